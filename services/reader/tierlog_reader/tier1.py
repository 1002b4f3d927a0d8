"""Frames of ledgers on storage nodes, for ``source``: runs from the ledger's own reader.

Owns cutting whole runs down to what was asked. Does not own which node is asked.

Invariant: nothing behind the LAC of an open ledger is returned; where the metadata says that the
ledger is closed, its last entry bounds the read instead. Of a ledger with a key only what is
signed with it is returned, and without that key nothing. An answer ends before what can't be read,
or was given up: only a read that begins there is told.
"""

from typing import Generic, TypeVar

from tierlog.format.checksum import Buffer
from tierlog.format.frame import FRAME_HEADER_LEN
from tierlog.format.run import LEN_UNKNOWN, Run
from tierlog.ledger.directory import NodeDirectory
from tierlog.ledger.keys import NO_KEYS, LedgerKeys
from tierlog.ledger.reader import KnownEnd, OnDamage, Tier1ReadHandle, closing_runs, log_damage
from tierlog.model.errors import Reason, RefusedError, RetryableError, TierlogError
from tierlog.model.ids import INT64_MAX, EntryId, LedgerId
from tierlog.model.ledger import LedgerMetadata, LedgerState
from tierlog.model.stream import ListedLedger
from tierlog.ports.storage_node import StorageNodeControl
from tierlog_reader.chunk import Budget, Chunk, without_rest
from tierlog_reader.places import Tier
from tierlog_reader.views import Views

Node = TypeVar("Node", bound=StorageNodeControl)


