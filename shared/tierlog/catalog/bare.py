"""Bare ledgers in the metadata store: made, claimed by their one writer, closed, deleted.

A bare ledger belongs to no stream: its metadata names none, and no offload context stands beside
it. So nothing rolls it over, offloads or trims it; it stays until it is deleted by name.

Owns these ledgers' znodes, and the records of their deletion. Does not own ids, ensembles nor
the beginning of a recovery: ``LedgerCatalog`` has those for every ledger.

Invariants:
    * A bare ledger has one writer in its life: whoever first put its UUID into the metadata.
    * Whoever closes first decides; closing again returns the end that stands.
    * Only recovery changes the last ensemble of a ledger that is not OPEN, by its closing change.
    * A ledger is deleted, and its deletion on record, in one transaction. A record is what lets
      storage nodes free many ledgers at once without an alarm; it is forgotten after a long time.
    * A ledger of a stream is never closed nor deleted here.
    * A staging ledger (ADR-0031) has a mark as long as it is one: made with it, gone with it.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from uuid import UUID

import structlog

from tierlog.catalog.change import ensure_node, settle
from tierlog.catalog.ledgers import LedgerCatalog, context_not_found
from tierlog.catalog.naming import naming, newly_named
from tierlog.format import ledger_metadata, paths
from tierlog.model.errors import CorruptError, Reason, RefusedError
from tierlog.model.ids import EntryId, LedgerId
from tierlog.model.ledger import (
    KEY_DELETED_MS,
    KEY_DELETION,
    KEY_WRITER,
    LedgerMetadata,
    LedgerState,
    Segment,
)
from tierlog.model.replication import EntryRange
from tierlog.ports.clock import Clock
from tierlog.ports.ids import Ids
from tierlog.ports.metadata import (
    Create,
    Delete,
    MetadataStore,
    NoNodeError,
    Operation,
    Put,
    VersionConflictError,
)

log = structlog.get_logger()


class BareLedgerCatalog:
    """The ledgers of a cluster that belong to no stream."""

    def __init__(self, store: MetadataStore, *, clock: Clock, ids: Ids) -> None:
        self._store = store
        self._clock = clock
        self._ids = ids
        self._ledgers = LedgerCatalog(store, clock=clock, ids=ids)

    async def create(
        self, metadata: LedgerMetadata, *, ledger_id: LedgerId | None = None
    ) -> LedgerId:
        """Make a ledger under an id that ``LedgerCatalog.new_id`` gave, or gives now.

        Raises ``NodeRetiredError`` when one of its nodes was retired since it was chosen.
        """
        assert metadata.is_bare
        assert metadata.state is LedgerState.OPEN
        taken = await self._ledgers.new_id() if ledger_id is None else ledger_id
        path, data = paths.ledger_path(taken), ledger_metadata.encode_znode(metadata)
        await ensure_node(self._store, path.rpartition("/")[0])
        marks: list[Operation] = []
        if metadata.is_staging:
            await ensure_node(self._store, paths.STAGING)
            marks = [Create(paths.staging_path(taken), b"")]

        async def one_round() -> LedgerId:
            found = await self._store.get(path)
            if found is None:
                checks = await naming(self._store, newly_named(metadata))
                await self._store.transact([*checks, Create(path, data), *marks])
            elif found.data != data:
                # The id is this process's alone, so this is a counter that went back.
                raise RefusedError(
                    f"ledger {taken} exists already",
                    remedy="Raise the cluster's ledger-id base: ids were given twice",
                )
            return taken

        return await settle(self._store, self._ids, path, one_round)

    async def get(self, ledger_id: LedgerId) -> LedgerMetadata:
        """Return a bare ledger as of now (after ``sync``), or raise LEDGER_NOT_FOUND."""
        await self._store.sync(paths.ledger_path(ledger_id))
        return (await self._read(ledger_id))[0]

    async def claim(self, ledger_id: LedgerId, writer: UUID) -> LedgerMetadata:
        """Make ``writer`` the ledger's writer; FENCED when it has, or had, another one."""
        path, claim = paths.ledger_path(ledger_id), str(writer).encode()

        async def one_round() -> LedgerMetadata:
            metadata, version = await self._read(ledger_id)
            if metadata.custom.get(KEY_WRITER) == claim:
                return metadata
            if KEY_WRITER in metadata.custom or metadata.state is not LedgerState.OPEN:
                raise _not_writable(ledger_id, metadata)
            claimed = replace(metadata, custom={**metadata.custom, KEY_WRITER: claim})
            await self._store.set(path, ledger_metadata.encode_znode(claimed), version=version)
            return claimed

        return await settle(self._store, self._ids, path, one_round)

    async def close(
        self,
        ledger_id: LedgerId,
        *,
        last_entry_id: EntryId,
        length: int,
        segments: tuple[Segment, ...] | None = None,
        lost: Sequence[EntryRange] = (),
    ) -> LedgerMetadata:
        """Close a ledger, unless it is closed already; return the end that stands.

        ``segments`` are those that recovery ended with, and ``lost`` what was given up there.
        """
        path = paths.ledger_path(ledger_id)

        async def one_round() -> LedgerMetadata:
            metadata, version = await self._read(ledger_id)
            if metadata.state is LedgerState.CLOSED:
                return metadata
            before = metadata
            if segments is not None:
                metadata = metadata.with_tail(segments)
            if lost:
                metadata = metadata.with_loss(lost)
            closed = metadata.moved_to(
                LedgerState.CLOSED, last_entry_id=last_entry_id, length=length
            )
            checks = await naming(self._store, newly_named(closed, before))
            put = Put(path, ledger_metadata.encode_znode(closed), version)
            await self._store.transact([*checks, put])
            return closed

        return await settle(self._store, self._ids, path, one_round)

    async def delete(self, ledger_id: LedgerId) -> None:
        """Delete a ledger, whatever its state; raises LEDGER_NOT_FOUND when there is none."""
        path, record_path = paths.ledger_path(ledger_id), paths.deleted_path(ledger_id)
        deletion = str(self._ids.uuid()).encode()
        noted = {KEY_DELETION: deletion, KEY_DELETED_MS: str(self._clock.wall_ms()).encode()}
        await ensure_node(self._store, record_path.rpartition("/")[0])

        async def one_round() -> None:
            record = await self._store.get(record_path)
            if record is not None:
                found = ledger_metadata.decode_znode(record.data)
                if found.custom.get(KEY_DELETION) == deletion:
                    return
            metadata, version = await self._read(ledger_id)
            noting = replace(metadata, custom={**metadata.custom, **noted})
            data = ledger_metadata.encode_znode(noting)
            operations: list[Operation] = [Delete(path, version), Create(record_path, data)]
            mark_path = paths.staging_path(ledger_id)
            mark = await self._store.get(mark_path) if metadata.is_staging else None
            if mark is not None:
                operations.append(Delete(mark_path, mark.version))
            await self._store.transact(operations)

        await settle(self._store, self._ids, path, one_round)

    async def list_all(self) -> dict[LedgerId, LedgerMetadata]:
        """Return all bare ledgers, by id. Any failure raises."""
        found: dict[LedgerId, LedgerMetadata] = {}
        for ledger_id in await self._ledgers.list_ids():
            data = await self._store.get(paths.ledger_path(ledger_id))
            metadata = None if data is None else ledger_metadata.decode_znode(data.data)
            if metadata is not None and await self._is_bare(ledger_id, metadata):
                found[ledger_id] = metadata
        return found

    async def list_staging(self) -> dict[LedgerId, LedgerMetadata]:
        """Return the staging ledgers that are not attached, by id; what can't be read is left out.

        Whoever asks deletes what it may: nothing that is left out.
        """
        await self._store.sync(paths.STAGING)
        found: dict[LedgerId, LedgerMetadata] = {}
        for name in await self._store.children(paths.STAGING) or []:
            try:
                ledger_id = paths.staging_ledger_id_of(name)
                data = await self._store.get(paths.ledger_path(ledger_id))
                metadata = None if data is None else ledger_metadata.decode_znode(data.data)
            except (CorruptError, RefusedError) as error:
                log.warning("staging.kept", name=name[:200], cause=str(error))
                continue
            # Otherwise it was attached, or deleted, since they were listed.
            if metadata is not None and metadata.is_staging:
                found[ledger_id] = metadata
        return found

    async def _is_bare(self, ledger_id: LedgerId, metadata: LedgerMetadata) -> bool:
        # A context is made with the ledger of a stream, or as a staging ledger is attached, which
        # changes its metadata too: a change of what was bare when it was read is refused then.
        context_path = paths.context_path(ledger_id)
        return metadata.is_bare and await self._store.get(context_path) is None

    async def deletion_on_record(self, ledger_id: LedgerId) -> bool:
        """Tell whether a bare ledger of this id was deleted, as far as that is remembered."""
        path = paths.deleted_path(ledger_id)
        await self._store.sync(path)
        return await self._store.get(path) is not None

    async def forget_deleted(self, *, before_ms: int) -> int:
        """Remove the records of deletions before a time; return how many."""
        count = 0
        async for path in self._deleted():
            found = await self._store.get(path)
            if found is None:
                continue
            record = ledger_metadata.decode_znode(found.data)
            if int(record.custom.get(KEY_DELETED_MS, b"0")) >= before_ms:
                continue
            try:
                await self._store.delete(path, version=found.version)
            except (NoNodeError, VersionConflictError):
                # Another node does the same just now.
                continue
            count += 1
        return count

    async def _deleted(self) -> AsyncIterator[str]:
        for level1 in await self._store.children(paths.DELETED) or []:
            upper = f"{paths.DELETED}/{level1}"
            for level2 in await self._store.children(upper) or []:
                for leaf in await self._store.children(f"{upper}/{level2}") or []:
                    yield f"{upper}/{level2}/{leaf}"

    async def _read(self, ledger_id: LedgerId) -> tuple[LedgerMetadata, int]:
        found = await self._store.get(paths.ledger_path(ledger_id))
        if found is None:
            # That of a stream's ledger goes with the local copy, and its context stays.
            if await self._store.get(paths.context_path(ledger_id)) is not None:
                raise _of_a_stream(ledger_id)
            raise context_not_found(ledger_id)
        metadata = ledger_metadata.decode_znode(found.data)
        if not await self._is_bare(ledger_id, metadata):
            raise _of_a_stream(ledger_id)
        return metadata, found.version


def _not_writable(ledger_id: LedgerId, metadata: LedgerMetadata) -> RefusedError:
    state = metadata.state
    why = f"is {state.name}" if state is not LedgerState.OPEN else "has a writer already"
    return RefusedError(
        f"ledger {ledger_id} {why}, and a ledger has one writer in its life",
        reason=Reason.FENCED,
        remedy="Create another ledger; close this one, if its writer is gone, by recovering it",
        details={"ledger_id": str(ledger_id)},
    )


def _of_a_stream(ledger_id: LedgerId) -> RefusedError:
    return RefusedError(
        f"ledger {ledger_id} belongs to a stream",
        remedy="Append to its stream, read that, seal that; tierlog ledger show names it",
        details={"ledger_id": str(ledger_id)},
    )
