"""What is said to happen is what happens: for people, from the functions that decide."""

from collections.abc import Iterator
from dataclasses import replace
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.scheduler.test_policy import DELAYS, doubtful, ledger, place, saw, stream
from tierlog.model.ids import LedgerId
from tierlog.model.offload import AbandonedAttempt, CopySeen, LedgerSample, OffloadState
from tierlog.model.policy import HOUR_MS, Policy
from tierlog_scheduler import retention
from tierlog_scheduler.clocks import History, Now
from tierlog_scheduler.explain import What, explain
from tierlog_scheduler.policy import (
    DeleteTier1,
    LedgerView,
    RequestOffload,
    SweepAbandoned,
    decide,
    offload_lag,
)

HISTORY = History([LedgerSample(LedgerId(1000), 5)])
NOW = Now(wall_ms=1_000_000, progress_ms=1_000_000, history=HISTORY)
S = OffloadState


def steps(view, now=NOW):
    return {(one.ledger_id, one.what): one for one in explain(view, now, DELAYS)}


def test_times_are_those_of_the_thresholds():
    view = stream(
        ledger(1, state=S.COMPLETE, closed_ms=900_000, timestamp_ms=950_000),
        ledger(2, closed_ms=990_000),
        ledger(3, is_open=True),
        policy=Policy(
            offload_time_ms=60_000,
            deletion_lag_ms=100_000,
            retention_time_ms=1_500_000,
            ledger_age_ms_max=1_500_000,
        ),
        complete_seen=saw(950_000),
        closed_seen_ms={LedgerId(1): 1},
    )
    found = steps(view)
    assert found[1, What.DELETE_LOCAL].in_ms == 50_000
    assert found[1, What.TRIM].in_ms == 500_001
    assert found[2, What.OFFLOAD].in_ms == 50_000
    assert found[3, What.SEAL].in_ms == 500_000
    assert (1, What.OFFLOAD) not in found
    assert (3, What.TRIM) not in found


def test_a_long_list_is_not_gone_through_for_each_ledger_that_waits():
    """A leader that is asked decides about no stream as long as that takes."""
    rounds = 0

    class Counted(list[LedgerView]):
        def __iter__(self) -> Iterator[LedgerView]:
            nonlocal rounds
            rounds += 1
            return super().__iter__()

    counts = []
    for count in (1, 100):
        waiting = Counted([ledger(one, closed_ms=1) for one in range(count)])
        view = replace(stream(policy=Policy(offload_size_bytes=10**9)), ledgers=waiting)
        rounds = 0
        assert f"once {10**9 - 100 * count} more" in steps(view)[0, What.OFFLOAD].why
        counts.append(rounds)
    assert counts[0] == counts[1]


def test_why_nothing_happens_is_said():
    alone = steps(stream(ledger(1, closed_ms=1)))
    assert alone[1, What.OFFLOAD].in_ms is None
    assert "no level sets" in alone[1, What.OFFLOAD].why
    assert "no limit" in alone[1, What.TRIM].why
    held = stream(ledger(1), policy=Policy(offload_time_ms=1, retention_size_bytes=0))
    assert steps(held)[1, What.TRIM].why == "it is to be offloaded first"
    paused = replace(held, paused=True)
    assert "paused" in steps(paused)[1, What.OFFLOAD].why
    assert "paused" in steps(paused)[1, What.TRIM].why
    second = stream(ledger(1), ledger(2, state=S.COMPLETE), policy=held.policy)
    assert "only a prefix" in steps(second)[2, What.TRIM].why
    size = steps(stream(ledger(1, length=30), policy=Policy(offload_size_bytes=100)))
    assert "70 more bytes" in size[1, What.OFFLOAD].why
    never = stream(ledger(1, state=S.COMPLETE), policy=Policy(deletion_lag_ms=-1))
    assert steps(never)[1, What.DELETE_LOCAL].in_ms is None
    trimmed = steps(stream(trimmed={LedgerId(7): None}))
    assert trimmed[7, What.CLEAN].in_ms == 0


kinds = st.lists(
    st.tuples(
        st.sampled_from([one for one in S if one is not S.TRIMMING]),
        st.integers(0, 3),
        st.integers(0, 1_000_000),
        st.booleans(),
    ),
    max_size=7,
)
values = st.none() | st.integers(1, 1_200_000)


