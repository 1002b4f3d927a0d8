"""The offloader process: real adapters around ``OffloadWorker``, in one consumer group.

SIGTERM drains: nothing more is taken, what was begun gets its time, then is given up as a crash
would; another worker begins anew.
"""

import asyncio
import sys
from collections.abc import Mapping

from tierlog.ledger.reader import Tier1ReadHandle
from tierlog.offload.drivers import MakeDriver
from tierlog.offload.manifests import BucketGuard
from tierlog.offload.messages import Stationery, Topics
from tierlog.runtime.costs import serve_costs
from tierlog.runtime.http import build_http_app, serve_http
from tierlog.runtime.service import announce_ready, run_service
from tierlog.runtime.settings import Settings
from tierlog.runtime.worker import WorkerLimits, run_worker
from tierlog.wiring.build import open_offload_requests, system_clock, system_ids
from tierlog.wiring.keys import ledger_keys
from tierlog.wiring.manifests import manifest_store
from tierlog.wiring.offload import OffloadParts, open_offload_parts
from tierlog_offloader.worker import OffloadWorker, WorkerSettings


async def serve(
    settings: Settings,
    stop: asyncio.Event,
    *,
    drivers: Mapping[str, MakeDriver] | None = None,
) -> None:
    """Handle offload requests until ``stop``; ``drivers``: more of them, by name."""
    own, listen = settings.offloader, settings.offloader.listen
    async with open_offload_parts(settings, drivers=drivers) as parts:
        worker = _worker(parts, settings)

        app = build_http_app("Tierlog offloader", checks={"metadata": parts.catalog.answers})
        async with (
            open_offload_requests(settings) as source,
            serve_costs(app, "offloader", parts.meter),
            serve_http(app, host=listen.host, port=listen.http_port) as http_port,
        ):
            announce_ready(
                service="offloader", http=f"{listen.advertise_host or listen.host}:{http_port}"
            )
            await run_worker(
                source,
                worker.handle,
                stop=stop,
                limits=WorkerLimits(
                    in_flight_max=own.ledgers_in_flight_max,
                    drain_s_max=own.drain_s_max,
                    give_up_s_max=own.give_up_s_max,
                    handle_s_max=own.request_s_max,
                ),
            )


def _worker(parts: OffloadParts, settings: Settings) -> OffloadWorker:
    clock, ids = system_clock(), system_ids()
    name = settings.offloader.worker_name or f"offloader-{ids.uuid().hex[:8]}"
    keys = ledger_keys(settings)

    return OffloadWorker(
        catalog=parts.catalog,
        open_ledger=lambda ledger_id, metadata: Tier1ReadHandle(
            ledger_id, metadata, parts.nodes, keys=keys, on_damage=parts.damage
        ),
        offloader=parts.offloader,
        guard=BucketGuard(manifest_store(settings, parts.objects, parts.cluster)),
        publisher=parts.publisher,
        stationery=Stationery(
            Topics.of(settings.kafka.topic_prefix), source=name, clock=clock, ids=ids
        ),
        clock=clock,
        ids=ids,
        settings=WorkerSettings(name=name, deliveries_max=settings.kafka.deliveries_max),
    )


def main() -> None:
    """Run the service and exit with its code."""
    sys.exit(run_service("offloader", serve))


if __name__ == "__main__":
    main()
