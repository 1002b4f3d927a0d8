"""Limits of bytes a second out of tier 2: kept, holding up nobody else, refusing nothing."""

import asyncio
import contextlib

import pytest

from tests.unit.catalog.world import on_virtual_time
from tests.unit.offload.world import World
from tierlog.adapters.memory.faults import no_faults
from tierlog.adapters.memory.objects import MemoryObjectsClient
from tierlog.offload.pacing import ReadPace
from tierlog.offload.range_memory import LastRanges
from tierlog.offload.ranges import RangeLimits, Ranges, Source
from tierlog.ports.spending import IN, NAMESPACE, PROCESS, Cause, CostMeter, spending

MIB = 1024 * 1024
KEYS = ("a", "b", "c")
SIZE = 32 * MIB


class Paced:
    """Objects of 32 MiB in a bucket, and ranges of them under limits."""

    def __init__(
        self, *, per_s: float = 0, namespaces=(), in_flight_max: int = 1, memory=None
    ) -> None:
        self.world = World()
        self.meter = CostMeter()
        self.pace = ReadPace(self.world.clock, self.meter, per_s=per_s, namespaces=namespaces)
        limits = RangeLimits(in_flight_max=in_flight_max, kept_bytes_max=256 * MIB, growth_max=16)
        self.objects = self.world.bucket.connect(no_faults())
        self.ranges = Ranges(self.objects, limits, memory, pace=self.pace)

    async def fill(self) -> None:
        for key in KEYS:
            await self.objects.put(key, bytes(SIZE), metadata={})

    async def read(self, stream: str, key: str, start: int, end: int) -> float:
        """Read, and return when it was there."""
        with spending(Cause.READ, stream):
            await self.ranges.read(Source(key, SIZE), start, end, exact=True)
        return asyncio.get_running_loop().time()


@on_virtual_time
async def test_what_a_process_reads_keeps_its_limit_whatever_the_streams():
    paced = Paced(per_s=MIB, in_flight_max=8)
    await paced.fill()
    async with asyncio.TaskGroup() as group:
        for stream, key in (("x.one", "a"), ("y.two", "b"), ("three", "c")):
            group.create_task(paced.read(stream, key, 0, 4 * MIB))
    # 12 MiB, of which a burst of 1 MiB comes at once.
    assert asyncio.get_running_loop().time() == pytest.approx(11, abs=0.1)
    assert paced.meter.throttled_s[IN, PROCESS] > 11
    assert not paced.meter.throttled_s[IN, NAMESPACE]


@on_virtual_time
async def test_a_namespace_that_waits_for_its_limit_holds_up_no_other():
    paced = Paced(namespaces=["slow=1000000", "*=10000000", "free=0"])
    await paced.fill()
    async with asyncio.TaskGroup() as group:
        slow = group.create_task(paced.read("slow.orders", "a", 0, 8 * MIB))
        await asyncio.sleep(0.01)
        other = group.create_task(paced.read("other.orders", "b", 0, 8 * MIB))
        free = group.create_task(paced.read("free.orders", "c", 0, 8 * MIB))
    assert slow.result() == pytest.approx(7 * MIB / 1e6, abs=0.1)
    assert other.result() == pytest.approx(7 * MIB / 1e7, abs=0.1)
    assert free.result() < 0.2
    assert paced.meter.throttled_s[IN, NAMESPACE] > 7
    assert not paced.meter.throttled_s[IN, PROCESS]


@on_virtual_time
async def test_streams_without_a_namespace_share_the_rate_of_each_other_namespace():
    paced = Paced(namespaces=["*=1048576"])
    await paced.fill()
    async with asyncio.TaskGroup() as group:
        together = [
            group.create_task(paced.read(stream, key, 0, 2 * MIB))
            for stream, key in (("orders", "a"), ("payments", "b"))
        ]
        apart = group.create_task(paced.read("x.orders", "c", 0, 2 * MIB))
    assert max(one.result() for one in together) == pytest.approx(3, abs=0.1)
    assert apart.result() == pytest.approx(1, abs=0.1)


@on_virtual_time
async def test_a_read_waits_behind_no_more_than_one_request_of_what_is_fetched_ahead():
    paced = Paced(per_s=4 * MIB)
    await paced.fill()
    with spending(Cause.READ, "x"):
        ahead = asyncio.create_task(paced.ranges.warm(Source("a", SIZE), 0, SIZE, growth=16))
    await asyncio.sleep(1.5)
    begun_s = asyncio.get_running_loop().time()
    # A request of 4 MiB pays just now at most: longer ones would take seconds.
    assert await paced.read("x", "b", 0, 64 * 1024) - begun_s <= 1.1
    assert not ahead.done()
    await ahead
    assert asyncio.get_running_loop().time() == pytest.approx(31 / 4, abs=0.3)


