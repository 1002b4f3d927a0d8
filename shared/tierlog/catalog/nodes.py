"""The cluster's identity and its live storage nodes in the metadata store."""

import asyncio
from dataclasses import replace

import structlog

from tierlog.catalog.change import settle
from tierlog.catalog.scrubs import leave_mark
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
        is restored from a backup, which knows nothing of the ids given since. No scrub by schedule
        repairs from then on, as after a restore: none could tell any more that ids were forgotten.
        """
        wanted = Cluster(
            cluster_id=self._ids.uuid(),
            created_ms=self._clock.wall_ms(),
            ledger_id_base=ledger_id_base,
        )

        async def one_round() -> Cluster:
            await self._refuse_flat_layout()
            if await self._store.get(paths.RESTORING) is not None:
                raise RefusedError(
                    "the cluster is being restored from its bucket, or that was interrupted",
                    remedy="Run the same tierlog restore again until it ends, then start services",
                )
            found = await self._store.get(paths.CLUSTER)
            if found is not None:
                cluster = records.decode_cluster(found.data)
                if cluster.ledger_id_base >= ledger_id_base:
                    return cluster
                # First: what dies between the two begins again.
                await leave_mark(self._store)
                raised = replace(cluster, ledger_id_base=ledger_id_base)
                data = records.encode_cluster(raised)
                await self._store.set(paths.CLUSTER, data, version=found.version)
                return raised
            await self._store.create(paths.CLUSTER, records.encode_cluster(wanted))
            await self._make(paths.LAYOUT, paths.LAYOUT_DATA)
            return wanted

        return await settle(self._store, self._ids, paths.CLUSTER, one_round)

    async def cluster(self) -> Cluster | None:
        """Return the cluster's identity; None: no node of it ever started here."""
        await self._store.sync(paths.CLUSTER)
        found = await self._store.get(paths.CLUSTER)
        return None if found is None else records.decode_cluster(found.data)

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
        here, there = _both_paths(info)
        data = records.encode_node(info)

        async def one_round() -> asyncio.Event:
            lost = self._store.session_lost
            found = await self._store.get(here)
            other = found if found is not None else await self._store.get(there)
            if other is not None and other.data != data:
                raise RefusedError(
                    f"node {info.node_id} is registered already, at "
                    f"{records.decode_node(other.data).wire_address}",
                    remedy="Give each node its own id; after a crash wait for its session's end",
                )
            if found is None:
                await self._store.create_ephemeral(here, data)
            return lost

        return await settle(self._store, self._ids, here, one_round)

    async def amend(self, info: NodeInfo) -> None:
        """Change what a registered node says of itself, and move it when it is read-only now.

        Does nothing when there is no registration, or one with other addresses.
        """
        here, there = _both_paths(info)
        data = records.encode_node(info)

        async def one_round() -> None:
            found, moved = await self._store.get(here), await self._store.get(there)
            if moved is not None and _same_process(moved.data, info):
                if found is None:
                    # Both stand for a moment: whoever looks takes the node for read-only.
                    await self._store.create_ephemeral(here, data)
                await self._store.delete(there, version=moved.version)
            elif found is not None and found.data != data and _same_process(found.data, info):
                await self._store.set(here, data, version=found.version)

        await settle(self._store, self._ids, here, one_round)

    async def tally(self, node: NodeId) -> int:
        """Return how often the store knows a node to have counted, as of now; -1: never."""
        path = paths.tally_path(node)
        await self._store.sync(path)
        found = await self._store.get(path)
        return -1 if found is None else found.version

    async def count(self, node: NodeId) -> int:
        """Raise a node's tally, which nobody but the node itself does; return it.

        Only a store from a backup has a lower one later.
        """
        path = paths.tally_path(node)
        if await self._store.get(path) is None:
            await self._store.create(path, b"")
            return 0
        return await self._store.set(path, b"", version=-1)

    async def watch_announced(self, info: NodeInfo) -> asyncio.Event | None:
        """Return an event that is set once the node's registration changes; None: there is none.

        A registration may be left over from before a crash: it goes with its own session.
        """
        here, _ = _both_paths(info)
        found, changed = await self._store.watch(here)
        return None if found is None else changed

    async def watch_live(self) -> tuple[dict[NodeId, NodeInfo], list[asyncio.Event]]:
        """Return the live nodes, and events of which one is set once a node comes or goes."""
        events = []
        for folder in (paths.AVAILABLE, paths.AVAILABLE_READONLY):
            _, changed = await self._store.watch_children(folder)
            events.append(changed)
        return await self.live(), events

    async def live(self) -> dict[NodeId, NodeInfo]:
        """Return the live nodes by id, read-only ones too."""
        nodes: dict[NodeId, NodeInfo] = {}
        for folder in (paths.AVAILABLE, paths.AVAILABLE_READONLY):
            for name in await self._store.children(folder) or []:
                if name == READONLY_NAME:
                    continue
                found = await self._store.get(f"{folder}/{name}")
                if found is not None and found.data:
                    info = records.decode_node(found.data)
                    nodes[info.node_id] = info
        return nodes


def _both_paths(info: NodeInfo) -> tuple[str, str]:
    """Return where a node's registration belongs now, and where it doesn't."""
    return (
        paths.available_path(info.node_id, read_only=info.read_only),
        paths.available_path(info.node_id, read_only=not info.read_only),
    )


def _same_process(data: bytes, info: NodeInfo) -> bool:
    return records.decode_node(data).wire_address == info.wire_address
