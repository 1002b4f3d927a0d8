"""What parts of the budget hold beyond their own counts, shows, and is taken from answers."""

import asyncio
import contextlib
from types import SimpleNamespace
from typing import cast

from prometheus_client import REGISTRY

from tests.simulation.virtual_loop import run_virtual
from tests.unit.reader.test_cached_ranges import (
    GRAIN,
    MIB,
    Torn,
    filled_bucket,
    memory_of,
    put,
    source_of,
    torn_ranges,
)
from tests.unit.reader.world import STREAM, ReaderWorld, at, budget, on_virtual_time
from tierlog.adapters.memory.faults import no_faults
from tierlog.adapters.memory.objects import MemoryObjectsClient
from tierlog.catalog import Catalog
from tierlog.format.frame import FRAME_HEADER_LEN
from tierlog.model.errors import RetryableError
from tierlog.model.ids import StreamName
from tierlog.offload.ranges import RangeLimits, Ranges
from tierlog.ports.spending import CostMeter
from tierlog.runtime.settings import ReaderSettings
from tierlog_reader import metrics
from tierlog_reader.cache.manager import Asks, Thresholds
from tierlog_reader.memory import held_of, parts_of
from tierlog_reader.read_index import ENTRY_OBJECT_BYTES, INDEX_OBJECT_BYTES
from tierlog_reader.shares import LOOK_S, Shares
from tierlog_reader.views import BYTES_MAX, LISTED_BYTES, STREAMS_BYTES_MAX, VALUE_BYTES, Views

LIMITS = ReaderSettings()
MANY = 100_000
REASONS = (*(one.value for one in Asks), "idle")


class Lists:
    """A catalog of streams of so many ledgers as their names say."""

    def __init__(self):
        self.streams = self.ledgers = self.contexts = self

    async def snapshot(self, name):
        return SimpleNamespace(ledgers=range(int(name)))

    async def get(self, _):
        return None


def shown(name, *, of="reader_", **labels):
    return REGISTRY.get_sample_value(f"tierlog_{of}{name}", labels)


@on_virtual_time
async def test_the_list_of_a_stream_of_very_many_ledgers_is_read_and_counts_beyond_its_part():
    world = ReaderWorld()
    await world.start()
    memory, parts = memory_of(), parts_of(LIMITS)
    views = Views(cast("Catalog", Lists()), age_s_max=1000, entries_max=100)
    async with world.reader() as source:
        held = held_of(parts, torn_ranges(Torn(), memory), memory, source._tier2, views)
        metrics.watch_memory(held)
        await views.stream(StreamName("1000"))
        assert (held.beyond, shown("memory_beyond_bytes")) == (0, 0)
        for _ in range(2):
            assert len((await views.stream(StreamName(str(MANY)))).ledgers) == MANY
            size = VALUE_BYTES + LISTED_BYTES * MANY
            assert size > STREAMS_BYTES_MAX
            assert shown("memory_bytes", part="views") == size
            assert shown("memory_limit_bytes", part="views") == BYTES_MAX
            assert held.beyond == shown("memory_beyond_bytes") == size - BYTES_MAX
        await views.stream(StreamName("1000"))
        assert held.beyond == 0, "the next one sends it away"


@on_virtual_time
async def test_as_many_requests_as_there_may_be_are_all_that_their_part_has():
    world = ReaderWorld()
    await world.start()
    memory, parts = memory_of(), parts_of(LIMITS)
    ranges = torn_ranges(Torn(), memory)
    assert ranges.limits.range_bytes == LIMITS.range_bytes
    ranges.in_flight = LIMITS.ranges_in_flight_max
    async with world.reader() as source:
        held = held_of(parts, ranges, memory, source._tier2, source._views)
        assert held.sizes["in_flight"]() == parts.in_flight
        ranges.in_flight += 1
        assert held.beyond == 2 * LIMITS.range_bytes, "a body, and what a library has of it"


