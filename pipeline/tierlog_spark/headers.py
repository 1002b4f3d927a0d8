"""Append headers of many entries at once, without a look at each (pure).

Headers of one writer look alike: the same fields at the same bytes, for numbers grow slowly. So
the first one's layout is found field by field, all others are compared with it as bytes, and the
numbers of those that agree are taken out of columns. What remains is looked at the same way again.

Owns finding headers that are *plain*: events uncompressed, unstructured, no attribute updates.
Does not own entry data (``tierlog.format.entry``): what is not plain, or not right, that module
reads and judges, one by one.

Invariant: an entry is called plain only if ``decode_entry`` would give the same header, its
checksum aside.
"""

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierlog.format.entry import (
    APPEND_HEADER_LEN_MAX,
    APPEND_HEADER_OFFSET,
    ENTRY_MAGIC,
    EVENT_COUNT_MAX,
    EVENT_LEN_LEN,
    FLAGS_OFFSET,
    HEADER_LEN_OFFSET,
    MAGIC_LEN,
    VERSION_OFFSET,
)
from tierlog.format.versions import Format, current
from tierlog.proto.v1 import entry_pb2 as pb

Int64s = NDArray[np.int64]
Bools = NDArray[np.bool_]
Bytes2D = NDArray[np.uint8]

# Layouts that are looked for in one set of entries; who is behind that is read by itself.
LAYOUTS_MAX: Final = 24
WRITER_ID_LEN: Final = 16
_VARINT_LEN_MAX: Final = 9  # 63 bits: no number is negative
_VARINT: Final = 0
_BYTES: Final = 2
_FIELDS: Final = pb.AppendHeader.DESCRIPTOR.fields_by_name
_WRITER: Final = _FIELDS["writer_id"].number
_NUMBER: Final = _FIELDS["event_number"].number
_COUNT: Final = _FIELDS["event_count"].number
_TIME: Final = _FIELDS["publish_time_ms"].number
_EVENTS_LEN: Final = _FIELDS["events_len"].number
_NUMBERS: Final = frozenset({_NUMBER, _COUNT, _TIME, _EVENTS_LEN})

_MAGIC_AND_VERSION: Final = ENTRY_MAGIC + bytes([current(Format.APPEND_HEADER), 0])
assert (VERSION_OFFSET, FLAGS_OFFSET, HEADER_LEN_OFFSET) == (MAGIC_LEN, MAGIC_LEN + 1, 4)


class PlainHeaders(NamedTuple):
    """A row for every entry; of one that isn't ``plain`` all else is zero.

    ``writers``: 16 bytes each. ``events_starts``: where in the buffer its events begin.
    """

    plain: Bools
    event_counts: Int64s
    event_numbers: Int64s
    publish_ms: Int64s
    has_writer: Bools
    writers: Bytes2D
    events_starts: Int64s


class _Layout(NamedTuple):
    mask: NDArray[np.uint8]
    value: NDArray[np.uint8]
    numbers: dict[int, tuple[int, int]]
    writer_at: int | None


def plain_headers(buffer: memoryview, starts: Int64s, lens: Int64s) -> PlainHeaders:
    """Read the headers of the entries that begin at ``starts`` and are so long."""
    count = len(starts)
    found = PlainHeaders(
        plain=np.zeros(count, np.bool_),
        event_counts=np.zeros(count, np.int64),
        event_numbers=np.zeros(count, np.int64),
        publish_ms=np.zeros(count, np.int64),
        has_writer=np.zeros(count, np.bool_),
        writers=np.zeros((count, WRITER_ID_LEN), np.uint8),
        events_starts=np.zeros(count, np.int64),
    )
    left = np.flatnonzero(lens >= APPEND_HEADER_OFFSET)
    if left.size == 0:
        return found
    begins = _bytes_at(buffer, starts[left], APPEND_HEADER_OFFSET)
    ours = (begins[:, :4] == np.frombuffer(_MAGIC_AND_VERSION, np.uint8)).all(axis=1)
    header_lens = np.zeros(count, np.int64)
    header_lens[left] = begins[:, 4:8].copy().view(">u4").ravel()
    rest = lens - APPEND_HEADER_OFFSET - header_lens
    left = left[ours]
    left = left[(header_lens[left] <= APPEND_HEADER_LEN_MAX) & (rest[left] >= 0)]
    left = left[header_lens[left] > 0]
    for _ in range(LAYOUTS_MAX):
        if left.size == 0:
            break
        same = left[header_lens[left] == header_lens[left[0]]]
        taken = _take_alike(buffer, starts, rest, same, int(header_lens[left[0]]), found)
        left = np.setdiff1d(left, taken, assume_unique=True)
    return found


