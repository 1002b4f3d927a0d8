"""Claim: how soon a storage node serves, and what it holds in memory.

many      a node with ``--ledgers`` open ledgers of one entry each: writing them, from the first
          add until all are answered and then until the node has stopped (all of it in its place,
          durably); the most memory that its process ever held; then a start, and what it held
killed    a start after ``kill -9`` with a journal of ``--journal-mb`` that no mark has passed:
          runs of 64 KiB, single entries of 10 KB and of 1 KB. The mark is kept from moving by
          settings, but for ``checkpoint_journal_records``: so many bytes of small entries, some
          of which a mark has passed, are what a node with these can be killed with.
          ``cold``: the journal is read from the device, its pages were dropped before.
          ``bare``: reading as many bytes from the journal's files, in pieces of 4 MiB, and writing
          them to another file, made durable every 32 MiB: what the disk takes for a replay

A start's time goes from the call of ``open`` until the node serves, the interpreter's own start
left out. Each start is a process of its own, over a folder that a killed one left.
"""

import asyncio
import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from common import (
    MB,
    MIB,
    Claim,
    Meter,
    Result,
    arguments_parser,
    child_mode,
    folder_of,
    median_claim,
    parse,
    report,
    rss_peak_bytes,
    run_child,
    say,
)
from nodes import CountingFiles, RunMaker, add_all, drop_page_cache, read_entry, running_node
from tierlog.runtime.logs import configure_logging
from tierlog.runtime.sections import LogSettings
from tierlog.runtime.settings import StorageSettings

ENTRY_SIZE: Final = 1000
ADDERS: Final = 100
MEMORY_MB_MAX: Final = 300.0
MANY_START_S_MAX: Final = 10.0
KILLED_START_S_MAX: Final = 5.0
LEDGERS: Final = 10
CHUNK_ENTRIES: Final = 4000
NEVER: Final = 2**50
PIECE_BYTES: Final = 4 * MIB
SYNC_BYTES: Final = 32 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a journal is full of."""

    name: str
    entry_size: int
    in_a_run: int


SHAPES: Final = (
    Shape(name="64K runs", entry_size=10_000, in_a_run=6),
    Shape(name="10K entries", entry_size=10_000, in_a_run=1),
    Shape(name="1K entries", entry_size=1000, in_a_run=1),
)


# In children


async def write_many(parameters: Mapping[str, Any]) -> Result:
    """Open many ledgers by adding an entry to each (in a child)."""
    configure_logging(LogSettings(level="warning"), service="bench")
    count, latencies = parameters["ledgers"], list[float]()
    maker = RunMaker(pool_bytes=100 * ENTRY_SIZE)
    files = CountingFiles(Path(parameters["folder"]))
    idle_mb = rss_peak_bytes() / MB
    numbers = iter(range(1, count + 1))

    async def add_some() -> None:
        # made one by one: this process's memory is measured
        for number in numbers:
            await add_all(node, maker.runs(number, entry_size=ENTRY_SIZE, entries=1), latencies)

    async with running_node(files, StorageSettings()) as (node, stop):
        meter = Meter()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(ADDERS):
                tasks.create_task(add_some())
        answered_s = time.perf_counter() - meter.started_s
        open_mb = rss_peak_bytes() / MB
        stop.set()
    files.close()
    more = {"answered_s": answered_s, "open_mb": open_mb, "idle_mb": idle_mb}
    return meter.result(count * ENTRY_SIZE, peak_mb=rss_peak_bytes() / MB, **more)


async def start_node(parameters: Mapping[str, Any]) -> Result:
    """Open a node, and read an entry (in a child)."""
    configure_logging(LogSettings(level="warning"), service="bench")
    folder = Path(parameters["folder"])
    if parameters["cold"]:
        drop_page_cache(folder)
    files = CountingFiles(folder)
    meter = Meter()
    async with running_node(files, StorageSettings()) as (node, _):
        seconds = time.perf_counter() - meter.started_s
        cpu_s = time.process_time() - meter.started_cpu_s
        assert await read_entry(node, parameters["ledgers"], 0) > 0
        ledgers = len(await node.list_ledgers())
        assert ledgers == parameters["ledgers"], ledgers
        assert not node.damages, node.damages
        peak_mb = rss_peak_bytes() / MB
    files.close()
    return {"start_s": seconds, "cpu_s": cpu_s, "peak_mb": peak_mb, "ledgers": ledgers}


async def fill_journal(parameters: Mapping[str, Any]) -> Result:
    """Fill a journal that no mark passes, say so, and wait for the end (in a child)."""
    configure_logging(LogSettings(level="warning"), service="bench")
    maker, size = RunMaker(), parameters["entry_size"]
    settings = StorageSettings(
        checkpoint_interval_s=NEVER, checkpoint_journal_bytes=NEVER, write_buffer_bytes_max=NEVER
    )  # a mark for the number of records comes all the same
    files = CountingFiles(Path(parameters["folder"]))

    async def add_ledger(ledger_id: int) -> None:
        shape = {"entry_size": size, "count": parameters["in_a_run"]}
        entries = parameters["bytes"] // size // LEDGERS
        await add_all(node, maker.runs(ledger_id, entries=entries, **shape), [])

    async with running_node(files, settings) as (node, _):
        async with asyncio.TaskGroup() as tasks:
            for ledger_id in range(1, LEDGERS + 1):
                tasks.create_task(add_ledger(ledger_id))
        print("full", flush=True)
        await asyncio.Event().wait()
    raise AssertionError("not reached")


async def copy_barely(parameters: Mapping[str, Any]) -> Result:
    """Do with a journal's bytes what a replay can't do without (in a child)."""
    folder = Path(parameters["folder"])
    if parameters["cold"]:
        drop_page_cache(folder)
    meter = Meter()
    copied = copy_journal(folder, PIECE_BYTES, sync_bytes=SYNC_BYTES)
    return {"start_s": time.perf_counter() - meter.started_s, "copied_mb": copied / MB}


def copy_journal(folder: Path, piece_bytes: int, *, sync_bytes: int) -> int:
    """Copy the journal's segments into one file; return their bytes."""
    copied = unsynced = 0
    with (folder / "bare").open("wb", buffering=0) as target:
        for path in sorted((folder / "journal").glob("*.journal")):
            with path.open("rb", buffering=0) as source:
                while piece := source.read(piece_bytes):
                    target.write(piece)
                    copied, unsynced = copied + len(piece), unsynced + len(piece)
                    if unsynced >= sync_bytes:
                        os.fdatasync(target.fileno())
                        unsynced = 0
        os.fdatasync(target.fileno())
    return copied


