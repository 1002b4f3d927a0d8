"""One request through protocols.md section 3, steps 2 to 8, whatever crashes or repeats.

Must hold: at most one attempt per ledger is ever complete; after recovery from any crash the
bucket comes to hold exactly what the metadata names, and no open upload.
"""

import asyncio
import random
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.world import TOPICS, ListHandle, World, bare_ledger, entries_of
from tierlog.adapters.memory.faults import FaultRates, Faults, Outcome
from tierlog.format import paths
from tierlog.model.errors import CorruptError, RetryableError
from tierlog.model.ids import LedgerId
from tierlog.model.offload import OffloadState
from tierlog.offload import UnconfiguredOffloader
from tierlog.offload.cleaning import delete_attempt
from tierlog.offload.messages import parse_result
from tierlog.ports.events import Event
from tierlog.ports.retrying import RetryLimits
from tierlog.proto.v1 import events_pb2 as pb

ENTRIES = [bytes([number]) * (number * 37 % 200) for number in range(20)]


def faults(seed: int = 1, **rates: float) -> Faults:
    return Faults(random.Random(seed), rates=FaultRates(**rates))


async def sealed(world: World):
    claimed = await world.stream()
    return claimed, await world.seal(claimed, ENTRIES)


async def sweep(world: World) -> None:
    """Delete what every abandoned attempt left, as the scheduler does, and strike it off."""
    catalog = world.catalog()
    for ledger_id in world.ledgers:
        context = await world.context(ledger_id)
        for attempt in context.abandoned:
            await delete_attempt(world.bucket.connect(), attempt.location)
            await catalog.contexts.strike_off(ledger_id, attempt.uuid)


async def check_whole(world: World, ledger_id: LedgerId) -> None:
    """The ledger is complete, its copy reads back, and the bucket holds nothing else."""
    context = await world.context(ledger_id)
    assert context.state is OffloadState.COMPLETE
    assert context.uuid is not None
    assert context.copy is not None
    offloader = world.offloader()
    await offloader.verify(ledger_id, context.uuid, context.location, context.copy)
    handle = await offloader.read_offloaded(
        ledger_id, context.uuid, context.location, copy=context.copy
    )
    assert await entries_of(handle) == world.ledgers[ledger_id]
    assert set(world.bucket.objects) == await world.expected_keys()
    assert not world.bucket.uploads


def outcomes(world: World) -> list[int]:
    return [parse_result(event).outcome for event in world.queue.events(TOPICS.completed)]


@pytest.mark.covers("A11", "A29", "A30", "A32")
def test_a_request_ends_in_a_complete_copy_and_a_result():
    async def main():
        world = World()
        claimed, ledger_id = await sealed(world)
        await asyncio.sleep(10)
        await world.worker().handle(world.request(claimed, ledger_id))
        await check_whole(world, ledger_id)
        context = await world.context(ledger_id)
        assert context.timestamp_ms == world.clock.wall_ms()
        assert (context.attempt_count, context.last_worker, context.last_error) == (1, "w1", "")
        (event,) = world.queue.events(TOPICS.completed)
        result = parse_result(event)
        assert result.outcome == pb.OffloadResult.OUTCOME_COMPLETED
        assert UUID(bytes=result.uuid) == context.uuid
        assert result.entry_count == len(ENTRIES)
        assert event.headers["ce_type"] == TOPICS.completed.encode()
        # No lock is left behind.
        assert await world.catalog().store.get(paths.ledger_lock_path(ledger_id)) is None

    run_virtual(main())


@pytest.mark.covers("A15", "A16")
def test_the_uuid_is_in_the_metadata_before_the_first_byte():
    async def main():
        world = World()
        claimed, ledger_id = await sealed(world)
        given = faults()
        given.calls = []
        await world.worker(given).handle(world.request(claimed, ledger_id))
        calls = given.calls
        stored = next(at for at, call in enumerate(calls) if call == "metadata.set")
        assert not [call for call in calls[:stored] if call.startswith("objects.")]
        assert calls[stored + 1] == "objects.create_upload"
        # The index last, then verification, then the second change of the context.
        put = calls.index("objects.put")
        assert "objects.upload_part" not in calls[put:]
        assert calls.index("objects.complete_upload") < put
        assert "metadata.set" in calls[put:]

    run_virtual(main())


