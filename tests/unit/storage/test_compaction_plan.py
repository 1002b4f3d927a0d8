"""Which logs go and when (checklist D40 to D46).

"The default minor compaction threshold is 0.2, the major one 0.8; minor every hour, major every
day. If either the threshold or interval is set to less than or equal to zero, compaction is
disabled."
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierlog.runtime.settings import StorageSettings
from tierlog_ingest.storage.compaction.compaction_plan import (
    LogUse,
    Rule,
    Rules,
    Trigger,
    below,
    due,
    for_space,
    without_live_ledgers,
)
from tierlog_ingest.storage.entrylog.entry_log_format import LOG_HEADER_LEN
from tierlog_ingest.storage.space import Level

HOUR_S, DAY_S = 3600, 86400
RULES = Rules.of(StorageSettings())


def use(log_id, live, garbage, *, ended=True):
    return LogUse(
        log_id=log_id, length=LOG_HEADER_LEN + live + garbage, ended=ended, live_bytes=live
    )


def done(*, minor=0.0, major=0.0):
    return {Trigger.MINOR: minor, Trigger.MAJOR: major, Trigger.SPACE: 0.0}


@pytest.mark.covers("D42", "D43", "D44", "D45")
def test_defaults():
    assert RULES.minor == Rule(threshold=0.2, interval_s=HOUR_S)
    assert RULES.major == Rule(threshold=0.8, interval_s=DAY_S)
    assert RULES.threshold(Trigger.MINOR) == 0.2
    assert RULES.threshold(Trigger.MAJOR) == 0.8


@pytest.mark.covers("D40")
@pytest.mark.parametrize(
    ("now_s", "done_s", "trigger"),
    [
        (HOUR_S - 1, done(), None),
        (HOUR_S, done(), Trigger.MINOR),
        (2 * HOUR_S - 1, done(minor=HOUR_S), None),
        (2 * HOUR_S, done(minor=HOUR_S), Trigger.MINOR),
        (DAY_S - 1, done(minor=DAY_S - 2), None),
        (DAY_S, done(minor=DAY_S - 2), Trigger.MAJOR),
        (DAY_S + HOUR_S, done(minor=DAY_S, major=DAY_S), Trigger.MINOR),
    ],
)
def test_when(now_s, done_s, trigger):
    assert due(RULES, now_s=now_s, done_s=done_s) is trigger


@pytest.mark.covers("D46")
@pytest.mark.parametrize("threshold", [0.0, -1.0, 0.5])
@pytest.mark.parametrize("interval_s", [0.0, -5.0, 10.0])
def test_zero_or_less_switches_off(threshold, interval_s):
    rule = Rule(threshold=threshold, interval_s=interval_s)
    off = Rule(threshold=0, interval_s=0)
    is_on = threshold > 0 and interval_s > 0
    assert rule.enabled is is_on
    now = {"now_s": 10**9, "done_s": done()}
    assert due(Rules(minor=rule, major=off), **now) is (Trigger.MINOR if is_on else None)
    assert due(Rules(minor=off, major=rule), **now) is (Trigger.MAJOR if is_on else None)
    for level in Level:
        threshold = Rules(minor=rule, major=off).threshold(Trigger.SPACE, level)
        assert (threshold > 0) is is_on, "also for want of space"


@pytest.mark.covers("D41")
def test_the_share_of_live_ledgers_decides():
    logs = [use(1, 199, 801), use(2, 200, 800), use(3, 799, 201), use(4, 800, 200), use(5, 100, 0)]
    assert below(logs, threshold=0.2) == [1]
    assert below(logs, threshold=0.8) == [1, 2, 3], "the cheapest gain first"
    assert below(logs, threshold=1.0) == [1, 2, 3, 4], "a log without garbage is never copied"
    assert below(logs, threshold=0) == []
    assert below(logs, threshold=0.2, besides={5}) == [1, 5], "but those that are unsettled"


def test_logs_that_are_written_to_are_left_alone():
    logs = [use(1, 1, 999, ended=False), use(2, 0, 1000, ended=False)]
    assert below(logs, threshold=1) == []
    assert without_live_ledgers(logs) == []


@pytest.mark.covers("D26")
def test_without_live_ledgers():
    assert without_live_ledgers([use(1, 0, 500), use(2, 1, 500), use(3, 0, 0)]) == [1, 3]
    assert below([use(1, 0, 500)], threshold=1) == [], "there is nothing to copy"


def test_for_space_the_least_copying_that_fits():
    logs = [use(1, 500, 500), use(2, 300, 100), use(3, 400, 5000), use(4, 10, 0)]
    assert for_space(logs, threshold=0.95, copy_bytes_max=10_000) == 2
    assert for_space(logs, threshold=0.6, copy_bytes_max=10_000) == 3
    assert for_space(logs, threshold=0.95, copy_bytes_max=logs[1].copy_bytes) == 2
    assert for_space(logs, threshold=0.95, copy_bytes_max=logs[1].copy_bytes - 1) is None
    assert for_space([], threshold=0.95, copy_bytes_max=10) is None


def test_how_much_is_done_for_space():
    assert RULES.threshold(Trigger.SPACE, Level.WARNING) == 0.8
    assert RULES.threshold(Trigger.SPACE, Level.READ_ONLY) == 0.95


sizes = st.integers(0, 10**6)
uses = st.lists(
    st.builds(use, st.integers(1, 50), sizes, sizes, ended=st.booleans()),
    unique_by=lambda one: one.log_id,
)


@given(uses, st.floats(0, 1), st.sets(st.integers(1, 50)), sizes)
def test_what_is_chosen(logs, threshold, besides, room):
    by_id = {one.log_id: one for one in logs}
    chosen = below(logs, threshold=threshold, besides=besides)
    assert len(chosen) == len(set(chosen))
    for log_id, log in by_id.items():
        share = log.live_bytes / max(1, log.length - LOG_HEADER_LEN)
        wanted = log.live_bytes < log.length - LOG_HEADER_LEN and share < threshold
        assert (log_id in chosen) == (
            log.ended and log.live_bytes > 0 and (wanted or log_id in besides)
        )
    assert not set(chosen) & set(without_live_ledgers(logs))
    picked = for_space(logs, threshold=threshold, copy_bytes_max=room)
    if picked is not None:
        assert by_id[picked].garbage_bytes > 0
        assert by_id[picked].live_bytes <= room
