"""A whole ingest node over memory adapters: the wire, owners, storage and its journal.

Protocols.md section 1, "must hold": an acknowledged entry is never lost, whenever the power goes.
"""

# Ids are plain numbers and names here; what is None fails the test anyway.
# mypy: disable-error-code="index,arg-type,union-attr,var-annotated,assignment"

import asyncio
import contextlib
import random

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.catalog.world import backup_of, put_back
from tests.unit.ledger.small_cluster import STREAM, NoConnector, draft
from tierlog.adapters.memory.clock import SimClock
from tierlog.adapters.memory.files import MemoryDisk
from tierlog.adapters.memory.ids import SeededIds
from tierlog.adapters.memory.metadata import MemoryMetadata
from tierlog.adapters.memory.transport import MemoryNetwork
from tierlog.catalog import Catalog
from tierlog.format import paths
from tierlog.ledger.directory import NodeDirectory
from tierlog.ledger.reader import Tier1ReadHandle
from tierlog.model.errors import IndeterminateError, RefusedError, RetryableError
from tierlog.model.ledger import LedgerState
from tierlog.model.policy import Policy
from tierlog.ports.files import DiskFailedError
from tierlog.runtime.sections import WireSettings
from tierlog.runtime.settings import IngestSettings, OwnerSettings, StorageSettings
from tierlog.wire.connection import Hello, WireClient
from tierlog.wire.messages import ROLE_PRODUCER
from tierlog_ingest.app import FrontAddresses, IngestNode, NodePorts
from tierlog_ingest.metrics import NodeCollector

SETTINGS = IngestSettings(
    node_id="n1",
    storage=StorageSettings(journal_segment_bytes=256 * 1024, free_bytes_min=0),
    owner=OwnerSettings(ensemble_size=1, write_quorum=1, ack_quorum=1),
)


@contextlib.asynccontextmanager
async def no_front(node):
    yield FrontAddresses("n1:2", "n1:3")


