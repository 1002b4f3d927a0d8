"""Reading the journal back, and telling a torn tail from corruption.

Owns: which bytes of the segments are records, what is damaged, and where the tail was torn. Does
not own what records mean (``node``).

The verdict on a bad place P, with K the highest position that any valid header anywhere names as
synced: P < K was durable once, so it is corruption, and what follows it is still read. Otherwise P
is where the tail was torn; it and everything behind it is cut.

Invariants:
    * What is read is durable before it is handed on.
    * Records come in the order of writing; none comes from behind the torn tail.
    * Every byte below K that is not a good record is in ``Replay.damages``.
"""

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Final

import structlog

from tierlog.model.errors import CorruptError
from tierlog.ports.files import File, Files
from tierlog_ingest.storage.journal import JOURNAL_DIRECTORY, list_segments, segment_path
from tierlog_ingest.storage.journal_format import (
    ALIGNMENT,
    GROUP_HEADER_LEN,
    RECORD_HEADER_LEN,
    SEGMENT_HEADER_LEN,
    GroupHeader,
    JournalPosition,
    Kind,
    SegmentHeader,
    align,
    decode_record,
)

log = structlog.get_logger()

_WINDOW_LEN: Final = 256 * ALIGNMENT
_NOWHERE: Final = JournalPosition(0, 0)


@dataclass(slots=True)
class _Segment:
    """What the first pass found."""

    segment_id: int
    size: int
    header: SegmentHeader | None = None
    groups: list[tuple[int, GroupHeader]] = field(default_factory=list)


@dataclass(slots=True)
class Replay:
    """What was found, growing while ``records`` is iterated."""

    files: Files
    first_segment_id: int
    segments: list[_Segment] = field(default_factory=list)
    known_synced: JournalPosition = _NOWHERE
    end: JournalPosition = _NOWHERE
    """Behind the last good record."""
    damages: list[str] = field(default_factory=list)
    torn: bool = False

    @property
    def next_segment_id(self) -> int:
        """An id that no segment has."""
        known = [one.segment_id for one in self.segments]
        return max([*known, self.first_segment_id - 1, self.known_synced.segment_id]) + 1

    def synced_len(self, segment: _Segment) -> int:
        """Return how long a segment was, durably, as far as any header knows."""
        named = [one.synced for one in self.headers()]
        return max([at for owner, at in named if owner == segment.segment_id], default=0)

    def headers(self) -> Iterator[SegmentHeader | GroupHeader]:
        """Iterate over every valid header."""
        for segment in self.segments:
            if segment.header is not None:
                yield segment.header
            for _, group in segment.groups:
                yield group

    def report(self, segment_id: int, offset: int, what: str) -> None:
        """Take note of a damage."""
        self.damages.append(f"{segment_path(segment_id)} at byte {offset}: {what}")
        log.error("journal.damaged", segment=segment_id, offset=offset, what=what)


async def scan_journal(files: Files, *, first_segment_id: int | None) -> Replay:
    """First pass: find headers. ``first_segment_id`` is the mark's; None when there is no mark."""
    found = await list_segments(files)
    if found:
        await files.sync_directory(JOURNAL_DIRECTORY)
    first = first_segment_id if first_segment_id is not None else 1
    replay = Replay(files, first)
    for segment_id in found:
        if segment_id >= first:
            segment = await _scan_segment(files, segment_id)
            replay.segments.append(segment)
    replay.known_synced = max((one.synced for one in replay.headers()), default=_NOWHERE)
    _drop_torn_creation(replay)
    expected = first
    for segment in replay.segments:
        if segment.segment_id != expected:
            replay.report(expected, 0, "the segment is missing")
        expected = segment.segment_id + 1
    if not replay.segments and first_segment_id is not None:
        replay.report(first, 0, "the segment that the mark names is missing")
    return replay


def _drop_torn_creation(replay: Replay) -> None:
    """Forget a last segment that never came to have a whole header: it was never used."""
    while replay.segments:
        last = replay.segments[-1]
        if last.header is not None or last.size > SEGMENT_HEADER_LEN:
            return
        named_by_mark = last.segment_id == replay.first_segment_id and last.segment_id > 1
        if named_by_mark or replay.known_synced.segment_id >= last.segment_id:
            return
        replay.segments.pop()


