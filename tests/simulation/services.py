"""The simulated processes: the services' own logic over the memory twins.

What stands in a service's ``main`` module, sockets and signals, is left out; everything below it
is the real code.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from uuid import UUID

from tests.simulation.checker import Checker
from tests.simulation.model import Position as At
from tests.simulation.processes import SimProcess, Tasks
from tests.simulation.remote import ControlConnector, Network, WireNodeConnector
from tests.simulation.servers import WatchedBucket, WatchedMetadata
from tests.simulation.trace import Trace
from tierlog.adapters.memory.attributes import MemoryAttributes
from tierlog.adapters.memory.cache import MemoryCache
from tierlog.adapters.memory.events import MemoryEvents, MemoryEventSource
from tierlog.adapters.memory.files import MemoryDisk
from tierlog.adapters.memory.ids import SeededIds
from tierlog.adapters.memory.metadata import MemoryMetadataClient
from tierlog.catalog import Catalog
from tierlog.format.frame import pack_entries
from tierlog.format.run import build_run
from tierlog.ledger.directory import NodeConnector, NodeDirectory
from tierlog.ledger.keys import LedgerKeys
from tierlog.ledger.reader import ReadHandle, Tier1ReadHandle
from tierlog.model.errors import IndeterminateError, Reason, RefusedError, TierlogError
from tierlog.model.ids import LedgerId, NodeId, StreamName
from tierlog.model.ledger import LedgerMetadata
from tierlog.model.position import Edge, Position
from tierlog.offload.driver import BlockOffloader, Tier2Settings
from tierlog.offload.manifests import BucketGuard, ManifestLimits, ManifestStore
from tierlog.offload.messages import Stationery, Topics
from tierlog.offload.ranges import RangeLimits, Ranges
from tierlog.ports.retrying import Retries, RetryLimits
from tierlog.ports.storage_node import StorageNodeClient, StorageNodeControl
from tierlog.runtime.sections import ReplicationSettings, WireSettings
from tierlog.runtime.settings import (
    IngestSettings,
    ListenSettings,
    OwnerSettings,
    StorageSettings,
)
from tierlog.runtime.worker import WorkerLimits, run_worker
from tierlog.wire.connection import Hello, WireClient
from tierlog.wire.messages import ROLE_PRODUCER
from tierlog_ingest.app import FrontAddresses, IngestNode, NodePorts, Tier2
from tierlog_offloader.worker import OffloadWorker, WorkerSettings
from tierlog_reader.cache.layout import Layout
from tierlog_reader.cache.store import StreamingCache
from tierlog_reader.cached_ranges import CachedRanges
from tierlog_reader.chunk import Budget
from tierlog_reader.source import StreamSource
from tierlog_reader.tail import TailLimits, TailMemory
from tierlog_reader.tier1 import StorageNodeTier
from tierlog_reader.tier2 import ObjectTier, Tier2Limits
from tierlog_reader.views import Views
from tierlog_scheduler.manifests import BucketManifests
from tierlog_scheduler.scheduler import Scheduler, SchedulerLimits

BUCKET = "bucket"
TOPICS = Topics.of("sim")
GROUP = "offloaders"
KEYS = LedgerKeys({"k1": bytes(range(32))})
"""Every process has them; a run's size tells whether owners use one."""
SMALL_RANGES = RangeLimits(range_bytes=256, in_flight_max=4, kept_bytes_max=4096)
SMALL_CACHE = Layout(64, 8)
CACHE_BYTES = 16 * 1024
"""So little that a reader's own ranges send each other away, beside what indexes take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """What all processes share."""

    seed: int
    trace: Trace
    tasks: Tasks
    metadata: WatchedMetadata
    bucket: WatchedBucket
    queue: MemoryEvents
    network: Network
    cache: MemoryCache
    attributes: MemoryAttributes
    checker: Checker
    stream: StreamName

    def rng(self, name: str) -> random.Random:
        """Return a source of chance that depends on the seed and the name alone."""
        return random.Random(f"{self.seed}/{name}")


class Service(SimProcess):
    """A process with a session at the metadata store."""

    def __init__(self, name: str, servers: Servers) -> None:
        super().__init__(
            name, trace=servers.trace, tasks=servers.tasks, rng=servers.rng(f"{name}/faults")
        )
        self.servers = servers
        self.store: MemoryMetadataClient | None = None
        self.ids = SeededIds(servers.rng(f"{name}/ids"))
        self.stop = asyncio.Event()

    def connect(self) -> Catalog:
        """Open a session."""
        self.store = self.servers.metadata.connect(self.faults)
        return Catalog.over(self.store, clock=self.clock, ids=self.ids)

    def start(self) -> None:
        self.stop = asyncio.Event()
        super().start()

    def release(self) -> None:
        if self.store is not None:
            self.store.abandon()
            self.store = None
        self.servers.network.memory.crash(self.name)

    def nodes(self, catalog: Catalog) -> NodeDirectory[StorageNodeControl]:
        """Return clients of storage nodes for who only reads."""
        connector = ControlConnector(self.servers.network, self)
        return NodeDirectory(catalog.nodes.live, connector)


class IngestProcess(Service):
    """Owner and storage node; its disk outlives it."""

    def __init__(
        self,
        name: str,
        servers: Servers,
        *,
        owner: OwnerSettings,
        replication: ReplicationSettings,
    ) -> None:
        super().__init__(name, servers)
        self.disk = MemoryDisk(servers.rng(f"{name}/disk"))
        self.node: IngestNode | None = None
        self.settings = IngestSettings(
            node_id=name,
            listen=ListenSettings(host=name),
            storage=StorageSettings(
                journal_segment_bytes=16 * 1024,
                checkpoint_interval_s=20.0,
                gc_interval_s=60.0,
                gc_quarantine_s=30.0,
                free_bytes_min=4096,
                free_bytes_resume=8192,
            ),
            owner=owner,
            replication=replication,
        )
        servers.network.hosts[NodeId(name)] = self

    @property
    def process(self) -> SimProcess:
        """See ``Host``."""
        return self

    @property
    def storage(self) -> StorageNodeControl | None:
        """See ``Host``."""
        return self.node.storage if self.node is not None and self.node.info is not None else None

    def empty_ledgers(self) -> set[int]:
        """Return the ledgers that are open here and have no entry: only an append ends that."""
        if self.storage is None or self.node is None:
            return set()
        owned = self.node.owners.statistics()
        return {
            int(str(one["open_ledger"]))
            for one in owned
            if one["open_ledger"] is not None and one["ledger_entries"] == 0
        }

    async def main(self) -> None:
        self.connect()
        assert self.store is not None
        self.node = None

        def connect(hello: Hello, tasks: asyncio.TaskGroup) -> NodeConnector[StorageNodeClient]:
            return WireNodeConnector(self.servers.network, self, hello, tasks)

        ports = NodePorts(
            files=self.disk.mount(self.faults),
            transport=self.servers.network.memory.transport(self.name),
            store=self.store,
            clock=self.clock,
            ids=self.ids,
            connect=connect,
            tier2=lambda *_: Tier2(
                index=self.servers.attributes.connect(self.faults), open_ledger=_not_in_tier2
            ),
        )
        node = IngestNode(
            ports, settings=self.settings, wire=WireSettings(), front=self._front, keys=KEYS
        )
        async with asyncio.TaskGroup() as tasks:
            telling = tasks.create_task(self._tell_ready(node))
            await node.run(self.stop)
            telling.cancel()

    async def _tell_ready(self, node: IngestNode) -> None:
        await node.ready.wait()
        self.ready.set()

    @contextlib.asynccontextmanager
    async def _front(self, node: IngestNode) -> AsyncIterator[FrontAddresses]:
        self.node = node
        yield FrontAddresses(f"{self.name}:grpc", f"{self.name}:http")

    def release(self) -> None:
        super().release()
        self.node = None
        self.disk.crash()


async def _not_in_tier2(ledger_id: LedgerId) -> ReadHandle:
    """Refuse, as for any ledger without a copy: one of a stream with attributes has none here."""
    raise RefusedError(
        f"ledger {ledger_id} has no copy in tier 2",
        reason=Reason.LEDGER_NOT_FOUND,
        remedy="The ledger is looked up again",
    )


class WorkerProcess(Service):
    """An offloader."""

    def __init__(self, name: str, servers: Servers) -> None:
        super().__init__(name, servers)
        self.source: MemoryEventSource | None = None
        self.completed = 0

    async def main(self) -> None:
        servers = self.servers
        catalog = self.connect()
        cluster = await catalog.nodes.ensure_cluster()
        nodes = self.nodes(catalog)

        def open_ledger(
            ledger_id: LedgerId, metadata: LedgerMetadata
        ) -> Tier1ReadHandle[StorageNodeControl]:
            return Tier1ReadHandle(ledger_id, metadata, nodes, keys=KEYS)

        worker = OffloadWorker(
            catalog=catalog,
            open_ledger=open_ledger,
            offloader=make_offloader(self, cluster.cluster_id),
            guard=BucketGuard(make_manifests(self, cluster.cluster_id)),
            publisher=servers.queue.publisher(self.faults),
            stationery=Stationery(TOPICS, source=self.name, clock=self.clock, ids=self.ids),
            clock=self.clock,
            ids=self.ids,
            settings=WorkerSettings(name=self.name),
        )
        self.source = servers.queue.source([TOPICS.requested], group=GROUP, faults=self.faults)
        self.ready.set()
        limits = WorkerLimits(in_flight_max=2, drain_s_max=10.0)
        await run_worker(self.source, worker.handle, stop=self.stop, limits=limits)

    def leave_group(self) -> None:
        """Be taken for dead by the queue: others get this worker's partitions."""
        if self.source is not None:
            self.servers.queue.leave(self.source, GROUP)

    def join_group(self) -> None:
        """Be seen by the queue again."""
        group = self.servers.queue._groups[GROUP]
        if self.source is not None and self.source not in group.members:
            group.members.append(self.source)
            self.servers.queue._rebalance(GROUP)

    def release(self) -> None:
        super().release()
        if self.source is not None:
            self.source.abandon()
            self.source = None


