"""Kafka and ZooKeeper away for long, or at a start: what goes on, and what comes after.

Design: reliability.md C2 (Kafka down; ZooKeeper partition and 60 s down). Sessions are short here.
"""

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.contracts.proxy import Proxy
from tests.integration.test_offload_queue import until_no_lag
from tests.integration.test_reader_tiers import append, numbered, payloads
from tests.plugins.fix_corner import environment_of
from tests.unit.offload.world import entries_of
from tierlog.adapters.rpc.ingest import GrpcStreamControl
from tierlog.client import open_client
from tierlog.embedded.nodes import quorum_environment
from tierlog.embedded.ports import LOOPBACK, Ports
from tierlog.embedded.services import SERVICE_PORTS, EmbeddedServices, service_spec
from tierlog.embedded.supervisor import EmbeddedServers
from tierlog.ledger.reader import Tier1ReadHandle
from tierlog.model.errors import IndeterminateError, RetryableError, TierlogError
from tierlog.model.ids import StreamName
from tierlog.model.policy import MIB, Policy
from tierlog.runtime.settings import ClientSettings, Settings
from tierlog.wiring.offload import OffloadParts, open_offload_parts

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

OPEN, IDLE = StreamName("open-ledger"), StreamName("no-ledger")
SESSION_S = 2.0
AWAY_S = 7.0
PROMPT_S = 10.0
"""As long as anything may take that needs no server that is away."""
STARTED_S_MAX = 60.0


async def complete_of(client, stream: str) -> list[bool]:
    return [bool(one["complete"]) for one in (await client.stream(stream))["ledgers"]]


async def test_appends_and_reads_go_on_without_kafka_and_the_backlog_is_drained(cluster, servers):
    stream = "kafka-away"
    sent: list[bytes] = []
    policy = Policy(offload_time_ms=0, deletion_lag_ms=-1, block_size=5 * MIB)
    async with open_client(cluster.settings) as client:
        await client.create_stream(stream, policy=policy)

        async def one_more() -> None:
            events = numbered(len(sent), 50)
            async with asyncio.timeout(PROMPT_S):
                await append(client, stream, events)
                await client.seal(stream)
                sent.extend(events)
                assert await payloads(client, stream) == sent

        async def all_complete() -> bool:
            return all(await complete_of(client, stream))

        await one_more()
        await cluster.until(all_complete, what="the first ledger's copy")
        servers.kill("kafka")
        try:
            for _ in range(2):
                await one_more()
            await asyncio.sleep(2)  # four passes of the scheduler
            assert await complete_of(client, stream) == [True, False, False]
            await one_more()
        finally:
            await servers.restart("kafka")
        await cluster.until(all_complete, what="the backlog's copies", timeout_s=90)
        assert await payloads(client, stream) == sent
        assert [one["attempt_count"] for one in await client.attempts(stream)] == [1] * 4
    await until_no_lag(cluster.settings, seconds=60)


