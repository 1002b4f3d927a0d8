"""What a process does to its disk, in order, with what it answered meanwhile.

Owns: the log of operations, and which file each of them meant. Does not own what of it survives a
power cut: ``model`` does.

Invariants:
    * A write is in the log before it is on its way: a power cut may find it at any time since.
    * A sync is in the log once it ended, and names the operations that came before it began:
      what was written while it was under way it does not cover.
    * An answer is in the log no earlier than it was given.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.crash_states.ram import RamFiles
from tierlog.ports.files import Buffer, File, Files, FileWrite, write_by_turns


@dataclass(frozen=True, slots=True)
class Write:
    """Bytes given to a file."""

    inode: int
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Truncate:
    """A file cut, or extended with zeros."""

    inode: int
    length: int


@dataclass(frozen=True, slots=True)
class Sync:
    """A file's earlier changes, those before ``since`` in the log, are durable."""

    inode: int
    since: int


@dataclass(frozen=True, slots=True)
class Names:
    """Each path came to mean that inode (None: nothing any more), at once."""

    changes: tuple[tuple[str, int | None], ...]


@dataclass(frozen=True, slots=True)
class SyncDirectory:
    """A folder's earlier changes of names are durable."""

    directory: str
    since: int


@dataclass(frozen=True, slots=True)
class MakeDirectory:
    """A folder was made, durably, as the port promises."""

    directory: str


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that the process was asked, or that it answered."""

    what: str
    subject: Any


Operation = Write | Truncate | Sync | Names | SyncDirectory | MakeDirectory | Mark


@dataclass(slots=True)
class Recording:
    """The log of one process, over the disk as it was when the process began."""

    base: dict[str, bytes] = field(default_factory=dict)
    directories: frozenset[str] = frozenset()
    operations: list[Operation] = field(default_factory=list)

    def mark(self, what: str, subject: Any) -> None:
        """Note a question or an answer."""
        self.operations.append(Mark(what, subject))

    def base_inodes(self) -> dict[str, int]:
        """Return the inode of each file that was there at the beginning."""
        return {path: -1 - number for number, path in enumerate(sorted(self.base))}


class Recorder:
    """Several folders of one machine, whose operations make one log: ``mount`` each of them."""

    def __init__(self, recording: Recording, *, sync_s: float = 0.001) -> None:
        self.recording = recording
        self.names: dict[str, int] = recording.base_inodes()
        self._sync_s = sync_s
        self._inodes = 0

    def mount(self, inner: Files, root: str) -> RecordingFiles:
        """Return ``inner``, recorded; its paths appear in the log below ``root``."""
        return RecordingFiles(self, inner, root)

    def note(self, operation: Operation) -> None:
        """Append to the log."""
        self.recording.operations.append(operation)

    def here(self) -> int:
        """Return where the log is."""
        return len(self.recording.operations)

    def new_inode(self) -> int:
        """Return a number that no file has."""
        self._inodes += 1
        return self._inodes

    async def pause(self) -> None:
        """Let others go on while a sync takes its time."""
        await asyncio.sleep(self._sync_s)


class RecordingFiles:
    """The files port: everything is done by ``inner`` and noted."""

    def __init__(self, recorder: Recorder, inner: Files, root: str) -> None:
        self._recorder = recorder
        self._inner = inner
        self._root = root

    def __repr__(self) -> str:
        return f"<RecordingFiles {self._root!r}>"

    async def open(self, path: str, *, create: bool = False, direct: bool = False) -> RecordingFile:
        file = await self._inner.open(path, create=create, direct=direct)
        full = self._full(path)
        inode = self._recorder.names.get(full)
        if inode is None:
            assert create, f"{path} came from nowhere"
            inode = self._recorder.new_inode()
            self._rename((full, inode))
        return RecordingFile(self._recorder, file, inode, full)

    async def write_files(self, writes: Sequence[FileWrite], *, sync: bool) -> None:
        # As the disk does it: all is written before any of it is synced.
        await write_by_turns(self, writes, sync=False)
        if sync:
            empty = [FileWrite(one.path, []) for one in writes]
            await write_by_turns(self, empty, sync=True)

    async def exists(self, path: str) -> bool:
        return await self._inner.exists(path)

    async def list(self, directory: str) -> list[str]:
        return await self._inner.list(directory)

    async def make_directory(self, directory: str) -> None:
        await self._inner.make_directory(directory)
        self._recorder.note(MakeDirectory(self._full(directory)))

    async def rename(self, source: str, target: str) -> None:
        full = self._full(source)
        inode = self._recorder.names.get(full)
        if inode is not None:
            self._rename((full, None), (self._full(target), inode))
        await self._inner.rename(source, target)

    async def remove(self, path: str) -> None:
        if self._full(path) in self._recorder.names:
            self._rename((self._full(path), None))
        await self._inner.remove(path)

    async def sync_directory(self, directory: str) -> None:
        since = self._recorder.here()
        await self._recorder.pause()
        await self._inner.sync_directory(directory)
        self._recorder.note(SyncDirectory(self._full(directory), since))

    async def free_bytes(self) -> int:
        return await self._inner.free_bytes()

    async def total_bytes(self) -> int:
        return await self._inner.total_bytes()

    def image(self) -> dict[str, bytes | bytearray]:
        """Return what lies on a disk in memory now."""
        assert isinstance(self._inner, RamFiles)
        return dict(self._inner.image)

    def directories(self) -> set[str]:
        """Return the folders of a disk in memory."""
        assert isinstance(self._inner, RamFiles)
        return set(self._inner.directories)

    def _rename(self, *changes: tuple[str, int | None]) -> None:
        for path, inode in changes:
            if inode is None:
                del self._recorder.names[path]
            else:
                self._recorder.names[path] = inode
        self._recorder.note(Names(changes))

    def _full(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root


class RecordingFile:
    """One open file, recorded."""

    def __init__(self, recorder: Recorder, inner: File, inode: int, path: str) -> None:
        self._recorder = recorder
        self._inner = inner
        self._inode = inode
        self.path = path

    async def write(self, offset: int, buffers: Sequence[Buffer]) -> None:
        data = b"".join(buffers)
        if data:
            self._recorder.note(Write(self._inode, offset, data))
        await self._inner.write(offset, [data])

    async def write_and_sync(self, offset: int, buffers: Sequence[Buffer]) -> None:
        await self.write(offset, buffers)
        await self.sync()

    async def read(self, offset: int, length: int) -> Buffer:
        return await self._inner.read(offset, length)

    async def size(self) -> int:
        return await self._inner.size()

    async def truncate(self, length: int) -> None:
        self._recorder.note(Truncate(self._inode, length))
        await self._inner.truncate(length)

    async def sync(self) -> None:
        since = self._recorder.here()
        await self._recorder.pause()
        await self._inner.sync()
        self._recorder.note(Sync(self._inode, since))

    def note_sync(self) -> None:
        """Note that all until now is durable."""
        self._recorder.note(Sync(self._inode, self._recorder.here()))

    async def close(self) -> None:
        await self._inner.close()


def recorded_ram(recording: Recording, roots: Sequence[str]) -> list[RecordingFiles]:
    """Return recorded folders over a copy of the recording's base, kept in memory."""
    recorder = Recorder(recording)
    image: dict[str, bytes | bytearray] = dict(recording.base)
    mounted = []
    for root in roots:
        files = RamFiles(image, root=root)
        files.directories.update(recording.directories)
        mounted.append(recorder.mount(files, root))
    return mounted
