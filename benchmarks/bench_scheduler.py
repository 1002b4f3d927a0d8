"""Claim: a leader looks at 100,000 ledgers in 10,000 streams within 5 s, and reads what changed.

cold     the first pass of a term: everything is read from ZooKeeper
full     a pass in which nothing changed: every stream is decided about, nothing is read (but for
         the slow round, which is left out here)
changed  a pass after one stream in a hundred got another ledger: what is read, for each change

Decisions are made with all thresholds set; nothing is due, so that no action is measured. Each
measured leader is a fresh process, and so is whoever changes something.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, Final
from uuid import UUID

from common import (
    HOUR_MS,
    MB,
    Bench,
    Claim,
    Result,
    arguments_parser,
    child_mode,
    folder_of,
    median_claim,
    parse,
    report,
    rss_peak_bytes,
    run_child,
    say,
)
from tierlog.adapters.memory.events import MemoryEvents
from tierlog.catalog.streams import StreamSnapshot
from tierlog.format import paths, records
from tierlog.model.ids import EntryId, LedgerId, StreamName
from tierlog.model.offload import OffloadContext, OffloadState, Tier2Copy, Tier2Location
from tierlog.model.policy import Policy, PolicyLevels
from tierlog.model.position import Position
from tierlog.model.stream import ListedLedger, Stream
from tierlog.offload.interface import UnconfiguredOffloader
from tierlog.offload.messages import Stationery, Topics
from tierlog.ports.metadata import Create
from tierlog.runtime.logs import configure_logging
from tierlog.runtime.settings import load_settings
from tierlog.wiring.build import open_catalog, system_clock, system_ids
from tierlog_scheduler.scheduler import Scheduler, SchedulerLimits

LEDGERS_A_STREAM: Final = 10
FULL_S_MAX: Final = 5.0
RSS_MB_MAX: Final = 500.0
READS_A_CHANGE_MAX: Final = 3.0  # the stream, its new ledger's context, the closed one's
IN_FLIGHT: Final = 32
LEDGER_LEN: Final = 10**9
INCARNATION: Final = UUID(int=1)
LEVELS: Final = PolicyLevels(
    cluster=Policy(
        offload_time_ms=1000 * HOUR_MS,
        offload_size_bytes=100 * LEDGER_LEN,
        retention_time_ms=2000 * HOUR_MS,
        retention_size_bytes=1000 * LEDGER_LEN,
    )
)
STATES: Final = (
    *[OffloadState.TIER1_DELETED] * 6,
    OffloadState.COMPLETE,
    OffloadState.OFFLOADING,
    OffloadState.LOCAL,
    OffloadState.LOCAL,
)
assert len(STATES) == LEDGERS_A_STREAM


class OpenGate:
    """A gate to manifests that are never in the way."""

    def begin_pass(self) -> None:
        pass

    def begin_term(self) -> None:
        """Know nothing."""

    def forget(self, name: StreamName) -> None:
        """Have nothing to forget."""
        del name

    async def look(self, name: StreamName, *, compare: bool = False) -> bool:
        """Have nothing to say."""
        del name, compare
        return False

    async def record(
        self, snapshot: StreamSnapshot, contexts: Mapping[LedgerId, OffloadContext]
    ) -> None:
        """Write nothing."""

    async def may_delete_local(self, context: OffloadContext) -> bool:
        """Allow it."""
        return context.complete

    async def may_sweep(self, context: OffloadContext, uuid: UUID) -> bool:
        """Allow it."""
        return context.uuid != uuid

    async def let_go(self, name: StreamName, incarnation: UUID, ledger_id: LedgerId) -> bool:
        """Allow it."""
        del name, incarnation, ledger_id
        return True

    async def record_cluster(self, *, compare: bool = False) -> None:
        """Write nothing."""
        del compare

    def attributes_through(self, name: StreamName) -> Position | None:
        """Name none."""
        del name
        return None

    def stopped(self, name: StreamName) -> str | None:
        """Stop nothing."""
        del name
        return None

    def reads_again(self, name: StreamName) -> bool:
        """Read none again."""
        del name
        return False

    def stopped_streams(self) -> Mapping[str, int]:
        """Stop none."""
        return {}


def stream_of(number: int, now_ms: int) -> tuple[Stream, list[OffloadContext]]:
    """Return a stream and the contexts of its ledgers; the last one is open."""
    name = StreamName(f"ns{number % 100}.stream-{number}")
    ledgers, contexts = [], []
    for place, state in enumerate(STATES):
        ledger_id = LedgerId(number * 100 + place)
        ledgers.append(listed(ledger_id, now_ms, closed=place < LEDGERS_A_STREAM - 1))
        contexts.append(context_of(name, ledger_id, state, now_ms))
    stream = Stream(name=name, incarnation=INCARNATION, created_ms=now_ms, ledgers=tuple(ledgers))
    return stream, contexts


def listed(ledger_id: LedgerId, now_ms: int, *, closed: bool) -> ListedLedger:
    """Return a ledger of the list."""
    return ListedLedger(
        ledger_id=ledger_id,
        opened_ms=now_ms,
        block_size=64 * MB,
        owner_epoch=1,
        closed=closed,
        last_entry_id=EntryId(10**6 if closed else -1),
        length=LEDGER_LEN if closed else 0,
        closed_ms=now_ms if closed else 0,
    )


def context_of(
    name: StreamName, ledger_id: LedgerId, state: OffloadState, now_ms: int
) -> OffloadContext:
    """Return a context as a worker leaves it."""
    context = OffloadContext(stream=name, incarnation=INCARNATION, ledger_id=ledger_id, state=state)
    if state is OffloadState.LOCAL:
        return context
    key = f"{UUID(int=ledger_id)}-ledger-{ledger_id}"
    location = Tier2Location(
        driver="aws-s3",
        endpoint_name="default",
        bucket="tierlog",
        data_key=key,
        index_key=f"{key}-index",
        side_key=f"{key}-side",
    )
    begun = replace(context, uuid=UUID(int=ledger_id + 1), location=location, attempt_count=1)
    if state is OffloadState.OFFLOADING:
        return begun
    copy = Tier2Copy(
        format_version=1,
        data_len=LEDGER_LEN,
        index_len=1000,
        index_sha256=bytes(32),
        entry_count=10**6,
        block_count=16,
    )
    return replace(
        begun,
        complete=True,
        timestamp_ms=now_ms,
        copy=copy,
        bookkeeper_deleted=state is OffloadState.TIER1_DELETED,
    )


# What runs in a child


async def all_of(count: int, work: Callable[[int], Awaitable[None]]) -> None:
    """Do ``work`` for 0 to ``count`` - 1, some at once."""
    numbers = iter(range(count))

    async def some() -> None:
        for number in numbers:
            await work(number)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(IN_FLIGHT):
            tasks.create_task(some())


async def fill(arguments: Mapping[str, Any]) -> Result:
    """Write all streams to ZooKeeper."""
    begun_s = time.perf_counter()
    async with opened() as catalog:
        now_ms = system_clock().wall_ms()
        await catalog.nodes.ensure_cluster()
        await catalog.streams.ensure_roots()
        await catalog.store.create(paths.POLICIES, records.encode_levels(LEVELS))

        async def make_folder(number: int) -> None:
            path = paths.context_path(LedgerId(number * 10_000)).rpartition("/")[0]
            await catalog.store.create(path, b"")

        async def write(number: int) -> None:
            stream, contexts = stream_of(number, now_ms)
            await catalog.store.transact(
                [
                    Create(paths.stream_path(stream.name), records.encode_stream(stream)),
                    *(
                        Create(paths.context_path(one.ledger_id), records.encode_context(one))
                        for one in contexts
                    ),
                ]
            )

        count = int(arguments["streams"])
        await all_of(count // 100 + 1, make_folder)
        await all_of(count, write)
    return {"seconds": time.perf_counter() - begun_s}


async def change(arguments: Mapping[str, Any]) -> Result:
    """Close the open ledger of some streams and open another one, as their owners do."""
    begun_s, round_number = time.perf_counter(), int(arguments["round"])
    async with opened() as catalog:
        now_ms = system_clock().wall_ms()

        async def roll(number: int) -> None:
            stream, _ = stream_of(number * 100, now_ms)
            found = await catalog.streams.get(stream.name)
            last = found.ledgers[-1]
            ledger_id = LedgerId(last.ledger_id + 1)
            tail = (
                *found.ledgers[:-1],
                listed(last.ledger_id, now_ms, closed=True),
                listed(ledger_id, now_ms, closed=False),
            )
            path = paths.context_path(ledger_id)
            context = context_of(stream.name, ledger_id, OffloadState.LOCAL, now_ms)
            await catalog.store.create(path, records.encode_context(context))
            data = records.encode_stream(replace(found, ledgers=tail))
            await catalog.store.set(paths.stream_path(stream.name), data, version=round_number)

        await all_of(int(arguments["changes"]), roll)
    return {"seconds": time.perf_counter() - begun_s}


async def lead(arguments: Mapping[str, Any]) -> Result:
    """Make one leader's passes; another process changes streams in between."""
    async with opened() as catalog:
        clock, ids = system_clock(), system_ids()
        queue = MemoryEvents(random.Random(1))
        leader = Scheduler(
            catalog=catalog,
            offloader=UnconfiguredOffloader(),
            publisher=queue.publisher(),
            stationery=Stationery(Topics.of("bench"), source="bench", clock=clock, ids=ids),
            manifests=OpenGate(),
            clock=clock,
            ids=ids,
            # Without the slow round, which reads everything once in so long whatever changes.
            limits=SchedulerLimits(streams_in_flight_max=64, reread_s=10**9),
        )
        await leader.begin()
        found: Result = {}
        cold_s, cold_reads, _ = await timed_pass(leader)
        full = [await timed_pass(leader) for _ in range(5)]
        await run_child(__file__, "change", arguments, env={})
        await asyncio.sleep(0.5)
        changed_s, changed_reads, cpu_s = await timed_pass(leader)
        assert not queue.events(Topics.of("bench").requested), "nothing is due"
        found |= {
            "cold_s": cold_s,
            "cold_reads": cold_reads,
            "full_s": max(seconds for seconds, _, _ in full),
            "full_cpu_s": max(cpu for _, _, cpu in full),
            "full_reads": max(reads for _, reads, _ in full),
            "changed_s": changed_s,
            "changed_cpu_s": cpu_s,
            "reads_a_change": changed_reads / float(arguments["changes"]),
            "peak_mb": rss_peak_bytes() / MB,
        }
        return found


