"""The journal's segments, groups and records.

A segment begins with a header, padded with zeros to 4,096 bytes:

    offset  size  field
         0     4  magic           "TLJS"
         4     4  version         1
         8     8  segment_id      counts up from 1
        16     8  generation      random; salts every other checksum in the segment
        24     8  synced_segment  everything before this position was durable
        32     8  synced_offset   when the header was written
        40     8  filled_len      the file was filled to this length before; 0: it grows
        48     4  crc32c          over bytes 0 to 47

Groups follow, each at a multiple of 4,096 and padded with zeros to one, so that a torn write
never touches an older group:

         0     4  magic           "TLJG"
         4     4  records_len     bytes of records that follow
         8     8  segment_id      where this group lies; its being there proves
        16     8  offset          that everything before it is durable
        24     4  record_count    0: an idle marker, which only proves what is before it
        28     4  crc32c          salted, over bytes 0 to 27

Records lie back to back behind a group's header:

         0     4  payload_len
         4     4  crc32c          salted, over kind, zeros, payload_len and payload
         8     1  kind
         9     3  zeros
        12     …  payload

    kind  payload
    1 RUN    an encoded run (tierlog.format.run)
    2 FENCE  ledger_id 8
    3 FREED  ledger_id 8: the ledger was deleted, and its id stays fenced
    4        reserved: once the length of a ledger's file

Integers are big-endian; ids signed, checksums and 4-byte lengths unsigned. The salt is the CRC32C
of segment_id and generation. Behind the last group a segment holds zeros, or what it held in an
older life: a segment is used again under another id.

Invariants:
    * A group of an older life, or of another place, never passes: it names another segment, its
      checksum another generation.
    * A segment that was filled is never shorter than ``filled_len``: a cut of it is corruption.
    * A position below one that any valid header names was durable once: what is bad there is
      corruption. What is bad above is a torn tail.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from struct import Struct
from typing import Final, NamedTuple

from tierlog.format.checksum import Buffer, crc32c
from tierlog.format.versions import Format, check_version, current
from tierlog.model.errors import CorruptError

ALIGNMENT: Final = 4096
SEGMENT_HEADER_LEN: Final = ALIGNMENT
GROUP_HEADER_LEN: Final = 32
RECORD_HEADER_LEN: Final = 12
RECORD_LEN_MAX: Final = 2**31 - 1

_SEGMENT_MAGIC: Final = b"TLJS"
_GROUP_MAGIC: Final = b"TLJG"
_SEGMENT: Final = Struct(">4sIqqqqq")
_GROUP: Final = Struct(">4sIqqI")
_CRC: Final = Struct(">I")
_RECORD: Final = Struct(">III")
_KIND_SHIFT: Final = 24  # the kind is the highest byte of the third word, the others are zeros
_SALT: Final = Struct(">qq")
_KIND_AND_LEN: Final = Struct(">II")
_ID: Final = Struct(">q")

assert _SEGMENT.size + _CRC.size == 52 <= SEGMENT_HEADER_LEN
assert _GROUP.size + _CRC.size == GROUP_HEADER_LEN
assert _RECORD.size == RECORD_HEADER_LEN


class Kind(IntEnum):
    """What a record says. Numbers are never reused; 4 was one."""

    RUN = 1
    FENCE = 2
    FREED = 3


_KIND_OF_WORD: Final = {kind << _KIND_SHIFT: kind for kind in Kind}


class JournalPosition(NamedTuple):
    """A place in the journal; positions compare in the order of writing."""

    segment_id: int
    offset: int


class Record(NamedTuple):
    """A record as it was found."""

    kind: Kind
    payload: memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentHeader:
    """What a segment says of itself."""

    segment_id: int
    generation: int
    synced: JournalPosition
    filled_len: int = 0
    """So long the file was before its first group; 0: it grows with them."""

    @property
    def salt(self) -> int:
        """What every other checksum of the segment starts from."""
        return crc32c(_SALT.pack(self.segment_id, self.generation))

    def pack(self) -> bytes:
        """Return the header with its padding."""
        head = _SEGMENT.pack(
            _SEGMENT_MAGIC,
            current(Format.JOURNAL),
            self.segment_id,
            self.generation,
            self.synced.segment_id,
            self.synced.offset,
            self.filled_len,
        )
        return (head + _CRC.pack(crc32c(head))).ljust(SEGMENT_HEADER_LEN, b"\0")

    @classmethod
    def unpack(cls, data: Buffer) -> "SegmentHeader":
        """Read a header, or raise ``CorruptError``; ``RefusedError`` for a newer version."""
        if len(data) < SEGMENT_HEADER_LEN:
            raise CorruptError("journal segment without a whole header", remedy="See its file")
        magic, version, segment_id, generation, *synced, filled_len = _SEGMENT.unpack_from(data)
        (expected,) = _CRC.unpack_from(data, _SEGMENT.size)
        if magic != _SEGMENT_MAGIC or crc32c(memoryview(data)[: _SEGMENT.size]) != expected:
            raise CorruptError("journal segment with a damaged header", remedy="See its file")
        check_version(Format.JOURNAL, version)
        return cls(
            segment_id=segment_id,
            generation=generation,
            synced=JournalPosition(*synced),
            filled_len=filled_len,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupHeader:
    """What a group says of itself."""

    records_len: int
    record_count: int
    position: JournalPosition

    @property
    def end(self) -> int:
        """Where the next group can begin."""
        return align(self.position.offset + GROUP_HEADER_LEN + self.records_len)

    def pack(self, salt: int) -> bytes:
        """Return the header."""
        head = _GROUP.pack(
            _GROUP_MAGIC,
            self.records_len,
            self.position.segment_id,
            self.position.offset,
            self.record_count,
        )
        return head + _CRC.pack(crc32c(head, salt))

    @classmethod
    def unpack(cls, data: Buffer, salt: int, position: JournalPosition) -> "GroupHeader | None":
        """Read the header of a group at ``position``; None when there is none."""
        found = cls.unpack_anywhere(data, salt)
        return found if found is not None and found.position == position else None

    @classmethod
    def unpack_anywhere(cls, data: Buffer, salt: int) -> "GroupHeader | None":
        """Read a header wherever it was found: out of its place it still proves what it names."""
        if len(data) < GROUP_HEADER_LEN or data[:4] != _GROUP_MAGIC:
            return None
        _, records_len, segment_id, offset, count = _GROUP.unpack_from(data)
        (expected,) = _CRC.unpack_from(data, _GROUP.size)
        if crc32c(memoryview(data)[: _GROUP.size], salt) != expected:
            return None
        position = JournalPosition(segment_id, offset)
        return cls(records_len=records_len, record_count=count, position=position)


def align(offset: int) -> int:
    """Return where the next group can begin."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def encode_record(kind: Kind, payload: Sequence[Buffer], payload_len: int, salt: int) -> bytes:
    """Return the header of a record."""
    assert payload_len <= RECORD_LEN_MAX
    word = kind << _KIND_SHIFT
    crc = crc32c(_KIND_AND_LEN.pack(word, payload_len), salt)
    for part in payload:
        crc = crc32c(part, crc)
    return _RECORD.pack(payload_len, crc, word)