@on_virtual_time
async def test_what_each_part_holds_beyond_its_own_counts():
    world = ReaderWorld()
    await world.start()
    memory, parts = memory_of(), parts_of(LIMITS)
    async with world.reader() as source:
        tier2 = source._tier2
        held = held_of(parts, torn_ranges(Torn(), memory), memory, tier2, source._views)
        memory.manager.owners_bytes = parts.cache - memory.manager.used_bytes + 1
        tier2.index_bytes = parts.indexes + 10
        tier2.offsets.size_bytes = parts.offsets + 100
        source._views._contexts.size_bytes = parts.views + 1000
        assert held.beyond == 1111


def test_what_others_hold_beyond_their_own_answers_do_not_get():
    async def main():
        beyond = 0
        shares = Shares(1000, wait_s_max=5, beyond=lambda: beyond)
        await shares.take("a", 400)
        beyond = 300
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):
                await shares.take("b", 400)
                raise AssertionError("there is no room for it")
        second = await shares.take("b", 300)
        beyond = 10_000
        refused = await asyncio.gather(shares.take("c", 1), return_exceptions=True)
        assert isinstance(refused[0], RetryableError)
        assert "other parts hold 10000 bytes beyond their own" in refused[0].message
        assert shares.used_bytes == 700
        shares.give_back("b", second)
        beyond = 0
        await shares.take("c", 600)

    run_virtual(main())


def test_who_waits_has_what_others_gave_back_though_no_answer_ends():
    async def main():
        loop, beyond = asyncio.get_running_loop(), 600
        shares = Shares(1000, wait_s_max=30, beyond=lambda: beyond)
        await shares.take("slow", 100)
        async with asyncio.TaskGroup() as group:
            waiting = [group.create_task(shares.take(one, 400)) for one in "bc"]
            await asyncio.sleep(5)
            assert shares.waiting == 2
            beyond, begun_s = 0, loop.time()
            await asyncio.wait(waiting)
            assert loop.time() - begun_s <= LOOK_S
        # Nothing looks once nobody waits.
        await asyncio.sleep(2 * LOOK_S)
        assert shares._look is None

    run_virtual(main())


def test_answers_go_out_one_at_a_time_however_much_others_hold():
    async def main():
        shares = Shares(1000, wait_s_max=1000, beyond=lambda: 10**9)
        at_once = []

        async def served(client):
            for size in (1, 900, 5000):
                async with shares.room(client, size) as room:
                    at_once.append(shares.used_bytes - room.size)
                    await asyncio.sleep(1)

        async with asyncio.TaskGroup() as group:
            for client in range(20):
                group.create_task(served(client))
        assert at_once == [0] * 60
        assert (shares.used_bytes, shares.waiting, len(shares._accounts)) == (0, 0, 0)

    run_virtual(main())


@on_virtual_time
async def test_gets_of_indexes_headers_and_pages_count_as_those_of_ranges_do():
    world, meter = ReaderWorld(), CostMeter()
    await world.start()
    ledger = await world.sealed([bytes(100)] * 50)
    await world.offloaded(ledger)
    await world.gone_locally(ledger)
    memory = memory_of()
    metrics._served.clear()
    async with world.reader(memory=memory) as source:
        objects = MemoryObjectsClient(world.bucket, no_faults(), meter)
        tier2 = source._tier2
        ranges = tier2._ranges
        assert isinstance(ranges, Ranges)
        tier2._objects = ranges._objects = tier2.side_pages._objects = objects
        metrics.watch(ranges, memory, meter)
        answer = await source.read(STREAM, at(ledger, 20), budget(entries=10))
        metrics.count(answer)
        assert answer.chunk is not None
        sent = meter.totals["requests_sent"]
        assert sent >= ranges.fetches + 2, "an index, a header, and ranges"
        assert shown("gets_per_mb") == 1e6 * sent / answer.chunk.frames_len
        await objects.head("nothing")
        assert shown("gets_per_mb") == 1e6 * sent / answer.chunk.frames_len
    metrics._served.clear()


