"""A queue that takes nothing holds up requests alone: no other work of a pass, and no stop."""

import asyncio

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.world import TOPICS, World
from tests.unit.scheduler.test_prefix import Stuck
from tests.unit.scheduler.test_scheduler import ENTRIES, LIMITS, scheduler
from tierlog.model.ids import StreamName
from tierlog.model.policy import Policy

STREAMS = 3 * LIMITS.streams_in_flight_max
PUBLISH_S = 30


async def due(world, *, streams):
    """Seal two ledgers in each stream that are to be offloaded at once."""
    for number in range(streams):
        name = StreamName(f"orders-{number}")
        claimed = await world.stream(name, Policy(offload_time_ms=0))
        for _ in range(2):
            await world.seal(claimed, ENTRIES)


def test_a_pass_waits_for_it_once_and_the_next_one_asks_for_all():
    async def main():
        world = World()
        await due(world, streams=STREAMS)
        stuck, there = Stuck("slow"), world.queue.publisher()
        leader = scheduler(world, publisher=stuck)
        await leader.begin()
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        await leader.run_pass()
        assert loop.time() - began_s <= PUBLISH_S + 1
        setattr(stuck, "publish", there.publish)  # noqa: B010
        await leader.run_pass()
        assert len(world.queue.events(TOPICS.requested)) == 2 * STREAMS

    run_virtual(main())


def test_who_is_to_stop_waits_for_no_queue():
    async def main():
        world = World()
        await due(world, streams=1)
        leader, stop = scheduler(world, publisher=Stuck("slow")), asyncio.Event()
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(leader.run(stop))
            await asyncio.sleep(5)
            assert leader.leading
            assert not leader.passes
            stop.set()
            began_s = loop.time()
        assert loop.time() - began_s <= 1
        # The next one leads at once: this one gave up its office, and kept its progress.
        stop.clear()
        async with asyncio.TaskGroup() as tasks:
            successor = scheduler(world)
            tasks.create_task(successor.run(stop))
            await asyncio.sleep(1)
            assert successor.leading
            stop.set()

    run_virtual(main())
