"""Entry data as the client writes it: the append header and the events of one append.

    offset  size  field
         0     2  magic         "TE"
         2     1  version       1
         3     1  flags         zero
         4     4  header_len    bytes of the AppendHeader
         8     4  crc32c        over bytes 0 to 7, the AppendHeader and the events
        12     …  AppendHeader  tierlog/v1/entry.proto
         …     …  events        to the end of the entry; after decompression, event_count x
               4    event_len
               …    event       plain bytes, or a StructuredEvent when the header says so

Integers are big-endian. Ledgers, storage nodes and offloader never look inside; in a raw stream
there is nothing of this, and entry data is the application's.

Owns the coding. Does not own compression: the functions for it are arguments, so that this room
stays free of their libraries.

Invariants:
    * ``decode_entry(encode_entry(append))`` holds what was appended.
    * Nothing is allocated on an unchecked length; a decompression never passes ``events_len``,
      nor that the caller's limit.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from struct import Struct
from struct import error as StructError  # noqa: N812 - it is a class
from typing import Final, NoReturn, Self
from uuid import UUID

from google.protobuf.message import DecodeError

from tierlog.format.checksum import Buffer, crc32c, crc32c_of
from tierlog.format.versions import Format, check_version, current
from tierlog.model.attributes import VALUE_MAX, VALUE_MIN
from tierlog.model.errors import CorruptError, Reason, RefusedError
from tierlog.model.ids import INT64_MAX
from tierlog.proto.v1 import entry_pb2 as pb

ENTRY_MAGIC: Final = b"TE"
MAGIC_OFFSET: Final = 0
MAGIC_LEN: Final = 2
VERSION_OFFSET: Final = MAGIC_OFFSET + MAGIC_LEN
VERSION_LEN: Final = 1
FLAGS_OFFSET: Final = VERSION_OFFSET + VERSION_LEN
FLAGS_LEN: Final = 1
HEADER_LEN_OFFSET: Final = FLAGS_OFFSET + FLAGS_LEN
HEADER_LEN_LEN: Final = 4
CRC_OFFSET: Final = HEADER_LEN_OFFSET + HEADER_LEN_LEN
CRC_LEN: Final = 4
APPEND_HEADER_OFFSET: Final = CRC_OFFSET + CRC_LEN
EVENT_LEN_LEN: Final = 4

APPEND_HEADER_LEN_MAX: Final = 1024 * 1024
EVENTS_LEN_MAX: Final = 256 * 1024 * 1024
EVENT_COUNT_MAX: Final = 2**31 - 1

_FIXED: Final = Struct(">2sBBI")
_U32: Final = Struct(">I")

# Protobuf's wire format: what stands behind a tag, by its last three bits.
_VARINT: Final = 0
_LENGTH_DELIMITED: Final = 2
_FIXED_LEN: Final = {1: 8, 5: 4}
_VARINT_BITS: Final = 63
_OTHERS_MAX: Final = 1000
"""An event has three other fields; no later version has so many."""
_PROPERTIES_TAG: Final = pb.StructuredEvent.PROPERTIES_FIELD_NUMBER << 3 | _LENGTH_DELIMITED

assert _FIXED.size == CRC_OFFSET == 8
assert APPEND_HEADER_OFFSET == 12

Compress = Callable[[bytes], bytes]
Decompress = Callable[[Buffer, int], bytes]
"""``decompress(data, length_max)``: must stop, with any error, before it passes ``length_max``."""


class Codec(Enum):
    """How the events of an entry are compressed."""

    NONE = 0
    ZSTD = 1
    LZ4 = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How whoever appends compresses events, and reads its own again."""

    codec: Codec
    compress: Compress
    decompress: Decompress


class Verb(Enum):
    """What an attribute update does (seeds/004)."""

    REPLACE = 0
    REPLACE_IF_GREATER = 1
    REPLACE_IF_EQUALS = 2
    REPLACE_IF_ABSENT = 3
    ACCUMULATE = 4


