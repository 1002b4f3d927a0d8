"""The leader's loop with real workers, on virtual time, whatever the queue and the crashes do.

Must hold (protocols.md section 3): the queue may lose everything and nothing is lost; at every
instant each entry is readable from tier 1 or from a complete copy; in the end the bucket holds
exactly what the metadata names, and no open upload.
"""

import asyncio
import contextlib
import random
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.gates import OpenGate
from tests.unit.offload.world import STREAM, TOPICS, World, bare_ledger
from tierlog.adapters.memory.faults import FaultRates, Faults
from tierlog.catalog.election import CourtesyLock
from tierlog.format import paths
from tierlog.model.errors import IndeterminateError, RetryableError
from tierlog.model.ids import EntryId, LedgerId, StreamName
from tierlog.model.offload import CopySeen, SchedulerProgress
from tierlog.model.policy import Policy
from tierlog.offload.messages import parse_request
from tierlog.runtime.worker import WorkerLimits, run_worker
from tierlog_scheduler.scheduler import Scheduler, SchedulerLimits

ENTRIES = [bytes([number]) * (number * 37 % 200) for number in range(10)]
LIMITS = SchedulerLimits(interval_s=10, request_again_s=60, sweep_again_s=300)
HOUR = 3600.0


def faults(seed: int = 1, **rates: float) -> Faults:
    return Faults(random.Random(seed), rates=FaultRates(**rates))


def scheduler(
    world: World, given: Faults | None = None, *, limits=LIMITS, manifests=None, publisher=None
) -> Scheduler:
    return Scheduler(
        catalog=world.catalog(given),
        offloader=world.offloader(given),
        publisher=publisher or world.queue.publisher(given),
        stationery=world.stationery,
        manifests=manifests or OpenGate(),
        clock=world.clock,
        ids=world.ids,
        limits=limits,
    )


@asynccontextmanager
async def running(world: World, *, schedulers: int = 1, workers: int = 1, given=None):
    """Run services for the length of the context."""
    stop = asyncio.Event()
    led = [scheduler(world, given) for _ in range(schedulers)]
    async with asyncio.TaskGroup() as group:
        for one in led:
            group.create_task(one.run(stop))
        for number in range(workers):
            group.create_task(
                run_worker(
                    world.queue.source([TOPICS.requested], group="offloader", faults=given),
                    world.worker(given, name=f"w{number}").handle,
                    stop=stop,
                    limits=WorkerLimits(in_flight_max=2, drain_s_max=5),
                )
            )
        try:
            yield led
        finally:
            stop.set()


async def states(world: World) -> list[str]:
    return [(await world.context(ledger_id)).state.name for ledger_id in sorted(world.ledgers)]


async def check_readable(world: World) -> None:
    """Each sealed ledger is in tier 1, or complete in tier 2."""
    catalog = world.catalog()
    for ledger_id in world.ledgers:
        local = await catalog.ledgers.get(ledger_id)
        context = await world.context(ledger_id)
        assert local is not None or context.complete
        if context.complete:
            assert context.uuid is not None
            assert context.copy is not None
            await world.offloader().verify(ledger_id, context.uuid, context.location, context.copy)


def test_a_bare_ledger_stays_where_it_is():
    async def main():
        world = World()
        claimed = await world.stream(policy=Policy(offload_time_ms=1000, retention_time_ms=10**10))
        await world.seal(claimed, ENTRIES)
        bare = await bare_ledger(world)
        before = await world.catalog().bare.get(bare)
        async with running(world):
            await asyncio.sleep(5 * HOUR)
        assert await states(world) == ["TIER1_DELETED"]
        assert await world.catalog().bare.list_all() == {bare: before}
        assert await world.catalog().contexts.get(bare) is None
        assert not [key for key in world.bucket.objects if key.endswith(f"ledger-{bare}")]

    run_virtual(main())


