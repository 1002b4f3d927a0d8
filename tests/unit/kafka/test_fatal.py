"""After a fatal error a producer refuses all that comes, and gives up what is under way.

All of that goes again by a new producer: no server can be told to forget a producer at a moment.
"""

from __future__ import annotations

import asyncio
import ctypes
from pathlib import Path

import confluent_kafka
import pytest
from confluent_kafka import KafkaError, KafkaException

from tierlog.adapters.kafka import publisher as module
from tierlog.adapters.kafka.publisher import SENDS_MAX, KafkaPublisher
from tierlog.model.errors import RetryableError


class Producers:
    """Stands for the library's class; ``dies_at``: before which event each one in turn fails."""

    def __init__(self, *dies_at):
        self.dies_at, self.made = dies_at, []

    def __call__(self, config, **kwargs):
        at = self.dies_at[len(self.made)] if len(self.made) < len(self.dies_at) else None
        self.made.append(FakeProducer(at))
        return self.made[-1]

    @property
    def sent(self):
        return [one.sent for one in self.made]


class FakeProducer:
    """Answers nothing that comes before its end."""

    def __init__(self, dies_at):
        self.dies_at, self.reports, self.sent = dies_at, [], []

    def produce(self, topic, value, key, *, headers, on_delivery):
        if len(self.sent) == self.dies_at:
            raise KafkaException(KafkaError(KafkaError._FATAL))
        self.sent.append(value)
        self.reports.append(on_delivery)

    def poll(self, timeout):
        if self.dies_at is None:
            self._report(None)
        return 0

    def flush(self, timeout):
        return len(self.reports)

    def __len__(self):
        return len(self.reports)

    def purge(self):
        self._report(KafkaError(KafkaError._PURGE_INFLIGHT))

    def _report(self, error):
        while self.reports:
            self.reports.pop()(error, None)


@pytest.fixture
async def publish(monkeypatch):
    made = []

    async def publish(producers, *values):
        monkeypatch.setattr(module, "Producer", producers)
        publisher = KafkaPublisher("nowhere:1", publish_timeout_s=1.0)
        made.append(publisher)
        async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
            for value in values:
                tasks.create_task(publisher.publish("t", key=b"k", value=value, headers={}))

    yield publish
    for publisher in made:
        await publisher.close()


async def test_what_is_refused_goes_by_a_new_producer(publish):
    producers = Producers(0)
    await publish(producers, b"one")
    assert producers.sent == [[], [b"one"]]


async def test_so_does_what_was_under_way_and_nobody_is_told_of_it(publish):
    producers = Producers(2)
    await publish(producers, b"one", b"two", b"three")
    first, second = producers.sent
    assert first == [b"one", b"two"]
    assert sorted(second) == [b"one", b"three", b"two"]


async def test_it_is_not_tried_for_ever(publish):
    producers = Producers(*[0] * 2 * SENDS_MAX)
    with pytest.raises(ExceptionGroup) as caught:
        await publish(producers, b"one")
    assert caught.group_contains(RetryableError, match="Fatal error")
    # One was made after the last try, for whoever comes next.
    assert producers.sent == [[]] * (SENDS_MAX + 1)


async def test_the_library_s_own_fatal_error_leaves_nobody_waiting():
    """The library's test hook raises one while an event is queued, before a broker of its own."""
    publisher = KafkaPublisher(
        "nowhere:1", publish_timeout_s=60, how={"test.mock.num.brokers": "1"}
    )
    try:
        async with asyncio.timeout(20):
            await publisher.publish("t", key=b"k", value=b"one", headers={})
            first = publisher._producing
            waiting = asyncio.create_task(
                publisher.publish("t", key=b"k", value=b"two", headers={})
            )
            await asyncio.sleep(0)
            _fail(first._producer, KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER)
            await waiting
            await publisher.publish("t", key=b"k", value=b"three", headers={})
        assert publisher._producing is not first
    finally:
        await publisher.close()


def _fail(producer, code):
    """Call ``rd_kafka_test_fatal_error``, which Python is not given."""
    folder = Path(confluent_kafka.__file__).parent.parent / "confluent_kafka.libs"
    [found] = folder.glob("librdkafka*.so*")
    library = ctypes.CDLL(str(found))
    handle = ctypes.c_void_p.from_address(id(producer) + object.__basicsize__)
    library.rd_kafka_test_fatal_error.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p]
    library.rd_kafka_test_fatal_error(handle, code, b"as a broker that forgot would")
