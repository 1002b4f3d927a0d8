"""Kafka away at a start: it is asked again with growing waits, and nothing is published before.

Design: reliability.md C2 (Kafka down).
"""

from __future__ import annotations

import asyncio
import itertools
import random

import pytest

from tests.unit.catalog.world import on_virtual_time
from tierlog.adapters.memory.clock import SimClock
from tierlog.adapters.memory.events import MemoryEvents
from tierlog.adapters.memory.ids import SeededIds
from tierlog.model.errors import Reason, RefusedError, RetryableError, TierlogError
from tierlog.offload.awaited_publisher import AwaitedPublisher
from tierlog.ports.retrying import PATIENT

PATIENCE_S = 30.0


class Away:
    """Makes topics once it is there, and knows when it was asked."""

    def __init__(self):
        self.error: TierlogError | None = RetryableError("Kafka is away", remedy="start it")
        self.asked_s: list[float] = []

    async def ensure(self):
        self.asked_s.append(asyncio.get_running_loop().time())
        if self.error is not None:
            raise self.error


class World:
    def __init__(self, seed=1):
        self.kafka = Away()
        self.queue = MemoryEvents(random.Random(seed))
        self.publisher = AwaitedPublisher(
            self.queue.publisher(),
            self.kafka.ensure,
            clock=SimClock(),
            ids=SeededIds(random.Random(seed)),
            patience_s=PATIENCE_S,
        )

    async def publish(self):
        await self.publisher.publish("t", key=b"k", value=b"v", headers={})


@on_virtual_time
async def test_it_is_asked_again_until_it_is_there_and_waits_are_capped():
    world = World()
    async with asyncio.TaskGroup() as tasks:
        coming = tasks.create_task(world.publisher.come())
        await asyncio.sleep(1000)
        assert not coming.done()
        world.kafka.error = None
    waits = [late - early for early, late in itertools.pairwise(world.kafka.asked_s)]
    assert len(waits) > 100
    assert max(waits[:3]) <= 4 * PATIENT.wait_s_first
    assert max(waits) <= PATIENT.wait_s_max
    assert max(waits) > PATIENT.wait_s_max / 2
    assert await world.publisher.answers()


@on_virtual_time
async def test_those_who_wait_together_do_not_ask_together():
    worlds = [World(seed) for seed in range(20)]
    async with asyncio.TaskGroup() as tasks:
        for world in worlds:
            tasks.create_task(world.publisher.come())
        await asyncio.sleep(50)
        for world in worlds:
            world.kafka.error = None
    asked = [round(world.kafka.asked_s[-1], 3) for world in worlds]
    assert len(set(asked)) == len(worlds)


@on_virtual_time
async def test_what_is_published_meanwhile_waits_and_then_goes():
    world = World()
    async with asyncio.TaskGroup() as tasks:
        publishing = tasks.create_task(world.publish())
        tasks.create_task(world.publisher.come())
        await asyncio.sleep(5)
        assert not publishing.done()
        assert world.queue.events("t") == []
        world.kafka.error = None
    assert len(world.queue.events("t")) == 1


@on_virtual_time
async def test_but_not_for_ever_and_readiness_says_why_each_time_anew():
    world = World()
    with pytest.raises(RetryableError, match=r"not reached yet.*kafka\.bootstrap_servers"):
        await world.publisher.answers()
    async with asyncio.TaskGroup() as tasks:
        coming = tasks.create_task(world.publisher.come())
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        with pytest.raises(RetryableError, match=r"Kafka is away\. start it") as caught:
            await world.publish()
        assert loop.time() - began_s == pytest.approx(PATIENCE_S)
        assert caught.value.reason is Reason.UNAVAILABLE
        with pytest.raises(RetryableError, match="start it") as again:
            await world.publisher.answers()
        assert again.value is not caught.value, "an error that is raised again and again grows"
        coming.cancel()
    assert world.queue.events("t") == []


@on_virtual_time
async def test_what_no_later_try_can_mend_ends_it():
    world = World()
    world.kafka.error = RefusedError("three copies on one broker")
    with pytest.raises(RefusedError):
        await world.publisher.come()
    assert len(world.kafka.asked_s) == 1


@on_virtual_time
async def test_who_does_not_wait_is_told_at_once():
    world = World()
    with pytest.raises(RetryableError, match="Kafka is away"):
        await world.publisher.ensure()
    world.kafka.error = None
    await world.publisher.ensure()
    await world.publish()
    assert len(world.queue.events("t")) == 1
