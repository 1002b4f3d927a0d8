"""Side objects: checksums, places and times of every grain of a data object (formats.md).

    offset  size  field
         0     4  magic           "TLSD"
         4     1  version         1
         5     1  zero
         6     2  fixed_len       96: the directory begins there
         8     4  header_len      96 + 16 x page_count: the pages begin there
        12     4  crc32c          over all other bytes of the header
        16     8  side_len        the whole side object
        24     8  data_len        the whole data object
        32     8  entry_count     of the ledger
        40     8  ledger_id
        48    16  uuid            of the attempt that wrote both objects
        64     4  grain_len       65536; a power of two
        68     4  grain_count     grain g is the data object's bytes from g x grain_len on
        72     4  page_len        4096; the last page is as long as it must be
        76     4  page_count
        80    16  zeros
        96     …  directory       of the pages, a column each
                8 x page_count    first_entry_id   as in the page's first row
                8 x page_count    publish_ms_max   the largest of all pages up to this one

Page p holds the rows of up to 127 grains from grain 127 x p on, n of them, in columns:

         0     4  crc32c          over uuid, ledger_id and all other bytes of the page
         4     4  page_number
         8     4  row_count       n
        12    20  zeros
        32   8 n  first_entry_id  the first entry that begins in the grain or behind it
         …   4 n  entry_offset    where that entry's frame begins, from the grain's start
         …   4 n  crc32c          of the grain's bytes, headers and padding included
         …   8 n  publish_ms_min  of the runs with entries that begin in the grain; 0: unknown
         …   8 n  publish_ms_max

Integers are big-endian; entry_offset and checksums unsigned. Behind the last entry a row has
entry_count, and the place where the data object ends.

Owns the layout, what header and pages promise each other, and how much an object may hold. Does
not own counting (``tierlog.format.grains``), nor fetching.

Invariants, checked whenever a header or a page is made, written or read:
    * The length of everything follows from ``grain_count``, which follows from ``data_len``.
    * Entry ids and the places of entries grow together, and never pass the object's ends.
    * A page of another attempt, or of another place, is as wrong as one with a flipped bit.
"""

from dataclasses import dataclass
from struct import Struct
from typing import Final, NamedTuple, NoReturn, Self
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from tierlog.format.block import BLOCK_HEADER_LEN
from tierlog.format.checksum import Buffer, crc32c
from tierlog.format.frame import FRAME_HEADER_LEN
from tierlog.format.grains import GRAIN_LEN, GrainColumns, GrainSums, Int64s
from tierlog.format.versions import Format, check_version, current
from tierlog.model.errors import CorruptError
from tierlog.model.ids import INT64_MAX, EntryId, LedgerId
from tierlog.model.scrub import REPAIR_COPY

SIDE_MAGIC: Final = b"TLSD"
PAGE_LEN: Final = 4096
PAGE_HEADER_LEN: Final = 32
ROW_LEN: Final = 8 + 4 + 4 + 8 + 8
ROWS_A_PAGE: Final = (PAGE_LEN - PAGE_HEADER_LEN) // ROW_LEN
SIDE_FIXED_LEN: Final = 96
DIRECTORY_ROW_LEN: Final = 8 + 8

CRC_OFFSET: Final = 12
SIDE_LEN_OFFSET: Final = 16
DATA_LEN_OFFSET: Final = 24
ENTRY_COUNT_OFFSET: Final = 32
LEDGER_ID_OFFSET: Final = 40
UUID_OFFSET: Final = 48
GRAIN_LEN_OFFSET: Final = 64
GRAIN_COUNT_OFFSET: Final = 68
PAGE_COUNT_OFFSET: Final = 76
ZEROS_OFFSET: Final = 80

