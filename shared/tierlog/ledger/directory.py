"""Node ids to clients of those nodes: connects when first asked, again after a failure.

Ensembles name node ids, never addresses; where a node is now, its registration tells.

Invariants:
    * At most one client a node is handed out at a time; callers share it.
    * A client that was reported as failed is never handed out again.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Generic, Protocol, TypeVar

from tierlog.model.errors import RetryableError
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

    def __repr__(self) -> str:
        return f"<NodeDirectory local={sorted(self._local)} remote={sorted(self._connected)}>"

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
        if self._connected.get(node_id) is node:
            del self._connected[node_id]
            await self._connector.close(node)

    async def close(self) -> None:
        """Give every connection back; local nodes belong to someone else."""
        while self._connected:
            _, node = self._connected.popitem()
            await self._connector.close(node)