# The benchmark


async def killed_folder(folder: Path, shape: Shape, byte_count: int) -> None:
    """Leave what a killed node leaves."""
    say(f"filling a journal of {byte_count / MB:,.0f} MB with {shape.name}")
    parameters = {"folder": str(folder), "bytes": byte_count, **asdict(shape)}
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--child", "fill", json.dumps(parameters),
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        while (line := await process.stdout.readline()) != b"full\n":
            if not line:
                raise SystemExit("the node ended by itself, see above")
    finally:
        if process.returncode is None:
            os.kill(process.pid, signal.SIGKILL)
        await process.wait()


def journal_mb(folder: Path) -> float:
    """Return what the journal takes of the disk."""
    return sum(path.stat().st_size for path in (folder / "journal").iterdir()) / MB


async def start_killed(shape: Shape, folder: Path, byte_count: int, rounds: int) -> list[Result]:
    """Start over and over what was killed once."""
    results = []
    with tempfile.TemporaryDirectory(dir=folder) as made:
        killed = Path(made) / "killed"
        await killed_folder(killed, shape, byte_count)
        size_mb = journal_mb(killed)
        for turn, cold in itertools.product(range(rounds), (False, True)):
            copy = Path(made) / "copy"
            shutil.copytree(killed, copy)
            parameters = {"folder": str(copy), "ledgers": LEDGERS, "cold": cold}
            result = await run_child(__file__, "start", parameters, {})
            shutil.rmtree(copy)
            shutil.copytree(killed, copy)
            bare = await run_child(__file__, "bare", parameters, {})
            shutil.rmtree(copy)
            result["bare_s"], result["ratio"] = bare["start_s"], result["start_s"] / bare["start_s"]
            kind = "cold" if cold else "warm"
            say(f"round {turn + 1}/{rounds}: {kind}: {result['start_s']:.2f} s")
            results.append({**result, "journal_mb": size_mb, "cold": float(cold)})
    return results


