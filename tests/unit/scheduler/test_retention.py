"""Retention: what goes, what stays, and that all of it goes from both tiers in the end.

seeds/000: a threshold for offloading lies below that of retention, "as otherwise the segment
would be deleted before being offloaded".
"""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.gates import OpenGate
from tests.unit.offload.world import STREAM, World, metadata_of
from tests.unit.scheduler.test_policy import DELAYS, doubtful, ledger, place, stream
from tests.unit.scheduler.test_scheduler import ENTRIES, HOUR, faults, running, scheduler, states
from tierlog.adapters.memory.faults import FaultRates
from tierlog.model.errors import RefusedError
from tierlog.model.ids import NO_ENTRY, EntryId, LedgerId, StreamName
from tierlog.model.ledger import LedgerState
from tierlog.model.offload import AbandonedAttempt, LedgerSample, OffloadState
from tierlog.model.policy import NEVER, Policy
from tierlog.model.staging import Staging
from tierlog.model.stream import ListedLedger, Stream
from tierlog.model.trimming import TrimGrounds
from tierlog_scheduler.clocks import History, Now
from tierlog_scheduler.policy import LedgerView
from tierlog_scheduler.retention import (
    TRIMMED_MAX,
    BeginTrim,
    DropTrimmed,
    FinishTrim,
    RemoveStream,
    decide,
    successors,
    trimmable,
)

NOW = Now(wall_ms=10**9, progress_ms=10**9, history=History([LedgerSample(LedgerId(1000), 1)]))
"""Every ledger that has a successor has been closed for almost as long."""
S = OffloadState
DAY_MS = 24 * 3_600_000


@pytest.mark.parametrize(("sealed_ms", "gone"), [(59_999, []), (60_000, [1]), (70_000, [1])])
def test_a_ledger_goes_once_it_was_seen_sealed_for_the_retention_time(sealed_ms, gone):
    policy = Policy(retention_time_ms=60_000)
    seen = {LedgerId(1): NOW.progress_ms - sealed_ms}
    # Whatever the stamps of its owner say.
    for closed_ms in (0, NOW.wall_ms, 10**15):
        view = stream(ledger(1, closed_ms=closed_ms), policy=policy, closed_seen_ms=seen)
        assert trimmable(view, NOW) == gone


def test_a_later_ledger_id_says_that_a_ledger_was_closed_before():
    policy = Policy(retention_time_ms=60_000)
    history = History([LedgerSample(LedgerId(5), 900_000), LedgerSample(LedgerId(8), 950_000)])
    now = Now(wall_ms=0, progress_ms=1_000_000, history=history)
    three = (ledger(3), ledger(5), ledger(6), ledger(9))
    # 3 was closed before 5 was given, and 5 before 6 was: by 950,000 at the latest. Of 6 that is
    # not known: 9 is newer than all samples.
    assert trimmable(stream(*three, policy=policy), now) == [3]
    later = Now(wall_ms=0, progress_ms=1_010_000, history=history)
    assert trimmable(stream(*three, policy=policy), later) == [3, 5]
    much_later = Now(wall_ms=0, progress_ms=10**9, history=history)
    assert trimmable(stream(*three, policy=policy), much_later) == [3, 5]
    seen = {LedgerId(6): 5_000_000}
    view = stream(*three, policy=policy, closed_seen_ms=seen)
    assert trimmable(view, much_later) == [3, 5, 6]


@pytest.mark.parametrize(
    ("size", "gone"), [(0, [1, 2, 3]), (1, [1, 2]), (100, [1, 2]), (101, [1]), (201, [])]
)
def test_by_size_at_least_so_much_stays_behind_what_goes(size, gone):
    view = stream(ledger(1), ledger(2), ledger(3), policy=Policy(retention_size_bytes=size))
    assert trimmable(view, NOW) == gone


