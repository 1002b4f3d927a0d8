"""The embedded servers: real ones, that find their data again and leave no process behind.

Clauses: starts S3, ZooKeeper, Kafka and Redis as child processes on free loopback ports; keeps
its state so that a second start finds the data of the first; leaves no process behind, also when
it was killed with -9 and started again; any of the four can be an external one; a second
supervisor of the same state, a port in use and an unreachable server get a clear error or another
way.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
from contextlib import closing
from typing import TYPE_CHECKING

import aiohttp
import pytest
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]
from kazoo.client import KazooClient

from tierlog.embedded import ports as ports_module
from tierlog.embedded.endpoints import ExternalS3, ExternalServers
from tierlog.embedded.process import identify
from tierlog.embedded.s3_probe import sign
from tierlog.embedded.seaweedfs import FSYNC_PATH
from tierlog.embedded.supervisor import EmbeddedServers
from tierlog.model.errors import RefusedError, RetryableError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.integration

SUPERVISOR = """
import asyncio, json, sys
from pathlib import Path
from tierlog.embedded.supervisor import EmbeddedServers
async def main():
    servers = EmbeddedServers(Path(sys.argv[1]))
    await servers.start()
    print(json.dumps([child.pid for child in servers.children.values()]), flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


async def s3(servers: EmbeddedServers, method: str, key: str, body: bytes = b"") -> bytes:
    at = servers.endpoints
    host = at.s3_endpoint_url.removeprefix("http://")
    path = f"/{at.s3_bucket}/{key}"
    headers = sign(method, host, path, body, at.s3_access_key, at.s3_secret_key)
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, f"http://{host}{path}", data=body, headers=headers) as answer,
    ):
        assert answer.status == 200, await answer.text()
        return await answer.read()


def zookeeper_read(servers: EmbeddedServers, path: str, write: bytes | None = None) -> bytes:
    client = KazooClient(hosts=servers.endpoints.zookeeper_hosts)
    client.start(timeout=10)
    try:
        if write is not None:
            client.create(path, write)
        return bytes(client.get(path)[0])
    finally:
        client.stop()
        client.close()


def admin_of(servers: EmbeddedServers) -> AdminClient:
    return AdminClient({"bootstrap.servers": servers.endpoints.kafka_bootstrap})


def kafka_write(servers: EmbeddedServers, topic: str, value: bytes) -> None:
    admin = admin_of(servers)
    admin.create_topics([NewTopic(topic, 1)])[topic].result(10)
    producer = Producer({"bootstrap.servers": servers.endpoints.kafka_bootstrap, "acks": "all"})
    producer.produce(topic, value)
    assert producer.flush(10) == 0


def kafka_read(servers: EmbeddedServers, topic: str) -> bytes | None:
    at = {"bootstrap.servers": servers.endpoints.kafka_bootstrap}
    group = {"group.id": "test", "auto.offset.reset": "earliest"}
    with closing(Consumer({**at, **group})) as consumer:
        consumer.subscribe([topic])
        message = consumer.poll(20)
        assert message is not None
        assert message.error() is None
        return message.value()


def all_gone(pids: list[int]) -> bool:
    return all(identify(pid) is None for pid in pids)


def pids_of(servers: EmbeddedServers) -> list[int]:
    return [child.pid for child in servers.children.values()]


async def test_a_second_start_finds_the_data_and_stop_leaves_no_process(tmp_path: Path) -> None:
    async with EmbeddedServers(tmp_path) as first:
        assert set(first.children) == {"s3", "zookeeper", "kafka", "redis"}
        await s3(first, "PUT", "kept", b"object")
        zookeeper_read(first, "/kept", write=b"node")
        kafka_write(first, "kept", b"message")
        pids = pids_of(first)
    assert all_gone(pids)
    assert not list((tmp_path / "run").iterdir())

    # Meanwhile somebody else took one port of each server.
    held = json.loads((tmp_path / "ports.json").read_text())
    taken = [socket.create_server(("127.0.0.1", next(iter(own.values())))) for own in held.values()]
    try:
        async with EmbeddedServers(tmp_path) as second:
            assert second.endpoints.redis_url != first_redis(held)
            assert await s3(second, "GET", "kept") == b"object"
            assert zookeeper_read(second, "/kept") == b"node"
            assert kafka_read(second, "kept") == b"message"
            pids = pids_of(second)
    finally:
        for listener in taken:
            listener.close()
    assert all_gone(pids)


def first_redis(held: dict[str, dict[str, int]]) -> str:
    return f"redis://127.0.0.1:{held['redis']['redis']}/0"


