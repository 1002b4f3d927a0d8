"""The four Grafana dashboards, as code: is data safe, does it move, can it be read.

Owns rows, panels and their expressions; ``boards()`` gives the JSON that Grafana takes. Generated
into the chart's folder ``dashboards``, which the compose file mounts too.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

WIDTH: Final = 24
HEIGHT: Final = 8
SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
OF: Final = '{namespace=~"$namespace"}'
TIER: Final = "sum by (tier) (rate(tierlog_{what}_total{of}[5m]))"
QUANTILE: Final = (
    "histogram_quantile({share}, sum by (le) "
    "(rate(tierlog_offload_attempt_duration_seconds_bucket{of}[15m])))"
)
HITS: Final = (
    f"sum(rate(tierlog_cache_hit_bytes_total{OF}[5m])) / "
    f"(sum(rate(tierlog_cache_hit_bytes_total{OF}[5m])) + "
    f"sum(rate(tierlog_cache_miss_bytes_total{OF}[5m])))"
)
RUNS: Final = (
    f"sum(rate(tierlog_cache_runs_read_total{OF}[5m])) / "
    f"sum(rate(tierlog_cache_entries_read_total{OF}[5m]))"
)
FSYNC: Final = "tierlog_journal_fsync_duration_seconds"


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One picture: lines over time, or one number with colours."""

    title: str
    exprs: tuple[tuple[str, str], ...]
    unit: str = "short"
    red_from: float | None = None
    is_number: bool = False


def lines(title: str, unit: str, *exprs: tuple[str, str]) -> Panel:
    """Return lines over time; each expression has a legend."""
    return Panel(title=title, unit=unit, exprs=exprs)


def number(title: str, expr: str, *, unit: str = "short", red_from: float | None = None) -> Panel:
    """Return one number, red from a value on."""
    exprs = ((expr, ""),)
    return Panel(title=title, unit=unit, exprs=exprs, red_from=red_from, is_number=True)


def rate(name: str, by: str = "") -> str:
    """Return the rate of a counter, summed."""
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate({name}{OF}[5m]))"


def slowest(name: str, by: str = "") -> str:
    """Return what 99 of 100 do not exceed, of a histogram."""
    grouped = f"le, {by}" if by else "le"
    return f"histogram_quantile(0.99, sum by ({grouped}) (rate({name}_bucket{OF}[5m])))"


def top(name: str, function: str = "max") -> str:
    """Return a gauge over all processes."""
    return f"{function}({name}{OF})"


Rows = tuple[tuple[str, tuple[Panel, ...]], ...]

OVERVIEW: Final[Rows] = (
    (
        "Is my data safe?",
        (
            number(
                "Ledgers that lack copies", top("tierlog_replication_queue_ledgers"), red_from=1
            ),
            number("Nodes with damage", top("tierlog_storage_limbo", "sum"), red_from=1),
            number("Nodes that are read-only", top("tierlog_storage_read_only", "sum"), red_from=1),
            number("Faults in the bucket", top("tierlog_scheduler_scrub_findings"), red_from=1),
        ),
    ),
    (
        "Is it moving?",
        (
            number(
                "Late for S3", top("tierlog_offload_overdue_seconds"), unit="s", red_from=6 * 3600
            ),
            number(
                "Oldest byte that is not in S3",
                top("tierlog_offload_oldest_pending_age_seconds"),
                unit="s",
            ),
            number(
                "Dead letters, last day",
                f"sum(increase(tierlog_dlq_messages_total{OF}[1d]))",
                red_from=1,
            ),
            number("Schedulers that lead", top("tierlog_scheduler_leading", "sum")),
            lines(
                "Offloads by outcome",
                "ops",
                (rate("tierlog_offload_attempts_total", "outcome"), "{{outcome}}"),
            ),
        ),
    ),
    (
        "Can it be read?",
        (
            lines(
                "Bytes served by tier", "Bps", (TIER.format(what="read_bytes", of=OF), "{{tier}}")
            ),
            lines("Reads by tier", "reqps", (TIER.format(what="reads", of=OF), "{{tier}}")),
            lines(
                "Journal: bytes written",
                "Bps",
                (rate("tierlog_journal_written_bytes_total", "pod"), "{{pod}}"),
            ),
        ),
    ),
)

