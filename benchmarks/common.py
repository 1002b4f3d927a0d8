"""What the benchmarks share: a cluster of real processes, measured children, ratios and output.

Every number that is claimed is a ratio of runs that took turns (A B A B …) in one sitting, since
machines differ and other work comes and goes. Each measured run is a fresh process, so that its
CPU time and its peak of memory are its own.

Invariants:
    * What a child reports is measured inside it, behind its start-up.
    * Nothing is left on disk, and no process, whatever a run ends with.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import re
import shutil
import statistics
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from tierlog.client import Client, open_client
from tierlog.embedded.cluster import EmbeddedCluster
from tierlog.embedded.services import server_environment
from tierlog.format.frame import pack_entries
from tierlog.format.run import Run, build_run
from tierlog.model.ids import LedgerId
from tierlog.model.policy import Policy
from tierlog.runtime.settings import ClientSettings, Settings

MB: Final = 10**6
MIB: Final = 1024 * 1024
BLOCK_BYTES: Final = 64 * MIB
HOUR_MS: Final = 3_600_000
RUNS: Final = 5
QUICK_RUNS: Final = 3
POOL_BYTES: Final = 32 * MIB

BEGUN: Final = b"begun\n"
CLOCK_TICKS_S: Final = os.sysconf("SC_CLK_TCK")

T = TypeVar("T")
Result = dict[str, float]


# What runs in a child


@dataclass(slots=True)
class Meter:
    """Seconds of the clock and of the CPU, of this process, from ``start`` on."""

    started_s: float = field(default_factory=time.perf_counter)
    started_cpu_s: float = field(default_factory=time.process_time)

    def result(self, byte_count: int, **more: float) -> Result:
        """Return what was measured until now."""
        seconds = time.perf_counter() - self.started_s
        cpu_s = time.process_time() - self.started_cpu_s
        return {
            "bytes": byte_count,
            "seconds": seconds,
            "mb_per_s": byte_count / MB / seconds,
            "cpu_s_per_gb": cpu_s / (byte_count / 10**9),
            "rss_peak_mib": rss_peak_bytes() / MIB,
            **more,
        }

    def cpu_share(self) -> float:
        """Return how many seconds of the CPU a second took until now."""
        seconds = time.perf_counter() - self.started_s
        return (time.process_time() - self.started_cpu_s) / seconds


def rss_peak_bytes(pid: int | str = "self") -> int:
    """Return the most memory that a program ever held; unless said, this one.

    Not ``ru_maxrss``: that remembers the process from before its exec.
    """
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


def process_cpu_s(pid: int) -> float:
    """Return the seconds of the CPU that a process took since it began, all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(") ")[2].split()
    user, system = fields[11:13]  # the 14th and 15th: two stand before the closing bracket
    return (int(user) + int(system)) / CLOCK_TICKS_S


Mode = Callable[[Mapping[str, Any]], Awaitable[Result]]


def child_mode(modes: Mapping[str, Mode]) -> bool:
    """Run one of ``modes`` when this process was started for it; else say False."""
    if len(sys.argv) < 2 or sys.argv[1] != "--child":
        return False
    mode, parameters = modes[sys.argv[2]], json.loads(sys.argv[3])

    async def run() -> Result:
        return await mode(parameters)

    profile_to = os.environ.get("TIERLOG_BENCH_PROFILE")
    if profile_to:
        print(json.dumps(_profiled(run, profile_to)))
    else:
        print(json.dumps(asyncio.run(run())))
    return True


def _profiled(run: Callable[[], Awaitable[Result]], path: str) -> Result:
    import cProfile  # noqa: PLC0415 - only for who looks for a reason

    async def main() -> Result:
        return await run()

    profile = cProfile.Profile()
    try:
        return profile.runcall(asyncio.run, main())
    finally:
        profile.dump_stats(path)


async def run_child(
    script: str, mode: str, parameters: Mapping[str, object], env: Mapping[str, str]
) -> Result:
    """Run a mode of a script as a process of its own, and return what it measured."""
    async with _child(script, mode, parameters, env) as process:
        return await _measured_by(process, script, mode)


async def run_beside(
    script: str,
    mode: str,
    parameters: Mapping[str, object],
    env: Mapping[str, str],
    work: Callable[[], Awaitable[T]],
) -> tuple[T, Result]:
    """Do ``work`` while a mode of a script runs; return the outcomes of both.

    The mode calls ``begun`` once it does what it is there for, and ends when that says so.
    """
    async with _child(script, mode, parameters, env, stdin=PIPE) as process:
        assert process.stdout is not None
        if await process.stdout.readline() != BEGUN:
            await _measured_by(process, script, mode)
            raise SystemExit(f"{Path(script).name} {mode} ended before it had begun")
        outcome = await work()
        return outcome, await _measured_by(process, script, mode)