class World:
    """What outlives the node: its disk, the metadata and the network."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.disk = MemoryDisk(self.rng)
        self.log_disks: tuple[MemoryDisk, ...] = ()
        self.metadata = MemoryMetadata()
        self.network = MemoryNetwork(latency_s=lambda: self.rng.uniform(0, 0.001))
        self.clock = SimClock()
        self.ids = SeededIds(self.rng)

    def catalog(self):
        return Catalog.over(self.metadata.connect(), clock=self.clock, ids=self.ids)

    def node(self):
        store = self.metadata.connect()
        ports = NodePorts(
            files=self.disk.mount(),
            transport=self.network.transport("n1"),
            store=store,
            clock=self.clock,
            ids=self.ids,
            connect=lambda _hello, _tasks: NoConnector(),
            ledger_dirs=tuple(one.mount() for one in self.log_disks),
        )
        return IngestNode(ports, settings=SETTINGS, wire=WireSettings(), front=no_front), store

    @contextlib.asynccontextmanager
    async def running(self, *, crash: bool):
        """Run a node; then drain it, or let the power go."""
        node, store = self.node()
        stop = asyncio.Event()
        life = asyncio.get_running_loop().create_task(node.run(stop))
        await node.ready.wait()
        yield node
        if crash:
            self.disk.crash()
            self.network.crash("n1")
            life.cancel()
            store.expire_session()
        else:
            stop.set()
        await asyncio.wait({life})
        if not crash:
            life.result()

    async def client(self, node, tasks):
        return await WireClient.connect(
            self.network.transport("producer"),
            node.info.wire_address,
            Hello(cluster_id=node.cluster.cluster_id, role=ROLE_PRODUCER),
            tasks=tasks,
        )


async def append_some(world, node, count, confirmed):
    """Append with many in flight until ``count`` were sent; note what was acknowledged."""

    async def one(client, entry):
        try:
            (where,) = await client.append(STREAM, draft(entry), deadline_s=10.0)
        except (IndeterminateError, RetryableError):
            return
        confirmed[where.ledger_id, where.first_entry_id] = entry

    async with asyncio.TaskGroup() as tasks:
        client = await world.client(node, tasks)
        for number in range(count):
            entry = b"%d-%d" % (len(confirmed), number) * world.rng.randint(1, 200)
            tasks.create_task(one(client, entry))
            if world.rng.random() < 0.1:
                await asyncio.sleep(world.rng.uniform(0, 0.01))
        await asyncio.sleep(world.rng.uniform(0, 0.02))
        await client.close()


@pytest.mark.covers("A03", "D09", "D18", "D37")
@pytest.mark.parametrize("seed", range(8))
def test_power_goes_in_mid_append_and_nothing_acknowledged_is_lost(seed):
    async def main():
        world = World(seed)
        await world.catalog().streams.ensure_roots()
        await world.catalog().nodes.ensure_cluster()
        await world.catalog().streams.create(STREAM, policy=Policy(ledger_entries_max=50))
        confirmed = {}
        for _ in range(4):
            async with world.running(crash=True) as node:
                await append_some(world, node, 120, confirmed)
        assert len(confirmed) > 100
        async with world.running(crash=False) as node:
            await asyncio.sleep(5)
            catalog = world.catalog()
            snapshot = await catalog.streams.snapshot(STREAM)
            assert all(one.closed for one in snapshot.ledgers)
            nodes = NodeDirectory(
                catalog.nodes.live, NoConnector(), local={node.node_id: node.storage}
            )
            for (ledger_id, entry_id), entry in confirmed.items():
                metadata = await catalog.ledgers.get(ledger_id)
                assert metadata.state is LedgerState.CLOSED
                handle = Tier1ReadHandle(ledger_id, metadata, nodes)
                async for (run,) in handle.read_runs(entry_id, entry_id):
                    assert bytes(run.entry(entry_id)) == entry

    run_virtual(main())


def test_a_failed_disk_ends_the_node():
    async def main():
        world = World(1)
        await world.catalog().streams.ensure_roots()
        await world.catalog().nodes.ensure_cluster()
        await world.catalog().streams.create(STREAM)
        confirmed = {}

        async def until_it_fails():
            async with world.running(crash=False) as node:
                await append_some(world, node, 5, confirmed)
                assert len(confirmed) == 5
                world.disk.fail_syncs = True
                await append_some(world, node, 5, confirmed)

        with pytest.raises(BaseExceptionGroup) as caught:
            await until_it_fails()
        assert len(confirmed) == 5, "nothing was acknowledged after it"
        assert caught.group_contains(DiskFailedError)

    run_virtual(main())


@pytest.mark.covers("D58")
def test_a_ledger_that_was_deleted_from_the_metadata_is_freed_and_no_other():
    async def main():
        world = World(2)
        catalog = world.catalog()
        await catalog.streams.ensure_roots()
        await catalog.nodes.ensure_cluster()
        await catalog.streams.create(STREAM, policy=Policy(ledger_entries_max=2))
        async with world.running(crash=False) as node:
            await append_some(world, node, 6, {})
            held = await node.storage.list_ledgers()
            path = paths.ledger_path(held[1])
            await catalog.store.delete(path, version=-1)
            await asyncio.sleep(200)
            assert await node.storage.list_ledgers() == [held[0], held[2]]
            assert node.statistics()["gc_alarm"] is None

    run_virtual(main())


@pytest.mark.covers("D59")
def test_a_node_says_that_zookeeper_came_back_from_an_old_backup_and_frees_nothing():
    async def main():
        world = World(2)
        catalog = world.catalog()
        await catalog.streams.ensure_roots()
        await catalog.nodes.ensure_cluster()
        await catalog.streams.create(STREAM, policy=Policy(ledger_entries_max=2))
        async with world.running(crash=False) as node:
            await append_some(world, node, 2, {})
            await asyncio.sleep(100)
            backup = backup_of(world.metadata)
            await append_some(world, node, 6, {})
            await asyncio.sleep(100)
            held = await node.storage.list_ledgers()
            assert node.statistics()["gc_alarm"] is None
        for _ in range(2):
            # Its session's end is forgotten, too: none of its nodes is there.
            put_back(world.metadata, backup)
            await catalog.nodes.ensure_cluster(ledger_id_base=1000)
            async with world.running(crash=False) as node:
                await asyncio.sleep(200)
                assert set(held) <= set(await node.storage.list_ledgers())
                assert "tierlog node trust-metadata" in str(node.statistics()["gc_alarm"])
                shown = {one.name: one.samples[0].value for one in NodeCollector(node).collect()}
                assert shown["tierlog_storage_gc_stopped"] == 1

    run_virtual(main())


def test_a_directory_of_another_cluster_is_refused():
    async def main():
        world = World(3)
        async with world.running(crash=False):
            pass
        world.metadata = MemoryMetadata()
        node, _ = world.node()
        with pytest.raises(RefusedError, match="belongs to node n1 of cluster"):
            await node.run(asyncio.Event())

    run_virtual(main())


def test_others_learn_how_much_room_a_node_has_left():
    async def main():
        world = World(1)
        async with world.running(crash=False):
            told = (await world.catalog().nodes.live())["n1"].free_bytes
            world.disk.capacity_bytes -= told // 16
            await asyncio.sleep(100)
            assert (await world.catalog().nodes.live())["n1"].free_bytes == told
            world.disk.capacity_bytes //= 4
            await asyncio.sleep(100)
            assert (await world.catalog().nodes.live())["n1"].free_bytes < told / 3

    run_virtual(main())


def test_the_room_of_a_node_is_where_its_entry_logs_go():
    async def main():
        world = World(1)
        world.log_disks = (MemoryDisk(world.rng), MemoryDisk(world.rng))
        world.disk.capacity_bytes = 2**30
        world.log_disks[0].capacity_bytes = 2**33
        world.log_disks[1].capacity_bytes = 2**36
        async with world.running(crash=False):
            told = (await world.catalog().nodes.live())["n1"].free_bytes
            assert 2**35 < told <= 2**36
            world.log_disks[1].capacity_bytes = 2**32
            await asyncio.sleep(100)
            told = (await world.catalog().nodes.live())["n1"].free_bytes
            assert 2**32 < told <= 2**33

    run_virtual(main())
