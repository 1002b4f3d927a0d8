"""Upload bodies on their way into a socket: a slow one, a full one, one that breaks, TLS."""

import asyncio
import contextlib
import hashlib
import os
import random
import socket
import ssl
import struct
import threading
import tracemalloc
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp.abc import AbstractStreamWriter
from multidict import CIMultiDict

from tests.security.making import Authority
from tierlog.adapters.s3.body import (
    CHUNK_BYTES,
    CHUNKS_A_TURN,
    SLICES_MAX,
    BuffersBody,
    BuffersPayload,
)
from tierlog.ports.files import Buffer

MIB = 1024 * 1024
SHAPES = [
    [1],
    [5] * (3 * SLICES_MAX),
    [54_054] * 200,
    [3 * MIB, 1, 0, 5 * MIB],
    [100] * 5000 + [MIB] * 5 + [7],
    [CHUNK_BYTES] * 4,
]


class Sink:
    """Takes uploads by small sips, on threads of its own, and keeps the digest of each."""

    def __init__(self, tls: ssl.SSLContext | None = None, *, resets_after: int = 2**60) -> None:
        self.digests: list[bytes] = []
        self.connections = 0
        self._tls = tls
        self._resets_after = resets_after

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        listening = socket.socket()
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        accepting = threading.Thread(target=self._accept, args=(listening,))
        accepting.start()
        try:
            yield f"{'https' if self._tls else 'http'}://127.0.0.1:{listening.getsockname()[1]}/"
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            accepting.join()
            listening.close()

    def _accept(self, listening: socket.socket) -> None:
        serving: list[threading.Thread] = []
        with contextlib.suppress(OSError):  # shut down
            while True:
                connection, _ = listening.accept()
                self.connections += 1
                serving.append(threading.Thread(target=self._serve, args=(connection,)))
                serving[-1].start()
        for thread in serving:
            thread.join()

    def _serve(self, connection: socket.socket) -> None:
        if self._tls is not None:
            connection = self._tls.wrap_socket(connection, server_side=True)
        sip = memoryview(bytearray(100_000))
        with connection, contextlib.suppress(ConnectionError):
            while length := _length_in(_head(connection)):
                digest = hashlib.sha256()
                left = min(length, self._resets_after)
                while left:
                    got = connection.recv_into(sip, min(left, len(sip)))
                    if not got:
                        return
                    digest.update(sip[:got])
                    left -= got
                if length > self._resets_after:
                    now = struct.pack("ii", 1, 0)
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, now)
                    return
                self.digests.append(digest.digest())
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")


def _head(connection: socket.socket) -> bytes:
    head = b""
    while not head.endswith(b"\r\n\r\n") and (byte := connection.recv(1)):
        head += byte
    return head


def _length_in(head: bytes) -> int:
    return int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)


def digest_of(buffers: list[Buffer]) -> bytes:
    return hashlib.sha256(b"".join(buffers)).digest()


async def put(session: aiohttp.ClientSession, url: str, body: BuffersBody) -> int:
    async with session.put(url, data=body, headers={"Content-Length": str(len(body))}) as answer:
        return answer.status


def filled(shape: list[int], seed: int = 1) -> list[Buffer]:
    chance = random.Random(seed)
    return [chance.randbytes(length) for length in shape]


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_slow_server_gets_each_byte_in_its_order(shape):
    sink, buffers = Sink(), filled(shape)
    async with sink.serving() as url, aiohttp.ClientSession() as session:
        for _ in range(2):  # the second time on the same connection, from the same body
            assert await put(session, url, BuffersBody(buffers)) == 200
            assert sink.digests.pop() == digest_of(buffers)
    assert sink.connections == 1


