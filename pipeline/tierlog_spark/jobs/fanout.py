"""Work items spread over executors: one asyncio function a task, rows back to the driver.

Owns cutting items into tasks of about equal weight, and the rounds in which they run. Does not own
what a task does.

Invariants:
    * Each item is in exactly one task. Spark may run a task again, or twice at once: what it does
      must bear that.
    * What a task returns is small: counts, and what the driver needs to know of each item.
"""

import asyncio
import heapq
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

from tierlog.model.errors import RefusedError
from tierlog.ports.spending import CostMeter
from tierlog.runtime.logs import configure_logging
from tierlog.runtime.sections import LogSettings
from tierlog_spark.jobs.frame import JobRun, plain_spark_errors

Item = TypeVar("Item")
Work = Callable[[Sequence[Item]], Awaitable[Sequence[Any]]]

TASKS_A_SLOT: Final = 8
"""How many tasks of each slot make a round: progress is told between rounds."""


class Asked(NamedTuple):
    """What one task asked the object store for, as a row beside its others."""

    operation: str
    requests: int
    sent: int
    received: int


def asked_of(meter: CostMeter) -> list[Asked]:
    """Return what a task's meter counted."""
    found: dict[str, Asked] = {}
    for spent, amount in meter.amounts.items():
        before = found.get(spent.operation, Asked(spent.operation, 0, 0, 0))
        found[spent.operation] = Asked(
            spent.operation,
            before.requests + amount.requests,
            before.sent + amount.bytes_sent,
            before.received + amount.bytes_received,
        )
    return list(found.values())


class Requests:
    """The sum of what tasks asked for; ``counts`` are a report's."""

    def __init__(self) -> None:
        self._requests = self._sent = self._received = 0

    def __repr__(self) -> str:
        return f"<Requests {self._requests}>"

    def rest(self, rows: Iterable[object]) -> Iterator[Any]:
        """Add up what is counts among rows, and give all other rows."""
        for row in rows:
            if isinstance(row, Asked):
                self._requests += row.requests
                self._sent += row.sent
                self._received += row.received
            else:
                yield row

    @property
    def counts(self) -> dict[str, int]:
        """What all tasks asked for."""
        return {
            "requests_sent": self._requests,
            "bytes_sent": self._sent,
            "bytes_received": self._received,
        }


def task_count(total: int, items: int, slots: int, *, weight_max: int) -> int:
    """Return how many tasks so much work makes: enough for all slots, none heavier than that."""
    return max(1, min(items, max(slots, -(-total // weight_max))))


def spread(items: Iterable[Item], weight: Callable[[Item], int], tasks: int) -> list[list[Item]]:
    """Return the items of each task: the heaviest first, each to the lightest task so far."""
    ordered = sorted(items, key=weight, reverse=True)
    found: list[list[Item]] = [[] for _ in range(min(tasks, len(ordered)))]
    # Of those that are as light the one with the fewest items: some weigh nothing.
    lightest = [(0, 0, number) for number in range(len(found))]
    for item in ordered:
        load, count, number = heapq.heappop(lightest)
        found[number].append(item)
        heapq.heappush(lightest, (load + weight(item), count + 1, number))
    return found


def slots_of(run: JobRun) -> int:
    """Return how many tasks run at once."""
    return run.spark.sparkContext.defaultParallelism


def pace_of_task(run: JobRun, bytes_per_s: float) -> float:
    """Return what one task may do a second where an executor may do so much; 0: no limit."""
    if not bytes_per_s:
        return 0.0
    context = run.spark.sparkContext
    cores = context.getConf().get("spark.executor.cores")
    return bytes_per_s / slots_of_executor(context.master or "", cores, slots_of(run))


def slots_of_executor(master: str, cores: str | None, slots: int) -> int:
    """Return how many tasks, each a process of Python, one executor runs at once.

    ``cores``: as the session says; ``slots``: those of all. Raises ``RefusedError`` where nobody
    knows: one of a standalone cluster takes all cores of its machine.
    """
    if master.startswith("local"):
        return slots
    if not cores and master.startswith("spark://"):
        raise RefusedError(
            "how many tasks share --bytes-per-s on an executor is not known",
            remedy="Say how many cores each has: --conf spark.executor.cores=N",
        )
    return int(cores or 1)


def run_tasks(
    run: JobRun, what: str, tasks: Sequence[Sequence[Item]], work: Work[Item]
) -> Iterator[Any]:
    """Run ``work`` on each task's items, on executors, and give the rows of all of them.

    What an executor raises of ours is raised here as what it is.
    """
    context, total, done = run.spark.sparkContext, sum(map(len, tasks)), 0
    a_round = TASKS_A_SLOT * slots_of(run)
    run.progress(what, 0, total)
    for start in range(0, len(tasks), a_round):
        some = tasks[start : start + a_round]
        parts = context.parallelize(list(some), len(some))
        with plain_spark_errors():
            rows = parts.mapPartitions(partial(_work_on, work)).collect()
        yield from rows
        done += sum(map(len, some))
        run.progress(what, done, total)


def _work_on(work: Work[Any], parts: Iterable[Sequence[Any]]) -> Iterator[Any]:
    configure_logging(LogSettings(level="warning"), service="spark")
    for part in parts:
        yield from asyncio.run(_finished(work, part))


async def _finished(work: Work[Any], part: Sequence[Any]) -> Sequence[Any]:
    return await work(part)
