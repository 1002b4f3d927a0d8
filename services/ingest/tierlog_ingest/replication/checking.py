"""The periodic full check that every entry of every closed ledger lies on all its nodes.

Owns: when it is due, and comparing what nodes hold with what they should. Does not own what is
read there: bytes are verified by whoever reads them.

Invariants:
    * Its time is kept in the metadata: a new auditor goes on from the last whole check.
    * What can't be asked (a node that is away, or can't tell) is no complaint, and is looked at
      again at the next check; lost nodes are the auditor's. A node that has no identity in the
      cluster is nobody's to wait for: it is lost.
"""

import asyncio
from collections.abc import Collection
from typing import Final

import structlog

from tierlog.catalog import Catalog
from tierlog.ledger.directory import NodeDirectory
from tierlog.ledger.shares import share_of
from tierlog.model.errors import CorruptError, Reason, TierlogError
from tierlog.model.ids import LedgerId, NodeId
from tierlog.model.ledger import LedgerMetadata, LedgerState
from tierlog.model.replication import CopyTrouble
from tierlog.model.spans import Spans, count, without
from tierlog.ports.clock import Clock
from tierlog.ports.storage_node import StorageNodeClient
from tierlog.runtime.sections import ReplicationSettings
from tierlog_ingest.replication.plan import named_nodes

log = structlog.get_logger()

LOOK_S_MAX: Final = 3600.0


class Checker:
    """Compares all copies when that is due."""

    def __init__(
        self,
        catalog: Catalog,
        nodes: NodeDirectory[StorageNodeClient],
        *,
        clock: Clock,
        settings: ReplicationSettings,
    ) -> None:
        self._catalog = catalog
        self._nodes = nodes
        self._clock = clock
        self._settings = settings

    async def run(self) -> None:
        """Check whenever it is due; ends by cancellation."""
        interval_s = self._settings.check_interval_s
        if interval_s <= 0:
            return
        while True:
            try:
                left_s = await self._left_s(interval_s)
                if left_s <= 0:
                    await self.check_all()
                    continue
            except TierlogError as error:
                log.info("check.skipped", cause=str(error))
                left_s = self._settings.interval_s
            await asyncio.sleep(max(self._settings.interval_s, min(left_s, LOOK_S_MAX)))

    async def _left_s(self, interval_s: float) -> float:
        checked_ms, now_ms = await self._catalog.draining.last_check_ms(), self._clock.wall_ms()
        if not checked_ms:
            # A new cluster has nothing to check: its time begins now.
            await self._catalog.draining.note_check(now_ms)
            return interval_s
        if checked_ms > now_ms:
            return 0.0  # the clock went back
        return interval_s - (now_ms - checked_ms) / 1000

    async def check_all(self) -> int:
        """Compare every copy; return how many were found to lack entries."""
        found = asked = 0
        known = {*await self._catalog.draining.known_nodes(), *await self._catalog.nodes.live()}
        for ledger_id in await self._catalog.ledgers.list_ids():
            try:
                metadata = await self._catalog.ledgers.get(ledger_id)
            except CorruptError as error:
                # One ledger that can't be read keeps no other from being checked.
                log.warning("check.ledger_unreadable", ledger_id=ledger_id, cause=str(error))
                continue
            if metadata is not None and metadata.state is LedgerState.CLOSED:
                found += await self.check_ledger(ledger_id, metadata)
                found += await self._check_identities(ledger_id, metadata, known)
                asked += 1
        await self._catalog.draining.note_check(self._clock.wall_ms())
        log.info("check.finished", ledgers=asked, lacking=found)
        return found

    async def _check_identities(
        self, ledger_id: LedgerId, metadata: LedgerMetadata, known: Collection[NodeId]
    ) -> int:
        """Report nodes that are named and unknown; return how many of them there are."""
        unknown = named_nodes(metadata).difference(known)
        if not unknown:
            return 0
        # It came since the check began, maybe: a node is known before it is named.
        now_known = await self._catalog.draining.known_nodes()
        unknown = unknown.difference(now_known)
        if not now_known:
            return 0  # no identity at all proves nothing
        if unknown:
            await self._catalog.underreplicated.add(
                ledger_id, reason=CopyTrouble.LOST, nodes=unknown
            )
        return len(unknown)

    async def check_ledger(self, ledger_id: LedgerId, metadata: LedgerMetadata) -> int:
        """Compare the copies of a closed ledger; return how many lack entries."""
        lacking: set[NodeId] = set()
        held: dict[NodeId, Spans | None] = {}
        for at, segment in enumerate(metadata.segments):
            for place, node_id in enumerate(segment.ensemble):
                share = share_of(metadata, at, place)
                if not share:
                    continue
                if node_id not in held:
                    held[node_id] = await held_by(self._nodes, node_id, ledger_id)
                known = held[node_id]
                if known is not None and without(share, known):
                    lacking.add(node_id)
                    log.info(
                        "check.copy_lacks_entries",
                        ledger_id=ledger_id,
                        node_id=node_id,
                        entries=count(without(share, known)),
                    )
        if lacking:
            await self._catalog.underreplicated.add(
                ledger_id, reason=CopyTrouble.MISSING, nodes=lacking
            )
        return len(lacking)


async def held_by(
    nodes: NodeDirectory[StorageNodeClient], node_id: NodeId, ledger_id: LedgerId
) -> Spans | None:
    """Return what a node holds of a ledger; None: it can't be asked, or can't tell."""
    client: StorageNodeClient | None = None
    try:
        client = await nodes.client(node_id)
        return await client.held_entries(ledger_id)
    except TierlogError as error:
        if error.reason is Reason.LEDGER_NOT_FOUND:
            return []  # freed, though the ledger exists: none of it is there
        log.info("copy.unknown", ledger_id=ledger_id, node_id=node_id, cause=str(error))
        if client is not None and error.reason is Reason.UNAVAILABLE:
            await nodes.report_failed(node_id, client)
        return None
