"""Topics are created explicitly, from specifications; never by use.

``ensure_topics`` is what services do when they start: what is missing is made, nothing that is
there is changed. ``apply_topics`` is what an operator does: it also brings partitions and settings
to what they should be. What would lose events is told and left alone.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import AlterConfigOpType, ConfigEntry, ConfigResource
from confluent_kafka.admin._listoffsets import OffsetSpec
from confluent_kafka.admin._resource import ResourceType
from confluent_kafka.cimpl import NewPartitions, NewTopic

from tierlog.adapters.kafka.common import (
    PLAIN,
    ClientErrors,
    How,
    Result,
    as_error,
    client_log,
    in_thread,
    log,
)
from tierlog.model.errors import TierlogError
from tierlog.offload.topics import (
    Difference,
    Remedy,
    TopicReport,
    TopicSpec,
    TopicState,
    differences,
)
from tierlog.ports.events import TopicMark

VISIBLE_POLL_S = 0.1
TOPICS_S_MAX: Final = 15.0


def topic_specs(
    names: Iterable[str], *, partitions: int, replication_factor: int
) -> list[TopicSpec]:
    """Return specifications of topics that are all alike."""
    return [
        TopicSpec(name=name, partitions=partitions, replication_factor=replication_factor)
        for name in names
    ]


async def ensure_topics(
    bootstrap: str,
    specs: Sequence[TopicSpec],
    *,
    timeout_s: float = TOPICS_S_MAX,
    how: How = PLAIN,
) -> list[str]:
    """Create those that are missing, and return their names once brokers lead them.

    Raises ``RetryableError`` UNAVAILABLE, or ``RefusedError`` when Kafka won't have them.
    """
    work = partial(_ensure_topics, specs=list(specs), timeout_s=timeout_s)
    return await in_thread("kafka-topics", partial(_by_admin, bootstrap, how, work))


def check_connection(bootstrap: str, *, how: How, timeout_s: float) -> None:
    """Return if a broker takes a connection and answers, or raise why not; blocks."""
    _by_admin(bootstrap, how, partial(_listed, timeout_s=timeout_s))


async def apply_topics(
    bootstrap: str,
    specs: Sequence[TopicSpec],
    *,
    dry_run: bool = False,
    timeout_s: float = TOPICS_S_MAX,
    how: How = PLAIN,
) -> list[TopicReport]:
    """Make the topics what they should be, as far as that loses nothing, and tell what is left.

    With ``dry_run`` nothing is changed: all that differs is left.
    """
    work = partial(_apply_topics, specs=list(specs), timeout_s=timeout_s, dry_run=dry_run)
    return await in_thread("kafka-topics", partial(_by_admin, bootstrap, how, work))


async def mark_topic(bootstrap: str, name: str, *, timeout_s: float, how: How = PLAIN) -> TopicMark:
    """Return which topic of that name there is now, and how many events it has had."""
    try:
        work = partial(_mark, name=name, timeout_s=timeout_s)
        return await in_thread("kafka-topics", partial(_by_admin, bootstrap, how, work))
    except KafkaException as failure:  # no client can be made while files of kafka.tls are wrong
        raise as_error(failure.args[0], f"describing topic {name}", bootstrap) from failure


class _Admin:
    """A client of a cluster, and what its brokers said of connections."""

    def __init__(self, bootstrap: str, how: How) -> None:
        self._bootstrap = bootstrap
        self._errors = ClientErrors("topics")
        config: dict[str, Any] = {
            **how,
            "bootstrap.servers": bootstrap,
            "reconnect.backoff.max.ms": 2000,
            "error_cb": self._errors.remember,
        }
        self.client = AdminClient(config, logger=client_log)

    def error(self, error: KafkaError, what: str) -> TierlogError:
        """Say what a failure means; why nobody answers is told to who polls."""
        self.client.poll(0)
        return as_error(self._errors.explain(error), what, self._bootstrap)


def _by_admin(bootstrap: str, how: How, work: Callable[[_Admin], Result]) -> Result:
    """Return what ``work`` does with a client; blocks."""
    admin = _Admin(bootstrap, how)
    # It ends here: what ends a client waits for names that are being looked up, and where an error
    # holds it that would be whoever collects the garbage, such as the loop, at each try.
    with admin.client:
        return work(admin)


def _ensure_topics(admin: _Admin, specs: list[TopicSpec], timeout_s: float) -> list[str]:
    deadline_s = time.monotonic() + timeout_s
    # Where topics are an operator's, a service may not be allowed to create any.
    there = _listed(admin, timeout_s)
    missing = [spec for spec in specs if spec.name not in there]
    created = _create(admin, missing, timeout_s) if missing else []
    wanted = {spec.name: spec for spec in specs}
    _wait_until_led(admin, wanted, deadline_s)
    if created:
        log.info("topics.created", names=created)
    return created


def _apply_topics(
    admin: _Admin, specs: list[TopicSpec], timeout_s: float, *, dry_run: bool
) -> list[TopicReport]:
    before = _describe(admin, specs, timeout_s)
    told = {spec.name: differences(spec, before.get(spec.name)) for spec in specs}
    if not dry_run:
        for spec in specs:
            _do(admin, spec, told[spec.name], timeout_s)
        wanted = {spec.name: spec for spec in specs}
        _wait_until_led(admin, wanted, time.monotonic() + timeout_s)
    after = before if dry_run else _settled(admin, specs, timeout_s)
    reports = []
    for spec in specs:
        left = differences(spec, after.get(spec.name))
        done = [one for one in told[spec.name] if one.what not in {other.what for other in left}]
        reports.append(
            TopicReport(
                spec=spec,
                found=before.get(spec.name),
                now=after.get(spec.name),
                done=done,
                left=left,
            )
        )
    return reports


def _mark(admin: _Admin, name: str, timeout_s: float) -> TopicMark:
    described = admin.client.describe_topics(TopicCollection([name]), request_timeout=timeout_s)
    what = f"describing topic {name}"
    if _result(admin, described[name], what, timeout_s, but=KafkaError.UNKNOWN_TOPIC_OR_PART):
        return TopicMark()
    topic = described[name].result()
    places = [TopicPartition(name, part.id) for part in topic.partitions]
    latest: OffsetSpec = OffsetSpec.latest()  # type: ignore[no-untyped-call]
    listed = admin.client.list_offsets(dict.fromkeys(places, latest), request_timeout=timeout_s)
    ends = {}
    for place, future in listed.items():
        _result(admin, future, f"asking for the end of topic {name}", timeout_s)
        ends[place.partition] = future.result().offset
    return TopicMark(topic_id=str(topic.topic_id), ends=ends)


def _do(admin: _Admin, spec: TopicSpec, told: Sequence[Difference], timeout_s: float) -> None:
    """Do what can be done about these differences of one topic."""
    remedies = {one.remedy for one in told}
    if Remedy.CREATE in remedies:
        _create(admin, [spec], timeout_s)
    if Remedy.ADD_PARTITIONS in remedies:
        futures = admin.client.create_partitions(
            [NewPartitions(spec.name, spec.partitions)], request_timeout=timeout_s
        )
        _result(admin, futures[spec.name], f"adding partitions to {spec.name}", timeout_s)
    values = [one for one in told if one.remedy is Remedy.SET]
    if values:
        resource = ConfigResource(
            ResourceType.TOPIC,
            spec.name,
            incremental_configs=[
                ConfigEntry(one.what, one.wanted, incremental_operation=AlterConfigOpType.SET)
                for one in values
            ],
        )
        done = admin.client.incremental_alter_configs([resource], request_timeout=timeout_s)
        (altered,) = done.values()
        _result(admin, altered, f"setting topic {spec.name}", timeout_s)


def _settled(
    admin: _Admin, specs: Sequence[TopicSpec], timeout_s: float
) -> Mapping[str, TopicState]:
    """Describe again, until brokers tell of what was changed, or time is up."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        after = _describe(admin, specs, timeout_s)
        left = [one for spec in specs for one in differences(spec, after.get(spec.name))]
        if all(one.remedy is Remedy.BY_HAND for one in left) or time.monotonic() >= deadline_s:
            return after
        time.sleep(VISIBLE_POLL_S)