class SchedulerProcess(Service):
    """A candidate for the scheduler's office."""

    def __init__(self, name: str, servers: Servers, *, limits: SchedulerLimits) -> None:
        super().__init__(name, servers)
        self.limits = limits
        self.scheduler: Scheduler | None = None

    async def main(self) -> None:
        catalog = self.connect()
        cluster = await catalog.nodes.ensure_cluster()
        self.scheduler = Scheduler(
            catalog=catalog,
            offloader=make_offloader(self, cluster.cluster_id),
            publisher=self.servers.queue.publisher(self.faults),
            stationery=Stationery(TOPICS, source=self.name, clock=self.clock, ids=self.ids),
            manifests=BucketManifests(make_manifests(self, cluster.cluster_id), catalog),
            clock=self.clock,
            ids=self.ids,
            limits=self.limits,
        )
        self.ready.set()
        await self.scheduler.run(self.stop)


def make_manifests(process: Service, cluster_id: UUID) -> ManifestStore:
    """Return the manifests in the bucket, as ``process`` reaches it; snapshots come often."""
    return ManifestStore(
        process.servers.bucket.connect(process.faults),
        cluster_id=cluster_id,
        clock=process.clock,
        ids=process.ids,
        limits=ManifestLimits(changes_min=3, changes_max=6),
    )