def test_of_what_was_fetched_ahead_the_bytes_that_were_read_count_once():
    memory = memory_of(4 * MIB)
    metrics.watch(torn_ranges(Torn(), memory), memory, CostMeter())
    put(memory, "a", 0, bytes(MIB), ahead=True)
    put(memory, "b", 0, bytes(1000))
    for key, start, end, expected in (
        ("b", 0, 1000, 0),
        ("a", 0, 10, 10),
        ("a", 500, 540, 50),
        ("a", 0, MIB, MIB),
        ("a", 0, MIB, MIB),
    ):
        assert memory.get(key, start, end) is not None
        assert shown("ahead_bytes_total") == MIB
        assert shown("ahead_read_bytes_total") == expected
        assert shown("ahead_efficiency") == expected / MIB


@on_virtual_time
async def test_what_was_in_the_cache_and_what_was_waited_for_are_told_apart():
    world, memory = await filled_bucket(), memory_of()
    ranges = Ranges(world.bucket.connect(), RangeLimits(range_bytes=GRAIN), memory)
    metrics.watch(ranges, memory, CostMeter())
    names = "hits_total", "misses_total", "hit_bytes_total", "miss_bytes_total"
    for start, end, expected in (
        (0, 100, [0, 1, 0, 100]),
        (50, GRAIN, [1, 1, GRAIN - 50, 100]),
        # A range of which a part is not there was waited for.
        (GRAIN - 10, GRAIN + 30, [1, 2, GRAIN - 40, 130]),
    ):
        await ranges.read(source_of("a", grains=False), start, end)
        assert [shown(name, of="cache_") for name in names] == expected


def test_how_full_the_cache_is_and_what_goes_from_it_is_shown():
    memory = memory_of(2 * MIB)
    metrics.watch(torn_ranges(Torn(), memory), memory, CostMeter())
    put(memory, "a", 0, bytes(MIB))
    used = MIB + ENTRY_OBJECT_BYTES + INDEX_OBJECT_BYTES
    empty = memory_of(2 * MIB).manager.used_bytes
    assert shown("bytes", of="cache_", state="used") == empty + used
    assert shown("occupancy", of="cache_") == (empty + used) / (2 * MIB)
    assert shown("entries", of="cache_") == 1
    gone = {who: shown("evictions_total", of="cache_", reason=who) for who in REASONS}
    assert gone == dict.fromkeys(REASONS, 0)
    # There is no room for both.
    put(memory, "b", 0, bytes(MIB))
    assert shown("evictions_total", of="cache_", reason="wanted") == 1
    for _ in range(Thresholds().idle):
        memory.manager.tick()
    assert shown("evictions_total", of="cache_", reason="idle") == 1
    assert shown("evictions_total", of="cache_", reason="tail") == 0
    assert shown("entries", of="cache_") == 0


@on_virtual_time
async def test_what_is_served_counts_by_tier():
    world = ReaderWorld()
    await world.start()
    gone, here = [await world.sealed([bytes(100)] * 50) for _ in range(2)]
    await world.offloaded(gone)
    await world.gone_locally(gone)
    names = "reads_total", "read_entries_total", "read_bytes_total"

    def counted(tier):
        return [shown(name, of="", tier=tier) or 0 for name in names]

    async with world.reader() as source:
        for ledger, tier in ((gone, "tier2"), (here, "tier1")):
            before = counted(tier)
            answer = await source.read(STREAM, at(ledger, 0), budget(entries=2))
            metrics.count(answer)
            expected = [1, 2, 2 * (FRAME_HEADER_LEN + 100)]
            assert [b - a for a, b in zip(before, counted(tier), strict=True)] == expected
    metrics._served.clear()


def test_gets_without_a_byte_that_was_served_are_no_share():
    memory, meter = memory_of(), CostMeter()
    metrics._served.clear()
    metrics.watch(torn_ranges(Torn(), memory), memory, meter)
    meter.count(metrics.GET)
    assert shown("gets_per_mb") == 0
