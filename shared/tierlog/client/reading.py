"""Iterates over entries and events of a stream, from any position, over the reader service.

Invariants:
    * Entries come in order and without a gap; the position behind each is where to go on.
    * Nothing is yielded whose frame or, in a stream with append headers, whose checksum is wrong.
    * A partitioned stream is read whole: partition after partition, or with ``follow`` all at once.
    * What is asked for of all partitions at once is bounded, however many are followed.
    * Whoever reads on is not waited for: the next answer is asked for while one is looked at. When
      an iteration ends, in whatever way, nothing is being asked for.
    * Retryable answers are asked again for as long as ``retry_s_max`` passes without progress.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, repeat
from operator import length_hint
from types import MappingProxyType
from typing import Any, Final, NamedTuple
from uuid import UUID

import structlog

from tierlog.client.merging import Answers, as_they_come, one_after_the_other
from tierlog.format.entry import Codec, Decompress, Entry, decode_entry
from tierlog.format.frame import FRAME_HEADER_LEN, check_frames, walk_frames
from tierlog.model.errors import (
    CorruptError,
    Reason,
    RefusedError,
    RetryableError,
    TierlogError,
)
from tierlog.model.ids import EntryId, LedgerId, StreamName
from tierlog.model.partitions import count_told, partition_names
from tierlog.model.position import Edge, Position
from tierlog.ports.reads import FramesAnswer, StreamReads

log = structlog.get_logger()

BACKOFF_S_FIRST: Final = 0.05
BACKOFF_S_MAX: Final = 1.0
FOLLOW_WAIT_S: Final = 10.0
PIECE_ENTRIES: Final = 200
# Of all partitions that are followed, together; and of each, as runs come whole.
FOLLOWED_BYTES_MAX: Final = 64 * 1024 * 1024
FOLLOWED_BYTES_MIN: Final = 64 * 1024


class ReadEntry(NamedTuple):
    """An entry as it was appended. ``raw``: its data has no append header."""

    ledger_id: LedgerId
    entry_id: EntryId
    data: memoryview
    tier: str
    raw: bool
    partition: int | None = None
    """Which one of a partitioned stream that is read whole."""

    @property
    def position(self) -> Position:
        """Its address, made when it is asked for: most who read small entries never do."""
        return Position(self.ledger_id, self.entry_id)


class ReadEvent(NamedTuple):
    """One event, and which of its entry's events it is."""

    position: Position
    batch_index: int
    payload: bytes
    tier: str
    key: bytes | None = None
    event_time_ms: int | None = None
    properties: Mapping[str, str] = MappingProxyType({})
    publish_time_ms: int | None = None
    writer_id: UUID | None = None
    partition: int | None = None