def make_offloader(process: Service, cluster_id: UUID) -> BlockOffloader:
    """Return an offloader into the bucket, as ``process`` reaches it."""
    settings = Tier2Settings(
        bucket=BUCKET, cluster_id=cluster_id, ranges=SMALL_RANGES, grain_len=256
    )
    limits = RetryLimits(tries_max=4, time_s_max=10.0, wait_s_first=0.2, wait_s_max=2.0)
    return BlockOffloader(
        process.servers.bucket.connect(process.faults),
        settings,
        retries=partial(Retries, limits, clock=process.clock, ids=process.ids),
    )


class ReaderProcess(Service):
    """Follows the stream from its beginning, and starts over when it was restarted."""

    def __init__(self, name: str, servers: Servers) -> None:
        super().__init__(name, servers)
        self.passes = 0
        self.position: Position | Edge = Edge.EARLIEST

    async def main(self) -> None:
        servers = self.servers
        catalog = self.connect()
        self.position, expected = Edge.EARLIEST, None
        async with self.reading(catalog) as source:
            self.ready.set()
            while True:
                budget = Budget(
                    entries_max=self.rng.randint(1, 20),
                    bytes_max=self.rng.randint(1, 2000),
                    wait_s=self.rng.choice((0.0, 0.0, 1.0, 5.0)),
                )
                try:
                    answer = await source.read(servers.stream, self.position, budget)
                except TierlogError as error:
                    self.trace.note("read.failed", at=self.position, reason=error.reason.value)
                    if error.reason is Reason.TRIMMED and servers.checker.trims.trimmed:
                        self.position, expected = Edge.EARLIEST, None
                        continue
                    lost = error.reason in {Reason.TRIMMED, Reason.CORRUPT, Reason.NO_SUCH_ENTRY}
                    if lost:
                        servers.checker.complain("a", f"at {self.position} the reader got {error}")
                    await asyncio.sleep(1.0)
                    continue
                if answer.chunk is not None:
                    first = (answer.chunk.ledger_id, answer.chunk.first_entry_id)
                    expected = self._check(expected, first, answer.chunk.count)
                    note_frames(servers.checker, first, answer.chunk.frames, self.name)
                else:
                    await asyncio.sleep(self.rng.uniform(0, 20))
                self.position = answer.resume

    def _check(self, expected: At | None, first: At, count: int) -> At:
        """Check that a chunk goes on where the one before it ended, or in a later ledger."""
        goes_on = expected is None or first == expected
        skips = expected is not None and first[0] > expected[0] and first[1] == 0
        if expected is not None and skips:
            left = [
                one.ledger_id
                for one in self.servers.checker.ledgers()
                if expected[0] <= one.ledger_id < first[0]
            ]
            skips = left in ([], [expected[0]])
            ended = next(
                (o for o in self.servers.checker.ledgers() if o.ledger_id == expected[0]), None
            )
            skips = skips and (ended is None or ended.last_entry_id + 1 == expected[1])
        if not goes_on and not skips:
            self.servers.checker.complain("a", f"{self.name} went from {expected} to {first}")
        return first[0], first[1] + count

    @contextlib.asynccontextmanager
    async def reading(self, catalog: Catalog) -> AsyncIterator[StreamSource]:
        """Put the reader together."""
        servers = self.servers
        objects = servers.bucket.connect(self.faults)
        memory = CachedRanges(StreamingCache(CACHE_BYTES, SMALL_CACHE), objects_max=4)
        ranges = Ranges(objects, SMALL_RANGES, memory)
        tier2 = ObjectTier(
            objects,
            ranges,
            servers.cache.connect(self.faults),
            Tier2Limits(handles_max=4, index_ttl_s=3600, ahead_bytes=512),
            bucket=BUCKET,
        )
        views = Views(catalog, age_s_max=0.5, entries_max=64)
        tier1 = StorageNodeTier(views, self.nodes(catalog), keys=KEYS)
        tail = TailMemory(tier1, memory.store, memory.manager, TailLimits(ledgers_max=2))
        async with memory.run(), ranges.run(), tier2.run(), tail.run():
            yield StreamSource(views, tier1, tier2, tail)


