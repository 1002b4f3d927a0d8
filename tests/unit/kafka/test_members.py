"""What a member of a group makes of partitions that come while it is full, and of no consumer."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from confluent_kafka import TopicPartition

from tierlog.adapters.kafka import source as module
from tierlog.adapters.kafka.source import KafkaEventSource
from tierlog.model.errors import RefusedError, RetryableError

READY_MAX = 4


class Message:
    """An event of partition 0."""

    def __init__(self, offset):
        self._offset = offset

    def error(self):
        return None

    def topic(self):
        return "t"

    def partition(self):
        return 0

    def offset(self):
        return self._offset

    def key(self):
        return b"k"

    def value(self):
        return b"%d" % self._offset

    def headers(self):
        return []


class Consumer:
    """Is given partition 0, and partition 1 once that is paused; says then what it has paused.

    ``drained`` is waited for before partition 1 comes: no server can be told to rebalance between
    two polls.
    """

    def __init__(self):
        self.paused, self.held, self.offset = set(), [], 0
        self.drained = threading.Event()

    def subscribe(self, topics, *, on_assign, on_revoke, on_lost):
        self.on_assign = on_assign

    def assignment(self):
        return self.held

    def pause(self, places):
        self.paused |= {one.partition for one in places}

    def resume(self, places):
        self.paused -= {one.partition for one in places}

    def poll(self, timeout_s):
        if not self.held:
            self._give(0)
        elif 0 not in self.paused:
            self.offset += 1
            return Message(self.offset)
        elif len(self.held) == 1:
            assert self.drained.wait(10)
            self._give(1)
        time.sleep(0.001)
        return None

    def _give(self, partition):
        place = TopicPartition("t", partition)
        self.held = [*self.held, place]
        self.on_assign(self, [place])

    def commit(self, **how):
        return None

    def get_watermark_offsets(self, place, *, cached):
        return None

    def close(self):
        return None


async def test_partitions_that_come_when_it_is_full_no_more_leave_none_paused(monkeypatch):
    consumer = Consumer()
    monkeypatch.setattr(module, "Consumer", lambda config, logger: consumer)
    monkeypatch.setattr(module, "ROOM_WAIT_S", 0.01)
    source = KafkaEventSource("b:1", ["t"], group="g", ready_max=READY_MAX)
    try:
        async with asyncio.timeout(10):
            while not consumer.paused:
                await asyncio.sleep(0.01)
            for _ in range(READY_MAX):
                await source.ack(await source.take())
            consumer.drained.set()
            assert (await source.take()).value == b"%d" % (READY_MAX + 1)
    finally:
        await source.close()


async def test_files_of_tls_that_are_not_there_are_refused_at_once(tmp_path):
    how = {"security.protocol": "ssl", "ssl.ca.location": str(tmp_path / "nothing.pem")}
    with pytest.raises(RefusedError, match=r"kafka\.tls can't be read"):
        KafkaEventSource("127.0.0.1:1", ["t"], group="g", how=how)


async def test_where_no_consumer_can_be_made_who_takes_is_told():
    how = {"security.protocol": "nonsense"}
    source = KafkaEventSource("127.0.0.1:1", ["t"], group="g", how=how)
    try:
        async with asyncio.timeout(10):
            with pytest.raises(RetryableError, match="joining group g"):
                await source.take()
    finally:
        await source.close()
