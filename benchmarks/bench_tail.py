"""Claim: how soon a follower has what was just appended.

tail        from the moment an entry is handed to a writer until a follower of the stream, through
            the reader, has it
append      from the same moment until the writer is told that it is durable: what of it is not
            the reader's
delivery    from that moment on: what of it is the reader's; 0 where the follower had it sooner

``idle``: nothing else is there. ``half``: producers append to another stream of the same node,
at half of what it takes. One entry at a time is followed, so that nothing waits behind anything
else. Catch-up reads, whose latency is unimportant, are measured by bench_read.py, throughput of
appends by bench_append.py.
"""

import asyncio
import os
import time
from collections.abc import Mapping
from typing import Any

from bench_append import STREAM, append_by_wire
from common import (
    MB,
    Bench,
    Claim,
    Meter,
    Result,
    arguments_parser,
    begun,
    child_mode,
    folder_of,
    median_claim,
    parse,
    quantiles,
    ratio_claim,
    report,
    run_beside,
    run_child,
    say,
    take_turns,
)
from tierlog.client import Client, Edge, open_client
from tierlog.runtime.settings import load_settings

ENTRIES = 1000
ENTRIES_QUICK = 200
NUMBER_LEN = 8
PRODUCERS = 20
WINDOW = 4
FULL_LOAD_MB = 100
LOAD_S = 5.0
"""Producers connect anew after so long; what is asked of them ends with such a stretch."""


async def follow(parameters: Mapping[str, Any]) -> Result:
    """Append one entry, wait until the follower has it, and so on (in a child)."""
    count, entry_size = parameters["count"], parameters["entry_size"]
    stream = f"tail-{os.getpid()}"  # each run's own, so that nothing old is followed
    async with open_client(load_settings()) as client, client.writer(stream, raw=True) as writer:
        await writer.send(bytes(entry_size))
        await writer.flush()
        arrived: asyncio.Queue[tuple[int, float]] = asyncio.Queue()
        tails, appends, deliveries = list[float](), list[float](), list[float]()
        async with asyncio.TaskGroup() as group:
            following = group.create_task(_follow(client, stream, arrived))
            meter = Meter()
            for number in range(1, count + 1):
                payload = number.to_bytes(NUMBER_LEN, "big").ljust(entry_size, b"\0")
                sent_s = time.perf_counter()
                await writer.send(payload)
                await writer.flush()
                durable_s = time.perf_counter()
                arrived_s = await _arrival(arrived, number)
                appends.append(durable_s - sent_s)
                tails.append(arrived_s - sent_s)
                deliveries.append(max(0.0, arrived_s - durable_s))
            result = meter.result(count * entry_size, **quantiles(tails, prefix="tail_"))
            following.cancel()
    return {
        **result,
        **quantiles(appends, prefix="append_"),
        **quantiles(deliveries, prefix="delivery_"),
    }


async def _follow(client: Client, stream: str, arrived: "asyncio.Queue[tuple[int, float]]") -> None:
    async for event in client.reader(stream, start=Edge.EARLIEST, follow=True).events():
        number = int.from_bytes(event.payload[:NUMBER_LEN], "big")
        await arrived.put((number, time.perf_counter()))


async def _arrival(arrived: "asyncio.Queue[tuple[int, float]]", number: int) -> float:
    while True:
        found, at_s = await arrived.get()
        if found == number:
            return at_s


async def load(parameters: Mapping[str, Any]) -> Result:
    """Append at a rate until it is enough (in a child)."""
    done, meter, length = begun(), Meter(), 0
    while not done.is_set():
        length += int((await append_by_wire(parameters))["bytes"])
    return meter.result(length)


class Followers:
    """The variants, over a cluster."""

    def __init__(self, bench: Bench, parameters: Mapping[str, Any]) -> None:
        self._bench, self._parameters = bench, parameters
        self._load: dict[str, Any] = {}

    async def prepare(self) -> None:
        """Find out what half load is."""
        await self._bench.endless_stream(STREAM, raw=True)
        entry_size = self._parameters["entry_size"]
        self._load = {"entry_size": entry_size, "producers": PRODUCERS, "window": WINDOW}
        everything = {**self._load, "bytes": FULL_LOAD_MB * MB}
        full = await run_child(__file__, "wire", everything, self._bench.env)
        rate = full["mb_per_s"] * MB / entry_size / 2
        self._load |= {"rate": rate, "bytes": int(rate * LOAD_S) * entry_size}
        say(f"half load is {rate:,.0f} entries a second")

    async def idle(self) -> Result:
        """Follow with nothing beside it."""
        return await run_child(__file__, "follow", self._parameters, self._bench.env)

    async def half(self) -> Result:
        """Follow beside half load."""
        result, beside = await run_beside(__file__, "load", self._load, self._bench.env, self.idle)
        return {**result, "beside_mb_per_s": beside["mb_per_s"]}


def claims_of(runs: Mapping[str, list[Result]]) -> list[Claim]:
    """Return what is told."""
    found = []
    for name, results in runs.items():
        # Each run holds all, measured on the same entries.
        paired = {
            what: [{"ms": one[f"{what}_p50_ms"], **one} for one in results]
            for what in ("tail", "append")
        }
        found.append(
            ratio_claim(f"{name}: tail / append, p50", paired, of="tail", to="append", key="ms")
        )
        found += [
            median_claim(f"{name}: {what} {quantile}", results, f"{what}_{quantile}_ms", unit="ms")
            for what in ("tail", "append", "delivery")
            for quantile in ("p50", "p99")
        ]
    found.append(median_claim("half: beside it", runs["half"], "beside_mb_per_s", unit="MB/s"))
    return found


async def main() -> None:
    """Measure and tell."""
    arguments = parse(arguments_parser("latency of tail reads", size_mb=10), quick_mb=2)
    count = ENTRIES_QUICK if arguments.quick else ENTRIES
    arguments.size = count * arguments.entry_size // MB
    with folder_of(arguments) as folder:
        async with Bench(folder, ["ingest", "reader"], {}) as bench:
            followers = Followers(bench, {"count": count, "entry_size": arguments.entry_size})
            await followers.prepare()
            variants = {"idle": followers.idle, "half": followers.half}
            runs = await take_turns(variants, arguments.runs)
    report("tail", arguments, claims_of(runs), runs)


if __name__ == "__main__":
    if not child_mode({"follow": follow, "wire": append_by_wire, "load": load}):
        asyncio.run(main())