def test_either_limit_is_enough_and_never_is_none():
    both = Policy(retention_time_ms=1000, retention_size_bytes=10**9)
    old, young = ledger(1), ledger(2)
    assert trimmable(stream(old, young, policy=both), NOW) == [1]
    size = Policy(retention_time_ms=NEVER, retention_size_bytes=50)
    assert trimmable(stream(old, young, policy=size), NOW) == [1]
    none = Policy(retention_time_ms=NEVER, retention_size_bytes=NEVER)
    assert trimmable(stream(old, young, policy=none), NOW) == []
    assert trimmable(stream(old, young), NOW) == []


@pytest.mark.covers("A36", "A38", "B10")
@pytest.mark.parametrize(
    "offloading",
    [{"offload_time_ms": 10}, {"offload_size_bytes": 10}],
)
def test_what_is_to_be_offloaded_stays_until_it_is(offloading):
    policy = Policy(retention_time_ms=1000, retention_size_bytes=10**9, **offloading)
    seen = {LedgerId(1): 0}
    for state, gone in (
        (S.LOCAL, []),
        (S.OFFLOADING, []),
        (S.COMPLETE, [1]),
        (S.TIER1_DELETING, []),
        (S.TIER1_DELETED, [1]),
        (S.REPAIRING, [1]),
    ):
        view = stream(ledger(1, state=state), policy=policy, closed_seen_ms=seen)
        assert trimmable(view, NOW) == gone, state
    # Whatever is wrong with a copy, its time is over too.
    doubted = stream(doubtful(ledger(1, state=S.COMPLETE)), policy=policy, closed_seen_ms=seen)
    assert trimmable(doubted, NOW) == [1]
    alone = Policy(retention_time_ms=1000)
    assert trimmable(stream(ledger(1), policy=alone, closed_seen_ms=seen), NOW) == [1]
    wished = stream(ledger(1), policy=alone, closed_seen_ms=seen, offload_through=LedgerId(1))
    assert trimmable(wished, NOW) == []


def test_what_was_not_read_and_what_is_open_stop_the_rest():
    policy = Policy(retention_size_bytes=0)
    unread = replace(ledger(2), context=None)
    assert trimmable(stream(ledger(1), unread, ledger(3), policy=policy), NOW) == [1]
    assert trimmable(stream(ledger(1), ledger(2, is_open=True), policy=policy), NOW) == [1]


ledger_kinds = st.lists(
    st.tuples(st.sampled_from(list(S)), st.integers(0, 3), st.integers(0, 2 * 10**9)), max_size=8
)


@given(
    ledger_kinds,
    st.none() | st.just(NEVER) | st.integers(1, 3 * 10**9),
    st.none() | st.integers(NEVER, 12),
    st.booleans(),
)
def test_only_a_prefix_that_nothing_needs_ever_goes(kinds, time_ms, size_bytes, offloads):
    views = [
        ledger(number, state=state, length=length, closed_ms=closed_ms)
        for number, (state, length, closed_ms) in enumerate(kinds)
    ]
    policy = Policy(
        retention_time_ms=time_ms,
        retention_size_bytes=size_bytes,
        offload_time_ms=0 if offloads else None,
    )
    view = stream(*views, policy=policy)
    gone = trimmable(view, NOW)
    assert gone == [one.listed.ledger_id for one in views[: len(gone)]]
    left = sum(one.listed.length for one in views[len(gone) :])
    for number in gone:
        one = views[number]
        assert one.context is not None
        assert one.context.state is not S.TIER1_DELETING
        assert one.context.complete or not view.policy.offloads
        by_time = time_ms not in {None, NEVER} and number + 1 < len(views)
        by_size = size_bytes not in {None, NEVER} and left >= (size_bytes or 0)
        assert by_time or by_size


