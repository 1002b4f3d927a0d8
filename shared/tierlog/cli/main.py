"""``tierlog``: noun, then verb. Rooms add commands through the entry points ``tierlog.commands``.

Imports of libraries are inside the commands, so that ``tierlog --help`` is quick.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from tierlog.cli import (
    append,
    attributes,
    cluster,
    config,
    cost,
    demo,
    diagnosis,
    dlq,
    ledger,
    objects,
    offload,
    perf,
    policy,
    read,
    restore,
    scrub,
    stream,
    topics,
    up,
)
from tierlog.cli.session import SESSION, command

if TYPE_CHECKING:
    from collections.abc import Callable

GROUP: Final = "tierlog.commands"
# Commands of distributions that one may well be without, and those distributions.
APART: Final = {"spark": "tierlog-spark"}
ANY_WORDS: Final = {"allow_extra_args": True, "ignore_unknown_options": True}

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
    profile: Annotated[
        str | None, typer.Option(help="A named set of settings: see tierlog config profiles.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="A setting, as s3.bucket=logs; often."),
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
    SESSION.profile = profile
    SESSION.given = set_ or []


app.command("up")(up.up)
app.command("demo")(demo.demo)
app.command("append")(append.append)
app.command("read")(read.read)
app.command("restore")(restore.restore)
app.add_typer(scrub.app, name="scrub")
app.add_typer(stream.app, name="stream")
app.add_typer(attributes.app, name="attributes")
app.add_typer(ledger.app, name="ledger")
app.add_typer(cluster.app, name="cluster")
app.add_typer(config.app, name="config")
app.add_typer(offload.app, name="offload")
app.add_typer(cost.app, name="cost")
app.add_typer(diagnosis.app, name="debug")
app.add_typer(policy.app, name="policy")
app.add_typer(objects.app, name="object")
app.add_typer(topics.app, name="topics")
app.add_typer(dlq.app, name="dlq")
app.add_typer(perf.app, name="perf")


OWN: Final = frozenset(
    {
        "up",
        "demo",
        "append",
        "read",
        "restore",
        "scrub",
        "stream",
        "attributes",
        "ledger",
        "cluster",
        "config",
        "debug",
        "offload",
        "policy",
        "object",
        "topics",
        "dlq",
        "perf",
        "cost",
    }
)


def add_rooms() -> None:
    """Add other rooms' commands; in the place of some that are not installed, what to install."""
    from importlib.metadata import entry_points

    found = sorted(entry_points(group=GROUP), key=lambda one: one.name)
    for point in found:
        app.add_typer(point.load(), name=point.name)
    for name in APART.keys() - {point.name for point in found}:
        app.command(name, hidden=True, context_settings=ANY_WORDS)(_missing(name))


def _missing(name: str) -> "Callable[[], None]":
    """Return a command that says what has to be installed for it to be there."""
    from tierlog.model.errors import RefusedError

    @command
    def refuse() -> None:
        raise RefusedError(
            f"tierlog {name} is not installed here",
            remedy=f"Install it into the same environment: pip install {APART[name]}",
        )

    return refuse


def main() -> None:
    """Run the command line and exit with its code."""
    # Looking for other rooms' commands takes as long as all the rest: not for our own.
    if next((one for one in sys.argv[1:] if not one.startswith("-")), "") not in OWN:
        add_rooms()
    sys.exit(app())


if __name__ == "__main__":
    main()
