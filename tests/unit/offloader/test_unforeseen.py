"""What a driver raises that nobody foresaw: a failure of that ledger's copy, and of nothing else.

It is told with its trace and counted, the request comes to the dead letters, and no other copy is
torn off for it; a cancellation goes through as it always does.
"""

import asyncio

import pytest
import structlog

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.world import TOPICS, World
from tierlog.model.offload import OffloadState
from tierlog.offload.messages import parse_result
from tierlog.proto.v1 import events_pb2 as pb
from tierlog.runtime.worker import WorkerLimits, run_worker
from tierlog_offloader import metrics

LEDGERS = 8
NO_ROOM = OSError(28, "no room on the shelf \udcff")


def counted() -> float:
    return float(metrics.UNEXPECTED._value.get())


class Shelf:
    """A driver around another one that raises its own errors, for some of what it is asked."""

    def __init__(self, offloader, bad, *, offloads=10**9, deletes=False) -> None:
        self._offloader, self._bad = offloader, bad
        self._offloads, self._deletes = offloads, deletes

    def __getattr__(self, name):
        return getattr(self._offloader, name)

    async def offload(self, handle, uuid, extra_metadata, **options):
        await asyncio.sleep(1 if handle.ledger_id == self._bad else 5)
        copy = await self._offloader.offload(handle, uuid, extra_metadata, **options)
        if handle.ledger_id == self._bad and self._offloads:
            self._offloads -= 1
            raise NO_ROOM
        return copy

    async def delete_offloaded(self, ledger_id, uuid, *location):
        if ledger_id == self._bad and self._deletes:
            raise KeyError(uuid)
        await self._offloader.delete_offloaded(ledger_id, uuid, *location)


async def ask_for_all(world: World):
    """Ask for eight ledgers; return them, in their order."""
    claimed, publisher = await world.stream(), world.queue.publisher()
    ledgers = [await world.seal(claimed, [b"%d" % number] * 9) for number in range(LEDGERS)]
    for ledger_id in ledgers:
        asked = world.request(claimed, ledger_id)
        await publisher.publish(
            asked.topic, key=asked.key, value=asked.value, headers=asked.headers
        )
    return ledgers


async def work(world: World, bad, seconds: float, **options) -> None:
    worker = world.worker(deliveries_max=3)
    worker._offloader = Shelf(worker._offloader, bad, **options)
    source, stop = world.queue.source([TOPICS.requested], group="offloader"), asyncio.Event()
    limits = WorkerLimits(in_flight_max=LEDGERS, drain_s_max=5)
    async with asyncio.TaskGroup() as group:
        group.create_task(run_worker(source, worker.handle, stop=stop, limits=limits))
        await asyncio.sleep(seconds)
        stop.set()


def test_what_nobody_foresaw_of_one_ledger_is_a_failed_try_of_it_alone():
    async def main():
        world, before = World(), counted()
        bad, *others = await ask_for_all(world)
        with structlog.testing.capture_logs() as logs:
            await work(world, bad, 300)
        for ledger_id in others:
            context = await world.context(ledger_id)
            assert (context.complete, context.attempt_count) == (True, 1), "none was torn off"
        (letter,) = world.queue.events(TOPICS.dead_letter)
        assert letter.headers["tierlog_attempts"] == b"3"
        assert b"no room on the shelf" in letter.headers["tierlog_error_message"]
        results = [parse_result(one) for one in world.queue.events(TOPICS.completed)]
        (failed,) = [one for one in results if one.ledger_id == bad]
        assert failed.outcome == pb.OffloadResult.OUTCOME_FAILED
        context = await world.context(bad)
        assert context.state is OffloadState.OFFLOADING
        assert "unexpected OSError" in context.last_error
        assert counted() == before + 3
        told = [one for one in logs if one["event"] == "unexpected_error"]
        assert [one["exc_info"] for one in told] == [NO_ROOM] * 3
        assert world.queue.lag(TOPICS.requested, "offloader") == 0
        assert set(world.bucket.objects) == await world.expected_keys(), "leftovers are gone"

    run_virtual(main())


def test_leftovers_that_a_driver_cannot_delete_keep_no_later_try_from_its_copy():
    async def main():
        world = World()
        bad, *_ = await ask_for_all(world)
        with structlog.testing.capture_logs() as logs:
            await work(world, bad, 300, offloads=2, deletes=True)
        told = {type(one["exc_info"]) for one in logs if one["event"] == "unexpected_error"}
        assert told == {OSError, KeyError}
        assert not world.queue.events(TOPICS.dead_letter)
        context = await world.context(bad)
        assert (context.complete, context.attempt_count, len(context.abandoned)) == (True, 3, 2)

    run_virtual(main())


def test_what_is_raised_outside_of_the_driver_is_a_failed_try_too(monkeypatch):
    async def main():
        world, before = World(), counted()
        bad, *others = await ask_for_all(world)
        whole = world.open_ledger

        def broken(ledger_id, metadata):
            if ledger_id == bad:
                raise ZeroDivisionError
            return whole(ledger_id, metadata)

        monkeypatch.setattr(world, "open_ledger", broken)
        await work(world, None, 300)
        assert len(world.queue.events(TOPICS.dead_letter)) == 1
        assert counted() == before + 3
        assert all([(await world.context(one)).complete for one in others])

    run_virtual(main())


@pytest.mark.parametrize("ending", [asyncio.CancelledError, SystemExit])
def test_a_cancellation_or_an_exit_is_nobodys_failed_try(monkeypatch, ending):
    async def main():
        world, before = World(), counted()
        claimed = await world.stream()
        ledger_id = await world.seal(claimed, [b"one"])
        worker = world.worker()

        async def offload(*args, **options):
            raise ending

        monkeypatch.setattr(worker._offloader, "offload", offload)
        with pytest.raises(ending):
            await worker.handle(world.request(claimed, ledger_id))
        assert counted() == before
        assert not (await world.context(ledger_id)).last_error
        assert not world.queue.events(TOPICS.dead_letter)

    run_virtual(main())
