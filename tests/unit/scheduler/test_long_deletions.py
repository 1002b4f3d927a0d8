"""Copies that take long to read back hold up one stream's local deletions, and nothing else.

Must hold: another stream's ledger is asked for while they go on; all local copies go in the end,
also behind some whose copies can't be read.
"""

import asyncio
from collections.abc import Collection
from dataclasses import replace
from unittest.mock import patch
from uuid import UUID

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.world import TOPICS, World
from tests.unit.scheduler.manifests_kit import Leader
from tests.unit.scheduler.test_scheduler import ENTRIES, HOUR, LIMITS, running, scheduler
from tierlog.adapters.memory.faults import no_faults
from tierlog.model.errors import RefusedError, RetryableError
from tierlog.model.ids import LedgerId, StreamName
from tierlog.model.offload import AbandonedAttempt
from tierlog.model.policy import Policy
from tierlog.model.trimming import TrimGrounds
from tierlog.offload.driver import BlockOffloader
from tierlog.offload.messages import parse_request
from tierlog_scheduler.policy import Action, SweepAbandoned
from tierlog_scheduler.retention import BeginTrim, DropTrimmed, RemoveStream, Trimming
from tierlog_scheduler.turns import TURNS_S_MAX, Turns

LARGE, SMALL = StreamName("large"), StreamName("small")
LEDGERS = 10
READ_S = 20.0
SWEEP_S = 1.5


class SlowWorld(World):
    """A world in which a copy takes long to be verified; some may never be readable."""

    unreadable: Collection[LedgerId] = ()

    def offloader(self, *given, **settings) -> BlockOffloader:
        made = super().offloader(*given, **settings)
        verify = made.verify

        async def slowly(ledger_id, *rest, **how):
            await asyncio.sleep(READ_S)
            if ledger_id in self.unreadable:
                raise RetryableError("the store takes its time")
            await verify(ledger_id, *rest, **how)

        sweep = made.delete_offloaded

        async def slow_sweep(*of):
            await asyncio.sleep(SWEEP_S)
            await sweep(*of)

        setattr(made, "verify", slowly)  # noqa: B010
        setattr(made, "delete_offloaded", slow_sweep)  # noqa: B010
        return made


async def due(
    world: World, name: StreamName = LARGE, count: int = LEDGERS, *, lag_ms: int = 0
) -> list[LedgerId]:
    """Make a stream whose local copies are all to go at once."""
    lasting = Policy(offload_time_ms=0, deletion_lag_ms=lag_ms, read_back="full")
    claimed = await world.stream(name, lasting)
    found = [await world.seal(claimed, ENTRIES[:2]) for _ in range(count)]
    for ledger_id in found:
        await world.worker().handle(world.request(claimed, ledger_id))
    return found


def asked_for(world: World) -> list[StreamName]:
    return [parse_request(one).stream for one in world.queue.events(TOPICS.requested)]


def test_other_streams_are_asked_for_meanwhile():
    async def main():
        world = SlowWorld()
        await due(world)
        claimed = await world.stream(SMALL, Policy(offload_time_ms=0))
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(scheduler(world).run(stop))
            await asyncio.sleep(READ_S / 2)
            await world.seal(claimed, ENTRIES)
            await asyncio.sleep(TURNS_S_MAX + 2 * READ_S + LIMITS.interval_s)
            assert SMALL in asked_for(world)
            stop.set()

    run_virtual(main())


def test_the_slow_round_counts_the_time_that_passes_take(monkeypatch):
    async def main():
        world = SlowWorld()
        await due(world)
        leader = scheduler(world)
        await leader.begin()
        whole, counted = leader.mirror.refresh, list[float]()
        begun_s = world.clock.monotonic_s()

        async def refresh(since_last_s):
            counted.append(since_last_s)
            await whole(since_last_s)

        monkeypatch.setattr(leader.mirror, "refresh", refresh)
        for _ in range(3):
            await leader.run_pass()
            assert leader.pass_s > READ_S
            await asyncio.sleep(LIMITS.interval_s)
        last_s = world.clock.monotonic_s()
        await leader.run_pass()
        assert sum(counted) == pytest.approx(last_s - begun_s)

    run_virtual(main())


