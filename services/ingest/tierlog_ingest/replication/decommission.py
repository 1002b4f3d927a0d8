"""Emptying a storage node for good: marked, waited for, and in the end its identity removed.

Owns the order, and that it ends only when no ledger names the node. Does not own moving what it
held: the auditor queues it, and workers move it.

Invariants:
    * The identity is removed only after two looks, apart, found no ledger that names the node; it
      was marked all the while, so that no new ledger got it.
    * Its id stays barred: no node ever starts under it again.

Crash, cancellation
    The mark stays and the node is emptied all the same; the same call again goes on waiting.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tierlog.catalog import Catalog
from tierlog.model.ids import LedgerId, NodeId
from tierlog.model.replication import Draining
from tierlog_ingest.replication.plan import named_nodes

LOOKS: Final = 2
SETTLE_S: Final = 10.0
"""Whoever chose the node before it was marked has its ledger in the metadata by the second look:
reaching a silent node of the same ensemble, and a back-off after a lost answer, take seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far it is."""

    ledgers_left: int
    first_left: LedgerId | None
    trouble: str
    """Why the first of those that are left is not moved yet; empty: nothing is known."""


async def decommission(
    catalog: Catalog,
    node_id: NodeId,
    *,
    tell: Callable[[Progress], None],
    interval_s: float = 2.0,
) -> Draining:
    """Empty a node and remove its identity; ends when that is done. Raises what can't be."""
    draining = await catalog.draining.begin(node_id)
    looks = 0
    while not draining.done_ms:
        left = await ledgers_on(catalog, node_id)
        looks = looks + 1 if not left else 0
        if looks == LOOKS:
            break
        if left:
            queued = await catalog.underreplicated.get(left[0])
            trouble = queued.last_error if queued is not None else ""
            tell(Progress(ledgers_left=len(left), first_left=left[0], trouble=trouble))
        await asyncio.sleep(interval_s if left else SETTLE_S)
    return await catalog.draining.finish(node_id)


async def ledgers_on(catalog: Catalog, node_id: NodeId) -> list[LedgerId]:
    """Return the ledgers that name a node, open ones too. Any failure raises."""
    found = []
    for ledger_id in await catalog.ledgers.list_ids():
        metadata = await catalog.ledgers.get(ledger_id)
        if metadata is not None and node_id in named_nodes(metadata):
            found.append(ledger_id)
    return found
