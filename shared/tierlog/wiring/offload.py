"""What offloader and scheduler stand on: metadata, bucket, queue, storage nodes."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from tierlog.adapters.rpc.storage_node import RemoteStorageControl
from tierlog.catalog import Catalog
from tierlog.ledger.damage import DamageReports
from tierlog.ledger.directory import NodeDirectory
from tierlog.model.node import Cluster
from tierlog.offload.driver import BlockOffloader, Tier2Settings
from tierlog.ports.events import EventPublisher
from tierlog.ports.objects import ObjectStore
from tierlog.runtime.settings import Settings
from tierlog.wiring.build import open_catalog, open_objects, open_publisher
from tierlog.wiring.tier1 import open_storage_controls, reporting_damage


@dataclass(frozen=True, slots=True)
class OffloadParts:
    """The adapters of one offloader or scheduler."""

    catalog: Catalog
    cluster: Cluster
    objects: ObjectStore
    offloader: BlockOffloader
    publisher: EventPublisher
    nodes: NodeDirectory[RemoteStorageControl]
    damage: DamageReports
    """Takes what reads meet of damaged and missing copies."""


@contextlib.asynccontextmanager
async def open_offload_parts(settings: Settings) -> AsyncIterator[OffloadParts]:
    """Connect everything for the length of the context."""
    async with (
        open_catalog(settings) as catalog,
        open_objects(settings) as objects,
        open_publisher(settings) as publisher,
        open_storage_controls(catalog) as nodes,
        reporting_damage(catalog) as damage,
    ):
        cluster = await catalog.nodes.ensure_cluster(ledger_id_base=settings.cluster.ledger_id_base)
        offloader = BlockOffloader(objects, tier2_settings(settings, cluster))
        yield OffloadParts(catalog, cluster, objects, offloader, publisher, nodes, damage)


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
