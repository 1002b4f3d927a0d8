"""Claim: an offload from memory is faster than Apache Pulsar's own, on the same machine.

tierlog   ``BlockOffloader`` in a process of its own: side object, index and verification included
pulsar    ``BlobStoreManagedLedgerOffloader`` of Pulsar 4.0.8 in one Java process that has offloaded
          before (``tests/interop/pulsar``, which ``make test-interop`` fetches and builds)

Both take a closed ledger whose entries lie in memory, in blocks of 64 MiB, to a SeaweedFS that was
just started empty and has got one small ledger from the same process. The runs take turns.

SeaweedFS acknowledges before its disk has the bytes, as it comes, and so that the two clients are
compared. ``--fsync``: as ``tierlog up`` runs it, where its disk sets the rate of both. ``--sink``:
a server that drops what it gets, so that the clients set the rate and not the server beside them.
``--server``: another S3 server that runs already, with the keys of ``AWS_ACCESS_KEY_ID`` and
``AWS_SECRET_ACCESS_KEY`` and an empty bucket ``tierlog``: one that holds anything is refused, and
what a run put there is deleted before the next.
"""

import argparse
import asyncio
import gc
import importlib
import os
import sys
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from bench_offload import null_s3
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
    entries_of,
    folder_of,
    median_claim,
    parse,
    process_cpu_s,
    random_pool,
    ratio_claim,
    report,
    run_child,
    say,
    take_turns,
)
from early_s3 import acknowledge_early
from tierlog.format.frame import FRAME_HEADER_LEN, pack_entries
from tierlog.format.run import Run, cut_runs
from tierlog.model.ids import EntryId, LedgerId, NodeId
from tierlog.model.ledger import KEY_BLOCK_SIZE, KEY_STREAM, LedgerMetadata, LedgerState, Segment
from tierlog.offload.budget import UploadBudget, bytes_for_blocks
from tierlog.offload.driver import BlockOffloader, Tier2Settings
from tierlog.runtime.logs import configure_logging
from tierlog.runtime.settings import load_settings
from tierlog.wiring.build import open_objects
from tierlog.wiring.offload import upload_retries

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for the program of the tests
from tests.interop.jars import InteropError
from tests.interop.program import Bucket, Pulsar, build

ENTRY_SIZES: Final = (100, 1000, 10_000, 1_000_000)
AHEAD_FROM: Final = 1000
WARM_BYTES: Final = 20 * MB
PACKED_BYTES: Final = 8 * MIB
RUNS_A_LIST: Final = 20


