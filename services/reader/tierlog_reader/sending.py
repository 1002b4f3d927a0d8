"""HTTP answers that hold room in memory until the client has taken them.

Invariants:
    * A body goes out piece by piece: of what a slow client has not taken, one piece at most
      lies in the connection's own buffer, and all of it counts until the last piece is there.
    * A client that takes nothing for ``send_s_max`` is left, also before an answer's first byte:
      its room is free again.
    * A body that can't be made to its end has none: its connection is cut, so that no client takes
      what came for the whole.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping
from types import MappingProxyType
from typing import Final

import structlog
from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from tierlog.format.checksum import Buffer
from tierlog.model.errors import TierlogError
from tierlog_reader.served import HeldRoom

log = structlog.get_logger()

PIECE_BYTES: Final = 256 * 1024


class HeldResponse(Response):
    """A body whose room is given back once it was sent, or can't be."""

    def __init__(
        self,
        body: Buffer,
        room: HeldRoom,
        *,
        send_s_max: float,
        headers: Mapping[str, str],
        media_type: str,
        status_code: int = 200,
    ) -> None:
        super().__init__(memoryview(body), status_code, headers, media_type)
        self._room = room
        self._send_s_max = send_s_max

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        body = memoryview(self.body)
        start = {
            "type": "http.response.start",
            "status": self.status_code,
            "headers": self.raw_headers,
        }
        at = 0
        now_s = asyncio.get_running_loop().time
        try:
            async with asyncio.timeout(self._send_s_max) as limit:
                await send(start)
                for at in range(0, max(1, len(body)), PIECE_BYTES):
                    piece = bytes(body[at : at + PIECE_BYTES])
                    more = at + PIECE_BYTES < len(body)
                    limit.reschedule(now_s() + self._send_s_max)
                    await send({"type": "http.response.body", "body": piece, "more_body": more})
        except TimeoutError:
            log.info("client.left", cause="it takes nothing", sent_bytes=at, bytes=len(body))
        finally:
            self._room.leave()


class HeldStream(StreamingResponse):
    """A body of any length, made piece by piece; what makes it is closed however that ends."""

    def __init__(
        self,
        pieces: AsyncGenerator[bytes, None],
        *,
        send_s_max: float,
        media_type: str,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        every = {"Cache-Control": "no-store", **headers}
        super().__init__(pieces, headers=every, media_type=media_type)
        self._pieces = pieces
        self._send_s_max = send_s_max

    async def stream_response(self, send: Send) -> None:
        """Send it."""
        start = {"status": self.status_code, "headers": self.raw_headers}
        sent = 0
        try:
            async with contextlib.aclosing(self._pieces):
                async with asyncio.timeout(self._send_s_max):
                    await send({"type": "http.response.start", **start})
                async for piece in self._pieces:
                    async with asyncio.timeout(self._send_s_max):
                        await send({"type": "http.response.body", "body": piece, "more_body": True})
                    sent += len(piece)
                    del piece  # the next one may be long in coming
            async with asyncio.timeout(self._send_s_max):
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            log.info("client.left", cause="it takes nothing", sent_bytes=sent)
        except TierlogError as error:
            log.warning("answer.cut", cause=str(error), sent_bytes=sent)
