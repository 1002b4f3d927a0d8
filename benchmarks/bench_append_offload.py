"""Claim: an offload beside appends costs them little more than the CPU that it takes.

alone     100 producers at half of what the node takes, nothing beside them
beside    the same, while an offloader in a process of its own offloads a ledger of the same node
          to SeaweedFS, at ``--rate`` MB/s, again and again
control   the same, while a process burns as much CPU as the offloader took beside them
wide      the same, and one more burns what SeaweedFS took for it, which shares the machine here
sink      ``beside``, into a server that drops what it gets: SeaweedFS shares the disk here as well

Offloader and SeaweedFS give way to appends by ``--niceness``, as ``tierlog up`` has them do with
that ``up.background_niceness``; what is burnt does not.

The offloader begins before the appends do, and they once its third block is on its way: then what
it reads ahead is in its memory, and the throttle holds everything back. What is burnt is what the
offload last took, the first time in a run that does not count. Each run meets a SeaweedFS that was
just started empty, and that acknowledges before its disk, which is the node's too, has the bytes;
``--fsync``: it syncs, as ``tierlog up`` runs it.
"""

import argparse
import asyncio
import gc
import importlib
import os
import statistics
import time
import uuid
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from bench_append import PRODUCERS_MANY, STREAM, append_by_wire
from bench_offload import null_s3
from common import (
    BLOCK_BYTES,
    MB,
    Bench,
    Claim,
    Meter,
    Result,
    arguments_parser,
    begun,
    child_mode,
    folder_of,
    latency_claims,
    median_claim,
    parse,
    ratio_claim,
    report,
    run_beside,
    run_child,
    say,
    take_turns,
)
from early_s3 import acknowledge_early
from tierlog.embedded.shim import give_way
from tierlog.model.ids import LedgerId
from tierlog.runtime.logs import configure_logging
from tierlog.runtime.settings import load_settings
from tierlog.wiring.offload import OffloadParts, ledger_opener, open_offload_parts

P99_RATIO_MAX: Final = 1.3
WINDOW: Final = 4
AHEAD_BYTES: Final = 2 * BLOCK_BYTES
LOOK_AGAIN_S: Final = 0.05
MORE_S: Final = 5.0
"""A ledger takes so much longer than the appends: what comes before them, and what is left."""
SLICE_S: Final = 0.001
REACHED: Final = 0.9
"""So much of the offload's rate, and of its CPU, is reached, or the sitting tells nothing."""


# In children


async def offload_on(parameters: Mapping[str, Any]) -> Result:
    """Offload a ledger until the appends are done, and then to its end (in a child)."""
    if parameters["niceness"]:
        os.setsid()
        give_way(parameters["niceness"])
    importlib.import_module("tierlog_offloader.main")
    settings = load_settings()
    configure_logging(settings.log, service="offloader")
    gc.freeze()  # as ``run_service`` does
    async with open_offload_parts(settings) as parts:
        metadata = await parts.catalog.ledgers.get(LedgerId(parameters["ledger_id"]))
        assert metadata is not None
        handle = ledger_opener(settings, parts)(LedgerId(parameters["ledger_id"]), metadata)
        whole, offloaded, enough = Meter(), 0, asyncio.Event()

        async def again_and_again() -> None:
            nonlocal offloaded
            while not enough.is_set():
                await parts.offloader.offload(handle, uuid.uuid4(), {})
                offloaded += metadata.length

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(again_and_again())
            while _sent(parts) <= AHEAD_BYTES:  # noqa: ASYNC110 - counts tell nobody
                await asyncio.sleep(LOOK_AGAIN_S)
            done, meter = begun(), Meter()
            await done.wait()
            cpu_share = meter.cpu_share()
            enough.set()
        return whole.result(offloaded, cpu_share=cpu_share)


def _sent(parts: OffloadParts) -> int:
    """Return the bytes of all parts that were begun."""
    return sum(amount.bytes_sent for amount in parts.meter.amounts.values())


