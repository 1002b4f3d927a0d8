"""Reading a topic of Kafka from end to end, as a member of no group.

Invariants:
    * Nothing is committed, created or changed.
    * A scan ends at what was the end of each partition when it began, or is an error in time.

Threads: each look has one, which alone touches its consumer; looks take turns.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

from confluent_kafka import (
    TIMESTAMP_NOT_AVAILABLE,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)

from tierlog.adapters.kafka.common import PLAIN, ClientErrors, How, as_error, client_log
from tierlog.adapters.kafka.records import event_of, number
from tierlog.ports.event_log import EventPlace, StoredEvent

BATCH_MAX: Final = 50
POLL_S: Final = 0.5
_NO_LEADER: Final = frozenset(
    {KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.LEADER_NOT_AVAILABLE}
)

Ends = dict[int, tuple[int, int]]
"""From where and until where each partition is read."""


class KafkaEventLog:
    """Reads topics of one cluster."""

    def __init__(self, bootstrap: str, *, timeout_s: float = 30.0, how: How = PLAIN) -> None:
        self._bootstrap = bootstrap
        self._timeout_s = timeout_s
        self._turn = asyncio.Lock()
        self._config: Mapping[str, Any] = {
            **how,
            "bootstrap.servers": bootstrap,
            "group.id": "tierlog-onlookers",  # the library wants one; it is never joined
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "earliest",
            "allow.auto.create.topics": False,
            "queued.max.messages.kbytes": 4 * 1024,
            "reconnect.backoff.max.ms": 2000,
            "error_cb": ClientErrors("event log"),
        }

    def __repr__(self) -> str:
        return f"KafkaEventLog({self._bootstrap!r})"

    async def scan(self, topic: str, *, newest_max: int) -> AsyncIterator[StoredEvent]:
        async with self._looking_at(topic) as look:
            ends = await look.ask(_begin, topic, newest_max, self._timeout_s)
            async with contextlib.aclosing(look.read(ends, self._timeout_s)) as read:
                async for stored in read:
                    yield stored

    async def get(self, topic: str, place: EventPlace) -> StoredEvent | None:
        async with self._looking_at(topic) as look:
            ends = await look.ask(_begin_at, topic, place, self._timeout_s)
            async with contextlib.aclosing(look.read(ends, self._timeout_s)) as read:
                stored = await anext(read, None)
        return stored if stored is not None and stored.place == place else None

    @contextlib.asynccontextmanager
    async def _looking_at(self, topic: str) -> AsyncIterator["_Look"]:
        async with self._turn:
            look = _Look(self._config, f"reading {topic}", self._bootstrap)
            try:
                yield look
            finally:
                await look.close()


class _Look:
    """A consumer that belongs to a thread: what is asked of it is done one after the other.

    So that closing it waits for what a cancelled call still does to it.
    """

    def __init__(self, config: Mapping[str, Any], what: str, bootstrap: str) -> None:
        self._what = what
        self._bootstrap = bootstrap
        self._consumer = Consumer(dict(config), logger=client_log)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kafka-look")

    async def ask(self, call: Callable[..., Any], *arguments: Any) -> Any:  # noqa: ANN401
        """Do something with the consumer."""
        loop = asyncio.get_running_loop()
        work = partial(call, self._consumer, *arguments)
        try:
            return await loop.run_in_executor(self._thread, work)
        except KafkaException as error:
            raise as_error(error.args[0], self._what, self._bootstrap) from error

    async def read(self, ends: Ends, timeout_s: float) -> AsyncGenerator[StoredEvent, None]:
        """Iterate over what was assigned, up to its ends."""
        left = {partition for partition, (start, end) in ends.items() if start < end}
        deadline_s = time.monotonic() + timeout_s
        while left:
            messages = await self.ask(Consumer.consume, BATCH_MAX, POLL_S)
            if messages:
                deadline_s = time.monotonic() + timeout_s
            elif time.monotonic() >= deadline_s:
                late = KafkaError(KafkaError._TIMED_OUT)  # noqa: SLF001 - librdkafka's own code
                raise as_error(late, self._what, self._bootstrap)
            for message in messages:
                is_event = self._is_event(message)
                partition = number(message.partition())
                if not is_event:
                    left.discard(partition)
                    continue
                offset, end = number(message.offset()), ends[partition][1]
                if offset + 1 >= end:
                    left.discard(partition)
                if offset < end:
                    yield _stored(message)

    def _is_event(self, message: Message) -> bool:
        """Tell whether it is an event; False: its partition has no more."""
        error = message.error()
        if error is None:
            return True
        if error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 - librdkafka's own code
            return False
        raise as_error(error, self._what, self._bootstrap)

    async def close(self) -> None:
        """Give the connection back."""
        try:
            await self.ask(Consumer.close)
        finally:
            self._thread.shutdown(wait=False)


def _begin(consumer: Consumer, topic: str, newest_max: int, timeout_s: float) -> Ends:
    """Assign all partitions from the newest events on; blocks."""
    ends: Ends = {}
    for partition in _partitions(consumer, topic, timeout_s):
        low, high = _bounds(consumer, topic, partition, timeout_s)
        ends[partition] = (max(low, high - newest_max), high)
    _assign(consumer, topic, ends)
    return ends


def _begin_at(consumer: Consumer, topic: str, place: EventPlace, timeout_s: float) -> Ends:
    """Assign one place, if an event may be there; blocks."""
    ends: Ends = {}
    if place.partition in _partitions(consumer, topic, timeout_s):
        low, high = _bounds(consumer, topic, place.partition, timeout_s)
        if low <= place.offset < high:
            ends[place.partition] = (place.offset, high)
    _assign(consumer, topic, ends)
    return ends


def _partitions(consumer: Consumer, topic: str, timeout_s: float) -> list[int]:
    found = consumer.list_topics(topic, timeout=timeout_s).topics[topic]
    if found.error is not None:
        raise KafkaException(found.error)
    return sorted(found.partitions)


def _bounds(consumer: Consumer, topic: str, partition: int, timeout_s: float) -> tuple[int, int]:
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            bounds = consumer.get_watermark_offsets(
                TopicPartition(topic, partition), timeout=timeout_s
            )
        except KafkaException as error:
            # A partition that was just made, or whose leader went, has one shortly.
            if error.args[0].code() not in _NO_LEADER or time.monotonic() >= deadline_s:
                raise
            time.sleep(POLL_S)
        else:
            if bounds is None:
                raise KafkaException(KafkaError(KafkaError._TIMED_OUT))  # noqa: SLF001
            low, high = bounds
            return low, high


def _assign(consumer: Consumer, topic: str, ends: Ends) -> None:
    consumer.assign(
        [
            TopicPartition(topic, partition, start)
            for partition, (start, end) in ends.items()
            if start < end
        ]
    )


def _stored(message: Message) -> StoredEvent:
    kind, stored_ms = message.timestamp()
    return StoredEvent(
        place=EventPlace(number(message.partition()), number(message.offset())),
        stored_ms=0 if kind == TIMESTAMP_NOT_AVAILABLE else stored_ms,
        event=event_of(message),
    )
