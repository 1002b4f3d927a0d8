"""An address is no identity: what another cluster's node answers there is no answer.

Nodes here are real servers of gRPC and the wire over streams in memory. One goes, and a node of
another cluster takes its ports.
"""

# A node has what these tests ask of it, and no more.
# mypy: disable-error-code="abstract"

import asyncio
import contextlib
import uuid
from typing import Any

import grpc
import pytest
from aiohttp import ClientSession

from tests.unit.catalog.world import Process
from tierlog.adapters.memory.metadata import MemoryMetadata
from tierlog.adapters.memory.streams import MemoryStreamControl, MemoryStreams
from tierlog.adapters.rpc.ingest import GrpcStreamControl
from tierlog.adapters.rpc.ingest_nodes import IngestNodes
from tierlog.adapters.rpc.rest import RestService
from tierlog.adapters.tcp import TcpTransport
from tierlog.client import open_client
from tierlog.model.errors import Reason, RefusedError, RetryableError
from tierlog.model.ids import LedgerId, NodeId, StreamName
from tierlog.model.node import NodeInfo
from tierlog.proto.v1 import ingest_pb2 as pb
from tierlog.proto.v1 import ingest_pb2_grpc as rpc
from tierlog.runtime.calling import Calling
from tierlog.runtime.clusters import CLUSTER_ID, KnownCluster
from tierlog.runtime.http import build_http_app, serve_http
from tierlog.runtime.rpc import open_channel, serve_grpc
from tierlog.runtime.settings import ClientSettings, Settings
from tierlog.wire.auth import OpenAuthenticator
from tierlog.wire.server import WireServer
from tierlog.wiring.tier1 import open_storage_controls

OURS, THEIRS = uuid.UUID(int=0xA), uuid.UUID(int=0xB)
LOGS = StreamName("logs")
LOOPBACK = "127.0.0.1"
NOBODY = f"{LOOPBACK}:9"
TIMEOUT_S = 1.0


class Node(rpc.IngestServicer):
    """One node of a cluster, over its streams; it owns whatever it is asked for."""

    def __init__(self, cluster_id: uuid.UUID, streams: MemoryStreams) -> None:
        self.cluster_id = cluster_id
        self.streams = streams
        self.grpc_port = self.wire_port = 0
        self.fenced: list[int] = []
        self._control = MemoryStreamControl(streams)

    async def CreateStream(self, request, context):  # noqa: N802 - gRPC's names, as the next ones
        created = await self._control.create_stream(
            request.stream, raw=request.raw, policy=None, exist_ok=request.exist_ok
        )
        return pb.CreateStreamResponse(created=created)

    async def FindOwner(self, request, context):  # noqa: N802
        found = self.streams.written(request.stream)
        return pb.FindOwnerResponse(
            node_id="n1",
            wire_address=f"{LOOPBACK}:{self.wire_port}",
            grpc_address=f"{LOOPBACK}:{self.grpc_port}",
            http_address=NOBODY,
            owner_epoch=found.owner_epoch,
            cluster_id=self.cluster_id.bytes,
        )

    async def Fence(self, request, context):  # noqa: N802
        self.fenced.append(request.ledger_id)
        return pb.FenceResponse()

    # What the wire calls

    async def ready(self, *, appends):
        pass

    def append(self, stream, draft, *, deadline_s, condition):
        answer = asyncio.get_running_loop().create_future()
        entries = [bytes(entry) for entry in draft.entries()]
        self.streams.check(stream, entries, condition)
        answer.set_result([self.streams.store(stream, entries)])
        return answer

    def add_run(self, run, *, recovery):
        raise NotImplementedError

    def lac(self, ledger_id, last_add_confirmed):
        raise NotImplementedError


