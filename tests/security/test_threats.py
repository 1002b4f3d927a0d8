"""The threat table, a test for each row, named after it.

Rows that need more than one test have a module of their own beside this one; here is what shows
that the row holds at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import io
import re
import time
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from fastapi import Request
from google.protobuf import __version__ as protobuf_version
from google.protobuf.internal import api_implementation
from google.protobuf.message import DecodeError

from tests.security.making import Issuer, gate_of
from tierlog.adapters.memory.clock import SimClock
from tierlog.adapters.redis.cache import DIGEST_LEN, RedisCache, digest_key
from tierlog.model.errors import CorruptError, RefusedError
from tierlog.model.ids import node_id, stream_name
from tierlog.proto.v1 import (
    events_pb2,
    ingest_pb2,
    manifest_pb2,
    metadata_pb2,
    reader_pb2,
    wire_pb2,
)
from tierlog.runtime import http as http_module
from tierlog.runtime.http import build_http_app, serve_http
from tierlog.runtime.http_access import guard_http
from tierlog.runtime.rpc import MESSAGE_BYTES_MAX, open_channel, serve_grpc
from tierlog.wire.codec import DEFAULT_LIMITS, FrameDecoder
from tierlog_offloader.access import HTTP_RULES
from tools.access_matrix import scheduler_app, surfaces

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(
    path
    for folder in ("shared", "services", "pipeline")
    for path in (ROOT / folder).rglob("*.py")
    if "/proto/" not in str(path)
)


def test_tenant_isolation():
    """Deny by default on every route; the matrix is generated from the routes."""
    for surface in surfaces():
        assert surface.operations == set(surface.rules)


def test_tokens(tmp_path):
    """A fixed list of algorithms; `none` is not among what can be set."""
    issuer = Issuer(tmp_path / "jwks.json")
    assert issuer.verifier().verify(issuer.token()).subject == "alice"
    with pytest.raises(RefusedError):
        issuer.verifier(issuer="https://other.test").verify(issuer.token())


def test_mtls():
    """No setting turns verification off, in any of the contexts that there are."""
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        assert "_create_unverified_context" not in text, path
        assert not re.search(r"check_hostname\s*=\s*False|verify=False|ssl=False", text), path
        assert not re.search(r"verify_certs\W+False|ssl_cert_reqs\W+\"?none", text), path
        if "CERT_NONE" in text or "CERT_OPTIONAL" in text:
            assert path.name == "tls.py", path


def test_ssrf_through_endpoints_of_requests():
    """Only operators say where to connect to: no request of any API has a field for a place."""
    document = scheduler_app().openapi()
    places = re.compile(r"endpoint|url|uri|host|webhook|callback|address", re.IGNORECASE)
    bodies = {
        content["schema"].get("$ref", "").rpartition("/")[2]
        for path in document["paths"].values()
        for operation in path.values()
        for content in operation.get("requestBody", {}).get("content", {}).values()
    }
    schemas = document["components"]["schemas"]
    fields = [name for body in bodies for name in schemas.get(body, {}).get("properties", {})]
    assert len(fields) > 5
    fields += [
        field.name
        for file in (ingest_pb2, reader_pb2)
        for name, message in file.DESCRIPTOR.message_types_by_name.items()
        if name.endswith("Request")
        for field in message.fields
    ]
    assert [name for name in fields if places.search(name)] == []


@pytest.mark.parametrize(
    "name",
    ["..", ".", "../etc", "a/b", "a\\b", "a\0b", "/etc/passwd", "a%2fb", "a b", "", "-rf", ".x",
     "a" * 129, "\uff41", "a\n", "CON/x", "~root"],
)  # fmt: skip
def test_path_traversal_in_names(name):
    for check in (stream_name, node_id):
        with pytest.raises(RefusedError):
            check(name)


@pytest.mark.parametrize("length", [2**31, 2**32 - 1, DEFAULT_LIMITS.frame_len_max + 1])
def test_length_bombs(length):
    """A frame that says that it is huge is refused before anything is allocated for it."""
    decoder = FrameDecoder(DEFAULT_LIMITS)
    head = length.to_bytes(4, "big") + (10).to_bytes(4, "big")
    buffer = decoder.buffer()
    size = len(buffer)
    buffer[: len(head)] = head
    with pytest.raises((CorruptError, RefusedError)):
        decoder.wrote(len(head))
    assert size < 2 * DEFAULT_LIMITS.frame_len_max


class Reader:
    async def read(self, request, context):
        return reader_pb2.ReadResponse()


async def test_decompression_bombs():
    """What is compressed is not taken at all: 64 MiB that travel as 64 KiB are never made."""

    def register(server):
        method: Any = grpc.unary_unary_rpc_method_handler(
            Reader().read, lambda data: data, lambda _: b""
        )
        handler = grpc.method_handlers_generic_handler("tierlog.v1.Reader", {"Read": method})
        server.add_generic_rpc_handlers((handler,))

    bomb = bytes(MESSAGE_BYTES_MAX - 1024)
    assert len(gzip.compress(bomb)) < 20_000
    async with (
        serve_grpc(register, host="127.0.0.1", port=0) as port,
        open_channel(f"127.0.0.1:{port}") as channel,
    ):
        call: Any = channel.unary_unary("/tierlog.v1.Reader/Read")
        assert await call(b"plain") == b""
        with pytest.raises(grpc.aio.AioRpcError):
            await call(bomb, compression=grpc.Compression.Gzip)
        with pytest.raises(grpc.aio.AioRpcError):
            await call(b"small", compression=grpc.Compression.Deflate)


def test_protobuf():
    """New enough, upb and not pure Python, no deep nesting, no Any from outside."""
    assert tuple(map(int, protobuf_version.split(".")[:2])) >= (6, 33)
    assert api_implementation.Type() == "upb"
    field = (3 << 3) | 2  # hello, of the frame; within it, unknown groups as deep as they go
    deep = bytes([(100 << 3 & 0x7F) | 3 | 0x80, 6]) * 10_000
    for message in (wire_pb2.WireFrame, reader_pb2.ReadRequest, ingest_pb2.AppendRequest):
        with pytest.raises(DecodeError):
            message.FromString(bytes([field]) + deep)
        with pytest.raises(DecodeError):
            message.FromString(deep)
    for file in (events_pb2, ingest_pb2, manifest_pb2, metadata_pb2, reader_pb2, wire_pb2):
        for message in file.DESCRIPTOR.message_types_by_name.values():
            types = [one.message_type.full_name for one in message.fields if one.message_type]
            assert "google.protobuf.Any" not in types
    assert not any("json_format" in path.read_text(encoding="utf-8") for path in SOURCES)


async def test_trusting_headers():
    """A client's address is the socket's, whatever headers say."""
    app, seen = build_http_app("test", checks={}), []

    async def who(request: Request) -> None:
        assert request.client is not None
        seen.append((request.client.host, request.url.scheme))

    app.add_api_route("/who", who)
    headers = {
        "X-Forwarded-For": "10.9.8.7", "X-Real-IP": "10.9.8.7", "Forwarded": "for=10.9.8.7",
        "X-Forwarded-Proto": "https",
    }  # fmt: skip
    async with (
        serve_http(app, host="127.0.0.1", port=0) as port,
        aiohttp.ClientSession() as session,
    ):
        await session.get(f"http://127.0.0.1:{port}/who", headers=headers)
    assert seen == [("127.0.0.1", "http")]


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /livez HTTP/1.1\r\nHost: x\r\nX-Slow: ",
        b"POST /livez HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n",
    ],
    ids=["nothing", "half-a-head", "half-a-body"],
)
async def test_slow_clients(sent, monkeypatch):
    """Who is slow with a request is hung up on; who waits for an answer is not."""
    monkeypatch.setattr(http_module, "HEAD_S_MAX", 0.2)
    monkeypatch.setattr(http_module, "BODY_S_MAX", 0.3)
    app = build_http_app("test", checks={})

    async def slow(request: Request) -> None:
        await request.body()
        await asyncio.sleep(0.8)

    app.add_api_route("/slow", slow, methods=["GET", "POST"])
    sent = sent.replace(b"/livez", b"/slow") if sent.startswith(b"POST") else sent
    async with serve_http(app, host="127.0.0.1", port=0) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        begun = time.monotonic()
        writer.write(sent)
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 5) == b""
        assert time.monotonic() - begun < 3
        writer.close()
        async with aiohttp.ClientSession() as session:
            for _ in range(2):
                async with session.post(f"http://127.0.0.1:{port}/slow", data=b"x") as answer:
                    assert answer.status == 200


async def test_a_slow_client_of_a_connection_that_was_used(monkeypatch):
    monkeypatch.setattr(http_module, "HEAD_S_MAX", 0.2)
    app = build_http_app("test", checks={})
    async with serve_http(app, host="127.0.0.1", port=0) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200" in await reader.readline()
        await asyncio.sleep(0.05)
        writer.write(b"GET /livez HTT")
        begun = time.monotonic()
        await asyncio.wait_for(reader.read(), 5)
        assert time.monotonic() - begun < 2
        writer.close()


@pytest.mark.parametrize("size", [512 * 1024, 2 * 1024 * 1024])
async def test_large_heads(size):
    app = build_http_app("test", checks={})
    guard_http(app, HTTP_RULES, gate_of())
    async with serve_http(app, host="127.0.0.1", port=0) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\nX: " + b"x" * size + b"\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            status = await asyncio.wait_for(reader.readline(), 5)
            assert b"400" in status or status == b""
        writer.close()


@pytest.mark.parametrize("told", [True, False], ids=["told", "not-told"])
async def test_large_bodies(told):
    """A body above the limit is refused, and not read to its end."""
    app, sent = build_http_app("test", checks={}), 0

    async def take(wish: dict[str, str]) -> None:
        raise AssertionError(wish)

    async def endless():
        nonlocal sent
        while sent < 64 * http_module.BODY_BYTES_MAX:
            sent += 1024 * 1024
            yield b" " * 1024 * 1024

    app.add_api_route("/take", take, methods=["POST"])
    async with (
        serve_http(app, host="127.0.0.1", port=0) as port,
        aiohttp.ClientSession() as session,
    ):
        data = io.BytesIO(bytes(http_module.BODY_BYTES_MAX + 1)) if told else endless()
        with contextlib.suppress(aiohttp.ClientError):
            async with session.post(f"http://127.0.0.1:{port}/take", data=data) as answer:
                assert answer.status == 413
    assert sent < 8 * http_module.BODY_BYTES_MAX


async def test_deep_nesting():
    """Depth ends in a refusal, and the process goes on."""
    app = build_http_app("test", checks={})

    async def take(wish: list[object]) -> None:
        raise AssertionError(wish)

    app.add_api_route("/take", take, methods=["POST"])
    async with (
        serve_http(app, host="127.0.0.1", port=0) as port,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session,
    ):
        for data in (b"[" * 1_000_000, b'{"a":' * 500_000):
            headers = {"Content-Type": "application/json"}
            async with session.post("/take", data=io.BytesIO(data), headers=headers) as answer:
                assert answer.status == 400
        async with session.get("/livez") as answer:
            assert answer.status == 200


async def test_large_messages():
    async with (
        serve_grpc(lambda _server: None, host="127.0.0.1", port=0) as port,
        open_channel(f"127.0.0.1:{port}") as channel,
    ):
        call: Any = channel.unary_unary("/grpc.health.v1.Health/Check")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(bytes(MESSAGE_BYTES_MAX + 1))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


class FakeRedis:
    """What somebody else wrote into the cache."""

    value = b""

    async def getrange(self, key, start, end):
        return self.value[start : end + 1]


async def test_redis_values_carry_a_code_that_nobody_else_makes():
    """The caches of readers with a secret believe nothing that is written by others."""

    def cache(secret):
        made = RedisCache("redis://127.0.0.1:1/0", clock=SimClock(), secret=digest_key(secret))
        made._redis, kept = FakeRedis(), made._redis  # type: ignore[assignment]
        return made, kept

    ours, one = cache("ours")
    theirs, two = cache(None)
    value = b"an index that says other things"
    for made in (ours, theirs):
        made._redis.value = theirs._digest("key", value) + value
    assert await theirs.get("key") == value
    assert await ours.get("key") is None
    ours._redis.value = ours._digest("key", value) + value
    assert await ours.get("key") == value
    assert await ours.get("another tenant's key") is None
    assert len(ours._redis.value) == DIGEST_LEN + len(value)
    for kept in (one, two):
        await kept.aclose()


def test_deserialisation():
    """No pickle, yaml.load, marshal, eval or exec on anything, in any room that ships."""
    libraries = "pickle|cPickle|marshal|shelve|dill|cloudpickle|jsonpickle"
    imports = re.compile(rf"^\s*(?:import|from)\s+(?:{libraries})\b", re.MULTILINE)
    calls = re.compile(r"(?<![\w.])(?:eval|exec|compile|__import__)\(|\byaml\.(?:unsafe_)?load\(")
    assert len(SOURCES) > 200
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        assert imports.search(text) is None, path
        assert calls.search(text) is None, path


def test_supply_chain():
    """Every package of every lock has hashes, and none a place to download it from."""
    locks = sorted(ROOT.glob("requirements*.lock"))
    assert len(locks) > 8
    for lock in locks:
        text = lock.read_text(encoding="utf-8")
        pinned = re.findall(
            r"^([\w.-]+)==[^\n]* \\\n    --hash=sha256:[0-9a-f]{64}", text, re.MULTILINE
        )
        named = re.findall(r"^([\w.-]+)==", text, re.MULTILINE)
        assert pinned == named
        assert named
        assert "http://" not in text
        assert "https://" not in text
