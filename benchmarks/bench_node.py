"""Claim: what the storage node costs beside its two writes, and beside a bookie.

node      a ``StorageNode`` over the real disk, in this process; producers wait for their answer
          before the next add. One entry an add, each producer with a ledger of its own
runs      the same outstanding bytes, made into runs of up to 64 KiB before they are added, by
          fewer producers
loop      the node's groups, as it made them, written to a journal and to an entry log, each made
          durable by fdatasync before the next group
lean      the same, but the entry log is written 32 MiB at a time and made durable once, at the
          end: the least that a node has to ask of the disk. Harder to keep up with
bookie    BookKeeper's bookie with its client over the loopback, as many bytes unanswered
direct    the same bookie called within its process, without client and network: as ``node``. It
          is told nothing of the entries but their bytes

The node has been round its journal once, so that segments are recycled; a life follows another.
A node's time ends when it has stopped: then everything is in the journal and in entry logs and
indexes, durably. The loops' journal is filled with zeros before the clock starts. A bookie's time
ends with its last answer, when its entry log is still to be written; beside it, the node's does
too.

At half load the node gets half of what it took at most, in even steps, whether or not what came
before is answered. The loops begin each group when the node began it, or at once where they are
late. Both count from the moment when an add, or a group, was due: who is late has it held against
him. What a loop takes for a group by itself, without the queue before it, is told too.
"""

import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import bookie
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
    positives,
    quantiles,
    random_pool,
    ratio_claim,
    report,
    run_child,
    say,
    take_turns,
)
from nodes import (
    CountingFiles,
    RunMaker,
    add_paced,
    add_side_by_side,
    running_node,
    settle_memory,
)
from tierlog.format.frame import FRAME_HEADER_LEN
from tierlog.format.run import RUN_BYTES_MAX
from tierlog.runtime.logs import configure_logging
from tierlog.runtime.sections import LogSettings
from tierlog.runtime.settings import StorageSettings

