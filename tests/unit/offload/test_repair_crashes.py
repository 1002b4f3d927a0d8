"""Repairs that crash at every step, race, and are cut off; the ledger stays readable."""

import asyncio
import contextlib
import random
from typing import Any

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.scrubs import REPAIR, kinds, repairer, scrub, scrubber, write_cluster
from tests.unit.offload.test_repair import APPENDS, offloaded, read_back
from tests.unit.offload.test_scrub import spoil
from tests.unit.offload.world import TOPICS, World
from tests.unit.scheduler.test_scheduler import LIMITS, scheduler
from tierlog.adapters.memory.faults import FaultRates, Faults
from tierlog.format.manifest import is_manifest_key
from tierlog.model.errors import TierlogError
from tierlog.model.ids import LedgerId
from tierlog.model.offload import OffloadContext, OffloadState
from tierlog.model.policy import Policy
from tierlog.model.scrub import ScrubReport
from tierlog.ports.throttle import TokenBucket
from tierlog.runtime.worker import WorkerLimits, run_worker
from tierlog_scheduler.manifests import BucketManifests

RACE_S = 1000
# Swept at once, and again after the longest request.
SWEPT_S = 2 * LIMITS.sweep_again_s + 60


def faults(seed: int = 1, **rates: float) -> Faults:
    return Faults(random.Random(seed), rates=FaultRates(**rates))


def pace(world: World) -> TokenBucket:
    return TokenBucket(world.clock, per_s=1e9)


async def lead(world: World, seconds: float) -> None:
    """Let a scheduler lead for a while, which sweeps what is abandoned."""
    stop = asyncio.Event()
    gate = BucketManifests(world.manifests(), world.catalog())
    async with asyncio.TaskGroup() as group:
        group.create_task(scheduler(world, manifests=gate).run(stop))
        await asyncio.sleep(seconds)
        stop.set()


async def check_readable(world: World, ledger_id: LedgerId, *, in_part: bool) -> None:
    """Whatever happened: the copy that is named lies there, as good as it was."""
    context = await world.context(ledger_id)
    assert context.complete
    assert context.location is not None
    assert context.location.data_key in world.bucket.objects
    if not in_part:
        assert await read_back(world, ledger_id) == world.ledgers[ledger_id]


async def check_swept(world: World, was: OffloadContext) -> None:
    """After all: one complete copy, and in the bucket what it names and nothing else."""
    context = await world.context(was.ledger_id)
    assert context.complete
    assert (context.repair, context.abandoned) == (None, ())
    assert context.state is not OffloadState.REPAIRING
    assert await read_back(world, was.ledger_id) == world.ledgers[was.ledger_id]
    kept = {key for key in world.bucket.objects if not is_manifest_key("", key)}
    assert kept == await world.expected_keys()
    assert not world.bucket.uploads


@pytest.mark.parametrize("gone", [True, False])
@pytest.mark.timeout(120)
def test_a_crash_at_every_step_leaves_what_is_readable_and_the_next_repair_ends_it(gone: bool):
    async def main(steps: int) -> bool:
        world, was = await offloaded(APPENDS, gone=gone)
        spoil(world, was, "index")
        dying = faults()
        dying.crash_after(steps)
        victim = repairer(world, dying)
        store: Any = victim._catalog.store
        run = asyncio.create_task(victim.repair(was, "index gone", pace(world)))
        dying.on_crash = lambda: (store.abandon(), run.cancel())
        await asyncio.wait({run})
        now = await world.context(was.ledger_id)
        await check_readable(world, was.ledger_id, in_part=now.uuid == was.uuid)
        # Its lock goes with its session.
        await asyncio.sleep(10)
        report = await scrub(world, REPAIR)
        assert report.remaining == 0, report.findings
        await lead(world, SWEPT_S)
        await check_swept(world, was)
        assert kinds(await scrub(world, REPAIR)) == []
        return dying.crashed

    steps = 1
    while run_virtual(main(steps)):
        steps += 1
    assert steps > 50, "every call has two steps"


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("role", ["index", "side", "flipped"])
def test_two_repairers_that_are_cut_off_beside_a_leader_that_sweeps(seed: int, role: str):
    async def main():
        world, was = await offloaded(APPENDS, gone=role != "flipped")
        spoil(world, was, role)
        given = [
            faults(
                10 * seed + number,
                refused=0.03,
                request_lost=0.03,
                reply_lost=0.05,
                delay_s_max=0.3,
            )
            for number in range(2)
        ]
        stop = asyncio.Event()
        gate = BucketManifests(world.manifests(), world.catalog())

        async def again_and_again(one: Faults) -> None:
            while not stop.is_set():
                context = await world.context(was.ledger_id)
                process = repairer(world, one)
                store: Any = process._catalog.store
                with contextlib.suppress(TierlogError, TimeoutError):
                    run = process.repair(context, "seen damaged", pace(world))
                    await asyncio.wait_for(run, world.rng.uniform(1, 200))
                store.abandon()
                now = await world.context(was.ledger_id)
                await check_readable(world, was.ledger_id, in_part=now.uuid == was.uuid)
                await asyncio.sleep(world.rng.uniform(0, 300))

        async with asyncio.TaskGroup() as group:
            group.create_task(scheduler(world, manifests=gate).run(stop))
            for one in given:
                group.create_task(again_and_again(one))
            await asyncio.sleep(RACE_S)
            for one in given:
                one.rates = FaultRates()
            await asyncio.sleep(RACE_S)
            stop.set()
        await asyncio.sleep(10)
        report = await scrub(world, REPAIR, safety_age_s=0)
        assert report.remaining == 0, report.findings
        await lead(world, SWEPT_S)
        assert (await scrub(world, REPAIR, safety_age_s=0)).remaining == 0
        await check_swept(world, was)
        assert (await world.context(was.ledger_id)).uuid != was.uuid

    run_virtual(main())


