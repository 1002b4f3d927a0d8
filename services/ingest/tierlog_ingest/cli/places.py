"""The directories that the storage node's commands work on, each locked while they do."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated

import typer

from tierlog.model.errors import Reason, RefusedError
from tierlog.wiring.nodes import open_files
from tierlog_ingest.inspection.inspector import Directories
from tierlog_ingest.storage.cookies import COOKIE_PATH

DataDirectory = Annotated[
    Path, typer.Argument(metavar="DIR", help="The node's data directory; no node may run on it.")
]
LedgerDirectories = Annotated[
    list[Path] | None,
    typer.Option("--ledger-directory", help="As in the node's settings, in their order."),
]


@contextlib.asynccontextmanager
async def open_directories(first: Path, others: list[Path] | None) -> AsyncIterator[Directories]:
    """Lock and give a node's directories, which must be some."""
    for path in (first, *(others or ())):
        if not (path / COOKIE_PATH).exists() and not (path / "state").exists():
            raise RefusedError(
                f"{path} is not a storage node's data directory: it has neither cookie nor state",
                reason=Reason.NO_SUCH_ENTRY,
                remedy="Name the directory that the node's settings call data_dir",
            )
    async with contextlib.AsyncExitStack() as stack:
        opened = [
            await stack.enter_async_context(open_files(one)) for one in (first, *(others or ()))
        ]
        yield Directories(opened[0], tuple(opened[1:]))