class Appending:
    """A producer that appends all the time and counts what was acknowledged."""

    def __init__(self, control: GrpcStreamControl) -> None:
        self._control = control
        self.acked: list[bytes] = []
        self.longest_s = 0.0

    async def run(self, seconds: float) -> None:
        """Append for so long; every append must be acknowledged."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + seconds
        while loop.time() < end_s:
            began_s, entry = loop.time(), b"%d" % len(self.acked)
            await self._control.append(OPEN, [entry])
            self.acked.append(entry)
            self.longest_s = max(self.longest_s, loop.time() - began_s)
            await asyncio.sleep(0.1)


async def ledgers_of(parts: OffloadParts, stream: StreamName) -> int:
    return len((await parts.catalog.streams.snapshot(stream)).ledgers)


async def insisting(work) -> None:
    """Call until it is done."""
    async with asyncio.timeout(30):
        while True:
            try:
                await work()
            except (RetryableError, IndeterminateError):
                await asyncio.sleep(0.2)
            else:
                return


async def test_acknowledgements_go_on_in_open_ledgers_without_zookeeper_and_none_is_opened(
    corner: Settings, tmp_path: Path
):
    hosts, _, root = corner.zookeeper.hosts.partition("/")
    services = EmbeddedServices(run_dir=tmp_path, log_dir=tmp_path)
    async with open_offload_parts(corner) as parts, Proxy(hosts) as proxy:
        ports = Ports(tmp_path / "ports.json").take("ingest", ["http", "grpc", "wire"])
        env = {
            **environment_of(corner),
            **quorum_environment(1, {}),
            "TIERLOG_INGEST__DATA_DIR": str(tmp_path / "data"),
            "TIERLOG_ZOOKEEPER__HOSTS": f"{proxy.address}/{root}",
            "TIERLOG_ZOOKEEPER__SESSION_TIMEOUT_S": str(SESSION_S),
        }
        control = GrpcStreamControl(f"{LOOPBACK}:{ports['grpc']}", timeout_s=PROMPT_S)
        try:
            await services.start([service_spec("ingest", ports=ports, env=env)])
            await _away_and_back(parts, proxy, control)
        finally:
            await control.close()
            await services.stop()


async def _away_and_back(parts: OffloadParts, proxy: Proxy, control: GrpcStreamControl) -> None:
    for stream in (OPEN, IDLE):
        await control.create_stream(stream, raw=True, policy=None, exist_ok=False)
    appending = Appending(control)
    await appending.run(0.5)
    known = len(appending.acked)
    proxy.drop_requests_and_cut()
    proxy.cut()
    async with asyncio.TaskGroup() as group:
        group.create_task(appending.run(AWAY_S))
        async with asyncio.timeout(AWAY_S):
            while await parts.catalog.nodes.live():  # until its session is over
                await asyncio.sleep(0.1)
        for refused in (
            control.append(IDLE, [b"needs a ledger"]),
            control.create_stream(StreamName("new"), raw=True, policy=None, exist_ok=False),
        ):
            with pytest.raises(TierlogError) as caught:
                await refused
            assert isinstance(caught.value, RetryableError | IndeterminateError)
    assert len(appending.acked) > known + 10
    assert appending.longest_s < PROMPT_S / 2
    assert (await ledgers_of(parts, OPEN), await ledgers_of(parts, IDLE)) == (1, 0)
    assert StreamName("new") not in await parts.catalog.streams.names()

    proxy.restore()
    await insisting(lambda: control.append(IDLE, [b"at last"]))
    await insisting(lambda: control.seal(OPEN))
    await insisting(lambda: control.append(OPEN, [b"behind it"]))
    assert (await ledgers_of(parts, OPEN), await ledgers_of(parts, IDLE)) == (2, 1)
    sealed = (await parts.catalog.streams.snapshot(OPEN)).ledgers[0]
    metadata = await parts.catalog.ledgers.get(sealed.ledger_id)
    assert metadata is not None
    handle = Tier1ReadHandle(sealed.ledger_id, metadata, parts.nodes)
    assert await entries_of(handle) == appending.acked


AT_START = ("scheduler", "offloader")


async def readiness(services: EmbeddedServices, name: str) -> tuple[int, dict[str, Any]]:
    url = f"http://{LOOPBACK}:{services.specs[name].ports['http']}/readyz?verbose"
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        return answer.status, await answer.json()


async def until_ready(services: EmbeddedServices, name: str) -> None:
    async with asyncio.timeout(60):
        while True:
            # While it waits another server answers at the same port.
            with contextlib.suppress(aiohttp.ClientError):
                if (await readiness(services, name))[0] == 200:
                    return
            await asyncio.sleep(0.2)


async def test_services_start_without_kafka_end_without_it_and_go_on_when_it_comes(
    corner: Settings, servers: EmbeddedServers, tmp_path: Path
):
    services = EmbeddedServices(run_dir=tmp_path, log_dir=tmp_path)
    ports = Ports(tmp_path / "ports.json")
    env = {
        **environment_of(corner),
        **quorum_environment(1, {}),
        "TIERLOG_INGEST__DATA_DIR": str(tmp_path / "data"),
        "TIERLOG_SCHEDULER__INTERVAL_S": "0.5",
    }
    taken = {kind: ports.take(kind, SERVICE_PORTS[kind]) for kind in ("ingest", *AT_START)}
    specs = {kind: service_spec(kind, ports=taken[kind], env=env) for kind in taken}
    for kind in AT_START:
        specs[kind] = replace(
            specs[kind], ready_url=specs[kind].ready_url.replace("readyz", "livez")
        )
    addresses = ClientSettings(
        ingest_address=f"{LOOPBACK}:{taken['ingest']['grpc']}",
        scheduler_http_address=f"{LOOPBACK}:{taken['scheduler']['http']}",
    )
    try:
        servers.kill("kafka")
        try:
            await services.start(list(specs.values()))
            for name in AT_START:
                await _lives_and_ends_without_kafka(services, name)
                await services.restart(name)
        finally:
            await servers.restart("kafka")
        for name in AT_START:
            await until_ready(services, name)
        async with open_client(corner.model_copy(update={"client": addresses})) as client:
            policy = Policy(offload_time_ms=0, deletion_lag_ms=-1, block_size=5 * MIB)
            await client.create_stream("late", policy=policy)
            await append(client, "late", numbered(0, 50))
            await client.seal("late")
            async with asyncio.timeout(60):
                while await complete_of(client, "late") != [True]:
                    await asyncio.sleep(0.2)
    finally:
        await services.stop()


async def _lives_and_ends_without_kafka(services: EmbeddedServices, name: str) -> None:
    status, told = await readiness(services, name)
    # A scheduler answers admins all the same.
    ready = name == "scheduler"
    assert (status, told["ready"]) == (200 if ready else 503, ready)
    assert told["checks"] == {"metadata": True, "queue": False}
    assert "kafka.bootstrap_servers" in told["remedies"]["queue"]
    child = services.children[name]
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    assert await child.stop(deadline_s=PROMPT_S), "it had to be killed"
    assert loop.time() - began_s < 3
    assert child.exit_code == 0
    logged = services.log(name).read_text(encoding="utf-8")
    assert "service.stopped" in logged
    assert "service.failed" not in logged


EVERY = ("ingest", "reader", "offloader", "scheduler")


@pytest.mark.parametrize(
    ("away", "missing", "setting"),
    [("zookeeper", "metadata", "ZOOKEEPER__HOSTS"), ("s3", "objects", "object store")],
)
async def test_services_start_without_it_end_without_it_and_go_on_when_it_comes(
    corner: Settings, tmp_path: Path, away: str, missing: str, setting: str
):
    services = EmbeddedServices(run_dir=tmp_path, log_dir=tmp_path)
    ports = Ports(tmp_path / "ports.json")
    hosts, _, root = corner.zookeeper.hosts.partition("/")
    endpoint = corner.s3.endpoint_url
    assert endpoint is not None
    async with Proxy(hosts if away == "zookeeper" else endpoint.removeprefix("http://")) as proxy:
        named = {
            "zookeeper": ("TIERLOG_ZOOKEEPER__HOSTS", f"{proxy.address}/{root}"),
            "s3": ("TIERLOG_S3__ENDPOINT_URL", f"http://{proxy.address}"),
        }
        env = {
            **environment_of(corner),
            **quorum_environment(1, {}),
            "TIERLOG_INGEST__DATA_DIR": str(tmp_path / "data"),
            **dict([named[away]]),
        }
        # Without the bucket appends go on.
        waiting = [name for name in EVERY if (away, name) != ("s3", "ingest")]
        specs = {
            kind: service_spec(kind, ports=ports.take(kind, SERVICE_PORTS[kind]), env=env)
            for kind in waiting
        }
        proxy.drop_requests_and_cut()
        try:
            await services.start(
                [
                    replace(spec, ready_url=spec.ready_url.replace("readyz", "livez"))
                    for spec in specs.values()
                ]
            )
            for name in waiting:
                await _lives_and_ends_without(services, name, missing, setting)
                await services.restart(name)
            proxy.restore()
            for name in waiting:
                await until_ready(services, name)
        finally:
            await services.stop()


async def _lives_and_ends_without(
    services: EmbeddedServices, name: str, missing: str, setting: str
) -> None:
    child, logged = services.children[name], services.log(name)
    async with asyncio.timeout(30):
        while "server.awaited" not in logged.read_text(encoding="utf-8"):
            await asyncio.sleep(0.2)
    status, told = await readiness(services, name)
    assert (status, told["ready"], told["checks"][missing]) == (503, False, False)
    assert setting in told["remedies"][missing]
    assert child.running
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    assert await child.stop(deadline_s=PROMPT_S), "it had to be killed"
    assert loop.time() - began_s < 3
    assert child.exit_code == 0
    lines = logged.read_text(encoding="utf-8").splitlines()
    assert len(lines) < 20
    assert not any("service.failed" in line for line in lines)


async def test_a_server_that_takes_connections_and_hangs_holds_up_no_end(
    corner: Settings, tmp_path: Path
):
    hosts, _, root = corner.zookeeper.hosts.partition("/")
    async with Proxy(hosts) as proxy:
        proxy.hold()
        env = {**environment_of(corner), "TIERLOG_ZOOKEEPER__HOSTS": f"{proxy.address}/{root}"}
        services = EmbeddedServices(run_dir=tmp_path, log_dir=tmp_path)
        ports = Ports(tmp_path / "ports.json").take("reader", SERVICE_PORTS["reader"])
        spec = replace(service_spec("reader", ports=ports, env=env), start_s_max=15)
        live = replace(
            spec, ready_url=spec.ready_url.replace("readyz", "livez"), start_s_max=STARTED_S_MAX
        )
        try:
            with pytest.raises(RetryableError, match="waits for metadata"):
                await services.start([spec])
            await services.start([live])
            loop = asyncio.get_running_loop()
            began_s = loop.time()
            assert await services.children["reader"].stop(deadline_s=PROMPT_S)
            assert loop.time() - began_s < 3
        finally:
            await services.stop()


async def test_what_is_refused_ends_a_start_with_what_to_do(corner: Settings, tmp_path: Path):
    env = {**environment_of(corner), "TIERLOG_S3__ACCESS_KEY": "of-nobody"}
    services = EmbeddedServices(run_dir=tmp_path, log_dir=tmp_path)
    ports = Ports(tmp_path / "ports.json").take("reader", SERVICE_PORTS["reader"])
    with pytest.raises(RetryableError, match=r"(?s)ended with 1 while starting.*s3\.endpoint_url"):
        await services.start([service_spec("reader", ports=ports, env=env)])