def test_what_left_the_list_goes_step_by_step():
    attempt = AbandonedAttempt(uuid=UUID(int=9), location=place(1), abandoned_ms=0)
    context = ledger(1).context
    assert context is not None
    trimming = replace(context, state=S.TRIMMING, abandoned=(attempt,))
    dropped = replace(trimming, bookkeeper_deleted=True)

    def steps(found):
        view = stream(trimmed={LedgerId(1): found})
        return [type(one) for one in decide(view, NOW, DELAYS)]

    sweep = type(decide(stream(trimmed={LedgerId(1): dropped}), NOW, DELAYS)[0])
    assert steps(trimming) == [DropTrimmed, sweep]
    assert steps(dropped) == [sweep]
    assert steps(replace(dropped, abandoned=())) == [FinishTrim]
    assert steps(None) == [FinishTrim]
    paused = stream(ledger(1), trimmed={LedgerId(2): trimming}, paused=True)
    assert decide(paused, NOW, DELAYS) == []


def test_so_many_at_once_and_no_more():
    trimmed = {LedgerId(number): None for number in range(10_000, 10_000 + TRIMMED_MAX - 1)}
    view = stream(ledger(1), ledger(2), policy=Policy(retention_size_bytes=0), trimmed=trimmed)
    (begin,) = [one for one in decide(view, NOW, DELAYS) if isinstance(one, BeginTrim)]
    assert begin.ledger_ids == (1,)


def test_a_long_list_is_not_gone_through_for_each_ledger_that_left_it():
    """As long as that takes no other stream is decided about, and no probe is answered."""
    rounds = 0

    class Counted(list[LedgerView]):
        def __iter__(self) -> Iterator[LedgerView]:
            nonlocal rounds
            rounds += 1
            return super().__iter__()

    attempt = AbandonedAttempt(uuid=UUID(int=9), location=place(1), abandoned_ms=0)
    context = ledger(1).context
    assert context is not None
    left = replace(context, state=S.TRIMMING, abandoned=(attempt,), bookkeeper_deleted=True)
    counts = []
    for count in (1, 100):
        trimmed = {LedgerId(one): replace(left, ledger_id=LedgerId(one)) for one in range(count)}
        view, rounds = replace(stream(trimmed=trimmed), ledgers=Counted([ledger(1000)])), 0
        assert len(decide(view, NOW, DELAYS)) == count
        counts.append(rounds)
    assert counts[0] == counts[1]


def test_a_stream_that_is_being_deleted_loses_everything_and_then_itself():
    views = (ledger(1), ledger(2, state=S.COMPLETE))
    view = replace(stream(*views, policy=Policy(offload_time_ms=5)), deleting=True)
    (begin,) = decide(view, NOW, DELAYS)
    assert begin == BeginTrim(
        ledger_ids=(LedgerId(1), LedgerId(2)), grounds=TrimGrounds(policy=None)
    )
    assert decide(replace(view, ledgers=()), NOW, DELAYS) == [RemoveStream()]
    left = replace(view, ledgers=(), trimmed={LedgerId(1): None})
    assert RemoveStream() not in decide(left, NOW, DELAYS)


# With the leader's loop and real workers


async def kept_keys(world: World) -> set[str]:
    """Return the keys of complete copies of ledgers that have a context."""
    named: set[str] = set()
    for ledger_id in world.ledgers:
        context = await world.catalog().contexts.get(ledger_id)
        if context is not None and context.complete:
            assert context.location is not None
            named |= {
                key
                for key in (
                    context.location.data_key,
                    context.location.index_key,
                    context.location.side_key,
                )
                if key in world.bucket.objects
            }
    return named


def test_what_is_changed_after_a_pass_decided_is_not_trimmed_by_it(monkeypatch):
    async def main():
        world = World()
        claimed = await world.stream(policy=Policy(retention_size_bytes=1))
        ids = [await world.seal(claimed, ENTRIES) for _ in range(3)]
        leader = scheduler(world)
        await leader.begin()
        retention = leader._catalog.retention
        begin_trim = retention.begin_trim

        async def after_a_change(*args, **named):
            policy = Policy(retention_size_bytes=10**9)
            await world.catalog().streams.set_policy(STREAM, policy)
            return await begin_trim(*args, **named)

        monkeypatch.setattr(retention, "begin_trim", after_a_change)
        await leader.run_pass()
        await leader.run_pass()
        assert [one.ledger_id for one in await listed(world)] == ids
        monkeypatch.setattr(retention, "begin_trim", begin_trim)
        await world.catalog().streams.set_policy(STREAM, Policy(retention_size_bytes=1))
        await leader.run_pass()
        assert [one.ledger_id for one in await listed(world)] == ids[2:]

    run_virtual(main())


