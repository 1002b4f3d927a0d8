"""Damage of entry logs: every flip, cut and swapped page is reported, and none is served.

"Every single flipped byte, every truncation and every swapped 4 KB page of any file is detected
and reported, never served and never a hang."
"""

from __future__ import annotations

import itertools
import random

import pytest

from tests.unit.storage.log_kit import (
    RUN_LEN,
    RUNS,
    State,
    new_logs,
    opened_logs,
    read_run,
    runs_of,
)
from tests.unit.storage.node_kit import make_run
from tierlog.adapters.memory.files import MemoryDisk
from tierlog.format.authentication import LedgerKey
from tierlog.format.frame import pack_entries
from tierlog.format.run import RUN_MAGIC, Run, build_run
from tierlog.model.errors import CorruptError, RetryableError
from tierlog_ingest.storage.entrylog import entry_log_scan
from tierlog_ingest.storage.entrylog.entry_log import Location, log_path
from tierlog_ingest.storage.entrylog.entry_log_format import LOG_HEADER_LEN

pytestmark = pytest.mark.covers("D03")

PAGE = 4096


class Written:
    """Logs as they were written, the state that lists them, and where each run went."""

    def __init__(self, disk, state, places):
        self.disk = disk
        self.state = state
        self.places = places
        self.whole = {path: disk.read_whole(path) for path in disk.paths()}

    def restore(self):
        for path, data in self.whole.items():
            self.disk.write_whole(path, data)

    async def check(self, *, reported=True):
        """Open what is on the disk; nothing wrong is served, and the damage is told."""
        logs, damages = await opened_logs(self.state, self.disk.mount(), log_bytes_max=2**20)
        written = [run for run, _ in self.places]
        reads_failed = 0
        for run, place in self.places:
            found = await read_run(logs, place)
            if found is None:
                reads_failed += 1
            elif found != run:
                # Another run that was written somewhere: its ids tell that it is not this one.
                assert found in written
                assert found.header.ledger_id != run.header.ledger_id or (
                    found.first_entry_id != run.first_entry_id
                )
                reads_failed += 1
        for info in logs.logs():
            assert all(run in written for run in await runs_of(logs, info.log_id))
        bad = bool(damages or logs.damaged_logs)
        assert not reads_failed or logs.damaged_logs
        assert bad == reported
        for found_id, places in logs.damaged_logs.items():
            length = next(one.length for one in logs.logs() if one.log_id == found_id)
            assert all(LOG_HEADER_LEN <= start < end <= length for start, end in places)
        await logs.close()
        return logs, damages


async def written(runs, *, sealed, disk=None):
    disk = disk or MemoryDisk(random.Random(1))
    logs = await new_logs(disk.mount(), log_bytes_max=2**20)
    places = await logs.append(runs, writer="flush")
    if sealed:
        await logs.seal("flush")
    await logs.sync()
    state = State.of(logs)
    await logs.close()
    return Written(disk, state, list(zip(runs, places, strict=True)))


SMALL = [make_run(ledger, n, size=8 + n, count=2) for ledger in (1, 2) for n in (0, 2)]


def signed(ledger_id, first):
    frames, offsets = pack_entries([b"signed"], first)
    key = LedgerKey("k", bytes(32))
    return build_run(frames, offsets, ledger_id=ledger_id, first_entry_id=first, key=key)


@pytest.mark.parametrize("sealed", [True, False])
async def test_every_flipped_byte(sealed):
    log = await written([*SMALL[:2], signed(2, 10), signed(1, 10), SMALL[2]], sealed=sealed)
    whole = log.whole[log_path(1)]
    for at in range(len(whole)):
        log.restore()
        damaged = bytearray(whole)
        damaged[at] ^= 1 << (at % 8)
        log.disk.write_whole(log_path(1), bytes(damaged))
        await log.check()
    log.restore()
    logs, _ = await log.check(reported=False)
    logs, _ = await opened_logs(log.state, log.disk.mount())
    assert await runs_of(logs, 1, ledger_id=2) == [signed(2, 10), SMALL[2]]


