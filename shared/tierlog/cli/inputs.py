"""Bytes to events, for ``tierlog append``: lines, NDJSON, length-prefixed binary; keys (pure).

    lines   one event a line, without its line feed; the last line may have none
    ndjson  the same, each line one JSON document; empty lines are passed over
    binary  event_len 4, big-endian, then event_len bytes; over and over

A key is what stands in each event before a separator, or in a field of its JSON document.

Invariant: every byte of the input is in an event, a key, a separator, or refused with its place.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from tierlog.model.errors import Reason, RefusedError

if TYPE_CHECKING:
    from tierlog.format.entry import StructuredEvent

EVENT_BYTES_MAX: Final = 64 * 1024 * 1024
LENGTH_LEN: Final = 4


class InputFormat(StrEnum):
    """How events lie in the input."""

    LINES = "lines"
    NDJSON = "ndjson"
    BINARY = "binary"


class EventParser:
    """Takes the input piece by piece; gives the events that are whole."""

    def __init__(self, kind: InputFormat) -> None:
        self._kind = kind
        self._rest = bytearray()
        self._count = 0
        self._offset = 0

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Iterate over the events that ``piece`` completes."""
        self._rest += piece
        if self._kind is InputFormat.BINARY:
            yield from self._records()
        else:
            yield from self._lines()

    def finish(self) -> Iterator[bytes]:
        """Iterate over what is left at the end of the input; refuses a cut record."""
        if not self._rest:
            return
        if self._kind is InputFormat.BINARY:
            raise RefusedError(
                f"the input ends inside record {self._count + 1}, which begins at byte "
                f"{self._offset}",
                remedy="Records are 4 bytes of length, big-endian, and that many bytes",
            )
        yield from self._line(bytes(self._rest))
        self._rest.clear()

    def _lines(self) -> Iterator[bytes]:
        if b"\n" not in self._rest:
            self._check_len(len(self._rest))
            return
        *lines, last = bytes(self._rest).split(b"\n")
        self._rest = bytearray(last)
        self._check_len(len(last))
        for line in lines:
            yield from self._line(line)

    def _line(self, line: bytes) -> Iterator[bytes]:
        self._count += 1
        if self._kind is InputFormat.NDJSON:
            if not line.strip():
                return
            self._check_json(line)
        yield line

    def _check_json(self, line: bytes) -> None:
        import orjson

        try:
            orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise RefusedError(
                f"line {self._count} is not JSON: {error}",
                remedy="Correct it, or append with: --format lines",
            ) from error

    def _records(self) -> Iterator[bytes]:
        at, rest = 0, bytes(self._rest)
        while len(rest) - at >= LENGTH_LEN:
            length = int.from_bytes(rest[at : at + LENGTH_LEN], "big")
            self._check_len(length)
            end = at + LENGTH_LEN + length
            if end > len(rest):
                break
            yield rest[at + LENGTH_LEN : end]
            self._count += 1
            self._offset += LENGTH_LEN + length
            at = end
        self._rest = bytearray(rest[at:])

    def _check_len(self, length: int) -> None:
        if length > EVENT_BYTES_MAX:
            raise RefusedError(
                f"event {self._count + 1} of {length} bytes is above the limit of "
                f"{EVENT_BYTES_MAX}",
                reason=Reason.TOO_LARGE,
                remedy="Check --format, or cut the event into smaller ones",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Keying:
    """Where an event has its key: before ``separator``, or in ``field`` of a JSON document."""

    separator: bytes | None = None
    field: str | None = None

    def keyed(self, events: Iterator[bytes]) -> "Iterator[StructuredEvent]":
        """Iterate over the events with their keys; one without a key has None."""
        from tierlog.format.entry import StructuredEvent

        for event in events:
            if self.separator is not None:
                key, payload = _split(event, self.separator)
                yield StructuredEvent(payload=payload, key=key)
            else:
                assert self.field is not None
                yield StructuredEvent(payload=event, key=_field_of(event, self.field))


def _split(event: bytes, separator: bytes) -> tuple[bytes, bytes]:
    key, found, payload = event.partition(separator)
    if not found:
        raise RefusedError(
            f"the event {event[:60]!r} has no {separator!r} behind its key",
            remedy="Correct the input, or give another --key-separator",
        )
    return key, payload


def _field_of(event: bytes, field: str) -> bytes | None:
    import orjson

    try:
        document = orjson.loads(event)
    except orjson.JSONDecodeError as error:
        raise RefusedError(
            f"the event {event[:60]!r} is not JSON, and its key is to be a field of it: {error}",
            remedy="Correct the input, or use --key-separator",
        ) from error
    value = document.get(field) if isinstance(document, dict) else None
    if value is None:
        return None
    return value.encode() if isinstance(value, str) else orjson.dumps(value)
