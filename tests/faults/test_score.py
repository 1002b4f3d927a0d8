"""A run of real points whose troubles were not done is no good run."""

from collections import deque

import pytest

from tests.faults.lives import Plan, Told, Trouble
from tests.faults.proxy import Place
from tests.faults.run import (
    REDRAWN_MAX,
    TRIES_MAX,
    Score,
    in_turn,
    live_all,
    main,
    seldom,
    until_met,
)


def plan_at(number: int) -> Plan:
    place = Place("zookeeper", "set", number)
    return Plan(victim="offloader", place=place, trouble=Trouble.KILL_BEFORE)


def told(plan: Plan, *, met: bool) -> Told:
    return Told(plan=plan, met=met, complete_s=1.0, places=())


@pytest.mark.parametrize(
    ("lives", "unmet", "good"), [(0, 0, False), (1, 1, False), (20, 2, True), (20, 3, False)]
)
def test_a_run_fails_when_more_than_a_tenth_was_not_done(lives, unmet, good):
    score = Score()
    for number in range(lives):
        while score.take(told(plan_at(number), met=number >= unmet)):
            pass
    assert (score.faults() == []) is good
    if not good:
        assert f"{unmet} of {lives} places" in score.faults()[0]


async def test_a_place_that_did_not_come_is_tried_again_and_what_never_comes_is_told_by_name():
    # At which life of it each place comes.
    comes = {0: 1, 1: TRIES_MAX, 2: TRIES_MAX + 1, 3: 1}
    lived: list[int] = []

    async def live(plan: Plan) -> Told:
        assert plan.place is not None
        lived.append(plan.place.nth)
        return told(plan, met=lived.count(plan.place.nth) >= comes[plan.place.nth])

    score, plans = Score(), deque(plan_at(number) for number in comes)
    await live_all(live, plans, score)
    assert [lived.count(number) for number in comes] == [1, TRIES_MAX, TRIES_MAX, 1]
    assert lived[: len(comes)] == list(comes), "again behind all others"
    assert score.unmet == [str(plan_at(2))]
    assert (len(score.places), sum(score.lived.values())) == (4, 2 + 2 * TRIES_MAX)


def test_a_run_fails_when_a_life_ended_badly():
    score = Score()
    score.take(told(plan_at(0), met=True))
    score.failed.append("offloader kill_before at s3.put#0: nothing reads back")
    assert score.faults() == score.failed


@pytest.mark.parametrize(
    ("first_met", "lived"), [(0, 2), (1, 2), (2, 3), (4, 5), (99, 2 + REDRAWN_MAX)]
)
async def test_further_places_are_drawn_until_one_came(first_met, lived):
    async def live(plan: Plan) -> Told:
        assert plan.place is not None
        return told(plan, met=plan.place.nth == first_met)

    assert len(await until_met(live, [plan_at(number) for number in range(9)], 2)) == lived


@pytest.mark.parametrize("trouble", [Trouble.STOP, Trouble.WIPE])
def test_a_share_of_places_is_stopped_or_wiped_at_and_none_of_a_scrub(trouble):
    places = tuple(Place("zookeeper", "set", number) for number in range(20))
    lives = [
        Told(plan=plan, met=False, complete_s=1.0, places=places)
        for plan in (
            Plan(victim="offloader"),
            Plan(victim="scheduler", delete=True),
            Plan(victim="scheduler", scrub=True),
        )
    ]
    drawn = seldom(lives, trouble, 0.25, seed=1)
    assert len(set(drawn)) == 10
    assert {one.trouble for one in drawn} == {trouble}
    assert not any(one.scrub for one in drawn)
    assert drawn != seldom(lives, trouble, 0.25, seed=2)
    assert seldom(lives, trouble, 0.0, seed=1) == []


@pytest.mark.parametrize("option", ["--stops", "--wipes"])
@pytest.mark.parametrize("said", ["-1", "7", "nan", "abc"])
def test_a_share_that_is_none_is_refused_before_anything_starts(option, said, capsys):
    with pytest.raises(SystemExit):
        main([option, said])
    assert f"{said} is not from 0 (none) to 1 (all)" in capsys.readouterr().err


def test_stops_and_wipes_are_drawn_apart():
    places = tuple(Place("zookeeper", "set", number) for number in range(40))
    lives = [Told(plan=Plan(victim="offloader"), met=False, complete_s=1.0, places=places)]
    stops, wipes = (
        {one.place for one in seldom(lives, trouble, 0.25, seed=1)}
        for trouble in (Trouble.STOP, Trouble.WIPE)
    )
    assert not wipes <= stops


def test_a_lane_begins_with_a_kind_of_its_own_and_goes_on_with_those_of_others() -> None:
    kinds = ("scrub", "offload", "delete")
    assert [in_turn(number, kinds) for number in range(4)] == [
        ["scrub", "offload", "delete"],
        ["offload", "delete", "scrub"],
        ["delete", "scrub", "offload"],
        ["scrub", "offload", "delete"],
    ]
