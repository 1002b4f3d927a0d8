"""``tierlog ledger …``: the ledgers of a stream, one in full, and ledgers of their own.

A ledger of its own (a bare ledger) has one writer in its life: one ``append``, which closes it.
"""

import asyncio
import getpass
import sys
from collections.abc import Awaitable, Callable
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import typer

from tierlog.cli.append import open_input, pieces_of
from tierlog.cli.cluster import with_catalog
from tierlog.cli.inputs import EventParser, InputFormat
from tierlog.cli.output import (
    Output,
    OutputOption,
    Row,
    print_one,
    print_rows,
    say,
    size_text,
    time_text,
)
from tierlog.cli.read import ReadOutput, Shown, beginning_of, text_or_base64
from tierlog.cli.session import command, load
from tierlog.cli.stream import LEDGER_COLUMNS, counted, with_client
from tierlog.model.ids import LEDGER_ID_MAX

if TYPE_CHECKING:
    from tierlog.catalog import Catalog
    from tierlog.client import Client, LedgerEntry, Ledgers, LedgerShape
    from tierlog.model.errors import RefusedError
    from tierlog.model.ledger import LedgerMetadata

app = typer.Typer(no_args_is_help=True, help="Ledgers: parts of a stream, or on their own.")

Result = TypeVar("Result")

TELL_S: Final = 2.0
"""So often a command that waits looks what for."""

LedgerNumber = Annotated[int, typer.Argument(help="The ledger's id.", min=0, max=LEDGER_ID_MAX)]

BARE_COLUMNS = {
    "ledger_id": None,
    "state": None,
    "entries": None,
    "length": size_text,
    "created_ms": time_text,
    "quorums": None,
    "nodes": None,
}


def with_ledgers(work: "Callable[[Ledgers], Awaitable[Result]]") -> Result:
    """Run ``work`` with the bare ledgers of the cluster."""
    from tierlog.client import open_ledgers

    async def run() -> Result:
        async with open_ledgers(load()) as ledgers:
            return await work(ledgers)

    return asyncio.run(run())


async def telling(ledgers: "Ledgers", ledger: int, work: Awaitable[Result]) -> Result:
    """Do what recovers a ledger, and say what that waits for: it may be for ever."""
    from tierlog.ports.waiting import Helpers

    async def tell() -> None:
        told = None
        while True:
            await asyncio.sleep(TELL_S)
            found = ledgers.waits_for(ledger)
            if found is not None and found != told:
                told = found
                say(f"the recovery of ledger {ledger} waits: {found}")

    async with Helpers() as tasks:
        tasks.spawn(tell())
        return await work


@app.command("ls")
@command
def ls(
    stream: Annotated[
        str | None, typer.Argument(help="The stream; without one: ledgers of their own.")
    ] = None,
    *,
    output: OutputOption = Output.TABLE,
) -> None:
    """List the ledgers of a stream and where each lies, or the ledgers that have no stream."""
    if stream is not None:
        found = with_client(lambda client: _of_stream(client, stream))
        shown = [counted(one) for one in found] if output is Output.TABLE else found
        partitioned = any("stream" in one for one in found)
        columns = {"stream": None, **LEDGER_COLUMNS} if partitioned else LEDGER_COLUMNS
        print_rows(shown, columns, output)
        return
    bare = with_ledgers(lambda ledgers: ledgers.ledgers())
    rows = [document_of(ledger_id, metadata) for ledger_id, metadata in bare.items()]
    print_rows(rows, BARE_COLUMNS, output)


async def _of_stream(client: "Client", stream: str) -> list[Row]:
    """Return the ledgers of a stream, or those of its partitions, each with the partition."""
    found = await client.stream(stream)
    if not found.get("partitions"):
        return list(found.get("ledgers", []))
    return [
        {"stream": name, **ledger}
        for name in await client.partitions(stream)
        for ledger in (await client.stream(name))["ledgers"]
    ]


@app.command("show")
@command
def show(ledger: LedgerNumber, *, output: OutputOption = Output.TABLE) -> None:
    """Show a ledger: metadata, ensembles, offload context."""
    print_one(with_client(lambda client: client.ledger(ledger)), output)


