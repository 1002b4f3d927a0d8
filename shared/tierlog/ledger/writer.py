"""The quorum writer of one open ledger (protocols.md section 1, "Add"; ADR-0016).

Owns the ids of its entries, the cutting of runs, the LAC, and when a node is to be replaced. Does
not own the ledger's metadata: ``replace`` finds nodes and publishes ensembles. Nor what happens
after it broke: its owner recovers and closes the ledger then.

Invariants:
    * ``last_add_confirmed`` is the last entry of a run, and never goes back.
    * An entry is confirmed only when its ack quorum, and every entry before it, has acknowledged.
    * An acknowledgement counts only of a node of the published ensemble, and for as long as it is
      the same node: whoever was replaced, or came back, has acknowledged nothing unconfirmed.
    * Nothing is confirmed while an ensemble change is under way: it begins behind the LAC.
    * A broken writer confirms nothing more, whatever answers still come.
    * An id is given once; a run goes to exactly the write set of its stripe, in order of ids.
    * Every run of a ledger with a key is signed with it, here and only here.
    * The bytes that wait for a confirmation stay below the limit, but for a single run.
    * ``lacking`` names every node that lacks a confirmed run of its own, and maybe some more.

Without a replacement the writer goes on while every unconfirmed run can still get its ack quorum,
and asks again after a while; else it breaks.

Cancellation: ``run`` may be cancelled at any time; the ledger is then as after a crash.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final

import structlog

from tierlog.format.authentication import LedgerKey
from tierlog.format.checksum import Buffer
from tierlog.format.frame import Offsets
from tierlog.format.run import Run, cut_runs
from tierlog.ledger.replicas import Replica, Sent, late_nodes
from tierlog.model.errors import IndeterminateError, Reason, RetryableError, TierlogError
from tierlog.model.ids import NO_ENTRY, EntryId, LedgerId, NodeId
from tierlog.model.ledger import DigestType, LedgerMetadata
from tierlog.ports.storage_node import StorageNodeClient

log = structlog.get_logger()

Replaced = tuple[LedgerMetadata, Mapping[NodeId, StorageNodeClient]]
"""The metadata as published, and a client of each node that is new, or is itself again."""

Replace = Callable[[LedgerMetadata, frozenset[NodeId], EntryId], Awaitable[Replaced | None]]
"""The metadata now, the nodes that failed, the first entry of the new segment; None: nobody
takes their place for now. Where that entry begins the last segment already, the segment is
replaced. A node in its own place again needs no new metadata."""

LATE_TICKS: Final = 2
"""So often in a row a node is found late before it counts as slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterLimits:
    """Every bound of a writer."""

    in_flight_bytes_max: int
    append_timeout_s: float
    run_bytes_max: int
    confirm_idle_s: float = 0.005
    """So long after the last confirmation the LAC goes out by itself, for readers at the tail."""
    slow_node_s: float = 2.0
    """A node that owes an answer for so long is slow, if it is that far behind the others too:"""
    slow_node_factor: float = 10.0
    replace_again_s_first: float = 1.0
    replace_again_s_max: float = 30.0
    straggle_s: float = 0.25
    """So long the end of a ledger waits for the answers that its quorums don't need."""


