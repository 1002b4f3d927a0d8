"""The ingest node: storage node and owner of streams, put together without process concerns.

Owns the order of starting and ending. A simulation runs this very object over memory adapters;
``tierlog_ingest.main`` runs it over the real ones, with HTTP and gRPC in front.

Start: identity (cookie), storage (replay), the wire, the front, registration, then recovery of
what this node owned before. End: others are told, appends are answered, open ledgers closed and
streams given up, then the front and the wire go, then storage is flushed. Ended by a crash
anywhere, the next start finds the same.

Invariants:
    * No directory is opened but this node's own (its cookie).
    * Nothing is served before what the journal holds was replayed.
    * Nothing is appended before the node is registered.
    * A failed disk ends ``run`` with its error; nothing is answered after it.
"""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple
from uuid import UUID

import structlog

from tierlog.catalog import Catalog
from tierlog.ledger.directory import NodeConnector, NodeDirectory
from tierlog.ledger.keys import NO_KEYS, LedgerKeys
from tierlog.ledger.reader import ReadHandle, Tier1ReadHandle
from tierlog.ledger.recovery import Recovery
from tierlog.model.ids import LedgerId, NodeId, StreamName, node_id
from tierlog.model.node import Cluster, NodeInfo
from tierlog.ports.attributes import AttributeIndex
from tierlog.ports.clock import Clock
from tierlog.ports.files import Files
from tierlog.ports.ids import Ids
from tierlog.ports.metadata import MetadataStore
from tierlog.ports.storage_node import StorageNodeClient
from tierlog.ports.streams import OwnerInfo
from tierlog.ports.tracing import NO_TRACER, Tracer
from tierlog.ports.transport import Transport
from tierlog.ports.waiting import first_of
from tierlog.runtime.sections import WireSettings
from tierlog.runtime.settings import IngestSettings
from tierlog.wire.auth import Authenticator, OpenAuthenticator
from tierlog.wire.connection import Hello
from tierlog.wire.messages import ROLE_OWNER, Credentials
from tierlog.wire.server import ServerLimits, WireServer
from tierlog_ingest.presence import Presence
from tierlog_ingest.replication.service import Replication
from tierlog_ingest.replication.worker import Owning
from tierlog_ingest.storage.cookies import check_cookie
from tierlog_ingest.storage.emptying import Emptying
from tierlog_ingest.storage.gc import CatalogLedgers, GarbageCollector
from tierlog_ingest.storage.node import StorageNode
from tierlog_ingest.streams.appends import QueueBudget
from tierlog_ingest.streams.attributes.crowd import Crowd
from tierlog_ingest.streams.attributes.keeper import AttributeParts
from tierlog_ingest.streams.attributes.replay import OpenLedger
from tierlog_ingest.streams.attributes.room import Room
from tierlog_ingest.streams.owners import Owners
from tierlog_ingest.streams.parts import OwnerParts
from tierlog_ingest.streams.reach import Reach
from tierlog_ingest.wire_handler import IngestWireHandler

log = structlog.get_logger()

DRAIN_S_MAX: Final = 20.0
TELLING_S_MAX: Final = 0.5
"""So long a draining node waits for others to hear of it: its streams stand still after that."""
PATIENCE_S: Final = 60.0
FREE_BYTES_AGAIN_S: Final = 60.0
FREE_BYTES_STEPS: Final = 8
"""Free space is told again once it has changed by more than such a part of itself."""
FRAME_BYTES_BESIDE_ENTRY: Final = 256
"""Heads of the wire's frame, of a signed run and of its one entry, and some to spare."""

Connect = Callable[[Hello, asyncio.TaskGroup], NodeConnector[StorageNodeClient]]


class FrontAddresses(NamedTuple):
    """Where the front listens, ``host:port`` each, as others reach it."""

    grpc_address: str
    http_address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier2:
    """What owners need of tier 2: checkpoints of attributes, and ledgers that are there alone."""

    index: AttributeIndex
    open_ledger: OpenLedger


