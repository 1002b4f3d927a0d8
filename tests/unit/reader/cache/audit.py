"""Reads every word of a cache's pool and checks that all of it agrees."""

import itertools
from dataclasses import dataclass

from tierlog_reader.cache.layout import read_free, read_head, read_used
from tierlog_reader.cache.store import StreamingCache


@dataclass(frozen=True)
class Counted:
    free: int
    used: int
    stored: int
    runs: int


def word(cache: StreamingCache, buffer: int, block: int) -> int:
    return cache._pool.words[(buffer << cache.layout.word_shift) + block]


def chain(cache: StreamingCache, address: int) -> list[int]:
    """Walk an entry block by block, as figure 2 does; from its first block on."""
    found = []
    while address:
        found.append(address)
        address = read_used(word(cache, *cache.layout.place(address)), address).prev
    return found[::-1]


def free_list(cache: StreamingCache, buffer: int) -> list[int]:
    """Walk the free blocks of a buffer one by one."""
    found = []
    block = read_head(word(cache, buffer, 0)).next
    while block:
        assert block not in found, f"the list of buffer {buffer} comes back to {block}"
        found.append(block)
        block = read_free(word(cache, buffer, block)).next
    return found


def audit(cache: StreamingCache, addresses) -> Counted:
    """Check the whole pool against itself, the counters and these entries; count it."""
    owned: dict[int, int] = {}
    stored = runs = 0
    for address in addresses:
        blocks = chain(cache, address)
        assert cache.runs(address) == _as_runs(cache, blocks)
        runs += len(cache.runs(address))
        lengths = [read_used(word(cache, *cache.layout.place(at)), at).length for at in blocks]
        assert all(length == cache.layout.block_len for length in lengths[:-1])
        assert lengths[-1] > 0 or len(blocks) == 1
        stored += sum(lengths)
        assert cache.length(address) == sum(lengths)
        for block in blocks:
            assert block not in owned, f"block {block} has two owners"
            owned[block] = address
    free = sum(_audit_buffer(cache, buffer, owned) for buffer in range(cache._unused))
    free += (cache.buffers - cache._unused) * cache.layout.data_blocks
    state = cache.state()
    assert free == cache.free_blocks
    assert len(owned) + free == cache.buffers * cache.layout.data_blocks
    assert state.used == len(owned) * cache.layout.block_len
    assert state.stored == cache.stored_bytes == stored
    assert state.entries == len(list(addresses))
    assert cache.used_bytes <= cache.bytes_max == len(cache._pool.map)
    roomy = [buffer for buffer in range(cache._unused) if _free_of(cache, buffer)]
    assert sorted(cache._queue) == roomy
    return Counted(free=free, used=len(owned), stored=stored, runs=runs)


def _free_of(cache: StreamingCache, buffer: int) -> int:
    if not word(cache, buffer, 0):  # given back, or queued and not yet opened
        return cache.layout.data_blocks
    return read_head(word(cache, buffer, 0)).free


def _as_runs(cache: StreamingCache, blocks: list[int]) -> list[tuple[int, int]]:
    """Put blocks together as the words say: a run begins where the number is 1."""
    runs: list[tuple[int, int]] = []
    for block in blocks:
        number = read_used(word(cache, *cache.layout.place(block)), block).run
        if number == 1:
            runs.append((block, 1))
        else:
            first, count = runs[-1]
            assert block == first + count
            assert number == count + 1
            runs[-1] = (first, number)
    return runs


def _audit_buffer(cache: StreamingCache, buffer: int, owned: dict[int, int]) -> int:
    if not word(cache, buffer, 0):
        return cache.layout.data_blocks
    head = read_head(word(cache, buffer, 0))
    listed = free_list(cache, buffer)
    assert head.free == len(listed)
    ends = []
    for block in range(1, cache.layout.blocks_per_buffer):
        if cache.layout.address(buffer, block) in owned:
            assert block not in listed
        else:
            assert block in listed, f"block {buffer}-{block} is lost"
    at, back = 0, 0
    while at < len(listed):
        first = listed[at]
        run = read_free(word(cache, buffer, first)).run
        assert run > 0
        assert listed[at : at + run] == list(range(first, first + run))
        assert read_free(word(cache, buffer, first)).back == back
        assert read_free(word(cache, buffer, first + run - 1)).run == run
        for between in listed[at + 1 : at + run - 1]:
            assert read_free(word(cache, buffer, between)) == (between + 1, 0, 0)
        ends.append((first, first + run - 1))
        at, back = at + run, first + run - 1
    ends.sort()
    assert all(b[0] > a[1] + 1 for a, b in itertools.pairwise(ends)), "runs touch"
    return len(listed)