async def test_kill_9_of_the_supervisor_ends_its_children_and_the_next_start_works(
    tmp_path: Path,
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        pids = json.loads(process.stdout.readline())
        assert len(pids) == 4
        assert not all_gone(pids[:1])

        with pytest.raises(RetryableError, match=f"in use by process {process.pid}") as refused:
            await EmbeddedServers(tmp_path).start()
        assert "another state directory" in refused.value.remedy

        process.kill()
    async with asyncio.timeout(5):
        while not all_gone(pids):
            await asyncio.sleep(0.01)

    async with EmbeddedServers(tmp_path) as again:
        await s3(again, "PUT", "after", b"x")


async def test_a_leftover_of_an_earlier_run_is_ended_and_a_recycled_pid_is_not(
    tmp_path: Path, address: str
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    leftover = subprocess.Popen(["sleep", "60"])
    innocent = subprocess.Popen(["sleep", "60"])
    try:
        identity = identify(leftover.pid)
        (run / "redis.pid").write_text(json.dumps({"name": "redis", **(identity or {})}))
        recycled = {"name": "s3", **(identify(innocent.pid) or {}), "start_ticks": 1}
        (run / "s3.pid").write_text(json.dumps(recycled))
        (run / "kafka.pid").write_text('{"na')
        told: list[str] = []
        servers = only_redis(tmp_path, address)
        await servers.start(lambda what, _done, _total: told.append(what))
        await servers.stop()
        assert leftover.wait(5) == -signal.SIGKILL
        assert innocent.poll() is None
        assert "ended a redis that an earlier run left" in told
    finally:
        for process in (leftover, innocent):
            process.kill()
            process.wait()


@pytest.fixture
def address() -> Iterator[str]:
    """An address that takes connections."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def only_redis(state: Path, address: str) -> EmbeddedServers:
    """Redis is ours; the other three are the same external address."""
    external = ExternalServers(
        s3=ExternalS3(endpoint_url=f"http://{address}", access_key="a", secret_key="s", bucket="b"),
        zookeeper=f"{address}/chroot",
        kafka=address,
    )
    return EmbeddedServers(state, external=external)


async def test_external_servers_are_used_and_not_started(tmp_path: Path, address: str) -> None:
    async with only_redis(tmp_path, address) as servers:
        assert list(servers.children) == ["redis"]
        assert servers.endpoints.kafka_bootstrap == address
        assert servers.endpoints.zookeeper_hosts == f"{address}/chroot"
        assert servers.endpoints.s3_bucket == "b"
        assert "secret" not in repr(servers.endpoints)


async def test_an_unreachable_external_server_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    servers = EmbeddedServers(tmp_path, external=ExternalServers(kafka=f"127.0.0.1:{port}"))
    with pytest.raises(RetryableError, match=f"external kafka .* 127.0.0.1:{port}"):
        await servers.start()
    assert not servers.children
    nonsense = EmbeddedServers(tmp_path, external=ExternalServers(redis="redis://:nope"))
    with pytest.raises(RefusedError, match="no host and port"):
        await nonsense.start()


async def test_a_port_lost_between_check_and_bind_is_replaced(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[socket.socket] = []

    def somebody_is_quicker(port: int) -> bool:
        if not taken:
            taken.append(socket.create_server(("127.0.0.1", port)))
            return True
        return is_free(port)

    is_free = ports_module.is_free
    monkeypatch.setattr(ports_module, "is_free", somebody_is_quicker)
    async with only_redis(tmp_path, address) as servers:
        assert f":{taken[0].getsockname()[1]}/" not in servers.endpoints.redis_url
    taken[0].close()


async def test_a_killed_server_comes_back_on_its_port(servers: EmbeddedServers) -> None:
    before = servers.endpoints
    await s3(servers, "PUT", "embedded/survives", b"kill -9")
    servers.kill("s3")
    with pytest.raises(aiohttp.ClientError):
        await s3(servers, "GET", "embedded/survives")
    await servers.restart("s3")
    assert servers.endpoints == before
    assert await s3(servers, "GET", "embedded/survives") == b"kill -9"


async def test_kafka_comes_back_empty_when_asked(servers: EmbeddedServers) -> None:
    kafka_write(servers, "embedded-forgotten", b"lost")
    await servers.restart("kafka", empty=True)
    topics = admin_of(servers).list_topics(timeout=10).topics
    assert "embedded-forgotten" not in topics


async def test_objects_are_fsynced_by_the_rule_that_the_filer_holds(
    servers: EmbeddedServers,
) -> None:
    port = json.loads((servers.state_dir / "ports.json").read_text())["s3"]["filer"]
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{port}{FSYNC_PATH}") as answer,
    ):
        rule = json.loads(await answer.read())
    assert rule["locations"] == [{"locationPrefix": "/buckets/", "fsync": True}]


async def test_a_state_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(RefusedError, match="cannot be written"):
        await EmbeddedServers(file / "state").start()
