"""``tierlog``: noun, then verb. Rooms add commands through the entry points ``tierlog.commands``.

Imports of libraries are inside the commands, so that ``tierlog --help`` is quick.
"""

import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from tierlog.cli import (
    append,
    cluster,
    cost,
    demo,
    dlq,
    ledger,
    objects,
    offload,
    policy,
    read,
    restore,
    scrub,
    stream,
    topics,
    up,
)
from tierlog.cli.session import SESSION

GROUP: Final = "tierlog.commands"

app = typer.Typer(
    name="tierlog",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Tiered log storage: streams that are fast while hot, and in S3 for ever after.",
)


def _print_version(wanted: bool) -> None:  # noqa: FBT001 - typer calls it so
    if wanted:
        from importlib.metadata import version

        typer.echo(f"tierlog {version('tierlog')}")
        raise typer.Exit


@app.callback()
def main_options(
    *,
    debug: Annotated[bool, typer.Option("--debug", help="Logs and stack traces.")] = False,
    state_dir: Annotated[
        Path | None, typer.Option(help="Where tierlog up keeps its state (default ./.tierlog).")
    ] = None,
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print it, end."),
    ] = False,
) -> None:
    """Take the options that all commands share."""
    SESSION.debug = debug
    if state_dir is not None:
        SESSION.state_dir = state_dir


app.command("up")(up.up)
app.command("demo")(demo.demo)
app.command("append")(append.append)
app.command("read")(read.read)
app.command("restore")(restore.restore)
app.add_typer(scrub.app, name="scrub")
app.add_typer(stream.app, name="stream")
app.add_typer(ledger.app, name="ledger")
app.add_typer(cluster.app, name="cluster")
app.add_typer(offload.app, name="offload")
app.add_typer(cost.app, name="cost")
app.add_typer(policy.app, name="policy")
app.add_typer(objects.app, name="object")
app.add_typer(topics.app, name="topics")
app.add_typer(dlq.app, name="dlq")


OWN: Final = frozenset(
    {
        "up",
        "demo",
        "append",
        "read",
        "restore",
        "scrub",
        "stream",
        "ledger",
        "cluster",
        "offload",
        "policy",
        "object",
        "topics",
        "dlq",
        "cost",
    }
)


def add_rooms() -> None:
    """Add other rooms' commands."""
    from importlib.metadata import entry_points

    for point in sorted(entry_points(group=GROUP), key=lambda one: one.name):
        app.add_typer(point.load(), name=point.name)


def main() -> None:
    """Run the command line and exit with its code."""
    # Looking for other rooms' commands takes as long as all the rest: not for our own.
    if next((one for one in sys.argv[1:] if not one.startswith("-")), "") not in OWN:
        add_rooms()
    sys.exit(app())


if __name__ == "__main__":
    main()