def test_a_duplicate_is_dropped_and_told_of():
    async def main():
        world = World()
        claimed, ledger_id = await sealed(world)
        request = world.request(claimed, ledger_id)
        worker = world.worker()
        for _ in range(3):
            await worker.handle(request)
        assert worker.attempts == 1
        assert outcomes(world) == [
            pb.OffloadResult.OUTCOME_COMPLETED,
            pb.OffloadResult.OUTCOME_ALREADY_COMPLETE,
            pb.OffloadResult.OUTCOME_ALREADY_COMPLETE,
        ]
        await check_whole(world, ledger_id)

    run_virtual(main())


def test_the_lock_saves_the_second_worker_the_work():
    async def main():
        world = World()
        claimed, ledger_id = await sealed(world)
        slow = world.worker(faults(delay_s_max=1.0))
        request = world.request(claimed, ledger_id)
        second = world.worker(name="w2")
        async with asyncio.TaskGroup() as group:
            first = group.create_task(slow.handle(request))
            await asyncio.sleep(10)
            assert not first.done()
            for attempt in (1, 5, 100):
                with pytest.raises(RetryableError, match="another worker"):
                    await second.handle(replace(request, attempt=attempt))
        await second.handle(replace(request, attempt=101))
        assert second.attempts == 0
        assert outcomes(world) == [
            pb.OffloadResult.OUTCOME_COMPLETED,
            pb.OffloadResult.OUTCOME_ALREADY_COMPLETE,
        ]
        assert not world.queue.events(TOPICS.dead_letter)
        await check_whole(world, ledger_id)

    run_virtual(main())


@pytest.mark.covers("A16")
@pytest.mark.parametrize("seed", range(40))
def test_two_workers_at_once_without_a_lock_complete_one_attempt(seed, monkeypatch):
    async def yes(lock: object) -> bool:
        return True

    monkeypatch.setattr("tierlog.catalog.election.CourtesyLock.take", yes)

    async def main():
        world = World(seed=seed)
        claimed, ledger_id = await sealed(world)
        request = world.request(claimed, ledger_id)
        workers = [
            world.worker(faults(seed * 10 + number, delay_s_max=1.0), name=f"w{number}")
            for number in range(3)
        ]
        async with asyncio.TaskGroup() as group:
            for worker in workers:
                group.create_task(worker.handle(request))
        assert sum(worker.completed for worker in workers) == 1
        await sweep(world)
        await check_whole(world, ledger_id)

    run_virtual(main())


@pytest.mark.covers("A15", "A29")
def test_a_superseded_attempt_is_cleaned_by_its_successor_and_drops_out():
    async def main():
        world = World()
        claimed, ledger_id = await sealed(world)
        catalog = world.catalog()
        request = world.request(claimed, ledger_id)
        stuck = world.worker(part_delay_s=100.0)
        async with asyncio.TaskGroup() as group:
            first = group.create_task(stuck.handle(request))
            await asyncio.sleep(50)
            old = await world.context(ledger_id)
            # Its session ends, as when a process is cut off; its upload goes on.
            await catalog.store.delete(paths.ledger_lock_path(ledger_id), version=-1)
            await world.worker(name="w2").handle(request)
            new = await world.context(ledger_id)
            assert new.complete
            assert new.uuid != old.uuid
            assert [one.uuid for one in new.abandoned] == [old.uuid]
            assert new.attempt_count == 2
            await first
        assert pb.OffloadResult.OUTCOME_SUPERSEDED in outcomes(world)
        assert not world.queue.events(TOPICS.dead_letter)
        await sweep(world)
        await check_whole(world, ledger_id)

    run_virtual(main())


