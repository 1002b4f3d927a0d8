"""Reading the journal back, and telling a torn tail from corruption.

Owns: which bytes of the segments are records, what is damaged, and where the tail was torn. Does
not own what records mean (``node``).

The verdict on a bad place P of a segment, which ends, as far as its reader can prove, at K: the
highest position that a valid header names, the segment's own groups behind P, the next segment's
header, or the mark. P < K was durable once, so it is corruption, and what follows it is still
read. Otherwise it is the end of the segment: in the last one the tail was torn there, if anything
was under way.

Invariants:
    * What is read is durable before it is handed on.
    * Records come in the order of writing; a group that was torn brings none.
    * Every byte from the mark to K that is not a good record, or padding, is in
      ``Replay.damages``.
    * Memory: one window, and what the caller keeps of it.
"""

from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from typing import Final

import structlog

from tierlog.model.errors import CorruptError
from tierlog.ports.files import File, Files
from tierlog_ingest.storage.journal.format import (
    ALIGNMENT,
    GROUP_HEADER_LEN,
    SEGMENT_HEADER_LEN,
    GroupHeader,
    JournalPosition,
    Record,
    SegmentHeader,
    decode_records,
)
from tierlog_ingest.storage.journal.segments import JOURNAL_DIRECTORY, list_segments, segment_path

log = structlog.get_logger()

_WINDOW_LEN: Final = 8 * 1024 * 1024
_NOWHERE: Final = JournalPosition(0, 0)

assert _WINDOW_LEN % ALIGNMENT == 0


@dataclass(slots=True)
class SegmentFound:
    """A segment from the mark on."""

    segment_id: int
    size: int
    header: SegmentHeader | None
    """None when it is damaged: then nothing in the segment can be read."""
    synced_len: int = 0
    """So long it was, durably, as far as headers and the mark say."""


@dataclass(slots=True)
class Replay:
    """What was found, growing while ``records`` is iterated."""

    files: Files
    mark: JournalPosition
    segments: list[SegmentFound] = field(default_factory=list)
    next_segment_id: int = 1
    """An id that no segment has."""
    known_synced: JournalPosition = _NOWHERE
    """The highest position that is known to have been durable."""
    end: JournalPosition = _NOWHERE
    """Behind the last good record."""
    damages: list[str] = field(default_factory=list)
    torn: bool = False
    """A group was under way when it all ended."""

    def report(self, segment_id: int, offset: int, what: str) -> None:
        """Take note of a damage."""
        self.damages.append(f"{segment_path(segment_id)} at byte {offset}: {what}")
        log.error("journal.damaged", segment=segment_id, offset=offset, what=what)


class _Window:
    """A file's bytes, read in large pieces."""

    def __init__(self, file: File, size: int) -> None:
        self._file = file
        self._size = size
        self._offset = 0
        self._data = memoryview(b"")

    async def view(self, offset: int, length: int) -> memoryview:
        """Return what lies there; fewer bytes only at the end of the file."""
        at = offset - self._offset
        if not 0 <= at <= at + length <= len(self._data):
            wanted = max(0, min(self._size - offset, max(length, _WINDOW_LEN)))
            self._data = memoryview(await self._file.read(offset, wanted) if wanted else b"")
            self._offset, at = offset, 0
        return self._data[at : at + length]


async def scan_journal(files: Files, mark: JournalPosition | None) -> Replay:
    """Find the segments from the mark on, or all of them when there is no mark."""
    found = await list_segments(files)
    if found:
        await files.sync_directory(JOURNAL_DIRECTORY)
    replay = Replay(files, mark if mark is not None else JournalPosition(1, 0))
    first = replay.mark.segment_id
    replay.next_segment_id = max([*found, first if mark is not None else 0]) + 1
    for segment_id in found:
        if segment_id >= first:
            replay.segments.append(await _look_at(files, segment_id))
    _note_synced(replay, replay.mark)
    for segment in replay.segments:
        if segment.header is not None:
            _note_synced(replay, segment.header.synced)
    expected = first
    for segment in replay.segments:
        if segment.segment_id != expected:
            replay.report(expected, 0, "the segment is missing")
        expected = segment.segment_id + 1
    if not replay.segments and mark is not None:
        replay.report(first, 0, "the segment that the mark names is missing")
    return replay


async def _look_at(files: Files, segment_id: int) -> SegmentFound:
    file = await files.open(segment_path(segment_id))
    try:
        # A process that was killed left what was not synced in the system's cache. What is read
        # here must be there after a power cut too, or entry logs would know more than it.
        await file.sync()
        size = await file.size()
        try:
            header = SegmentHeader.unpack(await file.read(0, SEGMENT_HEADER_LEN))
        except CorruptError:
            return SegmentFound(segment_id, size, None)
    finally:
        await file.close()
    return SegmentFound(segment_id, size, header if header.segment_id == segment_id else None)