@pytest.mark.covers("A24", "A25", "B12", "B01")
def test_retention_takes_ledgers_out_of_everything():
    async def main():
        world = World()
        policy = Policy(offload_time_ms=60_000, retention_time_ms=DAY_MS, deletion_lag_ms=3_600_000)
        claimed = await world.stream(policy=policy)
        first = [await world.seal(claimed, ENTRIES) for _ in range(3)]
        async with running(world):
            await asyncio.sleep(23 * HOUR)
            later = await world.seal(claimed, ENTRIES)
            assert await states(world) == ["TIER1_DELETED"] * 3 + ["LOCAL"]
            await asyncio.sleep(2 * HOUR)
            snapshot = await world.catalog().streams.snapshot(STREAM)
            assert [one.ledger_id for one in snapshot.ledgers] == [later]
            assert snapshot.stream.deleting == ()
        for ledger_id in first:
            assert await world.catalog().contexts.get(ledger_id) is None
        assert set(world.bucket.objects) == await kept_keys(world)
        assert not world.bucket.uploads

    run_virtual(main())


@pytest.mark.parametrize("quiet", [True, False])
@pytest.mark.parametrize("jump_h", [0, 5, -5])
def test_retention_outlives_leaders_and_is_never_early(quiet, jump_h):
    async def main():
        world = World()
        claimed = await world.stream(policy=Policy(retention_time_ms=5 * 3_600_000))
        first = await world.seal(claimed, ENTRIES)
        if not quiet:
            # No leader sees it as a stream's last, nor as one that waits for its offload.
            await world.seal(claimed, ENTRIES, close=False)
            await world.worker().handle(world.request(claimed, first))
        led_h = 0.0
        while first in [one.ledger_id for one in await listed(world)]:
            assert led_h < 6
            async with running(world, workers=0):
                await asyncio.sleep(0.5 * HOUR)
                world.clock.jump_wall(jump_h * HOUR)
                await asyncio.sleep(0.5 * HOUR)
            led_h += 1
            await asyncio.sleep(2 * HOUR)
        assert led_h >= 5

    run_virtual(main())


def test_what_was_attached_and_what_was_closed_for_it_stay_for_the_retention_time():
    """A job writes for two hours what is attached then, and other streams live on."""

    async def main():
        world = World()
        claimed = await world.stream(policy=Policy(retention_time_ms=3_600_000))
        other = await world.stream(StreamName("other"))
        async with running(world, workers=0):
            await asyncio.sleep(30)
            opened = await world.seal(claimed, ENTRIES, close=False)
            staged = [await stage(world, claimed) for _ in range(2)]
            for _ in range(12):
                await asyncio.sleep(600)
                await world.seal(other, ENTRIES)
            last, length = EntryId(len(ENTRIES) - 1), sum(map(len, ENTRIES))
            ledgers = world.catalog().ledgers
            await ledgers.close(claimed, opened, last_entry_id=last, length=length)
            await ledgers.attach(claimed, staged)
            await asyncio.sleep(0.9 * HOUR)
            assert [one.ledger_id for one in await listed(world)] == [opened, *staged]
            # One that came by itself tells of the attached ones, under whichever leader.
            newest = await world.seal(claimed, ENTRIES)
        async with running(world, workers=0):
            await asyncio.sleep(0.4 * HOUR)
            assert [one.ledger_id for one in await listed(world)] == [newest]

    run_virtual(main())