assert {codec.value for codec in Codec} == set(pb.Codec.values())
assert {verb.value for verb in Verb} == set(pb.AttributeUpdate.Verb.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class AttributeUpdate:
    """A change of one attribute, carried by the append that makes it. Values are signed."""

    key: UUID
    verb: Verb
    value: int
    expected: int = 0

    def __post_init__(self) -> None:
        assert VALUE_MIN <= self.value <= VALUE_MAX
        assert VALUE_MIN <= self.expected <= VALUE_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendHeader:
    """What an append says of itself. ``writer_id`` None: its writer keeps no state."""

    event_count: int
    publish_time_ms: int
    writer_id: UUID | None = None
    event_number: int = 0
    codec: Codec = Codec.NONE
    attribute_updates: tuple[AttributeUpdate, ...] = ()
    structured: bool = False
    events_len: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.event_count <= EVENT_COUNT_MAX:
            _corrupt(f"an append of {self.event_count} events")
        if not EVENT_LEN_LEN * self.event_count <= self.events_len <= INT64_MAX:
            _corrupt(f"{self.event_count} events in {self.events_len} bytes")
        if self.event_count == 0 and self.events_len:
            _corrupt(f"no events in {self.events_len} bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredEvent:
    """An event with what the application attached to it."""

    payload: bytes
    key: bytes | None = None
    event_time_ms: int | None = None
    properties: Mapping[str, str] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Return the event's bytes."""
        message = pb.StructuredEvent(payload=self.payload, properties=self.properties)
        if self.key is not None:
            message.key = self.key
        if self.event_time_ms is not None:
            message.event_time_ms = self.event_time_ms
        return message.SerializeToString(deterministic=True)

    @classmethod
    def decode(cls, buffer: Buffer) -> Self:
        """Read the event's bytes, or raise ``CorruptError``."""
        message = pb.StructuredEvent()
        try:
            message.ParseFromString(bytes(buffer))
        except DecodeError as error:
            raise CorruptError(
                "event is not a StructuredEvent", remedy="Read another copy"
            ) from error
        return cls(
            payload=message.payload,
            key=message.key if message.HasField("key") else None,
            event_time_ms=message.event_time_ms if message.HasField("event_time_ms") else None,
            properties=dict(message.properties),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Entry data as it was read. ``packed`` are its events, still compressed."""

    header: AppendHeader
    packed: memoryview

    def unpacked(
        self,
        decompressors: Mapping[Codec, Decompress] | None = None,
        *,
        events_len_max: int = EVENTS_LEN_MAX,
    ) -> memoryview:
        """Return all events, each behind its length, as they were before they were compressed.

        Raises ``CorruptError`` or ``RefusedError``; whether events fill it nobody looked at yet.
        """
        one, packed = self.header, self.packed
        if one.codec is not Codec.NONE:
            if one.events_len > events_len_max:
                raise RefusedError(
                    f"events of {one.events_len} bytes are over the limit of {events_len_max}",
                    reason=Reason.TOO_LARGE,
                    remedy="Read it by the client; append events in smaller entries",
                )
            packed = memoryview(_decompressed(one, packed, decompressors or {}))
        if len(packed) != one.events_len:
            _corrupt(f"events of {len(packed)} bytes where {one.events_len} belong")
        return packed

    def events(
        self,
        decompressors: Mapping[Codec, Decompress] | None = None,
        *,
        events_len_max: int = EVENTS_LEN_MAX,
    ) -> list[memoryview]:
        """Return the bytes of each event, or raise ``CorruptError`` or ``RefusedError``."""
        packed = self.unpacked(decompressors, events_len_max=events_len_max)
        return _split(packed, self.header.event_count)

    def structured_events(
        self,
        decompressors: Mapping[Codec, Decompress] | None = None,
        *,
        events_len_max: int = EVENTS_LEN_MAX,
    ) -> list[StructuredEvent]:
        """Return the events with key, time and properties; plain ones have none."""
        found = self.events(decompressors, events_len_max=events_len_max)
        if self.header.structured:
            return [StructuredEvent.decode(event) for event in found]
        return [StructuredEvent(payload=bytes(event)) for event in found]

    def structured_event(self, event: Buffer) -> StructuredEvent:
        """Return one of ``events`` as ``structured_events`` does: for few of them at a time."""
        if self.header.structured:
            return StructuredEvent.decode(event)
        return StructuredEvent(payload=bytes(event))


def encode_entry(
    events: Sequence[Buffer | StructuredEvent],
    *,
    publish_time_ms: int,
    writer_id: UUID | None = None,
    event_number: int = 0,
    attribute_updates: Sequence[AttributeUpdate] = (),
    codec: Codec = Codec.NONE,
    compress: Compress | None = None,
) -> bytes:
    """Return entry data for one append. Events are all plain or all structured."""
    assert (codec is Codec.NONE) == (compress is None)
    structured = bool(events) and isinstance(events[0], StructuredEvent)
    parts: list[Buffer] = []
    events_len = 0
    for event in events:
        assert isinstance(event, StructuredEvent) == structured, "one encoding an entry"
        raw = event.encode() if isinstance(event, StructuredEvent) else event
        parts += (_U32.pack(len(raw)), raw)
        events_len += EVENT_LEN_LEN + len(raw)
    if compress is not None:
        parts = [compress(b"".join(parts))] if parts else []
    header = _header_to_bytes(
        AppendHeader(
            event_count=len(events),
            publish_time_ms=publish_time_ms,
            writer_id=writer_id,
            event_number=event_number,
            codec=codec,
            attribute_updates=tuple(attribute_updates),
            structured=structured,
            events_len=events_len,
        )
    )
    fixed = _FIXED.pack(ENTRY_MAGIC, current(Format.APPEND_HEADER), 0, len(header))
    crc = crc32c_of((fixed, header, *parts))
    return b"".join((fixed, _U32.pack(crc), header, *parts))


def decode_entry(data: Buffer) -> Entry:
    """Read entry data; its checksum is verified. ``CorruptError``, or another version's."""
    view = memoryview(data)
    if len(view) < APPEND_HEADER_OFFSET:
        _corrupt(f"entry data of {len(view)} bytes")
    magic, version, flags, header_len = _FIXED.unpack_from(view)
    if magic != ENTRY_MAGIC:
        _corrupt("entry data without an append header (of a raw stream?)")
    (expected,) = _U32.unpack_from(view, CRC_OFFSET)
    if crc32c(view[APPEND_HEADER_OFFSET:], crc32c(view[:CRC_OFFSET])) != expected:
        _corrupt("entry data whose checksum differs")
    check_version(Format.APPEND_HEADER, version)
    events_offset = APPEND_HEADER_OFFSET + header_len
    if flags or header_len > APPEND_HEADER_LEN_MAX or events_offset > len(view):
        _corrupt(f"entry data with flags {flags:#x} and a header of {header_len} bytes")
    header = _header_from_bytes(bytes(view[APPEND_HEADER_OFFSET:events_offset]))
    return Entry(header=header, packed=view[events_offset:])


def unpacked_size(data: Buffer) -> tuple[int, int]:
    """Return how long entry data is once its events are decompressed, and how many these are.

    Nothing is verified: what is damaged is as long as it is, and ``decode_entry`` tells. No more
    events are told than that length has room for.
    """
    view, message = memoryview(data), pb.AppendHeader()
    try:
        *_, header_len = _FIXED.unpack_from(view)
        message.ParseFromString(
            bytes(view[APPEND_HEADER_OFFSET : APPEND_HEADER_OFFSET + header_len])
        )
    except (StructError, DecodeError):
        return len(view), 0
    packed = message.codec != pb.CODEC_NONE
    length = max(len(view), message.events_len) if packed else len(view)
    return length, min(message.event_count, length // EVENT_LEN_LEN, EVENT_COUNT_MAX)


def properties_count(event: Buffer, *, count_max: int) -> int:
    """Count a StructuredEvent's properties without making any, up to one more than ``count_max``.

    Those that come twice are counted twice. Of what is damaged those before it are. An event of
    nothing but other fields has too many, too: it would take as long to look through.
    """
    raw, at, count, others = bytes(event), 0, 0, 0
    try:
        while at < len(raw) and count <= count_max:
            tag, at = _varint(raw, at)
            kind = tag & 7
            if kind == _LENGTH_DELIMITED:
                length, at = _varint(raw, at)
                at += length
            elif kind == _VARINT:
                _, at = _varint(raw, at)
            else:
                at += _FIXED_LEN.get(kind, 0)
            count += tag == _PROPERTIES_TAG
            others += tag != _PROPERTIES_TAG
            if others > _OTHERS_MAX:
                return count_max + 1
    except IndexError:
        pass
    return count


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """Return a number of protobuf's wire format, and where it ends."""
    byte = raw[at]
    if byte < 0x80:
        return byte, at + 1
    found = shift = 0
    while byte >= 0x80:
        if shift >= _VARINT_BITS:
            raise IndexError("a number of more than ten bytes")
        found |= (byte & 0x7F) << shift
        shift, at = shift + 7, at + 1
        byte = raw[at]
    return found | byte << shift, at + 1


def _header_to_bytes(header: AppendHeader) -> bytes:
    message = pb.AppendHeader(
        writer_id=header.writer_id.bytes if header.writer_id is not None else b"",
        event_number=header.event_number,
        event_count=header.event_count,
        publish_time_ms=header.publish_time_ms,
        codec=pb.Codec.ValueType(header.codec.value),
        event_encoding=pb.EVENT_ENCODING_STRUCTURED
        if header.structured
        else pb.EVENT_ENCODING_PLAIN,
        events_len=header.events_len,
    )
    for update in header.attribute_updates:
        message.attribute_updates.add(
            key=update.key.bytes,
            verb=pb.AttributeUpdate.Verb.ValueType(update.verb.value),
            value=update.value,
            expected=update.expected,
        )
    return message.SerializeToString(deterministic=True)


def _header_from_bytes(raw: bytes) -> AppendHeader:
    message = pb.AppendHeader()
    try:
        message.ParseFromString(raw)
        return AppendHeader(
            event_count=message.event_count,
            publish_time_ms=message.publish_time_ms,
            writer_id=UUID(bytes=message.writer_id) if message.writer_id else None,
            event_number=message.event_number,
            codec=Codec(message.codec),
            attribute_updates=tuple(
                AttributeUpdate(
                    key=UUID(bytes=update.key),
                    verb=Verb(update.verb),
                    value=update.value,
                    expected=update.expected,
                )
                for update in message.attribute_updates
            ),
            structured=_is_structured(message.event_encoding),
            events_len=message.events_len,
        )
    except (DecodeError, ValueError) as error:
        raise CorruptError(
            f"append header can't be read ({error})", remedy="Read another copy"
        ) from error


def _is_structured(encoding: int) -> bool:
    if encoding not in pb.EventEncoding.values():
        _corrupt(f"events in the unknown encoding {encoding}")
    return encoding == pb.EVENT_ENCODING_STRUCTURED


def _decompressed(
    header: AppendHeader, packed: memoryview, decompressors: Mapping[Codec, Decompress]
) -> bytes:
    if header.event_count == 0:
        return bytes(packed)
    decompress = decompressors.get(header.codec)
    if decompress is None:
        raise RefusedError(
            f"events are compressed with {header.codec.name.lower()}, which can't be read here",
            remedy="Install tierlog[compression]",
        )
    try:
        return decompress(packed, header.events_len)
    except Exception as error:
        # Each codec's library has errors of its own, and all mean the same.
        raise CorruptError(
            f"events can't be decompressed ({error})", remedy="Read another copy"
        ) from error


def _split(packed: memoryview, count: int) -> list[memoryview]:
    events, at, end = [], 0, len(packed)
    for _ in range(count):
        if end - at < EVENT_LEN_LEN:
            _corrupt(f"events cut at byte {at}")
        (length,) = _U32.unpack_from(packed, at)
        at += EVENT_LEN_LEN
        if length > end - at:
            _corrupt(f"event of {length} bytes at byte {at} of {end}")
        events.append(packed[at : at + length])
        at += length
    if at != end:
        _corrupt(f"{end - at} bytes behind the last event")
    return events


def _corrupt(message: str) -> NoReturn:
    raise CorruptError(message, remedy="Read another copy")
