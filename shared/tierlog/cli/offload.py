"""``tierlog offload …``: ask for an offload, and see what became of it."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
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
from tierlog.cli.session import Quiet, Timeout, command
from tierlog.cli.stream import Name, with_client
from tierlog.model.errors import Reason, RefusedError, RetryableError

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
    "doubt": None,
}

STATUS_COLUMNS: Final = {
    "stream": None,
    "position": None,
    "pause": None,
    "wanted": None,
    "states": None,
    "waiting_bytes": size_text,
    "oldest_waiting_ms": time_text,
    "failing": None,
    "failing_count": None,
    "doubted": None,
    "doubted_count": None,
}

ATTEMPT_COLUMNS: Final = {
    "stream": None,
    "ledger_id": None,
    "uuid": None,
    "worker": None,
    "outcome": None,
    "started_ms": time_text,
    "duration_ms": None,
    "error": None,
}

LEFTOVER_COLUMNS: Final = {
    "stream": None,
    "ledger_id": None,
    "uuid": None,
    "data_key": None,
    "abandoned_ms": time_text,
    "swept_ms": time_text,
}


@app.command("run")
@command
def run(
    stream: Name,
    *,
    before: Annotated[
        str | None,
        typer.Option(
            help="Only ledgers that end before this LEDGER:ENTRY, a position that the stream has."
        ),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", "-w", help="Until all of them are in tier 2.")
    ] = False,
    timeout_s: Timeout = 600.0,
    output: OutputOption = Output.TABLE,
    quiet: Quiet = False,
) -> None:
    """Offload the closed ledgers of a stream now, whatever its thresholds say."""
    from tierlog.model.position import Position

    position = Position.parse(before) if before is not None else None

    async def ask(client: "Client") -> Any:  # noqa: ANN401 - JSON
        asked = dict(await client.offload(stream, position))
        if wait:
            await _until_there(client, stream, asked, timeout_s, quiet=quiet)
            asked["state"] = "complete"
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
    wait: Annotated[
        bool, typer.Option("--wait", "-w", help="Until what was asked for is in tier 2.")
    ] = False,
    timeout_s: Timeout = 600.0,
    output: OutputOption = Output.TABLE,
    quiet: Quiet = False,
) -> None:
    """Show which ledgers are on their way to tier 2, or there, with the last error of each.

    LOCAL: its attempt was given up, since nothing asked for it any more.

    doubt: its copy in tier 2 was found damaged, and the local copy stays until that is mended.

    With --wait: how far a stream's offload has come, once all that was asked for is there.
    """
    from tierlog.model.ids import stream_name

    if stream is not None:
        stream_name(stream)
    if wait:
        if stream is None:
            raise RefusedError(
                "--wait is for one stream", remedy="Write: tierlog offload status STREAM -w"
            )
        found = with_client(lambda client: _until_wanted(client, stream, timeout_s, quiet=quiet))
        print_rows(found, STATUS_COLUMNS, output)
        return

    print_rows(with_client(lambda client: client.offloads(stream)), COLUMNS, output)


@app.command("attempts")
@command
def attempts(
    stream: Name,
    *,
    ledger: Annotated[int | None, typer.Option(min=0, help="Only at this ledger.")] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show every attempt at a stream's ledgers: worker, times, how it ended, and its error."""
    ledgers = with_client(lambda client: client.attempts(stream))
    rows = [
        {"stream": one["stream"], "ledger_id": one["ledger_id"], **attempt}
        for one in ledgers
        if ledger in (None, one["ledger_id"])
        for attempt in one["attempts"]
    ]
    print_rows(rows, ATTEMPT_COLUMNS, output)


@app.command("gc")
@command
def gc(
    stream: Name,
    *,
    wait: Annotated[bool, typer.Option("--wait", "-w", help="Until nothing is left.")] = False,
    timeout_s: Timeout = 600.0,
    output: OutputOption = Output.TABLE,
    quiet: Quiet = False,
) -> None:
    """Show what attempts left in the bucket that the scheduler still has to delete.

    The copies of ledgers that were trimmed, or go with their stream, are among it.

    It does so by itself, twice: at once, and when no late request of a worker can land any more.
    """

    async def look(client: "Client") -> Sequence[Any]:
        if not wait:
            return await client.leftovers(stream)
        return await _poll(
            lambda: client.leftovers(stream),
            lambda left: f"{len(left)} attempts to clean" if left else None,
            f"what attempts at {stream} left is not deleted yet",
            timeout_s,
            quiet=quiet,
        )

    print_rows(with_client(look), LEFTOVER_COLUMNS, output)


