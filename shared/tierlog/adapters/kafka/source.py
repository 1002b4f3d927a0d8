"""Taking events from Kafka as a member of a consumer group.

Owns: which events are handed out and which are done (``PartitionProgress`` per partition),
commits, pauses, redelivery after a back-off. Does not own what becomes of an event that keeps
failing: whoever takes it sees ``attempt`` and decides.

Threads: one owns the consumer and does nothing but poll it, however long handlers take; so
``max.poll.interval`` is never exceeded by a slow handler, and partitions stay. It shares
``_holdings`` (under ``_lock``) and ``_ready`` (a deque) with the loop.

Invariants:
    * Committed is only what is done, with all before it in its partition, and only after it
      was acknowledged. What was not committed is delivered again, here or to a peer.
    * An acknowledgement or a redelivery of a partition that changed hands meanwhile is dropped.
    * At most ``ready_max`` events (and what one poll adds) wait to be taken. Then the thread
      waits for room, shortly, and after that pauses the partitions, which costs a new fetch.
    * When the files of TLS are others, and work, it becomes a member anew, which reads them.
    * An event leaves its place only together with the return of ``take``: cancelling loses none.

Crash: nothing but the group's committed offsets survives, and nothing else is needed.
"""

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition
from prometheus_client import Gauge

from tierlog.adapters.kafka.common import (
    PLAIN,
    UNKNOWN_TOPIC,
    ClientErrors,
    How,
    as_error,
    client_log,
    from_thread,
    log,
)
from tierlog.adapters.kafka.records import event_of, number
from tierlog.adapters.kafka.watched import WatchedFiles
from tierlog.adapters.offsets import Backoff, PartitionProgress
from tierlog.model.errors import RetryableError
from tierlog.ports.events import Event
from tierlog.runtime.sections import KAFKA_SESSION_S

POLL_S = 0.1
LAG_INTERVAL_S = 5.0
COMMIT_INTERVAL_S = 0.2
ROOM_WAIT_S = 0.3
STRANDED_S = 8.0
JOINS_AGAIN_MAX = 6
"""Members that are too many for the partitions stop trying, so as not to move them for ever."""
RESTART_DELAY_S = 1.0
CLOSE_S_MAX = 15.0
DEFAULT_BACKOFF = Backoff(first_s=1.0, max_s=30.0)

LAG: Final = Gauge(
    "tierlog_kafka_consumer_lag_messages",
    "Events that this member has not committed, of the partitions that it got some of",
    ["group", "topic"],
)


class _Place(NamedTuple):
    topic: str
    partition: int


class _Receipt(NamedTuple):
    place: _Place
    offset: int
    holding: int


@dataclass(slots=True)
class _Holding:
    """A partition in our hands. ``sent`` and ``committed`` are offsets asked for and answered."""

    number: int
    progress: PartitionProgress = field(default_factory=PartitionProgress)
    sent: int | None = None
    committed: int | None = None


