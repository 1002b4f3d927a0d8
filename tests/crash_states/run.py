"""Many crash states of the storage node: ``python -m tests.crash_states.run --states 20000``.

Looks at workload after workload, one line each, until so many distinct disks were recovered. The
first that lost, changed or invented something ends it, with exit code 1 and what shows it again.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import sys
import time
from collections.abc import Iterator

import structlog

from tests.crash_states.explore import CrashStateError, Plan, explore

EXHAUSTIVE = Plan(
    kind="one_by_one", seed=0, states_per_cut=4096, next_lives=12, states_per_next_cut=64
)


def plans(seed: int) -> Iterator[Plan]:
    """Iterate over workloads without end: the small one exhaustively, the others with new seeds."""
    yield EXHAUSTIVE
    for number in itertools.count(seed):
        yield Plan(kind="mixed", seed=number, states_per_cut=48, next_lives=8)
        yield Plan(kind="bulk", seed=number, states_per_cut=48, next_lives=8)


def main(arguments: list[str] | None = None) -> int:
    """Look; the process's exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--states", type=int, default=20_000, help="how many distinct disks")
    parser.add_argument("--seed", type=int, default=1, help="the first seed")
    chosen = parser.parse_args(arguments)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    states: set[bytes] = set()
    began_s = time.perf_counter()
    for plan in plans(chosen.seed):
        try:
            tally = explore(plan)
        except CrashStateError as error:
            print(f"FAILED: {error}")
            print(f"see it again: tests.crash_states.explore.explore({plan})")
            return 1
        states |= tally.observations.keys()
        took_s = time.perf_counter() - began_s
        print(
            f"{plan.kind} {plan.seed}: {tally.states} states of {tally.cuts} power cuts"
            f" in {tally.lives} lives; {len(states)} states in {took_s:.0f} s",
            flush=True,
        )
        if len(states) >= chosen.states:
            return 0
    raise AssertionError("there are always more plans")


if __name__ == "__main__":
    sys.exit(main())
