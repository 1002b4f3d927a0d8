"""A stream that can't be read costs the others neither memory nor the lag that they have waited.

Must hold (protocols.md section 3, step 9): elapsed time is checkpointed, of those that still wait,
whatever else there is; what was seen of a stream that can't be read stays seen.
"""

import asyncio

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.world import STREAM, World
from tests.unit.scheduler.test_scheduler import ENTRIES, HOUR, running, scheduler
from tierlog.format import paths
from tierlog.model.ids import LedgerId, StreamName
from tierlog.model.policy import Policy
from tierlog.model.stream import Stream
from tierlog_scheduler.actions import TIDY_PASSES

BAD = StreamName("bad")
LAG_S = 4 * HOUR
SOON = Policy(offload_time_ms=0, deletion_lag_ms=60_000)
LATE = Policy(offload_time_ms=0, deletion_lag_ms=round(LAG_S * 1000))


async def unread(world: World, name: StreamName) -> bytes:
    """Make a stream's record unreadable; return it as it was."""
    store, path = world.catalog().store, paths.stream_path(name)
    found = await store.get(path)
    assert found is not None
    await store.set(path, b"\xff\xff\xff", version=found.version)
    return found.data


async def mend(world: World, name: StreamName, data: bytes) -> None:
    await world.catalog().store.set(paths.stream_path(name), data, version=-1)


async def copied(world: World, claimed: Stream) -> LedgerId:
    """Return a ledger that has just been offloaded."""
    ledger_id = await world.seal(claimed, ENTRIES)
    await world.worker().handle(world.request(claimed, ledger_id))
    return ledger_id


async def has_local(world: World, ledger_id: LedgerId) -> bool:
    return await world.catalog().ledgers.get(ledger_id) is not None


@pytest.mark.parametrize("known_before", [False, True])
def test_what_is_gone_of_others_is_forgotten_and_its_own_is_not(known_before):
    async def main():
        world = World()
        bad = await world.stream(BAD, LATE)
        hers = await copied(world, bad)
        policy = Policy(offload_time_ms=0, deletion_lag_ms=60_000, retention_time_ms=3_600_000)
        claimed = await world.stream(policy=policy)
        if not known_before:
            async with running(world, workers=0):
                await asyncio.sleep(60)
            await unread(world, BAD)
        async with running(world) as (leader,):
            await asyncio.sleep(60)
            if known_before:
                await unread(world, BAD)
            for _ in range(10):
                await world.seal(claimed, ENTRIES)
                await asyncio.sleep(600)
            await asyncio.sleep(2 * HOUR + TIDY_PASSES * 10)
            assert leader.streams_unread == 1
            memory = leader._memory
            assert list(memory.complete_seen) == [hers]
            assert set(memory.closed_seen_ms) <= {hers}
            assert not memory.asked
            assert not memory.swept_seen_ms
            progress = await world.catalog().progress.load()
            assert list(progress.complete_seen) == [hers]

    run_virtual(main(), until_s=100 * HOUR)


def test_a_new_leader_goes_on_with_the_lag_of_those_that_wait(monkeypatch):
    monkeypatch.setattr("tierlog_scheduler.scheduler.CHECKPOINT_LEDGERS_MAX", 3)

    async def main():
        world = World()
        await world.stream(BAD)
        await unread(world, BAD)
        soon = await world.stream(StreamName("soon"), SOON)
        late = await world.stream(StreamName("late"), LATE)
        async with running(world):
            for _ in range(5):
                await world.seal(soon, ENTRIES)
            await asyncio.sleep(300)
            ledger_id = await copied(world, late)
            await asyncio.sleep(0.6 * LAG_S)
        async with running(world):
            await asyncio.sleep(0.3 * LAG_S)
            assert await has_local(world, ledger_id)
            await asyncio.sleep(0.2 * LAG_S)
            assert not await has_local(world, ledger_id)

    run_virtual(main(), until_s=100 * HOUR)


def test_what_no_list_shows_leaves_its_room_in_the_checkpoint_to_others(monkeypatch):
    """A checkpoint full of ledgers that went while nobody led, or of the unreadable stream's."""
    monkeypatch.setattr("tierlog_scheduler.scheduler.CHECKPOINT_LEDGERS_MAX", 3)

    async def main():
        world = World()
        bad = await world.stream(BAD, LATE)
        hers = [await copied(world, bad) for _ in range(3)]
        async with running(world):
            await asyncio.sleep(60)
        await unread(world, BAD)
        claimed = await world.stream(policy=LATE)
        ledger_id = await copied(world, claimed)
        async with running(world):
            await asyncio.sleep(0.6 * LAG_S)
        progress = await world.catalog().progress.load()
        assert sorted(progress.complete_seen) == [*hers[:2], ledger_id]

    run_virtual(main(), until_s=100 * HOUR)


@pytest.mark.parametrize("by_the_next", [False, True])
def test_the_lag_of_its_own_ledgers_goes_on_once_it_is_mended(by_the_next):
    async def main():
        world = World()
        bad = await world.stream(BAD, LATE)
        hers = await copied(world, bad)
        soon = await world.stream(policy=SOON)
        async with running(world):
            await asyncio.sleep(60)
            data = await unread(world, BAD)
            await world.seal(soon, ENTRIES)
            await asyncio.sleep(0.3 * LAG_S)
            if not by_the_next:
                await mend(world, BAD, data)
            await asyncio.sleep(0.3 * LAG_S)
        async with running(world):
            await asyncio.sleep(0.2 * LAG_S)
            if by_the_next:
                await mend(world, BAD, data)
            await asyncio.sleep(0.1 * LAG_S)
            assert await has_local(world, hers), "not early"
            await asyncio.sleep(0.2 * LAG_S)
            assert not await has_local(world, hers), "nor anew"

    run_virtual(main(), until_s=100 * HOUR)


@pytest.mark.parametrize("by_the_next", [False, True])
def test_what_its_own_ledgers_waited_for_retention_goes_on_once_it_is_mended(by_the_next):
    async def main():
        world = World()
        bad = await world.stream(BAD, Policy(retention_time_ms=round(LAG_S * 1000)), raw=True)
        hers = await world.seal(bad, ENTRIES)
        # What a checkpoint is written for.
        await copied(world, await world.stream(policy=LATE))
        async with running(world):
            await asyncio.sleep(0.3 * LAG_S)
            data = await unread(world, BAD)
            await asyncio.sleep(0.3 * LAG_S)
            if not by_the_next:
                await mend(world, BAD, data)
        async with running(world):
            await asyncio.sleep(0.1 * LAG_S)
            if by_the_next:
                await mend(world, BAD, data)
            await asyncio.sleep(0.2 * LAG_S)
            assert await has_local(world, hers), "not early"
            await asyncio.sleep(0.2 * LAG_S)
            assert not await has_local(world, hers), "nor anew"

    run_virtual(main(), until_s=100 * HOUR)


def test_levels_that_contradict_a_stream_for_a_while_do_not_begin_its_lag_anew():
    async def main():
        world = World()
        claimed = await world.stream(policy=LATE)
        ledger_id = await copied(world, claimed)
        leader = scheduler(world)
        await leader.begin()
        await leader.run_pass()
        seen = dict(leader._memory.complete_seen)
        assert list(seen) == [ledger_id]
        known = leader.mirror.streams[STREAM]
        policy, known.policy = known.policy, None
        await asyncio.sleep(10)
        await leader.run_pass()
        assert leader.mirror.is_whole
        assert leader._memory.complete_seen == seen
        known.policy = policy
        await leader.run_pass()
        assert leader._memory.complete_seen == seen

    run_virtual(main())
