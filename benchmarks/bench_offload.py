"""Claim: offloading a sealed ledger costs hardly more than a plain upload of as many bytes.

offload   a ledger from the real ingest process over HTTP, cut into blocks, to SeaweedFS, index
          and verification included: ``BlockOffloader`` in a process of its own, as a worker has it
plain     aioboto3 as it comes (its own checksums and signing), ``bytes`` parts of 64 MiB that lie
          in memory, as many in flight, to the same server
tuned     the same with the client settings that Tierlog uses: no payload signing, checksums only
          where required. The harder comparison
null      ``offload`` into a server that drops what it gets: the client's own limit; and once more
          in the same process, as a worker does with its second ledger: its memory is its own then,
          and the libraries have read what they read once
memory    ``null``, of runs that were read before: what uploading alone costs, beside reading
bytes     ``tuned`` into that server: what such an upload costs on this machine. Where the bound of
          0.6 s/GB comes from it took 0.9 s/GB, so that the bound is two thirds of it elsewhere
large     ``null`` of a ledger that is ``--large`` times as long, once: for the memory

Each upload meets a SeaweedFS that was just started empty; the runs take turns.
"""

import asyncio
import contextlib
import gc
import importlib
import sys
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import aioboto3
from aiobotocore.config import AioConfig

from common import (
    BLOCK_BYTES,
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
    process_cpu_s,
    random_pool,
    ratio_claim,
    report,
    rss_peak_bytes,
    run_child,
    say,
    take_turns,
)
from tierlog.format.run import Run
from tierlog.ledger.reader import ReadHandle, Tier1ReadHandle
from tierlog.model.ids import EntryId, LedgerId
from tierlog.runtime.logs import configure_logging
from tierlog.runtime.settings import load_settings
from tierlog.wiring.offload import OffloadParts, open_offload_parts

RUNS_A_LIST = 20  # as many as come over the network at once
RSS_MIB_MAX = (3 * BLOCK_BYTES + 100 * MB) / MIB
CPU_OF_BYTES_MAX = 0.6 / 0.9
VARIANTS: Final = ("offload", "plain", "tuned", "null", "memory", "bytes", "large")

# What is said of a variant: what it is called, the measured value, its unit, at most how much.
ROWS: Final[Sequence[tuple[str, str, str, str, float | None]]] = (
    ("offload", "offload", "mb_per_s", "MB/s", None),
    ("plain upload", "plain", "mb_per_s", "MB/s", None),
    ("tuned upload", "tuned", "mb_per_s", "MB/s", None),
    ("offload into null", "null", "mb_per_s", "MB/s", None),
    ("offloader's CPU, reading included", "offload", "cpu_s_per_gb", "s/GB", None),
    ("the same into null, a process's first ledger", "null", "cpu_s_per_gb", "s/GB", None),
    ("the same into null, its next one", "null", "later_cpu_s_per_gb", "s/GB", None),
    ("upload's CPU, a process's first ledger", "memory", "cpu_s_per_gb", "s/GB", None),
    ("upload's CPU, its next one", "memory", "later_cpu_s_per_gb", "s/GB", 0.6),
    ("tuned upload's CPU into null", "bytes", "cpu_s_per_gb", "s/GB", None),
    ("plain upload's CPU", "plain", "cpu_s_per_gb", "s/GB", None),
    ("tuned upload's CPU", "tuned", "cpu_s_per_gb", "s/GB", None),
    ("offloader's peak memory", "offload", "rss_peak_mib", "MiB", RSS_MIB_MAX),
    ("the same, {large} x the ledger", "large", "rss_peak_mib", "MiB", RSS_MIB_MAX),
    ("offloader's memory before", "offload", "rss_idle_mib", "MiB", None),
)


class HeldHandle:
    """A ``ReadHandle`` over runs that were read before."""

    def __init__(self, handle: Tier1ReadHandle[Any], runs: list[Run]) -> None:
        self.ledger_id = handle.ledger_id
        self.ledger_metadata = handle.ledger_metadata
        self._runs = runs

    async def last_add_confirmed(self) -> EntryId:
        """Return the last entry."""
        return self._runs[-1].last_entry_id

    async def read_runs(
        self, first: EntryId, last: EntryId, *, bytes_max: int | None = None, wait_s: float = 0.0
    ) -> AsyncIterator[Sequence[Run]]:
        """Iterate over the runs; this benchmark reads all of them."""
        assert (first, bytes_max, wait_s) == (0, None, 0.0)
        assert last == self._runs[-1].last_entry_id
        for start in range(0, len(self._runs), RUNS_A_LIST):
            yield self._runs[start : start + RUNS_A_LIST]

    async def close(self) -> None:
        """Hold on to the runs; the process ends anyway."""


