"""After a fatal error a producer refuses all that comes: the next event goes by another one."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError, KafkaException

from tierlog.adapters.kafka import publisher as module
from tierlog.adapters.kafka.publisher import KafkaPublisher
from tierlog.model.errors import TierlogError


class Producers:
    """Stands for the library's class: the first one made refuses, as after a fatal error."""

    def __init__(self):
        self.made = []

    def __call__(self, config, **kwargs):
        producer = FakeProducer(is_dead=not self.made)
        self.made.append(producer)
        return producer


class FakeProducer:
    def __init__(self, *, is_dead):
        self.is_dead, self.reports, self.sent = is_dead, [], []

    def produce(self, topic, value, key, *, headers, on_delivery):
        if self.is_dead:
            raise KafkaException(KafkaError(KafkaError._FATAL))
        self.sent.append((topic, value))
        self.reports.append(on_delivery)

    def poll(self, timeout):
        while self.reports:
            self.reports.pop()(None, None)
        return 0

    def flush(self, timeout):
        return 0


async def test_a_producer_that_refuses_all_since_a_fatal_error_is_replaced(monkeypatch):
    producers = Producers()
    monkeypatch.setattr(module, "Producer", producers)
    publisher = KafkaPublisher("nowhere:1", publish_timeout_s=1.0)
    try:
        with pytest.raises(TierlogError, match="Fatal error"):
            await publisher.publish("t", key=b"k", value=b"one", headers={})
        await publisher.publish("t", key=b"k", value=b"two", headers={})
    finally:
        await publisher.close()
    assert [one.sent for one in producers.made] == [[], [("t", b"two")]]
