"""Claim: what reading from the storage node costs beside reading a file.

node      a whole ledger, cold, in runs whose checksums are verified, by ``StorageNode.read``. It
          was written alone
mixed     the same of a ledger that was written beside three others: it lies in the entry logs in
          stretches of 8 MB, and the system's own reading ahead fetches the others' as well
plain     a file of as many bytes, cold, read from its start in pieces of 1 MiB
warm      node and plain once more, from the page cache: what is left is the CPU

Cold: after everything was written back and read once (so that the host of a virtual machine has
given it the memory), ``posix_fadvise(DONTNEED)`` on each file of the node's folder, and on the
plain file alike; the device's own reads of the process are printed to show that it was. What the
disk or the hypervisor keep for themselves stays warm for both.

random    entries one by one, and how often the node asked its disk for each (a decorator over its
          files counts): ``cold`` where no page of the index was touched before, ``first`` where
          nothing of the ledger was (small ones, their header is read too), ``again`` where the page
          is in memory
"""

import asyncio
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from common import (
    MB,
    MIB,
    Meter,
    Result,
    arguments_parser,
    child_mode,
    folder_of,
    median_claim,
    parse,
    quantiles,
    random_pool,
    ratio_claim,
    report,
    run_child,
    take_turns,
)
from nodes import (
    CountingFiles,
    RunMaker,
    add_all,
    device_read_bytes,
    drop_page_cache,
    fill_page_cache,
    read_bytes_of,
    read_entry,
    running_node,
)
from tierlog.runtime.logs import configure_logging
from tierlog.runtime.sections import LogSettings
from tierlog.runtime.settings import StorageSettings

MIXED: Final = (1, 2, 3, 4)
ALONE: Final = (5, 6)
SMALL_LEDGERS: Final = 500
SMALL_ENTRIES: Final = 20
IN_A_RUN: Final = 6
PIECE: Final = MIB
PAGE_ENTRIES: Final = 508
RANDOM_ENTRIES: Final = 500
LONG_ENTRY_SIZE: Final = 1000
LONG_LEDGER: Final = 1_000_000
SMALL_BASE: Final = 2_000_000
RATIO_MIN: Final = 0.7
COLD_READS_MAX: Final = 2.0
WARM_READS_MAX: Final = 1.0