async def offload_ledger(parameters: Mapping[str, Any]) -> Result:
    """Offload one ledger (in a child)."""
    importlib.import_module("tierlog_offloader.main")  # its memory counts
    settings = load_settings()
    configure_logging(settings.log, service="offloader")
    gc.freeze()  # as ``run_service`` does
    async with open_offload_parts(settings) as parts:
        ledger_id = LedgerId(parameters["ledger_id"])
        metadata = await parts.catalog.ledgers.get(ledger_id)
        assert metadata is not None
        handle: ReadHandle = Tier1ReadHandle(ledger_id, metadata, parts.nodes)
        if parameters["from_memory"]:
            assert isinstance(handle, Tier1ReadHandle)
            every = handle.read_runs(EntryId(0), metadata.last_entry_id)
            handle = HeldHandle(handle, [run async for runs in every for run in runs])
            gc.freeze()  # a worker lets go of runs block by block, and has no GB of them to look at
        idle_mib = rss_peak_bytes() / MIB
        if parameters["warm_id"] is not None:
            await _offload_before(parts, LedgerId(parameters["warm_id"]))
        others_s = sum(map(process_cpu_s, parameters["pids"]))
        meter = Meter()
        copy = await parts.offloader.offload(handle, uuid.uuid4(), {})
        nodes = {node for segment in metadata.segments for node in segment.ensemble}
        more = {"object_bytes": copy.data_len, "rss_idle_mib": idle_mib, "nodes": len(nodes)}
        others_s = sum(map(process_cpu_s, parameters["pids"])) - others_s
        more["nodes_cpu_s_per_gb"] = others_s / (metadata.length / 10**9)
        result = meter.result(metadata.length, **more)
        if not parameters["again"]:
            return result
        meter = Meter()
        await parts.offloader.offload(handle, uuid.uuid4(), {})
        later = meter.result(metadata.length)
        return {**result, "later_cpu_s_per_gb": later["cpu_s_per_gb"]}


async def _offload_before(parts: OffloadParts, ledger_id: LedgerId) -> None:
    metadata = await parts.catalog.ledgers.get(ledger_id)
    assert metadata is not None
    handle = Tier1ReadHandle(ledger_id, metadata, parts.nodes)
    await parts.offloader.offload(handle, uuid.uuid4(), {})


