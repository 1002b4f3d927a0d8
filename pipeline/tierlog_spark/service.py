"""Streams through the reader service: what it has, and a range of it.

Owns asking for the bounds of a read, or for a stream's ledgers, and reading between them. Does not
own the cutting into parts (``driving``), nor the client's own rules of reading
(``tierlog.client.reading``).

Invariant: what is read ends at a position that was fixed when the read was planned.
"""

import asyncio
import contextlib
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Sequence,
)
from typing import Any, Final, NamedTuple, TypeVar
from uuid import UUID

from tierlog.format.frame import Offsets, check_frames, walk_frames
from tierlog.model.errors import CorruptError, Reason, RefusedError, RetryableError
from tierlog.model.ids import EntryId, LedgerId, StreamName
from tierlog.model.partitions import count_told, partition_names
from tierlog.model.position import Edge, Position
from tierlog.ports.reads import FramesAnswer, ReaderService, ServedLedger, ServedLedgers
from tierlog.runtime.security import SecuritySettings
from tierlog.runtime.settings import ClientSettings
from tierlog.wiring.reads import open_reads
from tierlog.wiring.security import calling_of
from tierlog_spark.batches import record_batches
from tierlog_spark.offsets import ReadableLedger
from tierlog_spark.planning import Range, ServicePart
from tierlog_spark.reading import wanted_events

RETRY_PAUSE_S: Final = 0.5
ENTRY_BYTES: Final = 256 * 1024
_T = TypeVar("_T")


class ServedStream(NamedTuple):
    """A stream as the readers have it; None, None: nothing is in it."""

    name: StreamName
    first: Position | None
    end: Position | None


class ListedStream(NamedTuple):
    """The ledgers of a stream that can be read; ``trimmed_end``: behind what was trimmed.

    ``incarnation`` None: nobody asks which stream of its name it is.
    """

    name: StreamName
    ledgers: Sequence[ReadableLedger]
    trimmed_end: Position | None = None
    incarnation: UUID | None = None


@contextlib.asynccontextmanager
async def reads_of(
    client: ClientSettings, security: SecuritySettings
) -> AsyncIterator[ReaderService]:
    """Give the reader service that the options name."""
    if not client.reader_http_address:
        raise RefusedError(
            "option readerAddress: no address of a reader is known",
            remedy="Give host:port of a reader's HTTP, or set TIERLOG_CLIENT__READER_HTTP_ADDRESS",
        )
    async with open_reads(client, calling=calling_of(security)) as reads:
        yield reads


async def served(reads: ReaderService, names: Iterable[StreamName]) -> list[ServedStream]:
    """Return what there is of streams now, or of each of their partitions."""
    return await _each(names, lambda one: _served(reads, one))


async def listed(
    reads: ReaderService, names: Iterable[StreamName], *, retry_s: float
) -> list[ListedStream]:
    """Return the ledgers of streams now, or of each of their partitions."""
    return await _each(names, lambda one: _patiently(lambda: _listed(reads, one), retry_s))


async def _each(
    names: Iterable[StreamName], ask: Callable[[StreamName], Awaitable[_T]]
) -> list[_T]:
    """Ask of each once: a partition may be named beside the stream that it is of."""
    found: dict[StreamName, _T] = {}

    async def add(name: StreamName) -> None:
        if name not in found:
            found[name] = await ask(name)

    for name in names:
        try:
            await add(name)
        except RefusedError as error:
            count = count_told(error)
            if count is None:
                raise
            for one in partition_names(name, count):
                await add(one)
    return list(found.values())


