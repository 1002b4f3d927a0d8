"""What a leader knows of all streams and ledgers, read again only where it changed.

Owns a copy of the metadata that decisions are made from, and the watches that tell of changes,
one on each stream and one on each context. Does not own the truth: whoever deletes something by
a decision reads it again first (``actions``).

Invariants:
    * Reads are proportional to what changed, but for a slow round through all streams, which is
      there in case a change was not told. It lists each stream's manifests too, once.
    * A stream that could not be read, for whatever reason, is not decided about, and is read again
      at the next pass.
    * What was read of a stream stays read when the rest of it can't be: the next pass goes on
      there, so that a long stream is read to its end however often its reads fail.
    * Contexts are kept without what no decision asks for: places, digests, errors, history.

Crash, or a lost connection: everything is read again.
"""

import asyncio
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from uuid import UUID

import structlog

from tierlog.catalog import Catalog
from tierlog.catalog.streams import StreamSnapshot
from tierlog.model.attribute_record import AttributesRecord, KeptRoot
from tierlog.model.errors import Reason, TierlogError
from tierlog.model.ids import LedgerId, StreamName
from tierlog.model.offload import OffloadContext
from tierlog.model.policy import NO_LEVELS, Policy
from tierlog.model.stream import LedgerPageRef, ListedLedger
from tierlog_scheduler.defects import note_defect
from tierlog_scheduler.manifests import ManifestGate
from tierlog_scheduler.policy import LedgerView

log = structlog.get_logger()

Pages = Mapping[LedgerPageRef, tuple[ListedLedger, ...]]


@dataclass(slots=True)
class KnownStream:
    """A stream as of the last look. ``policy`` None: its levels contradict each other."""

    snapshot: StreamSnapshot
    changed: asyncio.Event
    pages: Pages
    policy: Policy | None
    contexts: dict[LedgerId, OffloadContext | None] = field(default_factory=dict)
    watches: dict[LedgerId, asyncio.Event] = field(default_factory=dict)
    views: tuple[LedgerView, ...] = ()
    trimmed: dict[LedgerId, OffloadContext | None] = field(default_factory=dict)
    attributes: AttributesRecord | None = None
    attributes_changed: asyncio.Event | None = None
    """None: not read yet; a raw stream has none to read."""
    trouble: bool = False
    unread: set[LedgerId] = field(default_factory=set)
    """Contexts that are still to be read anew, since the manifest was looked at."""
    unrecorded: dict[LedgerId, OffloadContext] = field(default_factory=dict)
    """What was read and no manifest was asked about yet, whole."""

    @property
    def is_stale(self) -> bool:
        """Whether anything of it is to be read again."""
        return (
            self.trouble
            or self.changed.is_set()
            or (self.attributes_changed is not None and self.attributes_changed.is_set())
            or any(watch.is_set() for watch in self.watches.values())
        )


