"""The read index: floor lookups, entries that grow, gaps, leases."""

import pytest

from tests.unit.reader.cache.audit import audit
from tierlog_reader.cache.layout import Layout
from tierlog_reader.cache.manager import Asks, CacheManager, Thresholds
from tierlog_reader.cache.store import StreamingCache
from tierlog_reader.read_index import Lease, ReadIndex

# What keeps bytes in the cache must not see which one it is.
pytestmark = pytest.mark.usefixtures("both_caches")

LAYOUT = Layout(64, 8)


@pytest.fixture
def room():
    store = StreamingCache(10 * LAYOUT.buffer_len, LAYOUT)
    return store, CacheManager(store)


def text(lease: Lease | None) -> bytes:
    assert lease is not None
    with lease:
        return b"".join(lease.views)


@pytest.mark.covers("C10", "C14")
def test_an_offset_inside_an_entry_finds_it(room):
    store, manager = room
    index = ReadIndex(store, manager)
    index.fill(100, b"abcdefghij", Asks.WANTED)
    index.fill(300, b"klm", Asks.WANTED)
    assert text(index.read(104, 3)) == b"efg"
    assert text(index.read(109, 50)) == b"j"
    assert text(index.read(302, 50)) == b"m"
    for miss in (0, 99, 110, 299, 303, 10**15):
        assert index.read(miss, 1) is None
    # The entry holds the address in the cache itself: there is no key in between.
    entry = index._entries[100]
    assert b"".join(store.get(entry.address)) == b"abcdefghij"


def test_no_more_is_looked_at_than_was_asked_for(room, monkeypatch):
    store, manager = room
    index = ReadIndex(store, manager)
    for start in range(0, 200, 10):
        index.fill(start, bytes(10), Asks.WANTED)
    index.fill(300, bytes(10), Asks.WANTED)
    looked = list[int]()
    walk = index._from

    def counted(offset):
        for entry in walk(offset):
            looked.append(entry.start)
            yield entry

    monkeypatch.setattr(ReadIndex, "_from", lambda _, offset: counted(offset))
    assert [index.held_end(5, end) for end in (6, 25, 200, 1000)] == [6, 25, 200, 200]
    assert index.held_end(250, 1000) == 250
    looked.clear()
    index.held_end(5, 25)
    assert len(looked) <= 4


@pytest.mark.covers("C04", "C13", "C23")
def test_the_newest_entry_grows_by_appends(room):
    store, manager = room
    index = ReadIndex(store, manager, stored_end=0, entry_bytes_max=300)
    sent = b""
    for number in range(40):
        event = b"%02d" % number * 5
        assert index.append(len(sent), event)
        sent += event
    assert index.entries() == [(0, 300), (300, 400)]
    assert store.state().entries == 2
    assert text(index.read(0, 1000)) == sent
    assert index.append(500, b"after a gap")
    assert index.read(400, 10) is None
    assert text(index.read(500, 20)) == b"after a gap"


def test_a_tail_that_was_stored_and_grows_again_is_not_evictable(room):
    store, manager = room
    index = ReadIndex(store, manager, stored_end=0)
    index.append(0, b"a" * 10)
    index.stored(10)
    index.append(10, b"b")
    assert not manager.promise(store.bytes_max - 10 * 64, Asks.TAIL), "its last byte is not there"
    assert text(index.read(0, 20)) == b"a" * 10 + b"b"
    index.stored(11)
    assert manager.promise(store.bytes_max - 10 * 64, Asks.TAIL)
    assert len(index) == 0


def test_what_grows_was_used_and_what_came_counts(room):
    store, manager = room
    tail, cold = ReadIndex(store, manager), ReadIndex(store, manager)
    tail.append(0, b"a" * 64)
    cold.fill(0, b"c" * 64, Asks.WANTED)
    for number in range(1, 4):
        manager.tick()
        tail.append(64 * number, b"b" * 64)
        entry = tail._entries[0]
        assert entry.generation == manager.generation, "before the append is acknowledged"
        assert entry.came_bytes == manager.came_bytes == store.stored_bytes
    assert len(tail) == 1
    assert manager.promise(store.bytes_max - manager.used_bytes + 64, Asks.TAIL)
    assert (len(cold), len(tail)) == (0, 1), "the one unused for longest goes first"


