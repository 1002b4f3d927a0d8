"""Claim: an entry anywhere in a bucket is read with few bytes, for the side object tells its place.

side      one entry at a random place of an offloaded ledger, index and side object's header at
          hand, nothing else: pages and grains come from the bucket
blocks    the same without the side object, as with objects that others wrote: from the block's
          start on, in ranges of 1 MiB, until the entry is found
pulsar    Pulsar's 4.0.8 reader on the same objects, in a Java process that has read elsewhere in
          the ledger; it remembers only where entries are that it gave already
          (``tests/interop/pulsar``, which ``make test-interop`` fetches and builds)

One read after the other, on SeaweedFS, by the code that the reader uses.
"""

import argparse
import asyncio
import random
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from common import (
    MB,
    Bench,
    Claim,
    Result,
    arguments_parser,
    child_mode,
    median_claim,
    open_bench,
    parse,
    quantiles,
    ratio_claim,
    report,
    run_child,
    say,
    take_turns,
)
from tierlog.ledger.reader import Tier1ReadHandle
from tierlog.model.ids import EntryId, LedgerId
from tierlog.offload.driver import BlockOffloader
from tierlog.ports.objects import ObjectStore
from tierlog.runtime.logs import configure_logging
from tierlog.runtime.settings import load_settings
from tierlog.wiring.offload import open_offload_parts, tier2_settings

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for the program of the tests
from tests.interop.jars import InteropError
from tests.interop.program import Bucket, Built, Pulsar, build

STREAM = "bench"
READ_BYTES = 4 * 1024 * 1024
READS = {"side": 300, "blocks": 30, "pulsar": 100}
WARM_READS = 10
TIMES_BETTER = 10.0


