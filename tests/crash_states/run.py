"""Many crash states of the storage node: ``python -m tests.crash_states.run --states 20000``.

Looks at workload after workload, one line each, until so many distinct disks were recovered. The
first that lost, changed or invented something ends it, with exit code 1 and what shows it again.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import random
import sys
import time
from collections.abc import Iterator

import structlog

from tests.crash_states.damage import (
    crashed_node,
    flips,
    judge,
    losses,
    stopped_node,
    swaps,
    truncations,
)
from tests.crash_states.explore import CrashStateError, Plan, explore
from tests.crash_states.life import ROOTS

EXHAUSTIVE = Plan(
    kind="one_by_one", seed=0, states_per_cut=4096, next_lives=12, states_per_next_cut=64
)


def plans(seed: int) -> Iterator[Plan]:
    """Iterate over workloads without end: the small one exhaustively, the others with new seeds."""
    yield EXHAUSTIVE
    for number in itertools.count(seed):
        for kind in ("mixed", "bulk", "scattered"):
            for roots in (ROOTS[:1], ROOTS):
                yield Plan(kind=kind, seed=number, roots=roots, states_max=12_000, next_lives=8)


def look_at_damages(seed: int) -> bool:
    """Flip every byte of small nodes, cut and swap everywhere; tell if all is well."""
    fine = True
    for make in (crashed_node, stopped_node):
        node, rng = make(), random.Random(seed)
        for cases in (flips(node, rng), truncations(node, step=64), swaps(node), losses(node)):
            report = judge(node, cases)
            fine = fine and not report.failures
            print(f"{node.name}: {report.counts.total()} damages\n{report}", flush=True)
    return fine


def look_at_states(states_max: int, seed: int) -> bool:
    """Recover so many distinct disks; tell if all was there."""
    states: set[bytes] = set()
    began_s = time.perf_counter()
    for plan in plans(seed):
        try:
            tally = explore(plan)
        except CrashStateError as error:
            print(f"FAILED: {error}")
            print(f"see it again: tests.crash_states.explore.explore({plan})")
            return False
        states |= tally.observations.keys()
        took_s = time.perf_counter() - began_s
        print(
            f"{plan.kind} {plan.seed}, {len(plan.roots)} folders: {tally.states} states of"
            f" {tally.cuts} power cuts in {tally.lives} lives;"
            f" {len(states)} states in {took_s:.0f} s",
            flush=True,
        )
        if len(states) >= states_max:
            break
    return True


def main(arguments: list[str] | None = None) -> int:
    """Look; the process's exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--states", type=int, default=20_000, help="how many distinct disks")
    parser.add_argument("--seed", type=int, default=1, help="the first seed")
    parser.add_argument("--damages", action="store_true", help="damage every byte of small nodes")
    chosen = parser.parse_args(arguments)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    fine = look_at_states(chosen.states, chosen.seed)
    if chosen.damages:
        fine = look_at_damages(chosen.seed) and fine
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
