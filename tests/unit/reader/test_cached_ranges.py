"""Ranges in the streaming cache: the same bytes as without it, within its bound, read once."""

import asyncio
import contextlib
import random
import tracemalloc
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import REGISTRY

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.world import World
from tests.unit.reader.cache.audit import audit
from tests.unit.reader.world import STREAM, ReaderWorld, at, budget, on_virtual_time, payloads
from tierlog.adapters.memory.faults import FaultRates, Faults
from tierlog.format.checksum import Buffer, crc32c
from tierlog.model.errors import CorruptError, RetryableError
from tierlog.offload.ranges import RangeLimits, Ranges, Source
from tierlog.ports.filling import Filling
from tierlog.ports.spending import CostMeter
from tierlog_reader import metrics
from tierlog_reader.cache.layout import Layout
from tierlog_reader.cache.manager import Line, Thresholds
from tierlog_reader.cache.store import StreamingCache
from tierlog_reader.cached_ranges import CachedRanges
from tierlog_reader.read_index import ENTRY_OBJECT_BYTES, INDEX_OBJECT_BYTES

# What keeps bytes in the cache must not see which one it is.
pytestmark = pytest.mark.usefixtures("both_caches")

MIB = 1024 * 1024
GRAIN = 64 * 1024
BODIES = {key: random.Random(key).randbytes(MIB + 100_003) for key in "abcd"}


def memory_of(size: int = 2 * MIB, **named) -> CachedRanges:
    return CachedRanges(StreamingCache(size), **{"objects_max": 100, **named})


def put(memory: CachedRanges, key: str, start: int, body: bytes, *, ahead: bool = False) -> None:
    """Keep bytes as a fetch does, if there is room."""
    blank = memory.blank(key, start, len(body), ahead=ahead)
    if blank is not None:
        Filling(blank.targets).add(body)
        blank.keep(ahead=ahead)


