"""``tierlog entrylog …``: a storage node's entry logs, while no node runs on them."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Annotated, Any

import typer

from tierlog.cli.output import Output, OutputOption, print_json, print_rows
from tierlog.cli.session import command
from tierlog.model.errors import CorruptError, Reason, RefusedError
from tierlog_ingest.cli.places import DataDirectory, mute_logs, open_directories

app = typer.Typer(no_args_is_help=True, help="Storage nodes' entry logs.")


@app.command("dump")
@command
def dump(
    directory: DataDirectory,
    log_id: Annotated[int, typer.Argument(min=1, help="The log's number.")],
    *,
    ledger: Annotated[int | None, typer.Option(min=0, help="Only runs of this ledger.")] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Print the runs of an entry log in the order of its bytes; exit 6 when one is damaged."""
    mute_logs()
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
    # Closed here, whatever ends this: the directory's lock is given back in the same task.
    async with contextlib.aclosing(runs_of(directory, log_id, ledger_id, bad)) as runs:
        async for row in runs:
            if output is Output.JSONL:
                print_json(row)
            else:
                rows.append(row)
    if output is not Output.JSONL:
        columns = dict.fromkeys(("offset", "ledger_id", "first", "last", "lac", "bytes", "signed"))
        print_rows(rows, columns, output, title=f"entry log {log_id} of {directory}")


async def runs_of(
    directory: Path, log_id: int, ledger_id: int | None, bad: list[str]
) -> AsyncGenerator[dict[str, Any], None]:
    """Iterate over runs as rows; what is damaged goes to ``bad``."""
    from tierlog_ingest.inspection.inspector import runs_end
    from tierlog_ingest.storage.entrylog.entry_log import log_path
    from tierlog_ingest.storage.entrylog.entry_log_format import LOG_HEADER_LEN
    from tierlog_ingest.storage.entrylog.entry_log_scan import LogScan

    async with open_directories(directory, None) as directories:
        try:
            file = await directories.first.open(log_path(log_id))
        except FileNotFoundError as error:
            raise RefusedError(
                f"{directory} has no entry log {log_id}",
                reason=Reason.NO_SUCH_ENTRY,
                remedy="tierlog node fsck lists them; each of several directories has its own",
            ) from error
        try:
            scan = LogScan(
                file.read,
                start=LOG_HEADER_LEN,
                end=(await runs_end(file, log_id))[0],
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
                        "signed": run.is_signed,
                    }
        finally:
            await file.close()
