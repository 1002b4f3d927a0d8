"""ZooKeeper and all disks are gone: a cluster comes back from its bucket, and goes on."""

from __future__ import annotations

import shutil
import uuid
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from tests.integration.test_reader_tiers import (
    SMALL,
    append,
    numbered,
    offloaded_and_gone,
    payloads,
)
from tests.plugins.fix_cluster import ServiceCluster
from tierlog.client import StructuredEvent, open_client
from tierlog.ports.spending import CostMeter

if TYPE_CHECKING:
    from pathlib import Path

    from tests.plugins.fix_cli import CommandLine
    from tierlog.embedded.supervisor import EmbeddedServers

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

KEPT = numbered(0, 8000)


def fresh(name: str) -> str:
    return f"{name}-{uuid.uuid4().hex[:12]}"


async def lived(site: ServiceCluster) -> dict[str, Any]:
    """Let a cluster have streams, all of them offloaded, and something that is not."""
    async with open_client(site.settings) as client:
        await client.set_level("shop", {"deletion_lag_ms": 700})
        await client.create_stream("logs", policy=SMALL)
        await append(client, "logs", KEPT)
        await offloaded_and_gone(site, client, "logs")
        await client.create_stream("shop.parts", partitions=2, policy=SMALL)
        async with client.writer("shop.parts") as writer:
            for number in range(20):
                text = str(number).encode()
                await writer.send(StructuredEvent(payload=text, key=text))
        for name in await client.partitions("shop.parts"):
            await offloaded_and_gone(site, client, name)
        # Gone with the disks.
        await append(client, "logs", [b"never offloaded"])
        return {name: await client.stream(name) for name in ("logs", "shop.parts")}


async def test_a_cluster_comes_back_from_its_bucket_alone(
    servers: EmbeddedServers, cli: CommandLine, tmp_path: Path
) -> None:
    first = ServiceCluster(servers, tmp_path / "first", name=fresh("lost"))
    bucket = first.env["TIERLOG_S3__BUCKET"]
    second = ServiceCluster(
        servers,
        tmp_path / "second",
        name=fresh("back"),
        env={"TIERLOG_S3__BUCKET": bucket},
    )
    env: dict[str, Any] = {
        name: second.env[name]
        for name in second.env
        if name.startswith(("TIERLOG_S3__", "TIERLOG_ZOOKEEPER__"))
    }
    try:
        await first.start()
        before = await lived(first)
        for name in ("ingest", "scheduler", "offloader", "reader"):
            first.kill(name)
        await first.stop()
        shutil.rmtree(first.state_dir)

        asked = ("restore", "--from", f"s3://{bucket}", "-o", "json")
        dry = (await cli(*asked, "--dry-run", state_dir=tmp_path, **env)).check(0)
        assert orjson.loads(dry.stdout)["applied"] is False
        done = (await cli(*asked, state_dir=tmp_path, **env)).check(0)
        document = orjson.loads(done.stdout)
        assert document["applied"] is True
        assert {one["stream"] for one in document["streams"]} == {
            "logs",
            "shop.parts",
            "shop.parts-partition-0",
            "shop.parts-partition-1",
        }
        assert not [one for one in document["findings"] if one["verdict"] != "lost"]
        again = (await cli(*asked, state_dir=tmp_path, **env)).check(0)
        assert document["requests_sent"] > 0
        # Requests that are repeated count, and need not be as many again.
        counts = CostMeter().totals
        assert orjson.loads(again.stdout) | counts == document | counts

        await second.start()
        await check_back(second, before, base=document["ledger_id_base"])
    finally:
        await first.stop()
        await second.stop()
    # In use it is not what the bucket says any more, and nobody writes over it.
    (await cli(*asked, state_dir=tmp_path, **env)).check(2, "not empty", "empty ZooKeeper")


async def check_back(site: ServiceCluster, before: dict[str, Any], *, base: int) -> None:
    """Every offloaded byte reads as before; appends and offloads go on, with new ids."""
    async with open_client(site.settings) as client:
        assert await payloads(client, "logs") == KEPT
        found = await client.stream("logs")
        for field in ("incarnation", "created_ms", "raw"):
            assert found[field] == before["logs"][field]
        gone = before["logs"]["ledgers"][-1]["ledger_id"]
        kept = [one["ledger_id"] for one in found["ledgers"]]
        assert kept == [one["ledger_id"] for one in before["logs"]["ledgers"][:-1]]
        assert sorted(map(int, await payloads(client, "shop.parts"))) == list(range(20))
        assert (await client.level("shop"))["own"]["deletion_lag_ms"] == 700
        await append(client, "logs", [b"new"])
        newest = (await client.stream("logs"))["ledgers"][-1]["ledger_id"]
        assert newest >= base > gone
        await offloaded_and_gone(site, client, "logs")
        assert await payloads(client, "logs") == [*KEPT, b"new"]


async def test_a_bucket_without_manifests_and_a_name_that_is_none(
    servers: EmbeddedServers, cli: CommandLine, tmp_path: Path, cluster: ServiceCluster
) -> None:
    env: dict[str, Any] = {
        name: cluster.env[name]
        for name in cluster.env
        if name.startswith(("TIERLOG_S3__", "TIERLOG_ZOOKEEPER__"))
    }
    bucket = cluster.env["TIERLOG_S3__BUCKET"]
    asked = ("restore", "--from", f"s3://{bucket}/nothing/here", "--dry-run")
    (await cli(*asked, state_dir=tmp_path, **env)).check(3, "no manifests", "--from")
    (await cli("restore", "--from", bucket, state_dir=tmp_path, **env)).check(2, "s3://")
    (await cli("restore", "--from", "s3://no-such-bucket-here", state_dir=tmp_path, **env)).check(
        2, "bucket"
    )
    (
        await cli(
            "restore", "--from", f"s3://{bucket}", "--cluster", "x", state_dir=tmp_path, **env
        )
    ).check(2, "UUID")
