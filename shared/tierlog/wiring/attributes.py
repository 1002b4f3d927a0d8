"""What an owner of streams needs of tier 2: checkpoints of attributes, and ledgers."""

from collections.abc import Awaitable, Callable

from tierlog.attributes.compaction import Compaction
from tierlog.attributes.objects import IndexObjects
from tierlog.attributes.page_cache import PageCache
from tierlog.attributes.store import IndexLimits, Tier2AttributeIndex
from tierlog.attributes.update import Shape
from tierlog.catalog import Catalog
from tierlog.ledger.reader import ReadHandle
from tierlog.model.errors import Reason, RefusedError
from tierlog.model.ids import LedgerId
from tierlog.model.node import Cluster
from tierlog.ports.attributes import AttributeIndex
from tierlog.ports.objects import ObjectStore
from tierlog.runtime.settings import Settings
from tierlog.wiring.build import system_ids
from tierlog.wiring.offload import ledger_offloader

OpenOffloaded = Callable[[LedgerId], Awaitable[ReadHandle]]


def attribute_index(
    settings: Settings, objects: ObjectStore, catalog: Catalog, cluster: Cluster
) -> AttributeIndex:
    """Return the index of all streams' attributes."""
    own = settings.ingest.owner.attributes
    return Tier2AttributeIndex(
        catalog.attributes,
        IndexObjects(
            objects,
            cluster_id=cluster.cluster_id,
            ids=system_ids(),
            key_prefix=settings.s3.key_prefix,
        ),
        PageCache(limit_bytes=own.page_cache_bytes_max),
        limits=IndexLimits(chunk_bytes=own.chunk_bytes, chunk_objects_max=own.chunk_objects_max),
        shape=Shape(
            compaction=Compaction(
                quiet_factor=own.compaction_quiet_factor,
                busy_factor=own.compaction_busy_factor,
                share=own.compaction_share,
            )
        ),
    )


def open_offloaded(
    settings: Settings, objects: ObjectStore, catalog: Catalog, cluster: Cluster
) -> OpenOffloaded:
    """Return what opens a ledger's copy in tier 2."""
    offloader = ledger_offloader(settings, cluster, objects)

    async def open_ledger(ledger_id: LedgerId) -> ReadHandle:
        context = await catalog.contexts.get(ledger_id)
        if context is None or context.uuid is None or not context.complete:
            raise RefusedError(
                f"ledger {ledger_id} has no copy in tier 2",
                reason=Reason.LEDGER_NOT_FOUND,
                remedy="The ledger is looked up again",
                details={"ledger_id": str(ledger_id)},
            )
        return await offloader.read_offloaded(
            ledger_id, context.uuid, context.location, copy=context.copy
        )

    return open_ledger
