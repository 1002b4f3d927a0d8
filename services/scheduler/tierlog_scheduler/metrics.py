"""The scheduler's state as Prometheus metrics, read when they are asked for.

    data not in S3 in time   tierlog_offload_oldest_byte_age_seconds_max (and by stream)
    a leader that is stuck   tierlog_scheduler_passes_total does not grow
    too many streams         tierlog_scheduler_pass_duration_seconds nears scheduler.interval_s

Invariant: only the leader knows ages; others say nothing of them, so that a sum or a maximum over
all processes is the leader's word. At most ``STREAMS_MAX`` streams have a metric of their own.
"""

import heapq
from collections.abc import Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tierlog_scheduler.scheduler import Scheduler

STREAMS_MAX: Final = 100
AGE: Final = "tierlog_offload_oldest_byte_age_seconds"


class SchedulerCollector(Collector):
    """Metrics of one scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def collect(self) -> Iterator[Metric]:
        found = self._scheduler
        yield GaugeMetricFamily(
            "tierlog_scheduler_leading", "1: this process leads", value=float(found.leading)
        )
        yield CounterMetricFamily(
            "tierlog_scheduler_passes", "Passes over all streams", value=found.passes
        )
        yield CounterMetricFamily(
            "tierlog_scheduler_reads", "Streams and contexts read", value=found.mirror.reads
        )
        if not found.leading:
            return
        yield GaugeMetricFamily(
            "tierlog_scheduler_pass_duration_seconds", "The last pass", value=found.pass_s
        )
        yield GaugeMetricFamily(
            "tierlog_scheduler_streams", "Streams that it knows", value=len(found.mirror.streams)
        )
        ages = found.oldest_byte_age_ms
        yield GaugeMetricFamily(
            f"{AGE}_max",
            "How old the oldest byte may be that is not in tier 2, of all offloaded streams",
            value=max(ages.values(), default=0) / 1000,
        )
        by_stream = GaugeMetricFamily(
            AGE, f"The same by stream, of the {STREAMS_MAX} oldest", labels=["stream"]
        )
        for name, age_ms in heapq.nlargest(STREAMS_MAX, ages.items(), key=lambda one: one[1]):
            by_stream.add_metric([name], age_ms / 1000)
        yield by_stream