OFFLOAD: Final[Rows] = (
    (
        "How far behind",
        (
            lines(
                "Late for S3, by stream",
                "s",
                (f"topk(10, tierlog_stream_offload_overdue_seconds{OF})", "{{stream}}"),
            ),
            lines(
                "Oldest byte that is not in S3, by stream",
                "s",
                (f"topk(10, tierlog_stream_offload_oldest_pending_age_seconds{OF})", "{{stream}}"),
            ),
            lines(
                "Requests in hand",
                "short",
                (top("tierlog_offloader_requests_in_hand", "sum"), "in hand"),
            ),
            lines("Bytes that are not in S3", "bytes", (top("tierlog_offload_lag_bytes"), "")),
            lines("Ledgers", "short", (f"max by (state) (tierlog_ledgers{OF})", "{{state}}")),
            lines(
                "How long a copy takes",
                "s",
                *(
                    (
                        QUANTILE.format(share=share, of=OF),
                        name,
                    )
                    for share, name in ((0.5, "half of them"), (0.99, "99 of 100"))
                ),
            ),
        ),
    ),
    (
        "The object store",
        (
            lines(
                "Requests by cause and operation",
                "reqps",
                (rate("tierlog_s3_requests_total", "cause, operation"), "{{cause}} {{operation}}"),
            ),
            lines(
                "99 of 100 requests take",
                "s",
                (slowest("tierlog_s3_request_duration_seconds", "operation"), "{{operation}}"),
            ),
            lines(
                "Requests that failed",
                "ops",
                (
                    f'sum by (code) (rate(tierlog_s3_answers_total{{code!="ok",{OF[1:]}[5m]))',
                    "{{code}}",
                ),
            ),
            lines("Bytes sent", "Bps", (rate("tierlog_s3_sent_bytes_total", "cause"), "{{cause}}")),
            lines(
                "Bytes received",
                "Bps",
                (rate("tierlog_s3_received_bytes_total", "cause"), "{{cause}}"),
            ),
        ),
    ),
    (
        "The scheduler",
        (
            lines(
                "A pass over all streams",
                "s",
                (top("tierlog_scheduler_pass_duration_seconds"), "last pass"),
            ),
            lines("Passes", "ops", (rate("tierlog_scheduler_passes_total", "pod"), "{{pod}}")),
            number("Streams", top("tierlog_scheduler_streams")),
            number(
                "Streams of which nothing is deleted",
                top("tierlog_scheduler_deletions_stopped_streams"),
                red_from=1,
            ),
            lines(
                "Deletions are behind for",
                "s",
                (top("tierlog_scheduler_deletions_behind_seconds"), "no pass did all"),
                (top("tierlog_scheduler_deletions_failing_seconds"), "one fails each time"),
            ),
        ),
    ),
)

READER: Final[Rows] = (
    (
        "What is served",
        (
            lines("Bytes by tier", "Bps", (TIER.format(what="read_bytes", of=OF), "{{tier}}")),
            lines("Entries by tier", "ops", (TIER.format(what="read_entries", of=OF), "{{tier}}")),
            lines("Reads by tier", "reqps", (TIER.format(what="reads", of=OF), "{{tier}}")),
            lines(
                "99 of 100 reads take",
                "s",
                (slowest("tierlog_read_duration_seconds", "tier"), "{{tier}}"),
                (slowest("tierlog_index_read_duration_seconds"), "index"),
            ),
        ),
    ),
    (
        "The cache",
        (
            lines(
                "How full",
                "bytes",
                (f"sum by (pod, state) (tierlog_cache_bytes{OF})", "{{pod}} {{state}}"),
                (f"tierlog_cache_limit_bytes{OF}", "{{pod}} limit"),
            ),
            lines(
                "Share of bytes that were in the cache",
                "percentunit",
                (
                    HITS,
                    "hits",
                ),
            ),
            lines(
                "Evicted, by who asked for room",
                "short",
                (rate("tierlog_cache_evictions_total", "reason"), "{{reason}}"),
            ),
            lines(
                "No room",
                "short",
                (rate("tierlog_cache_refusals_total", "who"), "{{who}}"),
            ),
            lines(
                "Runs that an entry lies in",
                "short",
                (RUNS, "runs"),
            ),
        ),
    ),
    (
        "Ranges of objects",
        (
            lines(
                "Bytes fetched",
                "Bps",
                (rate("tierlog_reader_range_bytes_fetched_total"), "fetched"),
            ),
            number(
                "Ranges that differed",
                top("tierlog_reader_ranges_differed_total", "sum"),
                red_from=1,
            ),
        ),
    ),
)

