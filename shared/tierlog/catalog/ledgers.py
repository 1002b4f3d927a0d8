"""Ledgers in the metadata store: ids, opening, recovering, closing, deleting (protocols.md 1).

Invariants:
    * A ledger is opened in one transaction with its context and its place in the stream's list,
      which checks the owner's epoch and claim.
    * A closed ledger stands in the list with the same end as in its own znode; one without
      entries stands nowhere.
    * No ledger is made to name a node that was retired: whoever chose it before then is refused
      with ``NodeRetiredError``, for certain, and chooses anew (``naming``).
    * The tail of the list is bounded: older ledgers move to pages in the same transaction, which
      makes their folder when it makes the first page: nothing is made below a stream but by a
      transaction that finds the stream there.
    * Looking at how far ids have come takes none.
    * Staging ledgers come into a list all at once or not at all, closed, behind every ledger that
      the list has or had, in the name of the owner, who has none open meanwhile (ADR-0031). They
      bear an id that was drawn once all others were closed: theirs tell nothing of when that was.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from tierlog.catalog.change import MOVED, Moved, ensure_node, settle
from tierlog.catalog.naming import naming, newly_named
from tierlog.catalog.streams import check_not_deleting, check_owner, stream_not_found
from tierlog.format import ledger_metadata, paths, records
from tierlog.model.errors import IndeterminateError, Reason, RefusedError
from tierlog.model.ids import NO_ENTRY, EntryId, LedgerId, StreamName
from tierlog.model.ledger import (
    COMPONENT_STREAM,
    KEY_COMPONENT,
    KEY_INCARNATION,
    KEY_LOSS_ACCEPTED,
    KEY_OWNER_EPOCH,
    KEY_RAW,
    KEY_STREAM,
    LedgerMetadata,
    LedgerState,
    Segment,
)
from tierlog.model.offload import OffloadContext
from tierlog.model.replication import EntryRange
from tierlog.model.staging import ATTACHED_LEDGERS_MAX, Staging
from tierlog.model.stream import LedgerPageRef, ListedLedger, Stream
from tierlog.ports.clock import Clock
from tierlog.ports.ids import Ids
from tierlog.ports.metadata import Check, Create, Delete, MetadataStore, Operation, Put

TAIL_LEDGERS_MAX: Final = 512
PAGE_LEDGERS: Final = 256
assert PAGE_LEDGERS < TAIL_LEDGERS_MAX
# One page is made at a time, and what was just attached stays in the tail.
assert ATTACHED_LEDGERS_MAX <= PAGE_LEDGERS


class LedgersBehindError(RefusedError):
    """Nothing was changed: ledgers have ids below one that the stream has, or had."""

    def __init__(self, name: StreamName, first: LedgerId, newest: LedgerId) -> None:
        super().__init__(
            f"ledger {first} can't come behind ledger {newest} of stream {name}: ids grow",
            remedy="Copy what is to be attached to new ledgers, and attach those",
            details={"ledger_id": str(first), "newest_ledger_id": str(newest)},
        )


class LedgerCatalog:
    """The ledgers of a cluster."""

    def __init__(self, store: MetadataStore, *, clock: Clock, ids: Ids) -> None:
        self._store = store
        self._clock = clock
        self._ids = ids

    async def new_id(self) -> LedgerId:
        """Return an id that no ledger of this cluster ever had (seeds/003: sequential znodes)."""

        async def one_round() -> LedgerId:
            # A number whose answer was lost is never used by anyone: numbers only grow.
            made = await self._store.create_ephemeral(paths.IDGEN_PREFIX, b"", sequential=True)
            # Read after it, so that a base raised before is seen.
            found = await self._store.get(paths.CLUSTER)
            base = records.decode_cluster(found.data).ledger_id_base if found else 0
            await self._drop(made)
            return paths.ledger_id_from_sequence(made, base=base)

        return await settle(self._store, self._ids, paths.IDGEN_PREFIX, one_round)

    async def next_id(self) -> LedgerId:
        """Return an id that ``new_id`` may give next, as of now (after ``sync``); take none.

        Every id that was given is below it, by this store: one from an old backup forgot some.
        """
        await self._store.sync(paths.IDGEN)
        position = await self._store.sequence_position(paths.IDGEN)
        found = await self._store.get(paths.CLUSTER)
        base = records.decode_cluster(found.data).ledger_id_base if found else 0
        # Without the folder none was given yet: the first one makes it.
        return LedgerId(base + (position or 0))

    async def _drop(self, path: str) -> None:
        try:
            await self._store.delete(path, version=-1)
        except IndeterminateError:
            # It goes with the session.
            return

    async def get(self, ledger_id: LedgerId) -> LedgerMetadata | None:
        """Return a ledger's metadata as of now (after ``sync``); None: deleted or never made."""
        path = paths.ledger_path(ledger_id)
        await self._store.sync(path)
        found = await self._store.get(path)
        return None if found is None else ledger_metadata.decode_znode(found.data)

    async def list_ids(self) -> list[LedgerId]:
        """Return the ids of all ledgers (after ``sync``), sorted. Any failure raises."""
        await self._store.sync(paths.LEDGERS_ROOT)
        ids: list[LedgerId] = []
        for level1 in await self._store.children(paths.LEDGERS_ROOT) or []:
            if not paths.is_hierarchy_name(level1, level=1):
                continue
            upper = f"{paths.LEDGERS_ROOT}/{level1}"
            for level2 in await self._store.children(upper) or []:
                lower = f"{upper}/{level2}"
                leaves = await self._store.children(lower) or []
                ids.extend(paths.ledger_id_of(f"{lower}/{leaf}") for leaf in leaves)
        return sorted(ids)

    async def open(
        self, claimed: Stream, ledger_id: LedgerId, metadata: LedgerMetadata, *, block_size: int
    ) -> Stream:
        """Make a ledger, its context and its place in the list, in one transaction.

        Raises FENCED when the stream has another owner than ``claimed``, ``NodeRetiredError`` when
        one of the nodes was retired since it was chosen.
        """
        name = claimed.name
        stream_path = paths.stream_path(name)
        ledger_path, context_path = paths.ledger_path(ledger_id), paths.context_path(ledger_id)
        listed = ListedLedger(
            ledger_id=ledger_id,
            opened_ms=self._clock.wall_ms(),
            block_size=block_size,
            owner_epoch=claimed.owner_epoch,
        )
        context = OffloadContext(stream=name, incarnation=claimed.incarnation, ledger_id=ledger_id)
        for path in (ledger_path, context_path):
            await ensure_node(self._store, path.rpartition("/")[0])

        async def one_round() -> Stream:
            stream, version = await self._read_stream(name)
            check_owner(stream, claimed)
            if stream.listed(ledger_id) is not None:
                return stream
            check_not_deleting(stream)
            paged, page = _paged(replace(stream, ledgers=(*stream.ledgers, listed)))
            operations: list[Operation] = [
                *await naming(self._store, newly_named(metadata)),
                Put(stream_path, records.encode_stream(paged), version),
                Create(ledger_path, ledger_metadata.encode_znode(metadata)),
                Create(context_path, records.encode_context(context)),
            ]
            if page is not None:
                operations += await self._page_made(name, *page)
            await self._store.transact(operations)
            return paged

        return await settle(self._store, self._ids, stream_path, one_round)

    async def _page_made(
        self, name: StreamName, number: int, ledgers: Sequence[ListedLedger]
    ) -> list[Operation]:
        """Return what makes a page, and the folder of pages with the first one."""
        folder = paths.pages_path(name)
        made: list[Operation] = []
        if await self._store.get(folder) is None:
            made.append(Create(folder, b""))
        return [*made, Create(paths.page_path(name, number), records.encode_page(ledgers))]

    async def begin_recovery(self, ledger_id: LedgerId) -> LedgerMetadata | None:
        """Move an open ledger to IN_RECOVERY; None when it is gone. A closed one is returned."""
        path = paths.ledger_path(ledger_id)

        async def one_round() -> LedgerMetadata | None:
            found = await self._store.get(path)
            if found is None:
                return None
            metadata = ledger_metadata.decode_znode(found.data)
            if metadata.state is not LedgerState.OPEN:
                return metadata
            moved = metadata.moved_to(LedgerState.IN_RECOVERY)
            await self._store.set(path, ledger_metadata.encode_znode(moved), version=found.version)
            return moved

        return await settle(self._store, self._ids, path, one_round)

    async def change_ensemble(
        self,
        claimed: Stream | None,
        ledger_id: LedgerId,
        metadata_before: LedgerMetadata,
        metadata_after: LedgerMetadata,
    ) -> LedgerMetadata:
        """Publish another last ensemble of an OPEN ledger; return the metadata as it stands then.

        Raises FENCED when someone recovers or closed the ledger, when it has another last ensemble
        than ``metadata_before``, or when the stream has another owner than ``claimed`` (None: the
        ledger belongs to no stream); ``NodeRetiredError`` when a node was retired since it was
        chosen. Earlier segments stay as they are found: auto-recovery may have moved copies of
        what is confirmed.
        """
        path = paths.ledger_path(ledger_id)
        before, after = metadata_before.segments, metadata_after.segments
        assert before[-1] != after[-1]
        replaced = after[-1].first_entry_id == before[-1].first_entry_id
        assert after[:-1] == (before[:-1] if replaced else before)

        async def one_round() -> LedgerMetadata:
            operations: list[Operation] = []
            if claimed is not None:
                stream, version = await self._read_stream(claimed.name)
                check_owner(stream, claimed)
                operations.append(Check(paths.stream_path(claimed.name), version))
            found = await self._store.get(path)
            if found is None:
                raise context_not_found(ledger_id)
            metadata = ledger_metadata.decode_znode(found.data)
            same = replace(metadata, segments=before) == metadata_before
            if not same or metadata.segments[-1] not in (before[-1], after[-1]):
                raise _not_open(ledger_id, metadata)
            if metadata.segments[-1] == after[-1]:
                return metadata
            kept = metadata.segments[:-1] if replaced else metadata.segments
            changed = replace(metadata, segments=(*kept, after[-1]))
            operations += await naming(self._store, newly_named(changed, metadata))
            put = Put(path, ledger_metadata.encode_znode(changed), found.version)
            await self._store.transact([*operations, put])
            return changed

        return await settle(self._store, self._ids, path, one_round)

    async def accept_loss(self, ledger_id: LedgerId, *, by: str) -> LedgerMetadata:
        """Let the recovery of a ledger give up what no node can give; on record for ever.

        Whoever recovers the ledger, now or later, sees it. Saying it again changes nothing.
        """
        path = paths.ledger_path(ledger_id)
        note = f"{self._clock.wall_ms()} {by}".encode()

        async def one_round() -> LedgerMetadata:
            found = await self._store.get(path)
            if found is None:
                raise context_not_found(ledger_id)
            metadata = ledger_metadata.decode_znode(found.data)
            if KEY_LOSS_ACCEPTED in metadata.custom:
                return metadata
            if metadata.state is not LedgerState.IN_RECOVERY:
                raise nothing_waits(ledger_id, metadata.state)
            noted = replace(metadata, custom={**metadata.custom, KEY_LOSS_ACCEPTED: note})
            await self._store.set(path, ledger_metadata.encode_znode(noted), version=found.version)
            return noted

        return await settle(self._store, self._ids, path, one_round)

    async def watch(self, ledger_id: LedgerId) -> tuple[LedgerMetadata | None, asyncio.Event]:
        """Return a ledger's metadata, and an event that is set once it has changed or gone."""
        found, changed = await self._store.watch(paths.ledger_path(ledger_id))
        return (None if found is None else ledger_metadata.decode_znode(found.data)), changed

    async def close(
        self,
        claimed: Stream,
        ledger_id: LedgerId,
        *,
        last_entry_id: EntryId,
        length: int,
        segments: tuple[Segment, ...] | None = None,
        lost: Sequence[EntryRange] = (),
    ) -> Stream:
        """Close a ledger and copy its end into the list, in one transaction.

        Whoever closes first decides; the end that stands is in the returned list. A ledger
        without entries leaves the list, and its znode and context go with it. ``segments`` are
        those that recovery ended with, and ``lost`` what was given up there.
        """
        name = claimed.name
        stream_path, ledger_path = paths.stream_path(name), paths.ledger_path(ledger_id)

        async def one_round() -> Stream | Moved:
            stream, version = await self._read_stream(name)
            check_owner(stream, claimed)
            listed = stream.listed(ledger_id)
            if listed is None or listed.closed:
                return stream
            found = await self._store.get(ledger_path)
            if found is None:
                return MOVED
            before = metadata = ledger_metadata.decode_znode(found.data)
            if segments is not None:
                metadata = metadata.with_tail(segments)
            if lost:
                metadata = metadata.with_loss(lost)
            metadata = metadata.moved_to(
                LedgerState.CLOSED, last_entry_id=last_entry_id, length=length
            )
            operations: list[Operation]
            if metadata.last_entry_id == NO_ENTRY:
                operations, ledgers = await self._removal(stream, ledger_id, found.version)
            else:
                closed = replace(
                    listed,
                    closed=True,
                    last_entry_id=metadata.last_entry_id,
                    length=metadata.length,
                    closed_ms=self._clock.wall_ms(),
                )
                ledgers = tuple(closed if one is listed else one for one in stream.ledgers)
                data = ledger_metadata.encode_znode(metadata)
                operations = await naming(self._store, newly_named(metadata, before))
                operations.append(Put(ledger_path, data, found.version))
            planned = replace(stream, ledgers=ledgers)
            if metadata.last_entry_id == NO_ENTRY:
                planned = replace(planned, empty_ledger_id=ledger_id)
            put = Put(stream_path, records.encode_stream(planned), version)
            await self._store.transact([put, *operations])
            return planned

        return await settle(self._store, self._ids, stream_path, one_round)

    async def attach(self, claimed: Stream, ledger_ids: Sequence[LedgerId]) -> Stream:
        """Make closed staging ledgers, their ids ascending, the stream's next ones.

        Raises FENCED when the stream has another owner than ``claimed``, LEDGER_NOT_FOUND when one
        of them is gone, ``LedgersBehindError`` when they can't come behind what is there.
        """
        assert list(ledger_ids) == sorted(set(ledger_ids))
        assert 0 < len(ledger_ids) <= ATTACHED_LEDGERS_MAX
        name, first = claimed.name, ledger_ids[0]
        stream_path = paths.stream_path(name)
        for folder in sorted({paths.context_path(one).rpartition("/")[0] for one in ledger_ids}):
            await ensure_node(self._store, folder)

        async def one_round() -> Stream:
            stream, version = await self._read_stream(name)
            if stream.listed(first) is not None:
                # By the round before, too, whose answer was lost; whoever owns the stream by now.
                return stream
            check_owner(stream, claimed)
            check_not_deleting(stream)
            assert not stream.ledgers or stream.ledgers[-1].closed, "the owner closed its ledger"
            newest = stream.newest_ledger_id
            if newest is not None and first <= newest:
                raise LedgersBehindError(name, first, newest)
            # In the round that saw all of the list closed: by it retention dates that (ADR-0021).
            attached_id = await self.new_id()
            listed: list[ListedLedger] = []
            operations: list[Operation] = []
            for ledger_id in ledger_ids:
                one, made = await self._attached(stream, ledger_id)
                listed.append(replace(one, attached_id=attached_id))
                operations += made
            paged, page = _paged(replace(stream, ledgers=(*stream.ledgers, *listed)))
            if page is not None:
                operations += await self._page_made(name, *page)
            put = Put(stream_path, records.encode_stream(paged), version)
            await self._store.transact([put, *operations])
            return paged

        return await settle(self._store, self._ids, stream_path, one_round)

    async def _attached(
        self, stream: Stream, ledger_id: LedgerId
    ) -> tuple[ListedLedger, list[Operation]]:
        """Return a staging ledger as it is to be listed, and what makes it the stream's."""
        path, mark_path = paths.ledger_path(ledger_id), paths.staging_path(ledger_id)
        found, mark = await self._store.get(path), await self._store.get(mark_path)
        if found is None:
            raise context_not_found(ledger_id)
        metadata = ledger_metadata.decode_znode(found.data)
        staging = checked_staging(stream, ledger_id, metadata)
        if mark is None:
            raise context_not_found(ledger_id)
        custom = {
            **metadata.custom,
            KEY_COMPONENT: COMPONENT_STREAM,
            KEY_STREAM: stream.name.encode(),
            KEY_INCARNATION: str(stream.incarnation).encode(),
            KEY_OWNER_EPOCH: str(stream.owner_epoch).encode(),
            KEY_RAW: b"0",
        }
        now_ms = self._clock.wall_ms()
        listed = ListedLedger(
            ledger_id=ledger_id,
            opened_ms=now_ms if metadata.ctime_ms is None else metadata.ctime_ms,
            block_size=staging.block_size,
            owner_epoch=stream.owner_epoch,
            closed=True,
            last_entry_id=metadata.last_entry_id,
            length=metadata.length,
            closed_ms=now_ms,
        )
        context = OffloadContext(
            stream=stream.name, incarnation=stream.incarnation, ledger_id=ledger_id
        )
        data = ledger_metadata.encode_znode(replace(metadata, custom=custom))
        return listed, [
            Put(path, data, found.version),
            Create(paths.context_path(ledger_id), records.encode_context(context)),
            Delete(mark_path, mark.version),
        ]

    async def _removal(
        self, stream: Stream, ledger_id: LedgerId, version: int
    ) -> tuple[list[Operation], tuple[ListedLedger, ...]]:
        """Return what removes an empty ledger, and the list without it."""
        operations: list[Operation] = [Delete(paths.ledger_path(ledger_id), version)]
        context_path = paths.context_path(ledger_id)
        context = await self._store.get(context_path)
        if context is not None:
            operations.append(Delete(context_path, context.version))
        return operations, tuple(one for one in stream.ledgers if one.ledger_id != ledger_id)

    async def delete_tier1(self, ledger_id: LedgerId, attempt: "OffloadContext") -> OffloadContext:
        """Delete the ledger's znode and note it in its context, in one transaction (3.9).

        ``attempt`` is the context as ``ContextCatalog.begin_tier1_deletion`` left it. Raises
        INVALID_ARGUMENT when the context has moved on to anything else, or its copy is in doubt.
        """
        ledger_path, context_path = paths.ledger_path(ledger_id), paths.context_path(ledger_id)

        async def one_round() -> OffloadContext:
            found = await self._store.get(context_path)
            if found is None:
                raise context_not_found(ledger_id)
            context = records.decode_context(found.data)
            if context.bookkeeper_deleted and context.uuid == attempt.uuid:
                return context
            if context.state is not attempt.state or context.uuid != attempt.uuid:
                raise RefusedError(
                    f"ledger {ledger_id} is {context.state.name} and not being deleted locally",
                    remedy="Nothing to do: the next pass of the scheduler decides anew",
                )
            context.check_not_doubted()
            deleted = context.tier1_deleted()
            operations: list[Operation] = [
                Put(context_path, records.encode_context(deleted), found.version)
            ]
            ledger = await self._store.get(ledger_path)
            if ledger is not None:
                operations.append(Delete(ledger_path, ledger.version))
            await self._store.transact(operations)
            return deleted

        return await settle(self._store, self._ids, context_path, one_round)

    async def _read_stream(self, name: StreamName) -> tuple[Stream, int]:
        found = await self._store.get(paths.stream_path(name))
        if found is None:
            raise stream_not_found(name)
        return records.decode_stream(found.data), found.version


