"""Adapters from settings, each as an async context manager that gives its connection back.

Adapters of outer systems are imported where they are opened: a process installs the libraries of
those systems alone that it talks to (ADR-0001).
"""

import contextlib
import os
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Final

from tierlog.adapters.system import SystemClock, SystemIds
from tierlog.catalog import Catalog
from tierlog.model.node import Cluster
from tierlog.offload.awaited_publisher import AwaitedPublisher
from tierlog.offload.dead_letters import DeadLetters
from tierlog.offload.messages import Stationery, Topics
from tierlog.offload.topics import TopicReport, TopicSpec, queue_specs
from tierlog.ports.clock import Clock
from tierlog.ports.events import EventPublisher, EventSource
from tierlog.ports.ids import Ids
from tierlog.ports.metadata import MetadataStore
from tierlog.ports.objects import ObjectStore
from tierlog.ports.retrying import Come, asked_once
from tierlog.ports.spending import CostMeter
from tierlog.ports.throttle import TokenBucket
from tierlog.runtime.redaction import learn_secrets, secrets_of
from tierlog.runtime.settings import S3Settings, Settings, load_settings

METADATA: Final = "metadata"
OBJECTS: Final = "objects"
"""What readiness calls ZooKeeper and the bucket."""


def system_clock() -> Clock:
    """Return the machine's clock."""
    return SystemClock()


def system_ids() -> Ids:
    """Return the machine's source of chance."""
    return SystemIds()


@contextlib.asynccontextmanager
async def open_metadata(
    settings: Settings, *, come: Come = asked_once
) -> AsyncIterator[MetadataStore]:
    """Connect to ZooKeeper for the length of the context."""
    from tierlog.adapters.zookeeper.metadata import ZooKeeperMetadata, connection_of

    connect = partial(
        ZooKeeperMetadata.connect,
        settings.zookeeper.hosts,
        how=connection_of(settings.zookeeper),
        session_timeout_s=settings.zookeeper.session_timeout_s,
        connect_timeout_s=settings.zookeeper.connect_timeout_s,
    )
    store = await come(METADATA, connect)
    try:
        yield store
    finally:
        await store.close()


@contextlib.asynccontextmanager
async def open_catalog(settings: Settings, *, come: Come = asked_once) -> AsyncIterator[Catalog]:
    """Connect to ZooKeeper and give the catalog over it, its folders made."""
    async with open_metadata(settings, come=come) as store:
        catalog = Catalog.over(store, clock=system_clock(), ids=system_ids())
        await come(METADATA, catalog.streams.ensure_roots)
        yield catalog


async def cluster_of(settings: Settings, catalog: Catalog, *, come: Come = asked_once) -> Cluster:
    """Return the cluster that the metadata are of, made when there is none."""
    base = settings.cluster.ledger_id_base
    return await come(METADATA, partial(catalog.nodes.ensure_cluster, ledger_id_base=base))


@contextlib.asynccontextmanager
async def open_objects(
    settings: Settings,
    *,
    meter: CostMeter | None = None,
    at_once: bool = True,
    come: Come = asked_once,
    pace: TokenBucket | None = None,
) -> AsyncIterator[ObjectStore]:
    """Open the bucket, made when it is missing, for the length of the context.

    ``meter`` counts its requests; ``come`` waits for it. Not ``at_once``: it may be away, and is
    not looked at before it is used. ``pace``: what its requests wait for, if others do too.
    """
    from tierlog.adapters.s3 import open_s3

    async with open_s3(
        settings.s3,
        clock=system_clock(),
        ids=system_ids(),
        meter=meter,
        reload=lambda: _s3_again(settings),
        pace=pace,
    ) as store:
        if at_once:
            await come(OBJECTS, store.ensure_bucket)
        yield store


def topic_specs(settings: Settings) -> list[TopicSpec]:
    """Return the queue's topics as they should be."""
    kafka = settings.kafka
    return queue_specs(
        Topics.of(kafka.topic_prefix),
        partitions=kafka.partitions,
        replication_factor=kafka.replication_factor,
        retention_s=kafka.retention_s,
        dead_letter_retention_s=kafka.dead_letter_retention_s,
    )


async def apply_queue_topics(settings: Settings, *, dry_run: bool) -> list[TopicReport]:
    """Make the queue's topics what they should be, as far as that loses nothing."""
    from tierlog.adapters.kafka.common import connection_of
    from tierlog.adapters.kafka.topics import apply_topics

    return await apply_topics(
        settings.kafka.bootstrap_servers,
        topic_specs(settings),
        dry_run=dry_run,
        how=connection_of(settings.kafka),
    )


def _s3_again(settings: Settings) -> S3Settings:
    """Read the settings as the process did: in a file, keys may be others by now."""
    config_file = os.environ.get("TIERLOG_CONFIG")
    again = load_settings(Path(config_file) if config_file else None, flags=settings.flags)
    learn_secrets(secrets_of(again))
    return again.s3


@contextlib.asynccontextmanager
async def open_publisher(
    settings: Settings, *, at_once: bool = True
) -> AsyncIterator[AwaitedPublisher]:
    """Make the topics that are missing, and publish to them for the length of the context.

    Not ``at_once``: Kafka may be away, and who opens this waits for it with ``come``.
    """
    from tierlog.adapters.kafka.common import connection_of
    from tierlog.adapters.kafka.publisher import KafkaPublisher
    from tierlog.adapters.kafka.topics import ensure_topics

    kafka = settings.kafka
    specs, how = topic_specs(settings), connection_of(kafka)
    publisher = AwaitedPublisher(
        KafkaPublisher(
            kafka.bootstrap_servers,
            publish_timeout_s=kafka.publish_timeout_s,
            queued_max=kafka.queued_messages_max,
            specs=specs,
            how=how,
        ),
        partial(ensure_topics, kafka.bootstrap_servers, specs, how=how),
        clock=system_clock(),
        ids=system_ids(),
        patience_s=kafka.publish_timeout_s,
    )
    try:
        if at_once:
            await publisher.ensure()
        yield publisher
    finally:
        await publisher.close()


def open_dead_letters(
    settings: Settings, publisher: EventPublisher, stationery: Stationery
) -> DeadLetters:
    """Give the dead letters of this deployment; they hold no connection of their own."""
    from tierlog.adapters.kafka.common import connection_of
    from tierlog.adapters.kafka.event_log import KafkaEventLog

    kafka = settings.kafka
    event_log = KafkaEventLog(
        kafka.bootstrap_servers, timeout_s=kafka.publish_timeout_s, how=connection_of(kafka)
    )
    return DeadLetters(event_log, publisher, stationery, newest_max=kafka.dead_letters_max)


@contextlib.asynccontextmanager
async def open_offload_requests(settings: Settings) -> AsyncIterator[EventSource]:
    """Join the offloaders' consumer group for the length of the context."""
    from tierlog.adapters.kafka.common import connection_of
    from tierlog.adapters.kafka.source import KafkaEventSource

    kafka = settings.kafka
    source = KafkaEventSource(
        kafka.bootstrap_servers,
        [Topics.of(kafka.topic_prefix).requested],
        group=kafka.offloader_group,
        poll_interval_max_s=kafka.poll_interval_max_s,
        how=connection_of(kafka),
    )
    try:
        yield source
    finally:
        await source.close()
