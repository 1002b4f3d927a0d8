"""Who goes, who is let in, and that a cache smaller than what is read does not go round."""

import pytest

from tierlog_reader.cache.layout import Layout
from tierlog_reader.cache.manager import Asks, CacheManager, Thresholds
from tierlog_reader.cache.store import StreamingCache
from tierlog_reader.read_index import ReadIndex

# What keeps bytes in the cache must not see which one it is.
pytestmark = pytest.mark.usefixtures("both_caches")

LAYOUT = Layout(64, 8)
BLOCK = 64


class Room:
    """A cache of 20 buffers, 140 blocks of data; metadata takes another 20."""

    def __init__(self, **thresholds) -> None:
        self.store = StreamingCache(20 * LAYOUT.buffer_len, LAYOUT)
        self.manager = CacheManager(self.store, Thresholds(**thresholds))

    def index(self, **named) -> ReadIndex:
        return ReadIndex(self.store, self.manager, entry_bytes_max=4 * BLOCK, **named)

    @property
    def blocks(self) -> int:
        return self.store.state().used // BLOCK


def data(blocks: int) -> bytes:
    return b"x" * blocks * BLOCK


@pytest.mark.covers("C11", "C12")
def test_the_longest_unused_goes_first():
    room = Room()
    index = room.index()
    for number in range(31):
        assert index.fill(number * 4 * BLOCK, data(4), Asks.WANTED)
    lease = index.read(0, 1)
    assert lease is not None
    lease.release()
    assert room.blocks <= 0.9 * 160
    before = {start for start, _ in index.entries()}
    assert index.fill(1000 * BLOCK, data(4), Asks.WANTED)
    after = {start for start, _ in index.entries()}
    assert 0 in after, "it was read a moment ago"
    assert before - after == {min(before - {0})}


@pytest.mark.parametrize(
    ("who", "share"), [(Asks.AHEAD, 0.75), (Asks.WANTED, 0.9), (Asks.TAIL, 1.0)]
)
def test_each_is_let_in_up_to_its_share(who, share):
    """Nothing may go, so all that is let in stays."""
    room = Room()
    room.index(stored_end=0)
    index = room.index()
    number = 0
    while room.manager.promise(BLOCK, who):
        number += 1
    assert room.manager.refusals == {who.value: 1}
    assert 20 + number == int(160 * share)
    for _ in range(number):
        room.manager.settle(BLOCK)
    assert index.fill(0, data(1), who)


@pytest.mark.covers("C15")
def test_what_was_promised_counts_until_it_is_settled():
    room = Room()
    assert room.manager.promise(100 * BLOCK, Asks.AHEAD)
    assert room.manager.used == 120 / 160
    assert not room.manager.promise(1, Asks.AHEAD)
    assert room.index().fill(0, data(1), Asks.AHEAD) == 0
    room.manager.settle(100 * BLOCK)
    assert room.index().fill(0, data(1), Asks.AHEAD) == BLOCK


def test_bytes_that_tier_2_lacks_stay_however_full_it_is():
    room = Room()
    tail = room.index(stored_end=0)
    appended = 0
    while tail.append(appended, data(1)):
        appended += BLOCK
    assert appended == 140 * BLOCK, "the tail may use all of it"
    other = room.index()
    for who in Asks:
        assert other.fill(0, data(1), who) == 0
    assert room.manager.evictions == {}
    # One byte short of an entry's end is not the whole entry.
    tail.stored(4 * BLOCK - 1)
    assert other.fill(0, data(1), Asks.TAIL) == 0
    tail.stored(4 * BLOCK)
    assert other.fill(0, data(1), Asks.TAIL) == BLOCK
    assert room.manager.evictions == {"tail": 1}


