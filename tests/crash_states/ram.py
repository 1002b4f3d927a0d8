"""The files port over a plain dictionary: what a node finds after a power cut, opened quickly.

Owns: the files of one state of a disk, changed as the node changes them. Does not own what is
durable: ``recorder`` notes that, ``model`` judges it.

Invariant: no call waits, and a node that calls without end is stopped (``TooManyCallsError``).
"""

from __future__ import annotations

from collections.abc import Sequence

from tierlog.model.errors import RetryableError
from tierlog.ports.files import Buffer, FileWrite, write_by_turns

CALLS_MAX = 200_000


class TooManyCallsError(AssertionError):
    """A node that should be done goes on and on."""


class RamFiles:
    """Files as ``tierlog.ports.files`` has them, below the folder ``root`` of a shared image."""

    def __init__(self, image: dict[str, bytes | bytearray], *, root: str = "") -> None:
        self.image = image
        self.directories = {""}
        self._prefix = f"{root}/" if root else ""
        for path in image:
            self._add_directory(path.rpartition("/")[0])
        self._add_directory(root)
        self.calls = 0

    def __repr__(self) -> str:
        return f"<RamFiles of {len(self.image)} files>"

    async def open(self, path: str, *, create: bool = False, direct: bool = False) -> RamFile:
        path = self._full(path)
        if path not in self.image:
            if not create or path.rpartition("/")[0] not in self.directories:
                raise FileNotFoundError(path)
            self.image[path] = bytearray()
        data = self.image[path]
        if not isinstance(data, bytearray):
            data = self.image[path] = bytearray(data)
        return RamFile(self, data, path)

    async def write_files(self, writes: Sequence[FileWrite], *, sync: bool) -> None:
        await write_by_turns(self, writes, sync=sync)

    async def exists(self, path: str) -> bool:
        path = self._full(path)
        return path in self.image or path in self.directories

    async def list(self, directory: str) -> list[str]:
        wanted = self._full(directory)
        known = [*self.image, *(one for one in self.directories if one)]
        return sorted({one.rpartition("/")[2] for one in known if one.rpartition("/")[0] == wanted})

    async def make_directory(self, directory: str) -> None:
        self._add_directory(self._full(directory))

    async def rename(self, source: str, target: str) -> None:
        source, target = self._full(source), self._full(target)
        if source not in self.image:
            raise FileNotFoundError(source)
        self.image[target] = self.image.pop(source)

    async def remove(self, path: str) -> None:
        path = self._full(path)
        if path not in self.image:
            raise FileNotFoundError(path)
        del self.image[path]

    async def sync_directory(self, directory: str) -> None:
        if self._full(directory) not in self.directories:
            raise FileNotFoundError(directory)

    async def free_bytes(self) -> int:
        self.count_call()
        return 2**40

    async def total_bytes(self) -> int:
        self.count_call()
        return 2**41

    def count_call(self) -> None:
        """Take note of a call, and end a node that never ends."""
        self.calls += 1
        if self.calls > CALLS_MAX:
            raise TooManyCallsError(f"the node called its disk {self.calls} times")

    def _full(self, path: str) -> str:
        self.count_call()
        return f"{self._prefix}{path}" if path else self._prefix.rstrip("/")

    def _add_directory(self, path: str) -> None:
        names = path.split("/")
        self.directories.update("/".join(names[:end]) for end in range(1, len(names) + 1))


class RamFile:
    """One open file; it goes on to mean the same bytes when its name is given to others."""

    def __init__(self, files: RamFiles, data: bytearray, path: str) -> None:
        self._files = files
        self._data = data
        self.path = path
        self._closed = False

    async def write(self, offset: int, buffers: Sequence[Buffer]) -> None:
        self._check_open()
        apply_write(self._data, offset, b"".join(buffers))

    async def write_and_sync(self, offset: int, buffers: Sequence[Buffer]) -> None:
        await self.write(offset, buffers)

    async def read(self, offset: int, length: int) -> bytes:
        self._check_open()
        return bytes(self._data[offset : offset + length])

    async def size(self) -> int:
        self._check_open()
        return len(self._data)

    async def truncate(self, length: int) -> None:
        self._check_open()
        apply_truncate(self._data, length)

    async def sync(self) -> None:
        self._check_open()

    async def close(self) -> None:
        self._closed = True

    def _check_open(self) -> None:
        self._files.count_call()
        if self._closed:
            raise RetryableError(f"{self.path} is closed", remedy="Open it again")


def apply_write(data: bytearray, offset: int, piece: bytes) -> None:
    """Write as a disk does: zeros fill what was never written."""
    if not piece:
        return
    if offset > len(data):
        data.extend(bytes(offset - len(data)))
    data[offset : offset + len(piece)] = piece


def apply_truncate(data: bytearray, length: int) -> None:
    """Cut, or extend with zeros."""
    if length > len(data):
        data.extend(bytes(length - len(data)))
    else:
        del data[length:]
