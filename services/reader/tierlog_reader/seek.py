"""Where in a stream a time begins, without reading the stream (field notes, "seek by time").

Owns the search: which ledger by its metadata, where in it by the side object's publish times in
tier 2 and by the headers of runs in tier 1, else by some entries, and the last steps over the
entries themselves. Does not own how these are read.

Publish times are those of writers' clocks, ledgers are opened and closed by servers' clocks: a
ledger that was closed up to ``SKEW_MS`` before a time is looked into as well.

Invariants:
    * What is returned is an entry published at that time or later, or the stream's end; in its
      ledger nothing before it is, as far as times grow from entry to entry. An end that is
      returned was looked up first, and all before it was searched then.
    * A ledger that is listed is passed over when all of it is older, never when it can't be read.
    * A raw ledger of which no times are known (its clients note none, nor do other programs)
      counts from its first entry. Of any other one whose copy has none (all in one object) the
      entries tell them.
    * A search reads a number of small pieces that grows with the logarithm of a ledger's length,
      each within its room, as a client of its own for each stream.
"""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from tierlog.format.entry import decode_entry
from tierlog.format.frame import FRAME_HEADER_LEN, walk_frames
from tierlog.model.errors import Reason, RefusedError, RetryableError
from tierlog.model.ids import INT64_MAX, EntryId, LedgerId, StreamName
from tierlog.model.position import TIME_PREFIX, Edge, Position, parse_position
from tierlog.model.stream import ListedLedger
from tierlog_reader.chunk import Budget, Chunk
from tierlog_reader.served import ServedReads
from tierlog_reader.source import UNLISTED_REASONS, unknown

SKEW_MS: Final = 60_000
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
STEP_ENTRIES: Final = 10_000
STEP_BYTES: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Time:
    """A time of publishing, in milliseconds since 1970."""

    publish_ms: int


