"""When scrubs run, one at a time, what is kept of them, and the same over REST."""

import asyncio
import random
from itertools import pairwise
from uuid import UUID

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.scrubs import plant, runner
from tests.unit.offload.test_scrub import offloaded, spoil
from tests.unit.offload.world import CLUSTER, World
from tests.unit.scheduler.test_api import ask
from tierlog.adapters.memory.clock import SimClock
from tierlog.adapters.memory.faults import FaultRates, Faults
from tierlog.format import paths
from tierlog.format.scrub_records import REPORT_LEN_MAX
from tierlog.model.errors import RefusedError, RetryableError
from tierlog.model.ids import LedgerId
from tierlog.model.scrub import (
    KINDS,
    SILENT_S_MAX,
    DeepPlace,
    Finding,
    FindingKind,
    ScrubReport,
    ScrubState,
    ScrubTimes,
    ScrubWish,
)
from tierlog.offload.scrub_crew import Crew
from tierlog.runtime.http import build_http_app, serve_http
from tierlog_scheduler.scrubs import ScrubRunner, ScrubSchedule
from tierlog_scheduler.scrubs_api import ScrubsApi, ScrubSummary

HOUR = 3600.0


async def run_for(world: World, found: ScrubRunner, seconds: float) -> None:
    """Let it run for so long."""
    del world
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(found.run(stop))
        await asyncio.sleep(seconds)
        stop.set()


def test_of_a_restored_cluster_no_scrub_by_schedule_repairs_until_one_is_asked_to():
    """What no metadata name there may be what did not come back."""

    async def main():
        world, _ = await offloaded(1)
        catalog = world.catalog()
        await catalog.store.create(paths.RESTORED, b"")
        kept = await plant(world, 5)
        world.clock.advance(100 * HOUR)
        found = runner(world, ScrubSchedule(interval_s=HOUR))
        await run_for(world, found, 3 * HOUR)
        reports = await found.reports()
        assert len(reports) == 3
        for one in reports:
            assert one.state is ScrubState.DONE
            assert not one.wish.repair
            assert one.counts[FindingKind.ORPHAN_OBJECTS] == 1
            assert "tierlog scrub --repair" in one.deletions_stopped, "else who would know?"
        for wish in (ScrubWish(), ScrubWish(repair=True, ledgers=frozenset({LedgerId(0)}))):
            await found.ask(wish)
            await run_for(world, found, 60)
        assert kept in world.bucket.objects
        assert await catalog.scrubs.is_restored()
        await found.ask(ScrubWish(repair=True))
        await run_for(world, found, 60)
        assert kept not in world.bucket.objects
        assert not await catalog.scrubs.is_restored()
        again = await plant(world, 6)
        world.clock.advance(100 * HOUR)
        await run_for(world, found, 2 * HOUR)
        assert again not in world.bucket.objects
        assert not (await found.reports())[0].deletions_stopped

    run_virtual(main())


@pytest.mark.parametrize(("leading", "counts"), [(True, (25, 3)), (False, (0, 0))])
def test_the_leader_scrubs_by_schedule_and_nobody_else(leading: bool, counts: tuple[int, int]):
    async def main():
        world = World()
        await world.stream()
        schedule = ScrubSchedule(
            interval_s=HOUR, deep_interval_s=8 * HOUR, first_s=600, reports_max=100
        )
        found = runner(world, schedule, leading=leading)
        await run_for(world, found, 25 * HOUR)
        assert len(await found.reports()) == counts[0]
        reports = await found.reports()
        assert sum(one.wish.deep for one in reports) == counts[1]
        assert all(one.is_clean and one.wish.repair for one in reports)

    run_virtual(main())


def test_what_is_kept_is_bounded():
    async def main():
        world = World()
        await world.stream()
        found = runner(world, ScrubSchedule(interval_s=60, reports_max=3, repair=False))
        await run_for(world, found, HOUR)
        assert len(await found.reports()) == 3
        reports = await found.reports()
        assert reports[0].started_ms > reports[-1].started_ms
        with pytest.raises(RefusedError, match="no report"):
            await found.report(UUID(int=1))

    run_virtual(main())


def test_one_that_fails_is_told_and_the_next_one_comes():
    async def main():
        world = World()
        await world.stream()
        given = Faults(random.Random(1), rates=FaultRates(refused=1.0))
        found = runner(world, ScrubSchedule(interval_s=60), faults=given)
        await run_for(world, found, 90)
        reports = await found.reports()
        assert [one.state for one in reports] == [ScrubState.FAILED]
        assert reports[0].error
        assert not reports[0].is_clean
        given.rates = FaultRates()
        await run_for(world, found, 70)
        assert (await found.reports())[0].is_clean

    run_virtual(main())