@on_virtual_time
async def test_what_was_ahead_has_its_turn_with_the_reads_once_one_waits_for_it():
    paced = Paced(per_s=MIB)
    await paced.fill()
    with spending(Cause.READ, "x"):
        ahead = asyncio.create_task(paced.ranges.warm(Source("a", SIZE), 0, 16 * MIB))
    await asyncio.sleep(1.5)
    begun_s = asyncio.get_running_loop().time()
    assert await paced.read("x", "a", 15 * MIB, 15 * MIB + 100) - begun_s <= 2.1
    ahead.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await ahead


@on_virtual_time
async def test_readers_of_one_namespace_have_their_turns_in_order():
    paced = Paced(namespaces=["x=1048576"], in_flight_max=8)
    await paced.fill()
    ends: dict[str, float] = {}

    async def catch_up(key: str) -> None:
        for at in range(0, 4 * MIB, MIB):
            ends[key] = await paced.read(f"x.{key}", key, at, at + MIB)

    async with asyncio.TaskGroup() as group:
        for key in KEYS:
            group.create_task(catch_up(key))
    assert min(ends.values()) >= 8.9, "no reader was done long before the others"
    assert max(ends.values()) == pytest.approx(11, abs=0.1)


@on_virtual_time
async def test_who_goes_while_it_waits_has_paid_nothing_and_holds_up_nobody():
    paced = Paced(per_s=MIB)
    await paced.fill()
    first = asyncio.create_task(paced.read("x", "a", 0, 3 * MIB))
    await asyncio.sleep(0.1)
    going = [asyncio.create_task(paced.read("x", "b", at, at + MIB)) for at in (0, 8 * MIB)]
    await asyncio.sleep(0.1)
    for one in going:
        one.cancel()
    last = asyncio.create_task(paced.read("x", "c", 0, MIB))
    await asyncio.wait([first, last, *going])
    assert last.result() == pytest.approx(3, abs=0.1)


@pytest.mark.parametrize("limits", [{"per_s": MIB / 10}, {"namespaces": ["x=104857"]}])
@on_virtual_time
async def test_who_goes_before_its_time_comes_again_and_has_waited_so_long(limits):
    paced = Paced(**limits)
    await paced.fill()
    await paced.read("x.orders", "a", 0, MIB)  # the burst
    tries = 0
    while True:
        tries += 1
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(4):
                # Ten seconds' worth.
                await paced.read("x.orders", "b", 0, MIB)
                break
    assert tries == 3
    # Nobody pays for what nobody got.
    begun_s = asyncio.get_running_loop().time()
    assert await paced.read("x.orders", "c", 0, MIB) - begun_s == pytest.approx(10, abs=0.1)


@on_virtual_time
async def test_who_goes_while_it_waits_for_the_process_has_not_paid_its_namespace_either():
    paced = Paced(per_s=MIB, namespaces=["x=104857"])
    await paced.fill()
    busy = asyncio.create_task(paced.read("y", "a", 0, 9 * MIB))
    await asyncio.sleep(0.1)
    for _ in range(3):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):
                await paced.read("x.orders", "b", 0, MIB)
    await busy
    begun_s = asyncio.get_running_loop().time()
    assert await paced.read("x.orders", "c", 0, MIB) - begun_s < 1.1, "it has its burst still"


class NoRoomAhead(LastRanges):
    """Memory that is full of what is needed sooner than what is fetched ahead."""

    def blank(self, key, start, size, *, ahead):
        return None if ahead else super().blank(key, start, size, ahead=ahead)


@on_virtual_time
async def test_what_there_is_no_room_for_ahead_pays_nothing():
    paced = Paced(per_s=MIB, memory=NoRoomAhead(256 * MIB))
    await paced.fill()

    async def ahead() -> None:
        while True:
            await paced.ranges.warm(Source("a", SIZE), 0, 8 * MIB)
            await asyncio.sleep(0.1)

    with spending(Cause.READ, "x"):
        other = asyncio.create_task(ahead())
    ends = []
    for at in range(0, 8 * MIB, MIB):
        ends.append(await paced.read("x", "b", at, at + MIB))
        await asyncio.sleep(0.01)  # what it does with them
    other.cancel()
    assert ends[-1] == pytest.approx(7, abs=0.1)
    assert paced.ranges.bytes_fetched == 8 * MIB


@on_virtual_time
async def test_memory_is_no_fetch_and_waits_for_nothing():
    paced = Paced(per_s=1000)
    await paced.fill()
    there_s = await paced.read("x", "a", 0, 2 * MIB)
    assert await paced.read("x", "a", 0, 2 * MIB) == there_s


