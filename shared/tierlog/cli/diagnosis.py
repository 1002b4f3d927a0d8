"""``tierlog debug``: one file with what somebody needs who is to help."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from tierlog.cli.output import Output, OutputOption, print_one
from tierlog.cli.session import command, config_file
from tierlog.model.errors import Reason, RefusedError

app = typer.Typer(no_args_is_help=True, help="What to send to somebody who is to help.")


@app.callback()
def debug() -> None:
    """Take no options of its own: a group of one command is to stay a group."""


@app.command("bundle")
@command
def bundle(
    out: Annotated[
        Path | None, typer.Option("--out", help="The file; default tierlog-debug-TIME.tar.gz.")
    ] = None,
    *,
    output: OutputOption = Output.TABLE,
) -> None:
    """Write settings, versions, checks, metrics, status, the ends of logs and a metadata summary.

    Secrets are masked everywhere, and entries are in none of it; names of streams, hosts and
    buckets are. Read it before you send it: it is a tar.gz of texts.
    """
    from tierlog.cli.bundle import Bundle, gather_all, redactor_for, summary_of, write_private
    from tierlog.cli.checks import cluster_settings
    from tierlog.wiring.build import system_clock

    settings = cluster_settings()
    now_s = system_clock().wall_ms() // 1000
    name = f"tierlog-debug-{now_s}"
    path = out or Path(f"{name}.tar.gz")
    if path.exists():
        raise RefusedError(
            f"{path} is there already",
            reason=Reason.INVALID_ARGUMENT,
            remedy="Name another file with --out",
        )
    found = Bundle(redactor_for(settings), name=name, time_s=now_s)
    asyncio.run(gather_all(found, settings, config_file()))
    packed = found.packed()
    write_private(path, packed)
    print_one(summary_of(found, path, len(packed)), output, title="debug bundle")
