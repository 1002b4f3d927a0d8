"""What a restore stands on: the bucket as it is, and a metadata store with nothing in it."""

import contextlib
from collections.abc import AsyncIterator
from uuid import UUID

from tierlog.catalog import Catalog
from tierlog.offload.manifests import ManifestStore
from tierlog.offload.restore import Restorer
from tierlog.ports.spending import CostMeter
from tierlog.runtime.settings import Settings
from tierlog.wiring.build import open_metadata, system_clock, system_ids
from tierlog.wiring.objects import open_bucket

# A restore writes no manifest.
_NO_CLUSTER = UUID(int=0)


@contextlib.asynccontextmanager
async def open_restorer(
    settings: Settings, bucket: str, key_prefix: str, *, ledger_id_margin: int, meter: CostMeter
) -> AsyncIterator[Restorer]:
    """Give what reads the bucket, and plans; nothing is made, in the bucket or elsewhere.

    ``meter`` counts the requests to the bucket.
    """
    async with open_bucket(settings, bucket, meter=meter) as objects:
        manifests = ManifestStore(
            objects,
            cluster_id=_NO_CLUSTER,
            clock=system_clock(),
            ids=system_ids(),
            key_prefix=key_prefix,
        )
        yield Restorer(
            objects,
            manifests,
            bucket=bucket,
            endpoint_name=settings.s3.endpoint_name,
            key_prefix=key_prefix,
            ledger_id_margin=ledger_id_margin,
        )


@contextlib.asynccontextmanager
async def open_restore_catalog(settings: Settings) -> AsyncIterator[Catalog]:
    """Give the catalog over a metadata store in which nothing is made yet."""
    async with open_metadata(settings) as store:
        yield Catalog.over(store, clock=system_clock(), ids=system_ids())
