"""An offloader process killed with -9 in the middle of an upload (protocols.md section 3).

A fresh process begins a new attempt; nothing of the old one is left; the local copy goes after
its lag; every byte reads back.
"""

import asyncio
import random
from pathlib import Path

import aiohttp
import pytest

from tests.plugins.fix_corner import environment_of
from tests.unit.offload.world import entries_of
from tierlog.adapters.rpc.ingest import GrpcStreamControl
from tierlog.embedded.nodes import quorum_environment
from tierlog.embedded.ports import Ports
from tierlog.embedded.services import EmbeddedServices, service_spec
from tierlog.format.manifest import is_manifest_key
from tierlog.model.ids import StreamName
from tierlog.model.offload import OffloadContext, OffloadState
from tierlog.model.policy import MIB, Policy
from tierlog.runtime.settings import Settings
from tierlog.wiring.offload import OffloadParts, open_offload_parts

pytestmark = pytest.mark.integration

STREAM = StreamName("crash")
POLICY = Policy(offload_time_ms=0, deletion_lag_ms=2000, block_size=5 * MIB)


@pytest.fixture
async def services(tmp_path: Path):
    embedded = EmbeddedServices(run_dir=tmp_path, log_dir=tmp_path)
    yield embedded
    await embedded.stop()


async def context_of(parts: OffloadParts) -> OffloadContext | None:
    (listed,) = (await parts.catalog.streams.snapshot(STREAM)).ledgers
    return await parts.catalog.contexts.get(listed.ledger_id)


async def until(parts: OffloadParts, reached, *, seconds: float = 60) -> OffloadContext:
    async with asyncio.timeout(seconds):
        while True:
            context = await context_of(parts)
            if context is not None and await reached(context):
                return context
            await asyncio.sleep(0.1)


@pytest.mark.covers("A15", "A28", "A31", "A73")
async def test_killed_in_mid_upload_nothing_of_the_attempt_is_left(
    services: EmbeddedServices, corner: Settings, tmp_path: Path
):
    env = {
        **environment_of(corner),
        **quorum_environment(1, {}),
        "TIERLOG_INGEST__DATA_DIR": str(tmp_path / "data"),
        "TIERLOG_SCHEDULER__INTERVAL_S": "0.5",
        "TIERLOG_SCHEDULER__REQUEST_AGAIN_S": "5",
        "TIERLOG_SCHEDULER__SWEEP_AGAIN_S": "3",
        "TIERLOG_S3__REQUEST_S_MAX": "5",
        "TIERLOG_S3__BYTES_PER_S_MIN": str(16 * MIB),
    }
    ports = Ports(tmp_path / "ports.json")
    ingest = service_spec("ingest", ports=ports.take("ingest", ["http", "grpc", "wire"]), env=env)
    scheduler = service_spec("scheduler", ports=ports.take("scheduler", ["http"]), env=env)
    offloader = service_spec(
        "offloader",
        ports=ports.take("offloader", ["http"]),
        env={**env, "TIERLOG_OFFLOADER__PART_DELAY_S": "3"},
    )
    await services.start([ingest, scheduler, offloader])
    entries = await filled(ingest.ports["grpc"])

    async with open_offload_parts(corner) as parts:

        async def in_mid_upload(context: OffloadContext) -> bool:
            if context.location is None:
                return False
            uploads = await parts.objects.list_uploads(context.location.data_key)
            return bool(uploads)

        killed = await until(parts, in_mid_upload)
        services.kill("offloader")
        assert killed.state is OffloadState.OFFLOADING
        await services.restart("offloader", env={"TIERLOG_OFFLOADER__PART_DELAY_S": "0"})

        async def gone_locally(context: OffloadContext) -> bool:
            return context.state is OffloadState.TIER1_DELETED and not context.abandoned

        context = await until(parts, gone_locally, seconds=90)
        assert context.uuid != killed.uuid
        assert context.uuid is not None
        assert context.location is not None
        assert context.attempt_count == 2
        prefix = corner.s3.key_prefix
        listed = {info.key async for info in parts.objects.list(prefix)}
        found = {key for key in listed if not is_manifest_key(prefix, key)}
        assert listed > found
        assert found == set(context.location.keys)
        assert not await parts.objects.list_uploads(corner.s3.key_prefix)
        handle = await parts.offloader.read_offloaded(
            context.ledger_id, context.uuid, context.location, copy=context.copy
        )
        assert await entries_of(handle) == entries
        assert await parts.catalog.ledgers.get(context.ledger_id) is None
        await shown(scheduler.ports["http"], context)


async def filled(grpc_port: int) -> list[bytes]:
    """Append 12 MiB and seal; return the entries."""
    rng = random.Random(1)
    entries = [rng.randbytes(100_000) for _ in range(126)]
    control = GrpcStreamControl(f"127.0.0.1:{grpc_port}", timeout_s=20.0)
    try:
        await control.create_stream(STREAM, raw=True, policy=POLICY, exist_ok=False)
        for start in range(0, len(entries), 6):
            await control.append(STREAM, entries[start : start + 6])
        await control.seal(STREAM)
    finally:
        await control.close()
    return entries


async def shown(http_port: int, context: OffloadContext) -> None:
    """The admin REST tells the same."""
    async with (
        aiohttp.ClientSession(f"http://127.0.0.1:{http_port}") as session,
        session.get(f"/v1/streams/{STREAM}") as answer,
    ):
        (ledger,) = (await answer.json())["ledgers"]
    assert ledger["ledger_id"] == context.ledger_id
    assert (ledger["tier1"], ledger["tier2"]) == (False, True)
    assert (ledger["offload_state"], ledger["attempts"]) == ("TIER1_DELETED", 2)