async def _patiently(ask: Callable[[], Awaitable[_T]], retry_s: float) -> _T:
    """Ask again while the reader can't be asked, or does not know yet where a stream ends."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + retry_s
    while True:
        try:
            return await ask()
        except RetryableError:
            if loop.time() + RETRY_PAUSE_S > deadline_s:
                raise
        await asyncio.sleep(RETRY_PAUSE_S)


async def _listed(reads: ReaderService, name: StreamName) -> ListedStream:
    found, first = list[ServedLedger](), LedgerId(0)
    while True:
        page = await reads.ledgers(name, first)
        found += page.ledgers
        if page.resume is None:
            ledgers = readable_of_served(found)
            return ListedStream(name, ledgers, page.trimmed_end, page.incarnation)
        first = page.resume


def readable_of_served(ledgers: Sequence[ServedLedger]) -> list[ReadableLedger]:
    """Return ledgers as offsets take them, all with a length.

    Of an open one that has none, entries are as long as those before; where there are none, as a
    producer's batches: a bound on bytes is one, whatever is known.
    """
    found: list[ReadableLedger] = []
    for one in ledgers:
        length = one.length
        if not one.closed and not length:
            length = one.entry_count * ENTRY_BYTES
            if found:
                length = found[-1].length * one.entry_count // found[-1].entry_count
        found.append(
            ReadableLedger(
                ledger_id=one.ledger_id,
                entry_count=one.entry_count,
                length=length,
                closed=one.closed,
            )
        )
    return found


async def _served(reads: ReaderService, name: StreamName) -> ServedStream:
    first, end = await reads.bounds(name)
    if not isinstance(first, Position) or not isinstance(end, Position):
        return ServedStream(name, None, None)
    return ServedStream(name, first, end)


async def incarnation_of(reads: ReaderService, stream: ServedStream) -> UUID:
    """Return which stream of its name the readers have."""
    assert stream.end is not None
    return (await reads.ledgers(stream.name, stream.end.ledger_id)).incarnation


async def placed(reads: ReaderService, stream: ServedStream, within: Range) -> Range:
    """Return a range in positions that the readers know; see ``place_of``."""
    if stream.end is None:
        return within
    found = list[Position | None]()
    for where in (within.start, within.end):
        if where is None or where.entry_id:
            found.append(where)
            continue
        page = await reads.ledgers(stream.name, LedgerId(max(0, where.ledger_id - 1)))
        found.append(place_of(where, page, stream.end))
    return Range(start=found[0], end=found[1])


def place_of(where: Position, page: ServedLedgers, end: Position) -> Position:
    """Return what a ledger's end means that is written as offsets have it, the next id's first.

    ``page``: the ledgers from the one before that id on; ``end``: the stream's. What it does not
    tell of stays as it is, to be refused where it makes no sense.
    """
    there = {one.ledger_id: one for one in page.ledgers}
    before = there.get(LedgerId(where.ledger_id - 1))
    if where.ledger_id in there:
        return where
    if before is not None and before.closed:
        return Position(before.ledger_id, EntryId(before.entry_count))
    trimmed_through = -1 if page.trimmed_end is None else page.trimmed_end.ledger_id
    if where.ledger_id == trimmed_through + 1:
        return min((Position(one, EntryId(0)) for one in there), default=end)
    return where


def checked_range(stream: ServedStream, within: Range) -> Range | None:
    """Return the positions to read between; None: there is nothing. Refuse what is not there."""
    if stream.first is None or stream.end is None:
        if within.start is not None or within.end is not None:
            raise RefusedError(
                f"stream {stream.name} is empty, so it has no such position",
                reason=Reason.NO_SUCH_ENTRY,
                remedy="Read it without start and end",
            )
        return None
    for name, where in (("start", within.start), ("end", within.end)):
        if where is not None and where.ledger_id < stream.first.ledger_id:
            raise RefusedError(
                f"option {name}: stream {stream.name} has no position {where}: it was trimmed, "
                f"and begins at {stream.first}",
                reason=Reason.TRIMMED,
                remedy="Read from earliest",
            )
        if where is not None and where > stream.end:
            raise RefusedError(
                f"option {name}: stream {stream.name} has no position {where}: "
                f"it ends at {stream.end}",
                reason=Reason.NO_SUCH_ENTRY,
                remedy="Read up to latest",
            )
    start, end = within.start or stream.first, within.end or stream.end
    return Range(start=start, end=end) if start < end else None


async def service_batches(
    part: ServicePart,
    client: ClientSettings,
    security: SecuritySettings,
    schema: Any,  # noqa: ANN401 - pyarrow ships no types
    *,
    fetch_bytes: int,
) -> AsyncGenerator[Any, None]:
    """Read a part of a stream through the reader service."""
    from tierlog.client.reading import StreamReader  # noqa: PLC0415 - see ``source``

    async with reads_of(client, security) as reads:
        reader = StreamReader(
            part.stream,
            reads,
            start=part.start,
            until=part.until,
            bytes_max=fetch_bytes,
            retry_s_max=client.timeout_s,
        )
        async with contextlib.aclosing(reader.answers()) as answers:
            async for answer in answers:
                for batch in _batches(part, answer, schema):
                    yield batch
        if not await _is_whole(reads, part, reader.resume, client.timeout_s):
            raise CorruptError(
                f"stream {part.stream} ended at {reader.resume}, before {part.until}",
                remedy="Plan the read again: the stream was trimmed or deleted meanwhile",
            )


async def _is_whole(
    reads: ReaderService, part: ServicePart, where: Position | Edge, retry_s: float
) -> bool:
    """Tell whether nothing lies between; a ledger's end is where the next one begins."""
    if not isinstance(where, Position):
        return False
    if where >= part.until or part.until.entry_id:
        return where >= part.until
    # Whoever answered last may not know yet how the ledger ended; and for a moment nobody may know
    # where the stream ends, of which no more is wanted.
    first = where.ledger_id
    page = await _patiently(lambda: reads.ledgers(part.stream, first), retry_s)
    if page.trimmed_end is not None and where < page.trimmed_end:
        return False
    left = [one for one in page.ledgers if one.ledger_id < part.until.ledger_id]
    return not any(
        one.entry_count > (where.entry_id if one.ledger_id == where.ledger_id else 0)
        or not one.closed
        for one in left
    )


def _batches(
    part: ServicePart,
    answer: FramesAnswer,
    schema: Any,  # noqa: ANN401
) -> Iterator[Any]:
    bounds = part.bounds
    if answer.raw and part.times_asked:
        raise RefusedError(
            f"option startTime: stream {part.stream} is raw, and its entries have no time",
            remedy="Read it by positions: start and end",
        )
    last = answer.first_entry_id + answer.count - 1
    entries = bounds.entries_of(answer.ledger_id, last)
    if entries is None or (answer.raw and bounds.has_times):
        return
    first, last = max(entries[0], answer.first_entry_id), entries[1]
    if first > last:
        return
    frames, offsets = _cut(answer, first, last)
    for events in wanted_events(
        frames, offsets, first, raw=answer.raw, verify=True, times=(bounds.ms_min, bounds.ms_max)
    ):
        yield from record_batches(events, schema, stream=part.stream, ledger_id=answer.ledger_id)


def _cut(answer: FramesAnswer, first: int, last: int) -> tuple[memoryview, Offsets]:
    """Return the frames of entries ``first`` to ``last``, and where each begins in them."""
    starts = walk_frames(answer.frames, answer.first_entry_id)
    if len(starts) != answer.count:
        raise CorruptError(
            f"{len(starts)} frames where {answer.count} were announced", remedy="Read again"
        )
    check_frames(answer.frames, starts, answer.first_entry_id)
    begin, stop = first - answer.first_entry_id, last - answer.first_entry_id + 1
    at = int(starts[begin])
    end = int(starts[stop]) if stop < len(starts) else len(answer.frames)
    return answer.frames[at:end], starts[begin:stop] - at