def test_it_is_asked_for_one_at_a_time_by_anybody():
    async def main():
        world = World()
        await world.stream()
        orphan = await plant(world, 5)
        world.clock.advance(30 * HOUR)
        found = runner(world, ScrubSchedule(interval_s=0), leading=False)
        first = await found.ask(ScrubWish())
        with pytest.raises(RetryableError, match="still at work"):
            await found.ask(ScrubWish())
        await run_for(world, found, 60)
        assert (first.state, first.remaining, first.is_clean) == (ScrubState.DONE, 1, False)
        second = await found.ask(ScrubWish(repair=True))
        await run_for(world, found, 60)
        assert second.is_clean
        assert orphan not in world.bucket.objects
        assert await found.report(second.scrub_id) is second

    run_virtual(main())


def test_a_scrub_that_is_cut_short_says_so():
    async def main():
        world = World()
        await world.stream()
        for number in range(200):
            await plant(world, 100 + number, 900 + number)
        found = runner(world)
        report = await found.ask(ScrubWish(repair=True))
        await run_for(world, found, 1)
        await asyncio.sleep(1)
        assert (report.state, report.error) == (ScrubState.FAILED, "the process ended")

    run_virtual(main())


def test_another_leader_has_the_reports_and_goes_on_with_the_interval():
    async def main():
        world = World()
        await world.stream()
        for number in range(3):
            await plant(world, 100 + number, 900 + number)
        world.clock.advance(48 * HOUR)
        schedule = ScrubSchedule(
            interval_s=6 * HOUR, deep_interval_s=12 * HOUR, first_s=600, repair=False
        )
        first = runner(world, schedule)
        await run_for(world, first, HOUR)
        assert [one.remaining for one in await first.reports()] == [3]
        told = await world.catalog().scrubs.reports()
        # It died; the next one leads for a while.
        second = runner(world, schedule)
        assert await second.reports() == told
        assert (await second.report(told[0].scrub_id)).findings == told[0].findings
        await run_for(world, second, 5 * HOUR)
        assert await second.reports() == told
        await run_for(world, second, HOUR)
        assert len(await second.reports()) == 2
        third = runner(world, schedule)
        await run_for(world, third, 24 * HOUR)
        found = await third.reports()
        assert [one.wish.deep for one in found] == [False, True, False, True, False, False]
        begun = [one.started_ms for one in reversed(found)]
        assert all(6 * HOUR <= (b - a) / 1000 < 6.1 * HOUR for a, b in pairwise(begun))

    run_virtual(main())


def test_whichever_scheduler_is_asked_knows_of_a_scrub_that_another_one_does():
    async def main():
        world, made = await offloaded(1)
        copy = (await world.context(made[0])).copy
        assert copy is not None
        # It takes longer than anybody may be silent.
        slow = {"bytes_per_s": copy.data_len / HOUR}
        never = ScrubSchedule(interval_s=0)
        first, second = runner(world, never, slow=slow), runner(world)
        begun = await first.ask(ScrubWish(deep=True))
        assert (await second.report(begun.scrub_id)).state is ScrubState.RUNNING
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(first.run(stop))
            await asyncio.sleep(0.9 * HOUR)
            asked = await second.report(begun.scrub_id)
            assert (asked.state, asked.ledgers) == (ScrubState.RUNNING, 1)
            await asyncio.sleep(0.3 * HOUR)
            stop.set()
        (ended,) = await second.reports()
        assert (ended.scrub_id, ended.state) == (begun.scrub_id, ScrubState.DONE)
        assert ended.is_clean

    run_virtual(main())


def test_a_scrub_whose_scheduler_was_killed_is_soon_told_as_failed():
    async def main():
        world, made = await offloaded(1)
        copy = (await world.context(made[0])).copy
        assert copy is not None
        killed = runner(world, slow={"bytes_per_s": copy.data_len / HOUR})
        begun = await killed.ask(ScrubWish(deep=True))
        await run_for(world, killed, 60)
        second = runner(world, leading=False)
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            # From when it begins it looks, whether it is asked or not.
            group.create_task(second.run(stop))
            await asyncio.sleep(SILENT_S_MAX + 2)
            asked = await second.report(begun.scrub_id)
            stop.set()
        assert asked.state is ScrubState.FAILED
        assert "nothing was heard of it" in asked.error
        assert not asked.is_clean

    run_virtual(main())


