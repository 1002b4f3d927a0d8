"""Drivers for whoever reads copies alone."""

from collections.abc import Mapping
from typing import Final
from uuid import UUID

from tierlog.ledger.reader import ReadHandle
from tierlog.model.offload import OffloadContext
from tierlog.offload.driver import Tier2Settings
from tierlog.offload.drivers import DriverParts, Drivers, MakeDriver
from tierlog.ports.cache import SharedCache
from tierlog.ports.objects import ObjectStore
from tierlog.runtime.settings import Settings

# Who only reads puts no cluster's id on an object.
_NO_CLUSTER: Final = UUID(int=0)


def reading_drivers(
    settings: Settings,
    objects: ObjectStore,
    *,
    cache: SharedCache | None = None,
    others: Mapping[str, MakeDriver] | None = None,
) -> Drivers:
    """Return the drivers, none of which writes."""
    tier2 = Tier2Settings(
        bucket=settings.s3.bucket,
        cluster_id=_NO_CLUSTER,
        endpoint_name=settings.s3.endpoint_name,
        key_prefix=settings.s3.key_prefix,
    )
    return Drivers(DriverParts(objects=objects, settings=tier2, cache=cache), others=others)


async def open_with(drivers: Drivers, context: OffloadContext) -> ReadHandle:
    """Return a ledger's complete copy, opened by the driver that wrote it."""
    assert context.uuid is not None
    assert context.location is not None
    return await drivers.read_offloaded(
        context.ledger_id, context.uuid, context.location, copy=context.copy
    )
