"""Every point of real processes: ``python -m tests.faults.run`` (``make faults``).

Lives a ledger once without trouble to learn the requests of offloader and scheduler, of a scrub and
of a stream's deletion, then once for each of them and each trouble. At a share of the places the
process is stopped past its session too, and resumed; at a share the queue comes back without
anything. Several lanes, each with processes of its own, work side by side over the same servers;
where queues are wiped each has a Kafka of its own. A place that did not come again is tried again,
and what never came is told by name. Ends with exit code 1 when a life ended badly, or when more
than a tenth of all places never came; logs are kept then.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Final
from uuid import uuid4

from tests.faults.invariants import Fate
from tests.faults.lane import KEPT, POLICY, VICTIMS, Lane, corner_of, open_lane, own_queue
from tests.faults.lives import Plan, Told, Trouble, life, plans_at
from tierlog.embedded.supervisor import EmbeddedServers
from tierlog.runtime.logs import configure_logging
from tierlog.runtime.sections import LogSettings

KINDS: Final = ("scrub", "offload", "delete")
KILLS: Final = (Trouble.KILL_BEFORE, Trouble.KILL_AFTER)
TELL_EACH: Final = 20
REDRAWN_MAX: Final = 3
TRIES_MAX: Final = 3
"""Clients repeat and poll: a place that came once does not come in every life."""
UNMET_SHARE_MAX: Final = 0.1
"""Of places that never came: a run with more of them does not show what it should."""
OTHERS: Final = (Trouble.DROP_REQUEST, Trouble.DROP_REPLY, Trouble.DELAY, Trouble.TWICE)


@dataclass(slots=True)
class Score:
    """How the lives of a run went."""

    lived: Counter[str] = field(default_factory=Counter)
    places: set[Plan] = field(default_factory=set)
    tries: Counter[Plan] = field(default_factory=Counter)
    """In vain."""
    unmet: list[str] = field(default_factory=list)
    """Those that came in no life."""
    failed: list[str] = field(default_factory=list)
    slowest_s: float = 0.0

    def take(self, told: Told) -> bool:
        """Count a life; tell whether its plan is to be lived again, as nothing was done in it."""
        assert told.plan.trouble is not None
        self.lived[told.plan.trouble.name] += 1
        self.places.add(told.plan)
        self.slowest_s = max(self.slowest_s, told.complete_s)
        if told.met:
            return False
        self.tries[told.plan] += 1
        if self.tries[told.plan] < TRIES_MAX:
            return True
        self.unmet.append(str(told.plan))
        return False

    def faults(self) -> list[str]:
        """Say what is wrong with the run; nothing: it shows what it should."""
        places = len(self.places)
        found = list(self.failed)
        if not places or len(self.unmet) > UNMET_SHARE_MAX * places:
            found.append(
                f"{len(self.unmet)} of {places} places never came, or nothing was done to them: "
                f"more than {UNMET_SHARE_MAX:.0%}"
            )
        return found


async def first_lives(lane: Lane, kind: str) -> list[Told]:
    """Make the stream, and live without trouble, once for each process."""
    if kind == "delete":
        await lane.create(None)
        return [await life(lane, Plan(victim=one, delete=True)) for one in VICTIMS]
    if kind == "scrub":
        await lane.create(KEPT)
        await lane.seal(Fate.COMPLETE)
        await lane.until_rest()
        return [await life(lane, Plan(victim="scheduler", scrub=True))]
    await lane.create(POLICY)
    # The first ledger of a lane has none before it that is trimmed.
    await life(lane, Plan(victim=VICTIMS[0]))
    told = await life(lane, Plan(victim=VICTIMS[0]))
    return [
        replace(told, plan=Plan(victim=one), places=tuple(lane.judges[one].places()))
        for one in VICTIMS
    ]


async def live_all(
    live: Callable[[Plan], Awaitable[Told]], plans: deque[Plan], score: Score
) -> bool:
    """Live one plan after the other, of those that all lanes of a kind share; False: one failed.

    One whose place did not come is lived again behind all others, by whichever lane is free.
    """
    while plans:
        plan = plans.popleft()
        try:
            if score.take(await live(plan)):
                plans.append(plan)
        except AssertionError as error:
            score.failed.append(f"{plan}: {error}")
            print(f"FAILED {plan}: {error}", flush=True)
            return False  # what this lane has now is no ground for the next life
        lived = sum(score.lived.values())
        if lived % TELL_EACH == 0:
            print(f"{lived} lives, {len(plans)} to come of these", flush=True)
    return True


async def until_met(
    live: Callable[[Plan], Awaitable[Told]], plans: Iterable[Plan], lives: int
) -> list[Told]:
    """Live so many plans, and further ones as long as no trouble was done, ``REDRAWN_MAX``."""
    told: list[Told] = []
    for plan in islice(plans, lives + REDRAWN_MAX):
        if len(told) >= lives and any(one.met for one in told):
            break
        told.append(await live(plan))
    return told


def share_of(plans: Sequence[Plan], count: int, seed: int | str) -> list[Plan]:
    """Return so many of them, drawn by a seed, of every trouble and process if there is room."""
    drawn = random.Random(seed).sample(list(plans), k=len(plans))
    return drawn[:count]


def seldom(told: Sequence[Told], trouble: Trouble, share: float, seed: int) -> list[Plan]:
    """Return a share of the places, drawn by a seed, for a trouble that takes long; of no scrub's.

    A leader that is stopped in a scrub takes the scrub along: nobody else goes on with it. And a
    scrub has no use for the queue.
    """
    lives = [one for one in told if not one.plan.scrub]
    plans = [plan for one in lives for plan in plans_at(one, troubles=(trouble,))]
    # By its name too: a small share is else drawn from the places of a larger one.
    return share_of(plans, round(share * len(plans)), f"{seed} {trouble.name}")


async def _lane(
    servers: EmbeddedServers,
    folder: Path,
    number: int,
    chosen: argparse.Namespace,
    shared: "Mapping[str, asyncio.Future[deque[Plan]]]",
    score: Score,
    *,
    opens: asyncio.Lock,
) -> None:
    for kind in in_turn(number, chosen.kinds):
        plans = shared[kind]
        if plans.done() and not plans.result():
            continue
        (folder / kind).mkdir(parents=True)
        async with AsyncExitStack() as stack:
            async with opens:  # processes of all lanes that start at once are not ready in time
                own = servers
                if chosen.wipes and kind != "scrub":
                    queue = own_queue(servers, folder / kind / "queue")
                    own = await stack.enter_async_context(queue)
                settings = corner_of(own, f"faults-{number}-{uuid4().hex[:8]}")
                opened = open_lane(own, settings, folder / kind)
                lane = await stack.enter_async_context(opened)
            told = await first_lives(lane, kind)
            if not plans.done():
                # The points are those of the lane that was first.
                plans.set_result(_drawn(told, chosen))
            if not await live_all(partial(life, lane), plans.result(), score):
                return


def in_turn(number: int, kinds: Sequence[str]) -> list[str]:
    """Return what a lane does: a kind of its own, as there are about as many points; then others.

    Lives of one kind may take thrice as long as those of another.
    """
    first = number % len(kinds)
    return [*kinds[first:], *kinds[:first]]


def _drawn(told: Sequence[Told], chosen: argparse.Namespace) -> deque[Plan]:
    plans = [plan for one in told for plan in plans_at(one, troubles=chosen.troubles)]
    for trouble, share in ((Trouble.STOP, chosen.stops), (Trouble.WIPE, chosen.wipes)):
        plans += seldom(told, trouble, share, chosen.seed)
    print(f"{_counts(told)}; {len(plans)} lives in all", flush=True)
    return deque(share_of(plans, chosen.lives or len(plans), chosen.seed))


def _counts(told: Sequence[Told]) -> str:
    parts = []
    for one in told:
        servers = Counter(place.server for place in one.places)
        each = ", ".join(f"{server} {count}" for server, count in sorted(servers.items()))
        of = " at a scrub" * one.plan.scrub + " at a deletion" * one.plan.delete
        parts.append(f"{one.plan.victim}{of}: {each}")
    return "; ".join(parts)


async def _run(keep: Path, chosen: argparse.Namespace) -> Score:
    score = Score()
    loop = asyncio.get_running_loop()
    shared: dict[str, asyncio.Future[deque[Plan]]] = {
        kind: loop.create_future() for kind in chosen.kinds
    }
    opens = asyncio.Lock()
    async with EmbeddedServers(keep / "servers") as servers, asyncio.TaskGroup() as group:
        for number in range(chosen.lanes):
            folder = keep / f"lane-{number}"
            group.create_task(_lane(servers, folder, number, chosen, shared, score, opens=opens))
    return score


def share(text: str) -> float:
    """Return a share of all, as it was said."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 (none) to 1 (all)")
    return value


