"""Freeing what a node still holds once it is retired: its copies lie elsewhere (ADR-0016).

Garbage collection (``gc``) frees ledgers that are no more. This frees ledgers that live on without
this node, and only where it can never be made part of them again: after it was retired.

Owns: when, and of which ledgers. Does not own freeing: ``StorageNode`` does, and then refuses the
ledger's id for ever, as if it were fenced.

Invariants:
    * A ledger is freed only if its metadata, read after the node was seen to be retired, is there
      and names the node nowhere. No later change can name it (``tierlog.catalog.naming``), so
      that no copy is freed that is counted on, nor one that is being made and is to be.
    * Nothing is concluded from an error, nor from metadata that is not there.
"""

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

import structlog

from tierlog.catalog import Catalog
from tierlog.model.errors import CorruptError, TierlogError
from tierlog.model.ids import LedgerId, NodeId
from tierlog.ports.waiting import first_of

log = structlog.get_logger()

LOOK_AGAIN_S: Final = 2.0


class RetiringNode(Protocol):
    """What this does to the node."""

    async def list_ledgers(self) -> list[LedgerId]:
        """Return the ledgers that the node holds entries of."""
        ...

    async def free(self, ledger_id: LedgerId) -> None:
        """Forget a ledger, durably."""
        ...


class Emptying:
    """Empties one node once that is decided. ``run`` is its life."""

    def __init__(
        self,
        node: RetiringNode,
        catalog: Catalog,
        node_id: NodeId,
        *,
        on_freed: Callable[[], None] = lambda: None,
    ) -> None:
        self._node = node
        self._catalog = catalog
        self._node_id = node_id
        self._on_freed = on_freed

    def __repr__(self) -> str:
        return f"<Emptying of {self._node_id}>"

    async def run(self) -> None:
        """Wait until the node is retired, then free what there is; ends by cancellation."""
        while True:
            try:
                draining, changed = await self._catalog.draining.watch(self._node_id)
                if draining is None or not draining.is_retired:
                    # A watch ends with its session.
                    await first_of(changed, self._catalog.store.session_lost)
                    if changed.is_set():
                        continue
                else:
                    await self.collect()
            except TierlogError as error:
                log.info("emptying.skipped", cause=str(error))
            await asyncio.sleep(LOOK_AGAIN_S)

    async def collect(self) -> list[LedgerId]:
        """Free every ledger that lies elsewhere; return those. What can't be asked raises."""
        if not await self._catalog.draining.is_retired(self._node_id):
            return []
        freed: list[LedgerId] = []
        for ledger_id in await self._node.list_ledgers():
            try:
                metadata = await self._catalog.ledgers.get(ledger_id)
            except CorruptError as error:
                # One ledger that can't be read is kept, and keeps no other from being freed.
                log.warning("emptying.ledger_unreadable", ledger_id=ledger_id, cause=str(error))
                continue
            if metadata is not None and self._node_id not in metadata.named_nodes:
                await self._node.free(ledger_id)
                freed.append(ledger_id)
        if freed:
            log.info("emptying.freed", ledgers=len(freed))
            self._on_freed()
        return freed