@pytest.mark.covers("A08", "A28", "A31")
def test_sealed_ledgers_go_to_tier_2_and_the_local_copy_after_the_lag():
    async def main():
        world = World()
        claimed = await world.stream(policy=Policy(offload_time_ms=60_000))
        ledger_id = await world.seal(claimed, ENTRIES)
        await world.seal(claimed, [b"open"], close=False)
        async with running(world):
            await asyncio.sleep(55)
            assert await states(world) == ["LOCAL", "LOCAL"]
            await asyncio.sleep(20)
            assert await states(world) == ["COMPLETE", "LOCAL"]
            await asyncio.sleep(4 * HOUR - 60)
            assert await states(world) == ["COMPLETE", "LOCAL"]
            assert await world.catalog().ledgers.get(ledger_id) is not None
            await asyncio.sleep(60)
            assert await states(world) == ["TIER1_DELETED", "LOCAL"]
            assert await world.catalog().ledgers.get(ledger_id) is None
            context = await world.context(ledger_id)
            assert context.complete
            assert context.bookkeeper_deleted
        await check_readable(world)
        assert len(world.queue.events(TOPICS.requested)) == 1

    run_virtual(main())


@pytest.mark.covers("A06")
def test_by_size_the_oldest_go_first_and_the_tail_stays():
    async def main():
        world = World()
        total = sum(map(len, ENTRIES))
        claimed = await world.stream(policy=Policy(offload_size_bytes=2 * total + 1))
        for _ in range(5):
            await world.seal(claimed, ENTRIES)
        async with running(world):
            await asyncio.sleep(100)
            assert await states(world) == ["COMPLETE"] * 3 + ["LOCAL"] * 2

    run_virtual(main())


def test_a_queue_that_loses_everything_loses_nothing():
    async def main():
        world = World()
        claimed = await world.stream(policy=Policy(offload_time_ms=0))
        await world.seal(claimed, ENTRIES)
        world.queue.rates = type(world.queue.rates)(lost=1.0)
        async with running(world):
            await asyncio.sleep(500)
            assert await states(world) == ["LOCAL"]
            world.queue.rates = type(world.queue.rates)()
            await asyncio.sleep(500)
            assert await states(world) == ["COMPLETE"]

    run_virtual(main())


def test_requests_carry_what_a_worker_and_a_tracer_need():
    async def main():
        world = World()
        claimed = await world.stream(policy=Policy(offload_time_ms=0))
        ledger_id = await world.seal(claimed, ENTRIES)
        leader = scheduler(world)
        await leader.begin()
        for _ in range(10):
            await leader.run_pass()
            await asyncio.sleep(10)
        first, second = world.queue.events(TOPICS.requested)
        assert first.key == f"{STREAM}/{ledger_id}".encode()
        assert first.headers["ce_specversion"] == b"1.0"
        assert first.headers["ce_type"] == TOPICS.requested.encode()
        assert first.headers["traceparent"] != second.headers["traceparent"]
        assert parse_request(first).request_count == 1
        assert parse_request(second).request_count == 2
        assert parse_request(second).incarnation == claimed.incarnation

    run_virtual(main())


@pytest.mark.covers("A15")
def test_leftovers_are_swept_again_after_the_deadline_then_struck_off():
    async def main():
        world = World()
        claimed = await world.stream(policy=Policy(offload_time_ms=0, deletion_lag_ms=-1))
        ledger_id = await world.seal(claimed, ENTRIES)
        catalog, offloader = world.catalog(), world.offloader()
        old = UUID(int=99)
        location = offloader.location(ledger_id, old)
        await catalog.contexts.begin_attempt(ledger_id, uuid=old, location=location, worker="dead")
        objects = world.bucket.connect()
        await objects.create_upload(location.data_key, metadata={}, content_type="x")
        async with running(world):
            await asyncio.sleep(30)
            context = await world.context(ledger_id)
            assert context.complete
            assert [one.uuid for one in context.abandoned] == [old]
            assert not world.bucket.uploads
            # A request of the dead worker that was in flight lands late.
            await objects.put(location.data_key, b"late", metadata={})
            await asyncio.sleep(260)
            assert (await world.context(ledger_id)).abandoned
            await asyncio.sleep(60)
            assert not (await world.context(ledger_id)).abandoned
        assert set(world.bucket.objects) == await world.expected_keys()

    run_virtual(main())


