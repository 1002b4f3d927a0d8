"""The scheduler's state as Prometheus metrics, read when they are asked for.

    data not in S3 in time   tierlog_offload_overdue_seconds
    how old it is            tierlog_offload_oldest_pending_age_seconds
    how much of it           tierlog_offload_lag_bytes, tierlog_offload_lag_ledgers
    streams left out of it   tierlog_scheduler_streams_unread
    a leader that is stuck   tierlog_scheduler_passes_total does not grow
    deletions that pile up   tierlog_scheduler_deletions_behind_seconds
    deletions that fail      tierlog_scheduler_deletions_failing_seconds
    deletions that are held  tierlog_scheduler_deletions_stopped_streams
    faults in the bucket     tierlog_scheduler_scrub_findings
    nobody looks for them    tierlog_scheduler_scrub_incomplete_seconds
    too many streams         tierlog_scheduler_pass_duration_seconds nears scheduler.interval_s

Invariant: they come from the metadata, by the leader alone: others say nothing of them, so that a
sum or a maximum over all processes is the leader's word, workers that fail hide nothing, and who
led before leaves nothing behind. A new leader says nothing either before it has decided once: what
is not known is no 0. With ``metrics.per_stream`` the streams that are furthest behind have metrics
of their own.
"""

import heapq
from collections.abc import Iterator, Mapping
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tierlog.model.scrub import KnownFaults
from tierlog_scheduler.manifests import ManifestGate
from tierlog_scheduler.policy import STATES
from tierlog_scheduler.scheduler import Scheduler
from tierlog_scheduler.scrubs import ScrubRunner

AGE: Final = "offload_oldest_pending_age_seconds"
OVERDUE: Final = "offload_overdue_seconds"
LAG: Final = "offload_lag_bytes"


class SchedulerCollector(Collector):
    """Metrics of one scheduler; ``streams_max`` streams are shown by themselves, too."""

    def __init__(
        self,
        scheduler: Scheduler,
        manifests: ManifestGate,
        scrubs: ScrubRunner,
        *,
        streams_max: int = 0,
    ) -> None:
        self._scheduler = scheduler
        self._manifests = manifests
        self._scrubs = scrubs
        self._streams_max = streams_max

    def collect(self) -> Iterator[Metric]:
        found = self._scheduler
        yield _gauge("scheduler_leading", "1: this process leads", found.leading)
        yield CounterMetricFamily(
            "tierlog_scheduler_passes", "Passes over all streams", value=found.passes
        )
        yield CounterMetricFamily(
            "tierlog_scheduler_reads", "Streams and contexts read", value=found.mirror.reads
        )
        if found.leading and self._scrubs.faults is not None:
            yield from _faults(self._scrubs.faults)
        incomplete_s = self._scrubs.incomplete_s
        if found.leading and incomplete_s is not None:
            yield _gauge(
                "scheduler_scrub_incomplete_seconds",
                "For how long, beyond their interval, no scrub could look at everything",
                incomplete_s,
            )
        if found.leading and found.decided:
            yield from self._of_streams()

    def _of_streams(self) -> Iterator[Metric]:
        found = self._scheduler
        yield _gauge("scheduler_pass_duration_seconds", "The last pass", found.pass_s)
        yield _gauge("scheduler_streams", "Streams that it knows", len(found.mirror.streams))
        yield _gauge(
            "scheduler_streams_unread",
            "Streams that can't be read, or decided about: nothing is done for them",
            found.streams_unread,
        )
        yield _gauge(
            "scheduler_deletions_behind_seconds",
            "For how long no pass had time for all deletions, trims and sweeps that were due",
            found.behind_s,
        )
        yield _gauge(
            "scheduler_deletions_failing_seconds",
            "For how long a deletion, trim or sweep that is due has failed whenever it was tried",
            found.failing_s,
        )
        lags = found.lags.values()
        yield _gauge(
            AGE,
            "How old the oldest byte may be that is not in tier 2, of all offloaded streams",
            max((one.age_ms for one in lags), default=0) / 1000,
        )
        yield _gauge(
            OVERDUE,
            "For how long something has been due in tier 2, by its stream's policy, and is not",
            max((one.overdue_ms for one in lags), default=0) / 1000,
        )
        yield _gauge(
            "offload_unbounded_age_seconds",
            "The oldest byte's age in streams where time alone makes nothing due in tier 2",
            max((one.unbounded_age_ms for one in lags), default=0) / 1000,
        )
        yield _gauge(
            LAG,
            "Bytes of closed ledgers of offloaded streams that are not in tier 2",
            sum(one.length for one in lags),
        )
        yield _gauge(
            "offload_lag_ledgers",
            "Ledgers of offloaded streams that are not in tier 2, open ones too",
            sum(one.ledgers for one in lags),
        )
        states = {state: found.ledger_states[state] for state in STATES}
        yield _by_label("ledgers", "Ledgers by state", "state", states)
        yield _by_label(
            "scheduler_deletions_stopped_streams",
            "Streams of which nothing is deleted, since a manifest is missing, can't be read or "
            "written, or is newer than the metadata",
            "cause",
            self._manifests.stopped_streams(),
        )
        if self._streams_max:
            yield from self._by_stream()

    def _by_stream(self) -> Iterator[Metric]:
        ages, overdue, lags = (
            GaugeMetricFamily(
                f"tierlog_stream_{name}",
                "The same by stream, of those furthest behind",
                labels=["stream"],
            )
            for name in (AGE, OVERDUE, LAG)
        )
        for name, lag in heapq.nlargest(
            self._streams_max,
            self._scheduler.lags.items(),
            key=lambda item: (item[1].overdue_ms, item[1].age_ms),
        ):
            ages.add_metric([name], lag.age_ms / 1000)
            overdue.add_metric([name], lag.overdue_ms / 1000)
            lags.add_metric([name], lag.length)
        yield from (ages, overdue, lags)


def _faults(found: KnownFaults) -> Iterator[Metric]:
    yield _by_label(
        "scheduler_scrub_findings",
        "Faults that scrubs found and did not repair",
        "kind",
        {kind.value: count for kind, count in found.by_kind.items()},
    )
    yield _gauge(
        "offload_orphan_objects",
        "Objects that nothing names, and that the last scrub left",
        found.orphan_objects,
    )
    yield _gauge("offload_orphan_bytes", "The bytes of those objects", found.orphan_bytes)


def _by_label(name: str, what: str, label: str, values: Mapping[str, int]) -> Metric:
    found = GaugeMetricFamily(f"tierlog_{name}", what, labels=[label])
    for each, value in values.items():
        found.add_metric([each], value)
    return found


def _gauge(name: str, what: str, value: float) -> Metric:
    return GaugeMetricFamily(f"tierlog_{name}", what, value=float(value))
