"""The queue of ledgers that lack copies, and the change that gives them other nodes (ADR-0016).

Owns: reporting, taking and striking off ledgers, and replacing a node in an ensemble of which no
writer changes anything any more. Does not own finding them, nor copying.

Invariants:
    * A report is there once ``add`` returned, however often it was made.
    * A ledger is struck off only as the worker saw it: a report that came since keeps it.
    * Only ensembles are changed here of which no writer and no recovery changes anything any
      more: those of closed ledgers, and all but the last of others; one node at a time, by
      compare-and-set.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Final
from uuid import UUID

import structlog

from tierlog.catalog.change import settle
from tierlog.catalog.election import CourtesyLock
from tierlog.catalog.naming import naming, newly_named
from tierlog.format import ledger_metadata, paths, records
from tierlog.model.errors import CorruptError, RefusedError
from tierlog.model.ids import EntryId, LedgerId, NodeId
from tierlog.model.ledger import LedgerMetadata, LedgerState, Segment
from tierlog.model.replication import EntryRange, UnderReplicated
from tierlog.ports.clock import Clock
from tierlog.ports.ids import Ids
from tierlog.ports.metadata import MetadataStore, Put

log = structlog.get_logger()

TEXT_LEN_MAX: Final = 2000
REASON_LEN_MAX: Final = 80

Queue = list[UnderReplicated]


class UnderReplicationCatalog:
    """The ledgers of a cluster that lack copies."""

    def __init__(self, store: MetadataStore, *, clock: Clock, ids: Ids) -> None:
        self._store = store
        self._clock = clock
        self._ids = ids

    async def add(
        self,
        ledger_id: LedgerId,
        *,
        reason: str,
        nodes: Collection[NodeId],
        entries: EntryRange | None = None,
    ) -> None:
        """Report that copies on ``nodes`` are missing or bad; repeating it changes nothing.

        ``reason`` is one of ``CopyTrouble``. With ``entries`` (first and last), the runs that
        hold them are written anew; without, a worker finds out what the nodes lack.
        """
        path = paths.underreplicated_path(ledger_id)
        text = str(reason)[:REASON_LEN_MAX]
        now_ms = self._clock.wall_ms()

        async def one_round() -> None:
            found = await self._store.get(path)
            if found is None:
                fresh = UnderReplicated(ledger_id=ledger_id, since_ms=now_ms)
                data = records.encode_underreplicated(fresh.complained(text, nodes, entries))
                await self._store.create(path, data)
                return
            known = records.decode_underreplicated(found.data)
            merged = known.complained(text, nodes, entries)
            if merged != known:
                data = records.encode_underreplicated(merged)
                await self._store.set(path, data, version=found.version)

        await settle(self._store, self._ids, path, one_round)

    async def list(self) -> Queue:
        """Return the whole queue as of now (after ``sync``), by ledger id."""
        await self._store.sync(paths.UNDERREPLICATED)
        queued: Queue = []
        for level1 in await self._store.children(paths.UNDERREPLICATED) or []:
            upper = f"{paths.UNDERREPLICATED}/{level1}"
            for level2 in await self._store.children(upper) or []:
                lower = f"{upper}/{level2}"
                for leaf in await self._store.children(lower) or []:
                    one = await self._peek(f"{lower}/{leaf}")
                    if one is not None:
                        queued.append(one)
        return queued

    async def get(self, ledger_id: LedgerId) -> UnderReplicated | None:
        """Return a ledger's place in the queue as of now; None: it has none."""
        path = paths.underreplicated_path(ledger_id)
        await self._store.sync(path)
        return await self._peek(path)

    async def _peek(self, path: str) -> UnderReplicated | None:
        found = await self._store.get(path)
        if found is None:
            return None
        try:
            return records.decode_underreplicated(found.data, znode_version=found.version)
        except CorruptError as error:
            # What it was is lost, that something was wrong isn't: all of the ledger is compared.
            log.warning("underreplicated.unreadable", path=path, cause=str(error))
            ledger_id = paths.underreplicated_ledger_id_of(path)
            return UnderReplicated(ledger_id=ledger_id, since_ms=0, version=found.version)

    async def begin(self, one: UnderReplicated, *, worker: str) -> UnderReplicated | None:
        """Note that a worker takes the ledger as it is now; None: it is not queued any more."""
        return await self._change(one.ledger_id, lambda known: known.begun(worker))

    async def fail(self, one: UnderReplicated, *, error: str) -> UnderReplicated | None:
        """Note why a worker could not make the ledger whole."""
        now_ms, text = self._clock.wall_ms(), error[:TEXT_LEN_MAX]
        return await self._change(one.ledger_id, lambda known: known.failed(text, now_ms))

    async def _change(
        self, ledger_id: LedgerId, plan: Callable[[UnderReplicated], UnderReplicated]
    ) -> UnderReplicated | None:
        """Replace a record by ``plan`` of it; a lost answer at worst counts one try twice."""
        path = paths.underreplicated_path(ledger_id)

        async def one_round() -> UnderReplicated | None:
            known = await self._peek(path)
            if known is None:
                return None
            planned = plan(known)
            data = records.encode_underreplicated(planned)
            version = await self._store.set(path, data, version=known.version)
            return replace(planned, version=version)

        return await settle(self._store, self._ids, path, one_round)

    async def remove(self, ledger_id: LedgerId, version: int) -> bool:
        """Strike a ledger off; False: something was reported since that version."""
        path = paths.underreplicated_path(ledger_id)

        async def one_round() -> bool:
            found = await self._store.get(path)
            if found is None:
                return True
            if found.version != version:
                return False
            await self._store.delete(path, version=version)
            return True

        return await settle(self._store, self._ids, path, one_round)

    def lock(self, ledger_id: LedgerId, holder: UUID) -> CourtesyLock:
        """Return the lock that keeps two workers from doing the same."""
        return CourtesyLock(self._store, paths.underreplicated_lock_path(ledger_id), holder)

    async def replace_member(
        self,
        ledger_id: LedgerId,
        *,
        first_entry_id: EntryId,
        leaving: NodeId,
        joining: NodeId,
    ) -> LedgerMetadata | None:
        """Put ``joining``, which holds all that ``leaving`` should, into its place in a segment.

        The segment is the one that begins with ``first_entry_id``. None: the ledger is gone.
        Raises INVALID_ARGUMENT when it is the last of an unclosed ledger, or has no such place, or
        when ``joining`` was retired since it was chosen.
        """
        path = paths.ledger_path(ledger_id)

        async def one_round() -> LedgerMetadata | None:
            found = await self._store.get(path)
            if found is None:
                return None
            metadata = ledger_metadata.decode_znode(found.data)
            changed = with_member(
                ledger_id,
                metadata,
                first_entry_id=first_entry_id,
                leaving=leaving,
                joining=joining,
            )
            if changed != metadata:
                checks = await naming(self._store, newly_named(changed, metadata))
                put = Put(path, ledger_metadata.encode_znode(changed), found.version)
                await self._store.transact([*checks, put])
            return changed

        return await settle(self._store, self._ids, path, one_round)