@pytest.mark.parametrize("at_work", [False, True], ids=["worker-is-dead", "worker-is-slow"])
def test_what_a_dead_attempt_left_goes_also_where_nothing_asks_for_the_ledger(at_work):
    async def main():
        world, dead = World(), UUID(int=99)
        claimed = await world.stream()
        ledger_id = await world.seal(claimed, ENTRIES)
        catalog, location = world.catalog(), world.offloader().location(ledger_id, dead)
        lock = CourtesyLock(catalog.store, paths.ledger_lock_path(ledger_id), UUID(int=98))
        assert await lock.take()
        await catalog.contexts.begin_attempt(ledger_id, uuid=dead, location=location, worker="w")
        objects = world.bucket.connect()
        await objects.create_upload(location.data_key, metadata={}, content_type="x")
        await objects.put(location.side_key, b"side", metadata={})
        if not at_work:
            await lock.release()
        async with running(world):
            await asyncio.sleep(24 * HOUR - 60)
            assert await states(world) == ["OFFLOADING"]
            await asyncio.sleep(HOUR)
            context = await world.context(ledger_id)
        assert context.names(dead) is at_work
        assert (context.uuid, context.state.name) == (
            (dead, "OFFLOADING") if at_work else (None, "LOCAL")
        )
        assert bool(world.bucket.uploads) is bool(world.bucket.objects) is at_work
        assert not world.queue.events(TOPICS.requested)

    run_virtual(main())


def test_a_damaged_copy_keeps_the_local_one_and_tells_why():
    async def main():
        world = World()
        claimed = await world.stream(policy=Policy(offload_time_ms=0, deletion_lag_ms=60_000))
        ledger_id = await world.seal(claimed, ENTRIES)
        async with running(world):
            await asyncio.sleep(30)
            context = await world.context(ledger_id)
            assert context.location is not None
            world.bucket.damage(context.location.index_key, 40)
            await asyncio.sleep(600)
        assert await states(world) == ["COMPLETE"]
        assert await world.catalog().ledgers.get(ledger_id) is not None
        assert "CORRUPT" in (await world.context(ledger_id)).last_error

    run_virtual(main())


@pytest.mark.parametrize("jump_h", [5, -5, 1000, -1000])
@pytest.mark.parametrize("at_h", [0.1, 2, 3.9])
def test_a_jump_of_the_wall_clock_deletes_nothing_early_and_stops_nothing(jump_h, at_h):
    async def main():
        world = World()
        claimed = await world.stream(policy=Policy(offload_time_ms=0))
        ledger_id = await world.seal(claimed, ENTRIES)
        async with running(world):
            await asyncio.sleep(30)
            assert await states(world) == ["COMPLETE"]
            await asyncio.sleep(at_h * HOUR)
            world.clock.jump_wall(jump_h * HOUR)
            await asyncio.sleep((3.98 - at_h) * HOUR)
            assert await world.catalog().ledgers.get(ledger_id) is not None
            # The same for what comes after the jump.
            second = await world.seal(claimed, ENTRIES)
            await asyncio.sleep(0.05 * HOUR)
            assert await world.catalog().ledgers.get(ledger_id) is None
            assert await states(world) == ["TIER1_DELETED", "COMPLETE"]
            await asyncio.sleep(3.9 * HOUR)
            assert await world.catalog().ledgers.get(second) is not None
            await asyncio.sleep(0.15 * HOUR)
            assert await world.catalog().ledgers.get(second) is None

    run_virtual(main())


@pytest.mark.parametrize("jump_h", [5, -5])
def test_offloading_goes_on_when_the_wall_clock_jumps(jump_h):
    async def main():
        world = World()
        claimed = await world.stream(policy=Policy(offload_time_ms=600_000))
        is_open = await world.seal(claimed, ENTRIES, close=False)
        async with running(world):
            await asyncio.sleep(20)
            await world.catalog().ledgers.close(
                claimed, is_open, last_entry_id=EntryId(9), length=sum(map(len, ENTRIES))
            )
            await asyncio.sleep(20)
            world.clock.jump_wall(jump_h * HOUR)
            await asyncio.sleep(620)
            assert await states(world) == ["COMPLETE"]

    run_virtual(main())


def test_the_lag_outlives_a_leader_and_its_down_time_does_not_count():
    async def main():
        world = World()
        claimed = await world.stream(policy=Policy(offload_time_ms=0))
        ledger_id = await world.seal(claimed, ENTRIES)
        async with running(world):
            await asyncio.sleep(3 * HOUR)
        await asyncio.sleep(10 * HOUR)
        async with running(world):
            await asyncio.sleep(0.9 * HOUR)
            assert await world.catalog().ledgers.get(ledger_id) is not None
            await asyncio.sleep(0.2 * HOUR)
            assert await world.catalog().ledgers.get(ledger_id) is None

    run_virtual(main())


