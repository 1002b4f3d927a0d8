"""``tierlog journal …``: a storage node's journal, while no node runs on it."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Annotated, Any

import typer

from tierlog.cli.output import Output, OutputOption, print_json, print_rows
from tierlog.cli.session import command
from tierlog.model.errors import CorruptError
from tierlog_ingest.cli.places import DataDirectory, LedgerDirectories, mute_logs, open_directories

app = typer.Typer(no_args_is_help=True, help="Storage nodes' journals.")

Row = dict[str, Any]


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
    mute_logs()
    damages: list[str] = []
    records = records_of(directory, ledger_directory, damages, everything=everything)
    asyncio.run(_dump(directory, records, output))
    if damages:
        raise CorruptError(
            f"{len(damages)} places are damaged, the first: {damages[0]}",
            remedy="tierlog node fsck tells what becomes of them",
        )


async def _dump(directory: Path, records: AsyncGenerator[Row, None], output: Output) -> None:
    rows: list[Row] = []
    # Closed here, whatever ends this: the directories' locks are given back in the same task.
    async with contextlib.aclosing(records):
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
) -> AsyncGenerator[Row, None]:
    """Iterate over records as rows; what is damaged goes to ``damages``."""
    from tierlog_ingest.inspection.inspector import journal_start
    from tierlog_ingest.storage.journal.replay import record_groups, scan_journal
    from tierlog_ingest.storage.state_file import read_states

    async with open_directories(directory, ledger_directories) as places:
        mark = None
        if not everything:
            try:
                state, _ = await read_states(places.all, log_directories=len(places.with_logs))
            except CorruptError as error:
                raise CorruptError(
                    f"{error.message}, which has the mark",
                    remedy="Add --all: the journal from its oldest segment on",
                ) from error
            mark = state.mark if state is not None else None
        replay = await scan_journal(places.first, mark or await journal_start(places.first))
        async with contextlib.aclosing(record_groups(replay)) as groups:
            async for group in groups:
                for record in group:
                    yield {"segment": replay.end.segment_id, **_row(record, damages)}
        damages += replay.damages


def _row(record: Any, damages: list[str]) -> Row:  # noqa: ANN401 - a Record, imported late
    try:
        return row_of(record)
    except CorruptError as error:
        damages.append(error.message)
        return {"kind": record.kind.name, "bytes": len(record.payload)}


def row_of(record: Any) -> Row:  # noqa: ANN401 - a Record, imported late
    """Return a record as a row."""
    from tierlog.format.run import Run
    from tierlog_ingest.storage.journal.format import Kind, decode_ledger_id

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
