"""The body of an upload: buffers that lie anywhere, sent from where they lie.

The S3 library takes any object with ``read``, ``__len__``, ``seek``, ``tell`` and asynchronous
iteration for a body. That is duck typing inside a library that is pinned for it; tests hold it
fast (content, checksum, replay after a cut connection). The HTTP library below it asks a
``Payload`` to write itself.

Invariants:
    * Sending starts at the first byte, however often: a request that is sent again is whole.
    * Many buffers go to the kernel in one call, and are copied by nobody before. What a full
      socket didn't take waits where it lies; the event loop is given (and copies) a little of it,
      so that it says when there is room again.
    * Whatever is not a bare socket (TLS), or wants another framing, gets joined chunks through the
      library.
    * The loop turns every few MB, however quick the receiver.
    * No chunk is longer than ``CHUNK_BYTES`` or of more than ``SLICES_MAX`` buffers.
"""

import asyncio
import io
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Final

import aiohttp
from aiohttp.abc import AbstractStreamWriter

from tierlog.ports.files import Buffer
from tierlog.ports.filling import cut, length_of

CHUNK_BYTES: Final = 512 * 1024
SLICES_MAX: Final = 1024  # the kernel's own limit of one call
WAITING_BYTES: Final = 16 * 1024
CHUNKS_A_TURN: Final = 8

Pace = Callable[[int], Awaitable[None]]


class BuffersBody:
    """``buffers`` back to back, as a file that the S3 library can send."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self.pace: Pace | None = None
        """Waits before so many bytes are given."""
        self._buffers = buffers
        self._len = length_of(buffers)
        self._at = 0

    def __repr__(self) -> str:
        return f"BuffersBody(buffers={len(self._buffers)}, len={self._len})"

    def __len__(self) -> int:
        return self._len

    def __bool__(self) -> bool:
        return True

    def tell(self) -> int:
        """Return where ``read`` goes on."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to ``offset``; iteration is not concerned."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._len}[whence]
        self._at = min(max(base + offset, 0), self._len)
        return self._at

    def read(self, size: int = -1) -> bytes:
        """Return up to ``size`` bytes; only for libraries that want to hash the body."""
        end = self._len if size < 0 else min(self._at + size, self._len)
        taken = b"".join(cut(self._buffers, self._at, end))
        self._at = end
        return taken

    async def chunks(self) -> AsyncIterator[list[Buffer]]:
        """Give the whole in lists of buffers, each when it may be sent."""
        for chunk in chunks(self._buffers):
            if self.pace is not None:
                await self.pace(length_of(chunk))
            yield chunk

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self.chunks():
            yield b"".join(chunk)


def chunks(buffers: Sequence[Buffer]) -> Iterator[list[Buffer]]:
    """Cut ``buffers`` into lists that one call to the kernel takes each."""
    chunk: list[Buffer] = []
    room = CHUNK_BYTES
    for buffer in buffers:
        rest, length = buffer, len(buffer)
        while length > room:
            view = memoryview(rest)
            chunk.append(view[:room])
            yield chunk
            rest, length = view[room:], length - room
            chunk, room = [], CHUNK_BYTES
        if length:
            chunk.append(rest)
            room -= length
        if not room or len(chunk) == SLICES_MAX:
            yield chunk
            chunk, room = [], CHUNK_BYTES
    if chunk:
        yield chunk


@aiohttp.payload_type(BuffersBody)
class BuffersPayload(aiohttp.Payload):
    """How the HTTP library sends a ``BuffersBody``."""

    _value: BuffersBody

    @property
    def size(self) -> int:
        return len(self._value)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        raise TypeError("the bytes of a ledger are no text")

    async def write(self, writer: AbstractStreamWriter) -> None:
        await self.write_with_length(writer, None)

    async def write_with_length(
        self, writer: AbstractStreamWriter, content_length: int | None
    ) -> None:
        # From here on, sending again is for those who count requests, not for the HTTP library.
        self._consumed = True
        transport = writer.transport
        is_bare = transport is not None and transport.get_extra_info("sslcontext") is None
        if not is_bare or content_length != self.size:
            async for joined in self._value:
                await writer.write(joined)
            return
        assert transport is not None
        # Whoever drains waits until nothing is left, so that order is kept beside the transport.
        transport.set_write_buffer_limits(high=0)
        try:
            writer.send_headers()
            await writer.drain()
            socket_fd, behind_turn = transport.get_extra_info("socket").fileno(), 0
            async for chunk in self._value.chunks():
                behind_turn += 1
                if behind_turn == CHUNKS_A_TURN:
                    await asyncio.sleep(0)
                    behind_turn = 0
                await _send(writer, socket_fd, chunk)
        finally:
            if not transport.is_closing():
                transport.set_write_buffer_limits()


async def _send(writer: AbstractStreamWriter, socket_fd: int, chunk: Sequence[Buffer]) -> None:
    """Send ``chunk`` past the writer's transport, whose buffer is empty now and afterwards."""
    left = length_of(chunk)
    while left:
        if writer.transport is None or writer.transport.is_closing():
            # By now the number may be another connection's.
            raise aiohttp.ClientConnectionResetError("the connection is closing")
        try:
            sent = os.writev(socket_fd, chunk)
        except BlockingIOError:
            sent = 0
        if sent < left:
            waiting = cut(chunk, sent, sent + WAITING_BYTES)[0]
            await writer.write(waiting)
            await writer.drain()
            sent += len(waiting)
            chunk = cut(chunk, sent, left)
        left -= sent
