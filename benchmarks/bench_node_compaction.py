"""Claim: compaction beside appends costs them little.

beside    100 producers at half of what the node takes, while it compacts at ``--rate`` MB/s
alone     the same, with compaction switched off

Each run begins with a copy of the same folder: entry logs, half of whose ledgers were then freed,
so that every log is half alive and the major compaction wants all of them. Compaction counts what
it reads and what it writes against its rate, and runs throughout.
"""

import asyncio
import shutil
import time
from collections.abc import Mapping
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
    latency_claims,
    median_claim,
    parse,
    quantiles,
    ratio_claim,
    report,
    run_child,
    say,
    take_turns,
)
from nodes import (
    CountingFiles,
    RunMaker,
    add_all,
    add_paced,
    running_node,
    settle_memory,
)
from tierlog.model.ids import LedgerId
from tierlog.runtime.logs import configure_logging
from tierlog.runtime.sections import LogSettings
from tierlog.runtime.settings import StorageSettings

PRODUCERS: Final = 100
OLD_LEDGERS: Final = 20
OLD_LOG_BYTES: Final = 16 * MIB
NEW_BASE: Final = 1000
P99_RATIO_MAX: Final = 1.2
FULL_MB: Final = 200
SETTLING_S: Final = 1.0


def _settings(rate_mb: float | None) -> StorageSettings:
    off, soon_s = -1.0, 0.5
    return StorageSettings(
        entry_log_bytes_max=OLD_LOG_BYTES,
        minor_compaction_threshold=off,
        major_compaction_threshold=off if rate_mb is None else 0.8,
        major_compaction_interval_s=soon_s,
        compaction_bytes_per_s=int((rate_mb or 10.0) * MB),
        gc_interval_s=soon_s,
    )


async def write_old(parameters: Mapping[str, Any]) -> Result:
    """Write what will be compacted (in a child)."""
    configure_logging(LogSettings(level="warning"), service="bench")
    maker, size = RunMaker(), parameters["entry_size"]
    files = CountingFiles(Path(parameters["folder"]))
    entries = parameters["bytes"] // size // OLD_LEDGERS
    async with running_node(files, _settings(None)) as (node, _):
        meter = Meter()
        async with asyncio.TaskGroup() as tasks:
            for ledger_id in range(1, OLD_LEDGERS + 1):
                runs = maker.runs(ledger_id, entry_size=size, entries=entries)
                tasks.create_task(add_all(node, runs, []))
    files.close()
    return meter.result(parameters["bytes"])


async def add_to_node(parameters: Mapping[str, Any]) -> Result:
    """Free half of what is old; then add, at a rate or as fast as can be (in a child)."""
    configure_logging(LogSettings(level="warning"), service="bench")
    maker, latencies, size = RunMaker(), list[float](), parameters["entry_size"]
    each = parameters["bytes"] // size // PRODUCERS
    work = [
        maker.runs(NEW_BASE + number, entry_size=size, entries=each) for number in range(PRODUCERS)
    ]
    settle_memory()
    files = CountingFiles(Path(parameters["folder"]))
    async with running_node(files, _settings(parameters["compaction_mb"])) as (node, _):
        for ledger_id in range(1, OLD_LEDGERS + 1, 2):
            await node.free(LedgerId(ledger_id))
        await asyncio.sleep(SETTLING_S)
        before, meter = node.statistics(), Meter()
        async with asyncio.TaskGroup() as tasks:
            for number, runs in enumerate(work):
                if parameters["rate"] is None:
                    tasks.create_task(add_all(node, runs, latencies))
                    continue
                interval_s = PRODUCERS / parameters["rate"]
                begin_s = meter.started_s + interval_s * number / PRODUCERS
                paced = add_paced(node, runs, latencies, begin_s=begin_s, interval_s=interval_s)
                tasks.create_task(paced)
        seconds = time.perf_counter() - meter.started_s
        result = meter.result(each * PRODUCERS * size, **quantiles(latencies))
        moved = sum(
            node.statistics().get(name, 0) - before.get(name, 0)
            for name in ("compaction_read_bytes", "compaction_copied_bytes")
        )
    files.close()
    return {**result, "compaction_mb_per_s": moved / MB / seconds}


class Runs:
    """The variants, each over a fresh copy."""

    def __init__(self, folder: Path, entry_size: int, *, compaction_mb: float) -> None:
        self._folder = folder
        self._entry_size = entry_size
        self._compaction_mb = compaction_mb
        self.rate = 0.0
        """Entries a second: half of what ``full`` found."""

    async def write(self, byte_count: int) -> None:
        """Make what is copied."""
        parameters = {
            "folder": str(self._folder / "old"),
            "bytes": byte_count,
            "entry_size": self._entry_size,
        }
        await run_child(__file__, "write", parameters, {})

    async def full(self) -> None:
        """Find out what the node takes."""
        full = await self._add(byte_count=FULL_MB * MB, rate=None, compaction=False)
        self.rate = full["mb_per_s"] * MB / self._entry_size / 2
        say(f"half load is {self.rate:,.0f} entries a second")

    async def paced(self, *, seconds: float, compaction: bool) -> Result:
        """Add at half load."""
        byte_count = int(self.rate * seconds * self._entry_size)
        return await self._add(byte_count=byte_count, rate=self.rate, compaction=compaction)

    async def _add(self, *, byte_count: int, rate: float | None, compaction: bool) -> Result:
        copy = self._folder / "copy"
        shutil.copytree(self._folder / "old", copy)
        parameters = {
            "folder": str(copy),
            "entry_size": self._entry_size,
            "bytes": byte_count,
            "rate": rate,
            "compaction_mb": self._compaction_mb if compaction else None,
        }
        try:
            return await run_child(__file__, "add", parameters, {})
        finally:
            shutil.rmtree(copy)


async def main() -> None:
    """Measure and tell."""
    parser = arguments_parser("appends beside compaction", size_mb=300)
    parser.add_argument("--rate", type=float, default=10.0, help="MB/s that compaction may move")
    parser.add_argument("--seconds", type=float, default=10.0, help="of a run")
    arguments = parse(parser, quick_mb=150)
    seconds = min(arguments.seconds, 5.0) if arguments.quick else arguments.seconds
    with folder_of(arguments) as folder:
        variants = Runs(folder, arguments.entry_size, compaction_mb=arguments.rate)
        await variants.write(arguments.size * MB)
        await variants.full()
        runs = await take_turns(
            {
                "beside": lambda: variants.paced(seconds=seconds, compaction=True),
                "alone": lambda: variants.paced(seconds=seconds, compaction=False),
            },
            arguments.runs,
        )
    claims = [
        ratio_claim(
            "p99 beside / alone", runs, of="beside", to="alone", key="p99_ms",
            target=P99_RATIO_MAX, at_most=True,
        ),
        ratio_claim("p50 beside / alone", runs, of="beside", to="alone", key="p50_ms"),
        *latency_claims(runs, runs),
    ]  # fmt: skip
    claims += [
        median_claim(f"{name}, appended", runs[name], "mb_per_s", unit="MB/s") for name in runs
    ]
    claims += [
        median_claim(f"{name}, compacted", runs[name], "compaction_mb_per_s", unit="MB/s")
        for name in runs
    ]
    report("appends beside compaction", arguments, claims, runs)


if __name__ == "__main__":
    if not child_mode({"write": write_old, "add": add_to_node}):
        asyncio.run(main())
