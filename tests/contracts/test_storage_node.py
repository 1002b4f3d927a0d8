"""The storage-node port (tierlog.ports.storage_node): the node itself, the node behind HTTP, gRPC
and the wire, and the twin that the ledger's tests use all pass this one suite.

"NO_SUCH_ENTRY, NOT_YET, UNKNOWN and FENCED are four answers, and only the first says that
something isn't there." (protocols.md)
"""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager
from dataclasses import replace
from uuid import UUID

import pytest

from tests.unit.storage.node_kit import make_run, opened, outcome, read_all
from tierlog.adapters.memory.files import MemoryDisk
from tierlog.adapters.memory.storage_node import MemoryStorageNode
from tierlog.adapters.rpc.storage_node import RemoteStorageNode, WireConnector
from tierlog.adapters.tcp import TcpTransport
from tierlog.format.run_stream import end_mark
from tierlog.model.errors import CorruptError, IndeterminateError, Reason, RetryableError
from tierlog.model.ids import EntryId, LedgerId, NodeId
from tierlog.model.node import NodeInfo
from tierlog.runtime.http import build_http_app, serve_http
from tierlog.runtime.rpc import serve_grpc
from tierlog.wire.auth import OpenAuthenticator
from tierlog.wire.connection import Hello
from tierlog.wire.messages import ROLE_OWNER
from tierlog.wire.server import WireServer
from tierlog_ingest import http_runs, rpc_storage

CLUSTER = UUID(int=1)
HELLO = Hello(cluster_id=CLUSTER, role=ROLE_OWNER)
L1, L2 = LedgerId(1), LedgerId(2)


class Handler:
    """The storage node's share of the wire."""

    def __init__(self, node):
        self.node = node

    async def ready(self, *, appends):
        await self.node.ready()

    def append(self, stream, draft, *, deadline_s, condition):
        raise NotImplementedError

    def add_run(self, run, *, recovery):
        return self.node.add(run, recovery=recovery)

    def lac(self, ledger_id, last_add_confirmed):
        self.node.confirm(ledger_id, last_add_confirmed)


@asynccontextmanager
async def served(node, *, small_calls_of=CLUSTER):
    """Serve a node over sockets; give its addresses and the listener of its wire.

    ``small_calls_of``: the cluster that answers over gRPC and HTTP.
    """
    server = WireServer(
        Handler(node),
        cluster_id=CLUSTER,
        node_id=NodeId("n1"),
        authenticator=OpenAuthenticator(),
    )
    listener = await TcpTransport().listen("127.0.0.1:0", server.serve)
    app = build_http_app("node", checks={}, cluster_id=small_calls_of)
    http_runs.add_routes(app, node)
    async with (
        serve_grpc(
            lambda grpc_server: rpc_storage.register(grpc_server, node),
            host="127.0.0.1",
            port=0,
            cluster_id=small_calls_of,
        ) as grpc_port,
        serve_http(app, host="127.0.0.1", port=0) as http_port,
    ):
        info = NodeInfo(
            node_id=NodeId("n1"),
            wire_address=listener.address,
            grpc_address=f"127.0.0.1:{grpc_port}",
            http_address=f"127.0.0.1:{http_port}",
        )
        try:
            yield info, listener
        finally:
            await listener.close()


@asynccontextmanager
async def remote(info):
    async with asyncio.TaskGroup() as tasks:
        connector = WireConnector(TcpTransport(), HELLO, tasks=tasks)
        client = await connector.connect(info)
        try:
            yield client
        finally:
            await connector.close(client)


@pytest.fixture(params=["twin", "node", "remote"])
def open_node(request):
    @asynccontextmanager
    async def make():
        if request.param == "twin":
            yield MemoryStorageNode(NodeId("n1"))
            return
        async with opened(MemoryDisk(random.Random(1))) as node:
            if request.param == "node":
                yield node
                return
            async with served(node) as (info, _), remote(info) as client:
                yield client

    return make


async def test_runs_come_back_as_they_were(open_node):
    async with open_node() as node:
        runs = [make_run(1, first, count=3, size=2000) for first in range(0, 120, 3)]
        for answer in [node.add(run) for run in runs]:
            await answer
        assert await read_all(node, 1) == runs
        assert await read_all(node, 1, 50) == runs[16:]
        assert await node.list_ledgers() == [1]
        assert await node.last_add_confirmed(L1) == (116, 119, False)


