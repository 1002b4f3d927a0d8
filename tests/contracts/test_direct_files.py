"""Files opened with ``direct=True``: the same bytes, whatever the file system makes of the hint.

The suite runs over the memory twin, over the disk as it is, and over systems that refuse to go
round their cache: when a file is opened, at the first write, at a later one, or halfway.
"""

from __future__ import annotations

import array
import asyncio
import errno
import os
import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierlog.adapters.files import DiskFiles
from tierlog.adapters.files.direct import DirectCalls
from tierlog.adapters.memory.files import MemoryDisk
from tierlog.model.errors import CorruptError, Reason, RetryableError
from tierlog.ports.files import DiskFailedError

PAGE = 4096
LARGE = 64 * 1024
LEAST = 16 * 1024
LONG = 256 * 1024
LONG_MAX = 4 * 1024 * 1024
BLOB = random.Random(7).randbytes(5_000_000)


class System:
    """The system's calls round its cache, noted; it may refuse them, or take only a part."""

    def __init__(
        self,
        *,
        open_error=0,
        write_error=0,
        good_writes=0,
        read_error=0,
        taking=lambda length: length,
        giving=lambda length: length,
    ):
        self.open_error = open_error
        self.write_error = write_error
        self.good_writes = good_writes
        """So many writes work before ``write_error``."""
        self.read_error = read_error
        self.taking = taking
        self.giving = giving
        self.written: list[tuple[int, int]] = []
        """Where, and how much the system took."""
        self.read: list[tuple[int, int]] = []

    def calls(self):
        return DirectCalls(self.open, self.write, self.give)

    def open(self, path, flags):
        if self.open_error:
            raise OSError(self.open_error, os.strerror(self.open_error))
        return os.open(path, flags)

    def write(self, fd, data, offset):
        if self.write_error and len(self.written) >= self.good_writes:
            raise OSError(self.write_error, os.strerror(self.write_error))
        taken = self.taking(len(data))
        written = os.pwrite(fd, data[: -(-taken // PAGE) * PAGE], offset)
        self.written.append((offset, min(taken, written)))
        return min(taken, written)

    def give(self, fd, views, offset):
        if self.read_error:
            raise OSError(self.read_error, os.strerror(self.read_error))
        given = min(self.giving(len(views[0])), os.preadv(fd, views, offset))
        views[0][given:] = b"?" * (len(views[0]) - given)
        self.read.append((offset, given))
        return given


SYSTEMS = {
    "as it is": System,
    "refusing files": lambda: System(open_error=errno.EINVAL),
    "refusing writes": lambda: System(write_error=errno.EINVAL),
    "refusing later": lambda: System(write_error=errno.EOPNOTSUPP, good_writes=3),
    "taking half": lambda: System(taking=lambda length: -(-length // 2 // PAGE) * PAGE),
    "taking no whole pages": lambda: System(taking=lambda length: length - 512),
    "taking nothing": lambda: System(taking=lambda _length: 0),
    "refusing reads": lambda: System(read_error=errno.EINVAL),
    "giving half": lambda: System(giving=lambda length: -(-length // 2 // PAGE) * PAGE),
    "giving no whole pages": lambda: System(giving=lambda length: length - 513),
    "giving little": lambda: System(giving=lambda _length: 700),
    "giving nothing": lambda: System(giving=lambda _length: 0),
}


def make_files(kind, folder):
    if kind == "memory":
        return MemoryDisk(random.Random(1)).mount()
    return DiskFiles(Path(folder), direct_calls=SYSTEMS[kind]().calls())


@pytest.fixture(params=["memory", *SYSTEMS])
def files(request, tmp_path):
    files = make_files(request.param, tmp_path / "data")
    yield files
    if isinstance(files, DiskFiles):
        files.close()


def cut(data, lengths):
    """Cut data into pieces of these lengths, taken round and round."""
    pieces, at, turn = [], 0, 0
    while at < len(data):
        step = lengths[turn % len(lengths)]
        pieces.append(data[at : at + step])
        at, turn = at + step, turn + 1
    return pieces


async def test_what_is_written_is_read(files):
    file = await files.open("f", create=True, direct=True)
    await file.write(0, [BLOB[:100_000], memoryview(BLOB)[100_000:300_007]])
    assert await file.read(0, 10**7) == BLOB[:300_007]
    await file.write_and_sync(300_007, [bytearray(BLOB[300_007:600_000])])
    assert await file.size() == 600_000
    await file.write(0, [])
    await file.write(0, [b"", b""])
    await file.write(5, [b"small"])
    assert await file.read(0, 12) == BLOB[:5] + b"small" + BLOB[10:12]
    await file.truncate(100_001)
    assert await file.read(99_999, 100) == BLOB[99_999:100_001]
    await file.write(1_000_003, [BLOB[:LARGE], BLOB[LARGE : 4 * LARGE]])
    assert await file.read(100_001, 899_999 + 10) == bytes(899_999 + 3)[:900_002] + BLOB[:7]
    await file.sync()
    await file.close()
    with pytest.raises(RetryableError):
        await file.write(0, [BLOB])
    again = await files.open("f")
    assert await again.read(1_000_003, 10**7) == BLOB[: 4 * LARGE]
    await again.close()
    with pytest.raises(FileNotFoundError):
        await files.open("nothing", direct=True)


async def test_buffers_of_any_kind_and_number(files):
    numbers = array.array("I", range(50_000))
    table = memoryview(bytes(range(200))).cast("B", (10, 20))
    pieces = [memoryview(numbers), b"", memoryview(numbers)[:0], table, bytearray(3)]
    pieces += [bytes([n % 251]) * (n % 97) for n in range(5000)]
    file = await files.open("f", create=True, direct=True)
    await file.write(4095, pieces)
    assert await file.read(4095, 10**7) == b"".join(bytes(one) for one in pieces)
    await file.close()


WRITES = st.lists(
    st.tuples(
        st.one_of(st.none(), st.integers(0, 9 * LARGE), st.integers(0, 100).map(PAGE.__mul__)),
        st.one_of(
            st.integers(0, 3 * PAGE),
            st.integers(LEAST - PAGE, LEAST + 2 * PAGE) | st.integers(LARGE, 6 * LARGE),
            st.integers(1, 64).map(PAGE.__mul__),
        ),
        st.lists(st.integers(1, 2 * LARGE), min_size=1, max_size=3),
        st.sampled_from(["write", "write_and_sync", "truncate", "reopen"]),
    ),
    max_size=8,
)


@pytest.mark.parametrize("kind", ["memory", *SYSTEMS])
@settings(max_examples=30)
@given(writes=WRITES, seed=st.integers(0, 100))
def test_any_writes_leave_the_bytes_that_plain_ones_leave(kind, writes, seed):
    async def play():
        with tempfile.TemporaryDirectory() as folder:
            files = make_files(kind, folder)
            file = await files.open("f", create=True, direct=True)
            other = await files.open("f")
            expected = bytearray()
            rng = random.Random(seed)
            for where, length, lengths, what in writes:
                offset = len(expected) if where is None else where
                if what == "truncate":
                    expected = expected[:length].ljust(length, b"\0")
                    await file.truncate(length)
                    continue
                if what == "reopen":
                    await file.close()
                    file = await files.open("f", direct=True)
                first = rng.randrange(1_000_000)
                data = BLOB[first : first + length]
                if data:
                    expected.extend(bytes(max(0, offset - len(expected))))
                    expected[offset : offset + length] = data
                write = file.write_and_sync if what == "write_and_sync" else file.write
                await write(offset, cut(memoryview(data), [1 + one // 7 for one in lengths]))
                at, some = rng.randrange(len(expected) + 1), rng.randrange(16 * LARGE)
                for reader in (file, other):
                    assert await reader.read(at, some) == bytes(expected[at : at + some])
            assert await other.size() == len(expected)
            assert await other.read(0, len(expected) + 1) == bytes(expected)
            await file.close()
            await other.close()
            if isinstance(files, DiskFiles):
                files.close()

    asyncio.run(play())


# The disk


async def test_whole_pages_go_round_the_cache_and_the_rest_does_not(tmp_path):
    system = System()
    disk = DiskFiles(tmp_path, direct_calls=system.calls())
    file = await disk.open("f", create=True, direct=True)
    await file.write(0, [BLOB[: LEAST - 1]])
    await file.write(1, [BLOB[: LEAST + PAGE - 2]])
    assert system.written == [], "too little"
    await file.write(100, [BLOB[: LARGE + PAGE]])
    assert system.written == [(PAGE, LARGE)]
    system.written.clear()
    await file.write(LARGE + 1, [BLOB[:5_000_000]])
    ends = [(offset, offset + length) for offset, length in system.written]
    assert ends[0][0] == LARGE + PAGE
    assert ends[-1][1] == (LARGE + 1 + 5_000_000) // PAGE * PAGE
    assert [end for _, end in ends[:-1]] == [start for start, _ in ends[1:]]
    assert {length % PAGE for _, length in system.written} == {0}
    system.written.clear()
    plain = await disk.open("f")
    await plain.write(0, [BLOB])
    assert system.written == []
    await file.close()
    await plain.close()
    disk.close()


async def test_long_reads_go_round_the_cache_and_others_do_not(tmp_path):
    system = System()
    disk = DiskFiles(tmp_path, direct_calls=system.calls())
    file = await disk.open("f", create=True, direct=True)
    await file.write(0, [BLOB])
    assert await file.read(0, LONG - 1) == BLOB[: LONG - 1]
    assert await file.read(5, 2 * LONG_MAX) == BLOB[5:], "too much at once"
    assert system.read == []
    assert await file.read(PAGE - 1, LONG) == BLOB[PAGE - 1 :][:LONG]
    assert await file.read(len(BLOB) - LONG, LONG_MAX) == BLOB[-LONG:], "the end"
    assert [offset for offset, _ in system.read] == [0, (len(BLOB) - LONG) // PAGE * PAGE]
    system.read.clear()
    plain = await disk.open("f")
    assert await plain.read(0, LONG) == BLOB[:LONG]
    assert await file.read(len(BLOB) + 5, LONG) == b""
    await file.close()
    await plain.close()
    disk.close()


async def test_what_was_read_stays_as_it_is_while_somebody_looks_at_it(tmp_path):
    disk = DiskFiles(tmp_path)
    file = await disk.open("f", create=True, direct=True)
    await file.write(0, [BLOB])
    views = [(at, await file.read(at, LONG)) for at in range(0, len(BLOB) - LONG, LONG)]
    kept = [(at + 7, memoryview(view)[7:100]) for at, view in views]
    del views
    await file.write(0, [bytes(len(BLOB))])
    for _ in range(len(kept)):
        assert not any(await file.read(0, LONG))
    assert [bytes(view) for _, view in kept] == [BLOB[at:][:93] for at, _ in kept]
    assert all(view.readonly for _, view in kept)
    await file.close()
    disk.close()


@pytest.mark.parametrize("code", [errno.EIO, errno.ENXIO])
async def test_errors_of_a_read_round_the_cache(tmp_path, code):
    system = System(read_error=code)
    disk = DiskFiles(tmp_path, direct_calls=system.calls())
    file = await disk.open("f", create=True, direct=True)
    await file.write(0, [BLOB])
    with pytest.raises((CorruptError, RetryableError)):
        await file.read(0, LONG)
    system.read_error = 0
    assert await file.read(0, LONG) == BLOB[:LONG]
    await file.close()
    disk.close()


async def test_a_system_that_refuses_is_asked_once_a_file(tmp_path):
    system = System(write_error=errno.EINVAL)
    asked = []

    def write(fd, data, offset):
        asked.append(offset)
        return system.write(fd, data, offset)

    disk = DiskFiles(tmp_path, direct_calls=DirectCalls(system.open, write))
    file = await disk.open("f", create=True, direct=True)
    for turn in range(3):
        await file.write(turn * LARGE, [BLOB[: 2 * LARGE]])
    assert asked == [0]
    await file.close()
    disk.close()


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (errno.ENOSPC, RetryableError),
        (errno.EDQUOT, RetryableError),
        (errno.EIO, DiskFailedError),
    ],
)
async def test_errors_of_a_write_round_the_cache(tmp_path, code, expected):
    system = System(write_error=code, good_writes=1)
    disk = DiskFiles(tmp_path, direct_calls=system.calls())
    file = await disk.open("f", create=True, direct=True)
    await file.write(0, [BLOB[:LARGE]])
    for write in (file.write, file.write_and_sync):
        with pytest.raises(expected) as caught:
            await write(LARGE, [BLOB[:LARGE]])
        if isinstance(caught.value, RetryableError):
            assert caught.value.reason is Reason.READ_ONLY
    system.write_error = 0
    await file.write(LARGE, [BLOB[LARGE : 3 * LARGE]])
    assert await file.read(0, 10**7) == BLOB[: 3 * LARGE]
    await file.close()
    disk.close()


async def test_no_descriptor_is_left_open(tmp_path):
    for system in (System(), System(open_error=errno.EMFILE), System(open_error=errno.EINVAL)):
        disk = DiskFiles(tmp_path, direct_calls=system.calls())
        # It is a hint: one descriptor too many for the system is no reason to have no file.
        file = await disk.open("f", create=True, direct=True)
        async with asyncio.TaskGroup() as tasks:
            for turn in range(6):
                tasks.create_task(file.write(turn * len(BLOB), [BLOB]))
            await asyncio.sleep(0)
            cancelled = tasks.create_task(file.write_and_sync(6 * len(BLOB), [BLOB]))
            await asyncio.sleep(0)
            cancelled.cancel()
            await file.close()
        disk.close()
        assert (tmp_path / "f").read_bytes() == 7 * BLOB
        assert repr(disk).endswith("open=0>")
        disk.close()
        assert not [fd for fd in Path("/proc/self/fd").iterdir() if _target(fd) == tmp_path / "f"]


def _target(fd):
    try:
        return fd.readlink()
    except FileNotFoundError:
        return None


async def test_a_name_that_went_to_another_file_is_not_written_to(tmp_path):
    def open_another(path, flags):
        Path(path).rename(tmp_path / "first")
        Path(path).write_bytes(b"another")
        return os.open(path, flags)

    disk = DiskFiles(tmp_path, direct_calls=DirectCalls(open_another))
    file = await disk.open("f", create=True, direct=True)
    await file.write(0, [BLOB])
    await file.close()
    disk.close()
    assert (tmp_path / "first").read_bytes() == BLOB
    assert (tmp_path / "f").read_bytes() == b"another"
