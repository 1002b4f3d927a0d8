"""Claim: appends and those who follow them, with the streaming cache and with RocksDB in its place.

The ingestion test of seeds/002: a hundred producers, batches of a hundred events of 100 bytes, each
append conditional on the one before it, a ``--window`` of batches unanswered. There appends go into
the cache of the process that takes them; here into that of the reader, which subscribes at
the ledger's storage nodes for a follower. So a follower takes all that comes, over HTTP, while the
producers append.

plain, compiled     the streaming cache
rocksdict           RocksDB, when requirements-bench.lock is installed: the seed's baseline

The reader is started anew for each run, with ``--cache`` MiB.
"""

import asyncio
import importlib.util
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import aiohttp

from bench_exactly_once import FIGURES, PRODUCERS, SMALL, write
from common import (
    MB,
    MIB,
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
    positive,
    process_cpu_s,
    ratio_claim,
    report,
    run_beside,
    run_child,
    say,
    take_turns,
)
from reading import resident_bytes
from swapped_reader import FOLDER, STORE
from tierlog.cli.perf import WriteLoad
from tierlog.runtime.settings import load_settings
from tierlog_reader.cache.store import compiled_blocks

STREAM: Final = "followed"
WAIT_MS: Final = 500
QUICK_S: Final = 3.0


async def follow(_: Mapping[str, Any]) -> Result:
    """Take all runs that come, until it is enough (in a child)."""
    url = f"http://{load_settings().client.reader_http_address}/v1/streams/{STREAM}/runs"
    where, length = "latest", 0
    async with aiohttp.ClientSession(read_bufsize=MIB) as session:
        done, meter = begun(), Meter()
        while not done.is_set():
            query = {"from": where, "bytes_max": str(MIB), "wait_ms": str(WAIT_MS)}
            async with session.get(url, params=query) as answer:
                assert answer.status in {200, 204}, (answer.status, await answer.text())
                length += len(await answer.read())
                where = answer.headers.get("Tierlog-Next", where)
    return meter.result(max(1, length))


class Sitting:
    """The variants over one cluster."""

    def __init__(self, bench: Bench, wanted: WriteLoad, folder: Path) -> None:
        self._bench, self._wanted, self._folder = bench, wanted, folder
        self._spec = bench.cluster.services.specs["reader"]

    async def with_store(self, name: str) -> Result:
        """Append and follow, with this store in a reader that was just started."""
        services = self._bench.cluster.services
        services.kill("reader")
        await asyncio.sleep(0.2)
        services.forget("reader")
        swap = {STORE: name, FOLDER: str(self._folder / "rocks")}
        env = {**self._spec.env, **swap, "PYTHONPATH": str(Path(__file__).parent)}
        await services.add(replace(self._spec, module="swapped_reader", env=env))
        pid = services.pid("reader")
        before_s = process_cpu_s(pid)
        result, followed = await run_beside(__file__, "follow", {}, self._bench.env, self._append)
        return result | {
            "followed_mb_per_s": followed["bytes"] / MB / followed["seconds"],
            "reader_s_per_gb": (process_cpu_s(pid) - before_s) / followed["bytes"] * 1000 * MB,
            "reader_mib": resident_bytes(pid) / MIB,
        }

    async def _append(self) -> Result:
        return await run_child(__file__, "write", asdict(self._wanted), self._bench.env)


def claims_of(runs: Mapping[str, list[Result]]) -> list[Claim]:
    """Return the ratios, and each figure."""
    first = next(iter(runs))
    claims = []
    for name, results in runs.items():
        if name != first:
            claims += [
                ratio_claim(f"{first} / {name}: {key}", runs, of=first, to=name, key=key)
                for key in ("mb_per_s", "followed_mb_per_s", "reader_s_per_gb", "p99_ms")
            ]
        units = {"mb_per_s": "MB/s", "followed_mb_per_s": "MB/s", "reader_s_per_gb": "s/GB"}
        units |= {"reader_mib": "MiB", **dict.fromkeys(FIGURES, "ms")}
        claims += [
            median_claim(f"{name} {key}", results, key, unit=unit) for key, unit in units.items()
        ]
    return claims


async def main() -> None:
    """Measure and tell."""
    parser = arguments_parser("the reader's cache beside appends", size_mb=1)
    parser.add_argument("--window", type=positive, default=4, help="unanswered batches of each")
    parser.add_argument("--seconds", type=positive, default=10, help="of a run")
    parser.add_argument("--cache", type=positive, default=256, help="MiB of the reader's budget")
    arguments = parse(parser, quick_mb=1)
    stores = {
        "compiled": compiled_blocks().module is not None,
        "plain": True,
        "rocksdict": importlib.util.find_spec("rocksdict") is not None,
    }
    for name in (one for one, there in stores.items() if not there):
        say(f"{name} is not there: left out")
    settings = {"TIERLOG_READER__CACHE_BYTES_MAX": str(arguments.cache * MIB)}
    with folder_of(arguments) as folder:
        async with Bench(folder, ["ingest", "reader"], settings) as bench:
            await bench.endless_stream(STREAM, raw=False)
            wanted = WriteLoad(
                stream=STREAM,
                producers=PRODUCERS,
                window=arguments.window,
                duration_s=QUICK_S if arguments.quick else float(arguments.seconds),
                conditional=True,
                rate=0.0,
                **SMALL,
            )
            sitting = Sitting(bench, wanted, folder)
            variants = {
                name: (lambda name=name: sitting.with_store(name))
                for name, there in stores.items()
                if there
            }
            runs = await take_turns(variants, arguments.runs)
    arguments.size = round(max(one["bytes"] for one in runs["plain"]) / MB)
    arguments.entry_size = SMALL["batch_events"] * SMALL["event_bytes"]
    report("follow cache", arguments, claims_of(runs), runs)


if __name__ == "__main__":
    if not child_mode({"write": write, "follow": follow}):
        asyncio.run(main())
