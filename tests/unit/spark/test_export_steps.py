"""Batches of an export follow each other without a gap, and hold each entry once."""

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierlog.model.errors import Reason, RefusedError
from tierlog.model.ids import EntryId, LedgerId, StreamName
from tierlog.model.position import Position
from tierlog.runtime.settings import S3Settings
from tierlog_spark.jobs.export.options import ExportOptions
from tierlog_spark.jobs.export.steps import (
    Source,
    beginning,
    behind_trimmed,
    check_incarnations,
    incarnations_of,
    steps,
    was_lost_unread,
)
from tierlog_spark.jobs.export.values import JsonSchema
from tierlog_spark.offsets import Offsets, ReadableLedger


def at(ledger_id, entry_id=0):
    return Position(LedgerId(ledger_id), EntryId(entry_id))


def source(name, counts, *, incarnation=1, trimmed_through=-1):
    return Source(
        stream=StreamName(name),
        incarnation=UUID(int=incarnation),
        trimmed_through=trimmed_through,
        ledgers=[
            ReadableLedger(ledger_id=LedgerId(number), entry_count=count, length=100 * count)
            for number, count in counts.items()
        ],
    )


def entries_of(one, counts):
    """Every entry of a piece; its ends must be entries that there are."""
    assert one.start.entry_id < counts[one.start.ledger_id]
    assert 0 < one.stop.entry_id <= counts[one.stop.ledger_id]
    return [
        (number, entry)
        for number, count in counts.items()
        for entry in range(count)
        if one.start <= at(number, entry) < one.stop
    ]


COUNTS = st.dictionaries(st.integers(1, 20), st.integers(0, 9), max_size=6).map(
    lambda found: dict(sorted(found.items()))
)


@given(COUNTS, COUNTS, st.integers(1, 3000), st.data())
def test_every_entry_is_in_one_batch_and_in_order(one, other, batch_bytes, data):
    streams = {"a": one, "b": other}
    sources = [source(name, counts) for name, counts in streams.items()]
    first = data.draw(st.sampled_from([at(0), *(at(number, 1) for number in one)]))
    start = beginning(sources, {StreamName("a"): first})
    seen: dict[str, list[tuple[int, int]]] = {"a": [], "b": []}
    where: Offsets = start
    for step in steps(sources, start, batch_bytes=batch_bytes):
        assert step.start == where
        assert step.pieces
        # At least one entry is taken, and the limit is that of them all together.
        assert step.entries == 1 or step.length <= batch_bytes
        for piece in step.pieces:
            found = entries_of(piece, streams[piece.stream])
            assert len(found) == piece.entries
            seen[piece.stream] += found
        where = step.to
    for name, counts in streams.items():
        wanted = [(number, entry) for number, count in counts.items() for entry in range(count)]
        from_there = start[StreamName(name)]
        assert seen[name] == [found for found in wanted if at(*found) >= from_there]
    assert list(steps(sources, where, batch_bytes=batch_bytes)) == []


def test_a_partition_that_is_new_begins_at_its_beginning():
    sources = [source("a", {3: 2}), source("b", {4: 2})]
    assert beginning(sources, {StreamName("a"): at(4)}) == {"a": at(4), "b": at(0)}


def test_what_was_trimmed_before_an_export_first_saw_a_stream_is_no_loss_of_its_own():
    sources = [source("a", {9: 5}, trimmed_through=8), source("b", {}, trimmed_through=6)]
    start = beginning(sources, {})
    assert start == {"a": at(9), "b": at(7)}
    for one in sources:
        assert not was_lost_unread(one, start[one.stream], None, skip=False, place="here")


def test_what_was_trimmed_unread_is_refused_or_told():
    one = source("s", {9: 5}, trimmed_through=8)
    for start in (at(9), at(9, 3)):
        assert not was_lost_unread(one, start, UUID(int=1), skip=False, place="here")
    # Recorded when it was empty: what came since, and went, is lost as well.
    for start in (at(8), at(8, 4), at(3), at(0)):
        assert was_lost_unread(one, start, UUID(int=1), skip=True, place="here")
        with pytest.raises(
            RefusedError, match=f"up to ledger 8, and here has it up to {start}"
        ) as e:
            was_lost_unread(one, start, UUID(int=1), skip=False, place="here")
        assert e.value.reason is Reason.TRIMMED
        assert "--skip-trimmed" in e.value.remedy
        # Told once.
        behind = behind_trimmed([one], {StreamName("s"): start, StreamName("t"): at(2)})
        assert behind == {"s": at(9), "t": at(2)}
    assert behind_trimmed([one], {StreamName("s"): at(9, 3)}) == {"s": at(9, 3)}


