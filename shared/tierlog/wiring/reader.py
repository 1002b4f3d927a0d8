"""What the reader service stands on: metadata, objects, the shared cache, storage nodes."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from tierlog.adapters.memory.cache import NoCache
from tierlog.adapters.rpc.storage_node import RemoteStorageControl
from tierlog.catalog import Catalog
from tierlog.ledger.damage import DamageReports
from tierlog.ledger.directory import NodeDirectory
from tierlog.model.errors import RefusedError
from tierlog.model.node import Cluster
from tierlog.ports.cache import SharedCache
from tierlog.ports.objects import ObjectReads, ObjectStore
from tierlog.ports.retrying import Come, asked_once
from tierlog.ports.spending import CostMeter
from tierlog.ports.throttle import TokenBucket, requests_pace
from tierlog.runtime.security import secret_text
from tierlog.runtime.settings import Settings
from tierlog.wiring.build import (
    cluster_of,
    open_catalog,
    open_objects,
    system_clock,
    system_ids,
)
from tierlog.wiring.security import calling_of
from tierlog.wiring.tier1 import open_storage_controls, reporting_damage


@dataclass(frozen=True, slots=True)
class ReaderParts:
    """The adapters of one reader."""

    catalog: Catalog
    cluster: Cluster
    objects: ObjectStore
    reads: ObjectReads
    """Of the same bucket, in the way that the settings choose."""
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
    from tierlog.adapters.redis.cache import RedisCache, connection_of, digest_key, url_of

    secret = secret_text(redis.secret, redis.secret_file, name="redis.secret")
    cache = RedisCache(
        url_of(redis),
        how=connection_of(redis),
        secret=digest_key(secret),
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
async def open_reader_parts(
    settings: Settings, *, pieces_bytes_max: int, come: Come = asked_once
) -> AsyncIterator[ReaderParts]:
    """Connect everything for the length of the context; ``come`` waits for what is away.

    ``pieces_bytes_max``: memory for what comes from storage nodes that is kept for what comes next.
    """
    meter = CostMeter()
    # The settings' cap is on all that the process sends, by whichever library.
    pace = requests_pace(system_clock(), per_s_max=settings.s3.requests_per_s_max)
    async with (
        open_catalog(settings, come=come) as catalog,
        open_objects(settings, meter=meter, come=come, pace=pace) as objects,
        open_cache(settings) as shared,
    ):
        cluster = await cluster_of(settings, catalog, come=come)
        async with (
            open_storage_controls(
                catalog, kept_bytes_max=pieces_bytes_max, calling=calling_of(settings.security)
            ) as nodes,
            reporting_damage(catalog) as damage,
        ):
            reads = _reads(settings, objects, meter, pace)
            yield ReaderParts(catalog, cluster, objects, reads, shared, nodes, damage, meter)


def _reads(
    settings: Settings, objects: ObjectStore, meter: CostMeter, pace: TokenBucket | None
) -> ObjectReads:
    if settings.reader.object_reads == "aioboto3":
        return objects
    try:
        from tierlog.adapters.obstore import open_obstore
    except ImportError as error:
        raise RefusedError(
            "reader.object_reads is obstore, which is not installed",
            remedy="Install tierlog[obstore], or set reader.object_reads to aioboto3",
        ) from error
    return open_obstore(settings.s3, meter=meter, clock=system_clock(), ids=system_ids(), pace=pace)