@pytest.mark.parametrize("hours", [5, -5])
def test_whether_a_scrub_is_at_work_is_told_by_no_wall_clock(hours: float):
    async def main():
        world, made = await offloaded(1)
        copy = (await world.context(made[0])).copy
        assert copy is not None
        first = runner(world, slow={"bytes_per_s": copy.data_len / HOUR})
        clock = SimClock()
        clock.jump_wall(hours * HOUR)
        second = runner(world, clock=clock)
        begun = await first.ask(ScrubWish(deep=True))

        async def told() -> ScrubState:
            return (await second.report(begun.scrub_id)).state

        stop = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(first.run(stop))
            for _ in range(3):
                assert await told() is ScrubState.RUNNING
                await asyncio.sleep(SILENT_S_MAX)
            clock.jump_wall(-2 * hours * HOUR)
            assert await told() is ScrubState.RUNNING
            stop.set()
        assert await told() is ScrubState.RUNNING
        await asyncio.sleep(SILENT_S_MAX - 1)
        assert await told() is ScrubState.RUNNING
        await asyncio.sleep(2)
        assert await told() is ScrubState.FAILED

    run_virtual(main())


@pytest.mark.parametrize("hours", [0.5, 5, 1000])
def test_a_scrub_that_was_begun_by_a_clock_ahead_holds_up_none_behind_it(hours: float):
    async def main():
        world = World()
        await world.stream()
        ahead = world.clock.wall_ms() + round(hours * HOUR * 1000)
        await world.catalog().scrubs.save_times(ScrubTimes(begun_ms=ahead, deep_begun_ms=ahead))
        schedule = ScrubSchedule(
            interval_s=HOUR, deep_interval_s=8 * HOUR, first_s=600, reports_max=100
        )
        found = runner(world, schedule)
        await run_for(world, found, 24 * HOUR)
        reports = await found.reports()
        assert len(reports) == 24
        assert [24 - at for at, one in enumerate(reports) if one.wish.deep] == [17, 9, 1]

    run_virtual(main())


def test_a_clock_that_goes_back_lengthens_the_interval_of_no_other_leader():
    async def main():
        world = World()
        await world.stream()
        begun = world.clock.wall_ms() - round(10 * HOUR * 1000)
        await world.catalog().scrubs.save_times(ScrubTimes(begun_ms=begun))
        clock = SimClock()
        schedule = ScrubSchedule(interval_s=24 * HOUR, deep_interval_s=0, first_s=600)
        found = runner(world, schedule, clock=clock)
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(found.run(stop))
            await asyncio.sleep(HOUR)
            clock.jump_wall(-5 * HOUR)
            await asyncio.sleep(12.9 * HOUR)
            assert not await found.reports()
            await asyncio.sleep(0.2 * HOUR)
            assert len(await found.reports()) == 1
            stop.set()

    run_virtual(main())


@pytest.mark.parametrize("hours", [-5, 5])
def test_a_jump_between_two_scrubs_holds_up_neither_kind(hours: float):
    async def main():
        world = World()
        await world.stream()
        schedule = ScrubSchedule(interval_s=24 * HOUR, deep_interval_s=72 * HOUR, first_s=600)
        clock = SimClock()
        found = runner(world, schedule, clock=clock)
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(found.run(stop))
            await asyncio.sleep(HOUR)
            clock.jump_wall(hours * HOUR)
            await asyncio.sleep(24 * HOUR)
            assert len(await found.reports()) == 2
            await asyncio.sleep(48 * HOUR)
            stop.set()
        reports = await found.reports()
        assert [one.wish.deep for one in reversed(reports)] == [False, False, False, True]

    run_virtual(main())


def test_who_becomes_leader_just_before_the_next_one_keeps_the_interval():
    async def main():
        world = World()
        await world.stream()
        leader = ["first"]
        schedule = ScrubSchedule(interval_s=24 * HOUR, first_s=600)
        second = runner(world, schedule, leading=lambda: leader == ["second"])
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            # It looks, each time, just before the first one does.
            group.create_task(second.run(stop))
            await asyncio.sleep(5)
            first = runner(world, schedule, leading=lambda: leader == ["first"])
            group.create_task(first.run(stop))
            await asyncio.sleep(600 + 24 * HOUR - 2)
            leader[:] = ["second"]
            await asyncio.sleep(2 * HOUR)
            stop.set()
        begun = [one.started_ms for one in await second.reports()]
        assert len(begun) == 2
        assert 24 <= (begun[0] - begun[1]) / 1000 / HOUR < 24.1

    run_virtual(main())