class Sums:
    """Checks of grains, as a side object does them."""

    grain_len = GRAIN

    def __init__(self, key: str) -> None:
        body = BODIES[key]
        starts = range(0, len(body), GRAIN)
        self.sums = [crc32c(body[start : start + GRAIN]) for start in starts]

    async def check(self, start: int, body: Sequence[Buffer]) -> None:
        await asyncio.sleep(0)
        whole = b"".join(body)
        for skip in range(0, len(whole), GRAIN):
            if crc32c(whole[skip : skip + GRAIN]) != self.sums[(start + skip) // GRAIN]:
                raise CorruptError("differs", remedy="", details={"offset": str(start + skip)})


SUMS = {key: Sums(key) for key in BODIES}


def source_of(key: str, *, grains: bool = True) -> Source:
    return Source(key, len(BODIES[key]), SUMS[key] if grains else None)


async def filled_bucket() -> World:
    world = World()
    for key, body in BODIES.items():
        await world.bucket.connect().put(key, body, metadata={})
    return world


def check_bounds(memory: CachedRanges) -> None:
    store, manager = memory.store, memory.manager
    assert manager.used_bytes + manager.promised_bytes <= store.bytes_max
    assert manager.overflow_bytes == 0
    entries = [entry for index in memory._indexes.values() for entry in index._entries.values()]
    assert all(entry.pins == 0 for entry in entries)
    assert manager.owners_bytes == INDEX_OBJECT_BYTES * len(memory._indexes)
    addresses = [entry.address for entry in entries]
    addresses += [address for blank in memory.blanks for address in blank.addresses]
    beside = ENTRY_OBJECT_BYTES * len(addresses) + manager.owners_bytes
    assert manager.used_bytes == store.used_bytes + beside
    audit(store, addresses)


steps = st.tuples(
    st.sampled_from(["read"] * 6 + ["exact", "warm", "forget"]),
    st.sampled_from(sorted(BODIES)),
    st.integers(0, MIB),
    st.sampled_from([1, 300, 70_000, 400_000]),
    st.floats(0, 5),
    st.none() | st.floats(0, 1),
)


@pytest.mark.covers("A80", "C36")
@settings(max_examples=25, deadline=None)
@given(
    st.lists(steps, min_size=5, max_size=40), st.sampled_from([GRAIN, 300_000, MIB]), st.booleans()
)
def test_many_readers_get_their_bytes_out_of_two_mebibytes(wanted, range_bytes, grains):
    """Objects are twice as large as the cache; some readers give up, some requests fail.

    Beside the cache there are as many ranges as are fetched at once, whoever wants more.
    """

    async def main():
        world = await filled_bucket()
        faults = Faults(random.Random(2), rates=FaultRates(delay_s_max=0.5, refused=0.05))
        limits = RangeLimits(range_bytes=range_bytes, in_flight_max=4, kept_bytes_max=2 * MIB)
        memory = memory_of(objects_max=3)
        assert memory.store.bytes_max == 2 * MIB
        ranges = Ranges(world.bucket.connect(faults), limits, memory)
        given_out = []

        async def take(what, key, start, length, begin_s, gives_up_s):
            await asyncio.sleep(begin_s)
            source, end = source_of(key, grains=grains), min(len(BODIES[key]), start + length)
            try:
                async with asyncio.timeout(gives_up_s):
                    if what == "forget":
                        ranges.forget(key)
                    elif what == "warm":
                        await ranges.warm(source, start, end)
                    else:
                        found = await ranges.read(source, start, end, exact=what == "exact")
                        given_out.append((found, BODIES[key][start:end]))
            except (TimeoutError, RetryableError):
                return
            finally:
                check_bounds(memory)
                assert ranges.in_flight <= 4

        async with memory.run():
            async with ranges.run():
                async with asyncio.TaskGroup() as group:
                    for one in wanted:
                        group.create_task(take(*one))
                check_bounds(memory)
            check_bounds(memory)
            assert memory.manager.promised_bytes == 0
            assert not memory.blanks
            assert not ranges._flying
            assert len(memory._indexes) <= 3
        # Compared at the end: by then the cache has used the same blocks for other bytes.
        assert all(found == body for found, body in given_out)

    run_virtual(main(), until_s=1000)


@pytest.mark.parametrize("range_bytes", [GRAIN, MIB])
def test_what_is_in_the_cache_is_fetched_once_for_all_readers(range_bytes):
    async def main():
        world = await filled_bucket()
        faults = Faults(random.Random(3), rates=FaultRates(delay_s_max=0.2))
        ranges = Ranges(
            world.bucket.connect(faults),
            RangeLimits(range_bytes=range_bytes, kept_bytes_max=16 * MIB),
            memory_of(16 * MIB),
        )
        sizes = random.Random(4)

        async def read_through(key, begin_s):
            await asyncio.sleep(begin_s)
            start, body = 0, BODIES[key]
            while start < len(body):
                end = min(len(body), start + sizes.randint(1, 100_000))
                assert await ranges.read(source_of(key), start, end) == body[start:end]
                start = end

        async with asyncio.TaskGroup() as group:
            for number in range(24):
                group.create_task(read_through("abcd"[number % 4], number / 5))
        assert ranges.bytes_fetched == sum(map(len, BODIES.values()))
        assert ranges.bytes_from_memory + ranges.bytes_waited_for == 6 * ranges.bytes_fetched
        assert ranges.bytes_from_memory > 3 * ranges.bytes_waited_for

    run_virtual(main(), until_s=1000)


def test_a_cache_that_fills_slows_fetching_ahead_first_and_fails_nobody():
    async def main():
        world = await filled_bucket()
        memory = memory_of()
        limits = RangeLimits(range_bytes=256 * 1024, kept_bytes_max=100 * MIB)
        ranges = Ranges(world.bucket.connect(), limits, memory)
        await ranges.warm(source_of("a"), 0, len(BODIES["a"]))
        await ranges.warm(source_of("b"), 0, len(BODIES["b"]))
        full = ranges.bytes_fetched
        assert full <= 0.75 * 2 * MIB, "three quarters, and not a request more"
        assert full > 0.75 * 2 * MIB - 256 * 1024
        assert memory.manager.refusals["ahead"] > 0
        # All of it is fetched ahead and still to be read, so that it stays.
        for key in "cd":
            for start in range(0, 1_000_000, 200_000):
                found = await ranges.read(source_of(key), start, start + 200_000)
                assert found == BODIES[key][start : start + 200_000]
                check_bounds(memory)
        fetched = ranges.bytes_fetched
        assert await ranges.read(source_of("a"), 0, MIB) == BODIES["a"][:MIB]
        assert ranges.bytes_fetched == fetched
        # What was read may go for the next that is fetched ahead, once a generation is over.
        memory.tick()
        await ranges.warm(source_of("b"), 0, len(BODIES["b"]))
        assert ranges.bytes_fetched > fetched

    run_virtual(main(), until_s=1000)


def test_what_somebody_waits_for_is_no_longer_fetched_ahead():
    async def main():
        world = await filled_bucket()
        memory = memory_of(4 * MIB)
        faults = Faults(random.Random(6), rates=FaultRates(delay_s_max=0.2))
        ranges = Ranges(world.bucket.connect(faults), RangeLimits(), memory)
        async with asyncio.TaskGroup() as group:
            group.create_task(ranges.warm(source_of("a", grains=False), 0, 1))
            group.create_task(ranges.warm(source_of("b", grains=False), 0, 1))
            await asyncio.sleep(0)
            group.create_task(ranges.read(source_of("a", grains=False), 0, 1))
        assert ranges.fetches == 2
        lines = memory.manager._lines
        assert [entry.owner for entry in lines[Line.READ]] == [memory._indexes["a"]]
        assert [entry.owner for entry in lines[Line.AHEAD]] == [memory._indexes["b"]]

    run_virtual(main(), until_s=1000)


def test_what_a_reader_asked_for_that_went_keeps_room_from_nobody():
    async def main():
        memory, objects = memory_of(), Torn()
        limits = RangeLimits(range_bytes=256 * 1024, kept_bytes_max=100 * MIB)
        ranges = Ranges(objects, limits, memory)  # type: ignore[arg-type]
        async with ranges.run():
            for key in "ab":
                gone = asyncio.create_task(ranges.read(source_of(key), 0, len(BODIES[key])))
                await asyncio.sleep(1)
                gone.cancel()
                await asyncio.sleep(1)
                objects.goes_on.set()
                await asyncio.sleep(1)
                objects.goes_on.clear()
            assert memory.manager.used > 0.75, "more than is ever fetched ahead"
            assert memory.manager.ahead_bytes == 0
            objects.goes_on.set()
            await ranges.read(source_of("c"), 0, MIB)
            assert not memory.manager.refusals
            assert bytes(memory.get("c", 0, MIB) or b"")
            memory.tick()
            await ranges.warm(source_of("d"), 0, MIB)
            assert memory.known_end("d", 0, MIB) == MIB
            check_bounds(memory)

    run_virtual(main(), until_s=1000)


@pytest.mark.parametrize("size", [1, 5000, 100_000])
@pytest.mark.covers("C15", "C18")
def test_small_objects_fill_the_budget_with_what_they_take_beside_the_pool(size):
    """An entry's own objects count: of one byte, they are what most of it takes beside a block."""
    memory = memory_of(4 * MIB, objects_max=200, thresholds=Thresholds(victims_max=10))
    body = b"x" * size
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(1000):
            for start in (0, MIB):
                put(memory, f"{number}", start, body)
            assert memory.manager.used_bytes <= memory.store.bytes_max
        heap = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    entries = memory.store.entries
    assert len(memory._indexes) <= 200
    assert entries > 0.8 * min(400, 4 * MIB // (size + 6144))
    assert heap < memory.manager.used_bytes - memory.store.used_bytes + 64 * 1024
    check_bounds(memory)


def shown(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"tierlog_cache_{name}", labels)


def test_what_entries_hold_shows_beside_what_they_take():
    memory = memory_of()
    metrics.watch(torn_ranges(Torn(), memory), memory, CostMeter())
    assert shown("stored_bytes") == 0
    put(memory, "a", 0, bytes(4097))
    put(memory, "a", MIB, b"a")
    assert (shown("stored_bytes"), shown("entries")) == (4098, 2)
    memory.forget("a")
    assert (shown("stored_bytes"), shown("entries")) == (0, 0)


def test_what_would_come_unasked_shows_as_overflow_and_goes_when_the_next_asks():
    memory = memory_of()
    metrics.watch(torn_ranges(Torn(), memory), memory, CostMeter())
    put(memory, "a", 0, bytes(MIB))
    used, limit = memory.manager.used_bytes, memory.store.bytes_max
    assert shown("overflow_bytes") == 0
    assert shown("bytes", state="used") == used
    assert shown("bytes", state="free") == limit - used
    memory.manager.owners_bytes += limit - used + 1000
    assert shown("overflow_bytes") == 1000
    assert shown("bytes", state="free") == 0
    put(memory, "b", 0, b"b")
    assert shown("overflow_bytes") == 0


def test_an_index_asks_for_its_room_and_where_there_is_none_nothing_is_kept():
    memory = memory_of(objects_max=1)
    manager, top = memory.manager, int(Thresholds().full * memory.store.bytes_max)
    put(memory, "a", 0, bytes(MIB))
    manager.promised_bytes = top - manager.used_bytes - INDEX_OBJECT_BYTES + 1
    assert memory.blank("b", 0, 1, ahead=True) is None
    assert (list(memory._indexes), manager.overflow_bytes) == (["a"], 0)
    assert memory.known("a", 0), "nor is anything sent away for what is not let in"
    put(memory, "b", 0, b"b")
    assert memory.known("b", 0), "what is waited for sends away what was read before"
    assert not memory.known("a", 0)
    assert manager.overflow_bytes == 0


def test_what_was_given_out_stays_when_its_blocks_are_used_again():
    memory = memory_of()
    put(memory, "a", 0, b"a" * 1000)
    found = memory.get("a", 10, 500)
    assert memory.get("a", 1000, 1001) is None
    memory.forget("a")
    assert memory.get("a", 10, 500) is None
    assert not memory.known("a", 10)
    put(memory, "b", 0, b"b" * MIB)
    assert found is not None
    assert found == b"a" * 490
    assert found.readonly


def test_the_object_used_longest_ago_goes_when_there_are_too_many():
    memory = memory_of(objects_max=2)
    for key in "ab":
        put(memory, key, 0, b"x")
    assert memory.get("a", 0, 1) is not None
    put(memory, "c", 0, b"x")
    assert [memory.known(key, 0) for key in "abc"] == [True, False, True]
    assert memory.store.entries == 2


@on_virtual_time
async def test_what_nobody_uses_is_given_back_and_the_ticks_end_with_the_run():
    memory = memory_of(8 * MIB, thresholds=Thresholds(idle=10, patience=5))
    async with memory.run():
        for key in "abcdef":
            put(memory, key, 0, bytes(MIB), ahead=key == "f")
        touched = memory.store.state().touched
        assert touched >= 6 * MIB
        await asyncio.sleep(8)
        assert memory.get("e", 0, 1) is not None
        await asyncio.sleep(8)
        assert list(memory._indexes) == ["e"]
        await asyncio.sleep(8)
        assert memory.store.entries == len(memory._indexes) == 0
        assert memory.store.state().touched == touched, (
            "a cache at work would only touch them again"
        )
        await asyncio.sleep(36)
        assert memory.store.state().touched == 2 * MIB
        generation = memory.manager.generation
    await asyncio.sleep(10)
    assert memory.manager.generation == generation >= 60, "one each second"
    with pytest.raises(ValueError, match="released"):
        memory.store.insert(b"x")


class Torn:
    """A store whose answers stop in the middle, until they are told to go on."""

    def __init__(self, *, flips: int = 0) -> None:
        self.goes_on = asyncio.Event()
        self.halves = 0
        self.flips = flips

    async def get_range_into(self, key: str, start: int, targets: Sequence[memoryview]) -> int:
        body = BODIES[key][start : start + sum(map(len, targets))]
        half, whole = Filling(targets), Filling(targets)
        half.add(body[: len(body) // 2])
        self.halves += 1
        await self.goes_on.wait()
        whole.add(body)
        if self.flips:
            self.flips -= 1
            targets[0][10] ^= 1
        return len(body)


def torn_ranges(objects: Torn, memory: CachedRanges) -> Ranges:
    return Ranges(objects, RangeLimits(), memory)  # type: ignore[arg-type]


def test_what_comes_lies_in_the_cache_and_is_found_once_all_of_it_is_there():
    async def main():
        memory, objects = memory_of(4 * MIB), Torn()
        ranges = torn_ranges(objects, memory)
        async with ranges.run():
            gone = asyncio.create_task(ranges.read(source_of("a"), 0, 1000))
            await asyncio.sleep(1)
            (blank,) = memory.blanks
            assert bytes(b"".join(blank.targets))[:1000] == BODIES["a"][:1000]
            assert memory.get("a", 0, 10) is None
            assert not memory.known("a", 0)
            check_bounds(memory)
            gone.cancel()
            await asyncio.sleep(1)
            objects.goes_on.set()
            await asyncio.sleep(1)
            assert bytes(memory.get("a", 0, 1000) or b"") == BODIES["a"][:1000]
            assert not memory.blanks
            assert objects.halves == 1
            check_bounds(memory)

    run_virtual(main(), until_s=1000)


@pytest.mark.parametrize("running", [True, False])
def test_a_body_that_is_given_up_in_its_middle_leaves_no_block_taken(running):
    async def main():
        memory, objects = memory_of(4 * MIB), Torn()
        ranges = torn_ranges(objects, memory)
        async with ranges.run() if running else contextlib.nullcontext():
            read = asyncio.create_task(ranges.read(source_of("a"), 0, 1000))
            await asyncio.sleep(1)
            assert memory.store.entries == 1
            read.cancel()
            await asyncio.sleep(1)
        assert memory.store.entries == 0
        assert not memory.blanks
        assert not ranges._flying
        check_bounds(memory)
        objects.goes_on.set()
        assert await ranges.read(source_of("a"), 0, 1000) == BODIES["a"][:1000]

    run_virtual(main(), until_s=1000)


@pytest.mark.parametrize(("flips", "right"), [(1, True), (2, False)])
def test_bytes_that_differ_are_fetched_into_the_same_blocks_once_more(flips, right):
    async def main():
        memory, objects = memory_of(4 * MIB), Torn(flips=flips)
        ranges = torn_ranges(objects, memory)
        objects.goes_on.set()
        async with ranges.run():
            if right:
                assert await ranges.read(source_of("a"), 0, 1000) == BODIES["a"][:1000]
            else:
                with pytest.raises(CorruptError):
                    await ranges.read(source_of("a"), 0, 1000)
        assert (ranges.mismatches, objects.halves) == (1, 2)
        assert memory.known("a", 0) == right
        assert memory.store.entries == right
        check_bounds(memory)

    run_virtual(main(), until_s=1000)


def test_what_was_forgotten_while_it_was_on_its_way_is_not_kept():
    memory = memory_of()
    blank = memory.blank("a", 0, 1000, ahead=False)
    assert blank is not None
    memory.forget("a")
    Filling(blank.targets).add(b"x" * 1000)
    assert blank.part(10, 20) == b"x" * 10
    blank.keep(ahead=False)
    assert not memory.known("a", 0)
    check_bounds(memory)


def test_room_for_some_entries_of_a_range_is_given_back_where_the_others_have_none():
    memory = memory_of()
    assert memory.blank("a", 0, 3 * MIB, ahead=False) is None
    assert memory.store.entries == 0
    check_bounds(memory)


def test_what_was_on_its_way_for_longer_than_a_tick_is_kept():
    memory = memory_of()
    blank = memory.blank("a", 0, 1000, ahead=False)
    assert blank is not None
    memory.tick()
    Filling(blank.targets).add(BODIES["a"][:1000])
    blank.keep(ahead=False)
    found = memory.get("a", 0, 1000)
    assert found is not None
    assert bytes(found) == BODIES["a"][:1000]


def test_what_is_there_already_is_not_replaced_and_gaps_are_filled():
    memory = memory_of()
    put(memory, "a", 1000, b"a" * 1000)
    put(memory, "a", 0, b"b" * 3000)
    found = [memory.get("a", at, 3000) for at in (0, 1000, 2000)]
    assert [bytes(one or b"")[:1] for one in found] == [b"b", b"a", b"b"]
    check_bounds(memory)


def test_a_range_longer_than_an_entry_lies_in_several():
    memory = memory_of(8 * MIB)
    body = random.Random(7).randbytes(2 * MIB + 5)
    put(memory, "a", 0, body)
    assert memory.store.entries == 3
    assert bytes(memory.get("a", 0, len(body)) or b"") == body
    check_bounds(memory)


def small_memory(buffers: int) -> CachedRanges:
    layout = Layout(64, 8)
    return CachedRanges(StreamingCache(buffers * layout.buffer_len, layout), objects_max=4)


ENTRIES = [b"%04d" % number * 12 for number in range(60)]


async def offloaded_world(count: int) -> ReaderWorld:
    world = ReaderWorld()
    await world.start()
    for _ in range(count):
        ledger_id = await world.sealed(ENTRIES)
        await world.offloaded(ledger_id)
        await world.gone_locally(ledger_id)
    return world


@pytest.mark.parametrize("buffers", [2, 40, 400])
@on_virtual_time
async def test_streams_read_the_same_through_a_cache_of_any_size(buffers):
    world = await offloaded_world(3)
    async with world.reader() as source:
        expected = await world.read_all(source)
    assert expected == ENTRIES * 3
    memory = small_memory(buffers)
    faults = Faults(random.Random(5), rates=FaultRates(delay_s_max=0.05))
    async with world.reader(memory=memory, objects_faults=faults) as source:
        async with asyncio.TaskGroup() as group:
            sizes = [50, 100, 170, 600, 5000] * 4
            tasks = [group.create_task(world.read_all(source, size=size)) for size in sizes]
        check_bounds(memory)
        assert (memory.store.entries > 0) == (buffers > 2), "two have no room for an index"
    assert all(task.result() == expected for task in tasks)


@pytest.mark.covers("C08")
@on_virtual_time
async def test_what_is_read_ahead_waits_in_the_cache_until_it_is_read():
    world = await offloaded_world(1)
    memory = small_memory(200)
    async with world.reader(memory=memory) as source:
        (ledger,) = [one.ledger_id for one in (await source._views.stream(STREAM)).ledgers]
        answer = await source.read(STREAM, at(ledger, 0), budget(size=100))
        assert payloads(answer) == ENTRIES[:1]
        await asyncio.sleep(0.5)
        lines = {line: len(entries) for line, entries in memory.manager._lines.items()}
        assert lines[Line.AHEAD] >= 2, "more than was asked for"
        ranges = source._tier2._ranges
        waited = ranges.bytes_waited_for
        answer = await source.read(STREAM, answer.resume, budget(size=600))
        assert payloads(answer) == ENTRIES[1 : 1 + answer.chunk.count]
        assert ranges.bytes_waited_for == waited, "all of it was there"
        assert len(memory.manager._lines[Line.AHEAD]) < lines[Line.AHEAD] + 4
        assert len(memory.manager._lines[Line.READ]) > lines[Line.READ]
