"""Claim: readers that catch up beside appends cost them little more than the CPU they take.

alone     100 producers at half of what the node takes, nothing beside them
beside    the same, while 64 readers read an offloaded ledger, each at a place of its own, again
          and again, through the reader
control   the same, while processes burn as much CPU as the reader, the bucket's server and the
          readers took beside them, which share the machine here
apart     the same, while one process burns for each of these three, the reader's and the server's
          in sessions of their own, as those run

Reader and server give way to appends by ``--niceness``, as ``tierlog up`` has them do with that
``up.background_niceness``; what is burnt does not.

What is burnt is what the readers last took, the first time in a run that does not count. The claim
is against `control`; `apart` tells what the way of burning makes of it.
"""

import argparse
import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, NamedTuple

from bench_append import PRODUCERS_MANY, STREAM, append_by_wire
from bench_append_offload import REACHED, WINDOW, add_niceness, burn
from common import (
    MB,
    MIB,
    Bench,
    Claim,
    Result,
    arguments_parser,
    child_mode,
    folder_of,
    latency_claims,
    median_claim,
    parse,
    process_cpu_s,
    ratio_claim,
    report,
    run_beside,
    run_child,
    say,
    take_turns,
)
from reading import offload, places_in, read_on
from tierlog.model.ids import LedgerId

P99_RATIO_MAX: Final = 1.1
READERS: Final = 64
READ_BYTES: Final = MIB
OFFLOADED: Final = "offloaded"
LEDGER_MB: Final = 400
CACHE_BYTES: Final = 64 * MIB
"""Far less than the ledger, so that readers go to the bucket."""


class Shares(NamedTuple):
    """What of the CPU each of them takes, seconds a second."""

    reader: float
    s3: float
    readers: float

    @property
    def whole(self) -> float:
        """All of them."""
        return sum(self)

    def __str__(self) -> str:
        return f"reader {self.reader:.2f}, S3 {self.s3:.2f}, who reads {self.readers:.2f}"


class Sitting:
    """The variants over one cluster, and what the readers took last."""

    def __init__(self, bench: Bench, arguments: argparse.Namespace, *, seconds: float) -> None:
        self._bench, self._arguments, self._seconds = bench, arguments, seconds
        self._ledger_id, self._entries = LedgerId(0), 0
        self._per_s, self._shares = 0.0, Shares(0.0, 0.0, 0.0)

    async def prepare(self) -> None:
        """Offload what is read; find out what the node takes, and the readers beside half of it."""
        entry_size = self._arguments.entry_size
        self._entries = LEDGER_MB * MB // entry_size
        self._ledger_id = await self._bench.sealed_ledger(
            OFFLOADED, size=LEDGER_MB * MB, entry_size=entry_size
        )
        say("offloading")
        await offload(self._bench, OFFLOADED)
        await self._bench.endless_stream(STREAM, raw=True)
        full = await self._append(self._arguments.size * MB, rate=None)
        self._per_s = full["mb_per_s"] * MB / entry_size / 2
        say(f"half load is {self._per_s:,.0f} entries a second")
        await self.beside()

    async def alone(self) -> Result:
        """Append at half load."""
        byte_count = int(self._per_s * self._seconds) * self._arguments.entry_size
        return await self._append(byte_count, rate=self._per_s)

    async def beside(self) -> Result:
        """Append so beside readers."""
        parameters = {
            "stream": OFFLOADED,
            "places": places_in(self._ledger_id, self._entries, READERS),
            "bytes_each": LEDGER_MB * MB,
            "read_bytes": READ_BYTES,
        }
        result, read = await run_beside(
            __file__, "read", parameters, self._bench.env, self._beside_servers
        )
        self._shares = Shares(result["reader_share"], result["s3_share"], read["cpu_share"])
        say(f"read {read['mb_per_s']:,.0f} MB/s, CPU s/s: {self._shares}")
        share = self._shares.whole
        return {**result, "read_mb_per_s": read["mb_per_s"], "beside_share": share}

    async def _beside_servers(self) -> Result:
        """Append, and see what the reader and the bucket's server take meanwhile."""
        pid = self._bench.cluster.services.pid("reader")
        started_s = time.perf_counter()
        reader_s, s3_s = process_cpu_s(pid), self._bench.s3_cpu_s()
        result = await self.alone()
        seconds = time.perf_counter() - started_s
        return {
            **result,
            "reader_share": (process_cpu_s(pid) - reader_s) / seconds,
            "s3_share": (self._bench.s3_cpu_s() - s3_s) / seconds,
        }

    async def control(self) -> Result:
        """Append so beside what burns as much."""
        burners = math.ceil(self._shares.whole)
        work: Callable[[], Awaitable[Result]] = self.alone
        for _ in range(burners):
            work = partial(self._burning, self._shares.whole / burners, work)
        return await work()

    async def apart(self) -> Result:
        """Append so beside what burns as much, each in a process as it was taken."""
        work: Callable[[], Awaitable[Result]] = self.alone
        work = partial(self._burning, self._shares.readers, work)
        work = partial(self._burning, self._shares.s3, work, apart=True)
        return await self._burning(self._shares.reader, work, apart=True)

    async def _burning(
        self, cpu_share: float, work: Callable[[], Awaitable[Result]], *, apart: bool = False
    ) -> Result:
        parameters = {"cpu_share": cpu_share, "apart": apart}
        result, burnt = await run_beside(__file__, "burn", parameters, self._bench.env, work)
        more = result.get("beside_share", 0.0)
        return {**result, "beside_share": burnt["cpu_share"] + more}

    async def _append(self, byte_count: int, *, rate: float | None) -> Result:
        parameters = {
            "bytes": byte_count, "entry_size": self._arguments.entry_size,
            "producers": PRODUCERS_MANY, "window": WINDOW, "rate": rate,
        }  # fmt: skip
        return await run_child(__file__, "wire", parameters, self._bench.env)