def test_the_newest_entry_is_not_idle_for_as_long_as_it_grows():
    store = StreamingCache(10 * LAYOUT.buffer_len, LAYOUT)
    manager = CacheManager(store, Thresholds(patience=2, idle=3))
    tail = ReadIndex(store, manager)
    for number in range(10):
        tail.append(5 * number, b"12345")
        manager.tick()
        manager.tick()
    assert tail.entries() == [(0, 50)]
    manager.tick()
    manager.tick()
    assert len(tail) == 0


def test_the_newest_entry_that_went_to_make_room_for_itself_begins_anew(room):
    store, manager = room
    tail = ReadIndex(store, manager)
    free = store.free_blocks
    assert tail.append(0, b"a" * 64 * (free - 2))
    assert tail.append(64 * (free - 2), b"b" * 64 * 5)
    assert tail.entries() == [(64 * (free - 2), 64 * (free + 3))]
    assert text(tail.read(64 * (free - 2), 1000)) == b"b" * 64 * 5
    audit(store, [entry.address for entry in tail._entries.values()])


def test_what_is_present_is_never_replaced(room):
    store, manager = room
    index = ReadIndex(store, manager, entry_bytes_max=64)
    index.fill(10, b"B" * 10, Asks.WANTED)
    index.fill(40, b"D" * 10, Asks.AHEAD)
    assert index.missing(0, 60) == [(0, 10), (20, 40), (50, 60)]
    assert index.fill(0, b"-" * 60, Asks.WANTED) == 40
    expected = b"-" * 10 + b"B" * 10 + b"-" * 20 + b"D" * 10 + b"-" * 10
    assert text(index.read(0, 99)) == expected
    assert index.fill(0, b"?" * 60, Asks.WANTED) == 0
    assert text(index.read(0, 99)) == expected


@pytest.mark.covers("C05")
def test_one_index_holds_what_came_from_both_tiers(room):
    store, manager = room
    index = ReadIndex(store, manager, stored_end=100)
    index.append(100, b"t" * 50)
    index.fill(0, b"s" * 100, Asks.AHEAD)
    assert text(index.read(90, 20)) == b"s" * 10 + b"t" * 10


def test_a_lease_keeps_its_bytes_whatever_becomes_of_the_index(room):
    store, manager = room
    index = ReadIndex(store, manager)
    index.fill(0, b"l" * 200, Asks.WANTED)
    lease, other = index.read(0, 200), index.read(50, 10)
    assert lease is not None
    assert other is not None
    index.clear()
    assert len(index) == 0
    assert store.state().entries == 1, "its blocks are not free"
    while store.insert(b"o" * 64):
        pass
    assert b"".join(lease.views) == b"l" * 200
    lease.release()
    lease.release()
    assert b"".join(other.views) == b"l" * 10
    other.release()
    assert store.free_blocks == 4


def test_a_lease_that_was_released_shows_nothing(room):
    store, manager = room
    index = ReadIndex(store, manager)
    index.fill(0, b"l" * 20, Asks.WANTED)
    lease = index.read(0, 20)
    assert lease is not None
    view = lease.views[0]
    lease.release()
    with pytest.raises(ValueError, match="released"):
        bytes(view)
    audit(store, [index._entries[0].address])


def test_few_bytes_are_copied_and_pin_nothing(room):
    store, manager = room
    index = ReadIndex(store, manager)
    index.fill(0, b"0123456789", Asks.WANTED)
    assert index.copy(3, 6) == b"345"
    assert index.copy(8, 11) is None
    assert index.copy(20, 21) is None
    assert index._entries[0].pins == 0


def test_truncating_drops_what_ends_before(room):
    store, manager = room
    index = ReadIndex(store, manager, stored_end=0, entry_bytes_max=10)
    for start in range(0, 50, 10):
        index.append(start, b"x" * 10)
    index.truncate(25)
    assert index.entries() == [(20, 30), (30, 40), (40, 50)]
    index.stored(50)
    assert manager.promise(7 * 10 * 64, Asks.TAIL)
    assert len(index) == 0


def test_a_full_cache_takes_nothing_and_says_so(room):
    store, manager = room
    tail = ReadIndex(store, manager, stored_end=0)
    while tail.append(len(tail) and tail.entries()[-1][1], b"x" * 64):
        pass
    index = ReadIndex(store, manager)
    assert index.fill(0, b"y", Asks.WANTED) == 0
    assert index.read(0, 1) is None
    assert not tail.append(tail.entries()[-1][1], b"x" * 64)