def main(arguments: list[str] | None = None) -> int:
    """Run it; the process's exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lanes", type=int, default=6, help="side by side, of each kind first")
    parser.add_argument("--seed", type=int, default=1, help="draws the order")
    parser.add_argument("--lives", type=int, default=0, help="of each kind at most; 0: all")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="of lives")
    parser.add_argument(
        "--stops", type=share, default=0.1, help="the share of places with a stop too"
    )
    parser.add_argument(
        "--wipes", type=share, default=0.0, help="the share of places with a wiped queue too"
    )
    parser.add_argument("--kills-only", action="store_true", help="no dropped or doubled requests")
    parser.add_argument("--keep", type=Path, help="where logs are kept")
    chosen = parser.parse_args(arguments)
    assert chosen.lanes >= len(chosen.kinds)
    chosen.troubles = KILLS if chosen.kills_only else (*KILLS, *OTHERS)
    keep = chosen.keep or Path(tempfile.mkdtemp(prefix="tierlog-faults-"))
    keep.mkdir(parents=True, exist_ok=True)
    configure_logging(LogSettings(level="warning"), service="faults")
    began_s = time.monotonic()
    score = asyncio.run(_run(keep, chosen))
    print(
        f"{sum(score.lived.values())} lives in {time.monotonic() - began_s:.0f} s: "
        f"{dict(score.lived)}; the slowest copy took {score.slowest_s:.1f} s; "
        f"{len(score.unmet)} of {len(score.places)} places never came; "
        f"{len(score.failed)} failed, logs in {keep}"
    )
    for one in score.unmet:
        print(f"NEVER CAME, in {TRIES_MAX} lives: {one}")
    for one in (faults := score.faults()):
        print(f"FAILED {one}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
