"""Frames of entries as columns of events (pure).

Owns taking entries apart, in bulk where their kind allows it: in a raw stream an entry is one
event; plain events of one entry that all have one length, which most have, are found without a
step for each. Compressed ones are decompressed together and taken apart the same way. Does not own
what Spark is given of it (``batches``).

Invariants:
    * Rows are in the order of entries, and of the events of each.
    * An entry that is not what its stream's kind says is ``CorruptError`` with its id.
    * Of events that are not structured no object is made of each, however small they are.
    * ``verify``: nothing vouches for the bytes, so each entry's own checksum is looked at.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from struct import Struct
from struct import error as StructError  # noqa: N812 - it is a class
from typing import Final, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from tierlog.format.checksum import crc32c
from tierlog.format.entry import (
    APPEND_HEADER_OFFSET,
    CRC_OFFSET,
    EVENT_LEN_LEN,
    EVENTS_LEN_MAX,
    Codec,
    Decompress,
    Entry,
    StructuredEvent,
    decode_entry,
)
from tierlog.format.frame import FRAME_HEADER_LEN, Offsets
from tierlog.model.errors import CorruptError, RefusedError
from tierlog_spark.headers import WRITER_ID_LEN, Int64s, PlainHeaders, plain_headers

_U32: Final = Struct(">I")
_NO_WRITER: Final = -1
# Fewer entries than that are walked through faster one by one.
TOGETHER_MIN: Final = 64
UNPACKED_BYTES_MAX: Final = 32 * 1024 * 1024
"""So much compressed and structured events take at once in memory, with what is made of each.

An entry that is more is decompressed alone, up to ``EVENTS_LEN_MAX``, as clients do: refused,
nobody would get past it. Its events are taken apart in steps.
"""
EVENT_BYTES: Final = 128
"""What the columns of an event take beside its bytes, and finding it, about."""
STRUCTURED_EVENT_BYTES: Final = 640
"""The same of one that is objects for a while: itself, its key and its properties."""
_NOT_FILLED: Final = "events that do not fill their entry"


class Details(NamedTuple):
    """What structured events have beside their payload, a value each."""

    keys: Sequence[bytes | None]
    event_times_ms: Sequence[int | None]
    properties: Sequence[Mapping[str, str]]


class EntryColumns(NamedTuple):
    """What entries tell of all their events, a row each.

    ``publish_ms`` None: a raw stream knows no times. ``writer_rows`` are rows of ``writers``, or
    -1; only where there is a writer the event has a number, from that of the first one on.
    """

    entry_ids: Int64s
    publish_ms: Int64s | None
    writers: Sequence[bytes]
    writer_rows: Int64s
    first_numbers: Int64s


class _Entry(NamedTuple):
    """An entry that is not plain, its events still packed."""

    entry_id: int
    entry: Entry


class EventColumns(NamedTuple):
    """Events of consecutive entries; payload ``i`` is ``buffer[starts[i] : starts[i] + lens[i]]``.

    ``entry_rows``: the row in ``entries`` of each event's entry. Entries are few and events are
    many: what entries tell becomes a column of events where one is asked for, and only there.
    """

    buffer: memoryview
    starts: Int64s
    lens: Int64s
    event_indexes: Int64s
    entry_rows: Int64s
    entries: EntryColumns
    details: Details | None = None

    def kept(self, wanted: NDArray[np.bool_]) -> "EventColumns":
        """Return the rows that are wanted."""
        details = self.details
        if details is not None:
            rows = np.flatnonzero(wanted).tolist()
            details = Details._make([column[row] for row in rows] for column in details)
        return self._replace(
            starts=self.starts[wanted],
            lens=self.lens[wanted],
            event_indexes=self.event_indexes[wanted],
            entry_rows=self.entry_rows[wanted],
            details=details,
        )

    def between(self, start: int, stop: int) -> "EventColumns":
        """Return the rows from ``start`` on and before ``stop``, without a copy."""
        some, details = slice(start, stop), self.details
        if details is not None:
            details = Details._make(column[some] for column in details)
        return self._replace(
            starts=self.starts[some],
            lens=self.lens[some],
            event_indexes=self.event_indexes[some],
            entry_rows=self.entry_rows[some],
            details=details,
        )


def raw_events(frames: memoryview, offsets: Offsets, first_entry_id: int) -> EventColumns:
    """Return each entry's data as one event."""
    starts, lens = _data_in(frames, offsets)
    count = len(starts)
    zeros, rows = np.zeros(count, np.int64), np.arange(count)
    return EventColumns(
        buffer=frames,
        starts=starts,
        lens=lens,
        event_indexes=zeros,
        entry_rows=rows,
        entries=EntryColumns(
            entry_ids=rows + first_entry_id,
            publish_ms=None,
            writers=(),
            writer_rows=np.full(count, _NO_WRITER, np.int64),
            first_numbers=zeros,
        ),
    )


