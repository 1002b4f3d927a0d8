"""The files port (tierlog.ports.files): every adapter passes this one suite.

"Written bytes survive a crash only after ``sync``, a new, renamed or removed name only after
``sync_directory`` of its folder": shown with the twin, which can crash.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
from pathlib import Path

import pytest

from tierlog.adapters.files import DiskFiles
from tierlog.adapters.files.disk import _sync_file_system
from tierlog.adapters.memory.faults import Faults
from tierlog.adapters.memory.files import SECTOR_LEN, MemoryDisk
from tierlog.model.errors import CorruptError, Reason, RefusedError, RetryableError
from tierlog.ports.files import DiskFailedError, FileWrite


@pytest.fixture(params=["memory", "disk"])
def files(request, tmp_path):
    if request.param == "memory":
        yield MemoryDisk(random.Random(1)).mount()
    else:
        disk = DiskFiles(tmp_path / "data")
        yield disk
        disk.close()


async def test_what_is_written_is_read(files):
    await files.make_directory("a/b")
    file = await files.open("a/b/c", create=True)
    await file.write(0, [b"hello", memoryview(b" "), bytearray(b"world")])
    await file.write_and_sync(11, [b"!"])
    assert await file.size() == 12
    assert await file.read(0, 100) == b"hello world!"
    assert await file.read(6, 5) == b"world"
    assert await file.read(12, 5) == b""
    await file.write(4, [b"O"])
    await file.write(14, [b"far"])
    assert await file.read(0, 100) == b"hellO world!\0\0far"
    await file.truncate(5)
    assert await file.read(0, 100) == b"hellO"
    await file.truncate(7)
    assert await file.read(0, 100) == b"hellO\0\0"
    await file.sync()
    await file.close()
    with pytest.raises(RetryableError):
        await file.read(0, 1)
    again = await files.open("a/b/c")
    assert await again.read(0, 100) == b"hellO\0\0"
    await again.close()


async def test_many_buffers_at_once(files):
    file = await files.open("many", create=True)
    pieces = [bytes([n % 251]) * (n % 7) for n in range(5000)]
    await file.write(3, pieces)
    assert await file.read(3, 10**6) == b"".join(pieces)
    await file.close()


@pytest.mark.parametrize("count", [1, 200])
@pytest.mark.parametrize("sync", [False, True])
async def test_many_files_at_once(files, count, sync):
    await files.make_directory("many")
    writes = [
        FileWrite(f"many/{n}", [(n, [b"ab"]), (n + 2, [b"c", b"d"])], create=True)
        for n in range(count)
    ]
    await files.write_files(writes, sync=sync)
    await files.write_files([FileWrite(one.path, [(1, [b"X"])]) for one in writes], sync=sync)
    await files.write_files([FileWrite(one.path, []) for one in writes], sync=True)
    assert len(await files.list("many")) == count
    for n in range(count):
        file = await files.open(f"many/{n}")
        expected = bytearray(bytes(n) + b"abcd").ljust(2, b"\0")
        expected[1:2] = b"X"
        assert await file.read(0, 1000) == bytes(expected)
        await file.close()
    with pytest.raises(FileNotFoundError):
        await files.write_files([FileWrite("many/missing", [(0, [b"x"])])], sync=sync)
    with pytest.raises(RefusedError):
        await files.write_files([FileWrite("../out", [], create=True)], sync=sync)


async def test_names(files):
    assert await files.list("") == []
    assert await files.list("nowhere") == []
    await files.make_directory("d")
    await files.make_directory("d")
    for name in ("d/2", "d/1", "top"):
        await (await files.open(name, create=True)).close()
    assert await files.list("d") == ["1", "2"]
    assert await files.list("") == ["d", "top"]
    await files.rename("d/1", "d/2")
    assert await files.list("d") == ["2"]
    await files.rename("top", "d/moved")
    assert await files.exists("d/moved")
    assert await files.exists("d")
    assert not await files.exists("top")
    await files.remove("d/2")
    await files.sync_directory("d")
    assert await files.list("d") == ["moved"]
    assert 0 < await files.free_bytes() <= await files.total_bytes()


async def test_what_is_missing_is_told(files):
    for call in (
        lambda: files.open("nothing"),
        lambda: files.open("no/folder", create=True),
        lambda: files.remove("nothing"),
        lambda: files.rename("nothing", "there"),
    ):
        with pytest.raises(FileNotFoundError):
            await call()


@pytest.mark.parametrize("path", ["..", "../x", "a/../../x", "/etc/passwd", "a//b", ".", "a\0b"])
async def test_no_path_leads_out(files, path):
    for call in (
        lambda: files.open(path, create=True),
        lambda: files.exists(path),
        lambda: files.list(path),
        lambda: files.make_directory(path),
        lambda: files.rename("a", path),
        lambda: files.remove(path),
        lambda: files.sync_directory(path),
    ):
        with pytest.raises(RefusedError):
            await call()


# The disk


async def test_links_are_not_followed(tmp_path):
    (tmp_path / "outside").write_bytes(b"secret")
    disk = DiskFiles(tmp_path / "data")
    (tmp_path / "data" / "link").symlink_to(tmp_path / "outside")
    with pytest.raises(RefusedError):
        await disk.open("link")
    disk.close()


async def test_closing_waits_for_calls_in_flight(tmp_path):
    disk = DiskFiles(tmp_path)
    file = await disk.open("file", create=True)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(8):
            tasks.create_task(file.write(0, [bytes(4_000_000)]))
        await asyncio.sleep(0)
        cancelled = tasks.create_task(file.write_and_sync(0, [bytes(4_000_000)]))
        await asyncio.sleep(0)
        cancelled.cancel()
        await file.close()
        await file.close()
    assert repr(disk).endswith("open=0>")
    disk.close()
    assert not [fd for fd in Path("/proc/self/fd").iterdir() if _target(fd) == tmp_path / "file"]


def _target(fd):
    try:
        return fd.readlink()
    except FileNotFoundError:
        return None


async def test_short_writes_are_gone_on_with(tmp_path, monkeypatch):
    disk = DiskFiles(tmp_path)
    file = await disk.open("file", create=True)
    real = os.pwritev

    def short(fd, buffers, offset):
        data = b"".join(buffers)
        return real(fd, [data[: max(1, len(data) // 3)]], offset)

    monkeypatch.setattr(os, "pwritev", short)
    pieces = [bytes([n]) * n for n in range(100)]
    await file.write(5, pieces)
    monkeypatch.undo()
    assert await file.read(5, 10**6) == b"".join(pieces)
    await file.close()
    disk.close()


@pytest.mark.parametrize(
    ("call", "code", "expected"),
    [
        ("pwritev", errno.ENOSPC, RetryableError),
        ("pwritev", errno.EDQUOT, RetryableError),
        ("pwritev", errno.EIO, DiskFailedError),
        ("fdatasync", errno.EIO, DiskFailedError),
        ("fdatasync", errno.ENOSPC, DiskFailedError),
        ("pread", errno.EIO, CorruptError),
    ],
)
async def test_errors_of_the_system(tmp_path, monkeypatch, call, code, expected):
    disk = DiskFiles(tmp_path)
    file = await disk.open("file", create=True)

    def fail(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, fail)
    action = file.read(0, 1) if call == "pread" else file.write_and_sync(0, [b"x"])
    with pytest.raises(expected) as caught:
        await action
    if expected is RetryableError:
        assert caught.value.reason is Reason.READ_ONLY
        assert caught.value.remedy
    monkeypatch.undo()
    await file.close()
    disk.close()


@pytest.mark.parametrize("count", [1, 200])
async def test_a_failed_sync_of_many_files_is_told(tmp_path, monkeypatch, count):
    disk = DiskFiles(tmp_path)

    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fdatasync", fail)
    monkeypatch.setattr("tierlog.adapters.files.disk._sync_file_system", fail)
    writes = [FileWrite(str(n), [(0, [b"x"])], create=True) for n in range(count)]
    await disk.write_files(writes, sync=False)
    with pytest.raises(DiskFailedError):
        await disk.write_files(writes, sync=True)
    monkeypatch.undo()
    with pytest.raises(OSError, match="Bad file"):
        _sync_file_system(-1)
    disk.close()


@pytest.mark.parametrize("place", ["root", "mounted"])
async def test_many_files_are_synced_at_once_on_the_roots_file_system_only(
    tmp_path, monkeypatch, place
):
    disk = DiskFiles(tmp_path)
    await disk.make_directory("many")
    if place == "mounted":  # as stat(2) tells of a folder where another file system begins
        monkeypatch.setattr(disk, "_device", disk._device + 1)
    synced: list[int] = []
    at_once: list[int] = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    monkeypatch.setattr("tierlog.adapters.files.disk._sync_file_system", at_once.append)
    writes = [FileWrite(f"many/{n}", [(0, [b"x"])], create=True) for n in range(20)]
    await disk.write_files(writes, sync=True)
    await disk.write_files([FileWrite(one.path, []) for one in writes], sync=True)
    assert len(synced) == (40 if place == "mounted" or not disk._is_local else 0)
    assert len(at_once) == (2 if not synced else 0)
    disk.close()


async def test_a_new_folder_that_cannot_be_synced_is_a_failed_disk(tmp_path, monkeypatch):
    disk = DiskFiles(tmp_path)

    def fail(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(DiskFailedError):
        await disk.make_directory("new/one")
    monkeypatch.undo()
    disk.close()


# The twin's crashes


async def test_synced_bytes_and_names_survive():
    for seed in range(50):
        disk = MemoryDisk(random.Random(seed))
        files = disk.mount()
        file = await files.open("f", create=True)
        await file.write_and_sync(0, [b"a" * 2000])
        await files.sync_directory("")
        await file.write(2000, [b"b" * 2000])
        disk.crash()
        with pytest.raises(DiskFailedError):
            await file.read(0, 1)
        data = disk.read_whole("f")
        assert data[:2000] == b"a" * 2000
        assert set(data[2000:]) <= set(b"b\0")


async def test_unsynced_bytes_are_lost_or_torn_by_sectors():
    seen = set()
    for seed in range(100):
        disk = MemoryDisk(random.Random(seed))
        files = disk.mount()
        file = await files.open("f", create=True)
        await files.sync_directory("")
        await file.write(0, [b"x" * (4 * SECTOR_LEN)])
        disk.crash()
        data = disk.read_whole("f").ljust(4 * SECTOR_LEN, b"\0")
        sectors = [data[at : at + SECTOR_LEN] for at in range(0, len(data), SECTOR_LEN)]
        assert all(len(set(sector)) == 1 for sector in sectors)
        seen.add(tuple(sector[0] for sector in sectors))
    assert len(seen) > 8, "nothing, all, and many mixtures"


async def test_unsynced_names_may_be_lost():
    kept = {"made": 0, "removed": 0, "renamed": 0}
    for seed in range(100):
        disk = MemoryDisk(random.Random(seed))
        files = disk.mount()
        for name in ("old", "source"):
            await (await files.open(name, create=True)).write_and_sync(0, [name.encode()])
        await files.sync_directory("")
        for change in (files.remove("old"), files.rename("source", "target")):
            await change
        await (await files.open("new", create=True)).close()
        disk.crash()
        names = disk.paths()
        assert ("source" in names) != ("target" in names), "a rename is atomic"
        kept["made"] += "new" in names
        kept["removed"] += "old" not in names
        kept["renamed"] += "target" in names
    assert all(0 < count < 100 for count in kept.values())


async def test_a_killed_process_loses_nothing_by_itself():
    disk = MemoryDisk(random.Random(1))
    file = await disk.mount().open("f", create=True)
    await file.write(0, [b"data"])
    disk.crash(power_lost=False)
    with pytest.raises(DiskFailedError):
        await file.read(0, 1)
    again = await disk.mount().open("f")
    assert await again.read(0, 10) == b"data"


async def test_a_full_disk_and_a_failing_one():
    disk = MemoryDisk(random.Random(1), capacity_bytes=1000)
    files = disk.mount()
    file = await files.open("f", create=True)
    await file.write(0, [bytes(900)])
    with pytest.raises(RetryableError) as caught:
        await file.write(900, [bytes(101)])
    assert caught.value.reason is Reason.READ_ONLY
    await file.write(0, [bytes(1000)])
    disk.fail_syncs = True
    with pytest.raises(DiskFailedError):
        await file.sync()


async def test_a_crash_at_a_step_leaves_the_process_hanging():
    disk = MemoryDisk(random.Random(1))
    faults = Faults(random.Random(2))
    file = await disk.mount(faults).open("f", create=True)
    faults.on_crash = disk.crash
    faults.crash_after(2)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(file.write_and_sync(0, [b"x"]), 0.05)
    assert disk.boot == 1


def test_a_locked_folder_has_one_process(tmp_path):
    first, second = DiskFiles(tmp_path), DiskFiles(tmp_path)
    try:
        first.lock()
        with pytest.raises(RetryableError, match=f"in use by process {os.getpid()}"):
            second.lock()
        first.close()
        second.lock()
    finally:
        first.close()
        second.close()
