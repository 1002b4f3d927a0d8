"""A store that lists uploads for a while after they have ended misleads no sweep and no scrub.

Must hold: what ended is not waited for, no object goes for it, and in the end all is clean.
"""

import asyncio
from uuid import UUID

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.gates import leader_of
from tests.unit.offload.scrubs import REPAIR, kinds, plant_upload, scrub
from tests.unit.offload.world import ListHandle, World, entries_of
from tierlog.adapters.memory.objects import MemoryObjects
from tierlog.model.ids import LedgerId
from tierlog.model.policy import Policy
from tierlog_scheduler.scheduler import SchedulerLimits

LINGER_S = 5.0
ENTRIES = [b"one", b"three"]


def lingering_world() -> World:
    world = World()
    world.bucket = MemoryObjects(world.clock, uploads_linger_s=LINGER_S)
    return world


async def listed(world: World) -> list[str]:
    return [one.upload_id for one in await world.bucket.connect().list_uploads()]


async def check_whole(world: World, ledger_id: LedgerId) -> None:
    """The copy, and nothing else, is there."""
    context = await world.context(ledger_id)
    assert context.complete
    assert context.uuid is not None
    assert set(world.bucket.objects) == await world.expected_keys()
    assert not world.bucket.uploads
    assert await entries_of(await world.offloader().read_offloaded(ledger_id, context.uuid)) == (
        ENTRIES
    )


def test_an_attempt_is_swept_and_struck_off_while_its_upload_is_listed():
    async def main():
        world = lingering_world()
        claimed = await world.stream(policy=Policy(deletion_lag_ms=-1))
        ledger_id = await world.seal(claimed, ENTRIES)
        contexts, uuid = world.catalog().contexts, UUID(int=9)
        location = world.offloader().location(ledger_id, uuid)
        await contexts.begin_attempt(ledger_id, uuid=uuid, location=location, worker="dead")
        left = await plant_upload(world, location.data_key)
        await world.worker().handle(world.request(claimed, ledger_id))
        assert left in await listed(world), "its successor aborted it, it is listed yet"
        assert len(await listed(world)) == 2, "so is its own, which is complete"
        leader = leader_of(
            world, SchedulerLimits(interval_s=0.5, request_again_s=60, sweep_again_s=1)
        )
        await leader.begin()
        for _ in range(6):
            await leader.run_pass()
            await asyncio.sleep(0.5)
        assert len(await listed(world)) == 2
        assert not (await world.context(ledger_id)).abandoned
        await check_whole(world, ledger_id)
        await asyncio.sleep(LINGER_S)
        assert not await listed(world)

    run_virtual(main())


def test_whoever_deletes_a_copy_whose_upload_is_listed_ends_and_may_do_it_again():
    async def main():
        world = lingering_world()
        offloader, ledger_id, uuid = world.offloader(), LedgerId(7), UUID(int=1)
        await offloader.offload(ListHandle(ledger_id, ENTRIES), uuid, {})
        for _ in range(2):
            await offloader.delete_offloaded(ledger_id, uuid)
            assert len(await listed(world)) == 1
            assert not world.bucket.objects

    run_virtual(main())


def test_a_scrub_takes_nothing_of_the_copy_whose_upload_is_listed():
    async def main():
        world = lingering_world()
        claimed = await world.stream()
        ledger_id = await world.seal(claimed, ENTRIES)
        await world.worker().handle(world.request(claimed, ledger_id))
        assert len(await listed(world)) == 1
        assert kinds(await scrub(world, REPAIR)) == [], "it is younger than the safety age"
        await check_whole(world, ledger_id)
        await asyncio.sleep(1)
        # One that took longer than the age: told as long as it is listed, and aborted in vain.
        for _ in range(2):
            found = await scrub(world, REPAIR, safety_age_s=0.5)
            assert kinds(found) == ["orphan-upload"]
            await check_whole(world, ledger_id)
        await asyncio.sleep(LINGER_S)
        assert kinds(await scrub(world, REPAIR, safety_age_s=0.5)) == []
        await check_whole(world, ledger_id)

    run_virtual(main())