def events_in(
    frames: memoryview,
    offsets: Offsets,
    first_entry_id: int,
    *,
    verify: bool,
    decompressors: Mapping[Codec, Decompress] | None = None,
) -> Iterator[EventColumns]:
    """Return the events of entries with append headers, those of one kind together."""
    starts, lens = _data_in(frames, offsets)
    headers = plain_headers(frames, starts, lens)
    kinds = np.flatnonzero(np.diff(headers.plain)) + 1
    bounds = [0, *kinds.tolist(), len(starts)]
    for begin, end in pairwise(bounds):
        if begin == end:
            continue
        some, first = slice(begin, end), first_entry_id + begin
        if headers.plain[begin]:
            if verify:
                _verify(frames, starts[some], lens[some], first)
            yield _plain(
                frames,
                PlainHeaders._make(one[some] for one in headers),
                lens[some],
                starts[some],
                first,
            )
        else:
            entries = _entries(frames, starts[some], lens[some], first)
            for group in _groups(entries):
                yield from _unpacked(group, decompressors)


def _data_in(frames: memoryview, offsets: Offsets) -> tuple[Int64s, Int64s]:
    """Return where the data of each entry begins, and how long it is."""
    begins = offsets.astype(np.int64)
    ends = np.append(begins[1:], len(frames))
    return begins + FRAME_HEADER_LEN, ends - begins - FRAME_HEADER_LEN


def _verify(frames: memoryview, starts: Int64s, lens: Int64s, first_entry_id: int) -> None:
    for number, (at, length) in enumerate(zip(starts.tolist(), lens.tolist(), strict=True)):
        body = frames[at + APPEND_HEADER_OFFSET : at + length]
        found = crc32c(body, crc32c(frames[at : at + CRC_OFFSET]))
        if found != _U32.unpack_from(frames, at + CRC_OFFSET)[0]:
            _corrupt(first_entry_id + number, "entry data whose checksum differs")


def _plain(
    frames: memoryview,
    headers: PlainHeaders,
    lens: Int64s,
    starts: Int64s,
    first_entry_id: int,
) -> EventColumns:
    counts = headers.event_counts
    of_entry, indexes = _numbered(counts)
    event_starts, event_lens = _places(
        frames, counts, headers.events_starts, starts + lens, of_entry, indexes
    )
    _check_filled(event_lens, of_entry, first_entry_id)
    writers, writer_rows = _writers(headers)
    return EventColumns(
        buffer=frames,
        starts=event_starts,
        lens=event_lens,
        event_indexes=indexes,
        entry_rows=of_entry,
        entries=EntryColumns(
            entry_ids=np.arange(first_entry_id, first_entry_id + len(counts)),
            publish_ms=headers.publish_ms,
            writers=writers,
            writer_rows=writer_rows,
            # The header has the number of the last one.
            first_numbers=headers.event_numbers - counts + 1,
        ),
    )


def _places(
    frames: memoryview,
    counts: Int64s,
    begins: Int64s,
    ends: Int64s,
    of_entry: Int64s,
    indexes: Int64s,
) -> tuple[Int64s, Int64s]:
    """Return where events begin and how long they are; -1: they do not fill their entry."""
    has_events = counts > 0
    first_lens = np.zeros(len(counts), np.int64)
    first_lens[has_events] = _u32_at(frames, begins[has_events])
    # If all are as long as the first one, they end where the entry does.
    strides = first_lens + EVENT_LEN_LEN
    guess = has_events & (begins + strides * counts == ends)
    found_starts = np.zeros(len(of_entry), np.int64)
    found_lens = np.full(len(of_entry), -1, np.int64)
    of_guess = guess[of_entry]
    where, entries = np.flatnonzero(of_guess), of_entry[of_guess]
    places = begins[entries] + strides[entries] * indexes[of_guess]
    same = _u32_at(frames, places) == first_lens[entries]
    found_starts[where] = places + EVENT_LEN_LEN
    found_lens[where] = first_lens[entries]
    guess[entries[~same]] = False
    walked = has_events & ~guess
    if walked.any():
        some = walked[of_entry]
        found = _walk(frames, begins[walked], ends[walked], counts[walked])
        found_starts[some], found_lens[some] = found
    return found_starts, found_lens


