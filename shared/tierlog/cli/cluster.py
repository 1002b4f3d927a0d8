"""``tierlog cluster …``: the storage nodes, and the ledgers that lack copies."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final, TypeVar

import typer

from tierlog.cli.output import Output, OutputOption, print_rows, size_text, time_text
from tierlog.cli.session import command, load

if TYPE_CHECKING:
    from tierlog.catalog import Catalog

app = typer.Typer(no_args_is_help=True, help="Storage nodes, and how well ledgers are replicated.")

Result = TypeVar("Result")

NODE_COLUMNS: Final = {
    "node_id": None,
    "state": None,
    "zone": None,
    "wire": None,
    "free_bytes": size_text,
    "draining_since_ms": time_text,
}

UNDERREPLICATED_COLUMNS: Final = {
    "ledger_id": None,
    "reasons": None,
    "nodes": None,
    "since_ms": time_text,
    "tries": None,
    "last_error": None,
}


def with_catalog(work: "Callable[[Catalog], Awaitable[Result]]") -> Result:
    """Run ``work`` on the metadata of the cluster that the settings, or ``tierlog up``, name."""
    from tierlog.client.cluster import open_cluster

    async def run() -> Result:
        async with open_cluster(load()) as catalog:
            return await work(catalog)

    return asyncio.run(run())


@app.command("nodes")
@command
def nodes(*, output: OutputOption = Output.TABLE) -> None:
    """List the storage nodes: live, away, draining or decommissioned."""
    from tierlog.client.cluster import node_documents

    print_rows(with_catalog(node_documents), NODE_COLUMNS, output)


@app.command("underreplicated")
@command
def underreplicated(*, output: OutputOption = Output.TABLE) -> None:
    """List the ledgers that lack copies: why, on which nodes, and what was tried. None: all whole.

    Auto-recovery empties this list by itself, as far as there are nodes to copy to.
    """
    from tierlog.client.cluster import underreplicated_documents

    print_rows(with_catalog(underreplicated_documents), UNDERREPLICATED_COLUMNS, output)
