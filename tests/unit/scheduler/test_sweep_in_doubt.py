"""What attempts left of a ledger whose copy is damaged: a repair may have to read it."""

import asyncio
from unittest.mock import patch
from uuid import UUID

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.scrubs import scrub
from tests.unit.offload.test_drivers import DrivenWorld, Shelf, drivers_of
from tests.unit.offload.world import STREAM, ListHandle, World
from tests.unit.scheduler.test_scheduler import ENTRIES, HOUR, scheduler
from tierlog.adapters.memory.faults import Faults, no_faults
from tierlog.model.ids import LedgerId
from tierlog.model.offload import GONE_FROM_TIER1
from tierlog.model.policy import Policy
from tierlog.model.scrub import FindingKind, ScrubWish
from tierlog.offload.driver import DRIVER
from tierlog.offload.manifests import WHOLE_KEPT, BucketGuard
from tierlog.ports.spending import Cause, Spent
from tierlog_scheduler.manifests import BucketManifests

POLICY = Policy(offload_time_ms=0, deletion_lag_ms=60_000)
FIRST, SECOND = UUID(int=9), UUID(int=10)


async def lead(world: World, seconds: float, given: Faults | None = None) -> None:
    """Let one leader lead for so long."""
    stop = asyncio.Event()
    gate = BucketManifests(world.manifests(given), world.catalog(given))
    async with asyncio.TaskGroup() as group:
        group.create_task(scheduler(world, given, manifests=gate).run(stop))
        await asyncio.sleep(seconds)
        stop.set()


async def begin_repair(world: World, ledger_id: LedgerId, uuid: UUID) -> None:
    contexts = world.catalog().contexts
    damaged = (await world.context(ledger_id)).uuid
    assert damaged is not None
    location = world.offloader().location(ledger_id, uuid)
    await contexts.begin_repair(
        ledger_id, damaged=damaged, uuid=uuid, location=location, worker="w"
    )


def test_what_a_repair_reads_is_not_swept_under_it() -> None:
    """The one before it ended all its uploads, and died; since then the damaged copy has gone."""

    async def main() -> None:
        world = World()
        claimed = await world.stream(policy=POLICY)
        ledger_id = await world.seal(claimed, ENTRIES)
        metadata = await world.catalog().ledgers.get(ledger_id)
        await world.worker().handle(world.request(claimed, ledger_id))
        await lead(world, 600)
        before = await world.context(ledger_id)
        assert before.state in GONE_FROM_TIER1
        assert before.uuid is not None
        await begin_repair(world, ledger_id, FIRST)
        handle = ListHandle(ledger_id, world.ledgers[ledger_id], metadata)
        await world.offloader().offload(handle, FIRST, {})
        for key in [one for one in world.bucket.objects if str(before.uuid) in one]:
            del world.bucket.objects[key]
        assert (await scrub(world)).counts[FindingKind.POINTS_NOWHERE] == 1
        # At it now: what it copies is the abandoned one's.
        await begin_repair(world, ledger_id, SECOND)
        assert (await world.context(ledger_id)).swept_at(FIRST) == 0
        await lead(world, HOUR)
        context = await world.context(ledger_id)
        assert not await BucketGuard(world.manifests()).may_clean(context, FIRST)
        report = await scrub(world, ScrubWish(repair=True))
        (found,) = [one for one in report.findings if one.kind is FindingKind.POINTS_NOWHERE]
        assert (found.repaired, found.lost) == ("copied anew, from what is good in tier 2", ())
        # Once a sound copy is complete nobody needs the others.
        await lead(world, HOUR)
        context = await world.context(ledger_id)
        assert (context.abandoned, context.doubt) == ((), None)
        assert not [one for one in world.bucket.objects if str(FIRST) in one]

    run_virtual(main(), until_s=1e6)


def test_what_is_kept_for_long_is_not_asked_about_in_each_pass() -> None:
    async def main() -> None:
        world = World()
        claimed = await world.stream(policy=Policy(offload_time_ms=-1))
        ledger_id = await world.seal(claimed, ENTRIES)
        metadata = await world.catalog().ledgers.get(ledger_id)
        location = world.offloader().location(ledger_id, FIRST)
        await world.catalog().contexts.begin_attempt(
            ledger_id, uuid=FIRST, location=location, worker="w"
        )
        handle = ListHandle(ledger_id, world.ledgers[ledger_id], metadata)
        await world.offloader().offload(handle, FIRST, {})
        await world.catalog().contexts.give_up_attempt(ledger_id, uuid=FIRST)
        counted = no_faults()
        calls: list[str] = []
        counted.calls = calls
        await lead(world, HOUR, counted)
        assert (await world.context(ledger_id)).swept_at(FIRST) == 0
        # 360 passes.
        assert 10 <= calls.count("objects.head") <= 14
        # As all that is asked of the store, for something and for a stream.
        spent = world.meter.amounts
        assert Spent(STREAM, Cause.SWEEP, "head_object") in spent
        assert Cause.OTHER not in {one.cause for one in spent}
        assert calls.count("objects.list") <= 20
        # It goes once there is a whole copy, be it a little later.
        await world.worker().handle(world.request(claimed, ledger_id))
        await lead(world, HOUR)
        assert (await world.context(ledger_id)).abandoned == ()

    run_virtual(main(), until_s=1e6)


