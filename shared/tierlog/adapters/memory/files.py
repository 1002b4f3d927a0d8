"""The files port in memory: a disk that can crash, fill up and fail.

Owns what survives a crash. ``MemoryDisk`` is the disk; ``mount`` gives the folder of one process,
whose ``Faults`` decide at which step it crashes.

Invariants:
    * Bytes survive a crash for certain only after ``sync``. Of what was written since, each
      sector of 512 bytes survives or not, by the disk's own ``random.Random``.
    * A name that was made, renamed or removed survives for certain only after ``sync_directory``
      of its folder. Of a folder's changes since, the first few survive, in their order.
    * A process that crashed changes nothing any more, and hears nothing.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from tierlog.adapters.memory.faults import Faults, no_faults
from tierlog.model.errors import IndeterminateError, Reason, RefusedError, RetryableError
from tierlog.ports.files import Buffer, DiskFailedError, FileWrite, write_by_turns

T = TypeVar("T")

SECTOR_LEN: Final = 512


@dataclass(slots=True, eq=False)
class _Inode:
    """A file: what reads see, what is durable, and the changes between the two."""

    data: bytearray = field(default_factory=bytearray)
    durable: bytearray = field(default_factory=bytearray)
    unsynced: list[tuple[int, bytes] | int] = field(default_factory=list)

    def write(self, offset: int, data: bytes) -> None:
        self.unsynced.append((offset, data))
        _apply_write(self.data, offset, data)

    def truncate(self, length: int) -> None:
        self.unsynced.append(length)
        _apply_truncate(self.data, length)

    def sync(self) -> None:
        for change in self.unsynced:
            if isinstance(change, int):
                _apply_truncate(self.durable, change)
            else:
                _apply_write(self.durable, *change)
        self.unsynced.clear()

    def crash(self, rng: random.Random) -> None:
        for change in self.unsynced:
            if isinstance(change, int):
                if rng.random() < 0.5:
                    _apply_truncate(self.durable, change)
            else:
                self._tear(*change, rng)
        self.unsynced.clear()
        self.data = bytearray(self.durable)

    def _tear(self, offset: int, data: bytes, rng: random.Random) -> None:
        share = rng.choice((0.0, 0.5, 1.0))
        at = 0
        while at < len(data):
            sector_end = (offset + at) // SECTOR_LEN * SECTOR_LEN + SECTOR_LEN
            end = min(len(data), sector_end - offset)
            if rng.random() < share:
                _apply_write(self.durable, offset + at, data[at:end])
            at = end


@dataclass(slots=True, eq=False)
class _NameChange:
    """``path`` came to mean ``inode`` (None: nothing any more); two such for a rename."""

    changes: tuple[tuple[str, _Inode | None], ...]

    def touches(self, directory: str) -> bool:
        return any(_parent(path) == directory for path, _ in self.changes)


class MemoryDisk:
    """One disk. Faults are switched on by setting its public attributes."""

    def __init__(self, rng: random.Random, *, capacity_bytes: int = 2**50) -> None:
        self._rng = rng
        self._names: dict[str, _Inode] = {}
        self._durable_names: dict[str, _Inode] = {}
        self._directories: set[str] = {""}
        self._unsynced_names: list[_NameChange] = []
        self.boot = 0
        self.capacity_bytes = capacity_bytes
        self.fail_syncs = False
        """Every sync fails from now on."""
        self.lying_syncs = False
        """Syncs of files and folders do nothing: for tests of tests."""

    def __repr__(self) -> str:
        return f"<MemoryDisk boot {self.boot}, files={len(self._names)}, used={self.used_bytes}>"

    @property
    def used_bytes(self) -> int:
        """Bytes of all files."""
        return sum(len(inode.data) for inode in self._names.values())

    def mount(self, faults: Faults | None = None) -> "MemoryFiles":
        """Return the folder for a process that lives until the next crash."""
        return MemoryFiles(self, faults or no_faults())

    def crash(self, *, power_lost: bool = True) -> None:
        """End the process; every folder mounted before is dead. Without power, lose what can be."""
        self.boot += 1
        if not power_lost:
            return
        directories = sorted({_parent(p) for c in self._unsynced_names for p, _ in c.changes})
        kept = {one: self._rng.randint(0, 3) for one in directories}
        for change in self._unsynced_names:
            touched = [one for one in directories if change.touches(one)]
            if any(kept[one] > 0 for one in touched):
                self._make_durable(change)
            for one in touched:
                kept[one] -= 1
        self._unsynced_names.clear()
        for inode in self._durable_names.values():
            inode.crash(self._rng)
        self._names = dict(self._durable_names)

    def read_whole(self, path: str) -> bytes:
        """Return a file as it is now: for tests."""
        return bytes(self._names[path].data)

    def write_whole(self, path: str, data: bytes) -> None:
        """Replace a file durably: for tests that damage it."""
        inode = self._names.setdefault(path, _Inode())
        inode.data, inode.durable = bytearray(data), bytearray(data)
        inode.unsynced.clear()
        self._durable_names[path] = inode

    def paths(self) -> list[str]:
        """Return the names of all files."""
        return sorted(self._names)

    # What a mounted folder calls

    def open(self, path: str, *, create: bool) -> _Inode:
        """Return the file's inode."""
        inode = self._names.get(path)
        if inode is None:
            if not create or _parent(path) not in self._directories:
                raise FileNotFoundError(path)
            inode = _Inode()
            self._change_names((path, inode))
        return inode

    def exists(self, path: str) -> bool:
        """Tell whether there is a file or a folder."""
        return path in self._names or path in self._directories

    def list(self, directory: str) -> list[str]:
        """Return names in a folder."""
        known = [*self._names, *(one for one in self._directories if one)]
        return sorted(path.rpartition("/")[2] for path in known if _parent(path) == directory)

    def make_directory(self, directory: str) -> None:
        """Make a folder and its parents, at once durable."""
        names = directory.split("/")
        self._directories.update("/".join(names[:end]) for end in range(1, len(names) + 1))

    def rename(self, source: str, target: str) -> None:
        """Rename a file."""
        if source not in self._names or _parent(target) not in self._directories:
            raise FileNotFoundError(source)
        self._change_names((source, None), (target, self._names[source]))

    def remove(self, path: str) -> None:
        """Remove a file."""
        if path not in self._names:
            raise FileNotFoundError(path)
        self._change_names((path, None))

    def sync_file(self, inode: _Inode) -> None:
        """Make a file's bytes durable."""
        self._check_sync()
        if not self.lying_syncs:
            inode.sync()

    def sync_directory(self, directory: str) -> None:
        """Make a folder's names durable."""
        self._check_sync()
        if self.lying_syncs:
            return
        if directory not in self._directories:
            raise FileNotFoundError(directory)
        for change in self._unsynced_names:
            if change.touches(directory):
                self._make_durable(change)
        self._unsynced_names = [c for c in self._unsynced_names if not c.touches(directory)]

    def check_space(self, growth: int) -> None:
        """Raise READ_ONLY when the disk does not take ``growth`` more."""
        if growth > 0 and self.used_bytes + growth > self.capacity_bytes:
            raise RetryableError(
                "the disk is full", reason=Reason.READ_ONLY, remedy="Free some space"
            )

    def _check_sync(self) -> None:
        if self.fail_syncs:
            raise DiskFailedError("the disk failed at a sync. Replace it")

    def _change_names(self, *changes: tuple[str, _Inode | None]) -> None:
        for path, inode in changes:
            _apply_name(self._names, path, inode)
        self._unsynced_names.append(_NameChange(changes))

    def _make_durable(self, change: _NameChange) -> None:
        for path, inode in change.changes:
            _apply_name(self._durable_names, path, inode)


