"""Claim: an entry anywhere in a bucket is read with few bytes, for the side object tells its place.

side      one entry at a random place of an offloaded ledger, index and side object's header at
          hand, nothing else: pages and grains come from the bucket
blocks    the same without the side object, as with objects that others wrote: from the block's
          start on, in ranges of 1 MiB, until the entry is found

One read after the other, on SeaweedFS, by the code that the reader uses. The targets of p50 and p99
are a tenth of what Apache Pulsar's own reader takes for a cold entry, measured another day.
"""

import asyncio
import random
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from common import (
    MB,
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
    take_turns,
)
from tierlog.ledger.reader import Tier1ReadHandle
from tierlog.model.ids import EntryId, LedgerId
from tierlog.offload.driver import BlockOffloader
from tierlog.ports.objects import ObjectStore
from tierlog.runtime.logs import configure_logging
from tierlog.runtime.settings import load_settings
from tierlog.wiring.offload import open_offload_parts, tier2_settings

STREAM = "bench"
READ_BYTES = 4 * 1024 * 1024
READS = {"side": 300, "blocks": 30}
PULSAR_MS = {"p50_ms": 194.0, "p99_ms": 409.0}
TIMES_BETTER = 10


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
        ledger_id, attempt = LedgerId(parameters["ledger_id"]), uuid.uuid4()
        metadata = await parts.catalog.ledgers.get(ledger_id)
        assert metadata is not None
        handle = Tier1ReadHandle(ledger_id, metadata, parts.nodes)
        copy = await parts.offloader.offload(handle, attempt, {})
        if mode == "blocks":
            copy = replace(copy, side_len=0)
        # The same places in each mode, as far as it gets.
        rng, count = random.Random(1), READS[mode]
        seconds, requests, fetched = [], 0, 0
        for _ in range(count):
            counted = Counted(parts.objects)
            offloader = BlockOffloader(
                cast("ObjectStore", counted), tier2_settings(settings, parts.cluster)
            )
            opened = await offloader.read_offloaded(ledger_id, attempt, copy=copy)
            before = (counted.requests, counted.fetched)
            entry_id = EntryId(rng.randrange(copy.entry_count))
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


async def main() -> None:
    """Measure and tell."""
    arguments = parse(arguments_parser("random reads of tier 2", size_mb=1000), quick_mb=200)
    async with open_bench(arguments, ["ingest"]) as bench:
        size = arguments.size * MB
        ledger = await bench.sealed_ledger(STREAM, size=size, entry_size=arguments.entry_size)

        async def child(mode: str) -> Result:
            parameters = {"mode": mode, "ledger_id": ledger}
            return await run_child(__file__, "read", parameters, bench.env)

        runs = await take_turns(
            {"side": lambda: child("side"), "blocks": lambda: child("blocks")}, arguments.runs
        )
    claims = [
        ratio_claim(
            "reads a second / those without",
            runs,
            of="side",
            to="blocks",
            target=4.0,
            key="reads_per_s",
        ),
        *(
            median_claim(
                key[:3], runs["side"], key, unit="ms", target=took / TIMES_BETTER, at_most=True
            )
            for key, took in PULSAR_MS.items()
        ),
        median_claim("requests a read", runs["side"], "requests", target=2.0, at_most=True),
        median_claim("kB a read", runs["side"], "kb", unit="kB", target=205.0, at_most=True),
        median_claim("without: p50", runs["blocks"], "p50_ms", unit="ms"),
        median_claim("without: requests a read", runs["blocks"], "requests"),
        median_claim("without: kB a read", runs["blocks"], "kb", unit="kB"),
    ]
    report("random_read", arguments, claims, runs)


if __name__ == "__main__":
    if not child_mode({"read": read_anywhere}):
        asyncio.run(main())
