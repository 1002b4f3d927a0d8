"""Closes a ledger whose writer is gone (protocols.md section 1, "Fencing and recovery").

Owns the steps: IN_RECOVERY, fence, find the end, re-write, close. Does not own who may recover:
the caller claimed the stream, and the closing transaction checks that claim.

Invariants:
    * Nothing is read for the end before every possible write set has so many fenced nodes that
      no ack quorum can hide: ``write_quorum - ack_quorum + 1``.
    * An entry is absent only when that many fenced nodes of its write set said NO_SUCH_ENTRY.
      UNKNOWN and silence are waited for, and ``waiting`` says so.
    * A run that is not signed with the ledger's key is damage. Without that key no node is asked.
    * Runs are re-written whole, header unchanged, to their ack quorum at least, before the close.
    * Whoever closes first decides; two recoveries of one ledger return the same end.

Retries: for ever, with back-off. Only cancellation, a lost claim, or an end by someone else stops
a recovery. Cancellation leaves a ledger that can be recovered again from the first step.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import structlog

from tierlog.catalog import Catalog
from tierlog.format.authentication import LedgerKey
from tierlog.format.run import Run
from tierlog.ledger.directory import NodeDirectory
from tierlog.ledger.keys import NO_KEYS, LedgerKeys, authentic
from tierlog.ledger.reader import closing_runs
from tierlog.model.errors import (
    IndeterminateError,
    Reason,
    RetryableError,
    TierlogError,
)
from tierlog.model.ids import NO_ENTRY, EntryId, LedgerId, NodeId
from tierlog.model.ledger import LedgerMetadata, LedgerState
from tierlog.model.stream import ListedLedger, Stream
from tierlog.ports.ids import Ids
from tierlog.ports.storage_node import StorageNodeClient

log = structlog.get_logger()

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryLimits:
    """Every bound of a recovery."""

    answer_timeout_s: float = 10.0
    backoff_s_first: float = 0.05
    backoff_s_max: float = 5.0
    batch_bytes_max: int = 4 * 1024 * 1024


class Recovery:
    """Recovers ledgers, several at once if asked to."""

    def __init__(
        self,
        catalog: Catalog,
        nodes: NodeDirectory[StorageNodeClient],
        *,
        ids: Ids,
        limits: RecoveryLimits | None = None,
        keys: LedgerKeys = NO_KEYS,
    ) -> None:
        self._catalog = catalog
        self._nodes = nodes
        self._ids = ids
        self._limits = limits or RecoveryLimits()
        self._keys = keys
        self.waiting: dict[LedgerId, str] = {}
        """What the recovery of a ledger waits for; absent: it goes on, or there is none."""

    async def recover(self, claimed: Stream, ledger_id: LedgerId) -> ListedLedger | None:
        """Recover and close a ledger of a claimed stream; return how it ended.

        None: it had no entry and is gone. Raises FENCED when the claim is.
        """
        try:
            return await self._recover(claimed, ledger_id)
        finally:
            self.waiting.pop(ledger_id, None)

    async def _recover(self, claimed: Stream, ledger_id: LedgerId) -> ListedLedger | None:
        metadata = await self._insist(
            ledger_id, "metadata", lambda: self._catalog.ledgers.begin_recovery(ledger_id)
        )
        if metadata is None or metadata.state is LedgerState.CLOSED:
            return await self._outcome(claimed, ledger_id, metadata)
        key = self._keys.of(ledger_id, metadata)
        one = _OneRecovery(
            ledger_id, metadata, key, self._nodes, self._ids, self._limits, self.waiting
        )
        lac = await one.fence()
        last_entry_id, length = await one.rewrite(lac)
        assert last_entry_id >= lac, "an entry that was confirmed is there"
        stream = await self._insist(
            ledger_id,
            "metadata",
            lambda: self._catalog.ledgers.close(
                claimed, ledger_id, last_entry_id=last_entry_id, length=length
            ),
        )
        closed = stream.listed(ledger_id)
        log.info(
            "ledger.recovered",
            stream=claimed.name,
            ledger_id=ledger_id,
            lac=lac,
            last_entry_id=closed.last_entry_id if closed else NO_ENTRY,
        )
        return closed

    async def _outcome(
        self, claimed: Stream, ledger_id: LedgerId, metadata: LedgerMetadata | None
    ) -> ListedLedger | None:
        """Return the end that someone else's close left."""
        snapshot = await self._insist(
            ledger_id, "metadata", lambda: self._catalog.streams.snapshot(claimed.name)
        )
        found = next((one for one in snapshot.ledgers if one.ledger_id == ledger_id), None)
        assert found is None or found.closed
        assert found is None or metadata is None or found.last_entry_id == metadata.last_entry_id
        return found

    async def _insist(
        self, ledger_id: LedgerId, what: str, call: Callable[[], Awaitable[Answer]]
    ) -> Answer:
        return await insist(
            call, ids=self._ids, limits=self._limits, waiting=_Waiting(ledger_id, what, self)
        )