def _note_synced(replay: Replay, position: JournalPosition) -> None:
    """Take note that everything before ``position`` was durable once."""
    replay.known_synced = max(replay.known_synced, position)
    for segment in replay.segments:
        if segment.segment_id == position.segment_id:
            segment.synced_len = max(segment.synced_len, position.offset)


async def records(replay: Replay) -> AsyncIterator[Record]:
    """Iterate over the good records from the mark on; judge the bad places; find the end."""
    async for group in record_groups(replay):
        for record in group:
            yield record


async def record_groups(replay: Replay) -> AsyncGenerator[list[Record], None]:
    """As ``records``, but those of a group together."""
    for segment in replay.segments:
        segment_id = segment.segment_id
        start = SEGMENT_HEADER_LEN
        if segment_id == replay.mark.segment_id:
            start = max(start, replay.mark.offset)
        replay.end = JournalPosition(segment_id, start)
        if segment.header is None:
            # A segment gets its name with a whole header behind it, so there was one once.
            replay.report(segment_id, 0, "its header is damaged")
            continue
        if segment.size < segment.header.filled_len:
            was = segment.header.filled_len
            replay.report(segment_id, segment.size, f"it was cut: it had {was} bytes")
        if segment.size < start:
            replay.report(segment_id, segment.size, "it is shorter than at the mark")
            continue
        file = await replay.files.open(segment_path(segment_id))
        try:
            window = _Window(file, segment.size)
            async for group in _segment_groups(replay, segment, window, segment.header.salt):
                yield group
        finally:
            await file.close()


async def _segment_groups(
    replay: Replay, segment: SegmentFound, window: _Window, salt: int
) -> AsyncGenerator[list[Record], None]:
    segment_id, expected = segment.segment_id, replay.end.offset
    header = await _group_at(window, replay.end, salt) or await _next_group(
        replay, segment, window, salt, expected
    )
    while header is not None:
        offset = header.position.offset
        _note_synced(replay, header.position)
        if offset != expected:
            replay.report(segment_id, expected, "a group is damaged")
        start = offset + GROUP_HEADER_LEN
        body = await window.view(start, header.records_len)
        found, damaged = decode_records(body, header.record_count, salt)
        if len(body) != header.records_len and not damaged:
            damaged.append(len(body))
        expected = header.end
        following = await _group_at(window, JournalPosition(segment_id, expected), salt)
        if following is None:
            after = offset if damaged else expected
            following = await _next_group(replay, segment, window, salt, after)
        if damaged and following is None and segment.synced_len <= offset:
            replay.torn = segment is replay.segments[-1]
            return
        for at in damaged:
            replay.report(segment_id, start + at, "a record is damaged")
        replay.end = JournalPosition(segment_id, expected)
        if found:
            yield found
        header = following
    if segment.synced_len > expected:
        replay.report(segment_id, expected, "synced groups are damaged or missing")


async def _group_at(window: _Window, position: JournalPosition, salt: int) -> GroupHeader | None:
    head = await window.view(position.offset, GROUP_HEADER_LEN)
    return GroupHeader.unpack(head, salt, position)


async def _next_group(
    replay: Replay, segment: SegmentFound, window: _Window, salt: int, offset: int
) -> GroupHeader | None:
    """Look from a bad place at ``offset`` on for a group of this life behind it.

    One that lies where it does not belong can't be read, but proves what it names.
    """
    for at in range(offset, segment.size, ALIGNMENT):
        head = await window.view(at, GROUP_HEADER_LEN)
        header = GroupHeader.unpack_anywhere(head, salt)
        if header is None:
            continue
        if header.position != (segment.segment_id, at):
            _note_synced(replay, header.position)
        elif at > offset:
            return header
    return None


async def cut_tail(replay: Replay) -> None:
    """Cut what is behind the end of the last segment, so that it never comes to light again.

    A segment that was filled keeps its length, which tells that nobody cut it: there the header
    of a group that was under way is overwritten, and its records with it lead nowhere.
    """
    header = replay.segments[-1].header if replay.segments else None
    if header is None:
        return
    last, end = replay.segments[-1], replay.end
    assert end.segment_id == last.segment_id, "all records were read before"
    if last.size <= end.offset:
        return
    file = await replay.files.open(segment_path(last.segment_id))
    try:
        if header.filled_len:
            await file.write(end.offset, [bytes(min(ALIGNMENT, last.size - end.offset))])
        else:
            await file.truncate(end.offset)
        await file.sync()
    finally:
        await file.close()
