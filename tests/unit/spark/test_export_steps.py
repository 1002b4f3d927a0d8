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
    check_incarnations,
    steps,
    was_trimmed_unread,
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


def test_what_was_trimmed_unread_is_refused_or_told():
    one = source("s", {9: 5}, trimmed_through=8)
    for start in (at(9), at(9, 3), at(0)):
        assert not was_trimmed_unread(one, start, skip=False, place="here")
    for start in (at(8), at(8, 4), at(3)):
        assert was_trimmed_unread(one, start, skip=True, place="here")
        with pytest.raises(
            RefusedError, match=f"up to ledger 8, and here has it up to {start}"
        ) as e:
            was_trimmed_unread(one, start, skip=False, place="here")
        assert e.value.reason is Reason.TRIMMED
        assert "--skip-trimmed" in e.value.remedy


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
