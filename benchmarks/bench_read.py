"""Claim: reading a ledger back from S3 through the reader is not much slower than S3 itself.

client    ``tierlog.client`` iterates over every entry, checksums verified, through the reader
http      the same bytes over plain HTTP from the reader, looked at by nobody
ranges    aioboto3 gets the same object by ranges of 1 MB, one after the other
plain     the leanest plain client gets it by ranges of 1 MiB, as many at once as the reader does

"Elsewhere" are numbers of Apache Pulsar's own reader; nothing here is divided by them.

The ledger went the whole way: appended, sealed, offloaded by the offloader, complete. The
reader keeps less than a quarter of it, so that each run fetches it again; runs take turns.
"""

import asyncio
import functools
from collections.abc import Awaitable, Mapping
from typing import Any

import aioboto3
import aiohttp
from aiobotocore.config import AioConfig

from common import (
    MB,
    MIB,
    Bench,
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
from reading import offload, read_plainly
from tierlog.client import open_client
from tierlog.runtime.settings import load_settings

STREAM = "bench"
RANGE_BYTES = MB
READ_BYTES = 4 * MIB
CACHE_BYTES = 256 * MIB
OF_PLAIN = 0.9

# MB/s of a whole ledger that lies in memory, by its entries' length; after warming up in brackets.
ELSEWHERE = {
    "Pulsar's reader, another day on 2 cores": "100 B 29 (36), 1 KB 86-92 (127-134), 10 KB 141-149"
}


async def read_by_client(parameters: Mapping[str, Any]) -> Result:
    """Iterate over all entries (in a child)."""
    async with open_client(load_settings()) as client:
        meter, length, tiers = Meter(), 0, set()
        async for entry in client.reader(STREAM).entries():
            length += len(entry.data)
            tiers.add(entry.tier)
        assert tiers == {"tier2"}, tiers
        assert length == parameters["bytes"], length
        return meter.result(length)


async def read_by_http(parameters: Mapping[str, Any]) -> Result:
    """Get all frames (in a child)."""
    url = f"http://{load_settings().client.reader_http_address}/v1/streams/{STREAM}/runs"
    async with aiohttp.ClientSession(read_bufsize=MIB) as session:
        meter, length, where = Meter(), 0, "earliest"
        while length < parameters["bytes"]:
            query = {"from": where, "bytes_max": str(READ_BYTES)}
            async with session.get(url, params=query) as answer:
                assert answer.status == 200, answer.status
                async for piece in answer.content.iter_any():
                    length += len(piece)
                where = answer.headers["Tierlog-Next"]
        return meter.result(length)


async def read_by_ranges(_: Mapping[str, Any]) -> Result:
    """Get the largest object by ranges (in a child)."""
    settings = load_settings().s3
    assert settings.secret_key is not None
    session = aioboto3.Session(
        aws_access_key_id=settings.access_key,
        aws_secret_access_key=settings.secret_key.get_secret_value(),
        region_name=settings.region,
    )
    config = AioConfig(s3={"addressing_style": "path"})
    async with session.client("s3", endpoint_url=settings.endpoint_url, config=config) as s3:
        listed = await s3.list_objects_v2(Bucket=settings.bucket)
        largest = max(listed["Contents"], key=lambda one: int(one["Size"]))
        size, key = int(largest["Size"]), largest["Key"]
        meter, length = Meter(), 0
        for start in range(0, size, RANGE_BYTES):
            stop = min(size, start + RANGE_BYTES) - 1
            answer = await s3.get_object(
                Bucket=settings.bucket, Key=key, Range=f"bytes={start}-{stop}"
            )
            async with answer["Body"] as body:
                length += len(await body.read())
        assert length == size
        return meter.result(length)


async def main() -> None:
    """Measure and tell."""
    arguments = parse(
        arguments_parser("reading back against ranged GETs", size_mb=1000), quick_mb=200
    )
    size = arguments.size * MB
    cache = min(CACHE_BYTES, size // 4)
    settings = {"TIERLOG_READER__CACHE_BYTES_MAX": str(cache)}
    kinds = ["ingest", "reader", "offloader", "scheduler"]
    with folder_of(arguments) as folder:
        async with Bench(folder, kinds, settings) as bench:
            await bench.sealed_ledger(STREAM, size=size, entry_size=arguments.entry_size)
            say("offloading")
            await offload(bench, STREAM)
            length = size // arguments.entry_size * arguments.entry_size

            def child(mode: str) -> Awaitable[Result]:
                return run_child(__file__, mode, {"bytes": length}, bench.env)

            runs = await take_turns(
                {mode: functools.partial(child, mode) for mode in MODES}, arguments.runs
            )
    claims = [
        ratio_claim("client / ranged GETs", runs, of="client", to="ranges", target=0.6),
        ratio_claim("http / ranged GETs", runs, of="http", to="ranges", target=0.6),
        ratio_claim("client / plain", runs, of="client", to="plain", target=OF_PLAIN),
        ratio_claim("http / plain", runs, of="http", to="plain", target=OF_PLAIN),
        median_claim("client", runs["client"], "mb_per_s", unit="MB/s"),
        median_claim("http", runs["http"], "mb_per_s", unit="MB/s"),
        median_claim("ranged GETs", runs["ranges"], "mb_per_s", unit="MB/s"),
        median_claim("plain", runs["plain"], "mb_per_s", unit="MB/s"),
        median_claim("client's CPU", runs["client"], "cpu_s_per_gb", unit="s/GB"),
        median_claim("ranged GETs' CPU", runs["ranges"], "cpu_s_per_gb", unit="s/GB"),
    ]
    report("read", arguments, claims, runs)
    if arguments.output == "table":
        for name, numbers in ELSEWHERE.items():
            print(f"  elsewhere: {name}: {numbers} MB/s")


MODES = {
    "client": read_by_client,
    "http": read_by_http,
    "ranges": read_by_ranges,
    "plain": read_plainly,
}

if __name__ == "__main__":
    if not child_mode(MODES):
        asyncio.run(main())