@app.command("export")
@command
def export(
    ledger: Annotated[int, typer.Argument(min=0, help="A ledger that is complete in tier 2.")],
    *,
    output: OutputOption = Output.TABLE,
) -> None:
    """Write an export copy of a ledger beside its objects: every event as a line of JSON.

    Again: anew. It is deleted with the ledger's objects, and Tierlog never reads it.
    """
    from tierlog.cli.objects import load_s3
    from tierlog.client.endpoints import with_zookeeper
    from tierlog.model.ids import LedgerId
    from tierlog.ports.spending import CostMeter
    from tierlog.wiring.exporting import export_ledger

    settings, meter = with_zookeeper(load_s3()), CostMeter()
    found = asyncio.run(export_ledger(settings, LedgerId(ledger), meter=meter))
    document = {
        "ledger_id": ledger,
        "bucket": found.bucket,
        "key": found.key,
        "length": found.length,
        "entries": found.entry_count,
        "events": found.event_count,
        **meter.totals,
    }
    print_one(document, output)


@app.command("pause")
@command
def pause(
    stream: Name,
    *,
    cause: Annotated[str, typer.Option(help="For whoever finds it paused.")] = "",
    output: OutputOption = Output.TABLE,
) -> None:
    """Begin no offload of a stream, and delete none of its copies, until it is resumed."""
    found = with_client(lambda client: client.pause_offload(stream, cause))
    print_rows(found, STATUS_COLUMNS, output)


@app.command("resume")
@command
def resume(stream: Name, *, output: OutputOption = Output.TABLE) -> None:
    """Let a paused stream go on."""
    print_rows(with_client(lambda client: client.resume_offload(stream)), STATUS_COLUMNS, output)


async def _until_wanted(
    client: "Client", stream: str, timeout_s: float, *, quiet: bool
) -> Sequence[Any]:
    def left(found: Sequence[Any]) -> str | None:
        count = sum(one["wanted"] for one in found)
        return f"{count} ledgers not in tier 2 yet" if count else None

    return await _poll(
        lambda: client.offload_status(stream),
        left,
        f"not all of {stream} that was asked for is in tier 2",
        timeout_s,
        quiet=quiet,
    )


async def _poll(
    look: Callable[[], Awaitable[Sequence[Any]]],
    left: Callable[[Sequence[Any]], str | None],
    late: str,
    timeout_s: float,
    *,
    quiet: bool,
) -> Sequence[Any]:
    """Look until nothing is ``left``, saying what is whenever that changes."""
    said: str | None = None
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                found = await look()
                now = left(found)
                if now is None:
                    return found
                if now != said:
                    said = now
                    say(now, quiet=quiet)
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise RetryableError(
            f"{late} after {timeout_s:g} s",
            remedy="It goes on; look at: tierlog offload attempts STREAM; and, for requests that "
            "were refused or kept failing: tierlog dlq list",
        ) from None


async def _with_ledgers(client: "Client", stream: str) -> list[str]:
    """Return the streams that have the ledgers: the partitions, or the stream itself."""
    partitions = (await client.stream(stream)).get("partition_streams", [])
    return [one["stream"] for one in partitions] or [stream]


async def _until_there(
    client: "Client", stream: str, asked: dict[str, Any], timeout_s: float, *, quiet: bool
) -> None:
    wanted, names = set(asked.get("ledgers", [])), await _with_ledgers(client, stream)
    missing = set(wanted)

    async def look() -> list[int]:
        listed = [one for name in names for one in (await client.stream(name))["ledgers"]]
        # What has no entries gets no copy.
        missing.difference_update(
            one["ledger_id"] for one in listed if one["complete"] or not one["entries"]
        )
        return [one["ledger_id"] for one in listed if one["ledger_id"] in missing]

    def left(found: Sequence[Any]) -> str | None:
        done = len(wanted) - len(missing)
        return f"{done} of {len(wanted)} ledgers in tier 2" if found else None

    await _poll(
        look,
        left,
        f"not all of {stream} that was asked for is in tier 2",
        timeout_s,
        quiet=quiet,
    )
    if missing:
        raise RefusedError(
            f"{len(missing)} of {len(wanted)} ledgers are gone from {stream}, and had no copy in "
            f"tier 2 when they were last seen: {', '.join(map(str, sorted(missing)[:10]))}",
            reason=Reason.TRIMMED,
            remedy=f"See what retention says: tierlog policy explain {stream}",
        )
