"""Ranges under many readers at once: right bytes, each unit once at a time, bounded memory."""

import asyncio
import itertools
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.world import World
from tierlog.adapters.memory.faults import FaultRates, Faults
from tierlog.format.checksum import crc32c
from tierlog.model.errors import CorruptError, RetryableError
from tierlog.offload.range_memory import Extent, LastRanges
from tierlog.offload.ranges import RangeLimits, Ranges, Source

SIZE = 5000
BODY = random.Random(1).randbytes(SIZE)


class Sums:
    """Checks of grains of 64 bytes, as a side object does them."""

    grain_len = 64

    def __init__(self) -> None:
        self.sums = [crc32c(BODY[at : at + 64]) for at in range(0, SIZE, 64)]

    async def check(self, start: int, body: bytes) -> None:
        await asyncio.sleep(0)
        assert start % 64 == 0
        for at in range(0, len(body), 64):
            if crc32c(body[at : at + 64]) != self.sums[(start + at) // 64]:
                raise CorruptError("differs", remedy="", details={"offset": str(start + at)})


class Watched:
    """Counts which bytes are being fetched, and that none is twice at once."""

    def __init__(self, objects, *, damages: bool) -> None:
        self._objects = objects
        self._damages = damages
        self.flying: list[range] = []
        self.peak = 0

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        span = range(start, start + length)
        assert not any(span.start < one.stop and one.start < span.stop for one in self.flying)
        self.flying.append(span)
        self.peak = max(self.peak, len(self.flying))
        try:
            body: bytes = await self._objects.get_range(key, start, length)
        finally:
            self.flying.remove(span)
        # The first try of every other range is damaged on its way.
        if self._damages and start // 64 % 2 and random.Random(start).random() < 0.5:
            self._damages = False
            return b"\0" + body[1:]
        return body


reads = st.lists(
    st.tuples(
        st.integers(0, SIZE - 1),
        st.integers(1, 900),
        st.booleans(),
        st.floats(0, 2),
        st.none() | st.floats(0, 1),
    ),
    min_size=1,
    max_size=25,
)


@settings(max_examples=150, deadline=None)
@given(reads, st.sampled_from([64, 256, 1000]), st.sampled_from([600, 10**6]), st.booleans())
def test_many_readers_get_their_bytes_and_fetch_none_twice_at_once(
    wanted, range_bytes, kept_max, damages
):
    async def main():
        world = World()
        await world.bucket.connect().put("k", BODY, metadata={})
        faults = Faults(random.Random(2), rates=FaultRates(delay_s_max=0.5, refused=0.05))
        objects = Watched(world.bucket.connect(faults), damages=damages)
        limits = RangeLimits(range_bytes=range_bytes, in_flight_max=3, kept_bytes_max=kept_max)
        memory = LastRanges(kept_max)
        ranges = Ranges(objects, limits, memory)  # type: ignore[arg-type]
        source = Source("k", SIZE, Sums())

        async def read(start, length, exact, begin_s, gives_up_s):
            await asyncio.sleep(begin_s)
            end = min(SIZE, start + length)
            try:
                async with asyncio.timeout(gives_up_s):
                    found = await ranges.read(source, start, end, exact=exact)
            except (TimeoutError, RetryableError):
                return
            assert bytes(found) == BODY[start:end]

        async with asyncio.TaskGroup() as group:
            for one in wanted:
                group.create_task(read(*one))
        assert not ranges._flying
        assert objects.peak <= 3
        kept = memory.extents()
        assert memory.kept_bytes == sum(len(one.body) for one in kept)
        assert memory.kept_bytes <= kept_max or len(kept) == 1
        spans = sorted((one.start, one.end) for one in kept)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans)), "nothing is kept twice"
        assert all(len(one.body) <= range_bytes + 64 for one in kept)
        ranges.forget("k")
        assert memory.extents() == []
        assert memory.kept_bytes == 0

    run_virtual(main(), until_s=1000)


class NoRoom(LastRanges):
    """A memory that is full, and stays so."""

    def promise(self, size: int, *, ahead: bool) -> bool:
        return False

    def put(self, extent: Extent, *, ahead: bool) -> None:
        raise AssertionError("nobody promised it room")


def test_all_who_waited_for_a_range_get_it_though_it_is_not_kept():
    async def main():
        world = World()
        await world.bucket.connect().put("k", BODY, metadata={})
        faults = Faults(random.Random(2), rates=FaultRates(delay_s_max=0.5))
        limits = RangeLimits(range_bytes=1000, in_flight_max=3)
        ranges = Ranges(world.bucket.connect(faults), limits, NoRoom(0))
        source = Source("k", SIZE)
        async with asyncio.TaskGroup() as group:
            reads = [group.create_task(ranges.read(source, at, at + 900)) for at in range(50)]
        assert [bytes(one.result()) for one in reads] == [BODY[at : at + 900] for at in range(50)]
        assert ranges.fetches == 1
        assert ranges.bytes_waited_for == 50 * 900
        few = await ranges.read(source, 100, 200)
        assert few == BODY[100:200]
        assert few.obj == BODY[100:200], "nobody who has a part holds the whole range"

    run_virtual(main(), until_s=1000)


def test_what_nobody_waits_for_is_not_fetched_where_there_is_no_room():
    async def main():
        world = World()
        await world.bucket.connect().put("k", BODY, metadata={})
        limits = RangeLimits(range_bytes=1000, in_flight_max=3)
        ranges = Ranges(world.bucket.connect(), limits, NoRoom(0))
        await ranges.warm(Source("k", SIZE), 0, SIZE)
        assert ranges.fetches == 0
        assert await ranges.read(Source("k", SIZE), 0, 10) == BODY[:10]

    run_virtual(main(), until_s=1000)
