"""Checks the specification: ``python -m tests.spec.run`` looks at every model and every mistake.

Prints one line each, as ``docs/spec/README.md`` has them, and ends with exit code 1 when a model
is broken or a mistake is not found. ``--trace`` shows the counterexamples.
"""

from __future__ import annotations

import argparse
import sys
import time

from tests.spec.models import MODELS, check_mistake, check_model, mistakes
from tests.spec.tlc import Tlc


def look_at_models(tlc: Tlc, chosen: list[str], *, trace: bool) -> bool:
    """Look through whole state spaces; tell if all is well."""
    fine = True
    print("| model | states generated | distinct | depth | s | |\n|---|---|---|---|---|---|")
    for model in chosen:
        began_s = time.perf_counter()
        verdict = check_model(tlc, model)
        fine = fine and verdict.broken is None
        print(
            f"| `{model}` | {verdict.generated:,} | {verdict.distinct:,} | {verdict.depth} "
            f"| {time.perf_counter() - began_s:.0f} | {verdict.broken or 'all hold'} |",
            flush=True,
        )
        if trace:
            print(verdict.output)
    return fine


def look_at_mistakes(tlc: Tlc, chosen: str, *, trace: bool) -> bool:
    """Look for the counterexample of each mistake; tell if each was found."""
    fine = True
    print("| mistake | model | breaks | steps | s |\n|---|---|---|---|---|")
    for mistake in (one for one in mistakes() if chosen in one.name):
        began_s = time.perf_counter()
        verdict = check_mistake(tlc, mistake)
        caught = mistake.is_caught(verdict)
        as_meant = ", on purpose" if mistake.breaks_nothing else ""
        fine = fine and caught
        print(
            f"| {mistake.name} | `{mistake.model}` "
            f"| {verdict.broken or 'nothing'}{as_meant if caught else ' (NOT AS EXPECTED)'} "
            f"| {max(0, verdict.steps - 1)} | {time.perf_counter() - began_s:.0f} |",
            flush=True,
        )
        if trace:
            print(verdict.output)
    return fine


def main(arguments: list[str] | None = None) -> int:
    """Look; the process's exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="append", choices=MODELS, help="only this one's space")
    parser.add_argument("--mistake", help="only mistakes whose name holds this")
    parser.add_argument("--trace", action="store_true", help="show all that TLC says")
    chosen = parser.parse_args(arguments)
    tlc = Tlc()
    fine = True
    if chosen.model or chosen.mistake is None:
        fine = look_at_models(tlc, chosen.model or MODELS, trace=chosen.trace)
    if chosen.mistake is not None or not chosen.model:
        fine = look_at_mistakes(tlc, chosen.mistake or "", trace=chosen.trace) and fine
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
