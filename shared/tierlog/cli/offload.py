"""``tierlog offload …``: ask for an offload, and see what became of it."""

import asyncio
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from tierlog.cli.output import (
    Output,
    OutputOption,
    print_one,
    print_rows,
    say,
    size_text,
    time_text,
)
from tierlog.cli.session import Quiet, command
from tierlog.cli.stream import Name, with_client
from tierlog.model.errors import RetryableError

if TYPE_CHECKING:
    from tierlog.client import Client

app = typer.Typer(no_args_is_help=True, help="Copying sealed ledgers to tier 2.")

POLL_S: Final = 0.5
LISTS: Final = ("ledgers", "requested")

COLUMNS: Final = {
    "stream": None,
    "ledger_id": None,
    "state": None,
    "attempts": None,
    "length": size_text,
    "attempt_started_ms": time_text,
    "timestamp_ms": time_text,
    "last_error": None,
}


@app.command("run")
@command
def run(
    stream: Name,
    *,
    before: Annotated[
        str | None, typer.Option(help="Only ledgers that end before this LEDGER:ENTRY.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Until all of them are in tier 2.")] = False,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds to wait.")] = 600.0,
    output: OutputOption = Output.TABLE,
    quiet: Quiet = False,
) -> None:
    """Offload the closed ledgers of a stream now, whatever its thresholds say."""
    from tierlog.model.position import Position

    position = Position.parse(before) if before is not None else None

    async def ask(client: "Client") -> Any:  # noqa: ANN401 - JSON
        asked = dict(await client.offload(stream, position))
        if wait:
            asked["state"] = await _wait(client, stream, asked, timeout_s, quiet=quiet)
        return asked

    asked = with_client(ask)
    if output is Output.TABLE:
        asked = {f"{name} (ids)" if name in LISTS else name: one for name, one in asked.items()}
    print_one(asked, output)


@app.command("status")
@command
def status(
    stream: Annotated[str | None, typer.Argument(help="Only of this stream.")] = None,
    *,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show which ledgers are on their way to tier 2, or there, with the last error of each."""
    from tierlog.model.ids import stream_name

    if stream is not None:
        stream_name(stream)

    async def ask(client: "Client") -> list[Any]:
        # Says so when there is no such stream.
        names = await _with_ledgers(client, stream) if stream is not None else None
        found = await client.offloads()
        return [one for one in found if names is None or one.get("stream") in names]

    print_rows(with_client(ask), COLUMNS, output)


async def _with_ledgers(client: "Client", stream: str) -> list[str]:
    """Return the streams that have the ledgers: the partitions, or the stream itself."""
    partitions = (await client.stream(stream)).get("partition_streams", [])
    return [one["stream"] for one in partitions] or [stream]


async def _wait(
    client: "Client", stream: str, asked: dict[str, Any], timeout_s: float, *, quiet: bool
) -> str:
    wanted, names = set(asked.get("ledgers", [])), await _with_ledgers(client, stream)
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                left = {
                    one["ledger_id"]
                    for name in names
                    for one in (await client.stream(name))["ledgers"]
                    if one["ledger_id"] in wanted and not one["complete"]
                }
                if not left:
                    return "complete"
                say(f"{len(wanted) - len(left)} of {len(wanted)} ledgers in tier 2", quiet=quiet)
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise RetryableError(
            f"the offload of {stream} did not end within {timeout_s:g} s",
            remedy="It goes on; look at: tierlog offload status",
        ) from None
