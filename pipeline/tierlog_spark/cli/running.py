"""What every job's command shares: its options, the session around it, and how it is told."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tierlog.cli.output import Columns, Output, print_json, print_rows, progress_bar, say
from tierlog.cli.scrub import EXIT_FINDINGS, EXIT_INCOMPLETE
from tierlog.cli.session import Quiet

if TYPE_CHECKING:
    from tierlog.ports.progress import Progress
    from tierlog_spark.jobs.frame import JobReport, JobRun, Run

DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done; change nothing.")]
Cores = Annotated[
    int, typer.Option(min=0, help="Cores of this machine, 0: all; under spark-submit unused.")
]
Memory = Annotated[str, typer.Option(help="Memory of Spark's JVM here; under spark-submit unused.")]
Metrics = Annotated[
    Path | None,
    typer.Option("--metrics", help="Write the counts to this file, in Prometheus's format."),
]
CORES = 0
MEMORY = "1G"
MEMORY_MB_MIN = 512
"""With less Spark's JVM ends at its start."""
NO_ENDS: Mapping[str, int] = {}

__all__ = [
    "CORES", "EXIT_FINDINGS", "EXIT_INCOMPLETE", "MEMORY", "Cores", "DryRun", "Memory", "Metrics",
    "Quiet", "check_metrics", "job_progress", "run_job", "tell",
]  # fmt: skip


def run_job(
    work: "Callable[[JobRun], JobReport]",
    *,
    columns: Columns,
    dry_run: bool,
    cores: int,
    memory: str,
    metrics: Path | None,
    output: Output,
    quiet: bool,
    ends: Mapping[str, int] = NO_ENDS,
) -> None:
    """Run a job in a session of its own, and tell its report."""
    from tierlog.cli.policy import parse_size
    from tierlog.model.errors import RefusedError
    from tierlog.model.policy import MIB
    from tierlog_spark.jobs.frame import JobRun, plain_spark_errors
    from tierlog_spark.jobs.session import job_session

    memory_mb = parse_size(memory) // MIB
    if memory_mb < MEMORY_MB_MIN:
        raise RefusedError(
            f"--memory {memory} is too little for Spark's JVM",
            remedy=f"Give {MEMORY_MB_MIN}M or more",
        )
    check_metrics(metrics)
    cores = cores or os.cpu_count() or 1
    with (
        job_session(cores=cores, memory_mb=memory_mb) as spark,
        job_progress(quiet=quiet) as progress,
        plain_spark_errors(),
    ):
        run = JobRun(spark=spark, dry_run=dry_run, progress=progress)
        report = work(run)
    tell(run, report, columns=columns, metrics=metrics, output=output, quiet=quiet, ends=ends)


def check_metrics(metrics: Path | None) -> None:
    """Refuse a file that can't be written in the end, as far as that is known before the work."""
    from tierlog.model.errors import RefusedError

    if metrics is None:
        return
    if not metrics.parent.is_dir():
        raise RefusedError(
            f"--metrics {metrics}: there is no folder {metrics.parent}",
            remedy="Make it, or name a file in one that is there",
        )
    if metrics.is_dir():
        raise RefusedError(
            f"--metrics {metrics}: that is a folder", remedy="Name a file in it, as job.prom"
        )


def tell(
    run: "Run",
    report: "JobReport",
    *,
    columns: Columns,
    metrics: Path | None,
    output: Output,
    quiet: bool,
    ends: Mapping[str, int] = NO_ENDS,
) -> None:
    """Show a report, write its metrics, and exit as its counts say.

    ``ends``: the exit codes of counts that are not 0; the first one that is not holds.
    """
    from tierlog_spark.jobs.frame import write_metrics

    code = next((code for name, code in ends.items() if report.counts.get(name)), 0)
    # First: no report of hours may be lost to a file that can't be written.
    show_report(report, columns, output, quiet=quiet)
    if metrics is not None:
        try:
            write_metrics(report, metrics, wall_ms=run.clock.wall_ms(), exit_code=code)
        except OSError as error:
            if not code:
                raise
            # What was found goes first: by another code a scheduled job would only run again.
            say(f"error: --metrics {metrics}: {error}")
    if code:
        raise typer.Exit(code)


def show_report(report: "JobReport", columns: Columns, output: Output, *, quiet: bool) -> None:
    """Print a report: rows as a table and counts below, or all of it as JSON."""
    if output is not Output.TABLE:
        print_json(report.document(), indent=output is Output.JSON)
        return
    if report.rows:
        print_rows(report.rows, columns, output)
    would = "would be: " if report.dry_run else ""
    counts = ", ".join(f"{value:g} {name}" for name, value in report.counts.items())
    say(f"{report.job}: {would}{counts}", quiet=quiet)


@contextlib.contextmanager
def job_progress(*, quiet: bool) -> "Iterator[Progress]":
    """Give a bar on a terminal; elsewhere a line for each step, as a scheduled job's log has it."""
    if quiet or sys.stderr.isatty():
        with progress_bar(quiet=quiet) as progress:
            yield progress
        return

    def line(what: str, done: int, total: int | None) -> None:
        say(f"{what}: {done}" + ("" if total is None else f" of {total}"))

    yield line
