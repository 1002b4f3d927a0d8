"""Walks from a known place to an entry: a range at a time, with room for it before it fetches."""

import asyncio

import pytest

from tests.unit.catalog.world import on_virtual_time
from tests.unit.offload import test_single as single
from tests.unit.offload import test_tier2_reader as tier2
from tests.unit.offload.world import ListHandle, World, metadata_of
from tierlog.adapters.memory.faults import no_faults
from tierlog.adapters.memory.objects import MemoryObjectsClient
from tierlog.format.block import BLOCK_HEADER_LEN
from tierlog.model.errors import Reason, RetryableError
from tierlog.model.ids import EntryId
from tierlog.offload.pacing import ReadPace
from tierlog.offload.range_memory import Extent, LastRanges
from tierlog.offload.ranges import WALK_COPIES, RangeLimits, Ranges, Source
from tierlog.ports.spending import Cause, CostMeter, spending
from tierlog.ports.throttle import BURST_BYTES
from tierlog_reader.shares import Shares

LIMITS = RangeLimits(range_bytes=256, in_flight_max=4, kept_bytes_max=64 * 256)
ROOM = WALK_COPIES * LIMITS.range_bytes
ENTRIES = [bytes([number % 256]) * 40 for number in range(100)]
FAR = EntryId(90)
FETCH_S = 0.1


class SlowObjects(MemoryObjectsClient):
    """A bucket that takes its time, and counts whom it serves at once."""

    def __init__(self, bucket):
        super().__init__(bucket, no_faults(), CostMeter())
        self.at_once = self.at_once_max = self.fetches = 0

    async def get_range_into(self, key, start, targets):
        self.fetches += 1
        self.at_once += 1
        self.at_once_max = max(self.at_once_max, self.at_once)
        await asyncio.sleep(FETCH_S)
        self.at_once -= 1
        return await super().get_range_into(key, start, targets)


class WatchedRanges(Ranges):
    """Ranges that note the longest buffer which they gave, and gave while no walk had room."""

    longest = longest_without_room = 0

    async def read(self, source, start, end, *, exact=False):
        found = await super().read(source, start, end, exact=exact)
        self.longest = max(self.longest, len(found))
        if isinstance(self._walks, Shares) and self._walks.used_bytes == 0:
            self.longest_without_room = max(self.longest_without_room, len(found))
        return found


async def handle_of(layout, walks):
    """Return a handle on a copy in one block without a side object, and what it reads from."""
    world = World()
    if layout == "single":
        driver = single.driver_of(world)
        metadata = metadata_of(ENTRIES, block_size=8192)
        whole = ListHandle(single.LEDGER, ENTRIES, metadata)
        copy = await driver.offload(whole, single.UUID_1, {})
        handle = await driver.read_offloaded(single.LEDGER, single.UUID_1, copy=copy)
    else:
        handle, _, _ = await tier2.copied(world, ENTRIES, block_size=8192)
    assert len(handle.index.entries) == 1
    objects = SlowObjects(world.bucket)
    handle._ranges = WatchedRanges(objects, LIMITS, LastRanges(LIMITS.kept_bytes_max), walks)
    return handle, objects


def payload_of(read):
    return bytes(read.frames[int(read.offsets[0]) :][12:52])


@pytest.mark.parametrize("layout", ["block", "single"])
def test_a_walk_holds_one_range_and_fetches_more_and_more_of_them_at_once(layout):
    @on_virtual_time
    async def test():
        walks = Shares(10 * ROOM, wait_s_max=5)
        handle, objects = await handle_of(layout, walks)
        begun_s = asyncio.get_running_loop().time()
        assert payload_of(await handle.read_frames(FAR, 1)) == ENTRIES[FAR]
        took_s = asyncio.get_running_loop().time() - begun_s
        assert handle._ranges.longest <= LIMITS.range_bytes
        assert objects.at_once_max == LIMITS.in_flight_max
        assert objects.fetches > 2 * took_s / FETCH_S
        assert (walks.most_used_bytes, walks.used_bytes) == (ROOM, 0)

    test()


@pytest.mark.parametrize("layout", ["block", "single"])
def test_many_walks_at_once_wait_for_room_and_fetch_nothing_before_they_have_it(layout):
    @on_virtual_time
    async def test():
        walks = Shares(ROOM, wait_s_max=5, what="a walk")
        handle, objects = await handle_of(layout, walks)
        async with walks.room("another", ROOM):
            if layout == "block":  # in the other one the first read within a block is a walk
                await handle.read_frames(EntryId(0), 1)
            known = objects.fetches
            reads = [asyncio.ensure_future(handle.read_frames(FAR, 1)) for _ in range(5)]
            await asyncio.sleep(1)
            # In the other one, too, the first of them walks for all.
            assert (walks.waiting, objects.fetches) == (5 if layout == "block" else 1, known)
            reads[0].cancel()
            cancelled, *refused = await asyncio.gather(*reads, return_exceptions=True)
            assert isinstance(cancelled, asyncio.CancelledError)
            for error in refused:
                assert isinstance(error, RetryableError)
                assert error.reason is Reason.RESOURCE_EXHAUSTED
                assert "no room for a walk of" in error.message
        assert (walks.waiting, walks.used_bytes, objects.fetches) == (0, 0, known)
        found = await asyncio.gather(*(handle.read_frames(FAR, 1) for _ in range(5)))
        assert {payload_of(read) for read in found} == {ENTRIES[FAR]}
        assert (walks.most_used_bytes, walks.used_bytes) == (ROOM, 0)

    test()