@pytest.mark.parametrize("sealed", [True, False])
async def test_every_cut(sealed):
    log = await written(SMALL, sealed=sealed)
    whole = log.whole[log_path(1)]
    for length in range(len(whole)):
        log.restore()
        log.disk.write_whole(log_path(1), whole[:length])
        logs, damages = await log.check()
        assert damages
        assert logs.lengths(0) == log.state.lengths[0]
        assert log.disk.read_whole(log_path(1)) == whole[:length], "the next start finds it, too"


@pytest.mark.parametrize("surplus", [1, 32, 5000])
async def test_what_is_behind_the_end(surplus):
    """Behind runs it is what the crash left, and is cut; behind a map there can't be anything."""
    log = await written(SMALL, sealed=False)
    log.disk.write_whole(log_path(1), log.whole[log_path(1)] + bytes(surplus))
    await log.check(reported=False)
    log = await written(SMALL, sealed=True)
    log.disk.write_whole(log_path(1), log.whole[log_path(1)] + bytes(surplus))
    await log.check()


async def test_a_missing_file():
    for sealed in (True, False):
        log = await written(SMALL, sealed=sealed)
        await log.disk.mount().remove(log_path(1))
        logs, damages = await opened_logs(log.state, log.disk.mount())
        assert damages == ["entry log 1: its file is missing"]
        assert logs.unmapped == ({1} if sealed else set())
        with pytest.raises(CorruptError, match="its file is missing"):
            await logs.read(*log.places[0][1])
        assert await runs_of(logs, 1) == []
        assert logs.damaged_logs == {1: {(LOG_HEADER_LEN, logs.logs()[0].length)}}
        assert logs.logs_of(1) == [1]
        assert await logs.scan_map(1) != sealed
        await logs.sync()
        assert State.of(logs) == log.state


async def pages_of(sealed):
    """Runs of several sizes, so that some pages hold whole runs and some none."""
    rng = random.Random(7)
    runs, firsts = [], [0, 0, 0]
    for _ in range(150):
        ledger = rng.randrange(3)
        size = rng.choice((5, 100, 300, 9000 if rng.random() < 0.2 else 50))
        runs.append(make_run(ledger + 1, firsts[ledger], size=size))
        firsts[ledger] += 1
    return await written(runs, sealed=sealed)


