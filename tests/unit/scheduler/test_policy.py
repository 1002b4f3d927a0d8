"""Thresholds mean what seeds/000 says, at every edge and for any mixture of ledgers.

offloadTimeInMinutes: "when it has been sealed for that many minutes"; offloadSizeInMB: "when the
tail of the log reaches the specified size"; the local copy goes "after a configured lag time".
"""

from dataclasses import replace
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierlog.model.errors import Reason, RefusedError
from tierlog.model.ids import EntryId, LedgerId, StreamName
from tierlog.model.offload import (
    AbandonedAttempt,
    CopySeen,
    Doubt,
    OffloadContext,
    OffloadState,
    Tier2Copy,
    Tier2Location,
)
from tierlog.model.policy import CLUSTER_DEFAULT, DELETION_LAG_DEFAULT_MS, MIB, Policy
from tierlog.model.position import Position
from tierlog.model.stream import ListedLedger
from tierlog.offload.messages import Trigger
from tierlog.runtime.settings import S3Settings, SchedulerSettings, Settings
from tierlog_scheduler.clocks import Now
from tierlog_scheduler.main import _limits
from tierlog_scheduler.policy import (
    AbandonStalled,
    Asked,
    Delays,
    DeleteTier1,
    LedgerView,
    RequestOffload,
    StreamView,
    SweepAbandoned,
    decide,
    sealed_before,
    sweeps,
    wanted_ledgers,
)

NOW = Now(wall_ms=1_000_000_000, progress_ms=500_000_000)
DELAYS = Delays(request_again_ms=60_000, sweep_again_ms=300_000)
COPY = Tier2Copy(
    format_version=1, data_len=1, index_len=1, index_sha256=b"x", entry_count=1, block_count=1
)


def place(number: int) -> Tier2Location:
    return Tier2Location(
        driver="aws-s3",
        endpoint_name="default",
        bucket="b",
        data_key=f"{number}",
        index_key=f"{number}-index",
        side_key=f"{number}-side",
    )


def ledger(
    number: int,
    *,
    length: int = 100,
    closed_ms: int = 0,
    state: OffloadState = OffloadState.LOCAL,
    is_open: bool = False,
    timestamp_ms: int = 0,
    abandoned: tuple[AbandonedAttempt, ...] = (),
) -> LedgerView:
    complete = state not in {OffloadState.LOCAL, OffloadState.OFFLOADING, OffloadState.TRIMMING}
    listed = ListedLedger(
        ledger_id=LedgerId(number),
        opened_ms=0,
        block_size=512,
        owner_epoch=1,
        closed=not is_open,
        last_entry_id=EntryId(-1 if is_open else 9),
        length=0 if is_open else length,
        closed_ms=closed_ms,
    )
    context = OffloadContext(
        stream=StreamName("s"),
        incarnation=UUID(int=1),
        ledger_id=LedgerId(number),
        state=state,
        uuid=None if state is OffloadState.LOCAL else UUID(int=number + 1),
        location=None if state is OffloadState.LOCAL else place(number),
        complete=complete,
        copy=COPY if complete else None,
        timestamp_ms=timestamp_ms,
        abandoned=abandoned,
    )
    return LedgerView(listed=listed, context=context)


def doubtful(one: LedgerView) -> LedgerView:
    """Return a ledger whose copy was found damaged."""
    assert one.context is not None
    doubt = Doubt(mark=UUID(int=7), found_ms=5, cause="damaged-data: grain 3")
    return replace(one, context=replace(one.context, doubt=doubt))


def stream(*ledgers: LedgerView, policy: Policy | None = None, **more) -> StreamView:
    return StreamView(ledgers=ledgers, policy=(policy or Policy()).over(CLUSTER_DEFAULT), **more)


def requests(view: StreamView, now: Now = NOW) -> dict[int, Trigger]:
    return {
        one.ledger_id: one.trigger
        for one in decide(view, now, DELAYS)
        if isinstance(one, RequestOffload)
    }


@pytest.mark.parametrize(("sealed_ms", "due"), [(59_999, False), (60_000, True), (60_001, True)])
def test_a_ledger_is_due_once_it_was_sealed_for_the_offload_time(sealed_ms, due):
    view = stream(
        ledger(1, closed_ms=NOW.wall_ms - sealed_ms),
        ledger(2, is_open=True),
        policy=Policy(offload_time_ms=60_000),
    )
    assert requests(view) == ({1: Trigger.TIME} if due else {})


@pytest.mark.parametrize(
    ("threshold", "due"), [(301, []), (300, [1]), (201, [1]), (200, [1, 2]), (1, [1, 2, 3])]
)
def test_the_oldest_are_due_until_less_than_the_offload_size_is_left(threshold, due):
    view = stream(ledger(1), ledger(2), ledger(3), policy=Policy(offload_size_bytes=threshold))
    assert list(requests(view)) == due


