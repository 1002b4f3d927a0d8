"""The node's state as Prometheus metrics, read when they are asked for.

Owns: names and units. Does not own the numbers (``statistics`` of the node and of its storage).

Invariant: every number of the storage's statistics is here, under one name; what only grows is a
counter, and starts anew with the process.

    slow appends        tierlog_append_duration_seconds
    a slow disk         tierlog_journal_fsync_duration_seconds, tierlog_journal_slow_fsyncs_total
    tier 2 away         tierlog_ingest_attributes_unflushed
    a full disk         tierlog_disk_space_level, tierlog_disk_free_bytes, tierlog_storage_read_only
    damage              tierlog_storage_limbo, tierlog_index_doubtful_ledgers
    missing copies      tierlog_replication_queue_ledgers, at the node that is auditor or any other
"""

import heapq
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, Protocol

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from tierlog.model.durations import Durations

_GAUGES: Final = {
    "ledgers": ("storage_ledgers", "Ledgers that the node holds entries of"),
    "ledgers_held": ("storage_ledgers_in_memory", "Ledgers whose end is kept in memory"),
    "fences": ("storage_fenced_ledgers", "Ledgers that take no ordinary adds any more"),
    "quarantined": ("storage_quarantined_ledgers", "Ledgers that are not served"),
    "limbo": ("storage_limbo", "1: a start found damage, what is not there is unknown"),
    "read_only": ("storage_read_only", "1: ordinary adds are refused, the disk is full"),
    "buffered_bytes": ("write_buffer_bytes", "Bytes that are in no entry log yet"),
    "read_ahead_bytes": ("read_ahead_bytes", "Bytes read before they were asked for"),
    "journal_queued_bytes": ("journal_queue_bytes", "Bytes that wait for the journal"),
    "journal_bytes_on_disk": ("journal_disk_bytes", "Bytes of the journal's segments"),
    "journal_sync_s_max": ("journal_fsync_duration_seconds_max", "The longest fsync so far"),
    "entry_logs": ("entry_logs", "Entry logs"),
    "entry_log_bytes": ("entry_log_bytes", "Bytes of runs in entry logs, live or not"),
    "index_pages": ("index_pages", "Pages of indexes in memory"),
    "index_pages_dirty": ("index_pages_dirty", "Pages that are not written yet"),
    "index_doubtful": ("index_doubtful_ledgers", "Ledgers whose index may lack entries"),
    "space_level": ("disk_space_level", "0 enough, 1 low, 2 read-only"),
    "disk_turns_taken": ("disk_turns_taken", "Work on the disk under way"),
    "disk_waiting": ("disk_turns_waiting", "Work that waits for the disk"),
    "compaction_logs_kept": ("compaction_logs_kept", "Logs that can't be compacted"),
    "compaction_logs_unsettled": ("compaction_logs_unsettled", "Logs that are being compacted"),
}
_COUNTERS: Final = {
    "journal_written_bytes": ("journal_written_bytes", "Bytes written to the journal"),
    "journal_slow_syncs": ("journal_slow_fsyncs", "Fsyncs longer than storage.slow_sync_s"),
    "index_pages_read": ("index_pages_read", "Pages of indexes read from disk"),
    "compaction_logs_removed": ("compaction_logs_removed", "Entry logs removed"),
    "compaction_logs_compacted": ("compaction_logs_compacted", "Entry logs copied elsewhere"),
    "compaction_read_bytes": ("compaction_read_bytes", "Bytes read by compaction"),
    "compaction_copied_bytes": ("compaction_copied_bytes", "Bytes written by compaction"),
    "compaction_copied_runs": ("compaction_copied_runs", "Runs written by compaction"),
    "compaction_freed_bytes": ("compaction_freed_bytes", "Bytes of entry logs removed"),
    "compaction_throttled_s": ("compaction_throttled_seconds", "Time that compaction waited"),
}
# Several numbers that are one metric with a label.
_LABELLED: Final = (
    (r"directory_(\d+)_free_bytes", "disk_free_bytes", "directory", "Free bytes", False),
    (r"directory_(\d+)_total_bytes", "disk_total_bytes", "directory", "The disk's size", False),
    (r"disk_(\w+)_turns", "disk_turns", "work", "Turns at the disk", True),
    (r"disk_(\w+)_wait_s", "disk_wait_seconds", "work", "Time waited for a turn", True),
    (r"disk_(\w+)_wait_s_max", "disk_wait_seconds_max", "work", "The longest wait", False),
    (r"compaction_rounds_(\w+)", "compaction_rounds", "kind", "Rounds of compaction", True),
)
UNNAMED: Final = "A number of the storage node that has no name here yet"
_SYNC_COUNT: Final = "journal_groups"
_SYNC_SUM: Final = "journal_sync_s"


class Node(Protocol):
    """What has a state."""

    def statistics(self) -> dict[str, object]:
        """Return it."""
        ...


class Appends(Protocol):
    """What came of the appends to a node's streams."""

    durations: Durations
    conditions_failed: int