async def upload_plainly(parameters: Mapping[str, Any]) -> Result:
    """Upload parts of bytes by aioboto3 (in a child)."""
    settings = load_settings().s3
    assert settings.secret_key is not None
    part, config = random_pool(BLOCK_BYTES), AioConfig(s3={"addressing_style": "path"})
    if parameters["tuned"]:
        config = AioConfig(
            s3={"addressing_style": "path", "payload_signing_enabled": False},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
    session = aioboto3.Session(
        aws_access_key_id=settings.access_key,
        aws_secret_access_key=settings.secret_key.get_secret_value(),
        region_name=settings.region,
    )
    async with session.client("s3", endpoint_url=settings.endpoint_url, config=config) as s3:

        async def upload(length: int) -> None:
            where = {"Bucket": settings.bucket, "Key": f"plain-{uuid.uuid4()}"}
            created = await s3.create_multipart_upload(**where)
            where["UploadId"] = created["UploadId"]
            slots = asyncio.Semaphore(parameters["parts_in_flight"])

            async def send(number: int, body: bytes) -> dict[str, object]:
                async with slots:
                    answer = await s3.upload_part(**where, PartNumber=number, Body=body)
                return {"PartNumber": number, "ETag": answer["ETag"]}

            starts = range(0, length, BLOCK_BYTES)
            async with asyncio.TaskGroup() as group:
                sent = [
                    group.create_task(send(number, part[: min(BLOCK_BYTES, length - start)]))
                    for number, start in enumerate(starts, 1)
                ]
            await s3.complete_multipart_upload(
                **where, MultipartUpload={"Parts": [one.result() for one in sent]}
            )

        if parameters["warm_bytes"]:
            await upload(parameters["warm_bytes"])
        meter = Meter()
        await upload(parameters["bytes"])
        return meter.result(parameters["bytes"])


@contextlib.asynccontextmanager
async def null_s3() -> AsyncIterator[str]:
    """Run the server that drops everything; give its address."""
    script = str(Path(__file__).with_name("null_s3.py"))
    process = await asyncio.create_subprocess_exec(
        sys.executable, script, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        port = int(await process.stdout.readline())
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        await process.wait()


class Warm(NamedTuple):
    """A ledger that a process offloads before, and how many bytes another one uploads before."""

    ledger_id: LedgerId | None = None
    length: int = 0


COLD: Final = Warm()


class Offloads:
    """The variants, for a cluster that runs; ``warm``: what each process has done before."""

    def __init__(
        self,
        bench: Bench,
        null_url: str | None = None,
        *,
        parts_in_flight: int,
        warm: Warm = COLD,
    ) -> None:
        self._bench = bench
        self._warm = warm
        self._null = {"TIERLOG_S3__ENDPOINT_URL": null_url or ""}
        self._parts = parts_in_flight

    async def offload(
        self, ledger_id: LedgerId, *, into_null: bool = False, from_memory: bool = False
    ) -> Result:
        """Offload a ledger."""
        if not into_null:
            await self._bench.fresh_s3()
        env = {
            **self._bench.env,
            **(self._null if into_null else {}),
            "TIERLOG_OFFLOADER__PARTS_IN_FLIGHT_MAX": str(self._parts),
            "TIERLOG_LOG__LEVEL": "warning",
        }
        parameters = {
            "ledger_id": ledger_id, "from_memory": from_memory, "again": into_null,
            "pids": self._bench.node_pids(), "warm_id": self._warm.ledger_id,
        }  # fmt: skip
        return await run_child(__file__, "offload", parameters, env)

    async def plain(self, length: int, *, tuned: bool, into_null: bool = False) -> Result:
        """Upload as many bytes."""
        if not into_null:
            await self._bench.fresh_s3()
        env = {**self._bench.env, **(self._null if into_null else {})}
        parameters = {
            "bytes": length, "parts_in_flight": self._parts, "tuned": tuned,
            "warm_bytes": self._warm.length,
        }  # fmt: skip
        return await run_child(__file__, "plain", parameters, env)


def claims_of(runs: Mapping[str, list[Result]], large: int) -> list[Claim]:
    """Compare what was measured."""
    claims = [
        ratio_claim(f"offload / {other} upload", runs, of="offload", to=other, target=0.6)
        for other in ("plain", "tuned")
        if {"offload", other} <= runs.keys()
    ]
    if {"memory", "bytes"} <= runs.keys():
        claims.append(
            ratio_claim(
                "upload's CPU / tuned upload's, both into null", runs, of="memory", to="bytes",
                key="cpu_s_per_gb", target=CPU_OF_BYTES_MAX, at_most=True,
            )
        )  # fmt: skip
    for name, variant, key, unit, target in ROWS:
        if variant in runs:
            named, at_most = name.format(large=large), target is not None
            claims.append(
                median_claim(named, runs[variant], key, unit=unit, target=target, at_most=at_most)
            )
    return claims


async def main() -> None:
    """Measure and tell."""
    parser = arguments_parser("offload against a plain multipart upload", size_mb=1000)
    parser.add_argument("--parts-in-flight", type=int, default=3)
    parser.add_argument("--large", type=int, default=3, help="times the size, for the memory")
    parser.add_argument(
        "--variants", nargs="+", choices=VARIANTS, default=VARIANTS, help="which of them to measure"
    )
    arguments = parse(parser, quick_mb=200)
    size = arguments.size * MB
    with folder_of(arguments) as folder:
        async with Bench(folder, ["ingest"], {}) as bench, null_s3() as null_url:
            offloads = Offloads(bench, null_url, parts_in_flight=arguments.parts_in_flight)
            ledger_id = await bench.sealed_ledger(
                "bench", size=size, entry_size=arguments.entry_size
            )
            variants = {
                "offload": partial(offloads.offload, ledger_id),
                "plain": partial(offloads.plain, size, tuned=False),
                "tuned": partial(offloads.plain, size, tuned=True),
                "null": partial(offloads.offload, ledger_id, into_null=True),
                "memory": partial(offloads.offload, ledger_id, into_null=True, from_memory=True),
                "bytes": partial(offloads.plain, size, tuned=True, into_null=True),
            }
            wanted = {name: variants[name] for name in arguments.variants if name in variants}
            runs = await take_turns(wanted, arguments.runs)
            if "large" in arguments.variants:
                large_id = await bench.sealed_ledger(
                    "large", size=arguments.large * size, entry_size=arguments.entry_size
                )
                say("offloading the large one")
                runs["large"] = [await offloads.offload(large_id, into_null=True)]
    report("offload", arguments, claims_of(runs, arguments.large), runs)


if __name__ == "__main__":
    if not child_mode({"offload": offload_ledger, "plain": upload_plainly}):
        asyncio.run(main())
