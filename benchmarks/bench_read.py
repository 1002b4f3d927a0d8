"""Claim: reading a ledger back from S3 through the reader is not much slower than S3 itself.

reader    the reader by itself, as its process puts it together: answers that nobody is sent
client    ``tierlog.client`` iterates over every entry, checksums verified, through the reader
http      the same bytes over plain HTTP from the reader, looked at by nobody
first     ``http`` from a reader that has just started and read nothing yet
by obstore  ``client`` and ``http`` from a reader that fetches with obstore, where that is installed
ranges    aioboto3 gets the same object by ranges of 1 MiB, one after the other
aioboto3  it gets eight at a time, as the reader does
obstore   the same with obstore, where that is installed (``make test-obstore`` does it)
threads   the same with the standard library's client, a thread a connection, and no checksums
relay     ``threads`` in a process that only passes on what it gets (``relay.py``), to this one

The target is against the fastest of those that get eight at a time. All of them, and Apache
Pulsar's own reader (``bench_read_peer.py``), have the bytes in the process that asks the store for
them, as ``reader`` has; ``client`` and ``http`` have them in one more, as ``relay`` has.

MB of the first four are of entries, without frames. The ledger went the whole way: appended,
sealed, offloaded by the offloader, complete. The reader is started anew before each run, keeps less
than a quarter of it, and has read another ledger, longer than its cache, since: a service's first
touch of 256 MB is the operating system's work, done once. Runs take turns.
"""

import asyncio
import importlib.util
from collections.abc import Awaitable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import aiohttp

from common import (
    MB,
    MIB,
    Bench,
    Claim,
    Meter,
    Result,
    arguments_parser,
    child_mode,
    folder_of,
    median_claim,
    parse,
    ratio_claim,
    report,
    run_child,
    say,
    take_turns,
)
from own_reader import read_frames
from reading import (
    IN_FLIGHT,
    READ_BYTES,
    cold_reader,
    offload,
    read_by_obstore,
    read_by_sdk,
    read_by_threads,
)
from relay import read_by_relay
from tierlog.client import open_client
from tierlog.format.frame import FRAME_HEADER_LEN
from tierlog.runtime.settings import load_settings

STREAM = "bench"
WARM = "warm"
WARM_OF_CACHE = 1.25
"""So much longer than the cache is what a reader has read before."""
CACHE_BYTES = 256 * MIB
OF_PLAIN = 0.9
BY_OBSTORE = {"TIERLOG_READER__OBJECT_READS": "obstore"}


async def read_by_client(parameters: Mapping[str, Any]) -> Result:
    """Iterate over all entries (in a child)."""
    async with open_client(load_settings()) as client:
        meter, length, tiers = Meter(), 0, set()
        async for entry in client.reader(parameters["stream"]).entries():
            length += len(entry.data)
            tiers.add(entry.tier)
        assert tiers == {"tier2"}, tiers
        assert length == parameters["bytes"], length
        return meter.result(length)


async def read_by_http(parameters: Mapping[str, Any]) -> Result:
    """Get all frames from the reader service (in a child)."""
    address = load_settings().client.reader_http_address
    url = f"http://{address}/v1/streams/{parameters['stream']}/runs"
    expected = parameters["bytes"] + parameters["entries"] * FRAME_HEADER_LEN
    async with aiohttp.ClientSession(read_bufsize=MIB) as session:
        meter, length, where = Meter(), 0, "earliest"
        while length < expected:
            query = {"from": where, "bytes_max": str(READ_BYTES)}
            async with session.get(url, params=query) as answer:
                assert answer.status == 200, answer.status
                async for piece in answer.content.iter_any():
                    length += len(piece)
                where = answer.headers["Tierlog-Next"]
        assert length == expected, (length, expected)
        return meter.result(parameters["bytes"])


async def offloaded(bench: Bench, stream: str, *, size: int, entry_size: int) -> dict[str, Any]:
    """Bring a stream of one ledger to tier 2; return what readers of all of it are told."""
    await bench.sealed_ledger(stream, size=size, entry_size=entry_size)
    say("offloading")
    await offload(bench, stream)
    entries = size // entry_size
    return {"stream": stream, "entries": entries, "bytes": entries * entry_size}


