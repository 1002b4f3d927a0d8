"""The reader's port over the streams in memory.

Invariants:
    * An answer is frames of one ledger from the asked entry on; an empty one says "not yet".
    * At least one entry is returned where there is one, however small ``bytes_max`` is.
"""

import asyncio

from tierlog.adapters.memory.streams import MemoryLedger, MemoryStream, MemoryStreams
from tierlog.format.frame import FRAME_HEADER_LEN, pack_entries
from tierlog.model.errors import Reason, RefusedError, RetryableError, TierlogError
from tierlog.model.ids import EntryId, StreamName
from tierlog.model.position import Edge, Position
from tierlog.ports.reads import FramesAnswer


class MemoryReads:
    """``StreamReads`` over streams in memory."""

    def __init__(self, streams: MemoryStreams) -> None:
        self._streams = streams

    async def read(
        self,
        stream: StreamName,
        where: Position | Edge,
        *,
        bytes_max: int,
        entries_max: int | None = None,
        wait_s: float = 0.0,
    ) -> FramesAnswer:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + wait_s
        while True:
            found = self._streams.written(stream)
            if where is Edge.LATEST:
                # Decided once: what comes while the read waits is after it.
                where = _end_of(found)
            place = _locate(found, where)
            if place is not None:
                ledger, entry_id = place
                return _frames(
                    found, ledger, entry_id, bytes_max=bytes_max, entries_max=entries_max
                )
            if loop.time() >= deadline_s:
                return FramesAnswer(resume=where)
            try:
                async with asyncio.timeout_at(deadline_s):
                    await self._streams.changed.wait()
            except TimeoutError:
                continue

    async def bounds(self, stream: StreamName) -> tuple[Position | Edge, Position | Edge]:
        found = self._streams.written(stream)
        if not found.ledgers:
            return Edge.EARLIEST, Edge.EARLIEST
        return Position(found.ledgers[0].ledger_id, EntryId(0)), _end_of(found)

    async def close(self) -> None:
        pass


def _end_of(stream: MemoryStream) -> Position | Edge:
    return stream.ledgers[-1].end if stream.ledgers else Edge.EARLIEST


def _locate(stream: MemoryStream, where: Position | Edge) -> tuple[MemoryLedger, int] | None:
    """Return the entry that ``where`` means, None at the tail, or raise why it means nothing."""
    ledgers = stream.ledgers
    if not isinstance(where, Position):
        return (ledgers[0], 0) if ledgers else None
    index = next((i for i, one in enumerate(ledgers) if one.ledger_id == where.ledger_id), None)
    if index is None:
        raise _not_listed(stream, where)
    ledger = ledgers[index]
    if where.entry_id < len(ledger.entries):
        return ledger, where.entry_id
    if where > ledger.end:
        raise _behind(stream, where, ledger)
    return (ledgers[index + 1], 0) if index + 1 < len(ledgers) else None


def _frames(
    stream: MemoryStream,
    ledger: MemoryLedger,
    first: int,
    *,
    bytes_max: int,
    entries_max: int | None,
) -> FramesAnswer:
    taken: list[bytes] = []
    length = 0
    for entry in ledger.entries[first:]:
        length += FRAME_HEADER_LEN + len(entry)
        if taken and (length > bytes_max or len(taken) == entries_max):
            break
        taken.append(entry)
    frames, _ = pack_entries(taken, first)
    return FramesAnswer(
        resume=Position(ledger.ledger_id, EntryId(first + len(taken))),
        ledger_id=ledger.ledger_id,
        first_entry_id=EntryId(first),
        count=len(taken),
        frames=memoryview(bytes(frames)),
        tier="tier2" if ledger.offloaded else "tier1",
        raw=stream.raw,
    )


def _not_listed(stream: MemoryStream, where: Position) -> RefusedError:
    trimmed = bool(stream.ledgers) and where.ledger_id < stream.ledgers[0].ledger_id
    return RefusedError(
        f"stream {stream.name} has no ledger {where.ledger_id}",
        reason=Reason.TRIMMED if trimmed else Reason.LEDGER_NOT_FOUND,
        remedy="Go on from earliest",
    )


def _behind(stream: MemoryStream, where: Position, ledger: MemoryLedger) -> TierlogError:
    message = f"stream {stream.name} has no entry {where}: its ledger ends before {ledger.end}"
    remedy = f"Go on from {ledger.end}"
    if ledger.closed:
        return RefusedError(message, reason=Reason.NO_SUCH_ENTRY, remedy=remedy)
    return RetryableError(message, reason=Reason.NOT_YET, remedy=remedy)
