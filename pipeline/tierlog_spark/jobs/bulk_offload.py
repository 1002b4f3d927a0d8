"""``bulk-offload``: a back-fill of sealed ledgers, by executors that do what offloaders do.

Owns the plan's reading, patience with each ledger, and the count afterwards. Does not own an
attempt (``tierlog.offload.attempting``): UUID before bytes, complete by compare-and-set, leftovers
cleaned by whoever comes next.

Invariants:
    * Who finds a ledger locked waits until it is complete or free: a task that Spark runs twice
      is never told to be done while its other half is at work.
    * What a task says is not believed: what is complete at the end is what the metadata say.

Crash: at any point the metadata have an attempt that did not complete; the next run, or the
scheduler, abandons it and begins anew. A worker that died holds its locks until its session ends.
"""

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

from tierlog.catalog import Catalog
from tierlog.catalog.streams import check_not_deleting, check_not_paused
from tierlog.model.errors import CorruptError, Reason, RefusedError, TierlogError
from tierlog.model.ids import LedgerId, StreamName
from tierlog.model.partitions import partition_names
from tierlog.model.stream import Stream
from tierlog.offload.attempting import (
    SUPERSEDED,
    Done,
    LockedError,
    OffloadAttempts,
    PausedError,
    StaleError,
)
from tierlog.offload.drivers import MakeDriver
from tierlog.offload.groups import plain_errors
from tierlog.offload.messages import OffloadRequest, Trigger
from tierlog.ports.clock import Clock
from tierlog.ports.ids import Ids
from tierlog.proto.v1 import events_pb2 as pb
from tierlog.runtime.settings import Settings
from tierlog.wiring.build import system_clock, system_ids
from tierlog.wiring.offload import open_attempts
from tierlog_spark.jobs.fanout import (
    Requests,
    asked_of,
    pace_of_task,
    run_tasks,
    slots_of,
    spread,
    task_count,
)
from tierlog_spark.jobs.frame import JobReport, JobRun, Unread
from tierlog_spark.jobs.offload_plan import (
    COMPLETED,
    FAILED,
    OUTCOMES,
    PAUSED,
    REFUSED,
    STALE,
    Context,
    OffloadItem,
    Outcome,
    best,
    is_wanting,
    sealed,
    wanting,
)
from tierlog_spark.jobs.site import open_site
from tierlog_spark.shipping import shipped

