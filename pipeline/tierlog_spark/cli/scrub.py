"""``tierlog spark scrub``: every object of the bucket verified, by executors."""

from typing import Annotated, Final

import typer

from tierlog.cli.output import Output, OutputOption
from tierlog.cli.session import command
from tierlog_spark.cli.running import (
    CORES,
    EXIT_FINDINGS,
    EXIT_INCOMPLETE,
    MEMORY,
    Cores,
    DryRun,
    Memory,
    Metrics,
    Quiet,
    run_job,
)

COLUMNS: Final = {
    "kind": None,
    "stream": None,
    "ledger_id": None,
    "uuid": None,
    "cause": None,
    "remedy": None,
}


@command
def scrub(
    *,
    deep: Annotated[
        bool, typer.Option("--deep/--no-deep", help="Read all data and compare, or lengths only.")
    ] = True,
    bytes_per_s: Annotated[
        str | None, typer.Option(help="What one executor reads a second, at most, as 50MB.")
    ] = None,
    dry_run: DryRun = False,
    cores: Cores = CORES,
    memory: Memory = MEMORY,
    metrics: Metrics = None,
    output: OutputOption = Output.TABLE,
    quiet: Quiet = False,
) -> None:
    """Compare every object of the bucket with index, side object, manifests and metadata.

    Repairs nothing: write the report with -o json, and give it to tierlog scrub --repair
    --from-report. Exits with 6 when anything is wrong, with 5 when not all could be looked at.
    """
    from tierlog.cli.cost import positive
    from tierlog.cli.objects import load_s3
    from tierlog.cli.policy import parse_size
    from tierlog.client.endpoints import with_zookeeper
    from tierlog_spark.jobs.scrub import scrub as job

    settings = with_zookeeper(load_s3())
    pace = 0 if bytes_per_s is None else positive(parse_size(bytes_per_s), "--bytes-per-s")
    run_job(
        lambda run: job(run, settings, deep=deep, bytes_per_s=pace),
        columns=COLUMNS,
        dry_run=dry_run,
        cores=cores,
        memory=memory,
        metrics=metrics,
        output=output,
        quiet=quiet,
        ends={"remaining": EXIT_FINDINGS, "unread": EXIT_INCOMPLETE},
    )
