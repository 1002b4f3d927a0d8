"""Runs over HTTP/1.1, received straight to where they stay.

The HTTP library of the other clients copies each body four times and makes objects of every
piece of it; for an offloader, which reads all day, that is more than all else that it does. So
heads and everything that is no answer with runs are h11's, and only the framing of a body of runs
is read here (RFC 9112, sections 6 and 7): chunked, by its length, or up to the connection's end.

Invariants:
    * A body that was cut never passes as a short one, whatever its framing: runs have an end mark.
    * Not more than ``LISTS_AHEAD`` lists of runs wait for their reader; then the socket waits.
    * A connection is used again only when its last answer was read to its end.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, Mapping
from http import HTTPStatus
from typing import Final

import h11

from tierlog.adapters.pieces import Pieces
from tierlog.adapters.rpc.run_inflow import RunInflow, receiving_pieces
from tierlog.format.run import Run
from tierlog.format.run_stream import RUNS_TYPE
from tierlog.runtime.calling import PLAIN, Calling
from tierlog.runtime.errors import error_of_problem

HEAD_BYTES_MAX: Final = 64 * 1024
LINE_BYTES_MAX: Final = 4096
PROBLEM_BYTES_MAX: Final = 1024 * 1024
LISTS_AHEAD: Final = 2
IDLE_MAX: Final = 8
_SCRATCH_BYTES: Final = 4096
_FRAMING_BYTES: Final = 32  # of which all that is body is copied
_ENDLESS: Final = 2**62
_SIZE: Final = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(;.*)?")


class BrokenHttpError(Exception):
    """The connection ended too early, or what came is no HTTP."""


class BodyFraming:
    """Tells a body's bytes from those around them."""

    def __init__(self, *, length: int | None, chunked: bool) -> None:
        self.left = 0 if chunked else _ENDLESS if length is None else length
        """Bytes of the body that come next; 0: framing comes next, unless ``done``."""
        self.done = not chunked and length == 0
        self._chunked = chunked
        self.until_closed = not chunked and length is None
        self._line = bytearray()
        self._behind_chunk = False
        self._in_trailer = False

    def took(self, count: int) -> None:
        """Count bytes of the body."""
        assert count <= self.left
        self.left -= count
        if self.left == 0:
            self._behind_chunk = True
            self.done = not self._chunked

    def feed(self, data: bytes) -> bytes:
        """Take the framing at the start of ``data``; return what follows it."""
        at = 0
        while not self.done and not self.left:
            end = data.find(b"\n", at) + 1
            self._line += data[at : end or None]
            if len(self._line) > LINE_BYTES_MAX:
                raise BrokenHttpError("a line between chunks is too long")
            if not end:
                return b""
            if not self._line.endswith(b"\r\n"):
                raise BrokenHttpError("a line between chunks ends with a bare LF")
            self._take_line(bytes(self._line[:-2]))
            self._line.clear()
            at = end
        return data[at:]

    def _take_line(self, line: bytes) -> None:
        if self._in_trailer:
            self.done = not line
        elif self._behind_chunk:
            if line:
                raise BrokenHttpError("a chunk is longer than it said")
            self._behind_chunk = False
        else:
            size = _SIZE.fullmatch(line)
            if size is None:
                raise BrokenHttpError("a chunk without its size")
            self.left = int(size[1], 16)
            self._in_trailer = self.left == 0