def _walk(
    frames: memoryview, begins: Int64s, ends: Int64s, counts: Int64s
) -> tuple[Int64s, Int64s]:
    """Return the same from one length to the next: of all entries together, while they are many."""
    slots, at, step = np.cumsum(counts) - counts, begins.copy(), 0
    starts = np.zeros(int(counts.sum()), np.int64)
    lens = np.full(len(starts), -1, np.int64)
    left = np.arange(len(counts))
    while len(left) >= TOGETHER_MIN:
        left = left[(counts[left] > step) & (at[left] + EVENT_LEN_LEN <= ends[left])]
        here = slots[left] + step
        lens[here] = _u32_at(frames, at[left])
        starts[here] = at[left] + EVENT_LEN_LEN
        at[left] = starts[here] + lens[here]
        step += 1
    for entry in left.tolist():
        first, behind = int(slots[entry]) + step, int(slots[entry] + counts[entry])
        bounds = _bounds(frames, int(at[entry]), behind - first)
        if bounds is not None:
            starts[first:behind] = bounds[:-1] + EVENT_LEN_LEN
            lens[first:behind] = bounds[1:] - starts[first:behind]
            at[entry] = bounds[-1]
    lens[np.repeat(at != ends, counts)] = -1
    return starts, lens


def _bounds(frames: memoryview, at: int, count: int) -> Int64s | None:
    """Return where so many events begin with their lengths, and where the last one ends."""
    # Who passes an entry's end never comes back to it: that is seen behind the last one.
    found, unpack = [at], _U32.unpack_from
    note = found.append
    try:
        for _ in range(count):
            at += EVENT_LEN_LEN + unpack(frames, at)[0]
            note(at)
    except StructError:
        return None
    return np.array(found, np.int64)


def _u32_at(frames: memoryview, places: Int64s) -> Int64s:
    windows: NDArray[np.uint32] = np.ndarray(
        (max(0, len(frames) - EVENT_LEN_LEN + 1),), np.dtype(">u4"), frames, 0, (1,)
    )
    return windows[places].astype(np.int64)


def _writers(headers: PlainHeaders) -> tuple[list[bytes], Int64s]:
    """Return the writers, each once, and the row of each entry's."""
    rows = np.full(len(headers.has_writer), _NO_WRITER, np.int64)
    have = np.flatnonzero(headers.has_writer)
    if have.size == 0:
        return [], rows
    ids = np.ascontiguousarray(headers.writers[have]).view(np.dtype((np.void, WRITER_ID_LEN)))
    if bool((ids == ids[0]).all()):
        rows[have] = 0
        return [ids[0].tobytes()], rows
    known: dict[bytes, int] = {}
    rows[have] = [known.setdefault(one.tobytes(), len(known)) for one in ids]
    return list(known), rows


def _entries(
    frames: memoryview, starts: Int64s, lens: Int64s, first_entry_id: int
) -> Iterator[_Entry]:
    """Read entries that are compressed, structured, or carry attribute updates."""
    for number, (at, length) in enumerate(zip(starts.tolist(), lens.tolist(), strict=True)):
        with _naming(first_entry_id + number):
            entry = decode_entry(frames[at : at + length])
        yield _Entry(first_entry_id + number, entry)


def _groups(entries: Iterable[_Entry]) -> Iterator[list[_Entry]]:
    """Take entries of one kind together that fit ``UNPACKED_BYTES_MAX``, or one that does not."""
    group, weight = list[_Entry](), 0
    for one in entries:
        header, more = one.entry.header, _weight_of(one)
        same = not group or group[0].entry.header.structured == header.structured
        if group and not (same and weight + more <= UNPACKED_BYTES_MAX):
            yield group
            group, weight = [], 0
        group.append(one)
        weight += more
    if group:
        yield group


def _weight_of(one: _Entry) -> int:
    header = one.entry.header
    each = STRUCTURED_EVENT_BYTES if header.structured else EVENT_BYTES
    return header.events_len + each * header.event_count


def _unpacked(
    group: Sequence[_Entry], decompressors: Mapping[Codec, Decompress] | None
) -> Iterator[EventColumns]:
    parts = _together(group, decompressors) if len(group) > 1 else _alone(group[0], decompressors)
    structured = group[0].entry.header.structured
    for columns in parts:
        yield _with_details(columns) if structured else columns


def _together(
    group: Sequence[_Entry], decompressors: Mapping[Codec, Decompress] | None
) -> Iterator[EventColumns]:
    """Give the events of some entries as if they lay unpacked in the ledger."""
    lens = np.array([one.entry.header.events_len for one in group], np.int64)
    counts = np.array([one.entry.header.event_count for one in group], np.int64)
    ends = np.cumsum(lens)
    begins = ends - lens
    buffer = memoryview(bytearray(int(ends[-1])))
    for one, begin, end in zip(group, begins.tolist(), ends.tolist(), strict=True):
        with _naming(one.entry_id):
            buffer[begin:end] = one.entry.unpacked(decompressors, events_len_max=EVENTS_LEN_MAX)
    first_entry_id = group[0].entry_id
    of_entry, indexes = _numbered(counts)
    starts, event_lens = _places(buffer, counts, begins, ends, of_entry, indexes)
    _check_filled(event_lens, of_entry, first_entry_id)
    yield EventColumns(buffer, starts, event_lens, indexes, of_entry, _columns_of(group))


