"""Claim: replicated appends keep up with Apache BookKeeper's, on the same machine.

ledger      one bare ledger, its writer in a process of its own, 3 storage nodes, a process each
stream      one stream through its owner, by one writer of ``tierlog.client``; events of 100 bytes
            go in batches of 100, larger ones as entries of their own
bookkeeper  BookKeeper's own client and 3 bookies, all in one JVM, V2 wire protocol, no throttle

``--shapes`` are ensemble / write quorum / ack quorum. 100 producers have ten appends each
unanswered (BookKeeper: a thousand). Everything that is answered is durable on an ack quorum.
Servers, clients and disk share one machine: what counts are ratios of runs that took turns.

At half load so many appends a second are due as the same variant took at most, halved; each
counts from when it was due, answered or not what came before.
"""

import asyncio
import statistics
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import bookie
from common import (
    MB,
    Bench,
    Claim,
    Meter,
    Result,
    arguments_parser,
    child_mode,
    due_times,
    entries_of,
    folder_of,
    latency_claims,
    median_claim,
    note_latency,
    parse,
    positives,
    quantiles,
    random_pool,
    ratio_claim,
    report,
    run_child,
    say,
    shape_settings,
    take_turns,
)
from tierlog.client import open_client
from tierlog.client.ledger_writer import LedgerAppender
from tierlog.client.ledgers import LedgerShape, open_ledgers
from tierlog.model.quorums import STRIPE_ENTRIES
from tierlog.runtime.settings import load_settings

PRODUCERS: Final = 100
WINDOW: Final = 10
HALF_S: Final = 4.0
STREAM: Final = "bench"
EVENT_BYTES: Final = 100


def shape_of(text: str, stripe_entries: int) -> LedgerShape:
    """Read ``3/2/2``."""
    ensemble, write, ack = (int(one) for one in text.split("/"))
    return LedgerShape(
        ensemble_size=ensemble, write_quorum=write, ack_quorum=ack, stripe_entries=stripe_entries
    )


# In children


