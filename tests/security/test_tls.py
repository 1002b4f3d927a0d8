"""TLS of the wire, HTTP and gRPC: names are verified, certificates say who calls, files reload.

The threat: "hostname verified before any credential is sent; no insecure fallback; certificates
reload".
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import ssl
import threading
import warnings
from uuid import uuid4

import aiohttp
import grpc
import pytest

from tests.security.making import Authority, Issuer, gate_of, grant
from tierlog.adapters.rpc.rest import RestService
from tierlog.adapters.tcp import TcpTransport
from tierlog.model.access import Role
from tierlog.model.errors import Reason, RefusedError, RetryableError, TierlogError
from tierlog.model.ids import NodeId
from tierlog.proto.v1 import reader_pb2, reader_pb2_grpc
from tierlog.runtime.calling import Calling
from tierlog.runtime.http import build_http_app, serve_http
from tierlog.runtime.http_access import guard_http
from tierlog.runtime.rpc import open_channel, serve_grpc
from tierlog.runtime.rpc_access import AccessInterceptor
from tierlog.runtime.security import TlsFiles
from tierlog.runtime.tls import ClientTls, ServerTls
from tierlog.runtime.wire_access import GateAuthenticator
from tierlog.wire.connection import Hello, WireClient
from tierlog.wire.messages import ROLE_OWNER, ROLE_PRODUCER
from tierlog.wire.server import WireServer
from tierlog_offloader.access import HTTP_RULES
from tierlog_reader.access import RPC_RULES

CLUSTER = uuid4()
SERVICE = "spiffe://cluster.test/ingest"


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


@pytest.fixture
def server_files(authority):
    return authority.files(authority.issue("server"))


@pytest.fixture
def gate():
    return gate_of(
        None,
        {
            f"certificate:{SERVICE}": grant(Role.SERVICE),
            "certificate:metrics": grant(Role.OPERATOR),
            "certificate:app": grant(Role.CONSUMER, Role.PRODUCER, streams=("orders*",)),
        },
    )


def client_of(authority, name=None, **how):
    issued = authority.issue(name, file=f"client-{name}", **how) if name is not None else None
    return ClientTls(authority.files(issued))


class NoRequests:
    """A node's handler that is never reached."""

    async def ready(self, *, appends):
        pass


@contextlib.asynccontextmanager
async def wire(tls, gate):
    server = WireServer(
        NoRequests(),  # type: ignore[arg-type]
        cluster_id=CLUSTER,
        node_id=NodeId("n"),
        authenticator=GateAuthenticator(gate),
    )
    transport = TcpTransport(server_tls=tls.context(required=True))
    listener = await transport.listen("127.0.0.1:0", server.serve)
    try:
        yield listener.address
    finally:
        await listener.close()


async def greet(address, client, role=ROLE_PRODUCER):
    transport = TcpTransport(client_tls=client.context if client is not None else None)
    async with asyncio.TaskGroup() as tasks:
        hello = Hello(cluster_id=CLUSTER, role=role)
        connected = await WireClient.connect(transport, address, hello, tasks=tasks)
        await connected.close(drain_s_max=0)


async def refused(address, client, role=ROLE_PRODUCER):
    with pytest.raises((TierlogError, ExceptionGroup)) as caught:
        await greet(address, client, role)
    error = caught.value
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, TierlogError)
    return error


async def test_a_certificate_says_who_calls_on_the_wire(authority, server_files, gate):
    tls = ServerTls(server_files, client_certificates=True)
    async with wire(tls, gate) as address:
        await greet(address, client_of(authority, "app"))
        await greet(address, client_of(authority, "x", uris=(SERVICE,)), ROLE_OWNER)
        error = await refused(address, client_of(authority, "app"), ROLE_OWNER)
        assert error.reason is Reason.PERMISSION_DENIED
        error = await refused(address, client_of(authority, "stranger"))
        assert error.reason is Reason.PERMISSION_DENIED


async def test_who_has_no_certificate_or_anothers_is_not_spoken_to(
    authority, server_files, gate, tmp_path
):
    tls = ServerTls(server_files, client_certificates=True)
    other = tmp_path / "other"
    other.mkdir()
    strangers = Authority(other)
    issued = strangers.issue("app")
    foreign = ClientTls(TlsFiles(certificate=issued.certificate, key=issued.key, ca=authority.file))
    async with wire(tls, gate) as address:
        for client in (client_of(authority), foreign, None):
            assert isinstance(await refused(address, client), RetryableError)


