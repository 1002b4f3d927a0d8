"""Local disk. Paths are ``/``-separated and relative to the root that the adapter was given.

Durability, which the memory twin simulates: written bytes survive a crash only after ``sync``,
a new, renamed or removed name only after ``sync_directory`` of its folder.

Errors: ``RetryableError`` READ_ONLY when the disk is full, ``DiskFailedError`` (of
``tierlog.ports.files``) when a sync failed: the process must end, a sync is never retried.
``FileNotFoundError`` where a name does not exist.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

Buffer = bytes | bytearray | memoryview


class DiskFailedError(Exception):
    """The disk did not take what it was given; its cache can't be trusted any more."""


class File(Protocol):
    """An open file. Writes and reads name their offset, so that one handle serves many."""

    async def write(self, offset: int, buffers: Sequence[Buffer]) -> None:
        """Write ``buffers`` back to back from ``offset`` on, all of it."""
        ...

    async def write_and_sync(self, offset: int, buffers: Sequence[Buffer]) -> None:
        """``write`` and ``sync`` as one step (one thread hop for a group commit)."""
        ...

    async def read(self, offset: int, length: int) -> Buffer:
        """Return up to ``length`` bytes from ``offset``; fewer only at the end of the file.

        Nobody changes them.
        """
        ...

    async def size(self) -> int:
        """Return the file's length in bytes."""
        ...

    async def truncate(self, length: int) -> None:
        """Cut or extend (with zeros) the file to ``length``."""
        ...

    async def sync(self) -> None:
        """Make what was written durable (fdatasync)."""
        ...

    async def close(self) -> None:
        """Give the handle back; syncs nothing."""
        ...


class FileWrite(NamedTuple):
    """One file's share of ``Files.write_files``."""

    path: str
    pieces: Sequence[tuple[int, Sequence[Buffer]]]
    """Offsets, and what goes there, in this order. None: the file is only synced."""
    create: bool = False


class Files(Protocol):
    """A folder of the local disk and all below it."""

    async def open(self, path: str, *, create: bool = False, direct: bool = False) -> File:
        """Open for reading and writing; ``create`` makes the file if there is none.

        ``direct`` is a hint: large writes need not be kept in the system's cache. It changes
        neither what they mean nor what is durable: ``sync`` is needed as ever.
        """
        ...

    async def write_files(self, writes: Sequence[FileWrite], *, sync: bool) -> None:
        """Write many files as one step, each opened or made, and closed; ``sync`` syncs them all.

        After an error any of it may have been done. A sync that failed is ``DiskFailedError``, as
        ever.
        """
        ...

    async def exists(self, path: str) -> bool:
        """Tell whether a file or folder of that name exists."""
        ...

    async def list(self, directory: str) -> list[str]:
        """Return the names in ``directory``, sorted; empty when there is no such folder."""
        ...

    async def make_directory(self, directory: str) -> None:
        """Make ``directory`` and its parents, durably; no error when it exists."""
        ...

    async def rename(self, source: str, target: str) -> None:
        """Rename atomically, replacing ``target``; durable after ``sync_directory``."""
        ...

    async def remove(self, path: str) -> None:
        """Remove a file; durable after ``sync_directory``."""
        ...

    async def sync_directory(self, directory: str) -> None:
        """Make the names in ``directory`` durable."""
        ...

    async def free_bytes(self) -> int:
        """Return what the disk still takes."""
        ...

    async def total_bytes(self) -> int:
        """Return how large the disk is."""
        ...


async def write_by_turns(files: Files, writes: Sequence[FileWrite], *, sync: bool) -> None:
    """Do what ``write_files`` does by the other calls of the port, one file after the other."""
    for path, pieces, create in writes:
        file = await files.open(path, create=create)
        try:
            for offset, buffers in pieces:
                await file.write(offset, buffers)
            if sync:
                await file.sync()
        finally:
            await file.close()
