"""What offloader and scheduler stand on: metadata, bucket, queue, storage nodes."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from tierlog.adapters.rpc.storage_node import ControlConnector, RemoteStorageControl
from tierlog.catalog import Catalog
from tierlog.ledger.directory import NodeDirectory
from tierlog.model.node import Cluster
from tierlog.offload.driver import BlockOffloader, Tier2Settings
from tierlog.ports.events import EventPublisher
from tierlog.ports.objects import ObjectStore
from tierlog.runtime.settings import Settings
from tierlog.wiring.build import open_catalog, open_objects, open_publisher


@dataclass(frozen=True, slots=True)
class OffloadParts:
    """The adapters of one offloader or scheduler."""

    catalog: Catalog
    cluster: Cluster
    objects: ObjectStore
    offloader: BlockOffloader
    publisher: EventPublisher
    nodes: NodeDirectory[RemoteStorageControl]


@contextlib.asynccontextmanager
async def open_offload_parts(settings: Settings) -> AsyncIterator[OffloadParts]:
    """Connect everything for the length of the context."""
    async with (
        open_catalog(settings) as catalog,
        open_objects(settings) as objects,
        open_publisher(settings) as publisher,
    ):
        cluster = await catalog.nodes.ensure_cluster(ledger_id_base=settings.cluster.ledger_id_base)
        nodes: NodeDirectory[RemoteStorageControl] = NodeDirectory(
            catalog.nodes.live, ControlConnector()
        )
        offloader = BlockOffloader(objects, tier2_settings(settings, cluster))
        try:
            yield OffloadParts(catalog, cluster, objects, offloader, publisher, nodes)
        finally:
            await nodes.close()


def tier2_settings(settings: Settings, cluster: Cluster) -> Tier2Settings:
    """Return where objects go, and how."""
    return Tier2Settings(
        bucket=settings.s3.bucket,
        cluster_id=cluster.cluster_id,
        endpoint_name=settings.s3.endpoint_name,
        key_prefix=settings.s3.key_prefix,
        parts_in_flight_max=settings.offloader.parts_in_flight_max,
        part_delay_s=settings.offloader.part_delay_s,
    )
