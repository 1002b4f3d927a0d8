"""The four services as processes over the session's servers, started once for the whole session.

`cluster.settings` is a client's view, `cluster.state_dir` what the command line takes;
`cluster.kill(name)` and `await cluster.restart(name, **env)` break and mend one of "ingest",
"reader", "offloader", "scheduler". A test that broke one brings it back before it ends. Tests
keep apart by streams of their own. Times are short: a pass of the scheduler takes half a second.
`signed_cluster` is a second one, for a module's tests: its owners sign what they write.
`three_nodes` has three ingest nodes, "ingest-1" to "ingest-3" (ids node-1 to node-3), at 3/3/2;
`start_nodes(count, **env)` makes more such clusters, each apart from all others.
"""

from __future__ import annotations

import asyncio
import base64
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tierlog.client.endpoints import FILE_NAME, EndpointsFile
from tierlog.embedded.nodes import KIND, places_of, quorum_environment
from tierlog.embedded.ports import LOOPBACK
from tierlog.embedded.services import (
    SERVICE_PORTS,
    EmbeddedServices,
    ServiceSpec,
    server_environment,
    service_spec,
)
from tierlog.runtime.settings import (
    ClientSettings,
    KafkaSettings,
    RedisSettings,
    S3Settings,
    Settings,
    ZooKeeperSettings,
)

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator, Mapping

    from tierlog.embedded.supervisor import EmbeddedServers

NAME = "cluster"
AWAY_S_MAX = 90.0
_EACH_ONE = {kind: kind for kind in SERVICE_PORTS if kind != KIND}
QUICK = {
    "TIERLOG_SCHEDULER__INTERVAL_S": "0.5",
    "TIERLOG_SCHEDULER__REQUEST_AGAIN_S": "3",
    "TIERLOG_SCHEDULER__SWEEP_AGAIN_S": "2",
    # No sweep is the last before the longest request is over: 14 s with 64 MiB.
    "TIERLOG_S3__REQUEST_S_MAX": "10",
    "TIERLOG_S3__BYTES_PER_S_MIN": str(16 * 2**20),
    "TIERLOG_INGEST__STORAGE__GC_INTERVAL_S": "1",
    "TIERLOG_INGEST__STORAGE__GC_QUARANTINE_S": "1",
    "TIERLOG_INGEST__STORAGE__GC_SHARE_MAX": "1",
}


