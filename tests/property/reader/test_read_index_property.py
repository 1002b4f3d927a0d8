"""Read indexes over one small cache against plain bytes: what is there is right, and stays."""

import itertools

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
from tierlog_reader.cache.layout import Layout
from tierlog_reader.cache.manager import Asks, CacheManager, Entry, Line, Thresholds
from tierlog_reader.cache.store import StreamingCache
from tierlog_reader.read_index import Lease, ReadIndex

# What keeps bytes in the cache must not see which one it is.
pytestmark = pytest.mark.usefixtures("both_caches")

WHOLE = bytes((at * 7 + at // 251) % 256 for at in range(4000))


class OverPlainBytes(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.leases: list[tuple[int, Lease, list[int]]] = []
        self.owed: list[Entry] = []
        """Entries that tier 2 did not have, at the end of the last step."""

    @initialize(
        layout=st.sampled_from([Layout(16, 2), Layout(64, 8), Layout(128, 16)]),
        buffers=st.integers(1, 5),
        entry=st.integers(1, 500),
        victims=st.integers(1, 5),
        stored=st.integers(0, 1500),
    )
    def start(self, layout, buffers, entry, victims, stored):
        self.store = StreamingCache(buffers * layout.buffer_len, layout)
        self.manager = CacheManager(self.store, Thresholds(victims_max=victims, patience=2, idle=9))
        self.cold = ReadIndex(self.store, self.manager, entry_bytes_max=entry)
        self.tail = ReadIndex(self.store, self.manager, stored_end=stored, entry_bytes_max=entry)
        self.tail_end = stored

    @rule(start=st.integers(0, 3500), size=st.integers(1, 500), who=st.sampled_from(list(Asks)))
    def fill(self, start, size, who):
        self.fill_in(self.cold, start, start + size, who)

    @rule(start=st.integers(0, 1500), size=st.integers(1, 500), who=st.sampled_from(list(Asks)))
    def fill_what_the_tail_has_in_tier_2(self, start, size, who):
        end = min(start + size, self.tail.stored_end)
        if start < end:
            self.fill_in(self.tail, start, end, who)

    def fill_in(self, index, start, end, who):
        gaps = index.missing(start, end)
        taken = index.fill(start, WHOLE[start:end], who)
        assert 0 <= taken <= sum(end - at for at, end in gaps)

    @rule(size=st.integers(0, 300))
    def append(self, size):
        data = WHOLE[self.tail_end : self.tail_end + size]
        fitted = self.tail.append(self.tail_end, data)
        self.tail_end += len(data)
        if fitted and data:
            assert self.tail.entries()[-1][1] == self.tail_end

    def kept(self, entry) -> bool:
        return bool(entry.end > self.tail.stored_end)

    @rule(upto=st.integers(0, 4000))
    def stored(self, upto):
        self.tail.stored(min(upto, self.tail_end))

    @rule(before=st.integers(0, 4000), tail=st.booleans())
    def truncate(self, before, tail):
        (self.tail if tail else self.cold).truncate(before)
        self.owed = [entry for entry in self.owed if entry.end > before or not tail]

    @rule(start=st.integers(0, 4000), size=st.integers(1, 900), tail=st.booleans())
    def read(self, start, size, tail):
        index = self.tail if tail else self.cold
        lease = index.read(start, size)
        gaps = index.missing(start, start + size)
        there = (gaps[0][0] if gaps else start + size) - start
        if lease is None:
            assert there == 0
            return
        assert len(lease) == there
        pinned = [entry.address for entry in lease._entries]
        self.leases.append((start, lease, pinned))

    @precondition(lambda self: self.leases)
    @rule(number=st.integers(0, 20))
    def release(self, number):
        _, lease, _ = self.leases.pop(number % len(self.leases))
        lease.release()

    @rule()
    def tick(self):
        self.manager.tick()

    @rule()
    def clear(self):
        self.cold.clear()

    @invariant()
    def all_is_right(self):
        if not hasattr(self, "store"):
            return
        assert not any(entry.forgotten for entry in self.owed if self.kept(entry))
        self.owed = [entry for entry in self.tail._entries.values() if self.kept(entry)]
        for start, lease, _ in self.leases:
            assert b"".join(lease.views) == WHOLE[start : start + len(lease)]
        live = {entry for index in (self.cold, self.tail) for entry in index._entries.values()} | {
            entry for _, lease, _ in self.leases for entry in lease._entries
        }
        audit(self.store, [entry.address for entry in live])
        lines = self.manager._lines
        for entry in live:
            data = b"".join(self.store.get(entry.address))
            assert data == WHOLE[entry.start : entry.end]
            index = entry.owner
            assert isinstance(index, ReadIndex)
            stored = entry.end <= index.stored_end
            assert (entry.line is not Line.UNSTORED) == stored or entry.forgotten
            listed = sum(entry in line for line in lines.values())
            assert listed == (stored and entry.pins == 0 and not entry.forgotten)
        assert sum(map(len, lines.values())) <= len(live)
        for index in (self.cold, self.tail):
            entries = index.entries()
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(entries))


SETTINGS = settings(max_examples=40, stateful_step_count=30)


@pytest.mark.covers("C11", "C12")
def test_what_is_in_memory_is_right_and_stays():
    run_state_machine_as_test(OverPlainBytes, settings=SETTINGS)
