"""Entry logs (checklist D24 to D26): runs of all ledgers in one file, sealed with their map.

"Entries from different ledgers are aggregated and written sequentially. A new entry log file is
created once the bookie starts or the older entry log file reaches the size threshold."
"""

from __future__ import annotations

import random

import pytest

from tests.unit.storage.node_kit import make_run
from tierlog.adapters.memory.files import MemoryDisk
from tierlog.adapters.memory.ids import SeededIds
from tierlog.model.errors import CorruptError, Reason, RetryableError
from tierlog_ingest.storage.entry_log import EntryLogs, LogLength, log_path

pytestmark = pytest.mark.covers("D21", "D24", "D25")


def make_logs(*disks, log_bytes_max=4000, open_files_max=2, seed=1):
    folders = [disk.mount() for disk in disks]
    return EntryLogs(
        folders,
        SeededIds(random.Random(seed)),
        log_bytes_max=log_bytes_max,
        open_files_max=open_files_max,
    )


async def new_logs(*disks, **how):
    logs = make_logs(*disks, **how)
    assert await logs.open([[] for _ in disks], {}) == []
    return logs


async def all_runs(logs):
    return [
        run for info in logs.logs() async for window in logs.scan(info.log_id) for _, run in window
    ]


@pytest.fixture
def disk():
    return MemoryDisk(random.Random(1))


RUNS = [make_run(ledger, n, size=300) for ledger in (1, 2, 3) for n in range(20)]


async def test_append_read_scan_roll(disk):
    logs = await new_logs(disk)
    places = await logs.append(RUNS, writer="flush")
    assert [await logs.read(*place) for place in places] == [bytes(run.encoded) for run in RUNS]
    assert await all_runs(logs) == RUNS
    assert {place.log_id for place in places} == {1, 2, 3, 4, 5, 6}
    assert [one.sealed for one in logs.logs()] == [True] * 5 + [False]
    assert logs.lengths(0) == [], "nothing is durable yet"
    await logs.sync()
    assert logs.lengths(0) == [LogLength(n, 3992, n < 6) for n in range(1, 7)]
    assert dict(logs.open_maps()) == {6: {3: 3960}}


async def test_restart_seals_and_begins_a_new_log(disk):
    logs = await new_logs(disk)
    await logs.append(RUNS, writer="flush")
    await logs.sync()
    lengths, maps = logs.lengths(0), dict(logs.open_maps())
    disk.crash()
    logs = make_logs(disk)
    assert await logs.open([lengths], maps) == []
    await logs.sync()
    assert logs.lengths(0) == [LogLength(n, 3992, True) for n in range(1, 7)]
    assert await all_runs(logs) == RUNS
    [place] = await logs.append(RUNS[:1], writer="flush")
    assert place.log_id == 7


async def test_removed_logs_are_told_from_those_that_never_were(disk):
    logs = await new_logs(disk)
    [place] = await logs.append(RUNS[:1], writer="flush")
    await logs.seal("flush")
    logs.retire(1)
    assert logs.logs() == []
    assert await logs.read(*place) == RUNS[0].encoded
    await logs.remove(1)
    assert log_path(1) not in disk.paths()
    with pytest.raises(RetryableError) as gone:
        await logs.read(*place)
    assert gone.value.reason is Reason.UNKNOWN
    with pytest.raises(CorruptError):
        await logs.read(2, 32, 100)