# Grains are longer in longer objects, so that a side object stays small enough for one request.
GRAIN_LEN_MIN: Final = 64
GRAIN_LEN_MAX: Final = 2**26
GRAIN_COUNT_MAX: Final = 2**20
PAGE_COUNT_MAX: Final = -(-GRAIN_COUNT_MAX // ROWS_A_PAGE)
SIDE_HEADER_LEN_MAX: Final = SIDE_FIXED_LEN + DIRECTORY_ROW_LEN * PAGE_COUNT_MAX
SIDE_LEN_MAX: Final = SIDE_HEADER_LEN_MAX + PAGE_LEN * PAGE_COUNT_MAX

_FIXED: Final = Struct(">4sBBHIIqqqq16sIIII16x")
_PAGE_FIXED: Final = Struct(">III20x")
_CRC: Final = Struct(">I")
_IDENTITY: Final = Struct(">16sq")
_I8: Final = np.dtype(">i8")
_U4: Final = np.dtype(">u4")
_COLUMNS: Final = (_I8, _U4, _U4, _I8, _I8)

assert _FIXED.size == SIDE_FIXED_LEN == 96
assert _PAGE_FIXED.size == PAGE_HEADER_LEN == 32
assert sum(kind.itemsize for kind in _COLUMNS) == ROW_LEN == 32
assert ROWS_A_PAGE == 127
assert PAGE_HEADER_LEN + ROW_LEN * ROWS_A_PAGE == PAGE_LEN


class _Fixed(NamedTuple):
    """The fixed part of a header, in the order of the bytes."""

    magic: bytes
    version: int
    zero: int
    fixed_len: int
    header_len: int
    crc: int
    side_len: int
    data_len: int
    entry_count: int
    ledger_id: int
    uuid: bytes
    grain_len: int
    grain_count: int
    page_len: int
    page_count: int


def grain_len_for(data_len: int, *, least: int = GRAIN_LEN) -> int:
    """Return how long grains should be in a data object of about that length."""
    grain_len = least
    # Half of what is allowed, since the padding of a ledger's blocks isn't known beforehand.
    while data_len > grain_len * (GRAIN_COUNT_MAX // 2) and grain_len < GRAIN_LEN_MAX:
        grain_len *= 2
    return grain_len


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SideHeader:
    """What is known of a side object without its pages; the directory as two columns."""

    ledger_id: LedgerId
    uuid: UUID
    data_len: int
    entry_count: int
    grain_len: int
    first_entry_ids: Int64s
    publish_ms_max: Int64s

    def __post_init__(self) -> None:
        # Checked here, so that what we refuse to read, we cannot write.
        if not 0 <= self.ledger_id <= INT64_MAX:
            _corrupt(f"ledger id {self.ledger_id}", LEDGER_ID_OFFSET)
        size = self.grain_len
        if not GRAIN_LEN_MIN <= size <= GRAIN_LEN_MAX or size & (size - 1):
            _corrupt(f"grains of {size} bytes", GRAIN_LEN_OFFSET)
        least = BLOCK_HEADER_LEN + FRAME_HEADER_LEN * self.entry_count
        if self.entry_count < 1 or not least <= self.data_len <= INT64_MAX:
            _corrupt(f"{self.entry_count} entries in {self.data_len} bytes", DATA_LEN_OFFSET)
        if self.grain_count > GRAIN_COUNT_MAX:
            _corrupt(f"{self.grain_count} grains", GRAIN_COUNT_OFFSET)
        self._check_directory()

    def _check_directory(self) -> None:
        firsts, times = self.first_entry_ids, self.publish_ms_max
        if not len(firsts) == len(times) == self.page_count:
            _corrupt(f"{len(firsts)} pages where {self.page_count} belong", PAGE_COUNT_OFFSET)
        if int(firsts[0]) != 0 or not _grows(firsts) or int(firsts[-1]) > self.entry_count:
            _corrupt("a directory whose entry ids do not grow from 0", SIDE_FIXED_LEN)
        if int(times[0]) < 0 or not _grows(times):
            _corrupt("a directory whose times do not grow", SIDE_FIXED_LEN + 8 * self.page_count)

    @property
    def grain_count(self) -> int:
        """How many grains the data object has."""
        return -(-self.data_len // self.grain_len)

    @property
    def page_count(self) -> int:
        """How many pages hold their rows."""
        return -(-self.grain_count // ROWS_A_PAGE)

    @property
    def header_len(self) -> int:
        """Where the pages begin."""
        return SIDE_FIXED_LEN + DIRECTORY_ROW_LEN * self.page_count

    @property
    def side_len(self) -> int:
        """The length of the whole side object."""
        return self.page_place(self.page_count - 1)[1]

    def page_place(self, number: int) -> tuple[int, int]:
        """Return where a page begins and ends in the side object."""
        assert 0 <= number < self.page_count
        start = self.header_len + PAGE_LEN * number
        return start, start + PAGE_HEADER_LEN + ROW_LEN * self.rows_of(number)

    def rows_of(self, number: int) -> int:
        """Return how many rows a page has."""
        return min(ROWS_A_PAGE, self.grain_count - ROWS_A_PAGE * number)

    def page_of_entry(self, entry_id: int) -> int:
        """Return the page of the grain in which an entry begins."""
        return int(np.searchsorted(self.first_entry_ids, entry_id, "right")) - 1

    def page_of_time(self, publish_ms: int) -> int | None:
        """Return the first page with entries at or after a time; None: there is none."""
        number = int(np.searchsorted(self.publish_ms_max, publish_ms, "left"))
        return number if number < self.page_count else None

    def grain_at(self, offset: int) -> int:
        """Return the grain that holds a byte of the data object."""
        return offset // self.grain_len

    @property
    def salt(self) -> int:
        """What checksums of pages begin with, so that no other attempt's page passes."""
        return crc32c(_IDENTITY.pack(self.uuid.bytes, self.ledger_id))

    def encode(self) -> bytes:
        """Return the header and its directory."""
        fixed = bytearray(
            _FIXED.pack(
                SIDE_MAGIC,
                current(Format.SIDE_OBJECT),
                0,
                SIDE_FIXED_LEN,
                self.header_len,
                0,
                self.side_len,
                self.data_len,
                self.entry_count,
                self.ledger_id,
                self.uuid.bytes,
                self.grain_len,
                self.grain_count,
                PAGE_LEN,
                self.page_count,
            )
        )
        directory = self.first_entry_ids.astype(_I8).tobytes()
        directory += self.publish_ms_max.astype(_I8).tobytes()
        _CRC.pack_into(fixed, CRC_OFFSET, _header_crc(fixed, directory))
        return bytes(fixed) + directory

    @staticmethod
    def header_len_at(buffer: Buffer) -> int:
        """Return how long a header is from its first ``SIDE_FIXED_LEN`` bytes."""
        return _checked_fixed(buffer).header_len

    @classmethod
    def decode(cls, buffer: Buffer) -> Self:
        """Read the header at the start of ``buffer``, or raise ``CorruptError``."""
        fixed = _checked_fixed(buffer)
        if len(buffer) < fixed.header_len:
            _corrupt(f"a header of {fixed.header_len} bytes cut after {len(buffer)}", len(buffer))
        view = memoryview(buffer)
        directory = view[SIDE_FIXED_LEN : fixed.header_len]
        if _header_crc(view[:SIDE_FIXED_LEN], directory) != fixed.crc:
            _corrupt("a header whose checksum differs", CRC_OFFSET)
        if any(view[ZEROS_OFFSET:SIDE_FIXED_LEN]) or fixed.zero or fixed.page_len != PAGE_LEN:
            _corrupt("a header with reserved bytes set", ZEROS_OFFSET)
        columns = np.frombuffer(directory, _I8).astype(np.int64)
        found = cls(
            ledger_id=LedgerId(fixed.ledger_id),
            uuid=UUID(bytes=fixed.uuid),
            data_len=fixed.data_len,
            entry_count=fixed.entry_count,
            grain_len=fixed.grain_len,
            first_entry_ids=columns[: fixed.page_count],
            publish_ms_max=columns[fixed.page_count :],
        )
        if (found.grain_count, found.side_len) != (fixed.grain_count, fixed.side_len):
            _corrupt(f"{fixed.grain_count} grains in {fixed.side_len} bytes", SIDE_LEN_OFFSET)
        return found

    def encode_page(self, number: int, rows: GrainColumns) -> bytes:
        """Return one page."""
        self._check_page(number, rows)
        ids, offsets, crcs, low, high = rows
        columns = ids.astype(_I8).tobytes() + offsets.astype(_U4).tobytes()
        columns += crcs.astype(_U4).tobytes() + low.astype(_I8).tobytes()
        columns += high.astype(_I8).tobytes()
        page = bytearray(_PAGE_FIXED.pack(0, number, len(rows.crcs)) + columns)
        _CRC.pack_into(page, 0, crc32c(memoryview(page)[_CRC.size :], self.salt))
        return bytes(page)

    def decode_page(self, buffer: Buffer, number: int) -> GrainColumns:
        """Read the page that is exactly ``buffer``, or raise ``CorruptError``."""
        start, end = self.page_place(number)
        if len(buffer) != end - start:
            _corrupt(f"page {number} cut after {len(buffer)} bytes", start)
        crc, found, count = _PAGE_FIXED.unpack_from(buffer)
        view = memoryview(buffer)
        if crc32c(view[_CRC.size :], self.salt) != crc:
            _corrupt(f"page {number} whose checksum differs", start)
        if (found, count) != (number, self.rows_of(number)) or any(view[12:PAGE_HEADER_LEN]):
            _corrupt(f"page {found} of {count} rows in the place of page {number}", start)
        at, columns = PAGE_HEADER_LEN, []
        for kind in _COLUMNS:
            column = np.frombuffer(view[at : at + count * kind.itemsize], kind)
            columns.append(column.astype(kind.newbyteorder("=")))
            at += count * kind.itemsize
        rows = GrainColumns._make(columns)
        self._check_page(number, rows)
        return rows

    def _check_page(self, number: int, rows: GrainColumns) -> None:
        """Raise ``CorruptError`` unless rows agree with each other and with the header."""
        at, count = self.page_place(number)[0], self.rows_of(number)
        if any(len(column) != count for column in rows):
            _corrupt(f"page {number} of {len(rows.crcs)} rows and not {count}", at)
        ids, first = rows.first_entry_ids, ROWS_A_PAGE * number
        # Before sums, which numbers of any size would carry over.
        if int(ids[0]) != int(self.first_entry_ids[number]) or not _grows(ids):
            _corrupt(f"page {number} whose entry ids do not grow from the directory's", at)
        starts = np.arange(first, first + count, dtype=np.int64) * self.grain_len
        places = starts + rows.entry_offsets
        ends = (int(ids[-1]) > self.entry_count) or int(places.max()) > self.data_len
        behind = (ids == self.entry_count) != (places == self.data_len)
        if ends or bool(behind.any()):
            _corrupt(f"page {number} with an entry behind the last", at)
        new, moved = np.diff(ids), np.diff(places)
        # An entry that begins behind a grain is the next one's first too, and no other is.
        same = rows.entry_offsets[:-1] >= self.grain_len
        if bool(((new == 0) != same).any() or (moved < FRAME_HEADER_LEN * new).any()):
            _corrupt(f"page {number} whose entries lie elsewhere than in order", at)
        if bool((moved[new == 0] != 0).any()):
            _corrupt(f"page {number} with two places of one entry", at)
        self._check_times(number, rows)

    def _check_times(self, number: int, rows: GrainColumns) -> None:
        at, (low, high) = self.page_place(number)[0], rows[3:]
        before = int(self.publish_ms_max[number - 1]) if number else 0
        wrong = (low < 0).any() or (low > high).any()
        if bool(wrong) or max(before, int(high.max())) != int(self.publish_ms_max[number]):
            _corrupt(f"page {number} with times that are not the directory's", at)


@dataclass(frozen=True, slots=True, eq=False)
class SideObject:
    """A whole side object as a value."""

    header: SideHeader
    columns: GrainColumns

    def encode(self) -> bytes:
        """Return the side object."""
        header = self.header
        pages = (
            header.encode_page(number, self.columns.between(*_rows(number)))
            for number in range(header.page_count)
        )
        encoded = b"".join((header.encode(), *pages))
        assert len(encoded) == header.side_len
        return encoded

    @classmethod
    def decode(cls, buffer: Buffer) -> Self:
        """Read the side object that is exactly ``buffer``, or raise ``CorruptError``."""
        header = SideHeader.decode(buffer)
        if len(buffer) != header.side_len:
            _corrupt(f"{len(buffer)} bytes and not {header.side_len}", SIDE_LEN_OFFSET)
        view = memoryview(buffer)
        pages = [
            header.decode_page(view[slice(*header.page_place(number))], number)
            for number in range(header.page_count)
        ]
        columns = GrainColumns._make(map(np.concatenate, zip(*pages, strict=True)))
        _check_joints(header, columns)
        return cls(header, columns)


class SideBuilder:
    """Makes an attempt's side object from what ``sums`` counts during its upload."""

    def __init__(
        self,
        ledger_id: LedgerId,
        uuid: UUID,
        *,
        grain_len: int = GRAIN_LEN,
        with_sha256: bool = False,
    ) -> None:
        self._ledger_id = ledger_id
        self._uuid = uuid
        self.sums: Final = GrainSums(grain_len, with_sha256=with_sha256)

    def __repr__(self) -> str:
        return f"<SideBuilder ledger={self._ledger_id} {self.sums}>"

    def finish(self, entry_count: int) -> SideObject:
        """Return the side object of the data object that was counted."""
        columns = self.sums.columns(entry_count)
        starts = np.arange(0, len(columns.crcs), ROWS_A_PAGE)
        largest = np.maximum.reduceat(columns.publish_ms_max, starts)
        header = SideHeader(
            ledger_id=self._ledger_id,
            uuid=self._uuid,
            data_len=self.sums.data_len,
            entry_count=entry_count,
            grain_len=self.sums.grain_len,
            first_entry_ids=columns.first_entry_ids[starts],
            publish_ms_max=np.maximum.accumulate(largest),
        )
        return SideObject(header, columns)


def last_at_or_before(ids: Int64s, entry_id: EntryId) -> int:
    """Return the row of the grain in which an entry begins; -1 when it is before them all."""
    return int(np.searchsorted(ids, entry_id, "right")) - 1


def _rows(number: int) -> tuple[int, int]:
    return ROWS_A_PAGE * number, ROWS_A_PAGE * (number + 1)


def _check_joints(header: SideHeader, columns: GrainColumns) -> None:
    """Raise ``CorruptError`` unless pages go on where those before them end."""
    starts = np.arange(header.grain_count, dtype=np.int64) * header.grain_len
    places = starts + columns.entry_offsets
    moved, new = np.diff(places), np.diff(columns.first_entry_ids)
    if bool((moved < FRAME_HEADER_LEN * new).any() or ((moved == 0) != (new == 0)).any()):
        _corrupt("pages that do not go on where those before them end", header.header_len)


def _checked_fixed(buffer: Buffer) -> _Fixed:
    """Return the fields of a header's fixed part; its lengths were checked."""
    if len(buffer) < SIDE_FIXED_LEN:
        _corrupt(f"{len(buffer)} bytes", 0)
    fixed = _Fixed._make(_FIXED.unpack_from(buffer))
    if fixed.magic != SIDE_MAGIC:
        _corrupt(f"magic {fixed.magic.hex()}, so it is none", 0)
    check_version(Format.SIDE_OBJECT, fixed.version, error=CorruptError)
    # Lengths before anything is made of them.
    if not 1 <= fixed.page_count <= PAGE_COUNT_MAX:
        _corrupt(f"{fixed.page_count} pages", PAGE_COUNT_OFFSET)
    wanted = SIDE_FIXED_LEN + DIRECTORY_ROW_LEN * fixed.page_count
    if (fixed.fixed_len, fixed.header_len) != (SIDE_FIXED_LEN, wanted):
        _corrupt(f"a header of {fixed.header_len} bytes for {fixed.page_count} pages", 6)
    return fixed


def _header_crc(fixed: Buffer, directory: Buffer) -> int:
    view = memoryview(fixed)
    crc = crc32c(view[CRC_OFFSET + _CRC.size :], crc32c(view[:CRC_OFFSET]))
    return crc32c(directory, crc)


def _grows(column: NDArray[np.int64]) -> bool:
    return bool((column[:-1] <= column[1:]).all())


def _corrupt(what: str, offset: int) -> NoReturn:
    raise CorruptError(
        f"side object with {what} (byte {offset})",
        remedy=REPAIR_COPY,
        details={"offset": str(offset)},
    )