class _Waiting:
    """Writes what a recovery waits for to where people look."""

    def __init__(self, ledger_id: LedgerId, what: str, recovery: Recovery) -> None:
        self._ledger_id, self._what, self._recovery = ledger_id, what, recovery

    def __call__(self, error: TierlogError | None) -> None:
        if error is None:
            self._recovery.waiting.pop(self._ledger_id, None)
            return
        self._recovery.waiting[self._ledger_id] = f"{self._what}: {error}"
        log.warning(
            "recovery.waiting", ledger_id=self._ledger_id, what=self._what, cause=str(error)
        )


async def insist(
    call: Callable[[], Awaitable[Answer]],
    *,
    ids: Ids,
    limits: RecoveryLimits,
    waiting: Callable[[TierlogError | None], None],
) -> Answer:
    """Call until it is answered; only a refusal or corruption is raised."""
    backoff_s = limits.backoff_s_first
    while True:
        try:
            answer = await call()
        except (RetryableError, IndeterminateError) as error:
            waiting(error)
        else:
            waiting(None)
            return answer
        await asyncio.sleep(ids.uniform(0.5, 1.0) * backoff_s)
        backoff_s = min(limits.backoff_s_max, 2 * backoff_s)


@dataclass(slots=True)
class _OneRecovery:
    """One pass over one ledger, from the fence to its end."""

    ledger_id: LedgerId
    metadata: LedgerMetadata
    key: LedgerKey | None
    nodes: NodeDirectory[StorageNodeClient]
    ids: Ids
    limits: RecoveryLimits
    waiting: dict[LedgerId, str]

    @property
    def _enough(self) -> int:
        """So many nodes of a write set leave no ack quorum without one of them."""
        return self.metadata.write_quorum - self.metadata.ack_quorum + 1

    async def fence(self) -> EntryId:
        """Fence the last ensemble until nothing can be acknowledged any more; return the LAC."""
        ensemble = self.metadata.segments[-1].ensemble
        lacs: dict[NodeId, EntryId] = {}
        backoff_s = self.limits.backoff_s_first
        while True:
            trouble: dict[NodeId, TierlogError] = {}
            async with asyncio.TaskGroup() as tasks:
                for node_id in ensemble:
                    if node_id not in lacs:
                        tasks.create_task(self._fence_one(node_id, lacs, trouble))
            if all(
                sum(node_id in lacs for node_id in write_set) >= self._enough
                for write_set in self._write_sets(ensemble)
            ):
                self.waiting.pop(self.ledger_id, None)
                return max(lacs.values())
            self._report("fence", trouble)
            await asyncio.sleep(self.ids.uniform(0.5, 1.0) * backoff_s)
            backoff_s = min(self.limits.backoff_s_max, 2 * backoff_s)

    async def _fence_one(
        self,
        node_id: NodeId,
        lacs: dict[NodeId, EntryId],
        trouble: dict[NodeId, TierlogError],
    ) -> None:
        try:
            async with _deadline(self.limits.answer_timeout_s, f"node {node_id}, fence"):
                client = await self.nodes.client(node_id)
                answer = await client.fence(self.ledger_id)
        except TierlogError as error:
            trouble[node_id] = error
            await self._drop(node_id)
        else:
            lacs[node_id] = answer.last_add_confirmed

    def _write_sets(self, ensemble: Sequence[NodeId]) -> list[list[NodeId]]:
        size = len(ensemble)
        quorum = self.metadata.write_quorum
        return [
            [ensemble[(start + step) % size] for step in range(quorum)] for start in range(size)
        ]

    async def rewrite(self, lac: EntryId) -> tuple[EntryId, int]:
        """Read to the end, re-write what may not have its quorum; return last id and length."""
        start = max(lac, EntryId(self.metadata.segments[-1].first_entry_id - 1)) + 1
        # The last confirmed run is read too, for the length up to it.
        position, length = EntryId(max(start - 1, 0)), 0
        backoff_s = self.limits.backoff_s_first
        while True:
            batch, absent, trouble = await self._read_batch(position)
            if batch:
                rewritten = [run for run in batch if run.last_entry_id >= start]
                if await self._rewrite_batch(rewritten):
                    position = EntryId(batch[-1].last_entry_id + 1)
                    length = batch[-1].header.ledger_len
                    assert length >= 0, "an owner's run tells the length"
                    backoff_s = self.limits.backoff_s_first
                    continue
            elif absent and position >= start:
                self.waiting.pop(self.ledger_id, None)
                return EntryId(position - 1), length
            else:
                # What lies up to the LAC was acknowledged: absent there means not readable now.
                self._report(f"entry {position}", trouble)
            await asyncio.sleep(self.ids.uniform(0.5, 1.0) * backoff_s)
            backoff_s = min(self.limits.backoff_s_max, 2 * backoff_s)

    async def _read_batch(
        self, position: EntryId
    ) -> tuple[list[Run], bool, dict[NodeId, TierlogError]]:
        """Return runs from ``position`` on; or none, and whether the entry is known absent."""
        absent = 0
        trouble: dict[NodeId, TierlogError] = {}
        for node_id in self.metadata.write_set(position):
            batch: list[Run] = []
            try:
                async with _deadline(self.limits.answer_timeout_s, f"node {node_id}, read"):
                    await self._read_node(node_id, position, batch)
            except TierlogError as error:
                trouble[node_id] = error
                if error.reason is Reason.NO_SUCH_ENTRY:
                    absent += 1
                else:
                    await self._drop(node_id)
            if batch:
                return batch, False, trouble
            if absent >= self._enough:
                return [], True, trouble
        return [], False, trouble

    async def _read_node(self, node_id: NodeId, position: EntryId, batch: list[Run]) -> None:
        """Add one node's runs from ``position`` on, as far as they go without a gap."""
        client = await self.nodes.client(node_id)
        expected = position
        read: AsyncIterator[Sequence[Run]] = client.read(
            self.ledger_id, position, bytes_max=self.limits.batch_bytes_max, recovery=True
        )
        async with closing_runs(read):
            async for runs in read:
                good, damage = authentic(runs, self.key)
                for run in good:
                    begins = run.first_entry_id == expected
                    holds = not batch and run.first_entry_id <= expected <= run.last_entry_id
                    if run.header.ledger_id != self.ledger_id or not (begins or holds):
                        return
                    batch.append(run)
                    expected = EntryId(run.last_entry_id + 1)
                if damage is not None:
                    raise damage

    async def _rewrite_batch(self, runs: Sequence[Run]) -> bool:
        """Send runs to their write sets; True when each has its ack quorum again."""
        acks = [0] * len(runs)
        trouble: dict[NodeId, TierlogError] = {}
        async with asyncio.TaskGroup() as tasks:
            for node_id in self.metadata.segments[-1].ensemble:
                held = [
                    (at, run)
                    for at, run in enumerate(runs)
                    if node_id in self.metadata.write_set(run.first_entry_id)
                ]
                if held:
                    tasks.create_task(self._rewrite_node(node_id, held, acks, trouble))
        if all(count >= self.metadata.ack_quorum for count in acks):
            return True
        self._report("re-write", trouble)
        return False

    async def _rewrite_node(
        self,
        node_id: NodeId,
        held: Sequence[tuple[int, Run]],
        acks: list[int],
        trouble: dict[NodeId, TierlogError],
    ) -> None:
        try:
            async with _deadline(self.limits.answer_timeout_s, f"node {node_id}, add"):
                client = await self.nodes.client(node_id)
                answers = [(at, client.add(run, recovery=True)) for at, run in held]
                for at, answer in answers:
                    await answer
                    acks[at] += 1
        except TierlogError as error:
            trouble[node_id] = error
            await self._drop(node_id)

    async def _drop(self, node_id: NodeId) -> None:
        try:
            client = await self.nodes.client(node_id)
        except TierlogError:
            return
        await self.nodes.report_failed(node_id, client)

    def _report(self, what: str, trouble: dict[NodeId, TierlogError]) -> None:
        causes = "; ".join(f"{node_id}: {error}" for node_id, error in trouble.items())
        self.waiting[self.ledger_id] = f"{what}: {causes or 'no node gives it'}"
        log.warning(
            "recovery.waiting", ledger_id=self.ledger_id, what=what, cause=causes or "no answer"
        )


class _deadline:  # noqa: N801 - reads as the statement it stands for
    """``asyncio.timeout`` whose end is an error of ours."""

    def __init__(self, seconds: float, what: str) -> None:
        self._timeout = asyncio.timeout(seconds)
        self._what = f"{what}: no answer within {seconds:g} s"

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(self, *error: object) -> None:
        try:
            await self._timeout.__aexit__(*error)  # type: ignore[arg-type]
        except TimeoutError:
            raise RetryableError(
                self._what,
                reason=Reason.UNKNOWN,
                remedy="Check that the storage node is up; recovery goes on by itself",
            ) from None