class LedgerWriter:
    """Writes one ledger. ``run`` must be running, in a task of the owner's, while it is used."""

    def __init__(
        self,
        *,
        ledger_id: LedgerId,
        metadata: LedgerMetadata,
        owner_epoch: int,
        nodes: Mapping[NodeId, StorageNodeClient],
        limits: WriterLimits,
        on_confirmed: Callable[[EntryId], None],
        key: LedgerKey | None = None,
        replace: Replace | None = None,
        on_failed: Callable[[NodeId, TierlogError], None] | None = None,
    ) -> None:
        """``nodes`` may lack members of the ensemble: they count as failed from the start."""
        (segment,) = metadata.segments
        assert set(nodes) <= set(segment.ensemble)
        assert (key is not None) == (metadata.digest_type is DigestType.HMAC)
        self.ledger_id = ledger_id
        self.metadata = metadata
        """As published; the ensemble of what is appended next is in its last segment."""
        self.last_add_confirmed = NO_ENTRY
        self.next_entry_id = EntryId(0)
        self.length = 0
        """Payload bytes of all entries sent."""
        self.failure: TierlogError | None = None
        self.ended = asyncio.Event()
        """Set once the writer is broken or finished."""
        self._owner_epoch = owner_epoch
        self._limits = limits
        self._on_confirmed = on_confirmed
        self._on_failed = on_failed
        self._replace = replace
        self._key = key
        self._replicas = {one: _replica(one, nodes.get(one)) for one in segment.ensemble}
        self._unconfirmed: deque[Sent] = deque()
        self._in_flight_bytes = 0
        self._lacking: set[NodeId] = set()
        self._tasks: asyncio.TaskGroup | None = None
        self._changing = False
        self._finishing = False
        self._mend_wanted = asyncio.Event()
        self._mend_again_s = 0.0
        self._mend_backoff_s = limits.replace_again_s_first
        self._changed = asyncio.Event()
        self._sent = asyncio.Event()
        self._owed = asyncio.Event()
        self._settled = asyncio.Event()
        self._carried = NO_ENTRY
        self._confirm_timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return (
            f"<LedgerWriter {self.ledger_id} next={self.next_entry_id} "
            f"LAC={self.last_add_confirmed} in_flight={self._in_flight_bytes}"
            f"{' changing' if self._changing else ''}{' broken' if self.failure else ''}>"
        )

    @property
    def entry_count(self) -> int:
        """How many entries were sent."""
        return self.next_entry_id

    @property
    def in_flight_bytes(self) -> int:
        """Encoded bytes that wait for their confirmation."""
        return self._in_flight_bytes

    @property
    def failed(self) -> tuple[NodeId, ...]:
        """The nodes of the ensemble that nothing is sent to."""
        return tuple(one.node_id for one in self._replicas.values() if one.failed)

    @property
    def lacking(self) -> tuple[NodeId, ...]:
        """The nodes, sorted, that lack runs of theirs; complete once the writer has ended."""
        return tuple(sorted(self._lacking))

    @property
    def degraded(self) -> bool:
        """Whether some node lacks runs of its own."""
        return bool(self._lacking)

    async def run(self) -> None:
        """Take the nodes' answers until the writer ended. Raises only what is not an answer."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            running = [
                tasks.create_task(self._watch()),
                tasks.create_task(self._watch_pace()),
                tasks.create_task(self._mend()),
            ]
            for replica in self._replicas.values():
                replica.task = tasks.create_task(self._collect(replica))
            try:
                await self.ended.wait()
            finally:
                for task in running:
                    task.cancel()
                if self._confirm_timer is not None:
                    self._confirm_timer.cancel()
                for replica in self._replicas.values():
                    _let_go(replica)

    async def wait_room(self, size: int) -> None:
        """Wait until ``size`` more bytes may be in flight, or the writer ended."""
        limit = self._limits.in_flight_bytes_max
        while self._in_flight_bytes and self._in_flight_bytes + size > limit:
            if self.ended.is_set():
                return
            self._changed.clear()
            await self._changed.wait()

    def append(
        self,
        frames: Buffer,
        offsets: Offsets,
        *,
        publish_ms_min: int = 0,
        publish_ms_max: int = 0,
    ) -> EntryId:
        """Give the entries their ids and send them; return the last id. Not once ended."""
        assert not self.ended.is_set(), "appended to a ledger that ended"
        runs = cut_runs(
            frames,
            offsets,
            ledger_id=self.ledger_id,
            first_entry_id=self.next_entry_id,
            last_add_confirmed=self.last_add_confirmed,
            owner_epoch=self._owner_epoch,
            publish_ms_min=publish_ms_min,
            publish_ms_max=publish_ms_max,
            run_bytes_max=self._limits.run_bytes_max,
            stripe_entries=self.metadata.stripe_entries,
            length_before=self.length,
            key=self._key,
        )
        now_s = asyncio.get_running_loop().time()
        for run in runs:
            assert run.first_entry_id == self.next_entry_id
            self._send(run, now_s)
            if self.ended.is_set():
                break
        self._carried = self.last_add_confirmed
        self._sent.set()
        if now_s >= self._mend_again_s and self.failed:
            self._mend_wanted.set()
        return EntryId(self.next_entry_id - 1)

    def _send(self, run: Run, now_s: float) -> None:
        sent = Sent.of(run, now_s + self._limits.append_timeout_s)
        self._unconfirmed.append(sent)
        self._in_flight_bytes += sent.size
        self.next_entry_id = EntryId(run.last_entry_id + 1)
        self.length += run.payload_len
        write_set = self.metadata.write_set(sent.first_entry_id)
        for node_id in write_set:
            self._send_to(self._replicas[node_id], sent, now_s)
        if any(self._replicas[one].failed for one in write_set) and not (
            self._can_be_confirmed(sent)
        ):
            # Not broken yet: someone may take the place of those that failed.
            self._mend_wanted.set()

    def _send_to(self, replica: Replica, sent: Sent, now_s: float) -> None:
        if replica.failed:
            return
        assert replica.client is not None
        assert sent.run is not None, "only what is not confirmed is sent"
        try:
            answer = replica.client.add(sent.run)
        except TierlogError as error:
            self._fail(replica, error)
            return
        replica.owe(sent, answer, now_s)
        self._owed.set()
        if replica.owed_bytes > 4 * self._limits.in_flight_bytes_max:
            self._fail(replica, _too_slow(replica.node_id))

    def _can_be_confirmed(self, sent: Sent) -> bool:
        """Tell whether the run's ack quorum may still come together."""
        hopeful = sum(
            node_id in sent.acked or not self._replicas[node_id].failed
            for node_id in self.metadata.write_set(sent.first_entry_id)
        )
        return hopeful >= self.metadata.ack_quorum

    async def finish(self) -> tuple[EntryId, int]:
        """Wait until all is confirmed and end; return last entry id and length for the close.

        Raises what broke the writer.
        """
        self._finishing = True
        while (self._unconfirmed or self._changing) and not self.ended.is_set():
            self._changed.clear()
            await self._changed.wait()
        await self._wait_stragglers()
        if self.failure is not None:
            raise self.failure
        assert self.last_add_confirmed == self.next_entry_id - 1
        self._tell_lac()
        self._lacking.update(one.node_id for one in self._replicas.values() if one.owed)
        self.ended.set()
        return self.last_add_confirmed, self.length

    async def _wait_stragglers(self) -> None:
        """Give the nodes beyond the quorum a moment, so that the ledger ends with all copies."""
        try:
            async with asyncio.timeout(self._limits.straggle_s):
                while not self.ended.is_set() and any(
                    one.owed for one in self._replicas.values() if not one.failed
                ):
                    self._settled.clear()
                    await self._settled.wait()
        except TimeoutError:
            return  # ``lacking`` says who owes

    def break_off(self, cause: TierlogError) -> None:
        """End without confirming anything more; the ledger needs recovery from here on."""
        if not self.ended.is_set():
            self.failure = cause
            self.ended.set()
            self._changed.set()
            self._settled.set()
            log.warning(
                "writer.broken",
                ledger_id=self.ledger_id,
                lac=self.last_add_confirmed,
                unconfirmed_runs=len(self._unconfirmed),
                cause=str(cause),
            )

    async def _collect(self, replica: Replica) -> None:
        """Take one node's answers in order."""
        while True:
            while not replica.owed:
                replica.owes.clear()
                await replica.owes.wait()
            sent, answer, _ = replica.owed[0]
            try:
                await answer
            except TierlogError as error:
                replica.settle()
                if sent.run is None:
                    self._lacking.add(replica.node_id)
                self._fail(replica, error)
            else:
                replica.settle()
                self._count_ack(replica, sent)
            self._settled.set()

    def _count_ack(self, replica: Replica, sent: Sent) -> None:
        assert self._replicas[replica.node_id] is replica, "who was replaced is not listened to"
        sent.acked.add(replica.node_id)
        self._advance()

    def _fail(self, replica: Replica, error: TierlogError) -> None:
        if replica.failed:
            return
        replica.failed, replica.cause = True, error
        if replica.owes_confirmed:
            self._lacking.add(replica.node_id)
        log.warning(
            "writer.replica_failed",
            ledger_id=self.ledger_id,
            node_id=replica.node_id,
            cause=str(error),
        )
        if error.reason is Reason.FENCED:
            # Someone recovers this ledger: no quorum may be counted any more.
            self.break_off(error)
            return
        if self._on_failed is not None:
            self._on_failed(replica.node_id, error)
        self._mend_wanted.set()
        self._settled.set()

    def _advance(self) -> None:
        if self._changing or self.ended.is_set():
            return
        before = self.last_add_confirmed
        while self._unconfirmed and len(self._unconfirmed[0].acked) >= self.metadata.ack_quorum:
            confirmed = self._unconfirmed.popleft()
            assert confirmed.last_entry_id > self.last_add_confirmed
            self.last_add_confirmed = confirmed.last_entry_id
            self._in_flight_bytes -= confirmed.size
            self._note_lacking(confirmed)
            confirmed.run = None
        if self.last_add_confirmed == before:
            return
        self._changed.set()
        self._on_confirmed(self.last_add_confirmed)
        if not self._unconfirmed and self._confirm_timer is None:
            loop = asyncio.get_running_loop()
            self._confirm_timer = loop.call_later(
                self._limits.confirm_idle_s, self._confirm_when_idle
            )

    def _note_lacking(self, confirmed: Sent) -> None:
        if len(confirmed.acked) < self.metadata.write_quorum:
            self._lacking.update(
                node_id
                for node_id in self.metadata.write_set(confirmed.first_entry_id)
                if node_id not in confirmed.acked and self._replicas[node_id].failed
            )

    def _confirm_when_idle(self) -> None:
        self._confirm_timer = None
        if not self.ended.is_set() and not self._unconfirmed:
            self._tell_lac()

    def _tell_lac(self) -> None:
        if self._carried == self.last_add_confirmed:
            return
        self._carried = self.last_add_confirmed
        for replica in self._replicas.values():
            if not replica.failed and replica.client is not None:
                replica.client.confirm(self.ledger_id, self.last_add_confirmed)

    # Ensemble changes

    async def _mend(self) -> None:
        """Have those replaced that failed or are slow, whenever there is a reason to ask."""
        while True:
            await self._mend_wanted.wait()
            self._mend_wanted.clear()
            if self._finishing and not self._unconfirmed:
                continue
            failed = [one for one in self._replicas.values() if one.failed or one.slow]
            if failed:
                await self._change(failed)
                self._judge()

    async def _change(self, failed: Collection[Replica]) -> None:
        """Ask for one ensemble change and take it over. Confirms nothing meanwhile."""
        changed = None
        self._changing = True
        try:
            if self._replace is not None:
                changed = await self._replace(
                    self.metadata,
                    frozenset(one.node_id for one in failed),
                    EntryId(self.last_add_confirmed + 1),
                )
        except TierlogError as error:
            # It may be published or not: only recovery can tell now.
            self.break_off(error)
        finally:
            self._changing = False
            self._changed.set()
        if self.ended.is_set():
            return
        if changed is not None:
            self._take_over(*changed)
        for replica in self._replicas.values():
            replica.slow, replica.late_count = False, 0
        still = bool(self.failed)
        backoff_s = self._mend_backoff_s if still or changed is None else 0.0
        self._mend_again_s = asyncio.get_running_loop().time() + backoff_s
        self._mend_backoff_s = min(2 * self._mend_backoff_s, self._limits.replace_again_s_max)
        if not still:
            self._mend_backoff_s = self._limits.replace_again_s_first
        self._advance()

    def _take_over(
        self, metadata: LedgerMetadata, clients: Mapping[NodeId, StorageNodeClient]
    ) -> None:
        """Let the replaced go, with what they acknowledged; send the new ones what is open."""
        ensemble = metadata.segments[-1].ensemble
        assert set(clients) <= set(ensemble)
        assert (
            metadata.segments[-1].first_entry_id == self.last_add_confirmed + 1
            or ensemble == self.metadata.segments[-1].ensemble
        ), "a new ensemble begins behind the LAC"
        gone = [one for one in self._replicas if one not in ensemble or one in clients]
        assert all(
            new == old or old in gone
            for old, new in zip(self.metadata.segments[-1].ensemble, ensemble, strict=True)
        ), "who stays keeps its place, and with it its stripes"
        for node_id in gone:
            replica = self._replicas.pop(node_id)
            if replica.owes_confirmed:
                self._lacking.add(node_id)
            _let_go(replica)
        self.metadata = metadata
        self._drop_acks(gone)
        assert self._tasks is not None
        for node_id, client in clients.items():
            replica = self._replicas[node_id] = Replica(node_id, client)
            replica.task = self._tasks.create_task(self._collect(replica))
        assert set(self._replicas) == set(ensemble)
        now_s = asyncio.get_running_loop().time()
        for sent in self._unconfirmed:
            for node_id in metadata.write_set(sent.first_entry_id):
                if node_id in clients:
                    self._send_to(self._replicas[node_id], sent, now_s)
        log.info(
            "writer.ensemble_changed",
            ledger_id=self.ledger_id,
            first_entry_id=metadata.segments[-1].first_entry_id,
            gone=gone,
            ensemble=ensemble,
            runs_sent_again=len(self._unconfirmed),
        )

    def _drop_acks(self, gone: Collection[NodeId]) -> None:
        """Forget what the replaced acknowledged of all that is not confirmed."""
        for sent in self._unconfirmed:
            sent.acked.difference_update(gone)

    def _judge(self) -> None:
        """Break when nobody took the place of a node that some run can't do without."""
        if self.ended.is_set() or self._mend_wanted.is_set():
            return
        for sent in self._unconfirmed:
            if not self._can_be_confirmed(sent):
                missing = (
                    self._replicas[node_id].cause
                    for node_id in self.metadata.write_set(sent.first_entry_id)
                    if node_id not in sent.acked
                )
                cause = next((one for one in missing if one is not None), None)
                self.break_off(cause or _below_quorum(self.ledger_id, self.failed))
                return

    # Time

    async def _watch(self) -> None:
        """Break the writer when the oldest run was not confirmed in time."""
        loop = asyncio.get_running_loop()
        while True:
            while not self._unconfirmed:
                self._sent.clear()
                await self._sent.wait()
            oldest = self._unconfirmed[0]
            await asyncio.sleep(max(0.0, oldest.deadline_s - loop.time()))
            if self._unconfirmed and self._unconfirmed[0] is oldest:
                self.break_off(_not_in_time(self.ledger_id, self._limits.append_timeout_s))
                return

    async def _watch_pace(self) -> None:
        """Find nodes that are far slower than those beside them, while any answer is owed."""
        limits, loop = self._limits, asyncio.get_running_loop()
        while True:
            while not any(one.owed for one in self._replicas.values()):
                self._owed.clear()
                await self._owed.wait()
            await asyncio.sleep(limits.slow_node_s / 4)
            now_s = loop.time()
            if now_s < self._mend_again_s:
                continue
            replicas = list(self._replicas.values())
            late = late_nodes(
                replicas,
                now_s,
                slow_node_s=limits.slow_node_s,
                factor=limits.slow_node_factor,
            )
            for replica in replicas:
                # Seen late once, its answers may just not have been read after a pause here.
                replica.late_count = replica.late_count + 1 if replica in late else 0
                if replica.late_count >= LATE_TICKS and not replica.slow:
                    replica.slow = True
                    self._mend_wanted.set()


def _replica(node_id: NodeId, client: StorageNodeClient | None) -> Replica:
    return Replica(node_id, client, failed=client is None)


def _let_go(replica: Replica) -> None:
    if replica.task is not None:
        replica.task.cancel()
    replica.give_up()


def _not_in_time(ledger_id: LedgerId, timeout_s: float) -> TierlogError:
    return IndeterminateError(
        f"entries of ledger {ledger_id} were not confirmed within {timeout_s:g} s",
        remedy="Read the stream's end to see whether they are there; check the storage nodes",
    )


def _below_quorum(ledger_id: LedgerId, failed: Collection[NodeId]) -> TierlogError:
    return IndeterminateError(
        f"ledger {ledger_id} lost its ack quorum: {', '.join(failed)} failed",
        remedy="Read the stream's end to see whether the entries are there",
    )


def _too_slow(node_id: NodeId) -> TierlogError:
    return RetryableError(
        f"storage node {node_id} is too far behind the rest of its ensemble",
        reason=Reason.RESOURCE_EXHAUSTED,
        remedy="Check the node's disk and network",
    )
