"""The ledger cache: index pages in one bounded pool, flushed lazily, never an empty answer.

A slot that was put is found, whatever was written out under pressure meanwhile; what is flushed
survives a power cut; a header lists what is there, and a gap costs nothing.
"""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.unit.storage.ledger_cache_kit import disk_of, opened, put, slot, whole
from tierlog.adapters.memory.faults import Faults
from tierlog.model.errors import CorruptError, RefusedError
from tierlog.model.ids import LedgerId
from tierlog_ingest.storage.index.index_files import index_path
from tierlog_ingest.storage.index.index_format import (
    ENTRY_ID_MAX,
    EXTENTS_MAX,
    PAGE_LEN,
    SLOTS_PER_PAGE,
    decode_header,
)


@pytest.mark.covers("D29")
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
    await put(cache, 7, 0, 1, slot(3))
    assert await cache.header(7) == (10, 600, 2)
    assert (await cache.slots(7, 0, 1)).tolist() == [slot(3)]


@pytest.mark.covers("D28")
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


async def test_headers_without_pages_are_bounded_too():
    disk = disk_of()
    cache = await opened(disk.mount(), headers=2)
    for ledger in range(200):
        await cache.put(ledger, [], last_add_confirmed=ledger, create_in=0)
    assert cache.statistics().headers < 50
    await cache.flush()
    disk.crash()
    cache = await opened(disk.mount())
    for ledger in range(200):
        assert await cache.header(ledger) == (ledger, -1, 0)
    assert cache.statistics().headers <= 2


# Which calls reach the disk


async def calls_of(faults, work):
    faults.calls = []
    await work
    calls, faults.calls = [one.removeprefix("files.") for one in faults.calls], None
    return calls


async def test_a_small_ledger_costs_one_write_and_one_sync():
    faults = Faults(random.Random(1))
    cache = await opened(disk_of().mount(faults))
    assert await calls_of(faults, put(cache, 7, 0, 5, slot(1))) == []
    assert await calls_of(faults, cache.flush()) == [
        "make_directory", "open", "write", "sync", "sync_directory",
    ]  # fmt: skip
    assert await calls_of(faults, cache.flush()) == []
    assert await calls_of(faults, put(cache, 7, 5, 5, slot(1))) == []
    assert await calls_of(faults, cache.flush()) == ["write", "sync"]


@pytest.mark.covers("D28")
async def test_adjacent_pages_are_one_write_and_the_header_comes_behind_them():
    disk, faults = disk_of(), Faults(random.Random(1))
    cache = await opened(disk.mount(faults), pages=20)
    for page in (0, 1, 2, 3, 6, 7, 9):
        await put(cache, 7, page * SLOTS_PER_PAGE, 1, slot(page + 1))
    calls = await calls_of(faults, cache.flush())
    assert calls == ["make_directory", "open", *["write"] * 4, "sync", "sync_directory"]
    header = decode_header(disk.read_whole(index_path(7))[:PAGE_LEN], LedgerId(7))
    assert header.bounds == (0, 4, 6, 8, 9, 10)
    for page in (2, 3):
        await cache.replace(7, page * SLOTS_PER_PAGE, 1, slot(page + 1), slot(100))
    assert await calls_of(faults, cache.flush()) == ["write", "sync"]


async def test_many_small_ledgers_are_one_step(monkeypatch):
    disk, steps = disk_of(), []
    mount = disk.mount()
    write_files = mount.write_files

    async def counted(writes, *, sync):
        steps.append((len(writes), sync))
        await write_files(writes, sync=sync)

    monkeypatch.setattr(mount, "write_files", counted)
    cache = await opened(mount, pages=250, headers=250)
    for ledger in range(100):
        await put(cache, ledger, 0, 600, slot(1))
    await cache.flush()
    assert steps == [(100, True)]
    for ledger in range(100):
        await put(cache, ledger, 600, 1, slot(2))
    await put(cache, 7, 5000, 20_000, slot(2))  # many pages: goes by itself
    await cache.flush()
    assert steps == [(100, True), (99, True)]
    assert cache.statistics().unsynced_files == 0
    assert cache.statistics().dirty_pages == 0
    assert cache.statistics().open_files == 1
    disk.crash()
    cache = await opened(disk.mount())
    for ledger in range(100):
        assert (await cache.slots(ledger, 599, 2)).tolist() == [slot(1), slot(2)]


