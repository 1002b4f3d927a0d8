"""A queue that takes nothing holds up requests alone: no other work of a pass, and no stop."""

import asyncio
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from prometheus_client import REGISTRY

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.world import TOPICS, World
from tests.unit.scheduler.test_prefix import Stuck
from tests.unit.scheduler.test_scheduler import ENTRIES, LIMITS, scheduler
from tierlog.adapters.memory.clock import SimClock
from tierlog.model.errors import RetryableError
from tierlog.model.ids import StreamName
from tierlog.model.policy import Policy
from tierlog.offload.awaited_publisher import AwaitedPublisher
from tierlog.runtime.http import serve_http
from tierlog.runtime.worker import WorkerLimits, run_worker
from tierlog_scheduler.main import _app

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


@pytest.mark.parametrize("how", ["slow", "refuses"])
def test_all_that_became_due_in_ten_minutes_without_it_is_complete_a_minute_later(how):
    async def main():
        world, stop = World(), asyncio.Event()
        await due(world, streams=STREAMS)
        stuck, there = Stuck(how), world.queue.publisher()
        leader = scheduler(world, publisher=stuck)
        source = world.queue.source([TOPICS.requested], group="g")
        limits = WorkerLimits(in_flight_max=2, drain_s_max=5)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(leader.run(stop))
            tasks.create_task(run_worker(source, world.worker().handle, stop=stop, limits=limits))
            await asyncio.sleep(600)
            assert not any([(await world.context(one)).complete for one in world.ledgers])
            setattr(stuck, "publish", there.publish)  # noqa: B010
            await asyncio.sleep(60)
            found = [await world.context(one) for one in world.ledgers]
            stop.set()
        assert [(one.complete, one.attempt_count) for one in found] == [(True, 1)] * 2 * STREAMS

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


async def test_who_never_reached_it_is_ready_for_admins_and_tells_of_it():
    world, away = World(), True

    async def ensure():
        if away:
            raise RetryableError("Kafka is away", remedy="Start Kafka")

    publisher = AwaitedPublisher(
        world.queue.publisher(), ensure, clock=SimClock(), ids=world.ids, patience_s=1
    )
    parts: Any = SimpleNamespace(
        catalog=world.catalog(), publisher=publisher, cluster=SimpleNamespace(cluster_id=None)
    )
    nobody: Any = SimpleNamespace()
    app = _app(parts, scheduler(world), nobody, nobody, nobody)
    async with (
        serve_http(app, host="127.0.0.1", port=0) as port,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session,
    ):

        async def told():
            async with session.get("/readyz?verbose") as answer:
                return answer.status, await answer.json()

        status, body = await told()
        assert (status, body["ready"]) == (200, True)
        assert body["checks"] == {"metadata": True, "queue": False}
        assert body["remedies"].keys() == {"queue"}
        assert REGISTRY.get_sample_value("tierlog_queue_reached") == 0
        away = False
        await publisher.come()
        assert (await told())[1]["checks"] == {"metadata": True, "queue": True}
        assert REGISTRY.get_sample_value("tierlog_queue_reached") == 1