def test_an_open_ledger_counts_once_it_is_closed_and_is_never_asked_for():
    policy = Policy(offload_size_bytes=100, offload_time_ms=0)
    assert list(requests(stream(ledger(1), ledger(2, is_open=True), policy=policy))) == [1]
    through = LedgerId(2)
    alone = stream(ledger(2, is_open=True), policy=policy, offload_through=through)
    assert requests(alone) == {}


def test_what_is_on_its_way_counts_as_not_offloaded_and_is_not_doubled_by_newer_ones():
    view = stream(
        ledger(1, state=OffloadState.OFFLOADING),
        ledger(2),
        policy=Policy(offload_size_bytes=150),
        asked={LedgerId(1): Asked(progress_ms=NOW.progress_ms, count=1)},
    )
    assert requests(view) == {}
    assert list(wanted_ledgers(view, NOW)) == [1]


@pytest.mark.parametrize(
    ("age_ms", "more", "given_up"),
    [
        (DELAYS.stalled_ms, {}, True),
        (DELAYS.stalled_ms - 1, {}, False),
        (DELAYS.stalled_ms, {"offload_through": LedgerId(1)}, False),
        (DELAYS.stalled_ms, {"policy": Policy(offload_time_ms=0)}, False),
        (DELAYS.stalled_ms, {"paused": True}, False),
        (DELAYS.stalled_ms, {"deleting": True}, False),
    ],
)
def test_an_attempt_that_did_not_end_is_given_up_where_nothing_asks_for_it(age_ms, more, given_up):
    one = ledger(1, state=OffloadState.OFFLOADING)
    assert one.context is not None
    begun = replace(one.context, attempt_started_ms=NOW.wall_ms - age_ms)
    actions = decide(stream(replace(one, context=begun), ledger(2), **more), NOW, DELAYS)
    uuids = [action.uuid for action in actions if isinstance(action, AbandonStalled)]
    assert uuids == ([begun.uuid] if given_up else [])


@pytest.mark.covers("A26", "A27")
def test_an_admin_s_wish_needs_no_threshold_and_holds_for_sealed_ledgers_only():
    view = stream(
        ledger(1, state=OffloadState.COMPLETE),
        ledger(2),
        ledger(3),
        ledger(4),
        offload_through=LedgerId(3),
    )
    assert requests(view) == {2: Trigger.ADMIN, 3: Trigger.ADMIN}


@pytest.mark.covers("A27")
@pytest.mark.parametrize(
    ("before", "selected"),
    [
        (None, [1, 2]),
        (Position(LedgerId(1), EntryId(0)), []),
        (Position(LedgerId(1), EntryId(9)), []),
        (Position(LedgerId(1), EntryId(10)), [1]),
        (Position(LedgerId(2), EntryId(0)), [1]),
        (Position(LedgerId(2), EntryId(9)), [1]),
        (Position(LedgerId(3), EntryId(0)), [1, 2]),
        (Position(LedgerId(99), EntryId(5)), [1, 2]),
    ],
)
def test_a_prefix_is_of_ledgers_that_lie_wholly_before_the_position(before, selected):
    listed = [ledger(1).listed, ledger(2).listed, ledger(3, is_open=True).listed]
    assert [one.ledger_id for one in sealed_before(listed, before)] == selected


def test_without_thresholds_nothing_is_asked_for():
    assert decide(stream(ledger(1), ledger(2)), NOW, DELAYS) == []


@pytest.mark.parametrize(("paused", "ended"), [(False, [1]), (True, [])])
def test_a_local_deletion_that_was_begun_is_ended_also_in_a_stream_that_goes(paused, ended):
    view = stream(
        ledger(1, state=OffloadState.TIER1_DELETING),
        ledger(2, state=OffloadState.COMPLETE),
        deleting=True,
        paused=paused,
    )
    found = [one for one in decide(view, NOW, DELAYS) if isinstance(one, DeleteTier1)]
    assert [one.context.ledger_id for one in found] == ended


@pytest.mark.parametrize(
    ("count", "wait_ms"), [(1, 60_000), (2, 120_000), (3, 240_000), (8, 7_680_000), (90, 7_680_000)]
)
def test_it_asks_again_later_and_later_but_for_ever(count, wait_ms):
    view = stream(ledger(1), policy=Policy(offload_time_ms=0))
    asked = Asked(progress_ms=NOW.progress_ms - wait_ms, count=count)
    (again,) = decide(replace(view, asked={LedgerId(1): asked}), NOW, DELAYS)
    assert again == RequestOffload(ledger_id=LedgerId(1), trigger=Trigger.TIME, count=count + 1)
    later = replace(asked, progress_ms=asked.progress_ms + 1)
    assert decide(replace(view, asked={LedgerId(1): later}), NOW, DELAYS) == []


