"""``tierlog node trust-metadata``: end what an old backup of the metadata store began."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tierlog.cli.output import Output, OutputOption, print_one
from tierlog.cli.session import command
from tierlog.model.errors import RefusedError
from tierlog_ingest.cli.places import DataDirectory, LedgerDirectories, mute_logs, open_directories

if TYPE_CHECKING:
    from tierlog_ingest.inspection.inspector import Directories
    from tierlog_ingest.storage.seen_ids import SeenIds


@command
def trust_metadata(
    directory: DataDirectory,
    *,
    ledger_directory: LedgerDirectories = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="What the metadata store does not list may be freed.")
    ] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Let a node free ledgers again after ZooKeeper came back from an old backup.

    Whatever the metadata store does not list once the node runs again is deleted then. A node
    that has no doubt about the store is left as it is.
    """
    result = asyncio.run(_trust(directory, ledger_directory, yes=yes))
    print_one(result, output, title=str(directory))


async def _trust(
    directory: Path, ledger_directories: list[Path] | None, *, yes: bool
) -> dict[str, Any]:
    mute_logs()
    async with open_directories(directory, ledger_directories) as directories:
        seen = await _seen_ids(directories)
        if not seen.behind:
            return _document(seen, seen)
        if not yes:
            raise RefusedError(
                f"ledger ids below {seen.next_id} were given, and the metadata store would have "
                f"given {seen.behind_at} next: it came back from an old backup, and the node in "
                f"{directory} may have ledgers that exist nowhere else",
                remedy="Add --yes, once newer metadata are back or these are known to be right: "
                "what they do not list is freed (tierlog node ledgers shows what there is)",
                details={"next_id_seen": str(seen.next_id), "next_id_found": str(seen.behind_at)},
            )
        return _document(seen, await _keep_trusting(directories))


async def _seen_ids(directories: "Directories") -> "SeenIds":
    """Return what the node keeps, and change nothing."""
    from tierlog_ingest.storage.seen_ids import NOTHING_SEEN
    from tierlog_ingest.storage.state_file import read_states

    state, _ = await read_states(directories.all, log_directories=len(directories.with_logs))
    return NOTHING_SEEN if state is None else state.seen_ids


async def _keep_trusting(directories: "Directories") -> "SeenIds":
    """Start the node without serving, let it trust the store, and end it."""
    from tierlog.cli.session import load
    from tierlog.wiring.build import system_clock, system_ids
    from tierlog_ingest.storage.node import StorageNode
    from tierlog_ingest.storage.seen_ids import trusting

    node = await StorageNode.open(
        directories.first,
        system_ids(),
        load().ingest.storage,
        clock=system_clock(),
        ledger_dirs=directories.logs,
    )
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(node.run(stop))
        await asyncio.sleep(0)
        try:
            await node.keep_seen_ids(trusting(node.seen_ids, await node.list_ledgers()))
        finally:
            stop.set()
    return node.seen_ids


def _document(before: "SeenIds", after: "SeenIds") -> dict[str, Any]:
    return {
        "was_stopped": before.behind,
        "gc_stopped": after.behind,
        "next_id_seen": before.next_id,
        "next_id_found": before.behind_at if before.behind else None,
    }
