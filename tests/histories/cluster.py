"""Ingest nodes and a reader as processes over real servers, and all that can happen to a node.

Owns one cluster in a corner of the servers: every node has disks that can be told to be slow
(``faulty_ingest``) and a way of its own to ZooKeeper, which can be cut. Does not own when what
happens (``nemeses``).
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Self

import aiohttp
from pydantic import SecretStr

from tests.contracts.proxy import Proxy
from tests.histories import defective_ingest
from tests.plugins import faulty_ingest
from tierlog.adapters.memory.clock import SimClock
from tierlog.adapters.system import SystemIds
from tierlog.adapters.zookeeper.metadata import ZooKeeperMetadata
from tierlog.catalog import Catalog
from tierlog.embedded.nodes import NodePlace, quorum_environment
from tierlog.embedded.ports import LOOPBACK, Ports
from tierlog.embedded.services import (
    SERVICE_PORTS,
    EmbeddedServices,
    ServiceSpec,
    server_environment,
    service_spec,
)
from tierlog.model.errors import RetryableError
from tierlog.runtime.settings import ClientSettings, S3Settings, Settings, ZooKeeperSettings

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tierlog.embedded.supervisor import EmbeddedServers

SESSION_S: Final = 4.0
OWNER_S_MAX: Final = 1.0
START_S_MAX: Final = 120.0
WHOLE_S_MAX: Final = 120.0
REPLICATION: Final = "TIERLOG_INGEST__REPLICATION__"
QUICK: Final = {
    f"{REPLICATION}INTERVAL_S": "0.5",
    f"{REPLICATION}LOST_NODE_DELAY_S": "1",
    f"{REPLICATION}GRACE_S": "1",
    f"{REPLICATION}SCAN_INTERVAL_S": "1",
    f"{REPLICATION}BACKOFF_S_FIRST": "0.5",
}
"""Lost copies are made anew soon, so that a history can lose a disk more than once."""
READER: Final = "reader"


class Node:
    """One ingest node: what can be done to it."""

    def __init__(self, place: NodePlace, root: Path, proxy: Proxy) -> None:
        self.name = place.process
        self.node_id = f"node-{place.number}"
        self.place = place
        self.data = root / place.folder
        self.faults = faulty_ingest.Faults(root / f"faults-{place.number}")
        self.proxy = proxy

    def __repr__(self) -> str:
        return f"<Node {self.name}>"


class HistoryCluster:
    """An asynchronous context manager: its nodes run while it is entered."""

    def __init__(
        self,
        servers: EmbeddedServers,
        root: Path,
        *,
        nodes: int,
        defect: str = "",
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Take what to break in the nodes' code as ``defect``, and settings of theirs."""
        self.servers = servers
        self.root = root
        self.nodes: list[Node] = []
        self._wanted = nodes
        self._defect = defect
        self._env = env or {}
        self._number_last = 0
        self._corner = f"history-{uuid.uuid4()}"
        self._ports = Ports(root / "ports.json")
        self.services = EmbeddedServices(run_dir=root, log_dir=root)
        self._reader_ports = self._ports.take(READER, SERVICE_PORTS[READER])
        self._proxies: list[Proxy] = []
        self._zookeeper = servers.endpoints.zookeeper_hosts

    async def __aenter__(self) -> Self:
        try:
            specs = [self._spec_of(await self._new_node()) for _ in range(self._wanted)]
            await self.services.start([*specs, self._reader_spec()])
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for node in self.nodes:
            node.faults.set()
            self.resume(node)
        try:
            await self.services.stop()
        finally:
            for proxy in self._proxies:
                await proxy.stop()

    @property
    def settings(self) -> Settings:
        """A client's view: the addresses of all nodes there are."""
        specs = self.services.specs
        ingest = ",".join(f"{LOOPBACK}:{specs[node.name].ports['grpc']}" for node in self.nodes)
        return Settings(
            zookeeper=ZooKeeperSettings(hosts=f"{self._zookeeper}/{self._corner}"),
            s3=self._s3(),
            client=ClientSettings(
                ingest_address=ingest,
                reader_http_address=f"{LOOPBACK}:{self._reader_ports['http']}",
                scheduler_http_address=f"{LOOPBACK}:1",  # nothing here asks it
                timeout_s=10.0,
            ),
        )

    async def owner_of(self, stream: str) -> Node | None:
        """Return the node that owns a stream, or None where nobody tells at once."""
        for node in self.nodes:
            base = f"http://{LOOPBACK}:{self.services.specs[node.name].ports['http']}"
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, KeyError):
                async with (
                    asyncio.timeout(OWNER_S_MAX),
                    aiohttp.ClientSession() as http,
                    http.get(f"{base}/v1/streams/{stream}/owner") as answer,
                ):
                    name = (await answer.json())["node_id"]
                    return next((one for one in self.nodes if one.node_id == name), None)
        return None

    def kill(self, node: Node) -> None:
        """End its process with SIGKILL."""
        self.services.kill(node.name)

    async def restart(self, node: Node) -> None:
        """Start it again; ready when this returns. Without ZooKeeper it does not start at once."""
        async with asyncio.timeout(START_S_MAX):
            while True:
                try:
                    await self.services.restart(node.name)
                except RetryableError:
                    await asyncio.sleep(0.5)
                else:
                    return

    async def drain(self, node: Node) -> None:
        """End its process with SIGTERM, and wait."""
        await self.services.children[node.name].stop(deadline_s=30.0)

    def pause(self, node: Node) -> None:
        """Stop its process where it is (SIGSTOP)."""
        self.services.children[node.name].signal(signal.SIGSTOP)

    def resume(self, node: Node) -> None:
        """Let it go on (SIGCONT)."""
        if (child := self.services.children.get(node.name)) is not None:
            child.signal(signal.SIGCONT)

    def cut_off(self, node: Node) -> None:
        """Cut it from ZooKeeper, so that its session expires; `join` mends it."""
        node.proxy.drop_requests_and_cut()
        node.proxy.cut()

    def join(self, node: Node) -> None:
        """Let it reach ZooKeeper again."""
        node.proxy.restore()

    async def replace(self, node: Node) -> Node:
        """Kill it, wipe its disk, and start another one in its stead, with an id of its own."""
        self.kill(node)
        shutil.rmtree(node.data)
        self.nodes.remove(node)
        self.services.forget(node.name)
        made = await self._new_node()
        await self.services.add(self._spec_of(made))
        return made

    async def until_whole(self) -> None:
        """Wait until no ledger names a node that is gone, and none is queued for copies."""
        store = await ZooKeeperMetadata.connect(f"{self._zookeeper}/{self._corner}")
        try:
            catalog = Catalog.over(store, clock=SimClock(), ids=SystemIds())
            async with asyncio.timeout(WHOLE_S_MAX):
                while not await self._is_whole(catalog):
                    await asyncio.sleep(0.5)
        finally:
            await store.close()

    async def _is_whole(self, catalog: Catalog) -> bool:
        here = {node.node_id for node in self.nodes}
        try:
            for name in await catalog.streams.names():
                for listed in (await catalog.streams.snapshot(name)).ledgers:
                    metadata = await catalog.ledgers.get(listed.ledger_id)
                    if metadata is None or not all(
                        here.issuperset(one.ensemble) for one in metadata.segments
                    ):
                        return False
            return not await catalog.underreplicated.list()
        except RetryableError:  # ZooKeeper may be away
            return False

    async def restart_zookeeper(self, away_s: float) -> None:
        """Kill ZooKeeper, and start it again after a while with its data."""
        self.servers.kill("zookeeper")
        try:
            await asyncio.sleep(away_s)
        finally:
            await self.servers.restart("zookeeper")

    async def _new_node(self) -> Node:
        self._number_last += 1
        proxy = await Proxy(self._zookeeper).__aenter__()
        self._proxies.append(proxy)
        alone = self._wanted == 1
        node = Node(NodePlace(number=self._number_last, alone=alone), self.root, proxy)
        node.faults.set()
        self.nodes.append(node)
        return node

    def _spec_of(self, node: Node) -> ServiceSpec:
        env = {
            **server_environment(self.servers.endpoints),
            **QUICK,
            **self._env,
            **quorum_environment(self._wanted, {}),
            **node.place.env,
            **node.faults.env,
            **self._corner_env(node.proxy.address),
            "TIERLOG_INGEST__DATA_DIR": str(node.data),
            defective_ingest.VARIABLE: self._defect,
        }
        ports = self._ports.take(node.name, SERVICE_PORTS["ingest"])
        module = defective_ingest.MODULE if self._defect else faulty_ingest.MODULE
        return replace(service_spec("ingest", ports=ports, env=env, name=node.name), module=module)

    def _reader_spec(self) -> ServiceSpec:
        env = server_environment(self.servers.endpoints) | self._corner_env(self._zookeeper)
        return service_spec(READER, ports=self._reader_ports, env=env)

    def _corner_env(self, zookeeper: str) -> dict[str, str]:
        return {
            "TIERLOG_ZOOKEEPER__HOSTS": f"{zookeeper}/{self._corner}",
            "TIERLOG_ZOOKEEPER__SESSION_TIMEOUT_S": str(SESSION_S),
            "TIERLOG_S3__KEY_PREFIX": self._corner,
            "TIERLOG_REDIS__KEY_PREFIX": f"{self._corner}:",
        }

    def _s3(self) -> S3Settings:
        found = self.servers.endpoints
        return S3Settings(
            endpoint_url=found.s3_endpoint_url,
            access_key=found.s3_access_key,
            secret_key=SecretStr(found.s3_secret_key),
            bucket=found.s3_bucket,
            key_prefix=self._corner,
        )