async def main() -> None:
    """Measure and tell."""
    arguments = parse(
        arguments_parser("reading back against ranged GETs", size_mb=1000), quick_mb=200
    )
    size = arguments.size * MB
    cache = min(CACHE_BYTES, size // 4)
    plain_names = plain_clients()
    settings = {"TIERLOG_READER__CACHE_BYTES_MAX": str(cache)}
    kinds = ["ingest", "reader", "offloader", "scheduler"]
    with folder_of(arguments) as folder:
        async with Bench(folder, kinds, settings) as bench:
            whole, warm = [
                await offloaded(bench, stream, size=length, entry_size=arguments.entry_size)
                for stream, length in ((STREAM, size), (WARM, int(WARM_OF_CACHE * cache)))
            ]

            async def ours(mode: str, *, used: bool, **changed: str) -> Result:
                await cold_reader(bench, **changed)
                if used:
                    await run_child(__file__, "http", warm, bench.env)
                return await run_child(__file__, mode, whole, bench.env)

            async def alone() -> Result:
                parameters = {"warm": warm, "whole": whole}
                return await run_child(__file__, "reader", parameters, bench.env)

            def plain(mode: str, in_flight: int) -> Awaitable[Result]:
                return run_child(__file__, mode, {"in_flight": in_flight}, bench.env)

            runs = await take_turns(
                {
                    "reader": alone,
                    "client": partial(ours, "client", used=True),
                    "http": partial(ours, "http", used=True),
                    "first": partial(ours, "http", used=False),
                    **{
                        f"{mode} by obstore": partial(ours, mode, used=True, **BY_OBSTORE)
                        for mode in ("client", "http")
                        if "obstore" in plain_names
                    },
                    "ranges": partial(plain, "aioboto3", 1),
                    **{name: partial(plain, name, IN_FLIGHT) for name in (*plain_names, "relay")},
                },
                arguments.runs,
            )
    report("read", arguments, claims_of(runs), runs)


def plain_clients() -> list[str]:
    """Return the plain clients that are there."""
    if importlib.util.find_spec("obstore") is not None:
        return ["aioboto3", "obstore", "threads"]
    say("obstore is not installed: without it")
    return ["aioboto3", "threads"]


def claims_of(runs: Mapping[str, Sequence[Result]]) -> list[Claim]:
    """Return what is claimed of what was measured."""
    plain = [name for name in runs if name in {"aioboto3", "obstore", "threads"}]
    fastest = max(plain, key=lambda name: median(run["mb_per_s"] for run in runs[name]))
    return [
        ratio_claim("reader / ranged GETs", runs, of="reader", to="ranges", target=0.6),
        ratio_claim("client / ranged GETs", runs, of="client", to="ranges", target=0.6),
        ratio_claim("http / ranged GETs", runs, of="http", to="ranges", target=0.6),
        *(
            ratio_claim(f"{name} / fastest: {fastest}", runs, of=name, to=fastest, target=OF_PLAIN)
            for name in runs
            if name.startswith(("reader", "client", "http"))
        ),
        *(
            ratio_claim(f"{name} / relay", runs, of=name, to="relay", target=OF_PLAIN)
            for name in ("client", "http")
        ),
        ratio_claim(f"relay / fastest: {fastest}", runs, of="relay", to=fastest),
        *(median_claim(name, runs[name], "mb_per_s", unit="MB/s") for name in runs),
        *(median_claim(f"{name}: CPU", runs[name], "cpu_s_per_gb", unit="s/GB") for name in runs),
    ]


MODES = {
    "reader": read_frames,
    "client": read_by_client,
    "http": read_by_http,
    "aioboto3": read_by_sdk,
    "obstore": read_by_obstore,
    "threads": read_by_threads,
    "relay": read_by_relay,
}

if __name__ == "__main__":
    if not child_mode(MODES):
        asyncio.run(main())
