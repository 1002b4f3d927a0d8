"""Protocols section 6: gRPC and HTTP tell the same reason, message, remedy and details."""

import asyncio
import socket
from typing import Any

import aiohttp
import grpc
import pytest
from fastapi import Body
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2
from grpc_status import rpc_status

from tierlog.model.errors import (
    SURFACES,
    CorruptError,
    IndeterminateError,
    Reason,
    RefusedError,
    RetryableError,
    from_reason,
)
from tierlog.proto.v1 import ingest_pb2 as pb
from tierlog.proto.v1 import ingest_pb2_grpc
from tierlog.runtime.errors import error_of_grpc, error_of_problem, grpc_status_of
from tierlog.runtime.http import build_http_app, listen, serve_http
from tierlog.runtime.rpc import open_channel, serve_grpc


def _error(reason: Reason):
    return from_reason(
        reason,
        f"what happened: {reason}, größer",
        remedy="do this",
        details={"object": "key", "offset": "7"},
        retry_after_s=1.5 if reason is Reason.RESOURCE_EXHAUSTED else None,
    )


def _same(one, other) -> bool:
    fields = ("reason", "message", "remedy", "details", "retry_after_s")
    return type(one) is type(other) and all(
        getattr(one, name) == getattr(other, name) for name in fields
    )


# ------------------------------------------------------------------------------------------ HTTP


@pytest.fixture
async def http():
    """A service whose every reason can be asked for."""
    ready = {"store": True}

    async def check() -> bool:
        return ready["store"]

    app = build_http_app("test", checks={"store": check})

    async def fail(reason: Reason):
        raise _error(reason)

    async def bug():
        raise ZeroDivisionError("secret details")

    async def number(value: int = Body(embed=True)) -> int:
        return value

    app.add_api_route("/fail/{reason}", fail)
    app.add_api_route("/bug", bug)
    app.add_api_route("/number", number, methods=["POST"])
    async with (
        serve_http(app, host="127.0.0.1", port=0) as port,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session,
    ):
        yield session, ready


async def test_every_reason_crosses_http_whole(http):
    session, _ = http
    for reason in Reason:
        async with session.get(f"/fail/{reason}") as answer:
            assert answer.status == SURFACES[reason].http_status
            assert answer.content_type == "application/problem+json"
            arrived = error_of_problem(await answer.read(), status=answer.status, source="test")
            assert _same(arrived, _error(reason))
            assert ("Retry-After" in answer.headers) == (reason is Reason.RESOURCE_EXHAUSTED)


async def test_what_the_framework_refuses_is_a_problem_too(http):
    session, _ = http
    for method, path, body, status in (
        ("GET", "/nowhere", None, 404),
        ("GET", "/number", None, 405),
        ("POST", "/number", {"value": "seven"}, 400),
    ):
        async with session.request(method, path, json=body) as answer:
            assert answer.status == status
            arrived = error_of_problem(await answer.read(), status=status, source="test")
            assert arrived.reason is Reason.INVALID_ARGUMENT
            assert "/docs" in arrived.remedy
            assert answer.headers.get("Allow") == ("POST" if status == 405 else None)


async def test_a_bug_tells_that_the_outcome_is_unknown_and_nothing_else(http):
    session, _ = http
    async with session.get("/bug") as answer:
        body = await answer.read()
    assert isinstance(error_of_problem(body, status=500, source="test"), IndeterminateError)
    assert b"secret details" not in body
    assert b"Traceback" not in body


async def test_readiness_names_what_is_missing_and_liveness_does_not_depend_on_it(http):
    session, ready = http
    for is_ready, status in ((True, 200), (False, 503)):
        ready["store"] = is_ready
        async with session.get("/readyz") as answer:
            assert (answer.status, await answer.json()) == (
                status,
                {"ready": is_ready, "checks": {"store": is_ready}},
            )
        async with session.head("/readyz") as answer:
            assert (answer.status, await answer.read()) == (status, b"")
        async with session.get("/livez") as answer:
            assert answer.status == 200
    async with session.get("/metrics") as answer:
        assert "python_info" in await answer.text()


@pytest.mark.parametrize("body", [b"", b"<html>", b"{}", b'{"reason": "NEW"}', b"\xff"])
def test_an_answer_that_is_not_ours_is_unknown(body):
    error = error_of_problem(body, status=502, source="the proxy")
    assert (type(error), error.reason) == (RetryableError, Reason.UNKNOWN)
    assert "502" in error.message


async def test_a_port_in_use_is_named_with_a_remedy():
    app = build_http_app("test", checks={})
    async with serve_http(app, host="127.0.0.1", port=0) as port:
        with pytest.raises(RetryableError, match=f"127.0.0.1:{port}.*another one"):
            async with serve_http(app, host="127.0.0.1", port=port):
                pass
        with pytest.raises(RetryableError, match=f"127.0.0.1:{port}.*another one"):
            async with serve_grpc(lambda _server: None, host="127.0.0.1", port=port):
                pass