class _Answer:
    """One answer as it comes in: a head, then runs, or what says why there are none."""

    def __init__(self, pieces: Pieces) -> None:
        self.inflow = RunInflow(pieces)
        self.framing: BodyFraming | None = None
        """How the runs are framed; None before the head and for other answers."""
        self.status = 0
        self.problem = bytearray()
        self.received = 0
        self.done = False
        self.reusable = False
        """Whether the connection may be used once more when this is ``done``."""
        self.failure: Exception | None = None
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_BYTES_MAX)
        self._head = bytearray()

    def request(self, target: str, host: str, shown: Mapping[str, str]) -> bytes:
        """Return the bytes to send."""
        headers = [("Host", host), ("Accept", RUNS_TYPE), *shown.items()]
        asked = h11.Request(method="GET", target=target, headers=headers)
        parts = (self._http.send(asked), self._http.send(h11.EndOfMessage()))
        return b"".join(part for part in parts if part)

    def body_came(self, length: int) -> None:
        """Count bytes that were received to where they belong."""
        assert self.framing is not None
        self.framing.took(length)
        self.inflow.received(length)
        self._end_if_done()

    def feed(self, data: bytes) -> None:
        """Take bytes that were received elsewhere."""
        while data and not self.done:
            if self.framing is not None:
                data = self._feed_framed(self.framing, data)
            elif self.status:
                self._http.receive_data(data)
                self._take_problem()
                return
            else:
                data = self._feed_head(data)
        # More than was asked for: nobody can tell what the next answer would be.
        self.reusable &= not data

    def _feed_framed(self, framing: BodyFraming, data: bytes) -> bytes:
        data = framing.feed(data)
        while data and framing.left and self.inflow.error is None:
            space = self.inflow.space()
            count = min(len(data), framing.left, len(space))
            space[:count] = data[:count]
            framing.took(count)
            self.inflow.received(count)
            data = data[count:]
        self._end_if_done()
        return b"" if self.failure else data

    def _feed_head(self, data: bytes) -> bytes:
        self._head += data
        end = self._head.find(b"\r\n\r\n") + 4
        if end < 4:
            if len(self._head) > HEAD_BYTES_MAX:
                raise BrokenHttpError("the answer's head is too long")
            return b""
        self._http.receive_data(bytes(self._head[:end]))
        rest = bytes(self._head[end:])
        self._head.clear()
        event = self._http.next_event()
        if isinstance(event, h11.Response):
            self._take_head(event)
        elif not isinstance(event, h11.InformationalResponse):
            raise BrokenHttpError("no answer where one belongs")
        return rest

    def _take_head(self, head: h11.Response) -> None:
        headers = {name.lower(): value for name, value in head.headers}
        self.status = head.status_code
        if self.status != HTTPStatus.OK:
            self._take_problem()
            return
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise BrokenHttpError("runs in an encoding that was not asked for")
        chunked, length = b"transfer-encoding" in headers, headers.get(b"content-length")
        self.framing = BodyFraming(
            length=None if chunked or length is None else int(length), chunked=chunked
        )
        self.reusable = (
            head.http_version >= b"1.1"
            and b"close" not in headers.get(b"connection", b"").lower()
            and not self.framing.until_closed
        )
        self._end_if_done()

    def _take_problem(self) -> None:
        """Let h11 read what is no answer with runs, which is short."""
        while not self.done:
            event = self._http.next_event()
            if event is h11.NEED_DATA:
                return
            if isinstance(event, h11.Data):
                self.problem += event.data
                if len(self.problem) > PROBLEM_BYTES_MAX:
                    raise BrokenHttpError("an error is told at too great length")
            elif isinstance(event, h11.EndOfMessage):
                self.done = True
                self.reusable = self._http.their_state is h11.DONE

    def _end_if_done(self) -> None:
        assert self.framing is not None
        if self.framing.done or self.inflow.error is not None:
            self.reusable &= self.framing.done
            self.inflow.finish()
            self.done = True

    def closed(self, error: Exception | None) -> None:
        """Take notice that nothing comes any more; what is missing shows by the end mark."""
        if self.done:
            return
        if self.framing is not None:
            self.inflow.finish()
        elif self.status:
            # What says why there are no runs may be cut: its status says enough.
            self.reusable = False
        else:
            self.failure = error or BrokenHttpError("the connection was closed before an answer")
        self.done = True

    def raise_error(self, source: str) -> None:
        """Raise what ended an answer, behind the runs that came before; nothing if all is well."""
        if self.failure is not None:
            raise self.failure
        if self.status != HTTPStatus.OK:
            raise error_of_problem(bytes(self.problem), status=self.status, source=source)
        if self.inflow.error is not None:
            raise self.inflow.error


