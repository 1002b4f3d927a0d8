"""What the streaming cache promises beside being right: bounds, queue, runs, growth in place."""

import gc
import os
import socket
import sys
import tracemalloc
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.reader.cache.audit import audit, chain, free_list
from tierlog_reader.cache import blocks, store
from tierlog_reader.cache.layout import (
    ADDRESSES,
    BLOCK_LEN,
    BLOCKS_PER_BUFFER,
    LOOKS_MAX,
    NO_ADDRESS,
    WORD_LEN,
    Layout,
)

MIB = 1024 * 1024
SMALL = Layout(64, 8)


@pytest.fixture
def small(streaming_cache):
    """Give a function that makes a cache of so many small buffers."""
    return lambda buffers: streaming_cache(buffers * SMALL.buffer_len, SMALL)


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
def test_the_last_of_2_to_the_32_blocks_can_be_used(streaming_cache):
    layout = Layout()
    assert layout.buffers_max * layout.buffer_len == 16 * 1024**4
    # Addresses alone are reserved: no machine has the memory. Only what is written is touched.
    cache = streaming_cache(2**62, layout, reserve=False)
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
def test_the_limit_holds_with_all_metadata_and_is_reserved_at_once(streaming_cache):
    limit = 5 * SMALL.buffer_len + 17
    cache = streaming_cache(limit, SMALL)
    assert len(cache._pool.map) == cache.bytes_max == 5 * SMALL.buffer_len <= limit
    addresses = []
    while (address := cache.insert(b"x" * 100)) != NO_ADDRESS:
        addresses.append(address)
        assert cache.used_bytes <= limit
    assert cache.free_blocks == 5 * 7 - 2 * len(addresses)
    assert len(cache._pool.map) == cache.bytes_max
    audit(cache, addresses)


def test_what_does_not_fit_changes_nothing(small):
    cache = small(2)
    held = cache.insert(b"h" * 64 * 10)
    before = bytes(cache._pool.view)
    assert cache.insert(b"x" * 64 * 5) == NO_ADDRESS
    assert cache.append(held, b"x" * 64 * 5) == NO_ADDRESS
    assert bytes(cache._pool.view) == before
    audit(cache, [held])


@pytest.mark.covers("C30", "C31")
def test_a_buffer_that_gets_room_again_goes_to_the_end(small):
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


def test_a_buffer_that_an_append_fills_leaves_the_queue_wherever_it_stands(small):
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
def test_an_append_writes_what_is_new_and_nothing_else(plain_cache, monkeypatch):
    written = []

    class Watched:
        def __init__(self, pool):
            self.pool = pool

        def __setitem__(self, where, data):
            written.append((where.start, bytes(data)))
            self.pool[where] = data

    cache = plain_cache(2 * SMALL.buffer_len, SMALL)
    address = cache.insert(b"a" * 100)
    for _ in range(3):
        cache.insert(b"b")
    monkeypatch.setattr(cache, "_target", Watched(cache._target))
    assert cache.append(address, b"c" * 28) == address, "the last block had room"
    assert written == [(2 * 64 + 36, b"c" * 28)]
    written.clear()
    grown = cache.append(address, b"d" * 64)
    assert written == [(6 * 64, b"d" * 64)]
    assert chain(cache, grown) == [1, 2, 6]
    assert b"".join(cache.get(grown)) == b"a" * 100 + b"c" * 28 + b"d" * 64


@pytest.mark.covers("C24")
def test_a_block_comes_from_the_head_of_the_list_however_many_there_are(plain_cache):
    """The words that an insert of one block reads and writes do not depend on the cache's size."""
    touched = []
    for buffers in (1, 8):
        cache = plain_cache(buffers * Layout().buffer_len)
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
def test_an_entry_is_in_one_piece_where_a_run_is_long_enough(streaming_cache):
    """Figure 2: the free blocks 1, 4, 6, 7 and 14 would make five pieces of E3."""
    cache = streaming_cache(32 * 256, Layout(256, 32))
    blocks = [cache.insert(b"x") for _ in range(31)]
    for block in (1, 4, 6, 7, 14, 20, 21, 22, 23, 24):
        cache.delete(blocks[block - 1])
    third = cache.insert(b"3" * 256 * 5)
    assert cache.runs(third) == [(20, 5)]
    fourth = cache.insert(b"4" * 256 * 5)
    assert len(cache.runs(fourth)) == 4, "6 and 7 are one; the rest is what the seed tells"
    assert len(cache.get(fourth)) == 4


def test_looking_for_a_run_has_a_bound(plain_cache):
    layout = Layout(4096, 512)
    cache = plain_cache(2 * layout.buffer_len, layout)
    blocks = [cache.insert(b"x") for _ in range(511)]
    for address in blocks[100:105]:
        cache.delete(address)
    for address in blocks[::2][60:]:
        cache.delete(address)
    cache.insert(bytes(511 * 4096))  # the queue's next one
    read = _watched(cache)
    assert cache._fitting(0, 5)[1] < 5
    assert read.count <= 2 * LOOKS_MAX + 1


@pytest.mark.covers("C55")
def test_what_get_returns_is_the_pool_itself_and_cannot_be_written(small):
    cache = small(3)
    address = cache.insert(b"v" * 64 * 9)
    views = cache.get(address)
    assert [len(view) for view in views] == [64 * 7, 64 * 2]
    with pytest.raises(TypeError):
        views[0][0] = 1
    cache._pool.map[64] = ord("w")
    assert views[0][0] == ord("w"), "no copy"


