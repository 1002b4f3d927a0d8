"""What the metrics say of the bucket: the leader alone, and by what all scrubs have found."""

import asyncio
import random
from collections.abc import Mapping
from dataclasses import replace
from unittest.mock import patch
from uuid import UUID

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.scrubs import plant, runner, scrubber
from tests.unit.offload.test_scrub import offloaded, spoil
from tests.unit.offload.test_scrub_attributes import grown
from tests.unit.offload.world import STREAM, World
from tests.unit.scheduler.manifests_kit import Leader
from tests.unit.scheduler.test_scheduler import scheduler
from tierlog.adapters.memory.faults import Faults, no_faults
from tierlog.format.paths import stream_path
from tierlog.format.scrub_records import encode_report
from tierlog.model.scrub import FAULTS, FindingKind, ScrubReport, ScrubState, ScrubWish
from tierlog_scheduler.manifests import RESTORED, UNREAD
from tierlog_scheduler.metrics import SchedulerCollector
from tierlog_scheduler.scrubs import LOOK_AGAIN_S, ScrubRunner, ScrubSchedule

FINDINGS = "tierlog_scheduler_scrub_findings"
ORPHANS = "tierlog_offload_orphan_objects"
STOPPED = "tierlog_scheduler_deletions_stopped_streams"
NEVER = ScrubSchedule(interval_s=0)
DEEP = ScrubWish(deep=True)


async def scrubbed(found: ScrubRunner, wish: ScrubWish) -> ScrubReport:
    """Have a scrub made, to its end."""
    report = await found.ask(wish)
    await run_for(found, 60)
    assert report.ended_ms
    return report


def without_number(report: ScrubReport) -> bytes:
    """Return a report as the release before keeps it."""
    return encode_report(replace(report, number=0))


async def run_for(found: ScrubRunner, seconds: float) -> None:
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(found.run(stop))
        await asyncio.sleep(seconds)
        stop.set()


def told(
    found: ScrubRunner, *, leader: Leader | None = None, leading: bool = True
) -> dict[str, Mapping[str, float]]:
    """Return what a process tells, by metric and label."""
    world = World()
    process, gate = scheduler(world), (leader or Leader(world)).gate
    process.leading = process.decided = leading
    return {
        metric.name: {
            next(iter(sample.labels.values()), ""): sample.value for sample in metric.samples
        }
        for metric in SchedulerCollector(process, gate, found).collect()
    }


def test_what_is_no_fault_is_counted_and_alerts_nobody():
    async def main():
        world, _ = await offloaded()
        await plant(world, 5)
        await plant(world, 6, cluster_id=UUID(int=3))
        found = runner(world, NEVER)
        report = await scrubbed(found, ScrubWish())
        assert report.counts[FindingKind.TOO_YOUNG] == report.counts[FindingKind.FOREIGN] == 1
        assert report.is_clean
        assert told(found)[FINDINGS] == {kind.value: 0 for kind in FAULTS}
        world.clock.advance(30 * 3600)
        report = await scrubbed(found, ScrubWish())
        left = told(found)
        assert sum(left[FINDINGS].values()) == left[FINDINGS]["orphan-objects"] == 1
        assert left[ORPHANS] == {"": 2}
        assert report.remaining == 1

    run_virtual(main())


def test_who_leads_no_more_tells_nothing_and_who_leads_next_knows_what_was_found():
    async def main():
        world, made = await offloaded()
        await plant(world, 5)
        world.clock.advance(30 * 3600)
        first, leads = runner(world, NEVER), False
        spoil(world, await world.context(made[0]), "flipped")
        await scrubbed(first, DEEP)
        second = runner(world, NEVER, leading=lambda: leads)
        await run_for(second, 60)
        for one in (first, second):
            assert not {FINDINGS, ORPHANS, STOPPED} & told(one, leading=False).keys()
        leads = True
        await run_for(second, 60)
        left = told(second)
        assert left == told(first)
        assert (left[FINDINGS]["damaged-data"], left[ORPHANS]) == (1, {"": 2})
        # What others do is heard of, too.
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(second.run(stop))
            await asyncio.sleep(1)
            await scrubbed(first, ScrubWish(repair=True))
            await asyncio.sleep(LOOK_AGAIN_S)
            assert not sum(told(second)[FINDINGS].values())
            leads = False
            await asyncio.sleep(LOOK_AGAIN_S)
            assert second.faults is None
            stop.set()

    run_virtual(main())


def test_what_a_deep_scrub_found_is_left_until_it_is_mended_whoever_looks_in_between():
    async def main():
        world, base, _ = await grown()
        context = await world.context(next(iter(world.ledgers)))
        spoil(world, context, "flipped")
        world.bucket.damage(base.objects[-1].key, 9)
        found = runner(world, NEVER)
        assert (await scrubbed(found, DEEP)).remaining == 2
        # More than are kept, but for the newest deep one.
        for wish in (*[ScrubWish()] * 22, ScrubWish(ledgers=frozenset())):
            await scrubbed(found, wish)
            assert told(found)[FINDINGS]["damaged-data"] == 2
        assert len(await world.catalog().scrubs.reports()) < 22
        await scrubbed(found, ScrubWish(repair=True))
        assert told(found)[FINDINGS]["damaged-data"] == 1
        world.bucket.damage(base.objects[-1].key, 9)
        await scrubbed(found, DEEP)
        assert told(found)[FINDINGS]["damaged-data"] == 0

    run_virtual(main(), until_s=1e6)


