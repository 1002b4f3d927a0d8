"""What offloader and scheduler stand on: metadata, bucket, queue, storage nodes."""

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial

from tierlog.adapters.rpc.storage_node import RemoteStorageControl
from tierlog.catalog import Catalog
from tierlog.ledger.damage import DamageReports
from tierlog.ledger.directory import NodeDirectory
from tierlog.model.node import Cluster
from tierlog.offload.budget import UploadBudget, bytes_for_blocks
from tierlog.offload.driver import BlockOffloader, Tier2Settings
from tierlog.offload.verify import ReadBack
from tierlog.ports.events import EventPublisher
from tierlog.ports.objects import ObjectStore
from tierlog.ports.retrying import Retries, RetryLimits
from tierlog.ports.spending import CostMeter
from tierlog.runtime.settings import Settings
from tierlog.wiring.build import (
    open_catalog,
    open_objects,
    open_publisher,
    system_clock,
    system_ids,
)
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
    meter: CostMeter
    """Counts the requests to the bucket."""


@contextlib.asynccontextmanager
async def open_offload_parts(settings: Settings) -> AsyncIterator[OffloadParts]:
    """Connect everything for the length of the context."""
    meter = CostMeter()
    async with (
        open_catalog(settings) as catalog,
        open_objects(settings, meter=meter) as objects,
        open_publisher(settings) as publisher,
        open_storage_controls(
            catalog, kept_bytes_max=bytes_for_blocks(settings.offloader.memory_bytes_max)
        ) as nodes,
        reporting_damage(catalog) as damage,
    ):
        cluster = await catalog.nodes.ensure_cluster(ledger_id_base=settings.cluster.ledger_id_base)
        offloader = BlockOffloader(
            objects,
            tier2_settings(settings, cluster),
            budget=UploadBudget(
                bytes_max=bytes_for_blocks(settings.offloader.memory_bytes_max),
                parts_max=settings.offloader.parts_in_flight_max,
            ),
            retries=upload_retries(settings),
        )
        yield OffloadParts(catalog, cluster, objects, offloader, publisher, nodes, damage, meter)


def upload_retries(settings: Settings) -> Callable[[], Retries]:
    """Return what makes the retries of one request of an upload."""
    patience_s, wait_s_max = settings.offloader.patience_s_max, settings.s3.retry_wait_s_max
    limits = RetryLimits(
        # Waits are half of that on average: time ends the patience, not this.
        tries_max=2 + int(4 * patience_s / max(wait_s_max, 1.0)),
        time_s_max=patience_s,
        wait_s_first=settings.s3.retry_wait_s_first,
        wait_s_max=wait_s_max,
    )
    return partial(Retries, limits, clock=system_clock(), ids=system_ids())


def tier2_settings(settings: Settings, cluster: Cluster) -> Tier2Settings:
    """Return where objects go, and how."""
    return Tier2Settings(
        bucket=settings.s3.bucket,
        cluster_id=cluster.cluster_id,
        endpoint_name=settings.s3.endpoint_name,
        key_prefix=settings.s3.key_prefix,
        part_delay_s=settings.offloader.part_delay_s,
        data_sha256=settings.s3.data_sha256,
        read_back=ReadBack(settings.s3.read_back),
    )
