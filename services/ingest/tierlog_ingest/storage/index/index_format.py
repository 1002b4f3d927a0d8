"""The index file of one ledger: where in the entry logs each of its entries lies.

A header page, then pages of slots, each of 4,096 bytes. Page ``n`` begins at (n + 1) * 4,096 and
holds entries n * 508 to n * 508 + 507; a page that the header does not list may be anything.

The header:

    offset  size  field
         0     4  magic               "TLIX"
         4     4  version             1
         8     8  ledger_id
        16     8  page_count          highest page that was written, plus 1
        24     8  last_add_confirmed  -1: none
        32     8  last_entry_id       the highest that has a slot; -1: none
        40     4  state               0 whole, 1 being rebuilt: what it lacks may exist
        44     4  extent_count        up to 500
        48     …  extents             the pages that were written, ascending, apart
         …     …  zeros
      4092     4  crc32c              over bytes 0 to 4091

An extent:

         0     4  first_page
         4     4  count

A page:

    offset  size  field
         0     4  magic      "TLIP"
         4     4  page_no
         8     8  ledger_id
        16  4064  slots      508, one an entry
      4080    12  zeros
      4092     4  crc32c     over bytes 0 to 4091

A slot, from its highest bit on; 0 is an entry that is not there:

    bits  field
      24  log_id
      32  offset  of the encoded run in the log
       8  hint    how much to read there

    hint        bytes to read
    1 to 128    hint * 4,096
    129 to 255  (9 + (hint - 129) mod 8) * 2 ** (16 + (hint - 129) div 8)

All entries of a run hold the same slot. Integers are big-endian; ids signed, all else unsigned.

Invariants:
    * ``read_len(slot) >= length`` of the run, and at most 4,095 bytes or an eighth more.
    * ``page_count`` is the end of the last extent, and ``last_entry_id`` lies in its last page.
    * A page that the header lists is whole, or the index is damaged: no bytes mean "no entry" but
      those of a whole page under a whole header.
"""

from bisect import bisect_right
from dataclasses import dataclass
from enum import IntEnum
from struct import Struct
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierlog.format.checksum import Buffer, crc32c
from tierlog.format.versions import Format, check_version, current
from tierlog.model.errors import CorruptError
from tierlog.model.ids import NO_ENTRY, EntryId, LedgerId

PAGE_LEN: Final = 4096
SLOTS_PER_PAGE: Final = 508
SLOT_LEN: Final = 8
EXTENTS_MAX: Final = 500
PAGE_NO_MAX: Final = 2**31 - 1
ENTRY_ID_MAX: Final = (PAGE_NO_MAX + 1) * SLOTS_PER_PAGE - 1
"""The highest entry id that an index can hold; the file has 8 TiB then."""
LOG_ID_MAX: Final = 2**24 - 1
LOG_OFFSET_MAX: Final = 2**32 - 1

# A page as 64-bit words: magic and page_no, ledger_id, the slots, zeros, zeros and crc32c.
PAGE_WORDS: Final = PAGE_LEN // 8
FIRST_SLOT_WORD: Final = 2
CRC_OFFSET: Final = PAGE_LEN - 4
WORD: Final = np.dtype(">u8")

_HEADER_MAGIC: Final = b"TLIX"
_PAGE_MAGIC: Final = b"TLIP"
_PAGE_MAGIC_WORD: Final = int.from_bytes(_PAGE_MAGIC, "big") << 32
_HEADER: Final = Struct(">4sIqqqqII")
_PAGE: Final = Struct(">4sIq")
_CRC: Final = Struct(">I")
_EXTENT: Final = np.dtype([("first_page", ">u4"), ("count", ">u4")])
_PADDING: Final = bytes(12)

_SMALL_UNIT: Final = 4096
_SMALL_HINT_MAX: Final = 128
_LARGE_SHIFT: Final = 16
_EIGHTHS: Final = 8
_SMALL_LEN_MAX: Final = _SMALL_UNIT * _SMALL_HINT_MAX
_REMEDY: Final = "The node rebuilds the index from its entry logs"

assert _HEADER.size == 48
assert _HEADER.size + EXTENTS_MAX * _EXTENT.itemsize <= CRC_OFFSET
assert _PAGE.size == FIRST_SLOT_WORD * SLOT_LEN
assert _PAGE.size + SLOTS_PER_PAGE * SLOT_LEN + len(_PADDING) + _CRC.size == PAGE_LEN
assert _SMALL_LEN_MAX == 8 << _LARGE_SHIFT


