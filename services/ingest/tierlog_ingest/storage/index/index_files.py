"""The index files of one node by name: which there are, in which directory, and a few of them open.

Owns names, the list of known ledgers, open handles, and which names are not durable yet. Does not
own what is in a file: ``index_format`` and the ledger cache do.

Invariants:
    * A ledger's index is in one directory, where it was made.
    * A file in use is never closed by the limit of open ones.
    * The name of a new or removed file is in ``changed_folders`` until its folder was synced.
"""

import asyncio
import contextlib
import re
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable, KeysView, Mapping, Sequence
from typing import Final, NamedTuple

import structlog

from tierlog.ports.files import File, Files, FileWrite
from tierlog_ingest.storage.index.index_format import damaged

log = structlog.get_logger()

INDEX_DIRECTORY: Final = "index"
_FOLDER_COUNT: Final = 256
_NAME: Final = re.compile(r"([0-9a-f]{16})\.idx", re.ASCII)


class Folder(NamedTuple):
    """A folder of index files, in one of the directories."""

    directory: int
    path: str


def index_folder(ledger_id: int) -> str:
    """Return the folder of a ledger's index."""
    return f"{INDEX_DIRECTORY}/{ledger_id % _FOLDER_COUNT:02x}"


def index_path(ledger_id: int) -> str:
    """Return the name of a ledger's index."""
    return f"{index_folder(ledger_id)}/{ledger_id:016x}.idx"