async def stage(world: World, claimed: Stream) -> LedgerId:
    bare = world.catalog().bare
    staging = Staging(
        stream=claimed.name,
        incarnation=claimed.incarnation,
        writer_id=UUID(int=9 << 100),
        number=1,
        block_size=world.block_size,
    )
    whole = metadata_of(ENTRIES, block_size=world.block_size)
    made = replace(
        whole,
        state=LedgerState.OPEN,
        last_entry_id=NO_ENTRY,
        length=0,
        custom=staging.custom(),
        ctime_ms=world.clock.wall_ms(),
    )
    ledger_id = await bare.create(made)
    await bare.close(ledger_id, last_entry_id=whole.last_entry_id, length=whole.length)
    world.ledgers[ledger_id] = list(ENTRIES)
    return ledger_id


def row(number: int, *, opened: int, closed: int, attached: int = 0) -> ListedLedger:
    return replace(
        ledger(number).listed, opened_ms=opened, closed_ms=closed, attached_id=LedgerId(attached)
    )


def test_which_id_was_given_after_a_ledger_was_closed():
    before, after = row(1, opened=0, closed=50), row(12, opened=60, closed=80)
    # Both were attached at 50, by an id drawn then; what is attached at 90 says so of the last one.
    drawn = [row(number, opened=number, closed=50, attached=10) for number in (2, 3)]
    later = [row(number, opened=number, closed=90, attached=30) for number in (20, 21)]
    assert successors([before, *drawn, after, *later]) == [10, 12, 12, 30, None, None]
    assert successors([before, *drawn, *later]) == [10, 30, 30, None, None]
    assert successors([*drawn, *later, row(31, opened=95, closed=99)]) == [30, 30, 31, 31, None]
    # By a release that drew none: by the stamps they were there when the one before was closed.
    old = [replace(one, attached_id=LedgerId(0)) for one in drawn]
    assert successors([before, *old, after]) == [12, 12, 12, None]
    assert successors([before, *old, *later]) == [30, 30, 30, None, None]
    assert successors([before, *old]) == [None, None, None]
    # Where a clock was set back it is the same, and late by a ledger.
    back = [row(1, opened=0, closed=50), row(2, opened=20, closed=30), row(3, opened=30, closed=40)]
    assert successors(back) == [3, 3, None]
    assert successors([]) == []


async def listed(world: World):
    return (await world.catalog().streams.snapshot(STREAM)).ledgers


def test_what_is_remembered_of_closed_ledgers_is_little():
    async def main():
        world = World()
        claimed = await world.stream(policy=Policy(retention_time_ms=1000 * 3_600_000))
        leader = scheduler(world)
        await leader.begin()
        for _ in range(20):
            await world.seal(claimed, ENTRIES)
            await leader.run_pass()
            await asyncio.sleep(60)
        seen = leader._memory.closed_seen_ms
        await asyncio.sleep(5 * HOUR)
        await leader.run_pass()
        # Not offloaded, all of them: each is remembered for as long as it may be due.
        assert len(seen) == 20
        for ledger_id in list(world.ledgers):
            await world.worker().handle(world.request(claimed, ledger_id))
        newest = await world.seal(claimed, ENTRIES)
        await world.worker().handle(world.request(claimed, newest))
        for _ in range(3):
            await asyncio.sleep(0.5 * HOUR)
            await leader.run_pass()
        assert len(seen) <= 3

    run_virtual(main())


def test_retention_alone_deletes_local_copies():
    async def main():
        world = World()
        total = sum(map(len, ENTRIES))
        claimed = await world.stream(policy=Policy(retention_size_bytes=2 * total))
        ids = [await world.seal(claimed, ENTRIES) for _ in range(5)]
        async with running(world, workers=0):
            await asyncio.sleep(60)
        snapshot = await world.catalog().streams.snapshot(STREAM)
        assert [one.ledger_id for one in snapshot.ledgers] == ids[3:]
        for ledger_id in ids[:3]:
            assert await world.catalog().ledgers.get(ledger_id) is None
            assert await world.catalog().bare.deletion_on_record(ledger_id)

    run_virtual(main())


