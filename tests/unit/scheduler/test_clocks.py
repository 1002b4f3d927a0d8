"""Time that is past for sure: never early, never stopped, whatever the wall clock does."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierlog.adapters.memory.clock import SimClock
from tierlog.format import records
from tierlog.model.offload import ClockSample, SchedulerProgress
from tierlog_scheduler.clocks import (
    JUMP_MS,
    PARTS,
    SAMPLE_AGAIN_MS,
    SAMPLES_MAX,
    History,
    Now,
    Timekeeper,
)

HOUR = 3600.0
MS_PER_H = 3_600_000
STEP_S = 10.0


def begun(clock: SimClock, progress: SchedulerProgress | None = None) -> Timekeeper:
    keeper = Timekeeper(clock)
    keeper.begin(progress or SchedulerProgress())
    return keeper


def pass_time(clock: SimClock, keeper: Timekeeper, seconds: float) -> Now:
    """Let passes of a leader follow each other for so long."""
    now = keeper.now()
    for _ in range(round(seconds / STEP_S)):
        clock.advance(STEP_S)
        now = keeper.now()
    return now


steps = st.lists(
    st.tuples(
        st.integers(1, 3000),
        st.sampled_from([0.0, 0.0, 0.0, 5 * HOUR, -5 * HOUR, 1.0, -1.0, 100 * HOUR, -30.0]),
        st.booleans(),
    ),
    min_size=1,
    max_size=60,
)


@given(steps)
def test_no_stamp_is_taken_for_older_than_it_is(given_steps):
    clock = SimClock()
    keeper = begun(clock)
    stamps: list[tuple[int, float]] = []
    true_s = jumps = 0.0
    for step_s, jump_s, stamped in given_steps:
        if stamped:
            stamps.append((clock.wall_ms(), true_s))
        clock.advance(step_s)
        true_s += step_s
        # Small steps back are not told apart from slewing; each may cost so much.
        jumps += 1 if jump_s else 0
        clock.jump_wall(jump_s)
        now = keeper.now()
        assert now.progress_ms <= true_s * 1000
        for stamp_ms, at_s in stamps:
            sure_ms = now.surely_since(stamp_ms)
            assert sure_ms <= (true_s - at_s) * 1000 + jumps * JUMP_MS


@pytest.mark.parametrize("jump_s", [5 * HOUR, -5 * HOUR])
@pytest.mark.parametrize("at_h", [0, 1, 6, 23])
def test_a_jump_of_five_hours_neither_hastens_nor_stops(jump_s, at_h):
    clock = SimClock()
    keeper = begun(clock)
    pass_time(clock, keeper, 2 * HOUR)
    stamp_ms, seen_ms = clock.wall_ms(), keeper.now().progress_ms
    pass_time(clock, keeper, at_h * HOUR)
    clock.jump_wall(jump_s)
    now = pass_time(clock, keeper, (24 - at_h) * HOUR)
    lost_ms = SAMPLE_AGAIN_MS + 2 * STEP_S * 1000
    # A leader that saw it loses the step of the jump alone.
    sure_ms = now.surely_since(stamp_ms, seen_ms=seen_ms)
    assert 24 * MS_PER_H - STEP_S * 1000 <= sure_ms <= 24 * MS_PER_H
    # The next one can't tell which of two times a clock that was set back has meant.
    twice_ms = 5 * MS_PER_H if jump_s < 0 and at_h * HOUR < -jump_s else 0
    sure_ms = now.surely_since(stamp_ms)
    assert 24 * MS_PER_H - lost_ms - twice_ms <= sure_ms <= 24 * MS_PER_H
    later_ms = clock.wall_ms()
    now = pass_time(clock, keeper, 3 * HOUR)
    assert 3 * MS_PER_H - lost_ms <= now.surely_since(later_ms) <= 3 * MS_PER_H


def test_what_may_come_early_believes_the_larger_clock():
    now = Now(wall_ms=1000, progress_ms=700)
    assert now.at_most_since(400) == 600
    assert now.at_most_since(900, seen_ms=100) == 600
    assert now.at_most_since(5000) == 0


def test_time_without_a_leader_does_not_count_and_the_rest_outlives_it():
    clock = SimClock()
    keeper = begun(clock)
    stamp_ms = clock.wall_ms()
    now = pass_time(clock, keeper, 10 * HOUR)
    kept = SchedulerProgress(progress_ms=now.progress_ms, samples=now.history.samples)
    assert records.decode_progress(records.encode_progress(kept)) == kept
    clock.advance(100 * HOUR)
    away_ms = clock.wall_ms() - 50 * MS_PER_H
    second = begun(clock, kept)
    now = pass_time(clock, second, 2 * HOUR)
    slack_ms = SAMPLE_AGAIN_MS + 2 * STEP_S * 1000
    assert 12 * MS_PER_H - slack_ms <= now.surely_since(stamp_ms) <= 12 * MS_PER_H
    # Sealed while nobody led: since the next leader began, at the latest.
    assert 2 * MS_PER_H - slack_ms <= now.surely_since(away_ms) <= 2 * MS_PER_H


def test_without_samples_everything_waits_anew():
    clock = SimClock()
    old_ms = clock.wall_ms() - 1000 * MS_PER_H
    keeper = begun(clock)
    assert keeper.now().surely_since(old_ms) == 0
    now = pass_time(clock, keeper, HOUR)
    assert now.surely_since(old_ms) == MS_PER_H
    assert Now(wall_ms=clock.wall_ms(), progress_ms=5).surely_since(old_ms) == 0


def test_a_stamp_of_a_clock_that_is_ahead_is_not_past():
    clock = SimClock()
    keeper = begun(clock)
    now = pass_time(clock, keeper, HOUR)
    assert now.surely_since(clock.wall_ms() + MS_PER_H) == 0
    assert now.surely_since(clock.wall_ms() - MS_PER_H // 2, seen_ms=now.progress_ms - 5) == 5


@pytest.mark.parametrize("jump_s", [0.0, 100.0])
def test_samples_are_bounded_and_months_are_known_within_a_64th(jump_s):
    clock = SimClock()
    keeper = begun(clock)
    stamps = []
    count, step_s = 120 * 24 * 6, 600.0
    for number in range(count):
        if number % 997 == 0:
            clock.jump_wall((-1) ** number * jump_s)
        now = keeper.now()
        stamps.append((clock.wall_ms(), number))
        clock.advance(step_s)
        assert len(now.history.samples) <= SAMPLES_MAX
    now = keeper.now()
    for stamp_ms, number in stamps[::101]:
        true_ms = (count - number) * step_s * 1000
        sure_ms = now.surely_since(stamp_ms)
        assert sure_ms <= true_ms
        assert sure_ms >= true_ms * (1 - 1.1 / PARTS) - 2 * SAMPLE_AGAIN_MS - 2 * jump_s * 1000


def test_a_clock_that_jumps_all_the_time_makes_nothing_older():
    clock = SimClock()
    keeper = begun(clock)
    stamps = []
    for number in range(3000):
        clock.jump_wall((-1) ** number * 100.0)
        stamps.append((clock.wall_ms(), number))
        now = keeper.now()
        assert len(now.history.samples) <= SAMPLES_MAX
        clock.advance(700)
    now = keeper.now()
    assert all(now.surely_since(ms) <= (3000 - number) * 700_000 for ms, number in stamps)


@given(
    st.lists(st.integers(0, 10**6), min_size=1, max_size=30, unique=True),
    st.integers(-10, 10**6 + 10),
)
def test_the_quick_way_finds_what_the_long_one_does(walls, stamp_ms):
    samples = [ClockSample(wall, number) for number, wall in enumerate(sorted(walls))]
    now = ClockSample(10**6 + 5, len(samples))
    history = History(samples)
    assert history.latest(stamp_ms, now) == history._latest_of_all(stamp_ms, now)