def test_a_lock_whose_taking_had_no_answer_is_given_back(monkeypatch):
    async def main():
        world = World()
        claimed, ledger_id = await sealed(world)
        faults = Faults(random.Random(1))
        faults.next("metadata.create_ephemeral", Outcome.REPLY_LOST)
        worker = world.worker(faults)
        lock_path = paths.ledger_lock_path(ledger_id)
        get = worker._catalog.store.get

        async def refuse_once(path):
            if path == lock_path:
                monkeypatch.undo()
                raise RetryableError("no answer", remedy="Ask again")
            return await get(path)

        monkeypatch.setattr(worker._catalog.store, "get", refuse_once)
        with pytest.raises(RetryableError, match="no answer"):
            await worker.handle(world.request(claimed, ledger_id))
        assert lock_path not in world.metadata.dump()
        await worker.handle(world.request(claimed, ledger_id))
        await check_whole(world, ledger_id)

    run_virtual(main())


@pytest.mark.covers("A29")
def test_an_attempt_that_begins_to_upload_after_it_was_struck_off_cleans_itself(monkeypatch):
    async def main():
        world = World()
        claimed, ledger_id = await sealed(world)
        catalog = world.catalog()
        request = world.request(claimed, ledger_id)
        slow = world.worker()
        offload = slow._offloader.offload

        async def late(*what, **how):
            await asyncio.sleep(1000)
            return await offload(*what, **how)

        monkeypatch.setattr(slow._offloader, "offload", late)
        async with asyncio.TaskGroup() as group:
            group.create_task(slow.handle(request))
            await asyncio.sleep(50)
            old = await world.context(ledger_id)
            await catalog.store.delete(paths.ledger_lock_path(ledger_id), version=-1)
            await world.worker(name="w2").handle(request)
            assert old.uuid is not None
            await catalog.contexts.strike_off(ledger_id, old.uuid)
        assert pb.OffloadResult.OUTCOME_SUPERSEDED in outcomes(world)
        await check_whole(world, ledger_id)

    run_virtual(main())


async def crash_and_recover(world: World, ledger_id: LedgerId, request: Event, steps: int) -> bool:
    """Let a worker die at its ``steps``-th step, then do what others would; True: it died."""
    dying = faults()
    worker = world.worker(dying)
    store: Any = worker._catalog.store
    task = asyncio.create_task(worker.handle(request))
    dying.on_crash = lambda: (store.abandon(), task.cancel())
    dying.crash_after(steps)
    await asyncio.wait({task})
    if not dying.crashed:
        task.result()
    # Redelivered to a peer until it takes it: the dead worker's lock goes with its session.
    peer = world.worker(name="w2")
    for attempt in range(1, 6):
        try:
            await peer.handle(replace(request, attempt=attempt))
            break
        except RetryableError:
            await asyncio.sleep(2**attempt)
    await sweep(world)
    await check_whole(world, ledger_id)
    context = await world.context(ledger_id)
    assert context.attempt_count <= 2
    return dying.crashed


@pytest.mark.covers("A15")
def test_a_crash_at_every_step_leaves_exactly_the_named_objects():
    async def main(steps: int) -> bool:
        world = World()
        claimed, ledger_id = await sealed(world)
        return await crash_and_recover(world, ledger_id, world.request(claimed, ledger_id), steps)

    steps = 1
    while run_virtual(main(steps)):
        steps += 1
    assert steps > 50, "every call has two steps"


@pytest.mark.parametrize(
    "call",
    ["metadata.set", "metadata.create_ephemeral", "events.publish", "objects.complete_upload"],
)
@pytest.mark.parametrize("outcome", [Outcome.REQUEST_LOST, Outcome.REPLY_LOST])
@pytest.mark.parametrize("which", [1, 2])
def test_a_lost_answer_is_read_back_and_never_doubled(call, outcome, which):
    async def main():
        world = World()
        claimed, ledger_id = await sealed(world)
        doubtful = faults()
        if which == 2:
            doubtful.next(call, Outcome.ANSWERED)
        doubtful.next(call, outcome)
        worker = world.worker(doubtful)
        request = world.request(claimed, ledger_id)
        for attempt in range(1, 5):
            try:
                await worker.handle(replace(request, attempt=attempt))
                break
            except RetryableError:
                await asyncio.sleep(10)
        assert worker.completed == 1
        await sweep(world)
        await check_whole(world, ledger_id)

    run_virtual(main())