def begun() -> asyncio.Event:
    """Say, in a child of ``run_beside``, that the work may begin; return what is set behind it."""
    done, loop = asyncio.Event(), asyncio.get_running_loop()

    def end() -> None:
        loop.remove_reader(sys.stdin)
        done.set()

    loop.add_reader(sys.stdin, end)  # nothing ever comes but its end
    sys.stdout.buffer.write(BEGUN)
    sys.stdout.buffer.flush()
    return done


@contextlib.asynccontextmanager
async def _child(
    script: str,
    mode: str,
    parameters: Mapping[str, object],
    env: Mapping[str, str],
    *,
    stdin: int | None = None,
) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, script, "--child", mode, json.dumps(parameters)),
        stdin=stdin,
        stdout=PIPE,
        env={**os.environ, **env},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _measured_by(process: Process, script: str, mode: str) -> Result:
    """Let a child end, and return what it measured."""
    if process.stdin is not None:
        process.stdin.close()
    out, _ = await process.communicate()
    if process.returncode != 0:
        raise SystemExit(f"{Path(script).name} {mode} failed with {process.returncode}, see above")
    result: Result = json.loads(out.splitlines()[-1])
    return result


# Loads and times


async def due_times(begin_s: float, interval_s: float, count: int) -> AsyncIterator[float]:
    """Wait until one after the other is due; give the time from which it counts.

    That is when it was due, if what came before held it up; the timer's own lateness is nobody's.
    """
    for number in range(count):
        due_s = begin_s + number * interval_s
        if (left_s := due_s - time.perf_counter()) > 0:
            await asyncio.sleep(left_s)
            due_s = time.perf_counter()
        yield due_s


def note_latency(latencies: list[float], started_s: float, _answer: object) -> None:
    """Note the time until an answer is done: a callback of its future."""
    latencies.append(time.perf_counter() - started_s)


# The cluster


def random_pool(size: int = POOL_BYTES) -> bytes:
    """Return bytes that no compression makes smaller."""
    return os.urandom(size)


def entries_of(pool: bytes, entry_size: int, count: int) -> Iterator[memoryview]:
    """Iterate over entries that are slices of the pool, each at another place."""
    view, at = memoryview(pool), 0
    for _ in range(count):
        if at + entry_size > len(pool):
            at = (at * 7919 + 1) % max(1, len(pool) - entry_size)
        yield view[at : at + entry_size]
        at += entry_size


def draft_of(entries: Sequence[memoryview]) -> Run:
    """Return raw entries as one append."""
    frames, offsets = pack_entries(entries)
    return build_run(frames, offsets)


def quantiles(seconds: Sequence[float], *, prefix: str = "") -> dict[str, float]:
    """Return median and p99 in milliseconds, as ``p50_ms`` and ``p99_ms`` behind the prefix."""
    cuts = statistics.quantiles(seconds, n=100) if len(seconds) > 1 else [0.0] * 99
    return {f"{prefix}p50_ms": cuts[49] * 1000, f"{prefix}p99_ms": cuts[98] * 1000}


def folder_of(arguments: argparse.Namespace) -> "contextlib.AbstractContextManager[Path]":
    """Give a temporary folder that goes with the context."""

    @contextlib.contextmanager
    def folder() -> Iterator[Path]:
        made = Path(tempfile.mkdtemp(prefix="tierlog-bench-", dir=arguments.dir))
        try:
            yield made
        finally:
            shutil.rmtree(made, ignore_errors=True)

    return folder()


def shape_settings(shape: str, *, stripe_entries: int | None = None) -> dict[str, str]:
    """Return what makes streams lie on nodes like ``3/2/2``: ensemble / write / ack quorum."""
    ensemble, write, ack = shape.split("/")
    section = "TIERLOG_INGEST__OWNER__"
    stripe = {} if stripe_entries is None else {f"{section}STRIPE_ENTRIES": str(stripe_entries)}
    return {
        f"{section}ENSEMBLE_SIZE": ensemble,
        f"{section}WRITE_QUORUM": write,
        f"{section}ACK_QUORUM": ack,
        **stripe,
    }


