"""``tierlog journal …``: a storage node's journal, while no node runs on it."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any

import typer

from tierlog.cli.output import Output, OutputOption, print_json, print_rows
from tierlog.cli.session import command
from tierlog.model.errors import CorruptError
from tierlog_ingest.cli.places import DataDirectory, LedgerDirectories, open_directories

app = typer.Typer(no_args_is_help=True, help="Storage nodes' journals.")


@app.command("dump")
@command
def dump(
    directory: DataDirectory,
    *,
    ledger_directory: LedgerDirectories = None,
    everything: Annotated[
        bool, typer.Option("--all", help="From the oldest segment on, not from the mark on.")
    ] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Print the journal's records in their order; exit 6 when one is damaged."""
    damages: list[str] = []
    records = records_of(directory, ledger_directory, damages, everything=everything)
    asyncio.run(_dump(directory, records, output))
    if damages:
        raise CorruptError(
            f"{len(damages)} places are damaged, the first: {damages[0]}",
            remedy="tierlog node fsck tells what becomes of them",
        )


async def _dump(directory: Path, records: AsyncIterator[dict[str, Any]], output: Output) -> None:
    rows: list[dict[str, Any]] = []
    async for row in records:
        if output is Output.JSONL:
            print_json(row)
        else:
            rows.append(row)
    if output is not Output.JSONL:
        columns = dict.fromkeys(("segment", "kind", "ledger_id", "first", "last", "lac", "bytes"))
        print_rows(rows, columns, output, title=f"journal of {directory}")


async def records_of(
    directory: Path,
    ledger_directories: list[Path] | None,
    damages: list[str],
    *,
    everything: bool,
) -> AsyncIterator[dict[str, Any]]:
    """Iterate over records as rows; what is damaged goes to ``damages``."""
    from tierlog_ingest.storage.state_file import read_states
    from tierlog_ingest.storage.wal.replay import record_groups, scan_journal

    async with open_directories(directory, ledger_directories) as places:
        mark = None
        if not everything:
            state, _ = await read_states(places.all, log_directories=len(places.with_logs))
            mark = state.mark if state is not None else None
        replay = await scan_journal(places.first, mark)
        async for group in record_groups(replay):
            for record in group:
                yield {"segment": replay.end.segment_id, **row_of(record)}
        damages += replay.damages


def row_of(record: Any) -> dict[str, Any]:  # noqa: ANN401 - a Record, imported late
    """Return a record as a row."""
    from tierlog.format.run import Run
    from tierlog_ingest.storage.wal.format import Kind, decode_ledger_id

    if record.kind is not Kind.RUN:
        ledger_id = decode_ledger_id(record.payload)
        return {"kind": record.kind.name, "ledger_id": ledger_id, "bytes": len(record.payload)}
    run = Run.decode(record.payload)
    return {
        "kind": record.kind.name,
        "ledger_id": run.header.ledger_id,
        "first": run.first_entry_id,
        "last": run.last_entry_id,
        "lac": run.header.last_add_confirmed,
        "bytes": len(record.payload),
    }
