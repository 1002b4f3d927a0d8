"""The ingest process over a disk that can be told to fail; run it with ``python -m``.

It is ``tierlog_ingest.main.main()`` and nothing else, but that the system calls which the files
adapter makes (``pwritev``, ``fdatasync``, ``fsync``, ``syncfs``, ``statvfs``) go through this
module. A wrapper, since a machine that runs the tests need not grant mounts, nor have strace or a
compiler: the tests ask for nothing below the process to put a fault there.

Owns: what each fault does. ``Faults`` (a test's side) writes the control file in the folder that
``TIERLOG_FAULTS`` names; the process reads it anew at each call:

    under         only paths that begin so; all without it
    eio_on_sync   the next sync of a path that contains this fails with EIO, once; syncs after it
                  succeed, as the kernel's do. What was written and not synced becomes zeros, as
                  pages that the disk did not take are dropped.
    full          writes beyond a file's end are cut there, or refused with ENOSPC
    free_bytes    what ``statvfs`` says is free
    sync_delay_s  how much longer each sync takes

Each sync appends a line to ``syncs``: its outcome and its path. All of it works on the real files,
so that what a process leaves behind is what a killed one would.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import sys
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

VARIABLE = "TIERLOG_FAULTS"
MODULE = "tests.plugins.faulty_ingest"
REPOSITORY = Path(__file__).resolve().parents[2]


class Faults:
    """Switches faults of a process on and off, and tells what it synced."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def env(self) -> dict[str, str]:
        """What the process needs in its environment."""
        return {VARIABLE: str(self.folder), "PYTHONPATH": str(REPOSITORY)}

    def set(self, **faults: Any) -> None:
        """Have these faults, and no others, from the next system call on."""
        written = self.folder / "control.new"
        written.write_text(json.dumps(faults), encoding="utf-8")
        written.replace(self.folder / "control")

    def syncs(self) -> list[tuple[str, str]]:
        """Return outcome and path of each sync, in order of their ends."""
        lines = (self.folder / "syncs").read_text(encoding="utf-8").splitlines()
        return [(outcome, path) for outcome, _, path in (line.partition(" ") for line in lines)]


@dataclass
class _Disk:
    """The system calls, with faults."""

    folder: Path
    real: dict[str, Callable[..., Any]]
    failed: bool = False
    unsynced: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    syncs_fd: int = -1

    def __post_init__(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self.syncs_fd = os.open(self.folder / "syncs", flags)

    def faults(self, path: str) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads((self.folder / "control").read_bytes())
        except FileNotFoundError:
            return {}
        return found if path.startswith(found.get("under", "")) else {}

    def pwritev(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        path = path_of(fd)
        length = sum(memoryview(one).nbytes for one in buffers)
        if self.faults(path).get("full"):
            length = min(length, max(0, os.fstat(fd).st_size - offset))
            if not length:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
            buffers = [b"".join(buffers)[:length]]
        with self.lock:
            self.unsynced.setdefault(path, []).append((offset, length))
        written: int = self.real["pwritev"](fd, buffers, offset)
        return written

    def sync(self, call: str, fd: Any) -> None:
        path = path_of(fd)
        faults = self.faults(path)
        time.sleep(faults.get("sync_delay_s", 0))
        wanted = faults.get("eio_on_sync")
        with self.lock:
            fails = wanted is not None and wanted in path and not self.failed
            self.failed = self.failed or fails
            written = self.unsynced.pop(path, [])
            if call == "syncfs":
                self.unsynced.clear()
        if fails:
            for offset, length in written:
                os.pwrite(fd, bytes(length), offset)
            self.note("EIO", path)
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        if self.real[call](fd):
            raise OSError(ctypes.get_errno(), "syncfs", path)
        self.note("ok", path)

    def syncfs(self, fd: int) -> int:
        """As the system has it: -1 and ``errno``."""
        try:
            self.sync("syncfs", fd)
        except OSError as error:
            ctypes.set_errno(error.errno or errno.EIO)
            return -1
        return 0

    def statvfs(self, path: Any) -> os.statvfs_result:
        found: os.statvfs_result = self.real["statvfs"](path)
        free = self.faults(os.fspath(path)).get("free_bytes")
        if free is None:
            return found
        values = list(found)
        values[4] = free // found.f_frsize  # f_bavail
        return os.statvfs_result(values)

    def note(self, outcome: str, path: str) -> None:
        os.write(self.syncs_fd, f"{outcome} {path}\n".encode())


def path_of(fd: int) -> str:
    return str(Path(f"/proc/self/fd/{fd}").readlink())


def install(folder: Path) -> None:
    """Put the wrapper between the files adapter and the system."""
    from tierlog.adapters.files import disk as adapter

    names = ("pwritev", "fdatasync", "fsync", "statvfs")
    real: dict[str, Callable[..., Any]] = {name: getattr(os, name) for name in names}
    disk = _Disk(folder, real)
    os.pwritev = disk.pwritev  # type: ignore[assignment]
    os.fdatasync = partial(disk.sync, "fdatasync")
    os.fsync = partial(disk.sync, "fsync")
    os.statvfs = disk.statvfs
    if adapter._syncfs is not None:
        disk.real["syncfs"] = adapter._syncfs
        adapter._syncfs = disk.syncfs  # type: ignore[misc]


if __name__ == "__main__":
    install(Path(os.environ[VARIABLE]))
    from tierlog_ingest.main import main

    sys.exit(main())