@contextlib.asynccontextmanager
async def served(node, *, grpc_port=0, wire_port=0, checks=True):
    """Serve a node; without ``checks`` it is of a version that does not look at clusters."""
    server = WireServer(
        node,
        cluster_id=node.cluster_id,
        node_id=NodeId("n1"),
        authenticator=OpenAuthenticator(),
    )
    listener = await TcpTransport().listen(f"{LOOPBACK}:{wire_port}", server.serve)
    node.wire_port = int(listener.address.rpartition(":")[2])
    try:
        async with serve_grpc(
            lambda grpc_server: _register(node, grpc_server),
            host=LOOPBACK,
            port=grpc_port,
            drain_s_max=0.2,
            cluster_id=node.cluster_id if checks else None,
        ) as port:
            node.grpc_port = port
            yield node
    finally:
        await listener.close()


def _register(node, server):
    rpc.add_IngestServicer_to_server(node, server)
    handler = grpc.unary_unary_rpc_method_handler(
        node.Fence,
        request_deserializer=pb.FenceRequest.FromString,
        response_serializer=pb.FenceResponse.SerializeToString,
    )
    methods = {"Fence": handler}
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("tierlog.v1.StorageNode", methods),)
    )


def client_of(*ports):
    addresses = ",".join(f"{LOOPBACK}:{port}" for port in ports)
    client = ClientSettings(
        ingest_address=addresses,
        reader_http_address=NOBODY,
        scheduler_http_address=NOBODY,
        timeout_s=TIMEOUT_S,
    )
    return open_client(Settings(client=client))


def is_of_another(error, *, answering=THEIRS, wanted=OURS):
    assert isinstance(error, RetryableError)
    assert "another cluster answers" in error.message
    assert error.reason is Reason.UNAVAILABLE
    assert error.details == {"cluster_id": str(answering), "wanted_cluster_id": str(wanted)}
    assert error.remedy
    return True


async def test_a_stranger_at_a_dead_nodes_address_gets_no_append_and_no_stream():
    ours, theirs = MemoryStreams(), MemoryStreams()
    async with contextlib.AsyncExitStack() as stack:
        other = await stack.enter_async_context(served(Node(OURS, ours)))
        async with served(Node(OURS, ours)) as gone:
            client = await stack.enter_async_context(client_of(gone.grpc_port, other.grpc_port))
            await client.append(LOGS, [b"one"])
        await stack.enter_async_context(
            served(Node(THEIRS, theirs), grpc_port=gone.grpc_port, wire_port=gone.wire_port)
        )
        await client.append(LOGS, [b"two"])
        assert theirs.by_name == {}
        assert len(ours.by_name[LOGS].ledgers[0].entries) == 2


async def test_a_stranger_of_an_older_version_that_says_it_is_the_owner_is_not_believed():
    ours, theirs = MemoryStreams(), MemoryStreams()
    await MemoryStreamControl(theirs).create_stream(LOGS, raw=False, policy=None, exist_ok=True)
    calling = Calling(cluster=KnownCluster())
    async with contextlib.AsyncExitStack() as stack:
        other = await stack.enter_async_context(served(Node(OURS, ours), checks=False))
        stranger = await stack.enter_async_context(served(Node(THEIRS, theirs), checks=False))
        nodes = IngestNodes(
            [f"{LOOPBACK}:{one.grpc_port}" for one in (other, stranger)],
            lambda address: GrpcStreamControl(address, timeout_s=5.0, calling=calling),
        )
        stack.push_async_callback(nodes.close)
        await nodes.create_stream(LOGS, raw=False, policy=None, exist_ok=True)
        found = await nodes.find_owner(LOGS)
        assert found.cluster_id == OURS
        with pytest.raises(RetryableError) as caught:
            await nodes.node(f"{LOOPBACK}:{stranger.grpc_port}").find_owner(LOGS)
        assert is_of_another(caught.value)


