"""What a client talks through: gRPC and the wire to ingest, HTTP to reader and scheduler."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from tierlog.adapters.rpc.admin import HttpAdministration, HttpDeadLetters, HttpScrubs
from tierlog.adapters.rpc.attaching import GrpcAttachDesk
from tierlog.adapters.rpc.ingest import GrpcStreamControl
from tierlog.adapters.rpc.ingest_nodes import IngestNodes, split_addresses
from tierlog.adapters.rpc.reader import HttpReads
from tierlog.adapters.system import SystemClock, SystemIds
from tierlog.format.entry import Codec, Decompress
from tierlog.ports.admin import Administration, DeadLetterDesk, ScrubDesk
from tierlog.ports.clock import Clock
from tierlog.ports.ids import Ids
from tierlog.ports.reads import ReadDesk, StreamReads
from tierlog.ports.streams import AppendChannel, AttachDesk, OwnerInfo, StreamControl
from tierlog.ports.transport import Transport
from tierlog.runtime.calling import Calling
from tierlog.runtime.settings import Settings
from tierlog.wire.connection import ClientLimits, Hello, WireClient
from tierlog.wire.messages import ROLE_PRODUCER
from tierlog.wiring.compression import decompressors
from tierlog.wiring.nodes import open_transport
from tierlog.wiring.security import calling_of, wire_credentials

WELCOME_S_MAX: Final = 2.0


@dataclass(frozen=True, slots=True)
class ClientConnections:
    """The connections of one client; each is made at its first use."""

    settings: Settings
    control: StreamControl
    reads: StreamReads
    read_desk: ReadDesk
    admin: Administration
    dead_letters: DeadLetterDesk
    scrubs: ScrubDesk
    clock: Clock
    ids: Ids
    transport: Transport
    calling: Calling
    decompressors: Mapping[Codec, Decompress]

    async def connect_owner(self, owner: OwnerInfo, tasks: asyncio.TaskGroup) -> AppendChannel:
        """Connect to an owner over the wire, its reader being one of ``tasks``."""
        wire = self.settings.wire
        show = wire_credentials(self.settings, self.calling)
        hello = Hello(cluster_id=owner.cluster_id, role=ROLE_PRODUCER, show=show)
        # It has just said that it is the owner: one that falls silent now is asked for elsewhere.
        limits = ClientLimits(hello_s_max=min(wire.hello_timeout_s, WELCOME_S_MAX))
        return await WireClient.connect(
            self.transport, owner.wire_address, hello, tasks=tasks, limits=limits
        )


@contextlib.asynccontextmanager
async def open_client_connections(
    settings: Settings, *, ingest_grpc: str, reader_http: str, scheduler_http: str
) -> AsyncIterator[ClientConnections]:
    """Give the connections to the services at these addresses (``host:port``).

    Of ingest it may be several, with commas between them.
    """
    timeout_s, calling = settings.client.timeout_s, calling_of(settings.security)
    async with contextlib.AsyncExitStack() as stack:
        control = IngestNodes(
            split_addresses(ingest_grpc),
            lambda address: GrpcStreamControl(address, timeout_s=timeout_s, calling=calling),
        )
        stack.push_async_callback(control.close)
        reads = HttpReads(reader_http, timeout_s=timeout_s, calling=calling)
        stack.push_async_callback(reads.close)
        admin = HttpAdministration(scheduler_http, timeout_s=timeout_s, calling=calling)
        stack.push_async_callback(admin.close)
        dead_letters = HttpDeadLetters(scheduler_http, timeout_s=timeout_s, calling=calling)
        stack.push_async_callback(dead_letters.close)
        scrubs = HttpScrubs(scheduler_http, timeout_s=timeout_s, calling=calling)
        stack.push_async_callback(scrubs.close)
        yield ClientConnections(
            settings=settings,
            control=control,
            reads=reads,
            read_desk=reads,
            admin=admin,
            dead_letters=dead_letters,
            scrubs=scrubs,
            clock=SystemClock(),
            ids=SystemIds(),
            transport=open_transport(settings.wire, calling=calling),
            calling=calling,
            decompressors=decompressors(),
        )


@contextlib.asynccontextmanager
async def open_attach_desk(
    settings: Settings, *, ingest_grpc: str, cluster_id: UUID
) -> AsyncIterator[AttachDesk]:
    """Give what attaches staging ledgers, by the cluster's ingest nodes at these addresses."""
    timeout_s, calling = settings.client.timeout_s, calling_of(settings.security).within(cluster_id)
    control = IngestNodes(
        split_addresses(ingest_grpc),
        lambda address: GrpcStreamControl(address, timeout_s=timeout_s, calling=calling),
    )
    try:
        yield GrpcAttachDesk(control, calling=calling)
    finally:
        await control.close()
