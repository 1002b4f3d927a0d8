"""A run of real points whose troubles were not done is no good run."""

import pytest

from tests.faults.lives import Plan, Told, Trouble
from tests.faults.proxy import Place
from tests.faults.run import REDRAWN_MAX, Score, until_met


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
        score.take(told(plan_at(number), met=number >= unmet))
    assert (score.faults() == []) is good
    if not good:
        assert f"{unmet} of {lives} places" in score.faults()[0]


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
