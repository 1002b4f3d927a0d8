"""The scheduler process: one of several leads; all answer admins."""

import asyncio
import sys

from tierlog.offload.messages import Stationery, Topics
from tierlog.runtime.http import build_http_app, serve_http
from tierlog.runtime.service import announce_ready, run_service
from tierlog.runtime.settings import Settings
from tierlog.wiring.build import system_clock, system_ids
from tierlog.wiring.offload import open_offload_parts
from tierlog_scheduler.api import AdminApi
from tierlog_scheduler.scheduler import Scheduler, SchedulerLimits


async def serve(settings: Settings, stop: asyncio.Event) -> None:
    """Lead when elected, and serve the admin API, until ``stop``."""
    own, listen = settings.scheduler, settings.scheduler.listen
    clock, ids = system_clock(), system_ids()
    async with open_offload_parts(settings) as parts:
        scheduler = Scheduler(
            catalog=parts.catalog,
            offloader=parts.offloader,
            publisher=parts.publisher,
            stationery=Stationery(
                Topics.of(settings.kafka.topic_prefix), source="scheduler", clock=clock, ids=ids
            ),
            clock=clock,
            ids=ids,
            limits=SchedulerLimits(
                interval_s=own.interval_s,
                request_again_s=own.request_again_s,
                sweep_again_s=own.sweep_again_s,
                streams_in_flight_max=own.streams_in_flight_max,
            ),
        )

        app = build_http_app("Tierlog scheduler", checks={"metadata": parts.catalog.answers})
        AdminApi(parts.catalog, scheduler).add_routes(app)
        async with serve_http(app, host=listen.host, port=listen.http_port) as http_port:
            announce_ready(
                service="scheduler", http=f"{listen.advertise_host or listen.host}:{http_port}"
            )
            await scheduler.run(stop)


def main() -> None:
    """Run the service and exit with its code."""
    sys.exit(run_service("scheduler", serve))


if __name__ == "__main__":
    main()