@pytest.mark.parametrize("unreadable", [(), (0, 1), (LEDGERS - 1,)])
def test_all_local_copies_go_in_the_end(unreadable):
    async def main():
        world = SlowWorld()
        ledgers = await due(world)
        world.unreadable = [ledgers[number] for number in unreadable]
        leader = scheduler(world)
        await leader.begin()
        for _ in range(2 * LEDGERS):
            await leader.run_pass()
            assert leader.pass_s <= TURNS_S_MAX + READ_S + 1
        catalog = world.catalog()
        left = [one for one in ledgers if await catalog.ledgers.get(one) is not None]
        assert left == world.unreadable

    run_virtual(main(), until_s=10_000)


def test_a_long_stream_that_is_deleted_holds_up_no_requests_and_no_metrics():
    async def main():
        world = SlowWorld()
        await due(world, count=80, lag_ms=-1)
        claimed = await world.stream(SMALL, Policy(offload_time_ms=0))
        await world.catalog().retention.begin_stream_deletion(LARGE)
        leader, stop = scheduler(world), asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(leader.run(stop))
            await asyncio.sleep(LIMITS.interval_s + TURNS_S_MAX / 2)
            await world.seal(claimed, ENTRIES)
            await asyncio.sleep(TURNS_S_MAX + SWEEP_S + LIMITS.interval_s)
            assert asked_for(world) == [SMALL]
            assert leader.lags[SMALL].ledgers == 1
            longest_s = 0.0
            for _ in range(100):
                await asyncio.sleep(LIMITS.interval_s)
                longest_s = max(longest_s, leader.pass_s)
            assert TURNS_S_MAX <= longest_s <= TURNS_S_MAX + SWEEP_S + 1
            stop.set()
        assert await world.catalog().streams.names() == [SMALL]
        assert not world.bucket.objects

    run_virtual(main(), until_s=10_000)


def test_many_streams_take_a_pass_no_longer_than_one():
    async def main():
        world = SlowWorld()
        names = [StreamName(f"s{number}") for number in range(7)]
        ledgers = [one for name in names for one in await due(world, name, 3)]
        world.unreadable = ledgers[:2]
        leader = scheduler(world, limits=replace(LIMITS, streams_in_flight_max=2))
        await leader.begin()
        catalog = world.catalog()
        for _ in range(12):
            await leader.run_pass()
            assert leader.pass_s <= TURNS_S_MAX + READ_S + 1
        left = [one for one in ledgers if await catalog.ledgers.get(one) is not None]
        assert left == world.unreadable

    run_virtual(main(), until_s=10_000)


def test_each_action_has_its_turn_whatever_fails_before_it():
    world = World()
    clock = world.clock
    turns = Turns(clock)
    place = world.offloader().location(LedgerId(1), UUID(int=1))
    attempt = AbandonedAttempt(uuid=UUID(int=1), location=place, abandoned_ms=1)
    actions: list[Action | Trimming] = [
        RemoveStream(),
        DropTrimmed(ledger_id=LedgerId(1)),
        SweepAbandoned(ledger_id=LedgerId(1), attempt=attempt, strike_off=False),
        SweepAbandoned(
            ledger_id=LedgerId(1), attempt=replace(attempt, uuid=UUID(int=2)), strike_off=False
        ),
        BeginTrim(ledger_ids=(LedgerId(2),), grounds=TrimGrounds(policy=None, paused=False)),
    ]

    def pass_of(seconds: float) -> list[Action | Trimming]:
        (name,) = turns.begin([LARGE], known=[LARGE])
        done: list[Action | Trimming] = []
        for one in turns.of(name, actions[::-1]):
            done.append(one)
            clock.advance(seconds)
        return done

    slow = [pass_of(TURNS_S_MAX) for _ in range(6)]
    assert slow == [[one] for one in [*actions, actions[0]]]
    assert pass_of(0) == [*actions[1:], actions[0]]
    assert pass_of(0) == actions