class MemoryFiles:
    """The folder of one process on a ``MemoryDisk``."""

    def __init__(self, disk: MemoryDisk, faults: Faults) -> None:
        self._disk = disk
        self._faults = faults
        self._boot = disk.boot

    def __repr__(self) -> str:
        return f"<MemoryFiles on {self._disk!r}>"

    async def open(self, path: str, *, create: bool = False, direct: bool = False) -> "MemoryFile":
        inode = await self.call("open", lambda: self._disk.open(_checked(path), create=create))
        return MemoryFile(self, self._disk, inode, path)

    async def write_files(self, writes: Sequence[FileWrite], *, sync: bool) -> None:
        await write_by_turns(self, writes, sync=sync)

    async def exists(self, path: str) -> bool:
        return await self.call("exists", lambda: self._disk.exists(_checked(path)), changes=False)

    async def list(self, directory: str) -> list[str]:
        return await self.call("list", lambda: self._disk.list(_checked(directory)), changes=False)

    async def make_directory(self, directory: str) -> None:
        await self.call("make_directory", lambda: self._disk.make_directory(_checked(directory)))

    async def rename(self, source: str, target: str) -> None:
        paths = _checked(source), _checked(target)
        await self.call("rename", lambda: self._disk.rename(*paths))

    async def remove(self, path: str) -> None:
        await self.call("remove", lambda: self._disk.remove(_checked(path)))

    async def sync_directory(self, directory: str) -> None:
        await self.call("sync_directory", lambda: self._disk.sync_directory(_checked(directory)))

    async def free_bytes(self) -> int:
        disk = self._disk
        return await self.call(
            "free_bytes", lambda: max(0, disk.capacity_bytes - disk.used_bytes), changes=False
        )

    async def total_bytes(self) -> int:
        disk = self._disk
        return await self.call("total_bytes", lambda: disk.capacity_bytes, changes=False)

    async def call(self, verb: str, effect: Callable[[], T], *, changes: bool = True) -> T:
        """Let the process's faults run ``effect``, unless the process is dead."""

        def guarded() -> T:
            self._check_alive()
            return effect()

        try:
            result = await self._faults.call(f"files.{verb}", guarded, changes=changes)
        except IndeterminateError as error:
            raise DiskFailedError(f"the disk did not answer: {error}") from error
        except DiskFailedError:
            await asyncio.sleep(0)
            raise
        self._check_alive()
        return result

    def _check_alive(self) -> None:
        if self._disk.boot != self._boot:
            raise DiskFailedError("this process crashed, its files are another's now")


