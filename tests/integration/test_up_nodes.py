"""``tierlog up --nodes 3``: three ingest processes at 3/3/2, of which one may end.

The four servers are those of the session, so that only the services start.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import uuid
from typing import TYPE_CHECKING, Any

import orjson
import psutil
import pytest

from tierlog.client import StructuredEvent, SyncClient
from tierlog.client.endpoints import EndpointsFile
from tierlog.embedded.cluster import EmbeddedCluster
from tierlog.embedded.endpoints import ExternalS3, ExternalServers
from tierlog.runtime.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.plugins.fix_cli import CommandLine
    from tierlog.embedded.supervisor import EmbeddedServers

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

UP = [sys.executable, "-m", "tierlog.cli.main", "up"]


@pytest.fixture
def own(servers: EmbeddedServers) -> dict[str, str]:
    """The settings that name the session's servers, with a corner of one's own in each."""
    name, found = f"up-{uuid.uuid4().hex[:12]}", servers.endpoints
    return {
        "TIERLOG_UP__EXTERNAL_S3": found.s3_endpoint_url,
        "TIERLOG_S3__ACCESS_KEY": found.s3_access_key,
        "TIERLOG_S3__SECRET_KEY": found.s3_secret_key,
        "TIERLOG_S3__BUCKET": name,
        "TIERLOG_UP__EXTERNAL_ZOOKEEPER": f"{found.zookeeper_hosts}/{name}",
        "TIERLOG_UP__EXTERNAL_KAFKA": found.kafka_bootstrap,
        "TIERLOG_KAFKA__TOPIC_PREFIX": name,
        "TIERLOG_UP__EXTERNAL_REDIS": found.redis_url,
        "TIERLOG_REDIS__KEY_PREFIX": f"{name}:",
    }


@contextlib.contextmanager
def up(state_dir: Path, own: dict[str, str], *more: str) -> Iterator[Any]:
    """Run `tierlog up`, and stop it in the end; gives the process and what it printed first."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("TIERLOG_")}
    with (state_dir.parent / "up.log").open("wb") as log:
        process = subprocess.Popen(
            [*UP, "--state-dir", str(state_dir), "-o", "jsonl", *more],
            stdout=subprocess.PIPE,
            stderr=log,
            env={**environ, **own},
        )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, (state_dir.parent / "up.log").read_text()
        yield process, EndpointsFile.model_validate(orjson.loads(line))
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


def child(process: Any, word: str) -> psutil.Process:
    """Return the child process that listens on a port."""
    port = f"TIERLOG_INGEST__LISTEN__GRPC_PORT={word.rpartition(':')[2]}"
    for one in psutil.Process(process.pid).children(recursive=True):
        if port in [f"{key}={value}" for key, value in one.environ().items()]:
            return one
    raise AssertionError(word)


async def test_up_runs_three_nodes_and_goes_on_without_one(
    cli: CommandLine, tmp_path: Path, own: dict[str, str]
) -> None:
    state = tmp_path / "state"
    with up(state, own, "--nodes", "3") as (process, written):
        assert list(written.services)[:4] == ["ingest", "ingest-1", "ingest-2", "ingest-3"]
        assert written.services["ingest"] == written.services["ingest-1"]
        assert len(written.ingest_addresses("grpc")) == 3
        (await cli("append", "three", stdin=b"one\n", state_dir=state)).check(0)
        shown = (await cli("stream", "show", "three", "-o", "json", state_dir=state)).check(0)
        found = orjson.loads(shown.stdout)
        number = str(found["ledgers"][0]["ledger_id"])
        shown = (await cli("ledger", "show", number, "-o", "json", state_dir=state)).check(0)
        metadata = orjson.loads(shown.stdout)["metadata"]
        quorums = [metadata[name] for name in ("ensemble_size", "write_quorum", "ack_quorum")]
        assert quorums == [3, 3, 2]
        assert sorted(metadata["ensembles"][0]["nodes"]) == ["node-1", "node-2", "node-3"]

        owner = found["owner"].removeprefix("node-")
        child(process, written.services[f"ingest-{owner}"]["grpc"]).kill()
        (await cli("append", "three", stdin=b"two\n", state_dir=state)).check(0)
        assert process.poll() is None
        assert (await cli("read", "three", state_dir=state)).check(0).stdout == b"one\ntwo\n"
        async with asyncio.timeout(10):
            while "go on without it" not in (tmp_path / "up.log").read_text():
                await asyncio.sleep(0.1)
    assert process.returncode == 0
    refused = await cli("up", "--nodes", "2", stdin=b"", state_dir=state, **own)
    refused.check(2, "has 3 nodes", "--nodes 3")
    # As many as there were, each with its own folder.
    with up(state, own) as (process, written):
        assert len(written.ingest_addresses("grpc")) == 3
        assert (await cli("read", "three", state_dir=state)).check(0).stdout == b"one\ntwo\n"


async def test_a_cluster_grows_by_a_node_and_loses_one_for_good(
    tmp_path: Path, servers: EmbeddedServers
) -> None:
    name, found = f"grow-{uuid.uuid4().hex[:12]}", servers.endpoints
    external = ExternalServers(
        s3=ExternalS3(
            endpoint_url=found.s3_endpoint_url,
            access_key=found.s3_access_key,
            secret_key=found.s3_secret_key,
            bucket=name,
        ),
        zookeeper=f"{found.zookeeper_hosts}/{name}",
        kafka=found.kafka_bootstrap,
        redis=found.redis_url,
    )
    settings = {"TIERLOG_KAFKA__TOPIC_PREFIX": name}
    cluster = EmbeddedCluster(tmp_path, nodes=1, external=external, settings=settings)
    async with cluster:
        assert cluster.nodes == ["ingest"]
        assert await cluster.add_node() == "ingest-2"
        assert cluster.data_dir("ingest-2").is_dir()
        folder = cluster.data_dir("ingest-2")
        cluster.lose_node("ingest-2")
        assert not folder.exists()
        # Its number is not given again: its id is that of a disk that is gone.
        assert await cluster.add_node() == "ingest-3"
        assert cluster.nodes == ["ingest", "ingest-3"]
        assert len(set(cluster.node_addresses("grpc"))) == 2
        watching = asyncio.ensure_future(cluster.wait_failed())
        await asyncio.sleep(0)
        cluster.services.kill("ingest-3")
        assert "ingest-3 ended with -9" in str(await watching)


def test_partitions_over_three_nodes(cluster_of_three: Settings) -> None:
    """Each partition has an owner of its own, wherever that is."""
    with SyncClient(cluster_of_three) as client:
        client.create_stream("orders", partitions=6)
        with client.writer("orders") as writer:
            for number in range(1000):
                event = StructuredEvent(payload=b"%d" % number, key=b"%d" % (number % 100))
                writer.send(event)
        found = sorted(int(event.payload) for event in client.events("orders"))
        assert found == list(range(1000))
        owners = [one["owner"] for one in client.stream("orders")["partition_streams"]]
        assert None not in owners
        assert len(set(owners)) > 1


@pytest.fixture
def cluster_of_three(three_nodes: Any) -> Settings:
    return three_nodes.settings  # type: ignore[no-any-return]