class Counted:
    """An object store whose ranged reads are counted."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self.requests = 0
        self.fetched = 0

    async def get_range(self, key: str, start: int, length: int) -> bytes | None:
        """Count, and pass on."""
        self.requests += 1
        self.fetched += length
        return await self._objects.get_range(key, start, length)

    async def get_range_into(
        self, key: str, start: int, targets: Sequence[memoryview]
    ) -> int | None:
        """Count, and pass on."""
        self.requests += 1
        self.fetched += sum(map(len, targets))
        return await self._objects.get_range_into(key, start, targets)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._objects, name)


async def read_anywhere(parameters: Mapping[str, Any]) -> Result:
    """Offload a ledger and read entries of it (in a child)."""
    settings, mode = load_settings(), parameters["mode"]
    configure_logging(settings.log, service="reader")
    async with open_offload_parts(settings) as parts:
        ledger_id, attempt = LedgerId(parameters["ledger_id"]), uuid.UUID(parameters["attempt"])
        metadata = await parts.catalog.ledgers.get(ledger_id)
        assert metadata is not None
        handle = Tier1ReadHandle(ledger_id, metadata, parts.nodes)
        copy = await parts.offloader.offload(handle, attempt, {})
        if mode == "blocks":
            copy = replace(copy, side_len=0)
        seconds, requests, fetched = [], 0, 0
        places, count = places_in(copy.entry_count, READS[mode]), READS[mode]
        for entry_id in places:
            counted = Counted(parts.objects)
            offloader = BlockOffloader(
                cast("ObjectStore", counted), tier2_settings(settings, parts.cluster)
            )
            opened = await offloader.read_offloaded(ledger_id, attempt, copy=copy)
            before = (counted.requests, counted.fetched)
            start_s = time.perf_counter()
            read = await opened.read_frames(entry_id, READ_BYTES, entries_max=1)
            seconds.append(time.perf_counter() - start_s)
            assert read.first_entry_id == entry_id
            requests += counted.requests - before[0]
            fetched += counted.fetched - before[1]
    return {
        **quantiles(seconds),
        "requests": requests / count,
        "kb": fetched / count / 1000,
        "reads_per_s": count / sum(seconds),
        "mb_per_s": fetched / MB / sum(seconds),
    }


def places_in(entries: int, count: int, *, seed: int = 1) -> list[EntryId]:
    """Return the same places for all, as far as each gets."""
    rng = random.Random(seed)
    return [EntryId(rng.randrange(entries)) for _ in range(count)]


async def read_by_pulsar(
    bench: Bench, built: Built, ledger_id: int, attempt: uuid.UUID, arguments: argparse.Namespace
) -> Result:
    """Read entries of a copy that is there with Pulsar."""
    where = bench.cluster.servers.endpoints
    bucket = Bucket(
        endpoint_url=where.s3_endpoint_url,
        name=where.s3_bucket,
        access_key=where.s3_access_key,
        secret_key=where.s3_secret_key,
    )
    entries = arguments.size * MB // arguments.entry_size
    warm, places = places_in(entries, WARM_READS, seed=2), places_in(entries, READS["pulsar"])
    found: list[float] = []
    with Pulsar(built, bucket) as pulsar:
        for singly in (warm, places):
            answer = await pulsar("pick", ledger_id=ledger_id, uuid=attempt, singly=singly)
            if not answer["ok"]:
                raise SystemExit(f"Pulsar could not read: {answer['error']}")
            assert answer["bytes"] == len(singly) * arguments.entry_size, answer
            found = answer["seconds"]
    took_s = sum(found)
    return {
        **quantiles(found),
        "reads_per_s": len(found) / took_s,
        "mb_per_s": len(found) * arguments.entry_size / MB / took_s,
    }


def claims_of(runs: Mapping[str, Sequence[Result]]) -> list[Claim]:
    """Return what is claimed."""
    found = [
        ratio_claim(
            "reads a second / those without", runs, of="side", to="blocks", target=4.0,
            key="reads_per_s",
        ),
        median_claim("requests a read", runs["side"], "requests", target=2.0, at_most=True),
        median_claim("kB a read", runs["side"], "kb", unit="kB", target=200.0, at_most=True),
        median_claim("without: requests a read", runs["blocks"], "requests"),
        median_claim("without: kB a read", runs["blocks"], "kb", unit="kB"),
    ]  # fmt: skip
    for key in ("p50_ms", "p99_ms"):
        if "pulsar" in runs:
            found.append(
                ratio_claim(
                    f"pulsar / tierlog, {key[:3]}", runs, of="pulsar", to="side", key=key,
                    target=TIMES_BETTER,
                )
            )  # fmt: skip
        found += [median_claim(f"{name}: {key[:3]}", runs[name], key, unit="ms") for name in runs]
    return found


async def main() -> None:
    """Measure and tell."""
    parser = arguments_parser("random reads of tier 2", size_mb=1000)
    arguments = parse(parser, quick_mb=200)
    if arguments.entry_size > arguments.size * MB:
        parser.error(f"--entry-size: {arguments.entry_size:,} bytes do not fit --size")
    try:
        built = await asyncio.to_thread(build, say)
    except InteropError as error:
        say(f"without Pulsar: {error}")
        built = None
    async with open_bench(arguments, ["ingest"]) as bench:
        size = arguments.size * MB
        ledger = await bench.sealed_ledger(STREAM, size=size, entry_size=arguments.entry_size)
        attempts: list[uuid.UUID] = []

        async def child(mode: str) -> Result:
            attempts.append(uuid.uuid4())
            parameters = {"mode": mode, "ledger_id": ledger, "attempt": str(attempts[-1])}
            return await run_child(__file__, "read", parameters, bench.env)

        async def pulsar() -> Result:
            assert built is not None
            return await read_by_pulsar(bench, built, ledger, attempts[-1], arguments)

        modes: dict[str, Callable[[], Awaitable[Result]]] = {
            "side": partial(child, "side"),
            "blocks": partial(child, "blocks"),
        }
        if built is not None:
            modes["pulsar"] = pulsar
        runs = await take_turns(modes, arguments.runs)
    report("random_read", arguments, claims_of(runs), runs)


if __name__ == "__main__":
    if not child_mode({"read": read_anywhere}):
        asyncio.run(main())
