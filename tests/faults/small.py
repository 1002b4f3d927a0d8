"""A small cluster on virtual time whose processes meet a trouble at one chosen call.

The services' own logic over the memory adapters, as in ``tests.simulation``, but with a storage
node that only answers, and with nothing left to chance: a run is a function of its story and of
the point. Short times: a pass of the scheduler takes a second, a session six.
"""

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from tests.faults import invariants
from tests.faults.invariants import Seen
from tests.simulation.checker import Checker
from tests.simulation.processes import HostClock, SimProcess, Tasks
from tests.simulation.remote import Network
from tests.simulation.servers import Changes, WatchedBucket, WatchedMetadata
from tests.simulation.services import (
    BUCKET,
    KEYS,
    TOPICS,
    SchedulerProcess,
    Servers,
    Service,
    WorkerProcess,
    make_manifests,
    make_offloader,
)
from tests.simulation.trace import Trace
from tests.unit.offload.world import entries_of, metadata_of, runs_of
from tierlog.adapters.memory.attributes import MemoryAttributes
from tierlog.adapters.memory.cache import MemoryCache
from tierlog.adapters.memory.events import MemoryEvents
from tierlog.adapters.memory.storage_node import MemoryStorageNode
from tierlog.adapters.memory.transport import MemoryNetwork
from tierlog.format import paths, records
from tierlog.format.keys import parse_key
from tierlog.format.manifest import is_manifest_key
from tierlog.ledger.reader import Tier1ReadHandle
from tierlog.model.errors import CorruptError, TierlogError
from tierlog.model.ids import EntryId, LedgerId, NodeId, StreamName
from tierlog.model.ledger import LedgerState
from tierlog.model.node import NodeInfo
from tierlog.model.offload import OffloadContext
from tierlog.model.policy import Policy
from tierlog.model.scrub import ScrubReport, ScrubWish
from tierlog.model.stream import Stream
from tierlog.offload.repair import Repairer
from tierlog.offload.scrub import Scrubber
from tierlog.offload.scrub_rules import ScrubLimits
from tierlog.ports.storage_node import StorageNodeControl
from tierlog_scheduler.scheduler import SchedulerLimits

STREAM: Final = StreamName("faults")
NODE: Final = NodeId("n1")
BLOCK_SIZE: Final = 600
LEDGER_BYTES_MAX: Final = 100_000
"""As many as 10,000 such blocks hold for sure."""
ENTRIES: Final = 11
"""Of 100 bytes each: three blocks, of four, four and three."""
SAFETY_S: Final = 3.0
SCRUB_AGAIN_S: Final = 30.0
LIMITS: Final = SchedulerLimits(
    interval_s=1.0, request_again_s=5.0, sweep_again_s=10.0, checkpoint_s=5.0
)


class NodeProcess(Service):
    """A storage node that is always there."""

    def __init__(self, servers: Servers) -> None:
        super().__init__(NODE, servers)
        self.node = MemoryStorageNode(NODE)
        servers.network.hosts[NODE] = self

    @property
    def process(self) -> SimProcess:
        """See ``Host``."""
        return self

    @property
    def storage(self) -> StorageNodeControl | None:
        """See ``Host``."""
        return self.node

    async def main(self) -> None:
        catalog = self.connect()
        await catalog.nodes.announce(
            NodeInfo(node_id=NODE, wire_address="n1:1", grpc_address="n1:2", http_address="n1:3")
        )
        self.ready.set()
        await asyncio.Event().wait()


class ScrubProcess(Service):
    """Scrubs and repairs when it is started, and by schedule."""

    def __init__(self, name: str, servers: Servers) -> None:
        super().__init__(name, servers)
        self.report: ScrubReport | None = None

    async def main(self) -> None:
        catalog = self.connect()
        cluster = await catalog.nodes.ensure_cluster()
        nodes = self.nodes(catalog)
        offloader = make_offloader(self, cluster.cluster_id)
        objects = self.servers.bucket.connect(self.faults)
        repairer = Repairer(
            objects=objects,
            catalog=catalog,
            offloader=offloader,
            open_ledger=lambda ledger_id, metadata: Tier1ReadHandle(
                ledger_id, metadata, nodes, keys=KEYS
            ),
            ids=self.ids,
        )
        scrubber = Scrubber(
            objects=objects,
            catalog=catalog,
            manifests=make_manifests(self, cluster.cluster_id),
            repairer=repairer,
            cluster_id=cluster.cluster_id,
            bucket=BUCKET,
            endpoint_name="default",
            key_prefix="",
            clock=self.clock,
            limits=ScrubLimits(safety_age_s=SAFETY_S),
        )
        while True:
            self.report = await self._scrub(scrubber)
            if not self.report.error and not self.report.unread:
                self.ready.set()
            await asyncio.sleep(SCRUB_AGAIN_S)

    async def _scrub(self, scrubber: Scrubber) -> ScrubReport:
        report = ScrubReport(
            scrub_id=self.ids.uuid(),
            wish=ScrubWish(repair=True, deep=True),
            started_ms=self.clock.wall_ms(),
            findings_max=100,
        )
        try:
            await scrubber.run(report)
        except TierlogError as error:
            report.error = str(error)
        return report