def test_the_rest_of_a_ledger_that_a_restore_did_not_bring_back_is_told():
    one = source("s", {6: 5, 9: 5})
    with pytest.raises(RefusedError, match="has lost its ledger 8, and here has it up to 8:3") as e:
        was_lost_unread(one, at(8, 3), UUID(int=1), skip=False, place="here")
    assert "--skip-trimmed" in e.value.remedy
    assert was_lost_unread(one, at(8, 3), UUID(int=1), skip=True, place="here")
    (step,) = steps([one], {StreamName("s"): at(8, 3)}, batch_bytes=10**6)
    assert step.to == {"s": at(10)}
    # All of a ledger was exported; or nothing is there yet behind what was.
    for start in (at(6, 2), at(7), at(8), at(9, 4), at(10), at(12, 3)):
        assert not was_lost_unread(one, start, UUID(int=1), skip=False, place="here")


def test_of_a_stream_that_was_made_anew_nobody_knows_what_went_with_the_one_before():
    anew, known = source("s", {9: 5}, incarnation=2), {StreamName("s"): UUID(int=1)}
    assert was_lost_unread(anew, at(7), UUID(int=1), skip=True, place="here")
    with pytest.raises(RefusedError, match="s was deleted and made anew, and here has") as e:
        was_lost_unread(anew, at(7), UUID(int=1), skip=False, place="here")
    assert "--skip-trimmed" in e.value.remedy
    assert incarnations_of([anew], known) == {"s": UUID(int=2)}
    # Told once.
    assert not was_lost_unread(anew, at(7), UUID(int=2), skip=False, place="here")


def test_a_stream_that_was_made_anew_counts_from_its_first_ledger_on():
    empty, known = source("s", {}, incarnation=2), {StreamName("s"): UUID(int=1)}
    assert not was_lost_unread(empty, at(7), UUID(int=1), skip=False, place="here")
    # Else another cluster's stream would pass once it has entries: it would be known by then.
    assert incarnations_of([empty], known) == known
    assert incarnations_of([empty], {}) == {"s": UUID(int=2)}
    # One that is gone may come back, as another one.
    assert incarnations_of([], known) == known


def test_another_stream_of_the_same_name_is_not_mixed_in():
    known = {StreamName("s"): UUID(int=1)}
    start = {StreamName("s"): at(7)}
    check_incarnations([source("s", {5: 1})], start, known, "here")
    check_incarnations([source("s", {5: 1}, incarnation=2)], start, {}, "here")
    # Deleted and made anew: all of it is behind.
    check_incarnations([source("s", {7: 1}, incarnation=2)], start, known, "here")
    with pytest.raises(RefusedError, match="here has another stream s"):
        check_incarnations([source("s", {5: 1}, incarnation=2)], start, known, "here")


@pytest.mark.parametrize(
    ("words", "more"),
    [
        ("no stream is named", {"streams": ()}),
        ("is not allowed", {"streams": ("a/b",)}),
        ("holds no data", {"payload": False}),
        ("would be lost", {"payload": False, "schema": JsonSchema("a INT"), "keep_bad": True}),
        ("batch_bytes is 0", {"batch_bytes": 0}),
        ("file_bytes is", {"file_bytes": 2**40}),
    ],
)
def test_an_export_that_makes_no_sense_is_refused(words, more):
    given = {"streams": ("s",), "to": "out", "s3": S3Settings(), **more}
    with pytest.raises(RefusedError, match=words):
        ExportOptions(**given).names()


def test_a_stream_is_exported_once():
    options = ExportOptions(streams=("a", "b", "a"), to="out", s3=S3Settings())
    assert options.names() == ["a", "b"]
