"""``tierlog spark bulk-offload``: a back-fill of sealed ledgers by executors."""

from typing import Annotated, Final

import typer

from tierlog.cli.output import Output, OutputOption, size_text
from tierlog.cli.session import command
from tierlog_spark.cli.running import (
    CORES,
    EXIT_INCOMPLETE,
    MEMORY,
    Cores,
    DryRun,
    Memory,
    Metrics,
    Quiet,
    run_job,
)
from tierlog_spark.cli.usage import Streams, stream_names

COLUMNS: Final = {
    "stream": None,
    "ledger_id": None,
    "outcome": None,
    "bytes": size_text,
    "seconds": None,
    "error": None,
}


@command
def bulk_offload(
    *,
    stream: Streams = None,
    older_than: Annotated[
        str | None, typer.Option(help="Only ledgers closed so long ago, as 1d.")
    ] = None,
    bytes_per_s: Annotated[
        str | None, typer.Option(help="What one executor sends a second, at most, as 50MB.")
    ] = None,
    task_bytes: Annotated[str, typer.Option(help="What one task offloads, about.")] = "1GB",
    dry_run: DryRun = False,
    cores: Cores = CORES,
    memory: Memory = MEMORY,
    metrics: Metrics = None,
    output: OutputOption = Output.TABLE,
    quiet: Quiet = False,
) -> None:
    """Offload every sealed ledger that has no complete copy, whatever its stream's thresholds.

    Exits with 5 when not all of them are complete at the end; run it again. Streams that are
    paused are left alone, and one that is named is told, with 5 too.
    """
    from tierlog.cli.cost import positive
    from tierlog.cli.objects import load_s3
    from tierlog.cli.policy import parse_size, parse_time
    from tierlog.client.endpoints import with_zookeeper
    from tierlog.model.errors import RefusedError
    from tierlog.model.policy import NEVER
    from tierlog.wiring.build import system_clock
    from tierlog_spark.jobs.bulk_offload import BackFill
    from tierlog_spark.jobs.bulk_offload import bulk_offload as job

    before = None
    if older_than is not None:
        age_ms = parse_time(older_than)
        if age_ms == NEVER:
            raise RefusedError(
                "no ledger was closed never ago", remedy="Give --older-than as 1d, or leave it out"
            )
        before = system_clock().wall_ms() - age_ms
    settings = with_zookeeper(load_s3())
    wish = BackFill(
        streams=tuple(stream_names(stream)),
        closed_before_ms=before,
        bytes_per_s=0
        if bytes_per_s is None
        else positive(parse_size(bytes_per_s), "--bytes-per-s"),
        task_bytes=positive(parse_size(task_bytes), "--task-bytes"),
    )
    run_job(
        lambda run: job(run, settings, wish),
        columns=COLUMNS,
        dry_run=dry_run,
        cores=cores,
        memory=memory,
        metrics=metrics,
        output=output,
        quiet=quiet,
        ends={"incomplete": EXIT_INCOMPLETE, "streams_failed": EXIT_INCOMPLETE},
    )
