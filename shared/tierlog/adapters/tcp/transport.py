"""Frames over TCP, with one copy each way.

Owns: sockets, and the queues on both sides of them. The kernel writes what arrives straight into
the decoder's chunk, and bodies are views of it. What leaves is joined up to ``write_len_max`` and
written as one piece; while the socket is full, frames wait here as they were given.

Does not own what frames say, nor credit (``tierlog.wire``).

Invariants:
    * Frames leave in the order of ``send``.
    * Received and not yet taken: at most ``receive_queue_max`` bytes and what one read brings.
    * A peer gets ``frame_s_max`` seconds for a frame it has begun.
    * After ``close`` a peer that reads nothing is dropped within ``linger_s_max``.
"""

import asyncio
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, cast

import structlog

from tierlog.model.errors import RefusedError, RetryableError, TierlogError
from tierlog.ports.files import Buffer
from tierlog.ports.transport import ChannelHandler, Frame
from tierlog.runtime.tls import peer_names
from tierlog.wire.codec import DEFAULT_LIMITS, FrameDecoder, FrameLimits, encode_head

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpLimits:
    """Every bound of a connection, in one place."""

    frames: FrameLimits = DEFAULT_LIMITS
    connect_s_max: float = 5.0
    receive_queue_max: int = 1024 * 1024
    send_queue_high: int = 1024 * 1024
    write_len_max: int = 256 * 1024
    frame_s_max: float = 60.0
    linger_s_max: float = 5.0


TLS_QUEUE_HIGH: Final = 64 * 1024
DEFAULT_TCP_LIMITS: Final = TcpLimits()


class TcpTransport:
    """Connects and listens. With TLS contexts, every connection is TLS.

    ``client_tls`` may be what gives a context, which is asked at each connection.
    """

    def __init__(
        self,
        *,
        limits: TcpLimits = DEFAULT_TCP_LIMITS,
        client_tls: "ssl.SSLContext | Callable[[], ssl.SSLContext] | None" = None,
        server_tls: ssl.SSLContext | None = None,
    ) -> None:
        self._limits = limits
        self._client_tls = client_tls
        self._server_tls = server_tls

    async def connect(self, address: str) -> "TcpChannel":
        host, port = split_address(address)
        loop = asyncio.get_running_loop()
        tls = self._client_tls
        context = tls() if callable(tls) else tls
        try:
            async with asyncio.timeout(self._limits.connect_s_max):
                _, channel = await loop.create_connection(
                    lambda: TcpChannel(self._limits), host, port, ssl=context
                )
        except (OSError, TimeoutError) as error:
            raise RetryableError(
                f"can't connect to {address} ({str(error) or 'no answer'})",
                remedy="Check that the node runs and that its address is right",
            ) from error
        return channel

    async def listen(self, address: str, handler: ChannelHandler) -> "TcpListener":
        host, port = split_address(address)
        loop = asyncio.get_running_loop()
        listener = TcpListener(handler)
        try:
            server = await loop.create_server(
                lambda: TcpChannel(self._limits, listener.accept), host, port, ssl=self._server_tls
            )
        except OSError as error:
            raise RetryableError(
                f"can't listen on {address} ({error})",
                remedy="Stop what uses the port, or choose another one in the settings",
            ) from error
        listener.opened(server, host)
        return listener


class TcpListener:
    """An open server socket with the tasks of its connections."""

    def __init__(self, handler: ChannelHandler) -> None:
        self._handler = handler
        self._server: asyncio.Server | None = None
        self._address = ""
        self._tasks: dict[asyncio.Task[None], TcpChannel] = {}

    def __repr__(self) -> str:
        return f"<TcpListener {self._address}, connections={len(self._tasks)}>"

    def opened(self, server: asyncio.Server, host: str) -> None:
        """Take note of the socket."""
        self._server = server
        self._address = f"{host}:{server.sockets[0].getsockname()[1]}"

    @property
    def address(self) -> str:
        return self._address

    def accept(self, channel: "TcpChannel") -> None:
        """Serve a new connection in a task that ends with it, or with ``close``."""
        task = asyncio.get_running_loop().create_task(self._serve(channel))
        self._tasks[task] = channel
        task.add_done_callback(self._tasks.pop)

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        tasks, channels = list(self._tasks), list(self._tasks.values())
        for task, channel in zip(tasks, channels, strict=True):
            channel.close()
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for channel in channels:
            await channel.wait_closed()

    async def _serve(self, channel: "TcpChannel") -> None:
        try:
            await self._handler(channel)
        except TierlogError as error:
            log.info("connection.failed", peer=channel.peer, cause=str(error))
        except Exception:
            log.exception("connection.failed", peer=channel.peer)
        finally:
            channel.close()


