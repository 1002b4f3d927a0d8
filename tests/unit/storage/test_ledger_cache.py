"""The ledger cache: index pages in one bounded pool, flushed lazily, never an empty answer.

A slot that was put is found, whatever was written out under pressure meanwhile; what is flushed
survives a power cut; damage is an error, and absence is answered from whole pages alone.
"""

from __future__ import annotations

import random

import pytest

from tierlog.adapters.memory.files import MemoryDisk
from tierlog_ingest.storage.index_format import (
    PAGE_LEN,
    SLOTS_PER_PAGE,
    pack_slot,
)
from tierlog_ingest.storage.ledger_cache import LedgerCache

pytestmark = pytest.mark.covers("D27", "D28", "D29")


def disk_of(seed: int = 1, **kwargs) -> MemoryDisk:
    return MemoryDisk(random.Random(seed), **kwargs)


async def opened(*mounts, pages: int = 4, files: int = 2, headers: int = 2) -> LedgerCache:
    cache = LedgerCache(
        mounts, bytes_max=pages * PAGE_LEN, open_files_max=files, headers_max=headers
    )
    await cache.open()
    return cache


def slot(n: int) -> int:
    return pack_slot(1, n, 100)


async def put(cache, ledger, first, count, value, *, lac=-1):
    await cache.put(ledger, [(first, count, value)], last_add_confirmed=lac, create_in=0)


async def whole(cache, ledger, count):
    found, at = [], 0
    while at < count:
        part = await cache.slots(ledger, at, count - at)
        found += part.tolist()
        at += len(part)
    return found


async def test_what_was_put_is_found():
    cache = await opened(disk_of().mount())
    await put(cache, 7, 500, 20, slot(1), lac=519)
    assert (await cache.slots(7, 505, 100)).tolist() == [slot(1)] * 3
    assert (await cache.slots(7, 508, 100)).tolist() == [slot(1)] * 12 + [0] * 88
    assert (await cache.slots(7, 498, 3)).tolist() == [0, 0, slot(1)]
    assert (await cache.slots(8, 0, 3)).tolist() == [0, 0, 0]
    assert await cache.header(7) == (519, 519, 2)
    assert await cache.header(8) is None
    assert set(cache.ledger_ids()) == {7}
    assert 7 in cache
    assert 8 not in cache
    cache.check()


async def test_the_last_add_confirmed_and_the_last_entry_never_go_back():
    cache = await opened(disk_of().mount())
    await put(cache, 7, 600, 1, slot(1), lac=10)
    await put(cache, 7, 0, 1, slot(2), lac=5)
    await put(cache, 7, 0, 0 + 1, slot(3))
    assert await cache.header(7) == (10, 600, 2)
    assert (await cache.slots(7, 0, 1)).tolist() == [slot(3)]


async def test_a_flush_makes_all_durable():
    disk = disk_of()
    cache = await opened(disk.mount())
    for ledger in range(20):
        await put(cache, ledger, 3 * ledger, 700, slot(ledger), lac=ledger)
    await cache.flush()
    disk.crash()
    cache = await opened(disk.mount())
    assert set(cache.ledger_ids()) == set(range(20))
    for ledger in range(20):
        expected = [0] * (3 * ledger) + [slot(ledger)] * 700
        assert await whole(cache, ledger, len(expected)) == expected
        last = 3 * ledger + 699
        assert await cache.header(ledger) == (ledger, last, last // SLOTS_PER_PAGE + 1)
    cache.check()


@pytest.mark.covers("D32")
async def test_under_pressure_pages_are_written_and_synced_with_the_next_flush():
    disk = disk_of()
    cache = await opened(disk.mount(), pages=3)
    for ledger in range(50):
        await put(cache, ledger, 0, 5, slot(ledger))
        cache.check()
    before = cache.statistics()
    assert before.pages <= 3
    assert before.writes >= 47
    assert before.syncs == 0
    assert before.unsynced_files >= 47
    for ledger in range(50):
        assert (await cache.slots(ledger, 0, 6)).tolist() == [slot(ledger)] * 5 + [0]
    await cache.flush()
    assert cache.statistics().unsynced_files == 0
    assert cache.statistics().syncs == 50
    assert cache.statistics().open_files <= 2
    disk.crash()
    cache = await opened(disk.mount(), pages=1)
    for ledger in range(50):
        assert (await cache.slots(ledger, 0, 6)).tolist() == [slot(ledger)] * 5 + [0]
