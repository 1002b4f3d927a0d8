"""No false alarm: scrubs that repair beside schedulers and workers that crash and are cut off.

The safety age is nothing: what keeps an attempt that is at work is the order in which bucket,
metadata and manifests are read, and the age is only there on top of it.
"""

import asyncio
import contextlib
import random

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.scrubs import BOTH, scrubber, write_cluster
from tests.unit.offload.world import TOPICS, World
from tests.unit.scheduler.test_scheduler import ENTRIES, check_readable, scheduler
from tierlog.adapters.memory.faults import FaultRates, Faults
from tierlog.format.manifest import is_manifest_key
from tierlog.model.errors import TierlogError
from tierlog.model.policy import Policy
from tierlog.model.scrub import FindingKind, ScrubReport, ScrubState
from tierlog.runtime.worker import WorkerLimits, run_worker
from tierlog_scheduler.manifests import BucketManifests

LEDGERS = 6
# What an attempt left that nobody names, after answers were lost: found, and deleted.
LEGAL = {FindingKind.ORPHAN_OBJECTS, FindingKind.ORPHAN_UPLOAD, FindingKind.STALLED_ATTEMPT}


async def scrub_often(
    world: World, faults: Faults | None, stop: asyncio.Event
) -> list[ScrubReport]:
    """Scrub again and again, with every request of a scrub in between those of others."""
    reports = []
    while not stop.is_set():
        report = ScrubReport(
            scrub_id=world.ids.uuid(),
            wish=BOTH,
            started_ms=world.clock.wall_ms(),
            findings_max=100,
        )
        with contextlib.suppress(TierlogError):
            await scrubber(world, faults, safety_age_s=0, requests_per_s=20).run(report)
            report.state = ScrubState.DONE
        reports.append(report)
        await asyncio.sleep(world.rng.uniform(0, 90))
    return reports


async def crashing_worker(world: World, number: int, given: Faults, stop: asyncio.Event) -> None:
    """Run a worker that is killed every few minutes, as long as there are faults at all."""
    while not stop.is_set():
        source = world.queue.source([TOPICS.requested], group="offloader", faults=given)
        run = run_worker(
            source,
            world.worker(given, name=f"w{number}", part_delay_s=world.rng.uniform(0, 9)).handle,
            stop=stop,
            limits=WorkerLimits(in_flight_max=2, drain_s_max=5),
        )
        with contextlib.suppress(TimeoutError):
            calm = given.rates == FaultRates()
            await asyncio.wait_for(run, None if calm else world.rng.uniform(30, 900))


async def named_keys(world: World) -> set[str]:
    """Return the keys of all attempts that the metadata name."""
    named: set[str] = set()
    for ledger_id in world.ledgers:
        context = await world.context(ledger_id)
        for one in (context.location, *(attempt.location for attempt in context.abandoned)):
            named |= set(one.keys) if one is not None else set()
    return named


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.timeout(120)
def test_scrubs_beside_offloads_find_nothing_that_is_not_so(seed: int):
    async def main():
        world = World(seed=seed)
        given = Faults(
            random.Random(seed),
            rates=FaultRates(refused=0.01, request_lost=0.01, reply_lost=0.02, delay_s_max=0.5),
        )
        claimed = await world.stream(policy=Policy(offload_time_ms=1000, deletion_lag_ms=600_000))
        await write_cluster(world)
        stop, stop_scrubs = asyncio.Event(), asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for _ in range(2):
                gate = BucketManifests(world.manifests(given), world.catalog(given))
                group.create_task(scheduler(world, given, manifests=gate).run(stop))
            for number in range(2):
                group.create_task(crashing_worker(world, number, given, stop))
            scrubs = [
                group.create_task(scrub_often(world, faults, stop_scrubs))
                for faults in (None, given)
            ]
            for _ in range(LEDGERS):
                await world.seal(claimed, ENTRIES)
                await asyncio.sleep(world.rng.uniform(0, 300))
                await check_readable(world)
            await asyncio.sleep(1800)
            given.rates = FaultRates()
            await asyncio.sleep(3600)
            stop.set()
            stop_scrubs.set()
        await check_readable(world)
        reports = [report for task in scrubs for report in task.result()]
        found = {kind for one in reports for kind in one.counts}
        assert found <= LEGAL, [one.findings for one in reports if set(one.counts) - LEGAL][:2]
        assert sum(one.copies_checked for one in reports) > LEDGERS
        assert any(one.state is ScrubState.DONE for one in reports)
        last = ScrubReport(scrub_id=world.ids.uuid(), wish=BOTH, started_ms=0, findings_max=9)
        await scrubber(world, safety_age_s=0).run(last)
        kept = {key for key in world.bucket.objects if not is_manifest_key("", key)}
        kept |= {one.key for one in world.bucket.uploads.values()}
        assert await world.expected_keys() <= kept <= await named_keys(world)

    run_virtual(main())