def test_copies_that_never_go_crowd_none_out_of_the_checkpoint(monkeypatch):
    monkeypatch.setattr("tierlog_scheduler.scheduler.CHECKPOINT_LEDGERS_MAX", 3)

    async def main():
        world = World()
        never = Policy(offload_time_ms=0, deletion_lag_ms=-1)
        kept = await world.stream(StreamName("kept"), policy=never)
        for _ in range(3):
            await world.seal(kept, ENTRIES)
        claimed = await world.stream(policy=Policy(offload_time_ms=0))
        ledger_id = await world.seal(claimed, ENTRIES)
        for _ in range(2):
            async with running(world):
                await asyncio.sleep(3 * HOUR)
        assert await world.catalog().ledgers.get(ledger_id) is None

    run_virtual(main())


@pytest.mark.parametrize("damage", [b"", b"\xff\xff\xff"])
def test_a_lost_or_damaged_progress_only_makes_waits_longer(damage):
    async def main():
        world = World()
        claimed = await world.stream(policy=Policy(offload_time_ms=0))
        ledger_id = await world.seal(claimed, ENTRIES)
        async with running(world):
            await asyncio.sleep(3 * HOUR)
        store = world.catalog().store
        found = await store.get(paths.SCHEDULER_PROGRESS)
        assert found is not None
        if damage:
            await store.set(paths.SCHEDULER_PROGRESS, damage, version=found.version)
        else:
            await store.delete(paths.SCHEDULER_PROGRESS, version=-1)
        leader = scheduler(world)
        await leader.begin()
        await leader.run_pass()
        assert await world.catalog().ledgers.get(ledger_id) is not None

    run_virtual(main())


def test_a_copy_made_anew_between_two_passes_has_its_whole_lag_before_it():
    async def main():
        world = World()
        claimed = await world.stream(policy=Policy(offload_time_ms=0))
        ledger_id = await world.seal(claimed, ENTRIES)
        await world.worker().handle(world.request(claimed, ledger_id))
        leader = scheduler(world)
        await leader.begin()
        await leader.run_pass()
        await asyncio.sleep(3.9 * HOUR)
        await leader.run_pass()
        # Repaired between two passes: the same objects have to do for another copy here.
        another = UUID(int=99)
        await world.catalog().contexts.change(
            ledger_id,
            lambda context: replace(context, uuid=another),
            applied=lambda context: context.uuid == another,
        )
        await leader.run_pass()
        await asyncio.sleep(3.9 * HOUR)
        await leader.run_pass()
        assert await world.catalog().ledgers.get(ledger_id) is not None
        await asyncio.sleep(0.2 * HOUR)
        await leader.run_pass()
        assert await world.catalog().ledgers.get(ledger_id) is None

    run_virtual(main())


def test_a_late_checkpoint_of_a_deposed_leader_changes_nothing():
    async def main():
        world = World()
        await world.stream()
        progress = world.catalog().progress
        assert await progress.load() == SchedulerProgress()
        newer = SchedulerProgress(
            progress_ms=500, complete_seen={LedgerId(1): CopySeen(UUID(int=1), 400)}
        )
        await progress.save(newer)
        await progress.save(SchedulerProgress(progress_ms=300))
        assert await progress.load() == newer

    run_virtual(main())


def test_one_of_several_leads_and_another_takes_over():
    async def main():
        world = World()
        claimed = await world.stream(policy=Policy(offload_time_ms=0))
        async with running(world, schedulers=3) as led:
            await asyncio.sleep(30)
            assert sum(one.leading for one in led) == 1
            leader = next(one for one in led if one.leading)
            store: Any = leader._catalog.store
            store.expire_session()
            await asyncio.sleep(60)
            assert sum(one.leading for one in led) == 1
            await world.seal(claimed, ENTRIES)
            await asyncio.sleep(60)
            assert await states(world) == ["COMPLETE"]

    run_virtual(main())


