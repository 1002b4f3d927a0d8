"""What every job has: where it runs, what it tells meanwhile, and its report (no PySpark here).

Owns the run, the report, its metrics, and errors of executors told as those of the driver. Does
not own the session (``session``), nor how a report is shown (``tierlog_spark.cli.running``).
"""

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from tierlog.model.errors import REASON_NOTE, REMEDY_NOTE, Reason, TierlogError, from_reason
from tierlog.model.ids import StreamName
from tierlog.ports.clock import Clock
from tierlog.ports.ids import Ids
from tierlog.ports.progress import Progress
from tierlog.wiring.build import system_clock, system_ids

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Row = TypeVar("Row")
METRIC: Final = "tierlog_spark_job"


def tell_nobody(what: str, done: int, total: int | None) -> None:
    """Take progress that nobody watches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of a job. ``dry_run``: say what would be done, and change nothing."""

    dry_run: bool = False
    progress: Progress = tell_nobody
    clock: Clock = field(default_factory=system_clock)
    ids: Ids = field(default_factory=system_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRun(Run):
    """One run of a job that needs Spark."""

    spark: "SparkSession"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReport:
    """What a job did, or with a dry run would do. ``counts`` are its metrics; ``rows`` a table.

    No count may be named ``job``, ``dry_run``, ``rows`` or ``exit_code``.
    """

    job: str
    dry_run: bool
    counts: Mapping[str, int | float]
    rows: Sequence[Mapping[str, Any]] = ()

    def document(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {
            "job": self.job,
            "dry_run": self.dry_run,
            **self.counts,
            "rows": [dict(row) for row in self.rows],
        }


class Unread(NamedTuple):
    """A stream that a job leaves out: what says what it has can't be read."""

    stream: StreamName
    error: str


def without_unread(rows: Iterable[Row | Unread]) -> tuple[list[Row], list[Unread]]:
    """Part the rows of what could be read from the streams of which nothing could."""
    found: list[Row] = []
    unread: list[Unread] = []
    for row in rows:
        if isinstance(row, Unread):
            unread.append(row)
        else:
            found.append(row)
    return found, sorted(unread)


def write_metrics(report: JobReport, path: Path, *, wall_ms: int, exit_code: int = 0) -> None:
    """Write a report's counts in Prometheus's text format, as a whole or not at all.

    A node exporter's textfile collector reads such files; a dry run has nothing to count. A run
    that came to its end may have left something undone: its exit code says so beside the time.
    """
    from prometheus_client import CollectorRegistry, Gauge, write_to_textfile  # noqa: PLC0415

    if report.dry_run:
        return
    registry = CollectorRegistry()
    counts = {**report.counts, "exit_code": exit_code, "ended_timestamp_seconds": wall_ms / 1000}
    for name, value in counts.items():
        text = f"{name.replace('_', ' ')} of the newest run that came to its end"
        gauge = Gauge(f"{METRIC}_{name}", text, ["job"], registry=registry)
        gauge.labels(report.job).set(value)
    write_to_textfile(str(path), registry)


# What another process prints of an exception: its class with the module, its text, its notes.
_RAISED: Final = re.compile(
    r"^[ \t|]*tierlog\w*\.[\w.]+: (?P<message>.+?)\n"
    rf"[ |]*{REASON_NOTE}(?P<reason>\w+)(?:\n[ |]*{REMEDY_NOTE}(?P<remedy>[^\n]+))?",
    re.MULTILINE | re.DOTALL,
)


def told_by_executor(text: str) -> TierlogError | None:
    """Return the error of ours that another process raised, out of what Spark says of it."""
    told: TierlogError | None = None
    # The last one was raised from those before it.
    for whole, reason, noted in _RAISED.findall(text):
        if reason in Reason.__members__:
            message = whole.strip()
            remedy = noted if message.endswith(noted) else ""
            told = from_reason(Reason(reason), message.removesuffix(f". {remedy}"), remedy=remedy)
    return told


@contextlib.contextmanager
def plain_spark_errors() -> Iterator[None]:
    """Raise as itself what an executor raised of ours, instead of Spark's pages about it."""
    from py4j.protocol import Py4JError  # noqa: PLC0415
    from pyspark.errors import PySparkException  # noqa: PLC0415

    try:
        yield
    except (PySparkException, Py4JError) as error:
        told = told_by_executor(str(error))
        if told is None:
            raise
        raise told from error
