"""Claim: a bucket that is far away is read nearly as fast as its distance lets anyone.

far      an offloaded ledger over HTTP from the reader, cold, from a bucket that is 1, 20 or 100 ms
         away; it has read another one before, longer than its cache
reader   the reader by itself, the same, in the process that asks, as the plain client's is
plain    the leanest plain client reads the same object from as far, in as many ranges at once
near     the same client, through the proxy too, from a bucket that is not away at all

A proxy adds the round trips (``delay_proxy``). What is in flight, over a round trip, is the limit;
and never more than ``near``, which is what the machine can do.
"""

import argparse
import asyncio
import contextlib
import itertools
import statistics
from collections.abc import Mapping
from functools import partial
from typing import Any, Final
from urllib.parse import urlsplit

from bench_read import CACHE_BYTES, STREAM, WARM, WARM_OF_CACHE, offloaded
from common import (
    MB,
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
from delay_proxy import delayed
from own_reader import read_frames
from reading import IN_FLIGHT, RANGE_BYTES, READ_BYTES, cold_reader, read_by_threads, read_many

Ledgers = Mapping[str, Mapping[str, Any]]
"""By name of their streams."""

OF_THE_LIMIT: Final = 0.8
ENDPOINT: Final = "TIERLOG_S3__ENDPOINT_URL"


class Distances:
    """The variants, over a cluster with two offloaded ledgers, and proxies to its bucket."""

    def __init__(self, bench: Bench, urls: dict[int, str], ledgers: Ledgers) -> None:
        self._bench, self._urls, self._ledgers = bench, urls, ledgers

    async def far(self, distance_ms: int) -> Result:
        """Read through the reader."""
        await cold_reader(self._bench, **{ENDPOINT: self._urls[distance_ms]})
        await self._read(self._ledgers[WARM])
        return await self._read(self._ledgers[STREAM])

    async def reader(self, distance_ms: int) -> Result:
        """Read with a reader of the child's own."""
        env = {**self._bench.env, ENDPOINT: self._urls[distance_ms]}
        ledgers = {"warm": self._ledgers[WARM], "whole": self._ledgers[STREAM]}
        return await run_child(__file__, "reader", ledgers, env)

    async def _read(self, ledger: Mapping[str, Any]) -> Result:
        parameters = {
            "stream": ledger["stream"], "places": ["earliest"], "bytes_each": ledger["bytes"],
            "read_bytes": READ_BYTES,
        }  # fmt: skip
        return await run_child(__file__, "many", parameters, self._bench.env)

    async def plain(self, distance_ms: int) -> Result:
        """Read without it."""
        env = {**self._bench.env, ENDPOINT: self._urls[distance_ms]}
        return await run_child(__file__, "plain", {"in_flight": IN_FLIGHT}, env)


def limited(runs: dict[str, list[Result]], distances: list[int]) -> dict[str, list[Result]]:
    """Return the limits, paired with the runs of the same round."""
    in_flight = IN_FLIGHT * RANGE_BYTES
    return {
        f"limit {distance_ms} ms": [
            {"mb_per_s": min(near["mb_per_s"], in_flight / MB / (distance_ms / 1000))}
            for near in runs["near"]
        ]
        for distance_ms in distances
    }


def claims_of(runs: dict[str, list[Result]], distances: list[int]) -> list[Claim]:
    """Return what is claimed."""
    found = []
    with_limits = {**runs, **limited(runs, distances)}
    for distance_ms, mode in itertools.product(distances, ("far", "reader")):
        name = f"{mode} {distance_ms} ms"
        found.append(
            ratio_claim(
                f"{name} / limit", with_limits, of=name, to=f"limit {distance_ms} ms",
                target=OF_THE_LIMIT,
            )
        )  # fmt: skip
        plain = f"plain {distance_ms} ms"
        found.append(ratio_claim(f"{name} / plain", runs, of=name, to=plain))
    found += [
        median_claim(name, results, "mb_per_s", unit="MB/s")
        for name, results in with_limits.items()
    ]
    return found


async def measure(
    arguments: argparse.Namespace, bench: Bench, ledgers: Ledgers
) -> dict[str, list[Result]]:
    """Run near and far by turns."""
    s3 = urlsplit(bench.cluster.endpoints.s3_endpoint_url).netloc
    distances: list[int] = arguments.distances
    async with contextlib.AsyncExitStack() as stack:
        urls = {}
        for distance_ms in [0, *distances]:
            address = await stack.enter_async_context(delayed(s3, distance_ms))
            urls[distance_ms] = f"http://{address}"
        variants = Distances(bench, urls, ledgers)
        runs = await take_turns(
            {
                "near": partial(variants.plain, 0),
                **{f"far {one} ms": partial(variants.far, one) for one in distances},
                **{f"reader {one} ms": partial(variants.reader, one) for one in distances},
                **{f"plain {one} ms": partial(variants.plain, one) for one in distances},
            },
            arguments.runs,
        )
    for distance_ms in distances:
        far = statistics.median(one["mb_per_s"] for one in runs[f"far {distance_ms} ms"])
        say(f"{distance_ms} ms away: {far:,.0f} MB/s")
    return runs


async def main() -> None:
    """Measure and tell."""
    parser = arguments_parser("reading from far away", size_mb=500)
    parser.add_argument("--distances", type=positives, default=[1, 20, 100], help="milliseconds")
    arguments = parse(parser, quick_mb=100)
    cache = min(CACHE_BYTES, arguments.size * MB // 4)
    settings = {"TIERLOG_READER__CACHE_BYTES_MAX": str(cache)}
    kinds = ["ingest", "reader", "offloader", "scheduler"]
    with folder_of(arguments) as folder:
        async with Bench(folder, kinds, settings) as bench:
            ledgers = {
                stream: await offloaded(bench, stream, size=size, entry_size=arguments.entry_size)
                for stream, size in (
                    (STREAM, arguments.size * MB), (WARM, int(WARM_OF_CACHE * cache)),
                )
            }  # fmt: skip
            runs = await measure(arguments, bench, ledgers)
    report("reading from far away", arguments, claims_of(runs, arguments.distances), runs)


if __name__ == "__main__":
    if not child_mode({"many": read_many, "reader": read_frames, "plain": read_by_threads}):
        asyncio.run(main())
