"""The offloader process: real adapters around ``OffloadWorker``, in one consumer group.

ZooKeeper, the bucket and Kafka may be away when it starts: they are waited for, and nothing is
taken before.

SIGTERM drains: nothing more is taken, what was begun gets its time, then is given up as a crash
would; another worker begins anew.
"""

import asyncio
import sys
from collections.abc import Mapping

from tierlog.offload.drivers import MakeDriver
from tierlog.offload.manifests import BucketGuard
from tierlog.offload.messages import Stationery, Topics
from tierlog.offload.timed import CopyTime
from tierlog.ports.throttle import rate_of_namespace
from tierlog.ports.tracing import Tracer
from tierlog.runtime.costs import serve_costs
from tierlog.runtime.http import build_http_app, serve_http
from tierlog.runtime.http_access import guard_http
from tierlog.runtime.service import announce_ready, run_service
from tierlog.runtime.settings import Settings
from tierlog.runtime.worker import WorkerLimits, run_worker, unless_stopped
from tierlog.wiring.awaiting import waiting_at
from tierlog.wiring.build import open_offload_requests, system_clock, system_ids
from tierlog.wiring.manifests import manifest_store
from tierlog.wiring.offload import OffloadParts, ledger_opener, open_offload_parts
from tierlog.wiring.security import protection_of
from tierlog.wiring.tracing import open_tracer
from tierlog_offloader.access import HTTP_RULES
from tierlog_offloader.worker import OffloadWorker, WorkerSettings


async def serve(
    settings: Settings,
    stop: asyncio.Event,
    *,
    drivers: Mapping[str, MakeDriver] | None = None,
) -> None:
    """Handle offload requests until ``stop``; ``drivers``: more of them, by name."""
    own, listen = settings.offloader, settings.offloader.listen
    protection = protection_of(settings)
    name = own.worker_name or f"offloader-{system_ids().uuid().hex[:8]}"
    async with (
        waiting_at(listen, "Tierlog offloader", protection, stop) as awaited,
        open_offload_parts(
            settings,
            drivers=drivers,
            queue_at_once=False,
            come=awaited.come,
            copy_time=_copy_time(settings),
        ) as parts,
        open_tracer(settings, "offloader", instance=name) as tracer,
    ):
        worker = _worker(parts, settings, name, tracer)

        checks = {"metadata": parts.catalog.answers, "queue": parts.publisher.answers}
        app = build_http_app(
            "Tierlog offloader",
            checks=checks,
            ids=system_ids(),
            cluster_id=parts.cluster.cluster_id,
        )
        guard_http(app, HTTP_RULES, protection.gate)
        await awaited.leave()
        async with (
            serve_costs(app, "offloader", parts.meter),
            serve_http(
                app, host=listen.host, port=listen.http_port, tls=protection.tls
            ) as http_port,
        ):
            await unless_stopped(parts.publisher.come(), stop)
            if stop.is_set():
                return
            async with open_offload_requests(settings) as source:
                announce_ready(
                    service="offloader", http=f"{listen.advertise_host or listen.host}:{http_port}"
                )
                limits = WorkerLimits(
                    in_flight_max=own.ledgers_in_flight_max,
                    drain_s_max=own.drain_s_max,
                    give_up_s_max=own.give_up_s_max,
                )
                async with asyncio.TaskGroup() as group:
                    releasing = group.create_task(worker.keep_releasing())
                    await run_worker(source, worker.handle, stop=stop, limits=limits)
                    releasing.cancel()


def _worker(parts: OffloadParts, settings: Settings, name: str, tracer: Tracer) -> OffloadWorker:
    clock, ids = system_clock(), system_ids()

    return OffloadWorker(
        catalog=parts.catalog,
        open_ledger=ledger_opener(settings, parts),
        offloader=parts.offloader,
        guard=BucketGuard(manifest_store(settings, parts.objects, parts.cluster)),
        publisher=parts.publisher,
        stationery=Stationery(
            Topics.of(settings.kafka.topic_prefix), source=name, clock=clock, ids=ids
        ),
        clock=clock,
        ids=ids,
        settings=WorkerSettings(name=name, deliveries_max=settings.kafka.deliveries_max),
        tracer=tracer,
    )


def _copy_time(settings: Settings) -> CopyTime:
    """Return how long a copy may take: no slower than one request, or than its share of a throttle.

    A large ledger that a throttle lets through slowly would else begin again for ever. As long may
    its export take behind it: exports take turns, and who is in turn has the shares of who waits.
    """
    pace: float = settings.s3.bytes_per_s_min
    of_namespaces = (rate_of_namespace(one)[1] for one in settings.s3.namespace_bytes_per_s_max)
    for rate in filter(None, (settings.s3.bytes_per_s_max, *of_namespaces)):
        pace = min(pace, rate / settings.offloader.ledgers_in_flight_max / 2)
    return CopyTime(base_s=settings.offloader.request_s_max, bytes_per_s_min=pace)


def main() -> None:
    """Run the service and exit with its code."""
    sys.exit(run_service("offloader", serve, sys.argv[1:]))


if __name__ == "__main__":
    main()