def _not_open(ledger_id: LedgerId, metadata: LedgerMetadata) -> RefusedError:
    return RefusedError(
        f"ledger {ledger_id} is {metadata.state.name} and no longer this writer's",
        reason=Reason.FENCED,
        remedy="Stop writing it; what was confirmed is kept by whoever recovers it",
        details={"ledger_id": str(ledger_id)},
    )


def context_not_found(ledger_id: LedgerId) -> RefusedError:
    """Say that there is no such ledger (its context outlives its znode)."""
    return RefusedError(
        f"there is no ledger {ledger_id}",
        reason=Reason.LEDGER_NOT_FOUND,
        remedy="List a stream's ledgers with: tierlog ledger ls STREAM; those of no stream with: "
        "tierlog ledger ls",
        details={"ledger_id": str(ledger_id)},
    )


def checked_staging(stream: Stream, ledger_id: LedgerId, metadata: LedgerMetadata) -> Staging:
    """Return what a ledger was made for; refuse one that can't be attached to the stream."""
    staging = Staging.of(metadata)
    if staging is None or (staging.stream, staging.incarnation) != (
        stream.name,
        stream.incarnation,
    ):
        raise RefusedError(
            f"ledger {ledger_id} is no staging ledger of stream {stream.name}",
            remedy="Attach ledgers that were staged for this stream, since it was created",
            details={"ledger_id": str(ledger_id)},
        )
    if metadata.state is not LedgerState.CLOSED or metadata.last_entry_id == NO_ENTRY:
        raise RefusedError(
            f"ledger {ledger_id} is {metadata.state.name}, with {metadata.last_entry_id + 1} "
            "entries, and can't be attached",
            remedy="Attach ledgers that have entries and were closed by their writer",
            details={"ledger_id": str(ledger_id)},
        )
    return staging


def nothing_waits(ledger_id: LedgerId, state: LedgerState) -> RefusedError:
    """Say that a ledger is not being recovered."""
    return RefusedError(
        f"ledger {ledger_id} is {state.name}: nothing waits for its copies",
        remedy="Accept a loss only while a ledger's recovery waits for lost nodes",
        details={"ledger_id": str(ledger_id)},
    )


def _paged(stream: Stream) -> tuple[Stream, tuple[int, tuple[ListedLedger, ...]] | None]:
    """Move the oldest ledgers of a tail that has grown too long to a page of their own."""
    if len(stream.ledgers) <= TAIL_LEDGERS_MAX:
        return stream, None
    moved = stream.ledgers[:PAGE_LEDGERS]
    number = stream.pages[-1].page_number + 1 if stream.pages else 0
    page = LedgerPageRef(
        page_number=number,
        first_ledger_id=moved[0].ledger_id,
        last_ledger_id=moved[-1].ledger_id,
        ledger_count=len(moved),
    )
    kept = stream.ledgers[PAGE_LEDGERS:]
    return replace(stream, ledgers=kept, pages=(*stream.pages, page)), (number, moved)