@on_virtual_time
async def test_a_rate_without_an_end_is_no_limit():
    paced = Paced(per_s=float("inf"), namespaces=["x=" + "9" * 400])
    await paced.fill()
    with spending(Cause.READ, "x.orders"):
        await paced.ranges.warm(Source("a", SIZE), 0, SIZE, growth=16)
    assert paced.ranges.bytes_fetched == SIZE
    assert asyncio.get_running_loop().time() < 0.1


class Stalled(MemoryObjectsClient):
    """A bucket that answers no range before it is let to."""

    def __init__(self, bucket):
        super().__init__(bucket, no_faults(), CostMeter())
        self.open = asyncio.Event()

    async def get_range_into(self, key, start, targets):
        await self.open.wait()
        return await super().get_range_into(key, start, targets)


@pytest.mark.parametrize("limits", [{"per_s": MIB / 10}, {"namespaces": ["x=104857"]}])
@on_virtual_time
async def test_who_goes_while_it_waits_for_its_turn_has_paid_nothing(limits):
    paced = Paced(**limits)
    await paced.fill()
    stalled = Stalled(paced.world.bucket)
    paced.ranges = Ranges(stalled, paced.ranges.limits, pace=paced.pace)
    first = asyncio.create_task(paced.read("x.orders", "a", 0, MIB))  # it has the only turn
    going = [asyncio.create_task(paced.read("x.orders", "b", at, at + MIB)) for at in (0, 8 * MIB)]
    await asyncio.sleep(20.5)  # both have paid
    for one in going:
        one.cancel()
    stalled.open.set()
    await asyncio.wait([first, *going])
    begun_s = asyncio.get_running_loop().time()
    assert await paced.read("x.orders", "c", 0, MIB) - begun_s < 1, "it has its burst still"
    assert paced.ranges.bytes_fetched == 2 * MIB


class OneRoomAhead(LastRanges):
    """Memory that has room for one range ahead, and not for the next."""

    def blank(self, key, start, size, *, ahead):
        if ahead and self.kept_bytes >= MIB:
            return None
        return super().blank(key, start, size, ahead=ahead)


@on_virtual_time
async def test_what_memory_has_no_room_for_any_more_once_it_paid_is_not_paid():
    paced = Paced(per_s=MIB / 10, memory=OneRoomAhead(256 * MIB))
    await paced.fill()
    with spending(Cause.READ, "x"):
        await paced.ranges.warm(Source("a", SIZE), 0, 3 * MIB)
    assert paced.ranges.bytes_fetched == MIB
    begun_s = asyncio.get_running_loop().time()
    assert await paced.read("x", "b", 0, MIB) - begun_s < 1, "it has its burst still"


@on_virtual_time
async def test_who_waits_for_more_than_the_burst_comes_again_and_has_waited_so_long():
    paced = Paced(per_s=MIB / 10)
    await paced.fill()
    limits = RangeLimits(range_bytes=4 * MIB, in_flight_max=1, kept_bytes_max=256 * MIB)
    paced.ranges = Ranges(paced.objects, limits, pace=paced.pace)
    tries = 0
    while tries < 10:
        tries += 1
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(12):
                await paced.read("x", "a", 0, MIB)
                break
    assert tries == 3, "30 seconds, beside the burst"


class Reading:
    urgent = True


@on_virtual_time
async def test_what_was_waited_for_more_than_the_burst_is_not_lost_to_who_comes_between():
    paced = Paced(per_s=MIB / 10)
    tries = 0
    while tries < 10:
        tries += 1
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(12):
                await paced.pace.take(4 * MIB, Reading())
                break
        await paced.pace.take(1000, Reading())
    assert tries == 3, "30 seconds, beside the burst"
    # It was spent with that: what nobody waits for counts up to the burst, as before.
    begun_s = asyncio.get_running_loop().time() + 1000
    await asyncio.sleep(1000)
    await paced.pace.take(1000, Reading())
    await paced.pace.take(2 * MIB, Reading())
    assert asyncio.get_running_loop().time() - begun_s == pytest.approx(10, abs=0.1)


@on_virtual_time
async def test_a_reader_that_went_does_not_wait_for_what_is_fetched_ahead():
    paced = Paced(per_s=MIB / 10, memory=OneRoomAhead(256 * MIB))
    await paced.fill()

    async def ahead() -> None:
        with spending(Cause.READ, "x"):
            await paced.ranges.warm(Source("a", SIZE), 0, 2 * MIB)

    warming = asyncio.create_task(ahead())
    await asyncio.sleep(5)  # the second range waits for its pace
    going = asyncio.create_task(paced.read("x", "a", MIB, 2 * MIB))
    await asyncio.sleep(1)
    going.cancel()
    await warming
    assert paced.ranges.bytes_fetched == MIB, "memory has no room, and nobody wants it"
    begun_s = asyncio.get_running_loop().time()
    assert await paced.read("x", "b", 0, MIB) - begun_s < 1, "it is not paid"
