"""Claim: an offload keeps up with a plain upload whatever the size of entries, in bounded memory.

For each size of entries, in turns, each upload into a SeaweedFS that was just started empty:

offload   a ledger from the real ingest process over HTTP, side object, index and verification
          included
plain     a plain multipart upload of as many bytes that lie in memory, by the same library as it
          comes, as many parts in flight
tuned     the same with the settings that Tierlog uses: no payload signing, checksums only where
          they must be
null      ``offload`` into a server that drops what it gets

Every process has offloaded or uploaded 200 MB before, as a worker has that is not new: the first
touch of its memory is the operating system's work, done once.

And once, into null: ``many`` ledgers at once in one process, and as many of a larger size: their
memory is the budget's, not the ledgers'.
"""

import argparse
import asyncio
import gc
import importlib
import uuid
from collections.abc import Mapping
from typing import Any, Final

from bench_offload import Offloads, Warm, null_s3, offload_ledger, upload_plainly
from common import (
    MB,
    MIB,
    Bench,
    Claim,
    Meter,
    Result,
    arguments_parser,
    child_mode,
    folder_of,
    median_claim,
    parse,
    ratio_claim,
    report,
    rss_peak_bytes,
    run_child,
    say,
    take_turns,
)
from tierlog.format.frame import FRAME_HEADER_LEN
from tierlog.ledger.reader import Tier1ReadHandle
from tierlog.model.ids import LedgerId
from tierlog.runtime.logs import configure_logging
from tierlog.runtime.settings import load_settings
from tierlog.wiring.offload import open_offload_parts

ENTRY_SIZES: Final = (100, 1000, 10_000, 1_000_000)
BUDGET_MIB_MAX: Final = (256 * MB + 100 * MB) / MIB
MANY: Final = 8
WARM_BYTES: Final = 200 * MB


async def offload_many(parameters: Mapping[str, Any]) -> Result:
    """Offload several ledgers at once (in a child)."""
    importlib.import_module("tierlog_offloader.main")  # its memory counts
    settings = load_settings()
    configure_logging(settings.log, service="offloader")
    gc.freeze()  # as ``run_service`` does
    async with open_offload_parts(settings) as parts:

        async def one(ledger_id: LedgerId) -> int:
            metadata = await parts.catalog.ledgers.get(ledger_id)
            assert metadata is not None
            handle = Tier1ReadHandle(ledger_id, metadata, parts.nodes)
            await parts.offloader.offload(handle, uuid.uuid4(), {})
            return metadata.length

        idle_mib = rss_peak_bytes() / MIB
        meter = Meter()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(LedgerId(each))) for each in parameters["ledger_ids"]]
        return meter.result(sum(task.result() for task in tasks), rss_idle_mib=idle_mib)


class Sitting:
    """What is measured in one sitting."""

    def __init__(self, bench: Bench, null_url: str, arguments: argparse.Namespace) -> None:
        self._bench = bench
        self._null_url = null_url
        self._arguments = arguments
        self.size = arguments.size * MB
        self.runs: dict[str, list[Result]] = {}
        self.claims: list[Claim] = []

    async def entries_of(self, entry_size: int) -> None:
        """Offload a ledger of such entries, in turns with a plain upload."""
        ledger_id = await self._bench.sealed_ledger(
            f"of-{entry_size}", size=self.size, entry_size=entry_size
        )
        warm_id = await self._bench.sealed_ledger(
            f"warm-{entry_size}", size=WARM_BYTES, entry_size=entry_size
        )
        offloads = Offloads(
            self._bench,
            self._null_url,
            parts_in_flight=self._arguments.parts_in_flight,
            warm=Warm(warm_id, WARM_BYTES),
        )
        text = f"{entry_size} B"
        framed = self.size // entry_size * (FRAME_HEADER_LEN + entry_size)

        async def plain(*, tuned: bool) -> Result:
            # The same bytes: frames and all. The rate counts the entries alone, as the offload's.
            result = await offloads.plain(framed, tuned=tuned)
            return {**result, "mb_per_s": self.size / MB / result["seconds"]}

        self.runs |= await take_turns(
            {
                f"offload {text}": lambda: offloads.offload(ledger_id),
                f"plain {text}": lambda: plain(tuned=False),
                f"tuned {text}": lambda: plain(tuned=True),
                f"null {text}": lambda: offloads.offload(ledger_id, into_null=True),
            },
            self._arguments.runs,
        )
        own, null = self.runs[f"offload {text}"], self.runs[f"null {text}"]
        self.claims += [
            *(
                ratio_claim(
                    f"offload / {other} upload, {text}", self.runs,
                    of=f"offload {text}", to=f"{other} {text}", target=0.9,
                )
                for other in ("plain", "tuned")
            ),
            median_claim(f"offload, {text}", own, "mb_per_s", unit="MB/s"),
            median_claim(f"its CPU, {text}", own, "cpu_s_per_gb", unit="s/GB"),
            median_claim(f"into null, {text}", null, "mb_per_s", unit="MB/s"),
            median_claim(f"its CPU into null, {text}", null, "later_cpu_s_per_gb", unit="s/GB"),
        ]  # fmt: skip

    async def many(self, length: int) -> None:
        """Offload several ledgers at once."""
        name = f"{self._arguments.many} ledgers of {length // MB} MB at once"
        say(name)
        ledger_ids = [
            await self._bench.sealed_ledger(
                f"many-{length}-{number}", size=length, entry_size=10_000
            )
            for number in range(self._arguments.many)
        ]
        env = {**self._bench.env, "TIERLOG_S3__ENDPOINT_URL": self._null_url}
        self.runs[name] = [await run_child(__file__, "many", {"ledger_ids": ledger_ids}, env)]
        self.claims += [
            median_claim(
                f"peak memory, {name}", self.runs[name], "rss_peak_mib", unit="MiB",
                target=BUDGET_MIB_MAX, at_most=True,
            ),
            median_claim(f"of which before, {name}", self.runs[name], "rss_idle_mib", unit="MiB"),
        ]  # fmt: skip


async def main() -> None:
    """Measure and tell."""
    parser = arguments_parser("offload by size of entries, and many at once", size_mb=1000)
    parser.add_argument("--parts-in-flight", type=int, default=3)
    parser.add_argument("--sizes", type=int, nargs="*", default=ENTRY_SIZES)
    parser.add_argument("--many", type=int, default=MANY, help="ledgers at once; 0: none")
    arguments = parse(parser, quick_mb=200)
    with folder_of(arguments) as folder:
        async with Bench(folder, ["ingest"], {}) as bench, null_s3() as null_url:
            sitting = Sitting(bench, null_url, arguments)
            for entry_size in arguments.sizes:
                await sitting.entries_of(entry_size)
            for times in (1, 3) if arguments.many else ():
                await sitting.many(times * sitting.size // arguments.many)
    report("offload_sizes", arguments, sitting.claims, sitting.runs)


if __name__ == "__main__":
    modes = {"offload": offload_ledger, "plain": upload_plainly, "many": offload_many}
    if not child_mode(modes):
        asyncio.run(main())
