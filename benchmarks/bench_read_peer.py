"""Claim: an offloaded ledger is read faster than by Apache Pulsar's own reader, on one machine.

client   ``tierlog.client`` gives every entry as an object, its frame checked, through the reader
         service, which holds each byte against the side object's checksums
reader   the same out of a reader in the client's process, as Pulsar's is, without a service between
http     all frames from the reader service over HTTP, looked at by nobody
pulsar   Pulsar's 4.0.8 reader gives every entry as an object, a hundred at a time, and checks none
         (``tests/interop/pulsar``, which ``make test-interop`` fetches and builds)

All read one ledger from one SeaweedFS, whole and in order; Tierlog offloaded it. *Cold* is a reader
service, and a Java process, that know nothing of this ledger but have read another one whole.
*Again* is the same once more: Pulsar remembers where entries are, and neither has the ledger's
bytes, of which Tierlog's cache holds less than a quarter. Runs take turns.

MB are those of entries. Pulsar's time is taken inside Java, and begins when the ledger is open;
Tierlog's begins with a client's first request. Tierlog's CPU is that of the client's process and
the reader's together. Targets are on *client* and *reader*.
"""

import argparse
import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from bench_read import CACHE_BYTES, read_by_client, read_by_http
from common import (
    MB,
    Bench,
    Claim,
    Result,
    arguments_parser,
    child_mode,
    folder_of,
    median_claim,
    parse,
    process_cpu_s,
    ratio_claim,
    report,
    run_child,
    say,
    take_turns,
)
from own_reader import Stream, read_entries_twice, twice
from reading import cold_reader, offload

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for the program of the tests
from tests.interop.jars import InteropError
from tests.interop.program import Bucket, Built, Pulsar, build

ENTRY_SIZES: Final = (100, 1000, 10_000)
SMALL: Final = 1000
TARGET_SMALL: Final = 3.0
TARGET_LARGE: Final = 2.0
ENTRIES_MAX: Final = 2_000_000
WARM_BYTES: Final = 200 * MB
BATCH: Final = 100
OURS: Final = ("reader", "client", "http")
WITH_TARGETS: Final = ("reader", "client")


@dataclass(frozen=True, slots=True, kw_only=True)
class Offloaded:
    """A ledger in tier 2."""

    stream: str
    ledger_id: int
    uuid: str
    entries: int
    bytes: int

    @property
    def told(self) -> Stream:
        """What those who read it in a child are told."""
        return {"stream": self.stream, "entries": self.entries, "bytes": self.bytes}


