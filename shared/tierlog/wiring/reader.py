"""What the reader service stands on: metadata, objects, the shared cache, storage nodes."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from tierlog.adapters.memory.cache import NoCache
from tierlog.adapters.rpc.storage_node import RemoteStorageControl
from tierlog.catalog import Catalog
from tierlog.ledger.damage import DamageReports
from tierlog.ledger.directory import NodeDirectory
from tierlog.ports.cache import SharedCache
from tierlog.ports.objects import ObjectStore
from tierlog.ports.spending import CostMeter
from tierlog.runtime.settings import Settings
from tierlog.wiring.build import open_catalog, open_objects, system_clock
from tierlog.wiring.tier1 import open_storage_controls, reporting_damage


@dataclass(frozen=True, slots=True)
class ReaderParts:
    """The adapters of one reader."""

    catalog: Catalog
    objects: ObjectStore
    shared: SharedCache
    nodes: NodeDirectory[RemoteStorageControl]
    damage: DamageReports
    """Takes what reads meet of damaged and missing copies."""
    meter: CostMeter
    """Counts the requests to the bucket."""


@contextlib.asynccontextmanager
async def open_cache(settings: Settings) -> AsyncIterator[SharedCache]:
    """Give the cache that readers share, or one that never has anything."""
    redis = settings.redis
    if redis.url is None:
        yield NoCache()
        return
    from tierlog.adapters.redis.cache import RedisCache

    cache = RedisCache(
        redis.url,
        clock=system_clock(),
        key_prefix=redis.key_prefix,
        timeout_s=redis.timeout_s,
        value_bytes_max=redis.value_bytes_max,
    )
    try:
        yield cache
    finally:
        await cache.close()


@contextlib.asynccontextmanager
async def open_reader_parts(settings: Settings) -> AsyncIterator[ReaderParts]:
    """Connect everything for the length of the context."""
    meter = CostMeter()
    async with (
        open_catalog(settings) as catalog,
        open_objects(settings, meter=meter) as objects,
        open_cache(settings) as shared,
        open_storage_controls(catalog) as nodes,
        reporting_damage(catalog) as damage,
    ):
        yield ReaderParts(catalog, objects, shared, nodes, damage, meter)