class StorageNodeTier(Generic[Node]):
    """Tier 1 as ``source`` wants it."""

    def __init__(
        self,
        views: Views,
        nodes: NodeDirectory[Node],
        *,
        keys: LedgerKeys = NO_KEYS,
        on_damage: OnDamage = log_damage,
    ) -> None:
        self._views = views
        self._nodes = nodes
        self._keys = keys
        self._on_damage = on_damage

    async def read(self, ledger: ListedLedger, first_entry_id: EntryId, budget: Budget) -> Chunk:
        """Return what follows ``first_entry_id``, within the budget."""
        handle = await self._open(ledger.ledger_id, closed=ledger.closed)
        try:
            return await self._read(handle, first_entry_id, budget)
        except RetryableError as error:
            if error.reason is not Reason.UNKNOWN:
                raise
            # Its runs may lie elsewhere by now: auto-recovery has moved them.
            now = await self._views.ledger(ledger.ledger_id, fresh=True)
            if now is None or now.segments == handle.ledger_metadata.segments:
                raise
        return await self._read(self._handle(ledger.ledger_id, now), first_entry_id, budget)

    async def _read(
        self, handle: Tier1ReadHandle[Node], first_entry_id: EntryId, budget: Budget
    ) -> Chunk:
        until = EntryId(min(INT64_MAX, first_entry_id + budget.entries_max - 1))
        last, wait_s = await self._end(handle, first_entry_id, budget.wait_s)
        frames: list[Buffer] = []
        expected, taken, full = first_entry_id, 0, False
        read = handle.read_runs(
            first_entry_id, min(last, until), bytes_max=budget.bytes_max, wait_s=wait_s
        )
        async with closing_runs(read):
            try:
                async for runs in read:
                    for run in runs:
                        end = min(until, run.last_entry_id)
                        piece = run.frames_between(expected, end)
                        taken += len(piece)
                        # Its client has no room for more: all of it would be read once more.
                        full = bool(frames) and taken > budget.bytes_max
                        if full:
                            break
                        frames.append(piece)
                        expected = EntryId(end + 1)
                    if full:
                        break
            except TierlogError:
                # What came is good. The next read begins at the bad place, and is told.
                if not frames:
                    raise
        if not frames:
            raise _gone(handle.ledger_id)
        return Chunk(
            ledger_id=handle.ledger_id,
            first_entry_id=first_entry_id,
            count=expected - first_entry_id,
            # Several are joined by whoever sends them, and one is sent as it lies.
            frames=tuple(frames) if len(frames) > 1 else (without_rest(frames[0]),),
            tier=Tier.TIER1,
        )

    async def _end(
        self, handle: Tier1ReadHandle[Node], first_entry_id: EntryId, wait_s: float
    ) -> tuple[EntryId, float]:
        """Return the last entry to ask for, and how long to wait for it."""
        closed = handle.ledger_metadata.state is LedgerState.CLOSED
        last = await handle.last_add_confirmed()
        if first_entry_id <= last:
            return last, 0.0
        if closed:
            raise _gone(handle.ledger_id)
        if wait_s > 0:
            return first_entry_id, wait_s
        raise RetryableError(
            f"entry {handle.ledger_id}:{first_entry_id} is not confirmed yet",
            reason=Reason.NOT_YET,
            remedy="Wait for producers",
        )

    async def last_confirmed(self, ledger_id: LedgerId) -> EntryId:
        """Return the highest LAC that a node of the ledger knows."""
        return await (await self._open(ledger_id)).last_add_confirmed()

    async def end(self, ledger_id: LedgerId) -> KnownEnd:
        """Return the highest LAC that a node of the ledger knows, and the last entry of any."""
        # Nodes that are of its ensemble no more know nothing of what was acknowledged since.
        return await (await self._open(ledger_id, fresh=True)).end()

    async def length(self, ledger_id: LedgerId, last: EntryId) -> int | None:
        """Return the bytes of a ledger's entries up to one that is confirmed; None: not known."""
        run = await self._run_of(await self._open(ledger_id), last)
        if run.header.ledger_len == LEN_UNKNOWN:
            return None
        more = run.last_entry_id - last
        if not more:
            return run.header.ledger_len
        behind = run.frames_between(last + 1, run.last_entry_id)
        return run.header.ledger_len - len(behind) + FRAME_HEADER_LEN * more

    async def entry_at_time(self, ledger: ListedLedger, publish_ms: int) -> EntryId | None:
        """Return the first entry of the first run with that time or a later one; None: unknown."""
        handle = await self._open(ledger.ledger_id, closed=ledger.closed)
        low, high = 0, await handle.last_add_confirmed() + 1
        while low < high:
            run = await self._run_of(handle, EntryId((low + high) // 2))
            if run.header.publish_ms_max == 0:
                return None
            if run.header.publish_ms_max < publish_ms:
                low = run.last_entry_id + 1
            else:
                high = run.first_entry_id
        return EntryId(low)

    async def _run_of(self, handle: Tier1ReadHandle[Node], entry_id: EntryId) -> Run:
        read = handle.read_runs(entry_id, entry_id, bytes_max=1)
        async with closing_runs(read):
            async for runs in read:
                return runs[0]
        raise _gone(handle.ledger_id)

    async def _open(
        self, ledger_id: LedgerId, *, closed: bool = False, fresh: bool = False
    ) -> Tier1ReadHandle[Node]:
        """Return a ledger's handle; ``closed``: the stream says so, and so must its metadata."""
        metadata = await self._views.ledger(ledger_id, fresh=fresh)
        if metadata is None or (closed and metadata.state is not LedgerState.CLOSED):
            metadata = await self._views.ledger(ledger_id, fresh=True)
        if metadata is None:
            raise _gone(ledger_id)
        return self._handle(ledger_id, metadata)

    def _handle(self, ledger_id: LedgerId, metadata: LedgerMetadata) -> Tier1ReadHandle[Node]:
        return Tier1ReadHandle(
            ledger_id, metadata, self._nodes, keys=self._keys, on_damage=self._on_damage
        )


def _gone(ledger_id: LedgerId) -> RefusedError:
    return RefusedError(
        f"ledger {ledger_id} is not in tier 1 (any more)",
        reason=Reason.LEDGER_NOT_FOUND,
        remedy="The ledger is looked up again",
        details={"ledger_id": str(ledger_id)},
    )
