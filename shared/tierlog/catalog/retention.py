"""Trimming in the metadata: off the list at once, out of everything step by step (protocols.md 3).

Steps: ``begin_trim`` takes the oldest ledgers off the list, to ``deleting``, and moves every
attempt of theirs to ``abandoned``; ``drop_tier1`` deletes the local copy; once no attempt is left
``finish_trim`` removes the context and the id from ``deleting``. Streams go the same way:
``begin_stream_deletion``, then all of that, then ``remove_stream``.

Invariants:
    * Only a prefix of the list goes, and never a ledger that is open or in the middle of another
      change: the contexts' states are checked in the transaction that takes it off the list.
    * Nothing goes that nobody orders now: in the same transaction the policy, the levels above
      it, a wish and a pause are as the decision found them, and copies are where they must be.
    * A trimmed ledger stays named in ``deleting`` as long as anything of it may be left. Its
      context goes last, in one transaction with that.
    * Storage nodes find the deletion on record, in the context first, then below ``DELETED``.
    * Every step asks for the stream's incarnation, and repeating one is legal.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final
from uuid import UUID

from tierlog.catalog.change import MOVED, Moved, ensure_node, settle
from tierlog.catalog.policies import pinned_levels, touch_levels
from tierlog.catalog.streams import stream_not_found
from tierlog.format import ledger_metadata, paths, records
from tierlog.model.errors import RefusedError
from tierlog.model.ids import EntryId, LedgerId, StreamName
from tierlog.model.ledger import KEY_DELETED_MS, KEY_DELETION
from tierlog.model.offload import OffloadContext, OffloadState
from tierlog.model.policy import PolicyLevels
from tierlog.model.position import Position
from tierlog.model.stream import LedgerPageRef, ListedLedger, Stream, StreamLifecycle
from tierlog.model.trimming import TrimGrounds
from tierlog.ports.clock import Clock
from tierlog.ports.ids import Ids
from tierlog.ports.metadata import (
    REQUEST_BYTES_MAX,
    Create,
    Delete,
    MetadataStore,
    Operation,
    Put,
    Versioned,
)

TRIM_LEDGERS_MAX: Final = 64
"""Ledgers of one transaction: contexts of a few KiB each."""
TRIM_BYTES_MAX: Final = REQUEST_BYTES_MAX // 2
"""Their contexts together, which may be long where much went wrong; the rest is for the list."""


class RetentionCatalog:
    """Ledgers and streams on their way out."""

    def __init__(self, store: MetadataStore, *, clock: Clock, ids: Ids) -> None:
        self._store = store
        self._clock = clock
        self._ids = ids

    async def begin_trim(
        self,
        name: StreamName,
        incarnation: UUID,
        ledger_ids: Sequence[LedgerId],
        *,
        grounds: TrimGrounds,
    ) -> int:
        """Take the oldest ledgers off the list, some at a time; return how many this call took.

        Raises what forbids it, also that the grounds are others by now; those before have then
        left the list all the same.
        """
        count = 0
        while count < len(ledger_ids):
            taken = await self._trim_some(name, incarnation, ledger_ids[count:], grounds)
            if not taken:
                break
            count += len(taken)
        return count

    async def _trim_some(
        self,
        name: StreamName,
        incarnation: UUID,
        wanted: Sequence[LedgerId],
        grounds: TrimGrounds,
    ) -> list[LedgerId]:
        """Take ledgers of one page, or of the list's tail, off the list, in one transaction."""
        now_ms = self._clock.wall_ms()
        path = paths.stream_path(name)
        planned: list[LedgerId] = []

        async def one_round() -> list[LedgerId] | Moved:
            stream, version = await self._stream(name, incarnation)
            done = set(stream.deleting)
            if planned and done.issuperset(planned):
                # The answer to the round before was lost.
                return planned
            levels, pinned = await pinned_levels(self._store)
            _check_grounds(stream, levels, grounds)
            found = await self._oldest(stream)
            if found is None:
                return MOVED
            page, ledgers = found
            taken = _prefix([one for one in wanted if one not in done], ledgers)
            if not taken:
                return []
            changes = await self._trimmings(stream, taken, grounds, now_ms)
            taken = taken[: len(changes)]
            planned[:] = [one.ledger_id for one in taken]
            operations: list[Operation] = [pinned, *changes]
            kept = ledgers[len(taken) :]
            after = replace(
                stream,
                deleting=(*stream.deleting, *planned),
                trimmed_end=Position(taken[-1].ledger_id, EntryId(taken[-1].entry_count)),
            )
            if page is None:
                after = replace(after, ledgers=kept)
            else:
                after, paging = _without(after, page, kept)
                operations.append(paging)
            operations.append(Put(path, records.encode_stream(after), version))
            await self._store.transact(operations)
            return planned

        return list(await settle(self._store, self._ids, path, one_round))

    async def _oldest(
        self, stream: Stream
    ) -> tuple[Versioned | None, tuple[ListedLedger, ...]] | None:
        """Return the page that the list begins with (None: its tail) and what is on it.

        None: the list has moved.
        """
        if not stream.pages:
            return None, stream.ledgers
        page = await self._store.get(paths.page_path(stream.name, stream.pages[0].page_number))
        return None if page is None else (page, records.decode_page(page.data))

    async def _trimmings(
        self, stream: Stream, taken: Sequence[ListedLedger], grounds: TrimGrounds, now_ms: int
    ) -> list[Put]:
        """Return the changes of ledgers' contexts, of as many as have room: one at least."""
        changes: list[Put] = []
        size = 0
        for one in taken:
            change = await self._trimming(stream, one, grounds, now_ms)
            size += len(change.data)
            if changes and size > TRIM_BYTES_MAX:
                break
            changes.append(change)
        return changes

    async def _trimming(
        self, stream: Stream, listed: ListedLedger, grounds: TrimGrounds, now_ms: int
    ) -> Put:
        """Return the change of a ledger's context; refused in a state that forbids it."""
        if not listed.closed:
            raise _refused(listed.ledger_id, "is open")
        path = paths.context_path(listed.ledger_id)
        found = await self._store.get(path)
        if found is None:
            raise _refused(listed.ledger_id, "has no context")
        context = records.decode_context(found.data)
        if context.incarnation != stream.incarnation:
            raise _refused(listed.ledger_id, "belongs to another incarnation of its stream")
        if grounds.wants_copy(listed.ledger_id) and not context.complete:
            raise _refused(listed.ledger_id, "is to be offloaded first")
        trimming = context.trimming_begun(now_ms=now_ms)
        return Put(path, records.encode_context(trimming), found.version)

    async def drop_tier1(self, ledger_id: LedgerId) -> OffloadContext:
        """Delete the local copy of a trimmed ledger, and put it on record, in one transaction."""
        ledger_path, context_path = paths.ledger_path(ledger_id), paths.context_path(ledger_id)
        record_path = paths.deleted_path(ledger_id)
        noted = {
            KEY_DELETION: str(self._ids.uuid()).encode(),
            KEY_DELETED_MS: str(self._clock.wall_ms()).encode(),
        }

        async def one_round() -> OffloadContext:
            found = await self._store.get(context_path)
            if found is None:
                raise _refused(ledger_id, "has no context")
            context = records.decode_context(found.data)
            if context.state is not OffloadState.TRIMMING:
                raise _refused(ledger_id, f"is {context.state.name}, not trimmed")
            if context.bookkeeper_deleted:
                return context
            dropped = context.trimmed_locally()
            operations: list[Operation] = [
                Put(context_path, records.encode_context(dropped), found.version)
            ]
            ledger = await self._store.get(ledger_path)
            if ledger is not None:
                metadata = ledger_metadata.decode_znode(ledger.data)
                record = replace(metadata, custom={**metadata.custom, **noted})
                await ensure_node(self._store, record_path.rpartition("/")[0])
                operations += [
                    Delete(ledger_path, ledger.version),
                    Create(record_path, ledger_metadata.encode_znode(record)),
                ]
            await self._store.transact(operations)
            return dropped

        return await settle(self._store, self._ids, context_path, one_round)

    async def finish_trim(self, name: StreamName, incarnation: UUID, ledger_id: LedgerId) -> None:
        """Forget a trimmed ledger; refused while anything of it may be left."""
        path, context_path = paths.stream_path(name), paths.context_path(ledger_id)

        async def one_round() -> None:
            stream, version = await self._stream(name, incarnation)
            if ledger_id not in stream.deleting:
                return
            operations: list[Operation] = []
            found = await self._store.get(context_path)
            if found is not None:
                context = records.decode_context(found.data)
                if not context.is_trimmed:
                    raise _refused(ledger_id, "is not wholly deleted yet")
                operations.append(Delete(context_path, found.version))
            left = tuple(one for one in stream.deleting if one != ledger_id)
            data = records.encode_stream(replace(stream, deleting=left))
            await self._store.transact([Put(path, data, version), *operations])

        await settle(self._store, self._ids, path, one_round)

    async def begin_stream_deletion(self, name: StreamName) -> Stream:
        """Mark a stream: no ledger is opened in it any more, and its owner is told to close."""
        path = paths.stream_path(name)
        meant: Stream | None = None

        async def one_round() -> Stream:
            nonlocal meant
            found = await self._store.get(path)
            stream = None if found is None else records.decode_stream(found.data)
            if meant is not None and (stream is None or stream.incarnation != meant.incarnation):
                # Marked by a round whose answer was lost, and gone since; this one is another.
                return replace(meant, lifecycle=StreamLifecycle.DELETING)
            if found is None or stream is None:
                raise stream_not_found(name)
            meant = stream
            if stream.lifecycle is StreamLifecycle.DELETING:
                return stream
            marked = replace(stream, lifecycle=StreamLifecycle.DELETING)
            put = Put(path, records.encode_stream(marked), found.version)
            await self._store.transact([put, *await touch_levels(self._store)])
            return marked

        return await settle(self._store, self._ids, path, one_round)

    async def remove_stream(self, name: StreamName, incarnation: UUID) -> None:
        """Free the name of a stream that is being deleted; refused while it has anything left."""
        path, pages = paths.stream_path(name), paths.pages_path(name)

        async def one_round() -> None:
            found = await self._store.get(path)
            stream = None if found is None else records.decode_stream(found.data)
            if found is None or stream is None or stream.incarnation != incarnation:
                return
            empty = not (stream.ledgers or stream.pages or stream.deleting)
            if stream.lifecycle is not StreamLifecycle.DELETING or not empty:
                raise RefusedError(
                    f"stream {name} is not empty, or not being deleted",
                    remedy="Delete it with: tierlog stream delete; its ledgers go first",
                    details={"stream": name},
                )
            operations: list[Operation] = []
            for below in (pages, paths.attributes_path(name)):
                there = await self._store.get(below)
                if there is not None:
                    operations.append(Delete(below, there.version))
            await self._store.transact([*operations, Delete(path, found.version)])

        await settle(self._store, self._ids, path, one_round)

    async def _stream(self, name: StreamName, incarnation: UUID) -> tuple[Stream, int]:
        found = await self._store.get(paths.stream_path(name))
        stream = None if found is None else records.decode_stream(found.data)
        if found is None or stream is None or stream.incarnation != incarnation:
            raise stream_not_found(name)
        return stream, found.version