def test_one_that_fails_does_not_wait_for_its_interval_to_come_again():
    async def main():
        world = World()
        await world.stream()
        given = Faults(random.Random(1), rates=FaultRates(refused=1.0))
        found = runner(world, ScrubSchedule(interval_s=24 * HOUR, first_s=60), faults=given)
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(found.run(stop))
            await asyncio.sleep(0.5 * HOUR)
            given.rates = FaultRates()
            await asyncio.sleep(2 * HOUR)
            stop.set()
        assert [one.state for one in await found.reports()] == [ScrubState.DONE, ScrubState.FAILED]

    run_virtual(main())


def test_a_deep_scrub_that_ran_out_of_time_is_gone_on_with_by_the_next_leader():
    async def main():
        world, made = await offloaded(4)
        copy = (await world.context(made[0])).copy
        assert copy is not None
        slow = {"bytes_per_s": copy.data_len / 10, "deep_s_max": 15}
        schedule = ScrubSchedule(interval_s=HOUR, deep_interval_s=HOUR / 2, first_s=60)
        await run_for(world, runner(world, schedule, slow=slow), 1.5 * HOUR)
        newest = (await runner(world).reports())[0]
        assert newest.deep_next is not None
        assert newest.deep_next.ledger_id == made[2]
        # At the next leader's pace.
        await run_for(world, runner(world, schedule), HOUR)
        again = (await runner(world).reports())[0]
        assert (again.wish.deep, again.deep_next) == (True, None)
        assert again.bytes_read == 2 * copy.data_len

    run_virtual(main())


def test_who_asks_for_a_deep_scrub_gets_all_of_it_wherever_others_stopped():
    async def main():
        world, made = await offloaded(4)
        copy = (await world.context(made[0])).copy
        assert copy is not None
        slow = {"bytes_per_s": copy.data_len / 10, "deep_s_max": 15}
        schedule = ScrubSchedule(interval_s=HOUR, deep_interval_s=HOUR / 2, first_s=60)
        found = runner(world, schedule, slow=slow)
        await run_for(world, found, 1.5 * HOUR)
        (newest, *_) = await found.reports()
        assert newest.deep_next is not None
        assert not newest.is_clean, "two of four were not read"
        told = await world.catalog().scrubs.times()
        spoil(world, await world.context(made[0]), "flipped")
        begun = await found.ask(ScrubWish(deep=True))
        await run_for(world, found, 60)
        assert begun.counts == {FindingKind.DAMAGED_DATA: 1}
        assert begun.deep_next == newest.deep_next
        going_on = await found.ask(ScrubWish(deep=True))
        await run_for(world, found, 60)
        # What the one before found is told until it is mended.
        assert (going_on.counts, going_on.deep_next) == (begun.counts, None)
        assert going_on.bytes_read == 2 * copy.data_len
        assert await world.catalog().scrubs.times() == told, "those by schedule go on on their own"

    run_virtual(main())


def test_a_deep_scrub_that_fails_is_not_the_one_of_its_interval():
    async def main():
        world, made = await offloaded(1)
        schedule = ScrubSchedule(interval_s=HOUR, deep_interval_s=24 * HOUR, first_s=60)
        await run_for(world, runner(world, schedule), HOUR / 2)
        world.clock.advance(24 * HOUR)
        failing = runner(world, schedule)

        async def unanswered(
            report: ScrubReport,
            *,
            deep_from: DeepPlace | None = None,
            crew: Crew | None = None,
        ) -> None:
            raise RetryableError("no answer", remedy="Wait")

        failing._scrubber.run = unanswered  # type: ignore[method-assign]
        times = world.catalog().scrubs.times
        before = await times()
        await run_for(world, failing, HOUR / 2)
        (newest, *_) = await failing.reports()
        assert (newest.state, newest.wish.deep) == (ScrubState.FAILED, True)
        assert await times() == before
        spoil(world, await world.context(made[0]), "flipped")
        await run_for(world, runner(world, schedule), HOUR / 2)
        (newest, *_) = await runner(world).reports()
        assert newest.counts == {FindingKind.DAMAGED_DATA: 1}

    run_virtual(main())