@pytest.mark.parametrize("layout", ["block", "single"])
def test_a_walk_that_waits_for_its_pace_leaves_its_room_to_others(layout):
    @on_virtual_time
    async def test():
        walks = Shares(ROOM, wait_s_max=5)
        handle, objects = await handle_of(layout, walks)
        world = World()
        pace = ReadPace(world.clock, CostMeter(), per_s=0, namespaces=["slow=100"])
        handle._ranges = WatchedRanges(
            objects, LIMITS, LastRanges(LIMITS.kept_bytes_max), walks, pace
        )

        async def read():
            with spending(Cause.READ, "slow.logs"):
                return await handle.read_frames(FAR, 1)

        with spending(Cause.READ, "slow.logs"):  # all that goes at once
            await pace.take(BURST_BYTES, Reading())
        reads = [asyncio.ensure_future(read()) for _ in range(3)]
        others = 0
        while not all(one.done() for one in reads):
            await asyncio.sleep(0.5)
            async with asyncio.timeout(0.1), walks.room("another", ROOM):
                others += 1
        assert {payload_of(one.result()) for one in reads} == {ENTRIES[FAR]}
        assert others > 50, "4 kB at 100 bytes a second"
        # A block's header, and the frame that was asked for, are no part of a walk.
        assert handle._ranges.longest_without_room <= BLOCK_HEADER_LEN
        assert (walks.waiting, walks.used_bytes) == (0, 0)

    test()


class Reading:
    urgent = True


class NoMemory(LastRanges):
    """One that has no room for anything."""

    def blank(self, key, start, size, *, ahead):
        return None


@pytest.mark.parametrize("layout", ["block", "single"])
def test_a_walk_pays_for_each_range_once_also_where_memory_has_no_room(layout):
    @on_virtual_time
    async def test():
        fetches = {}
        for paced in (False, True):
            handle, objects = await handle_of(layout, None)
            pace = ReadPace(World().clock, CostMeter(), per_s=1e9) if paced else None
            handle._ranges = Ranges(objects, LIMITS, NoMemory(0), None, pace)
            assert payload_of(await handle.read_frames(FAR, 1)) == ENTRIES[FAR]
            fetches[paced] = objects.fetches
        assert fetches[True] == fetches[False]

    test()


@pytest.mark.parametrize("layout", ["block", "single"])
def test_a_walk_pays_for_a_range_once_of_which_memory_has_lost_a_part(layout):
    @on_virtual_time
    async def test():
        fetches = {}
        for paced in (False, True):
            handle, objects = await handle_of(layout, None)
            pace = ReadPace(World().clock, CostMeter(), per_s=1e9) if paced else None
            memory, key = NoMemory(2**20), handle._source.key
            for start in range(0, handle._source.size, LIMITS.range_bytes):
                body = await objects.get_range(key, start, LIMITS.range_bytes // 2)
                memory._put(Extent(key, start, memoryview(body)))
            handle._ranges = Ranges(objects, LIMITS, memory, None, pace)
            assert payload_of(await handle.read_frames(FAR, 1)) == ENTRIES[FAR]
            fetches[paced] = objects.fetches
        assert fetches[True] == fetches[False]

    test()


@on_virtual_time
async def test_walks_over_one_object_leave_room_for_those_over_others():
    walks = Shares(3 * ROOM, wait_s_max=5)
    ranges = Ranges(SlowObjects(World().bucket), LIMITS, walks=walks)

    async def walk(key, stream):
        with spending(Cause.READ, stream):
            async with ranges.walking(Source(key, 1000)):
                await asyncio.sleep(10)

    tasks = [asyncio.create_task(walk("a", "x")) for _ in range(5)]
    await asyncio.sleep(1)
    assert (walks.used_bytes, walks.waiting) == (2 * ROOM, 3)
    tasks += [asyncio.create_task(walk(*other)) for other in (("b", "x"), ("a", "y"))]
    await asyncio.sleep(1)
    assert (walks.used_bytes, walks.waiting) == (3 * ROOM, 4), "the second one fits no more"
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert (walks.used_bytes, walks.waiting) == (0, 0)
