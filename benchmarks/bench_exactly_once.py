"""Claim: exactly once costs at most a tenth of the throughput; beside what Pravega published.

plain           producers without a writer's number: an answer that is lost is told
conditional     the same producers, each append conditional on the one before it
plain-10k       events of 10 KB, one an append
conditional-10k the same, conditional
paced           ``conditional`` at ``--rate`` events a second: latencies where nothing queues up

``small`` is the test of seeds/002: a hundred producers, batches of a hundred events of 100 bytes, a
``--window`` of batches unanswered each. Its figures of Pravega are of another machine and three
servers: they stand beside ours, and are no ratio. All against one ingest process; runs take turns.
The producers are those of ``tierlog perf write``, in a process of their own. Where a machine is
shared, the node's CPU of an append tells more than the throughput.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Any

from common import (
    MB,
    Bench,
    Claim,
    Meter,
    Result,
    arguments_parser,
    child_mode,
    folder_of,
    median_claim,
    parse,
    positive,
    process_cpu_s,
    ratio_claim,
    report,
    run_child,
    take_turns,
)
from tierlog.cli.perf import WriteLoad, write_load
from tierlog.client import open_client
from tierlog.runtime.settings import load_settings

PRODUCERS = 100
SMALL = {"batch_events": 100, "event_bytes": 100}
LARGE = {"batch_events": 1, "event_bytes": 10_000}
SHARE_MIN = 0.9
QUICK_S = 2.0

FIGURES = ("average_ms", "p50_ms", "p90_ms", "p99_ms", "p999_ms")
PRAVEGA = {
    "conditional": (91, (46, 17, 109, 161, 362)),
    "conditional-10k": (431, (130, 95, 246, 797, 1077)),
}


async def write(parameters: Mapping[str, Any]) -> Result:
    """Run the producers (in a child)."""
    async with open_client(load_settings()) as client:
        meter = Meter()
        wanted = WriteLoad(**parameters)
        document = await write_load(client, wanted)
        whole = meter.result(1)
    numbers = {
        name: float(value)
        for name, value in document.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    share = whole["seconds"] / (wanted.duration_s + wanted.warmup_s)
    cpu_s = whole["cpu_s_per_gb"] / 10**9 / share
    gigabytes = numbers["mb_per_s"] * (wanted.duration_s + wanted.warmup_s) / 1000
    return numbers | {
        "cpu_s_per_gb": cpu_s / gigabytes,
        "rss_peak_mib": whole["rss_peak_mib"],
    }


async def main() -> None:
    """Measure and tell."""
    parser = arguments_parser("exactly once against plain appends", size_mb=1)
    parser.add_argument("--producers", type=positive, default=PRODUCERS)
    parser.add_argument("--window", type=positive, default=4, help="unanswered batches of each")
    parser.add_argument("--seconds", type=positive, default=10, help="of a run")
    parser.add_argument("--rate", type=positive, default=50_000, help="events a second of paced")
    arguments = parse(parser, quick_mb=1)
    seconds = QUICK_S if arguments.quick else float(arguments.seconds)
    with folder_of(arguments) as folder:
        async with Bench(folder, ["ingest"], {}) as bench:
            await bench.endless_stream("exactly-once", raw=False)

            def load(
                shape: Mapping[str, int], *, conditional: bool, rate: float = 0.0
            ) -> Callable[[], Awaitable[Result]]:
                wanted = WriteLoad(
                    stream="exactly-once",
                    producers=arguments.producers,
                    window=arguments.window,
                    duration_s=seconds,
                    conditional=conditional,
                    rate=rate,
                    **shape,
                )
                return lambda: _measured(bench, wanted)

            runs = await take_turns(
                {
                    "plain": load(SMALL, conditional=False),
                    "conditional": load(SMALL, conditional=True),
                    "plain-10k": load(LARGE, conditional=False),
                    "conditional-10k": load(LARGE, conditional=True),
                    "paced": load(SMALL, conditional=True, rate=float(arguments.rate)),
                },
                arguments.runs,
            )
    # A run is bounded by time: what it came to stands where others have what was asked for.
    arguments.size = round(max(one["bytes"] for one in runs["conditional"]) / MB)
    arguments.entry_size = SMALL["batch_events"] * SMALL["event_bytes"]
    report("exactly once", arguments, claims_of(runs), runs)


async def _measured(bench: Bench, wanted: WriteLoad) -> Result:
    """Run the producers in a child; tell the node's CPU of an append, too."""
    before_s = sum(process_cpu_s(pid) for pid in bench.node_pids())
    result = await run_child(__file__, "write", asdict(wanted), bench.env)
    cpu_s = sum(process_cpu_s(pid) for pid in bench.node_pids()) - before_s
    appends = result["batches_per_s"] * (wanted.duration_s + wanted.warmup_s)
    return result | {"node_cpu_us": cpu_s / appends * 1e6}


def claims_of(runs: Mapping[str, list[Result]]) -> list[Claim]:
    """Return the ratios, and each figure with Pravega's behind it."""
    claims = [
        ratio_claim(f"{of} / {to}", runs, of=of, to=to, target=SHARE_MIN)
        for of, to in (("conditional", "plain"), ("conditional-10k", "plain-10k"))
    ]
    claims += [
        ratio_claim(f"{of} / {to}: node's CPU", runs, of=of, to=to, key="node_cpu_us")
        for of, to in (("conditional", "plain"), ("conditional-10k", "plain-10k"))
    ]
    for name, results in runs.items():
        theirs = PRAVEGA.get(name)
        claims.append(_beside(name, results, "mb_per_s", "MB/s", theirs[0] if theirs else None))
        for place, figure in enumerate(FIGURES):
            known = theirs[1][place] if theirs else None
            claims.append(_beside(f"{name} {figure[:-3]}", results, figure, "ms", known))
    return claims


def _beside(name: str, results: list[Result], key: str, unit: str, pravega: float | None) -> Claim:
    told = f"{unit} (Pravega: {pravega:g})" if pravega is not None else unit
    return median_claim(name, results, key, unit=told)


if __name__ == "__main__":
    if not child_mode({"write": write}):
        asyncio.run(main())