@given(kinds, values, values, values, st.none() | st.integers(0, 9), st.booleans())
def test_what_is_due_now_is_what_is_decided(found, offload, lag, keep, size, paused):
    views = [
        ledger(number, state=state, length=length, closed_ms=closed_ms, timestamp_ms=closed_ms)
        for number, (state, length, closed_ms, _) in enumerate(found)
    ]
    seen: dict[LedgerId, CopySeen] = {}
    for number, one in enumerate(found):
        seen |= saw(one[2], number) if one[3] else {}
    policy = Policy(
        offload_time_ms=offload if keep is None or offload is None else min(offload, keep - 1),
        deletion_lag_ms=lag,
        retention_time_ms=keep,
        retention_size_bytes=size,
    )
    view = stream(*views, policy=policy, complete_seen=seen, paused=paused)
    due = {key for key, one in steps(view).items() if one.in_ms == 0}
    decided: set[tuple[int, What]] = set()
    for action in decide(view, NOW, DELAYS):
        if isinstance(action, RequestOffload):
            decided.add((action.ledger_id, What.OFFLOAD))
        elif isinstance(action, DeleteTier1):
            decided.add((action.context.ledger_id, What.DELETE_LOCAL))
    for step in retention.decide(view, NOW, DELAYS):
        if isinstance(step, retention.BeginTrim):
            decided |= {(ledger_id, What.TRIM) for ledger_id in step.ledger_ids}
    assert due == decided


def test_what_keeps_a_local_copy_beside_a_damaged_one_is_said_with_what_helps():
    view = stream(
        doubtful(ledger(1, state=S.COMPLETE)),
        policy=Policy(deletion_lag_ms=0),
        complete_seen=saw(0),
    )
    step = steps(view)[1, What.DELETE_LOCAL]
    assert step.in_ms is None
    assert "found damaged: damaged-data: grain 3" in step.why
    assert "tierlog scrub --repair --deep" in step.why


def test_leftovers_are_told():
    attempt = AbandonedAttempt(uuid=UUID(int=9), location=place(1), abandoned_ms=0)
    found = steps(stream(ledger(1, abandoned=(attempt,))))
    assert found[1, What.CLEAN].in_ms == 0


@pytest.mark.parametrize("trimmed", [False, True])
def test_when_leftovers_are_swept_is_when_it_is_said(trimmed):
    attempt = AbandonedAttempt(uuid=UUID(int=9), location=place(1), abandoned_ms=0, swept_ms=5)
    one = ledger(1, state=S.TRIMMING if trimmed else S.LOCAL, abandoned=(attempt,))
    assert one.context is not None
    left = replace(one.context, bookkeeper_deleted=True)
    listed = [] if trimmed else [one]
    view = stream(
        *listed,
        trimmed={LedgerId(1): left} if trimmed else {},
        swept_seen_ms={attempt.uuid: NOW.progress_ms},
    )
    wait_ms = steps(view)[1, What.CLEAN].in_ms
    assert wait_ms == DELAYS.sweep_ms(view.block_size(LedgerId(1)))
    for later_ms, sweeps in ((wait_ms - 1, 0), (wait_ms, 1)):
        then = replace(NOW, progress_ms=NOW.progress_ms + later_ms)
        found = [*decide(view, then, DELAYS), *retention.decide(view, then, DELAYS)]
        assert len([one for one in found if isinstance(one, SweepAbandoned)]) == sweeps
        assert steps(view, then)[1, What.CLEAN].in_ms == wait_ms - later_ms
    paused = steps(replace(view, paused=True))[1, What.CLEAN]
    assert paused.in_ms == (None if trimmed else wait_ms), "attempts are swept all the same"


@pytest.mark.parametrize(
    ("views", "age_ms"),
    [
        ((), 0),
        ((ledger(1, state=S.TIER1_DELETED),), 0),
        ((ledger(1, state=S.COMPLETE), ledger(2)), 1_000_000),
        ((ledger(1, is_open=True),), 1_000_000),
        ((replace(ledger(1), context=None),), 1_000_000),
    ],
)
def test_the_age_of_the_oldest_byte_is_that_of_its_ledger(views, age_ms):
    assert offload_lag(stream(*views), NOW).age_ms == age_ms


@pytest.mark.parametrize("is_open", [False, True])
def test_an_age_that_leaders_saw_is_not_hidden_by_a_clock(is_open):
    """The owner's clock was five hours ahead, or the leader's went back by as much."""
    at = Now(wall_ms=10**9, progress_ms=10**9)
    one = ledger(2, is_open=is_open)
    one = replace(one, listed=replace(one.listed, opened_ms=at.wall_ms))
    assert offload_lag(stream(one), at).age_ms == 0
    ago_ms = at.progress_ms - 5 * HOUR_MS
    now = replace(at, history=History([LedgerSample(LedgerId(2), ago_ms)]))
    assert offload_lag(stream(one), now).age_ms == 5 * HOUR_MS
    # Without samples of that time: since when it was seen closed.
    seen = stream(one, closed_seen_ms={LedgerId(2): ago_ms})
    assert offload_lag(seen, at).age_ms == 5 * HOUR_MS


def test_what_is_not_in_tier_2_is_counted_in_bytes_and_ledgers():
    views = (ledger(1, state=S.COMPLETE), ledger(2), ledger(3, state=S.OFFLOADING))
    lag = offload_lag(stream(*views, ledger(4, is_open=True)), NOW)
    assert lag.ledgers == 3
    assert lag.length == sum(one.listed.length for one in views[1:]) > 0