class Mirror:
    """The copy of one leader. ``refresh`` before each pass; ``forget`` at the start of a term."""

    def __init__(
        self, catalog: Catalog, gate: ManifestGate, *, streams_in_flight_max: int, reread_s: float
    ) -> None:
        self._catalog = catalog
        self._gate = gate
        self._reread_s = reread_s
        self._slots = asyncio.Semaphore(streams_in_flight_max)
        self.reads = 0
        """Streams and contexts read so far."""
        self.forget()

    def __repr__(self) -> str:
        return f"<Mirror streams={len(self.streams)} reads={self.reads}>"

    def forget(self) -> None:
        """Know nothing."""
        self.streams: dict[StreamName, KnownStream] = {}
        self.defects: dict[StreamName, str] = {}
        """Streams that could not be read for a reason that nobody foresaw, and which."""
        self._levels = NO_LEVELS
        self._levels_changed: asyncio.Event | None = None
        self._names: list[StreamName] = []
        self._names_changed: asyncio.Event | None = None
        self._cursor = 0.0
        self._first = 0

    @property
    def is_whole(self) -> bool:
        """Whether every stream was read."""
        return len(self.streams) == len(self._names) and not any(
            known.trouble for known in self.streams.values()
        )

    def is_unread(self, name: StreamName) -> bool:
        """Tell whether there may be a stream of that name, not all of which was read."""
        known = self.streams.get(name)
        if known is not None:
            return known.trouble
        return self._names_changed is None or name in self._names

    def unread(self) -> set[StreamName]:
        """Return the streams that nothing may be decided about: see ``items``."""
        return set(self._names).difference(name for name, _ in self.items())

    def undecided(self) -> set[LedgerId]:
        """Return the ledgers that ``unread`` streams list, as far as they were ever read."""
        known = (self.streams[name] for name in self.unread() if name in self.streams)
        return {ledger.ledger_id for one in known for ledger in one.snapshot.ledgers}

    def listed(self) -> set[LedgerId]:
        """Return all ledgers that stand in a stream's list."""
        return {one.ledger_id for known in self.streams.values() for one in known.snapshot.ledgers}

    def newest_id(self) -> LedgerId:
        """Return the newest ledger id that stands in any list."""
        lists = (known.snapshot.ledgers for known in self.streams.values())
        return max((one[-1].ledger_id for one in lists if one), default=LedgerId(0))

    def abandoned(self) -> set[UUID]:
        """Return all attempts that are still to be cleaned."""
        return {
            attempt.uuid
            for known in self.streams.values()
            for context in known.contexts.values()
            if context is not None
            for attempt in context.abandoned
        }

    def items(self) -> Iterator[tuple[StreamName, KnownStream]]:
        """Iterate over the streams that may be decided about."""
        for name, known in self.streams.items():
            if not known.trouble and known.policy is not None:
                yield name, known

    async def refresh(self, since_last_s: float) -> None:
        """Read what changed. Raises when it can't be told which streams there are."""
        await self._read_levels()
        if self._names_changed is None or self._names_changed.is_set():
            before = set(self._names)
            self._names, self._names_changed = await self._catalog.streams.watch_names()
            for name in before.difference(self._names):
                self._drop(name)
        again = self._due_again(since_last_s)
        # Each time from another one on: where the bucket fails for some, others come first then.
        self._first = (self._first + max(1, len(self._names) // 8)) % max(1, len(self._names))
        async with asyncio.TaskGroup() as group:
            for name in (*self._names[self._first :], *self._names[: self._first]):
                known = self.streams.get(name)
                stopped = self._gate.reads_again(name)
                if known is None or known.is_stale or stopped or name in again:
                    await self._slots.acquire()
                    group.create_task(self._read(name, fresh=name in again))

    def _drop(self, name: StreamName) -> None:
        """Keep nothing of a stream that is not there any more."""
        self.streams.pop(name, None)
        self.defects.pop(name, None)
        self._gate.forget(name)

    async def _read_levels(self) -> None:
        if self._levels_changed is not None and not self._levels_changed.is_set():
            return
        before = self._levels
        self._levels, self._levels_changed = await self._catalog.policies.watch()
        if self._levels != before:
            for name, known in self.streams.items():
                known.snapshot = replace(known.snapshot, levels=self._levels)
                known.policy = _policy_of(name, known.snapshot)

    def _due_again(self, since_last_s: float) -> frozenset[StreamName]:
        """Return the streams whose turn it is in the slow round."""
        count = len(self._names)
        if not count:
            return frozenset()
        begin = self._cursor
        self._cursor = begin + min(count, count * since_last_s / self._reread_s)
        turns = range(math.floor(begin), math.floor(self._cursor))
        return frozenset(self._names[turn % count] for turn in turns)

    async def _read(self, name: StreamName, *, fresh: bool) -> None:
        try:
            await self._read_stream(name, fresh=fresh)
        except TierlogError as error:
            known = self.streams.get(name)
            if error.reason is Reason.STREAM_NOT_FOUND:
                # Removed since the names were read.
                self._drop(name)
            elif known is not None:
                known.trouble = True
            log.warning("stream.read_failed", stream=name, cause=str(error))
        except Exception as error:  # noqa: BLE001 - told: metric, log, status
            self.defects[name] = note_defect("read stream", error, stream=name)
            if name in self.streams:
                self.streams[name].trouble = True
        finally:
            self._slots.release()

    async def _read_stream(self, name: StreamName, *, fresh: bool) -> None:
        # The manifest first: one that is newer than what is read next must not go unnoticed.
        stopped = self._gate.reads_again(name)
        looked = await self._gate.look(name, compare=fresh)
        fresh = looked or fresh or stopped
        known = self.streams.get(name)
        if known is None or known.trouble or known.changed.is_set() or fresh:
            known = await self._read_list(name, known)
        await self._read_attributes(known, fresh=fresh)
        stream = known.snapshot.stream
        wanted = [one.ledger_id for one in known.snapshot.ledgers] + list(stream.deleting)
        if looked or (fresh and not known.unread):
            known.unread = set(wanted)
            known.unrecorded.clear()
        for ledger_id in wanted:
            watch = known.watches.get(ledger_id)
            if ledger_id in known.unread or watch is None or watch.is_set():
                await self._read_context(known, ledger_id)
        for ledger_id in known.contexts.keys() - set(wanted):
            known.contexts.pop(ledger_id)
            known.watches.pop(ledger_id, None)
        known.views = tuple(
            LedgerView(listed=one, context=known.contexts.get(one.ledger_id))
            for one in known.snapshot.ledgers
        )
        known.trimmed = {one: known.contexts.get(one) for one in stream.deleting}
        read = {one: known.unrecorded[one] for one in wanted if one in known.unrecorded}
        await self._gate.record(known.snapshot, read)
        known.unread.clear()
        known.unrecorded.clear()
        known.trouble = False
        self.defects.pop(name, None)

    async def _read_list(self, name: StreamName, before: KnownStream | None) -> KnownStream:
        pages = before.pages if before is not None else {}
        found, changed, pages = await self._catalog.streams.watch_snapshot(name, pages)
        self.reads += 1
        snapshot = replace(found, levels=self._levels)
        known = KnownStream(
            snapshot=snapshot,
            changed=changed,
            pages=pages,
            policy=_policy_of(name, snapshot),
            contexts=before.contexts if before is not None else {},
            watches=before.watches if before is not None else {},
            # Until all of it is read.
            trouble=True,
            attributes=before.attributes if before is not None else None,
            attributes_changed=before.attributes_changed if before is not None else None,
            unread=before.unread if before is not None else set(),
            unrecorded=before.unrecorded if before is not None else {},
        )
        self.streams[name] = known
        return known

    async def _read_attributes(self, known: KnownStream, *, fresh: bool) -> None:
        """Read how far the checkpoints of a stream's attributes have come."""
        stream, changed = known.snapshot.stream, known.attributes_changed
        if not stream.raw and (fresh or changed is None or changed.is_set()):
            found, known.attributes_changed = await self._catalog.attributes.watch(stream.name)
            known.attributes = slim_attributes(found)

    async def _read_context(self, known: KnownStream, ledger_id: LedgerId) -> None:
        context, changed = await self._catalog.contexts.watch(ledger_id)
        self.reads += 1
        known.contexts[ledger_id] = None if context is None else slim(context)
        known.watches[ledger_id] = changed
        known.unread.discard(ledger_id)
        known.unrecorded.pop(ledger_id, None)
        if context is not None:
            known.unrecorded[ledger_id] = context


def slim(context: OffloadContext) -> OffloadContext:
    """Return what decisions ask of a context."""
    doubt = replace(context.doubt, cause="") if context.doubt is not None else None
    return replace(
        context, location=None, copy=None, last_error="", last_worker="", history=(), doubt=doubt
    )


def slim_attributes(record: AttributesRecord | None) -> AttributesRecord | None:
    """Return what decisions ask of checkpoints: where the newest one is."""
    if record is None:
        return None
    newest = KeptRoot(through=record.newest.through)
    return AttributesRecord(incarnation=record.incarnation, newest=newest)


def _policy_of(name: StreamName, snapshot: StreamSnapshot) -> Policy | None:
    try:
        return snapshot.policy
    except TierlogError as error:
        log.error("policy.contradicts_itself", stream=name, cause=str(error))  # noqa: TRY400
        return None