@pytest.mark.parametrize("sealed", [True, False])
async def test_every_swapped_page(sealed):
    log = await pages_of(sealed)
    whole = log.whole[log_path(1)]
    assert len(whole) > 8 * PAGE
    for one, two in itertools.combinations(range(len(whole) // PAGE), 2):
        pages = [whole[at : at + PAGE] for at in range(0, len(whole), PAGE)]
        pages[one], pages[two] = pages[two], pages[one]
        log.restore()
        log.disk.write_whole(log_path(1), b"".join(pages))
        await log.check()


async def test_every_page_that_is_zeros():
    log = await pages_of(sealed=True)
    whole = log.whole[log_path(1)]
    for at in range(0, len(whole), PAGE):
        log.restore()
        zeros = bytes(len(whole[at : at + PAGE]))
        log.disk.write_whole(log_path(1), whole[:at] + zeros + whole[at + PAGE :])
        await log.check()


async def test_pages_swapped_between_logs_where_every_page_is_one_run():
    """Both logs read well from end to end; only their maps tell."""
    disk = MemoryDisk(random.Random(1))
    logs = await new_logs(disk.mount(), log_bytes_max=2**20)
    first = make_run(9, 0, size=PAGE - LOG_HEADER_LEN - 96)
    places: list[tuple[Run, Location]] = []
    for ledger in (1, 2):
        runs = [first] + [make_run(ledger, n, size=PAGE - 96) for n in range(3)]
        assert [len(run.encoded) for run in runs] == [PAGE - 32, PAGE, PAGE, PAGE]
        places += zip(runs, await logs.append(runs, writer="flush"), strict=True)
        await logs.seal("flush")
    await logs.sync()
    log = Written(disk, State.of(logs), places)
    one, two = log.whole.values()
    disk.write_whole(log_path(1), one[:PAGE] + two[PAGE : 2 * PAGE] + one[2 * PAGE :])
    disk.write_whole(log_path(2), two[:PAGE] + one[PAGE : 2 * PAGE] + two[2 * PAGE :])
    logs, damages = await log.check()
    assert damages == []
    length = 4 * PAGE
    assert logs.damaged_logs == {1: {(32, length)}, 2: {(32, length)}}
    logs, _ = await opened_logs(log.state, disk.mount())
    assert len(await runs_of(logs, 1, ledger_id=1)) == 2
    assert logs.damaged_logs == {1: {(32, length)}}, "also when one ledger's runs are looked for"


async def test_two_logs_in_each_others_place():
    disk = MemoryDisk(random.Random(1))
    logs = await new_logs(disk.mount(), log_bytes_max=2**20)
    for ledger in (1, 2):
        await logs.append([make_run(ledger, 0)], writer="flush")
        await logs.seal("flush")
    await logs.sync()
    one, two = (disk.read_whole(log_path(log_id)) for log_id in (1, 2))
    disk.write_whole(log_path(1), two)
    disk.write_whole(log_path(2), one)
    logs, damages = await opened_logs(State.of(logs), disk.mount())
    assert [text.partition(": ")[0] for text in damages] == [
        *["entry log 1"] * 2,
        *["entry log 2"] * 2,
    ]
    assert logs.unmapped == {1, 2}


async def test_runs_behind_a_bad_place_are_found():
    log = await written(RUNS, sealed=True)
    data = bytearray(log.whole[log_path(1)])
    for number in (5, 6, 20, 59):
        offset = log.places[number][1].offset
        data[offset + (0 if number == 6 else 100)] ^= 1
    log.disk.write_whole(log_path(1), bytes(data))
    logs, _ = await log.check()
    logs, _ = await opened_logs(log.state, log.disk.mount())
    assert await runs_of(logs, 1) == [RUNS[n] for n in range(60) if n not in {5, 6, 20, 59}]
    starts = [place.offset for _, place in log.places]
    assert logs.damaged_logs == {
        1: {
            (starts[5], starts[7]),
            (starts[20], starts[21]),
            (starts[59], starts[59] + RUN_LEN),
        }
    }


async def test_one_ledgers_runs_and_the_damage_of_another():
    """A flipped length, or ledger, of any run may hide one of the ledger that is looked for."""
    log = await written(RUNS, sealed=True)
    for field in (8, 12, 16, 23, 90):
        data = bytearray(log.whole[log_path(1)])
        data[log.places[25][1].offset + field] ^= 1
        log.disk.write_whole(log_path(1), bytes(data))
        logs, _ = await opened_logs(log.state, log.disk.mount())
        assert await runs_of(logs, 1, ledger_id=3) == RUNS[40:]
        assert list(logs.damaged_logs) == [1]


async def test_a_bad_map_makes_its_log_everybodys():
    log = await written(RUNS, sealed=True)
    data = bytearray(log.whole[log_path(1)])
    data[-1] ^= 1
    log.disk.write_whole(log_path(1), bytes(data))
    logs, damages = await opened_logs(log.state, log.disk.mount())
    assert len(damages) == 1
    assert logs.unmapped == {1}
    assert logs.logs_of(12345) == [1]
    assert logs.live_bytes(1) == logs.logs()[0].length - LOG_HEADER_LEN
    assert dict(logs.usage) == {}
    logs.forget_ledger(1)
    assert await logs.scan_map(1)
    assert logs.unmapped == set()
    assert logs.usage == {1: dict.fromkeys((1, 2, 3), 20 * 396)}
    assert logs.damaged_logs == {}
    await logs.sync()
    state = State.of(logs)
    assert state.lengths[0][0].sealed is False
    logs, damages = await opened_logs(state, log.disk.mount())
    await logs.sync()
    assert damages == []
    assert log.disk.read_whole(log_path(1)) == log.whole[log_path(1)], "the map is there again"
    assert logs.lengths(0) == log.state.lengths[0]


async def test_a_log_with_bad_runs_and_a_bad_map_stays_everybodys():
    log = await written(RUNS, sealed=True)
    data = bytearray(log.whole[log_path(1)])
    data[-1] ^= 1
    data[log.places[7][1].offset + 100] ^= 1
    log.disk.write_whole(log_path(1), bytes(data))
    logs, _ = await opened_logs(log.state, log.disk.mount())
    assert not await logs.scan_map(1)
    assert logs.unmapped == {1}
    assert logs.logs_of(12345) == [1]


async def test_a_log_that_state_lists_without_its_map():
    log = await written(RUNS, sealed=False)
    logs, damages = await opened_logs(State(log.state.lengths, {}), log.disk.mount())
    assert damages == ["entry log 1: its ledgers map is not in the node's state"]
    assert await logs.scan_map(1)
    assert State.of(logs) == log.state


async def test_a_log_that_two_directories_list():
    log = await written(SMALL, sealed=True)
    other = MemoryDisk(random.Random(1))
    state = State([log.state.lengths[0], log.state.lengths[0]], {})
    logs, damages = await opened_logs(state, log.disk.mount(), other.mount())
    assert damages == ["entry log 1 is listed by two directories"]
    assert [one.directory for one in logs.logs()] == [0]


async def test_what_looks_like_a_run_inside_of_an_entry():
    """An entry is the client's: what it contains is never taken for a run of the log."""
    inner = make_run(1, 70, size=60)
    frames, offsets = pack_entries([b"x" * 50 + bytes(inner.encoded) + b"y" * 50], 3)
    outer = build_run(frames, offsets, ledger_id=1, first_entry_id=3, owner_epoch=1)
    log = await written([RUNS[0], outer, RUNS[1], RUNS[2]], sealed=True)
    offset = log.places[1][1].offset
    for at in (0, 4, 8, 13, 16, 30, 79, 100, len(outer.encoded) - 1):
        data = bytearray(log.whole[log_path(1)])
        data[offset + at] ^= 1
        log.disk.write_whole(log_path(1), bytes(data))
        logs, _ = await opened_logs(log.state, log.disk.mount())
        assert inner not in await runs_of(logs, 1)
        assert list(logs.damaged_logs) == [1]
        assert await runs_of(logs, 1) == [RUNS[0], RUNS[1], RUNS[2]]


async def test_runs_of_ledgers_that_the_log_does_not_hold_are_never_found_in_entries():
    inner = b"".join(make_run(77, n, size=60).encoded for n in range(3))
    frames, offsets = pack_entries([inner], 3)
    outer = build_run(frames, offsets, ledger_id=1, first_entry_id=3, owner_epoch=1)
    log = await written([RUNS[0], outer, RUNS[1], RUNS[2]], sealed=True)
    data = bytearray(log.whole[log_path(1)])
    data[log.places[1][1].offset] ^= 1
    log.disk.write_whole(log_path(1), bytes(data))
    logs, _ = await opened_logs(log.state, log.disk.mount())
    assert await runs_of(logs, 1) == [RUNS[0], RUNS[1], RUNS[2]]


class Counting:
    """Files that count what is read."""

    def __init__(self, files):
        self._files = files
        self.read_bytes = 0
        self.reads = 0

    def __getattr__(self, name):
        return getattr(self._files, name)

    async def open(self, path, **how):
        return CountingFile(await self._files.open(path, **how), self)


class CountingFile:
    def __init__(self, file, counter):
        self._file = file
        self._counter = counter

    def __getattr__(self, name):
        return getattr(self._file, name)

    async def read(self, offset, length):
        self._counter.reads += 1
        data = await self._file.read(offset, length)
        self._counter.read_bytes += len(data)
        return data


@pytest.mark.parametrize("lure", ["heads", "magic"])
async def test_entries_full_of_what_begins_like_a_run_are_no_hang(lure, monkeypatch):
    monkeypatch.setattr(entry_log_scan, "_RESYNC_LEN_MIN", 2**20)
    length = 2**19
    if lure == "heads":
        # Each says that it is as long as what is left; all of it would be read for each.
        heads = (_head(left) for left in range(length - 4096, 2**17, -80))
        lured = b"".join(heads).ljust(length, b"\0")
    else:
        lured = RUN_MAGIC * (length // 4)
    frames, offsets = pack_entries([lured], 0)
    outer = build_run(frames, offsets, ledger_id=2, first_entry_id=0, owner_epoch=1)
    log = await written([RUNS[0], outer, RUNS[1]], sealed=True)
    data = bytearray(log.whole[log_path(1)])
    data[log.places[1][1].offset] ^= 1
    log.disk.write_whole(log_path(1), bytes(data))
    files = Counting(log.disk.mount())
    logs, _ = await opened_logs(log.state, files)
    assert (await runs_of(logs, 1))[:1] == [RUNS[0]]
    assert files.read_bytes < 10 * length
    assert files.reads < 1000
    assert list(logs.damaged_logs) == [1]


def _head(length):
    fields = bytes.fromhex("544c524e 01 00 0050 00000001") + (length - 84).to_bytes(4, "big")
    return (fields + (2).to_bytes(8, "big")).ljust(80, b"\0")


class Unreadable(Counting):
    """A disk that can't read some pages."""

    def __init__(self, files, pages):
        super().__init__(files)
        self.pages = pages

    async def open(self, path, **how):
        return UnreadableFile(await self._files.open(path, **how), self)


class UnreadableFile(CountingFile):
    async def read(self, offset, length):
        data = await super().read(offset, length)
        if any(offset < (page + 1) * PAGE and page * PAGE < offset + length
               for page in self._counter.pages):  # fmt: skip
            raise CorruptError("the disk can't read", remedy="Replace it")
        return data


async def test_pages_that_the_disk_can_not_read(monkeypatch):
    monkeypatch.setattr(entry_log_scan, "_FAILURES_MAX", 4)
    log = await pages_of(sealed=True)
    files = Unreadable(log.disk.mount(), {2, 3})
    logs, damages = await opened_logs(log.state, files)
    assert damages == []
    found = await runs_of(logs, 1)
    lost = [
        run
        for run, place in log.places
        if place.offset < 4 * PAGE and place.offset + place.length > 2 * PAGE
    ]
    assert lost
    assert set(map(repr, found)) == {repr(run) for run, _ in log.places if run not in lost}
    assert list(logs.damaged_logs) == [1]
    files.pages = {0}
    logs, damages = await opened_logs(log.state, files)
    assert damages == ["entry log 1: the disk can't read"]
    files.pages = set(range(10**5))
    before = files.reads
    logs, damages = await opened_logs(log.state, files)
    assert len(damages) == 2
    assert await runs_of(logs, 1) == []
    assert files.reads - before < 20, "a dead disk is not asked for each of its sectors"


async def test_damage_of_a_removed_log_is_forgotten():
    log = await written(SMALL, sealed=True)
    log.disk.write_whole(log_path(1), bytes(len(log.whole[log_path(1)])))
    logs, damages = await opened_logs(log.state, log.disk.mount())
    assert len(damages) == 2
    assert await runs_of(logs, 1) == []
    assert list(logs.damaged_logs) == [1]
    logs.retire(1)
    await logs.remove(1)
    assert logs.damaged_logs == {}
    with pytest.raises(RetryableError):
        await runs_of(logs, 1)
    assert logs.lengths(0) == []
