"""Auto-recovery in one ingest process: a candidate auditor, a worker, and word of being emptied.

Owns that these run while the node serves, and end with it. Does not own what they do.
"""

import asyncio
from collections.abc import Callable
from typing import Final

import structlog

from tierlog.catalog import Catalog
from tierlog.ledger.directory import NodeDirectory
from tierlog.ledger.keys import NO_KEYS, LedgerKeys
from tierlog.model.errors import TierlogError
from tierlog.ports.clock import Clock
from tierlog.ports.ids import Ids
from tierlog.ports.storage_node import StorageNodeClient
from tierlog.ports.waiting import first_of
from tierlog.runtime.sections import ReplicationSettings
from tierlog_ingest.replication.auditor import Auditor
from tierlog_ingest.replication.worker import Owning, Worker

log = structlog.get_logger()

LOOK_AGAIN_S: Final = 1.0


class Replication:
    """What one process does so that no ledger lacks copies for long."""

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
        self._node_id = owning.node_id
        self._settings = settings
        self._auditor = Auditor(catalog, nodes, clock=clock, ids=ids, settings=settings)
        self._worker = Worker(
            catalog, nodes, owning, clock=clock, ids=ids, settings=settings, keys=keys
        )

    def __repr__(self) -> str:
        return f"<Replication {self._auditor!r} {self._worker!r}>"

    def statistics(self) -> dict[str, float]:
        """Return how far replication is, as this process sees it."""
        return {"auditor": self._auditor.leading, **self._worker.statistics()}

    async def run(self) -> None:
        """Find and mend; ends by cancellation."""
        if not self._settings.enabled:
            return
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._auditor.run(), name="auditor")
            tasks.create_task(self._worker.run(), name="replication worker")

    async def tell_draining(self, tell: Callable[[bool], None]) -> None:
        """Tell whenever it is decided that this node is to be emptied, or is not any more."""
        while True:
            try:
                draining, changed = await self._catalog.draining.watch(self._node_id)
            except TierlogError as error:
                log.info("draining.unknown", cause=str(error))
                await asyncio.sleep(LOOK_AGAIN_S)
                continue
            tell(draining is not None)
            # A watch ends with its session.
            await first_of(changed, self._catalog.store.session_lost)
            if not changed.is_set():
                await asyncio.sleep(LOOK_AGAIN_S)
