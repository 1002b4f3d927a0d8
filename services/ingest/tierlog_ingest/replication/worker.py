"""Takes ledgers off the queue and makes them whole: copies runs, and gives ensembles other nodes.

Owns: one ledger's work from the queue to its end, and how many are worked on at once. Does not own
what is wrong (``plan`` judges, ``auditor`` and others report), the bytes' way (``copying``), nor
the queue's transactions (``tierlog.catalog.underreplication``).

Consistency
    * A node takes another's place only after it said that it holds all of the share, durably.
    * A ledger leaves the queue only as it was when the work on it began.
    * The last segment of a ledger that is not closed is left to its owner; those before it hold
      what is confirmed, and change no more. This worker is the owner's, too: when an auditor
      complains after the grace time, it has the owner seal the ledger here. A stream that nobody
      alive owns is claimed by that, and its ledger recovered; a bare ledger is recovered.
    * Unknown is not whole: while a node can't say what it holds, the ledger stays in the queue.

Retries
    For ever, each ledger with a back-off of its own. The lock saves work and proves nothing.

Cancellation, crash
    Copies that were made stay; the next worker finds them and goes on.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

import structlog

from tierlog.catalog import Catalog
from tierlog.ledger.directory import NodeDirectory
from tierlog.ledger.keys import NO_KEYS, LedgerKeys
from tierlog.ledger.placement import choose_replacement
from tierlog.model.errors import IndeterminateError, Reason, RetryableError, TierlogError
from tierlog.model.ids import EntryId, LedgerId, NodeId, StreamName, stream_name
from tierlog.model.ledger import KEY_STREAM, LedgerMetadata, LedgerState
from tierlog.model.node import NodeInfo
from tierlog.model.replication import CopyTrouble, Draining, UnderReplicated
from tierlog.model.spans import count, union, without
from tierlog.ports.clock import Clock
from tierlog.ports.ids import Ids
from tierlog.ports.storage_node import StorageNodeClient
from tierlog.runtime.sections import ReplicationSettings
from tierlog_ingest.replication.checking import held_by
from tierlog_ingest.replication.copying import Copier
from tierlog_ingest.replication.plan import (
    Copy,
    Fate,
    complained_nodes,
    copies_of,
    in_order,
    is_due,
    is_suspect,
)

log = structlog.get_logger()

SEAL_S_MAX: Final = 30.0
LONG_QUEUE: Final = 100
LONG_QUEUE_FACTOR_MAX: Final = 30.0

Seal = Callable[[StreamName], Awaitable[object]]
Recover = Callable[[LedgerId], Awaitable[object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Owning:
    """What a worker asks of its process about ledgers that are not closed."""

    node_id: NodeId
    seal: Seal
    """Closes a stream's open ledger, claiming the stream where nobody alive owns it."""
    recover_bare: Recover
    """Recovers and closes a ledger that belongs to no stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cluster:
    """Who is there, as of when a round began."""

    live: Mapping[NodeId, NodeInfo]
    draining: Mapping[NodeId, Draining]


@dataclass(frozen=True, slots=True)
class _Mending:
    """One ledger's pass."""

    ledger_id: LedgerId
    damaged: set[tuple[NodeId, EntryId]] = field(default_factory=set)
    """Copies that turned out to be bad where they were to be read from."""

    def note_damage(self, _: LedgerId, node_id: NodeId, entry_id: EntryId | None) -> None:
        """Take notice of a bad copy; what a node lacks is found by asking it."""
        if entry_id is not None:
            self.damaged.add((node_id, entry_id))


