"""``tierlog spark iceberg``: what was exported, into a table of Iceberg."""

from typing import Annotated, Final

import typer

from tierlog.cli.output import Output, OutputOption, size_text
from tierlog.cli.session import command
from tierlog_spark.cli.running import DryRun, Metrics, Quiet, check_metrics, job_progress, tell

COLUMNS: Final = {
    "stream": None,
    "table": None,
    "from": None,
    "to": None,
    "files": None,
    "events": None,
    "file_bytes": size_text,
    "commits": None,
}


@command
def iceberg(
    stream: Annotated[str, typer.Argument(help="A stream that was exported.")],
    *,
    source: Annotated[str, typer.Option("--from", help="Where it was exported to.")],
    table: Annotated[str, typer.Option("--table", help="NAMESPACE.NAME; made if it is not there.")],
    catalog: Annotated[
        str | None,
        typer.Option("--catalog", help="A name in PyIceberg's configuration; else its default."),
    ] = None,
    dry_run: DryRun = False,
    metrics: Metrics = None,
    output: OutputOption = Output.TABLE,
    quiet: Quiet = False,
) -> None:
    """Add exported files that an Iceberg table lacks to it, each once, as they are.

    It goes on where the table is, whatever was killed. Needs tierlog-spark[iceberg], and no Spark.
    """
    from tierlog.cli.objects import load_s3
    from tierlog_spark.jobs.frame import Run
    from tierlog_spark.jobs.iceberg import IcebergOptions, fill_table

    check_metrics(metrics)
    options = IcebergOptions(
        stream=stream, source=source, table=table, s3=load_s3().s3, catalog=catalog
    )
    with job_progress(quiet=quiet) as progress:
        run = Run(dry_run=dry_run, progress=progress)
        report = fill_table(run, options)
    tell(run, report, columns=COLUMNS, metrics=metrics, output=output, quiet=quiet)
