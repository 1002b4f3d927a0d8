"""Kafka keeps the queue's contract, through slow handlers, lost topics and brokers that forgot.

Design: protocols.md section 3 (a request may come twice, late, or never; nothing is lost by it),
reliability.md B23 (a handler slower than max.poll.interval) and C2 (Kafka lost all data).
"""

import asyncio
import contextlib
import uuid

import pytest
from prometheus_client import REGISTRY

from tests.contracts.event_log_suite import EventLogContract
from tests.contracts.events_suite import QUICK, EventsContract
from tierlog.adapters.kafka import source as source_module
from tierlog.adapters.kafka.event_log import KafkaEventLog
from tierlog.adapters.kafka.publisher import KafkaPublisher
from tierlog.adapters.kafka.source import KafkaEventSource
from tierlog.adapters.kafka.topics import ensure_topics, topic_specs
from tierlog.model.errors import Reason, RefusedError, RetryableError
from tierlog.offload.messages import Topics
from tierlog.offload.topics import TopicSpec
from tierlog.ports.events import TopicMark

pytestmark = pytest.mark.integration

PARTITIONS = 3
LAG_NAME = "tierlog_kafka_consumer_lag_messages"


class KafkaQueue:
    """Gives clients of one broker, with names of their own, and closes them."""

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap = bootstrap
        self.prefix = f"contract-{uuid.uuid4()}"
        self.given: list[KafkaPublisher | KafkaEventSource] = []

    async def topic(self) -> str:
        name = f"{self.prefix}.events.v1"
        await ensure_topics(self.bootstrap, self.specs(name))
        return name

    def specs(self, name: str) -> list[TopicSpec]:
        return topic_specs([name], partitions=PARTITIONS, replication_factor=1)

    def publisher(self, **options) -> KafkaPublisher:
        publisher = KafkaPublisher(self.bootstrap, publish_timeout_s=10, **options)
        self.given.append(publisher)
        return publisher

    def log(self) -> KafkaEventLog:
        return KafkaEventLog(self.bootstrap, timeout_s=10)

    def source(self, topic, *, group, **options) -> KafkaEventSource:
        source = KafkaEventSource(
            self.bootstrap, [topic], group=f"{self.prefix}-{group}", **options
        )
        self.given.append(source)
        return source

    async def close(self) -> None:
        async with asyncio.TaskGroup() as group:
            for each in self.given:
                group.create_task(each.close())


@pytest.fixture
async def queue(servers):
    queue = KafkaQueue(servers.endpoints.kafka_bootstrap)
    yield queue
    await queue.close()


class TestKafkaEvents(EventsContract):
    pass


class TestKafkaEventLog(EventLogContract):
    pass


async def test_how_far_a_member_is_behind_is_a_metric(queue, monkeypatch):
    monkeypatch.setattr(source_module, "LAG_INTERVAL_S", 0.05)
    topic = await queue.topic()
    publisher, source = queue.publisher(), queue.source(topic, group="behind")
    of = {"group": f"{queue.prefix}-behind", "topic": topic}

    async def until_behind(count: int) -> None:
        async with asyncio.timeout(30):
            while REGISTRY.get_sample_value(LAG_NAME, of) != count:
                await asyncio.sleep(0.05)

    for number in range(6):
        await publisher.publish(topic, key=b"%d" % number, value=b"", headers={})
    events = [await source.take() for _ in range(6)]
    await until_behind(6)
    for event in events:
        await source.ack(event)
    await until_behind(0)


async def test_topics_are_created_once_and_again_is_no_error(queue):
    names = Topics.of(queue.prefix)
    assert sorted(names) == [
        f"{queue.prefix}.offload.completed.v1",
        f"{queue.prefix}.offload.requested.v1",
        f"{queue.prefix}.offload.requested.v1.dlq",
    ]
    specs = topic_specs(names, partitions=4, replication_factor=1)
    assert sorted(await ensure_topics(queue.bootstrap, specs)) == sorted(names)
    assert await ensure_topics(queue.bootstrap, specs) == []


async def test_a_cluster_too_small_is_said_so(queue):
    specs = topic_specs([f"{queue.prefix}.x"], partitions=1, replication_factor=3)
    with pytest.raises(RefusedError, match=r"kafka\.replication_factor"):
        await ensure_topics(queue.bootstrap, specs)