async def test_small_pieces_of_an_answer_do_not_wait_for_acknowledgements():
    """TCP_NODELAY holds for what the server accepts, else a tail read takes 40 ms longer."""
    accepted = asyncio.get_running_loop().create_future()
    with listen("127.0.0.1", 0) as listening:
        server = await asyncio.start_server(
            lambda _reader, writer: accepted.set_result(writer), sock=listening
        )
        async with server:
            _, client = await asyncio.open_connection(*listening.getsockname())
            writer = await accepted
            taken = writer.get_extra_info("socket")
            assert taken.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
            for one in (client, writer):
                one.close()
                await one.wait_closed()


# ------------------------------------------------------------------------------------------ gRPC


class Failing(ingest_pb2_grpc.IngestServicer):
    """Fails as it is told."""

    async def CreateStream(self, request, context):  # noqa: N802 - gRPC's name
        if request.stream == "bug":
            raise ZeroDivisionError("secret details")
        if request.stream == "future":
            status = grpc_status_of(_error(Reason.UNAVAILABLE))
            await context.abort_with_status(_with_reason(status, "A_REASON_OF_THE_FUTURE"))
        raise _error(Reason(request.stream))


def _with_reason(status, reason: str):
    from google.protobuf import any_pb2
    from google.rpc import status_pb2

    info = any_pb2.Any()
    info.Pack(error_details_pb2.ErrorInfo(reason=reason, domain="tierlog"))
    code = status.code.value[0]
    return rpc_status.to_status(status_pb2.Status(code=code, message="?", details=[info]))


@pytest.fixture
async def channel():
    def register(server):
        ingest_pb2_grpc.add_IngestServicer_to_server(Failing(), server)  # type: ignore[abstract]

    async with (
        serve_grpc(register, host="127.0.0.1", port=0) as port,
        open_channel(f"127.0.0.1:{port}") as channel,
    ):
        yield channel


async def test_a_server_says_what_it_serves_and_how_it_is():
    name = "tierlog.v1.Ingest"
    async with (
        serve_grpc(lambda _server: None, services=[name], host="127.0.0.1", port=0) as port,
        open_channel(f"127.0.0.1:{port}") as channel,
    ):
        asked = health_pb2.HealthCheckRequest(service=name)
        healthy = await health_pb2_grpc.HealthStub(channel).Check(asked)  # type: ignore[attr-defined]
        assert healthy.status == health_pb2.HealthCheckResponse.SERVING
        listed = await _reflect(channel, list_services="")
        names = {one.name for one in listed.list_services_response.service}
        assert {name, "grpc.health.v1.Health"} <= names
        shown = await _reflect(channel, file_containing_symbol=name)
        assert b"CreateStream" in shown.file_descriptor_response.file_descriptor_proto[0]


async def _reflect(channel, **question):
    ask = channel.stream_stream(
        f"/{reflection.SERVICE_NAME}/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    return await anext(aiter(ask(iter([reflection_pb2.ServerReflectionRequest(**question)]))))


async def _fail(channel, stream: str, *, changes: bool = True):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ingest_pb2_grpc.IngestStub(channel).CreateStream(
            pb.CreateStreamRequest(stream=stream)
        )
    error = caught.value
    return error, error_of_grpc(error, source="ingest", changes=changes)


async def test_every_reason_crosses_grpc_whole(channel):
    for reason in Reason:
        raw, arrived = await _fail(channel, reason)
        assert raw.code().name == SURFACES[reason].grpc_status
        assert _same(arrived, _error(reason)), reason


async def test_a_bug_in_a_call_tells_that_the_outcome_is_unknown(channel):
    raw, arrived = await _fail(channel, "bug")
    assert isinstance(arrived, IndeterminateError)
    assert "secret details" not in raw.details() + str(raw.trailing_metadata())


async def test_a_reason_of_the_future_is_not_guessed_at(channel):
    assert type((await _fail(channel, "future"))[1]) is IndeterminateError
    assert type((await _fail(channel, "future", changes=False))[1]) is RetryableError


async def test_no_answer_is_indeterminate_for_a_change_and_retryable_for_a_read(free_port):
    async with open_channel(f"127.0.0.1:{free_port}") as channel:
        assert type((await _fail(channel, "x"))[1]) is IndeterminateError
        assert type((await _fail(channel, "x", changes=False))[1]) is RetryableError


async def test_health_is_served(channel):
    stub: Any = health_pb2_grpc.HealthStub(channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_method_that_is_not_there_changed_nothing(channel):
    stub = ingest_pb2_grpc.StorageNodeStub(channel)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.GetLac(pb.GetLacRequest())
    assert type(error_of_grpc(caught.value, source="ingest", changes=True)) is RetryableError


def test_kinds_are_what_crossing_keeps():
    for reason, kind in (
        (Reason.CORRUPT, CorruptError),
        (Reason.FENCED, RefusedError),
        (Reason.NOT_OWNER, RetryableError),
        (Reason.APPEND_INDETERMINATE, IndeterminateError),
    ):
        assert type(_error(reason)) is kind
