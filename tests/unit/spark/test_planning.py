"""Which entries are wanted, cut into whole blocks: each once, none left out in silence."""

import random
from dataclasses import replace
from datetime import UTC, datetime
from uuid import UUID

import pytest
from pyspark.sql.datasource import (
    EqualTo,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
)

from tests.unit.format.test_manifest import ledger
from tierlog.format.index import BlockRange
from tierlog.model.errors import Reason, RefusedError
from tierlog.model.ids import EntryId, LedgerId, StreamName
from tierlog.model.manifest import NO_LEDGER, ManifestCopy, ManifestHead, ManifestLedger
from tierlog.model.offload import Tier2Copy, Tier2Location
from tierlog.model.position import Position
from tierlog_spark.filters import push
from tierlog_spark.planning import (
    ALL,
    Bounds,
    Range,
    check_range,
    copied_alone,
    cut,
    wanted_of,
)

HEAD = ManifestHead(
    stream=StreamName("s"), incarnation=UUID(int=1), created_ms=1, trimmed_through=LedgerId(4)
)


def at(ledger_id, entry_id):
    return Position(LedgerId(ledger_id), EntryId(entry_id))


COPY = ManifestCopy(
    uuid=UUID(int=9),
    location=Tier2Location(
        driver="aws-s3", endpoint_name="e", bucket="b", data_key="d", index_key="i", side_key=""
    ),
    complete_ms=1,
    copy=Tier2Copy(
        format_version=1,
        data_len=100,
        index_len=1,
        index_sha256=b"",
        entry_count=10,
        block_count=1,
    ),
)


def listed(*numbers, uncopied=()):
    """Closed ledgers with ten entries each."""
    return [
        ManifestLedger(
            listed=replace(ledger(number).listed, last_entry_id=EntryId(9)),
            copy=None if number in uncopied else COPY,
        )
        for number in sorted((*numbers, *uncopied))
    ]


def blocks_of(*counts, size=100):
    found, first = [], 0
    for number, count in enumerate(counts):
        found.append(
            BlockRange(
                part_number=number + 1,
                offset=number * size,
                length=size,
                first_entry_id=EntryId(first),
                last_entry_id=EntryId(first + count - 1),
            )
        )
        first += count
    return found


@pytest.mark.parametrize("seed", range(30))
def test_pieces_hold_each_wanted_entry_once_and_begin_at_blocks(seed):
    rng = random.Random(seed)
    blocks = blocks_of(*(rng.randrange(1, 9) for _ in range(rng.randrange(1, 12))))
    end = blocks[-1].last_entry_id
    first = rng.randrange(end + 1)
    last = rng.randrange(first, end + 1)
    pieces = list(cut(blocks, first, last, bytes_target=rng.choice([1, 100, 250, 10**9])))
    held = [entry for low, high in pieces for entry in range(low, high + 1)]
    assert held == list(range(first, last + 1))
    assert {low for low, _ in pieces[1:]} <= {one.first_entry_id for one in blocks}


def test_pieces_are_as_long_as_the_target_and_one_block_at_least():
    blocks = blocks_of(*[5] * 7)
    assert list(cut(blocks, 0, 34, bytes_target=300)) == [(0, 14), (15, 29), (30, 34)]
    assert len(list(cut(blocks, 0, 34, bytes_target=1))) == 7


def test_a_range_takes_its_first_and_not_its_end():
    within = Range(start=at(5, 3), end=at(7, 2))
    found = wanted_of(listed(5, 6, 7, 8), within, ALL)
    assert [(one.ledger.listed.ledger_id, one.first, one.last) for one in found] == [
        (5, 3, 9),
        (6, 0, 9),
        (7, 0, 1),
    ]
    assert wanted_of(listed(5, 6), Range(start=at(5, 10), end=at(6, 0)), ALL) == []


def test_bounds_narrow_ledgers_and_entries():
    bounds = Bounds(ledger_min=6, ledgers=frozenset({5, 6, 8}), entry_min=4, entry_max=20)
    found = wanted_of(listed(5, 6, 7, 8), Range(), bounds)
    assert [(one.ledger.listed.ledger_id, one.first, one.last) for one in found] == [
        (6, 4, 9),
        (8, 4, 9),
    ]


def test_a_direct_read_ends_where_the_uncopied_tail_begins():
    found = copied_alone(listed(5, 6, uncopied=(7, 8)), Range(), ALL)
    assert [one.ledger.listed.ledger_id for one in found] == [5, 6]
    assert copied_alone(listed(uncopied=(7,)), Range(), ALL) == []


@pytest.mark.parametrize("within", [Range(), Range(start=at(5, 4))])
def test_a_hole_in_the_middle_is_refused(within):
    ledgers = listed(5, 7, uncopied=(6,))
    with pytest.raises(RefusedError, match="ledger 6 is wanted"):
        copied_alone(ledgers, within, ALL)


def test_a_hole_that_is_not_wanted_is_none():
    ledgers, within = listed(5, 7, uncopied=(6,)), Range(start=at(7, 0))
    assert len(copied_alone(ledgers, within, ALL)) == 1


