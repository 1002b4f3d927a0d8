"""Emptying a node's directories, so that a node with a new id can be made there.

Invariants:
    * Cookie and then state go last: a directory that was emptied in part is refused, never taken
      for an empty node.
    * What is not the node's stays.
"""

from collections.abc import Sequence
from typing import Final

from tierlog.ports.files import Files
from tierlog_ingest.storage.cookies import COOKIE_PATH
from tierlog_ingest.storage.entrylog.entry_log import LOGS_DIRECTORY
from tierlog_ingest.storage.index.index_files import INDEX_DIRECTORY
from tierlog_ingest.storage.journal.segments import JOURNAL_DIRECTORY
from tierlog_ingest.storage.state_file import STATE_PATH

_LAST: Final = (COOKIE_PATH, STATE_PATH)


async def format_directories(directories: Sequence[Files]) -> int:
    """Remove the node's files from all its directories, durably; return how many there were."""
    removed = 0
    for files in directories:
        folders = [JOURNAL_DIRECTORY, LOGS_DIRECTORY]
        folders += [f"{INDEX_DIRECTORY}/{one}" for one in await files.list(INDEX_DIRECTORY)]
        for folder in folders:
            removed += await _empty(files, folder)
    for files in directories:
        for path in _LAST:
            if await files.exists(path):
                await files.remove(path)
                await files.sync_directory("")
                removed += 1
    return removed


async def _empty(files: Files, folder: str) -> int:
    names = await files.list(folder)
    for name in names:
        await files.remove(f"{folder}/{name}")
    if names:
        await files.sync_directory(folder)
    return len(names)
