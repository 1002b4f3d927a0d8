"""What the streaming cache promises beside being right: bounds, queue, runs, growth in place."""

import gc
import os
import tracemalloc

import pytest

from tests.unit.reader.cache.audit import audit, chain, free_list
from tierlog_reader.cache import store as store_module
from tierlog_reader.cache.layout import (
    ADDRESSES,
    BLOCK_LEN,
    BLOCKS_PER_BUFFER,
    NO_ADDRESS,
    WORD_LEN,
    Layout,
)
from tierlog_reader.cache.store import StreamingCache

MIB = 1024 * 1024
SMALL = Layout(64, 8)


def small(buffers: int) -> StreamingCache:
    return StreamingCache(buffers * SMALL.buffer_len, SMALL)


@pytest.mark.covers("C20", "C29", "C37", "C38")
def test_the_lengths_are_those_of_the_seed():
    layout = Layout()
    assert (layout.block_len, layout.buffer_len) == (4096, 2 * MIB)
    assert BLOCKS_PER_BUFFER * WORD_LEN == BLOCK_LEN, "all words fill block 0 exactly"
    assert layout.data_blocks == 511
    four_gb = layout.buffers_within(4 * 1024 * MIB)
    assert four_gb * layout.block_len == 8 * MIB, "8 MB of metadata for 4 GB"
    assert round(1 - layout.data_blocks / layout.blocks_per_buffer, 3) == 0.002


@pytest.mark.covers("C19", "C21")
def test_the_last_of_2_to_the_32_blocks_can_be_used():
    layout = Layout()
    assert layout.buffers_max * layout.buffer_len == 16 * 1024**4
    # Addresses alone are reserved: no machine has the memory. Only what is written is touched.
    cache = StreamingCache(2**62, layout, reserve=False)
    cache._unused = layout.buffers_max - 2
    cache._queue.clear()
    cache._open_next_buffer()
    first = cache.insert(bytes(509 * BLOCK_LEN))
    data = bytes(range(256)) * 20 * 400
    last = cache.insert(data)
    assert first == ADDRESSES - 2 * 512 + 509
    assert last == ADDRESSES - 512 + 498
    assert chain(cache, last)[:2] == [ADDRESSES - 2 * 512 + 510, ADDRESSES - 2 * 512 + 511]
    top = cache.insert(bytes(13 * BLOCK_LEN))
    assert top == ADDRESSES - 1
    assert b"".join(cache.get(last)) == data
    cache.delete(last)
    assert cache.length(top) == 13 * BLOCK_LEN
    cache.close()


@pytest.mark.covers("C15", "C16", "C18", "C27", "C28", "C36")
def test_the_limit_holds_with_all_metadata_and_is_reserved_at_once():
    limit = 5 * SMALL.buffer_len + 17
    cache = StreamingCache(limit, SMALL)
    assert len(cache._pool.map) == cache.bytes_max == 5 * SMALL.buffer_len <= limit
    addresses = []
    while (address := cache.insert(b"x" * 100)) != NO_ADDRESS:
        addresses.append(address)
        assert cache.used_bytes <= limit
    assert cache.free_blocks == 5 * 7 - 2 * len(addresses)
    assert len(cache._pool.map) == cache.bytes_max
    audit(cache, addresses)


def test_what_does_not_fit_changes_nothing():
    cache = small(2)
    held = cache.insert(b"h" * 64 * 10)
    before = bytes(cache._pool.view)
    assert cache.insert(b"x" * 64 * 5) == NO_ADDRESS
    assert cache.append(held, b"x" * 64 * 5) == NO_ADDRESS
    assert bytes(cache._pool.view) == before
    audit(cache, [held])


@pytest.mark.covers("C30", "C31")
def test_a_buffer_that_gets_room_again_goes_to_the_end():
    cache = small(4)
    entries = [cache.insert(b"x" * 64 * 7) for _ in range(3)]  # buffers 0 to 2 are full
    assert list(cache._queue) == [3]
    cache.delete(entries[1])
    cache.delete(entries[0])
    assert list(cache._queue) == [3, 1, 0]
    last = cache.insert(b"y" * 64 * 8)
    assert [address >> 3 for address in chain(cache, last)] == [3] * 7 + [1]
    assert list(cache._queue) == [1, 0]
    assert free_list(cache, 1) == [2, 3, 4, 5, 6, 7], "and each has its own list"
    audit(cache, [entries[2], last])


def test_a_buffer_that_an_append_fills_leaves_the_queue_wherever_it_stands():
    cache = small(3)
    grows = cache.insert(b"g" * 64)
    cut = cache.insert(b"x" * 64 * 6)
    cache.insert(b"y" * 64 * 3)
    cache.delete(cut)
    assert list(cache._queue) == [1, 0]
    grows = cache.append(grows, b"g" * 64 * 6)
    assert list(cache._queue) == [1]
    assert chain(cache, grows) == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.covers("C01", "C04", "C13", "C23")
