"""The events port in memory: topics of partitions, consumer groups, and a queue's bad habits.

Owns Kafka's behaviour as the port promises it: the order within a partition, commits of
contiguous prefixes, redelivery from the last commit when a partition changes hands, members that
drop out. On top it repeats, delays and loses events, and can be wiped, as rates and hooks say.

Invariants:
    * Without loss and wipe, each event is handed out again and again until it is acknowledged
      by the member that holds its partition.
    * An acknowledgement by a former holder changes nothing.
"""

import asyncio
import random
import zlib
from collections import Counter, deque
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from tierlog.adapters.memory.faults import Faults, no_faults
from tierlog.adapters.offsets import Backoff, PartitionProgress
from tierlog.model.errors import IndeterminateError, RetryableError
from tierlog.ports.event_log import EventPlace, StoredEvent
from tierlog.ports.events import Event, TopicMark

DEFAULT_BACKOFF = Backoff(first_s=1.0, max_s=30.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueRates:
    """How often, from 0 to 1, an event is repeated or lost, and how late it may come."""

    repeated: float = 0.0
    lost: float = 0.0
    delay_s_max: float = 0.0


class _Place(NamedTuple):
    topic: str
    partition: int


class _Receipt(NamedTuple):
    place: _Place
    offset: int
    holding: int


@dataclass(slots=True)
class _Record:
    event: Event
    visible_at_s: float


@dataclass(slots=True)
class _Group:
    members: list["MemoryEventSource"] = field(default_factory=list)
    committed: dict[_Place, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Held:
    """A partition in a member's hands."""

    position: int
    number: int
    progress: PartitionProgress = field(default_factory=PartitionProgress)


class MemoryEvents:
    """The broker. ``publisher`` and ``source`` give clients; the hooks play the operator."""

    def __init__(
        self,
        rng: random.Random,
        *,
        partitions: int = 4,
        rates: QueueRates | None = None,
        session_timeout_s: float = 6.0,
    ) -> None:
        self._rng = rng
        self._partitions = partitions
        self.rates = rates or QueueRates()
        self._session_timeout_s = session_timeout_s
        self._logs: dict[_Place, list[_Record]] = {}
        self._groups: dict[str, _Group] = {}
        self._holdings = self._wipes = 0

    def __repr__(self) -> str:
        return f"MemoryEvents(records={sum(map(len, self._logs.values()))})"

    def publisher(self, faults: Faults | None = None) -> "MemoryEventPublisher":
        """Return a publisher that suffers ``faults``."""
        return MemoryEventPublisher(self, faults or no_faults())

    def source(
        self,
        topics: Sequence[str],
        *,
        group: str,
        faults: Faults | None = None,
        backoff: Backoff = DEFAULT_BACKOFF,
    ) -> "MemoryEventSource":
        """Return a new member of ``group``."""
        source = MemoryEventSource(self, tuple(topics), group, faults or no_faults(), backoff)
        self._groups.setdefault(group, _Group()).members.append(source)
        self._rebalance(group)
        return source

    def events(self, topic: str) -> list[Event]:
        """Return all that is in a topic: what an operator sees."""
        return [
            record.event
            for place, log in sorted(self._logs.items())
            if place.topic == topic
            for record in log
        ]

    def stored(self, topic: str) -> list[StoredEvent]:
        """Return all that is in a topic, with its places."""
        return [
            StoredEvent(
                place=EventPlace(place.partition, offset),
                stored_ms=round(record.visible_at_s * 1000),
                event=record.event,
            )
            for place, log in sorted(self._logs.items())
            if place.topic == topic
            for offset, record in enumerate(log)
        ]

    def lag(self, topic: str, group: str) -> int:
        """Return how many events of ``topic`` the group has not committed."""
        committed = self._groups[group].committed
        return sum(
            len(log) - committed.get(place, 0)
            for place, log in self._logs.items()
            if place.topic == topic
        )

    def wipe(self) -> None:
        """Lose everything, commits too: the broker was started again with an empty disk."""
        self._wipes += 1
        self._logs.clear()
        for name, group in self._groups.items():
            group.committed.clear()
            for member in group.members:
                member.held.clear()
            self._rebalance(name)

    # What clients do, each at one instant.

    def mark(self, topic: str) -> TopicMark:
        ends = {at.partition: len(log) for at, log in self._logs.items() if at.topic == topic}
        return TopicMark(topic_id=f"made after {self._wipes} wipes", ends=ends)

    def append(self, event: Event) -> None:
        place = _Place(event.topic, zlib.crc32(event.key) % self._partitions)
        copies = 1
        if self.rates.lost and self._rng.random() < self.rates.lost:
            copies = 0
        elif self.rates.repeated and self._rng.random() < self.rates.repeated:
            copies = 2
        loop = asyncio.get_running_loop()
        delay_s = self._rng.uniform(0, self.rates.delay_s_max) if self.rates.delay_s_max else 0.0
        for _ in range(copies):
            self._logs.setdefault(place, []).append(_Record(event, loop.time() + delay_s))
        if delay_s:
            loop.call_later(delay_s, self._wake_all)
        self._wake_all()

    def fetch(self, place: _Place, position: int) -> Event | None:
        log = self._logs.get(place, [])
        if position >= len(log):
            return None
        record = log[position]
        return record.event if record.visible_at_s <= asyncio.get_running_loop().time() else None

    def commit(self, group: str, place: _Place, offset: int) -> None:
        self._groups[group].committed[place] = offset

    def leave(self, source: "MemoryEventSource", group: str) -> None:
        if source in self._groups[group].members:
            self._groups[group].members.remove(source)
            source.held.clear()
            self._rebalance(group)

    def drop_later(self, source: "MemoryEventSource", group: str) -> None:
        asyncio.get_running_loop().call_later(
            self._session_timeout_s, lambda: self.leave(source, group)
        )

    def _rebalance(self, name: str) -> None:
        group = self._groups[name]
        for topic in sorted({topic for member in group.members for topic in member.topics}):
            takers = [member for member in group.members if topic in member.topics]
            for partition in range(self._partitions):
                place = _Place(topic, partition)
                holder = takers[partition % len(takers)]
                for member in group.members:
                    if member is not holder:
                        member.held.pop(place, None)
                if place not in holder.held:
                    self._holdings += 1
                    holder.held[place] = _Held(group.committed.get(place, 0), self._holdings)
        self._wake_all()

    def _wake_all(self) -> None:
        for group in self._groups.values():
            for member in group.members:
                member.woken.set()


class MemoryEventPublisher:
    """The publishing side of the port."""

    def __init__(self, broker: MemoryEvents, faults: Faults) -> None:
        self._broker = broker
        self.faults = faults

    async def publish(
        self, topic: str, *, key: bytes, value: bytes, headers: Mapping[str, bytes]
    ) -> None:
        event = Event(topic=topic, key=key, value=value, headers=dict(headers))
        try:
            await self.faults.call(
                "events.publish", lambda: self._broker.append(event), changes=True
            )
        except IndeterminateError as error:
            raise RetryableError(error.message, remedy="Publish it again") from error

    async def mark(self, topic: str) -> TopicMark:
        mark = self._broker.mark
        return await self.faults.call("events.mark", lambda: mark(topic), changes=False)

    async def close(self) -> None:
        """Nothing is queued."""


class MemoryEventSource:
    """A member of a group: the taking side of the port."""

    def __init__(
        self,
        broker: MemoryEvents,
        topics: tuple[str, ...],
        group: str,
        faults: Faults,
        backoff: Backoff,
    ) -> None:
        self._broker = broker
        self._group = group
        self._backoff = backoff
        self.topics = topics
        self.faults = faults
        self.held: dict[_Place, _Held] = {}
        self.woken = asyncio.Event()
        self._again: deque[Event] = deque()
        self._turn = 0

    def __repr__(self) -> str:
        return f"MemoryEventSource(group={self._group!r}, partitions={len(self.held)})"

    async def take(self) -> Event:
        await self.faults.step("events.take")
        while (event := self._next()) is None:
            self.woken.clear()
            await self.woken.wait()
        return event  # nothing is awaited after the event left its place: a cancel loses none

    async def ack(self, event: Event) -> None:
        receipt: _Receipt = event.receipt
        held = self.held.get(receipt.place)
        if held is None or held.number != receipt.holding:
            return
        held.progress.done(receipt.offset)
        try:
            await self.faults.call("events.ack", lambda: self._commit(receipt), changes=True)
        except (RetryableError, IndeterminateError):
            return  # a later commit says it too; else it is delivered again

    async def retry_later(self, event: Event) -> None:
        again = replace(event, attempt=event.attempt + 1)

        def offer() -> None:
            self._again.append(again)
            self.woken.set()

        asyncio.get_running_loop().call_later(self._backoff.after(event.attempt), offer)

    async def close(self) -> None:
        self._broker.leave(self, self._group)

    def abandon(self) -> None:
        """Die as a process does: the group notices after the session timeout."""
        self._broker.drop_later(self, self._group)

    def _commit(self, receipt: _Receipt) -> None:
        held = self.held.get(receipt.place)
        if held is not None and held.number == receipt.holding:
            offset = held.progress.commit_offset
            assert offset is not None, "what is acknowledged was delivered"
            self._broker.commit(self._group, receipt.place, offset)

    def _next(self) -> Event | None:
        while self._again:
            event = self._again.popleft()
            receipt: _Receipt = event.receipt
            held = self.held.get(receipt.place)
            if held is not None and held.number == receipt.holding:
                return event
        places = sorted(self.held)
        for _ in places:
            self._turn += 1
            place = places[self._turn % len(places)]
            held = self.held[place]
            event_or_none = self._broker.fetch(place, held.position)
            if event_or_none is not None:
                receipt = _Receipt(place, held.position, held.number)
                held.progress.deliver(held.position)
                held.position += 1
                return replace(event_or_none, receipt=receipt)
        return None


class MemoryEventLog:
    """The port that reads a topic from end to end."""

    def __init__(self, broker: MemoryEvents, faults: Faults | None = None) -> None:
        self._broker = broker
        self._faults = faults or no_faults()

    async def scan(self, topic: str, *, newest_max: int) -> AsyncIterator[StoredEvent]:
        await self._faults.step("events.scan")
        found = self._broker.stored(topic)
        counts = Counter(one.place.partition for one in found)
        for one in found:
            if one.place.offset >= counts[one.place.partition] - newest_max:
                yield one

    async def get(self, topic: str, place: EventPlace) -> StoredEvent | None:
        await self._faults.step("events.get")
        return next((one for one in self._broker.stored(topic) if one.place == place), None)
