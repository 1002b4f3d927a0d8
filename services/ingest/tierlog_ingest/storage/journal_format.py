"""The journal's segments, groups and records.

A segment begins with a header, padded with zeros to 4,096 bytes:

    offset  size  field
         0     4  magic           "TLJS"
         4     4  version         1
         8     8  segment_id      counts up from 1
        16     8  generation      random; salts every checksum in the segment
        24     8  synced_segment  everything before this position was durable
        32     8  synced_offset   when the header was written
        40     4  crc32c          over bytes 0 to 39

Groups follow, each at a multiple of 4,096, so that a torn write never touches an older group:

         0     4  magic           "TLJG"
         4     4  records_len     bytes of records that follow
         8     8  synced_segment
        16     8  synced_offset
        24     4  record_count    0: an idle marker, which only names the position
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
    4 BASE   ledger_id 8, length 8: so long was the ledger's file, durably, at the last mark

Integers are big-endian; ids and lengths signed, checksums and 4-byte lengths unsigned. The salt is
the CRC32C of segment_id and generation.

Invariants:
    * A position below one that any valid header names as synced was durable once: what is bad
      there is corruption. What is bad above is a torn tail.
    * BASE of a ledger comes before its first RUN after a mark.
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
_SEGMENT: Final = Struct(">4sIqqqq")
_GROUP: Final = Struct(">4sIqqI")
_CRC: Final = Struct(">I")
_RECORD: Final = Struct(">IIB3x")
_SALT: Final = Struct(">qq")
_KIND_AND_LEN: Final = Struct(">B3xI")
_ID: Final = Struct(">q")
_BASE: Final = Struct(">qq")

assert _SEGMENT.size + _CRC.size == 44 <= SEGMENT_HEADER_LEN
assert _GROUP.size + _CRC.size == GROUP_HEADER_LEN
assert _RECORD.size == RECORD_HEADER_LEN


class Kind(IntEnum):
    """What a record says. Numbers are never reused."""

    RUN = 1
    FENCE = 2
    FREED = 3
    BASE = 4


class JournalPosition(NamedTuple):
    """A place in the journal; positions compare in the order of writing."""

    segment_id: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentHeader:
    """What a segment says of itself."""

    segment_id: int
    generation: int
    synced: JournalPosition

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
        )
        return (head + _CRC.pack(crc32c(head))).ljust(SEGMENT_HEADER_LEN, b"\0")

    @classmethod
    def unpack(cls, data: Buffer) -> "SegmentHeader":
        """Read a header, or raise ``CorruptError``; ``RefusedError`` for a newer version."""
        if len(data) < SEGMENT_HEADER_LEN:
            raise CorruptError("journal segment without a whole header", remedy="See its file")
        magic, version, segment_id, generation, segment, offset = _SEGMENT.unpack_from(data)
        (expected,) = _CRC.unpack_from(data, _SEGMENT.size)
        if magic != _SEGMENT_MAGIC or crc32c(memoryview(data)[: _SEGMENT.size]) != expected:
            raise CorruptError("journal segment with a damaged header", remedy="See its file")
        check_version(Format.JOURNAL, version)
        return cls(
            segment_id=segment_id,
            generation=generation,
            synced=JournalPosition(segment, offset),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupHeader:
    """What a group says of itself."""

    records_len: int
    record_count: int
    synced: JournalPosition

    def pack(self, salt: int) -> bytes:
        """Return the header."""
        head = _GROUP.pack(
            _GROUP_MAGIC,
            self.records_len,
            self.synced.segment_id,
            self.synced.offset,
            self.record_count,
        )
        return head + _CRC.pack(crc32c(head, salt))

    @classmethod
    def unpack(cls, data: Buffer, salt: int) -> "GroupHeader | None":
        """Read a header; None when there is none."""
        if len(data) < GROUP_HEADER_LEN:
            return None
        magic, records_len, segment, offset, count = _GROUP.unpack_from(data)
        (expected,) = _CRC.unpack_from(data, _GROUP.size)
        if magic != _GROUP_MAGIC or crc32c(memoryview(data)[: _GROUP.size], salt) != expected:
            return None
        return cls(
            records_len=records_len,
            record_count=count,
            synced=JournalPosition(segment, offset),
        )


def align(offset: int) -> int:
    """Return where the next group can begin."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def encode_record(kind: Kind, payload: Sequence[Buffer], salt: int) -> list[Buffer]:
    """Return a record as buffers; the payload is not copied."""
    length = sum(map(len, payload))
    assert length <= RECORD_LEN_MAX
    crc = crc32c(_KIND_AND_LEN.pack(kind, length), salt)
    for part in payload:
        crc = crc32c(part, crc)
    return [_RECORD.pack(length, crc, kind), *payload]


def decode_record(data: memoryview, at: int, salt: int) -> tuple[Kind, memoryview] | None:
    """Read the record at ``at``; None when there is no good one."""
    start = at + RECORD_HEADER_LEN
    if start > len(data):
        return None
    length, expected, kind = _RECORD.unpack_from(data, at)
    payload = data[start : start + length]
    if len(payload) != length or kind not in set(Kind):
        return None
    crc = crc32c(payload, crc32c(_KIND_AND_LEN.pack(kind, length), salt))
    return (Kind(kind), payload) if crc == expected else None


def encode_ledger_id(ledger_id: int) -> bytes:
    """Return the payload of FENCE and FREED."""
    return _ID.pack(ledger_id)


def decode_ledger_id(payload: Buffer) -> int:
    """Invert ``encode_ledger_id``."""
    (ledger_id,) = _ID.unpack(payload)
    return int(ledger_id)


def encode_base(ledger_id: int, length: int) -> bytes:
    """Return the payload of BASE."""
    return _BASE.pack(ledger_id, length)


def decode_base(payload: Buffer) -> tuple[int, int]:
    """Invert ``encode_base``."""
    ledger_id, length = _BASE.unpack(payload)
    return int(ledger_id), int(length)
