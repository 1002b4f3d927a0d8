"""Frames of entries as columns of events (pure).

Owns taking entries apart, in bulk where their kind allows it: in a raw stream an entry is one
event; plain events of one entry that all have one length, which most have, are found without a
step for each. Does not own what Spark is given of it (``batches``).

Invariants:
    * Rows are in the order of entries, and of the events of each.
    * An entry that is not what its stream's kind says is ``CorruptError`` with its id.
    * ``verify``: nothing vouches for the bytes, so each entry's own checksum is looked at.
"""

from collections.abc import Iterator, Mapping, Sequence
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
    StructuredEvent,
    decode_entry,
    unpacked_len,
)
from tierlog.format.frame import FRAME_HEADER_LEN, Offsets
from tierlog.model.errors import CorruptError, RefusedError
from tierlog_spark.headers import WRITER_ID_LEN, Int64s, PlainHeaders, plain_headers

_U32: Final = Struct(">I")
_NO_WRITER: Final = -1
# Fewer entries than that are walked through faster one by one.
TOGETHER_MIN: Final = 64
UNPACKED_BYTES_MAX: Final = 32 * 1024 * 1024
"""So much compressed events of several entries make at once in memory.

An entry whose own are more is taken apart alone, up to ``EVENTS_LEN_MAX``, as clients do: refused,
nobody would get past it.
"""


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
            for part in _parts(frames, starts[some], lens[some]):
                yield _one_by_one(
                    frames, starts[some][part], lens[some][part], first + part.start, decompressors
                )


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
    event_starts, event_lens = _places(frames, headers, starts + lens, of_entry, indexes)
    bad = np.flatnonzero(event_lens < 0)
    if bad.size:
        entry = int(of_entry[bad[0]])
        _corrupt(first_entry_id + entry, "events that do not fill their entry")
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
    headers: PlainHeaders,
    ends: Int64s,
    of_entry: Int64s,
    indexes: Int64s,
) -> tuple[Int64s, Int64s]:
    """Return where events begin and how long they are; -1: they do not fill their entry."""
    counts, begins = headers.event_counts, headers.events_starts
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


def _parts(frames: memoryview, starts: Int64s, lens: Int64s) -> Iterator[slice]:
    """Take entries apart so that the events of each part fit ``UNPACKED_BYTES_MAX``, or are one."""
    begin, size = 0, 0
    for number, (at, length) in enumerate(zip(starts.tolist(), lens.tolist(), strict=True)):
        more = unpacked_len(frames[at : at + length])
        if number > begin and size + more > UNPACKED_BYTES_MAX:
            yield slice(begin, number)
            begin, size = number, 0
        size += more
    yield slice(begin, len(starts))


def _one_by_one(
    frames: memoryview,
    starts: Int64s,
    lens: Int64s,
    first_entry_id: int,
    decompressors: Mapping[Codec, Decompress] | None,
) -> EventColumns:
    """Read entries that are compressed, structured, or carry attribute updates."""
    events: list[StructuredEvent] = []
    rows: list[tuple[int, int, int, int]] = []
    writers: dict[bytes, int] = {}
    for number, (at, length) in enumerate(zip(starts.tolist(), lens.tolist(), strict=True)):
        entry_id = first_entry_id + number
        try:
            entry = decode_entry(frames[at : at + length])
            found = entry.structured_events(decompressors, events_len_max=EVENTS_LEN_MAX)
        except (CorruptError, RefusedError) as error:
            error.details.setdefault("entry_id", str(entry_id))
            raise
        header = entry.header
        row = _NO_WRITER
        if header.writer_id is not None:
            row = writers.setdefault(header.writer_id.bytes, len(writers))
        first_number = header.event_number - header.event_count + 1
        rows.append((len(found), header.publish_time_ms, row, first_number))
        events += found
    table = np.array(rows, np.int64).reshape(len(rows), 4).T
    payload_lens = np.fromiter((len(one.payload) for one in events), np.int64, len(events))
    entry_rows, indexes = _numbered(table[0])
    return EventColumns(
        buffer=memoryview(b"".join(one.payload for one in events)),
        starts=np.cumsum(payload_lens) - payload_lens,
        lens=payload_lens,
        event_indexes=indexes,
        entry_rows=entry_rows,
        entries=EntryColumns(
            entry_ids=np.arange(first_entry_id, first_entry_id + len(rows)),
            publish_ms=table[1],
            writers=list(writers),
            writer_rows=table[2],
            first_numbers=table[3],
        ),
        details=Details(
            [one.key for one in events],
            [one.event_time_ms for one in events],
            [one.properties for one in events],
        ),
    )


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
