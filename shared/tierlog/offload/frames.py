"""Any read handle as one that gives frames, for the reader: whichever driver it came from.

Invariant: frames are of consecutive entries from the one asked for, at least one, as the handle
gave them; a handle that gives none is ``CorruptError``, never an empty answer.
"""

from typing import Protocol

import numpy as np

from tierlog.format.run import Run
from tierlog.ledger.reader import ReadHandle, closing_runs
from tierlog.model.errors import CorruptError, Reason, RefusedError, TierlogError
from tierlog.model.ids import EntryId, LedgerId
from tierlog.model.ledger import LedgerMetadata
from tierlog.offload.tier2_reader import FramesRead


class FrameHandle(Protocol):
    """What the reader service wants of a ledger in tier 2."""

    @property
    def ledger_id(self) -> LedgerId: ...
    @property
    def ledger_metadata(self) -> LedgerMetadata: ...
    async def read_frames(
        self,
        first_entry_id: EntryId,
        bytes_max: int,
        *,
        entries_max: int | None = None,
        alone_max: int | None = None,
    ) -> FramesRead: ...
    async def prefetch(
        self, first_entry_id: EntryId, bytes_max: int, *, growth: int = 1
    ) -> int: ...
    async def close(self) -> None: ...


class FramesOfRuns:
    """A handle of a driver that knows runs alone."""

    def __init__(self, handle: ReadHandle) -> None:
        self._handle = handle

    def __repr__(self) -> str:
        return f"FramesOfRuns({self._handle!r})"

    @property
    def ledger_id(self) -> LedgerId:
        return self._handle.ledger_id

    @property
    def ledger_metadata(self) -> LedgerMetadata:
        return self._handle.ledger_metadata

    async def prefetch(self, first_entry_id: EntryId, bytes_max: int, *, growth: int = 1) -> int:
        """Fetch nothing: what a driver keeps is its own, and how long its entries are."""
        return bytes_max

    async def close(self) -> None:
        """Give back what the handle holds."""
        await self._handle.close()

    async def read_frames(
        self,
        first_entry_id: EntryId,
        bytes_max: int,
        *,
        entries_max: int | None = None,
        alone_max: int | None = None,
    ) -> FramesRead:
        """Return frames from an entry on: at least one, else about ``bytes_max``.

        An entry longer than ``alone_max`` comes, too: how long it is nobody knows before.
        """
        last = self.ledger_metadata.last_entry_id
        if not 0 <= first_entry_id <= last:
            raise RefusedError(
                f"there is no entry {first_entry_id}, the last one is {last}",
                reason=Reason.NO_SUCH_ENTRY,
                remedy="Read a position that exists",
            )
        if entries_max is not None:
            last = min(last, EntryId(first_entry_id + max(1, entries_max) - 1))
        frames, offsets, position = bytearray(), [], first_entry_id
        read = self._handle.read_runs(first_entry_id, last, bytes_max=bytes_max)
        async with closing_runs(read):
            try:
                async for runs in read:
                    for run in runs:
                        begin = self._begin_of(run, position)
                        offsets.append(run.offsets[position - run.first_entry_id :] - begin)
                        offsets[-1] = offsets[-1] + np.uint32(len(frames))
                        frames += run.frames[int(begin) :]
                        position = EntryId(run.last_entry_id + 1)
                    if len(frames) >= bytes_max:
                        break
            except TierlogError:
                # What came is good. The next read begins at the bad place, and is told.
                if not offsets:
                    raise
        if not offsets:
            raise self._lacks(first_entry_id)
        whole = np.concatenate(offsets)
        return FramesRead(memoryview(frames), first_entry_id, EntryId(position - 1), whole, 0)

    def _begin_of(self, run: Run, position: EntryId) -> np.uint32:
        if not run.first_entry_id <= position <= run.last_entry_id:
            raise self._lacks(position)
        return np.uint32(run.offsets[position - run.first_entry_id])

    def _lacks(self, entry_id: EntryId) -> CorruptError:
        return CorruptError(
            f"the copy of ledger {self.ledger_id} lacks entry {entry_id}",
            remedy="Look at the driver that wrote it",
            details={"ledger_id": str(self.ledger_id)},
        )
