"""What an export by hand stands on: the metadata, and the bucket."""

import contextlib

from tierlog.model.errors import Reason, RefusedError
from tierlog.model.ids import LedgerId
from tierlog.model.manifest import copy_of
from tierlog.offload.export import ExportCopy, Exporter
from tierlog.runtime.settings import Settings
from tierlog.wiring.build import open_catalog, open_objects
from tierlog.wiring.drivers import open_with, reading_drivers
from tierlog.wiring.offload import tier2_settings


async def export_ledger(settings: Settings, ledger_id: LedgerId) -> ExportCopy:
    """Write the export copy of a ledger that is complete in tier 2, from there."""
    async with contextlib.AsyncExitStack() as stack:
        catalog = await stack.enter_async_context(open_catalog(settings))
        objects = await stack.enter_async_context(open_objects(settings))
        cluster = await catalog.nodes.cluster()
        context = await catalog.contexts.get(ledger_id)
        if cluster is None or context is None:
            raise RefusedError(
                f"there is no ledger {ledger_id} of a stream",
                reason=Reason.LEDGER_NOT_FOUND,
                remedy="See the ledgers of a stream with: tierlog stream show NAME",
                details={"ledger_id": str(ledger_id)},
            )
        if copy_of(context) is None or context.location is None:
            raise RefusedError(
                f"ledger {ledger_id} is {context.state.name}, and only what is complete in tier 2 "
                "is exported",
                remedy="Offload it first: tierlog offload run STREAM --wait",
                details={"ledger_id": str(ledger_id)},
            )
        handle = await open_with(reading_drivers(settings, objects), context)
        exporter = Exporter(objects, tier2_settings(settings, cluster))
        return await exporter.export(handle, context.location)
