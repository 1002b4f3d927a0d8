"""A cluster as jobs find it: its metadata, and its bucket as it is.

Invariant: nothing is made. A metadata store without a cluster is refused, and a bucket without a
manifest of that cluster, which its scheduler writes first of all.
"""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from tierlog.catalog import Catalog
from tierlog.model.errors import RefusedError
from tierlog.model.node import Cluster
from tierlog.offload.manifests import ManifestStore
from tierlog.ports.objects import ObjectStore
from tierlog.ports.spending import CostMeter
from tierlog.runtime.settings import Settings
from tierlog.wiring.build import open_metadata, system_clock, system_ids
from tierlog.wiring.manifests import manifest_store
from tierlog.wiring.objects import open_bucket


@dataclass(frozen=True, slots=True)
class Site:
    """What a job reads."""

    catalog: Catalog
    cluster: Cluster
    objects: ObjectStore
    manifests: ManifestStore
    meter: CostMeter

    async def check_ours(self, settings: Settings) -> None:
        """Refuse a bucket that is another cluster's or nobody's, or that can't be read."""
        there = await self.manifests.clusters()
        if self.cluster.cluster_id not in there:
            named = ", ".join(sorted(map(str, there))) or "none"
            raise RefusedError(
                f"ZooKeeper at {settings.zookeeper.hosts} has cluster {self.cluster.cluster_id}, "
                f"and bucket {settings.s3.bucket} is of cluster {named}",
                remedy="Correct TIERLOG_S3__BUCKET, TIERLOG_S3__KEY_PREFIX or "
                "TIERLOG_ZOOKEEPER__HOSTS; in a new bucket the scheduler writes whose it is",
                details={"bucket": settings.s3.bucket},
            )


@contextlib.asynccontextmanager
async def open_site(settings: Settings) -> AsyncIterator[Site]:
    """Connect to metadata and bucket for the length of the context."""
    meter = CostMeter()
    async with (
        open_metadata(settings) as store,
        open_bucket(settings, settings.s3.bucket, meter=meter) as objects,
    ):
        catalog = Catalog.over(store, clock=system_clock(), ids=system_ids())
        cluster = await catalog.nodes.cluster()
        if cluster is None:
            raise RefusedError(
                f"there is no cluster in ZooKeeper at {settings.zookeeper.hosts}",
                remedy="Correct TIERLOG_ZOOKEEPER__HOSTS, with its root",
            )
        manifests = manifest_store(settings, objects, cluster)
        yield Site(catalog, cluster, objects, manifests, meter)