@pytest.mark.covers("D37")
async def test_a_process_that_is_killed_at_any_step_leaves_whole_indexes():
    for crash_at in range(1, 60):
        disk, faults = disk_of(crash_at), Faults(random.Random(crash_at))
        crashed = asyncio.Event()
        faults.on_crash = crashed.set
        cache = await opened(disk.mount(faults), pages=3)
        faults.crash_after(crash_at)
        work = asyncio.ensure_future(churn(cache))
        await crashed.wait()
        work.cancel()
        await asyncio.wait([work])
        disk.crash(power_lost=False)
        cache = await opened(disk.mount())
        for ledger in cache.ledger_ids():
            if not disk.read_whole(index_path(ledger)):  # made, and not written yet
                with pytest.raises(CorruptError, match="cut at 0 bytes"):
                    await cache.header(ledger)
                continue
            header = await cache.header(ledger)
            await whole(cache, ledger, header.page_count * SLOTS_PER_PAGE)


async def churn(cache):
    for n in range(4):
        for ledger in (1, 2, 3):
            await put(cache, ledger, n * 600, 600, slot(n + 1))
            await cache.slots(ledger, 0, 1)
        await cache.flush()


async def test_a_cold_entry_costs_one_read_of_the_index_and_one_more_if_it_is_absent():
    disk = disk_of()
    cache = await opened(disk.mount(), pages=20)
    await put(cache, 7, 0, 5000, slot(1))
    await cache.flush()
    faults = Faults(random.Random(1))
    cache = await opened(disk.mount(faults))
    assert await calls_of(faults, cache.slots(7, 2000, 1)) == ["open", "read"]
    assert await calls_of(faults, cache.slots(7, 2001, 10)) == []
    assert await calls_of(faults, cache.slots(7, 4999, 1)) == ["read"]
    assert await calls_of(faults, cache.slots(7, 5000, 1)) == ["read", "size"]
    assert await calls_of(faults, cache.slots(7, 5001, 1)) == []
    assert await calls_of(faults, cache.slots(7, 6001, 1)) == []
    assert await calls_of(faults, cache.header(7)) == []


# What the header lists


async def test_a_gap_costs_nothing():
    disk = disk_of()
    cache = await opened(disk.mount())
    await put(cache, 7, 1000 * SLOTS_PER_PAGE, 1, slot(1))
    await cache.flush()
    assert cache.statistics().writes == 2
    assert (await cache.slots(7, 500 * SLOTS_PER_PAGE, 2)).tolist() == [0, 0]
    cache = await opened(disk.mount())
    assert (await cache.slots(7, 500 * SLOTS_PER_PAGE, 2)).tolist() == [0, 0]
    assert (await cache.slots(7, 1000 * SLOTS_PER_PAGE, 2)).tolist() == [slot(1), 0]
    assert await cache.header(7) == (-1, 1000 * SLOTS_PER_PAGE, 1001)


async def test_when_the_header_is_full_the_smallest_gap_is_filled():
    disk = disk_of()
    cache = await opened(disk.mount(), pages=2)
    firsts = [3 * n - (n >= 200) for n in range(EXTENTS_MAX + 5)]
    for page in firsts:
        await put(cache, 7, page * SLOTS_PER_PAGE, 1, slot(page + 1))
    cache.check()
    await cache.flush()
    disk.crash()
    header = decode_header(disk.read_whole(index_path(7))[:PAGE_LEN], LedgerId(7))
    assert len(header.bounds) <= 2 * EXTENTS_MAX
    joined = [at for at in range(0, len(header.bounds), 2) if header.bounds[at] in {0, 3, 597}]
    lengths = [header.bounds[at + 1] - header.bounds[at] for at in joined]
    assert max(lengths) >= 3
    cache = await opened(disk.mount())
    for page in range(firsts[-1] + 1):
        expected = slot(page + 1) if page in firsts else 0
        assert (await cache.slots(7, page * SLOTS_PER_PAGE, 2)).tolist() == [expected, 0]