def parse_start(text: str) -> Position | Edge | Time:
    """Read a position, an edge, or ``time:`` with ISO 8601 or milliseconds; or refuse."""
    if not text.startswith(TIME_PREFIX):
        return parse_position(text, or_time=True)
    given = text.removeprefix(TIME_PREFIX)
    digits = given.isascii() and given.isdecimal() and len(given) <= len(str(INT64_MAX))
    if digits and int(given) <= INT64_MAX:
        return Time(int(given))
    try:
        when = datetime.fromisoformat(given)
    except ValueError as error:
        raise RefusedError(
            f"{given[:60]!r} is not a time",
            remedy="Give time:2026-01-31T12:00:00Z, or time: and milliseconds since 1970",
        ) from error
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    # Whole numbers: floats are up to a millisecond early. Within one, the next one is later.
    return Time(max(0, -((EPOCH - when) // timedelta(milliseconds=1))))


class TimeSeek:
    """The search for a time, over the reader's reads."""

    def __init__(self, reads: ServedReads) -> None:
        self._reads = reads
        self._source = reads.source

    async def start(self, stream: StreamName, where: Position | Edge | Time) -> Position | Edge:
        """Return a position as it is, and a time's position."""
        if not isinstance(where, Time):
            return where
        return await self.position_at(stream, where.publish_ms)

    async def position_at(self, stream: StreamName, publish_ms: int) -> Position | Edge:
        """Return the first entry that was published at that time or later, or the end."""
        snapshot, end = await self._source.snapshot(stream), None
        older: dict[LedgerId, EntryId] = {}
        refused: set[LedgerId] = set()
        while True:
            for ledger in snapshot.ledgers:
                if ledger.closed and ledger.closed_ms + SKEW_MS < publish_ms:
                    continue
                if _is_searched(ledger, older.get(ledger.ledger_id), end):
                    continue
                try:
                    found = await self._in_ledger(
                        stream, ledger, publish_ms, older, raw=snapshot.stream.raw
                    )
                except RefusedError as error:
                    if error.reason not in UNLISTED_REASONS:
                        raise
                    if ledger.ledger_id in refused:  # and a list that was read since has it
                        raise unknown(error) from error
                    # It may have been trimmed, or closed without an entry, since the list was read.
                    refused.add(ledger.ledger_id)
                    snapshot = await self._source.snapshot(stream, fresh=True)
                    break
                if found is not None:
                    return found
            else:
                if end is not None:
                    return end
                # The list was an older one, and entries came since: all before the end counts.
                snapshot, end = await self._source.end(stream)

    async def _in_ledger(
        self,
        stream: StreamName,
        ledger: ListedLedger,
        publish_ms: int,
        older: dict[LedgerId, EntryId],
        *,
        raw: bool,
    ) -> Position | None:
        """Return the entry in a ledger; None: all of it is older, or it has none.

        ``older``: up to which entry of a ledger all were found to be.
        """
        # Of a raw one nothing but its runs tells times, also of what came since.
        entry_id = None if raw else older.get(ledger.ledger_id)
        if entry_id is None:
            entry_id = await self._source.entry_at_time(stream, ledger, publish_ms)
        if entry_id is None and not raw:
            entry_id = await self._by_headers(stream, ledger, publish_ms)
        where = Position(ledger.ledger_id, entry_id or EntryId(0))
        if raw and ledger.closed:
            older[ledger.ledger_id] = where.entry_id
            return where if where.entry_id <= ledger.last_entry_id else None
        # Whether an open one has the entry is looked at: closed without any, its id means nothing.
        steps = 1 if raw else STEP_ENTRIES
        budget = Budget(entries_max=steps, bytes_max=STEP_BYTES, wait_s=0.0)
        while True:
            older[ledger.ledger_id] = where.entry_id
            if ledger.closed and where.entry_id > ledger.last_entry_id:
                return None
            try:
                answer, room = await self._reads.read(("time", stream), stream, where, budget)
            except RetryableError as error:
                if error.reason is Reason.NOT_YET:
                    return None
                raise
            try:
                if answer.chunk is None or answer.chunk.ledger_id != ledger.ledger_id:
                    return None
                found = where if raw else _first_at(answer.chunk, publish_ms)
            finally:
                room.leave()
            if found is not None:
                return found
            where = answer.chunk.end
            del answer  # whoever waits for room holds nothing

    async def _by_headers(
        self, stream: StreamName, ledger: ListedLedger, publish_ms: int
    ) -> EntryId:
        """Return where to begin in a ledger whose times nobody noted: all before it is older.

        Its entries tell their own, one by one: of those at which a search by halves arrives.
        """
        low, high = 0, ledger.last_entry_id + 1
        if not ledger.closed:
            _, end = await self._source.bounds(stream)
            here = isinstance(end, Position) and end.ledger_id == ledger.ledger_id
            high = end.entry_id if isinstance(end, Position) and here else 0
        one = Budget(entries_max=1, bytes_max=1, wait_s=0.0)
        while low < high:
            middle = Position(ledger.ledger_id, EntryId((low + high) // 2))
            answer, room = await self._reads.read(("time", stream), stream, middle, one)
            try:
                if answer.chunk is None or answer.chunk.ledger_id != ledger.ledger_id:
                    break  # it was trimmed, or is gone: the next look tells
                older = _first_at(answer.chunk, publish_ms) is None
            finally:
                room.leave()
            del answer
            low, high = (middle.entry_id + 1, high) if older else (low, middle.entry_id)
        return EntryId(low)


def _is_searched(ledger: ListedLedger, older: EntryId | None, end: Position | Edge | None) -> bool:
    """Say whether all of a ledger was found to be older; of an open one, all before the end."""
    if older is None:
        return False
    if ledger.closed:
        return older > ledger.last_entry_id
    before = isinstance(end, Position) and Position(ledger.ledger_id, older) >= end
    return before or end is Edge.EARLIEST


def _first_at(chunk: Chunk, publish_ms: int) -> Position | None:
    frames = memoryview(b"".join(chunk.frames))
    begins = walk_frames(frames, chunk.first_entry_id).tolist()
    ends = [*begins[1:], len(frames)]
    for step, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        header = decode_entry(frames[begin + FRAME_HEADER_LEN : end]).header
        if header.publish_time_ms >= publish_ms:
            return Position(chunk.ledger_id, EntryId(chunk.first_entry_id + step))
    return None