class MemoryFile:
    """One open file."""

    def __init__(self, files: MemoryFiles, disk: MemoryDisk, inode: _Inode, path: str) -> None:
        self._files = files
        self._disk = disk
        self._inode = inode
        self._path = path
        self._closed = False

    def __repr__(self) -> str:
        return f"<MemoryFile {self._path}{' closed' if self._closed else ''}>"

    async def write(self, offset: int, buffers: Sequence[Buffer]) -> None:
        def effect() -> None:
            data = b"".join(buffers)
            self._disk.check_space(offset + len(data) - len(self._inode.data))
            if data:
                self._inode.write(offset, data)

        await self._call("write", effect)

    async def write_and_sync(self, offset: int, buffers: Sequence[Buffer]) -> None:
        await self.write(offset, buffers)
        await self.sync()

    async def read(self, offset: int, length: int) -> bytes:
        return await self._call(
            "read", lambda: bytes(self._inode.data[offset : offset + length]), changes=False
        )

    async def size(self) -> int:
        return await self._call("size", lambda: len(self._inode.data), changes=False)

    async def truncate(self, length: int) -> None:
        def effect() -> None:
            self._disk.check_space(length - len(self._inode.data))
            self._inode.truncate(length)

        await self._call("truncate", effect)

    async def sync(self) -> None:
        await self._call("sync", lambda: self._disk.sync_file(self._inode))

    async def close(self) -> None:
        self._closed = True

    async def _call(self, verb: str, effect: Callable[[], T], *, changes: bool = True) -> T:
        if self._closed:
            raise RetryableError(f"{self._path} is closed", remedy="Open it again")
        return await self._files.call(verb, effect, changes=changes)


def _checked(path: str) -> str:
    if path and any(name in {"", ".", ".."} or "\0" in name for name in path.split("/")):
        raise RefusedError(
            f"the path {path[:200]!r} leads out of the data directory, or nowhere",
            remedy="Use relative paths without . and ..",
        )
    return path


def _parent(path: str) -> str:
    return path.rpartition("/")[0]


def _apply_name(names: dict[str, _Inode], path: str, inode: _Inode | None) -> None:
    if inode is None:
        names.pop(path, None)
    else:
        names[path] = inode


def _apply_write(data: bytearray, offset: int, piece: bytes) -> None:
    if offset > len(data):
        data.extend(bytes(offset - len(data)))
    data[offset : offset + len(piece)] = piece


def _apply_truncate(data: bytearray, length: int) -> None:
    if length > len(data):
        data.extend(bytes(length - len(data)))
    else:
        del data[length:]
