"""Many crash states of the storage node: ``python -m tests.crash_states.run --states 20000``.

Looks at workload after workload, one line each, until so many distinct disks were recovered. The
first that lost, changed or invented something ends it, with exit code 1 and what shows it again.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import logging
import random
import sys
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor

import structlog

from tests.crash_states.checker import Observation
from tests.crash_states.damage import (
    Report,
    crashed_node,
    flips,
    judge,
    losses,
    stopped_node,
    swaps,
    truncations,
)
from tests.crash_states.explore import CrashStateError, Plan, Tally, explore
from tests.crash_states.life import ROOTS

EXHAUSTIVE = Plan(
    kind="one_by_one", seed=0, states_per_cut=4096, next_lives=12, states_per_next_cut=64
)
DAMAGE_SHARES = 200
PLANS_AHEAD = 4
NOTHING = Observation()


def plans(seed: int) -> Iterator[Plan]:
    """Iterate over workloads without end: the small one exhaustively, the others with new seeds."""
    yield EXHAUSTIVE
    for number in itertools.count(seed):
        for kind in ("mixed", "bulk", "scattered"):
            for roots in (ROOTS[:1], ROOTS):
                yield Plan(kind=kind, seed=number, roots=roots, states_max=8000, next_lives=8)


def _damages(name: str, seed: int, share: int, shares: int) -> Report:
    """Judge every ``shares``-th damage of a node, from one on; its log is judged, too."""
    node = crashed_node() if name == "crashed" else stopped_node()
    cases = itertools.chain(
        flips(node, random.Random(seed)), truncations(node, step=1), swaps(node), losses(node)
    )
    return judge(node, itertools.islice(cases, share, None, shares))


def look_at_damages(workers: Executor, seed: int) -> bool:
    """Flip every byte of small nodes, cut at every length, swap all pages; tell if all is well."""
    whole = {name: Report() for name in ("crashed", "stopped")}
    running = [
        (name, workers.submit(_damages, name, seed, share, DAMAGE_SHARES))
        for name in whole
        for share in range(DAMAGE_SHARES)
    ]
    began_s = time.perf_counter()
    for number, (name, part) in enumerate(running, start=1):
        told = part.result()
        whole[name].counts += told.counts
        whole[name].failures += told.failures
        if number % 10 == 0 or told.failures:
            seen, wrong = whole[name].counts.total(), len(whole[name].failures)
            took_s = time.perf_counter() - began_s
            print(
                f"{name}: {seen} damages, {wrong} of them wrong;"
                f" {number} of {len(running)} parts in {took_s:.0f} s",
                flush=True,
            )
    for name, report in whole.items():
        print(f"{name}: {report.counts.total()} damages\n{report}", flush=True)
    return not any(report.failures for report in whole.values())


def _states(plan: Plan) -> Tally | str:
    """Explore a plan; return what was found wrong instead."""
    try:
        with _quiet():
            tally = explore(plan)
    except CrashStateError as error:
        return str(error)
    tally.observations = dict.fromkeys(tally.observations, NOTHING)
    return tally


def look_at_states(workers: Executor, states_max: int, seed: int) -> bool:
    """Recover so many distinct disks; tell if all was there."""
    states: set[bytes] = set()
    began_s = time.perf_counter()
    coming, more = deque[tuple[Plan, Future[Tally | str]]](), plans(seed)
    while len(states) < states_max:
        while len(coming) < PLANS_AHEAD:
            plan = next(more)
            coming.append((plan, workers.submit(_states, plan)))
        plan, exploring = coming.popleft()
        found = exploring.result()
        if isinstance(found, str):
            print(f"FAILED: {found}")
            print(f"see it again: tests.crash_states.explore.explore({plan})")
            return False
        states |= found.observations.keys()
        print(
            f"{plan.kind} {plan.seed}, {len(plan.roots)} folders: {found.states} states of"
            f" {found.cuts} power cuts in {found.lives} lives;"
            f" {len(states)} states in {time.perf_counter() - began_s:.0f} s",
            flush=True,
        )
    for _, exploring in coming:
        exploring.cancel()
    return True


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the log silent; whoever looks at damages in the same process judges by what it says."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        yield
    finally:
        structlog.configure(**before)


def main(arguments: list[str] | None = None) -> int:
    """Look; the process's exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--states", type=int, default=20_000, help="how many distinct disks")
    parser.add_argument("--seed", type=int, default=1, help="the first seed")
    parser.add_argument("--damages", action="store_true", help="damage every byte of small nodes")
    chosen = parser.parse_args(arguments)
    with ProcessPoolExecutor() as workers:
        fine = look_at_states(workers, chosen.states, chosen.seed)
        if chosen.damages:
            fine = look_at_damages(workers, chosen.seed) and fine
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