async def dying_worker(world: World, given: Faults, stop: asyncio.Event) -> None:
    """Run workers, one after the other, each of which is killed after a while."""
    while not stop.is_set():
        worker = world.worker(given, part_delay_s=world.rng.uniform(0, 9))
        store: Any = worker._catalog.store
        source = world.queue.source([TOPICS.requested], group="offloader", faults=given)
        limits = WorkerLimits(in_flight_max=2, drain_s_max=5)
        run = run_worker(source, worker.handle, stop=stop, limits=limits)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(run, world.rng.uniform(30, 900))
        store.abandon()
        source.abandon()


async def dying_scrubs(world: World, given: Faults, stop: asyncio.Event) -> None:
    """Scrub again and again; each scrubber is killed after a while, mostly at the end."""
    while not stop.is_set():
        one = scrubber(world, given, safety_age_s=0)
        store: Any = one.repairer._catalog.store
        report = ScrubReport(scrub_id=world.ids.uuid(), wish=REPAIR, started_ms=0, findings_max=100)
        with contextlib.suppress(TierlogError, TimeoutError):
            await asyncio.wait_for(one.run(report), world.rng.uniform(1, 120))
        store.abandon()
        await asyncio.sleep(world.rng.uniform(0, 90))


async def damage(world: World, stop: asyncio.Event) -> None:
    """Take a copy's index or side object away, now and then."""
    while not stop.is_set():
        await asyncio.sleep(world.rng.uniform(60, 300))
        context = await world.context(world.rng.choice(list(world.ledgers)))
        if context.complete and context.location is not None and not stop.is_set():
            await check_readable(world, context.ledger_id, in_part=True)
            keys = context.location.index_key, context.location.side_key
            world.bucket.objects.pop(world.rng.choice(keys), None)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.timeout(180)
def test_damage_beside_offloads_deletions_and_scrubs_that_are_cut_off_is_repaired(seed: int):
    async def main():
        world = World(seed=seed)
        given = faults(seed, refused=0.01, request_lost=0.01, reply_lost=0.02, delay_s_max=0.3)
        policy = Policy(offload_time_ms=1000, deletion_lag_ms=120_000)
        claimed = await world.stream(policy=policy)
        await world.seal(claimed, APPENDS)
        await write_cluster(world)
        calm, stop = asyncio.Event(), asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for _ in range(2):
                gate = BucketManifests(world.manifests(given), world.catalog(given))
                group.create_task(scheduler(world, given, manifests=gate).run(stop))
                group.create_task(dying_worker(world, given, stop))
                group.create_task(dying_scrubs(world, given, stop))
            group.create_task(damage(world, calm))
            for _ in range(3):
                await asyncio.sleep(world.rng.uniform(0, 300))
                await world.seal(claimed, APPENDS)
            await asyncio.sleep(2000)
            calm.set()
            given.rates = FaultRates()
            await asyncio.sleep(5000)
            stop.set()
        await asyncio.sleep(10)
        assert (await scrub(world, REPAIR, safety_age_s=0)).remaining == 0
        await lead(world, SWEPT_S)
        for ledger_id in world.ledgers:
            context = await world.context(ledger_id)
            assert context.state is OffloadState.TIER1_DELETED
            await check_swept(world, context)
        attempts = [(await world.context(one)).attempt_count for one in world.ledgers]
        assert sum(attempts) > len(attempts), "something was repaired"

    run_virtual(main())
