"""The directories that the storage node's commands work on, each locked while they do."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tierlog.model.errors import Reason, RefusedError

if TYPE_CHECKING:
    from tierlog_ingest.inspection.inspector import Directories

DataDirectory = Annotated[
    Path, typer.Argument(metavar="DIR", help="The node's data directory; no node may run on it.")
]
LedgerDirectories = Annotated[
    list[Path] | None,
    typer.Option("--ledger-directory", help="As in the node's settings, in their order."),
]

_COOKIE = "cookie"
_STATE = "state"


@contextlib.asynccontextmanager
async def open_directories(first: Path, others: list[Path] | None) -> "AsyncIterator[Directories]":
    """Lock and give a node's directories, which must be some."""
    from tierlog.wiring.nodes import open_all_files
    from tierlog_ingest.inspection.inspector import Directories

    paths = (first, *(others or ()))
    for path in paths:
        _check(path)
    if len({path.resolve() for path in paths}) < len(paths):
        raise RefusedError(
            "one directory is named twice",
            reason=Reason.INVALID_ARGUMENT,
            remedy="Name each directory of the node once, in the order of its settings",
        )
    async with open_all_files(paths) as opened:
        yield Directories(opened[0], opened[1:])


def _check(path: Path) -> None:
    """Refuse what no node has been in, before a lock is made there."""
    if not path.exists():
        what = "is not there"
    elif not path.is_dir():
        what = "is no directory"
    elif not (path / _COOKIE).is_file() and not (path / _STATE).is_file():
        what = "is not a storage node's data directory: it has neither cookie nor state"
    else:
        return
    raise RefusedError(
        f"{path} {what}",
        reason=Reason.NO_SUCH_ENTRY,
        remedy="Name the directory that the node's settings call data_dir",
    )


def mute_logs() -> None:
    """Leave to a command's result what the storage also logs; with --debug it does both."""
    import logging

    import structlog

    from tierlog.cli.session import SESSION

    if not SESSION.debug:
        muted = structlog.make_filtering_bound_logger(logging.CRITICAL)
        structlog.configure(wrapper_class=muted, cache_logger_on_first_use=False)