class TcpChannel(asyncio.BufferedProtocol):
    """One connection, as the loop's protocol and as the port's channel."""

    def __init__(
        self, limits: TcpLimits, accept: "Callable[[TcpChannel], None] | None" = None
    ) -> None:
        self._limits = limits
        self._accept = accept
        self._loop = asyncio.get_running_loop()
        self._decoder = FrameDecoder(limits.frames)
        self._transport: asyncio.Transport | None = None
        self._peer = ""
        self._encrypted = False
        self._certificate_names: Sequence[str] = ()
        self._queued_bytes = 0  # received, not taken
        self._reading = True
        self._arrived = asyncio.Event()
        self._end_of_stream = False
        self._error: TierlogError | None = None
        self._out: deque[Buffer] = deque()
        self._out_bytes = 0
        self._flush_planned = False
        self._writable = True
        self._drained = asyncio.Event()
        self._drained.set()
        self._closing = False
        self._gone = asyncio.Event()
        self._frame_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None
        self._frame_count = 0

    def __repr__(self) -> str:
        state = "closed" if self._closing else "open"
        return f"<TcpChannel {self._peer} {state}, out={self._out_bytes}, {self._decoder!r}>"

    # The port

    @property
    def peer(self) -> str:
        return self._peer

    @property
    def certificate_names(self) -> Sequence[str]:
        return self._certificate_names

    @property
    def frame_len_max(self) -> int:
        return self._limits.frames.frame_len_max

    def send(self, header: bytes, body: Sequence[Buffer] = ()) -> None:
        self._check_open()
        body_len = sum(map(len, body))
        head = encode_head(header_len=len(header), body_len=body_len, limits=self._limits.frames)
        self._out.append(head + header)
        self._out.extend(body)
        self._out_bytes += len(head) + len(header) + body_len
        if self._out_bytes >= self._limits.send_queue_high:
            self._drained.clear()
        if not self._flush_planned:
            self._flush_planned = True
            self._loop.call_soon(self._flush)

    async def drain(self) -> None:
        self._check_open()
        if not self._drained.is_set():
            await self._drained.wait()
            self._check_open()

    async def receive(self) -> Frame | None:
        frames = self._decoder.frames
        while not frames:
            if self._error is not None:
                raise self._error
            if self._end_of_stream:
                return None
            self._check_open()
            self._arrived.clear()
            await self._arrived.wait()
        frame = frames.popleft()
        self._queued_bytes -= len(frame.header) + len(frame.body)
        if self._queued_bytes <= self._limits.receive_queue_max // 2:
            self._resume_reading()
        return frame

    def close(self) -> None:
        if self._closing:
            return
        self._flush_everything()
        self._closing = True
        self._stop_timers()
        if self._transport is not None and not self._gone.is_set():
            if not self._transport.is_closing():
                # asyncio's TLS that is closed twice, once by the peer's farewell, can't be aborted.
                self._transport.close()
            self._linger_timer = self._loop.call_later(
                self._limits.linger_s_max, self._transport.abort
            )
        self._arrived.set()
        self._drained.set()

    def hang_up(self) -> None:
        self.close()
        # A farewell over TLS waits for the peer's, and the loop may be about to end.
        if self._encrypted and self._transport is not None and not self._gone.is_set():
            self._transport.abort()

    async def wait_closed(self) -> None:
        """Wait until the socket is closed."""
        await self._gone.wait()

    # The loop's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = cast("asyncio.Transport", transport)
        name = transport.get_extra_info("peername")
        self._peer = f"{name[0]}:{name[1]}" if isinstance(name, tuple) else str(name)
        # Whatever the kernel does not take at once stays in our queue, uncopied. (asyncio's TLS
        # compares with >=, so that at 0 it would pause for ever.)
        self._encrypted = transport.get_extra_info("sslcontext") is not None
        if self._encrypted:
            self._certificate_names = peer_names(transport)
        self._transport.set_write_buffer_limits(high=TLS_QUEUE_HIGH if self._encrypted else 0)
        if self._accept is not None:
            self._accept(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where the kernel writes to."""
        del sizehint
        return self._decoder.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        """Find the frames in what came."""
        frames = self._decoder.frames
        known = len(frames)
        try:
            self._decoder.wrote(nbytes)
        except TierlogError as error:
            self._fail(error)
        for at in range(known, len(frames)):
            self._queued_bytes += len(frames[at].header) + len(frames[at].body)
        self._frame_count += len(frames) - known
        if len(frames) > known:
            self._arrived.set()
        if self._queued_bytes > self._limits.receive_queue_max:
            self._pause_reading()
        waiting = self._decoder.partial_len and not self._closing and self._error is None
        if waiting and self._frame_timer is None:
            self._frame_timer = self._loop.call_later(
                self._limits.frame_s_max, self._check_progress, self._frame_count
            )

    def eof_received(self) -> bool:
        """Take note of an orderly end; asyncio closes the socket."""
        if self._decoder.partial_len:
            self._fail(RetryableError(f"{self._peer} hung up in mid-frame", remedy="Connect again"))
        self._end_of_stream = True
        self._arrived.set()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Wake whoever waits."""
        if self._error is None and not self._end_of_stream:
            cause = f" ({exc})" if exc is not None else ""
            self._error = RetryableError(
                f"the connection to {self._peer} is closed{cause}", remedy="Connect again"
            )
        self._closing = True
        self._gone.set()
        self._stop_timers()
        self._out.clear()
        self._out_bytes = 0
        self._arrived.set()
        self._drained.set()

    def pause_writing(self) -> None:
        """Keep frames here: the socket is full."""
        self._writable = False

    def resume_writing(self) -> None:
        """Go on: the socket takes more."""
        self._writable = True
        self._flush()

    # Inside

    def _check_open(self) -> None:
        if self._closing:
            raise self._error or RetryableError(
                f"the connection to {self._peer} is closed", remedy="Connect again"
            )

    def _flush(self) -> None:
        self._flush_planned = False
        while self._out and self._writable and not self._closing:
            self._write_some()
        if self._out_bytes < self._limits.send_queue_high:
            self._drained.set()

    def _flush_everything(self) -> None:
        if not self._gone.is_set():
            while self._out:
                self._write_some()

    def _write_some(self) -> None:
        assert self._transport is not None
        pieces: list[Buffer] = []
        length, out = 0, self._out
        while out and (not pieces or length + len(out[0]) <= self._limits.write_len_max):
            piece = out.popleft()
            pieces.append(piece)
            length += len(piece)
        self._out_bytes -= length
        joined = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        self._transport.write(memoryview(joined))

    def _check_progress(self, frame_count: int) -> None:
        self._frame_timer = None
        if not self._decoder.partial_len or self._closing:
            return
        if self._frame_count == frame_count and self._reading:
            limit_s = self._limits.frame_s_max
            self._fail(
                RefusedError(
                    f"{self._peer} did not finish a frame within {limit_s} s",
                    remedy="Connect again",
                )
            )
            return
        self._frame_timer = self._loop.call_later(
            self._limits.frame_s_max, self._check_progress, self._frame_count
        )

    def _fail(self, error: TierlogError) -> None:
        """Let the reader find ``error`` behind the frames that are whole; read no more."""
        if self._error is None:
            self._error = error
        self._pause_reading()
        self._arrived.set()

    def _pause_reading(self) -> None:
        if self._reading and self._transport is not None:
            self._reading = False
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        if not self._reading and self._error is None and self._transport is not None:
            self._reading = True
            self._transport.resume_reading()

    def _stop_timers(self) -> None:
        for timer in (self._frame_timer, self._linger_timer):
            if timer is not None:
                timer.cancel()
        self._frame_timer = self._linger_timer = None


def split_address(address: str) -> tuple[str, int]:
    """Take ``host:port`` (``[v6]:port``) apart, or raise ``RefusedError``."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise RefusedError(f"{address[:80]!r} is not an address", remedy="Give HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)
