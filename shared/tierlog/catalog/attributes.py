"""Checkpoints of streams' attributes in the metadata store (protocols.md section 4).

Owns the transactions on the znode beside a stream's own. Does not own the objects that a record
names, nor when a checkpoint is made: the owner does.

Invariants:
    * A checkpoint is published only by the stream's owner, behind the newest one, in the
      generation in which its objects were written: all three are checked in the transaction.
    * Nothing is made below a stream but by a transaction that finds the stream there.
    * A generation is raised before anything is deleted that no root needs.
    * Entries are given up only while an admin's consent is on record, which the next checkpoint
      clears.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple
from uuid import UUID

from tierlog.catalog.change import settle
from tierlog.catalog.policies import read_levels
from tierlog.catalog.streams import check_not_deleting, check_owner, stream_not_found
from tierlog.format import paths, records
from tierlog.format.attribute_records import decode_attributes, encode_attributes
from tierlog.model.attribute_record import AttributesRecord, GivenUp, KeptRoot, KeyRange
from tierlog.model.attributes import IndexChunk, IndexObject
from tierlog.model.errors import Reason, RefusedError, TierlogError
from tierlog.model.ids import StreamName
from tierlog.model.policy import PolicyLevels
from tierlog.model.position import Position
from tierlog.model.stream import Stream
from tierlog.ports.clock import Clock
from tierlog.ports.ids import Ids
from tierlog.ports.metadata import Check, Create, MetadataStore, Put, Versioned


class Anew(NamedTuple):
    """Says that an index takes the place of a damaged one: as ``AttributesRecord.made_anew``."""

    good: Position | None
    lost: Sequence[KeyRange]


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """A checkpoint that is to be published behind ``base``, with what was written for it.

    ``anew``: it is as of the same entry, and nothing of ``base`` is in it.
    """

    base: KeptRoot
    generation: int
    after: KeptRoot
    made: tuple[IndexObject, ...] = ()
    chunk: IndexChunk | None = None
    anew: Anew | None = None

    def of(self, record: AttributesRecord, *, keep_ends: bool) -> AttributesRecord:
        """Return what the record is then."""
        record = replace(record, objects=(*record.objects, *self.made))
        if self.anew is not None:
            good, lost = self.anew
            moved = record.made_anew(self.after, good=good, lost=lost)
        else:
            moved = record.published(self.after, None, keep_ends=keep_ends)
        return moved if self.chunk is None else moved.closed(self.chunk)


class GenerationRaisedError(RefusedError):
    """Nothing was published: objects may be gone that were written before."""


class AttributeCatalog:
    """The checkpoints of a cluster's streams."""

    def __init__(self, store: MetadataStore, *, clock: Clock, ids: Ids) -> None:
        self._store = store
        self._clock = clock
        self._ids = ids

    async def get(self, name: StreamName) -> AttributesRecord | None:
        """Return what is published as of now (after ``sync``); None: nothing ever was."""
        path = paths.attributes_path(name)
        await self._store.sync(path)
        return await self.peek(name)

    async def peek(self, name: StreamName) -> AttributesRecord | None:
        """Return what is published as last seen by this client; may be a little old."""
        return _record_of(await self._store.get(paths.attributes_path(name)))

    async def watch(self, name: StreamName) -> tuple[AttributesRecord | None, asyncio.Event]:
        """Return what is published, and an event that is set once that has changed."""
        found, changed = await self._store.watch(paths.attributes_path(name))
        return _record_of(found), changed

    async def declare(self, claimed: Stream) -> AttributesRecord:
        """Say that a stream has attributes, before a checkpoint of them; return what is published.

        From then on retention takes no ledger that a checkpoint does not cover. Raises FENCED when
        the stream has another owner.
        """
        path = paths.attributes_path(claimed.name)

        async def one_round() -> AttributesRecord:
            _, checked = await self._owned(claimed)
            found = await self._store.get(path)
            if found is not None:
                return _checked(found, claimed)
            made = AttributesRecord(incarnation=claimed.incarnation)
            await self._store.transact([checked, Create(path, encode_attributes(made))])
            return made

        return await settle(self._store, self._ids, path, one_round)

    async def publish(self, claimed: Stream, publication: Publication) -> AttributesRecord:
        """Put a checkpoint in the place of the newest one.

        Raises FENCED when the stream has another owner, or another checkpoint than ``base`` is
        published; ``GenerationRaisedError`` when the objects may have been swept.
        """
        path = paths.attributes_path(claimed.name)

        async def one_round() -> AttributesRecord:
            stream, checked = await self._owned(claimed)
            levels = await read_levels(self._store)
            found = await self._store.get(path)
            if found is None:
                raise stream_not_found(claimed.name)
            record = _checked(found, claimed)
            if record.newest.is_at(publication.after):
                return record
            if not record.newest.is_at(publication.base):
                raise moved_on(claimed.name, record)
            if record.generation != publication.generation:
                raise _raised(claimed.name, record)
            keep_ends = wants_copies(stream, levels)
            planned = publication.of(record, keep_ends=keep_ends)
            put = Put(path, encode_attributes(planned), found.version)
            await self._store.transact([checked, put])
            return planned

        return await settle(self._store, self._ids, path, one_round)

    async def accept_loss(self, stream: Stream, *, by: str) -> AttributesRecord:
        """Let the owner give up entries that no tier gives, to rebuild what is behind them.

        Whoever rebuilds the stream's attributes, now or later, sees it, until a checkpoint is
        there: also one that is published before the answer came. Saying it again changes nothing.
        """
        note = f"{self._clock.wall_ms()} {by}"
        said_at: list[KeptRoot] = []

        def plan(record: AttributesRecord) -> AttributesRecord:
            said_at.append(record.newest)
            return replace(record, loss_accepted=note)

        def applied(record: AttributesRecord) -> bool:
            # What a checkpoint has cleared since stands for no later loss, of which nobody knows.
            spent = bool(said_at) and not record.newest.is_at(said_at[0])
            return spent or bool(record.loss_accepted)

        record = await self._change(stream.name, stream.incarnation, plan, applied=applied)
        if record is None:
            raise RefusedError(
                f"stream {stream.name} has no attributes: nothing waits for its ledgers",
                remedy="Accept a loss only while a stream's attributes can't be rebuilt",
            )
        return record

    async def give_up(self, claimed: Stream, lost: GivenUp) -> AttributesRecord:
        """Put on record that entries are not counted in; refused without an admin's consent.

        Raises FENCED when the stream has another owner.
        """
        path = paths.attributes_path(claimed.name)

        async def one_round() -> AttributesRecord:
            _, checked = await self._owned(claimed)
            found = await self._store.get(path)
            if found is None:
                raise stream_not_found(claimed.name)
            record = _checked(found, claimed)
            planned = record.without_entries(lost)
            if planned == record:
                return record
            if not record.loss_accepted:
                raise RefusedError(
                    f"nobody accepted that entries {lost.first} to {lost.last} of ledger "
                    f"{lost.ledger_id} are lost",
                    remedy=f"Accept it with: tierlog attributes rebuild {claimed.name} "
                    "--accept-loss",
                )
            await self._store.transact(
                [checked, Put(path, encode_attributes(planned), found.version)]
            )
            return planned

        return await settle(self._store, self._ids, path, one_round)

    async def raise_generation(
        self, name: StreamName, incarnation: UUID
    ) -> AttributesRecord | None:
        """Refuse all flushes under way, and return what is named then; None: there is nothing.

        What was written before, and is not named then, will never be.
        """
        raised: AttributesRecord | None = None

        def plan(record: AttributesRecord) -> AttributesRecord:
            nonlocal raised
            raised = record.raised()
            return raised

        def applied(record: AttributesRecord) -> bool:
            # Also by another sweep: it is the same to who asks.
            return raised is not None and record.generation >= raised.generation

        return await self._change(name, incarnation, plan, applied=applied)

    async def drop_ends(
        self, name: StreamName, incarnation: UUID, *, before: Position
    ) -> AttributesRecord | None:
        """Forget roots of ledgers below ``before``: the manifest names that one by itself."""
        return await self._change(
            name,
            incarnation,
            lambda record: record.without_ends(before),
            applied=lambda record: record == record.without_ends(before),
        )

    async def _change(
        self,
        name: StreamName,
        incarnation: UUID,
        plan: Callable[[AttributesRecord], AttributesRecord],
        *,
        applied: Callable[[AttributesRecord], bool],
    ) -> AttributesRecord | None:
        path = paths.attributes_path(name)

        async def one_round() -> AttributesRecord | None:
            found = await self._store.get(path)
            record = _record_of(found)
            if found is None or record is None or record.incarnation != incarnation:
                return None
            if applied(record):
                return record
            planned = plan(record)
            await self._store.set(path, encode_attributes(planned), version=found.version)
            return planned

        return await settle(self._store, self._ids, path, one_round)

    async def _owned(self, claimed: Stream) -> tuple[Stream, Check]:
        """Return a stream, and the check that it still is this owner's; FENCED if it is not."""
        path = paths.stream_path(claimed.name)
        found = await self._store.get(path)
        if found is None:
            raise stream_not_found(claimed.name)
        stream = records.decode_stream(found.data)
        check_owner(stream, claimed)
        check_not_deleting(stream)
        return stream, Check(path, found.version)


