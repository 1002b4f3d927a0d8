"""A node with very many ledgers: what each costs in memory, and how soon they are listed.

The pool is allocated once; beside it a ledger costs its id, where its index is, and for a while
that its file is to be synced (performance: 100,000 ledgers with one entry each).
"""

from __future__ import annotations

import subprocess
import sys
import tracemalloc

import pytest

from tests.unit.storage.ledger_cache_kit import opened, put, slot
from tierlog.adapters.files import DiskFiles

pytestmark = pytest.mark.covers("D29")

COUNT = 4000


async def test_a_ledger_costs_little_memory(tmp_path):
    disk = DiskFiles(tmp_path)
    cache = await opened(disk, pages=64, headers=64)
    for ledger in range(100):
        await put(cache, ledger, 0, 1, slot(1))
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for ledger in range(100, 100 + COUNT):
        await put(cache, ledger, 0, 1, slot(1))
    unsynced = tracemalloc.get_traced_memory()[0] - before
    await cache.flush()
    flushed = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert cache.statistics().pages <= 64
    assert unsynced / COUNT < 300
    assert flushed / COUNT < 200
    await cache.close()
    cache = await opened(disk, pages=64, headers=64)
    assert cache.ledger_ids() == set(range(100 + COUNT))
    assert cache.statistics().headers_read == 0
    await cache.close()
    disk.close()


MANY = """
import asyncio, sys, time
from pathlib import Path
from tierlog.adapters.files import DiskFiles
from tierlog_ingest.storage.index.index_format import pack_slot
from tierlog_ingest.storage.index.ledger_cache import LedgerCache

def resident_mb():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024

async def main():
    disk = DiskFiles(Path(sys.argv[1]))
    before = resident_mb()
    cache = LedgerCache([disk], bytes_max=64 * 2**20, open_files_max=256)
    await cache.open()
    for ledger in range(100_000):
        placement = (0, 1, pack_slot(1, ledger * 100, 100))
        await cache.put(ledger, [placement], last_add_confirmed=-1, create_in=0)
    await cache.flush()
    grown = resident_mb() - before
    begin = time.perf_counter()
    cache = LedgerCache([disk], bytes_max=64 * 2**20, open_files_max=256)
    await cache.open()
    took = time.perf_counter() - begin
    assert len(cache.ledger_ids()) == 100_000
    for ledger in range(0, 100_000, 1000):
        assert (await cache.slots(ledger, 0, 2)).tolist() == [pack_slot(1, ledger * 100, 100), 0]
    print(grown, took)

asyncio.run(main())
"""


@pytest.mark.soak
def test_100_000_ledgers_cost_less_than_110_mb_and_are_listed_within_2_s(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", MANY, str(tmp_path)], check=True, capture_output=True, text=True
    )
    grown_mb, open_s = map(float, done.stdout.split())
    assert grown_mb < 110
    assert open_s < 2