def note_frames(
    checker: Checker, first: At, frames: "tuple[bytes | bytearray | memoryview, ...]", who: str
) -> None:
    """Tell the model what a read returned, one entry at a time."""
    ledger_id, entry_id = first
    data, at = b"".join(frames), 0
    while at < len(data):
        entry_len = int.from_bytes(data[at : at + 4], "big")
        found_id = int.from_bytes(data[at + 4 : at + 12], "big")
        if found_id != entry_id:
            checker.complain("a", f"{who} got entry {found_id} of {ledger_id} for {entry_id}")
            return
        checker.model.seen((ledger_id, entry_id), data[at + 12 : at + 12 + entry_len], who)
        at, entry_id = at + 12 + entry_len, entry_id + 1


class Producer(Service):
    """Appends to whichever node takes it, several appends at a time, and notes what it is told."""

    def __init__(self, name: str, servers: Servers, *, rest_s_max: float) -> None:
        super().__init__(name, servers)
        self.rest_s_max = rest_s_max
        self.enough = asyncio.Event()
        """Set to have it end its work."""
        self.is_appending = False
        self._connections = 0
        self._advised: str | None = None

    async def main(self) -> None:
        catalog = self.connect()
        self.ready.set()
        self.is_appending = True
        while not self.enough.is_set():
            cluster = await catalog.nodes.ensure_cluster()
            address = self._advised or self._some_node()
            self._advised = None
            hello = Hello(cluster_id=cluster.cluster_id, role=ROLE_PRODUCER)
            transport = self.servers.network.memory.transport(self.name)
            try:
                async with asyncio.TaskGroup() as tasks:
                    client = await WireClient.connect(transport, address, hello, tasks=tasks)
                    await self._use(client, tasks)
            except* TierlogError as group:
                self.trace.note("producer.no_connection", cause=str(group.exceptions[0])[:80])
            await asyncio.sleep(self.rng.uniform(0.1, 1.0))
        self.is_appending = False

    def _some_node(self) -> str:
        hosts = sorted(self.servers.network.memory.listeners)
        return self.rng.choice(hosts) if hosts else "nowhere:1"

    async def _use(self, client: WireClient, tasks: asyncio.TaskGroup) -> None:
        """Append through one connection until it breaks or it is enough."""
        self._connections += 1
        who = f"{self.name}/{self._connections}"
        flying: list[asyncio.Task[bool]] = []
        going = True
        while going and not client.closed and not self.enough.is_set():
            flying.append(tasks.create_task(self._append(client, who)))
            await asyncio.sleep(self.rest_s_max * self.rng.uniform(0, 1) ** 2)
            going = all(task.result() for task in flying if task.done())
            flying = [task for task in flying if not task.done()]
        for task in flying:
            await task
        await client.close()

    async def _append(self, client: WireClient, who: str) -> bool:
        """Append a few entries; False: look for another connection."""
        checker = self.servers.checker
        tokens = checker.model.new_entries(who, self.rng.choice((1, 1, 1, 2, 5, 9)))
        frames, offsets = pack_entries([checker.model.payload(token) for token in tokens])
        draft = build_run(frames, offsets)
        try:
            ranges = await client.append(self.servers.stream, draft, deadline_s=15.0)
        except IndeterminateError:
            checker.model.ambiguous(tokens)
            return False
        except TierlogError as error:
            checker.model.refused(tokens)
            self._advised = error.details.get("wire_address")
            return error.reason is Reason.RESOURCE_EXHAUSTED
        except BaseException:
            checker.model.ambiguous(tokens)
            raise
        positions = [
            (int(one.ledger_id), entry_id)
            for one in ranges
            for entry_id in range(one.first_entry_id, one.last_entry_id + 1)
        ]
        self.trace.note("append.acknowledged", tokens=tokens, first=positions[:1])
        checker.acknowledged(tokens, positions)
        return True