class ServiceCluster:
    """Four running services, ingest of one or several nodes, and what breaks and mends them."""

    def __init__(
        self,
        servers: EmbeddedServers,
        state_dir: Path,
        *,
        name: str = NAME,
        nodes: int = 1,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.servers = servers
        self.state_dir = state_dir
        for folder in ("run", "logs", "data"):
            (state_dir / folder).mkdir(parents=True)
        self.services = EmbeddedServices(run_dir=state_dir / "run", log_dir=state_dir / "logs")
        self._places = {place.process: place for place in places_of(nodes, ())}
        self.nodes = list(self._places)
        """The process names of the ingest nodes."""
        self._kinds = {**dict.fromkeys(self.nodes, KIND), **_EACH_ONE}
        self._ports = {
            process: servers.take_ports(f"{name}-{process}", SERVICE_PORTS[kind])
            for process, kind in self._kinds.items()
        }
        found = servers.endpoints
        self.env = {
            **server_environment(found),
            **QUICK,
            "TIERLOG_ZOOKEEPER__HOSTS": f"{found.zookeeper_hosts}/{name}",
            "TIERLOG_KAFKA__TOPIC_PREFIX": name,
            "TIERLOG_S3__BUCKET": name,
            **quorum_environment(nodes, env or {}),
            **(env or {}),
        }
        self.settings = Settings(
            state_dir=state_dir,
            s3=S3Settings.model_validate(
                {
                    "endpoint_url": found.s3_endpoint_url,
                    "access_key": found.s3_access_key,
                    "secret_key": found.s3_secret_key,
                    "bucket": name,
                }
            ),
            zookeeper=ZooKeeperSettings(hosts=self.env["TIERLOG_ZOOKEEPER__HOSTS"]),
            kafka=KafkaSettings(bootstrap_servers=found.kafka_bootstrap, topic_prefix=name),
            redis=RedisSettings(url=found.redis_url),
            client=ClientSettings(
                # So long a killed service may take to be there again; not what a test is about.
                timeout_s=AWAY_S_MAX,
                ingest_address=",".join(self.address(node, "grpc") for node in self.nodes),
                reader_http_address=self.address("reader", "http"),
                scheduler_http_address=self.address("scheduler", "http"),
            ),
        )

    def address(self, name: str, purpose: str) -> str:
        """Return host:port of a service; "ingest" is the first node."""
        process = self.nodes[0] if name == KIND else name
        return f"{LOOPBACK}:{self._ports[process][purpose]}"

    def data_dir(self, node: str = KIND) -> Path:
        """Return the folder of an ingest node."""
        folder = self.state_dir / "data"
        return folder if len(self.nodes) == 1 else folder / self._places[node].folder

    def _spec(self, process: str) -> ServiceSpec:
        env = dict(self.env)
        if process in self._places:
            own = {"TIERLOG_INGEST__DATA_DIR": str(self.data_dir(process))}
            env = own | self._places[process].env | env
        kind, ports = self._kinds[process], self._ports[process]
        return service_spec(kind, ports=ports, env=env, name=process)

    async def start(self) -> None:
        """Start all, and write the addresses as `tierlog up` does."""
        await self.services.start([self._spec(process) for process in self._kinds])
        s3 = self.settings.s3
        assert s3.secret_key is not None
        written = EndpointsFile(
            pid=1,
            state_dir=str(self.state_dir),
            services={
                name: {purpose: self.address(name, purpose) for purpose in SERVICE_PORTS[kind]}
                for name, kind in {KIND: KIND, **self._kinds}.items()
            },
            servers={
                "s3": s3.endpoint_url or "",
                "zookeeper": self.env["TIERLOG_ZOOKEEPER__HOSTS"],
                "s3_bucket": s3.bucket,
                "s3_access_key": s3.access_key or "",
                "s3_secret_key": s3.secret_key.get_secret_value(),
            },
        )
        (self.state_dir / FILE_NAME).write_text(written.model_dump_json(), encoding="utf-8")

    async def stop(self) -> None:
        """Stop all."""
        await self.services.stop()

    def kill(self, name: str) -> None:
        """SIGKILL a service."""
        self.services.kill(name)

    async def restart(self, name: str, **env: str) -> None:
        """Start a service again; settings that are given hold until the next restart."""
        begun_s = time.monotonic()
        await self.services.restart(name, env=env)
        print(f"[cluster] {name} was there again after {time.monotonic() - begun_s:.1f} s")

    async def until(
        self, condition: Callable[[], Awaitable[bool]], *, what: str, timeout_s: float = 60.0
    ) -> None:
        """Wait until a condition holds."""
        try:
            async with asyncio.timeout(timeout_s):
                while not await condition():
                    await asyncio.sleep(0.1)
        except TimeoutError:
            pytest.fail(f"{what}: not within {timeout_s:.0f} s")


def _fresh(name: str) -> str:
    """Return a name of a cluster that no other had: its nodes are others than theirs."""
    return f"{name}-{uuid.uuid4().hex[:12]}"


def run_apart(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine on a loop of its own. (Plugins don't import each other.)"""
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(work)
    finally:
        loop.close()


@pytest.fixture(scope="session")
def cluster(
    servers: EmbeddedServers, tmp_path_factory: pytest.TempPathFactory, pytestconfig: Any
) -> Iterator[ServiceCluster]:
    running = ServiceCluster(servers, tmp_path_factory.mktemp("cluster"))
    run_apart(running.start())
    yield running
    run_apart(running.stop())


@pytest.fixture(scope="module")
def signed_cluster(
    servers: EmbeddedServers, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServiceCluster]:
    env = {
        "TIERLOG_KEYS__K1": base64.b64encode(bytes(range(32))).decode(),
        "TIERLOG_INGEST__OWNER__LEDGER_KEY_ID": "k1",
    }
    folder = tmp_path_factory.mktemp("signed")
    running = ServiceCluster(servers, folder, name=_fresh("signed"), env=env)
    run_apart(running.start())
    yield running
    run_apart(running.stop())


StartNodes = Callable[..., Awaitable[ServiceCluster]]


@pytest.fixture(scope="module")
def three_nodes(
    servers: EmbeddedServers, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServiceCluster]:
    folder = tmp_path_factory.mktemp("three")
    running = ServiceCluster(servers, folder, name=_fresh("three"), nodes=3)
    run_apart(running.start())
    yield running
    run_apart(running.stop())


@pytest.fixture
async def start_nodes(servers: EmbeddedServers, tmp_path: Path) -> AsyncIterator[StartNodes]:
    """Give what starts a cluster of so many nodes; all are stopped at the end of the test."""
    started: list[ServiceCluster] = []

    async def start(count: int = 3, **env: str) -> ServiceCluster:
        name = _fresh("nodes")
        made = ServiceCluster(servers, tmp_path / name, name=name, nodes=count, env=env)
        started.append(made)
        await made.start()
        return made

    yield start
    for one in started:
        await one.stop()
