"""``tierlog topics …``: the queue's topics as they should be, and as they are."""

import asyncio
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer

from tierlog.cli.output import Output, OutputOption, print_rows, say
from tierlog.cli.session import EXIT_FAILURE, command, load

if TYPE_CHECKING:
    from tierlog.offload.topics import TopicReport

app = typer.Typer(no_args_is_help=True, help="Topics of the queue: explicit, and checked.")

COLUMNS: Final = {
    "topic": None,
    "partitions": None,
    "replication_factor": None,
    "retention_ms": None,
    "done": None,
    "differs": None,
}


@app.command("show")
@command
def show(
    *,
    check: Annotated[bool, typer.Option("--check", help="Fail when something differs.")] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show the topics, and how they differ from what the settings want."""
    rows = _rows(dry_run=True)
    print_rows(rows, COLUMNS, output)
    if check and any(one["differs"] for one in rows):
        _end(rows, "Make them so with: tierlog topics apply")


@app.command("apply")
@command
def apply(
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Change nothing.")] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Create topics that are missing, add partitions, set retention. Nothing is ever removed.

    What would lose events, as fewer partitions, is told and left to you, with exit code 1.
    """
    rows = _rows(dry_run=dry_run)
    print_rows(rows, COLUMNS, output)
    if dry_run:
        say("nothing was changed", quiet=output is not Output.TABLE)
    elif any(one["differs"] for one in rows):
        _end(rows, "Change it by hand, or the settings of section kafka")


def _rows(*, dry_run: bool) -> list[dict[str, Any]]:
    from tierlog.client.endpoints import with_kafka
    from tierlog.wiring.build import apply_queue_topics

    settings = with_kafka(load())
    return [_row(one) for one in asyncio.run(apply_queue_topics(settings, dry_run=dry_run))]


def _row(report: "TopicReport") -> dict[str, Any]:
    from tierlog.offload.topics import RETENTION

    found, spec = report.now, report.spec
    return {
        "topic": spec.name,
        "there": found is not None,
        "partitions": found.partitions if found is not None else None,
        "replication_factor": found.replication_factor if found is not None else None,
        "retention_ms": found.config.get(RETENTION) if found is not None else None,
        "done": [f"{one.what}: {one.found} -> {one.wanted}" for one in report.done],
        "differs": [
            f"{one.what}: {one.found or 'unset'}, wanted {one.wanted}" for one in report.left
        ],
    }


def _end(rows: list[dict[str, Any]], remedy: str) -> NoReturn:
    told = "; ".join(f"{one['topic']} {text}" for one in rows for text in one["differs"])
    say(f"error: topics are not what they should be: {told}")
    say(f"remedy: {remedy}")
    raise typer.Exit(EXIT_FAILURE)