def test_streams_that_had_no_turn_are_first_in_the_next_pass():
    world = World()
    turns = Turns(world.clock)
    names = [StreamName(one) for one in "abc"]
    assert turns.begin(names[::-1], known=names) == names
    assert turns.has_turn(names[0])
    world.clock.advance(TURNS_S_MAX)
    assert not turns.has_turn(names[1])
    assert turns.begin(names, known=names) == [*names[1:], names[0]]
    assert turns.begin(names, known=names) == names
    world.clock.advance(TURNS_S_MAX)
    assert not turns.has_turn(names[2])
    turns.forget()
    assert turns.begin(names, known=names) == names


def test_it_is_known_for_how_long_no_pass_came_to_the_end():
    world = World()
    clock, turns = world.clock, Turns(world.clock)
    trims: list[Action | Trimming] = [DropTrimmed(ledger_id=LedgerId(one)) for one in (1, 2)]

    def pass_of(due: list[StreamName], seconds: float) -> float:
        for name in turns.begin(due, known=[LARGE, SMALL]):
            if not turns.has_turn(name):
                break
            for _ in turns.of(name, trims):
                clock.advance(seconds)
        return turns.behind_s

    assert pass_of([LARGE, SMALL], 1.0) == 0
    # Streams that have no turn, and then actions of one: it is behind from the first of these on.
    assert pass_of([LARGE, SMALL], TURNS_S_MAX) == 0
    assert pass_of([SMALL], TURNS_S_MAX) == TURNS_S_MAX
    clock.advance(100)
    assert pass_of([SMALL], 1.0) == TURNS_S_MAX + 102
    assert pass_of([SMALL], 1.0) == 0
    # What was put off may not be due any more.
    assert pass_of([LARGE], TURNS_S_MAX) == 0
    clock.advance(100)
    assert pass_of([], 0.0) == 100
    assert pass_of([], 0.0) == 0
    # Another leader begins with nothing.
    assert pass_of([LARGE], TURNS_S_MAX) == 0
    turns.forget()
    clock.advance(100)
    assert turns.behind_s == 0


def test_it_is_known_for_how_long_something_fails_whenever_it_is_tried():
    """A store that forbids deletions takes no time for that: no pass is behind."""
    forbids = [LedgerId(-1)]

    async def main():
        world = World()
        keeps = Policy(offload_time_ms=0, retention_time_ms=3_600_000)
        claimed = await world.stream(policy=keeps, raw=True)
        forbids[:] = [await world.seal(claimed, ENTRIES) for _ in range(2)]
        offloader = BlockOffloader.delete_offloaded

        async def deleted(self, ledger_id, *rest):
            if ledger_id in forbids:
                raise RefusedError("403 AccessDenied")
            await offloader(self, ledger_id, *rest)

        async with running(world) as (leader,):
            with patch.object(BlockOffloader, "delete_offloaded", deleted):
                await asyncio.sleep(1.9 * HOUR)
                assert leader.failing_s == pytest.approx(0.9 * HOUR, abs=60)
                assert leader.behind_s == 0
                assert leader.ledger_states["trimming"] == 2
                # That others come and go is no news of the one that fails.
                del forbids[1]
                await asyncio.sleep(HOUR)
                assert leader.failing_s == pytest.approx(1.9 * HOUR, abs=60)
                assert leader.ledger_states["trimming"] == 1
                forbids.clear()
                await asyncio.sleep(HOUR)
            assert leader.failing_s == 0
            assert not leader.ledger_states["trimming"]

    run_virtual(main(), until_s=100 * HOUR)


def test_a_bucket_that_may_not_be_listed_any_more_fails_deletions_as_all_else_does():
    """Nothing is to be written of a quiet stream, so that nothing else would find it out."""

    async def main():
        world, given = World(), no_faults()
        (ledger_id,) = await due(world, count=1, lag_ms=30_000)
        gate = Leader(world, given).gate
        leader = scheduler(world, manifests=gate)
        await leader.begin()
        await leader.run_pass()
        given.outages = {"objects.list"}
        for _ in range(2):
            await asyncio.sleep(60)
            await leader.run_pass()
        assert leader.failing_s == pytest.approx(60, abs=1)
        assert gate.stopped(LARGE) is None
        assert await world.catalog().ledgers.get(ledger_id) is not None
        given.outages = set()
        await leader.run_pass()
        assert leader.failing_s == 0
        assert await world.catalog().ledgers.get(ledger_id) is None

    run_virtual(main())


