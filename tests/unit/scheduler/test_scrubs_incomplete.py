"""For how long no scrub could look at everything: that nothing was found says nothing then.

Must hold: one that fails, and one that leaves something out, are told the same; whoever leads next
goes on counting; who does not scrub tells nothing.
"""

from uuid import UUID

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.scrubs import runner
from tests.unit.offload.test_scrub import offloaded
from tests.unit.scheduler.test_scrub_metrics import NEVER, run_for, told
from tierlog.adapters.memory.faults import no_faults
from tierlog.model.scrub import ScrubReport, ScrubState, ScrubTimes, ScrubWish, all_seen_ms
from tierlog_scheduler.scrubs import LOOK_AGAIN_S, ScrubRunner, ScrubSchedule

HOUR = 3600.0
NAME = "tierlog_scheduler_scrub_incomplete_seconds"
OFTEN = ScrubSchedule(interval_s=HOUR, deep_interval_s=HOUR)


def incomplete_s(found: ScrubRunner) -> float:
    return told(found)[NAME][""]


@pytest.mark.parametrize(("verb", "state"), [("list", ScrubState.FAILED), ("get", ScrubState.DONE)])
def test_what_fails_and_what_leaves_something_out_is_told_by_how_long_it_does(verb, state):
    async def main():
        world, _ = await offloaded()
        given = no_faults()
        found = runner(world, OFTEN, faults=given)
        await run_for(found, 2.5 * HOUR)
        assert (await found.reports())[0].is_clean
        assert incomplete_s(found) == 0
        given.outages = {f"objects.{verb}"}
        await run_for(found, 30 * HOUR)
        newest = (await found.reports())[0]
        assert (newest.state, newest.is_clean) == (state, False)
        # More reports came since than are kept: the one from which it counts is one of them.
        assert 28 * HOUR < incomplete_s(found) < 31 * HOUR
        another = runner(world, OFTEN, faults=given)
        await run_for(another, LOOK_AGAIN_S / 2)
        assert incomplete_s(another) == pytest.approx(incomplete_s(found), abs=HOUR)
        given.outages = set()
        await run_for(another, 2 * HOUR)
        assert incomplete_s(another) == 0

    run_virtual(main(), until_s=100 * HOUR)


@pytest.mark.parametrize("verb", ["list", "get"])
def test_where_none_ever_looked_at_everything_it_counts_since_the_first_one_began(verb):
    async def main():
        world, _ = await offloaded()
        given = no_faults()
        given.outages = {f"objects.{verb}"}
        found = runner(world, OFTEN, faults=given)
        await run_for(found, 30 * HOUR)
        assert incomplete_s(found) == pytest.approx(29 * HOUR - OFTEN.first_s, abs=60)
        # Schedulers that are restarted more often than the alert takes count on.
        another = runner(world, OFTEN, faults=given)
        await run_for(another, HOUR)
        assert incomplete_s(another) == pytest.approx(30 * HOUR - OFTEN.first_s, abs=60)

    run_virtual(main(), until_s=100 * HOUR)


def test_what_counts_is_the_newest_that_came_to_its_end_and_looked_at_everything():
    def made(began_ms: int, *, state=ScrubState.DONE, unread: int = 0, ledgers=None) -> ScrubReport:
        return ScrubReport(
            scrub_id=UUID(int=began_ms),
            wish=ScrubWish(ledgers=ledgers),
            started_ms=began_ms,
            findings_max=1,
            state=state,
            unread_left_off=unread,
        )

    none = [made(9, state=ScrubState.FAILED), made(8, state=ScrubState.RUNNING)]
    some = made(7, ledgers=frozenset())
    times = ScrubTimes(begun_ms=5)
    assert all_seen_ms([*none, some], times) == 5
    assert all_seen_ms([], ScrubTimes()) == 0
    assert all_seen_ms(none, ScrubTimes()) == 8
    assert all_seen_ms([*none, some, made(6, unread=1), made(4, unread=1)], times) == 4
    assert all_seen_ms([*none, some, made(6, unread=1), made(3), made(2)], times) == 3


def test_who_scrubs_by_no_schedule_or_does_not_lead_tells_nothing():
    async def main():
        world, _ = await offloaded()
        for found in (runner(world, NEVER), runner(world, OFTEN, leading=False)):
            await run_for(found, 3 * HOUR)
            assert NAME not in told(found)
        assert NAME not in told(runner(world, OFTEN), leading=False)

    run_virtual(main(), until_s=100 * HOUR)
