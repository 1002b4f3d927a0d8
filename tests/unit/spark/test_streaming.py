"""What a batch of a streaming read refuses: entries that were trimmed unread, readers that lag."""

import pytest

from tierlog.model.errors import Reason, RefusedError
from tierlog.model.ids import EntryId, LedgerId, StreamName
from tierlog.model.position import Position
from tierlog.ports.reads import ServedLedger
from tierlog_spark.offsets import BEGINNING
from tierlog_spark.planning import Range
from tierlog_spark.service import ListedStream, readable_of_served
from tierlog_spark.streaming import check_served


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


def test_what_is_empty_by_now_has_its_end_where_it_was_trimmed():
    empty = served(trimmed=at(12, 5))
    check_served(empty, Range(start=at(12, 5), end=at(13, 0)), fail_on_data_loss=True)
    with pytest.raises(RefusedError, match="ends at 13:0"):
        check_served(empty, Range(start=at(13, 0), end=at(14, 0)), fail_on_data_loss=True)


def test_entries_of_an_open_ledger_are_taken_to_be_as_long_as_those_before():
    assert [one.length for one in STREAM.ledgers] == [40, 30]
