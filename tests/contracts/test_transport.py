"""The transport port (tierlog.ports.transport): every adapter passes this one suite.

"Byte frames between two processes, in order, at most once."
"""

from __future__ import annotations

import asyncio
import ssl
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast
from uuid import UUID

import pytest

from tierlog.adapters.memory.transport import MemoryNetwork
from tierlog.adapters.tcp import TcpTransport
from tierlog.adapters.tcp import transport as tcp
from tierlog.adapters.tcp.transport import TcpChannel
from tierlog.model.errors import Reason, RefusedError, RetryableError
from tierlog.model.ids import NodeId
from tierlog.wire.auth import OpenAuthenticator
from tierlog.wire.connection import Hello, WireClient
from tierlog.wire.messages import ROLE_OWNER
from tierlog.wire.server import WireHandler, WireServer

CLUSTER = UUID(int=7)


@pytest.fixture(params=["memory", "tcp"])
def make_transport(request):
    if request.param == "memory":
        network = MemoryNetwork(latency_s=lambda: 0.001)
        return network.transport
    return lambda _name: TcpTransport()


@pytest.fixture
def pair(make_transport):
    """Both ends of one connection, with a listener that goes at the end."""

    @asynccontextmanager
    async def make():
        accepted = asyncio.get_running_loop().create_future()
        over = asyncio.Event()

        async def handler(channel):
            accepted.set_result(channel)
            await over.wait()

        listener = await make_transport("server").listen("127.0.0.1:0", handler)
        client = await make_transport("client").connect(listener.address)
        try:
            yield client, await accepted
        finally:
            over.set()
            client.close()
            await listener.close()

    return make


async def test_frames_arrive_whole_and_in_order(pair):
    async with pair() as (client, server):
        for number in range(200):
            client.send(b"h%d" % number, [bytes([number]) * number, b"", memoryview(b"end")])
        for number in range(200):
            frame = await server.receive()
            assert frame.header == b"h%d" % number
            assert frame.body == bytes([number]) * number + b"end"
        server.send(b"back")
        assert (await client.receive()) == (b"back", b"")


async def test_bodies_stay_what_they_are(pair):
    async with pair() as (client, server):
        kept = []
        for number in range(64):
            client.send(b"", [bytes([number]) * 20_000])
            kept.append(await server.receive())
        for number, frame in enumerate(kept):
            assert frame.body == bytes([number]) * 20_000


async def test_a_body_can_be_written_over(pair):
    async with pair() as (client, server):
        client.send(b"", [b"draft"])
        frame = await server.receive()
        frame.body[:] = b"final"
        assert frame.body == b"final"


async def test_large_frames_and_a_slow_receiver(pair):
    async with pair() as (client, server), asyncio.TaskGroup() as tasks:

        async def send():
            for number in range(24):
                client.send(b"", [bytes([number]) * 1_000_000])
                await client.drain()

        sending = tasks.create_task(send())
        await asyncio.sleep(0.05)
        assert not sending.done(), "a sender is held back by a receiver that takes nothing"
        for number in range(24):
            frame = await server.receive()
            assert len(frame.body) == 1_000_000
            assert frame.body[0] == frame.body[-1] == number


async def test_an_orderly_close_ends_with_none_after_what_was_sent(pair):
    async with pair() as (client, server):
        client.send(b"last")
        client.close()
        assert (await server.receive()).header == b"last"
        assert await server.receive() is None
        with pytest.raises(RetryableError):
            client.send(b"more")
        with pytest.raises(RetryableError):
            await client.receive()


async def test_who_waits_hears_of_the_end(pair):
    async with pair() as (client, server):
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(server.receive())
            await asyncio.sleep(0.01)
            client.close()
        assert waiting.result() is None


