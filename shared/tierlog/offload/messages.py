"""Offload requests and results on the queue: topics, values, headers (protocols.md section 3).

Owns names of topics and the conversion of messages to values. Does not own publishing.

Invariants:
    * What ``parse_request`` returns is within every bound, whoever published it; anything else
      is ``CorruptError`` or ``RefusedError``.
    * Events of one ledger have one key, hence one partition and one order.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple
from uuid import UUID

from google.protobuf.message import DecodeError, Message

from tierlog.format.envelope import Envelope, Traceparent, build_headers, parse_headers
from tierlog.model.errors import CorruptError, RefusedError, TierlogError
from tierlog.model.ids import LEDGER_ID_MAX, LedgerId, StreamName, stream_name
from tierlog.ports.clock import Clock
from tierlog.ports.events import Event
from tierlog.ports.ids import Ids
from tierlog.proto.v1 import events_pb2 as pb

VALUE_LEN_MAX: Final = 64 * 1024
KEY_LEN_MAX: Final = 1024
ERROR_LEN_MAX: Final = 2000
HEADERS_MAX: Final = 32
HEADER_NAME_LEN_MAX: Final = 100
HEADER_LEN_MAX: Final = 4096

# Headers of dead letters, which are not taken from requests, but for the first.
OWN: Final = "tierlog_"
REPLAY_OF: Final = "tierlog_replay_of"
ERROR_REASON: Final = "tierlog_error_reason"
ERROR_MESSAGE: Final = "tierlog_error_message"
ERROR_TIME_MS: Final = "tierlog_error_time_ms"
ATTEMPTS: Final = "tierlog_attempts"
FROM_TOPIC: Final = "tierlog_topic"
CUT: Final = "tierlog_cut_from_bytes"
MARK: Final = "tierlog_dead_letter"
MARK_OF: Final = "tierlog_dead_letter_of"
MARK_TIME_MS: Final = "tierlog_dead_letter_time_ms"


# CloudEvents wants an absolute URI there, without which some of its libraries send nothing.
_SCHEMA_PLACE: Final = re.compile("[:/#]")


class Trigger(StrEnum):
    """Why a ledger is offloaded."""

    TIME = "time"
    SIZE = "size"
    ADMIN = "admin"


class Topics(NamedTuple):
    """The queue's topics, versioned: another meaning gets another topic."""

    requested: str
    completed: str
    dead_letter: str

    @classmethod
    def of(cls, prefix: str) -> "Topics":
        """Return the topics of a deployment."""
        return cls(
            requested=f"{prefix}.offload.requested.v1",
            completed=f"{prefix}.offload.completed.v1",
            dead_letter=f"{prefix}.offload.requested.v1.dlq",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadRequest:
    """The wish that a ledger be offloaded; may come twice, late, out of order or never."""

    stream: StreamName
    incarnation: UUID
    ledger_id: LedgerId
    trigger: Trigger
    requested_ms: int
    request_count: int = 1


class Outgoing(NamedTuple):
    """An event ready to be published."""

    topic: str
    key: bytes
    value: bytes
    headers: Mapping[str, bytes]


class Stationery:
    """Writes events: who they are from, when, and in which trace."""

    def __init__(self, topics: Topics, *, source: str, clock: Clock, ids: Ids) -> None:
        self.topics = topics
        self._source = source
        self._clock = clock
        self._ids = ids

    def request(self, request: OffloadRequest, trace: Traceparent | None = None) -> Outgoing:
        """Return the event of a request; without ``trace`` it begins one."""
        message = pb.OffloadRequest(
            stream=request.stream,
            incarnation=request.incarnation.bytes,
            ledger_id=request.ledger_id,
            trigger=request.trigger.value,
            requested_ms=request.requested_ms,
            request_count=request.request_count,
        )
        if trace is None:
            trace = Traceparent.create(self._ids.uuid().bytes + self._ids.uuid().bytes[:8])
        key = _key(request.stream, request.ledger_id)
        return self._event(self.topics.requested, key, message, trace)

    def result(self, result: pb.OffloadResult, *, cause: Event) -> Outgoing:
        """Return the event of a result, in the trace of the request that caused it."""
        trace = trace_of(cause)
        child = trace.child(self._ids.uuid().bytes[:8]) if trace is not None else None
        key = _key(result.stream, result.ledger_id)
        return self._event(self.topics.completed, key, result, child)

    def dead_letter(self, event: Event, error: TierlogError) -> Outgoing:
        """Return ``event`` as it came, with what was wrong beside it.

        Of what is too large to be a request only the beginning is kept: Kafka would not take it
        back with our headers added, and whoever can't put it aside meets it for ever.
        """
        kept = [
            (name, value)
            for name, value in event.headers.items()
            if len(name) <= HEADER_NAME_LEN_MAX
            and len(value) <= HEADER_LEN_MAX
            and (not name.startswith(OWN) or name == REPLAY_OF)
        ]
        headers = {
            **dict(kept[:HEADERS_MAX]),
            ERROR_REASON: error.reason.value.encode(),
            ERROR_MESSAGE: str(error)[:ERROR_LEN_MAX].encode(errors="replace"),
            ERROR_TIME_MS: str(self._clock.wall_ms()).encode(),
            ATTEMPTS: str(event.attempt).encode(),
            FROM_TOPIC: event.topic.encode(),
        }
        if len(event.value) > VALUE_LEN_MAX or len(event.key) > KEY_LEN_MAX:
            headers[CUT] = str(len(event.value)).encode()
        return Outgoing(
            self.topics.dead_letter, event.key[:KEY_LEN_MAX], event.value[:VALUE_LEN_MAX], headers
        )

    def replay(self, letter: Event, place: str) -> Outgoing:
        """Return the request that a dead letter was, as a new event."""
        headers = {name: v for name, v in letter.headers.items() if not name.startswith(OWN)}
        headers[REPLAY_OF] = place.encode()
        return Outgoing(self.topics.requested, letter.key, letter.value, headers)

    def mark(self, letter: Event, place: str, mark: str) -> Outgoing:
        """Return the event that says what became of the dead letter at ``place``."""
        headers = {
            MARK: mark.encode(),
            MARK_OF: place.encode(),
            MARK_TIME_MS: str(self._clock.wall_ms()).encode(),
        }
        return Outgoing(self.topics.dead_letter, letter.key, b"", headers)

    def _event(
        self, topic: str, key: bytes, message: Message, trace: Traceparent | None
    ) -> Outgoing:
        envelope = Envelope(
            event_id=self._ids.uuid(),
            source=self._source,
            event_type=topic,
            subject=key.decode(),
            time_ms=self._clock.wall_ms(),
            dataschema=message.DESCRIPTOR.full_name,
            traceparent=trace,
        )
        return Outgoing(topic, key, message.SerializeToString(), build_headers(envelope))


def trace_of(event: Event) -> Traceparent | None:
    """Return the trace that an event is in; None when it names none that can be followed."""
    text = event.headers.get("traceparent")
    return Traceparent.parse(text.decode("ascii", "replace")) if text is not None else None


def _key(stream: str, ledger_id: int) -> bytes:
    return f"{stream}/{ledger_id}".encode()


def parse_request(event: Event) -> OffloadRequest:
    """Read a request from the queue, trusting nothing."""
    if len(event.value) > VALUE_LEN_MAX:
        raise _bad(f"it has {len(event.value)} bytes")
    envelope = parse_headers(event.headers)
    if _SCHEMA_PLACE.split(envelope.dataschema)[-1] != pb.OffloadRequest.DESCRIPTOR.full_name:
        raise _bad(f"it says to be a {envelope.dataschema[:80]!r}")
    message = pb.OffloadRequest()
    try:
        message.ParseFromString(event.value)
    except DecodeError as error:
        raise _bad("its value is not a protobuf message") from error
    try:
        incarnation = UUID(bytes=message.incarnation)
        trigger = Trigger(message.trigger)
    except ValueError as error:
        raise _bad(str(error)) from error
    if not 0 <= message.ledger_id <= LEDGER_ID_MAX:
        raise _bad(f"there can be no ledger {message.ledger_id}")
    return OffloadRequest(
        stream=_stream(message.stream),
        incarnation=incarnation,
        ledger_id=LedgerId(message.ledger_id),
        trigger=trigger,
        requested_ms=message.requested_ms,
        request_count=message.request_count,
    )


def parse_result(event: Event) -> pb.OffloadResult:
    """Read a result from the queue, or raise ``CorruptError``."""
    message = pb.OffloadResult()
    try:
        message.ParseFromString(event.value)
    except DecodeError as error:
        raise _bad("its value is not a protobuf message") from error
    return message


def _stream(text: str) -> StreamName:
    try:
        return stream_name(text)
    except RefusedError as error:
        raise _bad(error.message) from error


def _bad(what: str) -> CorruptError:
    return CorruptError(
        f"event is no offload request: {what}",
        remedy="Look at it in the dead-letter topic, and at who published it",
    )
