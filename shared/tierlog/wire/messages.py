"""What the headers of the wire say, between protobuf and the values of the model.

Owns: HELLO and WELCOME as values, errors on their way, ranges, the runs of one message. Does not
own the order in which messages may come: ``connection`` and ``server`` do.

Invariant: whatever a peer sends, reading it ends in a value or in a ``CorruptError``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from google.protobuf.message import DecodeError

from tierlog.format.run import Run, take_runs
from tierlog.format.versions import Format, current
from tierlog.model.attributes import AppendCondition
from tierlog.model.errors import (
    CorruptError,
    IndeterminateError,
    Reason,
    RefusedError,
    RetryableError,
    TierlogError,
    from_reason,
)
from tierlog.model.ids import INT64_MAX, EntryId, LedgerId, NodeId
from tierlog.model.position import AppendedRange, Edge, Position
from tierlog.ports.files import Buffer
from tierlog.proto.v1 import wire_pb2 as pb

ROLE_PRODUCER: Final = "producer"
ROLE_OWNER: Final = "owner"

AUTH_NONE: Final = ""
AUTH_TOKEN: Final = "token"  # noqa: S105 - the method's name
"""A secret that a whole cluster shares, where security is open."""
AUTH_JWT: Final = "jwt"
"""A token that an issuer has signed. Certificates need no method: TLS has shown them."""

RUNS_MAX: Final = 1024
"""So many runs share a message at most."""
ADDS_HEADER_LEN_MAX: Final = 18
"""Bytes of the header of a message of runs: no id and no count need more. The header of an
append is within the sum of this and of its ``WireAppend``."""

_TEXT_LEN_MAX: Final = 8 * 1024
_UUID_LEN: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """What a caller shows of itself: a method's name, and what the method wants."""

    method: str = AUTH_NONE
    data: bytes = b""

    def __repr__(self) -> str:
        return f"Credentials({self.method!r})"  # never the secret


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """What the server says of itself and of its limits."""

    node_id: NodeId
    credit_bytes: int
    frame_len_max: int
    version: int = current(Format.WIRE)
    """What both sides speak on this connection: the newest that both read."""


def parse_frame(header: Buffer) -> pb.WireFrame:
    """Read a frame's header, or raise ``CorruptError``."""
    try:
        return pb.WireFrame.FromString(header)  # type: ignore[arg-type]
    except DecodeError as error:
        raise CorruptError(
            "a frame's header is not a WireFrame", remedy="Speak the wire's protocol"
        ) from error


def uuid_of(data: bytes) -> UUID | None:
    """Return the UUID in ``data``, or None when it is none."""
    return UUID(bytes=data) if len(data) == _UUID_LEN else None


def wire_error(error: TierlogError) -> pb.WireError:
    """Return ``error`` for its way; never a stack trace."""
    return pb.WireError(
        reason=error.reason.value,
        message=error.message[:_TEXT_LEN_MAX],
        remedy=error.remedy[:_TEXT_LEN_MAX],
        details={key: value[:_TEXT_LEN_MAX] for key, value in error.details.items()},
        retry_after_ms=int((error.retry_after_s or 0) * 1000),
    )


def error_of(record: pb.WireError, *, answers_request: bool) -> TierlogError:
    """Return the error that a peer tells of. An unknown reason is indeterminate for a request."""
    retry_after_s = record.retry_after_ms / 1000 if record.retry_after_ms > 0 else None
    try:
        reason = Reason(record.reason)
    except ValueError:
        kind = IndeterminateError if answers_request else RetryableError
        return kind(
            f"the peer answered with the unknown reason {record.reason[:80]!r}: {record.message}",
            remedy=record.remedy or "Upgrade this process to the version of its peer",
        )
    return from_reason(
        reason,
        record.message,
        remedy=record.remedy,
        details=dict(record.details),
        retry_after_s=retry_after_s,
    )


def ranges_of(record: pb.WireAppended) -> list[AppendedRange]:
    """Return where an append went, or raise ``CorruptError``."""
    ranges = []
    for one in record.ranges:
        first, last = one.first_entry_id, one.last_entry_id
        if not (0 <= one.ledger_id <= INT64_MAX and 0 <= first <= last <= INT64_MAX):
            raise CorruptError(
                f"the peer says that an append went to {one.ledger_id}:{first}-{last}",
                remedy="Check what listens on this address",
            )
        ranges.append(
            AppendedRange(
                ledger_id=LedgerId(one.ledger_id),
                first_entry_id=EntryId(first),
                last_entry_id=EntryId(last),
            )
        )
    return ranges


def condition_to_record(condition: AppendCondition | None) -> pb.AppendCondition | None:
    """Return a condition for its way."""
    if condition is None:
        return None
    record = pb.AppendCondition()
    if condition.last_event_number is not None:
        record.last_event_number = condition.last_event_number
    after = condition.after
    if isinstance(after, Position):
        record.after.ledger_id, record.after.entry_id = after.ledger_id, after.entry_id
    elif after is not None:
        assert after is Edge.EARLIEST, "what is the latest is only known once it was appended"
        record.empty_stream = True
    return record


def condition_of(record: pb.AppendCondition) -> AppendCondition:
    """Invert ``condition_to_record``, or raise ``RefusedError``."""
    last = record.last_event_number if record.HasField("last_event_number") else None
    kind = record.WhichOneof("last_entry")
    after: Position | Edge | None = None
    ids_ok = min(record.after.ledger_id, record.after.entry_id) >= 0
    if (last is not None and last < 0) or (kind == "after" and not ids_ok):
        raise _bad_condition("an append's condition is out of bounds")
    if kind == "after":
        after = Position(LedgerId(record.after.ledger_id), EntryId(record.after.entry_id))
    elif kind == "empty_stream":
        if not record.empty_stream:
            raise _bad_condition("an append's condition wants a stream that is not empty")
        after = Edge.EARLIEST
    if last is None and after is None:
        raise _bad_condition("an append's condition says nothing")
    return AppendCondition(last_event_number=last, after=after)


def _bad_condition(what: str) -> RefusedError:
    return RefusedError(
        what,
        remedy="Give the writer's last event number from 0 on, the last entry's position, or both",
    )


def appended_of(ranges: Sequence[AppendedRange]) -> pb.WireAppended:
    """Invert ``ranges_of``."""
    return pb.WireAppended(
        ranges=[
            pb.AppendedRange(
                ledger_id=one.ledger_id,
                first_entry_id=one.first_entry_id,
                last_entry_id=one.last_entry_id,
            )
            for one in ranges
        ]
    )


def runs_of(body: Buffer, count: int) -> tuple[list[Run], CorruptError | None]:
    """Return the runs of a message up to the first bad one, verified; and what is wrong with it.

    Where there is more than the message speaks of, none is good: who wrote it counts otherwise.
    """
    taken = take_runs(body, count_max=count)
    found = len(taken.runs)
    if found < count:
        return taken.runs, taken.error or _miscounted(f"{found} whole runs, not {count}")
    if taken.length < len(body):
        return [], _miscounted(f"more than {count} runs")
    return taken.runs, None


def _miscounted(what: str) -> CorruptError:
    return CorruptError(f"a message holds {what}", remedy="Send the runs again")
