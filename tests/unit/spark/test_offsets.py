"""Batches of a streaming read follow each other without gap or repeat, within their limits."""

import random
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest

from tierlog.model.errors import RefusedError
from tierlog.model.ids import EntryId, LedgerId, StreamName
from tierlog.model.position import Position
from tierlog_spark.offsets import (
    BEGINNING,
    Budget,
    ReadableLedger,
    advanced,
    advanced_all,
    capped,
    from_json,
    incarnations_in,
    is_another,
    normal,
    to_json,
)
from tierlog_spark.planning import Range

A, B = StreamName("a"), StreamName("b")


def at(ledger_id, entry_id):
    return Position(LedgerId(ledger_id), EntryId(entry_id))


def ledgers(*counts, first=5, step=3, size=10):
    return [
        ReadableLedger(
            ledger_id=LedgerId(first + step * number), entry_count=count, length=size * count
        )
        for number, count in enumerate(counts)
    ]


def entries_between(some, start, end):
    within = Range(start=start, end=end)
    found = []
    for one in some:
        held = within.within(one.ledger_id, one.entry_count - 1)
        if held is not None:
            found += [(one.ledger_id, entry) for entry in range(held[0], held[1] + 1)]
    return found


@pytest.mark.parametrize("seed", range(20))
def test_batches_hold_each_entry_once_while_the_stream_grows(seed):
    rng = random.Random(seed)
    counts = [rng.randrange(6) for _ in range(rng.randrange(1, 9))]
    everything = ledgers(*counts)
    known, where, found = 1, BEGINNING, []
    for _ in range(200):
        budget = Budget(entries=rng.choice([None, 1, 3]), length=rng.choice([None, 5, 35]))
        limits = (budget.entries, budget.length)
        end = advanced(where, everything[:known], budget)
        some = entries_between(everything, where, end)
        assert limits[0] is None or len(some) <= limits[0]
        assert limits[1] is None or len(some) <= max(1, limits[1] // 10)
        found += some
        if end == where and known == len(everything):
            break
        where, known = end, min(len(everything), known + rng.randrange(2))
    assert found == [
        (one.ledger_id, entry) for one in everything for entry in range(one.entry_count)
    ]


@pytest.mark.parametrize("seed", range(20))
def test_an_open_ledger_is_read_as_it_grows_and_goes_on_behind_it_once_it_is_closed(seed):
    rng = random.Random(seed)
    everything = ledgers(*[rng.randrange(1, 6) for _ in range(rng.randrange(1, 6))])
    known, held, where, found = 0, 0, BEGINNING, []
    for _ in range(500):
        seen = everything[:known]
        if held:
            seen = [*seen, replace(everything[known], entry_count=held, closed=False)]
        end = advanced(where, seen, Budget(entries=rng.choice([None, 1, 3])))
        assert end >= where
        found += entries_between(everything, where, end)
        where = end
        if known == len(everything):
            if seen and where == normal(seen[-1], seen[-1].entry_count):
                break
        elif held < everything[known].entry_count:
            held += rng.randrange(2)
        elif rng.randrange(2):
            known, held = known + 1, 0
    assert found == [
        (one.ledger_id, entry) for one in everything for entry in range(one.entry_count)
    ]


def test_behind_a_ledgers_end_is_the_first_of_the_next_id():
    assert advanced(BEGINNING, ledgers(2, 3), Budget()) == at(9, 0)
    assert advanced(at(5, 1), ledgers(2, 3), Budget(entries=1)) == at(6, 0)
    assert advanced(at(6, 0), ledgers(2, 3), Budget(entries=1)) == at(8, 1)
    assert advanced(at(9, 0), ledgers(2, 3), Budget()) == at(9, 0)


def test_a_limit_is_of_all_streams_and_who_is_behind_goes_first():
    readable = {A: ledgers(4), B: ledgers(4, first=3)}
    start = dict.fromkeys(readable, BEGINNING)
    first = advanced_all(start, readable, Budget(entries=5))
    assert first == {A: at(6, 0), B: at(3, 1)}
    assert advanced_all(first, readable, Budget(entries=3)) == {A: at(6, 0), B: at(4, 0)}


def test_a_target_is_not_passed_and_nothing_goes_back():
    start, target = {A: at(5, 0), B: at(9, 0)}, {A: at(5, 2), B: at(8, 0)}
    found = {A: at(6, 0), B: at(9, 5)}
    assert capped(start, found, target) == {A: at(5, 2), B: at(9, 0)}
    assert capped(start, found, {}) == start


def test_offsets_are_readable_and_read_back():
    offsets = {B: at(9, 0), A: at(12, 345)}
    assert to_json(offsets) == {"a": "12:345", "b": "9:0"}
    assert from_json(to_json(offsets)) == offsets
    with pytest.raises(RefusedError, match="checkpoint"):
        from_json({"a": "soon"})


def test_offsets_say_which_stream_of_a_name_they_are_of_if_that_is_known():
    offsets, one = {A: at(12, 345), B: at(9, 0)}, UUID("0f8fad5b-d9cb-469f-a165-70867728950e")
    written = to_json(offsets, {A: one, B: None})
    assert written == {"a": "12:345@0f8fad5b-d9cb-469f-a165-70867728950e", "b": "9:0"}
    assert (from_json(written), incarnations_in(written)) == (offsets, {A: one})
    wrongs: list[Any] = [{"a": "1:0@x"}, {"a": 1}]
    for wrong in wrongs:
        with pytest.raises(RefusedError, match="checkpoint"):
            incarnations_in(wrong)
    assert is_another(one, UUID(int=1))
    assert not any(is_another(*some) for some in ((one, one), (one, None), (None, one)))
