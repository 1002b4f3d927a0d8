"""What a batch of a streaming read refuses: entries trimmed unread, readers or buckets that lag."""

import asyncio
import functools
from dataclasses import replace
from uuid import UUID

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import StructType

from tests.unit.spark.bucket_kit import HEAD, INCARNATION, ManifestBucket, options
from tests.unit.spark.test_planning import listed
from tierlog.model.errors import Reason, RefusedError
from tierlog.model.ids import EntryId, LedgerId, StreamName
from tierlog.model.position import Position
from tierlog.ports.reads import ServedLedger
from tierlog_spark import streaming
from tierlog_spark.offsets import BEGINNING, Budget, advanced
from tierlog_spark.planning import Bounds, Range, ServicePart, StorePart
from tierlog_spark.service import ENTRY_BYTES, ListedStream, readable_of_served
from tierlog_spark.streaming import (
    EventStreamReader,
    check_served,
    check_start,
    check_stored,
)

ALL = ReadAllAvailable()


def at(ledger_id, entry_id):
    return Position(LedgerId(ledger_id), EntryId(entry_id))


def served(*rows, trimmed=None):
    found = [
        ServedLedger(ledger_id=LedgerId(one), entry_count=count, length=length, closed=closed)
        for one, count, length, closed in rows
    ]
    return ListedStream(StreamName("s"), readable_of_served(found), trimmed)


STREAM = served((15, 4, 40, True), (17, 3, 0, False), trimmed=at(12, 5))


@pytest.mark.parametrize(
    ("start", "end", "reason"),
    [
        (at(12, 4), at(15, 1), Reason.TRIMMED),
        (at(3, 0), at(15, 1), Reason.TRIMMED),
        (at(17, 0), at(17, 4), Reason.NO_SUCH_ENTRY),
        (at(17, 0), at(18, 0), Reason.NO_SUCH_ENTRY),
        # Nothing was there when the query began, and by now something came and went.
        (BEGINNING, at(15, 1), Reason.TRIMMED),
        # All of it had been read, however that is written.
        (at(12, 5), at(17, 3), None),
        (at(13, 0), at(16, 0), None),
    ],
)
def test_a_range_is_whole_or_refused(start, end, reason):
    within = Range(start=start, end=end)
    if reason is None:
        check_served(STREAM, within, fail_on_data_loss=True)
        return
    with pytest.raises(RefusedError) as caught:
        check_served(STREAM, within, fail_on_data_loss=True)
    assert caught.value.reason is reason
    if reason is Reason.TRIMMED:
        check_served(STREAM, within, fail_on_data_loss=False)


def test_a_stream_that_was_made_anew_is_not_taken_for_the_one_before():
    anew = served((15, 4, 40, True))
    for start in (at(3, 1), at(14, 0)):
        within = Range(start=start, end=at(16, 0))
        with pytest.raises(RefusedError, match="was made anew"):
            check_served(anew, within, fail_on_data_loss=True)
        check_served(anew, within, fail_on_data_loss=False)
    for start in (BEGINNING, at(15, 0), at(15, 2)):
        check_served(anew, Range(start=start, end=at(16, 0)), fail_on_data_loss=True)


@pytest.mark.parametrize("trimmed", [None, at(12, 5)])
def test_the_rest_of_a_ledger_that_is_gone_amid_a_stream_is_told(trimmed):
    """A restore brings back what was in the bucket: a ledger that was open then is not there."""
    stream = served((13, 4, 40, True), (17, 3, 0, False), trimmed=trimmed)
    head = HEAD if trimmed is None else replace(HEAD, trimmed_through=LedgerId(12))
    for start, fails in ((at(15, 2), True), (at(15, 0), False), (at(13, 2), False)):
        within = Range(start=start, end=at(17, 3))
        for check in (
            functools.partial(check_served, stream, within),
            functools.partial(check_stored, head, listed(13, 17), within),
        ):
            if fails:
                with pytest.raises(RefusedError, match="goes on at 17:0, since its ledger 15 was"):
                    check(fail_on_data_loss=True)
            else:
                check(fail_on_data_loss=True)
            check(fail_on_data_loss=False)
    # It was open, or is not in the bucket yet.
    check_served(stream, Range(start=at(17, 2), end=at(17, 3)), fail_on_data_loss=True)