async def start_many(folder: Path, ledgers: int, rounds: int) -> tuple[Result, list[Result]]:
    """Write many ledgers, then start over them."""
    say(f"writing {ledgers:,} ledgers")
    made = folder / "many"
    parameters = {"folder": str(made), "ledgers": ledgers, "cold": False}
    written = await run_child(__file__, "many", parameters, {})
    say(f"written in {written['seconds']:.1f} s, with {written['peak_mb']:.0f} MB")
    started = []
    for turn in range(rounds):
        started.append(await run_child(__file__, "start", parameters, {}))
        say(f"round {turn + 1}/{rounds}: started in {started[-1]['start_s']:.2f} s")
    return written, started


def many_claims(written: Sequence[Result], started: Sequence[Result]) -> list[Claim]:
    """Return what is claimed of many ledgers."""
    memory = {"unit": "MB", "target": MEMORY_MB_MAX, "at_most": True}
    return [
        median_claim("many: all answered", written, "answered_s", unit="s"),
        median_claim("many: stopped", written, "seconds", unit="s"),
        median_claim("many: memory with all open", written, "open_mb", **memory),  # type: ignore[arg-type]
        median_claim("many: memory until stopped", written, "peak_mb", **memory),  # type: ignore[arg-type]
        median_claim("many: memory before the node", written, "idle_mb", unit="MB"),
        median_claim(
            "many: start", started, "start_s", unit="s", target=MANY_START_S_MAX, at_most=True
        ),
        median_claim("many: memory after the start", started, "peak_mb", **memory),  # type: ignore[arg-type]
    ]


def killed_claims(name: str, results: Sequence[Result]) -> list[Claim]:
    """Return what is claimed of a start after a kill."""
    claims = []
    for kind, cold in (("warm", 0.0), ("cold", 1.0)):
        some = [one for one in results if one["cold"] == cold]
        claims += [
            median_claim(
                f"killed, {name}, {kind}: start", some, "start_s", unit="s",
                target=KILLED_START_S_MAX, at_most=True,
            ),
            median_claim(f"killed, {name}, {kind}: bare", some, "bare_s", unit="s"),
            median_claim(f"killed, {name}, {kind}: start / bare", some, "ratio"),
            median_claim(f"killed, {name}, {kind}: CPU", some, "cpu_s", unit="s"),
        ]  # fmt: skip
    claims.append(median_claim(f"killed, {name}: memory", results, "peak_mb", unit="MB"))
    claims.append(median_claim(f"killed, {name}: journal", results, "journal_mb", unit="MB"))
    return claims


async def main() -> None:
    """Measure and tell."""
    parser = arguments_parser("how soon a storage node serves", size_mb=0)
    parser.add_argument("--ledgers", type=int, default=100_000)
    parser.add_argument("--journal-mb", type=int, default=1074)
    parser.add_argument("--shapes", default="64K,10K,1K", help="which journals")
    parser.add_argument("--parts", default="many,killed", help="which of these to measure")
    arguments = parse(parser, quick_mb=0)
    if arguments.quick:
        arguments.ledgers, arguments.journal_mb = 5000, 100
    claims: list[Claim] = []
    runs: dict[str, list[Result]] = {}
    with folder_of(arguments) as folder:
        if "many" in arguments.parts:
            written, started = await start_many(folder, arguments.ledgers, arguments.runs)
            runs |= {"written": [written], "started": started}
            claims += many_claims([written], started)
        if "killed" in arguments.parts:
            wanted = arguments.shapes.split(",")
            for shape in (one for one in SHAPES if one.name.split()[0] in wanted):
                byte_count = arguments.journal_mb * MB
                runs[shape.name] = await start_killed(shape, folder, byte_count, arguments.runs)
                claims += killed_claims(shape.name, runs[shape.name])
    report("starts of the storage node", arguments, claims, runs)


MODES: Final = {
    "many": write_many, "start": start_node, "fill": fill_journal, "bare": copy_barely
}  # fmt: skip


if __name__ == "__main__":
    if not child_mode(MODES):
        asyncio.run(main())