@pytest.mark.parametrize("seed", range(6))
def test_two_leaders_at_once_do_no_harm(seed):
    async def main():
        world = World(seed=seed)
        claimed = await world.stream(policy=Policy(offload_time_ms=0, deletion_lag_ms=1000))
        for _ in range(3):
            await world.seal(claimed, ENTRIES)
        given = faults(seed, refused=0.02, request_lost=0.02, reply_lost=0.02, delay_s_max=0.5)
        leaders = [scheduler(world, given) for _ in range(2)]
        await asyncio.sleep(1)

        async def lead(leader: Scheduler) -> None:
            for _ in range(60):
                with contextlib.suppress(RetryableError, IndeterminateError):
                    await leader.run_pass()
                await check_readable(world)
                await asyncio.sleep(20)

        async with running(world, schedulers=0, workers=2), asyncio.TaskGroup() as group:
            for leader in leaders:
                group.create_task(lead(leader))
        assert await states(world) == ["TIER1_DELETED"] * 3
        await check_readable(world)

    run_virtual(main(), until_s=100 * HOUR)


@pytest.mark.parametrize("seed", range(8))
def test_faults_everywhere_end_in_exactly_the_named_objects(seed):
    async def main():
        world = World(seed=seed)
        world.queue.rates = type(world.queue.rates)(repeated=0.2, lost=0.2, delay_s_max=30)
        claimed = await world.stream(policy=Policy(offload_time_ms=0, deletion_lag_ms=60_000))
        for _ in range(4):
            await world.seal(claimed, ENTRIES)
        given = faults(seed, refused=0.03, request_lost=0.03, reply_lost=0.03, delay_s_max=0.2)
        async with running(world, schedulers=2, workers=2, given=given):
            for _ in range(40):
                await asyncio.sleep(60)
                await check_readable(world)
            given.rates = FaultRates()
            await asyncio.sleep(4 * HOUR)
        assert await states(world) == ["TIER1_DELETED"] * 4
        for ledger_id in world.ledgers:
            assert not (await world.context(ledger_id)).abandoned
        assert set(world.bucket.objects) == await world.expected_keys()
        assert not world.bucket.uploads

    run_virtual(main(), until_s=100 * HOUR)


def test_a_leader_that_dies_between_the_steps_of_a_deletion_is_followed_up():
    async def main(steps: int) -> bool:
        world = World()
        claimed = await world.stream(policy=Policy(offload_time_ms=0, deletion_lag_ms=0))
        await world.seal(claimed, ENTRIES)
        ledger_id = next(iter(world.ledgers))
        await world.worker().handle(world.request(claimed, ledger_id))
        dying = faults()
        leader = scheduler(world, dying)
        await leader.begin()
        task = asyncio.create_task(leader.run_pass())
        dying.on_crash = task.cancel
        dying.crash_after(steps)
        await asyncio.wait({task})
        await check_readable(world)
        if not dying.crashed:
            task.result()
        follower = scheduler(world)
        await follower.begin()
        for _ in range(2):
            await follower.run_pass()
        assert await states(world) == ["TIER1_DELETED"]
        await check_readable(world)
        return dying.crashed

    steps = 1
    while run_virtual(main(steps)):
        steps += 1
    assert steps > 20


def test_one_stream_s_trouble_keeps_no_other_waiting():
    async def main():
        world = World()
        claimed = await world.stream(policy=Policy(offload_time_ms=0))
        await world.seal(claimed, ENTRIES)
        await world.catalog().store.create(paths.stream_path(StreamName("broken")), b"\xff")
        async with running(world):
            await asyncio.sleep(60)
            assert await states(world) == ["COMPLETE"]

    run_virtual(main())


def test_what_was_seen_survives_a_pass_in_which_its_stream_could_not_be_read():
    async def main():
        world = World()
        claimed = await world.stream(policy=Policy(offload_time_ms=0))
        ledger_id = await world.seal(claimed, ENTRIES)
        await world.worker().handle(world.request(claimed, ledger_id))
        leader = scheduler(world)
        await leader.begin()
        await leader.run_pass()
        store = world.catalog().store
        path = paths.stream_path(STREAM)
        found = await store.get(path)
        assert found is not None
        version = await store.set(path, b"\xff", version=found.version)
        seen = dict(leader._memory.complete_seen)
        assert list(seen) == [ledger_id]
        await asyncio.sleep(10)
        await leader.run_pass()
        assert leader._memory.complete_seen == seen
        await store.set(path, found.data, version=version)
        await leader.run_pass()
        assert leader._memory.complete_seen == seen

    run_virtual(main())