class NodeCollector(Collector):
    """Metrics of one node: of its storage, and of its streams together.

    ``streams_max`` of them are shown by themselves, too.
    """

    def __init__(self, node: Node, *, appends: Appends | None = None, streams_max: int = 0) -> None:
        self._node = node
        self._appends = appends
        self._streams_max = streams_max

    def collect(self) -> Iterator[Metric]:
        state = self._node.statistics()
        streams = state["streams"]
        assert isinstance(streams, list)
        yield _gauge("ingest_streams", "Streams that this node owns", len(streams))
        for name, what in (
            ("appends_waiting", "Appends that were not sent yet"),
            ("appends_sent", "Shares of appends that are not confirmed yet"),
            ("in_flight_bytes", "Bytes of runs that are not confirmed yet"),
            ("attributes_unflushed", "Attributes that wait for a checkpoint"),
        ):
            yield _gauge(f"ingest_{name}", what, sum(one.get(name, 0) for one in streams))
        if self._appends is not None:
            yield from append_metrics(self._appends)
        if self._streams_max:
            yield from stream_metrics(streams, self._streams_max)
        recovering, storage = state["recovering"], state["storage"]
        assert isinstance(recovering, Mapping)
        yield _gauge("ingest_recoveries_waiting", "Recoveries that wait", len(recovering))
        stopped = state["gc_alarm"] is not None
        yield _gauge("storage_gc_stopped", "1: an alarm stopped garbage collection", stopped)
        assert isinstance(storage, Mapping)
        yield from storage_metrics(storage)
        replication = state.get("replication")
        if isinstance(replication, Mapping):
            yield from replication_metrics(replication)


def append_metrics(appends: Appends) -> Iterator[Metric]:
    """Return how long answers took, of all streams together."""
    yield HistogramMetricFamily(
        "tierlog_append_duration_seconds",
        "How long appends waited in their owner until they were answered",
        buckets=appends.durations.buckets(),
        sum_value=appends.durations.sum_s,
    )
    yield CounterMetricFamily(
        "tierlog_append_conditional_failures",
        "Appends whose condition did not hold",
        value=appends.conditions_failed,
    )


def stream_metrics(streams: list[dict[str, Any]], streams_max: int) -> Iterator[Metric]:
    """Return the metrics of single streams, of those that have most under way."""
    busiest = heapq.nlargest(streams_max, streams, key=lambda one: one["in_flight_bytes"])
    for key, name, what in (
        ("appends_waiting", "appends_waiting", "Appends of a stream that were not sent yet"),
        ("in_flight_bytes", "in_flight_bytes", "Bytes of its runs that are not confirmed yet"),
        ("ledger_bytes", "open_ledger_bytes", "Bytes in its open ledger"),
        ("ledger_entries", "open_ledger_entries", "Entries in its open ledger"),
    ):
        family = GaugeMetricFamily(f"tierlog_stream_{name}", what, labels=["stream"])
        for one in busiest:
            family.add_metric([one["stream"]], one[key])
        yield family


def replication_metrics(replication: Mapping[str, float]) -> Iterator[Metric]:
    """Return the metrics of auto-recovery, as one process sees it."""
    for key, what in (
        ("auditor", "1: this process is the auditor"),
        ("queue_ledgers", "Ledgers that lack copies"),
        ("at_work_ledgers", "Ledgers whose copies are being made by this process"),
    ):
        yield _gauge(f"replication_{key}", what, replication[key])
    for key, what in (
        ("made_whole", "Ledgers that this process struck off the queue"),
        ("copied_runs", "Runs written by auto-recovery"),
        ("copied_bytes", "Bytes written by auto-recovery"),
        ("throttled_seconds", "Time that auto-recovery waited for its rate"),
    ):
        yield CounterMetricFamily(f"tierlog_replication_{key}", what, value=replication[key])


def storage_metrics(storage: Mapping[str, float]) -> Iterator[Metric]:
    """Return the metrics of a storage node's statistics, which are empty before it is open."""
    if _SYNC_COUNT in storage:
        yield SummaryMetricFamily(
            "tierlog_journal_fsync_duration_seconds",
            "How long the journal's writes took until they were durable",
            count_value=int(storage[_SYNC_COUNT]),
            sum_value=storage[_SYNC_SUM],
        )
    labelled: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
    for key, value in storage.items():
        if key in _GAUGES:
            yield _gauge(*_GAUGES[key], value)
        elif key in _COUNTERS:
            name, what = _COUNTERS[key]
            yield CounterMetricFamily(f"tierlog_{name}", what, value=value)
        elif key not in {_SYNC_COUNT, _SYNC_SUM} and not _add_labelled(labelled, key, value):
            yield _gauge(f"storage_{key}", UNNAMED, value)
    yield from labelled.values()


def _add_labelled(
    families: dict[str, CounterMetricFamily | GaugeMetricFamily], key: str, value: float
) -> bool:
    for pattern, name, label, what, grows in _LABELLED:
        match = re.fullmatch(pattern, key)
        if match is not None:
            family = families.get(name)
            if family is None:
                kind = CounterMetricFamily if grows else GaugeMetricFamily
                family = families[name] = kind(f"tierlog_{name}", what, labels=[label])
            family.add_metric([match[1]], value)
            return True
    return False


def _gauge(name: str, what: str, value: float) -> Metric:
    return GaugeMetricFamily(f"tierlog_{name}", what, value=float(value))