class Witness:
    """Looks at each change of metadata and bucket as it happens."""

    def __init__(self, world: "SmallWorld") -> None:
        self._world = world
        self.broken: list[str] = []
        self.completed_s: dict[LedgerId, float] = {}
        self._ever_named: set[str] = set()
        self._ever_stored: set[str] = set()
        self.contexts: dict[LedgerId, OffloadContext] = {}
        self.held: set[LedgerId] = set()
        self.watching: set[LedgerId] = set()
        """Ledgers that have to be readable."""

    def metadata_changed(self, before: Changes) -> None:
        """See ``Watcher``."""
        metadata = self._world.servers.metadata
        for path in before:
            found = metadata.get(path)
            if (ledger_id := _id_in(paths.context_ledger_id_of, path)) is not None:
                was = self.contexts.pop(ledger_id, None)
                if found is not None:
                    self._context(was, records.decode_context(found.data))
            elif (ledger_id := _id_in(paths.ledger_id_of, path)) is not None:
                self.held.discard(ledger_id)
                if found is not None:
                    self.held.add(ledger_id)
        self._ever_named |= invariants.named_keys(self.contexts)
        self._look()

    def _context(self, was: OffloadContext | None, now: OffloadContext) -> None:
        self.contexts[now.ledger_id] = now
        if not now.complete:
            return
        if was is None or not was.complete:
            self.completed_s.setdefault(now.ledger_id, self._world.now_s())
            return
        before, after = (was.uuid, was.copy, was.location), (now.uuid, now.copy, now.location)
        repaired = was.repair is not None and was.repair.uuid == now.uuid
        if before != after and not repaired:
            self.broken.append(f"complete ledger {now.ledger_id} has another copy now")

    def _look(self) -> None:
        keys = self._world.servers.bucket.objects
        lost = invariants.lost_now(self.contexts, keys, self.held, self.watching)
        self.broken += [one for one in lost if one not in self.broken]

    def upload_begun(self, key: str) -> None:
        """See ``Watcher``."""
        if key not in self._ever_named and not self._world.planting:
            self.broken.append(f"upload of {key}, which the metadata do not name")

    def object_stored(self, key: str, before: bytes | None, body: bytes) -> None:
        """See ``Watcher``."""
        del before, body
        if parse_key("", key) is None or self._world.planting:
            return
        if key not in self._ever_named:
            self.broken.append(f"object {key}, which the metadata do not name")
        self._ever_stored.add(key)
        # What a zombie had stored may be swept by now.
        early = invariants.stored_too_early(key, self._ever_stored)
        self.broken += [early] if early is not None else []

    def object_deleted(self, key: str) -> None:
        """See ``Watcher``."""
        del key
        if not self._world.planting:
            self._look()