class KafkaEventSource:
    """One member of ``group``, subscribed to ``topics``, which need not exist yet."""

    def __init__(
        self,
        bootstrap: str,
        topics: Sequence[str],
        *,
        group: str,
        poll_interval_max_s: float = 300.0,
        session_timeout_s: float = KAFKA_SESSION_S,
        ready_max: int = 16,
        window_max: int = 1000,
        backoff: Backoff = DEFAULT_BACKOFF,
        how: How = PLAIN,
    ) -> None:
        self._bootstrap = bootstrap
        self._topics = list(topics)
        self._group = group
        self._ready_max = ready_max
        self._window_max = window_max
        self._backoff = backoff
        self._config = {
            **how,
            "bootstrap.servers": bootstrap,
            "group.id": group,
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": "earliest",
            "allow.auto.create.topics": False,
            "partition.assignment.strategy": "cooperative-sticky",
            "max.poll.interval.ms": round(poll_interval_max_s * 1000),
            "session.timeout.ms": round(session_timeout_s * 1000),
            "heartbeat.interval.ms": round(session_timeout_s * 1000 / 3),
            "topic.metadata.refresh.interval.ms": 5000,
            # A topic that is lost and made again, of as many partitions, is else taken for one
            # that was never away, and a group that was given none of them meanwhile stays so.
            "topic.metadata.propagation.max.ms": 0,
            "reconnect.backoff.max.ms": 2000,
            "queued.min.messages": 100,
            "queued.max.messages.kbytes": 16 * 1024,
            "error_cb": ClientErrors(group),
            "on_commit": self._on_commit,
        }
        self._files = WatchedFiles(bootstrap, how)
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._joins_left = self._polls_since_loss = 0
        self._holdings: dict[_Place, _Holding] = {}
        self._holdings_made = 0
        self._ready: deque[Event] = deque()
        self._again: deque[Event] = deque()
        self._timers: set[asyncio.TimerHandle] = set()
        self._woken = asyncio.Event()
        self._stopping = threading.Event()
        self._room = threading.Event()
        self._failure: Exception | None = None
        self._waits = False
        """Whether so much is ready that nothing is taken from any partition."""
        self._paused: frozenset[_Place] = frozenset()
        self._has_new = False
        """Whether partitions came that are not paused with the others."""
        self._commit_at_s = self._lag_at_s = 0.0
        self._thread = threading.Thread(target=self._run, name=f"kafka-{group}", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return (
            f"KafkaEventSource({self._bootstrap!r}, group={self._group!r}, "
            f"partitions={len(self._holdings)}, ready={len(self._ready)}, "
            f"retrying={len(self._timers)}, paused={len(self._paused)})"
        )

    # On the loop.

    async def take(self) -> Event:
        while (event := self._next()) is None:
            if self._failure is not None:
                raise self._failure
            if self._stopping.is_set():
                raise RetryableError("the connection to Kafka is closed", remedy="Connect again")
            self._woken.clear()
            await self._woken.wait()
        return event

    async def ack(self, event: Event) -> None:
        receipt: _Receipt = event.receipt
        with self._lock:
            holding = self._holdings.get(receipt.place)
            if holding is not None and holding.number == receipt.holding:
                holding.progress.done(receipt.offset)

    async def retry_later(self, event: Event) -> None:
        again = replace(event, attempt=event.attempt + 1)

        def offer() -> None:
            self._timers.discard(timer)
            self._again.append(again)
            self._woken.set()

        timer = self._loop.call_later(self._backoff.after(event.attempt), offer)
        self._timers.add(timer)

    async def close(self) -> None:
        self._stopping.set()
        self._woken.set()
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        await asyncio.to_thread(self._thread.join, CLOSE_S_MAX)
        if self._thread.is_alive():
            log.warning("source.close_given_up", group=self._group, after_s=CLOSE_S_MAX)

    def _next(self) -> Event | None:
        for queue in (self._again, self._ready):
            while queue:
                event = queue.popleft()
                if len(self._ready) * 2 <= self._ready_max:
                    self._room.set()
                if self._is_held(event.receipt):
                    return event
        return None

    def _is_held(self, receipt: _Receipt) -> bool:
        with self._lock:
            holding = self._holdings.get(receipt.place)
            return holding is not None and holding.number == receipt.holding

    # On the thread.

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._be_member()
                self._stopping.wait(RESTART_DELAY_S)
        except KafkaException as error:  # no member can be made of these settings
            self._fail(as_error(error.args[0], f"joining group {self._group}", self._bootstrap))
        except Exception as error:  # noqa: BLE001 - a bug
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """End; who takes next gets the error."""
        self._failure = error
        self._stopping.set()
        from_thread(self._loop, self._woken.set)

    def _be_member(self) -> None:
        generation = self._files.generation()
        consumer = Consumer(self._config, logger=client_log)
        try:
            self._consume(consumer, generation)
        except KafkaException as error:
            log.warning("source.restarted", group=self._group, cause=str(error))
        finally:
            consumer.close()
            self._drop_all()

    def _consume(self, consumer: Consumer, generation: int) -> None:
        consumer.subscribe(
            self._topics,
            on_assign=self._on_assign,
            on_revoke=self._on_revoke,
            on_lost=self._on_lost,
        )
        while not self._stopping.is_set() and self._files.generation() == generation:
            self._pause_or_resume(consumer)
            message = consumer.poll(POLL_S)
            if message is not None:
                self._take_message(message)
            elif self._is_stranded():
                return
            self._commit(consumer)
            self._tell_lag(consumer)
        self._commit_now(consumer, self._committable(list(self._holdings)))

    def _is_stranded(self) -> bool:
        """Tell whether to begin again: what was lost may be there anew, and the group not know.

        A broker that comes back empty gives its topics to nobody who joined before they were made.
        """
        if not self._joins_left:
            return False
        self._polls_since_loss += 1
        if self._polls_since_loss * POLL_S < STRANDED_S:
            return False
        self._joins_left -= 1
        self._polls_since_loss = 0
        log.info("source.joins_again", group=self._group)
        return True

    def _take_message(self, message: Message) -> None:
        error = message.error()
        if error is not None:
            if error.fatal():
                raise KafkaException(error)
            if error.code() in UNKNOWN_TOPIC:
                log.info("topic.unknown", topics=self._topics, cause=error.str())
            else:
                log.warning("source.poll_failed", group=self._group, cause=error.str())
            return
        place = _Place(str(message.topic()), number(message.partition()))
        offset = number(message.offset())
        with self._lock:
            holding = self._holdings.get(place)
            if holding is None:
                return
            if holding.progress.end is not None and offset < holding.progress.end:
                # The log began again below us: the broker lost it. What we hold is of another.
                log.warning("topic.began_again", topic=place.topic, offset=offset)
                holding = self._hold(place)
            if holding.progress.end is None:
                holding.sent = holding.committed = offset  # there is nothing to commit yet
            holding.progress.deliver(offset)
            receipt = _Receipt(place, offset, holding.number)
        self._ready.append(event_of(message, receipt=receipt))
        from_thread(self._loop, self._woken.set)

    def _pause_or_resume(self, consumer: Consumer) -> None:
        self._room.clear()
        if self._is_full() and not self._waits:
            self._room.wait(ROOM_WAIT_S)
        self._waits = self._is_full()
        with self._lock:
            # An event that waits for long, as for another worker, holds up its partition alone.
            full = frozenset(
                place
                for place, holding in self._holdings.items()
                if self._waits or holding.progress.window >= self._window_max
            )
        changed, self._has_new = full != self._paused or self._has_new, False
        if not changed or not (full or self._paused):
            return
        held = {_Place(one.topic, one.partition): one for one in consumer.assignment()}
        if stops := [one for place, one in held.items() if place in full]:
            consumer.pause(stops)
        if goes_on := [held[place] for place in self._paused - full if place in held]:
            consumer.resume(goes_on)
        self._paused = full

    def _is_full(self) -> bool:
        return len(self._ready) >= self._ready_max

    def _commit(self, consumer: Consumer) -> None:
        now_s = time.monotonic()
        if now_s < self._commit_at_s:
            return
        self._commit_at_s = now_s + COMMIT_INTERVAL_S
        offsets = self._committable(list(self._holdings))
        if offsets:
            consumer.commit(offsets=offsets, asynchronous=True)

    def _tell_lag(self, consumer: Consumer) -> None:
        """Say how far it is behind, by what the broker told with the last messages."""
        now_s = time.monotonic()
        if now_s < self._lag_at_s:
            return
        self._lag_at_s = now_s + LAG_INTERVAL_S
        behind = dict.fromkeys(self._topics, 0)
        with self._lock:
            done = {place: holding.committed for place, holding in self._holdings.items()}
        for place, offset in done.items():
            with contextlib.suppress(KafkaException):  # no number is worth a member
                known = consumer.get_watermark_offsets(TopicPartition(*place), cached=True)
                if offset is not None and known is not None:
                    behind[place.topic] += max(0, known[1] - offset)
        for topic, count in behind.items():
            LAG.labels(self._group, topic).set(count)

    def _committable(self, places: Sequence[_Place]) -> list[TopicPartition]:
        """Return what is done and was not yet sent, and note it as sent."""
        offsets = []
        with self._lock:
            for place in places:
                holding = self._holdings.get(place)
                offset = None if holding is None else holding.progress.commit_offset
                if holding is None or offset is None or offset == holding.sent:
                    continue
                offsets.append(TopicPartition(place.topic, place.partition, offset))
                holding.sent = offset
        return offsets

    def _commit_now(self, consumer: Consumer, offsets: list[TopicPartition]) -> None:
        if not offsets:
            return
        try:
            consumer.commit(offsets=offsets, asynchronous=False)
        except KafkaException as error:
            # Not a failure: what was not committed is delivered again.
            log.warning("source.commit_failed", group=self._group, cause=str(error))

    def _on_commit(self, error: KafkaError | None, offsets: Sequence[TopicPartition]) -> None:
        with self._lock:
            for answered in offsets:
                holding = self._holdings.get(_Place(answered.topic, answered.partition))
                if holding is None:
                    continue
                if error is None and answered.error is None:
                    holding.committed = answered.offset
                elif holding.sent == answered.offset:
                    holding.sent = holding.committed  # to be sent again
        if error is not None:
            log.warning("source.commit_failed", group=self._group, cause=error.str())

    def _on_assign(self, _: Any, partitions: Sequence[TopicPartition]) -> None:  # noqa: ANN401
        with self._lock:
            for each in partitions:
                self._hold(_Place(each.topic, each.partition))
        if partitions:
            self._joins_left = 0
        self._has_new = True
        log.info("source.assigned", group=self._group, count=len(partitions))

    def _on_revoke(self, consumer: Consumer, partitions: Sequence[TopicPartition]) -> None:
        places = [_Place(each.topic, each.partition) for each in partitions]
        self._commit_now(consumer, self._committable(places))
        self._drop(places)
        log.info("source.revoked", group=self._group, count=len(places))

    def _on_lost(self, _: Any, partitions: Sequence[TopicPartition]) -> None:  # noqa: ANN401
        self._drop([_Place(each.topic, each.partition) for each in partitions])
        self._joins_left, self._polls_since_loss = JOINS_AGAIN_MAX, 0
        log.warning("source.partitions_lost", group=self._group, count=len(partitions))

    def _hold(self, place: _Place) -> _Holding:
        self._holdings_made += 1
        self._holdings[place] = _Holding(self._holdings_made)
        return self._holdings[place]

    def _drop(self, places: Sequence[_Place]) -> None:
        with self._lock:
            for place in places:
                self._holdings.pop(place, None)

    def _drop_all(self) -> None:
        with self._lock:
            self._holdings.clear()