def test_an_append_writes_what_is_new_and_nothing_else(monkeypatch):
    written = []

    class Watched:
        def __init__(self, pool):
            self.pool = pool

        def __setitem__(self, where, data):
            written.append((where.start, bytes(data)))
            self.pool[where] = data

    cache = small(2)
    address = cache.insert(b"a" * 100)
    for _ in range(3):
        cache.insert(b"b")
    monkeypatch.setattr(cache, "_map", Watched(cache._map))
    assert cache.append(address, b"c" * 28) == address, "the last block had room"
    assert written == [(2 * 64 + 36, b"c" * 28)]
    written.clear()
    grown = cache.append(address, b"d" * 64)
    assert written == [(6 * 64, b"d" * 64)]
    assert chain(cache, grown) == [1, 2, 6]
    assert b"".join(cache.get(grown)) == b"a" * 100 + b"c" * 28 + b"d" * 64


@pytest.mark.covers("C24")
def test_a_block_comes_from_the_head_of_the_list_however_many_there_are():
    """The words that an insert of one block reads and writes do not depend on the cache's size."""
    touched = []
    for buffers in (1, 8):
        cache = StreamingCache(buffers * Layout().buffer_len)
        cache.insert(b"x")
        watched = _watched(cache)
        cache.insert(b"x")
        touched.append(watched.count)
    assert touched[0] == touched[1] <= 7


class _Words:
    def __init__(self, words):
        self.words, self.count = words, 0

    def __getitem__(self, where):
        self.count += 1
        return self.words[where]

    def __setitem__(self, where, value):
        self.count += 1
        self.words[where] = value


def _watched(cache) -> _Words:
    cache._words = watched = _Words(cache._words)
    return watched


@pytest.mark.covers("C32", "C33")
def test_an_entry_is_in_one_piece_where_a_run_is_long_enough():
    """Figure 2: the free blocks 1, 4, 6, 7 and 14 would make five pieces of E3."""
    cache = StreamingCache(32 * 256, Layout(256, 32))
    blocks = [cache.insert(b"x") for _ in range(31)]
    for block in (1, 4, 6, 7, 14, 20, 21, 22, 23, 24):
        cache.delete(blocks[block - 1])
    third = cache.insert(b"3" * 256 * 5)
    assert cache.runs(third) == [(20, 5)]
    fourth = cache.insert(b"4" * 256 * 5)
    assert len(cache.runs(fourth)) == 4, "6 and 7 are one; the rest is what the seed tells"
    assert len(cache.get(fourth)) == 4


def test_looking_for_a_run_has_a_bound():
    layout = Layout(4096, 512)
    cache = StreamingCache(2 * layout.buffer_len, layout)
    blocks = [cache.insert(b"x") for _ in range(511)]
    for address in blocks[100:105]:
        cache.delete(address)
    for address in blocks[::2][60:]:
        cache.delete(address)
    cache.insert(bytes(511 * 4096))  # the queue's next one
    read = _watched(cache)
    assert cache._fitting(0, 5)[1] < 5
    assert read.count <= 2 * store_module.LOOKS_MAX + 1


@pytest.mark.covers("C55")
def test_what_get_returns_is_the_pool_itself_and_cannot_be_written():
    cache = small(3)
    address = cache.insert(b"v" * 64 * 9)
    views = cache.get(address)
    assert [len(view) for view in views] == [64 * 7, 64 * 2]
    with pytest.raises(TypeError):
        views[0][0] = 1
    cache._pool.map[64] = ord("w")
    assert views[0][0] == ord("w"), "no copy"


@pytest.mark.covers("C56")
def test_views_are_written_to_a_file_as_they_are(tmp_path):
    cache = small(3)
    data = bytes(range(64)) * 9
    views = cache.get(cache.insert(data))
    with (tmp_path / "out").open("wb", buffering=0) as file:
        assert os.writev(file.fileno(), views) == len(data)
    assert (tmp_path / "out").read_bytes() == data


@pytest.mark.covers("C17", "C35", "C54")
def test_entries_take_no_memory_of_pythons_heap():
    cache = StreamingCache(64 * MIB)
    data = bytes(10_240)
    addresses = [0] * 4000
    for number in range(2000):
        addresses[number] = cache.insert(data)
    gc.collect()
    tracemalloc.start()
    try:
        for number in range(2000, 4000):
            addresses[number] = cache.insert(data)
        grown, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # The addresses themselves are 32 bytes each, in the caller's list.
    assert grown < 2000 * 32 + 10_000
    cache.close()


def test_empty_buffers_are_given_back_and_used_again():
    cache = StreamingCache(4 * 2 * MIB)
    data = b"d" * (511 * 4096)
    entries = [cache.insert(data) for _ in range(3)]
    for address in entries:
        cache.delete(address)
    assert cache.state().touched == 4 * 2 * MIB
    assert cache.give_back() == 3 * 2 * MIB
    assert cache.give_back() == 0
    assert cache.state().touched == 2 * MIB
    assert cache._pool.view[4096] == 0, "the kernel has them"
    again = [cache.insert(data) for _ in range(4)]
    assert all(b"".join(cache.get(address)) == data for address in again)
    audit(cache, again)


def test_what_is_gone_cannot_be_read_or_deleted_twice():
    cache = small(2)
    address = cache.insert(b"x" * 64 * 3)
    cache.delete(address)
    for call in (cache.get, cache.delete, cache.length, lambda one: cache.append(one, b"y")):
        with pytest.raises(AssertionError, match="no entry"):
            call(address)
    audit(cache, [])


def test_views_outlive_the_cache():
    cache = small(1)
    view = cache.get(cache.insert(b"still here"))[0]
    cache.close()
    assert bytes(view) == b"still here"
