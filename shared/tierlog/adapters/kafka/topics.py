"""Topics are created explicitly, from specifications; never by use."""

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from tierlog.adapters.kafka.common import ClientErrors, as_error, client_log, log

VISIBLE_POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicSpec:
    """A topic as it is to be."""

    name: str
    partitions: int
    replication_factor: int
    config: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.partitions > 0, "a topic has partitions"
        assert self.replication_factor > 0, "a partition has a replica"


def topic_specs(
    names: Iterable[str], *, partitions: int, replication_factor: int
) -> list[TopicSpec]:
    """Return specifications of topics that are all alike."""
    return [
        TopicSpec(name=name, partitions=partitions, replication_factor=replication_factor)
        for name in names
    ]


async def ensure_topics(
    bootstrap: str, specs: Sequence[TopicSpec], *, timeout_s: float = 15.0
) -> list[str]:
    """Create those that are missing, and return their names once brokers lead them.

    Raises ``RetryableError`` UNAVAILABLE, or ``RefusedError`` when Kafka won't have them.
    """
    return await asyncio.to_thread(_ensure_topics, bootstrap, list(specs), timeout_s)


def _ensure_topics(bootstrap: str, specs: list[TopicSpec], timeout_s: float) -> list[str]:
    deadline_s = time.monotonic() + timeout_s
    config: dict[str, Any] = {"bootstrap.servers": bootstrap, "error_cb": ClientErrors("topics")}
    admin = AdminClient(config, logger=client_log)
    futures = admin.create_topics(
        [
            NewTopic(
                spec.name,
                num_partitions=spec.partitions,
                replication_factor=spec.replication_factor,
                config=dict(spec.config),
            )
            for spec in specs
        ],
        request_timeout=timeout_s,
        operation_timeout=timeout_s,
    )
    created = []
    for name, future in futures.items():
        try:
            future.result(timeout_s + 1.0)  # Kafka's own answer comes first
            created.append(name)
        except TimeoutError as error:
            late = KafkaError(KafkaError._TIMED_OUT)  # noqa: SLF001 - librdkafka's own code
            raise as_error(late, f"creating topic {name}", bootstrap) from error
        except KafkaException as error:
            cause: KafkaError = error.args[0]
            if cause.code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise as_error(cause, f"creating topic {name}", bootstrap) from error
    wanted = {spec.name: spec for spec in specs}
    _wait_until_led(admin, bootstrap, wanted, deadline_s)
    if created:
        log.info("topics.created", names=created)
    return created


def _wait_until_led(
    admin: AdminClient, bootstrap: str, wanted: Mapping[str, TopicSpec], deadline_s: float
) -> None:
    while True:
        left_s = max(deadline_s - time.monotonic(), 0.1)
        try:
            found = admin.list_topics(timeout=left_s).topics
        except KafkaException as error:
            raise as_error(error.args[0], "listing topics", bootstrap) from error
        partitions = {
            name: sum(part.leader >= 0 for part in found[name].partitions.values())
            for name in wanted
            if name in found
        }
        if len(partitions) == len(wanted) and all(partitions.values()):
            for name, spec in wanted.items():
                if partitions[name] < spec.partitions:
                    log.warning(
                        "topics.fewer_partitions", name=name, found=partitions[name],
                        wanted=spec.partitions,
                    )  # fmt: skip
            return
        if time.monotonic() >= deadline_s:
            missing = sorted(set(wanted) - {n for n, count in partitions.items() if count})
            raise as_error(
                KafkaError(KafkaError._TIMED_OUT),  # noqa: SLF001 - librdkafka's own code
                f"leading topics {missing}",
                bootstrap,
            )
        time.sleep(VISIBLE_POLL_S)
