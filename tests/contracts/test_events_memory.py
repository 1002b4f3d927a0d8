"""The queue's twin keeps the contract, and misbehaves only as it is told to."""

import asyncio
import random
from collections import Counter

import pytest

from tests.contracts.event_log_suite import EventLogContract
from tests.contracts.events_suite import EventsContract
from tests.simulation.virtual_loop import run_virtual
from tierlog.adapters.memory.events import MemoryEventLog, MemoryEvents, QueueRates
from tierlog.adapters.memory.faults import Faults, Outcome
from tierlog.model.errors import RetryableError


class MemoryQueue:
    def __init__(self) -> None:
        self.broker = MemoryEvents(random.Random(1))

    async def topic(self) -> str:
        return "topic"

    def publisher(self):
        return self.broker.publisher()

    def log(self):
        return MemoryEventLog(self.broker)

    def source(self, topic, *, group, **options):
        return self.broker.source([topic], group=group, **options)


@pytest.fixture
def queue():
    return MemoryQueue()


class TestMemoryEvents(EventsContract):
    pass


class TestMemoryEventLog(EventLogContract):
    pass


async def publish(broker, count, **how):
    publisher = broker.publisher(**how)
    for number in range(count):
        await publisher.publish("t", key=b"%d" % number, value=b"%d" % number, headers={})


async def take_for(source, seconds):
    values: list[bytes] = []
    try:
        async with asyncio.timeout(seconds):
            while True:
                event = await source.take()
                values.append(event.value)
                await source.ack(event)
    except TimeoutError:
        return values


def test_repeats_losses_and_delays_are_drawn_from_the_seed():
    async def main(seed):
        rates = QueueRates(repeated=0.2, lost=0.1, delay_s_max=5)
        broker = MemoryEvents(random.Random(seed), rates=rates)
        source = broker.source(["t"], group="g")
        await publish(broker, 500)
        return Counter(await take_for(source, 60))

    counts = run_virtual(main(1))
    assert 400 < len(counts) < 490
    assert 50 < sum(count == 2 for count in counts.values()) < 150
    assert run_virtual(main(1)) == counts
    assert run_virtual(main(2)) != counts


def test_a_wiped_broker_starts_again_from_nothing():
    async def main():
        broker = MemoryEvents(random.Random(1))
        source = broker.source(["t"], group="g")
        await publish(broker, 3)
        held = await source.take()
        broker.wipe()
        await publish(broker, 2)
        values = await take_for(source, 10)
        await source.ack(held)  # of a log that is no more
        await source.retry_later(held)
        assert await take_for(source, 60) == []
        return sorted(values), broker.lag("t", "g")

    assert run_virtual(main()) == ([b"0", b"1"], 0)


def test_a_dead_member_is_noticed_after_the_session_timeout():
    async def main():
        broker = MemoryEvents(random.Random(1), session_timeout_s=6)
        dead, alive = broker.source(["t"], group="g"), broker.source(["t"], group="g")
        await publish(broker, 20)
        died_with = await dead.take()
        dead.abandon()
        early = await take_for(alive, 5)
        late = await take_for(alive, 5)
        assert died_with.value in late
        return sorted(early + late, key=int)

    assert run_virtual(main()) == [b"%d" % n for n in range(20)]


async def test_a_lost_commit_means_redelivery_or_is_made_good_by_the_next():
    broker, faults = MemoryEvents(random.Random(1), partitions=1), Faults(random.Random(1))
    source = broker.source(["t"], group="g", faults=faults)
    await publish(broker, 2)
    faults.next("events.ack", Outcome.REQUEST_LOST)
    await source.ack(await source.take())
    assert broker.lag("t", "g") == 2
    await source.ack(await source.take())
    assert broker.lag("t", "g") == 0


async def test_an_unreachable_broker_takes_nothing():
    broker, faults = MemoryEvents(random.Random(1)), Faults(random.Random(1))
    faults.outages.add("events.publish")
    with pytest.raises(RetryableError):
        await publish(broker, 1, faults=faults)
    assert broker.events("t") == []
