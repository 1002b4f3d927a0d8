"""A defect in one thing that the scheduler does ends neither the others nor the process.

Nothing is hidden: what was being done says so, it is counted, and the log has the trace.
"""

from __future__ import annotations

import asyncio

import pytest
import structlog

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.gates import OpenGate
from tests.unit.offload.scrubs import runner
from tests.unit.offload.world import TOPICS, World
from tests.unit.scheduler.test_scheduler import ENTRIES, running, scheduler
from tests.unit.scheduler.test_scrubs import run_for
from tierlog.model.ids import stream_name
from tierlog.model.policy import Policy
from tierlog.model.scrub import ScrubState, ScrubWish
from tierlog.offload.messages import parse_request
from tierlog_scheduler.actions import Actions
from tierlog_scheduler.defects import DEFECTS, describe
from tierlog_scheduler.policy import decide
from tierlog_scheduler.policy_api import PolicyApi
from tierlog_scheduler.scrubs import ScrubSchedule

AT_ONCE = Policy(offload_time_ms=0)
GOOD, BAD = stream_name("good"), stream_name("bad")


def counted(work: str) -> float:
    return float(DEFECTS.labels(work)._value.get())


def test_a_scrub_that_meets_a_defect_says_so_and_the_next_one_comes(monkeypatch):
    async def main():
        world = World()
        await world.stream()
        found = runner(world, ScrubSchedule(interval_s=60))
        before, whole = counted("scrub"), found._scrubber.run

        async def broken(report, *, deep_from):
            async with asyncio.TaskGroup():
                raise KeyError("no such digest")

        monkeypatch.setattr(found._scrubber, "run", broken)
        with structlog.testing.capture_logs() as logs:
            await run_for(world, found, 90)
        (report,) = await found.reports()
        assert (report.state, report.error) == (
            ScrubState.FAILED,
            "unexpected KeyError: 'no such digest'",
        )
        assert not report.is_clean
        assert counted("scrub") == before + 1
        (told,) = [one for one in logs if one["event"] == "unexpected_error"]
        assert told["log_level"] == "error"
        assert isinstance(told["exc_info"], ExceptionGroup)
        monkeypatch.setattr(found._scrubber, "run", whole)
        asked = await found.ask(ScrubWish())
        await run_for(world, found, 70)
        assert asked.is_clean

    run_virtual(main())


def test_a_defect_beside_a_scrub_does_not_end_the_schedule(monkeypatch):
    async def main():
        world = World()
        await world.stream()
        found = runner(world, ScrubSchedule(interval_s=60))
        whole, before = found._kept.is_restored, counted("scrub schedule")

        async def broken():
            raise ZeroDivisionError

        monkeypatch.setattr(found._kept, "is_restored", broken)
        await run_for(world, found, 200)
        assert counted("scrub schedule") == before + 3
        monkeypatch.setattr(found._kept, "is_restored", whole)
        await run_for(world, found, 90)
        assert [one.is_clean for one in await found.reports()] == [True]

    run_virtual(main())


class BrokenGate(OpenGate):
    async def record(self, snapshot, read):
        if snapshot.stream.name == BAD:
            raise AttributeError("it has no manifest")
        await super().record(snapshot, read)


def break_decide(monkeypatch, bad_ledger):
    def broken(view, now, delays):
        if any(one.listed.ledger_id == bad_ledger for one in view.ledgers):
            raise OverflowError("a stamp of the year 292277026596")
        return decide(view, now, delays)

    monkeypatch.setattr("tierlog_scheduler.scheduler.decide", broken)


def break_act(monkeypatch, bad_ledger):
    del bad_ledger
    whole = Actions._do

    async def do(self, stream, action, now):
        if stream.name == BAD:
            raise TypeError("not an action")
        await whole(self, stream, action, now)

    monkeypatch.setattr(Actions, "_do", do)


@pytest.mark.parametrize(
    ("work", "broken", "gate"),
    [
        ("decide", break_decide, None),
        ("act", break_act, None),
        ("read stream", None, BrokenGate()),
    ],
)
def test_one_streams_defect_stops_that_one_alone(monkeypatch, work, broken, gate):
    async def main():
        world = World()
        bad = await world.stream(BAD, policy=AT_ONCE)
        bad_ledger = await world.seal(bad, ENTRIES)
        good = await world.stream(GOOD, policy=AT_ONCE)
        good_ledger = await world.seal(good, ENTRIES)
        before = counted(work)
        with monkeypatch.context() as patched:
            if broken is not None:
                broken(patched, bad_ledger)
            one, stop = scheduler(world, manifests=gate), asyncio.Event()
            async with asyncio.TaskGroup() as group:
                group.create_task(one.run(stop))
                await asyncio.sleep(35)
                assert one.passes >= 3
                assert counted(work) >= before + 3
                assert one.defect(BAD) is not None
                assert one.defect(GOOD) is None
                answer = await PolicyApi(world.catalog(), one).explain(BAD)
                assert answer.unexpected_error == one.defect(BAD)
                stop.set()
        asked = [parse_request(event).ledger_id for event in world.queue.events(TOPICS.requested)]
        assert asked == [good_ledger], "the other stream went on"
        async with running(world):
            await asyncio.sleep(300)
            context = await world.context(bad_ledger)
            assert context.complete, "once it is mended, it goes on"

    run_virtual(main())


def test_one_actions_defect_keeps_none_of_the_same_stream_from_its_turn(monkeypatch):
    async def main():
        world = World()
        claimed = await world.stream(BAD, policy=Policy(offload_time_ms=0, deletion_lag_ms=0))
        ledgers = [await world.seal(claimed, ENTRIES) for _ in range(4)]
        for ledger_id in ledgers:
            await world.worker().handle(world.request(claimed, ledger_id))
        leader, before = scheduler(world), counted("act")
        whole = leader._actions.delete_tier1

        async def broken(action):
            if action.context.ledger_id == ledgers[1]:
                raise FileNotFoundError("shelf/1")
            await whole(action)

        monkeypatch.setattr(leader._actions, "delete_tier1", broken)
        await leader.begin()
        for _ in range(5):
            await leader.run_pass()
            await asyncio.sleep(10)
        found = [(await world.context(one)).state.name for one in ledgers]
        assert found == ["TIER1_DELETED", "COMPLETE", "TIER1_DELETED", "TIER1_DELETED"]
        assert counted("act") >= before + 4
        leader.leading = True
        assert leader.defect(BAD) == "FileNotFoundError: shelf/1"

    run_virtual(main())


def test_a_defect_in_a_pass_as_a_whole_does_not_end_the_leader(monkeypatch):
    async def main():
        world = World()
        ledger_id = await world.seal(await world.stream(policy=AT_ONCE), ENTRIES)
        before = counted("pass")
        async with running(world) as (leader,):
            with monkeypatch.context() as patched:
                patched.setattr(leader.mirror, "newest_id", lambda: 1 // 0)
                await asyncio.sleep(35)
                assert counted("pass") >= before + 3
                assert leader.passes == 0, "what alarms look at stands still"
            await asyncio.sleep(120)
            assert leader.passes > 5
            assert (await world.context(ledger_id)).complete

    run_virtual(main())


def test_of_a_group_the_first_error_is_told():
    nested = ExceptionGroup("outer", [ExceptionGroup("inner", [ValueError("this")]), KeyError()])
    assert describe(nested) == "ValueError: this"
