"""An owner's attributes where one thing overtakes another: fetches, flushes and appends."""

# What is None fails the test anyway.
# mypy: disable-error-code="union-attr"

import pytest

from tierlog.model.attributes import AttributeKey, Checkpoint, IndexRoot
from tierlog.model.ids import EntryId, LedgerId
from tierlog.model.position import Position
from tierlog_ingest.streams.attributes.room import Room
from tierlog_ingest.streams.attributes.state import AttributeState

ONE, TWO, THREE = (AttributeKey(bytes([number]) * 16) for number in (1, 2, 3))


def at(number: int) -> Position:
    return Position(LedgerId(1), EntryId(number))


def checkpoint(through: int, count: int = 3) -> Checkpoint:
    root = IndexRoot(root_offset=through, root_length=1, count=count)
    return Checkpoint(through=at(through), root=root)


@pytest.fixture
def state() -> AttributeState:
    return AttributeState(checkpoint(0), created_ms=0, capacity=2)


def append(state: AttributeState, number: int, key: AttributeKey, value: int) -> None:
    state.change({key: value}, 1)
    state.sent(at(number), 10)


@pytest.mark.covers("E25", "E59")
@pytest.mark.parametrize("stage", ["sent", "confirmed", "flushing", "flushed"])
def test_a_fetch_that_was_overtaken_changes_nothing(state, stage):
    (unknown,) = state.unknown([ONE])
    state.pin([unknown])
    append(state, 1, ONE, 7)
    if stage != "sent":
        state.confirm(at(1))
    if stage in {"flushing", "flushed"}:
        assert state.begin_flush().changes == {ONE: 7}
    if stage == "flushed":
        state.finish_flush(checkpoint(1))
        # Others send it away, unless it is pinned.
        for number, key in ((2, TWO), (3, THREE)):
            append(state, number, key, 1)
            state.confirm(at(number))
    state.absorb([unknown], {ONE: 3})
    state.unpin([unknown])
    assert state.value(ONE) == 7


@pytest.mark.covers("E14", "E23")
def test_all_streams_share_room_and_the_one_used_longest_ago_makes_it():
    room = Room(6)
    states = [AttributeState(checkpoint(0), created_ms=0, capacity=5, room=room) for _ in range(3)]
    keys = [AttributeKey(bytes([number]) * 16) for number in range(1, 6)]

    def fetch(state: AttributeState, some: list[AttributeKey]) -> None:
        state.pin(some)
        state.absorb(some, dict.fromkeys(some, 1))
        state.unpin(some)

    def cached() -> list[int]:
        return [state.statistics()["attributes_cached"] for state in states]

    fetch(states[0], keys[:4])
    fetch(states[1], keys[:2])
    assert (cached(), room.used) == ([4, 2, 0], 6)
    # What is pinned, or waits for a flush, stays whoever wants room.
    states[0].pin(keys[:1])
    append(states[0], 1, keys[4], 7)
    states[0].confirm(at(1))
    fetch(states[2], keys)
    assert (cached(), room.used) == ([1, 0, 5], 6)
    assert states[0].unknown(keys) == keys[1:4]
    assert states[0].value(keys[4]) == 7
    # The last one to take in has its own to give.
    fetch(states[1], keys)
    assert (cached(), room.used) == ([1, 5, 0], 6)
    # One that is dropped gives back what it had.
    del states[1]
    assert room.used == 1


@pytest.mark.covers("E26")
def test_what_changes_during_a_flush_is_in_the_next_one(state):
    append(state, 1, ONE, 1)
    state.confirm(at(1))
    assert state.begin_flush().changes == {ONE: 1}
    append(state, 2, ONE, 2)
    append(state, 3, TWO, 2)
    state.confirm(at(2))
    assert state.begin_flush() is None
    state.finish_flush(checkpoint(1))
    flush = state.begin_flush()
    assert (flush.changes, flush.through) == ({ONE: 2}, at(2))


@pytest.mark.covers("E26")
def test_a_failed_flush_is_made_up_for_with_what_is_newest(state):
    append(state, 1, ONE, 1)
    append(state, 2, TWO, 1)
    state.confirm(at(2))
    state.begin_flush()
    append(state, 3, ONE, 2)
    state.confirm(at(3))
    state.fail_flush()
    assert state.value(ONE) == 2
    assert state.begin_flush().changes == {ONE: 2, TWO: 1}


def test_a_piece_counts_when_all_of_it_is_confirmed(state):
    state.change({ONE: 1}, 1)
    state.change({ONE: 2, TWO: 5}, 3)
    state.sent(at(2), 10)
    state.confirm(at(1))
    assert state.through == at(0)
    assert state.confirmed(ONE) == (False, None)
    state.confirm(at(2))
    assert state.through == at(2)
    assert state.confirmed(ONE) == (True, 2)
    assert state.setter(ONE) is None


@pytest.mark.covers("E14")
def test_only_what_the_index_tells_again_goes_from_memory(state):
    for number, key in ((1, ONE), (2, TWO), (3, THREE)):
        append(state, number, key, number)
        state.confirm(at(number))
    assert state.is_full
    assert [state.value(key) for key in (ONE, TWO, THREE)] == [1, 2, 3]
    state.begin_flush()
    state.finish_flush(checkpoint(3))
    assert state.unknown([ONE, TWO, THREE]) == [ONE]
