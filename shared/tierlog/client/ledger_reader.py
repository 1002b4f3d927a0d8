"""Reading one bare ledger, closed or still being written.

Owns where a read ends, and following a ledger that grows. Does not own which replica is asked
(``tierlog.ledger.reader``).

Invariants:
    * Entries come in order and without a gap. Of a ledger that is not closed none comes that is
      not acknowledged.
    * A read that is told where to end gives all of that, or raises; so does one that is not, of
      what it was told to be acknowledged.

Copies move while a ledger is read, of a closed one too: what no node gives is looked for by the
metadata as it is then, before it is an error.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Final, NamedTuple

from tierlog.format.run import Run
from tierlog.ledger.reader import Tier1ReadHandle, closing_runs
from tierlog.model.errors import Reason, RefusedError, RetryableError
from tierlog.model.ids import NO_ENTRY, EntryId, LedgerId
from tierlog.model.ledger import LedgerMetadata, LedgerState
from tierlog.ports.storage_node import StorageNodeClient
from tierlog.wiring.ledgers import LedgerParts

FOLLOW_WAIT_S: Final = 1.0
"""So long a node may wait for the next entry, before the metadata is looked at again."""


class LedgerEntry(NamedTuple):
    """An entry of a ledger as it was appended."""

    entry_id: EntryId
    data: bytes


class LedgerReader:
    """Reads one ledger. It holds nothing: there is nothing to close."""

    def __init__(self, ledger_id: LedgerId, metadata: LedgerMetadata, parts: LedgerParts) -> None:
        self.ledger_id = ledger_id
        self.metadata = metadata
        """As of the last look; ``refresh`` looks again."""
        self._parts = parts
        self._handle = self._made()

    def __repr__(self) -> str:
        return f"<LedgerReader {self.ledger_id} {self.metadata.state.name}>"

    @property
    def closed(self) -> bool:
        """Whether the ledger was closed at the last look; its entries then never change again."""
        return self.metadata.state is LedgerState.CLOSED

    async def refresh(self) -> LedgerMetadata:
        """Look at the metadata again, unless the ledger is closed."""
        if not self.closed:
            await self._look_again()
        return self.metadata

    async def _look_again(self) -> None:
        self.metadata = await self._parts.catalog.bare.get(self.ledger_id)
        self._handle = self._made()

    async def _has_moved(self) -> bool:
        """Tell whether the ledger lies on other nodes than at the last look."""
        before = self.metadata.segments
        await self._look_again()
        return self.metadata.segments != before

    async def last_add_confirmed(self) -> EntryId:
        """Return the last entry that may be read: of a closed ledger its last one; -1: none."""
        await self.refresh()
        return await self._handle.last_add_confirmed()

    async def entries(
        self, first: int = 0, last: int | None = None, *, follow: bool = False
    ) -> AsyncIterator[LedgerEntry]:
        """Iterate over entries, both ends included; no end: as far as may be read now.

        With ``follow`` it waits for more until the ledger is closed. An end that is not there
        raises NO_SUCH_ENTRY, or NOT_YET while the ledger may still grow.
        """
        position = EntryId(first)
        while last is None or position <= last:
            end = await self._readable(position, last, follow=follow)
            if end is None:
                return
            if last is None and not follow:
                last = end  # whoever knew so may go, and those who are left know of less
            try:
                async with aclosing(self._read(position, end)) as read:
                    async for entry in read:
                        yield entry
                        position = EntryId(entry.entry_id + 1)
            except RetryableError as error:
                if error.reason is Reason.UNKNOWN and await self._has_moved():
                    continue
                # NOT_YET: the nodes that were asked don't know yet what is acknowledged.
                if error.reason is not Reason.NOT_YET or not follow:
                    raise

    async def _readable(
        self, position: EntryId, last: int | None, *, follow: bool
    ) -> EntryId | None:
        """Return up to where to read now; None: there is nothing more."""
        end = await self.last_add_confirmed()
        if position <= end:
            return end if last is None else min(end, EntryId(last))
        if follow and not self.closed:
            return position
        if last is None:
            return None
        raise self._not_there(position)

    async def _read(self, first: EntryId, last: EntryId) -> AsyncGenerator[LedgerEntry, None]:
        # What is acknowledged is given at once; behind it this waits.
        read = self._handle.read_runs(first, last, wait_s=FOLLOW_WAIT_S)
        async with closing_runs(read):
            async for runs in read:
                for entry in _entries_of(runs, first, last):
                    yield entry

    def _made(self) -> Tier1ReadHandle[StorageNodeClient]:
        parts = self._parts
        return Tier1ReadHandle(
            self.ledger_id,
            self.metadata,
            parts.nodes,
            keys=parts.keys,
            on_damage=parts.on_damage,
        )

    def _not_there(self, entry_id: EntryId) -> RefusedError | RetryableError:
        details = {"ledger_id": str(self.ledger_id), "entry_id": str(entry_id)}
        if self.closed:
            end = self.metadata.last_entry_id
            has = f"its last entry is {end}" if end > NO_ENTRY else "it is empty"
            return RefusedError(
                f"ledger {self.ledger_id} has no entry {entry_id}, {has}",
                reason=Reason.NO_SUCH_ENTRY,
                remedy="Read within the ledger",
                details=details,
            )
        return RetryableError(
            f"entry {self.ledger_id}:{entry_id} is not acknowledged yet",
            reason=Reason.NOT_YET,
            remedy="Wait, or follow the ledger; if its writer is gone, open it for recovery",
            details=details,
        )


def _entries_of(runs: Sequence[Run], first: EntryId, last: EntryId) -> list[LedgerEntry]:
    found = [
        LedgerEntry(EntryId(entry_id), bytes(data))
        for run in runs
        if run.last_entry_id >= first and run.first_entry_id <= last
        for entry_id, data in enumerate(run.entries(), run.first_entry_id)
    ]
    return [one for one in found if first <= one.entry_id <= last]