async def write_ledgers(parameters: Mapping[str, Any]) -> Result:
    """Fill a node's folder (in a child)."""
    configure_logging(LogSettings(level="warning"), service="bench")
    size, entry_size = parameters["bytes"], parameters["entry_size"]
    maker, latencies = RunMaker(), list[float]()
    files = CountingFiles(Path(parameters["folder"]))
    async with running_node(files, StorageSettings()) as (node, _):
        meter = Meter()
        for together in (MIXED, *((one,) for one in ALONE)):
            async with asyncio.TaskGroup() as tasks:
                for ledger_id in together:
                    shape = {"entry_size": entry_size, "entries": size // entry_size}
                    runs = maker.runs(ledger_id, count=IN_A_RUN, **shape)
                    tasks.create_task(add_all(node, runs, latencies))
        for ledger_id, entries in _small_ledgers():
            runs = maker.runs(ledger_id, entry_size=LONG_ENTRY_SIZE, entries=entries, count=20)
            await add_all(node, runs, latencies)
    files.close()
    return meter.result(size * (len(MIXED) + len(ALONE)))


def _small_ledgers() -> Iterator[tuple[int, int]]:
    """Iterate over what random reads read: a ledger of many pages, and many of one."""
    yield LONG_LEDGER, RANDOM_ENTRIES * PAGE_ENTRIES
    for number in range(SMALL_LEDGERS):
        yield SMALL_BASE + number, SMALL_ENTRIES


async def read_ledger(parameters: Mapping[str, Any]) -> Result:
    """Read a ledger (in a child)."""
    configure_logging(LogSettings(level="warning"), service="bench")
    folder = Path(parameters["folder"])
    files = CountingFiles(folder)
    async with running_node(files, StorageSettings()) as (node, _):
        (drop_page_cache if parameters["cold"] else fill_page_cache)(folder)
        files.counts.clear()
        before, meter = device_read_bytes(), Meter()
        found = await read_bytes_of(node, parameters["ledger_id"])
        result = meter.result(found, device_mb=(device_read_bytes() - before) / MB)
        result["read_kb"] = files.counts.read_bytes / max(1, files.counts.reads) / 1000
    files.close()
    return result


async def read_plainly(parameters: Mapping[str, Any]) -> Result:
    """Read a file from its start (in a child)."""
    path = Path(parameters["plain"])
    (drop_page_cache if parameters["cold"] else fill_page_cache)(path.parent)
    piece, found = bytearray(PIECE), 0
    before, meter = device_read_bytes(), Meter()
    with path.open("rb", buffering=0) as file:  # noqa: ASYNC230 - nothing else runs
        while got := file.readinto(piece):
            found += got
    return meter.result(found, device_mb=(device_read_bytes() - before) / MB)


async def read_randomly(parameters: Mapping[str, Any]) -> Result:
    """Read single entries, and count what the disk was asked (in a child)."""
    configure_logging(LogSettings(level="warning"), service="bench")
    folder, rng = Path(parameters["folder"]), random.Random(1)
    pages = [page * PAGE_ENTRIES + rng.randrange(PAGE_ENTRIES) for page in range(RANDOM_ENTRIES)]
    rng.shuffle(pages)
    cold = [(LONG_LEDGER, entry_id) for entry_id in pages]
    first = [(SMALL_BASE + number, rng.randrange(SMALL_ENTRIES)) for number in range(SMALL_LEDGERS)]
    files = CountingFiles(folder)
    async with running_node(files, StorageSettings()) as (node, _):
        await read_entry(node, LONG_LEDGER, 0)  # its header
        drop_page_cache(folder)
        result: Result = {"mb_per_s": 0.0}
        for name, entries in {"cold": cold, "again": cold, "first": first}.items():
            counts, seconds = list[int](), list[float]()
            files.counts.clear()
            for ledger_id, entry_id in entries:
                reads, started_s = files.counts.reads, time.perf_counter()
                assert await read_entry(node, ledger_id, entry_id) == LONG_ENTRY_SIZE
                seconds.append(time.perf_counter() - started_s)
                counts.append(files.counts.reads - reads)
            result |= {
                f"{name}_reads": statistics.fmean(counts),
                f"{name}_reads_max": max(counts),
                f"{name}_kb": files.counts.read_bytes / len(entries) / 1000,
                **{f"{name}_{key}": value for key, value in quantiles(seconds).items()},
            }
    files.close()
    return result


class Turns:
    """Counts, so that each turn reads another ledger."""

    def __init__(self, folder: Path, size: int) -> None:
        self._folder = folder
        self._size = size
        self._turn = 0

    async def node(self, ledgers: Sequence[int], *, cold: bool) -> Result:
        """Read the next ledger."""
        self._turn += 1
        ledger_id = ledgers[self._turn % len(ledgers)]
        return await self._child("node", cold=cold, ledger_id=ledger_id)

    async def plain(self, *, cold: bool) -> Result:
        """Read the file."""
        return await self._child("plain", cold=cold)

    async def random(self) -> Result:
        """Read single entries."""
        return await self._child("random")

    async def write(self, entry_size: int) -> None:
        """Make what is read."""
        plain = self._folder / "plain" / "file"
        plain.parent.mkdir()
        pool = random_pool()
        with plain.open("wb") as file:
            for _ in range(-(-self._size // len(pool))):
                file.write(pool)
            file.truncate(self._size)
        await self._child("write", bytes=self._size, entry_size=entry_size)

    async def _child(self, mode: str, **parameters: object) -> Result:
        folders = {
            "folder": str(self._folder / "node"),
            "plain": str(self._folder / "plain" / "file"),
        }
        return await run_child(__file__, mode, {**folders, **parameters}, {})


def random_claims(results: Sequence[Result]) -> list[Any]:
    """Return what is claimed of single entries."""
    targets = {"cold": COLD_READS_MAX, "first": COLD_READS_MAX, "again": WARM_READS_MAX}
    claims = [
        median_claim(
            f"disk reads an entry, {name}", results, f"{name}_reads", target=target, at_most=True
        )
        for name, target in targets.items()
    ]
    claims += [
        median_claim(f"most of them, {name}", results, f"{name}_reads_max") for name in targets
    ]
    claims += [median_claim(f"read, {name}", results, f"{name}_kb", unit="KB") for name in targets]
    claims += [
        median_claim(f"entry {name} {key[:3]}", results, f"{name}_{key}", unit="ms")
        for name in targets
        for key in ("p50_ms", "p99_ms")
    ]
    return claims


async def main() -> None:
    """Measure and tell."""
    parser = arguments_parser("reading from the storage node against a file", size_mb=300)
    arguments = parse(parser, quick_mb=60)
    with folder_of(arguments) as folder:
        turns = Turns(folder, arguments.size * MB)
        await turns.write(arguments.entry_size)
        runs = await take_turns(
            {
                "node": lambda: turns.node(ALONE, cold=True),
                "plain": lambda: turns.plain(cold=True),
                "mixed": lambda: turns.node(MIXED, cold=True),
                "node warm": lambda: turns.node(ALONE, cold=False),
                "plain warm": lambda: turns.plain(cold=False),
                "random": turns.random,
            },
            arguments.runs,
        )
    claims = [
        ratio_claim("node / plain, cold", runs, of="node", to="plain", target=RATIO_MIN),
        ratio_claim("mixed / plain, cold", runs, of="mixed", to="plain"),
        ratio_claim("node / plain, warm", runs, of="node warm", to="plain warm"),
    ]
    sequential = [name for name in runs if name != "random"]
    claims += [median_claim(name, runs[name], "mb_per_s", unit="MB/s") for name in sequential]
    claims += [
        median_claim(f"{name}, by the device", runs[name], "device_mb", unit="MB")
        for name in sequential
    ]
    claims += [median_claim("node's CPU", runs["node"], "cpu_s_per_gb", unit="s/GB")]
    claims += random_claims(runs["random"])
    report("reading from the storage node", arguments, claims, runs)


if __name__ == "__main__":
    modes = {
        "write": write_ledgers,
        "node": read_ledger,
        "plain": read_plainly,
        "random": read_randomly,
    }
    if not child_mode(modes):
        asyncio.run(main())