def test_nothing_of_a_trimmed_ledger_is_deleted_before_a_manifest_lets_it_go():
    async def main():
        world = World()
        claimed = await world.stream(policy=Policy(offload_time_ms=0, retention_time_ms=60_000))
        ledger_id = await world.seal(claimed, ENTRIES)
        gate = OpenGate()
        leader = scheduler(world, manifests=gate)
        await leader.begin()
        await leader.run_pass()
        await world.worker().handle(world.request(claimed, ledger_id))
        objects = set(world.bucket.objects)
        gate.shut = True
        for _ in range(20):
            await asyncio.sleep(60)
            await leader.run_pass()
        assert set(world.bucket.objects) == objects
        assert await world.catalog().ledgers.get(ledger_id) is not None
        gate.shut = False
        for _ in range(20):
            await asyncio.sleep(60)
            await leader.run_pass()
        assert not world.bucket.objects
        assert await world.catalog().contexts.get(ledger_id) is None

    run_virtual(main())


@pytest.mark.parametrize("seed", range(6))
def test_faults_everywhere_leave_exactly_what_retention_keeps(seed):
    async def main():
        world = World(seed=seed)
        world.queue.rates = type(world.queue.rates)(repeated=0.2, lost=0.2, delay_s_max=30)
        claimed = await world.stream(
            policy=Policy(
                offload_time_ms=0, deletion_lag_ms=60_000, retention_time_ms=2 * 3_600_000
            )
        )
        for _ in range(4):
            await world.seal(claimed, ENTRIES)
        given = faults(seed, refused=0.03, request_lost=0.03, reply_lost=0.03, delay_s_max=0.2)
        async with running(world, schedulers=2, workers=2, given=given):
            await asyncio.sleep(3 * HOUR)
            last = await world.seal(claimed, ENTRIES)
            given.rates = FaultRates()
            await asyncio.sleep(1.5 * HOUR)
        snapshot = await world.catalog().streams.snapshot(STREAM)
        assert [one.ledger_id for one in snapshot.ledgers] == [last]
        assert snapshot.stream.deleting == ()
        assert set(world.bucket.objects) == await kept_keys(world)
        assert not world.bucket.uploads

    run_virtual(main())


@pytest.mark.parametrize("seed", range(4))
def test_a_leader_that_dies_anywhere_leaves_what_the_next_one_ends(seed):
    async def main():
        world = World(seed=seed)
        claimed = await world.stream(policy=Policy(offload_time_ms=0, retention_time_ms=60_000))
        for _ in range(2):
            ledger_id = await world.seal(claimed, ENTRIES)
            await world.worker().handle(world.request(claimed, ledger_id))
        for step in range(0, 200, 3):
            given = faults(seed)
            leader = scheduler(world, given)
            given.crash_after(1 + step)
            dying = asyncio.get_running_loop().create_task(lead(leader))
            given.on_crash = dying.cancel
            await asyncio.wait({dying})
            await asyncio.sleep(30)
        last = scheduler(world)
        await last.begin()
        for _ in range(30):
            await last.run_pass()
            await asyncio.sleep(60)
        snapshot = await world.catalog().streams.snapshot(STREAM)
        assert (snapshot.ledgers, snapshot.stream.deleting) == ((), ())
        assert not world.bucket.objects
        assert not [
            path
            for path in world.metadata.dump()
            if path.startswith("/tierlog/contexts/") and path.rpartition("/")[2].startswith("L")
        ]

    async def lead(leader):
        await leader.begin()
        for _ in range(5):
            await leader.run_pass()
            await asyncio.sleep(60)

    run_virtual(main(), until_s=1000 * HOUR)


def test_a_deleted_stream_goes_with_its_objects_and_frees_its_name():
    async def main():
        world = World()
        claimed = await world.stream(policy=Policy(offload_time_ms=0))
        for _ in range(2):
            await world.seal(claimed, ENTRIES)
        async with running(world):
            await asyncio.sleep(60)
            assert world.bucket.objects
            catalog = world.catalog()
            await catalog.retention.begin_stream_deletion(STREAM)
            await asyncio.sleep(1200)
            assert not world.bucket.objects
            with pytest.raises(RefusedError):
                await catalog.streams.snapshot(STREAM)
            assert (await catalog.streams.create(STREAM))[1]

    run_virtual(main())