async def test_a_frame_over_the_limit_is_refused_and_the_connection_lives(pair):
    async with pair() as (client, server):
        with pytest.raises(RefusedError) as caught:
            client.send(b"", [bytes(9 * 1024 * 1024)])
        assert caught.value.reason is Reason.TOO_LARGE
        client.send(b"ok")
        assert (await server.receive()).header == b"ok"


async def test_nobody_listens(make_transport):
    async def handler(_channel):
        pass

    listener = await make_transport("server").listen("127.0.0.1:0", handler)
    address = listener.address
    await listener.close()
    with pytest.raises(RetryableError) as caught:
        await make_transport("client").connect(address)
    assert caught.value.remedy


async def test_an_address_in_use_is_told(make_transport):
    async def handler(_channel):
        pass

    transport = make_transport("server")
    listener = await transport.listen("127.0.0.1:0", handler)
    with pytest.raises(RetryableError, match="can't listen"):
        await transport.listen(listener.address, handler)
    await listener.close()


async def test_a_listener_that_closes_ends_its_connections(make_transport):
    ended = asyncio.Event()

    async def handler(channel):
        try:
            await channel.receive()
        finally:
            ended.set()

    listener = await make_transport("server").listen("127.0.0.1:0", handler)
    client = await make_transport("client").connect(listener.address)
    client.send(b"")
    assert repr(client)
    await asyncio.wait_for(ended.wait(), 5)
    await listener.close()
    assert await client.receive() is None


async def test_tcp_refuses_what_is_not_an_address():
    for address in ("nowhere", "host:", ":1", "host:port", "host:70000"):
        with pytest.raises(RefusedError):
            await TcpTransport().connect(address)


async def test_tls_carries_frames():
    server_tls, client_tls = _tls_contexts()
    transport = TcpTransport(server_tls=server_tls, client_tls=client_tls)

    async def handler(channel):
        while (frame := await channel.receive()) is not None:
            channel.send(frame.header, [frame.body])

    listener = await transport.listen("localhost:0", handler)
    client = await transport.connect(listener.address)
    body = bytes(range(256)) * 12_000
    client.send(b"tls", [body])
    frame = await client.receive()
    assert frame is not None
    assert (frame.header, bytes(frame.body)) == (b"tls", body)
    client.close()
    await client.wait_closed()
    await listener.close()


@pytest.mark.parametrize("at_once", [True, False])
async def test_who_hangs_up_over_tls_waits_for_no_farewell(at_once):
    server_tls, client_tls = _tls_contexts()
    transport = TcpTransport(server_tls=server_tls, client_tls=client_tls)

    async def handler(channel):
        while await channel.receive() is not None:
            channel.send(b"heard")

    listener = await transport.listen("localhost:0", handler)
    client = await transport.connect(listener.address)
    client.send(b"hello")
    assert await client.receive() is not None
    ended = asyncio.create_task(client.wait_closed())
    if at_once:
        client.hang_up()
    else:
        client.close()
    for _ in range(3):  # as a loop that ends still takes
        await asyncio.sleep(0)
    assert ended.done() is at_once
    await ended
    await listener.close()


async def test_who_gives_up_over_tls_leaves_no_socket_to_a_loop_that_ends(monkeypatch):
    """At every step of the loop: connecting, greeting, before reading begins, reading."""
    made: list[TcpChannel] = []

    def noted(limits, accept=None):
        channel = TcpChannel(limits, accept)
        if accept is None:
            made.append(channel)
        return channel

    monkeypatch.setattr(tcp, "TcpChannel", noted)
    server_tls, client_tls = _tls_contexts()
    transport = TcpTransport(server_tls=server_tls, client_tls=client_tls)
    node = WireServer(
        cast("WireHandler", Idle()),
        cluster_id=CLUSTER,
        node_id=NodeId("n1"),
        authenticator=OpenAuthenticator(),
    )
    listener = await transport.listen("localhost:0", node.serve)
    hello = Hello(cluster_id=CLUSTER, role=ROLE_OWNER, client_name="gives up")

    async def connected(*, fails=False):
        async with asyncio.TaskGroup() as tasks:
            await WireClient.connect(transport, listener.address, hello, tasks=tasks)
            if fails:
                raise OSError

    async def left():
        for _ in range(3):  # as a loop that ends still takes
            await asyncio.sleep(0)
        there = [one for one in made if one.peer]
        made.clear()
        return [one for one in there if not _is_over(one)], bool(there)

    with pytest.raises(ExceptionGroup):
        await connected(fails=True)
    assert await left() == ([], True)
    seen = 0
    for steps in range(400):
        task = asyncio.create_task(connected())
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        still, there = await left()
        assert still == [], steps
        seen += there
        if seen == 40:
            break
    assert seen == 40
    await listener.close()


