"""The ledger cache under many tasks at once: readers, writers, flushes, pressure, removals.

Readers see what was put before they began, or what is put meanwhile, with a pool of one page too;
one read serves all who wait for it; counts reconcile; all that was put is durable after a flush.
"""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.unit.storage.ledger_cache_kit import disk_of, opened, put, slot, whole
from tierlog.adapters.memory.faults import FaultRates, Faults
from tierlog.model.errors import CorruptError
from tierlog_ingest.storage.index import index_writer
from tierlog_ingest.storage.index.index_files import index_path
from tierlog_ingest.storage.index.index_format import SLOTS_PER_PAGE, page_offset


class Busy:
    """Ledgers that are written, read and flushed at once; ``newest`` is what was put for sure."""

    LEDGERS, ENTRIES = 6, 3 * SLOTS_PER_PAGE

    def __init__(self, cache, rng):
        self.cache, self.rng, self.is_over = cache, rng, False
        self.newest = [[0] * self.ENTRIES for _ in range(self.LEDGERS)]

    async def write(self, ledger):
        for n in range(1, 40):
            count = self.rng.randint(1, 700)
            first = self.rng.randrange(self.ENTRIES - count)
            await put(self.cache, ledger, first, count, slot(n), lac=n)
            self.newest[ledger][first : first + count] = [n] * count

    async def read(self):
        while not self.is_over:
            ledger, entry = self.rng.randrange(self.LEDGERS), self.rng.randrange(self.ENTRIES)
            before = self.newest[ledger][entry]
            found = (await self.cache.slots(ledger, entry, 1)).tolist()[0]
            assert found >= (slot(before) if before else 0)
            await asyncio.sleep(0)

    async def flush(self):
        while not self.is_over:
            await self.cache.flush()
            await asyncio.sleep(0)

    async def run(self):
        async with asyncio.TaskGroup() as tasks:
            for work in (self.read, self.read, self.read, self.flush):
                tasks.create_task(work())
            async with asyncio.TaskGroup() as writers:
                for ledger in range(self.LEDGERS):
                    writers.create_task(self.write(ledger))
            self.is_over = True


@pytest.fixture(params=[2, 100], autouse=True)
def batch_min(request, monkeypatch):
    """From so many ledgers on, the disk gets them in one step; or each by itself."""
    monkeypatch.setattr(index_writer, "_BATCH_MIN", request.param)


@pytest.mark.covers("D29", "D32")
@pytest.mark.parametrize("pages", [1, 2, 5])
@pytest.mark.parametrize("seed", range(4))
async def test_readers_writers_flushes_and_pressure_at_once(pages, seed):
    disk = disk_of(seed)
    faults = Faults(random.Random(seed), rates=FaultRates(delay_s_max=0.0001 * (seed % 2)))
    cache = await opened(disk.mount(faults), pages=pages, headers=1)
    busy = Busy(cache, random.Random(seed))
    await busy.run()
    cache.check()
    await cache.flush()
    disk.crash()
    cache = await opened(disk.mount())
    for ledger, newest in enumerate(busy.newest):
        found = await whole(cache, ledger, busy.ENTRIES)
        assert found == [slot(n) if n else 0 for n in newest]
        assert (await cache.header(ledger)).last_add_confirmed == 39


@pytest.mark.parametrize("seed", range(10))
async def test_ledgers_are_removed_and_rebuilt_under_way(seed):
    disk, rng = disk_of(seed), random.Random(seed)
    cache = await opened(disk.mount(), pages=2, headers=1)
    is_over = False

    async def write(ledger):
        for n in range(1, 40):
            await put(cache, ledger, rng.randrange(2000), rng.randint(1, 600), slot(n))

    async def read():
        while not is_over:
            try:
                await cache.slots(rng.randrange(4), rng.randrange(2000), 5)
            except CorruptError as error:
                assert "being rebuilt" in str(error)  # noqa: PT017
            await asyncio.sleep(0)

    async def disturb():
        while not is_over:
            await cache.flush()
            await cache.remove(0)
            await cache.discard(1)
            await asyncio.sleep(0)
            cache.complete(1)
            await cache.replace(2, 0, 2000, slot(3), slot(50))

    async with asyncio.TaskGroup() as tasks:
        for work in (read, read, disturb):
            tasks.create_task(work())
        async with asyncio.TaskGroup() as writers:
            for ledger in range(4):
                writers.create_task(write(ledger))
        is_over = True
    cache.check()
    await cache.flush()
    cache.check()
    assert cache.statistics().dirty_pages == 0
    assert cache.statistics().unsynced_files == 0


async def test_one_read_serves_all_who_wait_for_a_page_or_a_header():
    disk = disk_of()
    cache = await opened(disk.mount())
    await put(cache, 7, 0, 600, slot(1))
    await cache.flush()
    cache = await opened(disk.mount())
    async with asyncio.TaskGroup() as tasks:
        found = [tasks.create_task(cache.slots(7, n, 1)) for n in range(20)]
    assert all(one.result().tolist() == [slot(1)] for one in found)
    assert cache.statistics().pages_read == 1
    async with asyncio.TaskGroup() as tasks:
        headers = [tasks.create_task(cache.header(7)) for _ in range(20)]
    assert {one.result() for one in headers} == {(-1, 599, 2)}
    assert cache.statistics().headers_read == 1


async def test_a_reader_that_is_cancelled_leaves_the_page_to_others():
    disk = disk_of()
    cache = await opened(disk.mount())
    await put(cache, 7, 0, 600, slot(1))
    await cache.flush()
    cache = await opened(disk.mount())
    first = asyncio.ensure_future(cache.slots(7, 0, 1))
    await asyncio.sleep(0)
    second = asyncio.ensure_future(cache.slots(7, 0, 1))
    await asyncio.sleep(0)
    first.cancel()
    assert (await second).tolist() == [slot(1)]
    with pytest.raises(asyncio.CancelledError):
        await first
    cache.check()


async def test_who_reads_on_gets_many_pages_by_one_read():
    faults, pages = Faults(random.Random(1)), 40
    disk = disk_of()
    cache = await opened(disk.mount(), pages=200)
    for page in range(pages):
        await put(cache, 7, page * SLOTS_PER_PAGE, SLOTS_PER_PAGE, slot(page + 1))
    await cache.flush()
    cache = await opened(disk.mount(faults), pages=200)
    await cache.header(7)
    faults.calls = []
    found = await whole(cache, 7, pages * SLOTS_PER_PAGE)
    assert found == [slot(page + 1) for page in range(pages) for _ in range(SLOTS_PER_PAGE)]
    assert faults.calls.count("files.read") == 3
    assert cache.statistics().pages_read == pages
    cache.check()


async def test_a_damaged_page_behind_others_is_told_by_itself_alone():
    disk = disk_of()
    cache = await opened(disk.mount(), pages=200)
    for page in range(4):
        await put(cache, 7, page * SLOTS_PER_PAGE, SLOTS_PER_PAGE, slot(page + 1))
    await cache.flush()
    data = bytearray(disk.read_whole(index_path(7)))
    data[page_offset(2) + 100] ^= 1
    disk.write_whole(index_path(7), bytes(data))
    cache = await opened(disk.mount(), pages=200)
    await cache.header(7)
    assert await whole(cache, 7, 2 * SLOTS_PER_PAGE)
    with pytest.raises(CorruptError, match="page 2 can't be read"):
        await cache.slots(7, 2 * SLOTS_PER_PAGE, 2 * SLOTS_PER_PAGE)
    assert (await cache.slots(7, 3 * SLOTS_PER_PAGE, 1)).tolist() == [slot(4)]
    cache.check()
