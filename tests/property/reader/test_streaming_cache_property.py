"""The streaming cache against a plain dict of bytes; every word of the pool after every step."""

import random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.unit.reader.cache.audit import audit
from tierlog.ports.filling import Filling
from tierlog_reader.cache.layout import NO_ADDRESS, Layout

LAYOUTS = [Layout(16, 2), Layout(64, 8), Layout(128, 16), Layout(4096, 8)]


def content(seed: int, length: int) -> bytes:
    return bytes((seed * 31 + at * 7) % 251 for at in range(length))


class AgainstADict(RuleBasedStateMachine):
    cache_class: Any

    def __init__(self) -> None:
        super().__init__()
        self.model: dict[int, bytes] = {}
        self.seed = 0

    @initialize(layout=st.sampled_from(LAYOUTS), buffers=st.integers(1, 5), odd=st.integers(0, 9))
    def start(self, layout, buffers, odd):
        self.cache = self.cache_class(buffers * layout.buffer_len + odd, layout)
        assert self.cache.bytes_max == buffers * layout.buffer_len

    def data(self, blocks: int, more: int) -> bytes:
        self.seed += 1
        block_len = self.cache.layout.block_len
        return content(self.seed, max(0, blocks * block_len + more % block_len - block_len // 2))

    def pick(self, number: int) -> int:
        return list(self.model)[number % len(self.model)]

    @rule(blocks=st.integers(0, 12), more=st.integers(0, 5000), view=st.booleans())
    def insert(self, blocks, more, view):
        data = self.data(blocks, more)
        fits = self.cache.layout.blocks_of(len(data)) <= self.cache.free_blocks
        address = self.cache.insert(memoryview(data) if view else data)
        assert (address != NO_ADDRESS) == fits
        if address:
            assert address not in self.model
            self.model[address] = data

    @rule(blocks=st.integers(0, 12), more=st.integers(0, 5000))
    def reserve(self, blocks, more):
        data = self.data(blocks, more)
        fits = self.cache.layout.blocks_of(len(data)) <= self.cache.free_blocks
        address = self.cache.reserve(len(data))
        assert (address != NO_ADDRESS) == fits
        if address:
            Filling(self.cache.writable(address)).add(data)
            self.model[address] = data

    @precondition(lambda self: self.model)
    @rule(number=st.integers(0, 99), blocks=st.integers(0, 6), more=st.integers(0, 5000))
    def append(self, number, blocks, more):
        old = self.pick(number)
        data = self.data(blocks, more)
        layout, before = self.cache.layout, self.model[old]
        new_blocks = layout.blocks_of(len(before) + len(data)) - layout.blocks_of(len(before))
        views, free = self.cache.get(old), self.cache.free_blocks
        address = self.cache.append(old, data)
        assert (address != NO_ADDRESS) == (new_blocks <= free)
        assert b"".join(views) == before
        if address:
            del self.model[old]
            assert address not in self.model
            self.model[address] = before + data

    @precondition(lambda self: self.model)
    @rule(number=st.integers(0, 99))
    def delete(self, number):
        address = self.pick(number)
        self.cache.delete(address)
        del self.model[address]

    @precondition(lambda self: self.model)
    @rule(keep=st.integers(0, 3))
    def delete_many(self, keep):
        for number, address in enumerate(list(self.model)):
            if number % 4 != keep:
                self.cache.delete(address)
                del self.model[address]

    @rule()
    def give_back(self):
        before = self.cache.state().touched
        given = self.cache.give_back()
        assert self.cache.state().touched == before - given

    @invariant()
    def all_is_there(self):
        if not hasattr(self, "cache"):
            return
        for address, data in self.model.items():
            views = self.cache.get(address)
            assert all(view.readonly for view in views)
            assert b"".join(views) == data
            target = bytearray(len(data) + 1)
            assert self.cache.read_into(address, memoryview(target)) == len(data)
            assert target == data + b"\0"
        audit(self.cache, self.model)


SETTINGS = settings(max_examples=40, stateful_step_count=30)


@pytest.mark.covers("C13", "C22", "C25", "C26", "C36")
def test_the_cache_is_a_dict_and_all_counts_agree(streaming_cache):
    class ThisOne(AgainstADict):
        cache_class = streaming_cache

    run_state_machine_as_test(ThisOne, settings=SETTINGS)


@pytest.mark.parametrize("seed", range(4))
def test_compiled_and_plain_lay_every_word_alike(streaming_cache, plain_cache, seed):
    """The same calls leave the same pool, byte by byte, in large buffers as in small ones."""
    layout = Layout() if seed % 2 else Layout(256, 32)
    caches = [one(4 * layout.buffer_len, layout) for one in (streaming_cache, plain_cache)]
    rng, held = random.Random(seed), list[int]()
    longest = layout.buffer_len // 4
    for _ in range(3000):
        turn = rng.random()
        data = content(rng.randrange(251), 64) * (rng.randrange(longest) // 64)
        if turn < 0.1:
            address, other = (cache.reserve(len(data)) for cache in caches)
            assert address == other
            for cache in caches:
                Filling(cache.writable(address) if address else []).add(data if address else b"")
            held += [address] if address else []
        elif turn < 0.5 or not held:
            address, other = (cache.insert(data) for cache in caches)
            assert address == other
            held += [address] if address else []
        elif turn < 0.6:
            at = rng.randrange(len(held))
            address, other = (cache.append(held[at], data) for cache in caches)
            assert address == other
            held[at] = address or held[at]
        else:
            at = rng.randrange(len(held))
            for cache in caches:
                cache.delete(held[at])
            held[at] = held[-1]
            held.pop()
    assert bytes(caches[0]._pool.view) == bytes(caches[1]._pool.view)
    assert caches[0].state() == caches[1].state()
    assert list(caches[0]._queue) == list(caches[1]._queue)
    for cache in caches:
        cache.close()