def _create(admin: _Admin, specs: Sequence[TopicSpec], timeout_s: float) -> list[str]:
    futures = admin.client.create_topics(
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
        there = _result(
            admin,
            future,
            f"creating topic {name}",
            timeout_s,
            but=KafkaError.TOPIC_ALREADY_EXISTS,
        )
        if not there:
            created.append(name)
    return created


def _result(
    admin: _Admin, future: "Future[Any]", what: str, timeout_s: float, *, but: int | None = None
) -> bool:
    """Wait for an answer; True when it is the refusal ``but``. Raises any other."""
    try:
        future.result(timeout_s + 1.0)  # Kafka's own answer comes first
    except TimeoutError as error:
        late = KafkaError(KafkaError._TIMED_OUT)  # noqa: SLF001 - librdkafka's own code
        raise admin.error(late, what) from error
    except KafkaException as error:
        cause: KafkaError = error.args[0]
        if cause.code() != but:
            raise admin.error(cause, what) from error
        return True
    return False


def _listed(admin: _Admin, timeout_s: float) -> Mapping[str, Any]:
    try:
        found: Mapping[str, Any] = admin.client.list_topics(timeout=timeout_s).topics
    except KafkaException as error:
        raise admin.error(error.args[0], "listing topics") from error
    return found


def _describe(
    admin: _Admin, specs: Sequence[TopicSpec], timeout_s: float
) -> Mapping[str, TopicState]:
    """Return those of the topics that are there, as they are."""
    listed = _listed(admin, timeout_s)
    resources = [
        ConfigResource(ResourceType.TOPIC, spec.name) for spec in specs if spec.name in listed
    ]
    if not resources:
        return {}
    found = {}
    described = admin.client.describe_configs(resources, request_timeout=timeout_s)
    for resource, future in described.items():
        _result(admin, future, f"describing topic {resource.name}", timeout_s)
        parts = listed[resource.name].partitions.values()
        found[resource.name] = TopicState(
            partitions=len(parts),
            replication_factor=min((len(part.replicas) for part in parts), default=0),
            config={
                name: entry.value
                for name, entry in future.result().items()
                if entry.value is not None
            },
            leaderless=sum(part.leader < 0 for part in parts),
        )
    return found


def _wait_until_led(admin: _Admin, wanted: Mapping[str, TopicSpec], deadline_s: float) -> None:
    while True:
        left_s = max(deadline_s - time.monotonic(), 0.1)
        found = _listed(admin, left_s)
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
            raise admin.error(
                KafkaError(KafkaError._TIMED_OUT),  # noqa: SLF001 - librdkafka's own code
                f"leading topics {missing}",
            )
        time.sleep(VISIBLE_POLL_S)