Front = Callable[["IngestNode"], AbstractAsyncContextManager[FrontAddresses]]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePorts:
    """What a node needs from outside."""

    files: Files
    """The data directory: the journal, and all else unless there are ``ledger_dirs``."""
    transport: Transport
    store: MetadataStore
    clock: Clock
    ids: Ids
    connect: Connect
    """Makes the connector to other storage nodes."""
    ledger_dirs: tuple[Files, ...] = ()
    """Where entry logs and indexes lie."""
    authenticator: Authenticator = field(default_factory=OpenAuthenticator)
    """Decides who may speak on the wire."""
    credentials: Callable[[], Credentials] = Credentials
    """Gives what this node shows to others there."""
    tier2: Callable[[Catalog, Cluster], Tier2] | None = None
    """Makes what attributes need of tier 2; None: streams have no attributes."""
    tracer: Tracer = NO_TRACER


class IngestNode:
    """One node. ``run`` is its life."""

    def __init__(
        self,
        ports: NodePorts,
        *,
        settings: IngestSettings,
        wire: WireSettings,
        front: Front,
        ledger_id_base: int = 0,
        keys: LedgerKeys = NO_KEYS,
    ) -> None:
        self.node_id: NodeId = node_id(settings.node_id)
        self.catalog = Catalog.over(ports.store, clock=ports.clock, ids=ports.ids)
        self.ready = asyncio.Event()
        """Set while the node serves everything."""
        self.info: NodeInfo | None = None
        self.cluster: Cluster | None = None
        self._ports = ports
        self._settings = settings
        self._wire = wire
        self._front = front
        self._ledger_id_base = ledger_id_base
        self._keys = keys
        self._owners: Owners | None = None
        self._storage: StorageNode | None = None
        self._presence: Presence | None = None
        self._replication: Replication | None = None
        self._garbage: GarbageCollector | None = None

    def __repr__(self) -> str:
        return f"<IngestNode {self.node_id} ready={self.ready.is_set()} {self._owners!r}>"

    @property
    def owners(self) -> Owners:
        """The owned streams; there once the front is entered."""
        assert self._owners is not None
        return self._owners

    @property
    def storage(self) -> StorageNode:
        """The storage node; there once the front is entered."""
        assert self._storage is not None
        return self._storage

    @property
    def registered(self) -> bool:
        """Whether others see this node among the live ones."""
        return self._presence is not None and self._presence.registered.is_set()

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until ``stop``, then drain. Raises what the node can't go on after."""
        ports = self._ports
        await self.catalog.streams.ensure_roots()
        self.cluster = await self.catalog.nodes.ensure_cluster(ledger_id_base=self._ledger_id_base)
        await check_cookie(
            ports.files,
            ports.store,
            ports.ids,
            cluster_id=self.cluster.cluster_id,
            node_id=self.node_id,
            ledger_dirs=ports.ledger_dirs,
        )
        async with asyncio.TaskGroup() as tasks:
            storage = self._storage = await StorageNode.open(
                ports.files,
                ports.ids,
                self._settings.storage,
                clock=ports.clock,
                ledger_dirs=ports.ledger_dirs,
            )
            if storage.limbo_unlimited:
                # Ledgers made from now on can't have lost anything to that damage.
                await self._limit_limbo(storage)
            storage_stop = asyncio.Event()
            keeping = tasks.create_task(storage.run(storage_stop), name="storage")
            hello = self._hello(self.cluster.cluster_id)
            directory = NodeDirectory[StorageNodeClient](
                self.catalog.nodes.live,
                ports.connect(hello, tasks),
                local={self.node_id: storage},
            )
            recovery = Recovery(self.catalog, directory, ids=ports.ids, keys=self._keys)
            reach = Reach(ports.transport, hello, on_silent=directory.failed)
            self._owners = Owners(self._parts(directory, recovery, reach))
            self._replication = self._auto_recovery(directory, recovery)
            collecting = tasks.create_task(self._collect_garbage(storage), name="gc")
            emptying = tasks.create_task(self._empty_when_retired(storage), name="emptying")
            try:
                await self._serve(stop, tasks)
            finally:
                collecting.cancel()
                emptying.cancel()
                self.ready.clear()
                await directory.close()
            storage_stop.set()
            await keeping

    async def _serve(self, stop: asyncio.Event, tasks: asyncio.TaskGroup) -> None:
        """Open the wire and the front, register, recover; at the end go back the same way."""
        assert self.cluster is not None
        listen = self._settings.listen
        server = WireServer(
            IngestWireHandler(self.owners, self.storage),
            cluster_id=self.cluster.cluster_id,
            node_id=self.node_id,
            authenticator=self._ports.authenticator,
            limits=ServerLimits(
                hello_s_max=self._wire.hello_timeout_s,
                credit_bytes=self._wire.credit_bytes,
                frame_len_max=self._wire.frame_bytes_max,
            ),
        )
        owning = tasks.create_task(self.owners.run(), name="owners")
        listener = await self._ports.transport.listen(
            f"{listen.host}:{listen.wire_port}", server.serve
        )
        try:
            async with self._front(self) as front:
                self.info = await self._info(listener.address, front)
                presence = self._presence = Presence(
                    self.catalog, self.info, ids=self._ports.ids, patience_s=PATIENCE_S
                )
                being = tasks.create_task(presence.run(), name="presence")
                telling = tasks.create_task(self._tell_read_only(presence), name="read-only")
                await first_of(presence.registered, stop)
                if presence.registered.is_set():
                    tending = tasks.create_task(self.owners.tend(), name="tending")
                    following = tasks.create_task(self.owners.follow(), name="following")
                    flushing = tasks.create_task(self.owners.see_to_checkpoints(), name="flushing")
                    replicating = tasks.create_task(self._replicate(presence), name="replication")
                    self.ready.set()
                    log.info("node.ready", node_id=self.node_id, **front._asdict())
                    await stop.wait()
                    tending.cancel()
                    following.cancel()
                    flushing.cancel()
                    replicating.cancel()
                self.ready.clear()
                await self._drain(presence, owning)
                being.cancel()
                telling.cancel()
        finally:
            owning.cancel()
            await listener.close()

    async def _limit_limbo(self, storage: StorageNode) -> None:
        next_id = await self.catalog.ledgers.next_id()
        seen_ids = storage.seen_ids
        # A store from an old backup does not know which ids it gave.
        if not seen_ids.behind and next_id >= seen_ids.next_id:
            storage.limit_limbo(max(LedgerId(next_id - 1), *storage.held_ledgers()))

    async def _collect_garbage(self, storage: StorageNode) -> None:
        """Free what was deleted, while this node is registered."""
        settings = self._settings.storage
        self._garbage = GarbageCollector(
            storage,
            CatalogLedgers(self.catalog, self.node_id),
            self._ports.clock,
            share_max=settings.gc_share_max,
            quarantine_s=settings.gc_quarantine_s,
        )
        await self._garbage.run(interval_s=settings.gc_interval_s)

    async def _empty_when_retired(self, storage: StorageNode) -> None:
        """Free what lies elsewhere once this node is to go."""
        want = storage.compactor.want
        await Emptying(storage, self.catalog, self.node_id, on_freed=want).run()

    async def _replicate(self, presence: Presence) -> None:
        """Keep ledgers whole, and tell others while this node is being emptied."""
        assert self._replication is not None

        def tell(draining: bool) -> None:  # noqa: FBT001 - called with what was found
            if presence.info.draining is not draining:
                presence.amend(replace(presence.info, draining=draining))
            self.owners.empty(draining)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._replication.run())
            tasks.create_task(self._replication.tell_draining(tell))

    async def _tell_read_only(self, presence: Presence) -> None:
        """Let others know while this node takes no ordinary adds, and how much room it has."""
        while True:
            changed = self.storage.state_changed
            free_bytes, told = await self._free_bytes(), presence.info.free_bytes
            if abs(free_bytes - told) * FREE_BYTES_STEPS <= told:
                free_bytes = told
            info = replace(presence.info, read_only=self.storage.read_only, free_bytes=free_bytes)
            if info != presence.info:
                presence.amend(info)
            with suppress(TimeoutError):
                async with asyncio.timeout(FREE_BYTES_AGAIN_S):
                    await changed.wait()

    async def _free_bytes(self) -> int:
        """Return the room for entries: of several directories that of the next entry log's."""
        directories = self._ports.ledger_dirs or (self._ports.files,)
        return max([await one.free_bytes() for one in directories])

    async def _drain(self, presence: Presence, owning: "asyncio.Task[None]") -> None:
        """Answer what is here, close the open ledgers and give the streams up.

        Others are told first, so that they put nothing new here and send nobody back.
        """
        presence.amend(replace(presence.info, draining=True))
        await presence.told(timeout_s=TELLING_S_MAX)
        await self.owners.drain()
        _, left = await asyncio.wait({owning}, timeout=DRAIN_S_MAX)
        if left:
            # Not a failure: the next start recovers what is still open.
            log.warning("node.drain_cut_short", drain_s_max=DRAIN_S_MAX)

    async def find_owner(self, stream: StreamName) -> OwnerInfo:
        """Return who owns the stream; where nobody alive does, this node claims it first."""
        assert self.cluster is not None
        assert self.info is not None
        found = await self.owners.find(stream)
        info = self.info if found.info is None else found.info
        return OwnerInfo(
            node_id=info.node_id,
            wire_address=info.wire_address,
            grpc_address=info.grpc_address,
            http_address=info.http_address,
            owner_epoch=found.owner_epoch,
            cluster_id=self.cluster.cluster_id,
        )

    def statistics(self) -> dict[str, object]:
        """Return what people ask of a node."""
        alarm = self._garbage.alarm if self._garbage is not None else None
        return {
            "node_id": self.node_id,
            "cluster_id": str(self.cluster.cluster_id) if self.cluster else None,
            "ready": self.ready.is_set(),
            "registered": self.registered,
            "streams": self.owners.statistics(),
            "recovering": self.owners.recovering(),
            "replication": self._replication.statistics() if self._replication else None,
            "storage": self.storage.statistics(),
            "damages": list(self.storage.damages),
            "gc_alarm": alarm.message if alarm is not None else None,
        }

    def _auto_recovery(
        self, directory: NodeDirectory[StorageNodeClient], recovery: Recovery
    ) -> Replication:
        owning = Owning(
            node_id=self.node_id,
            seal=self.owners.seal,
            recover_bare=lambda ledger_id: recovery.recover(None, ledger_id),
        )
        return Replication(
            self.catalog,
            directory,
            owning,
            clock=self._ports.clock,
            ids=self._ports.ids,
            settings=self._settings.replication,
            keys=self._keys,
        )

    def _hello(self, cluster_id: UUID) -> Hello:
        return Hello(
            cluster_id=cluster_id,
            role=ROLE_OWNER,
            client_name=self.node_id,
            show=self._ports.credentials,
        )

    def _parts(
        self, directory: NodeDirectory[StorageNodeClient], recovery: Recovery, reach: Reach
    ) -> OwnerParts:
        return OwnerParts(
            node_id=self.node_id,
            catalog=self.catalog,
            nodes=directory,
            recovery=recovery,
            clock=self._ports.clock,
            ids=self._ports.ids,
            settings=self._settings.owner,
            budget=QueueBudget(self._settings.owner.in_flight_bytes_max),
            keys=self._keys,
            answers=reach.answers,
            attributes=self._attribute_parts(directory),
            # An entry that came in a frame may have to go on in one, in a signed run.
            entry_len_max=max(0, self._wire.frame_bytes_max - FRAME_BYTES_BESIDE_ENTRY),
            tracer=self._ports.tracer,
        )

    def _attribute_parts(
        self, directory: NodeDirectory[StorageNodeClient]
    ) -> AttributeParts | None:
        if self._ports.tier2 is None:
            return None
        assert self.cluster is not None
        tier2 = self._ports.tier2(self.catalog, self.cluster)

        async def open_ledger(ledger_id: LedgerId) -> ReadHandle:
            metadata = await self.catalog.ledgers.get(ledger_id)
            if metadata is not None:
                return Tier1ReadHandle(ledger_id, metadata, directory, keys=self._keys)
            return await tier2.open_ledger(ledger_id)

        settings = self._settings.owner.attributes
        return AttributeParts(
            index=tier2.index,
            open_ledger=open_ledger,
            open_copy=tier2.open_ledger,
            settings=settings,
            room=Room(settings.cached_all_max),
            crowd=Crowd(settings.unflushed_all_max),
        )

    async def _info(self, wire_address: str, front: FrontAddresses) -> NodeInfo:
        listen = self._settings.listen
        port = wire_address.rpartition(":")[2]
        return NodeInfo(
            node_id=self.node_id,
            wire_address=f"{listen.advertise_host or listen.host}:{port}",
            grpc_address=front.grpc_address,
            http_address=front.http_address,
            zone=self._settings.zone,
            free_bytes=await self._free_bytes(),
        )
