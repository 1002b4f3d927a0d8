"""Claim: many readers cost the bucket and the reader's memory no more than one does.

one       one reader over HTTP, from the first entry of an offloaded ledger to its last, cold
eight     eight at once, from the first entry on: all of them want every range
resident  what the reader's process has in memory while 1, 8, 64 and 256 read at places of their
          own, ``--size`` in all each time, within a budget of 256 MB; and the same with a quarter
          of that as pages of JSON and of Arrow, and over gRPC

GETs are the reader's own count; a range is one MiB of what was read. The reader is started anew
before each run, but for those of one way of reading, whose numbers grow: what it took it keeps.
"""

import argparse
import asyncio
from typing import Final

from bench_read import STREAM
from common import (
    MB,
    MIB,
    Bench,
    Claim,
    Result,
    arguments_parser,
    child_mode,
    folder_of,
    median_claim,
    parse,
    positives,
    ratio_claim,
    report,
    run_child,
    say,
    take_turns,
)
from reading import (
    READ_BYTES,
    cold_reader,
    offload,
    peak_of,
    places_in,
    read_many,
    read_many_by_grpc,
    reader_says,
)
from tierlog.model.ids import LedgerId

MANY: Final = 8
GETS_MAX: Final = 1.1
BUDGET_BYTES: Final = 256 * MB
CACHE_BYTES: Final = 96 * MIB
OF_256_BYTES: Final = 256 * 1024
"""What one of very many asks for at once."""
BESIDE_MB_MAX: Final = 150.0
FLAT: Final = 1.1
PARTS: Final = ("same", "memory")
WAYS: Final = ("runs", "ndjson", "arrow", "grpc")


class Readers:
    """The variants, over a cluster with one offloaded ledger."""

    def __init__(self, bench: Bench, ledger_id: LedgerId, entries: int, byte_count: int) -> None:
        self.bench, self._ledger_id = bench, ledger_id
        self._entries, self._byte_count = entries, byte_count

    async def same(self, number: int) -> Result:
        """Let so many read the ledger from its beginning, cold."""
        await cold_reader(self.bench)
        result = await self._read(["earliest"] * number, self._byte_count, READ_BYTES)
        gets = await reader_says(self.bench, "tierlog_reader_ranges_fetched_total")
        each = result["bytes"] / number
        return {**result, "gets": gets, "gets_per_range": gets / max(1.0, each / MIB)}

    async def apart(self, number: int, way: str) -> Result:
        """Let so many read at places of their own, as much in all as one reads."""
        places = places_in(self._ledger_id, self._entries, number)
        pid = self.bench.cluster.services.pid("reader")
        byte_count = self._byte_count if way == "runs" else self._byte_count // 4
        work = self._read(places, byte_count // number, OF_256_BYTES, way)
        result, peak = await peak_of(pid, work)
        return {**result, "resident_mb": peak / MB}

    async def _read(
        self, places: list[str], bytes_each: int, read_bytes: int, way: str = "runs"
    ) -> Result:
        parameters = {
            "stream": STREAM, "places": places, "bytes_each": bytes_each, "read_bytes": read_bytes,
            "way": way, "address": self.bench.cluster.address("reader", "grpc"),
        }  # fmt: skip
        mode = "grpc" if way == "grpc" else "many"
        return await run_child(__file__, mode, parameters, self.bench.env)


def claims_of(runs: dict[str, list[Result]], numbers: list[int]) -> list[Claim]:
    """Return what is claimed of what was measured."""
    found = []
    if "one" in runs:
        found += [
            ratio_claim("eight / one, MB/s of all", runs, of="eight", to="one", target=1.0),
            *(
                median_claim(
                    f"{name}: GETs a range", runs[name], "gets_per_range",
                    target=GETS_MAX, at_most=True,
                )
                for name in ("one", "eight")
            ),
            *(
                median_claim(name, runs[name], "mb_per_s", unit="MB/s")
                for name in ("one", "eight")
            ),
        ]  # fmt: skip
    for way in WAYS:
        apart = [name for number in numbers if (name := _named(number, way)) in runs]
        found += _apart_claims(runs, apart)
    return found


def _apart_claims(runs: dict[str, list[Result]], apart: list[str]) -> list[Claim]:
    """Return what is claimed of one way of reading, whose runs are named, fewest readers first."""
    found = []
    for name in apart:
        most = BUDGET_BYTES / MB + BESIDE_MB_MAX
        found.append(
            median_claim(
                f"{name}: resident", runs[name], "resident_mb", unit="MB", target=most, at_most=True
            )
        )
    if apart:
        ends = {"of": apart[-1], "to": apart[0]}
        found.append(
            ratio_claim(
                f"{apart[-1]} / {apart[0]}: resident", runs, **ends,
                key="resident_mb", target=FLAT, at_most=True,
            )
        )  # fmt: skip
    found += [median_claim(name, runs[name], "mb_per_s", unit="MB/s") for name in apart]
    return found


def _named(number: int, way: str) -> str:
    return f"{number} apart" if way == "runs" else f"{number} apart, {way}"


async def measure(arguments: argparse.Namespace, readers: Readers) -> dict[str, list[Result]]:
    """Run all parts that are wanted."""
    runs: dict[str, list[Result]] = {}
    if "same" in arguments.parts:
        runs |= await take_turns(
            {"one": lambda: readers.same(1), "eight": lambda: readers.same(MANY)}, arguments.runs
        )
    if "memory" in arguments.parts:
        for turn in range(arguments.runs):
            for way in arguments.ways.split(","):
                await cold_reader(readers.bench)
                for number in arguments.readers:
                    result, name = await readers.apart(number, way), _named(number, way)
                    runs.setdefault(name, []).append(result)
                    say(f"round {turn + 1}: {name}: {result['resident_mb']:,.0f} MB resident")
    return runs


async def main() -> None:
    """Measure and tell."""
    parser = arguments_parser("many readers of one ledger", size_mb=1000)
    parser.add_argument("--parts", default=",".join(PARTS), help="which of these to measure")
    parser.add_argument("--ways", default=",".join(WAYS), help="how memory is read through")
    parser.add_argument("--readers", type=positives, default=[1, 8, 64, 256], help="at once")
    arguments = parse(parser, quick_mb=200)
    if unknown := set(arguments.ways.split(",")) - set(WAYS):
        parser.error(f"--ways: there is no {', '.join(sorted(unknown))}: {', '.join(WAYS)}")
    size = arguments.size * MB
    entries = size // arguments.entry_size
    settings = {
        "TIERLOG_READER__MEMORY_BYTES_MAX": str(BUDGET_BYTES),
        "TIERLOG_READER__CACHE_BYTES_MAX": str(CACHE_BYTES),
    }
    kinds = ["ingest", "reader", "offloader", "scheduler"]
    with folder_of(arguments) as folder:
        async with Bench(folder, kinds, settings) as bench:
            ledger_id = await bench.sealed_ledger(
                STREAM, size=size, entry_size=arguments.entry_size
            )
            say("offloading")
            await offload(bench, STREAM)
            readers = Readers(bench, ledger_id, entries, entries * arguments.entry_size)
            runs = await measure(arguments, readers)
    report("many readers", arguments, claims_of(runs, arguments.readers), runs)


if __name__ == "__main__":
    if not child_mode({"many": read_many, "grpc": read_many_by_grpc}):
        asyncio.run(main())
