"""Calls name the cluster that they are meant for; who is not known is not told of any."""

from __future__ import annotations

from uuid import UUID

import aiohttp
import grpc
import pytest

from tests.security.making import Issuer, gate_of
from tests.security.test_rpc_access import RULES, Reader
from tierlog.model.access import Permission, Rule
from tierlog.proto.v1 import reader_pb2, reader_pb2_grpc
from tierlog.runtime.clusters import CLUSTER_ID
from tierlog.runtime.http import build_http_app, serve_http
from tierlog.runtime.http_access import guard_http
from tierlog.runtime.rpc import open_channel, serve_grpc
from tierlog.runtime.rpc_access import AccessInterceptor

OURS, THEIRS = UUID(int=1), UUID(int=2)
READ = reader_pb2.ReadRequest(stream="orders")


@pytest.fixture
def token(tmp_path):
    issuer = Issuer(tmp_path / "jwks.json")
    gate = gate_of(issuer)
    return issuer.token("c", roles=("consumer",), streams=("orders*",)), gate


@pytest.mark.parametrize("named", [None, OURS, THEIRS])
async def test_over_grpc(token, named):
    shown, gate = token
    called: list[str] = []

    def register(server):
        reader_pb2_grpc.add_ReaderServicer_to_server(Reader(called), server)  # type: ignore[abstract]

    access = AccessInterceptor(RULES, gate)
    metadata = ((CLUSTER_ID, str(named)),) if named else ()
    async with (
        serve_grpc(register, host="127.0.0.1", port=0, access=access, cluster_id=OURS) as port,
        open_channel(f"127.0.0.1:{port}") as channel,
    ):
        reader = reader_pb2_grpc.ReaderStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await reader.Read(READ, metadata=metadata)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert str(OURS) not in repr((caught.value, caught.value.initial_metadata()))
        call = reader.Read(READ, metadata=(*metadata, ("authorization", f"Bearer {shown}")))
        if named == THEIRS:
            with pytest.raises(grpc.aio.AioRpcError, match="another cluster"):
                await call
        else:
            await call
        assert dict(await call.initial_metadata())[CLUSTER_ID] == str(OURS)
        following = reader.Follow(
            reader_pb2.FollowRequest(stream="orders"),
            metadata=(*metadata, ("authorization", f"Bearer {shown}")),
        )
        if named == THEIRS:
            with pytest.raises(grpc.aio.AioRpcError, match="another cluster"):
                _ = [one async for one in following]
        else:
            assert len([one async for one in following]) == 3
    assert len(called) == (0 if named == THEIRS else 2)


@pytest.mark.parametrize("named", [None, OURS, THEIRS])
async def test_over_http(token, named):
    shown, gate = token
    app = build_http_app("test", checks={}, cluster_id=OURS)
    called: list[str] = []

    async def bounds(stream: str) -> str:
        called.append(stream)
        return stream

    app.add_api_route("/v1/streams/{stream}/bounds", bounds, methods=["GET"])
    rules = {
        "GET /livez": Rule(permission=None),
        "GET /v1/streams/{stream}/bounds": Rule(permission=Permission.READ, stream="stream"),
    }
    guard_http(app, rules, gate)
    headers = {CLUSTER_ID: str(named)} if named else {}
    known = {**headers, "Authorization": f"Bearer {shown}"}
    path = "/v1/streams/orders/bounds"
    async with (
        serve_http(app, host="127.0.0.1", port=0) as port,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session,
    ):
        for asked, status in ((path, 401), ("/livez", 200)):
            async with session.get(asked, headers=headers) as answer:
                assert answer.status == status
                assert str(OURS) not in repr(answer.headers) + await answer.text()
        async with session.get(path, headers=known) as answer:
            assert answer.status == (503 if named == THEIRS else 200)
            assert answer.headers[CLUSTER_ID] == str(OURS)
    assert len(called) == (0 if named == THEIRS else 1)