async def test_a_server_with_another_name_is_shown_nothing(authority, gate, tmp_path):
    """No HELLO leaves before the name is verified."""
    issued = authority.issue("elsewhere", dns=("elsewhere",), addresses=())
    context = ServerTls(authority.files(issued), client_certificates=False).context(required=True)
    received: list[bytes] = []

    async def listen(reader, writer):
        received.append(await reader.read(100))
        writer.close()

    server = await asyncio.start_server(listen, "127.0.0.1", 0, ssl=context)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    client = client_of(authority)
    await refused(address, client)
    service = RestService(
        address, name="x", timeout_s=5, calling=Calling(tls=client, token=lambda: "secret")
    )
    with pytest.raises(RetryableError, match="can't be reached"):
        await service.call("GET", "/")
    await service.close()
    async with open_channel(address, Calling(tls=client, token=lambda: "secret")) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await reader_pb2_grpc.ReaderStub(channel).Read(reader_pb2.ReadRequest(), timeout=5)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    server.close()
    await server.wait_closed()
    assert [one for one in received if one] == []


async def test_a_client_does_not_fall_back_to_plain_text(authority):
    received: list[bytes] = []

    async def listen(reader, writer):
        received.append(await reader.read(1000))
        writer.close()

    server = await asyncio.start_server(listen, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    calling = Calling(tls=client_of(authority), token=lambda: "a-secret-token")
    await refused(address, calling.tls)
    service = RestService(address, name="x", timeout_s=5, calling=calling)
    with pytest.raises(RetryableError):
        await service.call("GET", "/")
    await service.close()
    server.close()
    await server.wait_closed()
    assert received
    assert not any(b"a-secret-token" in one or b"GET" in one for one in received)


def test_a_call_that_is_given_up_leaves_no_socket_to_a_loop_that_ends(authority, server_files):
    """Its server says nothing any more, no farewell either."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(server_files.certificate, server_files.key)
    asked, over = threading.Event(), threading.Event()

    def serve(listener):
        with tls.wrap_socket(listener.accept()[0], server_side=True) as connection:
            connection.recv(65536)
            asked.set()
            over.wait(30)

    async def give_up(address):
        calling = Calling(tls=client_of(authority))
        service = RestService(address, name="x", timeout_s=20, calling=calling)
        call = asyncio.create_task(service.call("GET", "/"))
        await asyncio.to_thread(asked.wait, 20)
        call.cancel()
        await asyncio.wait({call})
        await service.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=serve, args=(listener,))
        server.start()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            asyncio.run(give_up(f"127.0.0.1:{listener.getsockname()[1]}"))
            gc.collect()
        over.set()
        server.join()
    assert asked.is_set()
    assert [str(one.message) for one in caught] == []


def test_a_token_is_not_sent_in_plain_text():
    with pytest.raises(RefusedError, match="plain text"):
        Calling(token=lambda: "secret")


async def test_http_knows_a_certificate_and_lets_probes_in_without(authority, server_files, gate):
    app = build_http_app("test", checks={})
    guard_http(app, HTTP_RULES, gate)
    tls = ServerTls(server_files, client_certificates=True)

    async def status(port, client, path):
        url = f"https://127.0.0.1:{port}{path}"
        async with (
            aiohttp.ClientSession() as session,
            session.get(url, ssl=client.context()) as answer,
        ):
            return answer.status

    async with serve_http(app, host="127.0.0.1", port=0, tls=tls) as port:
        assert await status(port, client_of(authority), "/livez") == 200
        assert await status(port, client_of(authority), "/metrics") == 401
        assert await status(port, client_of(authority, "app"), "/metrics") == 403
        assert await status(port, client_of(authority, "metrics"), "/metrics") == 200
        plain = f"http://127.0.0.1:{port}/livez"
        async with aiohttp.ClientSession() as session:
            with pytest.raises(aiohttp.ClientError):
                await session.get(plain)


class Reader(reader_pb2_grpc.ReaderServicer):
    async def Read(self, request, context):  # noqa: N802 - gRPC's name
        return reader_pb2.ReadResponse(tier="tier1")


@contextlib.asynccontextmanager
async def grpc_port(tls, gate):
    async with serve_grpc(
        lambda server: reader_pb2_grpc.add_ReaderServicer_to_server(Reader(), server),  # type: ignore[abstract]
        host="127.0.0.1", port=0, tls=tls, access=AccessInterceptor(RPC_RULES, gate),
    ) as port:  # fmt: skip
        yield port


async def read(port, calling, stream="orders"):
    async with open_channel(f"127.0.0.1:{port}", calling) as channel:
        stub = reader_pb2_grpc.ReaderStub(channel)
        return (await stub.Read(reader_pb2.ReadRequest(stream=stream), timeout=10)).tier


async def test_grpc_knows_a_certificate(authority, server_files, gate):
    tls = ServerTls(server_files, client_certificates=True)
    async with grpc_port(tls, gate) as port:
        app = Calling(tls=client_of(authority, "app"))
        assert await read(port, app) == "tier1"
        for calling, stream, code in (
            (app, "billing", grpc.StatusCode.PERMISSION_DENIED),
            (Calling(tls=client_of(authority, "metrics")), "a", grpc.StatusCode.PERMISSION_DENIED),
            (Calling(tls=client_of(authority)), "orders", grpc.StatusCode.UNAVAILABLE),
            (Calling(), "orders", grpc.StatusCode.UNAVAILABLE),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await read(port, calling, stream)
            assert caught.value.code() is code


async def test_a_token_goes_over_tls_with_each_call(authority, server_files, tmp_path):
    issuer = Issuer(tmp_path / "jwks.json")
    tokens = [issuer.token("one", roles=("consumer",), streams=("orders",))]
    calling = Calling(tls=client_of(authority), token=lambda: tokens[-1])
    tls = ServerTls(server_files, client_certificates=False)
    async with grpc_port(tls, gate_of(issuer)) as port:
        assert await read(port, calling) == "tier1"
        tokens.append(issuer.token("two"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read(port, calling)
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


def replace(issued, into):
    """Put a certificate where another one is, as an operator or cert-manager does."""
    for old, new in zip(into, issued, strict=True):
        new.replace(old)


def serial_of(port):
    """Return the serial number that a listener shows."""
    pem = ssl.get_server_certificate(("127.0.0.1", port))
    from cryptography import x509

    return x509.load_pem_x509_certificate(pem.encode()).serial_number


async def test_certificates_of_servers_are_reloaded(authority, gate):
    issued = authority.issue("server")
    tls = ServerTls(authority.files(issued), client_certificates=False)
    app = build_http_app("test", checks={})
    async with (
        serve_http(app, host="127.0.0.1", port=0, tls=tls) as http,
        grpc_port(tls, gate) as rpc,
        wire(tls, gate) as address,
    ):
        ports = (http, rpc, int(address.rpartition(":")[2]))
        before = [await asyncio.to_thread(serial_of, port) for port in ports]
        assert len(set(before)) == 1
        replace(authority.issue("next"), issued)
        after = [await asyncio.to_thread(serial_of, port) for port in ports]
        assert len(set(after)) == 1
        assert after != before
        issued.certificate.write_text("half", encoding="utf-8")
        assert [await asyncio.to_thread(serial_of, port) for port in ports] == after


async def test_authorities_are_reloaded(authority, server_files, gate, tmp_path):
    """Who was let in by an authority that left the file isn't any more."""
    tls = ServerTls(server_files, client_certificates=True)
    folder = tmp_path / "next"
    folder.mkdir()
    successor = Authority(folder)
    issued = successor.issue("app")
    old = client_of(authority, "app")
    # Both trust the server's certificate, which stays as it is.
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(authority.file.read_bytes())
    new = ClientTls(TlsFiles(certificate=issued.certificate, key=issued.key, ca=trusted))
    old = ClientTls(
        TlsFiles(
            certificate=tmp_path / "client-app.crt", key=tmp_path / "client-app.key", ca=trusted
        )
    )
    async with wire(tls, gate) as address, grpc_port(tls, gate) as port:
        await greet(address, old)
        assert await read(port, Calling(tls=old)) == "tier1"
        await refused(address, new)
        successor.file.replace(authority.file)
        await greet(address, new)
        assert await read(port, Calling(tls=new)) == "tier1"
        await refused(address, old)
        with pytest.raises(grpc.aio.AioRpcError):
            await read(port, Calling(tls=old))


async def test_certificates_of_clients_are_reloaded(authority, server_files, gate):
    issued = authority.issue("metrics", file="client")
    client = ClientTls(authority.files(issued))
    tls = ServerTls(server_files, client_certificates=True)
    calling = Calling(tls=client)
    async with (
        grpc_port(tls, gate) as port,
        wire(tls, gate) as address,
        open_channel(f"127.0.0.1:{port}", calling) as channel,
    ):
        stub, request = reader_pb2_grpc.ReaderStub(channel), reader_pb2.ReadRequest(stream="orders")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Read(request, timeout=10)
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        await refused(address, client)
        replace(authority.issue("app", file="next"), issued)
        assert (await stub.Read(request, timeout=10)).tier == "tier1"
        await greet(address, client)


async def test_old_versions_are_not_spoken(authority, server_files):
    context = ssl.create_default_context(cafile=authority.file)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        context.minimum_version = ssl.TLSVersion.TLSv1
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    app = build_http_app("test", checks={})
    tls = ServerTls(server_files, client_certificates=False)
    async with serve_http(app, host="127.0.0.1", port=0, tls=tls) as port:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.open_connection("127.0.0.1", port, ssl=context)


def test_files_that_do_not_fit_are_refused_at_the_start(authority, tmp_path):
    one, other = authority.issue("one"), authority.issue("other")
    for files in (
        TlsFiles(certificate=one.certificate, key=other.key),
        TlsFiles(certificate=one.certificate, key=tmp_path / "missing.key"),
    ):
        with pytest.raises(RefusedError, match="can't be read"):
            ServerTls(files, client_certificates=False)