@pytest.mark.covers("C36")
def test_what_owners_take_beside_the_pool_has_room_made_for_it_or_is_refused():
    room = Room()
    cold, limit = room.index(), room.store.bytes_max
    for number in range(35):
        assert cold.fill(number * 4 * BLOCK, data(4), Asks.TAIL)
    assert room.manager.used_bytes == limit
    assert room.manager.take(96, Asks.TAIL)
    assert room.manager.evictions == {"tail": 1}
    assert room.manager.used_bytes == limit - 4 * BLOCK + 96
    assert not room.manager.take(limit, Asks.TAIL), "all that may go is not enough"
    assert room.manager.refusals == {"tail": 1}
    assert (len(cold), room.manager.owners_bytes) == (34, 96)
    room.manager.give_back(96)
    assert (room.manager.owners_bytes, room.manager.overflow_bytes) == (0, 0)


def test_the_tail_goes_on_while_the_cache_is_full_of_other_things():
    room = Room()
    cold = room.index()
    for number in range(60):
        cold.fill(number * 4 * BLOCK, data(4), Asks.AHEAD)
        cold.fill((100 + number) * 4 * BLOCK, data(4), Asks.WANTED)
    tail = room.index(stored_end=0)
    assert all(tail.append(number * BLOCK, data(1)) for number in range(140))


def test_what_would_not_be_enough_is_not_sent_away():
    room = Room()
    tail, cold = room.index(stored_end=0), room.index()
    cold.fill(0, data(4), Asks.WANTED)
    for number in range(121):
        assert tail.append(number * BLOCK, data(1))
    assert cold.fill(100 * BLOCK, data(4), Asks.WANTED) == 0
    assert cold.entries() == [(0, 4 * BLOCK)], "gone for nothing"


@pytest.mark.covers("C16")
def test_one_call_sends_away_a_bounded_number():
    room = Room(victims_max=3)
    index = room.index()
    for number in range(120):
        index.fill(number * 2 * BLOCK, data(1), Asks.WANTED)
    assert not room.manager.promise(10 * BLOCK, Asks.WANTED), "not enough at once …"
    assert room.manager.evictions == {"wanted": 3}
    assert room.manager.promise(10 * BLOCK, Asks.WANTED), "… but it gets on"


def test_a_tick_goes_down_to_the_target_and_drops_what_is_idle():
    room = Room(idle=20)
    index = room.index()
    for number in range(31):
        index.fill(number * 4 * BLOCK, data(4), Asks.WANTED)
    assert room.manager.used > 0.75
    room.manager.tick()
    assert room.manager.used <= 0.75
    for _ in range(18):
        room.manager.tick()
    assert room.blocks > 0
    room.manager.tick()
    assert room.blocks == 0


def test_what_was_fetched_ahead_is_not_sent_away_to_fetch_ahead():
    room = Room()
    first, second = room.index(), room.index()
    for number in range(25):
        assert first.fill(number * 4 * BLOCK, data(4), Asks.AHEAD)
    room.manager.tick()
    assert second.fill(0, data(4), Asks.AHEAD) == 0
    for _ in range(9):
        room.manager.tick()
    assert second.fill(0, data(4), Asks.AHEAD), "nobody came for it in ten generations"


