"""Histories of real processes under faults, judged: ``python -m tests.histories.run --seed N``.

Starts the servers, then a cluster for each history: for each seed one of a log, and one of
attributes. Prints what the judge says of each, and ends with exit code 1 when one is not
linearizable. The histories are kept, with the services' logs.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Final

from tests.histories.attribute_life import SMALL, record_attributes
from tests.histories.checker import Checker, CheckerMissingError
from tests.histories.cluster import HistoryCluster
from tests.histories.life import Plan, record
from tests.histories.nemeses import FAULTS
from tierlog.embedded.supervisor import EmbeddedServers
from tierlog.runtime.logs import configure_logging
from tierlog.runtime.sections import LogSettings

FILE: Final = "history.jsonl"

Record = Callable[..., Awaitable[dict[str, int]]]
KINDS: Final[Mapping[str, tuple[Record, Mapping[str, str]]]] = {
    "log": (record, {}),
    "attributes": (record_attributes, SMALL),
}
"""What histories are of: how one is recorded, and settings of the nodes."""


def main(arguments: list[str] | None = None) -> int:
    """Run it; the process's exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="the (first) seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many, from the first on")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long things go wrong")
    parser.add_argument("--nodes", type=int, nargs="+", default=[3], help="taken in turn")
    parser.add_argument("--of", nargs="+", choices=KINDS, default=[*KINDS], help="what of")
    parser.add_argument("--faults", default=",".join(FAULTS), help="which faults may come")
    parser.add_argument("--at-once", type=int, default=1, help="faults side by side, at most")
    parser.add_argument("--defect", default="", help="break the nodes: a mutant's name")
    parser.add_argument("--keep", type=Path, help="where histories and logs are kept")
    chosen = parser.parse_args(arguments)
    keep = chosen.keep or Path(tempfile.mkdtemp(prefix="tierlog-histories-"))
    keep.mkdir(parents=True, exist_ok=True)
    try:
        checker = Checker.build(keep)
    except CheckerMissingError as missing:
        print(f"error: {missing}", file=sys.stderr)
        return 1
    configure_logging(LogSettings(level="warning"), service="histories")
    faults = tuple(chosen.faults.split(","))
    plan = Plan(seconds=chosen.seconds, faults=faults, at_once=chosen.at_once)
    seeds = range(chosen.seed, chosen.seed + chosen.seeds)
    runs = {seed: chosen.nodes[step % len(chosen.nodes)] for step, seed in enumerate(seeds)}
    failed = asyncio.run(_run(runs, chosen.of, plan, keep, checker, chosen.defect))
    count = len(runs) * len(chosen.of)
    print(f"{count - failed} of {count} histories are linearizable; kept in {keep}")
    return 1 if failed else 0


async def _run(
    runs: dict[int, int], kinds: list[str], plan: Plan, keep: Path, checker: Checker, defect: str
) -> int:
    """Return how many histories are not linearizable, or failed."""
    failed = 0
    async with EmbeddedServers(keep / "servers") as servers:
        for seed, nodes in runs.items():
            for kind in kinds:
                folder = keep / f"seed-{seed}-{kind}"
                folder.mkdir()
                what = f"seed {seed}, {kind}, {nodes} nodes"
                record_one, env = KINDS[kind]
                began_s = time.monotonic()
                cluster = HistoryCluster(servers, folder, nodes=nodes, defect=defect, env=env)
                try:
                    async with cluster:
                        faults = await record_one(cluster, folder / FILE, seed=seed, plan=plan)
                except Exception as error:  # noqa: BLE001 - each one is told, the next goes on
                    failed += 1
                    print(f"{what}: FAILED: {error!r}; see {folder}", flush=True)
                    continue
                (judgement,) = checker.judge(folder / FILE)
                print(f"{what}, {time.monotonic() - began_s:.0f} s, {faults}")
                print(f"  {judgement}", flush=True)
                failed += judgement.verdict != "linearizable"
    return failed


if __name__ == "__main__":
    sys.exit(main())