ALIGNMENT: Final = 4096
LOG_WRITE_BYTES: Final = 32 * MIB
PRODUCERS_MANY: Final = 100
ALONE_ENTRIES: Final = 2000
HALF_S: Final = 4.0
PRIMING_BYTES: Final = 700 * MB
RATIO_MIN: Final = 0.6
TARGET_ENTRY_SIZE: Final = 10_000
SLACK_MS: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Who adds what."""

    entry_size: int
    producers: int
    in_a_run: int = 1

    @property
    def name(self) -> str:
        """Its name in the results."""
        kind = "node" if self.in_a_run == 1 else "runs"
        return f"{kind} {self.entry_size // 1000}K x{self.outstanding}"

    @property
    def outstanding(self) -> int:
        """Entries that may be unanswered."""
        return self.producers * self.in_a_run


def coalesced(case: Case) -> Case:
    """Return the case with exactly as many bytes unanswered, in fewer and larger runs."""
    fit = RUN_BYTES_MAX // (case.entry_size + FRAME_HEADER_LEN)
    in_a_run = next(few for few in range(max(1, fit), 0, -1) if case.producers % few == 0)
    return Case(entry_size=case.entry_size, producers=case.producers // in_a_run, in_a_run=in_a_run)


# In children


async def add_to_node(parameters: Mapping[str, Any]) -> Result:
    """Add entries to a fresh node (in a child), and note the groups that it made."""
    configure_logging(LogSettings(level="warning"), service="bench")
    entry_size, producers = parameters["entry_size"], parameters["producers"]
    in_a_run, rate = parameters["in_a_run"], parameters["rate"]
    each = max(2 * in_a_run, parameters["bytes"] // entry_size // producers)
    maker, latencies = RunMaker(), list[float]()
    work = [
        maker.runs(ledger_id, entry_size=entry_size, entries=each, count=in_a_run)
        for ledger_id in range(parameters["first_id"], parameters["first_id"] + producers)
    ]
    byte_count = each * producers * entry_size
    settle_memory()
    files = CountingFiles(Path(parameters["home"]))
    async with running_node(files, StorageSettings()) as (node, stop):
        files.counts.clear()
        meter = Meter()
        async with asyncio.TaskGroup() as tasks:
            if rate is None:
                tasks.create_task(add_side_by_side(node, work, latencies))
            for number, runs in enumerate(work if rate is not None else ()):
                assert rate is not None
                interval_s = in_a_run * producers / rate
                begin_s = meter.started_s + interval_s * number / producers
                paced = add_paced(node, runs, latencies, begin_s=begin_s, interval_s=interval_s)
                tasks.create_task(paced)
        answered_s = time.perf_counter() - meter.started_s
        stop.set()
    files.close()
    counts = files.counts
    groups = [(begun_s - meter.started_s, size) for begun_s, size in counts.groups]
    _save(Path(parameters["groups"]), groups)
    return meter.result(
        byte_count,
        **quantiles(latencies),
        answered_mb_per_s=byte_count / MB / answered_s,
        groups=len(groups),
        group_kb=statistics.fmean(size for _, size in groups) / 1000,
        group_p50_ms=statistics.median(counts.group_ms),
        journal_mb=sum(size for _, size in groups) / MB,
        other_mb=counts.other_write_bytes / MB,
    )


Groups = Sequence[tuple[float, int]]
Latencies = list[tuple[float, float]]
"""Of each group, in seconds: since it was due, and by itself."""


def _save(path: Path, groups: Groups) -> None:
    path.write_text(json.dumps(groups), encoding="ascii")


def _load(path: Path) -> Groups:
    return [(begun_s, size) for begun_s, size in json.loads(path.read_text(encoding="ascii"))]


async def write_groups(parameters: Mapping[str, Any]) -> Result:
    """Write a node's groups to two files (in a child)."""
    groups = _load(Path(parameters["groups"]))
    pool = memoryview(random_pool())
    with tempfile.TemporaryDirectory(dir=parameters["folder"]) as folder:
        journal = os.open(Path(folder) / "journal", os.O_RDWR | os.O_CREAT)
        entry_log = os.open(Path(folder) / "log", os.O_RDWR | os.O_CREAT)
        try:
            _fill_with_zeros(journal, sum(size + ALIGNMENT for _, size in groups))
            writer = _write_both if parameters["both"] else _write_lean
            meter = Meter()
            latencies = writer(groups, pool, journal, entry_log, paced=parameters["paced"])
            # Each group counts for as many adds as it held.
            weighted = [
                latency
                for latency, (_, size) in zip(latencies, groups, strict=True)
                for _ in range(max(1, size // parameters["entry_size"]))
            ]
            since_due, by_itself = zip(*weighted, strict=True)
            by_itself_ms = quantiles(by_itself)["p99_ms"]
            return meter.result(
                parameters["bytes"], **quantiles(since_due), by_itself_p99_ms=by_itself_ms
            )
        finally:
            os.close(journal)
            os.close(entry_log)


def _fill_with_zeros(fd: int, length: int) -> None:
    zeros = bytes(4 * MIB)
    for offset in range(0, length, len(zeros)):
        os.pwrite(fd, zeros, offset)
    os.fsync(fd)


def _wait_until(started_s: float, offset_s: float, *, paced: bool) -> float:
    """Wait for a group's time, if it is to come; return when it was due, or begun unpaced."""
    if not paced:
        return time.perf_counter()
    due_s = started_s + offset_s
    late_s = time.perf_counter() - due_s
    if late_s >= 0:
        return due_s
    time.sleep(-late_s)
    return time.perf_counter()


def _write_both(
    groups: Groups, pool: memoryview, journal: int, entry_log: int, *, paced: bool
) -> Latencies:
    latencies, journal_at, log_at, started_s = Latencies(), 0, 0, time.perf_counter()
    for offset_s, size in groups:
        due_s = _wait_until(started_s, offset_s, paced=paced)
        begun_s = time.perf_counter()
        data = _slice(pool, log_at, size)
        os.pwritev(journal, data, journal_at)
        os.fdatasync(journal)
        os.pwritev(entry_log, data, log_at)
        os.fdatasync(entry_log)
        ended_s = time.perf_counter()
        latencies.append((ended_s - due_s, ended_s - begun_s))
        journal_at += -(-size // ALIGNMENT) * ALIGNMENT
        log_at += size
    return latencies


def _write_lean(
    groups: Groups, pool: memoryview, journal: int, entry_log: int, *, paced: bool
) -> Latencies:
    latencies, journal_at, log_at, held = Latencies(), 0, 0, 0
    started_s = time.perf_counter()
    for offset_s, size in groups:
        due_s = _wait_until(started_s, offset_s, paced=paced)
        begun_s = time.perf_counter()
        os.pwritev(journal, _slice(pool, journal_at, size), journal_at)
        os.fdatasync(journal)
        ended_s = time.perf_counter()
        latencies.append((ended_s - due_s, ended_s - begun_s))
        journal_at += -(-size // ALIGNMENT) * ALIGNMENT
        held += size
        if held >= LOG_WRITE_BYTES:
            os.pwritev(entry_log, _slice(pool, 0, held), log_at)
            log_at, held = log_at + held, 0
    os.pwritev(entry_log, _slice(pool, 0, held), log_at)
    os.fdatasync(entry_log)
    return latencies


def _slice(pool: memoryview, at: int, size: int) -> list[memoryview]:
    """Return some ``size`` bytes of the pool."""
    start = at % len(pool)
    parts = [pool[start : start + size]]
    while (missing := size - sum(map(len, parts))) > 0:
        parts.append(pool[:missing])
    return parts


# The benchmark


class Bench:
    """The variants for one size of entry. A loop writes the groups of its node's latest run.

    All runs of a node are lives of the same one, whose journal has been round once, so that its
    segments are recycled ones as they are in the long run.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self._folder = folder
        self._size = size
        self._next_id = 1
        self.alone: Runs = {}
        """What a bookie did with one unanswered entry, beside the rest."""

    def byte_count(self, case: Case) -> int:
        """Return how much one run adds: more of larger entries, less where each waits."""
        if case.outstanding == 1:
            return min(self._size, ALONE_ENTRIES * case.entry_size)
        return self._size * {1000: 1, 10_000: 4, 100_000: 8}[case.entry_size] // 4

    async def prime(self) -> None:
        """Let the node's journal go round once."""
        say("filling the node's journal once")
        await self._node(Case(entry_size=10_000, producers=20, in_a_run=5), PRIMING_BYTES, None)

    async def node(self, case: Case, *, rate: float | None = None) -> Result:
        """Add to a node; ``rate``: entries a second."""
        byte_count = self.byte_count(case)
        if rate is not None:
            byte_count = int(HALF_S * rate) * case.entry_size
        return await self._node(case, byte_count, rate)

    async def _node(self, case: Case, byte_count: int, rate: float | None) -> Result:
        parameters = {
            "entry_size": case.entry_size,
            "producers": case.producers,
            "in_a_run": case.in_a_run,
            "bytes": byte_count,
            "rate": rate,
            "home": str(self._folder / "node"),
            "first_id": self._next_id,
            "groups": str(self._groups(case, paced=rate is not None)),
        }
        self._next_id += case.producers
        return await run_child(__file__, "node", parameters, {})

    async def loop(self, case: Case, *, both: bool, paced: bool = False) -> Result:
        """Write the same groups."""
        parameters = {
            "entry_size": case.entry_size,
            "bytes": self.byte_count(case),
            "folder": str(self._folder),
            "groups": str(self._groups(case, paced=paced)),
            "both": both,
            "paced": paced,
        }
        return await run_child(__file__, "loop", parameters, {})

    async def bookie(self, way: str, many: Case, alone: Case) -> Result:
        """Add to a bookie, with many and with one unanswered."""
        works = [
            (case.entry_size, self.byte_count(case) // case.entry_size, case.outstanding)
            for case in (many, alone)
        ]
        results = await bookie.bookie_adds(self._folder, way, works)
        for result in results.values():
            result["answered_mb_per_s"] = result["mb_per_s"]
        name = peer_name(way, alone)
        self.alone.setdefault(name, []).append(results[alone.entry_size, alone.outstanding])
        return results[many.entry_size, many.outstanding]

    def _groups(self, case: Case, *, paced: bool) -> Path:
        return self._folder / f"{case.name}{' paced' if paced else ''}.json"


Variants = dict[str, Callable[[], Awaitable[Result]]]
Runs = dict[str, list[Result]]


def peer_name(way: str, case: Case) -> str:
    """Return the name of a bookie's results."""
    return f"{way} {case.entry_size // 1000}K x{case.outstanding}"


async def measure_adds(
    bench: Bench, cases: Sequence[Case], rounds: int, *, with_bookie: bool
) -> Runs:
    """Return each case's node, loop and lean loop, and bookies of the first and last."""
    variants: Variants = {}
    for case in cases:
        await bench.node(case)  # its groups, for loops that come first
        variants |= {
            case.name: lambda case=case: bench.node(case),  # type: ignore[misc]
            f"{case.name} loop": lambda case=case: bench.loop(case, both=True),  # type: ignore[misc]
            f"{case.name} lean": lambda case=case: bench.loop(case, both=False),  # type: ignore[misc]
        }
    if with_bookie:
        for way in ("bookie", "direct"):
            name = peer_name(way, cases[0])
            variants[name] = lambda way=way: bench.bookie(way, cases[0], cases[-1])  # type: ignore[misc]
    runs = await take_turns(variants, rounds)
    return runs | bench.alone


async def measure_half_load(bench: Bench, case: Case, full: Sequence[Result], rounds: int) -> Runs:
    """Return the same at half of what the node took."""
    most = statistics.median(one["answered_mb_per_s"] for one in full)
    rate = most * MB / case.entry_size / 2
    name = f"{case.name} half"
    say(f"{name}: {rate:,.0f} entries a second")
    await bench.node(case, rate=rate)
    variants: Variants = {
        name: lambda: bench.node(case, rate=rate),
        f"{name} loop": lambda: bench.loop(case, both=True, paced=True),
        f"{name} lean": lambda: bench.loop(case, both=False, paced=True),
    }
    return await take_turns(variants, rounds)


def claims_of(cases: Sequence[Case], runs: Runs) -> list[Claim]:
    """Return what is claimed of adds."""
    claims = []
    for case in cases:
        name = case.name
        wanted = case.entry_size >= TARGET_ENTRY_SIZE and case.outstanding > 1
        target = RATIO_MIN if wanted else None
        claims += [
            ratio_claim(f"{name} / loop", runs, of=name, to=f"{name} loop", target=target),
            ratio_claim(f"{name} / lean", runs, of=name, to=f"{name} lean"),
        ]
        for way, least in (("bookie", 1.0), ("direct", None)):
            peer = peer_name(way, case)
            if peer in runs:
                claims.append(
                    ratio_claim(
                        f"{name} / {way}", runs, of=name, to=peer, key="answered_mb_per_s",
                        target=least,
                    )
                )  # fmt: skip
    return claims


def half_claims(case: Case, runs: Runs) -> list[Claim]:
    """Return what is claimed at half load: milliseconds above what is allowed, so at most 0."""
    name = f"{case.name} half"
    claims = []
    for loop in ("loop", "lean"):
        for key, which in (("by_itself_p99_ms", " by itself"), ("p99_ms", "")):
            over = [
                {"ms": node["p99_ms"] - (2 * bare[key] + SLACK_MS)}
                for node, bare in zip(runs[name], runs[f"{name} {loop}"], strict=True)
            ]
            claims.append(
                median_claim(
                    f"{name} p99 - (2 x {loop} p99{which} + 2)", over, "ms", unit="ms",
                    target=0.0 if loop == "loop" else None, at_most=True,
                )
            )  # fmt: skip
    return claims


def rate_claims(runs: Runs) -> list[Claim]:
    """Return rates, latencies and groups, of which nothing is claimed."""
    claims = [
        median_claim(name, runs[name], "mb_per_s", unit="MB/s")
        for name in runs
        if "half" not in name
    ]
    claims += [
        median_claim(f"{name} {key[:3]}", runs[name], key, unit="ms")
        for name in runs
        if "half" in name or not name.endswith(("loop", "lean"))
        for key in ("p50_ms", "p99_ms")
    ]
    claims += [
        median_claim(f"{name} p99 by itself", runs[name], "by_itself_p99_ms", unit="ms")
        for name in runs
        if "half l" in name
    ]
    for name in runs:
        if name.startswith(("node", "runs")) and not name.endswith(("loop", "lean")):
            claims += [
                median_claim(f"{name} group", runs[name], "group_kb", unit="KB"),
                median_claim(f"{name} group p50", runs[name], "group_p50_ms", unit="ms"),
            ]
    return claims


async def main() -> None:
    """Measure and tell."""
    parser = arguments_parser("adds to the storage node against the disk", size_mb=300)
    parser.add_argument("--parts", default="adds,half,bookie", help="which of these to measure")
    parser.add_argument(
        "--sizes", type=positives, default="1000,10000,100000", help="bytes of an entry"
    )
    arguments = parse(parser, quick_mb=40)
    parts = arguments.parts.split(",")
    reason = bookie.missing() or await bookie.build() if "bookie" in parts else None
    if reason is not None:
        say(f"no bookie beside it: {reason}")
    runs: Runs = {}
    claims: list[Claim] = []
    for size in arguments.sizes:
        many, alone = (Case(entry_size=size, producers=count) for count in (PRODUCERS_MANY, 1))
        in_runs = coalesced(many)
        cases = [many, *([in_runs] if in_runs.in_a_run > 1 else []), alone]
        with folder_of(arguments) as folder:
            bench = Bench(folder, arguments.size * MB)
            await bench.prime()
            with_bookie = "bookie" in parts and reason is None
            runs |= await measure_adds(bench, cases, arguments.runs, with_bookie=with_bookie)
            claims += claims_of(cases, runs)
            if "half" in parts:
                runs |= await measure_half_load(bench, many, runs[many.name], arguments.runs)
                claims += half_claims(many, runs)
    claims += rate_claims(runs)
    report("storage node", arguments, claims, runs)


if __name__ == "__main__":
    if not child_mode({"node": add_to_node, "loop": write_groups}):
        asyncio.run(main())
