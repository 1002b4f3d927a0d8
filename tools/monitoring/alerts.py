"""The alerts: what somebody is to be told, and where the page is that says what to do.

Each has a page docs/runbooks/<name>.md; each expression names metrics that the code has. Tests
hold both (tests/deployment/test_monitoring.py). Ages and rates are of one namespace: several
releases may share one Prometheus.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

CRITICAL: Final = "critical"
WARNING: Final = "warning"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One alert."""

    name: str
    expr: str
    lasting: str
    severity: str
    summary: str

    @property
    def page(self) -> str:
        """Its page under docs/runbooks."""
        head = self.name.removeprefix("Tierlog")
        words = "".join(f"-{one.lower()}" if one.isupper() else one for one in head)
        return f"{words.removeprefix('-')}.md"


def _alert(name: str, severity: str, lasting: str, expr: str, summary: str) -> Alert:
    return Alert(
        name=f"Tierlog{name}", expr=expr, lasting=lasting, severity=severity, summary=summary
    )


FSYNC: Final = "tierlog_journal_fsync_duration_seconds"
OVERDUE: Final = "tierlog_offload_overdue_seconds"
LEADING: Final = "tierlog_scheduler_leading"
UP: Final = 'up{job="tierlog"}'
COMPONENTS: Final = ("ingest", "reader", "offloader", "scheduler")
HITS: Final = "rate(tierlog_cache_hit_bytes_total[15m])"


def _none_of(component: str) -> str:
    """Return what is so where others are asked, and none of a component's processes can be.

    Of pods that never came up there is no ``up`` that could be 0.
    """
    own = f'up{{job="tierlog", component="{component}"}}'
    missing = f"group by (namespace) ({UP}) unless group by (namespace) ({own})"
    return f'label_replace({missing}, "component", "{component}", "", "")'


