"""Clients of one namespace that wait for its limit: to others they are one, in memory too."""

import asyncio
import gc
from functools import partial

import pytest

from tests.unit.catalog.world import on_virtual_time
from tests.unit.offload.world import World
from tests.unit.reader.test_tail import tails_of
from tests.unit.reader.world import ReaderWorld
from tierlog.adapters.memory.faults import no_faults
from tierlog.model.ids import StreamName
from tierlog.model.position import Edge, Position
from tierlog.offload.pacing import ReadPace
from tierlog.offload.ranges import WALK_COPIES, RangeLimits, Ranges, Source
from tierlog.ports.spending import Cause, spending
from tierlog_reader.chunk import Budget
from tierlog_reader.engine import _group_of
from tierlog_reader.served import ServedReads
from tierlog_reader.shares import Shares

MIB = 1024 * 1024
ENTRIES = [b"%04d" % number * 25_000 for number in range(40)]
RANGES = RangeLimits(range_bytes=65_536, in_flight_max=8, kept_bytes_max=256 * 1024)
SLOW, FAST = StreamName("slow.logs"), StreamName("fast.logs")


async def catch_up(reads, host, stream) -> float:
    """Read all of a stream; return when that was."""
    where: Position | Edge = Edge.EARLIEST
    budget, count = Budget(entries_max=1000, bytes_max=400_000, wait_s=0), 0
    while count < len(ENTRIES):
        answer, room = await reads.read((host, stream), stream, where, budget)
        count += answer.chunk.count
        where = answer.chunk.end
        del answer
        await asyncio.sleep(0.001)  # it is sent
        room.leave()
    return asyncio.get_running_loop().time()


@on_virtual_time
async def test_many_who_wait_for_their_limit_leave_others_room_for_their_answers():
    world = ReaderWorld(block_size=8 * MIB)
    for name in (SLOW, FAST):
        world.claimed = await world.stream(name)
        ledger = await world.sealed(ENTRIES, run_bytes_max=1_000_000)
        await world.offloaded(ledger)
        await world.gone_locally(ledger)
    pace = ReadPace(world.clock, world.meter, per_s=0, namespaces=["slow=100000"])
    shares = Shares(12 * MIB, wait_s_max=30, group_of=partial(_group_of, pace))
    async with world.reader(limits=RANGES, pace=pace, tails=tails_of()) as source:
        reads = ServedReads(source, shares)
        slow = [asyncio.create_task(catch_up(reads, f"{n}", SLOW)) for n in range(24)]
        await asyncio.sleep(5)
        begun_s = asyncio.get_running_loop().time()
        # 24 clients hold all rooms, one alone as long as 400 kB take: 4 s.
        assert await catch_up(reads, "other", FAST) - begun_s < 1
        for one in slow:
            one.cancel()
        await asyncio.wait(slow)
    assert (shares.used_bytes, shares.waiting, len(shares._accounts)) == (0, 0, 0)
    del slow, one
    gc.collect()
    assert not list(shares._groups)


def group_of(client):
    return client.partition(".")[0] if "." in client else None


@pytest.mark.parametrize("large", [6000, 12_000])
@on_virtual_time
async def test_in_a_group_small_answers_never_starve_a_large_one(large):
    shares = Shares(12_000, wait_s_max=1000, group_of=group_of)

    async def small(client) -> None:
        for _ in range(100):
            async with shares.room(client, 1000):
                await asyncio.sleep(1)

    async with asyncio.TaskGroup() as group:
        others = [group.create_task(small(f"slow.{number}")) for number in range(12)]
        await asyncio.sleep(3.5)
        async with asyncio.timeout(20), shares.room("slow.large", large):
            pass
        for one in others:
            one.cancel()


@on_virtual_time
async def test_in_a_group_who_takes_nothing_holds_up_no_other():
    shares = Shares(12_000, wait_s_max=5, group_of=group_of)

    async def stuck() -> None:
        async with shares.room("slow.stuck", 1000):
            await asyncio.sleep(1000)

    async with asyncio.TaskGroup() as group:
        waiting = [group.create_task(stuck()) for _ in range(12)]
        await asyncio.sleep(1)
        for _ in range(20):
            async with asyncio.timeout(1), shares.room("slow.a", 1000):
                await asyncio.sleep(0.1)
        for one in waiting:
            one.cancel()


@on_virtual_time
async def test_walks_of_one_namespace_leave_room_for_those_of_another():
    world = World()
    pace = ReadPace(world.clock, world.meter, per_s=0, namespaces=["slow=1"])
    size = WALK_COPIES * RANGES.range_bytes
    walks = Shares(4 * size, wait_s_max=5, group_of=partial(_group_of, pace))
    ranges = Ranges(world.bucket.connect(no_faults()), RANGES, walks=walks)

    async def walk(key, stream, hold_s) -> None:
        with spending(Cause.READ, stream):
            async with ranges.walking(Source(key, 1)):
                await asyncio.sleep(hold_s)

    slow = [asyncio.create_task(walk(f"object {n}", SLOW, 100)) for n in range(8)]
    await asyncio.sleep(1)
    async with asyncio.timeout(0.5):
        await walk("another", FAST, 0.1)
    for task in slow:
        task.cancel()
    await asyncio.wait(slow)