async def test_a_page_that_the_header_does_not_list_is_no_page():
    """A power cut kept a page and not the header: what the page says is from a lost life."""
    disk = disk_of()
    cache = await opened(disk.mount())
    await put(cache, 7, 0, 1, slot(1))
    await cache.flush()
    before = disk.read_whole(index_path(7))
    await put(cache, 7, SLOTS_PER_PAGE, 3, slot(2))
    await cache.flush()
    after = disk.read_whole(index_path(7))
    disk.write_whole(index_path(7), before[:PAGE_LEN] + after[PAGE_LEN:])
    for is_header_first in (True, False):
        cache = await opened(disk.mount())
        if is_header_first:
            assert (await cache.header(7)).page_count == 1
        assert (await cache.slots(7, SLOTS_PER_PAGE, 4)).tolist() == [0] * 4
        await put(cache, 7, SLOTS_PER_PAGE + 1, 1, slot(3))
        assert (await cache.slots(7, SLOTS_PER_PAGE, 4)).tolist() == [0, slot(3), 0, 0]


async def test_an_entry_id_that_no_index_holds_is_refused():
    cache = await opened(disk_of().mount())
    for first, count in ((ENTRY_ID_MAX, 2), (-1, 1), (2**62, 1)):
        with pytest.raises(RefusedError):
            await put(cache, 7, first, count, slot(1))
    assert 7 not in cache


# Replacing and removing


async def test_replace_changes_what_has_the_old_value_alone():
    cache = await opened(disk_of().mount(), pages=1)
    await put(cache, 7, 500, 1100, slot(1))
    await put(cache, 7, 510, 1, slot(2))
    assert await cache.replace(7, 505, 600, slot(1), slot(3))
    expected = [slot(1)] * 5 + [slot(3)] * 5 + [slot(2)] + [slot(3)] * 594 + [slot(1)] * 495
    assert (await whole(cache, 7, 1600))[500:] == expected
    assert not await cache.replace(7, 505, 600, slot(1), slot(4))
    assert not await cache.replace(8, 505, 600, slot(1), slot(4))
    assert not await cache.replace(7, 5_000_000, 600, slot(1), slot(4))
    assert 8 not in cache


async def test_a_removed_index_is_gone_for_good_after_a_flush():
    disk = disk_of()
    cache = await opened(disk.mount())
    await put(cache, 7, 0, 5, slot(1))
    await cache.flush()
    await put(cache, 7, 5, 5, slot(1))
    await cache.remove(7)
    assert 7 not in cache
    assert (await cache.slots(7, 0, 1)).tolist() == [0]
    assert await cache.header(7) is None
    await cache.remove(7)
    await cache.flush()
    disk.crash()
    assert disk.paths() == []
    cache = await opened(disk.mount())
    await put(cache, 7, 1, 1, slot(2))
    assert (await cache.slots(7, 0, 2)).tolist() == [0, slot(2)]
    cache.check()


async def test_it_says_how_it_is():
    cache = await opened(disk_of().mount())
    await put(cache, 7, 0, 1, slot(1))
    await cache.flush()
    assert repr(cache) == (
        "<LedgerCache <IndexFiles 1, open=1/2>,"
        " <PagePool 4: free=3, clean=1, dirty=0, writing=0>,"
        " <IndexWriter headers=0, unsynced=0>>"
    )
    await cache.close()
    assert cache.statistics().open_files == 0