async def test_ordinary_reads_end_at_the_lac(open_node):
    async with open_node() as node:
        for first in range(4):
            await node.add(make_run(1, first))
        found = await read_all(node, 1, recovery=False)
        assert [run.first_entry_id for run in found] == [0, 1, 2]
        found = await read_all(node, 1, recovery=False, last_entry_id=EntryId(1))
        assert [run.first_entry_id for run in found] == [0, 1]
        found = await read_all(node, 1, recovery=False, bytes_max=1)
        assert [run.first_entry_id for run in found] == [0]
        for how in ({}, {"last_entry_id": EntryId(9)}, {"wait_s": 0.05}):
            error = await outcome(read_all(node, 1, 3, recovery=False, **how))
            assert error.reason is Reason.NOT_YET
        node.confirm(L1, EntryId(3))
        await asyncio.sleep(0.05)
        assert len(await read_all(node, 1, recovery=False)) == 4


async def test_what_is_not_there_is_told(open_node):
    async with open_node() as node:
        await node.add(make_run(1, 4, lac=4))
        for ledger_id, first, how in (
            (1, 0, {}),
            (1, 5, {}),
            (7, 0, {}),
            (1, 0, {"recovery": False}),
        ):
            error = await outcome(read_all(node, ledger_id, first, **how))
            assert error.reason is Reason.NO_SUCH_ENTRY
        assert await node.last_add_confirmed(L2) == (-1, -1, False)


async def test_a_doubt_is_told_over_the_network():
    twin = MemoryStorageNode(NodeId("n1"))
    twin.doubtful.add(L2)
    async with served(twin) as (info, _), remote(info) as client:
        assert await client.last_add_confirmed(L1) == (-1, -1, False)
        assert await client.last_add_confirmed(L2) == (-1, -1, True)


@pytest.mark.covers("D13")
async def test_a_node_says_which_entries_it_holds(open_node):
    async with open_node() as node:
        assert await node.held_entries(L1) == []
        for first, count in ((4, 2), (0, 1), (9, 3), (6, 1)):
            await node.add(make_run(1, first, count=count), recovery=True)
        await node.add(make_run(2, 0))
        assert await node.held_entries(L1) == [(0, 0), (4, 6), (9, 11)]
        assert await node.held_entries(L2) == [(0, 0)]
        assert await node.held_entries(LedgerId(3)) == []


async def test_runs_that_are_added_together_are_judged_one_by_one(open_node):
    async with open_node() as node:
        await node.fence(L2)
        runs = [
            make_run(1, 0, count=3),
            make_run(2, 0),  # fenced
            make_run(1, 3),
            make_run(3, 0),
            make_run(1, 3),  # again
        ]
        outcomes = [await outcome(answer) for answer in [node.add(run) for run in runs]]
        assert [one and one.reason for one in outcomes] == [
            None, Reason.FENCED, None, None, None,
        ]  # fmt: skip
        assert await read_all(node, 1) == [runs[0], runs[2]]
        assert await read_all(node, 3) == [runs[3]]
        assert await node.held_entries(L2) == []


@pytest.mark.covers("D18")
async def test_a_fence_ends_ordinary_adds(open_node):
    async with open_node() as node:
        await node.add(make_run(1, 0))
        assert await node.fence(L1) == (-1, 0, False)
        assert await node.fence(L1) == (-1, 0, False)
        assert await node.fence(L2) == (-1, -1, False)
        for ledger_id in (1, 2):
            error = await outcome(node.add(make_run(ledger_id, 1)))
            assert error.reason is Reason.FENCED
            await node.add(make_run(ledger_id, 1), recovery=True)
        await node.add(make_run(3, 0))
        await read_all(node, 3)
        assert (await outcome(node.add(make_run(3, 1)))).reason is Reason.FENCED


async def test_a_reader_waits_for_the_lac(open_node):
    async with open_node() as node:
        await node.add(make_run(1, 0))
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(read_all(node, 1, recovery=False, wait_s=0.3))
            await asyncio.sleep(0.05)
            await node.add(make_run(1, 1))
        assert [run.first_entry_id for run in await reading] == [0]


# What only distance brings


