"""Closes a ledger whose writer is gone (protocols.md section 1, "Fencing and recovery").

Owns the steps: IN_RECOVERY, fence, find the end, re-write, close. Does not own who may recover:
a stream's ledgers are recovered by who claimed it, and the closing transaction checks that claim;
a bare ledger is recovered by whoever wants it closed.

Invariants:
    * Nothing is read for the end before every possible write set has so many fenced nodes that
      no ack quorum can hide: ``write_quorum - ack_quorum + 1``.
    * An entry is absent only when that many fenced nodes of its write set said NO_SUCH_ENTRY.
      UNKNOWN and silence are waited for, and ``waiting`` says so.
    * What suffices is enough: a silent node holds nothing up, as long as the others suffice.
    * A run that is not signed with the ledger's key is damage. Without that key no node is asked.
    * Runs are re-written whole, header unchanged, to their ack quorum at least, before the close.
    * Other nodes than the metadata names become known with the closing change, or never.
    * Whoever closes first decides; two recoveries of one ledger return the same end.
    * Entries are given up only where an admin said so, and are then on record as lost.
    * A ledger that may lack copies when it is closed is reported to be replicated.

Retries: for ever, with back-off. Only cancellation, a lost claim, or an end by someone else stops
a recovery. Cancellation leaves a ledger that can be recovered again from the first step.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar, overload

import structlog

from tierlog.catalog import Catalog
from tierlog.catalog.naming import NodeRetiredError
from tierlog.ledger.asking import Asking, RecoveryLimits
from tierlog.ledger.directory import NodeDirectory
from tierlog.ledger.keys import NO_KEYS, LedgerKeys
from tierlog.ledger.one_recovery import End, OneRecovery
from tierlog.ledger.rewriting import Rewriting
from tierlog.ledger.shares import shares_of
from tierlog.model.errors import (
    CorruptError,
    IndeterminateError,
    RetryableError,
    TierlogError,
)
from tierlog.model.ids import NO_ENTRY, LedgerId, NodeId
from tierlog.model.ledger import KEY_LOSS_ACCEPTED, LedgerMetadata, LedgerState
from tierlog.model.replication import CopyTrouble
from tierlog.model.spans import without
from tierlog.model.stream import ListedLedger, Stream
from tierlog.ports.ids import Ids
from tierlog.ports.storage_node import StorageNodeClient
from tierlog.ports.waiting import Helpers

__all__ = ["Recovery", "RecoveryLimits", "insist"]

log = structlog.get_logger()

Answer = TypeVar("Answer")
Outcome = ListedLedger | LedgerMetadata | None


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

    @overload
    async def recover(self, claimed: Stream, ledger_id: LedgerId) -> ListedLedger | None: ...

    @overload
    async def recover(self, claimed: None, ledger_id: LedgerId) -> LedgerMetadata: ...

    async def recover(self, claimed: Stream | None, ledger_id: LedgerId) -> Outcome:
        """Recover and close a ledger; return how it ended.

        Of a claimed stream: its place in the list; None: it had no entry and is gone. Raises
        FENCED when the claim is. Of a bare ledger: its metadata, or raises LEDGER_NOT_FOUND.
        Metadata that can't be read, or contradicts itself, is CORRUPT.
        """
        try:
            if claimed is None:
                # A stream's ledger would be fenced by it, and is not this caller's to close.
                await self._insist(ledger_id, lambda: self._catalog.bare.get(ledger_id))
            while True:
                try:
                    return await self._recover(claimed, ledger_id)
                except NodeRetiredError as error:
                    # Nothing was closed: the same again, over other nodes.
                    log.warning("recovery.again", ledger_id=ledger_id, cause=str(error))
                    await asyncio.sleep(self._limits.backoff_s_max)
        finally:
            self.waiting.pop(ledger_id, None)

    async def _recover(self, claimed: Stream | None, ledger_id: LedgerId) -> Outcome:
        metadata = await self._insist(
            ledger_id, lambda: self._catalog.ledgers.begin_recovery(ledger_id)
        )
        if metadata is None or metadata.state is LedgerState.CLOSED:
            return await self._outcome(claimed, ledger_id)
        key = self._keys.of(ledger_id, metadata)
        asking = Asking(
            ledger_id, self._nodes, ids=self._ids, limits=self._limits, waiting=self.waiting
        )
        rewriting = Rewriting(ledger_id, metadata, asking, self._catalog.nodes.live)
        one = OneRecovery(ledger_id, metadata, key, asking, rewriting)
        async with Helpers() as tasks:
            finding = tasks.spawn(one.find_end(tasks))
            elsewhere = tasks.spawn(self._ended_elsewhere(ledger_id, one, asking))
            await asyncio.wait({finding, elsewhere}, return_when=asyncio.FIRST_COMPLETED)
            if not finding.done():
                trouble = elsewhere.result()
                if trouble is not None:
                    raise trouble
                return await self._outcome(claimed, ledger_id)
            end = finding.result()
            outcome = await self._close(claimed, ledger_id, end)
        last_entry_id = outcome.last_entry_id if outcome is not None else NO_ENTRY
        log.info(
            "ledger.recovered",
            stream=claimed.name if claimed is not None else None,
            ledger_id=ledger_id,
            lac=end.lac,
            last_entry_id=last_entry_id,
        )
        if end.lost:
            log.error("ledger.entries_lost", ledger_id=ledger_id, ranges=list(end.lost))
        if last_entry_id == end.last_entry_id != NO_ENTRY:
            # Of an end that another recovery decided on, that one says what is missing.
            await self._report_missing(ledger_id, one, end)
        return outcome

    async def _close(self, claimed: Stream | None, ledger_id: LedgerId, end: End) -> Outcome:
        if claimed is None:
            return await self._insist(
                ledger_id,
                lambda: self._catalog.bare.close(
                    ledger_id,
                    last_entry_id=end.last_entry_id,
                    length=end.length,
                    segments=end.segments,
                    lost=end.lost,
                ),
            )
        stream = await self._insist(
            ledger_id,
            lambda: self._catalog.ledgers.close(
                claimed,
                ledger_id,
                last_entry_id=end.last_entry_id,
                length=end.length,
                segments=end.segments,
                lost=end.lost,
            ),
        )
        return stream.listed(ledger_id)

    async def _ended_elsewhere(
        self, ledger_id: LedgerId, one: OneRecovery, asking: Asking
    ) -> TierlogError | None:
        """Wait until someone has closed or deleted the ledger; return why nobody can go on."""
        try:
            await self._closed_elsewhere(ledger_id, one, asking)
        except TierlogError as error:
            return error
        return None

    async def _closed_elsewhere(
        self, ledger_id: LedgerId, one: OneRecovery, asking: Asking
    ) -> None:
        """Wait until somebody else has closed or deleted the ledger; mind what else is changed."""
        while True:
            metadata, changed = await self._insist(
                ledger_id, lambda: self._catalog.ledgers.watch(ledger_id)
            )
            if metadata is None or metadata.state is LedgerState.CLOSED:
                return
            one.learn(metadata)
            if KEY_LOSS_ACCEPTED in metadata.custom and not asking.loss_accepted:
                by = metadata.custom[KEY_LOSS_ACCEPTED].decode("utf-8", "replace")
                log.warning("recovery.loss_accepted", ledger_id=ledger_id, by=by)
                asking.accept_loss()
            await changed.wait()

    async def _outcome(self, claimed: Stream | None, ledger_id: LedgerId) -> Outcome:
        """Return the end that someone else's close left."""
        if claimed is None:
            return await self._insist(ledger_id, lambda: self._catalog.bare.get(ledger_id))
        snapshot = await self._insist(
            ledger_id, lambda: self._catalog.streams.snapshot(claimed.name)
        )
        found = next((one for one in snapshot.ledgers if one.ledger_id == ledger_id), None)
        if found is not None and not found.closed:
            raise CorruptError(
                f"ledger {ledger_id} of stream {claimed.name} stands open in its list, and its own"
                " metadata is gone or says otherwise",
                remedy="Look into the metadata store: something else than Tierlog changed it",
                details={"ledger_id": str(ledger_id)},
            )
        return found

    async def _report_missing(self, ledger_id: LedgerId, one: OneRecovery, end: End) -> None:
        """Have copies made that may be missing; what is not reported, the next check finds."""
        suspects = {*one.rewriting.lacking, *one.unfenced}
        shares = shares_of(one.closed(end))

        async def compare(node_id: NodeId) -> None:
            try:
                client = await self._nodes.client(node_id)
                lacking = without(shares[node_id], await client.held_entries(ledger_id))
            except TierlogError as error:
                log.info("copy.unknown", ledger_id=ledger_id, node_id=node_id, cause=str(error))
            else:
                if lacking:
                    suspects.add(node_id)

        others = [node_id for node_id in shares if node_id not in suspects]
        if others:
            async with Helpers() as tasks:
                comparing = [tasks.spawn(compare(node_id)) for node_id in others]
                await asyncio.wait(comparing, timeout=self._limits.patience_s)
        if not suspects:
            return
        try:
            await self._catalog.underreplicated.add(
                ledger_id, reason=CopyTrouble.MISSING, nodes=sorted(suspects)
            )
        except TierlogError as error:
            log.warning("recovery.missing_unreported", ledger_id=ledger_id, cause=str(error))

    async def _insist(self, ledger_id: LedgerId, call: Callable[[], Awaitable[Answer]]) -> Answer:
        return await insist(
            call, ids=self._ids, limits=self._limits, waiting=_Waiting(ledger_id, self)
        )


class _Waiting:
    """Writes what a recovery waits for to where people look."""

    def __init__(self, ledger_id: LedgerId, recovery: Recovery) -> None:
        self._ledger_id, self._recovery = ledger_id, recovery

    def __call__(self, error: TierlogError | None) -> None:
        if error is None:
            self._recovery.waiting.pop(self._ledger_id, None)
            return
        self._recovery.waiting[self._ledger_id] = f"metadata: {error}"
        log.warning(
            "recovery.waiting", ledger_id=self._ledger_id, what="metadata", cause=str(error)
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
