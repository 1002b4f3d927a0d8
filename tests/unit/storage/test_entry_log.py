"""Entry logs (checklist D24 to D26): runs of all ledgers in one file, sealed with their map.

"Entries from different ledgers are aggregated and written sequentially. A new entry log file is
created once the bookie starts or the older entry log file reaches the size threshold."
"""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.unit.storage.log_kit import (
    RUN_LEN,
    RUNS,
    State,
    all_runs,
    make_logs,
    new_logs,
    opened_logs,
    read_run,
    refused,
    runs_of,
)
from tests.unit.storage.node_kit import make_run
from tierlog.adapters.files import DiskFiles
from tierlog.adapters.memory.faults import FaultRates, Faults
from tierlog.adapters.memory.files import MemoryDisk, MemoryFiles
from tierlog.model.errors import CorruptError, Reason, RefusedError, RetryableError
from tierlog.ports.files import DiskFailedError
from tierlog_ingest.storage.entrylog.entry_log import LogLength, log_path
from tierlog_ingest.storage.entrylog.entry_log_format import LOG_HEADER_LEN

PER_LOG = 10


@pytest.fixture
def disk():
    return MemoryDisk(random.Random(1))


@pytest.mark.covers("D24", "D25")
async def test_append_read_scan_roll(disk):
    logs = await new_logs(disk.mount())
    assert await logs.append([], writer="flush") == []
    assert disk.paths() == [], "no log is made for nothing"
    places = await logs.append(RUNS, writer="flush")
    assert [await logs.read(*place) for place in places] == [bytes(run.encoded) for run in RUNS]
    assert await all_runs(logs) == RUNS
    assert [place.log_id for place in places] == [1 + n // PER_LOG for n in range(60)]
    assert [one.sealed for one in logs.logs()] == [True] * 5 + [False]
    assert State.of(logs) == ([[]], {}), "nothing is durable yet"
    await logs.sync()
    assert logs.lengths(0) == [LogLength(n, 3992, n < 6) for n in range(1, 7)]
    assert logs.open_maps() == {6: {3: PER_LOG * RUN_LEN}}
    assert "6 logs, 23952 bytes" in repr(logs)


async def test_state_says_only_what_is_durable(disk):
    logs = await new_logs(disk.mount())
    await logs.append(RUNS[:3], writer="flush")
    await logs.sync()
    first = State.of(logs)
    await logs.append(RUNS[20:23], writer="flush")
    assert State.of(logs) == first
    assert logs.live_bytes(1) == 6 * RUN_LEN
    await logs.seal("flush")
    assert State.of(logs) == first
    await logs.sync()
    assert State.of(logs) == ([[LogLength(1, 32 + 6 * RUN_LEN, True)]], {})
    assert logs.usage == {1: {1: 3 * RUN_LEN, 2: 3 * RUN_LEN}}


async def test_a_sync_covers_what_was_appended_before_it(disk):
    faults = Faults(random.Random(3))
    logs = await new_logs(disk.mount(faults))
    await logs.append(RUNS[:2], writer="flush")
    faults.rates_by_prefix["files.sync"] = FaultRates(delay_s_max=0.01)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(logs.sync())
        await asyncio.sleep(0)
        await logs.append(RUNS[2:5], writer="flush")
        logs.forget_ledger(7)
    assert State.of(logs) == ([[LogLength(1, 32 + 2 * RUN_LEN, False)]], {1: {1: 2 * RUN_LEN}})
    await logs.sync()
    assert State.of(logs) == ([[LogLength(1, 32 + 5 * RUN_LEN, False)]], {1: {1: 5 * RUN_LEN}})


async def test_a_sync_after_one_that_was_cancelled_covers_both(disk):
    faults = Faults(random.Random(3))
    logs = await new_logs(disk.mount(faults))
    await logs.append(RUNS[:2], writer="flush")
    faults.rates_by_prefix["files.sync"] = FaultRates(delay_s_max=10)
    sync = asyncio.create_task(logs.sync())
    await asyncio.sleep(0.01)
    sync.cancel()
    faults.rates_by_prefix.clear()
    await asyncio.wait([sync])
    await logs.append(RUNS[2:5], writer="flush")
    await logs.sync()
    assert State.of(logs) == ([[LogLength(1, 32 + 5 * RUN_LEN, False)]], {1: {1: 5 * RUN_LEN}})


@pytest.mark.covers("D25")
async def test_restart_seals_and_begins_a_new_log(disk):
    logs = await new_logs(disk.mount())
    await logs.append(RUNS, writer="flush")
    await logs.sync()
    state = State.of(logs)
    await logs.append(RUNS[:7], writer="flush")
    disk.crash(power_lost=False)
    logs, damages = await opened_logs(state, disk.mount())
    assert damages == []
    assert State.of(logs) == state, "until the map is durable"
    await logs.sync()
    assert State.of(logs) == ([[LogLength(n, 3992, True) for n in range(1, 7)]], {})
    assert await all_runs(logs) == RUNS, "what state does not list comes back from the journal"
    [place] = await logs.append(RUNS[:1], writer="flush")
    assert place.log_id == 8, "no id is used again, not even that of a log that was removed"
    assert logs.next_log_id == 9


async def test_ids_of_removed_logs_are_remembered_by_the_caller(disk):
    logs = make_logs(disk.mount())
    await logs.open([[]], {}, next_log_id=17)
    assert [one.log_id for one in await logs.append(RUNS[:1], writer="flush")] == [17]


async def test_each_writer_has_its_own_log(disk):
    logs = await new_logs(disk.mount())
    async with asyncio.TaskGroup() as tasks:
        flush = tasks.create_task(logs.append(RUNS[:15], writer="flush"))
        copy = tasks.create_task(logs.append(RUNS[20:35], writer="compaction"))
    flushed = {place.log_id for place in flush.result()}
    copied = {place.log_id for place in copy.result()}
    assert len(flushed) == len(copied) == 2
    assert not flushed & copied
    for run, place in zip(RUNS[:15] + RUNS[20:35], flush.result() + copy.result(), strict=True):
        assert await read_run(logs, place) == run


async def test_one_large_run_has_a_log_of_its_own(disk):
    large = make_run(9, 0, size=10_000)
    logs = await new_logs(disk.mount())
    places = await logs.append([RUNS[0], large, RUNS[1]], writer="flush")
    assert [place[:2] for place in places] == [(1, 32), (2, 32), (3, 32)]
    assert await all_runs(logs) == [RUNS[0], large, RUNS[1]]


class Watched:
    """Files whose writes are noted, buffer by buffer."""

    def __init__(self, files):
        self._files = files
        self.written = []

    def __getattr__(self, name):
        return getattr(self._files, name)

    async def open(self, path, **how):
        return WatchedFile(await self._files.open(path, **how), self.written)


class WatchedFile:
    def __init__(self, file, written):
        self._file = file
        self._written = written

    def __getattr__(self, name):
        return getattr(self._file, name)

    async def write(self, offset, buffers):
        self._written.append((offset, list(buffers)))
        await self._file.write(offset, buffers)


async def test_an_append_is_one_write_of_the_runs_own_buffers(disk):
    files = Watched(disk.mount())
    logs = await new_logs(files, log_bytes_max=2**20)
    await logs.append(RUNS[:30], writer="flush")
    await logs.append(RUNS[30:], writer="flush")
    (first, head), (second, rest) = files.written
    assert (first, second) == (0, LOG_HEADER_LEN + 30 * RUN_LEN)
    assert len(head[0]) == LOG_HEADER_LEN
    assert all(one is run.encoded for one, run in zip(head[1:] + rest, RUNS, strict=True))


async def test_the_directory_with_most_room_gets_the_next_log():
    small = MemoryDisk(random.Random(1), capacity_bytes=20_000)
    large = MemoryDisk(random.Random(1), capacity_bytes=30_000)
    logs = await new_logs(small.mount(), large.mount())
    await logs.append(RUNS, writer="flush")
    assert [one.directory for one in logs.logs()] == [1, 1, 1, 0, 1, 0]
    await logs.sync()
    state = State.of(logs, 2)
    assert [len(one) for one in state.lengths] == [2, 4]
    for disk in (small, large):
        disk.crash()
    logs, damages = await opened_logs(state, small.mount(), large.mount())
    assert damages == []
    assert sorted(map(repr, await all_runs(logs))) == sorted(map(repr, RUNS))


async def test_directories_on_one_disk_are_filled_alike(monkeypatch):
    async def same(files) -> int:
        return 10**9

    monkeypatch.setattr(MemoryFiles, "free_bytes", same)
    folders = [MemoryDisk(random.Random(1)).mount() for _ in range(3)]
    logs = await new_logs(*folders)
    await logs.append(RUNS, writer="flush")
    assert [one.directory for one in logs.logs()] == [0, 1, 2, 0, 1, 2]


async def test_removed_logs_are_told_from_those_that_never_were(disk):
    logs = await new_logs(disk.mount())
    [place] = await logs.append(RUNS[:1], writer="flush")
    with pytest.raises(AssertionError, match="appended to"):
        logs.retire(1)
    await logs.seal("flush")
    await logs.sync()
    with pytest.raises(AssertionError, match="state must forget"):
        await logs.remove(1)
    logs.retire(1)
    assert logs.logs() == []
    assert logs.logs_of(1) == []
    assert logs.lengths(0) == []
    assert await logs.read(*place) == RUNS[0].encoded, "readable until it goes"
    await logs.remove(1)
    assert disk.paths() == []
    with pytest.raises(RetryableError) as gone:
        await logs.read(*place)
    assert gone.value.reason is Reason.UNKNOWN
    with pytest.raises(CorruptError):
        await logs.read(2, 32, 100)


@pytest.mark.parametrize("seed", range(8))
async def test_a_removed_log_is_gone_durably(seed):
    disk = MemoryDisk(random.Random(seed))
    logs = await new_logs(disk.mount())
    await logs.append(RUNS[:1], writer="flush")
    await logs.seal("flush")
    await logs.sync()
    logs.retire(1)
    await logs.remove(1)
    disk.crash()
    assert disk.paths() == []


async def test_a_log_removed_under_a_scan_ends_it_in_an_error(disk):
    logs = await new_logs(disk.mount())
    await logs.append(RUNS, writer="flush")
    scan = logs.scan(1)
    logs.retire(1)
    await logs.remove(1)
    with pytest.raises(RetryableError):
        await anext(scan)
    assert logs.damaged_logs == {}


async def test_a_read_goes_no_further_than_the_runs(disk):
    logs = await new_logs(disk.mount())
    places = await logs.append(RUNS[:3], writer="flush")
    await logs.seal("flush")
    assert await logs.read(1, places[2].offset, 10**6) == RUNS[2].encoded
    assert len(await logs.read(1, places[1].offset, 500)) == 500
    for offset in (0, 31, places[2].offset + RUN_LEN - 15, places[2].offset + RUN_LEN, 10**7):
        with pytest.raises(CorruptError, match="nothing begins there"):
            await logs.read(1, offset, 100)


@pytest.mark.covers("D24")
async def test_which_log_holds_which_ledger(disk):
    logs = await new_logs(disk.mount())
    await logs.append(RUNS, writer="flush")
    assert logs.ledger_ids() == {1, 2, 3}
    assert [logs.logs_of(ledger) for ledger in (1, 2, 3, 4)] == [[1, 2], [3, 4], [5, 6], []]
    logs.forget_ledger(2)
    assert logs.ledger_ids() == {1, 3}
    assert logs.logs_of(2) == []
    assert [one.live_bytes for one in logs.logs()] == [3960, 3960, 0, 0, 3960, 3960]
    assert dict(logs.usage[3]) == {}
    logs.forget_ledgers([1, 3, 1, 99])
    assert {one.live_bytes for one in logs.logs()} == {0}
    assert await runs_of(logs, 3) == RUNS[20:30], "the bytes are there until compaction"
    assert logs.damaged_logs == {}


@pytest.mark.parametrize("first", [[2], [1, 2]])
async def test_forgotten_ledgers_are_not_sealed_into_the_map(disk, first):
    logs = await new_logs(disk.mount())
    await logs.append(RUNS[:4] + RUNS[20:24], writer="flush")
    logs.forget_ledgers(first)
    await logs.seal("flush")
    await logs.sync()
    logs, damages = await opened_logs(State.of(logs), disk.mount())
    assert damages == []
    assert logs.ledger_ids() == {1, 2} - set(first)
    assert await all_runs(logs) == RUNS[:4] + RUNS[20:24]


async def test_full_disk_takes_nothing_or_all(disk):
    logs = await new_logs(disk.mount())
    places = await logs.append(RUNS[:12], writer="flush")
    await logs.sync()
    state = State.of(logs)
    disk.capacity_bytes = disk.used_bytes + 4 * RUN_LEN
    error = await refused(logs.append(RUNS[12:], writer="flush"))
    assert error.reason is Reason.READ_ONLY
    assert State.of(logs) == state
    assert [one.log_id for one in logs.logs()] == [1, 2], "logs made for it are gone"
    assert disk.paths() == [log_path(1), log_path(2)]
    assert disk.used_bytes <= disk.capacity_bytes - 4 * RUN_LEN, "it gave all of it back"
    disk.capacity_bytes = 2**40
    places += await logs.append(RUNS[12:], writer="flush")
    await logs.sync()
    for run, place in zip(RUNS, places, strict=True):
        assert await read_run(logs, place) == run
    assert await all_runs(logs) == RUNS
    logs, damages = await opened_logs(State.of(logs), disk.mount())
    assert damages == []


async def test_a_full_disk_among_several_takes_no_more_and_the_log_goes_on_elsewhere(disk):
    other = MemoryDisk(random.Random(2))
    logs = await new_logs(disk.mount(), other.mount(), log_bytes_max=40_000)
    disk.capacity_bytes, other.capacity_bytes = 100_000, 50_000
    places = await logs.append(RUNS[:5], writer="flush")
    await logs.sync()
    disk.capacity_bytes = disk.used_bytes + 10
    places += await logs.append(RUNS[5:], writer="flush")
    await logs.sync()
    assert [(one.log_id, one.directory) for one in logs.logs()] == [(1, 0), (2, 1)]
    assert {place.log_id for place in places[5:]} == {2}
    other.capacity_bytes = other.used_bytes + 10
    error = await refused(logs.append(RUNS[5:6], writer="flush"))
    assert error.reason is Reason.READ_ONLY
    state = State.of(logs, 2)
    assert state.lengths[0] == [LogLength(1, 32 + 5 * RUN_LEN, False)], "no room for its map"
    logs, damages = await opened_logs(state, disk.mount(), other.mount())
    assert damages == []
    for run, place in zip(RUNS, places, strict=True):
        assert await read_run(logs, place) == run


class HalfTaking(Watched):
    """A disk that is full in the middle of a write, as a real one is."""

    def __init__(self, files, room):
        super().__init__(files)
        self.room = room

    async def open(self, path, **how):
        return HalfTakingFile(await self._files.open(path, **how), self)


class HalfTakingFile:
    def __init__(self, file, folder):
        self._file = file
        self._folder = folder

    def __getattr__(self, name):
        return getattr(self._file, name)

    async def write(self, offset, buffers):
        data = b"".join(buffers)
        taken = data[: self._folder.room]
        self._folder.room -= len(taken)
        await self._file.write(offset, [taken])
        if len(taken) < len(data):
            raise RetryableError("the disk is full", reason=Reason.READ_ONLY)


@pytest.mark.parametrize("room", range(0, 9000, 200))
async def test_full_disk_in_the_middle_of_a_write(disk, room):
    logs = await new_logs(disk.mount())
    places = await logs.append(RUNS[:12], writer="flush")
    await logs.sync()
    state = State.of(logs)
    files = HalfTaking(disk.mount(), 2**40)
    logs, _ = await opened_logs(state, files)
    await logs.sync()
    before = {path: disk.read_whole(path) for path in disk.paths()}
    files.room = room
    error = await refused(logs.append(RUNS[12:], writer="flush"))
    assert error.reason is Reason.READ_ONLY
    assert {path: disk.read_whole(path) for path in disk.paths()} == before
    files.room = 2**40
    places += await logs.append(RUNS[12:35], writer="flush")
    await logs.sync()
    before = {path: disk.read_whole(path) for path in disk.paths()}
    files.room = room
    error = await refused(logs.append(RUNS[35:], writer="flush"))
    assert {path: disk.read_whole(path) for path in disk.paths()} == before, "and behind others"
    files.room = 2**40
    places += await logs.append(RUNS[35:], writer="flush")
    await logs.sync()
    assert [await read_run(logs, place) for place in places] == RUNS
    logs, damages = await opened_logs(State.of(logs), disk.mount())
    assert damages == []


async def test_a_map_that_was_written_by_half(disk):
    """Ledgers are forgotten until there is room for the map: nothing of the first is left."""
    files = HalfTaking(disk.mount(), 2**40)
    logs = await new_logs(files)
    await logs.append(RUNS[15:25], writer="flush")
    files.room = 60
    await logs.seal("flush")
    assert len(disk.read_whole(log_path(1))) > logs.logs()[0].length
    logs.forget_ledger(1)
    logs.forget_ledger(2)
    files.room = 2**40
    await logs.sync()
    assert logs.logs()[0].sealed
    logs, damages = await opened_logs(State.of(logs), disk.mount())
    assert damages == []
    assert logs.ledger_ids() == set()


async def test_a_map_that_the_disk_does_not_take_is_written_later(disk):
    logs = await new_logs(disk.mount())
    await logs.append(RUNS[:3], writer="flush")
    await logs.sync()
    disk.capacity_bytes = disk.used_bytes
    await logs.seal("flush")
    await logs.sync()
    assert logs.lengths(0) == [LogLength(1, 32 + 3 * RUN_LEN, False)], "it is durable without"
    state = State.of(logs)
    again, damages = await opened_logs(state, disk.mount())
    assert damages == [], "nor does it hinder a start"
    await again.sync()
    assert again.lengths(0) == state.lengths[0]
    disk.capacity_bytes = 2**40
    await logs.sync()
    assert logs.lengths(0) == [LogLength(1, 32 + 3 * RUN_LEN, True)]


async def test_a_cancelled_append_leaves_its_log_alone(disk):
    faults = Faults(random.Random(3))
    logs = await new_logs(disk.mount(faults))
    await logs.append(RUNS[:2], writer="flush")
    faults.rates_by_prefix["files.write"] = FaultRates(delay_s_max=10)
    append = asyncio.create_task(logs.append(RUNS[2:4], writer="flush"))
    await asyncio.sleep(0.01)
    append.cancel()
    await asyncio.wait([append])
    faults.rates_by_prefix.clear()
    [place] = await logs.append(RUNS[4:5], writer="flush")
    assert place.log_id == 2, "the write may go on"
    await logs.seal("flush")
    await logs.sync()
    assert logs.lengths(0) == [
        LogLength(1, 32 + 2 * RUN_LEN, False),
        LogLength(2, 32 + RUN_LEN, True),
    ]
    logs, damages = await opened_logs(State.of(logs), disk.mount())
    await logs.sync()
    assert damages == []
    assert [one.sealed for one in logs.lengths(0)] == [True, True]


async def test_a_failed_sync_is_no_success(disk):
    logs = await new_logs(disk.mount())
    await logs.append(RUNS[:2], writer="flush")
    disk.fail_syncs = True
    with pytest.raises(DiskFailedError):
        await logs.sync()
    assert State.of(logs) == ([[]], {})


async def test_a_newer_version_is_refused(disk):
    logs = await new_logs(disk.mount())
    await logs.append(RUNS[:2], writer="flush")
    await logs.seal("flush")
    await logs.sync()
    data = bytearray(disk.read_whole(log_path(1)))
    header = bytes.fromhex("544c454c 00000002 0000000000000001 0000000000000001 00000000")
    from tierlog.format.checksum import crc32c

    data[:32] = header + crc32c(header).to_bytes(4, "big")
    disk.write_whole(log_path(1), bytes(data))
    with pytest.raises(RefusedError, match="version 2"):
        await opened_logs(State.of(logs), disk.mount())


async def test_open_files_are_bounded(disk):
    logs = await new_logs(disk.mount(), open_files_max=2)
    places = await logs.append(RUNS, writer="flush")
    await logs.sync()
    async with asyncio.TaskGroup() as tasks:
        reads = [tasks.create_task(read_run(logs, place)) for place in places]
    assert [one.result() for one in reads] == RUNS
    assert "2/2" in repr(logs._open_files)
    await logs.close()
    assert "0/2" in repr(logs._open_files)


async def test_over_a_real_disk(tmp_path):
    folders = [DiskFiles(tmp_path / name) for name in ("a", "b")]
    logs = await new_logs(*folders)
    places = await logs.append(RUNS[:35], writer="flush")
    places += await logs.append(RUNS[35:], writer="flush")
    await logs.sync()
    assert {one.directory for one in logs.logs()} == {0, 1}
    state = State.of(logs, 2)
    await logs.append(RUNS[:5], writer="flush")
    await logs.close()
    logs, damages = await opened_logs(state, *folders)
    assert damages == []
    await logs.sync()
    assert [await read_run(logs, place) for place in places] == RUNS
    first = logs.logs()[0]
    logs.retire(first.log_id)
    await logs.remove(first.log_id)
    assert not (tmp_path / "ab"[first.directory] / log_path(first.log_id)).exists()
    await logs.close()
    for one in folders:
        one.close()


async def test_a_hundred_thousand_ledgers_take_little_memory(disk):
    """Appended, synced, sealed, opened again: the maps are columns, whatever holds them."""
    import tracemalloc

    from tierlog.format.frame import pack_entries
    from tierlog.format.run import build_run

    frames, offsets = pack_entries([b""], 0)
    logs = await new_logs(disk.mount(), log_bytes_max=6_000_000)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for start in range(0, 100_000, 2_000):
            runs = [
                build_run(frames, offsets, ledger_id=ledger_id)
                for ledger_id in range(start, start + 2_000)
            ]
            await logs.append(runs, writer="flush")
            del runs
        on_disk = sum(len(disk.read_whole(path)) for path in disk.paths())
        await logs.sync()
        used = tracemalloc.get_traced_memory()[0] - before - 2 * on_disk
        peak_before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        assert len(logs.ledger_ids()) == 100_000
        logs.forget_ledgers(range(0, 100_000, 2))
        assert len(logs.ledger_ids()) == 50_000
        peak = tracemalloc.get_traced_memory()[1] - peak_before
    finally:
        tracemalloc.stop()
    assert [one.sealed for one in logs.logs()] == [True, False]
    assert used < 20_000_000
    assert peak < 20_000_000
    logs, damages = await opened_logs(State.of(logs), disk.mount())
    assert damages == []
    assert len(logs.ledger_ids()) > 50_000
