"""Locks that nobody means any more: no ledger waits for one longer than a session (B25)."""

import asyncio
import contextlib
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.world import World
from tests.unit.scheduler.test_scheduler import faults, running
from tierlog.adapters.memory.faults import Outcome
from tierlog.catalog.election import CourtesyLock
from tierlog.format import paths
from tierlog.model.errors import RetryableError
from tierlog.model.policy import Policy
from tierlog.offload.attempting import LOCKS_LEFT_S
from tierlog.offload.messages import Trigger

ENTRIES = [b"one", b"three"]
SESSION_S = 6.0
REQUEST_AGAIN_S = 60.0


async def cancelled_at(tick: int, again: int | None) -> bool:
    """Cancel a worker in mid-request, perhaps twice; tell whether it was still at work."""
    world = World()
    claimed = await world.stream()
    ledger_id, other = [await world.seal(claimed, ENTRIES) for _ in range(2)]
    worker, lock = world.worker(), paths.ledger_lock_path(ledger_id)
    at_work = True
    async with asyncio.TaskGroup() as group:
        handling = group.create_task(worker.handle(world.request(claimed, ledger_id)))
        for _ in range(tick):
            await asyncio.sleep(0)
        at_work = not handling.done()
        handling.cancel()
        if again is not None:
            for _ in range(again):
                await asyncio.sleep(0)
            handling.cancel()
    if again is not None:
        # Torn out of giving it back twice: with its next request it does.
        await worker.handle(world.request(claimed, other))
    assert world.metadata.get(lock) is None, f"cancelled at {tick}, {again}"
    await world.worker(name="w2").handle(world.request(claimed, ledger_id))
    assert (await world.context(ledger_id)).complete
    return at_work


@pytest.mark.parametrize("again", [None, 0, 1, 2, 3, 5, 8])
def test_a_worker_that_is_cancelled_anywhere_leaves_no_lock_behind(again):
    with capture_logs():
        tick = 0
        while run_virtual(cancelled_at(tick, again)):
            tick += 1
    assert tick > 50


def test_a_lock_that_was_left_is_given_back_though_no_request_comes():
    async def main():
        world = World()
        claimed = await world.stream()
        ledger_id = await world.seal(claimed, ENTRIES)
        worker, path = world.worker(), paths.ledger_lock_path(ledger_id)
        left = CourtesyLock(world.catalog().store, path, worker._holder)
        assert await left.take()
        worker._locks_left[ledger_id] = left
        releasing = asyncio.create_task(worker.keep_releasing())
        await asyncio.sleep(LOCKS_LEFT_S + 1)
        assert world.metadata.get(path) is None
        assert not worker._locks_left
        releasing.cancel()

    run_virtual(main())


def test_a_lock_that_was_left_is_not_given_back_under_the_hands_of_who_takes_it():
    async def main():
        world, begun, go_on = World(), asyncio.Event(), asyncio.Event()
        claimed = await world.stream()
        ledger_id = await world.seal(claimed, ENTRIES)
        worker, path = world.worker(), paths.ledger_lock_path(ledger_id)

        class Left(CourtesyLock):
            async def release(self) -> bool:
                if not begun.is_set():
                    begun.set()
                    await go_on.wait()
                return await super().release()

        left = Left(world.catalog().store, path, worker._holder)
        assert await left.take()
        worker._locks_left[ledger_id] = left
        async with asyncio.TaskGroup() as group:
            slow = group.create_task(worker._release_left())
            await begun.wait()
            with contextlib.suppress(RetryableError):
                # What each request does.
                await worker._release_left()
                async with worker._lock(ledger_id):
                    go_on.set()
                    await slow
                    assert world.metadata.get(path) is not None, "it is another one's by now"
            go_on.set()
        assert world.metadata.get(path) is None
        await worker.handle(world.request(claimed, ledger_id))
        assert (await world.context(ledger_id)).complete
        assert not worker._locks_left

    run_virtual(main())


def test_the_lock_of_a_worker_that_died_holds_its_ledger_up_no_longer_than_its_session():
    async def main():
        world = World()
        claimed = await world.stream(policy=Policy(offload_time_ms=0, deletion_lag_ms=-1))
        ledger_id = await world.seal(claimed, ENTRIES)
        dead: Any = world.metadata.connect()
        orphan = CourtesyLock(dead, paths.ledger_lock_path(ledger_id), world.ids.uuid())
        assert await orphan.take()
        dead.abandon()
        async with running(world, workers=2):
            await asyncio.sleep(SESSION_S - 1)
            assert not (await world.context(ledger_id)).complete
            await asyncio.sleep(REQUEST_AGAIN_S)
            assert (await world.context(ledger_id)).complete
        assert (await world.context(ledger_id)).attempt_count == 1

    run_virtual(main())


@pytest.mark.parametrize("outcome", [Outcome.REPLY_LOST, Outcome.REQUEST_LOST])
@pytest.mark.parametrize("call", ["metadata.create_ephemeral", "metadata.delete"])
def test_a_lock_whose_taking_or_giving_back_has_no_answer_is_nobodys_afterwards(call, outcome):
    async def main():
        world, given = World(), faults()
        claimed = await world.stream()
        ledger_id = await world.seal(claimed, ENTRIES)
        given.next(call, outcome)
        worker = world.worker(given)
        await worker.handle(world.request(claimed, ledger_id, Trigger.ADMIN))
        assert not given._script, "it did not come"
        assert world.metadata.get(paths.ledger_lock_path(ledger_id)) is None
        assert (await world.context(ledger_id)).attempt_count == 1

    run_virtual(main())