@pytest.mark.parametrize("end", [at(15, 3), at(16, 0)])
@pytest.mark.parametrize("trimmed", [None, at(12, 5)])
def test_a_begun_batch_whose_last_ledger_is_gone_is_not_passed_over(trimmed, end):
    """A cluster that is lost ends a query amid a batch, of which a restore brings back a part."""
    head = HEAD if trimmed is None else replace(HEAD, trimmed_through=LedgerId(12))
    for first in (at(13, 2), at(14, 0)):
        within = Range(start=first, end=end)
        for ledgers, fails in ((((13, 4), (17, 3)), True), (((13, 4), (15, 3), (17, 3)), False)):
            stream = served(*((one, count, 9, True) for one, count in ledgers), trimmed=trimmed)
            for check in (
                functools.partial(check_served, stream, within),
                functools.partial(check_stored, head, listed(*(one for one, _ in ledgers)), within),
            ):
                if fails:
                    with pytest.raises(RefusedError, match="goes on at 17:0, since its ledger 15"):
                        check(fail_on_data_loss=True)
                else:
                    check(fail_on_data_loss=True)
                check(fail_on_data_loss=False)
    # All of it was read, and went since.
    gone = served((17, 3, 9, True), trimmed=at(15, 3))
    check_served(gone, Range(start=at(15, 3), end=at(16, 0)), fail_on_data_loss=True)


def test_what_is_empty_by_now_has_its_end_where_it_was_trimmed():
    empty = served(trimmed=at(12, 5))
    check_served(empty, Range(start=at(12, 5), end=at(13, 0)), fail_on_data_loss=True)
    with pytest.raises(RefusedError, match="ends at 13:0"):
        check_served(empty, Range(start=at(13, 0), end=at(14, 0)), fail_on_data_loss=True)


def test_entries_of_an_open_ledger_are_taken_to_be_as_long_as_those_before():
    assert [one.length for one in STREAM.ledgers] == [40, 30]
    told = served((15, 4, 40, True), (17, 3, 6000, False))
    assert [one.length for one in told.ledgers] == [40, 6000]


