"""A queue that lost everything: what was asked for is asked for again soon, and not too often.

docs/reference/faults.md: complete within 60 s after every fault, with the settings as shipped.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.world import STREAM, TOPICS, World
from tests.unit.scheduler.test_scheduler import ENTRIES, scheduler
from tierlog.adapters.memory.faults import no_faults
from tierlog.model.ids import LedgerId
from tierlog.model.policy import Policy
from tierlog.model.stream import Stream
from tierlog.ports.events import EventPublisher, TopicMark
from tierlog.runtime.settings import SchedulerSettings
from tierlog.runtime.worker import WorkerLimits, run_worker
from tierlog_scheduler.scheduler import Scheduler, SchedulerLimits

ASKED_S_MAX = 45
"""A minute, less what a copy of a few blocks and a group that forms again take."""
DAY = 86_400.0


def shipped() -> SchedulerLimits:
    own = SchedulerSettings()
    return SchedulerLimits(interval_s=own.interval_s, request_again_s=own.request_again_s)


@asynccontextmanager
async def led(world: World, publisher: EventPublisher | None = None) -> AsyncIterator[Scheduler]:
    """Run a leader as it is shipped, and no worker."""
    stop, leader = asyncio.Event(), scheduler(world, limits=shipped(), publisher=publisher)
    async with asyncio.TaskGroup() as group:
        group.create_task(leader.run(stop))
        try:
            yield leader
        finally:
            stop.set()


async def due(world: World) -> tuple[Stream, LedgerId]:
    claimed = await world.stream(policy=Policy(offload_time_ms=0, deletion_lag_ms=-1))
    return claimed, await world.seal(claimed, ENTRIES)


def asked(world: World) -> int:
    return len(world.queue.events(TOPICS.requested))


@asynccontextmanager
async def at_work(world: World) -> AsyncIterator[None]:
    """Run a worker."""
    stop = asyncio.Event()
    source = world.queue.source([TOPICS.requested], group="g")
    limits = WorkerLimits(in_flight_max=1, drain_s_max=5)
    async with asyncio.TaskGroup() as group:
        group.create_task(run_worker(source, world.worker().handle, stop=stop, limits=limits))
        try:
            yield
        finally:
            stop.set()


@pytest.mark.parametrize("waited_s", [1, 15, 29, 200, 1000, 3000, DAY])
def test_what_a_wiped_queue_lost_is_complete_in_a_minute(waited_s: float):
    async def main():
        world = World()
        _, ledger_id = await due(world)
        async with led(world):
            await asyncio.sleep(waited_s)
            assert asked(world) >= 1
            world.queue.wipe()
            async with at_work(world):
                await asyncio.sleep(ASKED_S_MAX)
                assert (await world.context(ledger_id)).complete
                assert asked(world) == 1, "and asked for once"

    run_virtual(main())


def test_so_is_what_it_lost_while_it_was_away_from_when_it_is_back():
    async def main():
        world = World()
        _, ledger_id = await due(world)
        faults = no_faults()
        async with led(world, world.queue.publisher(faults)):
            await asyncio.sleep(1000)
            faults.outages = {"events.publish", "events.mark"}
            await asyncio.sleep(1000)
            world.queue.wipe()
            faults.outages = set()
            async with at_work(world):
                await asyncio.sleep(ASKED_S_MAX)
                assert (await world.context(ledger_id)).complete

    run_virtual(main())


def test_who_has_asked_for_nothing_asks_the_queue_nothing():
    async def main():
        world = World()
        _, ledger_id = await due(world)
        faults = no_faults()
        async with led(world, world.queue.publisher(faults)):
            faults.calls = []
            await asyncio.sleep(100)
            async with at_work(world):
                await asyncio.sleep(2 * shipped().interval_s)
            assert (await world.context(ledger_id)).complete
            assert "events.mark" in faults.calls
            faults.calls = []
            await asyncio.sleep(1000)
            assert faults.calls == []

    run_virtual(main())


@pytest.mark.parametrize(
    ("later", "lost"),
    [
        (TopicMark(topic_id="a", ends={0: 7, 1: 0}), False),
        (TopicMark(topic_id="a", ends={0: 9, 1: 1}), False),
        (TopicMark(topic_id="a", ends={0: 6, 1: 9}), True),
        (TopicMark(topic_id="b", ends={0: 9, 1: 9}), True),
        (TopicMark(topic_id="a", ends={1: 9}), True),
        (TopicMark(), True),
    ],
)
def test_a_topic_has_lost_events_where_it_is_another_one_or_shorter(later: TopicMark, lost: bool):
    assert TopicMark(topic_id="a", ends={0: 7, 1: 0}).is_lost_in(later) is lost
    assert not TopicMark().is_lost_in(later), "nothing was there"


def test_what_waits_in_the_queue_unharmed_costs_it_little():
    async def main():
        world = World()
        await due(world)
        async with led(world):
            await asyncio.sleep(3600)
            assert asked(world) <= 8
            await asyncio.sleep(DAY)
            # As many as before for each day that it waits longer: one in 64 minutes.
            assert asked(world) <= 8 + 24

    run_virtual(main())


def test_a_stream_that_is_resumed_is_asked_for_at_once_however_often_it_was_before():
    async def main():
        world = World()
        _, ledger_id = await due(world)
        async with led(world):
            await asyncio.sleep(1000)
            streams = world.catalog().streams
            await streams.pause_offload(STREAM, "the bucket is moved")
            # Who takes it meanwhile drops it, as of a stream that is paused.
            world.queue.wipe()
            await asyncio.sleep(60)
            assert asked(world) == 0
            await streams.resume_offload(STREAM)
            async with at_work(world):
                await asyncio.sleep(2 * shipped().interval_s)
                assert (await world.context(ledger_id)).complete

    run_virtual(main())


def test_a_pause_that_begins_and_ends_between_two_passes_is_seen():
    """Who took the request meanwhile has dropped it, and says so to nobody that leads."""

    async def main():
        world = World()
        _, ledger_id = await due(world)
        async with led(world) as leader:
            await asyncio.sleep(3003)
            streams, passes = world.catalog().streams, leader.passes
            await streams.pause_offload(STREAM)
            async with at_work(world):
                while world.queue.lag(TOPICS.requested, "g"):
                    await asyncio.sleep(0.1)
                await streams.resume_offload(STREAM)
                assert leader.passes == passes
                assert not (await world.context(ledger_id)).complete
                await asyncio.sleep(2 * shipped().interval_s)
                assert (await world.context(ledger_id)).complete

    run_virtual(main())


def test_who_names_no_limits_has_those_that_are_shipped():
    own, limits = SchedulerSettings(), SchedulerLimits()
    assert (own.interval_s, own.request_again_s) == (limits.interval_s, limits.request_again_s)