async def test_who_hangs_up_over_tls_as_the_peer_does_waits_for_nothing():
    server_tls, client_tls = _tls_contexts()
    transport = TcpTransport(server_tls=server_tls, client_tls=client_tls)

    async def handler(channel):
        await channel.receive()

    listener = await transport.listen("localhost:0", handler)
    client = await transport.connect(listener.address)
    inner: Any = client._transport
    aborted = []
    abort = inner._ssl_protocol._abort

    def noted(*words):
        aborted.append(words)
        abort(*words)

    inner._ssl_protocol._abort = noted
    inner._closed = True  # as the peer's farewell does, when there is still something to send
    client.hang_up()
    for _ in range(3):
        await asyncio.sleep(0)
    assert aborted
    assert _is_over(client)
    await listener.close()


class Idle:
    async def ready(self, *, appends):
        """Take whatever comes; nothing does."""


def _is_over(channel):
    ended = channel.wait_closed()
    try:
        ended.send(None)
    except StopIteration:
        return True
    ended.close()
    return False


def _tls_contexts():
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    pem = Path(__file__).parent / "localhost.pem"  # of this test alone, and worth nothing
    server.load_cert_chain(pem)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.load_verify_locations(pem)
    return server, client


# The memory network's faults


@asynccontextmanager
async def memory_pair(network):
    accepted = asyncio.get_running_loop().create_future()
    over = asyncio.Event()

    async def handler(channel):
        accepted.set_result(channel)
        await over.wait()

    listener = await network.transport("server").listen("server:1", handler)
    client = await network.transport("client").connect("server:1")
    yield client, await accepted
    over.set()
    await listener.close()


async def test_a_cut_loses_what_is_on_its_way_and_both_sides_hear_of_it():
    network = MemoryNetwork(latency_s=lambda: 0.01)
    async with memory_pair(network) as (client, server):
        client.send(b"arrives")
        assert (await server.receive()).header == b"arrives"
        client.send(b"is lost")
        network.cut("client")
        for end in (client, server):
            with pytest.raises(RetryableError, match="is lost"):
                await end.receive()
            with pytest.raises(RetryableError, match="is lost"):
                end.send(b"more")
        assert not network.channels


async def test_a_lost_frame_cuts_so_that_nothing_behind_it_arrives():
    network = MemoryNetwork()
    async with memory_pair(network) as (client, server):
        losing = iter([False, True])
        network.loses = lambda _source, _target: next(losing)
        client.send(b"first")
        assert (await server.receive()).header == b"first"
        client.send(b"second")
        with pytest.raises(RetryableError):
            client.send(b"third")
        with pytest.raises(RetryableError):
            await server.receive()


async def test_who_is_unreachable_is_not_reached():
    network = MemoryNetwork()
    async with memory_pair(network) as (client, server):
        network.unreachable.add(("server", "client"))
        client.send(b"one way works")
        assert (await server.receive()).header == b"one way works"
        server.send(b"the other does not")
        with pytest.raises(RetryableError):
            await client.receive()
        network.unreachable = {("client", "server")}
        with pytest.raises(RetryableError, match="can't connect"):
            await network.transport("client").connect("server:1")
    network.crash("server")
    assert not network.listeners
