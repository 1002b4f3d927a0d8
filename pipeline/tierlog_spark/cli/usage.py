"""``tierlog spark usage`` and ``cost``: what lies in a bucket, and what it costs."""

from typing import TYPE_CHECKING, Annotated, Final

import typer

from tierlog.cli.cost import AMOUNT_MAX
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

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tierlog.model.ids import StreamName

Streams = Annotated[
    list[str] | None,
    typer.Option("--stream", help="Only this stream, or its partitions; repeat it."),
]
Time = Annotated[str | None, typer.Option(help="As 10m, 4h, 7d; never.")]
Size = Annotated[str | None, typer.Option(help="As 512M, 100G; never.")]
Bytes = Annotated[str | None, typer.Option(help="As 64M, 1G.")]

USAGE_COLUMNS: Final = {
    "stream": None,
    "kind": None,
    "age": None,
    "ledgers": None,
    "entries": None,
    "objects": None,
    "bytes": size_text,
    "requests": None,
    "error": None,
}


def _price_text(value: float) -> str:
    return f"{value:.6f}"


COST_COLUMNS: Final = {
    "stream": None,
    "bytes": size_text,
    "price_of_bytes": _price_text,
    "bytes_per_day": size_text,
    "if_tier1_bytes": size_text,
    "if_tier2_bytes": size_text,
    "if_requests": None,
    "if_price": _price_text,
    "error": None,
}

ENDS: Final = {"streams_failed": EXIT_INCOMPLETE}


@command
def usage(
    *,
    stream: Streams = None,
    dry_run: DryRun = False,
    cores: Cores = CORES,
    memory: Memory = MEMORY,
    metrics: Metrics = None,
    output: OutputOption = Output.TABLE,
    quiet: Quiet = False,
) -> None:
    """Show bytes, objects and requests of the bucket, by stream, kind and age.

    Requests are those that making the objects took. Reads of them are counted by the services:
    tierlog cost show.
    """
    from tierlog.cli.objects import load_s3
    from tierlog_spark.jobs.usage import usage as job

    settings, names = load_s3(), stream_names(stream)
    run_job(
        lambda run: job(run, settings.s3, streams=names),
        columns=USAGE_COLUMNS,
        dry_run=dry_run,
        cores=cores,
        memory=memory,
        metrics=metrics,
        output=output,
        quiet=quiet,
        ends=ENDS,
    )


@command
def cost(  # noqa: PLR0913 - one option each
    *,
    stream: Streams = None,
    offload_time: Time = None,
    offload_size: Size = None,
    retention_time: Time = None,
    retention_size: Size = None,
    deletion_lag: Time = None,
    ledger_bytes_max: Bytes = None,
    block_size: Bytes = None,
    reads: Annotated[
        float, typer.Option(min=0, max=AMOUNT_MAX, help="How often a month's data are read.")
    ] = 1.0,
    read_size: Annotated[str, typer.Option("--range", help="Bytes of one ranged GET.")] = "1MiB",
    dry_run: DryRun = False,
    cores: Cores = CORES,
    memory: Memory = MEMORY,
    metrics: Metrics = None,
    output: OutputOption = Output.TABLE,
    quiet: Quiet = False,
) -> None:
    """Show what each stream costs a month, and would if these thresholds held instead.

    Prices are those of the settings (section prices). What would be is of a stream that goes on as
    in the last 30 days, and is as long as it gets.
    """
    from tierlog.cli.cost import positive, prices_of
    from tierlog.cli.objects import load_s3
    from tierlog.cli.policy import parse_limit, parse_size, parse_time
    from tierlog.model.policy import Policy
    from tierlog_spark.jobs.cost import WhatIf
    from tierlog_spark.jobs.cost import cost as job

    policy = Policy(
        offload_time_ms=_given(offload_time, parse_time),
        offload_size_bytes=_given(offload_size, parse_limit),
        retention_time_ms=_given(retention_time, parse_time),
        retention_size_bytes=_given(retention_size, parse_limit),
        deletion_lag_ms=_given(deletion_lag, parse_time),
        ledger_bytes_max=_given(ledger_bytes_max, parse_size),
        block_size=_given(block_size, parse_size),
    )
    asked = WhatIf(
        policy=policy, reads=reads, range_bytes=positive(parse_size(read_size), "--range")
    )
    settings, names = load_s3(), stream_names(stream)
    run_job(
        lambda run: job(run, settings.s3, prices_of(settings), streams=names, what_if=asked),
        columns=COST_COLUMNS,
        dry_run=dry_run,
        cores=cores,
        memory=memory,
        metrics=metrics,
        output=output,
        quiet=quiet,
        ends=ENDS,
    )


def stream_names(given: "Sequence[str] | None") -> "list[StreamName]":
    """Return the names that were given, checked."""
    from tierlog.model.ids import stream_name

    return [stream_name(one) for one in given or ()]


def _given(text: str | None, parse: "Callable[[str], int]") -> int | None:
    return None if text is None else parse(text)