def test_bytes_of_a_batch_are_bounded_whether_or_not_a_reader_knows_the_length():
    known, unknown = (served((15, 1000, length, False)).ledgers for length in (10**8, 0))
    assert advanced(BEGINNING, known, Budget(length=10**7)) == at(15, 100)
    assert advanced(BEGINNING, unknown, Budget(length=10**7)) == at(15, 10**7 // ENTRY_BYTES)


@pytest.mark.parametrize(
    ("ledgers", "end", "reason"),
    [
        ((15, 17), at(17, 4), None),
        ((15, 17), at(18, 0), None),
        # It was open when a reader told of it, or the bucket is an older copy.
        ((15, 17), at(18, 4), Reason.NO_SUCH_ENTRY),
        ((15, 17), at(19, 0), Reason.NO_SUCH_ENTRY),
        # All of it was read, and trimmed since.
        ((), at(13, 0), None),
        ((), at(15, 1), Reason.NO_SUCH_ENTRY),
    ],
)
@pytest.mark.parametrize("fail", [True, False])
def test_a_range_is_in_the_manifest_up_to_its_end_or_refused(ledgers, end, reason, fail):
    head = replace(HEAD, trimmed_through=LedgerId(12), trimmed_last=EntryId(9))
    within = Range(start=at(13, 0), end=end)
    if reason is None:
        check_stored(head, listed(*ledgers), within, fail_on_data_loss=fail)
        return
    with pytest.raises(RefusedError) as caught:
        check_stored(head, listed(*ledgers), within, fail_on_data_loss=fail)
    assert caught.value.reason is reason


def planned(start, end, **given):
    reader = EventStreamReader(options(**given), StructType())
    return [
        (one.value.ledger.ledger_id, one.value.first_entry_id, one.value.last_entry_id)
        for one in reader.partitions(start, end)
    ]


def test_times_that_a_query_wants_are_those_of_each_of_its_parts(monkeypatch):
    bucket = ManifestBucket(monkeypatch)
    asyncio.run(bucket.write(11))
    there = served((11, 10, 100, True), (12, 5, 50, False))._replace(incarnation=INCARNATION)
    serving(monkeypatch, there)
    kinds = {
        "direct": [StorePart],
        "service": [ServicePart] * 2,
        "auto": [StorePart, ServicePart],
    }
    for mode, wanted in kinds.items():
        end = {"s": "12:0" if mode == "direct" else "12:5"}
        for given, times in (
            ({"startTime": "5", "endTime": "9"}, (5, 8)),
            ({"startTime": "5"}, (5, Bounds().ms_max)),
            ({"endTime": "9"}, (Bounds().ms_min, 8)),
        ):
            reader = reading(readMode=mode, **given)
            parts = [one.value for one in reader.partitions({"s": "0:0"}, end)]
            assert [type(one) for one in parts] == wanted
            bounds = [one if isinstance(one, StorePart) else one.bounds for one in parts]
            assert {(one.ms_min, one.ms_max) for one in bounds} == {times}
            # A raw stream, which has no times, is refused by who reads it.
            assert all(one.times_asked for one in parts if isinstance(one, ServicePart))
        nothing = reading(readMode=mode, startTime="9", endTime="9")
        found = [one.value for one in nothing.partitions({"s": "0:0"}, end)]
        assert found == []


def test_a_batch_that_the_bucket_has_in_part_is_refused(monkeypatch):
    bucket = ManifestBucket(monkeypatch)
    asyncio.run(bucket.write(11, 12))
    whole = [(11, 4, 9), (12, 0, 9)]
    assert planned({"s": "11:4"}, {"s": "13:0"}) == whole
    with pytest.raises(RefusedError, match="ends at 13:0, and the query knows it up to 16:0"):
        planned({"s": "11:4"}, {"s": "16:0"})
    asyncio.run(bucket.write(13, 15))
    assert planned({"s": "11:4"}, {"s": "16:0"}) == [*whole, (13, 0, 9), (15, 0, 9)]


def test_a_batch_of_a_partition_that_the_bucket_has_not_is_refused(monkeypatch):
    bucket = ManifestBucket(monkeypatch)
    one, other = "s-partition-0", "s-partition-1"
    asyncio.run(bucket.write(partitions=2))
    asyncio.run(bucket.write(11, stream=one))
    begin = {one: "0:0", other: "0:0"}
    assert planned(begin, {one: "12:0", other: "0:0"}) == [(11, 0, 9)]
    with pytest.raises(RefusedError, match="s-partition-1 ends at 0:0"):
        planned(begin, {one: "12:0", other: "13:0"})
    # Of what the query reads no more, nothing is missed.
    left = {"t-partition-0": "9:0"}
    assert planned({one: "0:0", **left}, {one: "12:0", **left}) == [(11, 0, 9)]


def test_a_stream_that_is_named_later_begins_where_it_does_and_has_lost_nothing(monkeypatch):
    bucket = ManifestBucket(monkeypatch)
    asyncio.run(bucket.write(4, 5, stream="a"))
    asyncio.run(bucket.write(9, 11, stream="b", trimmed_through=7))
    reader, start = reading(streams="a,b"), {"a": "5:0"}
    first = reader.latestOffset(start, ALL)
    assert first == {"a": f"6:0@{INCARNATION}", "b": f"9:0@{INCARNATION}"}
    assert reader.reportLatestOffset() == {"a": first["a"], "b": f"12:0@{INCARNATION}"}
    assert len(reader.partitions(start, first)) == 1
    second = reader.latestOffset(first, ALL)
    assert second == reader.reportLatestOffset()
    assert len(reader.partitions(first, second)) == 2
    # It is taken off again amid either batch.
    alone = reading(streams="a")
    assert len(alone.partitions(start, first)) == 1
    with pytest.raises(RefusedError, match="stream b is to be read up to 12:0"):
        alone.partitions(first, second)
    # What is trimmed from here on was lost.
    asyncio.run(bucket.write(stream="b", trimmed_through=9, removed=[9]))
    with pytest.raises(RefusedError, match="trimmed up to"):
        reader.partitions(first, second)


def test_of_a_partition_that_comes_later_nothing_is_passed_over(monkeypatch):
    bucket = ManifestBucket(monkeypatch)
    one, other = "s-partition-0", "s-partition-1"
    asyncio.run(bucket.write(partitions=2))
    asyncio.run(bucket.write(11, stream=one))
    start = reading().latestOffset(reading().initialOffset(), ALL)
    asyncio.run(bucket.write(12, stream=other))
    first = reading().latestOffset(start, ALL)
    assert first == {**start, other: f"0:0@{INCARNATION}"}
    assert planned(start, first) == []
    second = reading().latestOffset(first, ALL)
    assert planned(first, second) == [(12, 0, 9)]


def test_partitions_of_a_stream_that_is_named_later_begin_where_they_do(monkeypatch):
    bucket = ManifestBucket(monkeypatch)
    asyncio.run(bucket.write(4, 5, stream="a"))
    asyncio.run(bucket.write(partitions=2))
    asyncio.run(bucket.write(9, 11, stream="s-partition-0", trimmed_through=7))
    first = reading(streams="a,s").latestOffset({"a": "5:0"}, ALL)
    assert first["s-partition-0"] == f"9:0@{INCARNATION}"
    # Readers know all partitions from the start: one without an offset was named since.
    parts = served((9, 10, 100, True))._replace(
        name=StreamName("s-partition-0"), trimmed_end=at(7, 3)
    )
    serving(monkeypatch, parts)
    for mode in ("service", "auto"):
        reader = reading(readMode=mode)
        first = reader.latestOffset({"s-partition-1": "3:0"}, ALL)
        assert first["s-partition-0"].startswith("9:0")


def test_a_begun_batch_of_a_partition_that_is_gone_is_passed_over_where_losses_may_be(monkeypatch):
    serving(monkeypatch, served((9, 10, 100, True))._replace(name=StreamName("s-partition-0")))
    start = {"s-partition-0": "9:0", "s-partition-1": "5:0"}
    end = {"s-partition-0": "10:0", "s-partition-1": "9:0"}
    for mode in ("service", "auto"):
        with pytest.raises(RefusedError, match="stream s-partition-1 is to be read up to 9:0"):
            reading(readMode=mode).partitions(start, end)
    lax = reading(readMode="service", failOnDataLoss="false")
    assert len(lax.partitions(start, end)) == 1


def test_a_begun_batch_is_not_made_shorter_by_leaving_out_a_stream(monkeypatch):
    bucket = ManifestBucket(monkeypatch)
    asyncio.run(bucket.write(4, 5, stream="a"))
    asyncio.run(bucket.write(6, stream="b"))
    start, end = {"a": "4:0", "b": "6:0"}, {"a": "6:0", "b": "7:0"}
    assert [one for one, _, _ in planned(start, end, streams="a,b")] == [4, 5, 6]
    with pytest.raises(RefusedError, match=r"stream a is to be read up to 6:0 .* name it until"):
        planned(start, end, streams="b")
    # Between two batches it may be left out, and once it is gone for good.
    assert [one for one, _, _ in planned({**start, "a": "6:0"}, end, streams="b")] == [6]
    lax = {"streams": "b", "failOnDataLoss": "false"}
    assert [one for one, _, _ in planned(start, end, **lax)] == [6]
    # With readers as well.
    serving(monkeypatch, served((6, 10, 100, True))._replace(name=StreamName("b")))
    for mode in ("service", "auto"):
        with pytest.raises(RefusedError, match="stream a is to be read"):
            reading(streams="b", readMode=mode).partitions(start, end)


OPEN = served((12, 100, 1000, True), (15, 10, 100, False))


@pytest.mark.parametrize(
    ("stream", "start", "words"),
    [
        (OPEN, at(99, 0), "it ends at 15:10"),
        (OPEN, at(15, 400), "it ends at 15:10"),
        (OPEN, at(16, 0), "it ends at 15:10"),
        (OPEN, at(12, 500), "that ledger ends at 12:100"),
        (OPEN, at(13, 1), "it ends at 15:10"),
        (OPEN, at(14, 0), "it ends at 15:10"),
        (served(), at(5, 0), "it ends at 0:0"),
        (served(trimmed=at(12, 5)), at(14, 0), "it ends at 13:0"),
        *((OPEN, at(*where), None) for where in ((12, 0), (12, 100), (13, 0), (15, 10))),
        (served((15, 4, 40, True)), at(16, 0), None),
        (served(), BEGINNING, None),
        (served(trimmed=at(12, 5)), at(12, 5), None),
        (served(trimmed=at(12, 5)), at(13, 0), None),
        # A batch tells of what was trimmed, or goes on behind it.
        (OPEN, BEGINNING, None),
        (OPEN, at(3, 7), None),
    ],
)
def test_a_query_does_not_begin_where_its_stream_has_no_position(stream, start, words):
    if words is None:
        check_start(stream, start)
        return
    with pytest.raises(RefusedError, match=f"no position {start}: {words}") as caught:
        check_start(stream, start)
    assert caught.value.reason is Reason.NO_SUCH_ENTRY


def begun(start, **given):
    return EventStreamReader(options(start=start, **given), StructType()).initialOffset()


def serving(monkeypatch, stream):
    async def served_now(_):
        return [stream]

    monkeypatch.setattr(streaming, "_served", served_now)


@pytest.mark.parametrize("mode", ["service", "auto"])
def test_a_query_through_readers_does_not_begin_behind_their_end(monkeypatch, mode):
    serving(monkeypatch, OPEN)
    assert begun("15:10", readMode=mode) == {"s": "15:10"}
    named = OPEN._replace(incarnation=INCARNATION)
    serving(monkeypatch, named)
    assert begun("15:10", readMode=mode) == {"s": f"15:10@{INCARNATION}"}
    with pytest.raises(RefusedError, match="no position 99:0"):
        begun("99:0", readMode=mode)


def test_a_query_of_a_bucket_does_not_begin_behind_a_ledgers_end(monkeypatch):
    bucket = ManifestBucket(monkeypatch)
    asyncio.run(bucket.write(12, uncopied=[15], trimmed_through=9))
    for start in ("12:500", "13:5", "15:11"):
        with pytest.raises(RefusedError, match=f"no position {start}") as caught:
            begun(start)
        assert caught.value.reason is Reason.NO_SUCH_ENTRY
    # Ledger 17 may be there, and is no more in the bucket yet than 15 is; 9:10 is no loss.
    for start in ("12:3", "12:10", "13:0", "15:10", "16:0", "17:3", "9:10", "3:0"):
        assert begun(start) == {"s": f"{start}@{INCARNATION}"}


def test_a_position_in_the_one_partition_that_there_is_is_of_that(monkeypatch):
    bucket = ManifestBucket(monkeypatch)
    asyncio.run(bucket.write(partitions=1))
    asyncio.run(bucket.write(12, stream="s-partition-0"))
    assert begun("12:3") == {"s-partition-0": f"12:3@{INCARNATION}"}


ANEW = UUID(int=77)


def reading(**given):
    return EventStreamReader(options(**given), StructType())


def test_a_checkpoint_does_not_go_on_in_another_clusters_stream_of_the_same_name(monkeypatch):
    bucket = ManifestBucket(monkeypatch)
    asyncio.run(bucket.write(11))
    reader, lax = reading(), reading(failOnDataLoss="false")
    start = reader.latestOffset(reader.initialOffset(), ALL)
    assert start == {"s": f"12:0@{INCARNATION}"}
    # The cluster is built anew, and its ids begin at 0.
    bucket = ManifestBucket(monkeypatch)
    asyncio.run(bucket.write(0, 1, 2, incarnation=ANEW))
    for more in ([], [11, 12, 13]):
        asyncio.run(bucket.write(*more, incarnation=ANEW))
        with pytest.raises(RefusedError, match=f"made anew.*{ANEW}.*{INCARNATION} up to 12:0"):
            reader.latestOffset(start, ALL)
        end = lax.latestOffset(start, ALL)
        assert end == {"s": f"{more[-1] + 1 if more else 3}:0@{ANEW}"}
        assert [one for one, _, _ in planned(start, end, failOnDataLoss="false")] == [
            *range(3),
            *more,
        ]
        with pytest.raises(RefusedError, match="made anew"):
            planned(start, end)
    # Both stand at one position, and nothing of this one was read.
    end = {"s": f"12:0@{ANEW}"}
    assert [one for one, _, _ in planned(start, end, failOnDataLoss="false")] == [0, 1, 2, 11]
    # What was begun of the one before is gone; in a batch without it nothing is.
    begun_before = ({"s": f"11:4@{INCARNATION}"}, start)
    assert planned(*begun_before, failOnDataLoss="false") == []
    with pytest.raises(RefusedError, match="made anew"):
        planned(*begun_before)
    assert planned(start, start) == []


def test_what_was_begun_without_an_incarnation_goes_on_with_one(monkeypatch):
    bucket = ManifestBucket(monkeypatch)
    asyncio.run(bucket.write(11, 12))
    start, end = {"s": "11:4"}, {"s": f"13:0@{INCARNATION}"}
    assert reading().latestOffset(start, ALL) == end
    assert planned(start, end) == [(11, 4, 9), (12, 0, 9)]
    assert planned({"s": "13:0"}, end) == []
    # One that had nothing yet has lost nothing.
    assert reading().latestOffset({"s": f"0:0@{ANEW}"}, ALL) == end


@pytest.mark.parametrize("mode", ["service", "auto"])
def test_readers_of_another_cluster_are_not_taken_for_those_before(monkeypatch, mode):
    there = served((0, 5, 50, True), (3, 10, 0, False))._replace(incarnation=ANEW)
    starts = ({"s": f"12:345@{INCARNATION}"}, {"s": f"3:10@{INCARNATION}"})
    serving(monkeypatch, there)
    end = {"s": f"3:10@{ANEW}"}
    for start in starts:
        with pytest.raises(RefusedError, match="made anew"):
            reading(readMode=mode).latestOffset(start, ALL)
        assert reading(readMode=mode, failOnDataLoss="false").latestOffset(start, ALL) == end
        with pytest.raises(RefusedError, match="made anew"):
            reading(readMode=mode).partitions(start, end)


@pytest.mark.parametrize("mode", ["service", "auto"])
def test_what_was_there_at_first_is_no_bound_of_a_stream_that_was_made_anew_since(
    monkeypatch, mode
):
    # The bucket hears of the new one later.
    asyncio.run(ManifestBucket(monkeypatch).write(12))
    serving(monkeypatch, served((12, 10, 100, True))._replace(incarnation=INCARNATION))
    query = reading(readMode=mode, failOnDataLoss="false")
    query.prepareForTriggerAvailableNow()
    serving(monkeypatch, served((20, 10, 100, True))._replace(incarnation=ANEW))
    end = query.latestOffset({"s": f"12:4@{INCARNATION}"}, ALL)
    # None of its positions, of which the next run would say that it was made anew once more.
    assert end == {"s": f"0:0@{ANEW}"}
    assert query.partitions({"s": f"12:4@{INCARNATION}"}, end) == []
    assert query.latestOffset(end, ALL) == end, "what came since is the next run's"
    again = reading(readMode="service").latestOffset(end, ALL)
    assert again == {"s": f"21:0@{ANEW}"}
    assert len(reading(readMode="service").partitions(end, again)) == 1
