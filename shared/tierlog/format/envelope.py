"""Headers of an event on the queue: CloudEvents 1.0 in binary mode, and W3C trace context.

    ce_specversion  "1.0"                    ce_time        RFC 3339, UTC, milliseconds
    ce_id           the event's UUID         ce_dataschema  name of the value's protobuf message
    ce_source       who published it         content-type   "application/protobuf"
    ce_type         topic-like, versioned    traceparent    00-<trace id>-<span id>-<flags>
    ce_subject      stream/ledger

Owns the headers. Does not own topics nor values.

Invariants:
    * ``parse_headers(build_headers(envelope)) == envelope``.
    * The specification's major version is the one of the gate (``tierlog.format.versions``).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, Self
from uuid import UUID

from tierlog.format.versions import Format, check_version, current
from tierlog.model.errors import CorruptError, RefusedError

SPECVERSION: Final = f"{current(Format.CLOUD_EVENT)}.0"
CONTENT_TYPE: Final = "application/protobuf"

TRACE_ID_LEN: Final = 16
SPAN_ID_LEN: Final = 8

_VERSION: Final = re.compile(r"(\d{1,4})\.\d{1,4}", re.ASCII)
_TRACEPARENT: Final = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})", re.ASCII)
# Other languages' clocks give seven digits of a second, or nine.
_TIME: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,30})?(Z|[+-]\d\d:\d\d)", re.ASCII)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_HEADER_LEN_MAX: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Traceparent:
    """Where in a trace something happened."""

    trace_id: bytes
    span_id: bytes
    sampled: bool = True

    def __post_init__(self) -> None:
        if len(self.trace_id) != TRACE_ID_LEN or not any(self.trace_id):
            raise CorruptError("trace id is not 16 bytes, or all zeros", remedy="Start a new trace")
        if len(self.span_id) != SPAN_ID_LEN or not any(self.span_id):
            raise CorruptError("span id is not 8 bytes, or all zeros", remedy="Start a new trace")

    def __str__(self) -> str:
        return f"00-{self.trace_id.hex()}-{self.span_id.hex()}-{int(self.sampled):02x}"

    @classmethod
    def create(cls, chance: bytes) -> Self:
        """Begin a trace with 24 random bytes."""
        return cls(trace_id=chance[:TRACE_ID_LEN], span_id=chance[TRACE_ID_LEN:])

    def child(self, chance: bytes) -> Self:
        """Return a span below this one, with 8 random bytes."""
        return type(self)(trace_id=self.trace_id, span_id=chance, sampled=self.sampled)

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Read a traceparent; None when there is none that can be followed."""
        match = _TRACEPARENT.fullmatch(text)
        if match is None:
            return None
        try:
            return cls(
                trace_id=bytes.fromhex(match[1]),
                span_id=bytes.fromhex(match[2]),
                sampled=bool(int(match[3], 16) & 1),
            )
        except CorruptError:
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """What an event says of itself beside its value."""

    event_id: UUID
    source: str
    event_type: str
    subject: str
    time_ms: int
    dataschema: str
    traceparent: Traceparent | None = None


def build_headers(envelope: Envelope) -> dict[str, bytes]:
    """Return the event's headers."""
    texts = {
        "ce_specversion": SPECVERSION,
        "ce_id": str(envelope.event_id),
        "ce_source": envelope.source,
        "ce_type": envelope.event_type,
        "ce_subject": envelope.subject,
        "ce_time": _to_rfc3339(envelope.time_ms),
        "ce_dataschema": envelope.dataschema,
        "content-type": CONTENT_TYPE,
    }
    if envelope.traceparent is not None:
        texts["traceparent"] = str(envelope.traceparent)
    return {name: text.encode() for name, text in texts.items()}


def parse_headers(headers: Mapping[str, bytes]) -> Envelope:
    """Read an event's headers: ``CorruptError``, or ``RefusedError`` for another version."""
    version = _VERSION.fullmatch(_text(headers, "ce_specversion"))
    if version is None:
        raise _corrupt("ce_specversion", "is no version")
    check_version(Format.CLOUD_EVENT, int(version[1]))
    kind = _text(headers, "content-type")
    if kind != CONTENT_TYPE:
        raise RefusedError(
            f"event whose value is {kind[:80]!r}", remedy=f"Publish events as {CONTENT_TYPE}"
        )
    try:
        event_id = UUID(_text(headers, "ce_id"))
    except ValueError as error:
        raise _corrupt("ce_id", "is no UUID") from error
    trace = Traceparent.parse(_text(headers, "traceparent")) if "traceparent" in headers else None
    return Envelope(
        event_id=event_id,
        source=_text(headers, "ce_source"),
        event_type=_text(headers, "ce_type"),
        subject=_text(headers, "ce_subject"),
        time_ms=_from_rfc3339(_text(headers, "ce_time")),
        dataschema=_text(headers, "ce_dataschema"),
        traceparent=trace,
    )


def _text(headers: Mapping[str, bytes], name: str) -> str:
    raw = headers.get(name)
    if raw is None:
        raise _corrupt(name, "is missing")
    if len(raw) > _HEADER_LEN_MAX:
        raise _corrupt(name, f"has {len(raw)} bytes")
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise _corrupt(name, "is not UTF-8") from error


def _to_rfc3339(time_ms: int) -> str:
    moment = _EPOCH + timedelta(milliseconds=time_ms)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{time_ms % 1000:03d}Z"


def _from_rfc3339(text: str) -> int:
    # Its letters may be small ones.
    time = text.upper()
    if _TIME.fullmatch(time) is None:
        raise _corrupt("ce_time", f"is {text[:40]!r}")
    try:
        return (datetime.fromisoformat(time) - _EPOCH) // timedelta(milliseconds=1)
    except ValueError as error:
        raise _corrupt("ce_time", f"is {text[:40]!r}") from error


def _corrupt(name: str, what: str) -> CorruptError:
    return CorruptError(
        f"event header {name} {what}",
        remedy="Look at the event in the dead-letter topic",
        details={"header": name},
    )
