"""The cluster as its metadata tells it: storage nodes, and ledgers that lack copies.

Owns: finding the metadata store, and documents for people and programs. Does not own what they
tell of: the catalog does.

Invariant: nothing is changed here.
"""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from tierlog.catalog import Catalog
from tierlog.client.endpoints import with_zookeeper
from tierlog.model.errors import RetryableError
from tierlog.model.node import NodeInfo
from tierlog.model.replication import Draining
from tierlog.runtime.settings import Settings
from tierlog.wiring.build import open_metadata, system_clock, system_ids

Document = dict[str, Any]


@contextlib.asynccontextmanager
async def open_cluster(settings: Settings) -> AsyncIterator[Catalog]:
    """Give the catalog of a cluster that is there; UNAVAILABLE where there is none."""
    settings = with_zookeeper(settings)
    async with open_metadata(settings) as store:
        catalog = Catalog.over(store, clock=system_clock(), ids=system_ids())
        if await catalog.nodes.cluster() is None:
            raise RetryableError(
                f"there is no cluster in ZooKeeper at {settings.zookeeper.hosts}",
                remedy="Correct TIERLOG_ZOOKEEPER__HOSTS, with its root; or start ingest nodes",
            )
        yield catalog


def node_state(info: NodeInfo | None, mark: Draining | None) -> str:
    """Name what is known of a node by its registration, if any, and whether it is to go."""
    if mark is not None:
        return "decommissioned" if mark.done_ms else "draining"
    if info is None:
        return "away"
    if info.draining:
        return "leaving"
    return "read-only" if info.read_only else "live"


async def node_documents(catalog: Catalog) -> list[Document]:
    """Return every storage node that is live, or known, or was decommissioned."""
    live = await catalog.nodes.live()
    known = await catalog.draining.known_nodes()
    draining = await catalog.draining.list()
    rows: list[Document] = []
    for node_id in sorted({*live, *known, *draining}):
        info, mark = live.get(node_id), draining.get(node_id)
        rows.append(
            {
                "node_id": node_id,
                "state": node_state(info, mark),
                "live": info is not None,
                "zone": info.zone if info is not None else None,
                "wire": info.wire_address if info is not None else None,
                "grpc": info.grpc_address if info is not None else None,
                "http": info.http_address if info is not None else None,
                "free_bytes": info.free_bytes if info is not None else None,
                "draining_since_ms": mark.since_ms if mark is not None else None,
                "retired_ms": (mark.retired_ms or None) if mark is not None else None,
                "decommissioned_ms": (mark.done_ms or None) if mark is not None else None,
            }
        )
    return rows


async def underreplicated_documents(catalog: Catalog) -> list[Document]:
    """Return the ledgers that lack copies, by id."""
    return [
        {
            "ledger_id": one.ledger_id,
            "reasons": list(one.reasons),
            "nodes": list(one.nodes),
            "complaints": [
                {
                    "node_id": complaint.node_id,
                    "reason": complaint.reason,
                    "entries": list(complaint.entries) if complaint.entries is not None else None,
                }
                for complaint in one.complaints
            ],
            "since_ms": one.since_ms,
            "tries": one.tries,
            "last_worker": one.last_worker or None,
            "last_error": one.last_error or None,
            "last_error_ms": one.last_error_ms or None,
        }
        for one in await catalog.underreplicated.list()
    ]
