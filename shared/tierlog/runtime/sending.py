"""Buffers on their way into a socket, sent from where they lie.

asyncio joins what it is given in pieces, and copies what a full socket did not take. Bulk bodies
go past it: of an upload's request, of an answer of runs or frames. Owns the way of a body's bytes
into a bare socket. Does not own its framing, which is the HTTP library's.

Invariants:
    * Many buffers go to the kernel in one call, and are copied by nobody before. What a full
      socket didn't take waits where it lies; the event loop is given (and copies) a little of it,
      so that it says when there is room again.
    * Order is kept: nothing is in the transport's own buffer before, and nothing afterwards.
    * The loop turns every few MB, however quick the receiver.
    * No chunk is longer than ``CHUNK_BYTES`` or of more than ``SLICES_MAX`` buffers.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from starlette.responses import StreamingResponse

from tierlog.ports.files import Buffer
from tierlog.ports.filling import cut, length_of
from tierlog.runtime.requests import Message, Receive, Send

CHUNK_BYTES: Final = 512 * 1024
SLICES_MAX: Final = 1024  # the kernel's own limit of one call
WAITING_BYTES: Final = 16 * 1024
CHUNKS_A_TURN: Final = 8

PAST_TRANSPORT: Final = "past_transport"
"""In the state of a request: sends buffers of its answer's body, where the connection is bare."""


def is_bare(transport: asyncio.BaseTransport) -> bool:
    """Say whether what is written goes to the socket as it is: without TLS."""
    return transport.get_extra_info("sslcontext") is None


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


class PastTransport:
    """Sends past a bare transport that was told to let nothing wait.

    ``drain`` waits until nothing is left in the transport's buffer: its limit is 0.
    """

    def __init__(
        self, transport: asyncio.WriteTransport, drain: Callable[[], Awaitable[None]]
    ) -> None:
        self._transport = transport
        self._drain = drain
        self._socket_fd: int = transport.get_extra_info("socket").fileno()
        self._behind_turn = 0

    def __repr__(self) -> str:
        return f"<PastTransport {self._transport!r}>"

    async def send(self, chunk: Sequence[Buffer]) -> None:
        """Send the whole of ``chunk``; ``ConnectionResetError`` where the connection closes.

        The transport's buffer is empty before and afterwards. Who is cancelled has sent a part.
        """
        self._behind_turn += 1
        if self._behind_turn == CHUNKS_A_TURN:
            self._behind_turn = 0
            await asyncio.sleep(0)
        left = length_of(chunk)
        while left:
            if self._transport.is_closing():
                # By now the number may be another connection's.
                raise ConnectionResetError("the connection is closing")
            try:
                sent = os.writev(self._socket_fd, chunk)
            except BlockingIOError:
                sent = 0
            if sent < left:
                waiting = cut(chunk, sent, sent + WAITING_BYTES)[0]
                self._transport.write(waiting)
                await self._drain()
                sent += len(waiting)
                chunk = cut(chunk, sent, left)
            left -= sent


async def send_part(scope: Mapping[str, Any], send: Send, buffers: Sequence[Buffer]) -> None:
    """Send a part of the body of an answer that has begun, of which more follows."""
    past = scope.get("state", {}).get(PAST_TRANSPORT)
    if past is not None:
        await past(buffers)
        return
    body = bytes(buffers[0]) if len(buffers) == 1 else b"".join(buffers)
    await send({"type": "http.response.body", "body": body, "more_body": True})


class BuffersResponse(StreamingResponse):
    """A body without a known length, in parts of many buffers that nobody joins."""

    def __init__(self, parts: AsyncIterator[Sequence[Buffer]], *, media_type: str) -> None:
        super().__init__((), media_type=media_type)
        self._parts = parts
        self._scope: Message = {}

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Send it, until the client goes."""
        self._scope = scope
        await super().__call__(scope, receive, send)

    async def stream_response(self, send: Send) -> None:
        """Send it."""
        start = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **start})
        async for buffers in self._parts:
            await send_part(self._scope, send, buffers)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