@pytest.mark.parametrize("seed", range(30))
def test_any_faults_end_well(seed):
    async def main():
        world = World(seed=seed)
        claimed, ledger_id = await sealed(world)
        worker = world.worker(
            faults(seed, refused=0.05, request_lost=0.05, reply_lost=0.05, delay_s_max=0.1),
            deliveries_max=10**6,
            limits=RetryLimits(tries_max=2),
        )
        request = world.request(claimed, ledger_id)
        for attempt in range(1, 200):
            try:
                await worker.handle(replace(request, attempt=attempt))
                break
            except RetryableError:
                await asyncio.sleep(1)
        await sweep(world)
        await check_whole(world, ledger_id)

    run_virtual(main())


class TestRefusals:
    """Clear refusals: aside with the error beside it, acknowledged, never a crash loop."""

    def refused(self, make_event, *, match: str, told: bool = True) -> None:
        async def main():
            world = World()
            claimed, ledger_id = await sealed(world)
            worker = world.worker()
            await worker.handle(await make_event(world, claimed, ledger_id))
            (aside,) = world.queue.events(TOPICS.dead_letter)
            assert match in aside.headers["tierlog_error_message"].decode()
            assert aside.headers["tierlog_topic"] == TOPICS.requested.encode()
            assert worker.attempts == 0
            assert not world.bucket.objects
            if told:
                assert outcomes(world) == [pb.OffloadResult.OUTCOME_REFUSED]

        run_virtual(main())

    def test_no_such_ledger(self):
        async def make(world, claimed, ledger_id):
            return world.request(claimed, LedgerId(999))

        self.refused(make, match="no ledger 999")

    def test_a_bare_ledger(self):
        async def make(world, claimed, ledger_id):
            return world.request(claimed, await bare_ledger(world))

        self.refused(make, match="there is no ledger")

    def test_an_open_ledger(self):
        async def make(world, claimed, ledger_id):
            return world.request(claimed, await world.seal(claimed, [b"a"], close=False))

        self.refused(make, match="only a closed one")

    def test_another_incarnation(self):
        async def make(world, claimed, ledger_id):
            return world.request(replace(claimed, incarnation=UUID(int=5)), ledger_id)

        self.refused(make, match="belongs to")

    def test_another_stream(self):
        async def make(world, claimed, ledger_id):
            return world.request(replace(claimed, name="other"), ledger_id)

        self.refused(make, match="belongs to")

    @pytest.mark.parametrize("value", [b"", b"\xff" * 100, b"garbage", bytes(100_000)])
    def test_garbage(self, value):
        async def make(world, claimed, ledger_id):
            return replace(world.request(claimed, ledger_id), value=value)

        self.refused(make, match="event is no offload request", told=False)

    def test_no_headers(self):
        async def make(world, claimed, ledger_id):
            return replace(world.request(claimed, ledger_id), headers={})

        self.refused(make, match="ce_specversion is missing", told=False)

    def test_a_ledger_gone_from_tier_1(self):
        async def make(world, claimed, ledger_id):
            await world.catalog().store.delete(paths.ledger_path(ledger_id), version=-1)
            return world.request(claimed, ledger_id)

        self.refused(make, match="not in tier 1 any more")


def test_a_store_that_stays_down_ends_in_the_dead_letter_topic_and_in_the_context():
    async def main():
        world = World()
        claimed, ledger_id = await sealed(world)
        down = faults()
        down.outages.add("objects.")
        worker = world.worker(down, deliveries_max=3)
        request = world.request(claimed, ledger_id)
        for attempt in (1, 2):
            with pytest.raises(RetryableError):
                await worker.handle(replace(request, attempt=attempt))
        await worker.handle(replace(request, attempt=3))
        (aside,) = world.queue.events(TOPICS.dead_letter)
        assert aside.headers["tierlog_error_reason"] == b"UNAVAILABLE"
        assert aside.headers["tierlog_attempts"] == b"3"
        assert outcomes(world) == [pb.OffloadResult.OUTCOME_FAILED]
        context = await world.context(ledger_id)
        assert "UNAVAILABLE" in context.last_error
        assert context.state is OffloadState.OFFLOADING
        assert (context.attempt_count, len(context.abandoned)) == (3, 2)
        # It comes back; the next request, of the scheduler, ends well.
        down.outages.clear()
        await worker.handle(world.request(claimed, ledger_id))
        await sweep(world)
        await check_whole(world, ledger_id)
        assert (await world.context(ledger_id)).last_error == ""

    run_virtual(main())