@app.command("create")
@command
def create(
    *,
    ensemble: Annotated[
        int | None, typer.Option(min=1, help="On how many nodes it lies (3, if there are).")
    ] = None,
    write_quorum: Annotated[
        int | None, typer.Option(min=1, help="How many of them get each entry (all).")
    ] = None,
    ack_quorum: Annotated[
        int | None, typer.Option(min=1, help="How many acknowledge it (all but one, at least 1).")
    ] = None,
    key_id: Annotated[
        str | None, typer.Option(help="The key that signs its runs (settings: keys).")
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Create a ledger of its own, of no stream; its id is what the other commands take."""
    shape = _shape(ensemble, write_quorum, ack_quorum)
    ledger_id = with_ledgers(lambda ledgers: ledgers.make(shape, key_id=key_id))
    print_one({"ledger_id": ledger_id}, output)


@app.command("append")
@command
def append(
    ledger: LedgerNumber,
    file: Annotated[
        Path | None, typer.Argument(help="What to append; - or nothing: standard input.")
    ] = None,
    input_format: Annotated[
        InputFormat, typer.Option("--format", "-f", help="How entries lie in the input.")
    ] = InputFormat.LINES,
    *,
    output: OutputOption = Output.TABLE,
) -> None:
    """Append entries to a created ledger, once and for all, and close it.

    An input that is refused, or interrupted, closes it too, with the entries that came before.
    """
    from tierlog.client import SyncLedgers
    from tierlog.model.errors import TierlogError

    source, parser = open_input(file), EventParser(input_format)
    with SyncLedgers(load()) as ledgers, ledgers.write(ledger) as writer:
        try:
            for piece in pieces_of(source):
                writer.append_all(parser.feed(piece))
            writer.append_all(parser.finish())
        except BaseException:
            try:
                writer.close()
            except TierlogError:
                say(
                    f"ledger {ledger} takes no more entries of this writer, and could not be "
                    f"closed: tierlog ledger read {ledger} --recover closes it"
                )
            else:
                say(
                    f"ledger {ledger} takes no more entries: it is closed with those that came "
                    f"before; see: tierlog ledger show {ledger}; the whole input needs a ledger of "
                    "its own"
                )
            raise
        closed = document_of(ledger, writer.close())
    print_one(closed, output)


@app.command("read")
@command
def read(
    ledger: LedgerNumber,
    first: Annotated[int, typer.Option("--from", min=0, help="The first entry.")] = 0,
    last: Annotated[
        int | None, typer.Option("--to", min=0, help="The last entry; none: as far as it goes.")
    ] = None,
    *,
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on as entries are appended, until it is closed.")
    ] = False,
    recover: Annotated[
        bool, typer.Option("--recover", help="Close it first: its writer can append no more.")
    ] = False,
    output: Annotated[
        ReadOutput,
        typer.Option(
            "--output", "-o", help="raw: entry and line feed; binary: 4 bytes of length before."
        ),
    ] = ReadOutput.RAW,
) -> None:
    """Print the entries of a ledger of its own, of an open one those that are acknowledged."""

    async def work(ledgers: "Ledgers") -> None:
        shown = Shown(
            output,
            ("entry_id", "bytes", "data"),
            payload_of=attrgetter("data"),
            row_of=_entry_row,
            document_of=_entry_document,
        )
        reader = await telling(ledgers, ledger, ledgers.open(ledger, recover=recover))
        with shown:
            async for entry in reader.entries(first, last, follow=follow):
                shown.add(entry)
                if follow:
                    sys.stdout.buffer.flush()

    with_ledgers(work)


@app.command("close")
@command
def close(ledger: LedgerNumber, *, output: OutputOption = Output.TABLE) -> None:
    """Close a ledger whose writer is gone: fence it, find its end, keep all that is there."""
    metadata = with_ledgers(lambda found: telling(found, ledger, found.recover(ledger)))
    print_one(document_of(ledger, metadata), output)


@app.command("recover")
@command
def recover(
    ledger: LedgerNumber,
    *,
    accept_loss: Annotated[
        bool,
        typer.Option("--accept-loss", help="Its lost nodes never come back: give up their share."),
    ] = False,
    wait_s: Annotated[
        float, typer.Option(min=0, help="So long it may take until the ledger is closed.")
    ] = 60.0,
    output: OutputOption = Output.TABLE,
) -> None:
    """End the wait of a recovery for lost nodes, of a stream's ledger or one of its own.

    What no node can give is then lost for good: it is on record with the ledger, with who said
    so, and reading it is an error. Where a node may come back, start it instead.
    """
    if not accept_loss:
        raise with_catalog(lambda catalog: _why_not_recovered(catalog, ledger))
    by = getpass.getuser()

    async def work(ledgers: "Ledgers") -> "LedgerMetadata":
        ending = ledgers.accept_loss(ledger, by=by, wait_s=wait_s)
        return await telling(ledgers, ledger, ending)

    metadata = with_ledgers(work)
    lost = [f"{first}-{last}" for first, last in metadata.lost]
    print_one({**document_of(ledger, metadata), "lost": lost}, output)


@app.command("delete")
@command
def delete(ledger: LedgerNumber, *, output: OutputOption = Output.TABLE) -> None:
    """Delete a ledger of its own; storage nodes free its entries some time later."""
    with_ledgers(lambda ledgers: ledgers.delete(ledger))
    print_one({"ledger_id": ledger, "deleted": True}, output)


async def _why_not_recovered(catalog: "Catalog", ledger: int) -> "RefusedError":
    """Say that nothing is done, by what the ledger is."""
    from tierlog.catalog.ledgers import context_not_found, nothing_waits
    from tierlog.model.errors import RefusedError
    from tierlog.model.ids import LedgerId
    from tierlog.model.ledger import LedgerState

    wanted = LedgerId(ledger)
    metadata = await catalog.ledgers.get(wanted)
    if metadata is None:
        return context_not_found(wanted)
    if metadata.state is not LedgerState.IN_RECOVERY:
        return nothing_waits(wanted, metadata.state)
    goes_on = "with: tierlog ledger close" if metadata.is_bare else "by itself"
    return RefusedError(
        f"nothing was done with ledger {ledger}: its recovery goes on {goes_on}",
        remedy="Start the nodes that it waits for (tierlog ledger show). If they are lost for "
        "good, give up what they alone had with --accept-loss",
    )


def document_of(ledger_id: int, metadata: "LedgerMetadata") -> dict[str, Any]:
    """Return what is said of a bare ledger; entries and length only once it is closed."""
    from tierlog.model.ledger import LedgerState

    closed = metadata.state is LedgerState.CLOSED
    return {
        "ledger_id": ledger_id,
        "state": metadata.state.name,
        "entries": metadata.last_entry_id + 1 if closed else None,
        "length": metadata.length if closed else None,
        "created_ms": metadata.ctime_ms,
        "quorums": f"{metadata.ensemble_size}/{metadata.write_quorum}/{metadata.ack_quorum}",
        "nodes": sorted({node for one in metadata.segments for node in one.ensemble}),
    }


def _shape(
    ensemble: int | None, write_quorum: int | None, ack_quorum: int | None
) -> "LedgerShape | None":
    """Return the shape that the options describe; None: the cluster's."""
    from tierlog.client import LedgerShape

    if ensemble is None and write_quorum is None and ack_quorum is None:
        return None
    size = ensemble or max(3, write_quorum or 1, ack_quorum or 1)
    write = write_quorum or size
    return LedgerShape(
        ensemble_size=size, write_quorum=write, ack_quorum=ack_quorum or max(1, write - 1)
    )


def _entry_row(entry: "LedgerEntry") -> dict[str, Any]:
    return {
        "entry_id": entry.entry_id,
        "bytes": len(entry.data),
        "data": beginning_of(entry.data),
    }


def _entry_document(entry: "LedgerEntry") -> dict[str, Any]:
    document = {"entry_id": entry.entry_id, "bytes": len(entry.data)}
    return document | text_or_base64("data", entry.data)
