"""gRPC: who asks is known before a request is parsed; health is public, reflection is not."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
from typing import Any

import grpc
import pytest
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.security.making import Issuer, gate_of
from tierlog.adapters.memory.clock import SimClock
from tierlog.model.access import Rule
from tierlog.proto.v1 import ingest_pb2, ingest_pb2_grpc, reader_pb2, reader_pb2_grpc
from tierlog.runtime import rpc_access
from tierlog.runtime.rpc import MESSAGE_BYTES_MAX, open_channel, serve_grpc
from tierlog.runtime.rpc_access import AccessInterceptor
from tierlog_ingest.access import RPC_RULES as INGEST_RULES
from tierlog_reader.access import RPC_RULES as READER_RULES

RULES = {**INGEST_RULES, **READER_RULES}
READER = "tierlog.v1.Reader"


class Reader(reader_pb2_grpc.ReaderServicer):
    def __init__(self, called):
        self.called = called

    async def Read(self, request, context):  # noqa: N802 - gRPC's names
        self.called.append(request.stream)
        return reader_pb2.ReadResponse(tier="tier1")

    async def Follow(self, request, context):  # noqa: N802
        self.called.append(request.stream)
        for _ in range(3):
            yield reader_pb2.ReadResponse(tier="tier1")


class Ingest(ingest_pb2_grpc.IngestServicer):
    def __init__(self, called):
        self.called = called

    async def CreateStream(self, request, context):  # noqa: N802
        self.called.append(request.stream)
        return ingest_pb2.CreateStreamResponse(created=True)

    async def Seal(self, request, context):  # noqa: N802
        raise ValueError("a bug")


@pytest.fixture
def issuer(tmp_path):
    return Issuer(tmp_path / "jwks.json")


@contextlib.asynccontextmanager
async def serving(gate, rules=RULES, reader=Reader):
    called: list[str] = []

    def register(server):
        reader_pb2_grpc.add_ReaderServicer_to_server(reader(called), server)
        ingest_pb2_grpc.add_IngestServicer_to_server(Ingest(called), server)  # type: ignore[abstract]

    access = AccessInterceptor(rules, gate) if gate is not None else None
    async with (
        serve_grpc(register, services=[READER], host="127.0.0.1", port=0, access=access) as port,
        open_channel(f"127.0.0.1:{port}") as channel,
    ):
        yield channel, called


def shown(token):
    return (("authorization", f"Bearer {token}"),)


async def code_of(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code()


async def test_role_and_prefix_decide(issuer):
    token = shown(issuer.token("c", roles=("consumer",), streams=("orders*",)))
    async with serving(gate_of(issuer)) as (channel, called):
        reader = reader_pb2_grpc.ReaderStub(channel)
        request = reader_pb2.ReadRequest(stream="orders.eu")
        assert (await reader.Read(request, metadata=token)).tier == "tier1"
        assert await code_of(reader.Read(request)) is grpc.StatusCode.UNAUTHENTICATED
        other = reader_pb2.ReadRequest(stream="billing")
        assert (
            await code_of(reader.Read(other, metadata=token)) is grpc.StatusCode.PERMISSION_DENIED
        )
        nameless = reader_pb2.ReadRequest()
        assert (
            await code_of(reader.Read(nameless, metadata=token))
            is grpc.StatusCode.PERMISSION_DENIED
        )
        create = ingest_pb2.CreateStreamRequest(stream="orders.eu")
        ingest = ingest_pb2_grpc.IngestStub(channel)
        assert (
            await code_of(ingest.CreateStream(create, metadata=token))
            is grpc.StatusCode.PERMISSION_DENIED
        )
        assert called == ["orders.eu"]


async def test_answers_that_go_on_are_guarded_too(issuer):
    token = shown(issuer.token("c", roles=("consumer",), streams=("orders",)))
    async with serving(gate_of(issuer)) as (channel, called):
        reader = reader_pb2_grpc.ReaderStub(channel)
        request = reader_pb2.FollowRequest(stream="orders")
        assert len([one async for one in reader.Follow(request, metadata=token)]) == 3
        for metadata, stream in ((None, "orders"), (token, "billing")):
            with pytest.raises(grpc.aio.AioRpcError):
                async for _ in reader.Follow(
                    reader_pb2.FollowRequest(stream=stream), metadata=metadata
                ):
                    pass
        assert called == ["orders"]


async def test_answers_that_go_on_end_with_the_token(issuer):
    clock = SimClock()

    class LongReader(Reader):
        async def Follow(self, request, context):  # noqa: N802
            try:
                while True:
                    yield reader_pb2.ReadResponse(tier="tier1")
                    clock.jump_wall(400 * 86_400)
            finally:
                self.called.append("left")

    token = shown(issuer.token("c", roles=("consumer",), streams=("a",)))
    async with serving(gate_of(issuer, clock=clock), reader=LongReader) as (channel, called):
        reader = reader_pb2_grpc.ReaderStub(channel)
        call = reader.Follow(reader_pb2.FollowRequest(stream="a"), metadata=token, timeout=30)
        assert (await call.read()).tier == "tier1"
        assert await code_of(call.read()) is grpc.StatusCode.UNAUTHENTICATED
        assert "expired" in str(await call.details())
        assert called == ["left"]


async def test_health_is_public_and_reflection_is_not(issuer):
    observer = shown(issuer.token("o", roles=("service",), streams=("*",)))

    async def asked(channel, metadata):
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)

        async def requests():
            yield reflection_pb2.ServerReflectionRequest(list_services="")

        call = stub.ServerReflectionInfo(requests(), metadata=metadata)
        return [one async for one in call]

    async with serving(gate_of(issuer)) as (channel, _):
        health: Any = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(service=READER))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        assert len(await asked(channel, observer)) == 1
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asked(channel, None)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_method_without_a_rule_is_refused_whoever_asks(issuer):
    rules = {name: rule for name, rule in RULES.items() if not name.endswith("/Read")}
    roles = ("admin", "consumer", "operator", "producer", "service")
    token = shown(issuer.token("root", roles=roles, streams=("*",)))
    async with serving(gate_of(issuer), rules) as (channel, called):
        reader = reader_pb2_grpc.ReaderStub(channel)
        call = reader.Read(reader_pb2.ReadRequest(stream="a"), metadata=token)
        assert await code_of(call) is grpc.StatusCode.PERMISSION_DENIED
        assert called == []
        missing = channel.unary_unary("/tierlog.v1.Reader/Nothing")
        assert await code_of(missing(b"", metadata=token)) is grpc.StatusCode.UNIMPLEMENTED


async def test_nobody_gets_a_request_parsed(issuer):
    token = shown(issuer.token("c", roles=("consumer",), streams=("*",)))
    async with serving(gate_of(issuer)) as (channel, called):
        raw = channel.unary_unary("/tierlog.v1.Reader/Read")
        broken = b"\x0a\xff\xff\xff\xff\x0f"  # says that a string of 4 GiB follows
        assert await code_of(raw(broken)) is grpc.StatusCode.UNAUTHENTICATED
        assert await code_of(raw(broken, metadata=token)) is grpc.StatusCode.INVALID_ARGUMENT
        assert called == []


async def test_what_is_compressed_is_not_taken(issuer):
    """A small message that would be a large one here is refused before it is one."""
    token = shown(issuer.token("c", roles=("consumer",), streams=("*",)))
    bomb = bytes(64 * 1024 * 1024)
    assert len(gzip.compress(bomb)) < MESSAGE_BYTES_MAX // 100
    async with serving(gate_of(issuer)) as (channel, called):
        raw = channel.unary_unary("/tierlog.v1.Reader/Read")
        call = raw(bytes(1024 * 1024), metadata=token, compression=grpc.Compression.Gzip)
        assert await code_of(call) in {
            grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.RESOURCE_EXHAUSTED,
            grpc.StatusCode.INTERNAL,
        }  # fmt: skip
        assert called == []


async def test_what_changes_something_is_written_down(issuer):
    producer = shown(issuer.token("p", roles=("producer",), streams=("a",)))
    operator = shown(issuer.token("op", roles=("operator",), streams=("a",)))
    with structlog.testing.capture_logs() as logs:
        async with serving(gate_of(issuer)) as (channel, _):
            ingest = ingest_pb2_grpc.IngestStub(channel)
            await ingest.CreateStream(
                ingest_pb2.CreateStreamRequest(stream="a"),
                metadata=(*producer, ("x-request-id", "r-7")),
            )
            for stream in ("a", "b"):
                await code_of(ingest.Seal(ingest_pb2.SealRequest(stream=stream), metadata=operator))
    found = [one for one in logs if one["event"] == "action.audited"]
    assert [(one["subject"], one["action"], one["target"], one["outcome"]) for one in found] == [
        ("token:p", "/tierlog.v1.Ingest/CreateStream", "a", "done"),
        ("token:op", "/tierlog.v1.Ingest/Seal", "a", "failed"),
        ("token:op", "/tierlog.v1.Ingest/Seal", "b", "PERMISSION_DENIED"),
    ]
    assert found[0]["request_id"] == "r-7"
    assert all(one["request_id"] for one in found)


async def test_a_kind_of_call_that_there_is_none_of_is_refused(issuer):
    async def collect(requests, context):
        raise AssertionError

    handler = grpc.method_handlers_generic_handler(
        "tierlog.v1.Odd", {"Collect": grpc.stream_unary_rpc_method_handler(collect)}
    )
    rules = {"/tierlog.v1.Odd/Collect": Rule(permission=None)} | RULES
    del rules["/tierlog.v1.Odd/Collect"]
    access = AccessInterceptor(rules, gate_of(issuer))
    async with (
        serve_grpc(
            lambda server: server.add_generic_rpc_handlers((handler,)),
            host="127.0.0.1", port=0, access=access,
        ) as port,
        open_channel(f"127.0.0.1:{port}") as channel,
    ):  # fmt: skip

        async def nothing():
            yield b""

        call: Any = channel.stream_unary("/tierlog.v1.Odd/Collect")(nothing())
        with pytest.raises(grpc.aio.AioRpcError):
            await call


async def nothing_yet():
    """Give no request, and do not end."""
    await asyncio.Event().wait()
    yield b""


READ, FOLLOW = "/tierlog.v1.Reader/Read", "/tierlog.v1.Reader/Follow"
HEALTH = "/grpc.health.v1.Health/"


async def test_strangers_are_refused_before_they_have_sent_anything(issuer):
    """A request is of up to 16 MiB: of who may not ask nothing is received."""
    async with serving(gate_of(issuer)) as (channel, called), asyncio.timeout(20):
        unary: Any = channel.stream_unary(READ)(nothing_yet())
        assert await code_of(unary) is grpc.StatusCode.UNAUTHENTICATED
        following: Any = channel.stream_stream(FOLLOW)(nothing_yet())
        assert await code_of(following.read()) is grpc.StatusCode.UNAUTHENTICATED
        assert called == []


async def test_a_call_that_ends_without_a_request_is_refused(issuer):
    nothing: list[bytes] = []

    async def none_at_all():
        for one in nothing:
            yield one

    token = shown(issuer.token("c", roles=("consumer",), streams=("*",)))
    async with serving(gate_of(issuer)) as (channel, called):
        call: Any = channel.stream_unary(READ)(none_at_all(), metadata=token)
        assert await code_of(call) is grpc.StatusCode.INVALID_ARGUMENT
        assert called == []


async def test_what_everybody_may_ask_is_small_and_comes_at_once(issuer, monkeypatch):
    """Else strangers would fill the memory with names of services that nobody knows."""
    monkeypatch.setattr(rpc_access, "PUBLIC_READ_S_MAX", 0.5)
    large = health_pb2.HealthCheckRequest(service="x" * rpc_access.PUBLIC_BYTES_MAX)
    async with serving(gate_of(issuer)) as (channel, _), asyncio.timeout(30):
        health: Any = health_pb2_grpc.HealthStub(channel)
        assert await code_of(health.Check(large)) is grpc.StatusCode.INVALID_ARGUMENT
        assert await code_of(health.Watch(large).read()) is grpc.StatusCode.INVALID_ARGUMENT
        slow: list[Any] = [
            channel.stream_unary(HEALTH + "Check")(nothing_yet())
            for _ in range(2 * rpc_access.PUBLIC_READS_MAX)
        ]
        for call in slow:
            assert await code_of(call) is grpc.StatusCode.RESOURCE_EXHAUSTED
        watch = health.Watch(health_pb2.HealthCheckRequest(service=READER))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()
        answer = await health.Check(health_pb2.HealthCheckRequest(service=READER))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
