"""What reading tier 1 stands on: clients of storage nodes, and reports of damaged copies."""

import contextlib
from collections.abc import AsyncIterator

from tierlog.adapters.rpc.run_inflow import receiving_pieces
from tierlog.adapters.rpc.storage_node import ControlConnector, RemoteStorageControl
from tierlog.catalog import Catalog
from tierlog.ledger.damage import DamageReports
from tierlog.ledger.directory import NodeDirectory
from tierlog.ports.waiting import Helpers
from tierlog.runtime.calling import PLAIN, Calling


@contextlib.asynccontextmanager
async def open_storage_controls(
    catalog: Catalog, *, kept_bytes_max: int | None = None, calling: Calling = PLAIN
) -> AsyncIterator[NodeDirectory[RemoteStorageControl]]:
    """Give clients of all storage nodes of the cluster, for small calls and reads.

    ``kept_bytes_max``: memory for runs that is kept for the next ones.
    """
    pieces = (
        receiving_pieces()
        if kept_bytes_max is None
        else receiving_pieces(kept_bytes_max=kept_bytes_max)
    )
    cluster = await catalog.nodes.cluster()
    if cluster is not None:
        calling = calling.within(cluster.cluster_id)
    nodes: NodeDirectory[RemoteStorageControl] = NodeDirectory(
        catalog.nodes.live, ControlConnector(pieces, calling=calling)
    )
    try:
        yield nodes
    finally:
        await nodes.close()


@contextlib.asynccontextmanager
async def reporting_damage(catalog: Catalog) -> AsyncIterator[DamageReports]:
    """Give what takes reports of damage, and passes them on for as long as the context lasts."""
    reports = DamageReports(catalog.underreplicated.add)
    async with Helpers() as tasks:
        tasks.spawn(reports.run())
        yield reports