INGEST: Final[Rows] = (
    (
        "The journal",
        (
            lines(
                "A sync, on average",
                "s",
                (f"rate({FSYNC}_sum{OF}[5m]) / rate({FSYNC}_count{OF}[5m])", "{{pod}}"),
            ),
            lines(
                "99 of 100 appends take",
                "s",
                (slowest("tierlog_append_duration_seconds", "pod"), "{{pod}}"),
            ),
            lines("Bytes that wait", "bytes", (f"tierlog_journal_queue_bytes{OF}", "{{pod}}")),
            lines(
                "Bytes written",
                "Bps",
                (f"rate(tierlog_journal_written_bytes_total{OF}[5m])", "{{pod}}"),
            ),
            lines(
                "Slow syncs",
                "ops",
                (f"rate(tierlog_journal_slow_fsyncs_total{OF}[5m])", "{{pod}}"),
            ),
        ),
    ),
    (
        "Disks",
        (
            lines(
                "Free",
                "percentunit",
                (
                    f"tierlog_disk_free_bytes{OF} / tierlog_disk_total_bytes{OF}",
                    "{{pod}} {{directory}}",
                ),
            ),
            lines("Entry logs", "bytes", (f"tierlog_entry_log_bytes{OF}", "{{pod}}")),
            lines(
                "Compaction: bytes freed",
                "Bps",
                (f"rate(tierlog_compaction_freed_bytes_total{OF}[15m])", "{{pod}}"),
            ),
        ),
    ),
    (
        "Streams and copies",
        (
            lines("Streams owned", "short", (f"tierlog_ingest_streams{OF}", "{{pod}}")),
            lines("Appends that wait", "short", (f"tierlog_ingest_appends_waiting{OF}", "{{pod}}")),
            lines(
                "Ledgers that lack copies",
                "short",
                (top("tierlog_replication_queue_ledgers"), "queue"),
            ),
            lines(
                "Copies made anew",
                "Bps",
                (f"rate(tierlog_replication_copied_bytes_total{OF}[5m])", "{{pod}}"),
            ),
        ),
    ),
)

BOARDS: Final[dict[str, tuple[str, Rows]]] = {
    "overview": ("Tierlog: overview", OVERVIEW),
    "offload": ("Tierlog: offload", OFFLOAD),
    "reader": ("Tierlog: reader and cache", READER),
    "ingest": ("Tierlog: ingest and journal", INGEST),
}


def boards() -> dict[str, str]:
    """Return the JSON of each board, by file name."""
    return {
        f"tierlog-{name}.json": json.dumps(board(name), indent=1, ensure_ascii=False) + "\n"
        for name in BOARDS
    }


def board(name: str) -> dict[str, Any]:
    """Return one board as Grafana takes it."""
    title, rows = BOARDS[name]
    panels: list[dict[str, Any]] = []
    y = 0
    for heading, row in rows:
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": heading,
                "collapsed": False,
                "panels": [],
                "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1},
            }
        )
        width = WIDTH // len(row)
        for number_in_row, one in enumerate(row):
            place = {"x": number_in_row * width, "y": y + 1, "w": width, "h": HEIGHT}
            panels.append(_panel(one, len(panels) + 1, place))
        y += 1 + HEIGHT
    return {
        "uid": f"tierlog-{name}",
        "title": title,
        "tags": ["tierlog"],
        "editable": False,
        "schemaVersion": 39,
        "time": {"from": "now-6h", "to": "now"},
        "refresh": "30s",
        "templating": {"list": [_datasource(), _namespace()]},
        "panels": panels,
    }


def _panel(panel: Panel, number_of: int, place: dict[str, int]) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if panel.red_from is not None:
        steps.append({"color": "red", "value": panel.red_from})
    defaults: dict[str, Any] = {
        "unit": panel.unit,
        "thresholds": {"mode": "absolute", "steps": steps},
    }
    if not panel.is_number:
        defaults["min"] = 0
    return {
        "id": number_of,
        "type": "stat" if panel.is_number else "timeseries",
        "title": panel.title,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + index), "expr": expr, "legendFormat": legend}
            for index, (expr, legend) in enumerate(panel.exprs)
        ],
    }


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Source"}


def _namespace() -> dict[str, Any]:
    # `.*` also matches where there is no such label, as in docker-compose.yml.
    return {
        "name": "namespace",
        "type": "query",
        "label": "Namespace",
        "datasource": SOURCE,
        "query": "label_values(tierlog_scheduler_leading, namespace)",
        "refresh": 2,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    }