async def timed_pass(leader: Scheduler) -> tuple[float, float, float]:
    """Make one pass; return its seconds, its reads and its seconds of the CPU."""
    reads, begun_s, cpu_s = leader.mirror.reads, time.perf_counter(), time.process_time()
    await leader.run_pass()
    return (
        time.perf_counter() - begun_s,
        leader.mirror.reads - reads,
        time.process_time() - cpu_s,
    )


def opened() -> Any:  # noqa: ANN401 - a context manager of the wiring
    """Connect to the metadata."""
    settings = load_settings(None)
    configure_logging(settings.log, service="bench")
    return open_catalog(settings)


async def main() -> None:
    """Measure and tell."""
    parser = arguments_parser("the scheduler's passes", size_mb=0)
    parser.add_argument("--streams", type=int, default=10_000)
    arguments = parse(parser, quick_mb=0)
    if arguments.quick:
        arguments.streams = 1000
    changes = arguments.streams // 100
    given = {"streams": arguments.streams, "changes": changes}
    runs: list[Result] = []
    with folder_of(arguments) as folder:
        async with Bench(folder, [], {}) as bench:
            say(f"writing {arguments.streams} streams of {LEDGERS_A_STREAM} ledgers")
            await run_child(__file__, "fill", given, env=bench.env)
            for number in range(arguments.runs):
                one = {**given, "round": number}
                runs.append(await run_child(__file__, "lead", one, env=bench.env))
    report("the scheduler's passes", arguments, claims_of(runs), {"lead": runs})


def claims_of(runs: list[Result]) -> list[Claim]:
    """Return what is claimed."""
    return [
        median_claim(
            "full evaluation", runs, "full_s", unit="s", target=FULL_S_MAX, at_most=True
        ),
        median_claim("full evaluation: CPU", runs, "full_cpu_s", unit="s"),
        median_claim("full evaluation: reads", runs, "full_reads", target=0.0, at_most=True),
        median_claim("first of a term", runs, "cold_s", unit="s"),
        median_claim("first of a term: reads", runs, "cold_reads"),
        median_claim("after changes", runs, "changed_s", unit="s"),
        median_claim(
            "reads for each change", runs, "reads_a_change",
            target=READS_A_CHANGE_MAX, at_most=True,
        ),
        median_claim("memory", runs, "peak_mb", unit="MB", target=RSS_MB_MAX, at_most=True),
    ]  # fmt: skip


MODES: Final = {"fill": fill, "change": change, "lead": lead}


if __name__ == "__main__":
    if not child_mode(MODES):
        asyncio.run(main())
