"""A store that answers, at ten kilobytes a second: each request has its deadline all the same.

A hang is found by silence; here something comes all the time. The server is a real socket that
takes, and gives, a little at a time.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager

import pytest

from tests.unit.s3.test_s3_faults import opened
from tierlog.format.checksum import crc32c_of
from tierlog.model.errors import RetryableError
from tierlog.ports.files import Buffer

BYTES_PER_S, TURN_S = 10_000, 0.1
PART: list[Buffer] = [bytes(3_000_000)]
"""More than the buffers of two sockets take in."""
REQUEST_S_MAX, TRIES = 0.5, 2


class SlowS3:
    """Reads requests, and sends what is asked for, at ``BYTES_PER_S``."""

    def __init__(self) -> None:
        self.url = ""
        self.requests = 0
        self.taken = 0
        self.given = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            self.requests += 1
            if head.startswith(b"GET"):
                await self._give(writer)
            if b"100-continue" in head.lower():
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            while chunk := await reader.read(int(BYTES_PER_S * TURN_S)):
                self.taken += len(chunk)
                await asyncio.sleep(TURN_S)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.transport.abort()

    async def _give(self, writer: asyncio.StreamWriter) -> None:
        length = len(PART[0])
        range_line = f"Content-Range: bytes 0-{length - 1}/{length}"
        lines = ["HTTP/1.1 206 X", f"Content-Length: {length}", range_line, 'ETag: "e"']
        lines.append("Last-Modified: Sat, 21 Nov 2026 10:00:00 GMT")
        writer.write("\r\n".join([*lines, "", ""]).encode())
        while self.given < length * TRIES:
            writer.write(bytes(int(BYTES_PER_S * TURN_S)))
            await writer.drain()
            self.given += int(BYTES_PER_S * TURN_S)
            await asyncio.sleep(TURN_S)


@asynccontextmanager
async def slow_store() -> AsyncIterator[SlowS3]:
    """Start one on a port of its own."""
    slow = SlowS3()
    server = await asyncio.start_server(slow.serve, "127.0.0.1", 0, limit=2**14)
    slow.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield slow
    finally:
        server.close()


@pytest.mark.parametrize("verb", ["upload", "read"])
async def test_a_store_at_ten_kilobytes_a_second_is_given_up_in_time(verb: str):
    async with slow_store() as slow:
        begun_s = asyncio.get_running_loop().time()
        async with opened(
            slow, request_s_max=REQUEST_S_MAX, bytes_per_s_min=10**7, attempts_max=TRIES
        ) as store:
            asked: Coroutine[object, object, object] = (
                store.upload_part("k", "u", 1, PART, crc32c=crc32c_of(PART))
                if verb == "upload"
                else store.get_range("k", 0, len(PART[0]))
            )
            with pytest.raises(RetryableError, match="not done within"):
                await asked
        took_s = asyncio.get_running_loop().time() - begun_s
        assert REQUEST_S_MAX * TRIES <= took_s < 15
        # It was slow, not silent.
        assert slow.taken + slow.given > 1000
        assert slow.requests == TRIES