JOB: Final = "bulk-offload"
CONTEXTS_AT_ONCE: Final = 64
TASK_BYTES: Final = 1024**3
TRIES_MAX: Final = 5
_LOST: Final = (
    "the ledger is listed and has no context. Bring back what is gone; see the how-to "
    "scrub-a-bucket"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackFill:
    """What is wanted: of which streams (none: all), how old, how fast.

    ``bytes_per_s``: of one executor; 0: as fast as it goes. ``task_bytes``: what one task offloads,
    about.
    """

    streams: tuple[StreamName, ...] = ()
    closed_before_ms: int | None = None
    bytes_per_s: float = 0.0
    task_bytes: int = TASK_BYTES


def bulk_offload(
    run: JobRun,
    settings: Settings,
    wish: BackFill | None = None,
    *,
    drivers: Mapping[str, MakeDriver] | None = None,
) -> JobReport:
    """Offload every sealed ledger that has no complete copy.

    ``drivers``: more of them, by name, as offloaders may have; executors must be able to import
    them.
    """
    wish = wish or BackFill()
    pace = pace_of_task(run, wish.bytes_per_s)
    plan = asyncio.run(_plan(settings, wish))
    items = plan.items
    counts: dict[str, int | float] = {
        "ledgers": len(items) + len(plan.lost),
        "bytes": sum(one.length for one in items),
        "streams_failed": len(plan.left_out),
    }
    left_out = [_left_out_row(one) for one in plan.left_out]
    left_out += [_row(Outcome(item=one, outcome=FAILED, error=_LOST)) for one in plan.lost]
    if run.dry_run:
        rows = left_out + [
            _row(Outcome(item=one, outcome="planned", bytes=one.length)) for one in items
        ]
        return JobReport(job=JOB, dry_run=True, counts=counts, rows=rows)
    slots, began_s = slots_of(run), run.clock.monotonic_s()
    number = task_count(int(counts["bytes"]), len(items), slots, weight_max=wish.task_bytes)
    tasks = spread(items, lambda one: one.length, number) if items else []
    used = shipped(settings, "s3", "zookeeper", "security", "keys", "wire")
    slowed = throttled(used, pace)
    requests = Requests()
    found = best(
        requests.rest(run_tasks(run, "ledgers", tasks, partial(_offload_some, slowed, drivers)))
    )
    complete = asyncio.run(_complete(settings, items))
    by_outcome = {name: sum(one.outcome == name for one in found) for name in OUTCOMES}
    by_outcome[FAILED] += len(plan.lost)
    counts |= {
        **by_outcome,
        "complete": complete,
        "incomplete": len(items) + len(plan.lost) - complete,
        "bytes_offloaded": sum(one.bytes for one in found if one.outcome == COMPLETED),
        "seconds": run.clock.monotonic_s() - began_s,
        **requests.counts,
    }
    rows = left_out + [_row(one) for one in found]
    return JobReport(job=JOB, dry_run=False, counts=counts, rows=rows)


def throttled(settings: Settings, pace: float) -> Settings:
    """Return the settings of a process that may send so many bytes a second; 0: no limit."""
    if not pace:
        return settings
    s3 = settings.s3.model_copy(update={"bytes_per_s_max": pace})
    return settings.model_copy(update={"s3": s3})


class Plan(NamedTuple):
    """What has no complete copy yet, and what is left out of that."""

    items: list[OffloadItem]
    lost: list[OffloadItem]
    """Ledgers that have no context, so that nobody can offload them."""
    left_out: list[Unread]
    """Streams that can't be read, or were named and may not be offloaded now."""


async def _plan(settings: Settings, wish: BackFill) -> Plan:
    """Read what has no complete copy yet; refuse a cluster, a bucket, a stream that is none."""
    async with open_site(settings) as site:
        await site.check_ours(settings)
        names = wish.streams or tuple(await site.catalog.streams.names())
        return await plan_streams(site.catalog, names, wish)


async def plan_streams(catalog: Catalog, names: Sequence[StreamName], wish: BackFill) -> Plan:
    """Return what of these streams has no complete copy yet, each once."""
    plan = Plan([], [], [])
    # A partition may be named beside the stream that it is of.
    left = deque(dict.fromkeys(names))
    while left:
        name = left.popleft()
        try:
            snapshot = await catalog.streams.snapshot(name)
            why = _why_left_out(snapshot.stream) if wish.streams else None
            if why is not None:
                plan.left_out.append(Unread(name, why))
                continue
            parts = snapshot.stream.partitions
            if parts:
                # With all streams each partition comes by its own name.
                more = partition_names(name, parts) if wish.streams else ()
                left.extend(one for one in more if one not in names)
                continue
            items = list(
                sealed(snapshot.stream, snapshot.ledgers, closed_before_ms=wish.closed_before_ms)
            )
            contexts = await _contexts(catalog, items)
            lost = await _lost(catalog, items, contexts)
            plan.items.extend(wanting(items, contexts))
            plan.lost.extend(lost)
        except CorruptError as error:
            plan.left_out.append(Unread(name, str(error)))
        except TierlogError as error:
            # One that nobody named was deleted since it was listed: nothing of it is wanted.
            if error.reason is not Reason.STREAM_NOT_FOUND or wish.streams:
                raise
    return plan


def _why_left_out(stream: Stream) -> str | None:
    """Return why a stream gets no offload now; a partitioned one gets none of its own."""
    try:
        check_not_deleting(stream)
        if not stream.partitions:
            check_not_paused(stream)
    except RefusedError as error:
        return str(error)
    return None


async def _lost(
    catalog: Catalog, items: Sequence[OffloadItem], contexts: Mapping[LedgerId, Context]
) -> list[OffloadItem]:
    """Return those that have no context and, looked at again, are listed all the same."""
    found: list[OffloadItem] = []
    doubtful = [one for one in items if contexts[one.ledger_id] is None]
    for name in dict.fromkeys(one.stream for one in doubtful):
        try:
            snapshot = await catalog.streams.snapshot(name)
        except TierlogError as error:
            if error.reason is not Reason.STREAM_NOT_FOUND:
                raise
            continue
        listed = {one.ledger_id for one in snapshot.ledgers}
        some = [one for one in doubtful if one.stream == name and one.ledger_id in listed]
        again = await _contexts(catalog, some)
        found += [one for one in some if again[one.ledger_id] is None]
    return found


async def _contexts(catalog: Catalog, items: Sequence[OffloadItem]) -> dict[LedgerId, Context]:
    async def one(ledger_id: LedgerId) -> Context:
        try:
            return await catalog.contexts.get(ledger_id)
        except CorruptError as error:
            return error

    found: dict[LedgerId, Context] = {}
    for start in range(0, len(items), CONTEXTS_AT_ONCE):
        some = [one.ledger_id for one in items[start : start + CONTEXTS_AT_ONCE]]
        with plain_errors():
            async with asyncio.TaskGroup() as group:
                tasks = {each: group.create_task(one(each)) for each in some}
        found |= {each: task.result() for each, task in tasks.items()}
    return found


async def _complete(settings: Settings, items: Sequence[OffloadItem]) -> int:
    async with open_site(settings) as site:
        return await count_complete(site.catalog, items)


async def count_complete(catalog: Catalog, items: Sequence[OffloadItem]) -> int:
    """Count what is complete by now; a ledger that was trimmed meanwhile needs no copy."""
    contexts = await _contexts(catalog, items)
    lost = await _lost(catalog, items, contexts)
    return sum(not is_wanting(one) for one in contexts.values()) - len(lost)


async def _offload_some(
    settings: Settings, drivers: Mapping[str, MakeDriver] | None, some: Sequence[OffloadItem]
) -> list[Any]:
    """Offload one task's ledgers, on an executor."""
    clock, ids = system_clock(), system_ids()
    name = f"spark-{ids.uuid().hex[:8]}"
    async with open_attempts(settings, name, drivers=drivers) as (attempts, parts):
        patience = Patience(attempts, clock, ids, wait_s_max=settings.offloader.request_s_max)
        found: list[Any] = [await patience.offload(one) for one in some]
    return [*found, *asked_of(parts.meter)]


class Patience:
    """Offloads a ledger again and again, until it is clear what becomes of it."""

    def __init__(
        self, attempts: OffloadAttempts, clock: Clock, ids: Ids, *, wait_s_max: float
    ) -> None:
        self._attempts = attempts
        self._clock = clock
        self._ids = ids
        self._wait_s_max = wait_s_max

    async def offload(self, item: OffloadItem) -> Outcome:
        """Return what became of a ledger."""
        began_s, tries, waits = self._clock.monotonic_s(), 0, 0
        request = OffloadRequest(
            stream=item.stream,
            incarnation=item.incarnation,
            ledger_id=item.ledger_id,
            trigger=Trigger.ADMIN,
            requested_ms=self._clock.wall_ms(),
        )
        while True:
            trouble: TierlogError | None = None
            try:
                done = await self._attempts.offload(request)
                if done.outcome != SUPERSEDED:
                    return self._done(item, done, began_s)
            except (PausedError, StaleError) as error:
                outcome = PAUSED if isinstance(error, PausedError) else STALE
                return self._ended(item, outcome, began_s, error)
            except LockedError as error:
                trouble = error
            except RefusedError as error:
                return self._ended(item, REFUSED, began_s, error)
            except TierlogError as error:
                tries, trouble = tries + 1, error
            late = self._clock.monotonic_s() - began_s >= self._wait_s_max
            if trouble is not None and (late or tries >= TRIES_MAX):
                return self._ended(item, FAILED, began_s, trouble)
            await asyncio.sleep(self._ids.uniform(0.5, 1.0) * min(2.0 ** min(waits, 3), 5.0))
            waits += 1

    def _done(self, item: OffloadItem, done: Done, began_s: float) -> Outcome:
        name = pb.OffloadResult.Outcome.Name(done.outcome).removeprefix("OUTCOME_").lower()
        return Outcome(
            item=item,
            outcome=name,
            bytes=done.copy.data_len if done.copy is not None else 0,
            seconds=self._clock.monotonic_s() - began_s,
        )

    def _ended(
        self, item: OffloadItem, outcome: str, began_s: float, error: TierlogError
    ) -> Outcome:
        took_s = self._clock.monotonic_s() - began_s
        return Outcome(item=item, outcome=outcome, seconds=took_s, error=str(error))


def _left_out_row(one: Unread) -> dict[str, Any]:
    nothing = {"ledger_id": None, "outcome": FAILED, "bytes": 0, "seconds": 0.0}
    return {"stream": one.stream, **nothing, "error": one.error}


def _row(one: Outcome) -> dict[str, Any]:
    return {
        "stream": one.item.stream,
        "ledger_id": int(one.item.ledger_id),
        "outcome": one.outcome,
        "bytes": one.bytes,
        "seconds": round(one.seconds, 3),
        "error": one.error or None,
    }