@pytest.mark.covers("A36", "A38")
@pytest.mark.parametrize("what", ["time_ms", "size_bytes"])
@pytest.mark.parametrize(("offload", "fits"), [(99, True), (100, False), (101, False)])
def test_offload_thresholds_lie_below_retention_thresholds(what, offload, fits):
    values = {f"offload_{what}": offload, f"retention_{what}": 100}
    if fits:
        Policy(**values)
        return
    with pytest.raises(RefusedError) as refused:
        Policy(**values)
    assert refused.value.reason is Reason.POLICY_INVALID


def saw(progress_ms: int, number: int = 1) -> dict[LedgerId, CopySeen]:
    """Return that the copy of a ledger was seen complete."""
    return {LedgerId(number): CopySeen(UUID(int=number + 1), progress_ms)}


class TestDeletion:
    LAG = DELETION_LAG_DEFAULT_MS

    def deleted(self, wall_ms: int, progress_ms: int | None, policy: Policy | None = None) -> bool:
        """Tell whether a copy is deleted that is complete for so long, on both clocks."""
        seen = {} if progress_ms is None else saw(NOW.progress_ms - progress_ms)
        view = stream(
            ledger(1, state=OffloadState.COMPLETE, timestamp_ms=NOW.wall_ms - wall_ms),
            policy=policy,
            complete_seen=seen,
        )
        return bool(decide(view, NOW, DELAYS))

    @pytest.mark.covers("A28")
    def test_after_four_hours_by_default_of_the_leaders_progress(self):
        assert self.LAG == 4 * 3600 * 1000
        assert self.deleted(self.LAG, self.LAG)
        assert not self.deleted(self.LAG, self.LAG - 1)

    def test_a_wall_clock_that_jumps_neither_deletes_nor_keeps_anything(self):
        assert not self.deleted(1000 * self.LAG, 5)
        assert not self.deleted(1000 * self.LAG, None)
        assert self.deleted(-1000 * self.LAG, self.LAG)

    def test_of_another_copy_nothing_is_known(self):
        for uuid, gone in ((UUID(int=2), True), (UUID(int=77), False)):
            view = stream(
                ledger(1, state=OffloadState.COMPLETE),
                complete_seen={LedgerId(1): CopySeen(uuid, 0)},
            )
            assert bool(decide(view, NOW, DELAYS)) is gone

    def test_never(self):
        assert not self.deleted(10**12, 10**8, Policy(deletion_lag_ms=-1))

    def test_at_once(self):
        assert self.deleted(0, 0, Policy(deletion_lag_ms=0))

    @pytest.mark.parametrize("state", list(OffloadState))
    def test_only_complete_ones_and_those_begun(self, state):
        view = stream(
            ledger(1, state=state),
            policy=Policy(deletion_lag_ms=0),
            complete_seen=saw(0),
        )
        expected = state in {OffloadState.COMPLETE, OffloadState.TIER1_DELETING}
        assert [type(one) for one in decide(view, NOW, DELAYS)] == [DeleteTier1] * expected

    @pytest.mark.parametrize("deleting", [False, True])
    @pytest.mark.parametrize("state", list(OffloadState))
    def test_never_while_the_copy_is_in_doubt(self, state, deleting):
        view = stream(
            doubtful(ledger(1, state=state)),
            policy=Policy(deletion_lag_ms=0),
            complete_seen=saw(0),
            deleting=deleting,
        )
        assert decide(view, NOW, DELAYS) == []

    def test_what_was_begun_is_ended_whatever_the_lag(self):
        view = stream(
            ledger(1, state=OffloadState.TIER1_DELETING), policy=Policy(deletion_lag_ms=-1)
        )
        assert [type(one) for one in decide(view, NOW, DELAYS)] == [DeleteTier1]