async def test_where_all_addresses_are_a_strangers_the_client_says_so_in_its_usual_time():
    ours, theirs = MemoryStreams(), MemoryStreams()
    async with contextlib.AsyncExitStack() as stack:
        async with served(Node(OURS, ours)) as gone:
            client = await stack.enter_async_context(client_of(gone.grpc_port))
            await client.append(LOGS, [b"one"])
        await stack.enter_async_context(
            served(Node(THEIRS, theirs), grpc_port=gone.grpc_port, wire_port=gone.wire_port)
        )
        begun_s = asyncio.get_running_loop().time()
        with pytest.raises(RetryableError) as caught:
            await client.append(LOGS, [b"two"])
        assert is_of_another(caught.value)
        with pytest.raises(RetryableError) as caught:
            await client.create_stream("new", exist_ok=False)
        assert is_of_another(caught.value)
        assert asyncio.get_running_loop().time() - begun_s < 5 * TIMEOUT_S
        assert theirs.by_name == {}
        # Whoever begins anew with these addresses means this cluster.
        anew = await stack.enter_async_context(client_of(gone.grpc_port))
        await anew.append(LOGS, [b"three"])
        assert list(theirs.by_name) == [LOGS]


async def test_a_writer_goes_on_where_a_stranger_took_its_owners_wire():
    ours, theirs = MemoryStreams(), MemoryStreams()
    async with contextlib.AsyncExitStack() as stack:
        other = await stack.enter_async_context(served(Node(OURS, ours)))
        async with served(Node(OURS, ours)) as gone:
            client = await stack.enter_async_context(client_of(other.grpc_port))
            # The node that is asked names the wire of the one that is gone, for a while.
            right, other.wire_port = other.wire_port, gone.wire_port
            await client.append(LOGS, [b"one"])
        await stack.enter_async_context(served(Node(THEIRS, theirs), wire_port=gone.wire_port))
        async with asyncio.TaskGroup() as tasks:
            appending = tasks.create_task(client.append(LOGS, [b"two"]))
            await asyncio.sleep(0.3)
            other.wire_port = right
            await appending
        assert len(ours.by_name[LOGS].ledgers[0].entries) == 2
        assert theirs.by_name == {}


async def test_calls_name_a_cluster_or_none_and_answers_always_do():
    async with (
        served(Node(OURS, MemoryStreams())) as node,
        open_channel(f"{LOOPBACK}:{node.grpc_port}") as channel,
    ):
        calls: Any = rpc.IngestStub(channel)
        for named in ((), ((CLUSTER_ID, str(OURS)),), ((CLUSTER_ID, str(OURS).upper()),)):
            call = calls.CreateStream(
                pb.CreateStreamRequest(stream=LOGS, exist_ok=True), metadata=named
            )
            await call
            assert dict(await call.initial_metadata())[CLUSTER_ID] == str(OURS)
        for other in (str(THEIRS), "", "nonsense" * 100):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await calls.CreateStream(
                    pb.CreateStreamRequest(stream="other", exist_ok=True),
                    metadata=((CLUSTER_ID, other),),
                )
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert dict(caught.value.initial_metadata())[CLUSTER_ID] == str(OURS)
            assert "another cluster" in str(caught.value.details())
        assert list(node.streams.by_name) == [LOGS]


async def test_answers_that_go_on_are_refused_to_strangers_too():
    class Numbers(grpc.GenericRpcHandler):
        def service(self, handler_call_details):
            async def count(request, context):
                for number in range(3):
                    yield bytes([number])

            return grpc.unary_stream_rpc_method_handler(count)

    def register(server):
        server.add_generic_rpc_handlers((Numbers(),))

    async def numbers(calling):
        async with open_channel(f"{LOOPBACK}:{port}", calling) as channel:
            counting: Any = channel.unary_stream("/tierlog.Test/Count")
            return [one async for one in counting(b"")]

    async with serve_grpc(register, host=LOOPBACK, port=0, cluster_id=OURS) as port:
        assert len(await numbers(Calling(cluster=KnownCluster(OURS)))) == 3
        with pytest.raises(grpc.aio.AioRpcError, match="another cluster"):
            await numbers(Calling(cluster=KnownCluster(THEIRS)))


