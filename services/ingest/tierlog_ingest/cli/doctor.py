"""``tierlog doctor``: whether this machine can keep what a storage node promises."""

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer

from tierlog.cli.output import Output, OutputOption, print_rows
from tierlog.cli.session import command, load
from tierlog.model.errors import Reason, RetryableError
from tierlog_ingest.cli.places import mute_logs

app = typer.Typer(
    invoke_without_command=True,
    help="Time a disk's fsync, look at its space and at limits; exit 5 when a check fails.",
)


@app.callback()
@command
def doctor(
    *,
    directory: Annotated[
        Path | None,
        typer.Option("--dir", help="A data directory; by default all that the settings name."),
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Time the disk's fsync and look at its space and limits; exit 5 when a check fails."""
    from tierlog_ingest.inspection.doctor import examine

    ingest = load().ingest
    settings_own = [ingest.data_dir, *ingest.ledger_directories]
    directories = [directory] if directory is not None else settings_own
    mute_logs()
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