def test_a_named_end_in_the_uncopied_tail_is_refused():
    within = Range(end=at(6, 5))
    with pytest.raises(RefusedError, match="ledger 6 is wanted"):
        copied_alone(listed(5, uncopied=(6,)), within, ALL)


@pytest.mark.parametrize(
    ("within", "reason", "words"),
    [
        (Range(start=at(3, 0)), Reason.TRIMMED, "begins at 5:0"),
        (Range(start=at(4, 9)), Reason.TRIMMED, "option start"),
        (Range(end=at(2, 0)), Reason.TRIMMED, "option end"),
        (Range(start=at(0, 0)), Reason.TRIMMED, "option start"),
        (Range(start=at(6, 1)), Reason.NO_SUCH_ENTRY, "up to 11"),
        (Range(start=at(9, 0)), Reason.NO_SUCH_ENTRY, "up to 11"),
        (Range(end=at(12, 1)), Reason.NO_SUCH_ENTRY, "up to 11"),
        (Range(end=at(13, 0)), Reason.NO_SUCH_ENTRY, "up to 11"),
        (Range(start=at(5, 11)), Reason.NO_SUCH_ENTRY, "ends with entry 9"),
    ],
)
def test_positions_that_are_not_there_are_told_apart(within, reason, words):
    with pytest.raises(RefusedError) as caught:
        check_range(HEAD, listed(5, 7, 11), within, to_the_end=True)
    assert caught.value.reason is reason
    assert words in str(caught.value)


def test_right_behind_a_ledger_is_a_position_and_so_is_what_others_have():
    check_range(HEAD, listed(5, 7), Range(start=at(5, 10), end=at(7, 10)), to_the_end=True)
    check_range(HEAD, listed(5, 7), Range(end=at(12, 0)), to_the_end=False)


@pytest.mark.parametrize("name", ["start", "end"])
def test_a_ledgers_end_as_offsets_write_it_is_a_position(name):
    ledgers = listed(7, 11)
    # Behind what was trimmed, behind a ledger and before the next, and behind all.
    for where in (at(5, 0), at(8, 0), at(12, 0)):
        check_range(HEAD, ledgers, Range(**{name: where}), to_the_end=True)
    check_range(HEAD, [], Range(**{name: at(5, 0)}), to_the_end=True)
    untrimmed = replace(HEAD, trimmed_through=NO_LEDGER)
    check_range(untrimmed, ledgers, Range(**{name: at(0, 0)}), to_the_end=True)
    with pytest.raises(RefusedError):
        check_range(untrimmed, ledgers, Range(**{name: at(5, 0)}), to_the_end=True)


def path(name):
    return (name,)


def test_places_are_settled_and_the_rest_is_handed_back():
    filters = [
        IsNotNull(path("ledger_id")),
        GreaterThan(path("ledger_id"), 5),
        LessThanOrEqual(path("ledger_id"), 9),
        GreaterThanOrEqual(path("entry_id"), 3),
        LessThan(path("entry_id"), 8),
        EqualTo(path("stream"), "s"),
        In(path("ledger_id"), (6, 7, 30)),
        EqualTo(path("key"), b"k"),
        IsNotNull(path("key")),
        Not(EqualTo(path("stream"), "t")),
        EqualTo(("properties", "a"), "b"),
    ]
    bounds, left = push(ALL, filters)
    assert left == filters[7:]
    assert (bounds.ledger_min, bounds.ledger_max) == (6, 9)
    assert (bounds.entry_min, bounds.entry_max) == (3, 7)
    assert bounds.ledgers == frozenset({6, 7, 30})
    assert bounds.wants_stream("s")
    assert not bounds.wants_stream("t")


@pytest.mark.parametrize(
    ("kind", "low", "high"),
    [
        (GreaterThan, 1001, None),
        (GreaterThanOrEqual, 1001, None),
        (LessThan, None, 1000),
        (LessThanOrEqual, None, 1000),
        (EqualTo, 1001, 1000),
    ],
)
def test_times_narrow_by_whole_ms_and_are_looked_at_again(kind, low, high):
    one = kind(path("publish_time"), datetime.fromtimestamp(1.0005, UTC))
    bounds, left = push(ALL, [one])
    assert left == [one]
    assert bounds.has_times
    assert low is None or bounds.ms_min == low
    assert high is None or bounds.ms_max == high


def test_a_time_on_the_ms_is_taken_as_it_is():
    moment = datetime.fromtimestamp(1, UTC)
    for kind, low, high in (
        (GreaterThan, 1001, None),
        (GreaterThanOrEqual, 1000, None),
        (LessThan, None, 999),
        (LessThanOrEqual, None, 1000),
        (EqualTo, 1000, 1000),
    ):
        bounds, _ = push(ALL, [kind(path("publish_time"), moment)])
        assert low is None or bounds.ms_min == low
        assert high is None or bounds.ms_max == high


def test_a_time_without_a_zone_narrows_nothing():
    one = GreaterThan(path("publish_time"), datetime(2026, 1, 1))  # noqa: DTZ001
    assert push(ALL, [one]) == (ALL, [one])
