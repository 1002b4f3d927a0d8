"""``tierlog spark export`` and ``exported``: streams as Parquet files, and which files count."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from tierlog.cli.output import Output, OutputOption, print_rows, say, size_text
from tierlog.cli.session import command
from tierlog.model.errors import RefusedError
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

if TYPE_CHECKING:
    from tierlog_spark.jobs.export import ExportOptions
    from tierlog_spark.jobs.export.values import ValueSchema

COLUMNS: Final = {
    "stream": None,
    "from": None,
    "to": None,
    "entries": None,
    "source_bytes": size_text,
    "events": None,
    "bad": None,
    "files": None,
    "file_bytes": size_text,
    "commits": None,
    "removed": None,
    "trimmed_unread": None,
    "error": None,
}
FILE_COLUMNS: Final = {"path": None, "commit": None, "rows": None, "bytes": size_text}

Streams = Annotated[list[str], typer.Argument(help="Streams; of a partitioned one all partitions.")]


@command
def export(  # noqa: PLR0913 - options of a command
    streams: Streams,
    *,
    to: Annotated[str, typer.Option("--to", help="A folder, or s3://BUCKET/PREFIX.")],
    json_schema: Annotated[
        str | None,
        typer.Option(help="Payloads are JSON with these fields: 'id BIGINT, tags ARRAY<STRING>'."),
    ] = None,
    protobuf: Annotated[
        Path | None,
        typer.Option(help="Payloads are protobuf: a file of descriptors, with its imports."),
    ] = None,
    message: Annotated[
        str | None, typer.Option(help="The full name of their message, with --protobuf.")
    ] = None,
    payload: Annotated[
        bool, typer.Option("--payload/--no-payload", help="Keep the bytes beside the values.")
    ] = True,
    keep_bad: Annotated[
        bool,
        typer.Option("--keep-bad", help="Events not of the schema get null, and don't end it."),
    ] = False,
    skip_trimmed: Annotated[
        bool,
        typer.Option("--skip-trimmed", help="Go on behind what was trimmed or deleted unexported."),
    ] = False,
    batch: Annotated[str, typer.Option(help="Bytes of entries in one commit, about.")] = "1G",
    file_size: Annotated[
        str, typer.Option(help="Bytes that a task reads, and holds for a file, about.")
    ] = "128M",
    dry_run: DryRun = False,
    cores: Cores = CORES,
    memory: Memory = MEMORY,
    metrics: Metrics = None,
    output: OutputOption = Output.TABLE,
    quiet: Quiet = False,
) -> None:
    """Write what is new in streams to Parquet files by day, each event once.

    It goes on where the run before ended, however that ended. Read the files that exported lists.
    Exits with 5 when one of several streams could not be exported; its row says why.
    """
    from tierlog.cli.objects import load_s3
    from tierlog.cli.policy import parse_size
    from tierlog_spark.jobs.export import ExportOptions
    from tierlog_spark.jobs.export import export as export_streams

    options = ExportOptions(
        streams=tuple(streams),
        to=to,
        s3=load_s3().s3,
        schema=_schema(json_schema, protobuf, message),
        payload=payload,
        keep_bad=keep_bad,
        skip_trimmed=skip_trimmed,
        batch_bytes=parse_size(batch),
        file_bytes=parse_size(file_size),
    )
    _check(options)
    run_job(
        lambda run: export_streams(run, options),
        columns=COLUMNS,
        dry_run=dry_run,
        cores=cores,
        memory=memory,
        metrics=metrics,
        output=output,
        quiet=quiet,
        ends={"failed": EXIT_INCOMPLETE},
    )


@command
def exported(
    stream: Annotated[str, typer.Argument(help="A stream that was exported.")],
    *,
    source: Annotated[str, typer.Option("--from", help="Where it was exported to.")],
    since: Annotated[int, typer.Option(min=0, help="Only of commits behind this one.")] = 0,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read each file, and compare its SHA-256.")
    ] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """List the files of an export that count: those that its commits name. Needs no Spark."""
    from tierlog.cli.objects import load_s3
    from tierlog_spark.jobs.export import committed_files

    found = committed_files(source, stream, load_s3().s3, since=since, verify=verify)
    print_rows([asdict(one) for one in found], FILE_COLUMNS, output)
    if output is Output.TABLE:
        say(f"{len(found)} files, {sum(one.rows for one in found)} events")


def _check(options: "ExportOptions") -> None:
    """Refuse what is wrong with an export before Spark starts."""
    from tierlog_spark.jobs.export.targets import target_of

    options.names()
    target_of(options.to, options.s3)


def _schema(
    json_schema: str | None, protobuf: Path | None, message: str | None
) -> "ValueSchema | None":
    """Return the schema that the options say."""
    from tierlog_spark.jobs.export.values import JsonSchema

    if (protobuf is None) != (message is None):
        raise RefusedError("--protobuf and --message belong together", remedy="Give both")
    if protobuf is None or message is None:
        return None if json_schema is None else JsonSchema(json_schema)
    if json_schema is not None:
        raise RefusedError("there are two schemas", remedy="Give --json-schema or --protobuf")
    from tierlog_spark.jobs.export.protobufs import ProtobufSchema

    return ProtobufSchema(protobuf.read_bytes(), message)