class IndexFiles:
    """The index files in all directories of a node."""

    def __init__(self, dirs: Sequence[Files], *, open_files_max: int) -> None:
        self._dirs = tuple(dirs)
        self._open_max = open_files_max
        self._directories: dict[int, int] = {}
        self._doubled: dict[int, set[int]] = {}
        self._folders: set[Folder] = set()
        self._changed: set[Folder] = set()
        self._open: OrderedDict[int, File] = OrderedDict()
        self._users: dict[int, int] = {}
        self._opening: dict[int, asyncio.Event] = {}

    def __repr__(self) -> str:
        return f"<IndexFiles {len(self._directories)}, open={len(self._open)}/{self._open_max}>"

    @property
    def open_count(self) -> int:
        """Files that are open."""
        return len(self._open)

    def ledger_ids(self) -> KeysView[int]:
        """Return all ledgers that have an index."""
        return self._directories.keys()

    def is_doubled(self, ledger_id: int) -> bool:
        """Tell whether several directories have an index of that ledger: none can be trusted."""
        return ledger_id in self._doubled

    async def list_all(self) -> None:
        """Find out which there are; opens none."""
        for directory, files in enumerate(self._dirs):
            made = set(await files.list(INDEX_DIRECTORY))
            for number in range(_FOLDER_COUNT):
                if f"{number:02x}" in made:
                    await self._list(Folder(directory, f"{INDEX_DIRECTORY}/{number:02x}"), number)

    async def _list(self, folder: Folder, number: int) -> None:
        for name in await self._dirs[folder.directory].list(folder.path):
            match = _NAME.fullmatch(name)
            ledger_id = int(match[1], 16) if match else -1
            if ledger_id % _FOLDER_COUNT != number or ledger_id < 0:
                log.warning("index.foreign_file", path=f"{folder.path}/{name}")
                continue
            known = self._directories.setdefault(ledger_id, folder.directory)
            if known != folder.directory:
                log.error("index.doubled", ledger_id=ledger_id)
                self._doubled.setdefault(ledger_id, set()).add(folder.directory)

    def add(self, ledger_id: int, directory: int) -> None:
        """Take note of a ledger whose file will be made."""
        assert 0 <= directory < len(self._dirs)
        self._directories[ledger_id] = directory

    @contextlib.asynccontextmanager
    async def use(self, ledger_id: int, *, create: bool = False) -> AsyncIterator[File]:
        """Lend a ledger's file. ``FileNotFoundError`` if it was removed meanwhile."""
        self._users[ledger_id] = self._users.get(ledger_id, 0) + 1
        try:
            yield await self._get(ledger_id, create=create)
        finally:
            self._users[ledger_id] -= 1
            if not self._users[ledger_id]:
                del self._users[ledger_id]
            await self._close_surplus()

    async def _get(self, ledger_id: int, *, create: bool) -> File:
        while (file := self._open.get(ledger_id)) is None:
            under_way = self._opening.get(ledger_id)
            if under_way is not None:
                await under_way.wait()
                continue
            done = self._opening[ledger_id] = asyncio.Event()
            try:
                await self._open_file(ledger_id, create=create)
            finally:
                del self._opening[ledger_id]
                done.set()
        self._open.move_to_end(ledger_id)
        return file

    async def _open_file(self, ledger_id: int, *, create: bool) -> None:
        directory = self._directories.get(ledger_id)
        if directory is None:
            raise FileNotFoundError(index_path(ledger_id))
        files, folder = self._dirs[directory], Folder(directory, index_folder(ledger_id))
        if create:
            await self.make_folders([ledger_id])
        try:
            file = await files.open(index_path(ledger_id), create=create)
        except FileNotFoundError:
            if ledger_id in self._directories:
                raise damaged(ledger_id, "its file is gone") from None
            raise
        if create:
            self._changed.add(folder)
        if self._directories.get(ledger_id) != directory:
            await file.close()
            raise FileNotFoundError(index_path(ledger_id))
        self._open[ledger_id] = file

    async def make_folders(self, ledger_ids: Iterable[int]) -> None:
        """Make the folders that new files need, durably."""
        for ledger_id in ledger_ids:
            folder = Folder(self._directories[ledger_id], index_folder(ledger_id))
            if folder not in self._folders:
                await self._dirs[folder.directory].make_directory(folder.path)
                self._folders.add(folder)

    async def write(self, writes: Mapping[int, FileWrite], *, sync: bool) -> bool:
        """Write the files of several ledgers; False if one is missing."""
        of_directories: dict[int, list[FileWrite]] = {}
        for ledger_id, write in writes.items():
            of_directories.setdefault(self._directories[ledger_id], []).append(write)
        try:
            for directory, some in of_directories.items():
                await self._dirs[directory].write_files(some, sync=sync)
        except FileNotFoundError:
            return False
        finally:
            for directory, some in of_directories.items():
                made = {one.path.rpartition("/")[0] for one in some if one.create}
                self._changed.update(Folder(directory, path) for path in made)
        return True

    async def _close_surplus(self) -> None:
        while len(self._open) > self._open_max:
            idle = next((one for one in self._open if one not in self._users), None)
            if idle is None:
                return
            await self._open.pop(idle).close()

    def forget(self, ledger_id: int) -> list[int]:
        """Let a ledger be unknown; return the directories in which it has a file."""
        directory = self._directories.pop(ledger_id, None)
        return [] if directory is None else [directory, *self._doubled.pop(ledger_id, ())]

    async def remove(self, ledger_id: int, directories: Sequence[int]) -> None:
        """Remove a ledger's files; a crash may bring them back until their folder is synced."""
        await self._close(ledger_id)
        for directory in directories:
            await self._remove(ledger_id, directory)

    async def remove_doubles(self, ledger_id: int) -> None:
        """Keep the file in the first directory only, durably; it is opened anew."""
        await self._close(ledger_id)
        for directory in self._doubled.get(ledger_id, ()):
            await self._remove(ledger_id, directory)
            await self._dirs[directory].sync_directory(index_folder(ledger_id))
        self._doubled.pop(ledger_id, None)

    async def _remove(self, ledger_id: int, directory: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            await self._dirs[directory].remove(index_path(ledger_id))
            self._changed.add(Folder(directory, index_folder(ledger_id)))

    async def sync_folders(self) -> None:
        """Make all names durable that changed before the call."""
        changed = self._changed
        self._changed = set()
        try:
            for folder in sorted(changed):
                await self._dirs[folder.directory].sync_directory(folder.path)
        except BaseException:
            self._changed |= changed
            raise

    async def close(self) -> None:
        """Close all; syncs nothing."""
        for ledger_id in list(self._open):
            await self._close(ledger_id)

    async def _close(self, ledger_id: int) -> None:
        file = self._open.pop(ledger_id, None)
        if file is not None:
            await file.close()
