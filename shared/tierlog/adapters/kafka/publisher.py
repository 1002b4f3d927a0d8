"""Publishing to Kafka: a bridge over librdkafka's producer (its asyncio one takes no headers).

Threads: one polls. Delivery reports are collected while it polls and handed to the loop
together, in one ``call_soon_threadsafe``.

Invariants:
    * ``publish`` returns only after all in-sync replicas have the event (acks=all, idempotent).
    * At most ``queued_max`` events are under way; the next ``publish`` waits.
    * After a fatal error (a broker that lost its memory) a new producer takes the place of the old
      one, and what that did not have acknowledged goes again by it: some of it twice, as the port
      allows. An event is sent at most ``SENDS_MAX`` times.
    * When the files of TLS are others, and work, so does one that has read them; what the old one
      has queued, it sends.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException, Producer

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
from tierlog.adapters.kafka.topics import ensure_topics, mark_topic
from tierlog.adapters.kafka.watched import WatchedFiles
from tierlog.model.errors import Reason, RetryableError
from tierlog.offload.topics import TopicSpec
from tierlog.ports.events import TopicMark

POLL_S = 0.2
CLOSE_FLUSH_S_MAX = 5.0
LOOK_UP_S_MAX = 5.0
SENDS_MAX: Final = 3
"""Once more by a new producer, and once more to a topic that was made again."""


class KafkaPublisher:
    """One producer. Topics given as ``specs`` are created again when a broker has lost them."""

    def __init__(
        self,
        bootstrap: str,
        *,
        publish_timeout_s: float = 30.0,
        queued_max: int = 10_000,
        specs: Sequence[TopicSpec] = (),
        how: How = PLAIN,
    ) -> None:
        self._bootstrap = bootstrap
        self._how = how
        self._specs = {spec.name: spec for spec in specs}
        self._errors = ClientErrors("publisher")
        self._config = {
            **how,
            "bootstrap.servers": bootstrap,
            "acks": "all",
            "enable.idempotence": True,
            "linger.ms": 1,
            "message.timeout.ms": round(publish_timeout_s * 1000),
            "queue.buffering.max.messages": queued_max,
            # How long a topic that the brokers don't know is given the benefit of the doubt.
            "topic.metadata.propagation.max.ms": 2000,
            "topic.metadata.refresh.interval.ms": 5000,
            "reconnect.backoff.max.ms": 2000,
            "socket.keepalive.enable": True,
            "error_cb": self._errors,
        }
        self._slots = asyncio.Semaphore(queued_max)
        self._ensuring = asyncio.Lock()
        self._closed = False
        self._files = WatchedFiles(bootstrap, how)
        self._generation = self._files.generation()
        self._producing = _Producing(self._config, asyncio.get_running_loop())
        self._retired: list[_Producing] = []

    def __repr__(self) -> str:
        return f"KafkaPublisher({self._bootstrap!r}, closed={self._closed})"

    async def publish(
        self, topic: str, *, key: bytes, value: bytes, headers: Mapping[str, bytes]
    ) -> None:
        async with self._slots:
            self._look_at_files()
            for left in reversed(range(SENDS_MAX)):
                producing = self._producing
                error = await self._send(producing, topic, key, value, headers)
                if error is None:
                    return
                is_lost = error.code() in UNKNOWN_TOPIC and topic in self._specs
                if not left or not (is_lost or producing is not self._producing):
                    why = self._errors.explain(error)
                    raise as_error(why, f"publishing to {topic}", self._bootstrap)
                if is_lost:
                    await self._make_again(topic)

    async def _make_again(self, topic: str) -> None:
        log.warning("topic.lost", topic=topic)
        async with self._ensuring:
            await ensure_topics(self._bootstrap, [self._specs[topic]], how=self._how)
            await asyncio.to_thread(self._producing.look_up, topic)

    async def mark(self, topic: str) -> TopicMark:
        return await mark_topic(self._bootstrap, topic, timeout_s=LOOK_UP_S_MAX, how=self._how)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for producing in (*self._retired, self._producing):
            await asyncio.to_thread(producing.close)

    async def _send(
        self,
        producing: "_Producing",
        topic: str,
        key: bytes,
        value: bytes,
        headers: Mapping[str, bytes],
    ) -> KafkaError | None:
        if self._closed:
            raise RetryableError("the connection to Kafka is closed", remedy="Connect again")
        try:
            error = await producing.send(topic, key, value, headers)
        except BufferError as full:
            raise RetryableError(
                "too many events wait for Kafka",
                reason=Reason.RESOURCE_EXHAUSTED,
                remedy="Publish more slowly, or raise kafka.queued_messages_max",
                retry_after_s=1.0,
            ) from full
        except KafkaException as failure:
            error = failure.args[0]
        spent = error is not None and (producing.is_spent or _is_fatal(error))
        if spent and producing is self._producing:
            producing.retire()
            self._renew(str(error))
        return error

    def _look_at_files(self) -> None:
        generation = self._files.generation()
        if generation == self._generation or self._closed:
            return
        old = self._producing
        with contextlib.suppress(KafkaException):  # they are others again: the next time, then
            self._renew("other files of kafka.tls")
            old.finish()
            self._generation = generation

    def _renew(self, cause: str) -> None:
        """Put a new producer in the place of one that ends."""
        fresh = _Producing(self._config, asyncio.get_running_loop())
        log.warning("producer.renewed", cause=cause)
        self._retired = [one for one in (*self._retired, self._producing) if one.is_alive]
        self._producing = fresh


def _is_fatal(error: KafkaError) -> bool:
    """Tell whether its producer is of no use any more; what it then refuses is not marked so."""
    return error.fatal() or error.code() == KafkaError._FATAL  # noqa: SLF001 - its public code


class _Producing:
    """A producer, its polling thread, and the futures of what is under way."""

    def __init__(self, config: Mapping[str, Any], loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._producer = Producer(dict(config), logger=client_log)
        self._reports: list[tuple[asyncio.Future[KafkaError | None], KafkaError | None]] = []
        self._stopping = threading.Event()
        self._flush_s_max = CLOSE_FLUSH_S_MAX
        self.is_spent = False
        """Whether it met a fatal error; what was queued is given back by delivery reports."""
        self._thread = threading.Thread(target=self._poll, name="kafka-producer", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether its thread still runs."""
        return self._thread.is_alive()

    def send(
        self, topic: str, key: bytes, value: bytes, headers: Mapping[str, bytes]
    ) -> "asyncio.Future[KafkaError | None]":
        """Queue an event; the future gets the error, if any, of its delivery."""
        future: asyncio.Future[KafkaError | None] = self._loop.create_future()
        self._producer.produce(
            topic,
            value,
            key,
            headers=list(headers.items()),
            on_delivery=partial(self._delivered, future),
        )
        return future

    def look_up(self, topic: str) -> None:
        """Forget that ``topic`` was not there, by asking again; blocks."""
        with contextlib.suppress(KafkaException):  # then sending it says what is wrong
            self._producer.list_topics(topic, timeout=LOOK_UP_S_MAX)

    def retire(self) -> None:
        """Give up what is under way, and stop, without waiting for it."""
        self._flush_s_max = 0.0
        self._stopping.set()

    def finish(self) -> None:
        """Send what is queued, within a bound, and stop, without waiting for it."""
        self._stopping.set()

    def close(self) -> None:
        """Send what is queued, within a bound; blocks."""
        self.finish()
        self._thread.join()

    def _delivered(
        self, future: "asyncio.Future[KafkaError | None]", error: KafkaError | None, _: object
    ) -> None:
        self._reports.append((future, error))

    def _poll(self) -> None:
        while not self._stopping.is_set():
            self._serve(self._producer.poll, POLL_S)
            self._hand_over()
        self._serve(self._producer.flush, self._flush_s_max)
        if left := len(self._producer):
            log.warning("producer.gave_up_events", count=left)
            self._producer.purge()
            self._serve(self._producer.flush, 1.0)
        self._hand_over()

    def _serve(self, call: Callable[[float], int], timeout_s: float) -> None:
        try:
            call(timeout_s)
        except KafkaException as failure:
            # A fatal error is raised here, in place of a call of ``error_cb``. Reports go on.
            self.is_spent = True
            log.warning("producer.failed", cause=str(failure.args[0]))

    def _hand_over(self) -> None:
        if self._reports:
            reports, self._reports = self._reports, []
            from_thread(self._loop, partial(_settle, reports))


def _settle(
    reports: list[tuple["asyncio.Future[KafkaError | None]", KafkaError | None]],
) -> None:
    for future, error in reports:
        if not future.done():
            future.set_result(error)
