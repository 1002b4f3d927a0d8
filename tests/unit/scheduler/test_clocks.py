"""Time that is past for sure: never early, never stopped, whatever any wall clock does."""

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierlog.adapters.memory.clock import SimClock
from tierlog.format.progress import decode_progress, encode_progress
from tierlog.model.errors import CorruptError
from tierlog.model.ids import LedgerId
from tierlog.model.offload import CopySeen, LedgerSample, SchedulerProgress
from tierlog.ports.metadata import REQUEST_BYTES_MAX
from tierlog.proto.v1 import metadata_pb2 as pb
from tierlog_scheduler.clocks import (
    PARTS,
    SAMPLE_AGAIN_MS,
    SAMPLES_MAX,
    History,
    Now,
    Timekeeper,
)
from tierlog_scheduler.scheduler import CHECKPOINT_LEDGERS_MAX

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


jumps = st.sampled_from([0.0, 0.0, 5 * HOUR, -5 * HOUR, 1.0, -1.0, 100 * HOUR, -30.0])
steps = st.lists(st.tuples(st.floats(0.001, 3000), jumps), min_size=1, max_size=60)


@given(steps)
def test_progress_is_never_ahead_and_loses_no_more_than_steps_with_a_jump(given_steps):
    clock = SimClock()
    keeper = begun(clock)
    true_s = lost_s = 0.0
    for step_s, jump_s in given_steps:
        clock.advance(step_s)
        clock.jump_wall(jump_s)
        true_s += step_s
        lost_s += min(step_s, -jump_s) if jump_s < 0 else 0
        progress_ms = keeper.now().progress_ms
        assert progress_ms <= true_s * 1000 + 1
        assert progress_ms >= (true_s - lost_s) * 1000 - len(given_steps) - 1


@pytest.mark.parametrize("jump_s", [5 * HOUR, -5 * HOUR])
@pytest.mark.parametrize("at_h", [0, 1, 6, 23])
def test_a_jump_of_five_hours_neither_hastens_nor_stops(jump_s, at_h):
    clock = SimClock()
    keeper = begun(clock)
    seen_ms = pass_time(clock, keeper, 2 * HOUR).progress_ms
    keeper.note_newest(LedgerId(8))
    pass_time(clock, keeper, at_h * HOUR)
    clock.jump_wall(jump_s)
    now = pass_time(clock, keeper, (24 - at_h) * HOUR)
    for sure_ms in (now.closed_since(seen_ms, None), now.closed_since(None, LedgerId(7))):
        assert 24 * MS_PER_H - STEP_S * 1000 <= sure_ms <= 24 * MS_PER_H


def test_progress_grows_by_the_clock_that_went_less_far():
    """A monotonic clock may be the one that is off, as on a host that was moved while it slept."""
    clock = SimClock()
    keeper = begun(clock)
    for jump_s, progress_ms in ((-STEP_S, 0), (-4.0, 6000), (0.0, 16_000), (5 * HOUR, 26_000)):
        clock.advance(STEP_S)
        clock.jump_wall(jump_s)
        assert keeper.now().progress_ms == progress_ms


def test_what_may_come_early_believes_the_larger_clock():
    now = Now(wall_ms=1000, progress_ms=700)
    assert now.at_most_since(400) == 600
    assert now.at_most_since(900, seen_ms=100) == 600
    assert now.at_most_since(5000) == 0


def test_time_without_a_leader_does_not_count_and_the_rest_outlives_it():
    clock = SimClock()
    keeper = begun(clock)
    keeper.note_newest(LedgerId(3))
    now = pass_time(clock, keeper, 10 * HOUR)
    kept = SchedulerProgress(
        progress_ms=now.progress_ms,
        samples=now.history.samples,
        closed_seen_ms={LedgerId(9): 77},
        complete_seen={
            LedgerId(2): CopySeen(UUID(int=7), 5),
            LedgerId(3): CopySeen(UUID(int=8), 6),
        },
    )
    assert decode_progress(encode_progress(kept)) == kept
    clock.advance(100 * HOUR)
    second = begun(clock, kept)
    second.note_newest(LedgerId(6))
    now = pass_time(clock, second, 2 * HOUR)
    assert now.closed_since(None, LedgerId(3)) == pytest.approx(12 * MS_PER_H, abs=2000)
    # Of what was closed while nobody led it is known since the next leader began.
    assert now.closed_since(None, LedgerId(5)) == pytest.approx(2 * MS_PER_H, abs=2000)
    assert now.closed_since(None, LedgerId(7)) == 0