class _Connection(asyncio.BufferedProtocol):
    """One connection, and the answer that comes over it."""

    def __init__(self) -> None:
        self.closed = asyncio.get_running_loop().create_future()
        self.used = False
        """Whether it had an answer before."""
        self.answer: _Answer | None = None
        self._transport: asyncio.Transport | None = None
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._waiter: asyncio.Future[None] | None = None
        self._paused = False
        self._lost = False

    # What the reader calls

    def ask(self, target: str, host: str, shown: Mapping[str, str], pieces: Pieces) -> _Answer:
        """Send a request; return the answer that is to come."""
        assert self._transport is not None
        self.answer = _Answer(pieces)
        self._transport.write(self.answer.request(target, host, shown))
        return self.answer

    async def progress(self, answer: _Answer, timeout_s: float) -> None:
        """Wait until there are runs, or no more; TimeoutError when no byte came meanwhile."""
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        while not (answer.inflow.lists or answer.done):
            before = answer.received
            self._waiter = asyncio.get_running_loop().create_future()
            await asyncio.wait({self._waiter}, timeout=timeout_s)
            if answer.received == before and not answer.done:
                raise TimeoutError

    def release(self) -> bool:
        """Say whether another request may follow; if not, the connection is dropped."""
        answer, self.answer = self.answer, None
        self.used = True
        if self._lost or answer is None or not (answer.done and answer.reusable):
            self.abort()
            return False
        return True

    @property
    def lost(self) -> bool:
        """Whether the other side went, or the connection was dropped."""
        return self._lost

    def abort(self) -> None:
        """Drop the connection."""
        self._lost = True
        if self._transport is not None:
            self._transport.abort()

    # What the loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        answer = self.answer
        if answer is None or answer.framing is None:
            return self._scratch
        if answer.framing.left:
            return answer.inflow.space()[: answer.framing.left]
        return self._scratch[:_FRAMING_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        answer = self.answer
        if answer is None or answer.done:
            self.abort()  # nothing was asked
            return
        answer.received += nbytes
        try:
            if answer.framing is not None and answer.framing.left:
                answer.body_came(nbytes)
            else:
                answer.feed(bytes(self._scratch[:nbytes]))
        except (BrokenHttpError, h11.RemoteProtocolError) as error:
            broken = BrokenHttpError(f"what came is no HTTP: {error}")
            answer.failure, answer.done, answer.reusable = broken, True, False
        if answer.done and not answer.reusable:
            self.abort()
        elif len(answer.inflow.lists) >= LISTS_AHEAD and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        if answer.done or answer.inflow.lists:
            self._wake()

    def eof_received(self) -> None:
        self._ended(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended(exc)
        if not self.closed.done():
            self.closed.set_result(None)

    def _ended(self, error: Exception | None) -> None:
        self._lost = True
        if self.answer is not None:
            self.answer.closed(error)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class RunsHttp:
    """Asks one storage node for runs, over connections that are kept for the next request."""

    def __init__(
        self,
        address: str,
        *,
        source: str,
        connect_s_max: float,
        pieces: Pieces | None = None,
        calling: Calling = PLAIN,
    ) -> None:
        self._address = address
        self._calling = calling
        self._source = source
        self._connect_s_max = connect_s_max
        self._pieces = pieces if pieces is not None else receiving_pieces()
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()

    def __repr__(self) -> str:
        return f"<RunsHttp {self._address}, {len(self._open)} connections>"

    async def get(self, target: str, *, silence_s_max: float) -> AsyncGenerator[list[Run], None]:
        """Iterate over the runs that the node answers with.

        Raises what the node answers instead, ``RetryableError`` UNKNOWN for a body that was cut,
        and ``OSError``, ``TimeoutError`` or ``BrokenHttpError`` when there is no answer.
        """
        connection, answer = await self._asked(target, silence_s_max)
        lists = answer.inflow.lists
        try:
            while True:
                while lists:
                    yield lists.popleft()
                if answer.done:
                    break
                await connection.progress(answer, silence_s_max)
            answer.raise_error(self._source)
        finally:
            self._give_back(connection)

    async def _asked(self, target: str, silence_s_max: float) -> tuple[_Connection, _Answer]:
        """Send a request, again when a connection that was kept turns out to be gone."""
        while True:
            connection = await self._connected()
            shown = self._calling.headers()
            answer = connection.ask(target, self._address, shown, self._pieces)
            try:
                await connection.progress(answer, silence_s_max)
            except BaseException:
                connection.abort()
                raise
            if not (connection.used and connection.lost and not answer.received):
                return connection, answer

    async def _connected(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if not connection.lost:
                return connection
        host, _, port = self._address.rpartition(":")
        async with asyncio.timeout(self._connect_s_max):
            _, connection = await asyncio.get_running_loop().create_connection(
                _Connection, host.strip("[]"), int(port), ssl=self._calling.ssl_context()
            )
        self._open = {one for one in self._open if not one.closed.done()} | {connection}
        return connection

    def _give_back(self, connection: _Connection) -> None:
        self._idle = [one for one in self._idle if not one.lost]
        if connection.release():
            if len(self._idle) < IDLE_MAX:
                self._idle.append(connection)
            else:
                connection.abort()

    async def close(self) -> None:
        """Drop all connections."""
        for connection in self._open:
            connection.abort()
        for connection in self._open:
            await connection.closed
        self._open.clear()
