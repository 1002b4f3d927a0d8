"""Bodies of answers on their way into a socket: a slow client, one that goes, TLS, each framing."""

import asyncio
import contextlib
import http.client
import random
import socket
import ssl
import time
import tracemalloc

import pytest
from starlette.responses import Response

from tests.security.making import Authority
from tierlog.ports.filling import length_of
from tierlog.runtime.http import build_http_app, serve_http
from tierlog.runtime.sending import CHUNK_BYTES, SLICES_MAX, BuffersResponse, send_part
from tierlog.runtime.tls import ServerTls

HOST = "127.0.0.1"
MIB = 1024 * 1024
SIP = 100_000
SHAPES = [
    [[1]],
    [[5] * (3 * SLICES_MAX), [7]],
    [[54_054] * 40] * 5,
    [[3 * MIB, 1, 0], [5 * MIB], [0]],
    [[CHUNK_BYTES] * 4, [100] * 5000],
]


def filled(shape):
    chance = random.Random(1)
    return [[chance.randbytes(length) for length in part] for part in shape]


def joined(parts):
    return b"".join(buffer for part in parts for buffer in part)


class OfLength(Response):
    """Parts whose length is told before; ``part_s_max`` is the time that one may take."""

    def __init__(self, parts, part_s_max=None):
        self.parts = parts
        self.part_s_max = part_s_max
        super().__init__(headers={"Content-Length": str(sum(map(length_of, parts)))})

    async def __call__(self, scope, receive, send):
        start = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **start})
        for part in self.parts:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.part_s_max):
                    await send_part(scope, send, part)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class Served:
    """A server of ``parts`` in both framings, which keeps what its generators came to."""

    def __init__(self, parts, *, part_s_max=None):
        self.parts = parts
        self.part_s_max = part_s_max
        self.ended = asyncio.Event()
        self.port = 0

    async def _parts(self):
        try:
            for part in self.parts:
                yield part
        finally:
            self.ended.set()

    @contextlib.asynccontextmanager
    async def serving(self, tls=None):
        app = build_http_app("bodies", checks={})

        async def chunked() -> Response:
            return BuffersResponse(self._parts(), media_type="application/octet-stream")

        async def counted() -> Response:
            return OfLength(self.parts, self.part_s_max)

        app.add_api_route("/chunked", chunked, methods=["GET", "HEAD"])
        app.add_api_route("/counted", counted, methods=["GET", "HEAD"])
        async with serve_http(app, host=HOST, port=0, tls=tls) as self.port:
            yield self


def connected(served, *, tls=None):
    """Return a connection whose kernel takes little, so that the server's is full soon."""
    connection = (
        http.client.HTTPConnection(HOST, served.port, timeout=30)
        if tls is None
        else http.client.HTTPSConnection(HOST, served.port, timeout=30, context=tls)
    )
    plain = socket.socket()
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
    plain.connect((HOST, served.port))
    connection.sock = plain if tls is None else tls.wrap_socket(plain, server_hostname=HOST)
    return connection


def sipped(connection, path, method="GET"):
    connection.request(method, path)
    answer = connection.getresponse()
    came = bytearray()
    while sip := answer.read(SIP):
        came += sip
    return answer, bytes(came)


@pytest.mark.parametrize("path", ["/chunked", "/counted"])
@pytest.mark.parametrize("shape", SHAPES)
async def test_a_slow_client_gets_each_byte_in_its_order(shape, path):
    served = Served(filled(shape))
    async with served.serving():
        with contextlib.closing(connected(served)) as connection:
            for _ in range(2):  # the second time on the same connection
                answer, came = await asyncio.to_thread(sipped, connection, path)
                assert came == joined(served.parts)
                assert bool(answer.chunked) == (path == "/chunked")
                assert not answer.will_close


@pytest.mark.parametrize("path", ["/chunked", "/counted"])
async def test_who_asks_for_the_head_gets_no_body(path):
    served = Served(filled(SHAPES[0]))
    async with served.serving():
        with contextlib.closing(connected(served)) as connection:
            _, came = await asyncio.to_thread(sipped, connection, path, "HEAD")
            assert came == b""
            _, came = await asyncio.to_thread(sipped, connection, path)
            assert came == joined(served.parts)


async def test_a_client_of_the_first_version_gets_it_until_the_end():
    served = Served(filled([[54_054] * 40]))
    async with served.serving():
        with contextlib.closing(connected(served)) as connection:
            connection._http_vsn, connection._http_vsn_str = 10, "HTTP/1.0"
            answer, came = await asyncio.to_thread(sipped, connection, "/chunked")
    assert came == joined(served.parts)
    assert not answer.chunked


@pytest.mark.parametrize("path", ["/chunked", "/counted"])
async def test_over_tls_nothing_goes_past_the_cipher(tmp_path, path):
    authority = Authority(tmp_path)
    tls = ServerTls(authority.files(authority.issue("server")), client_certificates=False)
    trusting = ssl.create_default_context(cafile=str(authority.file))
    served = Served(filled([[54_054] * 100, [3 * MIB]]))
    async with served.serving(tls):
        with contextlib.closing(await asyncio.to_thread(connected, served, tls=trusting)) as one:
            for _ in range(2):
                _, came = await asyncio.to_thread(sipped, one, path)
                assert came == joined(served.parts)


async def test_nothing_of_a_body_is_copied_on_its_way():
    served = Served(filled([[60_000] * 400] * 2))
    async with served.serving():
        with contextlib.closing(connected(served)) as connection:
            connection.request("GET", "/counted")
            answer = await asyncio.to_thread(connection.getresponse)
            tracemalloc.start()
            try:
                into = memoryview(bytearray(SIP))
                tracemalloc.reset_peak()
                before, _ = tracemalloc.get_traced_memory()
                while await asyncio.to_thread(answer.readinto, into):
                    pass
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
    assert peak - before < CHUNK_BYTES // 2


async def test_what_makes_a_body_ends_when_its_client_goes(caplog):
    served = Served(filled([[MIB] * 4] * 100))
    async with served.serving():
        with contextlib.closing(connected(served)) as connection:
            connection.request("GET", "/chunked")
            answer = await asyncio.to_thread(connection.getresponse)
            await asyncio.to_thread(answer.read, SIP)
        async with asyncio.timeout(10):
            await served.ended.wait()
        with contextlib.closing(connected(served)) as connection:
            connection.request("HEAD", "/counted")
            assert (await asyncio.to_thread(connection.getresponse)).status == 200
    assert not caplog.records


async def test_a_part_that_was_given_up_never_passes_as_whole():
    # Whoever gave it up goes on with the next, of which the library knows the length alone.
    served = Served(filled([[20 * MIB], [1000]]), part_s_max=0.2)
    async with served.serving():
        with contextlib.closing(connected(served)) as connection:
            connection.request("GET", "/counted")
            answer = await asyncio.to_thread(connection.getresponse)
            await asyncio.to_thread(time.sleep, 0.5)
            with pytest.raises((ConnectionError, http.client.IncompleteRead)):
                await asyncio.to_thread(answer.read)
