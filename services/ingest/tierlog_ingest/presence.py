"""Keeps this node registered among the live ones, whatever becomes of sessions.

Invariant: while the store can be reached, the registration is this process's own within a moment:
after a lost session, and after one that a crash left behind has gone.
"""

import asyncio
from typing import Final

import structlog

from tierlog.catalog import Catalog
from tierlog.model.errors import IndeterminateError, RefusedError, RetryableError
from tierlog.model.node import NodeInfo
from tierlog.ports.ids import Ids
from tierlog.ports.waiting import first_of

log = structlog.get_logger()

BACKOFF_S: Final = 0.5


class Presence:
    """Announces one node for as long as ``run`` runs."""

    def __init__(self, catalog: Catalog, info: NodeInfo, *, ids: Ids, patience_s: float) -> None:
        self.registered = asyncio.Event()
        self.info = info
        self._amended = asyncio.Event()
        self._told: NodeInfo | None = None
        self._told_more = asyncio.Event()
        self._catalog = catalog
        self._ids = ids
        self._patience_s = patience_s

    def amend(self, info: NodeInfo) -> None:
        """Tell others something new of this node (read-only, or no more; draining)."""
        assert info.node_id == self.info.node_id
        self.info = info
        self._amended.set()

    async def told(self, *, timeout_s: float) -> bool:
        """Wait until others can read what this node last told; False: not in that time."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._told != self.info:
                    self._told_more.clear()
                    await self._told_more.wait()
        except TimeoutError:
            return False
        return True

    async def run(self) -> None:
        """Register, and again whenever the registration is gone.

        Raises ``RefusedError`` when another process holds the node's id longer than a crashed
        one's session lasts.
        """
        loop = asyncio.get_running_loop()
        refused_since_s: float | None = None
        while True:
            try:
                self._amended.clear()
                info = self.info
                # What stands there may be older news of this very process.
                await self._catalog.nodes.amend(info)
                lost = await self._catalog.nodes.announce(info)
                changed = await self._catalog.nodes.watch_announced(info)
            except (RetryableError, IndeterminateError) as error:
                log.warning("node.not_registered", cause=str(error))
            except RefusedError as error:
                since_s = refused_since_s = refused_since_s or loop.time()
                if loop.time() - since_s > self._patience_s:
                    raise
                log.info("node.registration_held", cause=str(error))
            else:
                if changed is not None:
                    refused_since_s = None
                    self._told = info
                    self._told_more.set()
                    self.registered.set()
                    await first_of(lost, changed, self._amended)
                    if self._amended.is_set():
                        continue
                    self.registered.clear()
                    log.info("node.registration_moved", session_lost=lost.is_set())
                    continue
            await asyncio.sleep(self._ids.uniform(0.5, 1.0) * BACKOFF_S)
