"""Emptying a storage node for good: marked, waited for, and in the end its identity removed.

Owns the order, and that it ends only when no ledger names the node and the node holds nothing.
Does not own moving what it held (the auditor queues it, and workers move it), nor freeing the
copies that were moved (the node's own ``storage.emptying``).

    draining   marked: nobody chooses the node any more, and what it holds moves
    retired    no ledger named it, and from then on none can be made to. One that was made to name
               it a moment before is seen by the next look, and waited for
    done       it says that it holds nothing, or is gone: its identity is removed

Invariants:
    * The identity is removed only after a look, later than the node was retired, found no ledger
      that names it.
    * Nor is it while the node lives and holds anything. A node that is gone can't be asked: what
      its disk holds is not known then, and that is said.
    * Its id stays barred: no node ever starts under it again.

Crash, cancellation
    The mark stays and the node is emptied all the same; the same call again goes on waiting.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from tierlog.catalog import Catalog
from tierlog.ledger.directory import Node, NodeDirectory
from tierlog.model.errors import IndeterminateError, RefusedError, RetryableError
from tierlog.model.ids import LedgerId, NodeId
from tierlog.model.replication import Draining

GONE_S: Final = 15.0
"""A node without registration for so long is gone; a restart takes less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far it is."""

    ledgers_left: int
    first_left: LedgerId | None
    trouble: str
    """Why the first of those that are left is not moved yet; empty: nothing is known."""
    retired: bool = False
    """Nothing is left to move; those that are left are copies that the node has yet to free."""


async def decommission(
    catalog: Catalog,
    nodes: NodeDirectory[Node],
    node_id: NodeId,
    *,
    tell: Callable[[Progress], None],
    interval_s: float = 2.0,
) -> Draining:
    """Empty a node and remove its identity; ends when that is done. Raises what can't be."""
    draining = await catalog.draining.begin(node_id)
    asking = _Asking(catalog, nodes, node_id)
    while not draining.done_ms:
        left = await ledgers_on(catalog, node_id)
        if left:
            queued = await catalog.underreplicated.get(left[0])
            tell(_progress(left, trouble=queued.last_error if queued is not None else ""))
        elif not draining.is_retired:
            draining = await catalog.draining.retire(node_id)
            continue
        else:
            held, trouble = await asking.held()
            if not held and not trouble:
                return await catalog.draining.finish(node_id, said_empty=held is not None)
            tell(_progress(held or (), trouble=trouble, retired=True))
        await asyncio.sleep(interval_s)
        draining = await _still(catalog, node_id)
    return draining


async def _still(catalog: Catalog, node_id: NodeId) -> Draining:
    """Look at the mark again: someone else may have ended it, or called it off."""
    draining = await catalog.draining.get(node_id)
    if draining is None:
        raise RefusedError(
            f"the decommission of node {node_id} was called off",
            remedy="Nothing to do: the node takes ledgers again",
        )
    return draining


def _progress(left: Sequence[LedgerId], *, trouble: str, retired: bool = False) -> Progress:
    return Progress(
        ledgers_left=len(left),
        first_left=left[0] if left else None,
        trouble=trouble,
        retired=retired,
    )


class _Asking:
    """Asks the node itself, for as long as it lives."""

    def __init__(self, catalog: Catalog, nodes: NodeDirectory[Node], node_id: NodeId) -> None:
        self._catalog = catalog
        self._nodes = nodes
        self._node_id = node_id
        self._gone_since_s: float | None = None

    async def held(self) -> tuple[Sequence[LedgerId] | None, str]:
        """Return what the node holds, and why that is not known; None without a why: it's gone."""
        now_s = asyncio.get_running_loop().time()
        if self._node_id not in await self._catalog.nodes.live():
            if self._gone_since_s is None:
                self._gone_since_s = now_s
            waiting = now_s - self._gone_since_s < GONE_S
            return None, "it is away, and is waited for in case it only starts" if waiting else ""
        self._gone_since_s = None
        try:
            client = await self._nodes.client(self._node_id)
        except (RetryableError, IndeterminateError) as error:
            return None, str(error)
        try:
            return await client.list_ledgers(), ""
        except (RetryableError, IndeterminateError) as error:
            await self._nodes.report_failed(self._node_id, client)
            return None, str(error)


async def ledgers_on(catalog: Catalog, node_id: NodeId) -> list[LedgerId]:
    """Return the ledgers that name a node, open ones too. Any failure raises."""
    found = []
    for ledger_id in await catalog.ledgers.list_ids():
        metadata = await catalog.ledgers.get(ledger_id)
        if metadata is not None and node_id in metadata.named_nodes:
            found.append(ledger_id)
    return found
