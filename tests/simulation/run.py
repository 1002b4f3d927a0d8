"""Replays runs of the simulation: ``python -m tests.simulation.run --seed N``.

Prints what happened, in order, and how it ended; with ``--seeds N`` runs many, one line each (or,
with ``--progress``, one line now and then), and ends with exit code 1 and the failing seeds when
any rule was broken.
"""

import argparse
import sys
import time
from dataclasses import replace

from tests.simulation.losses import LOSSES_SIZE
from tests.simulation.once import ONCE_SIZE
from tests.simulation.scenarios import run
from tests.simulation.steps import Plan
from tests.simulation.trace import Trace
from tests.simulation.world import DEFAULT_SIZE, QUORUM_SIZE, SIGNED_SIZE

PROGRESS_S = 20.0


class Progress:
    """Says now and then how far many runs are."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._began_s = self._said_s = time.perf_counter()

    def __repr__(self) -> str:
        return f"<Progress of {self._count} runs>"

    def tell(self, done: int, failed: int) -> None:
        """Say it, if it is time or the end."""
        now_s = time.perf_counter()
        if now_s - self._said_s < PROGRESS_S and done < self._count:
            return
        self._said_s, each_s = now_s, (now_s - self._began_s) / done
        left_min = each_s * (self._count - done) / 60
        print(
            f"{done} of {self._count} seeds, {failed} failed, {each_s:.1f} s each,"
            f" about {left_min:.0f} min left",
            flush=True,
        )


def replay_command(seed: int, plan: Plan) -> str:
    """Return what shows the same run again."""
    command = f"python -m tests.simulation.run --seed {seed} --ledgers {plan.ledgers}"
    if plan.focus:
        command += f" --focus {plan.focus}"
    if plan.size == QUORUM_SIZE:
        command += " --quorum"
    if plan.size == SIGNED_SIZE:
        command += " --signed"
    if plan.scenario == "lose_nodes":
        command += " --losses"
    if plan.scenario == "write_once":
        command += " --once"
    if plan.scenario == "trim_many":
        command += " --trims"
    return command


def _plan(chosen: argparse.Namespace) -> Plan:
    size = QUORUM_SIZE if chosen.quorum else DEFAULT_SIZE
    size = SIGNED_SIZE if chosen.signed else size
    plan = Plan(ledgers=chosen.ledgers, focus=chosen.focus, size=size)
    if chosen.losses:
        plan = replace(plan, size=LOSSES_SIZE, scenario="lose_nodes")
    if chosen.once:
        plan = replace(plan, size=ONCE_SIZE, scenario="write_once")
    if chosen.trims:
        plan = replace(plan, scenario="trim_many")
    return plan


def main(arguments: list[str] | None = None) -> int:
    """Run it; the process's exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="the (first) seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds, from the first on")
    parser.add_argument("--ledgers", type=int, default=100, help="how many ledgers a run fills")
    parser.add_argument("--quiet", action="store_true", help="no trace, only how it ended")
    parser.add_argument("--progress", action="store_true", help="no line for each run")
    parser.add_argument("--calls", action="store_true", help="each call of a port in the trace")
    parser.add_argument("--quorum", action="store_true", help="3 nodes, each entry on all of them")
    parser.add_argument("--signed", action="store_true", help="as --quorum; ledgers have a key")
    parser.add_argument("--losses", action="store_true", help="nodes are lost, bare ledgers too")
    parser.add_argument("--once", action="store_true", help="writers with conditional appends")
    parser.add_argument("--trims", action="store_true", help="retention takes that many away")
    parser.add_argument("--focus", default="", help="what goes wrong most: crash, stall, usurp, …")
    chosen = parser.parse_args(arguments)
    plan = _plan(chosen)
    failed: list[int] = []
    progress = Progress(chosen.seeds)
    for seed in range(chosen.seed, chosen.seed + chosen.seeds):
        echo = chosen.seeds == 1 and not (chosen.quiet or chosen.progress)
        trace = Trace(echo=echo, keep_calls=chosen.calls)
        began_s = time.perf_counter()
        try:
            result = run(seed, plan, trace)
        except Exception as error:  # noqa: BLE001 - each seed is told, the next one goes on
            failed.append(seed)
            print(f"seed {seed}: FAILED after {time.perf_counter() - began_s:.1f} s")
            print(f"{type(error).__name__}: {error}")
            print(f"see it again: {replay_command(seed, plan)}", flush=True)
        else:
            if not chosen.progress:
                print(f"{result} in {time.perf_counter() - began_s:.1f} s", flush=True)
        if chosen.progress:
            progress.tell(seed - chosen.seed + 1, len(failed))
    if failed:
        print(f"{len(failed)} of {chosen.seeds} runs failed: seeds {failed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