GROUPS: Final[dict[str, tuple[Alert, ...]]] = {
    "tierlog-data": (
        _alert(
            "StorageDamage", CRITICAL, "1m",
            "tierlog_storage_limbo == 1 or tierlog_index_doubtful_ledgers > 0"
            " or tierlog_storage_quarantined_ledgers > 0",
            "a storage node found damage in its files, and answers UNKNOWN for some of them",
        ),
        _alert(
            "StorageReadOnly", CRITICAL, "1m", "tierlog_storage_read_only == 1",
            "a storage node takes no appends: its disk is full",
        ),
        _alert(
            "DiskFilling", WARNING, "10m", "tierlog_disk_space_level == 1",
            "a storage node has little free space left",
        ),
        _alert(
            "DiskWillFill", WARNING, "60m",
            "predict_linear(tierlog_disk_free_bytes[6h], 24 * 3600) < 0",
            "a storage node's disk will be full within a day, if it goes on like this",
        ),
        _alert(
            "CopiesMissing", WARNING, "30m",
            "max by (namespace) (tierlog_replication_queue_ledgers) > 0",
            "ledgers have lacked copies for half an hour",
        ),
        _alert(
            "AuditorMissing", WARNING, "10m",
            "sum by (namespace) (tierlog_replication_auditor) != 1",
            "not exactly one node looks for lost copies",
        ),
        _alert(
            "GarbageCollectionStopped", WARNING, "5m", "tierlog_storage_gc_stopped == 1",
            "a storage node frees nothing: the metadata look older than what it knows",
        ),
        _alert(
            "DeletionsStopped", CRITICAL, "10m",
            "max by (namespace) (tierlog_scheduler_deletions_stopped_streams) > 0",
            "nothing is deleted of some streams: their manifests can't be read or written, or know "
            "more than the metadata",
        ),
        _alert(
            "DeletionsBehind", WARNING, "10m",
            "max by (namespace) (tierlog_scheduler_deletions_behind_seconds) > 6 * 3600",
            "more becomes due for deletion than is deleted: local disks and the bucket fill",
        ),
        _alert(
            "DeletionsFailing", WARNING, "10m",
            "max by (namespace) (tierlog_scheduler_deletions_failing_seconds) > 6 * 3600",
            "something that is to be deleted can't be, however often it is tried",
        ),
        _alert(
            "ScrubFindings", CRITICAL, "5m",
            "max by (namespace) (tierlog_scheduler_scrub_findings) > 0",
            "scrubs found faults in the bucket and did not repair them",
        ),
        _alert(
            "ScrubsIncomplete", WARNING, "15m",
            "max by (namespace) (tierlog_scheduler_scrub_incomplete_seconds) > 48 * 3600",
            "no scrub could look at all of the bucket, for two days more than their interval",
        ),
        _alert(
            "ObjectsDiffer", WARNING, "0m",
            "increase(tierlog_reader_ranges_differed_total[30m]) > 0",
            "the object store gave bytes that are not what was written",
        ),
    ),
    "tierlog-moving": (
        _alert(
            "OffloadLate", WARNING, "15m", f"max by (namespace) ({OVERDUE}) > 6 * 3600",
            "bytes that are to be in S3 are more than six hours late",
        ),
        _alert(
            "OffloadStopped", CRITICAL, "15m", f"max by (namespace) ({OVERDUE}) > 24 * 3600",
            "bytes that are to be in S3 are more than a day late",
        ),
        _alert(
            "OffloadUnbounded", WARNING, "15m",
            "max by (namespace) (tierlog_offload_unbounded_age_seconds) > 24 * 3600",
            "bytes have waited for more than a day, and no time is set that brings them to S3",
        ),
        _alert(
            "StreamsUnread", CRITICAL, "10m",
            "max by (namespace) (tierlog_scheduler_streams_unread) > 0",
            "streams can't be read: nothing of them is offloaded, or trimmed",
        ),
        _alert(
            "OffloadsFailing", WARNING, "15m",
            'sum by (namespace) (rate(tierlog_offload_attempts_total'
            '{outcome=~"failed|refused"}[15m]))'
            " > sum by (namespace) (rate(tierlog_offload_attempts_total"
            '{outcome="completed"}[15m]))',
            "more offloads fail than succeed",
        ),
        _alert(
            "DeadLetters", WARNING, "0m",
            "sum by (namespace, reason) (increase(tierlog_dlq_messages_total[30m])) > 0",
            "requests kept failing and were put aside",
        ),
        _alert(
            "SchedulerWithoutLeader", CRITICAL, "2m",
            # A sum over no schedulers at all is nothing, and not 0.
            f"sum by (namespace) ({LEADING}) != 1"
            f" or (group by (namespace) ({UP}) unless group by (namespace) ({LEADING}))",
            "not exactly one scheduler leads: nothing is asked for, nothing is trimmed",
        ),
        _alert(
            "SchedulerStuck", CRITICAL, "10m",
            "sum by (namespace) (rate(tierlog_scheduler_passes_total[5m])) == 0",
            "no scheduler has passed over the streams",
        ),
        _alert(
            "UnexpectedErrors", WARNING, "0m",
            "increase(tierlog_scheduler_unexpected_errors_total[1h]) > 0 "
            "or increase(tierlog_offloader_unexpected_errors_total[1h]) > 0",
            "the scheduler or an offloader met an error that nobody foresaw",
        ),
        _alert(
            "UploadsUnseen", WARNING, "0m",
            "increase(tierlog_offload_uploads_unseen_total[1h]) > 0",
            "open uploads can't be looked for: some may be left in the bucket, and cost",
        ),
    ),
    "tierlog-serving": (
        _alert(
            "Down", CRITICAL, "2m", " or ".join([f"{UP} == 0", *map(_none_of, COMPONENTS)]),
            "a process of Tierlog gives no metrics, or there is none of its kind",
        ),
        _alert(
            "JournalSlow", WARNING, "10m", f"rate({FSYNC}_sum[5m]) / rate({FSYNC}_count[5m]) > 0.1",
            "a journal's syncs take more than 100 ms on average, and so do appends",
        ),
        _alert(
            "RecoveriesWaiting", WARNING, "10m", "tierlog_ingest_recoveries_waiting > 0",
            "ledgers of an owner that crashed could not be closed yet",
        ),
        _alert(
            "ReaderCacheFull", WARNING, "15m",
            'increase(tierlog_cache_refusals_total{who="wanted"}[10m]) > 0',
            "a reader's cache has no room for what readers wait for",
        ),
        _alert(
            "CacheThrash", WARNING, "30m",
            f"{HITS} / ({HITS} + rate(tierlog_cache_miss_bytes_total[15m])) < 0.2"
            " and sum without (reason)"
            ' (rate(tierlog_cache_evictions_total{reason!="idle"}[15m])) > 1',
            "a reader's cache gives room away before what lies there is read",
        ),
        _alert(
            "CacheEvictsEarly", WARNING, "15m",
            "increase(tierlog_cache_early_evictions_total[15m]) > 0",
            "a reader's cache gives room away although its entries are below the target",
        ),
    ),
}  # fmt: skip

ALERTS: Final = tuple(alert for group in GROUPS.values() for alert in group)


def alerts_file() -> str:
    """Return the rule file: YAML, every text of it quoted as JSON is."""
    lines = ["# Generated by `make deploy-files` from tools/monitoring/alerts.py.", "groups:"]
    for group, alerts in GROUPS.items():
        lines += [f"  - name: {group}", "    rules:"]
        for alert in alerts:
            lines += [
                f"      - alert: {alert.name}",
                f"        expr: {json.dumps(alert.expr)}",
                f"        for: {alert.lasting}",
                "        labels:",
                f"          severity: {alert.severity}",
                "        annotations:",
                f"          summary: {json.dumps(alert.summary)}",
                f"          runbook: docs/runbooks/{alert.page}",
            ]
    return "\n".join(lines) + "\n"
