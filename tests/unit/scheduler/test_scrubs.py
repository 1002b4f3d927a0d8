"""When scrubs run, one at a time, what is kept of them, and the same over REST."""

import asyncio
import random
from dataclasses import replace
from uuid import UUID

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.scrubs import plant, runner
from tests.unit.offload.world import CLUSTER, ListHandle, World
from tests.unit.scheduler.test_api import ask
from tests.unit.scheduler.test_scheduler import ENTRIES
from tierlog.adapters.memory.faults import FaultRates, Faults
from tierlog.model.errors import CorruptError, RefusedError, RetryableError
from tierlog.model.ids import LedgerId
from tierlog.model.scrub import KINDS, FindingKind, ScrubState, ScrubWish
from tierlog.runtime.http import build_http_app, serve_http
from tierlog_scheduler.scrubs import ScrubRunner, ScrubSchedule, tier1_check
from tierlog_scheduler.scrubs_api import ScrubsApi

HOUR = 3600.0


async def run_for(world: World, found: ScrubRunner, seconds: float) -> None:
    """Let it run for so long."""
    del world
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(found.run(stop))
        await asyncio.sleep(seconds)
        stop.set()


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
        assert len(found.reports) == counts[0]
        assert sum(one.wish.deep for one in found.reports) == counts[1]
        assert all(one.is_clean and one.wish.repair for one in found.reports)

    run_virtual(main())


def test_what_is_kept_is_bounded():
    async def main():
        world = World()
        await world.stream()
        found = runner(world, ScrubSchedule(interval_s=60, reports_max=3, repair=False))
        await run_for(world, found, HOUR)
        assert len(found.reports) == 3
        assert found.reports[0].started_ms > found.reports[-1].started_ms
        with pytest.raises(RefusedError, match="no report"):
            found.report(UUID(int=1))

    run_virtual(main())


def test_one_that_fails_is_told_and_the_next_one_comes():
    async def main():
        world = World()
        await world.stream()
        given = Faults(random.Random(1), rates=FaultRates(refused=1.0))
        found = runner(world, ScrubSchedule(interval_s=60), faults=given)
        await run_for(world, found, 90)
        assert [one.state for one in found.reports] == [ScrubState.FAILED]
        assert found.reports[0].error
        assert not found.reports[0].is_clean
        given.rates = FaultRates()
        await run_for(world, found, 60)
        assert found.reports[0].is_clean

    run_virtual(main())


def test_it_is_asked_for_one_at_a_time_by_anybody():
    async def main():
        world = World()
        await world.stream()
        orphan = await plant(world, 5)
        world.clock.advance(30 * HOUR)
        found = runner(world, ScrubSchedule(interval_s=0), leading=False)
        first = found.ask(ScrubWish())
        with pytest.raises(RetryableError, match="still at work"):
            found.ask(ScrubWish())
        await run_for(world, found, 60)
        assert (first.state, first.remaining, first.is_clean) == (ScrubState.DONE, 1, False)
        second = found.ask(ScrubWish(repair=True))
        await run_for(world, found, 60)
        assert second.is_clean
        assert orphan not in world.bucket.objects
        assert found.report(second.scrub_id) is second

    run_virtual(main())


def test_a_scrub_that_is_cut_short_says_so():
    async def main():
        world = World()
        await world.stream()
        for number in range(200):
            await plant(world, 100 + number, 900 + number)
        found = runner(world)
        report = found.ask(ScrubWish(repair=True))
        await run_for(world, found, 1)
        await asyncio.sleep(1)
        assert (report.state, report.error) == (ScrubState.FAILED, "the process ended")

    run_virtual(main())


def test_a_local_copy_counts_only_when_all_of_it_reads():
    async def main():
        world = World()
        claimed = await world.stream()
        ledger_id = await world.seal(claimed, ENTRIES)
        context = await world.context(ledger_id)
        await tier1_check(world.catalog(), world.open_ledger)(context)

        def shorter(number, metadata):
            return ListHandle(number, ENTRIES[:-1], metadata)

        with pytest.raises(CorruptError, match="ends before entry"):
            await tier1_check(world.catalog(), shorter)(context)
        with pytest.raises(CorruptError, match="no closed local copy"):
            await tier1_check(world.catalog(), world.open_ledger)(
                replace(context, ledger_id=LedgerId(ledger_id + 1))
            )

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