class SmallWorld:
    """Servers, one node, and the processes that a story starts."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        clock, tasks = HostClock(), Tasks()
        metadata, bucket = WatchedMetadata(), WatchedBucket(clock)
        self.planting = True
        self.servers = Servers(
            seed=1,
            trace=trace,
            tasks=tasks,
            metadata=metadata,
            bucket=bucket,
            attributes=MemoryAttributes(),
            queue=MemoryEvents(random.Random(0), partitions=2),
            network=Network(MemoryNetwork()),
            cache=MemoryCache(clock),
            checker=Checker(metadata, bucket, trace, stream=STREAM, lag_s=0.0),
            stream=STREAM,
        )
        self.witness = Witness(self)
        metadata.watcher = bucket.watcher = self.witness
        self.node = NodeProcess(self.servers)
        self.admin = Service("admin", self.servers)
        self.catalog = self.admin.connect()
        self.entries: dict[LedgerId, list[bytes]] = {}

    def now_s(self) -> float:
        """Return virtual time."""
        return asyncio.get_running_loop().time()

    def process(self, kind: str, number: int = 1) -> Service:
        """Return a process of a kind, which does not run yet."""
        name = f"{kind[0]}{number}"
        if kind == "worker":
            return WorkerProcess(name, self.servers)
        if kind == "scheduler":
            return SchedulerProcess(name, self.servers, limits=LIMITS)
        assert kind == "scrub"
        return ScrubProcess(f"x{number}", self.servers)

    # What is there before a story begins

    async def begin(self, policy: Policy) -> Stream:
        """Make the stream and the node."""
        await self.catalog.nodes.ensure_cluster()
        await self.catalog.streams.ensure_roots()
        self.node.start()
        await self.node.ready.wait()
        await self.catalog.streams.create(STREAM, policy=policy)
        return await self.catalog.streams.claim(STREAM, NODE)

    async def seal(self, claimed: Stream) -> LedgerId:
        """Make a closed ledger of three blocks in tier 1."""
        ledger_id = await self.catalog.ledgers.new_id()
        entries = [bytes([65 + number]) * 100 for number in range(ENTRIES)]
        entries[0] = str(ledger_id).encode().ljust(100)
        closed = metadata_of(entries, block_size=BLOCK_SIZE)
        opened = replace(closed, state=LedgerState.OPEN, last_entry_id=EntryId(-1), length=0)
        await self.catalog.ledgers.open(claimed, ledger_id, opened, block_size=BLOCK_SIZE)
        for run in runs_of(ledger_id, entries):
            await self.node.node.add(run)
        await self.catalog.ledgers.close(
            claimed, ledger_id, last_entry_id=closed.last_entry_id, length=closed.length
        )
        self.entries[ledger_id] = entries
        return ledger_id

    async def copied(self, ledger_id: LedgerId) -> OffloadContext:
        """Bring a ledger to tier 2, in no time and without faults."""
        cluster = await self.catalog.nodes.ensure_cluster()
        offloader, uuid = make_offloader(self.admin, cluster.cluster_id), self.admin.ids.uuid()
        location = offloader.location(ledger_id, uuid)
        contexts = self.catalog.contexts
        await contexts.begin_attempt(ledger_id, uuid=uuid, location=location, worker="a")
        handle = await self.local(ledger_id)
        copy = await offloader.offload(handle, uuid, {"ManagedLedgerName": STREAM})
        await handle.close()
        return await contexts.complete_attempt(ledger_id, uuid=uuid, copy=copy)

    async def moved(self, ledger_id: LedgerId) -> None:
        """Bring a ledger to tier 2 alone."""
        context = await self.copied(ledger_id)
        assert context.uuid is not None
        deleting = await self.catalog.contexts.begin_tier1_deletion(ledger_id, uuid=context.uuid)
        await self.catalog.ledgers.delete_tier1(ledger_id, deleting)

    async def local(self, ledger_id: LedgerId) -> Tier1ReadHandle[StorageNodeControl]:
        """Return a handle on a ledger in tier 1."""
        metadata = await self.catalog.ledgers.get(ledger_id)
        assert metadata is not None
        return Tier1ReadHandle(ledger_id, metadata, self.admin.nodes(self.catalog), keys=KEYS)

    # Looking

    def seen(self, read: Mapping[LedgerId, Sequence[bytes]] | None = None) -> Seen:
        """Return what there is."""
        found = self.servers.metadata.get(paths.stream_path(STREAM))
        deleting = records.decode_stream(found.data).deleting if found is not None else ()
        bucket = self.servers.bucket
        return Seen(
            contexts=dict(self.witness.contexts),
            keys=[key for key in bucket.objects if not is_manifest_key("", key)],
            uploads=[one.key for one in bucket.uploads.values()],
            held=set(self.witness.held),
            deleting=deleting,
            read=read or {},
        )

    async def read_back(self) -> dict[LedgerId, list[bytes]]:
        """Read every ledger that has a context, from tier 2 and from tier 1."""
        cluster = await self.catalog.nodes.ensure_cluster()
        offloader = make_offloader(self.admin, cluster.cluster_id)
        read: dict[LedgerId, list[bytes]] = {}
        for ledger_id, context in self.witness.contexts.items():
            assert context.uuid is not None
            assert context.location is not None
            handle = await offloader.read_offloaded(
                ledger_id, context.uuid, context.location, copy=context.copy
            )
            read[ledger_id] = await entries_of(handle)
            if ledger_id in self.witness.held:
                local = await entries_of(await self.local(ledger_id))
                assert local == read[ledger_id], "the tiers differ"
        return read

    def replay(self) -> None:
        """Hand every request out again, the newest first, each twice."""
        for event in reversed(self.servers.queue.events(TOPICS.requested)):
            self.servers.queue.append(event)
            self.servers.queue.append(event)


def _id_in(read: Callable[[str], LedgerId], path: str) -> LedgerId | None:
    try:
        return read(path)
    except CorruptError:
        return None
