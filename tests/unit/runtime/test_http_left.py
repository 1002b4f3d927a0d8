"""A client that takes nothing of its answer is cut off: neither its bytes nor its place stay.

Nobody reads for one that went.

Design: adr/0030, point 7.
"""

import asyncio
import contextlib
import socket

import aiohttp
import pytest
from fastapi.responses import Response, StreamingResponse
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from tierlog.runtime import http as http_module
from tierlog.runtime.http import build_http_app, serve_http

PIECE_LEN = 256 * 1024
ANSWER_LEN = 16 * PIECE_LEN


def get(path):
    return f"GET {path} HTTP/1.1\r\nHost: test\r\n\r\n".encode()


async def asking(port, sent):
    """Return a client that has asked, and takes little at once."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))
    await asyncio.get_running_loop().sock_sendall(client, sent)
    return client


async def status_of(port, path="/livez"):
    with await asking(port, get(path)) as client:
        answer = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 100), 5)
    return int(answer.split()[1])


@pytest.fixture
def made(monkeypatch):
    """The connections of servers, for which the kernel keeps little, in the order of making."""
    connections, making = [], http_module._Connection.connection_made

    def connection_made(self, transport):
        connections.append(self)
        kept = transport.get_extra_info("socket")
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)
        making(self, transport)

    monkeypatch.setattr(http_module._Connection, "connection_made", connection_made)
    return connections


@pytest.fixture
def app(made):
    app = build_http_app("test", checks={})

    async def pieces():
        for _ in range(ANSWER_LEN // PIECE_LEN):
            yield bytes(PIECE_LEN)

    async def left(_scope, _receive, send):
        """Give up behind the first pieces, as one who made an answer does."""
        await send({"type": "http.response.start", "status": 200, "headers": []})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.1):
                while True:
                    piece = bytes(PIECE_LEN)
                    await send({"type": "http.response.body", "body": piece, "more_body": True})

    async def little(scope, _receive, send):
        """Stop as soon as anything is left."""
        transport = next(one for one in made if one.client == scope["client"]).transport
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not transport.get_write_buffer_size():
            await send({"type": "http.response.body", "body": bytes(4096), "more_body": True})
            if transport.get_write_buffer_size():
                await asyncio.sleep(0.05)  # what the kernel still takes
        assert transport.get_write_buffer_size() <= 5000

    app.add_api_route("/whole", lambda: Response(bytes(ANSWER_LEN)), response_class=Response)
    app.add_api_route("/pieces", lambda: StreamingResponse(pieces()), response_class=Response)
    app.mount("/left", left)
    app.mount("/little", little)
    return app


@pytest.mark.parametrize(
    "sent",
    [
        get("/whole"),
        get("/whole").replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"),
        get("/pieces"),
        get("/left/"),
        get("/little/"),
        get("/whole") + get("/livez"),
    ],
    ids=["whole", "closed", "pieces", "left", "little", "next"],
)
async def test_who_takes_nothing_is_cut_off_and_others_have_its_place(sent, app, made, monkeypatch):
    monkeypatch.setattr(http_module, "CONNECTIONS_MAX", 5)
    async with serve_http(app, host="127.0.0.1", port=0, taken_s_max=1.0) as port:
        with contextlib.ExitStack() as stack:
            for _ in range(4):
                stack.enter_context(await asking(port, sent))
            await asyncio.sleep(0.3)
            assert await status_of(port, "/openapi.json") == 503
            async with asyncio.timeout(5):
                while any(one in one.connections for one in made[:4]):
                    await asyncio.sleep(0.05)
            assert [one.transport.get_write_buffer_size() for one in made[:4]] == [0] * 4
            assert await status_of(port, "/openapi.json") == 200


async def test_who_watches_is_answered_when_no_one_else_is(app, monkeypatch):
    """Else a process with many clients would be ended, and they would go to the next one."""
    monkeypatch.setattr(http_module, "CONNECTIONS_MAX", 5)
    refused = REGISTRY.get_sample_value("tierlog_http_refused_total") or 0
    async with serve_http(app, host="127.0.0.1", port=0) as port:
        with contextlib.ExitStack() as stack:
            for _ in range(4):
                stack.enter_context(await asking(port, b""))
            async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
                for path in ("/livez", "/readyz", "/metrics"):
                    async with session.get(path) as answer:
                        assert answer.status == 200, path
                async with session.get("/openapi.json") as answer:
                    problem = await answer.json(content_type="application/problem+json")
                    assert (answer.status, problem["reason"]) == (503, "UNAVAILABLE")
                    assert answer.headers["Retry-After"] == "1"
                    assert answer.headers["Connection"] == "close"
                    assert "run more processes" in problem["remedy"]
        assert REGISTRY.get_sample_value("tierlog_http_refused_total") == refused + 1


@pytest.mark.parametrize(("path", "told"), [("/whole", ["client.left"]), ("/left/", [])])
async def test_it_is_told_where_who_made_the_answer_did_not(path, told, app, made):
    async with serve_http(app, host="127.0.0.1", port=0, taken_s_max=0.5) as port:
        with await asking(port, get(path)), capture_logs() as logged:
            async with asyncio.timeout(5):
                while not made or made[0] in made[0].connections:
                    await asyncio.sleep(0.05)
    assert [one["event"] for one in logged] == told


@pytest.mark.parametrize("path", ["/whole", "/pieces"])
async def test_a_slow_one_that_goes_on_taking_has_all_of_it(path, app, made):
    loop, came = asyncio.get_running_loop(), 0
    async with serve_http(app, host="127.0.0.1", port=0, taken_s_max=0.5) as port:
        with await asking(port, get(path)) as client:
            begun_s = loop.time()
            while came < ANSWER_LEN:
                # A piece in 100 ms.
                await asyncio.sleep(max(0, begun_s + 0.1 * came / PIECE_LEN - loop.time()))
                data = await asyncio.wait_for(loop.sock_recv(client, 65536), 5)
                assert data, "it was cut off"
                came += len(data)
            assert loop.time() - begun_s > 1, "it takes longer than the limit"


@pytest.mark.parametrize(("method", "how"), [("GET", "cancelled"), ("POST", "done")])
async def test_a_read_ends_when_its_client_goes_and_what_changes_something_does_not(
    method, how, app, caplog
):
    """Else one that goes and asks again would have any number of reads under way."""
    ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def waits() -> Response:
        try:
            await asyncio.sleep(1)
            ended.set_result("done")
        except asyncio.CancelledError:
            ended.set_result("cancelled")
            raise
        return Response()

    app.add_api_route("/waits", waits, methods=[method], response_class=Response)
    asked = f"{method} /waits HTTP/1.1\r\nHost: test\r\nContent-Length: 0\r\n\r\n".encode()
    async with serve_http(app, host="127.0.0.1", port=0) as port:
        with await asking(port, asked):
            await asyncio.sleep(0.2)
            assert not ended.done()
        assert await asyncio.wait_for(ended, 5) == how
        assert await status_of(port) == 200
    assert caplog.records == []