def with_member(
    ledger_id: LedgerId,
    metadata: LedgerMetadata,
    *,
    first_entry_id: EntryId,
    leaving: NodeId,
    joining: NodeId,
) -> LedgerMetadata:
    """Return a ledger with one node of one segment replaced; itself where it is so."""
    at = next(
        (at for at, one in enumerate(metadata.segments) if one.first_entry_id == first_entry_id),
        None,
    )
    ensemble = metadata.segments[at].ensemble if at is not None else ()
    is_settled = metadata.state is LedgerState.CLOSED or at != len(metadata.segments) - 1
    if is_settled and at is not None:
        if leaving not in ensemble and joining in ensemble:
            return metadata
        if leaving in ensemble and joining not in ensemble:
            moved = tuple(joining if one == leaving else one for one in ensemble)
            segment = Segment(first_entry_id=first_entry_id, ensemble=moved)
            segments = (*metadata.segments[:at], segment, *metadata.segments[at + 1 :])
            return replace(metadata, segments=segments)
    raise RefusedError(
        f"ledger {ledger_id} is {metadata.state.name}, its segment at entry {first_entry_id} lies"
        f" on {', '.join(ensemble) or 'nothing'}: {leaving} can't be replaced by {joining}",
        remedy="Read the ledger's metadata again and decide anew",
    )
