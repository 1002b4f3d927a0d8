"""ZooKeeper and all disks are gone: writers go on from what came back, and repeat nothing."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any
from uuid import UUID

import orjson
import pytest

from tests.integration.spark_kit import options_of, rows_read
from tests.integration.test_reader_tiers import SMALL, offloaded_and_gone, payloads
from tests.integration.test_restore import fresh
from tests.plugins.fix_cluster import ServiceCluster
from tierlog.client import WriterState, open_client
from tierlog.model.attributes import EVENT_COUNT
from tierlog.model.core_attributes import CORE_NAMES
from tierlog.model.policy import MIB

if TYPE_CHECKING:
    from pathlib import Path

    from tests.plugins.fix_cli import CommandLine
    from tierlog.embedded.supervisor import EmbeddedServers

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

EVENTS = UUID(bytes=bytes(EVENT_COUNT))


def events(writer: bytes, count: int) -> list[bytes]:
    return [b"%s %05d" % (writer, number) for number in range(count)]


async def send(client: Any, state: WriterState, what: list[bytes], *, there: int) -> None:
    async with client.writer("logs", state=state) as writer:
        assert writer.resumed_event_number == there
        for event in what[there:]:
            await writer.send(event)


async def lived(site: ServiceCluster, early: WriterState, late: WriterState) -> dict[UUID, int]:
    """Two writers, one of which appended to nothing but a ledger that was trimmed.

    Returns the attributes as of what will come back.
    """
    async with open_client(site.settings) as client:
        await client.create_stream("logs", policy=SMALL)
        await send(client, early, events(b"early", 500), there=0)
        await offloaded_and_gone(site, client, "logs")
        (first,) = (await client.stream("logs"))["ledgers"]
        await send(client, late, events(b"late", 300), there=0)
        await offloaded_and_gone(site, client, "logs")
        levels = {"ledger_bytes_max": 6 * MIB, "ledger_age_ms_max": 3_600_000}
        await client.set_level(None, levels)
        policy = {"retention_size_bytes": 1, "deletion_lag_ms": 500, "ledger_entries_max": 12345}
        await client.set_policy("logs", policy)

        async def trimmed() -> bool:
            listed = (await client.stream("logs"))["ledgers"]
            return first["ledger_id"] not in {one["ledger_id"] for one in listed}

        await site.until(trimmed, what="the first ledger is trimmed")
        kept = {key: value async for key, value in client.attributes("logs").list()}
        # Gone with the disks, and the writer was told that it is there.
        await send(client, late, events(b"late", 400), there=300)
    return kept


async def test_writers_go_on_as_of_what_came_back(
    servers: EmbeddedServers, cli: CommandLine, tmp_path: Path
) -> None:
    first = ServiceCluster(servers, tmp_path / "first", name=fresh("lost"))
    bucket = first.env["TIERLOG_S3__BUCKET"]
    second = ServiceCluster(
        servers, tmp_path / "second", name=fresh("back"), env={"TIERLOG_S3__BUCKET": bucket}
    )
    env: dict[str, Any] = {
        name: second.env[name]
        for name in second.env
        if name.startswith(("TIERLOG_S3__", "TIERLOG_ZOOKEEPER__"))
    }
    early, late = WriterState(writer_id=UUID(int=2**127)), WriterState(writer_id=UUID(int=2**126))
    try:
        await first.start()
        kept = await lived(first, early, late)
        for name in ("ingest", "scheduler", "offloader", "reader"):
            first.kill(name)
        await first.stop()
        shutil.rmtree(first.state_dir)
        asked = ("restore", "--from", f"s3://{bucket}", "-o", "json")
        document = orjson.loads((await cli(*asked, state_dir=tmp_path, **env)).check(0).stdout)
        (stream,) = document["streams"]
        assert stream["attributes_through"] is not None
        assert not [one for one in document["findings"] if one["verdict"] != "lost"]
        rows = await rows_read(options_of(first.settings.s3, table="attributes"))
        assert {UUID(row["key"]): row["value"] for row in rows} == kept

        await second.start()
        async with open_client(second.settings) as client:
            found = await client.attributes("logs").get([early.writer_id, late.writer_id, EVENTS])
            # Of what was lost nothing is counted.
            assert found == {early.writer_id: 500, late.writer_id: 300, EVENTS: 800}
            # Policies, and the root of the index, are derived of the same as before.
            found = {key: value async for key, value in client.attributes("logs").list()}
            assert found == kept
            core = {name: found[UUID(bytes=key)] for key, name in CORE_NAMES.items()}
            assert (core["roll-over-bytes"], core["roll-over-entries"]) == (6 * MIB, 12345)
            assert core["index-root-length"] > 0
            await send(client, early, events(b"early", 501), there=500)
            await send(client, late, events(b"late", 400), there=300)
            assert await payloads(client, "logs") == [
                *events(b"late", 300),
                events(b"early", 501)[500],
                *events(b"late", 400)[300:],
            ]
    finally:
        await first.stop()
        await second.stop()