async def test_an_unreachable_broker_is_unavailable_in_time(free_port):
    bootstrap = f"127.0.0.1:{free_port}"
    specs = topic_specs(["x"], partitions=1, replication_factor=1)
    with pytest.raises(RetryableError) as caught:
        await ensure_topics(bootstrap, specs, timeout_s=1)
    assert caught.value.reason is Reason.UNAVAILABLE
    assert bootstrap in str(caught.value)
    publisher = KafkaPublisher(bootstrap, publish_timeout_s=1)
    source = KafkaEventSource(bootstrap, ["x"], group="g")
    async with asyncio.timeout(10):
        with pytest.raises(RetryableError) as caught:
            await publisher.publish("x", key=b"", value=b"", headers={})
    assert caught.value.reason is Reason.UNAVAILABLE
    async with asyncio.timeout(10):
        await publisher.close()
        await source.close()
    with pytest.raises(RetryableError):
        await publisher.publish("x", key=b"", value=b"", headers={})
    with pytest.raises(RetryableError):
        await source.take()


async def test_many_events_at_once_go_out_together(queue):
    topic = await queue.topic()
    publisher, source = queue.publisher(queued_max=100), queue.source(topic, group="g")
    async with asyncio.TaskGroup() as group:
        for number in range(1000):
            value = b"%d" % number
            group.create_task(publisher.publish(topic, key=value, value=value, headers={}))
    taken: set[bytes] = set()
    async with asyncio.timeout(30):
        while len(taken) < 1000:
            event = await source.take()
            taken.add(event.value)
            await source.ack(event)


async def test_a_handler_slower_than_the_poll_interval_gets_each_event_once(queue):
    topic = await queue.topic()
    options = {"poll_interval_max_s": 6.0, "ready_max": 1}
    slow = queue.source(topic, group="g", **options)
    publisher = queue.publisher()
    for number in range(6):
        await publisher.publish(topic, key=b"%d" % number, value=b"%d" % number, headers={})
    async with asyncio.timeout(20):
        first = await slow.take()
    await asyncio.sleep(9)  # an upload that takes longer than Kafka waits for a poll
    await slow.ack(first)
    values = [first.value]
    async with asyncio.timeout(20):
        while len(values) < 6:
            event = await slow.take()
            values.append(event.value)
            await slow.ack(event)
    assert sorted(values) == [b"%d" % number for number in range(6)]
    await slow.close()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(3):
            await queue.source(topic, group="g", **options).take()  # all was committed


async def test_a_topic_that_comes_later_is_found(queue):
    name = f"{queue.prefix}.later.v1"
    source = queue.source(name, group="g")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1):
            await source.take()
    with pytest.raises(RetryableError, match="has no topic"):
        await queue.publisher().publish(name, key=b"", value=b"", headers={})
    publisher = queue.publisher(specs=queue.specs(name))
    await publisher.publish(name, key=b"k", value=b"v", headers={})
    async with asyncio.timeout(20):
        assert (await source.take()).value == b"v"


async def test_a_broker_started_again_empty_goes_on_from_nothing(queue, servers):
    topic = await queue.topic()
    publisher = queue.publisher(specs=queue.specs(topic))
    source = queue.source(topic, group="g", backoff=QUICK)
    for number in range(5):
        await publisher.publish(topic, key=b"same", value=b"old %d" % number, headers={})
    async with asyncio.timeout(20):
        held = [await source.take() for _ in range(5)]
    for event in held[:3]:
        await source.ack(event)
    before = await publisher.mark(topic)
    assert sum(before.ends.values()) == 5
    servers.kill("kafka")
    with pytest.raises(RetryableError):  # unknown is not empty
        await publisher.mark(topic)
    await servers.restart("kafka", empty=True)
    assert await publisher.mark(topic) == TopicMark()
    published: list[bytes] = []
    async with asyncio.timeout(60):
        while len(published) < 8:  # as the scheduler does: again, until it is taken
            value = b"new %d" % len(published)
            try:
                await publisher.publish(topic, key=b"same", value=value, headers={})
                published.append(value)
            except RetryableError:
                await asyncio.sleep(0.2)
    after = await publisher.mark(topic)
    assert sum(after.ends.values()) >= 8, "more than before, of another topic"
    assert before.is_lost_in(after)
    taken: list[bytes] = []
    async with asyncio.timeout(60):
        while not set(taken) >= set(published):
            event = await source.take()
            taken.append(event.value)
            await source.ack(event)
    for event in held[3:]:
        await source.ack(event)  # of a log that is no more: changes nothing
        await source.retry_later(event)
    await source.close()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(3):
            print(await queue.source(topic, group="g").take())


