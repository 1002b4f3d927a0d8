"""Claim: how soon a follower has what was just appended.

tail        from the moment an entry is handed to a writer until a follower of the stream, through
            the reader, has it
append      from the same moment until the writer is told that it is durable: what of it is not
            the reader's

One entry at a time, so that nothing waits behind anything else. Catch-up reads, whose latency is
unimportant, are measured by bench_read.py, throughput of appends by bench_append.py.
"""

import asyncio
import os
import time
from collections.abc import Mapping
from typing import Any

from common import (
    Bench,
    Meter,
    Result,
    arguments_parser,
    child_mode,
    folder_of,
    median_claim,
    parse,
    quantiles,
    ratio_claim,
    report,
    run_child,
    take_turns,
)
from tierlog.client import Client, Edge, open_client
from tierlog.runtime.settings import load_settings

ENTRIES = 1000
ENTRIES_QUICK = 200
NUMBER_LEN = 8


async def follow(parameters: Mapping[str, Any]) -> Result:
    """Append one entry, wait until the follower has it, and so on (in a child)."""
    count, entry_size = parameters["count"], parameters["entry_size"]
    stream = f"tail-{os.getpid()}"  # each run's own, so that nothing old is followed
    async with open_client(load_settings()) as client, client.writer(stream, raw=True) as writer:
        await writer.send(bytes(entry_size))
        await writer.flush()
        arrived: asyncio.Queue[tuple[int, float]] = asyncio.Queue()
        tails, appends = list[float](), list[float]()
        async with asyncio.TaskGroup() as group:
            following = group.create_task(_follow(client, stream, arrived))
            meter = Meter()
            for number in range(1, count + 1):
                payload = number.to_bytes(NUMBER_LEN, "big").ljust(entry_size, b"\0")
                sent_s = time.perf_counter()
                await writer.send(payload)
                await writer.flush()
                appends.append(time.perf_counter() - sent_s)
                tails.append(await _arrival(arrived, number) - sent_s)
            result = meter.result(count * entry_size, **quantiles(tails, prefix="tail_"))
            following.cancel()
    return {**result, **quantiles(appends, prefix="append_")}


async def _follow(client: Client, stream: str, arrived: "asyncio.Queue[tuple[int, float]]") -> None:
    async for event in client.reader(stream, start=Edge.EARLIEST, follow=True).events():
        number = int.from_bytes(event.payload[:NUMBER_LEN], "big")
        await arrived.put((number, time.perf_counter()))


async def _arrival(arrived: "asyncio.Queue[tuple[int, float]]", number: int) -> float:
    while True:
        found, at_s = await arrived.get()
        if found == number:
            return at_s


async def main() -> None:
    """Measure and tell."""
    arguments = parse(arguments_parser("latency of tail reads", size_mb=10), quick_mb=2)
    count = ENTRIES_QUICK if arguments.quick else ENTRIES
    arguments.size = count * arguments.entry_size // 10**6
    with folder_of(arguments) as folder:
        async with Bench(folder, ["ingest", "reader"], {}) as bench:
            parameters = {"count": count, "entry_size": arguments.entry_size}
            runs = await take_turns(
                {"follow": lambda: run_child(__file__, "follow", parameters, bench.env)},
                arguments.runs,
            )
    # Each run holds both, measured on the same entries.
    paired = {
        name: [{"ms": one[f"{name}_p50_ms"], **one} for one in runs["follow"]]
        for name in ("tail", "append")
    }
    claims = [ratio_claim("tail / append, p50", paired, of="tail", to="append", key="ms")]
    claims += [
        median_claim(f"{name} {quantile}", runs["follow"], f"{name}_{quantile}_ms", unit="ms")
        for name in ("tail", "append")
        for quantile in ("p50", "p99")
    ]
    report("tail", arguments, claims, runs)


if __name__ == "__main__":
    if not child_mode({"follow": follow}):
        asyncio.run(main())