class ReadMeanwhile(AbstractStreamWriter):
    """Its peer makes room whenever something was given to the loop because there was none."""

    def __init__(self, writer: asyncio.StreamWriter, peer: socket.socket) -> None:
        self._writer = writer
        self._peer = peer
        self.came = bytearray()
        self.waited = 0

    @property
    def transport(self) -> asyncio.WriteTransport:
        return self._writer.transport

    def take(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while some := self._peer.recv(MIB):
                self.came += some

    async def write(self, chunk: bytes | bytearray | memoryview) -> None:
        self._writer.write(chunk)
        self.waited += bool(self.transport.get_write_buffer_size())
        self.take()

    async def drain(self) -> None:
        await self._writer.drain()

    async def write_eof(self, chunk: bytes = b"") -> None:
        raise NotImplementedError

    def enable_compression(self, encoding: str = "", strategy: int | None = None) -> None:
        raise NotImplementedError

    def enable_chunking(self) -> None:
        raise NotImplementedError

    async def write_headers(self, status_line: str, headers: CIMultiDict[str]) -> None:
        raise NotImplementedError


async def test_what_waits_in_the_loop_is_sent_before_what_is_behind_it():
    mine, peer = socket.socketpair()
    peer.setblocking(False)
    _, inner = await asyncio.open_connection(sock=mine)
    writer, buffers = ReadMeanwhile(inner, peer), filled([54_054] * 200)
    limits = writer.transport.get_write_buffer_limits()
    try:
        payload = BuffersPayload(BuffersBody(buffers))
        await payload.write_with_length(writer, payload.size)
        writer.take()
        assert hashlib.sha256(writer.came).digest() == digest_of(buffers)
        assert writer.waited > 1
        assert writer.transport.get_write_buffer_limits() == limits
    finally:
        inner.transport.abort()
        peer.close()


async def test_a_receiver_that_always_has_room_does_not_keep_the_loop(monkeypatch):
    monkeypatch.setattr("os.writev", lambda _, buffers: sum(map(len, buffers)))
    mine, peer = socket.socketpair()
    _, inner = await asyncio.open_connection(sock=mine)
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    turning = asyncio.ensure_future(turn())
    chunks = 10 * CHUNKS_A_TURN
    payload = BuffersPayload(BuffersBody([bytes(CHUNK_BYTES)] * chunks))
    try:
        await payload.write_with_length(ReadMeanwhile(inner, peer), payload.size)
    finally:
        turning.cancel()
        inner.transport.abort()
        peer.close()
    assert turns >= 10 - 1


async def test_uploads_beside_each_other_keep_their_bytes_apart():
    sink = Sink()
    bodies = [filled([30_000] * 100, seed) for seed in range(4)]
    async with sink.serving() as url, aiohttp.ClientSession() as session:
        await asyncio.gather(*(put(session, url, BuffersBody(body)) for body in bodies))
    assert sorted(sink.digests) == sorted(map(digest_of, bodies))


async def test_nothing_of_a_body_is_copied_on_its_way():
    sink, buffers = Sink(), filled([60_000] * 400)
    async with sink.serving() as url, aiohttp.ClientSession() as session:
        await put(session, url, BuffersBody(buffers[:1]))  # what is made once
        tracemalloc.start()
        try:
            await put(session, url, BuffersBody(buffers))
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak < CHUNK_BYTES * 3 // 4


def test_one_call_to_the_kernel_takes_a_chunk():
    assert os.sysconf("SC_IOV_MAX") >= SLICES_MAX


async def test_a_connection_that_breaks_meanwhile_is_an_error_of_the_connection():
    sink = Sink(resets_after=100_000)
    async with sink.serving() as url, aiohttp.ClientSession() as session:
        with pytest.raises((aiohttp.ClientOSError, aiohttp.ServerDisconnectedError)):
            await put(session, url, BuffersBody(filled([60_000] * 400)))
    assert sink.connections == 1, "nobody sent it again unasked and uncounted"


async def test_over_tls_nothing_goes_past_the_cipher(tmp_path):
    authority = Authority(tmp_path)
    issued = authority.issue("server")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(issued.certificate, issued.key)
    sink, buffers = Sink(tls), filled([54_054] * 100 + [3 * MIB])
    trusting = aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=str(authority.file)))
    async with sink.serving() as url, aiohttp.ClientSession(connector=trusting) as session:
        assert await put(session, url, BuffersBody(buffers)) == 200
    assert sink.digests == [digest_of(buffers)]
