"""One ingest process whose disks can be told to fail, and a writer that remembers everything.

``faulty`` is a node that a test starts, with ``faulty.faults`` to switch (``faulty_ingest``), in
a corner of the metadata store of its own. ``Writer`` appends entries that are all different.
"""

# mypy: disable-error-code="union-attr,var-annotated"

import asyncio
import contextlib
import json
import os
import sys
import uuid
from collections import Counter
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from tests.plugins.faulty_ingest import MODULE, Faults
from tierlog.adapters.memory.clock import SimClock
from tierlog.adapters.rpc.ingest import GrpcStreamControl
from tierlog.adapters.rpc.storage_node import ControlConnector, RemoteStorageControl
from tierlog.adapters.system import SystemIds
from tierlog.adapters.tcp import TcpTransport
from tierlog.adapters.zookeeper.metadata import ZooKeeperMetadata
from tierlog.catalog import Catalog
from tierlog.embedded.nodes import quorum_environment
from tierlog.embedded.ports import Ports
from tierlog.embedded.process import Child, Launch
from tierlog.embedded.server import child_environment
from tierlog.embedded.services import EmbeddedServices, service_spec
from tierlog.format.frame import pack_entries
from tierlog.format.run import build_run
from tierlog.ledger.directory import NodeDirectory
from tierlog.ledger.reader import Tier1ReadHandle
from tierlog.model.errors import IndeterminateError, RetryableError
from tierlog.model.ids import EntryId, NodeId, StreamName
from tierlog.model.policy import MIB
from tierlog.wire.connection import Hello, WireClient
from tierlog.wire.messages import ROLE_PRODUCER

STREAM = StreamName("faults.test")
OTHER = StreamName("faults.deleted")
STORAGE = "TIERLOG_INGEST__STORAGE__"
BASE = {
    f"{STORAGE}JOURNAL_SEGMENT_BYTES": str(4 * MIB),
    f"{STORAGE}JOURNAL_SPARES_MAX": "1",
    f"{STORAGE}SPACE_CHECK_S": "0.2",
    f"{STORAGE}GC_INTERVAL_S": "0.5",
    f"{STORAGE}LEDGER_CACHE_BYTES_MAX": str(4 * MIB),
    "TIERLOG_INGEST__OWNER__APPEND_TIMEOUT_S": "1.5",
}