class StreamReader:
    """A range of a stream, to be iterated over once or often.

    ``until`` is where to stop, not included. Without it and without ``follow``, what the stream
    had when the iteration began is read; with one that the stream has not reached, all that it has
    by then, or an error where nobody can say what that is. A position is one of a single stream: a
    partitioned one is read from an edge on, and whoever keeps its place reads the partitions by
    their names.
    """

    def __init__(
        self,
        stream: StreamName,
        reads: StreamReads,
        *,
        start: Position | Edge = Edge.EARLIEST,
        until: Position | None = None,
        limit: int | None = None,
        follow: bool = False,
        bytes_max: int = 4 * 1024 * 1024,
        retry_s_max: float = 30.0,
        decompressors: Mapping[Codec, Decompress] | None = None,
    ) -> None:
        self.stream = stream
        self._resume: Position | Edge = start
        self._given = _Given()
        self._reads = reads
        self._start = start
        self._until = until
        self._told_end: Position | None = None
        self._limit = limit
        self._follow = follow
        self._bytes_max = bytes_max
        self._retry_s_max = retry_s_max
        self._decompressors = decompressors

    def __repr__(self) -> str:
        return f"<StreamReader {self.stream} at {self.resume}>"

    @property
    def resume(self) -> Position | Edge:
        """Where to go on: right behind what was yielded last. Partitions have each their own.

        An entry counts once its last event was yielded: whoever goes on there misses none.
        """
        last = self._given.last
        return self._resume if last is None else _behind(last)

    async def answers(self) -> Answers:
        """Iterate over frames as they come, in large pieces, cut to ``until`` and the limit."""
        try:
            async with contextlib.aclosing(self._own_answers()) as own:
                async for answer in own:
                    yield answer
        except RefusedError as error:
            count = count_told(error)
            if count is None or isinstance(self._start, Position) or self._until is not None:
                raise
        else:
            return
        bytes_max = self._bytes_max
        if self._follow:  # each has an answer here at once
            bytes_max = min(bytes_max, max(FOLLOWED_BYTES_MIN, FOLLOWED_BYTES_MAX // count))
        names = partition_names(self.stream, count)
        readers = [self._of_partition(name, bytes_max) for name in names]
        whole = as_they_come(readers) if self._follow else one_after_the_other(readers)
        left = self._limit
        async with contextlib.aclosing(whole):
            async for answer in whole:
                if left is not None:
                    answer = _first(answer, left)  # noqa: PLW2901 - the rest is not wanted
                    left -= answer.count
                yield answer
                if left == 0:
                    return

    def _of_partition(self, name: StreamName, bytes_max: int) -> Answers:
        reader = StreamReader(
            name,
            self._reads,
            start=self._start,
            limit=self._limit,
            follow=self._follow,
            bytes_max=bytes_max,
            retry_s_max=self._retry_s_max,
        )
        return reader.answers()

    async def _own_answers(self) -> Answers:
        until, self._told_end = self._until, None
        if until is None and not self._follow:
            until = self._told_end = await self._end()
            if until is None:
                return
        left = self._limit
        where = await self._begin(until, left)
        ahead, reads_on = _Ahead(), False
        async with contextlib.aclosing(ahead):
            while (left is None or left > 0) and not _reached(where, until):
                answer = await ahead.taken() or await self._next(where, left)
                if answer.count == 0:
                    if not self._follow and where == answer.resume:
                        until = await self._end_before(until, where)
                        if until is None:
                            return
                    where = self._go_on_at(answer.resume)
                    continue
                cut = _cut(answer, until=until)
                if cut.count == 0:
                    return
                if left is not None:
                    left -= cut.count
                where = self._go_on_at(cut.resume)
                if reads_on and not self._follow and left != 0 and not _reached(where, until):
                    await ahead.ask(self._ask(where, left))
                reads_on = True
                yield cut

    async def _begin(self, until: Position | None, left: int | None) -> Position | Edge:
        """Return where to read first."""
        where = self._start
        if where is Edge.LATEST and self._follow:
            # Decided once: asked again behind a failure, it would be behind what came meanwhile.
            answer = await self._next(where, 1, waits=False)
            first = Position(answer.ledger_id, answer.first_entry_id)
            where = self._go_on_at(first if answer.count else answer.resume)
        if isinstance(where, Position) and until is not None and where > until:
            # Behind the end: the reader says what is wrong with it.
            await self._next(where, left)
        return where

    async def _end_before(self, until: Position | None, where: Position | Edge) -> Position | None:
        """Return up to where there is more than a read from ``where`` found; None: nowhere.

        Whoever said ``until`` did not ask for the end, and who was read from may know of less.
        """
        end = await self._end() if self._told_end is None else None
        if end is None or _reached(where, end):
            return None
        self._told_end = end if until is None else min(end, until)
        return self._told_end

    async def _end(self) -> Position | None:
        """Return where the stream ends now; None: it has no entry."""
        _, end = await self._retrying_bounds()
        if isinstance(end, Position):
            return end
        if isinstance(self._start, Position):
            # Nothing is there: the reader says what is wrong with the position.
            await self._next(self._start, self._limit)
        return None

    def _go_on_at(self, where: Position | Edge) -> Position | Edge:
        self._resume, self._given = where, _Given()
        return where

    async def entries(self) -> AsyncGenerator[ReadEntry, None]:
        """Iterate over entries."""
        async with contextlib.aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                for entry in piece:
                    yield entry

    async def events(self) -> AsyncGenerator[ReadEvent, None]:
        """Iterate over events; in a raw stream each entry is one."""
        async with contextlib.aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                given = self._given
                for entry in piece:
                    given.open = 1
                    events = self.events_of(entry)
                    for event in events[:-1]:
                        yield event
                    given.open = 0
                    for event in events[-1:]:
                        yield event

    async def _pieces(self) -> AsyncGenerator[Iterator[ReadEntry], None]:
        """Iterate over entries some at a time; whoever takes one of them is behind it."""
        async with contextlib.aclosing(self.answers()) as answers:
            async for answer in answers:
                if answer.partition is None:  # nothing of it was yielded yet, nor may ever be
                    self._go_on_at(Position(answer.ledger_id, answer.first_entry_id))
                for piece in _pieces_of(answer):
                    rest = iter(piece)
                    if answer.partition is None:
                        self._given = _Given(piece, rest)
                    del piece  # it is gone before the next one is made
                    try:
                        yield rest
                    finally:
                        if self._given.rest is rest:  # nobody has begun to read anew since
                            self._go_on_at(self.resume)

    def events_of(self, entry: ReadEntry) -> list[ReadEvent]:
        """Return an entry's events, their checksum verified."""
        return events_of(entry, self._decompressors)

    async def _next(
        self, where: Position | Edge, left: int | None, *, waits: bool = True
    ) -> FramesAnswer:
        loop = asyncio.get_running_loop()
        deadline_s, backoff_s = loop.time() + self._retry_s_max, BACKOFF_S_FIRST
        while True:
            try:
                return await self._ask(where, left, waits=waits)
            except (RetryableError, CorruptError) as error:
                waits_for_producers = error.reason is Reason.NOT_YET and not self._follow
                if waits_for_producers or loop.time() + backoff_s >= deadline_s:
                    raise
                log.info("read.again", stream=self.stream, position=str(where), cause=str(error))
            await asyncio.sleep(backoff_s)
            backoff_s = min(BACKOFF_S_MAX, 2 * backoff_s)

    async def _ask(
        self, where: Position | Edge, left: int | None, *, waits: bool = True
    ) -> FramesAnswer:
        answer = await self._reads.read(
            self.stream,
            where,
            bytes_max=self._bytes_max,
            entries_max=min(left, 1_000_000) if left is not None else None,
            wait_s=FOLLOW_WAIT_S if self._follow and waits else 0.0,
        )
        end = self._told_end
        if end is not None and answer.count == 0 and not _reached(answer.resume, end):
            # Whoever knew so went since: who is left knows less, and not that nothing is there.
            raise RetryableError(
                f"stream {self.stream} has entries from {answer.resume} to {end}, and nobody "
                "confirms them now",
                reason=Reason.UNKNOWN,
                remedy="Check that the storage nodes of its last ledger are up",
            )
        return answer

    async def _retrying_bounds(self) -> tuple[Position | Edge, Position | Edge]:
        loop = asyncio.get_running_loop()
        deadline_s, backoff_s = loop.time() + self._retry_s_max, BACKOFF_S_FIRST
        while True:
            try:
                return await self._reads.bounds(self.stream)
            except RetryableError:
                if loop.time() + backoff_s >= deadline_s:
                    raise
            await asyncio.sleep(backoff_s)
            backoff_s = min(BACKOFF_S_MAX, 2 * backoff_s)


@dataclass(slots=True)
class _Given:
    """Entries that are being yielded: ``rest`` iterates over them, so that none has to be noted."""

    piece: Sequence[ReadEntry] = ()
    rest: Iterator[ReadEntry] = field(default_factory=lambda: iter(()))
    open: int = 0
    """1 as long as there are events to come of the entry that was yielded last."""

    @property
    def last(self) -> Position | None:
        """The last one that was yielded whole; None: not one."""
        count = len(self.piece) - length_hint(self.rest) - self.open
        return self.piece[count - 1].position if count > 0 else None


class _Ahead:
    """The answer that is wanted next, asked for while the one before it is looked at."""

    def __init__(self) -> None:
        self._task: asyncio.Task[FramesAnswer] | None = None

    async def ask(self, read: Coroutine[Any, Any, FramesAnswer]) -> None:
        """Begin to read."""
        self._task = asyncio.get_running_loop().create_task(read)
        await asyncio.sleep(0)  # it is sent first: who looks at entries may not wait for long

    async def taken(self) -> FramesAnswer | None:
        """Return it; None: nothing was asked for, or that failed, and is to be asked for anew."""
        task, self._task = self._task, None
        try:
            return await task if task is not None else None
        except TierlogError as error:
            log.debug("read.ahead_failed", cause=str(error))
            return None

    async def aclose(self) -> None:
        """Give up what nobody wants any more."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(Exception, asyncio.CancelledError):
                await task


def entries_of(answer: FramesAnswer) -> list[ReadEntry]:
    """Return the entries of an answer, or raise ``CorruptError``."""
    return list(chain.from_iterable(_pieces_of(answer)))


def _pieces_of(answer: FramesAnswer) -> Iterator[list[ReadEntry]]:
    """Give the entries some at a time, or raise ``CorruptError`` before the first one.

    All at once they would be more memory than the processor has near it.
    """
    starts = walk_frames(answer.frames, answer.first_entry_id)
    if len(starts) != answer.count:
        raise CorruptError(
            f"{len(starts)} frames where {answer.count} were announced", remedy="Read again"
        )
    check_frames(answer.frames, starts, answer.first_entry_id)
    frames, begins = answer.frames, (starts + FRAME_HEADER_LEN).tolist()
    ends = [*starts[1:].tolist(), len(frames)]
    first, ledger_id = answer.first_entry_id, repeat(answer.ledger_id)
    same = repeat(answer.tier), repeat(answer.raw), repeat(answer.partition)
    for at in range(0, len(begins), PIECE_ENTRIES):
        piece = slice(at, at + PIECE_ENTRIES)
        datas = [frames[begin:end] for begin, end in zip(begins[piece], ends[piece], strict=True)]
        # Without a call of Python for each: small entries come by the million.
        rows = zip(
            ledger_id, range(first + at, first + at + len(datas)), datas, *same, strict=False
        )
        yield list(map(partial(tuple.__new__, ReadEntry), rows))


def events_of(
    entry: ReadEntry, decompressors: Mapping[Codec, Decompress] | None = None
) -> list[ReadEvent]:
    """Return an entry's events, their checksum verified."""
    if entry.raw:
        return [
            ReadEvent(
                position=entry.position,
                batch_index=0,
                payload=bytes(entry.data),
                tier=entry.tier,
                properties={},
                partition=entry.partition,
            )
        ]
    try:
        decoded: Entry = decode_entry(entry.data)
        events = decoded.structured_events(decompressors)
    except (CorruptError, RefusedError) as error:
        error.details.update(position=str(entry.position), tier=entry.tier)
        raise
    header = decoded.header
    return [
        ReadEvent(
            position=entry.position,
            batch_index=index,
            payload=event.payload,
            tier=entry.tier,
            key=event.key,
            event_time_ms=event.event_time_ms,
            properties=event.properties,
            publish_time_ms=header.publish_time_ms,
            writer_id=header.writer_id,
            partition=entry.partition,
        )
        for index, event in enumerate(events)
    ]


def _behind(last: Position) -> Position:
    return Position(last.ledger_id, EntryId(last.entry_id + 1))


def _reached(where: Position | Edge, until: Position | None) -> bool:
    return until is not None and isinstance(where, Position) and where >= until


def _cut(answer: FramesAnswer, *, until: Position | None) -> FramesAnswer:
    """Return the answer without what lies at or behind ``until``."""
    first = Position(answer.ledger_id, answer.first_entry_id)
    last = Position(answer.ledger_id, EntryId(answer.first_entry_id + answer.count - 1))
    if until is None or last < until:
        return answer
    if first >= until:
        return FramesAnswer(resume=answer.resume)
    return _first(answer, until.entry_id - answer.first_entry_id)


def _first(answer: FramesAnswer, count: int) -> FramesAnswer:
    """Return the first ``count`` entries of an answer."""
    if count >= answer.count:
        return answer
    starts = walk_frames(answer.frames, answer.first_entry_id)
    return replace(
        answer,
        resume=Position(answer.ledger_id, EntryId(answer.first_entry_id + count)),
        count=count,
        frames=answer.frames[: int(starts[count])],
    )
