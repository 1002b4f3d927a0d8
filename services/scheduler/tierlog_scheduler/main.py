"""The scheduler process: one of several leads; all answer admins."""

import asyncio
import sys

from prometheus_client import REGISTRY

from tierlog.offload.messages import Stationery, Topics
from tierlog.runtime.costs import serve_costs
from tierlog.runtime.http import serve_http
from tierlog.runtime.service import announce_ready, run_service
from tierlog.runtime.settings import Settings
from tierlog.wiring.build import open_dead_letters, system_clock, system_ids
from tierlog.wiring.manifests import manifest_store
from tierlog.wiring.offload import open_offload_parts
from tierlog_scheduler.app import build_app
from tierlog_scheduler.manifests import BucketManifests
from tierlog_scheduler.metrics import SchedulerCollector
from tierlog_scheduler.scheduler import Scheduler, SchedulerLimits


async def serve(settings: Settings, stop: asyncio.Event) -> None:
    """Lead when elected, and serve the admin API, until ``stop``."""
    own, listen = settings.scheduler, settings.scheduler.listen
    clock, ids = system_clock(), system_ids()
    topics = Topics.of(settings.kafka.topic_prefix)
    stationery = Stationery(topics, source="scheduler", clock=clock, ids=ids)
    async with open_offload_parts(settings) as parts:
        manifests = manifest_store(settings, parts.objects, parts.cluster)
        scheduler = Scheduler(
            catalog=parts.catalog,
            offloader=parts.offloader,
            publisher=parts.publisher,
            stationery=stationery,
            manifests=BucketManifests(manifests, parts.catalog),
            clock=clock,
            ids=ids,
            limits=SchedulerLimits(
                interval_s=own.interval_s,
                request_again_s=own.request_again_s,
                sweep_again_s=own.sweep_again_s,
                checkpoint_s=own.checkpoint_s,
                reread_s=own.reread_s,
                streams_in_flight_max=own.streams_in_flight_max,
            ),
        )

        letters = open_dead_letters(settings, parts.publisher, stationery)
        checks = {"metadata": parts.catalog.answers}
        app = build_app(parts.catalog, scheduler, letters, manifests, checks=checks)
        collector = SchedulerCollector(scheduler)
        REGISTRY.register(collector)
        try:
            async with (
                serve_costs(app, "scheduler", parts.meter),
                serve_http(app, host=listen.host, port=listen.http_port) as http_port,
            ):
                announce_ready(
                    service="scheduler", http=f"{listen.advertise_host or listen.host}:{http_port}"
                )
                await scheduler.run(stop)
        finally:
            REGISTRY.unregister(collector)


def main() -> None:
    """Run the service and exit with its code."""
    sys.exit(run_service("scheduler", serve))


if __name__ == "__main__":
    main()
