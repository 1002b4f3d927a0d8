"""``tierlog stream …``: list, show, create and seal streams."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

import typer

from tierlog.cli.output import (
    Columns,
    Output,
    OutputOption,
    Row,
    print_json,
    print_one,
    print_rows,
    say,
    size_text,
    time_text,
)
from tierlog.cli.session import command, load
from tierlog.model.errors import RefusedError
from tierlog.model.partitions import PARTITIONS_MAX

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
    """List all streams; entries and bytes are those of closed ledgers."""
    print_rows(with_client(lambda client: client.streams()), STREAM_COLUMNS, output)


@app.command("show")
@command
def show(stream: Name, *, output: OutputOption = Output.TABLE) -> None:
    """Show a stream: its owner, thresholds and ledgers, and where each lies; or its partitions."""
    found = with_client(lambda client: client.stream(stream))
    if output is not Output.TABLE:
        print_json(found, indent=output is Output.JSON)
        return
    lists = ("ledgers", "partition_streams")
    print_one({key: value for key, value in found.items() if key not in lists}, output)
    if found.get("partitions"):
        print_rows(found["partition_streams"], STREAM_COLUMNS, output)
    else:
        print_rows([counted(one) for one in found.get("ledgers", [])], LEDGER_COLUMNS, output)


def counted(ledger: Row) -> Row:
    """Return a ledger for a table: what an open one holds is not known before it is closed."""
    return {**ledger, "entries": None, "length": None} if ledger["state"] == "OPEN" else ledger


@app.command("create")
@command
def create(
    stream: Name,
    *,
    raw: Annotated[
        bool, typer.Option("--raw", help="Entry data is the event and nothing more.")
    ] = False,
    partitions: Annotated[
        int,
        typer.Option(
            min=0, max=PARTITIONS_MAX, help="So many streams behind one name; 0: a plain stream."
        ),
    ] = 0,
    output: OutputOption = Output.TABLE,
) -> None:
    """Create a stream; nothing happens when one of the same shape exists.

    With --partitions 3 the streams NAME-partition-0 to NAME-partition-2 are created: append to
    NAME and the key of an event decides; read NAME and all are read.
    """
    created = with_client(
        lambda client: client.create_stream(stream, raw=raw, partitions=partitions)
    )
    print_one({"stream": stream, "created": created, "partitions": partitions}, output)


@app.command("seal")
@command
def seal(stream: Name, *, output: OutputOption = Output.TABLE) -> None:
    """Close the open ledger, or those of all partitions, so that all before can be offloaded."""
    sealed = with_client(lambda client: _seal(client, stream))
    if len(sealed) == 1:
        print_one(sealed[0], output)
    else:
        print_rows(sealed, {"stream": None, "sealed_ledger": None}, output)


@app.command("delete")
@command
def delete(
    stream: Name,
    *,
    yes: Annotated[
        bool, typer.Option("--yes", help="All data of the stream goes, for good.")
    ] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Delete a stream with its data in both tiers; again: show how much of it is left."""
    if not yes:
        raise RefusedError(
            f"stream {stream} is not deleted: that would be for good, in both tiers",
            remedy="Add --yes to delete it",
        )
    found = with_client(lambda client: client.delete_stream(stream))
    print_one(found, output)
    if found["paused"]:
        say(f"nothing of it goes while it is paused; go on with: tierlog offload resume {stream}")


async def _seal(client: "Client", stream: str) -> list[dict[str, object]]:
    return [
        {"stream": name, "sealed_ledger": await client.seal(name)}
        for name in await client.partitions(stream)
    ]


STREAM_COLUMNS: Final[Columns] = {
    "stream": None,
    "ledgers": None,
    "entries": None,
    "bytes": size_text,
    "tier1_bytes": size_text,
    "tier2_bytes": size_text,
    "owner": None,
    "owner_epoch": None,
    "raw": None,
    "partitions": None,
}
LEDGER_COLUMNS: Final[Columns] = {
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