class State(IntEnum):
    """Whether an index says all there is. Numbers are never reused."""

    WHOLE = 0
    REBUILDING = 1


class IndexHeader(NamedTuple):
    """What an index says of its ledger."""

    last_add_confirmed: EntryId
    last_entry_id: EntryId
    page_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeaderPage:
    """The header page of an index file."""

    ledger_id: LedgerId
    last_add_confirmed: EntryId
    last_entry_id: EntryId
    bounds: tuple[int, ...]
    """First page and end of each extent, one after the other."""
    state: State = State.WHOLE

    def __post_init__(self) -> None:
        assert len(self.bounds) % 2 == 0
        assert len(self.bounds) <= 2 * EXTENTS_MAX
        assert last_page_of(self.last_entry_id) == self.page_count - 1

    @property
    def page_count(self) -> int:
        """The highest page that was written, plus 1."""
        return self.bounds[-1] if self.bounds else 0

    def pack(self) -> bytes:
        """Return the page."""
        extents = np.empty(len(self.bounds) // 2, _EXTENT)
        extents["first_page"] = self.bounds[::2]
        extents["count"] = np.subtract(self.bounds[1::2], self.bounds[::2])
        head = _HEADER.pack(
            _HEADER_MAGIC,
            current(Format.LEDGER_INDEX),
            self.ledger_id,
            self.page_count,
            self.last_add_confirmed,
            self.last_entry_id,
            self.state,
            len(extents),
        )
        page = (head + extents.tobytes()).ljust(CRC_OFFSET, b"\0")
        return page + _CRC.pack(crc32c(page))


def decode_header(data: Buffer, ledger_id: LedgerId) -> HeaderPage:
    """Read the header page of a ledger's index; ``CorruptError`` unless all of it is right."""
    _check_crc(data, ledger_id, "header")
    magic, version, found_id, page_count, confirmed, last, state, count = _HEADER.unpack_from(data)
    if magic != _HEADER_MAGIC or found_id != ledger_id:
        raise damaged(ledger_id, "the header is another's")
    check_version(Format.LEDGER_INDEX, version)
    end = _HEADER.size + count * _EXTENT.itemsize
    if count > EXTENTS_MAX or any(memoryview(data)[end:CRC_OFFSET]):
        raise damaged(ledger_id, "the header's extents are wrong")
    extents = np.frombuffer(data, _EXTENT, count, _HEADER.size).astype([("a", "i8"), ("b", "i8")])
    bounds = np.column_stack((extents["a"], extents["a"] + extents["b"])).ravel()
    is_apart = bool((np.diff(bounds) > 0).all())
    if not is_apart or page_count != (bounds[-1] if count else 0) or page_count > PAGE_NO_MAX + 1:
        raise damaged(ledger_id, "the header's extents are wrong")
    if last < NO_ENTRY or last_page_of(last) != page_count - 1 or confirmed < NO_ENTRY:
        raise damaged(ledger_id, "the header's entry ids are wrong")
    if state not in {State.WHOLE, State.REBUILDING}:
        raise damaged(ledger_id, f"the header has state {state}")
    return HeaderPage(
        ledger_id=ledger_id,
        last_add_confirmed=EntryId(confirmed),
        last_entry_id=EntryId(last),
        bounds=tuple(bounds.tolist()),
        state=State(state),
    )


# Pages


def page_offset(page_no: int) -> int:
    """Return where a page begins in the file."""
    return (page_no + 1) * PAGE_LEN


def last_page_of(entry_id: int) -> int:
    """Return the page of an entry; -1 for no entry."""
    return entry_id // SLOTS_PER_PAGE


def clear_page(words: NDArray[np.uint64], ledger_id: int, page_no: int) -> None:
    """Make ``words`` a page without entries; ``seal_page`` is to follow before it is written."""
    words[:] = 0
    words[0] = _PAGE_MAGIC_WORD | page_no
    words[1] = ledger_id


def seal_page(page: memoryview) -> None:
    """Set the checksum of a page, all of whose other bytes are right."""
    _CRC.pack_into(page, CRC_OFFSET, crc32c(page[:CRC_OFFSET]))


def check_page(data: Buffer, ledger_id: LedgerId, page_no: int) -> None:
    """Raise ``CorruptError`` unless ``data`` is that page of that ledger, unharmed."""
    name = f"page {page_no}"
    _check_crc(data, ledger_id, name)
    if _PAGE.unpack_from(data) != (_PAGE_MAGIC, page_no, ledger_id):
        raise damaged(ledger_id, f"{name} is another's")
    if bytes(data[CRC_OFFSET - len(_PADDING) : CRC_OFFSET]) != _PADDING:
        raise damaged(ledger_id, f"{name} has something where zeros belong")


def damaged(ledger_id: int, what: str) -> CorruptError:
    """Return the error of an index that is not what was written."""
    return CorruptError(
        f"the index of ledger {ledger_id} is damaged: {what}",
        remedy=_REMEDY,
        details={"ledger_id": str(ledger_id)},
    )


def _check_crc(data: Buffer, ledger_id: int, name: str) -> None:
    if len(data) != PAGE_LEN:
        raise damaged(ledger_id, f"{name} is cut at {len(data)} bytes")
    if _CRC.unpack_from(data, CRC_OFFSET)[0] != crc32c(memoryview(data)[:CRC_OFFSET]):
        raise damaged(ledger_id, f"{name} has a wrong checksum")


# Extents


def has_page(bounds: list[int], page_no: int) -> bool:
    """Tell whether an extent holds ``page_no``."""
    return bool(bisect_right(bounds, page_no) & 1)


def add_page(bounds: list[int], page_no: int) -> None:
    """Add a page that no extent holds."""
    at = bisect_right(bounds, page_no)
    assert at % 2 == 0
    assert 0 <= page_no <= PAGE_NO_MAX
    joins_before = at > 0 and bounds[at - 1] == page_no
    joins_behind = at < len(bounds) and bounds[at] == page_no + 1
    if joins_before and joins_behind:
        del bounds[at - 1 : at + 1]
    elif joins_before:
        bounds[at - 1] += 1
    elif joins_behind:
        bounds[at] -= 1
    else:
        bounds[at:at] = [page_no, page_no + 1]


def smallest_gap(bounds: list[int]) -> range:
    """Return the pages between the two extents that are nearest to each other."""
    gaps = zip(bounds[1:-1:2], bounds[2::2], strict=True)
    return range(*min(gaps, key=lambda gap: gap[1] - gap[0]))


# Slots


def pack_slot(log_id: int, offset: int, length: int) -> int:
    """Return the slot of an encoded run of ``length`` bytes."""
    assert 0 < log_id <= LOG_ID_MAX
    assert 0 <= offset <= LOG_OFFSET_MAX
    assert length > 0
    return log_id << 40 | offset << 8 | _hint_of(length)


class Slot(NamedTuple):
    """Where to read, and how much: at least the run's length."""

    log_id: int
    offset: int
    read_len: int


def unpack_slot(slot: int) -> Slot:
    """Invert ``pack_slot``, but for the length."""
    assert slot, "an entry that is not there has no place"
    return Slot(slot >> 40, slot >> 8 & LOG_OFFSET_MAX, READ_LENS[slot & 0xFF])


def read_len(slot: int) -> int:
    """Return how much to read for a slot; 0 where there is no entry."""
    return READ_LENS[slot & 0xFF]


def _hint_of(length: int) -> int:
    if length <= _SMALL_LEN_MAX:
        return -(-length // _SMALL_UNIT)
    shift = (length - 1).bit_length() - 4
    eighths = -(-length >> shift)  # 9 to 16
    hint = _SMALL_HINT_MAX + 1 + _EIGHTHS * (shift - _LARGE_SHIFT) + eighths - _EIGHTHS - 1
    assert hint <= 0xFF, f"a run of {length} bytes fits in no log"
    return hint


def _read_lens() -> list[int]:
    small = [hint * _SMALL_UNIT for hint in range(_SMALL_HINT_MAX + 1)]
    steps = [divmod(at, _EIGHTHS) for at in range(255 - _SMALL_HINT_MAX)]
    return small + [(9 + eighths) << (_LARGE_SHIFT + shift) for shift, eighths in steps]


READ_LENS: Final = _read_lens()

assert len(READ_LENS) == 256
assert READ_LENS[255] > LOG_OFFSET_MAX