def test_a_record_from_before_copies_had_their_uuid_is_read_and_lags_begin_anew():
    seen = {LedgerId(2): CopySeen(UUID(int=7), 5)}
    raw = encode_progress(SchedulerProgress(progress_ms=9, complete_seen=seen))
    record = pb.SchedulerProgressRecord.FromString(raw)
    record.complete_uuids = b""
    assert decode_progress(record.SerializeToString()) == SchedulerProgress(progress_ms=9)


@pytest.mark.parametrize("uuids", [b"x", bytes(15), bytes(17), bytes(32)])
def test_a_record_whose_lists_do_not_fit_is_corrupt(uuids):
    seen = {LedgerId(2): CopySeen(UUID(int=7), 5)}
    record = pb.SchedulerProgressRecord.FromString(
        encode_progress(SchedulerProgress(complete_seen=seen))
    )
    record.complete_uuids = uuids
    with pytest.raises(CorruptError):
        decode_progress(record.SerializeToString())
    record.complete_uuids = b""
    record.complete_seen_ms.append(5)
    with pytest.raises(CorruptError):
        decode_progress(record.SerializeToString())


def test_the_largest_checkpoint_fits_a_change_of_the_metadata():
    # Later than any leader's: 2**45 milliseconds are a thousand years.
    ids, late_ms = [LedgerId(2**47 + one) for one in range(CHECKPOINT_LEDGERS_MAX)], 2**45
    largest = SchedulerProgress(
        progress_ms=late_ms,
        complete_seen={one: CopySeen(UUID(int=one), late_ms) for one in ids},
        closed_seen_ms=dict.fromkeys(ids, late_ms),
        samples=tuple(LedgerSample(one, late_ms) for one in ids[:SAMPLES_MAX]),
    )
    assert len(encode_progress(largest)) < REQUEST_BYTES_MAX


def test_without_samples_everything_waits_anew():
    now = Now(wall_ms=10**12, progress_ms=10**9)
    assert now.closed_since(None, LedgerId(3)) == 0
    assert now.closed_since(None, None) == 0
    assert now.closed_since(10**9 - 5, LedgerId(3)) == 5
    assert now.closed_since(10**9 + 5, None) == 0


ids = st.lists(st.integers(0, 50), min_size=1, max_size=40)


@given(ids, st.integers(0, 60))
def test_an_id_was_given_by_the_first_sample_that_is_as_new(newest, asked):
    history = History()
    seen: list[tuple[int, int]] = []
    for number, ledger_id in enumerate(newest):
        at_ms = number * SAMPLE_AGAIN_MS
        seen.append((ledger_id, at_ms))
        history = history.with_newest(LedgerId(ledger_id), at_ms)
    expected = next((at_ms for ledger_id, at_ms in seen if ledger_id >= asked), None)
    assert history.given_by(LedgerId(asked)) == expected


def test_samples_are_bounded_and_months_are_known_within_a_64th():
    history = History()
    count = 120 * 24 * 6
    for number in range(count):
        history = history.with_newest(LedgerId(number), number * SAMPLE_AGAIN_MS)
        # Too soon for another one.
        assert history.with_newest(LedgerId(10**6), number * SAMPLE_AGAIN_MS + 1) is history
    assert len(history.samples) <= SAMPLES_MAX
    now = Now(wall_ms=0, progress_ms=count * SAMPLE_AGAIN_MS, history=history)
    for number in range(0, count, 101):
        true_ms = (count - number) * SAMPLE_AGAIN_MS
        sure_ms = now.closed_since(None, LedgerId(number))
        assert true_ms * (1 - 1.1 / PARTS) - 2 * SAMPLE_AGAIN_MS <= sure_ms <= true_ms
    assert history.samples[-1] == LedgerSample(LedgerId(count - 1), (count - 1) * SAMPLE_AGAIN_MS)
