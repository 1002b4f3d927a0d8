"""Node ids to clients of those nodes: connects when first asked, again after a failure.

Ensembles name node ids, never addresses; where a node is now, its registration tells. Which of
several nodes to ask first, their answers so far tell (``paces``).

Invariants:
    * At most one client a node is handed out at a time; callers share it.
    * A client that was reported as failed is never handed out again.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from tierlog.ledger.paces import Paces
from tierlog.model.errors import Reason, RetryableError, TierlogError
from tierlog.model.ids import NodeId
from tierlog.model.node import NodeInfo
from tierlog.ports.storage_node import StorageNodeControl

Node = TypeVar("Node", bound=StorageNodeControl)

LiveNodes = Callable[[], Awaitable[Mapping[NodeId, NodeInfo]]]


class NodeConnector(Protocol[Node]):
    """Makes clients of nodes, and ends them."""

    async def connect(self, info: NodeInfo) -> Node:
        """Return a client of that node, or raise UNAVAILABLE."""
        ...

    async def close(self, node: Node) -> None:
        """Give a client back."""
        ...


class NodeDirectory(Generic[Node]):
    """The clients of all storage nodes that one process talks to."""

    def __init__(
        self,
        live: LiveNodes,
        connector: NodeConnector[Node],
        *,
        local: Mapping[NodeId, Node] | None = None,
    ) -> None:
        self._live = live
        self._connector = connector
        self._local = dict(local or {})
        self._connected: dict[NodeId, Node] = {}
        self._locks: dict[NodeId, asyncio.Lock] = {}
        self._paces = Paces()

    def __repr__(self) -> str:
        return f"<NodeDirectory local={sorted(self._local)} remote={sorted(self._connected)}>"

    def fastest_first(self, node_ids: Sequence[NodeId]) -> list[NodeId]:
        """Return nodes in the order in which to ask them for the same."""
        return self._paces.order(node_ids, now_s=_now_s())

    def expected_s(self, node_id: NodeId) -> float | None:
        """Return how long the node's answers took of late; None: that isn't known."""
        return self._paces.expected_s(node_id, now_s=_now_s())

    def failed_lately(self, node_id: NodeId) -> bool:
        """Tell whether nobody should wait for this node where others have answered."""
        return self._paces.failed_lately(node_id, now_s=_now_s())

    def answered(self, node_id: NodeId, took_s: float) -> None:
        """Take notice of how long an answer took."""
        self._paces.answered(node_id, took_s, now_s=_now_s())

    def silent(self, node_id: NodeId, waited_s: float) -> None:
        """Take notice that an answer takes longer than that."""
        self._paces.silent(node_id, waited_s, now_s=_now_s())

    def failed(self, node_id: NodeId) -> None:
        """Take notice that a node can't be read from now."""
        self._paces.failed(node_id, now_s=_now_s())

    async def client(self, node_id: NodeId) -> Node:
        """Return the node's client, or raise UNAVAILABLE."""
        local = self._local.get(node_id)
        if local is not None:
            return local
        async with self._locks.setdefault(node_id, asyncio.Lock()):
            found = self._connected.get(node_id)
            if found is not None:
                return found
            info = (await self._live()).get(node_id)
            if info is None:
                raise RetryableError(
                    f"storage node {node_id} is not live",
                    remedy="Start it, or wait until it has registered",
                    details={"node_id": node_id},
                )
            made = await self._connector.connect(info)
            self._connected[node_id] = made
            return made

    async def report_failed(self, node_id: NodeId, node: Node) -> None:
        """Drop a client that failed; the next caller resolves and connects anew."""
        self.failed(node_id)
        if self._connected.get(node_id) is node:
            del self._connected[node_id]
            await self._connector.close(node)

    async def close(self) -> None:
        """Give every connection back; local nodes belong to someone else."""
        while self._connected:
            _, node = self._connected.popitem()
            await self._connector.close(node)


def is_gone(error: TierlogError) -> bool:
    """Tell whether an error says that the node gave no answer; it may be elsewhere by now."""
    return error.reason in (Reason.UNAVAILABLE, Reason.APPEND_INDETERMINATE)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
