"""Roll-over by size, entries and age (protocols.md section 1), decided purely."""

import pytest

from tierlog.format.frame import pack_entries
from tierlog_ingest.streams.rollover import LedgerFill, LedgerLimits, fitting, is_due

LIMITS = LedgerLimits(bytes_max=100, entries_max=10, age_ms_max=5000)


def fill(entry_count=1, length=0, age_s=0.0):
    return LedgerFill(entry_count=entry_count, length=length, age_s=age_s)


@pytest.mark.parametrize(
    ("state", "due"),
    [
        (fill(), False),
        (fill(9, 99, 4.9), False),
        (fill(10), True),
        (fill(1, 100), True),
        (fill(1, 0, 5.0), True),
        (fill(0, 0, 4.9), False),
    ],
)
@pytest.mark.covers("D09")
def test_a_ledger_is_due_at_any_of_its_limits(state, due):
    assert is_due(state, LIMITS, waits=False) is due
    assert is_due(state, LIMITS, waits=True) is due


def test_an_empty_one_is_due_by_its_age_but_not_before_an_append_that_waits():
    assert is_due(fill(0, 0, 5.0), LIMITS, waits=False)
    assert not is_due(fill(0, 0, 50.0), LIMITS, waits=True)


def fit(state, *sizes):
    frames, offsets = pack_entries([b"x" * size for size in sizes])
    return fitting(state, LIMITS, offsets, len(frames))


def test_entries_fit_up_to_the_one_that_reaches_the_size():
    assert fit(fill(0), 40, 40, 40, 40) == 3
    assert fit(fill(0), 50, 50, 1) == 2
    assert fit(fill(1, 60), 39, 1, 1) == 2
    assert fit(fill(1, 99), 0, 0, 5, 5) == 3
    assert fit(fill(0), 1000, 1) == 1
    assert fit(fill(0), 40, 40) == 2


def test_entries_fit_up_to_their_number():
    assert fit(fill(8), 1, 1, 1) == 2
    assert fit(fill(10), 1) == 0
    assert fit(fill(0), *[1] * 12) == 10
