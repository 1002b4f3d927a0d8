"""Claim: an offload from three storage nodes keeps up with one from memory.

nodes     a ledger that lies on three ingest processes at 3/2/2, read over HTTP from all of them,
          to SeaweedFS, side object, index and verification included
memory    the same of the same ledger, whose runs were read before: what is left is the upload

Each upload is a process of its own and meets a SeaweedFS that was just started empty. The ledger
is in the nodes' page cache, since a run from memory, which goes first, reads all of it as well;
``--cold`` drops the page cache before each run from the nodes.
"""

import argparse
import asyncio
from functools import partial
from typing import Final

from bench_offload import Offloads, offload_ledger
from common import (
    MB,
    Bench,
    Claim,
    Result,
    arguments_parser,
    child_mode,
    median_claim,
    open_bench,
    parse,
    ratio_claim,
    report,
    shape_settings,
    take_turns,
)
from nodes import drop_page_cache
from tierlog.model.ids import LedgerId

SHAPE: Final = "3/2/2"
NODES: Final = 3
ENTRY_SIZES: Final = (1000, 10_000)
RATIO_MIN: Final = 0.8


async def from_nodes(
    bench: Bench, offloads: Offloads, ledger_id: LedgerId, *, cold: bool
) -> Result:
    """Offload a ledger."""
    if cold:
        for name in bench.cluster.nodes:
            drop_page_cache(bench.cluster.data_dir(name))
    result = await offloads.offload(ledger_id)
    assert result["nodes"] == NODES, "the ledger does not lie on three nodes"
    return result


async def measure(
    bench: Bench, entry_size: int, arguments: argparse.Namespace
) -> tuple[dict[str, list[Result]], list[Claim]]:
    """Return the runs with entries of one size, and what is claimed of them."""
    offloads = Offloads(bench, parts_in_flight=arguments.parts_in_flight)
    ledger_id = await bench.sealed_ledger(
        f"of-{entry_size}", size=arguments.size * MB, entry_size=entry_size
    )
    memory, nodes = f"memory {entry_size} B", f"nodes {entry_size} B"
    runs = await take_turns(
        {
            memory: partial(offloads.offload, ledger_id, from_memory=True),
            nodes: partial(from_nodes, bench, offloads, ledger_id, cold=arguments.cold),
        },
        arguments.runs,
    )
    own = runs[nodes]
    claims = [
        ratio_claim(
            f"three nodes / memory, {entry_size} B", runs, of=nodes, to=memory, target=RATIO_MIN
        ),
        median_claim(nodes, own, "mb_per_s", unit="MB/s"),
        median_claim(memory, runs[memory], "mb_per_s", unit="MB/s"),
        median_claim(f"CPU, {nodes}", own, "cpu_s_per_gb", unit="s/GB"),
        median_claim(f"CPU, {memory}", runs[memory], "cpu_s_per_gb", unit="s/GB"),
        median_claim(f"CPU of the {nodes}", own, "nodes_cpu_s_per_gb", unit="s/GB"),
    ]
    return runs, claims


async def main() -> None:
    """Measure and tell."""
    parser = arguments_parser("offload from three nodes against one from memory", size_mb=1000)
    parser.add_argument("--parts-in-flight", type=int, default=3)
    parser.add_argument("--sizes", type=int, nargs="*", default=ENTRY_SIZES)
    parser.add_argument("--cold", action="store_true", help="drop the page cache before each run")
    arguments = parse(parser, quick_mb=200)
    claims: list[Claim] = []
    all_runs: dict[str, list[Result]] = {}
    async with open_bench(arguments, ["ingest"], shape_settings(SHAPE), nodes=NODES) as bench:
        for entry_size in arguments.sizes:
            runs, more = await measure(bench, entry_size, arguments)
            all_runs |= runs
            claims += more
    report("offload from three nodes", arguments, claims, all_runs)


if __name__ == "__main__":
    if not child_mode({"offload": offload_ledger}):
        asyncio.run(main())
