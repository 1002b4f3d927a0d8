"""``tierlog node …``: a storage node's directories, while no node runs on them; and its end."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tierlog.cli.output import (
    Output,
    OutputOption,
    print_json,
    print_one,
    print_rows,
    print_table,
    say,
    size_text,
)
from tierlog.cli.session import Quiet, command
from tierlog.model.errors import CorruptError, RefusedError
from tierlog_ingest.cli.decommission import decommission
from tierlog_ingest.cli.places import DataDirectory, LedgerDirectories, mute_logs, open_directories
from tierlog_ingest.cli.trust import trust_metadata

if TYPE_CHECKING:
    from tierlog_ingest.inspection.report import NodeFound

app = typer.Typer(no_args_is_help=True, help="Storage nodes: their directories, their end.")
app.command("decommission")(decommission)
app.command("trust-metadata")(trust_metadata)

ROWS_SHOWN_MAX = 50
RECOVERED = (
    "ledgers",
    "entry_logs",
    "entry_log_bytes",
    "journal_bytes_on_disk",
    "fences",
    "index_doubtful",
    "limbo",
)


@app.command("fsck")
@command
def fsck(
    directory: DataDirectory,
    *,
    ledger_directory: LedgerDirectories = None,
    quiet: Quiet = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Check every record, checksum, slot and mark; change nothing. Exit 6 when something is bad."""
    found = asyncio.run(_inspect(directory, ledger_directory, quiet=quiet))
    if output is Output.TABLE:
        _print_found(directory, found)
    else:
        print_json(document_of(found), indent=output is Output.JSON)
    if not found.sound:
        first = found.problems[0]
        verdicts = Counter(one.verdict.value for one in found.problems)
        counted = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())
        raise CorruptError(
            f"{directory} has {len(found.problems)} problems ({counted}), the first in "
            f"{first.path} at byte {first.offset}: {first.what}",
            remedy="What is 'rebuilt' the node mends at its start; what is 'damaged' is in the"
            " other copies of these ledgers; where it is 'refused', see the message",
        )


async def _inspect(
    directory: Path, ledger_directories: list[Path] | None, *, quiet: bool
) -> "NodeFound":
    from tierlog_ingest.inspection.inspector import inspect_node

    mute_logs()
    async with open_directories(directory, ledger_directories) as directories:
        return await inspect_node(directories, lambda text: say(text, quiet=quiet))


def document_of(found: "NodeFound") -> dict[str, Any]:
    """Return an inspection as JSON."""
    journal = found.journal
    return {
        "sound": found.sound,
        "problems": [
            {"path": one.path, "offset": one.offset, "what": one.what, "verdict": one.verdict}
            for one in found.problems
        ],
        "would_be_recovered": _recovered(found),
        "journal": {
            "segments": journal.segments,
            "mark": list(journal.mark) if journal.mark is not None else None,
            "end": list(journal.end) if journal.end is not None else None,
            "torn_tail": journal.torn,
        },
        "entry_logs": [_log_row(found, at) for at in range(len(found.logs))],
        "index": {
            "files": found.index_files,
            "pages": found.index_pages,
            "slots": found.index_slots,
        },
        "ledgers": len(found.ledgers),
        "fences": sum(one.fenced for one in found.ledgers.values()),
        "freed_ids": found.freed_ids,
        "doubtful": {"all": found.limbo, "ledgers": found.doubtful},
    }


def _recovered(found: "NodeFound") -> dict[str, Any]:
    journal = found.journal
    return {
        "records": dict(journal.records),
        "entries": journal.entries,
        "bytes": journal.run_bytes,
        "ledgers": sum(one.journal_entries > 0 for one in found.ledgers.values()),
    }


def _log_row(found: "NodeFound", at: int) -> dict[str, Any]:
    one = found.logs[at]
    return {
        "log_id": one.listed.log_id,
        "directory": one.directory,
        "sealed": one.listed.sealed,
        "bytes": one.listed.length,
        "runs": one.runs,
        "entries": one.entries,
        "ledgers": one.ledgers,
    }


def _print_found(directory: Path, found: "NodeFound") -> None:
    journal = found.journal
    summary = {
        "journal": f"{journal.segments} segments from the mark on, mark {_place(journal.mark)}, "
        f"end {_place(journal.end)}{', a torn tail' if journal.torn else ''}",
        "would be recovered": f"{journal.entries} entries, {size_text(journal.run_bytes)}, "
        + (", ".join(f"{count} {kind}" for kind, count in journal.records.items()) or "no record"),
        "entry logs": f"{len(found.logs)}, {sum(one.runs for one in found.logs)} runs, "
        f"{size_text(sum(one.listed.length for one in found.logs))}",
        "index": f"{found.index_files} files, {found.index_pages} pages, "
        f"{found.index_slots} entries",
        "ledgers": len(found.ledgers),
        "doubtful": "all that are not in the journal or an index"
        if found.limbo
        else len(found.doubtful),
        "problems": len(found.problems),
    }
    print_one(summary, Output.TABLE, title=str(directory))
    if found.problems:
        rows = [
            {"file": one.path, "byte": one.offset, "verdict": one.verdict.value, "what": one.what}
            for one in found.problems
        ]
        _print_some(rows, ("file", "byte", "verdict", "what"), "problems")


