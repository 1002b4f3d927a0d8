"""The running services, through gRPC, the wire and HTTP, keep the contracts of their ports."""

import contextlib
import uuid

import pytest
from aiohttp import ClientSession, web

from tests.contracts.admin_suite import AdminContract
from tests.contracts.reads_suite import ReadsContract
from tests.contracts.services import READ_BYTES, Services
from tests.contracts.streams_suite import StreamsContract
from tierlog.adapters.memory.clock import SimClock
from tierlog.adapters.rpc.reader import HttpReads
from tierlog.adapters.system import SystemIds
from tierlog.adapters.tcp import TcpTransport
from tierlog.adapters.zookeeper.metadata import ZooKeeperMetadata
from tierlog.catalog import Catalog
from tierlog.model.errors import CorruptError
from tierlog.model.ids import StreamName
from tierlog.model.node import NodeInfo
from tierlog.model.position import Edge
from tierlog.proto.v1 import ingest_pb2 as pb
from tierlog.proto.v1 import ingest_pb2_grpc as rpc
from tierlog.runtime.rpc import serve_grpc
from tierlog.wire.auth import OpenAuthenticator
from tierlog.wire.server import WireServer
from tierlog.wiring.client import open_client_connections

pytestmark = pytest.mark.integration

NOBODY = "127.0.0.1:9"
LOOPBACK = "127.0.0.1"


class NoRequests:
    """A node on the wire that greets, and takes nothing."""

    async def ready(self, *, appends):
        pass

    def append(self, stream, draft, *, deadline_s, condition):
        raise NotImplementedError

    def add_run(self, run, *, recovery):
        raise NotImplementedError

    def lac(self, ledger_id, last_add_confirmed):
        raise NotImplementedError


class Bystander(rpc.IngestServicer):
    """A node that says of every stream that it is its own, and does no more."""

    def __init__(self, node_id, cluster_id):
        self.owner = pb.FindOwnerResponse(
            node_id=node_id, http_address=NOBODY, owner_epoch=1, cluster_id=cluster_id.bytes
        )

    async def FindOwner(self, request, context):  # noqa: N802 - gRPC's names, as the next ones
        return self.owner

    async def CreateStream(self, request, context):  # noqa: N802
        raise NotImplementedError

    async def Append(self, request, context):  # noqa: N802
        raise NotImplementedError

    async def Seal(self, request, context):  # noqa: N802
        raise NotImplementedError

    async def GetAttributes(self, request, context):  # noqa: N802
        raise NotImplementedError

    async def ListAttributes(self, request, context):  # noqa: N802
        raise NotImplementedError

    async def Attach(self, request, context):  # noqa: N802
        raise NotImplementedError


@contextlib.asynccontextmanager
async def bystander(node_id, cluster_id):
    """Run one; give what it announces."""
    node = Bystander(node_id, cluster_id)
    wire = WireServer(
        NoRequests(), cluster_id=cluster_id, node_id=node_id, authenticator=OpenAuthenticator()
    )
    listener = await TcpTransport().listen(f"{LOOPBACK}:0", wire.serve)
    try:
        async with serve_grpc(
            lambda server: rpc.add_IngestServicer_to_server(node, server), host=LOOPBACK, port=0
        ) as port:
            node.owner.grpc_address = f"{LOOPBACK}:{port}"
            node.owner.wire_address = listener.address
            yield NodeInfo(
                node_id=node_id,
                wire_address=listener.address,
                grpc_address=node.owner.grpc_address,
                http_address=NOBODY,
                read_only=True,
            )
    finally:
        await listener.close()


@pytest.fixture
def stream():
    return StreamName(f"contract-{uuid.uuid4().hex[:8]}")


@pytest.fixture
def services(cluster):
    settings = cluster.settings

    @contextlib.asynccontextmanager
    async def give_away(stream, node_id):
        """Announce another node, which takes no ledgers, and let it claim the stream."""
        store = await ZooKeeperMetadata.connect(settings.zookeeper.hosts)
        try:
            catalog = Catalog.over(store, clock=SimClock(), ids=SystemIds())
            found = await catalog.nodes.ensure_cluster()
            async with bystander(node_id, found.cluster_id) as info:
                await catalog.nodes.announce(info)
                await catalog.streams.claim(stream, node_id)
                yield
        finally:
            await store.close()

    @contextlib.asynccontextmanager
    async def open_services():
        async with open_client_connections(
            settings,
            ingest_grpc=cluster.address("ingest", "grpc"),
            reader_http=cluster.address("reader", "http"),
            scheduler_http=cluster.address("scheduler", "http"),
        ) as found:

            async def connect(stream, tasks):
                return await found.connect_owner(await found.control.find_owner(stream), tasks)

            yield Services(
                control=found.control,
                reads=found.reads,
                admin=found.admin,
                connect=connect,
                give_away=give_away,
            )

    return open_services


class TestRunningIngest(StreamsContract):
    pass


class TestRunningReader(ReadsContract):
    pass


class TestRunningScheduler(AdminContract):
    pass


async def test_frames_that_are_damaged_on_their_way_are_told(cluster, services, stream, free_port):
    """Between reader and client stands one that flips a bit of every body."""

    async def relay(request: web.Request) -> web.Response:
        url = f"http://{cluster.address('reader', 'http')}{request.raw_path}"
        async with ClientSession() as session, session.get(url) as answer:
            body = bytearray(await answer.read())
            body[-1] ^= 1
            kept = {
                name: text
                for name, text in answer.headers.items()
                if name.lower().startswith("tierlog-")
            }
            return web.Response(status=answer.status, body=bytes(body), headers=kept)

    app = web.Application()
    app.router.add_get("/{path:.*}", relay)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", free_port).start()
    reads = HttpReads(f"127.0.0.1:{free_port}", timeout_s=10.0)
    try:
        async with services() as on:
            (ledger,) = await on.fill(stream, [b"whole"])
        with pytest.raises(CorruptError) as caught:
            await reads.read(stream, Edge.EARLIEST, bytes_max=READ_BYTES)
        assert caught.value.details == {"ledger_id": str(ledger), "entry_id": "0"}
    finally:
        await reads.close()
        await runner.cleanup()