class Worker:
    """The worker of one process. ``run`` is its life."""

    def __init__(
        self,
        catalog: Catalog,
        nodes: NodeDirectory[StorageNodeClient],
        owning: Owning,
        *,
        clock: Clock,
        ids: Ids,
        settings: ReplicationSettings,
        keys: LedgerKeys = NO_KEYS,
    ) -> None:
        self._catalog = catalog
        self._nodes = nodes
        self._owning = owning
        self._clock = clock
        self._ids = ids
        self._settings = settings
        self._holder = ids.uuid()
        self._copier = Copier(nodes, keys, clock=clock, bytes_per_s=settings.bytes_per_s)
        self._queued = 0
        self._made_whole = 0
        self._at_work: set[LedgerId] = set()

    def __repr__(self) -> str:
        return f"<Worker of {self._owning.node_id}, queued={self._queued} {self._copier!r}>"

    def statistics(self) -> dict[str, float]:
        """Return how far replication is, as this process sees it."""
        return {
            "queue_ledgers": self._queued,
            "at_work_ledgers": len(self._at_work),
            "made_whole": self._made_whole,
            **self._copier.statistics(),
        }

    async def run(self) -> None:
        """Empty the queue, again and again; ends by cancellation."""
        while True:
            try:
                await self.round()
            except TierlogError as error:
                log.info("replication.skipped", cause=str(error))
            # Listing a long queue costs as much as the work: it is done the less often.
            pause = min(LONG_QUEUE_FACTOR_MAX, max(1.0, self._queued / LONG_QUEUE))
            await asyncio.sleep(self._settings.interval_s * pause * self._ids.uniform(0.5, 1.0))

    async def round(self) -> None:
        """Try each ledger that is due once."""
        queue = await self._catalog.underreplicated.list()
        self._queued = len(queue)
        now_ms = self._clock.wall_ms()
        due = [
            one
            for one in queue
            if is_due(
                one,
                now_ms,
                backoff_s_first=self._settings.backoff_s_first,
                backoff_s_max=self._settings.backoff_s_max,
            )
        ]
        if not due:
            return
        start = int(self._ids.uniform(0, due[-1].ledger_id + 1))
        cluster = await self._cluster()
        slots = asyncio.Semaphore(self._settings.copies_in_flight_max)
        async with asyncio.TaskGroup() as tasks:
            for one in in_order(due, LedgerId(start)):
                await slots.acquire()
                task = tasks.create_task(self._guarded(one, cluster))
                task.add_done_callback(lambda _: slots.release())

    async def _cluster(self) -> _Cluster:
        live = await self._catalog.nodes.live()
        return _Cluster(live=live, draining=await self._catalog.draining.list())

    async def _guarded(self, one: UnderReplicated, cluster: _Cluster) -> None:
        """Work on one ledger; what goes wrong is written beside it, for people and for later."""
        lock = self._catalog.underreplicated.lock(one.ledger_id, self._holder)
        try:
            if not await lock.take():
                return
        except TierlogError as error:
            log.info("replication.not_locked", ledger_id=one.ledger_id, cause=str(error))
            return
        self._at_work.add(one.ledger_id)
        try:
            trouble = await self._work(one, cluster)
            if trouble:
                await self._note(one.ledger_id, trouble)
        except (RetryableError, IndeterminateError) as error:
            await self._note(one.ledger_id, str(error))
        except TierlogError as error:
            log.warning("replication.failed", ledger_id=one.ledger_id, cause=str(error))
            await self._note(one.ledger_id, str(error))
        finally:
            self._at_work.discard(one.ledger_id)
            await lock.release()

    async def _note(self, ledger_id: LedgerId, trouble: str) -> None:
        try:
            known = await self._catalog.underreplicated.get(ledger_id)
            if known is not None:
                await self._catalog.underreplicated.fail(known, error=trouble)
        except TierlogError as error:
            log.info("replication.note_lost", ledger_id=ledger_id, cause=str(error))

    async def _work(self, one: UnderReplicated, cluster: _Cluster) -> str:
        """Make a ledger whole; return what it still waits for, or nothing."""
        catalog = self._catalog
        metadata = await catalog.ledgers.get(one.ledger_id)
        if metadata is not None and metadata.state is not LedgerState.CLOSED:
            return await self._work_unclosed(one, metadata, cluster)
        begun = await catalog.underreplicated.begin(one, worker=self._owning.node_id)
        if begun is None:
            return ""
        trouble = await self._mend_all(begun, metadata, cluster) if metadata is not None else ""
        if not trouble:
            await self._strike_off(begun)
        return trouble

    async def _work_unclosed(
        self, one: UnderReplicated, metadata: LedgerMetadata, cluster: _Cluster
    ) -> str:
        *before, last = metadata.segments
        if not any(set(segment.ensemble).intersection(one.nodes) for segment in before):
            return await self._close_if_stuck(one, metadata, cluster)
        begun = await self._catalog.underreplicated.begin(one, worker=self._owning.node_id)
        if begun is None:
            return ""
        trouble = await self._mend_all(begun, metadata, cluster)
        if trouble:
            return trouble
        if set(last.ensemble).isdisjoint(begun.nodes):
            await self._strike_off(begun)
            return ""
        return await self._close_if_stuck(begun, metadata, cluster)

    async def _mend_all(
        self, begun: UnderReplicated, metadata: LedgerMetadata, cluster: _Cluster
    ) -> str:
        copies = copies_of(metadata, begun, live=cluster.live, draining=cluster.draining)
        mending = _Mending(begun.ledger_id)
        troubles = [await self._mend(mending, copy) for copy in copies]
        for node_id, entry_id in sorted(mending.damaged):
            if not is_suspect(begun, node_id, entry_id):
                await self._catalog.underreplicated.add(
                    begun.ledger_id,
                    reason=CopyTrouble.DAMAGED,
                    nodes=[node_id],
                    entries=(entry_id, entry_id),
                )
        return "; ".join(sorted({one for one in troubles if one}))

    async def _strike_off(self, begun: UnderReplicated) -> None:
        if await self._catalog.underreplicated.remove(begun.ledger_id, begun.version):
            self._made_whole += 1
            log.info("replication.ledger_whole", ledger_id=begun.ledger_id, reasons=begun.reasons)

    async def _mend(self, mending: _Mending, copy: Copy) -> str:
        if copy.fate is Fate.AWAITED:
            return f"node {copy.node_id} is away; it comes back, or will count as lost"
        try:
            # Metadata as it is now: the copy before this one may have been given another node.
            metadata = await self._catalog.ledgers.get(mending.ledger_id)
            if metadata is None:
                return ""
            if copy.fate is Fate.COMPARED:
                return await self._complete(mending, metadata, copy)
            return await self._move(mending, metadata, copy)
        except TierlogError as error:
            return str(error)  # and go on with the other copies

    async def _complete(self, mending: _Mending, metadata: LedgerMetadata, copy: Copy) -> str:
        """Copy to a live node what it lacks of its share."""
        ledger_id = mending.ledger_id
        held = await held_by(self._nodes, copy.node_id, ledger_id)
        if held is None:
            return f"node {copy.node_id} can't say what it holds"
        wanted = union([*without(copy.share, held), *copy.suspect])
        if not wanted:
            return ""
        await self._copier.copy(
            ledger_id, metadata, wanted, copy.node_id, on_damage=mending.note_damage
        )
        log.info(
            "replication.copied", ledger_id=ledger_id, node_id=copy.node_id, entries=count(wanted)
        )
        return await self._lacking(ledger_id, copy, copy.node_id)

    async def _move(self, mending: _Mending, metadata: LedgerMetadata, copy: Copy) -> str:
        """Give another node all of a share, then the place in the ensemble."""
        ledger_id = mending.ledger_id
        # A round may last hours, and nobody is to get what has begun to be emptied since.
        cluster = await self._cluster()
        segment = metadata.segment_of(copy.first_entry_id)
        if segment.first_entry_id != copy.first_entry_id or copy.node_id not in segment.ensemble:
            return ""  # someone else gave the place away
        joining = choose_replacement(
            cluster.live.values(),
            segment.ensemble,
            segment.ensemble.index(copy.node_id),
            write_quorum=metadata.write_quorum,
            seed=f"{ledger_id}".encode(),
            excluded=cluster.draining,
        )
        if joining is None:
            return f"no other node can take what {copy.node_id} held"
        held = await held_by(self._nodes, joining, ledger_id)
        if held is None:
            return f"node {joining} can't say what it holds"
        wanted = without(copy.share, held)
        await self._copier.copy(ledger_id, metadata, wanted, joining, on_damage=mending.note_damage)
        lacking = await self._lacking(ledger_id, copy, joining)
        if lacking:
            return lacking
        if joining in await self._catalog.draining.list():
            return f"node {joining} is being emptied since it was chosen"
        await self._catalog.underreplicated.replace_member(
            ledger_id,
            first_entry_id=copy.first_entry_id,
            leaving=copy.node_id,
            joining=joining,
        )
        log.info(
            "replication.moved",
            ledger_id=ledger_id,
            first_entry_id=copy.first_entry_id,
            leaving=copy.node_id,
            joining=joining,
            entries=count(wanted),
        )
        return ""

    async def _lacking(self, ledger_id: LedgerId, copy: Copy, node_id: NodeId) -> str:
        """Ask the node once more: what was acknowledged must be there by its own account."""
        held = await held_by(self._nodes, node_id, ledger_id)
        if held is None:
            return f"node {node_id} can't say what it holds"
        lacking = without(copy.share, held)
        return f"node {node_id} still lacks {count(lacking)} entries" if lacking else ""

    async def _close_if_stuck(
        self, one: UnderReplicated, metadata: LedgerMetadata, cluster: _Cluster
    ) -> str:
        """Have a ledger closed that stands open on nodes which are gone, or are to go."""
        lost = complained_nodes(one, CopyTrouble.LOST)
        # Once a draining is called off, its complaint says nothing: the node may be away for a
        # restart, and the auditor complains anew when it is lost.
        gone = frozenset(
            node
            for node in lost | complained_nodes(one, CopyTrouble.DRAINING)
            if node in cluster.draining or (node in lost and node not in cluster.live)
        )
        if gone.isdisjoint(metadata.segments[-1].ensemble):
            return "the ledger is not closed yet"
        able = [
            info.node_id
            for info in cluster.live.values()
            if not (info.read_only or info.draining or info.node_id in cluster.draining)
        ]
        if len(able) < metadata.ensemble_size:
            # Closing it would not help: the next ledger would lie on the same nodes.
            return f"{len(able)} nodes can take ledgers, and its ensemble has more"
        return await self._have_closed(one.ledger_id, metadata, gone, cluster)

    async def _have_closed(
        self,
        ledger_id: LedgerId,
        metadata: LedgerMetadata,
        gone: Collection[NodeId],
        cluster: _Cluster,
    ) -> str:
        """Ask who may close a ledger for that; nobody, where it is another process's to do."""
        name = metadata.custom.get(KEY_STREAM)
        if name is None:
            if self._has_grace(gone, cluster):
                return "its writer may still close it"
            closing = self._owning.recover_bare(ledger_id)
        elif await self._is_mine(stream_name(name.decode()), cluster.live):
            closing = self._owning.seal(stream_name(name.decode()))
        else:
            return ""
        log.info("replication.closing", ledger_id=ledger_id, gone=sorted(gone))
        try:
            async with asyncio.timeout(SEAL_S_MAX):
                await closing
        except TimeoutError:
            return "its owner does not come to close it"
        except RetryableError as error:
            # Otherwise another process is to claim the stream, or did.
            if error.reason is not Reason.NOT_OWNER:
                raise
        return ""

    def _has_grace(self, gone: Collection[NodeId], cluster: _Cluster) -> bool:
        """Tell whether nodes that are being emptied leave a writer some time yet.

        Nodes that are lost had theirs before the auditor complained. Nobody can ask the writer of
        a bare ledger to close it.
        """
        until_ms = self._clock.wall_ms() - 1000 * self._settings.grace_s
        return all(
            node in cluster.live and cluster.draining[node].since_ms > until_ms for node in gone
        )

    async def _is_mine(self, name: StreamName, live: Collection[NodeId]) -> bool:
        """Tell whether this process owns a stream, or may find out that it has to."""
        owner = (await self._catalog.streams.snapshot(name)).stream.owner
        return owner is None or owner.node_id == self._owning.node_id or owner.node_id not in live
