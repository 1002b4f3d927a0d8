"""A server that gives its port back answers nobody any more, whenever they connected.

Design: reliability.md C1. The server that says what a service waits for has the service's own port.
"""

import asyncio
import socket

import pytest

from tierlog.runtime.http import _EmbeddedServer, build_http_app, serve_http

REQUEST = b"GET /livez HTTP/1.1\r\nHost: test\r\n\r\n"


async def answer_to(client, request=REQUEST):
    """Return the first bytes that come for a request; none: the connection is closed."""
    loop = asyncio.get_running_loop()
    try:
        await loop.sock_sendall(client, request)
        return await asyncio.wait_for(loop.sock_recv(client, 100), 5)
    except (ConnectionResetError, BrokenPipeError):
        return b""


def connected(port):
    client = socket.create_connection(("127.0.0.1", port))
    client.setblocking(False)
    return client


@pytest.mark.parametrize("turns", range(6))
async def test_who_connects_while_a_server_ends_is_not_kept_by_it(turns, monkeypatch):
    clients, ending = [], _EmbeddedServer.shutdown

    async def shutdown(self, sockets=None):
        # The kernel has it at once; in so many turns of the loop it is accepted, or almost.
        clients.append(connected(port))
        for _ in range(turns):
            await asyncio.sleep(0)
        await ending(self, sockets)

    monkeypatch.setattr(_EmbeddedServer, "shutdown", shutdown)
    async with serve_http(build_http_app("test", checks={}), host="127.0.0.1", port=0) as port:
        with connected(port) as before:
            assert (await answer_to(before)).startswith(b"HTTP/1.1 200")
    with clients[0] as client:
        assert await answer_to(client) == b""


async def test_who_is_not_done_when_a_server_has_ended_is_cut_off(monkeypatch):
    monkeypatch.setattr("tierlog.runtime.http.DRAIN_S_MAX", 1)
    app = build_http_app("test", checks={})
    asked = asyncio.Event()

    @app.get("/slow")
    async def slow():
        asked.set()
        await asyncio.sleep(60)

    async with serve_http(app, host="127.0.0.1", port=0) as port:
        client = connected(port)
        waiting = asyncio.create_task(answer_to(client, REQUEST.replace(b"livez", b"slow")))
        await asyncio.wait_for(asked.wait(), 5)
    with client:
        assert b"200" not in await waiting
        assert await answer_to(client) == b""