def test_what_a_scrub_could_not_look_at_is_as_it_was_found_before():
    """An alert that went green as a stream could not be read would say that all is well."""

    async def main():
        world, made = await offloaded()
        await plant(world, 5)
        world.clock.advance(30 * 3600)
        location = (await world.context(made[0])).location
        assert location is not None
        lost = world.bucket.objects.pop(location.index_key)
        found = runner(world, NEVER)
        assert (await scrubbed(found, ScrubWish())).remaining == 2
        left = told(found)
        assert (left[FINDINGS]["missing-object"], left[ORPHANS]) == (1, {"": 2})
        store, path = world.catalog().store, stream_path(STREAM)
        node = await store.get(path)
        assert node is not None
        await store.set(path, b"of no version", version=node.version)
        # More than are kept, but for the one that knows.
        for _ in range(22):
            report = await scrubbed(found, ScrubWish(repair=True))
            assert report.unread
            assert not report.counts[FindingKind.MISSING_OBJECT]
            assert told(found) == left
        # Who leads next has not seen it.
        second = runner(world, NEVER)
        await run_for(second, 60)
        assert told(second) == left
        # Whoever is alerted finds what it is about.
        for one in (found, second):
            kinds = {each.kind for report in await one.reports() for each in report.findings}
            assert FindingKind.MISSING_OBJECT in kinds
        await store.set(path, node.data, version=-1)
        world.bucket.objects[location.index_key] = lost
        await scrubbed(found, ScrubWish(repair=True))
        assert not sum(told(found)[FINDINGS].values())
        assert told(found)[ORPHANS] == {"": 0}
        assert len(await world.catalog().scrubs.reports()) <= 21

    run_virtual(main(), until_s=1e6)


def test_streams_of_which_nothing_is_deleted_are_told_by_the_leader_alone():
    async def main():
        world = World()
        await world.stream()
        given = Faults(random.Random(1))
        leader, found = Leader(world, given), runner(world)
        given.outages.add("objects.list")
        await leader.visit()
        assert told(found, leader=leader)[STOPPED] == {RESTORED: 0, UNREAD: 1}
        assert STOPPED not in told(found, leader=leader, leading=False)
        given.outages.clear()
        await leader.visit()
        assert told(found, leader=leader)[STOPPED] == {RESTORED: 0, UNREAD: 0}

    run_virtual(main())


@pytest.mark.parametrize("was_ahead", [False, True])
def test_the_last_scrub_counts_whatever_the_clock_was_like_when_it_began(was_ahead: bool):
    """A clock that was ahead is set right between them, or one that was right goes back."""
    off_s = 400 * 86_400.0

    async def main():
        world, (ledger_id,) = await offloaded()
        damaged = await world.context(ledger_id)
        found = runner(world, NEVER)
        if was_ahead:
            world.clock.jump_wall(off_s)
        assert (await scrubbed(found, DEEP)).is_clean
        spoil(world, damaged, "flipped")
        world.clock.jump_wall(-off_s)
        report = await scrubbed(found, DEEP)
        assert report.counts == {FindingKind.DAMAGED_DATA: 1}
        other = runner(world, NEVER)
        for one in (found, other):
            newest, _ = await one.reports()
            assert newest.scrub_id == report.scrub_id
            assert told(one)[FINDINGS][FindingKind.DAMAGED_DATA] == 1

    run_virtual(main())


def test_what_a_leader_of_the_release_before_found_in_a_rolling_upgrade_counts():
    """Its reports have no number: they are the newest where nobody has scrubbed since."""

    async def main():
        world, made = await offloaded()
        found, before = runner(world, NEVER), runner(world, NEVER)
        assert (await scrubbed(found, ScrubWish())).is_clean
        location = (await world.context(made[0])).location
        assert location is not None
        lost = world.bucket.objects.pop(location.index_key)
        with patch("tierlog.catalog.scrubs.encode_report", without_number):
            old = await scrubbed(before, ScrubWish())
        assert old.counts == {FindingKind.MISSING_OBJECT: 1}
        for one in (found, runner(world, NEVER)):
            newest, _ = await one.reports()
            assert (newest.scrub_id, newest.number) == (old.scrub_id, 0)
            assert told(one)[FINDINGS][FindingKind.MISSING_OBJECT] == 1
        assert [one.number for one in await world.catalog().scrubs.reports()] == [0, 1]
        world.bucket.objects[location.index_key] = lost
        again = await scrubbed(found, ScrubWish(repair=True))
        assert again.number == 2
        assert [one.number for one in await found.reports()] == [2, 0, 1]
        assert not sum(told(found)[FINDINGS].values())

    run_virtual(main())


def test_one_that_could_not_be_kept_is_not_the_newest_for_ever():
    async def main():
        world = World()
        await world.stream()
        given = no_faults()
        found = ScrubRunner(
            scrubber(world, given),
            world.catalog(given).scrubs,
            leading=lambda: True,
            clock=world.clock,
            ids=world.ids,
            schedule=NEVER,
        )
        given.outages = {"metadata"}
        failed = await found.ask(ScrubWish())
        await run_for(found, 60)
        assert (failed.state, failed.number) == (ScrubState.FAILED, 0)
        given.outages = set()
        done = await found.ask(ScrubWish())
        await run_for(found, 60)
        assert done.is_clean
        for _ in range(2):
            assert [one.scrub_id for one in await found.reports()] == [
                done.scrub_id,
                failed.scrub_id,
            ]

    run_virtual(main())