async def test_the_first_answer_decides_whose_answers_count_also_when_it_is_a_refusal():
    calling = Calling(cluster=KnownCluster())
    async with (
        served(Node(OURS, MemoryStreams())) as node,
        served(Node(THEIRS, MemoryStreams())) as stranger,
    ):
        control, other = (
            GrpcStreamControl(f"{LOOPBACK}:{one.grpc_port}", timeout_s=5.0, calling=calling)
            for one in (node, stranger)
        )
        try:
            with pytest.raises(RefusedError) as caught:
                await control.find_owner(LOGS)
            assert caught.value.reason is Reason.STREAM_NOT_FOUND
            with pytest.raises(RetryableError) as doubted:
                await other.find_owner(LOGS)
            assert is_of_another(doubted.value)
            assert await control.answers()
            assert not await other.answers()
        finally:
            await control.close()
            await other.close()


def test_what_is_known_of_a_cluster_does_not_change():
    known = KnownCluster()
    known.check(None, where="x")
    known.check("no id at all", where="x")
    assert known.named() == {}
    known.check(str(OURS), where="x")
    known.check(str(OURS).upper(), where="x")
    known.check(None, where="x")
    with pytest.raises(RetryableError) as caught:
        known.check(str(THEIRS), where="x")
    assert is_of_another(caught.value)
    assert known.named() == {CLUSTER_ID: str(OURS)}


async def test_a_service_fences_no_ledger_of_another_cluster():
    """It knows its cluster from the metadata; an id of a ledger is anybody's."""
    process = Process(MemoryMetadata(), 1)
    await process.catalog.streams.ensure_roots()
    cluster = await process.catalog.nodes.ensure_cluster()
    async with served(Node(THEIRS, MemoryStreams())) as stranger:
        info = NodeInfo(
            node_id=NodeId("n1"),
            wire_address=NOBODY,
            grpc_address=f"{LOOPBACK}:{stranger.grpc_port}",
            http_address=NOBODY,
        )
        await process.catalog.nodes.announce(info)
        async with open_storage_controls(process.catalog) as nodes:
            client = await nodes.client(NodeId("n1"))
            with pytest.raises(RetryableError) as caught:
                await client.fence(LedgerId(1))
            assert is_of_another(caught.value, wanted=cluster.cluster_id)
        assert stranger.fenced == []


@contextlib.asynccontextmanager
async def http_service(cluster_id, done, *, port=0):
    app = build_http_app("test", checks={}, cluster_id=cluster_id)

    @app.post("/v1/things")
    async def make() -> int:
        done.append(cluster_id)
        return len(done)

    async with serve_http(app, host=LOOPBACK, port=port) as bound:
        yield bound


async def test_over_http_a_stranger_does_nothing_either():
    done: list[uuid.UUID] = []
    calling = Calling(cluster=KnownCluster())
    async with http_service(OURS, done) as port:
        service = RestService(f"{LOOPBACK}:{port}", name="test", timeout_s=5.0, calling=calling)
        try:
            # Whoever is told "no such path" knows by whom.
            with pytest.raises(RefusedError):
                await service.json("GET", "/v1/nothing")
            assert await service.json("POST", "/v1/things") == 1
        finally:
            await service.close()
    async with http_service(THEIRS, done, port=port):
        service = RestService(f"{LOOPBACK}:{port}", name="test", timeout_s=5.0, calling=calling)
        try:
            for method, path in (("POST", "/v1/things"), ("GET", "/v1/nothing")):
                with pytest.raises(RetryableError) as caught:
                    await service.json(method, path)
                assert is_of_another(caught.value)
        finally:
            await service.close()
    assert done == [OURS]


async def test_an_http_request_names_a_cluster_or_none():
    done: list[uuid.UUID] = []
    async with http_service(OURS, done) as port, ClientSession() as session:
        url = f"http://{LOOPBACK}:{port}/v1/things"
        for named in ({}, {CLUSTER_ID: str(OURS)}):
            async with session.post(url, headers=named) as answer:
                assert (answer.status, answer.headers[CLUSTER_ID]) == (200, str(OURS))
        async with session.post(url, headers={CLUSTER_ID: str(THEIRS)}, json=[1]) as answer:
            assert (answer.status, answer.headers[CLUSTER_ID]) == (503, str(OURS))
            problem = await answer.json(content_type=None)
        assert problem["reason"] == "UNAVAILABLE"
        assert problem["details"]["wanted_cluster_id"] == str(THEIRS)
    assert len(done) == 2