def decode_records(body: memoryview, count: int, salt: int) -> tuple[list[Record], list[int]]:
    """Return the good ones among a group's ``count`` records, and where the others begin."""
    records: list[Record] = []
    damaged: list[int] = []
    at, end = 0, len(body)
    for _ in range(count):
        start = at + RECORD_HEADER_LEN
        if start > end:
            damaged.append(at)
            return records, damaged
        payload_len, expected, word = _RECORD.unpack_from(body, at)
        kind = _KIND_OF_WORD.get(word)
        payload = body[start : start + payload_len]
        crc = crc32c(payload, crc32c(_KIND_AND_LEN.pack(word, payload_len), salt))
        if kind is None or crc != expected or len(payload) != payload_len:
            damaged.append(at)
            if len(payload) != payload_len:
                return records, damaged
        else:
            records.append(Record(kind, payload))
        at = start + payload_len
    if at != end and not damaged:
        damaged.append(at)
    return records, damaged


def encode_ledger_id(ledger_id: int) -> bytes:
    """Return the payload of FENCE and FREED."""
    return _ID.pack(ledger_id)


def decode_ledger_id(payload: Buffer) -> int:
    """Invert ``encode_ledger_id``."""
    (ledger_id,) = _ID.unpack(payload)
    return int(ledger_id)