@pytest.mark.covers("A21", "A22")
def test_the_offloader_is_given_and_the_default_offloads_nothing():
    async def main():
        world = World()
        claimed, ledger_id = await sealed(world)
        worker = world.worker()
        worker._offloader = UnconfiguredOffloader()
        await worker.handle(world.request(claimed, ledger_id))
        (aside,) = world.queue.events(TOPICS.dead_letter)
        assert b"no offloader is configured" in aside.headers["tierlog_error_message"]
        assert (await world.context(ledger_id)).state is OffloadState.LOCAL

    run_virtual(main())


def test_a_failed_attempt_takes_its_leftovers_away_at_once():
    async def main():
        world = World()
        claimed, ledger_id = await sealed(world)
        flaky = faults()
        for _ in range(3):
            flaky.next("objects.upload_part", Outcome.ANSWERED)
        flaky.next("objects.upload_part", Outcome.REFUSED)
        with pytest.raises(RetryableError):
            await world.worker(flaky).handle(world.request(claimed, ledger_id))
        assert not world.bucket.objects
        assert not world.bucket.uploads

    run_virtual(main())


def test_damage_on_the_way_is_tried_again_before_it_is_believed():
    async def main():
        world = World()
        claimed, ledger_id = await sealed(world)
        worker = world.worker()

        class Damaged(ListHandle):
            async def read_runs(self, first, last, *, bytes_max=None, wait_s=0.0):
                async for runs in ListHandle.read_runs(self, first, last):
                    yield runs
                    raise CorruptError("a damaged run")

        worker._open_ledger = lambda ledger_id, metadata: Damaged(ledger_id, ENTRIES, metadata)
        request = world.request(claimed, ledger_id)
        with pytest.raises(RetryableError, match="damaged run"):
            await worker.handle(request)
        await worker.handle(replace(request, attempt=5))
        (aside,) = world.queue.events(TOPICS.dead_letter)
        assert aside.headers["tierlog_error_reason"] == b"CORRUPT"

    run_virtual(main())


def test_an_attempt_that_was_superseded_before_it_knew_that_it_began_drops_out(monkeypatch):
    async def main():
        world = World()
        claimed, ledger_id = await sealed(world)
        request, worker = world.request(claimed, ledger_id), world.worker()
        contexts = worker._catalog.contexts
        begin = contexts.begin_attempt

        async def twice(ledger_id, **how):
            # As the round does that comes after a lost answer.
            await begin(ledger_id, **how)
            place = world.offloader().location(ledger_id, UUID(int=7))
            await begin(ledger_id, uuid=UUID(int=7), location=place, worker="w2")
            return await begin(ledger_id, **how)

        monkeypatch.setattr(contexts, "begin_attempt", twice)
        await worker.handle(request)
        assert outcomes(world) == [pb.OffloadResult.OUTCOME_SUPERSEDED]
        assert not world.queue.events(TOPICS.dead_letter)
        assert (await world.context(ledger_id)).uuid == UUID(int=7)
        monkeypatch.undo()
        await worker.handle(request)
        await sweep(world)
        await check_whole(world, ledger_id)

    run_virtual(main())


def test_an_attempt_of_a_ledger_that_is_deleted_meanwhile_cleans_itself():
    async def main():
        world = World()
        claimed, ledger_id = await sealed(world)
        worker = world.worker(part_delay_s=10.0)
        async with asyncio.TaskGroup() as group:
            group.create_task(worker.handle(world.request(claimed, ledger_id)))
            await asyncio.sleep(15)
            await world.catalog().store.delete(paths.context_path(ledger_id), version=-1)
        assert outcomes(world) == [pb.OffloadResult.OUTCOME_SUPERSEDED]
        assert not world.bucket.objects
        assert not world.bucket.uploads

    run_virtual(main())
