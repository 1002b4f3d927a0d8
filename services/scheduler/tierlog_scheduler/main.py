"""The scheduler process: one of several leads; all answer admins.

ZooKeeper and the bucket may be away when it starts: they are waited for. Kafka, too: all but asking
workers goes on, as when it goes later.
"""

import asyncio
import sys
from collections.abc import Mapping

from fastapi import FastAPI
from prometheus_client import REGISTRY

from tierlog.offload.attribute_sweep import AttributeSweeper
from tierlog.offload.dead_letters import DeadLetters
from tierlog.offload.drivers import MakeDriver
from tierlog.offload.manifests import ManifestStore
from tierlog.offload.messages import Stationery, Topics
from tierlog.offload.repair import Repairer
from tierlog.offload.scrub import Scrubber
from tierlog.offload.scrub_rules import ScrubLimits
from tierlog.runtime.costs import serve_costs
from tierlog.runtime.http import serve_http
from tierlog.runtime.http_access import guard_http
from tierlog.runtime.service import announce_ready, run_service
from tierlog.runtime.settings import Settings
from tierlog.runtime.worker import unless_stopped
from tierlog.wiring.awaiting import waiting_at
from tierlog.wiring.build import open_dead_letters, system_clock, system_ids
from tierlog.wiring.manifests import manifest_store
from tierlog.wiring.offload import OffloadParts, ledger_opener, open_offload_parts
from tierlog.wiring.security import protection_of
from tierlog.wiring.tracing import open_tracer
from tierlog_scheduler.access import HTTP_RULES
from tierlog_scheduler.app import build_app
from tierlog_scheduler.manifests import BucketManifests
from tierlog_scheduler.metrics import SchedulerCollector
from tierlog_scheduler.scheduler import Scheduler, SchedulerLimits
from tierlog_scheduler.scrubs import ScrubRunner, ScrubSchedule
from tierlog_scheduler.staging import StagingSweeper


async def serve(
    settings: Settings,
    stop: asyncio.Event,
    *,
    drivers: Mapping[str, MakeDriver] | None = None,
) -> None:
    """Lead when elected, and serve the admin API, until ``stop``; ``drivers``: more, by name."""
    own, listen = settings.scheduler, settings.scheduler.listen
    clock, ids, protection = system_clock(), system_ids(), protection_of(settings)
    topics = Topics.of(settings.kafka.topic_prefix)
    stationery = Stationery(topics, source="scheduler", clock=clock, ids=ids)
    async with (
        waiting_at(listen, "Tierlog scheduler", protection, stop) as awaited,
        open_offload_parts(
            settings, drivers=drivers, queue_at_once=False, come=awaited.come
        ) as parts,
        open_tracer(settings, "scheduler") as tracer,
    ):
        manifests = manifest_store(settings, parts.objects, parts.cluster)
        gate = BucketManifests(manifests, parts.catalog)
        scheduler = Scheduler(
            catalog=parts.catalog,
            offloader=parts.offloader,
            publisher=parts.publisher,
            stationery=stationery,
            manifests=gate,
            clock=clock,
            ids=ids,
            limits=_limits(settings),
            sweeper=AttributeSweeper(
                objects=parts.objects,
                catalog=parts.catalog,
                manifests=manifests,
                cluster_id=parts.cluster.cluster_id,
                key_prefix=settings.s3.key_prefix,
                clock=clock,
                safety_ms=round(own.attributes_safety_s * 1000),
            ),
            tracer=tracer,
        )

        letters = open_dead_letters(settings, parts.publisher, stationery)
        scrubs = _scrubs(parts, settings, manifests, scheduler)
        staging = _staging(parts, settings, scheduler)
        app = _app(parts, scheduler, letters, manifests, scrubs)
        guard_http(app, HTTP_RULES, protection.gate)
        collector = SchedulerCollector(
            scheduler, gate, scrubs, streams_max=settings.metrics.streams_shown
        )
        REGISTRY.register(collector)
        await awaited.leave()
        try:
            async with (
                serve_costs(app, "scheduler", parts.meter),
                serve_http(
                    app, host=listen.host, port=listen.http_port, tls=protection.tls
                ) as http_port,
            ):
                address = f"{listen.advertise_host or listen.host}:{http_port}"
                async with asyncio.TaskGroup() as group:
                    group.create_task(_tell_ready(parts, address, stop))
                    group.create_task(scrubs.run(stop))
                    group.create_task(staging.run(stop))
                    await scheduler.run(stop)
        finally:
            REGISTRY.unregister(collector)