def test_who_reads_all_of_the_cache_within_a_generation_is_still_fetched_ahead_for():
    """One that is faster than the ticks: what it left behind goes, what it read last stays."""
    room = Room(past=0.25)
    index = room.index()
    for number in range(200):
        assert index.fill(number * 4 * BLOCK, data(4), Asks.AHEAD), number
        lease = index.read(number * 4 * BLOCK, 4 * BLOCK)
        assert lease is not None
        lease.release()
    assert room.manager.generation == 1
    kept = [start // (4 * BLOCK) for start, _ in index.entries()]
    assert kept == list(range(kept[0], 200)), "the oldest went first"
    assert len(kept) * 4 >= 0.25 * 160, "a quarter of what came last is nobody's past"


def test_what_was_used_while_less_than_the_past_came_in_is_not_sent_away_to_fetch_ahead():
    room = Room(past=0.7)
    index, ahead = room.index(), room.index()
    for number in range(25):
        assert index.fill(number * 4 * BLOCK, data(4), Asks.WANTED)
    assert not ahead.fill(0, data(4), Asks.AHEAD), "it is full, and no more than that came in"
    assert len(index) == 25
    room.manager.tick()
    assert ahead.fill(0, data(4), Asks.AHEAD), "all of it was used in another generation"


@pytest.mark.parametrize("readers", [1, 4, 16])
def test_a_working_set_larger_than_the_cache_is_fetched_once_through(readers):
    """Each reader goes through bytes of its own, ten times the cache in all, one range ahead."""
    room = Room()
    size, ranges = 4 * BLOCK, 350 // readers
    indexes = [room.index() for _ in range(readers)]
    fetched = [[0] * (ranges + 2) for _ in range(readers)]
    for step in range(ranges):
        room.manager.tick()
        for index, count in zip(indexes, fetched, strict=True):
            for ahead in (step + 1, step + 2):
                gaps = index.missing(ahead * size, (ahead + 1) * size)
                if ahead < ranges and gaps and room.manager.promise(size, Asks.AHEAD):
                    room.manager.settle(size)
                    count[ahead] += 1
                    assert index.fill(ahead * size, data(4), Asks.AHEAD) == size
            lease = index.read(step * size, size)
            if lease is None:  # fetched, sent, and kept when there is room
                count[step] += 1
                index.fill(step * size, data(4), Asks.WANTED)
                continue
            assert len(lease) == size
            lease.release()
    assert all(each == 1 for count in fetched for each in count[:ranges])


def test_an_entry_that_another_one_still_reads_stays():
    room = Room()
    index = room.index()
    index.fill(0, data(1), Asks.WANTED)
    first, second = index.read(0, BLOCK), index.read(0, BLOCK)
    assert first is not None
    assert second is not None
    first.release()
    assert not room.manager.promise(140 * BLOCK, Asks.TAIL)
    assert len(index) == 1
    second.release()
    assert room.manager.promise(140 * BLOCK, Asks.TAIL)


def test_a_pinned_entry_stays_and_takes_its_place_in_line_again():
    room = Room()
    index = room.index()
    index.fill(0, data(4), Asks.AHEAD)
    lease = index.read(0, BLOCK)
    assert lease is not None
    tail = room.index(stored_end=0)
    appended = 0
    while tail.append(appended, data(1)):
        appended += BLOCK
    assert index.entries() == [(0, 4 * BLOCK)]
    assert bytes(lease.views[0]) == data(1)
    lease.release()
    assert tail.append(appended, data(1))
    assert index.entries() == []


@pytest.mark.parametrize("who", list(Asks))
def test_a_cache_that_evicts_below_its_target_says_so_and_a_sound_one_never_does(who):
    room = Room(patience=1)
    index = room.index()
    for number in range(100):
        room.manager.tick()
        index.fill(number * 4 * BLOCK, data(4), who)
    assert sum(room.manager.evictions.values()) > 50
    assert room.manager.early_evictions == 0
    # Room that was promised and never settled.
    room.manager.promised_bytes += 60 * BLOCK
    for number in range(100, 120):
        room.manager.tick()
        index.fill(number * 4 * BLOCK, data(4), who)
    assert room.manager.early_evictions >= 15


def test_runs_of_entries_that_were_read_are_counted():
    room = Room()
    index = room.index()
    for number in range(30):
        index.fill(number * BLOCK, data(1), Asks.TAIL)
    assert index.copy(0, 3 * BLOCK)
    assert (room.manager.entries_read, room.manager.runs_read) == (3, 3)
    # Every second block is free, and no two of them are neighbours.
    for number in range(30, 140):
        index.fill(number * BLOCK, data(1), Asks.TAIL)
    for start, _ in index.entries()[::2]:
        index._drop(index._entries[start])
    other = room.index()
    assert other.fill(0, data(4), Asks.TAIL)
    assert other.copy(0, 1)
    assert (room.manager.entries_read, room.manager.runs_read) == (4, 3 + 4)