def test_what_another_driver_ended_stays_until_there_is_a_sound_copy() -> None:
    """Whether it is whole its driver alone knows: no key of it is one of the bucket's."""

    async def main() -> None:
        world, shelf = DrivenWorld(), Shelf()
        world.driven_by = drivers_of(world, Shelf.name, shelf)
        claimed = await world.stream(policy=Policy(offload_time_ms=-1))
        ledger_id = await world.seal(claimed, ENTRIES)
        metadata = await world.catalog().ledgers.get(ledger_id)
        assert metadata is not None
        location = shelf.location(ledger_id, FIRST)
        await world.catalog().contexts.begin_attempt(
            ledger_id, uuid=FIRST, location=location, worker="w"
        )
        await shelf.offload(world.open_ledger(ledger_id, metadata), FIRST, {})
        await world.catalog().contexts.give_up_attempt(ledger_id, uuid=FIRST)
        await lead(world, HOUR)
        assert FIRST in shelf.kept
        await world.worker().handle(world.request(claimed, ledger_id))
        await lead(world, HOUR)
        assert shelf.kept.keys() == {(await world.context(ledger_id)).uuid}

    run_virtual(main(), until_s=1e6)


def test_a_copy_is_made_also_where_what_is_left_of_another_one_can_not_be_looked_at() -> None:
    async def main() -> None:
        world, away = World(), no_faults()
        away.outages = {"objects.head"}
        claimed = await world.stream()
        ledger_id = await world.seal(claimed, ENTRIES)
        location = world.offloader().location(ledger_id, FIRST)
        await world.catalog().contexts.begin_attempt(
            ledger_id, uuid=FIRST, location=location, worker="w"
        )
        guard = BucketGuard(world.manifests(away))
        with patch.object(BucketGuard, "may_clean", guard.may_clean):
            await world.worker().handle(world.request(claimed, ledger_id))
        context = await world.context(ledger_id)
        assert (context.complete, context.swept_at(FIRST)) == (True, 0)

    run_virtual(main(), until_s=1e6)


def test_who_dies_behind_its_last_byte_again_and_again_does_not_fill_the_bucket() -> None:
    async def main() -> None:
        world = World()
        claimed = await world.stream(policy=Policy(offload_time_ms=-1))
        ledger_id = await world.seal(claimed, ENTRIES)
        metadata = await world.catalog().ledgers.get(ledger_id)
        assert metadata is not None
        died = [UUID(int=100 + number) for number in range(2 * WHOLE_KEPT)]
        for uuid in died:
            await world.catalog().contexts.begin_attempt(
                ledger_id,
                uuid=uuid,
                location=world.offloader().location(ledger_id, uuid),
                worker="w",
            )
            await world.offloader().offload(world.open_ledger(ledger_id, metadata), uuid, {})
        await world.catalog().contexts.give_up_attempt(ledger_id, uuid=died[-1])
        await lead(world, HOUR)
        left = [one.uuid for one in (await world.context(ledger_id)).abandoned]
        assert left == died[-WHOLE_KEPT:]
        lying = [uuid for uuid in died if any(str(uuid) in key for key in world.bucket.objects)]
        assert lying == left

    run_virtual(main(), until_s=1e6)


def test_of_which_nobody_knows_whether_they_are_whole_do_not_count_among_those() -> None:
    """Tries by another driver, behind a whole copy in the bucket that may be the only one."""

    async def main() -> None:
        world, shelf = DrivenWorld(), Shelf()
        claimed = await world.stream(policy=Policy(offload_time_ms=-1))
        ledger_id = await world.seal(claimed, ENTRIES)
        metadata = await world.catalog().ledgers.get(ledger_id)
        assert metadata is not None
        contexts = world.catalog().contexts
        world.driven_by = drivers_of(world, DRIVER, shelf)
        place = world.offloader().location(ledger_id, FIRST)
        await contexts.begin_attempt(ledger_id, uuid=FIRST, location=place, worker="w")
        await world.offloader().offload(world.open_ledger(ledger_id, metadata), FIRST, {})
        failed = [UUID(int=100 + number) for number in range(WHOLE_KEPT)]
        for uuid in failed:
            place = shelf.location(ledger_id, uuid)
            await contexts.begin_attempt(ledger_id, uuid=uuid, location=place, worker="w")
        await contexts.give_up_attempt(ledger_id, uuid=failed[-1])
        await lead(world, HOUR)
        left = [one.uuid for one in (await world.context(ledger_id)).abandoned]
        assert left == [FIRST, *failed]
        assert any(str(FIRST) in key for key in world.bucket.objects)

    run_virtual(main(), until_s=1e6)


def test_what_nothing_names_any_more_is_cleaned_without_a_look_at_what_others_left() -> None:
    async def main() -> None:
        world, away = World(), no_faults()
        away.outages = {"objects.head"}
        claimed = await world.stream()
        ledger_id = await world.seal(claimed, ENTRIES)
        location = world.offloader().location(ledger_id, FIRST)
        await world.catalog().contexts.begin_attempt(
            ledger_id, uuid=FIRST, location=location, worker="w"
        )
        await world.catalog().contexts.give_up_attempt(ledger_id, uuid=FIRST)
        guard = BucketGuard(world.manifests(away))
        context = await world.context(ledger_id)
        assert not await guard.may_clean(context, FIRST)
        assert await guard.may_clean(context, SECOND)

    run_virtual(main(), until_s=1e6)