@pytest.mark.covers("C56")
@pytest.mark.parametrize("where", ["file", "socket"])
def test_views_are_written_to_a_file_and_to_a_socket_as_they_are(small, tmp_path, where):
    cache = small(3)
    data = bytes(range(64)) * 9
    views = cache.get(cache.insert(data))
    # What lies in the pool now is what is written: nothing was copied on the way.
    cache._pool.map[64], data = ord("w"), b"w" + data[1:]
    if where == "file":
        with (tmp_path / "out").open("wb", buffering=0) as file:
            assert os.writev(file.fileno(), views) == len(data)
        assert (tmp_path / "out").read_bytes() == data
    else:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            assert ours.sendmsg(views) == len(data)
            assert theirs.recv(1000) == data


@pytest.mark.covers("C17", "C35", "C54")
def test_entries_take_no_memory_of_pythons_heap(streaming_cache):
    cache = streaming_cache(64 * MIB)
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


def test_empty_buffers_are_given_back_and_used_again(streaming_cache):
    cache = streaming_cache(4 * 2 * MIB)
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


def test_a_buffer_that_still_has_an_entry_is_not_given_back(streaming_cache):
    cache = streaming_cache(2 * 2 * MIB)
    gone, data = cache.insert(b"g" * 4096), b"d" * (510 * 4096)
    stays = cache.insert(data)
    cache.delete(gone)
    assert list(cache._queue) == [1, 0]
    assert cache.give_back() == 0
    assert b"".join(cache.get(stays)) == data


def test_what_is_gone_cannot_be_read_or_deleted_twice(small):
    cache = small(2)
    address = cache.insert(b"x" * 64 * 3)
    cache.delete(address)
    for call in (cache.get, cache.delete, cache.length, lambda one: cache.append(one, b"y")):
        with pytest.raises(AssertionError, match="no entry"):
            call(address)
    audit(cache, [])


def test_views_outlive_the_cache(small):
    cache = small(1)
    view = cache.get(cache.insert(b"still here"))[0]
    cache.close()
    assert bytes(view) == b"still here"


def test_what_is_no_buffer_leaves_the_cache_as_it_was(small):
    cache = small(2)
    held = cache.insert(b"h" * 64)
    before = bytes(cache._pool.view)
    for wrong in ("text", 7, None):
        with pytest.raises(TypeError):
            cache.insert(wrong)
        with pytest.raises(TypeError):
            cache.append(held, wrong)
    assert bytes(cache._pool.view) == before
    audit(cache, [held])


def test_a_target_that_is_too_short_is_refused(small):
    cache = small(3)
    in_one, in_two = cache.insert(b"1" * 100), cache.insert(b"2" * 64 * 8)
    assert [len(cache.runs(one)) for one in (in_one, in_two)] == [1, 2]
    for address, length in ((in_one, 100), (in_two, 64 * 8)):
        around = bytearray(length)
        with pytest.raises(ValueError, match=r"target|structures"):
            cache.read_into(address, memoryview(around)[:-1])
        assert around[-1] == 0, "nothing is written behind it"
        with pytest.raises((TypeError, BufferError)):
            cache.read_into(address, memoryview(bytes(length)))
        assert cache.read_into(address, memoryview(bytearray(length))) == length


def test_a_compiled_cache_is_not_asked_for_what_lies_outside_of_the_pool(streaming_cache):
    """Plain Python fails at an index; C would look, and perhaps find something."""
    cache = streaming_cache(2 * SMALL.buffer_len, SMALL)
    cache.insert(b"x")
    for address in (2 * 8, 2**32 - 1, 2**40):
        for call in (cache.get, cache.delete, cache.length):
            with pytest.raises((AssertionError, IndexError)):
                call(address)
    audit(cache, [1])


def test_nothing_is_put_in_or_read_once_it_is_closed(small):
    cache = small(2)
    address = cache.insert(b"x" * 100)
    cache.close()
    calls = (
        lambda: cache.insert(b"y"),
        lambda: cache.insert(b"y" * 64 * 8),
        lambda: cache.append(address, b"y" * 200),
        lambda: cache.get(address),
        lambda: cache.read_into(address, memoryview(bytearray(100))),
        lambda: cache.delete(address),
    )
    for call in calls:
        with pytest.raises(ValueError, match="released"):
            call()


def test_it_says_which_way_it_runs(streaming_cache):
    how = "plain" if streaming_cache is blocks.StreamingCache else "compiled"
    assert how in repr(streaming_cache(2 * SMALL.buffer_len, SMALL))
    chosen = store.StreamingCache is not blocks.StreamingCache
    assert chosen == store.COMPILED


def test_what_was_compiled_of_another_source_is_not_used(monkeypatch):
    stranger: Any = SimpleNamespace(MADE_OF=store.source_digest())
    monkeypatch.setitem(sys.modules, store.MODULE, stranger)
    assert store.compiled_blocks().why_not == ""
    stranger.MADE_OF = "0" * 64
    found = store.compiled_blocks()
    assert found.module is None
    assert "another source" in found.why_not
    monkeypatch.setitem(sys.modules, store.MODULE, None)
    assert "is not compiled" in store.compiled_blocks().why_not
