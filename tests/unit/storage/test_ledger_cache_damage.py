"""Damaged indexes: an error that names the ledger, never a wrong answer, and never an empty one.

Flipped bits, torn and swapped pages, cut files, rebuilds that did not come to their end, full and
failing disks (ADR-0014, point 3).
"""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.unit.storage.ledger_cache_kit import disk_of, opened, put, slot
from tierlog.adapters.memory.faults import Faults
from tierlog.model.errors import CorruptError, Reason, RetryableError
from tierlog.ports.files import DiskFailedError
from tierlog_ingest.storage.index.index_files import index_path
from tierlog_ingest.storage.index.index_format import PAGE_LEN, SLOTS_PER_PAGE
from tierlog_ingest.storage.index.index_writer import IndexWriter

pytestmark = pytest.mark.covers("D03")


@pytest.fixture
async def stored():
    """Return a disk with two indexes of three pages."""
    disk = disk_of()
    cache = await opened(disk.mount())
    await put(cache, 7, 0, 2 * SLOTS_PER_PAGE + 10, slot(1))
    await put(cache, 8, 0, 2 * SLOTS_PER_PAGE + 10, slot(2))
    await cache.flush()
    return disk


async def answers(disk, ledger=7):
    """Ask for every page and one behind the end, in a fresh process; None where it is damaged."""
    found = []
    for page in range(4):
        cache = await opened(disk.mount())
        try:
            found.append((await cache.slots(ledger, page * SLOTS_PER_PAGE, 20)).tolist())
        except CorruptError as error:
            found.append(None if error.details["ledger_id"] == str(ledger) else "another's error")
        await cache.close()
    return found


FULL, PART, NONE = [slot(1)] * 20, [slot(1)] * 10 + [0] * 10, [0] * 20


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        (0, [FULL, FULL, None, None]),
        (1, [None, FULL, PART, NONE]),
        (2, [FULL, None, PART, NONE]),
        (3, [FULL, FULL, None, NONE]),
    ],
)
async def test_a_flipped_bit_in_any_page_is_never_an_answer(stored, page, expected):
    assert await answers(stored) == [FULL, FULL, PART, NONE]
    good = stored.read_whole(index_path(7))
    for at in range(0, PAGE_LEN, 97):
        data = bytearray(good)
        data[page * PAGE_LEN + at] ^= 1 << at % 8
        stored.write_whole(index_path(7), bytes(data))
        assert await answers(stored) == expected


@pytest.mark.parametrize("sectors", range(1, 9))
async def test_a_torn_page_or_header_is_never_an_answer(stored, sectors):
    good = stored.read_whole(index_path(7))
    expected = [FULL, FULL, PART, NONE]
    for page in range(4):
        data = bytearray(good)
        data[page * PAGE_LEN : page * PAGE_LEN + sectors * 512] = bytes(sectors * 512)
        stored.write_whole(index_path(7), bytes(data))
        lost = {2, 3} if page == 0 else {page - 1}
        assert await answers(stored) == [
            None if at in lost else one for at, one in enumerate(expected)
        ]


