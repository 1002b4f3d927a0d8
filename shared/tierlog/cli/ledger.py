"""``tierlog ledger …``: the ledgers of a stream, and one of them in full."""

from typing import Annotated

import typer

from tierlog.cli.output import Output, OutputOption, print_one, print_rows
from tierlog.cli.session import command
from tierlog.cli.stream import LEDGER_COLUMNS, Name, with_client

app = typer.Typer(no_args_is_help=True, help="Ledgers, the parts of a stream.")


@app.command("ls")
@command
def ls(stream: Name, *, output: OutputOption = Output.TABLE) -> None:
    """List the ledgers of a stream, and where each lies."""
    found = with_client(lambda client: client.stream(stream))
    print_rows(found.get("ledgers", []), LEDGER_COLUMNS, output)


@app.command("show")
@command
def show(
    ledger: Annotated[int, typer.Argument(help="The ledger's id.", min=0)],
    *,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show a ledger: metadata, ensembles, offload context."""
    print_one(with_client(lambda client: client.ledger(ledger)), output)
