"""Poison, and requests of other versions, every so often among the rest (B24).

What nobody can read is put aside once, however often workers are stopped and started; what an
older or a newer publisher says is understood, or put aside, and never holds anyone up.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.world import TOPICS, World
from tierlog.adapters.memory.events import MemoryEventLog, MemoryEventSource
from tierlog.adapters.memory.faults import FaultRates, Faults
from tierlog.offload.dead_letters import DeadLetters
from tierlog.ports.events import Event
from tierlog.proto.v1 import events_pb2 as pb
from tierlog.runtime.worker import WorkerLimits, run_worker

LEDGERS = 30
LIMITS = WorkerLimits(in_flight_max=2, drain_s_max=60)
GROUP = "offloaders"
UNKNOWN_FIELD = b"\x9a\x06\x05later"
"""Field 99, of five bytes."""


def older(event: Event) -> Event:
    """As a publisher from before traces and counts says it."""
    message = pb.OffloadRequest.FromString(event.value)
    message.ClearField("request_count")
    headers = {name: one for name, one in event.headers.items() if name != "traceparent"}
    return replace(event, value=message.SerializeToString(), headers=headers)


def newer(event: Event) -> Event:
    """As a publisher says it that has more to say."""
    headers = {**event.headers, "ce_specversion": b"1.1", "ce_priority": b"high"}
    return replace(event, value=event.value + UNKNOWN_FIELD, headers=headers)


def with_headers(**changed: bytes) -> Callable[[Event], Event]:
    return lambda event: replace(event, headers={**event.headers, **changed})


UNDERSTOOD = (lambda event: event, older, newer)
POISON: tuple[Callable[[Event], Event], ...] = (
    lambda event: replace(event, value=bytes(range(200, 256)), headers={}),
    with_headers(ce_specversion=b"2.0"),
    with_headers(ce_dataschema=b"tierlog.v2.OffloadRequest"),
    lambda event: replace(event, value=b"\xff" * 9),
    with_headers(ce_specversion=b"0.3"),
    lambda event: replace(event, value=b""),
)


async def filled(world: World) -> int:
    """Ask for each ledger, every third time with poison before it; return how much of that."""
    claimed = await world.stream()
    publisher, poison = world.queue.publisher(), 0
    for number in range(LEDGERS):
        ledger_id = await world.seal(claimed, [b"%d" % number])
        plain = world.request(claimed, ledger_id)
        sent = [UNDERSTOOD[number % 3](plain)]
        if number % 3 == 0:
            sent.insert(0, POISON[(number // 3) % len(POISON)](plain))
            poison += 1
        for one in sent:
            await publisher.publish(one.topic, key=one.key, value=one.value, headers=one.headers)
    return poison


async def work(world: World, given: Faults, seconds: float, *, kill: bool = False) -> None:
    """Run a worker for so long; it is stopped in order, or dies."""
    source: MemoryEventSource = world.queue.source([TOPICS.requested], group=GROUP, faults=given)
    stop = asyncio.Event()
    worker = world.worker(given)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(run_worker(source, worker.handle, stop=stop, limits=LIMITS))
        given.on_crash = task.cancel
        await asyncio.sleep(seconds)
        if kill:
            given.crashed = True
            task.cancel()
        stop.set()
    if kill:
        source.abandon()
        store: Any = worker._catalog.store
        store.abandon()
        await asyncio.sleep(10)
    else:
        await source.close()


async def check(world: World, poison: int) -> None:
    assert world.queue.lag(TOPICS.requested, GROUP) == 0
    letters = DeadLetters(
        MemoryEventLog(world.queue), world.queue.publisher(), world.stationery, newest_max=1000
    )
    assert len(await letters.find()) == poison
    for ledger_id in world.ledgers:
        assert (await world.context(ledger_id)).complete


@pytest.mark.parametrize("seconds", [0.3, 0.7, 1.5, 3.0])
def test_the_count_of_dead_letters_is_exact_after_restarts_in_the_middle(seconds):
    async def main():
        world = World()
        poison = await filled(world)
        slow = Faults(random.Random(1), rates=FaultRates(delay_s_max=0.05))
        lives = 0
        while not lives or world.queue.lag(TOPICS.requested, GROUP):
            await work(world, slow, seconds)
            lives += 1
        assert lives > 2
        await check(world, poison)
        counts = [(await world.context(one)).attempt_count for one in world.ledgers]
        assert counts == [1] * LEDGERS

    with capture_logs():
        run_virtual(main())


@pytest.mark.parametrize("life_s", [2.1, 2.9, 4.7])
def test_killed_workers_lose_no_letter_and_double_only_what_was_in_hand(life_s):
    async def main():
        world = World()
        poison = await filled(world)
        rng, lives = random.Random(5), 0
        while not lives or world.queue.lag(TOPICS.requested, GROUP):
            slow = Faults(rng, rates=FaultRates(delay_s_max=0.05))
            await work(world, slow, life_s, kill=True)
            lives += 1
            assert lives < 300
        letters = world.queue.events(TOPICS.dead_letter)
        kinds = {(one.key, one.value, one.headers["tierlog_error_message"]) for one in letters}
        assert len(kinds) == poison
        assert poison <= len(letters) <= poison + LIMITS.in_flight_max * lives
        for ledger_id in world.ledgers:
            assert (await world.context(ledger_id)).complete

    with capture_logs():
        run_virtual(main())