@pytest.mark.parametrize("length", [0, 1, 4095, 4096, 8192, 12288, 16383])
async def test_a_cut_file_is_never_an_answer(stored, length):
    stored.write_whole(index_path(7), stored.read_whole(index_path(7))[:length])
    whole_pages = min(2, max(0, length // PAGE_LEN - 1))
    assert await answers(stored) == [FULL] * whole_pages + [None] * (4 - whole_pages)


async def test_swapped_pages_are_never_an_answer(stored):
    own, other = stored.read_whole(index_path(7)), stored.read_whole(index_path(8))
    pages = [own[at : at + PAGE_LEN] for at in range(0, len(own), PAGE_LEN)]
    stored.write_whole(index_path(7), b"".join([pages[0], pages[2], pages[1], pages[3]]))
    assert await answers(stored) == [None, None, PART, NONE]
    stored.write_whole(index_path(7), own[: 2 * PAGE_LEN] + other[2 * PAGE_LEN :])
    assert await answers(stored) == [FULL, None, None, NONE]
    stored.write_whole(index_path(7), other)
    assert await answers(stored) == [None] * 4


async def test_a_damaged_index_takes_nothing_until_it_is_rebuilt(stored):
    good = stored.read_whole(index_path(7))
    stored.write_whole(index_path(7), good[:PAGE_LEN] + bytes(PAGE_LEN) + good[2 * PAGE_LEN :])
    cache = await opened(stored.mount())
    with pytest.raises(CorruptError):
        await put(cache, 7, 5, 1, slot(3))
    with pytest.raises(CorruptError):
        await cache.replace(7, 5, 1, slot(1), slot(3))
    cache.check()
    await put(cache, 7, 0, SLOTS_PER_PAGE, slot(3))  # all of the page: what was there is no matter
    assert (await cache.slots(7, 0, 20)).tolist() == [slot(3)] * 20
    await cache.flush()
    assert await answers(stored) == [[slot(3)] * 20, FULL, PART, NONE]


async def test_until_a_rebuild_is_complete_nothing_is_absent_also_after_a_restart(stored):
    cache = await opened(stored.mount())
    await cache.discard(7)
    assert 7 in cache
    for lac in (4, 5):
        for work in (cache.slots(7, 0, 1), cache.header(7)):
            with pytest.raises(CorruptError, match="being rebuilt"):
                await work
        await put(cache, 7, 3, 2, slot(5), lac=lac)
        assert (await cache.slots(7, 3, 2)).tolist() == [slot(5)] * 2
        with pytest.raises(CorruptError, match="being rebuilt"):
            await cache.slots(7, 3, 3)
        await cache.flush()
        restarted = await opened(stored.mount())
        with pytest.raises(CorruptError, match="did not come to an end"):
            await restarted.header(7)
        with pytest.raises(CorruptError):
            await put(restarted, 7, 9, 1, slot(5))
    cache.complete(7)
    assert (await cache.slots(7, 3, 3)).tolist() == [slot(5), slot(5), 0]
    await cache.flush()
    restarted = await opened(stored.mount())
    assert await restarted.header(7) == (5, 4, 1)
    assert (await restarted.slots(7, 3, 3)).tolist() == [slot(5), slot(5), 0]
    assert (await restarted.slots(8, 0, 1)).tolist() == [slot(2)]


async def test_a_rebuild_that_a_power_cut_ends_is_never_an_answer(stored):
    good = stored.read_whole(index_path(7))
    for seed in range(40):
        disk = disk_of(seed)
        await disk.mount().make_directory("index/07")
        disk.write_whole(index_path(7), good)
        cache = await opened(disk.mount(), pages=1)
        await cache.discard(7)
        await put(cache, 7, 0, 600, slot(1))  # more is to come; a page is written under pressure
        if seed % 2:
            await cache.flush()
        disk.crash()
        assert set(map(str, await answers(disk))) <= {str(FULL), "None"}


async def test_an_index_that_was_lost_is_rebuilt_from_nothing(stored):
    files = stored.mount()
    await files.remove(index_path(7))
    cache = await opened(stored.mount())
    assert 7 not in cache
    await cache.discard(7)
    with pytest.raises(CorruptError, match="being rebuilt"):
        await cache.slots(7, 0, 1)
    await put(cache, 7, 0, 20, slot(1))
    cache.complete(7)
    await cache.flush()
    stored.crash()
    assert (await answers(stored))[:2] == [FULL, NONE]


async def test_an_index_in_two_directories_is_damaged_until_it_is_rebuilt(stored):
    other = disk_of()
    await other.mount().make_directory("index/07")
    other.write_whole(index_path(7), stored.read_whole(index_path(7)))
    cache = await opened(stored.mount(), other.mount())
    with pytest.raises(CorruptError, match="several"):
        await cache.header(7)
    await cache.discard(7)
    await put(cache, 7, 0, 1, slot(9))
    cache.complete(7)
    await cache.flush()
    other.crash()
    cache = await opened(stored.mount(), other.mount())
    assert (await cache.slots(7, 0, 2)).tolist() == [slot(9), 0]
    assert other.paths() == []


async def test_an_index_in_two_directories_can_be_removed(stored):
    other = disk_of()
    await other.mount().make_directory("index/07")
    other.write_whole(index_path(7), stored.read_whole(index_path(7)))
    cache = await opened(stored.mount(), other.mount())
    await cache.remove(7)
    await cache.flush()
    other.crash()
    stored.crash()
    assert [*stored.paths(), *other.paths()] == [index_path(8)]


async def test_a_file_that_vanished_is_damage_and_foreign_names_are_nothing(stored):
    cache = await opened(stored.mount())
    files = stored.mount()
    await files.remove(index_path(7))
    for work in (cache.header(7), cache.slots(7, 0, 1)):
        with pytest.raises(CorruptError, match="gone"):
            await work
    with pytest.raises(CorruptError, match="gone"):
        await put(cache, 7, 0, 1, slot(1))
    stored.write_whole("index/07/0000000000000009.idx", b"")
    stored.write_whole("index/07/readme", b"")
    cache = await opened(stored.mount())
    assert set(cache.ledger_ids()) == {8}


@pytest.mark.parametrize("count", [5, 40])
async def test_a_full_disk_loses_nothing_and_the_next_flush_comes_to_its_end(count):
    disk = disk_of(capacity_bytes=5 * PAGE_LEN)
    cache = await opened(disk.mount(), pages=50, headers=50)
    for ledger in range(count):
        await put(cache, ledger, 0, 5, slot(ledger + 1))
    for _ in range(2):
        with pytest.raises(RetryableError) as caught:
            await cache.flush()
        assert caught.value.reason is Reason.READ_ONLY
        cache.check()
    disk.capacity_bytes = 2**30
    await cache.flush()
    disk.crash()
    cache = await opened(disk.mount())
    for ledger in range(count):
        assert (await cache.slots(ledger, 0, 6)).tolist() == [slot(ledger + 1)] * 5 + [0]


async def test_one_file_that_vanished_does_not_keep_others_from_being_flushed():
    disk = disk_of()
    cache = await opened(disk.mount(), pages=50, headers=50)
    for ledger in range(40):
        await put(cache, ledger, 0, 5, slot(1))
    await cache.flush()
    await disk.mount().remove(index_path(7))
    for ledger in range(40):
        await put(cache, ledger, 5, 5, slot(2))
    await cache.close()
    with pytest.raises(CorruptError, match="gone") as caught:
        await cache.flush()
    assert caught.value.details["ledger_id"] == "7"
    await cache.discard(7)
    cache.complete(7)
    await cache.flush()
    disk.crash()
    cache = await opened(disk.mount())
    for ledger in range(40):
        expected = 0 if ledger == 7 else slot(2)
        assert (await cache.slots(ledger, 9, 1)).tolist() == [expected]


async def test_a_failed_sync_is_the_end():
    disk = disk_of()
    cache = await opened(disk.mount())
    await put(cache, 7, 0, 5, slot(1))
    disk.fail_syncs = True
    with pytest.raises(DiskFailedError):
        await cache.flush()


async def test_a_failed_sync_is_the_end_also_where_another_file_finds_the_disk_full(monkeypatch):
    disk = disk_of()
    cache = await opened(disk.mount(), headers=8)
    await put(cache, 7, 0, 5, slot(1))
    await put(cache, 8, 0, 5, slot(1))
    write_one, both, full = IndexWriter._write_one, asyncio.Event(), asyncio.Event()

    async def write(writer, ledger_id, *, sync):
        if ledger_id == 7:
            await both.wait()
            full.set()
            raise RetryableError("full", reason=Reason.READ_ONLY, remedy="Free some space")
        both.set()
        await full.wait()
        disk.fail_syncs = True
        await write_one(writer, ledger_id, sync=sync)

    monkeypatch.setattr(IndexWriter, "_write_one", write)
    with pytest.raises(DiskFailedError):
        await cache.flush()


async def test_a_write_that_was_cancelled_ends_all_writing():
    disk, faults = disk_of(), Faults(random.Random(1))
    cache = await opened(disk.mount(faults))
    await put(cache, 7, 0, 5, slot(1))
    flush = asyncio.ensure_future(cache.flush())
    faults.calls = []
    while "files.write" not in faults.calls:
        await asyncio.sleep(0)
    flush.cancel()
    with pytest.raises(asyncio.CancelledError):
        await flush
    cache.check()
    with pytest.raises(DiskFailedError, match="Start the node anew"):
        await cache.flush()
    assert (await cache.slots(7, 0, 1)).tolist() == [slot(1)]