def test_what_nobody_foresaw_fails_as_all_else_does(monkeypatch):
    async def main():
        world = World()
        await due(world, count=1)

        async def broken(*given, **how):
            raise ValueError("a defect")

        monkeypatch.setattr(BlockOffloader, "verify", broken)
        leader = scheduler(world)
        await leader.begin()
        await leader.run_pass()
        await asyncio.sleep(60)
        await leader.run_pass()
        assert leader.failing_s == pytest.approx(60, abs=1)
        monkeypatch.undo()
        await leader.run_pass()
        assert leader.failing_s == 0

    run_virtual(main())


def test_what_failed_and_is_not_due_any_more_does_not_fail():
    world = World()
    turns = Turns(world.clock)
    actions = [DropTrimmed(ledger_id=LedgerId(one)) for one in range(3)]
    for name in (LARGE, SMALL):
        turns.note(name, actions[0], failed=True)
        turns.note(name, actions[1], failed=True)
    world.clock.advance(60)
    turns.note(LARGE, actions[0], failed=True)
    turns.note(SMALL, actions[0], failed=False)
    assert turns.failing_s == 60
    list(turns.of(LARGE, actions[1:]))
    assert turns.failing_s == 0
    turns.note(SMALL, actions[2], failed=True)
    world.clock.advance(60)
    assert turns.failing_s == 60
    turns.begin([LARGE], known=[LARGE, SMALL])
    assert turns.failing_s == 0


def test_for_how_long_a_sweep_fails_is_known_to_who_leads_next():
    async def main():
        world = World()
        claimed = await world.stream(policy=Policy(offload_time_ms=0, retention_time_ms=3_600_000))
        await world.seal(claimed, ENTRIES)
        await world.seal(claimed, ENTRIES)

        async def forbidden(*given, **how):
            raise RefusedError("403 AccessDenied")

        with patch.object(BlockOffloader, "delete_offloaded", forbidden):
            told = []
            for _ in range(4):
                async with running(world) as (leader,):
                    await asyncio.sleep(0.5 * HOUR)
                    told.append(leader.failing_s / HOUR)
            assert told == pytest.approx([0, 0, 0.5, 1], abs=0.05)
        async with running(world) as (leader,):
            await asyncio.sleep(HOUR)
            assert leader.failing_s == 0

    run_virtual(main(), until_s=100 * HOUR)


def test_of_several_that_fail_the_oldest_counts_whichever_has_its_turn_first():
    world = World()
    turns, clock = Turns(world.clock), world.clock
    now_ms = clock.wall_ms()
    new, old, swept = (
        SweepAbandoned(
            ledger_id=LedgerId(number),
            attempt=AbandonedAttempt(
                uuid=UUID(int=number),
                location=world.offloader().location(LedgerId(number), UUID(int=number)),
                abandoned_ms=now_ms - before_s * 1000,
                swept_ms=swept_ms,
            ),
            strike_off=bool(swept_ms),
        )
        for number, before_s, swept_ms in ((1, 10, 0), (2, 7200, 0), (3, 9000, now_ms - 60_000))
    )
    for _ in range(2):
        for one in (new, old, swept):
            turns.note(LARGE, one, failed=True)
        assert turns.failing_s == 7200
    turns.note(LARGE, old, failed=False)
    for one in (new, swept):
        turns.note(LARGE, one, failed=True)
    assert turns.failing_s == 60
    # A clock that is off says nothing for longer than it is, and what was seen is known.
    clock.jump_wall(-86_400)
    clock.advance(600)
    assert turns.failing_s == 600
    clock.jump_wall(86_400)
    assert turns.failing_s == 660
