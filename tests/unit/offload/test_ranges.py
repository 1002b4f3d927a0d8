"""Ranges under many readers at once: right bytes, each unit once at a time, bounded memory."""

import asyncio
import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.world import World
from tierlog.adapters.memory.faults import FaultRates, Faults
from tierlog.format.checksum import Buffer, crc32c
from tierlog.model.errors import CorruptError, RetryableError
from tierlog.offload.range_memory import LastRanges
from tierlog.offload.ranges import RangeLimits, Ranges, Source, _Flight
from tierlog.offload.tier2_reader import Steps
from tierlog.offload.turns import Turns
from tierlog.ports.filling import Filling, length_of

SIZE = 5000
BODY = random.Random(1).randbytes(SIZE)


class Sums:
    """Checks of grains of 64 bytes, as a side object does them."""

    grain_len = 64

    def __init__(self) -> None:
        self.sums = [crc32c(BODY[at : at + 64]) for at in range(0, SIZE, 64)]

    async def check(self, start: int, body: Sequence[Buffer]) -> None:
        await asyncio.sleep(0)
        assert start % 64 == 0
        whole = b"".join(body)
        for at in range(0, len(whole), 64):
            if crc32c(whole[at : at + 64]) != self.sums[(start + at) // 64]:
                raise CorruptError("differs", remedy="", details={"offset": str(start + at)})


class Watched:
    """Counts which bytes are being fetched, and that none is twice at once."""

    def __init__(self, objects, *, damages: bool) -> None:
        self._objects = objects
        self._damages = damages
        self.flying: list[range] = []
        self.peak = 0

    async def get_range_into(self, key: str, start: int, targets: Sequence[memoryview]) -> int:
        span = range(start, start + sum(map(len, targets)))
        assert not any(span.start < one.stop and one.start < span.stop for one in self.flying)
        self.flying.append(span)
        self.peak = max(self.peak, len(self.flying))
        try:
            found: int = await self._objects.get_range_into(key, start, targets)
        finally:
            self.flying.remove(span)
        # The first try of every other range is damaged on its way.
        if self._damages and start // 64 % 2 and random.Random(start).random() < 0.5:
            self._damages = False
            targets[0][0] ^= 1
        return found


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

    def blank(self, key: str, start: int, size: int, *, ahead: bool) -> None:
        return None


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


class Slow:
    """An object store whose answers come when they are told to."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.lengths: list[int] = []
        self.answers = asyncio.Event()
        self.fails = 0

    async def get_range_into(self, key: str, start: int, targets: Sequence[memoryview]) -> int:
        self.asked.append(start)
        self.lengths.append(sum(map(len, targets)))
        await self.answers.wait()
        if self.fails:
            self.fails -= 1
            raise RetryableError("away", remedy="wait")
        Filling(targets).add(BODY[start : start + sum(map(len, targets))])
        return sum(map(len, targets))


def slow_ranges(
    in_flight_max: int = 1, memory: LastRanges | None = None, **limits: int
) -> tuple[Slow, Ranges]:
    objects = Slow()
    within = RangeLimits(**{"range_bytes": 1000, "in_flight_max": in_flight_max, **limits})
    return objects, Ranges(objects, within, memory)  # type: ignore[arg-type]


def test_what_has_begun_is_kept_though_whoever_asked_for_it_went():
    async def main():
        objects, ranges = slow_ranges()
        async with ranges.run():
            gone = asyncio.create_task(ranges.read(Source("k", SIZE), 0, 100))
            await asyncio.sleep(1)
            joined = asyncio.create_task(ranges.read(Source("k", SIZE), 50, 150))
            await asyncio.sleep(1)
            gone.cancel()
            await asyncio.sleep(1)
            joined.cancel()
            await asyncio.sleep(1)
            objects.answers.set()
            assert await ranges.read(Source("k", SIZE), 100, 200) == BODY[100:200]
            assert objects.asked == [0]
            assert not ranges._flying

    run_virtual(main(), until_s=1000)


def test_what_is_fetched_ahead_goes_on_for_others_when_who_began_it_goes():
    async def main():
        objects, ranges = slow_ranges()
        async with ranges.run():
            walker = asyncio.create_task(ranges.warm(Source("k", SIZE), 0, 10))
            await asyncio.sleep(1)
            read = asyncio.create_task(ranges.read(Source("k", SIZE), 0, 10))
            await asyncio.sleep(1)
            walker.cancel()
            await asyncio.sleep(1)
            objects.answers.set()
            assert await read == BODY[:10]
            assert objects.asked == [0]
            assert walker.cancelled()

    run_virtual(main(), until_s=1000)


@pytest.mark.parametrize("kind", ["another", "one of those ahead"])
def test_what_a_reader_waits_for_comes_before_what_nobody_waits_for(kind):
    async def main():
        source, wanted = Source("k", SIZE), 4000 if kind == "one of those ahead" else 4500
        objects, ranges = slow_ranges(range_bytes=100, in_flight_max=1)
        async with ranges.run(), asyncio.TaskGroup() as group:
            for at in range(0, 4100, 100):
                group.create_task(ranges.warm(source, at, at + 1))
            await asyncio.sleep(1)
            gone = group.create_task(ranges.read(source, 4700, 4800))
            reads = [group.create_task(ranges.read(source, at, at + 9)) for at in (wanted, 4600)]
            await asyncio.sleep(1)
            gone.cancel()
            objects.answers.set()
            assert [bytes(await one) for one in reads] == [BODY[wanted:][:9], BODY[4600:4609]]
            assert objects.asked[:3] == [0, wanted, 4600]
        # The others come, too, in their order.
        assert objects.asked[3:] == [at for at in range(100, 4100, 100) if at != wanted]
        assert ranges._turns._free == 1

    run_virtual(main(), until_s=1000)


def test_a_reader_that_went_is_nobody_who_waits_for_what_is_ahead():
    async def main():
        source = Source("k", SIZE)
        objects, ranges = slow_ranges(in_flight_max=1)
        async with ranges.run(), asyncio.TaskGroup() as group:
            for at in (0, 1000, 2000):
                group.create_task(ranges.warm(source, at, at + 1))
            await asyncio.sleep(1)
            gone = group.create_task(ranges.read(source, 2000, 2100))
            await asyncio.sleep(1)
            gone.cancel()
            group.create_task(ranges.read(source, 3000, 3100))
            await asyncio.sleep(1)
            objects.answers.set()
        assert objects.asked == [0, 3000, 1000, 2000]

    run_virtual(main(), until_s=1000)


def test_a_turn_that_comes_to_who_is_just_going_is_the_next_ones():
    async def main():
        turns, flight = Turns(1), _Flight()
        await turns.take(flight)
        going, staying = [asyncio.create_task(turns.take(flight)) for _ in range(2)]
        await asyncio.sleep(0)
        turns.give_back()
        going.cancel()
        await staying
        assert going.cancelled()
        turns.give_back()
        assert turns._free == 1

    run_virtual(main(), until_s=1000)


def test_what_waits_for_its_turn_is_given_up_with_the_last_who_wants_it():
    async def main():
        objects, ranges = slow_ranges()
        async with ranges.run():
            first = asyncio.create_task(ranges.read(Source("k", SIZE), 0, 100))
            await asyncio.sleep(1)
            many = [
                asyncio.create_task(ranges.read(Source("k", SIZE), start, start + 1))
                for start in range(1000, SIZE, 1000)
            ]
            await asyncio.sleep(1)
            for one in many:
                one.cancel()
            await asyncio.sleep(1)
            assert len(ranges._flying) == 1
            objects.answers.set()
            assert await first == BODY[:100]
            assert objects.asked == [0]

    run_virtual(main(), until_s=1000)


def test_an_error_is_told_to_all_who_waited_and_asked_for_once():
    async def main():
        objects, ranges = slow_ranges()
        objects.fails = 1
        async with ranges.run():
            tasks = [
                asyncio.create_task(ranges.read(Source("k", SIZE), at, at + 1)) for at in range(20)
            ]
            await asyncio.sleep(1)
            assert ranges.in_flight == 1
            objects.answers.set()
            await asyncio.wait(tasks)
        assert all(isinstance(one.exception(), RetryableError) for one in tasks)
        assert objects.asked == [0]
        assert ranges.in_flight == 0

    run_virtual(main(), until_s=1000)


def test_what_fetching_ahead_meets_is_no_readers_error():
    async def main():
        objects, ranges = slow_ranges()
        objects.fails = 1
        async with ranges.run():
            ahead = asyncio.create_task(ranges.warm(Source("k", SIZE), 0, 10))
            await asyncio.sleep(1)
            read = asyncio.create_task(ranges.read(Source("k", SIZE), 0, 10))
            await asyncio.sleep(1)
            objects.answers.set()
            with pytest.raises(RetryableError):
                await ahead
            assert await read == BODY[:10]
            assert objects.asked == [0, 0]

    run_virtual(main(), until_s=1000)


@pytest.mark.parametrize(
    ("kept", "growth", "growth_max", "lengths"),
    [
        (10**6, 1, 4, [100] * 16),
        (10**6, 2, 4, [200] * 8),
        (10**6, 99, 4, [400] * 4),
        (10**6, 99, 2, [200] * 8),
        (16 * 399, 99, 4, [300] * 6),  # it holds 16 requests of three ranges; all are whole
        (16 * 200 - 1, 99, 4, [100] * 16),
    ],
)
def test_requests_ahead_grow_within_the_limits(kept, growth, growth_max, lengths):
    async def main():
        objects, ranges = slow_ranges(range_bytes=100, kept_bytes_max=kept, growth_max=growth_max)
        objects.answers.set()
        await ranges.warm(Source("k", SIZE), 0, 1600, growth=growth)
        assert objects.lengths == lengths
        assert await ranges.read(Source("k", SIZE), 0, 1600) == BODY[:1600]
        assert ranges.fetches == len(lengths)

    run_virtual(main())


def test_long_requests_end_at_borders_too():
    """What would be left of one would come as a short one, a read later."""

    async def main():
        objects, ranges = slow_ranges(range_bytes=100)
        objects.answers.set()
        await ranges.warm(Source("k", SIZE), 0, 450, growth=4)
        await ranges.warm(Source("k", SIZE), 100, 550, growth=4)
        await ranges.warm(Source("k", SIZE), 400, 850, growth=4)
        assert objects.lengths == [400, 400, 400]

    run_virtual(main())


def test_what_is_on_its_way_is_asked_for_once():
    async def main():
        objects, ranges = slow_ranges(range_bytes=100)
        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(ranges.warm(Source("k", SIZE), 0, 1600, growth=4))
            await asyncio.sleep(1)
            objects.answers.set()
        assert sorted(objects.asked) == [0, 400, 800, 1200]
        assert await ranges.read(Source("k", SIZE), 0, 1600) == BODY[:1600]
        assert ranges.fetches == 4

    run_virtual(main())


def test_long_requests_begin_at_borders_and_leave_out_what_is_there():
    async def main():
        objects, ranges = slow_ranges(range_bytes=100)
        objects.answers.set()
        await ranges.read(Source("k", SIZE), 600, 601)
        await ranges.warm(Source("k", SIZE), 150, 1150, growth=4)
        asked = sorted(zip(objects.asked, objects.lengths, strict=True))
        assert asked == [(100, 300), (400, 200), (600, 100), (700, 100), (800, 400)]
        assert await ranges.read(Source("k", SIZE), 100, 1200) == BODY[100:1200]
        assert ranges.fetches == 5

    run_virtual(main())


def test_who_waits_for_a_long_request_without_room_asks_by_ranges():
    """What is held beside the memory is no longer than a range, whatever was to be ahead."""

    async def main():
        objects, ranges = slow_ranges(memory=NoRoom(0))
        async with ranges.run(), asyncio.TaskGroup() as group:
            first = group.create_task(ranges.read(Source("k", SIZE), 4000, 4100))
            await asyncio.sleep(1)
            group.create_task(ranges.warm(Source("k", SIZE), 0, 4000, growth=4))
            await asyncio.sleep(1)
            second = group.create_task(ranges.read(Source("k", SIZE), 1500, 1600))
            await asyncio.sleep(1)
            assert objects.asked == [4000], "the others wait for their turn"
            objects.answers.set()
        assert first.result() == BODY[4000:4100]
        assert second.result() == BODY[1500:1600]
        assert (objects.asked, objects.lengths) == ([4000, 1000], [1000, 1000])
        assert not ranges._flying

    run_virtual(main(), until_s=1000)


def test_damage_that_stays_is_told_and_takes_no_room():
    async def main():
        world = World()
        await world.bucket.connect().put("k", BODY, metadata={})
        world.bucket.damage("k", 70)
        memory = LastRanges(10**6)
        ranges = Ranges(world.bucket.connect(), RangeLimits(range_bytes=256), memory)
        async with ranges.run():
            with pytest.raises(CorruptError):
                await ranges.read(Source("k", SIZE, Sums()), 0, 10**3)
        assert ranges.mismatches == 1
        assert not memory.known("k", 70)
        assert not ranges._flying

    run_virtual(main())


@pytest.mark.parametrize("queued", [False, True])
def test_a_walk_ends_though_readers_keep_all_turns_busy(queued):
    class Steady(Slow):
        async def get_range_into(self, key, start, targets):
            await asyncio.sleep(0.01)
            return length_of(targets)

    async def main():
        limits = RangeLimits(range_bytes=100, in_flight_max=2, kept_bytes_max=2000)
        ranges = Ranges(Steady(), limits)  # type: ignore[arg-type]

        async def reads_on(key):
            for start in itertools.count(0, 100):
                await ranges.read(Source(key, 10**9), start, start + 1, exact=True)

        async with ranges.run():
            busy = [asyncio.create_task(reads_on(f"k{number}")) for number in range(4)]
            await asyncio.sleep(1)
            source = Source("walked", 6400)
            if queued:
                busy.append(asyncio.create_task(ranges.warm(source, 0, 3000)))
                await asyncio.sleep(0.1)
            at, began_s = 0, asyncio.get_running_loop().time()
            steps = Steps(ranges, source, source.size)
            while at < source.size:
                end = await steps.end(at)
                await ranges.read(source, at, end)
                at = end
            assert asyncio.get_running_loop().time() - began_s < 1.2
            for one in busy:
                one.cancel()

    run_virtual(main(), until_s=100)
