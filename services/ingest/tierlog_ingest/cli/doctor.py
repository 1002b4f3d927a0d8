"""``tierlog doctor``: whether this machine can keep what a storage node promises."""

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer

from tierlog.cli.output import Output, OutputOption, print_rows
from tierlog.cli.session import command, load
from tierlog.model.errors import Reason, RetryableError

app = typer.Typer(invoke_without_command=True, help="Check what a storage node stands on.")


@app.callback()
@command
def doctor(
    *,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="A data directory; by default the settings'.")
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Time the disk's fsync and look at its space and limits; exit 5 when a check fails."""
    from tierlog_ingest.inspection.doctor import examine

    ingest = load().ingest
    directories = [directory] if directory is not None else [ingest.data_dir]
    rows: list[dict[str, Any]] = []
    for one in directories:
        rows += asyncio.run(examine(one, ingest.storage))
    columns = dict.fromkeys(("check", "result", "value", "remedy"))
    print_rows(rows, columns, output, title="doctor")
    failed = [row for row in rows if row["result"] == "failed"]
    if failed:
        raise RetryableError(
            f"{len(failed)} of {len(rows)} checks failed, the first: {failed[0]['check']}, "
            f"{failed[0]['value']}",
            reason=Reason.UNAVAILABLE,
            remedy=str(failed[0]["remedy"]),
        )
