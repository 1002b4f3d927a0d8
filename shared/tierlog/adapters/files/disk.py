"""The files port over one folder of the local disk, by a small pool of threads.

Owns: system calls, and what their errors mean. Does not own how a call is cut (``direct``), what is
written, nor the order of writes to a file: whoever awaits them does.

Invariants:
    * No name reaches outside of the root; symbolic links are not followed.
    * A file's descriptors are closed only when no call uses them, whoever was cancelled meanwhile.
    * An error of a sync, and EIO of a write, is ``DiskFailedError``; a full disk READ_ONLY.
    * A folder that is locked has one process; the system gives the lock back when that ends.

Cancellation: a call that has begun goes on; its caller just doesn't hear of it.
"""

import asyncio
import contextlib
import ctypes
import errno
import fcntl
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeVar

from tierlog.adapters.files.direct import (
    DirectCalls,
    DirectFile,
    direct_memory,
    open_direct,
    read_all,
    write_all,
)
from tierlog.model.errors import CorruptError, Reason, RefusedError, RetryableError
from tierlog.ports.files import Buffer, DiskFailedError, FileWrite

T = TypeVar("T")

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_NAME_LEN_MAX: Final = 255
_NO_NAMES: Final = frozenset({"", ".", ".."})
_OPEN_FLAGS: Final = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
_SYNC_AT_ONCE_MIN: Final = 16
"""So many files, or more, are synced with their file system: one wait instead of many."""
_LOCAL_FILE_SYSTEMS: Final = frozenset(
    # ext2 to ext4, XFS, Btrfs, F2FS, tmpfs: statfs(2)
    {0xEF53, 0x58465342, 0x9123683E, 0xF2F52010, 0x01021994}
)
LOCK_NAME: Final = "lock"