def _check_grounds(stream: Stream, levels: PolicyLevels, grounds: TrimGrounds) -> None:
    """Refuse to trim by a decision that stood on something else than what holds now."""
    if grounds.paused or TrimGrounds.of(stream, levels) != grounds:
        raise RefusedError(
            f"stream {stream.name} is not trimmed: its policy, a level above it, a wish or a "
            "pause was changed since that was decided, or it is paused",
            remedy="Nothing to do: the next pass of the scheduler decides anew",
            details={"stream": stream.name},
        )


def _prefix(
    wanted: Sequence[LedgerId], ledgers: Sequence[ListedLedger]
) -> tuple[ListedLedger, ...]:
    """Return the ledgers that the list begins with, as far as they are wanted."""
    ids = frozenset(wanted)
    count = 0
    while count < min(len(ledgers), TRIM_LEDGERS_MAX) and ledgers[count].ledger_id in ids:
        count += 1
    return tuple(ledgers[:count])


def _without(
    stream: Stream, page: Versioned, kept: tuple[ListedLedger, ...]
) -> tuple[Stream, Operation]:
    """Return the stream whose first page holds ``kept`` alone, and the change of the page."""
    ref = stream.pages[0]
    path = paths.page_path(stream.name, ref.page_number)
    if not kept:
        return replace(stream, pages=stream.pages[1:]), Delete(path, page.version)
    shorter = LedgerPageRef(
        page_number=ref.page_number,
        first_ledger_id=kept[0].ledger_id,
        last_ledger_id=kept[-1].ledger_id,
        ledger_count=len(kept),
    )
    put = Put(path, records.encode_page(kept), page.version)
    return replace(stream, pages=(shorter, *stream.pages[1:])), put


def _refused(ledger_id: LedgerId, why: str) -> RefusedError:
    return RefusedError(
        f"ledger {ledger_id} can't be trimmed: it {why}",
        remedy="Nothing to do: the next pass of the scheduler decides anew",
        details={"ledger_id": str(ledger_id)},
    )
