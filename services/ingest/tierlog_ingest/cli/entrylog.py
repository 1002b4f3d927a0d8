"""``tierlog entrylog …``: a storage node's entry logs, while no node runs on them."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tierlog.cli.output import Output, OutputOption, print_json, print_rows
from tierlog.cli.session import command
from tierlog.model.errors import CorruptError, Reason, RefusedError
from tierlog_ingest.cli.places import DataDirectory, open_directories

if TYPE_CHECKING:
    from tierlog.ports.files import File

app = typer.Typer(no_args_is_help=True, help="Storage nodes' entry logs.")


@app.command("dump")
@command
def dump(
    directory: DataDirectory,
    log_id: Annotated[int, typer.Argument(min=1, help="The log's number.")],
    *,
    ledger: Annotated[int | None, typer.Option(help="Only runs of this ledger.")] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Print the runs of an entry log in the order of its bytes; exit 6 when one is damaged."""
    bad: list[str] = []
    asyncio.run(_dump(directory, log_id, ledger, bad, output))
    if bad:
        raise CorruptError(
            f"entry log {log_id} has {len(bad)} bad places, the first: {bad[0]}",
            remedy="tierlog node fsck tells what becomes of them",
        )


async def _dump(
    directory: Path, log_id: int, ledger_id: int | None, bad: list[str], output: Output
) -> None:
    rows: list[dict[str, Any]] = []
    async for row in runs_of(directory, log_id, ledger_id, bad):
        if output is Output.JSONL:
            print_json(row)
        else:
            rows.append(row)
    if output is not Output.JSONL:
        columns = dict.fromkeys(("offset", "ledger_id", "first", "last", "lac", "bytes"))
        print_rows(rows, columns, output, title=f"entry log {log_id} of {directory}")


async def runs_of(
    directory: Path, log_id: int, ledger_id: int | None, bad: list[str]
) -> AsyncIterator[dict[str, Any]]:
    """Iterate over runs as rows; what is damaged goes to ``bad``."""
    from tierlog_ingest.storage.entry_log import log_path
    from tierlog_ingest.storage.entry_log_format import LOG_HEADER_LEN
    from tierlog_ingest.storage.entry_log_scan import LogScan

    async with open_directories(directory, None) as directories:
        try:
            file = await directories.first.open(log_path(log_id))
        except FileNotFoundError as error:
            raise RefusedError(
                f"{directory} has no entry log {log_id}",
                reason=Reason.NO_SUCH_ENTRY,
                remedy="tierlog node fsck lists them",
            ) from error
        try:
            scan = LogScan(
                file.read,
                start=LOG_HEADER_LEN,
                end=await _runs_end(file, log_id),
                ledger_id=ledger_id,
                holds=None,
                on_bad=lambda start, end: bad.append(f"bytes {start} to {end - 1}"),
            )
            async for found in scan.runs():
                for offset, run in found:
                    yield {
                        "offset": offset,
                        "ledger_id": run.header.ledger_id,
                        "first": run.first_entry_id,
                        "last": run.last_entry_id,
                        "lac": run.header.last_add_confirmed,
                        "bytes": len(run.encoded),
                    }
        finally:
            await file.close()


async def _runs_end(file: "File", log_id: int) -> int:
    """Return where the runs end: at the map of a sealed log, else at the file's end."""
    from tierlog_ingest.storage.entry_log_format import MAP_TRAILER_LEN, map_offset_of

    size = await file.size()
    trailer = await file.read(max(0, size - MAP_TRAILER_LEN), MAP_TRAILER_LEN)
    return map_offset_of(trailer, log_id=log_id, size=size) or size
