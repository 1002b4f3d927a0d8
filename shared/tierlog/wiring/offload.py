"""What offloader and scheduler stand on: metadata, bucket, queue, storage nodes.

Who only offloads, without a queue, takes ``open_copy_parts`` or ``open_attempts``.
"""

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Final

from tierlog.adapters.rpc.storage_node import RemoteStorageControl
from tierlog.catalog import Catalog
from tierlog.ledger.damage import DamageReports
from tierlog.ledger.directory import NodeDirectory
from tierlog.ledger.reader import ReadHandle, Tier1ReadHandle
from tierlog.model.ids import LedgerId
from tierlog.model.ledger import LedgerMetadata
from tierlog.model.node import Cluster
from tierlog.offload.attempting import OffloadAttempts, OpenLedger
from tierlog.offload.awaited_publisher import AwaitedPublisher
from tierlog.offload.budget import UploadBudget, bytes_for_blocks
from tierlog.offload.driver import Tier2Settings
from tierlog.offload.drivers import DriverParts, Drivers, MakeDriver, driver_name
from tierlog.offload.export import Exporter, ExportingOffloader
from tierlog.offload.interface import LedgerOffloader
from tierlog.offload.manifests import BucketGuard
from tierlog.offload.timed import CopyTime, TimedOffloader
from tierlog.offload.verify import ReadBack
from tierlog.ports.objects import ObjectStore
from tierlog.ports.retrying import Come, Retries, RetryLimits, asked_once
from tierlog.ports.spending import CostMeter
from tierlog.ports.throttle import TokenBucket
from tierlog.runtime.settings import Settings
from tierlog.wiring.build import (
    cluster_of,
    open_catalog,
    open_objects,
    open_publisher,
    system_clock,
    system_ids,
)
from tierlog.wiring.compression import decompressors
from tierlog.wiring.keys import ledger_keys
from tierlog.wiring.manifests import manifest_store
from tierlog.wiring.security import calling_of
from tierlog.wiring.tier1 import open_storage_controls, reporting_damage

# A block is read so much faster than it may be sent, so that sending never waits for it; and never
# slower than the other: a node leaves who takes nothing for long, and appends don't feel so little.
READ_FASTER: Final = 2
READ_PER_S_MIN: Final = 16e6


@dataclass(frozen=True, slots=True)
class CopyParts:
    """The adapters of whoever offloads."""

    catalog: Catalog
    cluster: Cluster
    objects: ObjectStore
    offloader: LedgerOffloader
    """The drivers by name, with export copies if the settings want them."""
    nodes: NodeDirectory[RemoteStorageControl]
    damage: DamageReports
    """Takes what reads meet of damaged and missing copies."""
    meter: CostMeter
    """Counts the requests to the bucket."""


@dataclass(frozen=True, slots=True)
class OffloadParts(CopyParts):
    """The adapters of one offloader or scheduler."""

    publisher: AwaitedPublisher


@contextlib.asynccontextmanager
async def open_offload_parts(
    settings: Settings,
    *,
    drivers: Mapping[str, MakeDriver] | None = None,
    queue_at_once: bool = True,
    come: Come = asked_once,
    copy_time: CopyTime | None = None,
) -> AsyncIterator[OffloadParts]:
    """Connect everything for the length of the context.

    ``drivers``: more of them, by the names that settings and places of copies may say. Not
    ``queue_at_once``: Kafka may be away, and is to be waited for; ``come`` waits for the others.
    ``copy_time``: how long a copy may take, and its export behind it.
    """
    async with (
        open_copy_parts(settings, drivers=drivers, come=come, copy_time=copy_time) as parts,
        open_publisher(settings, at_once=queue_at_once) as publisher,
    ):
        own = {item.name: getattr(parts, item.name) for item in fields(parts)}
        yield OffloadParts(**own, publisher=publisher)


@contextlib.asynccontextmanager
async def open_copy_parts(
    settings: Settings,
    *,
    drivers: Mapping[str, MakeDriver] | None = None,
    come: Come = asked_once,
    copy_time: CopyTime | None = None,
) -> AsyncIterator[CopyParts]:
    """Connect everything but the queue for the length of the context."""
    meter = CostMeter()
    async with (
        open_catalog(settings, come=come) as catalog,
        open_objects(settings, meter=meter, come=come) as objects,
    ):
        cluster = await cluster_of(settings, catalog, come=come)
        async with (
            open_storage_controls(
                catalog,
                kept_bytes_max=bytes_for_blocks(settings.offloader.memory_bytes_max),
                calling=calling_of(settings.security),
            ) as nodes,
            reporting_damage(catalog) as damage,
        ):
            offloader = ledger_offloader(
                settings, cluster, objects, drivers=drivers, copy_time=copy_time
            )
            yield CopyParts(catalog, cluster, objects, offloader, nodes, damage, meter)


@contextlib.asynccontextmanager
async def open_attempts(
    settings: Settings, name: str, *, drivers: Mapping[str, MakeDriver] | None = None
) -> AsyncIterator[tuple[OffloadAttempts, CopyParts]]:
    """Give what takes ledgers to tier 2, and what it stands on; ``name``: who does."""
    async with open_copy_parts(settings, drivers=drivers) as parts:
        attempts = OffloadAttempts(
            catalog=parts.catalog,
            open_ledger=ledger_opener(settings, parts),
            offloader=parts.offloader,
            guard=BucketGuard(manifest_store(settings, parts.objects, parts.cluster)),
            ids=system_ids(),
            name=name,
        )
        yield attempts, parts


def ledger_opener(settings: Settings, parts: CopyParts) -> OpenLedger:
    """Return what opens a ledger in tier 1, with the keys that this process has.

    All ledgers that are read share one pace, where there is any.
    """
    keys, per_s = ledger_keys(settings), read_per_s(settings.s3.bytes_per_s_max)
    pace = TokenBucket(system_clock(), per_s=per_s).take if per_s else None

    def opened(ledger_id: LedgerId, metadata: LedgerMetadata) -> ReadHandle:
        return Tier1ReadHandle(
            ledger_id, metadata, parts.nodes, keys=keys, on_damage=parts.damage, pace=pace
        )

    return opened


def read_per_s(sent_per_s: float) -> float:
    """Return how fast ledgers are read that may be sent so fast; 0: as fast as can be.

    At full speed a block of 64 MiB has a node's processor for a fifth of a second, for which
    appends wait: whoever limits what offloads send doesn't want that.
    """
    return max(READ_FASTER * sent_per_s, READ_PER_S_MIN) if sent_per_s else 0.0


def ledger_offloader(
    settings: Settings,
    cluster: Cluster,
    objects: ObjectStore,
    *,
    drivers: Mapping[str, MakeDriver] | None = None,
    copy_time: CopyTime | None = None,
) -> LedgerOffloader:
    """Return the drivers, the one that the settings name for new copies."""
    tier2 = tier2_settings(settings, cluster)
    budget = UploadBudget(
        bytes_max=bytes_for_blocks(settings.offloader.memory_bytes_max),
        parts_max=settings.offloader.parts_in_flight_max,
    )
    parts = DriverParts(
        objects=objects, settings=tier2, budget=budget, retries=upload_retries(settings)
    )
    writes = driver_name(settings.s3.driver, settings.s3.layout)
    offloader: LedgerOffloader = Drivers(parts, writes=writes, others=drivers)
    if copy_time is not None:
        offloader = TimedOffloader(offloader, copy_time)
    if not settings.s3.export_events:
        return offloader
    exporter = Exporter(objects, tier2, decompressors=decompressors(), budget=budget)
    return ExportingOffloader(offloader, exporter, copy_time)


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