def test_a_report_is_as_long_as_there_is_room_and_the_metadata_keep_the_newest():
    async def main():
        world = World()
        await world.stream()
        catalog = world.catalog().scrubs
        for number in range(5):
            report = ScrubReport(
                scrub_id=UUID(int=number + 1),
                wish=ScrubWish(repair=True),
                started_ms=1000 - number,  # by a clock that goes back
                findings_max=10**6,
            )
            for count in range(2000):
                cause = f"{count} {'x' * 300}"
                report.add(Finding(kind=FindingKind.DAMAGED_DATA, cause=cause, kept="no"))
            report.state = ScrubState.DONE
            await catalog.save(report, keep=3)
            await catalog.save(report, keep=3)
        kept = await catalog.reports()
        assert [(one.scrub_id.int, one.number) for one in kept] == [(5, 5), (4, 4), (3, 3)]
        for one in kept:
            assert one.remaining == 2000
            assert 100 < len(one.findings) == 2000 - one.findings_left_off
            assert [found.cause.split()[0] for found in one.findings[:3]] == ["0", "1", "2"]
            node = await world.catalog().store.get(paths.scrub_path(one.scrub_id))
            assert node is not None
            assert len(node.data) <= REPORT_LEN_MAX

    run_virtual(main())


def test_how_much_was_not_looked_at_is_told_where_there_is_no_room_for_it():
    async def main():
        world = World()
        catalog = world.catalog().scrubs
        report = ScrubReport(scrub_id=UUID(int=1), wish=ScrubWish(), started_ms=1, findings_max=50)
        for number in range(70):
            report.skip(f"stream {number}")
        report.state = ScrubState.DONE
        assert (len(report.unread), report.unread_left_off) == (50, 20)
        await catalog.save(report, keep=3)
        (kept,) = await catalog.reports()
        assert (len(kept.unread), kept.unread_left_off) == (20, 50)
        for one in (report, kept):
            shown = ScrubSummary.of(one)
            assert len(shown.unread) + shown.unread_left_off == 70
            assert not shown.clean

    run_virtual(main())


def test_a_report_that_can_not_be_read_is_passed_over_and_goes_first():
    async def main():
        world = World()
        await world.stream()
        schedule = ScrubSchedule(interval_s=HOUR, first_s=60, reports_max=2)
        found = runner(world, schedule)
        await run_for(world, found, 600)
        (told,) = await runner(world, schedule).reports()
        store = world.catalog().store
        await store.create(paths.scrub_path(UUID(int=9)), b"no report")
        node = await store.get(paths.SCRUBS)
        assert node is not None
        await store.set(paths.SCRUBS, b"no times", version=node.version)
        assert await runner(world, schedule).reports() == [told]
        # Nobody knows when the last one was: the next one comes early.
        await run_for(world, runner(world, schedule), 600)
        assert len(await runner(world, schedule).reports()) == 2
        assert await store.get(paths.scrub_path(UUID(int=9))) is None

    run_virtual(main())


def test_every_kind_says_what_it_means_and_what_to_do():
    for kind in FindingKind:
        assert KINDS[kind].meaning
        assert bool(KINDS[kind].remedy) is KINDS[kind].fault


async def test_over_rest():
    world = World()
    await world.stream()
    await plant(world, 5)
    await plant(world, 6, cluster_id=UUID(int=3))
    world.clock.advance(30 * HOUR)
    found = runner(world)
    app = build_http_app("test", checks={})
    ScrubsApi(found).add_routes(app)
    stop = asyncio.Event()
    import aiohttp

    async with (
        serve_http(app, host="127.0.0.1", port=0) as port,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session,
        asyncio.TaskGroup() as group,
    ):
        begun = await ask(session, "POST", "/v1/scrubs", status=202, json={"repair": False})
        await ask(session, "POST", "/v1/scrubs", status=503)
        group.create_task(found.run(stop))
        path = f"/v1/scrubs/{begun['scrub_id']}"
        async with asyncio.timeout(10):
            while (shown := await ask(session, "GET", path))["state"] == "running":
                await asyncio.sleep(0.01)
        stop.set()
        assert (shown["state"], shown["remaining"], shown["clean"]) == ("done", 1, False)
        assert shown["counts"] == {"foreign": 1, "orphan-objects": 1}
        assert shown["findings"][0]["key"].startswith(str(UUID(int=5)))
        listed = await ask(session, "GET", "/v1/scrubs")
        assert [one["scrub_id"] for one in listed["scrubs"]] == [begun["scrub_id"]]
        assert "findings" not in listed["scrubs"][0]
        await ask(session, "GET", f"/v1/scrubs/{CLUSTER}", status=404)