class TestSweeping:
    def swept(self, swept_ms: int, seen_ms: int | None) -> list[bool]:
        attempt = AbandonedAttempt(
            uuid=UUID(int=9), location=place(9), abandoned_ms=1, swept_ms=swept_ms
        )
        view = stream(
            ledger(1, state=OffloadState.TIER1_DELETED, abandoned=(attempt,)),
            swept_seen_ms={} if seen_ms is None else {attempt.uuid: seen_ms},
        )
        actions = decide(view, NOW, DELAYS)
        assert all(isinstance(one, SweepAbandoned) for one in actions)
        return [one.strike_off for one in actions if isinstance(one, SweepAbandoned)]

    def test_at_once_and_again_after_the_deadline(self):
        assert self.swept(0, None) == [False]
        long_ago = NOW.progress_ms - DELAYS.sweep_again_ms
        assert self.swept(NOW.wall_ms - DELAYS.sweep_again_ms, long_ago) == [True]
        assert self.swept(NOW.wall_ms + 5 * 3_600_000, long_ago) == [True]
        assert self.swept(NOW.wall_ms - DELAYS.sweep_again_ms, long_ago + 1) == []
        assert self.swept(1, None) == []

    def test_the_settings_of_the_process_say_how_long_a_request_may_take(self):
        found = Settings(s3=S3Settings(request_s_max=7, bytes_per_s_min=MIB))
        delays = _limits(found).delays
        assert delays.longest_request_s(3 * MIB) == 10
        assert delays.sweep_ms(3 * MIB) == 300_000
        assert delays.sweep_ms(400 * MIB) == 407_000

    @pytest.mark.parametrize("name", ["sweep_again_s", "interval_s"])
    def test_a_scheduler_that_never_waits_is_refused(self, name):
        with pytest.raises(ValueError, match=name):
            SchedulerSettings.model_validate({name: 0})

    @pytest.mark.parametrize(
        ("block_size", "wait_ms"),
        [(64 * MIB, 300_000), (128 * MIB, 316_000), (256 * MIB, 572_000), (2**31 - 1, 4_156_000)],
    )
    @pytest.mark.parametrize("listed", [True, False])
    def test_no_sweep_is_the_last_while_a_request_may_be_on_its_way(
        self, block_size, wait_ms, listed
    ):
        delays = replace(DELAYS, longest_request_s=S3Settings().longest_request_s)
        attempt = AbandonedAttempt(uuid=UUID(int=9), location=place(9), abandoned_ms=1, swept_ms=1)
        one = ledger(1, state=OffloadState.TRIMMING, abandoned=(attempt,))
        assert one.context is not None
        larger = replace(one, listed=replace(one.listed, block_size=block_size))
        context = one.context if listed else replace(one.context, ledger_id=LedgerId(2))
        # One that left the list may have had blocks as large as any that is known.
        views = [
            stream(larger),
            *([] if listed else [stream(policy=Policy(block_size=block_size))]),
        ]
        times, long_ago = {attempt.uuid: 0}, {attempt.uuid: -(10**9)}
        seen = [
            replace(view, swept_seen_ms=swept_ms, unseen_ms=unseen_ms)
            for view in views
            for swept_ms, unseen_ms in ((times, {}), (long_ago, times))
        ]
        for view in seen:
            for late_ms, swept in ((-1, 0), (0, 1)):
                now = replace(NOW, progress_ms=wait_ms + late_ms)
                assert len(list(sweeps(context, view, now, delays))) == swept


ledgers = st.lists(
    st.builds(
        lambda length, closed_ms, state, asked: (length, closed_ms, state, asked),
        st.integers(0, 300),
        st.integers(NOW.wall_ms - 200, NOW.wall_ms + 50),
        st.sampled_from(list(OffloadState)),
        st.none() | st.integers(0, 200_000),
    ),
    max_size=12,
)


@given(
    ledgers,
    st.none() | st.integers(0, 150),
    st.none() | st.integers(0, 2000),
    st.none() | st.integers(0, 12),
)
def test_decisions_against_a_plain_reading_of_the_rules(given_ledgers, time, size, through):
    views = [
        ledger(number, length=length, closed_ms=closed_ms, state=state)
        for number, (length, closed_ms, state, _) in enumerate(given_ledgers)
    ]
    asked = {
        LedgerId(number): Asked(progress_ms=NOW.progress_ms - ago, count=1)
        for number, (_, _, _, ago) in enumerate(given_ledgers)
        if ago is not None
    }
    view = stream(
        *views,
        policy=Policy(offload_time_ms=time, offload_size_bytes=size, deletion_lag_ms=-1),
        offload_through=None if through is None else LedgerId(through),
        asked=asked,
    )
    waiting = [
        number
        for number, (_, _, state, _) in enumerate(given_ledgers)
        if state.name in {"LOCAL", "OFFLOADING"}
    ]
    due = set()
    for number in waiting:
        _, closed_ms, _, ago = given_ledgers[number]
        not_offloaded = sum(given_ledgers[n][0] for n in waiting if n >= number)
        # A stamp ahead of our clock is of now: early does no harm.
        by_time = time is not None and max(0, NOW.wall_ms - closed_ms) >= time
        by_size = size is not None and not_offloaded >= size
        by_admin = through is not None and number <= through
        if (by_time or by_size or by_admin) and (ago is None or ago >= 60_000):
            due.add(number)
    assert set(requests(view)) == due
    assert list(requests(view)) == sorted(due)
    # Deciding changes nothing: the same question has the same answer.
    assert decide(view, NOW, DELAYS) == decide(view, NOW, DELAYS)
