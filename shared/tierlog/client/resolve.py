"""What became of appends whose answer was lost: reads back until it is certain.

The rule: ambiguous is neither success nor failure. After a lost answer the writer's entries are
looked for in every ledger from its last acknowledged position on. That is conclusive only when
nothing of them can land any more, so the open ledger is sealed first, and where the owner is the
one that was asked, its deadline for the appends must have passed.

Invariant: when ``settle`` returns, a batch without ``ranges`` is in no ledger and will be in none.
"""

import asyncio
from collections.abc import Sequence
from typing import Final
from uuid import UUID

import structlog

from tierlog.client.batches import Batch
from tierlog.format.entry import decode_entry
from tierlog.format.frame import FRAME_HEADER_LEN, walk_frames
from tierlog.model.errors import CorruptError, RetryableError
from tierlog.model.ids import EntryId, StreamName
from tierlog.model.position import AppendedRange, Edge, Position
from tierlog.ports.reads import FramesAnswer, StreamReads
from tierlog.ports.streams import StreamControl

log = structlog.get_logger()

READ_BYTES: Final = 4 * 1024 * 1024


class ReadBack:
    """Finds the entries of one writer in one stream."""

    def __init__(
        self,
        stream: StreamName,
        writer_id: UUID,
        *,
        control: StreamControl,
        reads: StreamReads,
        append_s_max: float,
    ) -> None:
        self._stream = stream
        self._writer_id = writer_id
        self._control = control
        self._reads = reads
        self._append_s_max = append_s_max
        self.owner_epoch = -1
        """Of the owner that the appends were last sent to."""

    async def settle(self, start: Position | Edge, lost: Sequence[Batch], lost_s: float) -> None:
        """Give those of ``lost`` that landed behind ``start`` their place."""
        await self._until_conclusive(lost_s)
        wanted = {one.last_number: one for one in lost}
        found = 0
        where = start
        while True:
            answer = await self._reads.read(self._stream, where, bytes_max=READ_BYTES)
            if answer.count == 0:
                break
            for number, entry_id in _numbers_of(answer, self._writer_id):
                batch = wanted.get(number)
                if batch is not None and batch.ranges is None:
                    batch.ranges = (
                        AppendedRange(
                            ledger_id=answer.ledger_id,
                            first_entry_id=entry_id,
                            last_entry_id=entry_id,
                        ),
                    )
                    found += 1
            where = answer.resume
        log.info("appends.resolved", stream=self._stream, lost=len(lost), landed=found)

    async def _until_conclusive(self, lost_s: float) -> None:
        """Seal the open ledger, after the owner let go of what it was sent."""
        await self._control.seal(self._stream)
        owner = await self._control.find_owner(self._stream)
        if owner.owner_epoch < self.owner_epoch:
            raise RetryableError(
                f"{owner.node_id} is asked for {self._stream}, and has not heard of its own owner",
                remedy="Find the owner again in a moment",
            )
        if owner.owner_epoch == self.owner_epoch:
            # The same owner may still hold appends that it took before the connection went.
            left_s = lost_s + self._append_s_max - asyncio.get_running_loop().time()
            await asyncio.sleep(max(0.0, left_s))
            await self._control.seal(self._stream)


def _numbers_of(answer: FramesAnswer, writer_id: UUID) -> list[tuple[int, EntryId]]:
    """Return (event number, entry id) of that writer's entries."""
    starts = walk_frames(answer.frames, answer.first_entry_id).tolist()
    if len(starts) != answer.count:
        raise CorruptError(
            f"{len(starts)} frames where {answer.count} were announced", remedy="Read again"
        )
    found = []
    ends = [*starts[1:], len(answer.frames)]
    for step, (begin, end) in enumerate(zip(starts, ends, strict=True)):
        header = decode_entry(answer.frames[begin + FRAME_HEADER_LEN : end]).header
        if header.writer_id == writer_id:
            found.append((header.event_number, EntryId(answer.first_entry_id + step)))
    return found