def _alone(one: _Entry, decompressors: Mapping[Codec, Decompress] | None) -> Iterator[EventColumns]:
    """Give the events of one entry, in as many steps as its weight asks for."""
    with _naming(one.entry_id):
        buffer = one.entry.unpacked(decompressors, events_len_max=EVENTS_LEN_MAX)
    count, entries = one.entry.header.event_count, _columns_of([one])
    step = max(1, count // -(-max(1, _weight_of(one)) // UNPACKED_BYTES_MAX))
    at = 0
    for first in range(0, count, step):
        some = min(step, count - first)
        bounds = _even_bounds(buffer, at, some)
        if bounds is None:
            bounds = _bounds(buffer, at, some)
        at = len(buffer) + 1 if bounds is None else int(bounds[-1])
        if bounds is None or at > len(buffer) or (first + some == count and at != len(buffer)):
            _corrupt(one.entry_id, _NOT_FILLED)
        starts = bounds[:-1] + EVENT_LEN_LEN
        indexes, rows = np.arange(first, first + some), np.zeros(some, np.int64)
        yield EventColumns(buffer, starts, bounds[1:] - starts, indexes, rows, entries)


def _even_bounds(buffer: memoryview, at: int, count: int) -> Int64s | None:
    """Return what ``_bounds`` does if all these events are as long as the first one."""
    if at + EVENT_LEN_LEN > len(buffer):
        return None
    (length,) = _U32.unpack_from(buffer, at)
    if at + (EVENT_LEN_LEN + length) * count > len(buffer):
        return None
    bounds: Int64s = at + (EVENT_LEN_LEN + length) * np.arange(count + 1)
    return bounds if bool((_u32_at(buffer, bounds[:-1]) == length).all()) else None


def _columns_of(group: Sequence[_Entry]) -> EntryColumns:
    writers: dict[bytes, int] = {}
    rows: list[tuple[int, int, int]] = []
    for one in group:
        header, row = one.entry.header, _NO_WRITER
        if header.writer_id is not None:
            row = writers.setdefault(header.writer_id.bytes, len(writers))
        first_number = header.event_number - header.event_count + 1
        rows.append((header.publish_time_ms, row, first_number))
    publish_ms, writer_rows, first_numbers = np.array(rows, np.int64).T
    first_entry_id = group[0].entry_id
    return EntryColumns(
        entry_ids=np.arange(first_entry_id, first_entry_id + len(group)),
        publish_ms=publish_ms,
        writers=list(writers),
        writer_rows=writer_rows,
        first_numbers=first_numbers,
    )


def _with_details(columns: EventColumns) -> EventColumns:
    """Take structured events apart."""
    events: list[StructuredEvent] = []
    places = zip(columns.starts.tolist(), columns.lens.tolist(), strict=True)
    for number, (at, length) in enumerate(places):
        try:
            events.append(StructuredEvent.decode(columns.buffer[at : at + length]))
        except CorruptError as error:
            entry_id = columns.entries.entry_ids[columns.entry_rows[number]]
            error.details.setdefault("entry_id", str(entry_id))
            raise
    lens = np.fromiter((len(one.payload) for one in events), np.int64, len(events))
    return columns._replace(
        buffer=memoryview(b"".join(one.payload for one in events)),
        starts=np.cumsum(lens) - lens,
        lens=lens,
        details=Details(
            [one.key for one in events],
            [one.event_time_ms for one in events],
            [one.properties for one in events],
        ),
    )


@contextlib.contextmanager
def _naming(entry_id: int) -> Iterator[None]:
    """Say of an error which entry it is about."""
    try:
        yield
    except (CorruptError, RefusedError) as error:
        error.details.setdefault("entry_id", str(entry_id))
        raise


def _check_filled(event_lens: Int64s, of_entry: Int64s, first_entry_id: int) -> None:
    bad = np.flatnonzero(event_lens < 0)
    if bad.size:
        _corrupt(first_entry_id + int(of_entry[bad[0]]), _NOT_FILLED)


def _numbered(counts: Int64s) -> tuple[Int64s, Int64s]:
    """Return each event's row among entries of so many events, and its number in its entry."""
    rows = np.repeat(np.arange(len(counts)), counts)
    return rows, np.arange(len(rows)) - (np.cumsum(counts) - counts)[rows]


def _corrupt(entry_id: int, what: str) -> NoReturn:
    raise CorruptError(
        f"entry {entry_id}: {what}",
        remedy="Read another copy",
        details={"entry_id": str(entry_id)},
    )
