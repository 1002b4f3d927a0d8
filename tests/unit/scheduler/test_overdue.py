"""What is late for tier 2 is so by its stream's policy, and not by its age alone."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.offload.gates import OpenGate
from tests.unit.offload.scrubs import runner
from tests.unit.offload.world import STREAM, World
from tests.unit.scheduler.test_policy import ledger, stream
from tests.unit.scheduler.test_scheduler import ENTRIES, scheduler
from tierlog.model.ids import LedgerId, StreamName
from tierlog.model.offload import OffloadState
from tierlog.model.policy import CLUSTER_DEFAULT, HOUR_MS, NEVER, Policy
from tierlog.offload.messages import Trigger
from tierlog_scheduler.clocks import Now
from tierlog_scheduler.metrics import AGE, OVERDUE, SchedulerCollector
from tierlog_scheduler.policy import OffloadLag, offload_lag, wanted_ledgers

DAILY = Policy(offload_time_ms=24 * HOUR_MS)
S = OffloadState


def after(hours: float) -> Now:
    """Return the time so long after ledgers were opened."""
    return Now(wall_ms=round(hours * HOUR_MS), progress_ms=round(hours * HOUR_MS))


def sealed(number=1, *, hours=4.0, **more):
    """Return a ledger that was closed so long after it was opened."""
    return ledger(number, closed_ms=round(hours * HOUR_MS), **more)


@pytest.mark.parametrize(
    ("views", "policy", "hours", "overdue_hours"),
    [
        ((sealed(),), DAILY, 25, 0),
        ((sealed(),), DAILY, 28, 0),
        ((sealed(),), DAILY, 35, 7),
        ((sealed(hours=0.5),), DAILY, 25, 0.5),
        ((sealed(state=S.OFFLOADING),), DAILY, 35, 7),
        ((replace(sealed(), context=None),), DAILY, 35, 7),
        ((sealed(1, state=S.COMPLETE), sealed(2)), DAILY, 30, 2),
        # An owner that does not seal hides nothing.
        ((ledger(1, is_open=True),), DAILY, 28, 0),
        ((ledger(1, is_open=True),), DAILY, 35, 7),
        ((sealed(state=S.COMPLETE),), DAILY, 999, 0),
        ((), DAILY, 999, 0),
    ],
)
def test_it_is_late_once_it_was_sealed_for_longer_than_the_offload_time(
    views, policy, hours, overdue_hours
):
    lag = offload_lag(stream(*views, policy=policy), after(hours))
    assert lag.overdue_ms == overdue_hours * HOUR_MS
    assert lag.unbounded_age_ms == 0


@pytest.mark.parametrize(
    ("size", "overdue_hours"), [(301, 0), (300, 4), (201, 4), (200, 6), (100, 9), (1, 9), (0, 9)]
)
def test_by_size_it_is_late_since_so_much_waited(size, overdue_hours):
    views = (sealed(1, hours=1), sealed(2, hours=4), sealed(3, hours=6))
    view = stream(*views, ledger(4, is_open=True), policy=Policy(offload_size_bytes=size))
    lag = offload_lag(view, after(10))
    assert lag.overdue_ms == overdue_hours * HOUR_MS
    assert lag.unbounded_age_ms == (0 if overdue_hours else 10 * HOUR_MS)


def test_a_time_bounds_what_a_size_does_not():
    policy = Policy(offload_size_bytes=10**9, offload_time_ms=HOUR_MS)
    lag = offload_lag(stream(sealed(), policy=policy), after(11))
    assert (lag.overdue_ms, lag.unbounded_age_ms) == (6 * HOUR_MS, 0)
    never = replace(policy, offload_time_ms=NEVER)
    lag = offload_lag(stream(sealed(), policy=never), after(11))
    assert (lag.overdue_ms, lag.unbounded_age_ms) == (0, 11 * HOUR_MS)


def test_what_an_admin_paused_is_not_late_and_has_no_bound():
    lag = offload_lag(stream(sealed(), policy=DAILY, paused=True), after(99))
    assert (lag.overdue_ms, lag.unbounded_age_ms) == (0, 99 * HOUR_MS)


def test_what_stands_as_it_was_known_becomes_late_meanwhile():
    lag = offload_lag(stream(sealed(), policy=DAILY), after(25))
    assert lag.aged(2 * HOUR_MS).overdue_ms == 0
    assert lag.aged(10 * HOUR_MS).overdue_ms == 7 * HOUR_MS
    nothing = OffloadLag(age_ms=0, length=0, ledgers=0, due_in_ms=None)
    assert nothing.aged(HOUR_MS) == nothing


views = st.lists(
    st.tuples(st.sampled_from([S.LOCAL, S.OFFLOADING, S.COMPLETE]), st.integers(0, 9)), max_size=5
)
limits = st.none() | st.integers(0, 9)


@given(views, limits, limits, st.booleans())
def test_something_is_due_when_it_is_wanted(found, offload_time_ms, size, is_open):
    ledgers = [
        ledger(number, state=state, length=closed_ms, closed_ms=closed_ms)
        for number, (state, closed_ms) in enumerate(found)
    ]
    policy = Policy(
        offload_time_ms=offload_time_ms, offload_size_bytes=size, ledger_age_ms_max=10
    ).over(CLUSTER_DEFAULT)
    view = stream(*ledgers, *([ledger(99, is_open=True)] if is_open else []), policy=policy)
    now = Now(wall_ms=10, progress_ms=0)
    lag = offload_lag(view, now)
    wanted = wanted_ledgers(view, now)
    if not is_open or offload_time_ms != 0:  # else it should have been sealed just now
        assert (lag.due_in_ms is not None and lag.due_in_ms <= 0) is bool(wanted)
    if not wanted:
        assert lag.overdue_ms == 0
    if Trigger.TIME in wanted.values():
        assert lag.overdue_ms >= max(
            10 - one.listed.closed_ms - (offload_time_ms or 0)
            for one in ledgers
            if wanted.get(one.listed.ledger_id) is Trigger.TIME
        )


async def test_who_is_late_is_told_beside_who_has_time():
    world = World()
    late = StreamName("late")
    for name, hours in ((STREAM, 24), (late, 1)):
        claimed = await world.stream(name, policy=Policy(offload_time_ms=hours * HOUR_MS))
        await world.seal(claimed, ENTRIES)
    leader = scheduler(world, manifests=OpenGate())
    await leader.begin()
    leader.leading = True
    world.clock.advance(8 * 3600)
    await leader.run_pass()
    assert leader.lags[STREAM].ledgers == 1
    collector = SchedulerCollector(leader, OpenGate(), runner(world), streams_max=1)
    found = {one.name: one.samples for one in collector.collect()}
    assert found[f"tierlog_{AGE}"][0].value == pytest.approx(8 * 3600, abs=60)
    assert found[f"tierlog_{OVERDUE}"][0].value == pytest.approx(7 * 3600, abs=60)
    assert found["tierlog_offload_unbounded_age_seconds"][0].value == 0
    (sample,) = found[f"tierlog_stream_{OVERDUE}"]
    assert sample.labels == {"stream": late}
    assert sample.value == pytest.approx(7 * 3600, abs=60)


async def test_a_stream_that_is_being_deleted_is_late_for_nothing():
    world = World()
    claimed = await world.stream(policy=Policy(offload_time_ms=0))
    ledger_id = await world.seal(claimed, ENTRIES)
    await world.catalog().streams.pause_offload(STREAM)
    await world.catalog().retention.begin_stream_deletion(STREAM)
    leader = scheduler(world, manifests=OpenGate())
    await leader.begin()
    await leader.run_pass()
    (view,) = leader.mirror.streams[STREAM].views
    assert view.listed.ledger_id == LedgerId(ledger_id)
    assert leader.lags == {}
