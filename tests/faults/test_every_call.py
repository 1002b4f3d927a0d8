"""A trouble at every call of every process, on virtual time.

For each story (``tests.faults.stories``) and each process in it, the calls of a run without
trouble are the points. For each point the process is killed before the request and after it was
done: none is left out. Of the other troubles one in ``SHARE`` is run here, and all of them by
``make faults``, which sets TIERLOG_FAULTS_SHARE=1; TIERLOG_FAULTS_SEED moves what that is.
"""

import os
import sys

import pytest

from tests.faults.stories import STORIES, run_story
from tests.faults.troubles import Point, Trouble, fits

ROLES = [(one.name, kind) for one in STORIES.values() for kind in one.kinds]
SHARE = int(os.environ.get("TIERLOG_FAULTS_SHARE", "6"))
SEED = int(os.environ.get("TIERLOG_FAULTS_SEED", "0"))
KILLS = (Trouble.KILL_BEFORE, Trouble.KILL_AFTER)
CLOUDY = (Trouble.DROP_REQUEST, Trouble.DROP_REPLY)
ODD = (Trouble.STOP_BEFORE, Trouble.STOP_AFTER, Trouble.LATE, Trouble.TWICE)
QUEUE = (Trouble.WIPE, Trouble.WIPE_AND_KILL, Trouble.REPLAY)


def run_all(story: str, victim: str, troubles: tuple[Trouble, ...], *, share: int = 1) -> int:
    """Run a story once for each point and trouble, or for one in so many; return how many."""
    calm = run_story(story, victim)
    assert not calm.broken, "\n".join([*calm.broken, *calm.lines[-60:]])
    points = [
        (Point(number, trouble), call.name)
        for number, call in enumerate(calm.calls)
        for trouble in troubles
        if fits(trouble, call)
    ][SEED % share :: share]
    for point, name in points:
        ending = run_story(story, victim, point)
        assert ending.met, f"{name}, the {point.number}th call, did not come again"
        if ending.broken:
            what = f"{story}: {victim}, call {point.number} ({name}): {point.trouble.value}"
            pytest.fail("\n".join([what, *ending.broken, *ending.lines[-60:]]))
    return len(points)


def tell(capsys: pytest.CaptureFixture[str], story: str, victim: str, count: int) -> None:
    with capsys.disabled():
        print(f"\n[faults] {story}, {victim}: {count} runs", end="", file=sys.stderr)


@pytest.mark.timeout(600)
@pytest.mark.covers("A15", "A28", "A31")
@pytest.mark.parametrize(("story", "victim"), ROLES)
def test_killed_before_and_after_every_call(story, victim, capsys):
    tell(capsys, story, victim, run_all(story, victim, KILLS))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("story", "victim"), ROLES)
def test_no_answer_at_every_call(story, victim, capsys):
    tell(capsys, story, victim, run_all(story, victim, CLOUDY, share=SHARE))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("story", "victim"), ROLES)
def test_a_zombie_and_late_and_doubled_requests_at_every_call(story, victim, capsys):
    tell(capsys, story, victim, run_all(story, victim, ODD, share=SHARE))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("story", "victim"), [("offload", "worker"), ("offload", "scheduler")])
def test_the_queue_forgets_or_repeats_everything_at_every_call(story, victim, capsys):
    tell(capsys, story, victim, run_all(story, victim, QUEUE))