def claims_of(runs: dict[str, list[Result]]) -> list[Claim]:
    """Return what is claimed."""
    burnt = [
        {"share": control["beside_share"] / beside["beside_share"]}
        for control, beside in zip(runs["control"], runs["beside"], strict=True)
    ]
    return [
        ratio_claim(
            "p99 beside / control", runs, of="beside", to="control", key="p99_ms",
            target=P99_RATIO_MAX, at_most=True,
        ),
        ratio_claim("p50 beside / control", runs, of="beside", to="control", key="p50_ms"),
        ratio_claim("p99 beside / apart", runs, of="beside", to="apart", key="p99_ms"),
        ratio_claim("p50 beside / apart", runs, of="beside", to="apart", key="p50_ms"),
        ratio_claim("p99 beside / alone", runs, of="beside", to="alone", key="p99_ms"),
        *latency_claims(runs, runs),
        *(median_claim(f"{name}, appended", runs[name], "mb_per_s", unit="MB/s") for name in runs),
        median_claim("read", runs["beside"], "read_mb_per_s", unit="MB/s"),
        median_claim("CPU of reading", runs["beside"], "beside_share", unit="s/s"),
        median_claim("burnt / CPU of reading", burnt, "share", target=REACHED),
    ]  # fmt: skip


async def main() -> None:
    """Measure and tell."""
    parser = arguments_parser("appends beside readers that catch up", size_mb=200)
    parser.add_argument("--seconds", type=float, default=10.0, help="of a run")
    add_niceness(parser)
    arguments = parse(parser, quick_mb=50)
    seconds = min(arguments.seconds, 3.0) if arguments.quick else arguments.seconds
    settings = {"TIERLOG_READER__CACHE_BYTES_MAX": str(CACHE_BYTES)}
    kinds = ["ingest", "reader", "offloader", "scheduler"]
    with folder_of(arguments) as folder:
        async with Bench(folder, kinds, settings, niceness=arguments.niceness) as bench:
            sitting = Sitting(bench, arguments, seconds=seconds)
            await sitting.prepare()
            variants = ("alone", "beside", "control", "apart")
            runs = await take_turns(
                {name: getattr(sitting, name) for name in variants}, arguments.runs
            )
    report("appends beside readers that catch up", arguments, claims_of(runs), runs)


if __name__ == "__main__":
    if not child_mode({"wire": append_by_wire, "read": read_on, "burn": burn}):
        asyncio.run(main())
