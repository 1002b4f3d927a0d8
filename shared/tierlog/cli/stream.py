"""``tierlog stream …``: list, show, create and seal streams."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from tierlog.cli.output import (
    Output,
    OutputOption,
    print_json,
    print_one,
    print_rows,
    size_text,
    time_text,
)
from tierlog.cli.session import command, load

if TYPE_CHECKING:
    from tierlog.client import Client

app = typer.Typer(no_args_is_help=True, help="Streams.")

Result = TypeVar("Result")

Name = Annotated[str, typer.Argument(help="The stream.")]


def with_client(work: "Callable[[Client], Awaitable[Result]]") -> Result:
    """Run ``work`` with a client of the services."""
    from tierlog.client import open_client

    async def run() -> Result:
        async with open_client(load()) as client:
            return await work(client)

    return asyncio.run(run())


@app.command("ls")
@command
def ls(*, output: OutputOption = Output.TABLE) -> None:
    """List all streams."""
    rows = with_client(lambda client: client.streams())
    columns = {
        "stream": None,
        "ledgers": None,
        "entries": None,
        "bytes": size_text,
        "tier1_bytes": size_text,
        "tier2_bytes": size_text,
        "owner": None,
        "owner_epoch": None,
        "raw": None,
    }
    print_rows(rows, columns, output)


@app.command("show")
@command
def show(stream: Name, *, output: OutputOption = Output.TABLE) -> None:
    """Show a stream: its owner, thresholds and ledgers, and where each lies."""
    found = with_client(lambda client: client.stream(stream))
    if output is not Output.TABLE:
        print_json(found, indent=output is Output.JSON)
        return
    print_one({key: value for key, value in found.items() if key != "ledgers"}, output)
    print_rows(found.get("ledgers", []), LEDGER_COLUMNS, output)


@app.command("create")
@command
def create(
    stream: Name,
    *,
    raw: Annotated[
        bool, typer.Option("--raw", help="Entry data is the event and nothing more.")
    ] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Create a stream; nothing happens when one of the same shape exists."""
    created = with_client(lambda client: client.create_stream(stream, raw=raw))
    print_one({"stream": stream, "created": created}, output)


@app.command("seal")
@command
def seal(stream: Name, *, output: OutputOption = Output.TABLE) -> None:
    """Close the open ledger, so that everything before now can be offloaded."""
    ledger_id = with_client(lambda client: client.seal(stream))
    print_one({"stream": stream, "sealed_ledger": ledger_id}, output)


LEDGER_COLUMNS = {
    "ledger_id": None,
    "state": None,
    "entries": None,
    "length": size_text,
    "opened_ms": time_text,
    "closed_ms": time_text,
    "offload_state": None,
    "tier1": None,
    "tier2": None,
    "attempts": None,
    "last_error": None,
}
