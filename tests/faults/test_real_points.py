"""Real processes killed and stopped at requests to real servers, and what is left of it: nothing.

A drawn share of all points; ``make faults`` lives them all, and dropped, late and doubled requests
too. Which share, a seed says: TIERLOG_FAULTS_SEED=… draws it again. All of it is lived once, on
several lanes side by side, since it is mostly waiting; each test then looks at its own part.
"""

import asyncio
import os
import random
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from uuid import uuid4

import pytest

from tests.faults.invariants import Fate
from tests.faults.lane import POLICY, VICTIMS, Lane, corner_of, open_lane
from tests.faults.lives import COMPLETE_S_MAX, Plan, Told, Trouble, life, plans_at
from tests.faults.proxy import Act, Place
from tests.faults.run import KILLS, OTHERS, first_lives, share_of, until_met
from tests.plugins.fix_servers import run_apart
from tierlog.embedded.supervisor import EmbeddedServers
from tierlog.model.ids import LedgerId
from tierlog.model.offload import OffloadState

pytestmark = [pytest.mark.integration, pytest.mark.timeout(420)]

SEED = int(os.environ.get("TIERLOG_FAULTS_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
AWAY_S = 8.0
"""Longer than a session."""
SERVERS = {
    "offloader": {"s3", "zookeeper", "kafka", "node"},
    "scheduler": {"s3", "zookeeper", "kafka"},
}
IN_MID_UPLOAD = Place("s3", "upload_part", 1)
AT_THE_END = {
    "its upload is about to be complete": Place("s3", "complete_upload", 0),
    "its copy is about to be complete": Place("zookeeper", "set", 1),
}


@dataclass(slots=True)
class Part:
    """What was lived for one test."""

    told: list[Told] = field(default_factory=list)
    points: int = 0
    error: str = ""


Parts = Mapping[str, Part]


async def kill(lane: Lane, parts: Parts) -> None:
    calm = await first_lives(lane, "offload")
    for victim, one in zip(VICTIMS, calm, strict=True):
        assert SERVERS[victim] <= {place.server for place in one.places}
        await lived(lane, parts[victim], plans_at(one, troubles=KILLS), lives=2)
    for trouble in OTHERS:
        plans = [plan for one in calm for plan in plans_at(one, troubles=(trouble,))]
        await lived(lane, parts["others"], plans, lives=1)


async def kill_scrubs(lane: Lane, parts: Parts) -> None:
    (calm,) = await first_lives(lane, "scrub")
    await lived(lane, parts["scrub"], plans_at(calm, troubles=KILLS), lives=2)


async def kill_deletions(lane: Lane, parts: Parts) -> None:
    calm = await first_lives(lane, "delete")
    by_scheduler = [one for one in calm if one.plan.victim == "scheduler"]
    part = parts["deletion"]
    for lives, told, troubles in ((2, by_scheduler, KILLS), (1, calm, (Trouble.STOP,))):
        plans = [plan for one in told for plan in plans_at(one, troubles=troubles)]
        await lived(lane, part, plans, lives=lives)


async def stop(lane: Lane, parts: Parts) -> None:
    calm = await first_lives(lane, "offload")
    plans = [plan for one in calm for plan in plans_at(one, troubles=(Trouble.STOP,))]
    await lived(lane, parts["zombies anywhere"], plans, lives=1)
    at = AT_THE_END[random.Random(SEED).choice(list(AT_THE_END))]
    plan = Plan(victim="offloader", place=at, trouble=Trouble.STOP)
    parts["zombie offloader"].told.append(await life(lane, plan))
    # Over the transaction that ends a local deletion; another leader has done it since.
    plan = Plan(victim="scheduler", place=Place("zookeeper", "multi", 0), trouble=Trouble.STOP)
    parts["zombie scheduler"].told.append(await life(lane, plan))


async def take_away(lane: Lane, parts: Parts) -> None:
    del parts
    await lane.create(POLICY)
    for server in ("zookeeper", "kafka", "s3"):
        await without(lane, server)


async def lived(lane: Lane, part: Part, plans: Sequence[Plan], *, lives: int) -> None:
    """Live a share of the plans, in which at least one has its trouble done if any can."""
    drawn = share_of(plans, len(plans), SEED + part.points)
    part.points += len(plans)
    part.told += await until_met(partial(life, lane), drawn, lives)


async def without(lane: Lane, server: str) -> None:
    """Take a server away from offloader and scheduler in the middle of an upload."""
    ledger_id = await held_in_mid_upload(lane)
    for judge in lane.judges.values():
        judge.away.add(server)
    lane.judges["offloader"].let_go(cut=False)
    await asyncio.sleep(AWAY_S)
    context = await lane.parts.catalog.contexts.get(ledger_id)
    assert context is not None
    # What was under way may end; the local copy has to wait for what nobody can say now.
    if server != "kafka":
        assert context.state in {OffloadState.OFFLOADING, OffloadState.COMPLETE}
    for judge in lane.judges.values():
        judge.away.clear()
    await lane.until_complete(ledger_id, seconds=COMPLETE_S_MAX)
    await lane.until_rest()


async def held_in_mid_upload(lane: Lane) -> LedgerId:
    lane.count_anew()
    judge = lane.judges["offloader"]
    judge.arm(IN_MID_UPLOAD, Act.HOLD_REQUEST)
    ledger_id = await lane.seal(Fate.MOVED)
    async with asyncio.timeout(COMPLETE_S_MAX):
        await judge.met.wait()
    return ledger_id


async def wipe(lane: Lane, parts: Parts) -> None:
    """Have Kafka come back without anything in the middle of an upload."""
    plan = Plan(victim="offloader", place=IN_MID_UPLOAD, trouble=Trouble.WIPE)
    parts["wiped queue"].told.append(await life(lane, plan))


Duty = Callable[[Lane, Parts], Awaitable[None]]
DUTIES: dict[str, tuple[Duty, tuple[str, ...]]] = {
    "kill": (kill, (*VICTIMS, "others")),
    "scrub": (kill_scrubs, ("scrub",)),
    "delete": (kill_deletions, ("deletion",)),
    "stop": (stop, ("zombie offloader", "zombie scheduler", "zombies anywhere")),
}


async def live(servers: EmbeddedServers, folder: Path, parts: Parts) -> None:
    """Live everything; the queue that all lanes have is wiped when the others are done."""
    async with asyncio.TaskGroup() as group:
        others = [
            group.create_task(
                on_lane(servers, folder / name, duty, [parts[one] for one in owned], parts)
            )
            for name, (duty, owned) in DUTIES.items()
        ]

        async def last(lane: Lane, parts: Parts) -> None:
            await take_away(lane, parts)
            await asyncio.wait(others)
            await wipe(lane, parts)

        both = [parts["away"], parts["wiped queue"]]
        group.create_task(on_lane(servers, folder / "away", last, both, parts))


async def on_lane(
    servers: EmbeddedServers, folder: Path, duty: Duty, owned: Sequence[Part], parts: Parts
) -> None:
    """Do one duty; what goes wrong is told by the tests that it belongs to."""
    folder.mkdir()
    try:
        settings = corner_of(servers, f"faults-{uuid4().hex[:12]}")
        async with open_lane(servers, settings, folder) as lane:
            await duty(lane, parts)
    except Exception as error:  # noqa: BLE001 - whatever it is, a test tells it
        for part in owned:
            part.error = f"{error!r}; logs in {folder}"


@pytest.fixture(scope="module")
def parts(servers, tmp_path_factory):
    names = [one for _, owned in DUTIES.values() for one in owned]
    names += ["away", "wiped queue"]
    found = {name: Part() for name in names}
    run_apart(live(servers, tmp_path_factory.mktemp("faults"), found))
    return found


@pytest.fixture
def check(parts, capsys):
    """Give what checks a part: nothing went wrong, and something was lived."""

    def checked(name: str, *, lives: int) -> None:
        part = parts[name]
        with capsys.disabled():
            for told in part.told:
                met = "" if told.met else ", did not come"
                print(
                    f"\n[faults] {told.plan}{met}: {told.complete_s:.1f} s", end="", file=sys.stderr
                )
            print(
                f"\n[faults] TIERLOG_FAULTS_SEED={SEED}, {name}: {part.points} points",
                end="",
                file=sys.stderr,
            )
        assert not part.error, f"TIERLOG_FAULTS_SEED={SEED}: {part.error}"
        assert len(part.told) >= lives
        assert any(told.met for told in part.told) or not lives, "no trouble was done"
        assert all(told.complete_s < COMPLETE_S_MAX for told in part.told)

    return checked


@pytest.mark.covers("A15", "A28", "A31", "A73")
@pytest.mark.parametrize("victim", VICTIMS)
def test_offloader_and_scheduler_killed_at_a_share_of_their_requests(check, parts, victim):
    check(victim, lives=2)
    assert parts[victim].points > 30


def test_requests_dropped_delayed_and_doubled(check, parts):
    check("others", lives=len(OTHERS))
    done = {told.plan.trouble for told in parts["others"].told if told.met}
    assert done == set(OTHERS), "by what the proxy counted"


def test_a_scrub_killed_at_a_share_of_its_requests(check, parts):
    check("scrub", lives=2)
    assert parts["scrub"].points > 30


def test_a_stream_s_deletion_killed_and_stopped_at_a_share_of_its_requests(check, parts):
    check("deletion", lives=3)
    assert parts["deletion"].points > 60
    assert {told.plan.trouble for told in parts["deletion"].told} >= {Trouble.STOP}


def test_offloader_or_scheduler_stopped_at_a_drawn_request_changes_nothing(check):
    check("zombies anywhere", lives=1)


def test_an_offloader_stopped_past_its_session_changes_nothing(check):
    check("zombie offloader", lives=1)


def test_a_scheduler_stopped_past_its_session_changes_nothing(check):
    check("zombie scheduler", lives=1)


def test_a_server_away_past_the_session_in_mid_upload_costs_nothing(check):
    check("away", lives=0)


def test_a_queue_wiped_in_mid_upload_costs_nothing(check):
    check("wiped queue", lives=1)
