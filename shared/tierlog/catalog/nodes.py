"""The cluster's identity and its live storage nodes in the metadata store."""

import asyncio
from dataclasses import replace

import structlog

from tierlog.catalog.change import settle
from tierlog.format import paths, records
from tierlog.model.errors import RefusedError
from tierlog.model.ids import READONLY_NAME, NodeId
from tierlog.model.node import Cluster, NodeInfo
from tierlog.ports.clock import Clock
from tierlog.ports.ids import Ids
from tierlog.ports.metadata import MetadataStore, NodeExistsError

log = structlog.get_logger()


class NodeCatalog:
    """Who belongs to the cluster, and who of them is alive."""

    def __init__(self, store: MetadataStore, *, clock: Clock, ids: Ids) -> None:
        self._store = store
        self._clock = clock
        self._ids = ids

    async def ensure_cluster(self, *, ledger_id_base: int = 0) -> Cluster:
        """Return the cluster's identity, giving it one when it has none.

        Its ``ledger_id_base`` is raised to the one given, never lowered: raise it when metadata
        is restored from a backup, which knows nothing of the ids given since.
        """
        wanted = Cluster(
            cluster_id=self._ids.uuid(),
            created_ms=self._clock.wall_ms(),
            ledger_id_base=ledger_id_base,
        )

        async def one_round() -> Cluster:
            await self._refuse_flat_layout()
            found = await self._store.get(paths.CLUSTER)
            if found is not None:
                cluster = records.decode_cluster(found.data)
                if cluster.ledger_id_base >= ledger_id_base:
                    return cluster
                raised = replace(cluster, ledger_id_base=ledger_id_base)
                data = records.encode_cluster(raised)
                await self._store.set(paths.CLUSTER, data, version=found.version)
                return raised
            await self._store.create(paths.CLUSTER, records.encode_cluster(wanted))
            await self._make(paths.LAYOUT, paths.LAYOUT_DATA)
            return wanted

        return await settle(self._store, self._ids, paths.CLUSTER, one_round)

    async def _refuse_flat_layout(self) -> None:
        layout = await self._store.get(paths.LAYOUT)
        if layout is not None:
            paths.check_layout(layout.data)

    async def _make(self, path: str, data: bytes) -> None:
        try:
            await self._store.create(path, data)
        except NodeExistsError:
            return

    async def announce(self, info: NodeInfo) -> asyncio.Event:
        """Register a live node for the length of the session; return the session's end.

        Raises ``RefusedError`` while another process is registered under the same id. What stands
        there and reads the same counts, though it may go with the session of the process before
        this one: callers watch it (``watch_announced``) and announce again.
        """
        path, data = paths.available_path(info.node_id), records.encode_node(info)

        async def one_round() -> asyncio.Event:
            lost = self._store.session_lost
            found = await self._store.get(path)
            if found is None:
                await self._store.create_ephemeral(path, data)
            elif found.data != data:
                raise RefusedError(
                    f"node {info.node_id} is registered already, at "
                    f"{records.decode_node(found.data).wire_address}",
                    remedy="Give each node its own id; after a crash wait for its session's end",
                )
            return lost

        return await settle(self._store, self._ids, path, one_round)

    async def amend(self, info: NodeInfo) -> None:
        """Change what a registered node says of itself (that it is read-only); it stays its own.

        Does nothing when there is no registration, or one with other addresses.
        """
        path = paths.available_path(info.node_id)

        async def one_round() -> None:
            found = await self._store.get(path)
            if found is None:
                return
            there = records.decode_node(found.data)
            if there != info and there.wire_address == info.wire_address:
                await self._store.set(path, records.encode_node(info), version=found.version)

        await settle(self._store, self._ids, path, one_round)

    async def watch_announced(self, node_id: NodeId) -> asyncio.Event | None:
        """Return an event that is set once the node's registration changes; None: there is none.

        A registration may be left over from before a crash: it goes with its own session.
        """
        found, changed = await self._store.watch(paths.available_path(node_id))
        return None if found is None else changed

    async def live(self) -> dict[NodeId, NodeInfo]:
        """Return the live nodes by id."""
        nodes: dict[NodeId, NodeInfo] = {}
        for name in await self._store.children(paths.AVAILABLE) or []:
            if name == READONLY_NAME:
                continue
            found = await self._store.get(f"{paths.AVAILABLE}/{name}")
            if found is not None and found.data:
                info = records.decode_node(found.data)
                nodes[info.node_id] = info
        return nodes
