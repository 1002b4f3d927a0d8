"""A copy that was found damaged is in doubt, and the local copy stays until that is settled.

Whoever deletes a local copy verifies the other one first, by samples that may miss what a scrub
has found. So what was found is kept in the metadata: until a repair is complete, or all of the
copy was read since and is sound.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.scrubs import BOTH, DEEP, REPAIR, kinds, runner, scrub, scrubber
from tests.unit.offload.test_repair import begun, flip, offloaded, read_back, repaired
from tests.unit.offload.test_scrub import copy_arguments, spoil
from tests.unit.offload.world import STREAM, World
from tests.unit.scheduler.test_scheduler import scheduler
from tierlog.adapters.memory.faults import Faults
from tierlog.model.errors import RefusedError, RetryableError
from tierlog.model.ids import LedgerId
from tierlog.model.offload import OffloadContext, OffloadState
from tierlog.model.policy import Policy
from tierlog.model.scrub import ScrubReport, ScrubWish
from tierlog.ports.objects import ObjectInfo, ObjectStore
from tierlog_scheduler.manifests import BucketManifests
from tierlog_scheduler.scheduler import Scheduler
from tierlog_scheduler.scrubs import ScrubSchedule

S = OffloadState
ENTRIES = [bytes([number]) * 300 for number in range(200)]
UNSAMPLED = 30_000
"""A byte of the data object that no sample of its copy reads."""
LAG_S = 60


async def copied() -> tuple[World, OffloadContext, Scheduler]:
    """Return a ledger in both tiers, and a leader that deletes the local copy after the lag."""
    world, was = await offloaded(ENTRIES, gone=False)
    await world.catalog().policies.set_level(None, Policy(deletion_lag_ms=LAG_S * 1000))
    leader = scheduler(world, manifests=BucketManifests(world.manifests(), world.catalog()))
    await leader.begin()
    return world, was, leader


def damage(world: World, was: OffloadContext, offset: int = UNSAMPLED) -> None:
    """Flip a byte of the data object; the second time: bring it back."""
    assert was.location is not None
    flip(world, was.location.data_key, offset)


async def lead(leader: Scheduler, for_s: float) -> None:
    for _ in range(round(for_s / 10)):
        await leader.run_pass()
        await asyncio.sleep(10)


async def is_local(world: World, was: OffloadContext) -> bool:
    return await world.catalog().ledgers.get(was.ledger_id) is not None


async def goes_after_the_lag(world: World, was: OffloadContext, leader: Scheduler) -> None:
    """The local copy stays for the whole lag from now on, and no longer."""
    await lead(leader, LAG_S)
    assert await is_local(world, was)
    await lead(leader, 30)
    assert (await world.context(was.ledger_id)).state is S.TIER1_DELETED
    assert not await is_local(world, was)
    assert await read_back(world, was.ledger_id) == ENTRIES


async def look(world: World) -> ScrubReport:
    return await scrub(world, DEEP)


async def by_schedule_without_repairs(world: World) -> ScrubReport:
    schedule = ScrubSchedule(repair=False, deep_interval_s=1, interval_s=1, first_s=0)
    run, stop = runner(world, schedule), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(run.run(stop))
        await asyncio.sleep(5)
        stop.set()
    return next(one for one in await run.reports() if one.findings)


async def while_paused(world: World) -> ScrubReport:
    await world.catalog().streams.pause_offload(STREAM)
    report = await scrub(world, BOTH)
    await world.catalog().streams.resume_offload(STREAM)
    return report


async def while_nodes_are_away(world: World) -> ScrubReport:
    found = scrubber(world)

    def away(*_: object) -> None:
        raise RetryableError("no node answers")

    found.repairer._open_ledger = away  # type: ignore[assignment]
    report = ScrubReport(scrub_id=world.ids.uuid(), wish=BOTH, started_ms=1, findings_max=10)
    await found.run(report)
    return report


async def with_entries_in_neither_tier(world: World) -> ScrubReport:
    return await scrub(world, BOTH, damaged_locally=True)


@pytest.mark.parametrize(
    "find",
    [
        look,
        by_schedule_without_repairs,
        while_paused,
        while_nodes_are_away,
        with_entries_in_neither_tier,
    ],
)
def test_what_a_scrub_finds_and_does_not_repair_keeps_the_local_copy(
    find: Callable[[World], Awaitable[ScrubReport]],
):
    async def main():
        world, was, leader = await copied()
        # Behind the middle, which is what the local copy lacks where it is damaged too.
        offset = 80_000 if find is with_entries_in_neither_tier else UNSAMPLED
        damage(world, was, offset)
        await world.offloader().verify(*await copy_arguments(world, was.ledger_id))
        report = await find(world)
        assert report.findings
        assert not any(one.repaired for one in report.findings)
        await lead(leader, 10 * LAG_S)
        assert await is_local(world, was)
        doubted = await world.context(was.ledger_id)
        assert (doubted.state, doubted.uuid) == (S.COMPLETE, was.uuid)
        assert doubted.doubt is not None
        assert doubted.doubt.cause.startswith(report.findings[0].kind.value)
        await repaired(world, was, await scrub(world, BOTH), "the local copy")
        assert (await world.context(was.ledger_id)).doubt is None
        await goes_after_the_lag(world, was, leader)

    run_virtual(main())


def test_a_copy_is_sound_again_once_all_of_it_was_read():
    async def main():
        world, was, leader = await copied()
        # The lag that it has had by now counts no more.
        await lead(leader, LAG_S - 20)
        damage(world, was)
        assert kinds(await scrub(world, DEEP)) == ["damaged-data"]
        # As after the object was brought back from another copy of the bucket.
        damage(world, was)
        others = ScrubWish(repair=True, deep=True, ledgers=frozenset({LedgerId(900)}))
        for wish in (ScrubWish(), others):
            assert kinds(await scrub(world, wish)) == ["damaged-data"]
        # Nor one that came not so far.
        short = await scrub(world, DEEP, deep_s_max=0.0)
        assert short.deep_next is not None
        assert kinds(short) == ["damaged-data"]
        await lead(leader, 10 * LAG_S)
        assert (await world.context(was.ledger_id)).doubt is not None
        assert await is_local(world, was)
        assert kinds(await scrub(world, DEEP)) == []
        assert await world.context(was.ledger_id) == was
        await goes_after_the_lag(world, was, leader)

    run_virtual(main())


def test_a_scrub_that_reads_no_data_tells_of_a_copy_in_doubt_and_repairs_it():
    async def main():
        world, was, leader = await copied()
        damage(world, was)
        assert kinds(await scrub(world, DEEP)) == ["damaged-data"]
        doubted = await world.context(was.ledger_id)
        report = await scrub(world)
        assert (kinds(report), report.remaining) == (["damaged-data"], 1)
        assert "found before, and not mended since: damaged-data" in report.findings[0].cause
        assert await world.context(was.ledger_id) == doubted
        await repaired(world, was, await scrub(world, REPAIR), "the local copy")
        assert kinds(await scrub(world)) == []
        await goes_after_the_lag(world, was, leader)

    run_virtual(main())


def test_what_could_not_be_read_is_neither_damaged_nor_sound():
    async def main():
        world, was, _ = await copied()
        given = Faults(random.Random(1))
        given.outages.add("objects.get_range")
        away = world.bucket.connect(given)
        assert (await scrub(world, DEEP, objects=away)).unread
        assert await world.context(was.ledger_id) == was
        spoil(world, was, "flipped")
        await scrub(world, DEEP)
        doubted = await world.context(was.ledger_id)
        spoil(world, was, "flipped")
        assert (await scrub(world, DEEP, objects=away)).unread
        assert await world.context(was.ledger_id) == doubted

    run_virtual(main())


def test_what_a_verification_before_the_deletion_finds_is_kept_too():
    async def main():
        world, was, leader = await copied()
        # Every sample has the first grain; once it is back no sample tells of what was there.
        damage(world, was, 40)
        await lead(leader, LAG_S + 30)
        damage(world, was, 40)
        damage(world, was)
        await lead(leader, 10 * LAG_S)
        assert await is_local(world, was)
        now = await world.context(was.ledger_id)
        assert now.doubt is not None
        assert "CORRUPT" in now.doubt.cause
        await repaired(world, was, await scrub(world, BOTH), "the local copy")
        await goes_after_the_lag(world, was, leader)

    run_virtual(main())


class BeforeRange:
    """A store at which something happens once, after the last range of a data object was read."""

    def __init__(self, store: ObjectStore, key: str, what: Callable[[], Awaitable[None]]) -> None:
        self._store = store
        self._key = key
        self._what = what

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    async def get_range(self, key: str, start: int, length: int) -> bytes | None:
        body = await self._store.get_range(key, start, length)
        if key == self._key and length > 1000:
            await self._what()
        return body

    async def head(self, key: str) -> ObjectInfo | None:
        return await self._store.head(key)


def test_what_is_found_while_another_one_reads_is_not_taken_back_by_it():
    async def main():
        world, was, _ = await copied()
        assert was.location is not None
        damage(world, was)
        await scrub(world, DEEP)
        damage(world, was)

        async def find() -> None:
            damage(world, was)
            assert kinds(await scrub(world, DEEP)) == ["damaged-data"]

        store = BeforeRange(world.bucket.connect(), was.location.data_key, find)
        report = await scrub(world, DEEP, objects=store)  # type: ignore[arg-type]
        assert kinds(report) == ["damaged-data"]
        assert (await world.context(was.ledger_id)).doubt is not None

    run_virtual(main())


def test_a_local_deletion_that_was_begun_is_called_off():
    async def main():
        world, was, leader = await copied()
        catalog = world.catalog()
        assert was.uuid is not None
        begun_then = await catalog.contexts.begin_tier1_deletion(was.ledger_id, uuid=was.uuid)
        damage(world, was)
        assert kinds(await scrub(world, DEEP)) == ["damaged-data"]
        now = await world.context(was.ledger_id)
        assert replace(now, doubt=None) == was
        # Whoever was about to end it, too.
        for late in (begun_then, now):
            with pytest.raises(RefusedError):
                await catalog.ledgers.delete_tier1(was.ledger_id, late)
        with pytest.raises(RefusedError, match="found damaged: damaged-data") as refused:
            await catalog.contexts.begin_tier1_deletion(was.ledger_id, uuid=was.uuid)
        assert "tierlog scrub --repair --deep" in refused.value.remedy
        await lead(leader, 10 * LAG_S)
        assert await is_local(world, was)

    run_virtual(main())


def test_a_repair_that_is_given_up_leaves_the_copy_in_doubt():
    async def main():
        world, was, leader = await copied()
        repairing = await begun(world, was, 5)
        assert repairing.repair is not None
        now = await world.catalog().contexts.give_up_repair(
            was.ledger_id, uuid=repairing.repair.uuid, error="some entries are in no copy"
        )
        assert (now.state, now.uuid) == (S.COMPLETE, was.uuid)
        assert now.doubt is not None
        await lead(leader, 10 * LAG_S)
        assert await is_local(world, was)

    run_virtual(main())


def test_metadata_that_can_not_be_changed_are_told_of():
    async def main():
        world, was, _ = await copied()
        damage(world, was)
        given = Faults(random.Random(1))
        given.outages.add("metadata.set")
        report = ScrubReport(scrub_id=world.ids.uuid(), wish=DEEP, started_ms=1, findings_max=10)
        await scrubber(world, given).run(report)
        assert kinds(report) == ["damaged-data"]
        (unread,) = report.unread
        assert "could not be kept in its metadata" in unread
        assert (await world.context(was.ledger_id)).doubt is None

    run_virtual(main())
