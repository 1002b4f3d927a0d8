"""Entries as HTTP gives them: lines of JSON, payloads with their lengths, Arrow; pure.

    type                                  a body holds
    application/x-ndjson                  a document an event, each with a line feed
    application/octet-stream              an event after the other: 4 bytes of length, its payload
    application/vnd.apache.arrow.stream   an Arrow stream of one batch, a row an event

A document has ``position``, ``index``, ``tier``, then what the event has of ``publish_time_ms``,
``writer_id``, ``event_time_ms``, ``properties``, ``key``, and ``payload``. Bytes that are no UTF-8
stand in base64 under ``key_base64`` and ``payload_base64``.

Invariant: nothing is told of an entry whose checksum is wrong.
"""

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import orjson

from tierlog.format.checksum import Buffer
from tierlog.format.entry import (
    AppendHeader,
    Codec,
    Decompress,
    StructuredEvent,
    decode_entry,
    properties_count,
    unpacked_size,
)
from tierlog.format.frame import FRAME_HEADER_LEN, check_frames, walk_frames
from tierlog.model.errors import CorruptError, Reason, RefusedError
from tierlog.model.ids import EntryId
from tierlog.model.position import Position
from tierlog_reader.chunk import Chunk

NDJSON: Final = "application/x-ndjson"
OCTETS: Final = "application/octet-stream"
ARROW: Final = "application/vnd.apache.arrow.stream"
EVENTS: Final = "text/event-stream"
BODY_TYPES: Final = (NDJSON, OCTETS, ARROW)
EVENT_LEN_LEN: Final = 4
_NONE: Final[Mapping[str, str]] = {}
# What a property counts as beside its bytes, in a room that has several times what is counted:
# 270 to 460 bytes were measured of each, as protobuf's and as Python's objects.
PROPERTY_BYTES: Final = 40
# A shorter event has so few that they need no room of their own.
WIDE_BYTES: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpacking:
    """What decompresses events, and the most that those of one entry may have then."""

    decompressors: Mapping[Codec, Decompress]
    events_len_max: int

    @property
    def properties_max(self) -> int:
        """How many properties one event may have: they take half of the room of all its bytes."""
        return self.events_len_max // (2 * PROPERTY_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundEntry:
    """One entry: its data is the application's where ``raw``, else has an append header."""

    position: Position
    data: bytes
    tier: str
    raw: bool

    @property
    def unpacked_size(self) -> tuple[int, int]:
        """Bytes of its data, the events decompressed; and how many these are, as it says."""
        return (len(self.data), 1) if self.raw else unpacked_size(self.data)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundEvent:
    """One event of an entry."""

    position: Position
    index: int
    tier: str
    event: StructuredEvent
    header: AppendHeader | None


def entries_of(chunk: Chunk, *, raw: bool) -> list[FoundEntry]:
    """Return the entries of a chunk."""
    frames = b"".join(chunk.frames)
    starts = walk_frames(frames, chunk.first_entry_id)
    check_frames(frames, starts, chunk.first_entry_id)
    begins = starts.tolist()
    ends = [*begins[1:], len(frames)]
    return [
        FoundEntry(
            position=Position(chunk.ledger_id, EntryId(chunk.first_entry_id + step)),
            data=frames[begin + FRAME_HEADER_LEN : end],
            tier=chunk.tier.value,
            raw=raw,
        )
        for step, (begin, end) in enumerate(zip(begins, ends, strict=True))
    ]


def events_of(entry: FoundEntry, unpacking: Unpacking) -> Iterator[FoundEvent]:
    """Give the events of an entry; in a raw stream it is one itself.

    One at a time: their properties, as objects, take several times what they have in bytes.
    """
    where, tier = entry.position, entry.tier
    if entry.raw:
        event = StructuredEvent(payload=entry.data)
        yield FoundEvent(position=where, index=0, tier=tier, event=event, header=None)
        return
    try:
        decoded = decode_entry(entry.data)
        found = decoded.events(unpacking.decompressors, events_len_max=unpacking.events_len_max)
        for index, one in enumerate(found):
            if decoded.header.structured:
                _check_properties(one, unpacking.properties_max)
            event = decoded.structured_event(one)
            yield FoundEvent(
                position=where, index=index, tier=tier, event=event, header=decoded.header
            )
    except (CorruptError, RefusedError) as error:
        error.details.update(position=str(where), tier=tier)
        raise


def properties_len(entry: FoundEntry, unpacking: Unpacking) -> int:
    """Return what the properties of its widest event count as; 0 where that can't be read."""
    if entry.raw or entry.unpacked_size[0] < WIDE_BYTES:
        return 0
    try:
        decoded = decode_entry(entry.data)
        if not decoded.header.structured:
            return 0
        events = decoded.events(unpacking.decompressors, events_len_max=unpacking.events_len_max)
    except (CorruptError, RefusedError):
        return 0  # ``events_of`` tells it
    counts = (
        properties_count(one, count_max=unpacking.properties_max)
        for one in events
        if len(one) >= WIDE_BYTES
    )
    return PROPERTY_BYTES * max(counts, default=0)