class Bench:
    """Real servers and the services that a benchmark asks for, each a process of its own."""

    def __init__(
        self, folder: Path, kinds: Sequence[str], settings: Mapping[str, str], *, nodes: int = 1,
        niceness: int = 0,
    ) -> None:  # fmt: skip
        """Take how many ingest nodes there are; from three on they keep entries at 3/3/2."""
        settings = {"TIERLOG_LOG__LEVEL": "warning", **settings}
        self.cluster = EmbeddedCluster(
            folder, nodes=nodes, settings=settings, background_niceness=niceness
        )
        self._kinds = kinds

    async def __aenter__(self) -> Self:
        say("starting servers and services")
        await self.cluster.servers.start()
        try:
            await self.cluster.services.start(self.cluster.specs(self._kinds))
        except BaseException:
            await self.cluster.servers.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.cluster.stop()

    @property
    def env(self) -> dict[str, str]:
        """The settings that name the servers and services, for a child."""
        given = server_environment(self.cluster.endpoints)
        for name, value in self._addresses().items():
            given[f"TIERLOG_CLIENT__{name.upper()}"] = value
        return {**given, "TIERLOG_LOG__LEVEL": "warning"}

    def _addresses(self) -> dict[str, str]:
        wanted = {"ingest": "grpc", "reader": "http", "scheduler": "http"}
        names = {
            "ingest": "ingest_address",
            "reader": "reader_http_address",
            "scheduler": "scheduler_http_address",
        }
        # Nobody listens at port 1: whoever is not there is not asked either.
        return {
            names[kind]: self._address(kind, purpose) if kind in self._kinds else "127.0.0.1:1"
            for kind, purpose in wanted.items()
        }

    def _address(self, kind: str, purpose: str) -> str:
        if kind == "ingest":
            return ",".join(self.cluster.node_addresses(purpose))
        return self.cluster.address(kind, purpose)

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        """Give a client."""
        settings = Settings(client=ClientSettings(**self._addresses()))
        async with open_client(settings) as client:
            yield client

    async def endless_stream(self, stream: str, *, raw: bool) -> None:
        """Make a stream whose first ledger takes everything."""
        policy = Policy(
            ledger_bytes_max=10**11,
            ledger_entries_max=10**9,
            ledger_age_ms_max=1000 * HOUR_MS,
        )
        async with self.client() as client:
            await client.create_stream(stream, raw=raw, policy=policy)

    async def sealed_ledger(self, stream: str, *, size: int, entry_size: int) -> LedgerId:
        """Append ``size`` bytes in raw entries to a new stream; return its one, sealed ledger."""
        say(f"appending {size / MB:,.0f} MB in entries of {entry_size:,} bytes")
        policy = Policy(
            ledger_bytes_max=4 * size,
            ledger_entries_max=10**9,
            ledger_age_ms_max=1000 * HOUR_MS,
        )
        pool = random_pool()
        async with self.client() as client:
            await client.create_stream(stream, raw=True, policy=policy)
            async with client.writer(stream, raw=True) as writer:
                for entry in entries_of(pool, entry_size, size // entry_size):
                    await writer.send(entry)
            ledger_id = await client.seal(stream)
        assert ledger_id is not None
        return ledger_id

    async def fresh_s3(self) -> None:
        """Start S3 anew, and empty, so that each upload meets it in the same state."""
        await self.cluster.servers.restart("s3", empty=True)

    def s3_cpu_s(self) -> float:
        """Return the seconds of the CPU that S3 took since it was started."""
        return process_cpu_s(self.cluster.servers.pid("s3"))

    def node_pids(self) -> list[int]:
        """Return the processes of the ingest nodes."""
        return [self.cluster.services.pid(name) for name in self.cluster.nodes]


@contextlib.asynccontextmanager
async def open_bench(
    arguments: argparse.Namespace,
    kinds: Sequence[str],
    settings: Mapping[str, str] | None = None,
    *,
    nodes: int = 1,
) -> AsyncIterator[Bench]:
    """Give servers and services in a temporary folder that goes with the context."""
    with folder_of(arguments) as folder:
        async with Bench(folder, kinds, settings or {}, nodes=nodes) as bench:
            yield bench


# Running and telling


def say(what: str) -> None:
    """Say what is going on, beside the results."""
    print(f"  … {what}", file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One number and what it has to be."""

    name: str
    value: float
    target: float | None = None
    at_most: bool = False
    low: float | None = None
    high: float | None = None
    unit: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the target is reached; None: there is none."""
        if self.target is None:
            return None
        return self.value <= self.target if self.at_most else self.value >= self.target


def ratio_claim(
    name: str,
    runs: Mapping[str, Sequence[Result]],
    *,
    of: str,
    to: str,
    key: str = "mb_per_s",
    target: float | None = None,
    at_most: bool = False,
) -> Claim:
    """Return the median of the ratios of runs that took turns, and their spread."""
    ratios = [a[key] / b[key] for a, b in zip(runs[of], runs[to], strict=True)]
    return Claim(
        name=name,
        value=statistics.median(ratios),
        low=min(ratios),
        high=max(ratios),
        target=target,
        at_most=at_most,
    )


def median_claim(
    name: str,
    results: Sequence[Result],
    key: str,
    *,
    unit: str = "",
    target: float | None = None,
    at_most: bool = False,
) -> Claim:
    """Return the median of one measured value, and its spread."""
    values = [result[key] for result in results]
    return Claim(
        name=name,
        value=statistics.median(values),
        low=min(values),
        high=max(values),
        unit=unit,
        target=target,
        at_most=at_most,
    )


def latency_claims(
    runs: Mapping[str, Sequence[Result]], names: Iterable[str], *, prefix: str = ""
) -> list[Claim]:
    """Return p50 and p99 of those of the named runs that have them."""
    return [
        median_claim(f"{prefix}{name} {key[:3]}", runs[name], key, unit="ms")
        for name in names
        for key in ("p50_ms", "p99_ms")
        if key in runs[name][0]
    ]


async def take_turns(
    variants: Mapping[str, Callable[[], Awaitable[Result]]], rounds: int
) -> dict[str, list[Result]]:
    """Run all variants once a round; every other round the other way about."""
    runs: dict[str, list[Result]] = {name: [] for name in variants}
    for turn in range(rounds):
        names = list(variants) if turn % 2 == 0 else list(variants)[::-1]
        for name in names:
            result = await variants[name]()
            runs[name].append(result)
            cpu = f", {result['cpu_s_per_gb']:.2f} CPU s/GB" if "cpu_s_per_gb" in result else ""
            say(f"round {turn + 1}/{rounds}: {name}: {result['mb_per_s']:,.0f} MB/s{cpu}")
    return runs


def positive(text: str) -> int:
    """Take a whole number above 0 from the command line."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def positives(text: str) -> list[int]:
    """Take whole numbers above 0 with commas between them from the command line."""
    return [positive(one) for one in text.split(",")]


def arguments_parser(description: str, *, size_mb: int) -> argparse.ArgumentParser:
    """Return a parser of the options that all benchmarks have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--size", type=positive, default=size_mb, help="megabytes of a run")
    parser.add_argument("--entry-size", type=positive, default=10_000, help="bytes of an entry")
    parser.add_argument("--runs", type=positive, default=RUNS, help="paired runs")
    parser.add_argument("--quick", action="store_true", help="small and short: to try it out")
    parser.add_argument("--dir", default=None, help="where the temporary folder is made")
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    return parser


def parse(parser: argparse.ArgumentParser, *, quick_mb: int) -> argparse.Namespace:
    """Parse the command line; ``--quick`` makes sizes and numbers small."""
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.size = min(arguments.size, quick_mb)
        arguments.runs = min(arguments.runs, QUICK_RUNS)
    return arguments


def machine() -> dict[str, object]:
    """Say where the numbers come from."""
    model = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    memory = re.search(r"MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text(encoding="ascii"))
    return {
        "cpu": model[1].strip() if model else platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(int(memory[1]) / MIB) if memory else None,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_1m": round(os.getloadavg()[0], 1),
    }


def report(
    title: str,
    arguments: argparse.Namespace,
    claims: Sequence[Claim],
    runs: Mapping[str, Sequence[Result]],
) -> None:
    """Print the outcome as the command line asks."""
    if arguments.output == "json":
        document = {
            "benchmark": title,
            "machine": machine(),
            "options": {"size_mb": arguments.size, "entry_size": arguments.entry_size},
            "claims": [
                {
                    "name": one.name, "median": one.value, "low": one.low, "high": one.high,
                    "unit": one.unit, "target": one.target, "met": one.met,
                }
                for one in claims
            ],
            "runs": {name: list(results) for name, results in runs.items()},
        }  # fmt: skip
        print(json.dumps(document, indent=2))
        return
    where = ", ".join(f"{name} {value}" for name, value in machine().items())
    print(f"{title}\n  {where}")
    print(f"  {arguments.size} MB, entries of {arguments.entry_size:,} bytes")
    width = max(len(one.name) for one in claims)
    print(f"  {'':{width}}  {'median':>10}  {'low':>9}  {'high':>9}  target")
    for one in claims:
        print(f"  {one.name:{width}}  {_row(one)}")


def _row(claim: Claim) -> str:
    def number(value: float | None) -> str:
        return "" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.2f}"

    target = ""
    if claim.target is not None:
        sign = "≤" if claim.at_most else "≥"
        target = f"{sign} {claim.target:g}: {'met' if claim.met else 'MISSED'}"
    value, low, high = number(claim.value), number(claim.low), number(claim.high)
    return f"{value:>10}  {low:>9}  {high:>9}  {claim.unit} {target}".rstrip()