async def _scan_segment(files: Files, segment_id: int) -> _Segment:
    file = await files.open(segment_path(segment_id))
    try:
        # A process that was killed left what was not synced in the system's cache. What is read
        # here must be there after a power cut too, or ledger files would know more than it.
        await file.sync()
        segment = _Segment(segment_id, await file.size())
        try:
            segment.header = SegmentHeader.unpack(await file.read(0, SEGMENT_HEADER_LEN))
        except CorruptError:
            return segment
        if segment.header.segment_id != segment_id:
            segment.header = None
            return segment
        await _scan_groups(file, segment, segment.header.salt)
    finally:
        await file.close()
    return segment


async def _scan_groups(file: File, segment: _Segment, salt: int) -> None:
    window, window_offset, offset = b"", 0, SEGMENT_HEADER_LEN
    while offset < segment.size:
        inside = offset - window_offset
        if not 0 <= inside <= len(window) - GROUP_HEADER_LEN:
            window, window_offset, inside = await file.read(offset, _WINDOW_LEN), offset, 0
        header = GroupHeader.unpack(window[inside : inside + GROUP_HEADER_LEN], salt)
        if header is None:
            offset += ALIGNMENT
        else:
            segment.groups.append((offset, header))
            offset = align(offset + GROUP_HEADER_LEN + header.records_len)


async def records(replay: Replay) -> AsyncIterator[tuple[Kind, memoryview]]:
    """Second pass: iterate over the good records, judge the bad places, note where it ends."""
    for segment in replay.segments:
        replay.end = JournalPosition(segment.segment_id, min(segment.size, SEGMENT_HEADER_LEN))
        if segment.header is None:
            # Not a torn creation, those were dropped: there was a whole header once.
            replay.report(segment.segment_id, 0, "its header is damaged")
            continue
        file = await replay.files.open(segment_path(segment.segment_id))
        try:
            async for record in _segment_records(replay, segment, file, segment.header.salt):
                yield record
        finally:
            await file.close()
        if replay.torn:
            return


async def _segment_records(
    replay: Replay, segment: _Segment, file: File, salt: int
) -> AsyncIterator[tuple[Kind, memoryview]]:
    segment_id, expected = segment.segment_id, SEGMENT_HEADER_LEN
    for offset, header in segment.groups:
        if offset != expected and not _judge(replay, segment_id, expected, "a group is damaged"):
            return
        start = offset + GROUP_HEADER_LEN
        data = memoryview(await file.read(start, header.records_len))
        at = 0
        for _ in range(header.record_count):
            record = decode_record(data, at, salt)
            if record is None:
                if not _judge(replay, segment_id, start + at, "a record is damaged"):
                    return
                break
            yield record
            at += RECORD_HEADER_LEN + len(record[1])
            replay.end = JournalPosition(segment_id, start + at)
        expected = align(start + header.records_len)
        replay.end = JournalPosition(segment_id, expected)
    if replay.synced_len(segment) > expected:
        replay.report(segment_id, expected, "synced groups are damaged or missing")
    elif segment.size > expected and replay.known_synced < (segment_id, expected + 1):
        replay.torn = True


def _judge(replay: Replay, segment_id: int, offset: int, what: str) -> bool:
    """Tell whether to go on behind a bad place: yes if it was durable once."""
    if (segment_id, offset) < replay.known_synced:
        replay.report(segment_id, offset, what)
        return True
    replay.torn = True
    return False


async def cut_tail(replay: Replay) -> None:
    """Cut what is behind the last good record, and make what is before it durable."""
    for segment in replay.segments:
        if segment.segment_id > replay.end.segment_id:
            await replay.files.remove(segment_path(segment.segment_id))
            continue
        file = await replay.files.open(segment_path(segment.segment_id))
        try:
            if segment.segment_id == replay.end.segment_id and segment.size > replay.end.offset:
                await file.truncate(replay.end.offset)
            await file.sync()
        finally:
            await file.close()
    if replay.segments:
        await replay.files.sync_directory(JOURNAL_DIRECTORY)