def _place(position: "tuple[int, int] | None") -> str:
    return "-" if position is None else f"{position[0]}:{position[1]}"


def _print_some(rows: list[dict[str, Any]], columns: tuple[str, ...], title: str) -> None:
    print_table(rows[:ROWS_SHOWN_MAX], dict.fromkeys(columns), title=title)
    if len(rows) > ROWS_SHOWN_MAX:
        say(f"{len(rows) - ROWS_SHOWN_MAX} more; -o json prints all")


@app.command("ledgers")
@command
def ledgers(
    directory: DataDirectory,
    *,
    ledger_directory: LedgerDirectories = None,
    quiet: Quiet = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """List the ledgers that a node holds entries of, or has fenced."""
    found = asyncio.run(_inspect(directory, ledger_directory, quiet=quiet))
    rows = [
        {
            "ledger_id": one.ledger_id,
            "entries": one.entries,
            "journal_entries": one.journal_entries,
            "bytes": one.payload_bytes,
            "last_entry_id": one.last_entry_id,
            "last_add_confirmed": one.last_add_confirmed,
            "fenced": one.fenced,
        }
        for _, one in sorted(found.ledgers.items())
    ]
    columns: dict[str, Any] = dict.fromkeys(rows[0] if rows else ("ledger_id", "entries"))
    if "bytes" in columns:
        columns["bytes"] = size_text
    print_rows(rows, columns, output, title=f"ledgers of {directory}")
    if found.problems:
        say(f"{len(found.problems)} problems: see tierlog node fsck {directory}")


@app.command("recover")
@command
def recover(
    directory: DataDirectory,
    *,
    ledger_directory: LedgerDirectories = None,
    quiet: Quiet = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Do what a node's start does, without serving: replay the journal, make it all durable."""
    result = asyncio.run(_recover(directory, ledger_directory, quiet=quiet))
    print_one(result, output, title=f"recovered {directory}")
    if result["damages"]:
        raise CorruptError(
            f"{len(result['damages'])} places were damaged, the first: {result['damages'][0]}",
            remedy="What the node can't prove it answers UNKNOWN; other nodes have the entries",
        )


async def _recover(
    directory: Path, ledger_directories: list[Path] | None, *, quiet: bool
) -> dict[str, Any]:
    from tierlog.cli.session import load
    from tierlog.wiring.build import system_clock, system_ids
    from tierlog_ingest.storage.node import StorageNode

    settings = load().ingest.storage
    mute_logs()
    async with open_directories(directory, ledger_directories) as directories:
        say("replaying the journal", quiet=quiet)
        node = await StorageNode.open(
            directories.first,
            system_ids(),
            settings,
            clock=system_clock(),
            ledger_dirs=directories.logs,
        )
        stop = asyncio.Event()
        stop.set()
        await node.run(stop)
        numbers = node.statistics()
        found: dict[str, Any] = {name: numbers[name] for name in RECOVERED}
        found["limbo"] = bool(numbers["limbo"])
        return {**found, "read_only": node.read_only, "damages": list(node.damages)}


@app.command("format")
@command
def format_directory(
    directory: DataDirectory,
    *,
    ledger_directory: LedgerDirectories = None,
    yes: Annotated[bool, typer.Option("--yes", help="Delete everything in it.")] = False,
    quiet: Quiet = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Empty a node's directories. The node's id is never used again: start it with a new one."""
    if not yes:
        raise RefusedError(
            f"this deletes all that the node has in {directory}",
            remedy="Add --yes, once other nodes have what it held (tierlog node ledgers shows it)",
        )
    removed = asyncio.run(_format(directory, ledger_directory))
    if output is not Output.TABLE:
        found = {"directory": str(directory), "files_removed": removed}
        print_json(found, indent=output is Output.JSON)
    say(f"removed {removed} files; start the node with a new ingest.node_id", quiet=quiet)


async def _format(directory: Path, ledger_directories: list[Path] | None) -> int:
    from tierlog_ingest.storage.formatting import format_directories

    async with open_directories(directory, ledger_directories) as directories:
        return await format_directories(directories.all)
