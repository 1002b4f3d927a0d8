"""Claim: what an append costs beside the disk, from one producer and from a hundred.

client-1    one writer of ``tierlog.client``, which batches, to one stream
wire-1      one connection, appends of one entry, ``--window`` of them unanswered
wire-100    a hundred connections, ``--window`` each
alone       one connection, one append at a time: the latency of an idle node
raw         the same bytes written to a file in groups of 4 MiB, each made durable by fdatasync:
            what the journal could do at best
raw-alone   one entry at a time, written and made durable

All against one ingest process; an answer means that the entry is durable. Runs take turns.
"""

import asyncio
import itertools
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common import (
    MB,
    MIB,
    Bench,
    Meter,
    Result,
    arguments_parser,
    child_mode,
    draft_of,
    due_times,
    entries_of,
    folder_of,
    latency_claims,
    median_claim,
    parse,
    quantiles,
    random_pool,
    ratio_claim,
    report,
    run_child,
    take_turns,
)
from tierlog.client import open_client
from tierlog.model.ids import stream_name
from tierlog.runtime.settings import load_settings
from tierlog.wire.connection import WireClient
from tierlog.wiring.client import ClientConnections, open_client_connections

STREAM = "bench"
GROUP_BYTES = 4 * MIB
APPEND_S_MAX = 30.0
PRODUCERS_MANY = 100
LATENCY_ENTRIES = 2000


async def append_by_client(parameters: Mapping[str, Any]) -> Result:
    """Append by one writer (in a child)."""
    size, entry_size = parameters["bytes"], parameters["entry_size"]
    pool = random_pool()
    async with (
        open_client(load_settings()) as client,
        client.writer(STREAM, raw=True) as writer,
    ):
        await writer.send(bytes(entry_size))
        await writer.flush()  # connected
        meter = Meter()
        for entry in entries_of(pool, entry_size, size // entry_size):
            await writer.send(entry)
        await writer.flush()
        return meter.result(size)


async def append_by_wire(parameters: Mapping[str, Any]) -> Result:
    """Append entry by entry over some connections, at a rate if there is one (in a child)."""
    size, entry_size = parameters["bytes"], parameters["entry_size"]
    producers, window = parameters["producers"], parameters["window"]
    each = size // entry_size // producers
    pool, latencies = random_pool(), list[float]()
    settings = load_settings()
    async with (
        open_client_connections(
            settings,
            ingest_grpc=settings.client.ingest_address,
            reader_http="127.0.0.1:1",
            scheduler_http="127.0.0.1:1",
        ) as connections,
        asyncio.TaskGroup() as readers,
    ):
        channels = [await _connect(connections, readers) for _ in range(producers)]
        rate = parameters.get("rate")
        meter = Meter()
        async with asyncio.TaskGroup() as group:
            if rate is None:
                for channel in channels:
                    entries = entries_of(pool, entry_size, each)
                    for _ in range(window):
                        group.create_task(_produce(channel, entries, latencies))
            else:
                count = each * producers
                due = due_times(meter.started_s, 1 / rate, count)
                turns = zip(itertools.cycle(channels), entries_of(pool, entry_size, count))
                async for due_s in due:
                    group.create_task(_append(*next(turns), latencies, due_s))
        result = meter.result(len(latencies) * entry_size, **quantiles(latencies))
        for channel in channels:
            await channel.close()
    return result


async def _connect(connections: ClientConnections, tasks: asyncio.TaskGroup) -> WireClient:
    owner = await connections.control.find_owner(stream_name(STREAM))
    channel = await connections.connect_owner(owner, tasks)
    assert isinstance(channel, WireClient)
    return channel


async def _produce(channel: WireClient, entries: Any, latencies: list[float]) -> None:  # noqa: ANN401
    """Append what others of the same producer leave, one after the other."""
    for entry in entries:
        await _append(channel, entry, latencies, time.perf_counter())


async def _append(
    channel: WireClient, entry: memoryview, latencies: list[float], started_s: float
) -> None:
    await channel.append(stream_name(STREAM), draft_of([entry]), deadline_s=APPEND_S_MAX)
    latencies.append(time.perf_counter() - started_s)


async def write_raw(parameters: Mapping[str, Any]) -> Result:
    """Write and make durable (in a child)."""
    size, group = parameters["bytes"], parameters["group"]
    pool, latencies = memoryview(random_pool()), list[float]()
    path = Path(parameters["folder"]) / "raw"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        meter, at = Meter(), 0
        while at < size:
            started_s = time.perf_counter()
            start = at % (len(pool) - group)
            at += os.write(fd, pool[start : start + group])
            os.fdatasync(fd)
            latencies.append(time.perf_counter() - started_s)
        return meter.result(at, **quantiles(latencies))
    finally:
        os.close(fd)
        path.unlink()


async def main() -> None:
    """Measure and tell."""
    parser = arguments_parser("appending against the disk", size_mb=100)
    parser.add_argument("--window", type=int, default=4, help="unanswered appends of a producer")
    arguments = parse(parser, quick_mb=50)
    size, entry_size, window = arguments.size * MB, arguments.entry_size, arguments.window
    with folder_of(arguments) as folder:
        async with Bench(folder, ["ingest"], {}) as bench:
            await bench.endless_stream(STREAM, raw=True)

            def wire(producers: int, window: int, byte_count: int) -> Any:  # noqa: ANN401
                more = {"producers": producers, "window": window}
                parameters = {"bytes": byte_count, "entry_size": entry_size, **more}
                return run_child(__file__, "wire", parameters, bench.env)

            def raw(group: int, byte_count: int) -> Any:  # noqa: ANN401
                parameters = {"bytes": byte_count, "group": group, "folder": str(folder)}
                return run_child(__file__, "raw", parameters, bench.env)

            few = min(size, LATENCY_ENTRIES * entry_size)
            by_client = {"bytes": size, "entry_size": entry_size}
            runs = await take_turns(
                {
                    "client-1": lambda: run_child(__file__, "client", by_client, bench.env),
                    "wire-1": lambda: wire(1, window, size),
                    "wire-100": lambda: wire(PRODUCERS_MANY, window, size),
                    "alone": lambda: wire(1, 1, few),
                    "raw": lambda: raw(GROUP_BYTES, size),
                    "raw-alone": lambda: raw(entry_size, few),
                },
                arguments.runs,
            )
    claims = [
        ratio_claim(f"{name} / raw", runs, of=name, to="raw")
        for name in ("client-1", "wire-1", "wire-100")
    ]
    claims += [
        ratio_claim("alone p50 / raw-alone p50", runs, of="alone", to="raw-alone", key="p50_ms")
    ]
    claims += [median_claim(name, runs[name], "mb_per_s", unit="MB/s") for name in runs]
    claims += latency_claims(runs, ("wire-1", "wire-100", "alone", "raw-alone"))
    report("append", arguments, claims, runs)


if __name__ == "__main__":
    if not child_mode({"client": append_by_client, "wire": append_by_wire, "raw": write_raw}):
        asyncio.run(main())