async def burn(parameters: Mapping[str, Any]) -> Result:
    """Take so many seconds of the CPU a second until the appends are done (in a child).

    ``apart``: in a session of its own, as servers and services run, which Linux may give another
    share of the CPU than it gives to who burns in ours (autogroups).
    """
    share = parameters["cpu_share"]
    if parameters.get("apart"):
        os.setsid()
    done, meter = begun(), Meter()
    while not done.is_set():
        cpu_s = time.process_time()
        owed_s = share * (time.perf_counter() - meter.started_s) - (cpu_s - meter.started_cpu_s)
        while time.process_time() < cpu_s + SLICE_S and owed_s >= SLICE_S:
            pass
        # Who came late makes up for it, slice by slice, as an offloader behind its throttle does.
        await asyncio.sleep(max(0.0, (SLICE_S - owed_s) / share))
    return {"cpu_share": meter.cpu_share()}


# The benchmark


class Sitting:
    """The variants over one cluster, and what the offload took last."""

    def __init__(
        self, bench: Bench, sink_url: str, arguments: argparse.Namespace, *, seconds: float
    ) -> None:
        self._bench, self._arguments = bench, arguments
        self._sink_url, self._seconds = sink_url, seconds
        self._ledger_id = LedgerId(0)
        self._per_s = 0.0
        self._offloader_share = self._s3_share = 0.0

    async def prepare(self) -> None:
        """Find out what the node takes, and what an offload takes beside half of that."""
        await self._bench.endless_stream(STREAM, raw=True)
        size = int(self._arguments.rate * MB * (self._seconds + MORE_S))
        self._ledger_id = await self._bench.sealed_ledger(
            "offloaded", size=size, entry_size=self._arguments.entry_size
        )
        full = await self._append(self._arguments.size * MB, rate=None)
        self._per_s = full["mb_per_s"] * MB / self._arguments.entry_size / 2
        say(f"half load is {self._per_s:,.0f} entries a second")
        await self.beside()

    async def _fresh_s3(self) -> None:
        await self._bench.fresh_s3()
        if not self._arguments.fsync:
            await acknowledge_early(self._bench)

    async def alone(self) -> Result:
        """Append at half load."""
        await self._fresh_s3()
        return await self._paced()

    async def beside(self) -> Result:
        """Append so beside an offload."""
        result = await self._offloading({})
        self._offloader_share, self._s3_share = result["beside_share"], result["s3_share"]
        say(
            f"offloaded {result['offloaded_mb_per_s']:.1f} MB/s; CPU s/s: offloader "
            f"{self._offloader_share:.2f}, S3 {self._s3_share:.2f}"
        )
        return result

    async def sink(self) -> Result:
        """Append so beside an offload to nowhere."""
        return await self._offloading({"TIERLOG_S3__ENDPOINT_URL": self._sink_url})

    async def _offloading(self, more: Mapping[str, str]) -> Result:
        await self._fresh_s3()
        rate = str(self._arguments.rate * MB)
        env = {**self._bench.env, "TIERLOG_S3__BYTES_PER_S_MAX": rate, **more}
        parameters = {"ledger_id": self._ledger_id, "niceness": self._arguments.niceness}
        result, offload = await run_beside(__file__, "offload", parameters, env, self._beside_s3)
        return {
            **result,
            "offloaded_mb_per_s": offload["mb_per_s"],
            "beside_share": offload["cpu_share"],
        }

    async def _beside_s3(self) -> Result:
        started_s, before_s = time.perf_counter(), self._bench.s3_cpu_s()
        result = await self._paced()
        seconds = time.perf_counter() - started_s
        return {**result, "s3_share": (self._bench.s3_cpu_s() - before_s) / seconds}

    async def control(self) -> Result:
        """Append so beside what burns as much as the offloader."""
        await self._fresh_s3()
        return await self._burning(self._offloader_share, self._paced)

    async def wide(self) -> Result:
        """Append so beside what burns S3's share too."""
        await self._fresh_s3()
        both = partial(self._burning, self._s3_share, self._paced)
        return await self._burning(self._offloader_share, both)

    async def _burning(self, cpu_share: float, work: Any) -> Result:  # noqa: ANN401
        parameters = {"cpu_share": cpu_share}
        result: Result
        result, burnt = await run_beside(__file__, "burn", parameters, self._bench.env, work)
        more = result.get("beside_share", 0.0)
        return {**result, "beside_share": burnt["cpu_share"] + more}

    async def _paced(self) -> Result:
        byte_count = int(self._per_s * self._seconds) * self._arguments.entry_size
        return await self._append(byte_count, rate=self._per_s)

    async def _append(self, byte_count: int, *, rate: float | None) -> Result:
        parameters = {
            "bytes": byte_count, "entry_size": self._arguments.entry_size,
            "producers": PRODUCERS_MANY, "window": WINDOW, "rate": rate,
        }  # fmt: skip
        return await run_child(__file__, "wire", parameters, self._bench.env)


