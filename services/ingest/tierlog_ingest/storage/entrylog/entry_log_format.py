"""Entry logs: runs of many ledgers, one behind the other, and a map of them at the end.

A log begins with a header:

    offset  size  field
         0     4  magic       "TLEL"
         4     4  version     1
         8     8  log_id      counts up from 1, below 2^24
        16     8  generation  random: tells this file from another of the same id
        24     4  zeros
        28     4  crc32c      over bytes 0 to 27

Runs lie back to back behind it, each as tierlog.format.run has it. A sealed log goes on with the
ledgers map, and nothing comes behind its trailer:

         0     …  ledgers     count x (ledger_id 8, bytes of its runs 8), ascending
         …     4  magic       "TLEM"
         …     4  version     1
         …     8  log_id
         …     8  map_offset  where the runs end and the map begins
         …     4  count       ledgers in the map
         …     4  crc32c      over the ledgers and the trailer before it

Integers are big-endian; ids signed, the others unsigned. Ledgers that were deleted before the log
was sealed are not in its map.

Owns: the coding of header and map. Does not own files: ``entry_log`` does.

Invariants:
    * A run begins below 4 GiB, so that its offset takes 4 bytes: a log longer than its limit
      holds a single run.
    * The sizes in a map sum up to at most the length of the runs.
"""

from dataclasses import dataclass
from struct import Struct
from typing import Final

import numpy as np

from tierlog.format.checksum import Buffer, crc32c
from tierlog.format.versions import Format, check_version, current
from tierlog.model.errors import CorruptError
from tierlog_ingest.storage.entrylog.ledger_map import LedgerMap

LOG_ID_MAX: Final = 2**24 - 1
LOG_MAGIC: Final = b"TLEL"
MAP_MAGIC: Final = b"TLEM"

_HEADER: Final = Struct(">4sIqq4x")
_TRAILER: Final = Struct(">4sIqQI")
_CRC: Final = Struct(">I")
_ROWS: Final = np.dtype([("ledger_id", ">i8"), ("size", ">i8")])

LOG_HEADER_LEN: Final = _HEADER.size + _CRC.size
MAP_ROW_LEN: Final = _ROWS.itemsize
MAP_TRAILER_LEN: Final = _TRAILER.size + _CRC.size

assert LOG_HEADER_LEN == 32
assert MAP_ROW_LEN == 16
assert MAP_TRAILER_LEN == 32


@dataclass(frozen=True, slots=True, kw_only=True)
class LogHeader:
    """What a log says of itself."""

    log_id: int
    generation: int

    def __post_init__(self) -> None:
        if not 1 <= self.log_id <= LOG_ID_MAX or self.generation < 0:
            raise _corrupt(f"entry log with the id {self.log_id}", offset=8)

    def pack(self) -> bytes:
        """Return the header."""
        head = _HEADER.pack(LOG_MAGIC, current(Format.ENTRY_LOG), self.log_id, self.generation)
        return head + _CRC.pack(crc32c(head))

    @classmethod
    def unpack(cls, data: Buffer) -> "LogHeader":
        """Read a header, or raise ``CorruptError``; ``RefusedError`` for a newer version."""
        if len(data) < LOG_HEADER_LEN:
            raise _corrupt("entry log without a whole header", offset=0)
        magic, version, log_id, generation = _HEADER.unpack_from(data)
        (expected,) = _CRC.unpack_from(data, _HEADER.size)
        if magic != LOG_MAGIC or crc32c(memoryview(data)[: _HEADER.size]) != expected:
            raise _corrupt("entry log with a damaged header", offset=0)
        check_version(Format.ENTRY_LOG, version)
        return cls(log_id=log_id, generation=generation)


def pack_map(ledgers: LedgerMap, *, log_id: int, map_offset: int) -> bytes:
    """Return a ledgers map with its trailer."""
    ids, sizes = ledgers.columns()
    rows = np.empty(len(ids), _ROWS)
    rows["ledger_id"], rows["size"] = ids, sizes
    trailer = _TRAILER.pack(MAP_MAGIC, current(Format.ENTRY_LOG), log_id, map_offset, len(ids))
    data = rows.tobytes() + trailer
    return data + _CRC.pack(crc32c(data))


def unpack_map(data: Buffer, *, log_id: int, map_offset: int) -> LedgerMap:
    """Read the map that is exactly ``data``, or raise ``CorruptError``.

    ``RefusedError`` for a newer version.
    """
    rows_len = len(data) - MAP_TRAILER_LEN
    if rows_len < 0 or rows_len % MAP_ROW_LEN:
        raise _corrupt(f"ledgers map of {len(data)} bytes", offset=map_offset)
    view = memoryview(data)
    magic, version, found_id, found_offset, count = _TRAILER.unpack_from(view, rows_len)
    (expected,) = _CRC.unpack_from(view, rows_len + _TRAILER.size)
    if magic != MAP_MAGIC or crc32c(view[: -_CRC.size]) != expected:
        raise _corrupt("damaged ledgers map", offset=map_offset)
    check_version(Format.ENTRY_LOG, version)
    if (found_id, found_offset, count * MAP_ROW_LEN) != (log_id, map_offset, rows_len):
        raise _corrupt(f"ledgers map of log {found_id} at {found_offset}", offset=map_offset)
    rows = np.frombuffer(view[:rows_len], _ROWS)
    ids, sizes = rows["ledger_id"].astype(np.int64), rows["size"].astype(np.int64)
    if count and not (
        ids[0] >= 0
        and bool((ids[1:] > ids[:-1]).all())
        and int(sizes.min()) > 0
        and int(sizes.max()) < 2**32
        and int(sizes.sum()) <= map_offset - LOG_HEADER_LEN
    ):
        raise _corrupt("ledgers map that contradicts itself", offset=map_offset)
    ledgers = LedgerMap()
    ledgers.add(ids, sizes)
    return ledgers


def map_offset_of(trailer: Buffer, *, log_id: int, size: int) -> int | None:
    """Return where the runs of a file of ``size`` bytes end; None: it does not end in a map."""
    if len(trailer) < MAP_TRAILER_LEN:
        return None
    magic, _, found_id, map_offset, count = _TRAILER.unpack_from(trailer)
    map_len = count * MAP_ROW_LEN + MAP_TRAILER_LEN
    ends_so = magic == MAP_MAGIC and found_id == log_id and map_offset + map_len == size
    return int(map_offset) if ends_so else None


def _corrupt(message: str, *, offset: int) -> CorruptError:
    return CorruptError(
        f"{message}, at byte {offset}",
        remedy="Read another copy of what the log holds",
        details={"offset": str(offset)},
    )