async def test_a_broker_killed_and_started_again_loses_nothing(queue, servers):
    topic = await queue.topic()
    publisher, source = queue.publisher(), queue.source(topic, group="g")
    for number in range(5):
        await publisher.publish(topic, key=b"same", value=b"%d" % number, headers={})
    async with asyncio.timeout(20):
        held = [await source.take() for _ in range(5)]
    for event in held[:2]:
        await source.ack(event)
    before = await publisher.mark(topic)
    servers.kill("kafka")
    for event in held[2:4]:
        await source.ack(event)  # while there is nobody to tell
    await servers.restart("kafka")
    async with asyncio.timeout(60):
        while True:
            try:
                await publisher.publish(topic, key=b"same", value=b"5", headers={})
                break
            except RetryableError:
                await asyncio.sleep(0.2)
        assert not before.is_lost_in(await publisher.mark(topic))
        taken: list[bytes] = []
        while b"5" not in taken:
            event = await source.take()
            taken.append(event.value)
            await source.ack(event)
    await source.close()
    # The one that was never acknowledged comes to us again, or to the next member.
    successor = queue.source(topic, group="g")
    while b"4" not in taken:
        async with asyncio.timeout(30):
            taken.append((await successor.take()).value)


async def test_a_member_that_joins_takes_only_what_moves_and_the_rest_goes_on(queue, monkeypatch):
    """Cooperative: what stays is never revoked, so that work in hand on it is still its own."""
    topic, revoked = await queue.topic(), set[int]()
    revoke = KafkaEventSource._on_revoke

    def noted(source, consumer, places):
        if source is first:
            revoked.update(one.partition for one in places)
        revoke(source, consumer, places)

    monkeypatch.setattr(KafkaEventSource, "_on_revoke", noted)
    publisher, first = queue.publisher(), queue.source(topic, group="g")
    for number in range(30):
        await publisher.publish(topic, key=b"%d" % number, value=b"%d" % number, headers={})
    async with asyncio.timeout(30):
        under_way = [await first.take() for _ in range(30)]
    held = {place: one.number for place, one in first._holdings.items()}
    assert len(held) == PARTITIONS
    second = queue.source(topic, group="g")
    async with asyncio.timeout(60):
        while not second._holdings:
            await asyncio.sleep(0.1)
        moved = set(held) - set(first._holdings)
        again = [await second.take() for _ in range(_in(moved, under_way))]
    stays = {place: one.number for place, one in first._holdings.items()}
    assert stays
    assert revoked == {place.partition for place in moved} == {_partition(one) for one in again}
    assert stays == {place: held[place] for place in stays}, "not taken and given again"
    # What was in hand is done where it was begun: nobody gets it again.
    for event in under_way:
        await first.ack(event)
    for event in again:
        await second.ack(event)
    await first.close()
    await second.close()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(5):
            print(await queue.source(topic, group="g").take())


def _partition(event):
    return event.receipt.place.partition


def _in(places, events):
    return sum(event.receipt.place in places for event in events)


async def test_an_event_that_waits_for_long_holds_up_its_partition_alone(queue):
    """As a request for a ledger that another worker is at for hours."""
    count, window, patience_s = 300, 5, 3.0
    topic = await queue.topic()
    publisher, source = queue.publisher(), queue.source(topic, group="g", window_max=window)
    async with asyncio.TaskGroup() as group:
        for number in range(count):
            # Two keys of two partitions, as the first of each tells.
            key = b"a" if number % 2 else b"b"
            group.create_task(publisher.publish(topic, key=key, value=b"%d" % number, headers={}))
    first = await source.take()
    waits = first.receipt.place
    found = {waits: 1}
    with contextlib.suppress(TimeoutError):
        while True:
            event = await asyncio.wait_for(source.take(), patience_s)
            place = event.receipt.place
            found[place] = found.get(place, 0) + 1
            await source.ack(event)
    assert len(found) == 2, "the keys are of one partition: take others"
    of_others = sum(number for place, number in found.items() if place != waits)
    assert of_others == count // 2
    # So many more were taken from the client's own buffer before it was told to stop.
    assert window <= found[waits] < count // 2
    await source.ack(first)
    while sum(found.values()) < count:
        event = await asyncio.wait_for(source.take(), 10)
        found[event.receipt.place] += 1
        await source.ack(event)