async def offloaded(bench: Bench, stream: str, *, entry_size: int, size: int) -> Offloaded:
    """Bring a ledger to tier 2."""
    entries = min(size // entry_size, ENTRIES_MAX)
    await bench.sealed_ledger(stream, size=entries * entry_size, entry_size=entry_size)
    say("offloading")
    await offload(bench, stream)
    async with bench.client() as client:
        (ledger,) = (await client.stream(stream))["ledgers"]
    return Offloaded(
        stream=stream,
        ledger_id=ledger["ledger_id"],
        uuid=ledger["uuid"],
        entries=entries,
        bytes=entries * entry_size,
    )


class Peers:
    """Both of them, over one ledger, and what both read before it."""

    def __init__(self, bench: Bench, built: Built, ledger: Offloaded, warm: Offloaded) -> None:
        self._bench, self._built = bench, built
        self._ledger, self._warm = ledger, warm

    async def tierlog(self, mode: str) -> Result:
        """Read twice with Tierlog, in a process that has read another ledger."""
        if mode == "reader":
            ledgers = {"warm": self._warm.told, "whole": self._ledger.told}
            return await run_child(__file__, mode, ledgers, self._bench.env)
        await cold_reader(self._bench)
        await self._read("http", self._warm)
        return twice(await self._read(mode, self._ledger), await self._read(mode, self._ledger))

    async def _read(self, mode: str, ledger: Offloaded) -> Result:
        pid = self._bench.cluster.services.pid("reader")
        before_s = process_cpu_s(pid)
        result = await run_child(__file__, mode, ledger.told, self._bench.env)
        cpu_s = process_cpu_s(pid) - before_s
        per_gb = cpu_s / (ledger.bytes / 10**9)
        return {
            **result,
            "cpu_s_per_gb": result["cpu_s_per_gb"] + per_gb,
            "reader_cpu_s_per_gb": per_gb,
        }

    async def pulsar(self) -> Result:
        """Read twice with Pulsar, in a process that has read another ledger."""
        where = self._bench.cluster.servers.endpoints
        bucket = Bucket(
            endpoint_url=where.s3_endpoint_url,
            name=where.s3_bucket,
            access_key=where.s3_access_key,
            secret_key=where.s3_secret_key,
        )
        with Pulsar(self._built, bucket) as pulsar:
            await _scan(pulsar, self._warm)
            return twice(await _scan(pulsar, self._ledger), await _scan(pulsar, self._ledger))


async def _scan(pulsar: Pulsar, ledger: Offloaded) -> Result:
    answer = await pulsar("scan", ledger_id=ledger.ledger_id, uuid=ledger.uuid, batch=BATCH)
    if not answer["ok"]:
        raise SystemExit(f"Pulsar could not read: {answer['error']}")
    assert (answer["entries"], answer["bytes"]) == (ledger.entries, ledger.bytes), answer
    return {
        "bytes": ledger.bytes,
        "seconds": answer["seconds"],
        "open_s": answer["open_s"],
        "mb_per_s": ledger.bytes / MB / answer["seconds"],
        "cpu_s_per_gb": answer["cpu_s"] / (ledger.bytes / 10**9),
    }


def claims_of(runs: Mapping[str, Sequence[Result]], entry_size: int) -> list[Claim]:
    """Return what is claimed of entries of one size."""
    target = TARGET_SMALL if entry_size <= SMALL else TARGET_LARGE
    theirs = _named("pulsar", entry_size)
    found: list[Claim] = []
    for mode in OURS:
        ours = _named(mode, entry_size)
        for words, prefix in (("cold", ""), ("again", "again_")):
            found.append(
                ratio_claim(
                    f"{mode} / pulsar, {entry_size} B, {words}", runs, of=ours, to=theirs,
                    key=f"{prefix}mb_per_s", target=target if mode in WITH_TARGETS else None,
                )
            )  # fmt: skip
    for name in (_named(mode, entry_size) for mode in (*OURS, "pulsar")):
        for words, prefix in (("cold", ""), ("again", "again_")):
            found += [
                median_claim(f"{name}, {words}", runs[name], f"{prefix}mb_per_s", unit="MB/s"),
                median_claim(
                    f"{name}, {words}: CPU", runs[name], f"{prefix}cpu_s_per_gb", unit="s/GB"
                ),
            ]
    return found


def _named(what: str, entry_size: int) -> str:
    return f"{what} {entry_size} B"


async def measure(
    bench: Bench, built: Built, arguments: argparse.Namespace
) -> tuple[list[Claim], dict[str, list[Result]]]:
    """Take turns at each size of entries."""
    claims: list[Claim] = []
    runs: dict[str, list[Result]] = {}
    size = arguments.size * MB
    for entry_size in arguments.sizes:
        ledger = await offloaded(bench, f"peer-{entry_size}", entry_size=entry_size, size=size)
        warm = await offloaded(
            bench, f"warm-{entry_size}", entry_size=entry_size, size=min(size, WARM_BYTES)
        )
        peers = Peers(bench, built, ledger, warm)
        runs |= await take_turns(
            {
                **{_named(mode, entry_size): partial(peers.tierlog, mode) for mode in OURS},
                _named("pulsar", entry_size): peers.pulsar,
            },
            arguments.runs,
        )
        claims += claims_of(runs, entry_size)
    return claims, runs


async def main() -> None:
    """Measure and tell."""
    parser = arguments_parser("reading back against Apache Pulsar's reader", size_mb=500)
    parser.add_argument("--sizes", type=int, nargs="*", default=ENTRY_SIZES)
    arguments = parse(parser, quick_mb=100)
    try:
        built = await asyncio.to_thread(build, say)
    except InteropError as error:
        say(f"not measured: {error}")
        return
    smallest = min(arguments.size * MB, min(arguments.sizes) * ENTRIES_MAX)
    settings = {"TIERLOG_READER__CACHE_BYTES_MAX": str(min(CACHE_BYTES, smallest // 4))}
    kinds = ["ingest", "reader", "offloader", "scheduler"]
    with folder_of(arguments) as folder:
        async with Bench(folder, kinds, settings) as bench:
            claims, runs = await measure(bench, built, arguments)
    report("read_peer", arguments, claims, runs)


MODES: Final = {"reader": read_entries_twice, "client": read_by_client, "http": read_by_http}

if __name__ == "__main__":
    if not child_mode(MODES):
        asyncio.run(main())
