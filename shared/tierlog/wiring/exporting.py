"""What an export by hand stands on: the metadata, and the bucket in which the ledger lies."""

from tierlog.catalog import Catalog
from tierlog.model.errors import Reason, RefusedError
from tierlog.model.ids import LedgerId
from tierlog.model.manifest import copy_of
from tierlog.model.offload import OffloadContext
from tierlog.offload.export import ExportCopy, Exporter
from tierlog.ports.spending import CostMeter
from tierlog.runtime.settings import Settings
from tierlog.wiring.build import open_catalog
from tierlog.wiring.compression import decompressors
from tierlog.wiring.drivers import open_with, reading_drivers
from tierlog.wiring.objects import open_bucket
from tierlog.wiring.offload import tier2_settings


async def export_ledger(settings: Settings, ledger_id: LedgerId, *, meter: CostMeter) -> ExportCopy:
    """Write the export copy of a ledger that is complete in tier 2, from there.

    ``meter`` counts the requests to the bucket.
    """
    async with open_catalog(settings) as catalog:
        cluster, context = await catalog.nodes.cluster(), await _exportable(catalog, ledger_id)
        assert cluster is not None, "there is a context, so there is a cluster"
        assert context.location is not None, "a copy is somewhere"
        bucket = context.location.bucket
        s3 = settings.s3.model_copy(update={"bucket": bucket})
        settings = settings.model_copy(update={"s3": s3})
        async with open_bucket(settings, bucket, meter=meter) as objects:
            handle = await open_with(reading_drivers(settings, objects), context)
            exporter = Exporter(
                objects, tier2_settings(settings, cluster), decompressors=decompressors()
            )
            return await exporter.export(handle, context.location)


async def _exportable(catalog: Catalog, ledger_id: LedgerId) -> OffloadContext:
    context = await catalog.contexts.get(ledger_id)
    if context is None:
        raise RefusedError(
            f"there is no ledger {ledger_id} of a stream",
            reason=Reason.LEDGER_NOT_FOUND,
            remedy="See the ledgers of a stream with: tierlog stream show NAME",
            details={"ledger_id": str(ledger_id)},
        )
    if copy_of(context) is None:
        raise RefusedError(
            f"ledger {ledger_id} is {context.state.name}, and only what is complete in tier 2 is "
            "exported",
            remedy="Offload it first: tierlog offload run STREAM --wait",
            details={"ledger_id": str(ledger_id)},
        )
    return context