def _app(
    parts: OffloadParts,
    scheduler: Scheduler,
    letters: DeadLetters,
    manifests: ManifestStore,
    scrubs: ScrubRunner,
) -> FastAPI:
    return build_app(
        parts.catalog,
        scheduler,
        letters,
        manifests,
        scrubs,
        checks={"metadata": parts.catalog.answers},
        # Admins are answered without it, and a service that is not ready has no address.
        told={"queue": parts.publisher.answers},
        ids=system_ids(),
        cluster_id=parts.cluster.cluster_id,
    )


def _limits(settings: Settings) -> SchedulerLimits:
    own = settings.scheduler
    return SchedulerLimits(
        interval_s=own.interval_s,
        request_again_s=own.request_again_s,
        sweep_again_s=own.sweep_again_s,
        sweep_attributes_s=own.sweep_attributes_s,
        stalled_s=own.scrub_safety_age_s,
        checkpoint_s=own.checkpoint_s,
        reread_s=own.reread_s,
        streams_in_flight_max=own.streams_in_flight_max,
        longest_request_s=settings.s3.longest_request_s,
    )


async def _tell_ready(parts: OffloadParts, address: str, stop: asyncio.Event) -> None:
    """Wait for the queue, and say where the service listens."""
    await unless_stopped(parts.publisher.come(), stop)
    if not stop.is_set():
        announce_ready(service="scheduler", http=address)


def _staging(parts: OffloadParts, settings: Settings, scheduler: Scheduler) -> StagingSweeper:
    return StagingSweeper(
        parts.catalog,
        leading=lambda: scheduler.leading,
        stopped=scheduler.kept_beside_passes,
        clock=system_clock(),
        age_s=settings.scheduler.staging_s,
        again_s=settings.scheduler.sweep_again_s,
    )


def _scrubs(
    parts: OffloadParts, settings: Settings, manifests: ManifestStore, scheduler: Scheduler
) -> ScrubRunner:
    own, clock = settings.scheduler, system_clock()
    repairer = Repairer(
        objects=parts.objects,
        catalog=parts.catalog,
        offloader=parts.offloader,
        open_ledger=ledger_opener(settings, parts),
        ids=system_ids(),
    )
    scrubber = Scrubber(
        objects=parts.objects,
        catalog=parts.catalog,
        manifests=manifests,
        repairer=repairer,
        cluster_id=parts.cluster.cluster_id,
        bucket=settings.s3.bucket,
        endpoint_name=settings.s3.endpoint_name,
        key_prefix=settings.s3.key_prefix,
        clock=clock,
        limits=ScrubLimits(
            safety_age_s=own.scrub_safety_age_s,
            requests_per_s=own.scrub_requests_per_s,
            bytes_per_s=own.scrub_bytes_per_s,
            deep_s_max=own.scrub_deep_s_max,
        ),
    )
    return ScrubRunner(
        scrubber,
        parts.catalog.scrubs,
        leading=lambda: scheduler.leading,
        clock=clock,
        ids=system_ids(),
        schedule=ScrubSchedule(
            interval_s=own.scrub_interval_s,
            deep_interval_s=own.scrub_deep_interval_s,
            repair=own.scrub_repairs,
            findings_max=own.scrub_findings_max,
            reports_max=own.scrub_reports_max,
        ),
    )


def main() -> None:
    """Run the service and exit with its code."""
    sys.exit(run_service("scheduler", serve, sys.argv[1:]))


if __name__ == "__main__":
    main()