class Node:
    """One ingest process with faults, its corner of the metadata store, and its folder."""

    def __init__(self, hosts, root, catalog, store):
        self.root = root
        self.data = root / "data"
        self.catalog = catalog
        self.store = store
        self.faults = Faults(root / "faults")
        self.services = EmbeddedServices(run_dir=root, log_dir=root)
        self.ports = Ports(root / "ports.json").take("ingest", ["http", "grpc", "wire"])
        self.env = {
            **BASE,
            "TIERLOG_ZOOKEEPER__HOSTS": hosts,
            **quorum_environment(1, {}),
            "TIERLOG_INGEST__DATA_DIR": str(self.data),
            **self.faults.env,
        }

    @property
    def base(self):
        return f"http://127.0.0.1:{self.ports['http']}"

    @property
    def child(self):
        return self.services.children["ingest"]

    async def start(self, **env):
        """Start it, with settings that stay."""
        self.env |= env
        spec = service_spec("ingest", ports=self.ports, env=self.env)
        await self.services.start([replace(spec, module=MODULE)])

    async def refusal(self, *, ports=None, **env):
        """Start it where it must not start; return its exit code and what its log says."""
        log = self.root / f"refused-{uuid.uuid4()}.log"
        ports = ports or {**self.ports, "http": 0}
        spec = service_spec("ingest", ports=ports, env={**self.env, **env})
        launch = Launch(
            argv=[sys.executable, "-P", "-m", MODULE],
            cwd=Path.cwd(),
            log=log,
            env={**child_environment(os.environ), **spec.env},
        )
        child = Child.spawn(log.stem, launch, run_dir=self.root)
        try:
            async with asyncio.timeout(30):
                return await child.wait(), log.read_text()
        finally:
            if child.running:
                child.kill()

    def log(self, event):
        """Return the log's lines about something."""
        found = []
        for line in self.services.log("ingest").read_text().splitlines():
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                if record.get("event") == event:
                    found.append(record)
        return found

    def crash(self):
        """Return how the last process failed that did, for whoever looks into a failed test."""
        found = [one.get("exception", "")[-2000:] for one in self.log("service.crashed")]
        return found[-1] if found else "no crash is logged"

    async def statistics(self):
        async with aiohttp.ClientSession() as http, http.get(f"{self.base}/v1/status") as answer:
            return (await answer.json())["storage"]

    async def metrics(self):
        async with aiohttp.ClientSession() as http, http.get(f"{self.base}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
        return {name: float(value) for name, value in pairs}

    async def until(self, condition, *, what, seconds=15.0):
        try:
            async with asyncio.timeout(seconds):
                while not await condition():
                    await asyncio.sleep(0.05)
        except TimeoutError:
            pytest.fail(f"{what}: not within {seconds} s; {self.child!r} {self.crash()}")

    @contextlib.asynccontextmanager
    async def control(self):
        control = GrpcStreamControl(f"127.0.0.1:{self.ports['grpc']}", timeout_s=20.0)
        try:
            yield control
        finally:
            await control.close()

    @contextlib.asynccontextmanager
    async def storage(self):
        """The node as owners see it."""
        info = (await self.catalog.nodes.live())[NodeId("node-1")]
        control = RemoteStorageControl(info)
        try:
            yield control
        finally:
            await control.close()

    async def is_closed(self, name=STREAM):
        return all(one.closed for one in (await self.catalog.streams.snapshot(name)).ledgers)

    async def read_all(self, name=STREAM):
        """Return all entries by place, once every ledger is closed."""
        await self.until(lambda: self.is_closed(name), what="ledgers are closed", seconds=30)
        nodes = NodeDirectory(self.catalog.nodes.live, ControlConnector())
        found = {}
        try:
            for listed in (await self.catalog.streams.snapshot(name)).ledgers:
                metadata = await self.catalog.ledgers.get(listed.ledger_id)
                handle = Tier1ReadHandle(listed.ledger_id, metadata, nodes)
                async for runs in handle.read_runs(EntryId(0), listed.last_entry_id):
                    for run in runs:
                        for step, entry in enumerate(run.entries()):
                            found[listed.ledger_id, run.first_entry_id + step] = bytes(entry)
        finally:
            await nodes.close()
        return found


class Writer:
    """Appends entries that are all different, some at once, and keeps what became of each."""

    def __init__(self, node, stream=STREAM, *, width=4, entry_len=4000, pause_s=0.0):
        self._node, self._stream, self._width = node, stream, width
        self._entry_len, self._pause_s = entry_len, pause_s
        self._number = 0
        self._marker = uuid.uuid4().hex.encode()
        self.stop = asyncio.Event()
        self.acknowledged = {}
        self.refused = {}
        self.unknown = {}

    def entries(self, count=4):
        made = []
        for _ in range(count):
            self._number += 1
            head = self._marker + b" %08d " % self._number
            made.append(head + b"x" * (self._number * 37 % self._entry_len))
        return made

    async def append(self, client):
        """One append; tells whether it was acknowledged."""
        entries = self.entries()
        frames, offsets = pack_entries(entries)
        try:
            ranges = await client.append(self._stream, build_run(frames, offsets), deadline_s=10.0)
        except IndeterminateError as error:
            self.unknown |= dict.fromkeys(entries, error)
            return False
        except RetryableError as error:
            self.refused |= dict.fromkeys(entries, error)
            return False
        places = [
            (one.ledger_id, entry_id)
            for one in ranges
            for entry_id in range(one.first_entry_id, one.last_entry_id + 1)
        ]
        assert not self.acknowledged.keys() & set(places), "no id is given twice"
        self.acknowledged.update(zip(places, entries, strict=True))
        return True

    async def _one(self, client):
        while not self.stop.is_set() and not client.closed:
            if not await self.append(client):
                await asyncio.sleep(0.02)
            if self._pause_s:
                await asyncio.sleep(self._pause_s)

    @contextlib.asynccontextmanager
    async def connected(self):
        async with self._node.control() as control, asyncio.TaskGroup() as tasks:
            owner = await control.find_owner(self._stream)
            client = await WireClient.connect(
                TcpTransport(),
                owner.wire_address,
                Hello(cluster_id=owner.cluster_id, role=ROLE_PRODUCER),
                tasks=tasks,
            )
            try:
                yield client
            finally:
                await client.close()

    async def run(self):
        """Append until ``stop``, or until the connection has gone."""
        async with self.connected() as client, asyncio.TaskGroup() as writers:
            for _ in range(self._width):
                writers.create_task(self._one(client))

    @contextlib.asynccontextmanager
    async def beside(self):
        """Append while the block runs, and take the last answers at its end."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.run())
            try:
                yield self
            finally:
                self.stop.set()

    async def got(self, count, *, seconds=20.0):
        """Wait for so many more acknowledged entries."""
        wanted = len(self.acknowledged) + count

        async def is_there():
            return len(self.acknowledged) >= wanted

        await self._node.until(is_there, what=f"{count} more entries", seconds=seconds)

    def check(self, found):
        """All that was acknowledged is there; nothing twice; nothing that was refused."""
        missing = [place for place, entry in self.acknowledged.items() if found.get(place) != entry]
        assert missing == []
        times = Counter(found.values())
        assert [entry[:41] for entry, count in times.items() if count > 1] == []
        assert [entry[:41] for entry in self.refused if entry in times] == []


@pytest.fixture
async def faulty(zookeeper_corner, tmp_path):
    store = await ZooKeeperMetadata.connect(zookeeper_corner)
    catalog = Catalog.over(store, clock=SimClock(), ids=SystemIds())
    made = Node(zookeeper_corner, tmp_path, catalog, store)
    yield made
    made.faults.set()
    await made.services.stop()
    await store.close()