class DiskFiles:
    """Everything below ``root``, which is made when it is missing."""

    def __init__(
        self, root: Path, *, threads: int = 8, direct_calls: DirectCalls | None = None
    ) -> None:
        self._root = root.resolve()
        self._root_name = str(self._root)
        _make_root(self._root)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="disk")
        self._memory = direct_memory()
        self._direct_calls = direct_calls or DirectCalls()
        self._open_count = 0
        self._lock_fd = -1
        # Open for good: it is told of all errors since it was opened, also of forgotten files.
        self._root_fd = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._device = os.fstat(self._root_fd).st_dev
        self._is_local = _is_local(self._root_fd)

    def __repr__(self) -> str:
        return f"<DiskFiles {self._root}, open={self._open_count}>"

    async def open(self, path: str, *, create: bool = False, direct: bool = False) -> "DiskFile":
        full = self._full_name(path)
        with _errors(path):
            fd, writer = await self._run(lambda: self._open(full, create=create, direct=direct))
        self._open_count += 1
        return DiskFile(self, fd, path, writer)

    async def write_files(self, writes: Sequence[FileWrite], *, sync: bool) -> None:
        fulls = [self._full_name(write.path) for write in writes]

        def write_files() -> None:
            at_once = len(writes) >= _SYNC_AT_ONCE_MIN and self._can_sync_at_once(fulls)
            for full, write in zip(fulls, writes, strict=True):
                if write.pieces or not at_once:
                    _write_file(full, write, sync=sync and not at_once)
            if sync and at_once:
                with _errors(str(self._root), syncing=True):
                    _sync_file_system(self._root_fd)

        await self._run(write_files)

    async def exists(self, path: str) -> bool:
        full = self._full(path)
        return await self._run(lambda: os.path.lexists(full))

    async def list(self, directory: str) -> list[str]:
        full = self._full(directory)
        try:
            with _errors(directory):
                return await self._run(lambda: sorted(one.name for one in full.iterdir()))
        except FileNotFoundError:
            return []

    async def make_directory(self, directory: str) -> None:
        full = self._full(directory)
        with _errors(directory):
            await self._run(lambda: self._make_directory(full))

    async def rename(self, source: str, target: str) -> None:
        source_full, target_full = self._full(source), self._full(target)
        with _errors(target):
            await self._run(lambda: source_full.replace(target_full))

    async def remove(self, path: str) -> None:
        full = self._full(path)
        with _errors(path):
            await self._run(full.unlink)

    async def sync_directory(self, directory: str) -> None:
        full = self._full(directory)
        with _errors(directory, syncing=True):
            await self._run(lambda: _sync_directory(full))

    async def free_bytes(self) -> int:
        def ask() -> int:
            found = os.statvfs(self._root)
            return found.f_bavail * found.f_frsize

        return await self._run(ask)

    async def total_bytes(self) -> int:
        def ask() -> int:
            found = os.statvfs(self._root)
            return found.f_blocks * found.f_frsize

        return await self._run(ask)

    def lock(self) -> None:
        """Keep every other process out until ``close``; ``RetryableError`` when one is in."""
        fd = os.open(self._root / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 20, 0).decode("ascii", "replace") or "unknown"
            os.close(fd)
            raise RetryableError(
                f"the data directory {self._root} is in use by process {holder}",
                remedy="Stop that process, or name another directory",
            ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
        self._lock_fd = fd

    def close(self) -> None:
        """End the threads; calls in flight are waited for."""
        self._pool.shutdown(wait=True)
        if self._root_fd >= 0:
            os.close(self._root_fd)
            self._root_fd = -1
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    async def _run(self, call: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        # Shielded: a call that waits for its thread is not withdrawn, so that what a file counts
        # at the call is counted back in the thread.
        return await asyncio.shield(loop.run_in_executor(self._pool, call))

    def _full(self, path: str) -> Path:
        return Path(self._full_name(path))

    def _full_name(self, path: str) -> str:
        names = path.split("/") if path else []
        if any(name in _NO_NAMES or "\0" in name or len(name) > _NAME_LEN_MAX for name in names):
            raise RefusedError(
                f"the path {path[:200]!r} leads out of the data directory, or nowhere",
                remedy="Use relative paths without . and ..",
            )
        return f"{self._root_name}/{path}" if path else self._root_name

    def _can_sync_at_once(self, fulls: Sequence[str]) -> bool:
        """Tell whether all files lie on the root's file system: a folder may be a mount point."""
        folders = {os.path.dirname(full) for full in fulls}  # noqa: PTH120 - many, and strings
        try:
            devices = {os.stat(folder).st_dev for folder in folders}  # noqa: PTH116
        except OSError:
            return False  # each file by itself says what is wrong
        return self._is_local and devices <= {self._device}

    def _open(self, full: str, *, create: bool, direct: bool) -> tuple[int, DirectFile | None]:
        fd = os.open(full, _OPEN_FLAGS | (os.O_CREAT if create else 0), 0o640)
        if not direct:
            return fd, None
        try:
            return fd, open_direct(full, _OPEN_FLAGS, fd, self._memory, self._direct_calls)
        except BaseException:
            os.close(fd)
            raise

    def _make_directory(self, full: Path) -> None:
        below = full.relative_to(self._root).parts
        parent = self._root
        for name in below:
            (parent / name).mkdir(mode=0o750, exist_ok=True)
            # Also when it was there: a process that was killed may not have come to it.
            with _errors(str(parent), syncing=True):
                _sync_directory(parent)
            parent /= name


class DiskFile:
    """One open file, of one descriptor or two."""

    def __init__(
        self, files: DiskFiles, fd: int, path: str, direct: DirectFile | None = None
    ) -> None:
        self._files = files
        self._fd = fd
        self._direct = direct
        self._path = path
        self._lock = threading.Lock()
        self._users = 0
        self._closing = False

    def __repr__(self) -> str:
        return f"<DiskFile {self._path}{' closed' if self._closing else ''}>"

    async def write(self, offset: int, buffers: Sequence[Buffer]) -> None:
        with _errors(self._path):
            await self._call(lambda: self._write(offset, buffers))

    async def write_and_sync(self, offset: int, buffers: Sequence[Buffer]) -> None:
        def write_and_sync() -> None:
            with _errors(self._path):
                self._write(offset, buffers)
            with _errors(self._path, syncing=True):
                os.fdatasync(self._fd)

        await self._call(write_and_sync)

    async def read(self, offset: int, length: int) -> Buffer:
        with _errors(self._path, reading=True):
            return await self._call(lambda: self._read(offset, length))

    async def size(self) -> int:
        return await self._call(lambda: os.fstat(self._fd).st_size)

    async def truncate(self, length: int) -> None:
        with _errors(self._path):
            await self._call(lambda: os.ftruncate(self._fd, length))

    async def sync(self) -> None:
        with _errors(self._path, syncing=True):
            await self._call(lambda: os.fdatasync(self._fd))

    async def close(self) -> None:
        with self._lock:
            if self._closing:
                return
            self._closing = True
            self._files._open_count -= 1  # noqa: SLF001 - the folder's own file
            if self._users == 0:
                self._close()

    def _write(self, offset: int, buffers: Sequence[Buffer]) -> None:
        if self._direct is None:
            write_all(self._fd, offset, buffers)
        else:
            self._direct.write(self._fd, offset, buffers)

    def _read(self, offset: int, length: int) -> Buffer:
        if self._direct is None:
            return read_all(self._fd, offset, length)
        return self._direct.read(self._fd, offset, length)

    def _close(self) -> None:
        os.close(self._fd)
        if self._direct is not None:
            os.close(self._direct.fd)

    async def _call(self, call: Callable[[], T]) -> T:
        with self._lock:
            if self._closing:
                raise RetryableError(f"{self._path} is closed", remedy="Open it again")
            self._users += 1

        def use() -> T:
            try:
                return call()
            finally:
                with self._lock:
                    self._users -= 1
                    if self._closing and self._users == 0:
                        self._close()

        return await self._files._run(use)  # noqa: SLF001 - the folder's own file


def _make_root(root: Path) -> None:
    """Make a folder with its parents, durably: a root that vanishes takes all with it."""
    missing = [one for one in (root, *root.parents) if not one.exists()]
    root.mkdir(parents=True, exist_ok=True)
    # Also when it was there: a process that was killed may not have come to it.
    for made in missing or [root]:
        _sync_directory(made.parent)


_libc: Final = ctypes.CDLL(None, use_errno=True)


def _find_syncfs() -> Callable[[int], int] | None:
    """Return the system's call, if it reports errors: Linux does since 5.8."""
    system = os.uname()
    if system.sysname != "Linux" or tuple(map(int, system.release.split(".")[:2])) < (5, 8):
        return None
    found: Callable[[int], int] | None = getattr(_libc, "syncfs", None)
    return found


_syncfs: Final = _find_syncfs()


def _is_local(fd: int) -> bool:
    """Tell whether a file system is known to make all durable that ``syncfs`` finds in it.

    Where files really lie elsewhere (FUSE, network, overlays), ``syncfs`` returns too early, or is
    not told of errors.
    """
    found = ctypes.create_string_buffer(512)
    if _syncfs is None or _libc.fstatfs(fd, found) != 0:
        return False
    return ctypes.c_long.from_buffer(found).value in _LOCAL_FILE_SYSTEMS


def _sync_file_system(fd: int) -> None:
    assert _syncfs is not None
    if _syncfs(fd) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _write_file(full: str, write: FileWrite, *, sync: bool) -> None:
    with _errors(write.path):
        fd = os.open(full, _OPEN_FLAGS | (os.O_CREAT if write.create else 0), 0o640)
        try:
            for offset, buffers in write.pieces:
                write_all(fd, offset, buffers)
            if sync:
                with _errors(write.path, syncing=True):
                    os.fdatasync(fd)
        finally:
            os.close(fd)


def _sync_directory(full: Path) -> None:
    fd = os.open(full, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _errors(path: str, *, syncing: bool = False, reading: bool = False) -> Iterator[None]:
    """Let the system's errors out as what they mean."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        if syncing or (error.errno == errno.EIO and not reading):
            raise DiskFailedError(
                f"the disk failed at {path} ({error.strerror}). Replace it, or check the system's"
                " log; the node must be started anew"
            ) from error
        if error.errno in _FULL:
            raise RetryableError(
                f"the disk is full ({path})",
                reason=Reason.READ_ONLY,
                remedy="Free some space, or move the data directory to a larger disk",
            ) from error
        if error.errno == errno.EIO:
            raise CorruptError(
                f"the disk can't read {path}", remedy="Read another copy; replace the disk"
            ) from error
        if error.errno in {errno.ELOOP, errno.ENOTDIR, errno.EISDIR}:
            raise RefusedError(
                f"{path} is not a plain file below its folder ({error.strerror})",
                remedy="Remove what was put there",
            ) from error
        raise RetryableError(
            f"the system refused to work on {path} ({error.strerror})",
            remedy="Check permissions and the limit of open files",
        ) from error