def wants_copies(stream: Stream, levels: PolicyLevels) -> bool:
    """Tell whether ledgers of the stream are to be offloaded, so that a restore can begin there."""
    if stream.offload_through is not None:
        return True
    try:
        return levels.effective(stream.name, stream.policy).offloads
    except TierlogError:
        # Levels that contradict each other say nothing: keep what may be needed.
        return True


def _record_of(found: Versioned | None) -> AttributesRecord | None:
    # An empty node is one that somebody made as a parent.
    return decode_attributes(found.data) if found is not None and found.data else None


def _checked(found: Versioned, claimed: Stream) -> AttributesRecord:
    record = decode_attributes(found.data)
    if record.incarnation != claimed.incarnation:
        raise stream_not_found(claimed.name)
    return record


def moved_on(name: StreamName, record: AttributesRecord) -> RefusedError:
    """Say that a checkpoint was to be published behind one that is not the newest."""
    return RefusedError(
        f"the checkpoint of stream {name} moved on to {record.newest.through}",
        reason=Reason.FENCED,
        remedy="Load the checkpoint again, and rebuild from it",
        details={"stream": name},
    )


def _raised(name: StreamName, record: AttributesRecord) -> RefusedError:
    return GenerationRaisedError(
        f"the checkpoints of stream {name} are of generation {record.generation} by now",
        reason=Reason.FENCED,
        remedy="Flush again: objects that were written before may be gone",
        details={"stream": name, "generation": str(record.generation)},
    )
