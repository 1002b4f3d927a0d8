"""The quorum writer of one open ledger (protocols.md section 1, "Add").

Owns the ids of its entries, the cutting of runs, and the LAC. Does not own the ledger's metadata
nor what happens after it broke: its owner recovers and closes the ledger then. Replacing a failed
node (an ensemble change) is not done here: below its ack quorum the writer breaks.

Invariants:
    * ``last_add_confirmed`` is the last entry of a run, and never goes back.
    * An entry is confirmed only when its ack quorum, and every entry before it, has acknowledged.
    * A broken writer confirms nothing more, whatever answers still come.
    * An id is given once; a run is sent to exactly the write set of its stripe, in order of ids.
    * Every run of a ledger with a key is signed with it, here and only here.
    * The bytes that wait for a confirmation stay below the limit, but for a single run.

Cancellation: ``run`` may be cancelled at any time; the ledger is then as after a crash.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

import structlog

from tierlog.format.authentication import LedgerKey
from tierlog.format.checksum import Buffer
from tierlog.format.frame import Offsets
from tierlog.format.run import Run, cut_runs
from tierlog.model.errors import IndeterminateError, Reason, TierlogError
from tierlog.model.ids import NO_ENTRY, EntryId, LedgerId, NodeId
from tierlog.model.ledger import DigestType, LedgerMetadata
from tierlog.ports.storage_node import StorageNodeClient

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterLimits:
    """Every bound of a writer."""

    in_flight_bytes_max: int
    append_timeout_s: float
    run_bytes_max: int
    confirm_idle_s: float = 0.005
    """So long after the last confirmation the LAC goes out by itself, for readers at the tail."""


@dataclass(slots=True, eq=False)
class _Sent:
    """A run on its way, until it is confirmed."""

    last_entry_id: EntryId
    size: int
    deadline_s: float
    acks: int = 0
    failures: int = 0


@dataclass(slots=True, eq=False)
class _Replica:
    """One node of the ensemble, with the answers that it still owes."""

    node_id: NodeId
    client: StorageNodeClient
    owed: deque[tuple[_Sent, Awaitable[None]]] = field(default_factory=deque)
    owes: asyncio.Event = field(default_factory=asyncio.Event)
    owed_bytes: int = 0
    failed: bool = False


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
    ) -> None:
        (segment,) = metadata.segments
        assert set(nodes) == set(segment.ensemble)
        assert (key is not None) == (metadata.digest_type is DigestType.HMAC)
        self.ledger_id = ledger_id
        self.last_add_confirmed = NO_ENTRY
        self.next_entry_id = EntryId(0)
        self.length = 0
        """Payload bytes of all entries sent."""
        self.failure: TierlogError | None = None
        self.ended = asyncio.Event()
        """Set once the writer is broken or finished."""
        self._metadata = metadata
        self._owner_epoch = owner_epoch
        self._limits = limits
        self._on_confirmed = on_confirmed
        self._key = key
        self._replicas = {one: _Replica(one, client) for one, client in nodes.items()}
        self._unconfirmed: deque[_Sent] = deque()
        self._in_flight_bytes = 0
        self._changed = asyncio.Event()
        self._sent = asyncio.Event()
        self._carried = NO_ENTRY
        self._confirm_timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return (
            f"<LedgerWriter {self.ledger_id} next={self.next_entry_id} "
            f"LAC={self.last_add_confirmed} in_flight={self._in_flight_bytes}"
            f"{' broken' if self.failure else ''}>"
        )

    @property
    def entry_count(self) -> int:
        """How many entries were sent."""
        return self.next_entry_id

    @property
    def in_flight_bytes(self) -> int:
        """Encoded bytes that wait for their confirmation."""
        return self._in_flight_bytes

    async def run(self) -> None:
        """Take the nodes' answers until the writer ended. Raises only what is not an answer."""
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self._collect(one)) for one in self._replicas.values()]
            running.append(tasks.create_task(self._watch()))
            try:
                await self.ended.wait()
            finally:
                for task in running:
                    task.cancel()
                if self._confirm_timer is not None:
                    self._confirm_timer.cancel()
                for replica in self._replicas.values():
                    _give_up(replica)

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
            stripe_entries=self._metadata.stripe_entries,
            length_before=self.length,
            key=self._key,
        )
        deadline_s = asyncio.get_running_loop().time() + self._limits.append_timeout_s
        for run in runs:
            assert run.first_entry_id == self.next_entry_id
            self._send(run, deadline_s)
            if self.ended.is_set():
                break
        self._carried = self.last_add_confirmed
        self._sent.set()
        return EntryId(self.next_entry_id - 1)

    def _send(self, run: Run, deadline_s: float) -> None:
        sent = _Sent(run.last_entry_id, len(run.encoded), deadline_s)
        self._unconfirmed.append(sent)
        self._in_flight_bytes += sent.size
        self.next_entry_id = EntryId(run.last_entry_id + 1)
        self.length += run.payload_len
        for node_id in self._metadata.write_set(run.first_entry_id):
            replica = self._replicas[node_id]
            if replica.failed:
                self._count_failure(sent, None)
                continue
            try:
                answer = replica.client.add(run)
            except TierlogError as error:
                self._fail(replica, sent, error)
                continue
            replica.owed.append((sent, answer))
            replica.owed_bytes += sent.size
            replica.owes.set()
            if replica.owed_bytes > 4 * self._limits.in_flight_bytes_max:
                self._fail(replica, sent, _too_slow(node_id))

    async def finish(self) -> tuple[EntryId, int]:
        """Wait until all is confirmed and end; return last entry id and length for the close.

        Raises what broke the writer.
        """
        while self._unconfirmed and not self.ended.is_set():
            self._changed.clear()
            await self._changed.wait()
        if self.failure is not None:
            raise self.failure
        assert self.last_add_confirmed == self.next_entry_id - 1
        self._tell_lac()
        self.ended.set()
        return self.last_add_confirmed, self.length

    def break_off(self, cause: TierlogError) -> None:
        """End without confirming anything more; the ledger needs recovery from here on."""
        if not self.ended.is_set():
            self.failure = cause
            self.ended.set()
            self._changed.set()
            log.warning(
                "writer.broken",
                ledger_id=self.ledger_id,
                lac=self.last_add_confirmed,
                unconfirmed_runs=len(self._unconfirmed),
                cause=str(cause),
            )

    async def _collect(self, replica: _Replica) -> None:
        """Take one node's answers in order."""
        while True:
            while not replica.owed:
                replica.owes.clear()
                await replica.owes.wait()
            sent, answer = replica.owed[0]
            try:
                await answer
            except TierlogError as error:
                self._settled(replica)
                self._fail(replica, sent, error)
            else:
                self._settled(replica)
                sent.acks += 1
                self._advance()

    def _settled(self, replica: _Replica) -> None:
        sent, _ = replica.owed.popleft()
        replica.owed_bytes -= sent.size

    def _fail(self, replica: _Replica, sent: _Sent, error: TierlogError) -> None:
        if not replica.failed:
            replica.failed = True
            log.warning(
                "writer.replica_failed",
                ledger_id=self.ledger_id,
                node_id=replica.node_id,
                cause=str(error),
            )
        if error.reason is Reason.FENCED:
            # Someone recovers this ledger: no quorum may be counted any more.
            self.break_off(error)
        self._count_failure(sent, error)

    def _count_failure(self, sent: _Sent, error: TierlogError | None) -> None:
        sent.failures += 1
        metadata = self._metadata
        if metadata.write_quorum - sent.failures < metadata.ack_quorum:
            failed = [one.node_id for one in self._replicas.values() if one.failed]
            self.break_off(error or _below_quorum(self.ledger_id, failed))

    def _advance(self) -> None:
        if self.ended.is_set():
            return
        before = self.last_add_confirmed
        while self._unconfirmed and self._unconfirmed[0].acks >= self._metadata.ack_quorum:
            confirmed = self._unconfirmed.popleft()
            assert confirmed.last_entry_id > self.last_add_confirmed
            self.last_add_confirmed = confirmed.last_entry_id
            self._in_flight_bytes -= confirmed.size
        if self.last_add_confirmed == before:
            return
        self._changed.set()
        self._on_confirmed(self.last_add_confirmed)
        if not self._unconfirmed and self._confirm_timer is None:
            loop = asyncio.get_running_loop()
            self._confirm_timer = loop.call_later(
                self._limits.confirm_idle_s, self._confirm_when_idle
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
            if not replica.failed:
                replica.client.confirm(self.ledger_id, self.last_add_confirmed)

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


def _give_up(replica: _Replica) -> None:
    for _, answer in replica.owed:
        if isinstance(answer, asyncio.Future):
            answer.cancel()
    replica.owed.clear()


def _not_in_time(ledger_id: LedgerId, timeout_s: float) -> TierlogError:
    return IndeterminateError(
        f"entries of ledger {ledger_id} were not confirmed within {timeout_s:g} s",
        remedy="Read the stream's end to see whether they are there; check the storage nodes",
    )


def _below_quorum(ledger_id: LedgerId, failed: list[NodeId]) -> TierlogError:
    return IndeterminateError(
        f"ledger {ledger_id} lost its ack quorum: {', '.join(failed)} failed",
        remedy="Read the stream's end to see whether the entries are there",
    )


def _too_slow(node_id: NodeId) -> TierlogError:
    return IndeterminateError(
        f"storage node {node_id} is too far behind the rest of its ensemble",
        remedy="Check the node's disk and network",
    )