def claims_of(runs: Mapping[str, list[Result]], rate: float) -> list[Claim]:
    """Return what is claimed."""
    return [
        ratio_claim(
            "p99 beside / control", runs, of="beside", to="control", key="p99_ms",
            target=P99_RATIO_MAX, at_most=True,
        ),
        ratio_claim("p99 beside / wide", runs, of="beside", to="wide", key="p99_ms"),
        ratio_claim("p99 sink / control", runs, of="sink", to="control", key="p99_ms"),
        ratio_claim("p99 beside / alone", runs, of="beside", to="alone", key="p99_ms"),
        ratio_claim("p50 beside / control", runs, of="beside", to="control", key="p50_ms"),
        *latency_claims(runs, runs),
        *(median_claim(f"{name}, appended", runs[name], "mb_per_s", unit="MB/s") for name in runs),
        median_claim(
            "offloaded", runs["beside"], "offloaded_mb_per_s", unit="MB/s", target=REACHED * rate
        ),
        median_claim("offloaded, sink", runs["sink"], "offloaded_mb_per_s", unit="MB/s"),
        median_claim("offloader's CPU", runs["beside"], "beside_share", unit="s/s"),
        median_claim("S3's CPU", runs["beside"], "s3_share", unit="s/s"),
        median_claim(
            "burnt, control", runs["control"], "beside_share", unit="s/s",
            target=REACHED * statistics.median(one["beside_share"] for one in runs["beside"]),
        ),
        median_claim("burnt, wide", runs["wide"], "beside_share", unit="s/s"),
    ]  # fmt: skip


def add_niceness(parser: argparse.ArgumentParser) -> None:
    """Add how much what runs beside appends gives way to them: as much as can be, or 0, not."""
    parser.add_argument(
        "--niceness", type=int, choices=range(20), default=19, metavar="0…19",
        help="up.background_niceness of the cluster",
    )  # fmt: skip


async def main() -> None:
    """Measure and tell."""
    parser = arguments_parser("appends beside an offload", size_mb=200)
    parser.add_argument("--fsync", action="store_true", help="S3 as `tierlog up` runs it")
    parser.add_argument("--rate", type=float, default=50.0, help="MB/s of the offload")
    parser.add_argument("--seconds", type=float, default=10.0, help="of a run")
    add_niceness(parser)
    arguments = parse(parser, quick_mb=50)
    seconds = min(arguments.seconds, 3.0) if arguments.quick else arguments.seconds
    with folder_of(arguments) as folder:
        async with (
            Bench(folder, ["ingest"], {}, niceness=arguments.niceness) as bench,
            null_s3() as sink_url,
        ):
            sitting = Sitting(bench, sink_url, arguments, seconds=seconds)
            await sitting.prepare()
            variants = ("alone", "beside", "control", "wide", "sink")
            runs = await take_turns(
                {name: getattr(sitting, name) for name in variants}, arguments.runs
            )
    claims = claims_of(runs, arguments.rate)
    report("appends beside an offload", arguments, claims, runs)


if __name__ == "__main__":
    if not child_mode({"wire": append_by_wire, "offload": offload_on, "burn": burn}):
        asyncio.run(main())
