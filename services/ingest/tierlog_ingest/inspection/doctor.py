"""Checks of the machine that a storage node would run on.

Owns: what is measured, and from where on it is worth a warning or a failure. Does not own the
limits that are settings.

Invariant: every check that isn't ok names its remedy; the probe's file goes again.
"""

import contextlib
import os
import resource
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Any, Final

from tierlog.ports.clock import Clock
from tierlog.ports.files import DiskFailedError, Files
from tierlog.runtime.settings import StorageSettings
from tierlog.wiring.build import system_clock
from tierlog.wiring.nodes import open_files

PROBE_PATH: Final = "doctor.probe"
SYNCS: Final = 50
SYNC_BYTES: Final = 4096
FSYNC_WARN_S: Final = 0.02
MOUNTS: Final = Path("/proc/self/mounts")
IN_MEMORY: Final = frozenset({"tmpfs", "ramfs"})
OPEN_FILES_SPARE: Final = 256

Row = dict[str, Any]


async def examine(directory: Path, settings: StorageSettings) -> list[Row]:
    """Return one row a check: what, ok or warning or failed, the value, the remedy."""
    rows = [_rights(directory)]
    if rows[0]["result"] == "failed":
        return rows
    async with open_files(directory) as files:
        kind = file_system(directory, mounts())
        rows.append(await _guarded("fsync", lambda: _fsync(files, system_clock(), settings, kind)))
        rows.append(await _guarded("free space", lambda: _space(files, settings)))
    rows.append(_open_files(settings))
    return rows


def mounts() -> str:
    """Return what is mounted where, as Linux lists it; nothing where it can't be told."""
    try:
        return MOUNTS.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def file_system(directory: Path, mounted: str) -> str:
    """Return the kind of file system that a directory lies on; empty: it is not known."""
    where = directory.resolve()
    found, depth = "", -1
    for line in mounted.splitlines():
        _, point, kind, *_ = [*line.split(" "), "", "", ""]
        root = Path(point.replace("\\040", " "))
        if where.is_relative_to(root) and len(root.parts) >= depth:
            found, depth = kind, len(root.parts)
    return found


def _rights(directory: Path) -> Row:
    if not os.access(directory, os.F_OK):
        remedy = "Make it, or name the directory that the node will have"
        return _row("directory", "failed", f"{directory} is not there", remedy)
    if not directory.is_dir():
        return _row("directory", "failed", f"{directory} is no directory", "Name a directory")
    if os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        return _row("directory", "ok", str(directory))
    return _row("directory", "failed", f"{directory} can't be written", "Give this user the rights")


async def _guarded(check: str, work: Callable[[], Awaitable[Row]]) -> Row:
    try:
        return await work()
    except DiskFailedError as error:
        return _row(check, "failed", str(error), "Replace the disk")


async def _fsync(files: Files, clock: Clock, settings: StorageSettings, kind: str) -> Row:
    file = await files.open(PROBE_PATH, create=True)
    took_s = []
    try:
        await file.write_and_sync(0, [bytes(SYNCS * SYNC_BYTES)])
        for at in range(SYNCS):
            began_s = clock.monotonic_s()
            await file.write_and_sync(at * SYNC_BYTES, [bytes([at]) * SYNC_BYTES])
            took_s.append(clock.monotonic_s() - began_s)
    finally:
        await file.close()
        with contextlib.suppress(FileNotFoundError):
            await files.remove(PROBE_PATH)
    typical_s, slowest_s = median(took_s), max(took_s)
    value = f"{typical_s * 1000:.2f} ms, at most {slowest_s * 1000:.2f} ms, of {SYNCS} of 4 KiB"
    if slowest_s > settings.slow_sync_s:
        remedy = "Take a faster disk, or one that nothing else uses; each append waits for it"
        return _row("fsync", "failed", value, remedy)
    if typical_s > FSYNC_WARN_S:
        remedy = "Appends will take at least as long; put the journal on a disk of its own"
        return _row("fsync", "warning", value, remedy)
    if kind in IN_MEMORY:
        remedy = f"Take a disk: this is {kind}, memory, which loses everything with the power"
        return _row("fsync", "warning", value, remedy)
    return _row("fsync", "ok", value)


async def _space(files: Files, settings: StorageSettings) -> Row:
    free = await files.free_bytes()
    value = f"{free / 2**30:.1f} GiB"
    if free < settings.free_bytes_min:
        return _row("free space", "failed", value, "Free some: the node would be read-only")
    if free < 4 * settings.free_bytes_resume:
        return _row("free space", "warning", value, "Take a larger disk")
    return _row("free space", "ok", value)


def _open_files(settings: StorageSettings) -> Row:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * settings.open_files_max + OPEN_FILES_SPARE
    if soft < needed:
        remedy = f"Raise it to {needed} (ulimit -n), or lower storage.open_files_max"
        return _row("open files", "failed", str(soft), remedy)
    return _row("open files", "ok", str(soft))


def _row(check: str, result: str, value: str, remedy: str = "") -> Row:
    return {"check": check, "result": result, "value": value, "remedy": remedy}