async def append_to_ledger(parameters: Mapping[str, Any]) -> Result:
    """Append to a new bare ledger (in a child)."""
    size, rate = parameters["entry_size"], parameters["rate"]
    count = max(PRODUCERS, parameters["bytes"] // size)
    shape = shape_of(parameters["shape"], parameters["stripe_entries"])
    latencies: list[float] = []
    entries = entries_of(random_pool(), size, count)
    async with open_ledgers(load_settings()) as ledgers, await ledgers.create(shape) as ledger:
        await ledger.append(bytes(size))
        meter = Meter()
        if rate is None:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(PRODUCERS * WINDOW):
                    tasks.create_task(_produce(ledger, entries, latencies))
        else:
            await _produce_paced(ledger, entries, latencies, count=count, rate=rate)
        return meter.result(len(latencies) * size, **quantiles(latencies))


async def _produce(ledger: LedgerAppender, entries: Any, latencies: list[float]) -> None:  # noqa: ANN401
    for entry in entries:
        started_s = time.perf_counter()
        await (await ledger.send(entry))
        latencies.append(time.perf_counter() - started_s)


async def _produce_paced(
    ledger: LedgerAppender,
    entries: Any,  # noqa: ANN401
    latencies: list[float],
    *,
    count: int,
    rate: float,
) -> None:
    answers = []
    async for due_s in due_times(time.perf_counter(), 1 / rate, count):
        answer = await ledger.send(next(entries))
        answer.add_done_callback(partial(note_latency, latencies, due_s))
        answers.append(answer)
    for answer in answers:
        await answer


async def append_to_stream(parameters: Mapping[str, Any]) -> Result:
    """Append events to a stream, which the client batches (in a child)."""
    size, byte_count = parameters["event_size"], parameters["bytes"]
    async with (
        open_client(load_settings()) as client,
        client.writer(STREAM) as writer,
    ):
        await writer.send(bytes(size))
        await writer.flush()
        meter = Meter()
        for event in entries_of(random_pool(), size, byte_count // size):
            await writer.send(event)
        await writer.flush()
        return meter.result(byte_count)


# The benchmark


class Replication:
    """The variants over one cluster, for one shape."""

    def __init__(self, bench: Bench, folder: Path, *, shape: str, stripe: int, size: int) -> None:
        self._bench, self._folder = bench, folder
        self._shape, self._stripe, self._size = shape, stripe, size

    async def ledger(self, entry_size: int, *, rate: float | None = None) -> Result:
        """Append entries to a bare ledger."""
        byte_count = self._size if rate is None else int(HALF_S * rate) * entry_size
        parameters = {
            "entry_size": entry_size, "bytes": byte_count, "shape": self._shape,
            "stripe_entries": self._stripe, "rate": rate,
        }  # fmt: skip
        return await run_child(__file__, "ledger", parameters, self._bench.env)

    async def stream(self, event_size: int) -> Result:
        """Append events to a stream."""
        parameters = {"event_size": event_size, "bytes": self._size // 4}
        return await run_child(__file__, "stream", parameters, self._bench.env)

    async def bookkeeper(self, entry_size: int, *, rate: float | None = None) -> Result:
        """Let BookKeeper do it."""
        count = self._size // entry_size if rate is None else int(HALF_S * rate)
        outstanding = PRODUCERS * WINDOW
        work: tuple[Any, ...] = (entry_size, count, outstanding)
        works = [work if rate is None else (*work, rate)]
        found = await bookie.bookie_adds(self._folder, f"client:{self._shape}", works)
        return found[entry_size, outstanding]


async def measure(one: Replication, sizes: list[int], arguments: Any, *, peer: bool) -> Any:  # noqa: ANN401
    """Return all runs of one shape, and what is claimed of them."""
    variants: dict[str, Any] = {}
    for size in sizes:
        variants[f"ledger {size}"] = partial(one.ledger, size)
        if peer:
            variants[f"bookkeeper {size}"] = partial(one.bookkeeper, size)
    if "stream" in arguments.parts:
        variants["stream 100 B events"] = partial(one.stream, EVENT_BYTES)
    runs = await take_turns(variants, arguments.runs)
    if "half" in arguments.parts:
        for size in sizes:
            names = [f"ledger {size}", *([f"bookkeeper {size}"] if peer else [])]
            # The same load for both: half of what the slower one takes.
            rate = min(statistics.median(r["mb_per_s"] for r in runs[name]) for name in names)
            per_s = rate * MB / size / 2
            say(f"half load: {per_s:,.0f} entries of {size} bytes a second")
            halves: dict[str, Any] = {f"ledger {size} half": partial(one.ledger, size, rate=per_s)}
            if peer:
                halves[f"bookkeeper {size} half"] = partial(one.bookkeeper, size, rate=per_s)
            runs |= await take_turns(halves, arguments.runs)
    return runs


def claims_of(shape: str, runs: Any) -> list[Claim]:  # noqa: ANN401
    """Return what is claimed of one shape."""
    claims = []
    for name in [name for name in runs if name.startswith("ledger")]:
        peer = name.replace("ledger", "bookkeeper")
        if peer not in runs:
            continue
        if name.endswith("half"):
            claims.append(
                ratio_claim(f"{shape} {name} p99 / {peer}", runs, of=name, to=peer, key="p99_ms")
            )
        else:
            least = 1.0 if int(name.split()[1]) >= 10_000 else None
            claims.append(
                ratio_claim(f"{shape} {name} / {peer}", runs, of=name, to=peer, target=least)
            )
    claims += [
        median_claim(f"{shape} {name}", runs[name], "mb_per_s", unit="MB/s")
        for name in runs
        if not name.endswith("half")
    ]
    return claims + latency_claims(runs, runs, prefix=f"{shape} ")


async def main() -> None:
    """Measure and tell."""
    parser = arguments_parser("replicated appends beside BookKeeper's", size_mb=300)
    parser.add_argument("--shapes", default="3/2/2", help="ensemble/write/ack quorum, by commas")
    parser.add_argument(
        "--sizes", type=positives, default="1000,10000,100000", help="bytes of an entry"
    )
    parser.add_argument("--stripe-entries", type=int, default=STRIPE_ENTRIES)
    parser.add_argument("--parts", default="half,stream,bookkeeper", help="beside the ledger")
    arguments = parse(parser, quick_mb=40)
    reason = bookie.missing() or await bookie.build() if "bookkeeper" in arguments.parts else None
    if reason is not None:
        say(f"no BookKeeper beside it: {reason}")
    claims: list[Claim] = []
    all_runs: dict[str, Any] = {}
    for shape in arguments.shapes.split(","):
        settings = shape_settings(shape, stripe_entries=arguments.stripe_entries)
        nodes = int(shape.split("/")[0])
        with folder_of(arguments) as folder:
            async with Bench(folder, ["ingest"], settings, nodes=nodes) as bench:
                await bench.endless_stream(STREAM, raw=False)
                one = Replication(
                    bench,
                    folder,
                    shape=shape,
                    stripe=arguments.stripe_entries,
                    size=arguments.size * MB,
                )
                peer = "bookkeeper" in arguments.parts and reason is None
                runs = await measure(one, arguments.sizes, arguments, peer=peer)
        claims += claims_of(shape, runs)
        all_runs |= {f"{shape} {name}": results for name, results in runs.items()}
    report("replication", arguments, claims, all_runs)


if __name__ == "__main__":
    if not child_mode({"ledger": append_to_ledger, "stream": append_to_stream}):
        asyncio.run(main())