class MemoryHandle:
    """A ``ReadHandle`` over runs that lie in memory."""

    def __init__(self, ledger_id: LedgerId, pool: bytes, *, entry_size: int, count: int) -> None:
        self.ledger_id = ledger_id
        self.ledger_metadata = LedgerMetadata(
            ensemble_size=1,
            write_quorum=1,
            ack_quorum=1,
            segments=(Segment(first_entry_id=EntryId(0), ensemble=(NodeId("n1"),)),),
            state=LedgerState.CLOSED,
            last_entry_id=EntryId(count - 1),
            length=count * entry_size,
            custom={KEY_BLOCK_SIZE: str(BLOCK_BYTES).encode(), KEY_STREAM: b"peer"},
        )
        self._runs: list[Run] = []
        step = max(1, PACKED_BYTES // (FRAME_HEADER_LEN + entry_size))
        for first in range(0, count, step):
            entries = list(entries_of(pool, entry_size, min(step, count - first)))
            frames, offsets = pack_entries(entries)
            self._runs += cut_runs(
                frames,
                offsets,
                ledger_id=ledger_id,
                first_entry_id=first,
                last_add_confirmed=count - 1,
                owner_epoch=1,
                stripe_entries=2**62,
            )

    async def last_add_confirmed(self) -> EntryId:
        """Return the last entry."""
        return self.ledger_metadata.last_entry_id

    async def read_runs(
        self, first: EntryId, last: EntryId, *, bytes_max: int | None = None, wait_s: float = 0.0
    ) -> AsyncIterator[Sequence[Run]]:
        """Iterate over the runs; this benchmark reads all of them."""
        assert (first, bytes_max, wait_s) == (0, None, 0.0)
        assert last == self.ledger_metadata.last_entry_id
        for start in range(0, len(self._runs), RUNS_A_LIST):
            yield self._runs[start : start + RUNS_A_LIST]

    async def close(self) -> None:
        """Hold on to the runs; the process ends anyway."""


async def offload_from_memory(parameters: Mapping[str, Any]) -> Result:
    """Offload a ledger that lies in memory (in a child)."""
    importlib.import_module("tierlog_offloader.main")  # its memory counts
    settings, pool = load_settings(), random_pool()
    configure_logging(settings.log, service="offloader")
    size = parameters["entry_size"]
    warm, whole = (
        MemoryHandle(LedgerId(number), pool, entry_size=size, count=length // size)
        for number, length in enumerate((WARM_BYTES, parameters["bytes"]), 1)
    )
    gc.freeze()  # as ``run_service`` does
    async with open_objects(settings) as objects:
        offloader = BlockOffloader(
            objects,
            Tier2Settings(bucket=settings.s3.bucket, cluster_id=uuid.uuid4()),
            budget=UploadBudget(
                bytes_max=bytes_for_blocks(settings.offloader.memory_bytes_max),
                parts_max=settings.offloader.parts_in_flight_max,
            ),
            retries=upload_retries(settings),
        )
        await offloader.offload(warm, uuid.uuid4(), {})
        meter, server = Meter(), ServerMeter(parameters["s3_pid"])
        await offloader.offload(whole, uuid.uuid4(), {})
        length = whole.ledger_metadata.length
        return meter.result(length, **server.result(length))


class ServerMeter:
    """What SeaweedFS takes from now on; nothing where another server is in its place."""

    def __init__(self, pid: int | None) -> None:
        self._pid = pid
        self._started_s = 0.0 if pid is None else process_cpu_s(pid)

    def result(self, byte_count: int) -> Result:
        """Return it, by GB of what was sent."""
        if self._pid is None:
            return {}
        taken_s = process_cpu_s(self._pid) - self._started_s
        return {"s3_cpu_s_per_gb": taken_s / (byte_count / 10**9)}


class Peers:
    """Both of them, for servers that run."""

    def __init__(
        self,
        bench: Bench,
        pulsar: Pulsar,
        pool: Path,
        size: int,
        *,
        fsync: bool,
        given: Mapping[str, str],
    ) -> None:
        self._bench = bench
        self._fsync = fsync
        self._given = given
        self._pulsar = pulsar
        self._pool = pool
        self._size = size
        self._ledgers = 0

    async def _fresh_s3(self) -> None:
        if self._given:
            # The sink holds nothing, and lists nothing.
            await run_child(__file__, "empty", {}, {**self._bench.env, **self._given})
            return
        await self._bench.fresh_s3()
        if not self._fsync:
            await acknowledge_early(self._bench)

    async def tierlog(self, entry_size: int) -> Result:
        """Offload with Tierlog."""
        await self._fresh_s3()
        parameters = {"entry_size": entry_size, "bytes": self._size}
        environ = {**self._bench.env, **self._given}
        return await run_child(
            __file__, "offload", {**parameters, "s3_pid": self._s3_pid()}, environ
        )

    async def pulsar(self, entry_size: int) -> Result:
        """Offload with Pulsar."""
        await self._fresh_s3()
        await self._write(entry_size, WARM_BYTES)
        return await self._write(entry_size, self._size)

    def _s3_pid(self) -> int | None:
        """Return the process of SeaweedFS, where it is the server."""
        return None if self._given else self._bench.cluster.servers.pid("s3")

    async def warm_up(self, entry_size: int, times: int) -> None:
        """Have Java compile what it will."""
        for number in range(times):
            say(f"warming Pulsar up with {entry_size:,} B, {number + 1} of {times}")
            await self.pulsar(entry_size)

    async def _write(self, entry_size: int, length: int) -> Result:
        self._ledgers += 1
        server = ServerMeter(self._s3_pid())
        answer = await self._pulsar(
            "write",
            ledger_id=self._ledgers,
            uuid=uuid.uuid4(),
            block_size=BLOCK_BYTES,
            file=self._pool,
            sizes=[[length // entry_size, entry_size]],
        )
        if not answer["ok"]:
            raise SystemExit(f"Pulsar could not offload: {answer['error']}")
        seconds, bytes_ = answer["seconds"], answer["bytes"]
        return {
            "bytes": bytes_,
            "seconds": seconds,
            "mb_per_s": bytes_ / MB / seconds,
            "cpu_s_per_gb": answer["cpu_s"] / (bytes_ / 10**9),
            **server.result(bytes_),
        }


async def held(_: Mapping[str, Any]) -> Result:
    """Count the objects of the bucket (in a child)."""
    async with open_objects(load_settings()) as objects:
        return {"objects": len([one async for one in objects.list()])}


async def empty_bucket(_: Mapping[str, Any]) -> Result:
    """Delete what the runs put into a bucket that was empty before them (in a child)."""
    async with open_objects(load_settings()) as objects:
        keys = [one.key async for one in objects.list()]
        for key in keys:
            await objects.delete(key)
    return {"deleted": len(keys)}


def given_server(arguments: argparse.Namespace, null_url: str) -> dict[str, str]:
    """Return how the server is reached that takes the place of SeaweedFS; nothing: none does."""
    if arguments.sink:
        return {"TIERLOG_S3__ENDPOINT_URL": null_url}
    if arguments.server is None:
        return {}
    names = {"ACCESS_KEY": "AWS_ACCESS_KEY_ID", "SECRET_KEY": "AWS_SECRET_ACCESS_KEY"}
    if missing := [name for name in names.values() if not os.environ.get(name)]:
        raise SystemExit(f"--server wants its keys in the environment: set {', '.join(missing)}")
    keys = {f"TIERLOG_S3__{ours}": os.environ[name] for ours, name in names.items()}
    return {"TIERLOG_S3__ENDPOINT_URL": arguments.server, **keys}


async def require_empty(environ: Mapping[str, str]) -> None:
    """Refuse a bucket in which something lies that no run put there."""
    found = await run_child(__file__, "held", {}, environ)
    if found["objects"]:
        raise SystemExit(
            f"the bucket of --server holds {found['objects']:,.0f} objects, which would be "
            "deleted between runs: give a server whose bucket `tierlog` is empty"
        )


async def measure(
    peers: Peers, arguments: argparse.Namespace
) -> tuple[list[Claim], dict[str, list[Result]]]:
    """Take turns at each size of entries."""
    claims: list[Claim] = []
    runs: dict[str, list[Result]] = {}
    for size in arguments.sizes:
        await peers.warm_up(size, arguments.warmups)
        ours, theirs = f"tierlog {size} B", f"pulsar {size} B"
        runs |= await take_turns(
            {ours: partial(peers.tierlog, size), theirs: partial(peers.pulsar, size)},
            arguments.runs,
        )
        claims.append(
            ratio_claim(
                f"tierlog / pulsar, {size} B", runs, of=ours, to=theirs,
                target=1.2 if size >= AHEAD_FROM else 1.0,
            )
        )  # fmt: skip
        for name in (ours, theirs):
            claims += [
                median_claim(name, runs[name], "mb_per_s", unit="MB/s"),
                median_claim(f"its CPU, {name}", runs[name], "cpu_s_per_gb", unit="s/GB"),
            ]
            if "s3_cpu_s_per_gb" in runs[name][0]:
                claims.append(
                    median_claim(f"S3's CPU, {name}", runs[name], "s3_cpu_s_per_gb", unit="s/GB")
                )
    return claims, runs


async def main() -> None:
    """Measure and tell."""
    parser = arguments_parser("offload from memory against Apache Pulsar's", size_mb=1000)
    parser.add_argument("--sizes", type=int, nargs="*", default=ENTRY_SIZES)
    parser.add_argument("--warmups", type=int, default=1, help="of Java, before each size")
    servers = parser.add_mutually_exclusive_group()
    servers.add_argument("--fsync", action="store_true", help="S3 as `tierlog up` runs it")
    servers.add_argument("--sink", action="store_true", help="a server that drops what it gets")
    servers.add_argument("--server", help="URL of another S3 server, its bucket `tierlog` empty")
    arguments = parse(parser, quick_mb=200)
    try:
        built = await asyncio.to_thread(build, say)
    except InteropError as error:
        say(f"not measured: {error}")
        return
    with folder_of(arguments) as folder:
        pool = folder / "pool"
        pool.write_bytes(random_pool())
        async with Bench(folder, [], {}) as bench, null_s3() as null_url:
            where = bench.cluster.servers.endpoints
            given = given_server(arguments, null_url)
            if arguments.server is not None:
                await require_empty({**bench.env, **given})
            bucket = Bucket(
                endpoint_url=given.get("TIERLOG_S3__ENDPOINT_URL", where.s3_endpoint_url),
                name=where.s3_bucket,
                access_key=given.get("TIERLOG_S3__ACCESS_KEY", where.s3_access_key),
                secret_key=given.get("TIERLOG_S3__SECRET_KEY", where.s3_secret_key),
            )
            with Pulsar(built, bucket) as pulsar:
                peers = Peers(
                    bench, pulsar, pool, arguments.size * MB,
                    fsync=arguments.fsync, given=given,
                )  # fmt: skip
                claims, runs = await measure(peers, arguments)
    report("offload_peer", arguments, claims, runs)


if __name__ == "__main__":
    if not child_mode({"offload": offload_from_memory, "held": held, "empty": empty_bucket}):
        asyncio.run(main())