async def test_of_runs_in_one_message_those_that_overlap_are_refused():
    disk, spans = MemoryDisk(random.Random(1)), ((0, 3), (2, 3), (0, 2), (3, 2), (3, 2), (4, 1))
    async with opened(disk) as node, served(node) as (info, _), remote(info) as client:
        runs = [make_run(1, first, count=count) for first, count in spans]
        outcomes = [await outcome(answer) for answer in [client.add(run) for run in runs]]
        assert [one and one.reason for one in outcomes] == [
            None, Reason.CORRUPT, Reason.CORRUPT, None, None, Reason.CORRUPT,
        ]  # fmt: skip
        assert await read_all(client, 1) == [runs[0], runs[3]]


async def test_a_node_that_goes_leaves_adds_open_and_reads_unknown():
    async with opened(MemoryDisk(random.Random(1))) as node:
        async with served(node) as (info, listener), remote(info) as client:
            await client.add(make_run(1, 0))
            node.add = lambda _run, **_: asyncio.get_running_loop().create_future()
            adding = client.add(make_run(1, 1))
            await asyncio.sleep(0.1)
            await listener.close()
            assert isinstance(await outcome(adding), IndeterminateError)
            assert isinstance(await outcome(client.add(make_run(1, 2))), RetryableError)
        async with asyncio.TaskGroup() as tasks:
            connector = WireConnector(TcpTransport(), HELLO, tasks=tasks)
            assert isinstance(await outcome(connector.connect(info)), RetryableError)


async def test_another_clusters_node_at_the_address_is_asked_nothing_of_a_ledger():
    """It has ledgers of the same ids: fencing one would stop that cluster's writer."""
    async with opened(MemoryDisk(random.Random(1))) as node:
        await node.add(make_run(1, 0))
        async with (
            served(node, small_calls_of=UUID(int=2)) as (info, _),
            remote(info) as client,
        ):
            asked = [
                client.fence(L1),
                client.last_add_confirmed(L1),
                client.list_ledgers(),
                client.held_entries(L1),
                read_all(client, 1),
            ]
            for one in asked:
                error = await outcome(one)
                assert isinstance(error, RetryableError), error
                assert error.reason is Reason.UNAVAILABLE
                assert "another cluster answers" in error.message
        await node.add(make_run(1, 1))


async def test_another_node_at_the_address_is_not_taken_for_the_one_that_was_there():
    """Two of three copies would lie on it, and both acknowledgements would be its own."""
    async with (
        opened(MemoryDisk(random.Random(1))) as node,
        served(node) as (info, _),
        asyncio.TaskGroup() as tasks,
    ):
        connector = WireConnector(TcpTransport(), HELLO, tasks=tasks)
        error = await outcome(connector.connect(replace(info, node_id=NodeId("n2"))))
        assert isinstance(error, RetryableError)
        assert error.details == {"node_id": "n2"}


@asynccontextmanager
async def answering(body, *, declared_len):
    """Answer every request with ``body``, and hang up."""

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        head = f"HTTP/1.1 200 OK\r\ncontent-length: {declared_len}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    info = NodeInfo(
        node_id=NodeId("n1"), wire_address=address, grpc_address=address, http_address=address
    )
    client = RemoteStorageNode(info, None)  # type: ignore[arg-type]
    try:
        yield client
    finally:
        await super(RemoteStorageNode, client).close()
        server.close()
        await server.wait_closed()


async def test_a_body_that_is_cut_never_passes_as_a_short_one():
    runs = [make_run(1, first) for first in range(2)]
    whole = b"".join(bytes(run.encoded) for run in runs) + end_mark(2)
    async with answering(whole, declared_len=len(whole)) as client:
        assert await read_all(client, 1, recovery=False) == runs
    for cut in range(0, len(whole), 7):
        for declared_len in (cut, len(whole)):
            async with answering(whole[:cut], declared_len=declared_len) as client:
                error = await outcome(read_all(client, 1, recovery=False))
                assert error.reason is Reason.UNKNOWN, cut
    wrong_count = whole[: -len(end_mark(2))] + end_mark(3)
    async with answering(wrong_count, declared_len=len(whole)) as client:
        assert (await outcome(read_all(client, 1))).reason is Reason.UNKNOWN


async def test_a_flipped_byte_in_a_body_is_never_handed_on():
    run = make_run(1, 0)
    whole = bytearray(run.encoded)
    for at in range(0, len(whole), 5):
        flipped = bytearray(whole)
        flipped[at] ^= 1
        body = bytes(flipped) + end_mark(1)
        async with answering(body, declared_len=len(body)) as client:
            error = await outcome(read_all(client, 1, recovery=False))
            assert isinstance(error, CorruptError) or error.reason is Reason.UNKNOWN