def _take_alike(
    buffer: memoryview,
    starts: Int64s,
    rest: Int64s,
    rows: Int64s,
    header_len: int,
    found: PlainHeaders,
) -> Int64s:
    """Fill in what looks like the first of ``rows``; return which ones are settled."""
    places = starts[rows] + APPEND_HEADER_OFFSET
    headers = _bytes_at(buffer, places, header_len)
    layout = _layout_of(headers[0])
    if layout is None:
        return rows[:1]
    alike = ((headers & layout.mask) == layout.value).all(axis=1)
    taken: Int64s = rows[alike]
    headers = headers[alike]
    numbers = {number: _varints(headers, *at) for number, at in layout.numbers.items()}
    zeros = np.zeros(len(taken), np.int64)
    counts = numbers.get(_COUNT, zeros)
    events_len = numbers.get(_EVENTS_LEN, zeros)
    right = (events_len == rest[taken]) & (counts <= EVENT_COUNT_MAX)
    right &= (EVENT_LEN_LEN * counts <= events_len) & ((counts > 0) | (events_len == 0))
    found.plain[taken] = right
    found.event_counts[taken] = counts * right
    found.event_numbers[taken] = numbers.get(_NUMBER, zeros)
    found.publish_ms[taken] = numbers.get(_TIME, zeros)
    found.events_starts[taken] = places[alike] + header_len
    if layout.writer_at is not None:
        found.has_writer[taken] = True
        at = layout.writer_at
        found.writers[taken] = headers[:, at : at + WRITER_ID_LEN]
    return taken


def _layout_of(header: NDArray[np.uint8]) -> _Layout | None:
    """Return where the fields of a header lie; None when it is not one of the plain kind."""
    raw = header.tobytes()
    mask = np.zeros(len(raw), np.uint8)
    numbers: dict[int, tuple[int, int]] = {}
    writer_at, at, before = None, 0, 0
    while at < len(raw):
        number, kind = raw[at] >> 3, raw[at] & 7
        # Once each and in order, as they are written.
        if raw[at] >= 0x80 or number <= before:
            return None
        mask[at], before = 0xFF, number
        at += 1
        if number == _WRITER and kind == _BYTES:
            if raw[at : at + 1] != bytes([WRITER_ID_LEN]) or at + 1 + WRITER_ID_LEN > len(raw):
                return None
            mask[at], writer_at = 0xFF, at + 1
            at += 1 + WRITER_ID_LEN
        elif number in _NUMBERS and kind == _VARINT:
            length = _varint_len(raw, at)
            if length is None:
                return None
            mask[at : at + length] = 0x80
            numbers[number] = (at, length)
            at += length
        else:
            return None
    return _Layout(mask, header & mask, numbers, writer_at)


def _varint_len(raw: bytes, at: int) -> int | None:
    for length in range(1, _VARINT_LEN_MAX + 1):
        if at + length > len(raw):
            return None
        if raw[at + length - 1] < 0x80:
            return length
    return None


def _varints(rows: Bytes2D, at: int, length: int) -> Int64s:
    found = np.zeros(len(rows), np.int64)
    for step in range(length):
        found |= (rows[:, at + step] & 0x7F).astype(np.int64) << (7 * step)
    return found


def _bytes_at(buffer: memoryview, places: Int64s, length: int) -> Bytes2D:
    """Return ``length`` bytes from each place on, a row each."""
    kind: np.dtype[Any] = np.dtype((np.void, length))
    windows: NDArray[Any] = np.ndarray((len(buffer) - length + 1,), kind, buffer, 0, (1,))
    rows: Bytes2D = windows[places].view(np.uint8)
    return rows.reshape(len(places), length)