def escapes_len(entries: Sequence[FoundEntry], unpacking: Unpacking) -> int:
    """Return how much longer entries are in JSON at most; those that can't be read not at all.

    Control characters take six bytes there, and quotes two.
    """
    found = np.frombuffer(b"".join(_unpacked(one, unpacking) for one in entries), np.uint8)
    quotes = np.count_nonzero(found == ord('"')) + np.count_nonzero(found == ord("\\"))
    return int(5 * np.count_nonzero(found < ord(" ")) + quotes)


def _unpacked(entry: FoundEntry, unpacking: Unpacking) -> Buffer:
    if entry.unpacked_size[0] <= len(entry.data):
        return entry.data
    try:
        decoded, limit = decode_entry(entry.data), unpacking.events_len_max
        return decoded.unpacked(unpacking.decompressors, events_len_max=limit)
    except (CorruptError, RefusedError):
        return b""  # ``events_of`` tells it


def _check_properties(event: Buffer, count_max: int) -> None:
    if len(event) >= WIDE_BYTES and properties_count(event, count_max=count_max) > count_max:
        raise RefusedError(
            f"an event has more than {count_max} properties",
            reason=Reason.TOO_LARGE,
            remedy="Read it by the client, which takes entries as they are; or give the reader more"
            " reader.response_bytes_max",
        )


def document_of(found: FoundEvent) -> dict[str, Any]:
    """Return an event as JSON has it."""
    event, header = found.event, found.header
    document: dict[str, Any] = {
        "position": str(found.position),
        "index": found.index,
        "tier": found.tier,
    }
    if header is not None:
        document["publish_time_ms"] = header.publish_time_ms
        if header.writer_id is not None:
            document["writer_id"] = str(header.writer_id)
    if event.event_time_ms is not None:
        document["event_time_ms"] = event.event_time_ms
    if event.properties:
        document["properties"] = dict(event.properties)
    if event.key is not None:
        document |= _text_or_base64("key", event.key)
    return document | _text_or_base64("payload", event.payload)


def body_of(kind: str, entries: Sequence[FoundEntry], unpacking: Unpacking) -> Buffer:
    """Return all entries as one body of that type.

    A line that ``orjson`` made takes some KiB for as long as it is kept: so each is added at once.
    """
    events = (event for entry in entries for event in events_of(entry, unpacking))
    if kind == ARROW:
        return _arrow([_without_properties(event) for event in events])
    body = bytearray()
    for event in events:
        if kind == NDJSON:
            body += line_of(event)
        else:
            assert kind == OCTETS, kind
            body += len(event.event.payload).to_bytes(EVENT_LEN_LEN, "big")
            body += event.event.payload
    return body


def line_of(event: FoundEvent) -> bytes:
    """Return an event's document with its line feed."""
    return orjson.dumps(document_of(event), option=orjson.OPT_APPEND_NEWLINE)


def wanted_type(accept: str | None, offered: Sequence[str]) -> str:
    """Return which of the offered types a client likes best, or refuse all that it named.

    What it says of a type holds before what it says of ``*/*`` (RFC 9110, 12.5.1).
    """
    wishes: dict[str, tuple[float, int]] = {}
    for number, one in enumerate((accept or "*/*").split(",")):
        name, *parameters = (part.strip().lower() for part in one.split(";"))
        quality = next((part[2:] for part in parameters if part.startswith("q=")), "1")
        try:
            wishes.setdefault(name, (-float(quality), number))
        except ValueError:
            continue
    found: list[tuple[float, int, int]] = []
    for at, kind in enumerate(offered):
        names = (kind, kind.partition("/")[0] + "/*", "*/*")
        wish = next((wishes[name] for name in names if name in wishes), None)
        if wish is not None and wish[0] < 0:
            found.append((*wish, at))
    if found:
        return offered[min(found)[-1]]
    raise RefusedError(
        f"none of the types {(accept or '')[:200]!r} is served here",
        remedy=f"Accept one of: {', '.join(offered)}",
    )


def _text_or_base64(name: str, data: bytes) -> dict[str, str]:
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(data).decode("ascii")}


def _without_properties(found: FoundEvent) -> FoundEvent:
    """Return an event as Arrow has it: all are kept until the last one was made."""
    if not found.event.properties:
        return found
    return replace(found, event=replace(found.event, properties=_NONE))


def _arrow(events: Sequence[FoundEvent]) -> bytes:
    try:
        import pyarrow as pa  # noqa: PLC0415 - not every reader has it
    except ImportError as error:
        raise RefusedError(
            "this reader can't write Arrow: pyarrow is not installed",
            remedy="Install tierlog[arrow] beside it, or accept another type",
        ) from error
    columns = {
        "ledger_id": pa.array([one.position.ledger_id for one in events], pa.int64()),
        "entry_id": pa.array([one.position.entry_id for one in events], pa.int64()),
        "index": pa.array([one.index for one in events], pa.int32()),
        "tier": pa.array([one.tier for one in events], pa.string()),
        "publish_time": pa.array(
            [one.header.publish_time_ms if one.header is not None else None for one in events],
            pa.timestamp("ms", tz="UTC"),
        ),
        "event_time": pa.array(
            [one.event.event_time_ms for one in events], pa.timestamp("ms", tz="UTC")
        ),
        "key": pa.array([one.event.key for one in events], pa.binary()),
        "payload": pa.array([one.event.payload for one in events], pa.binary()),
    }
    batch = pa.record_batch(list(columns.values()), names=list(columns))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    body: bytes = sink.getvalue().to_pybytes()
    return body
