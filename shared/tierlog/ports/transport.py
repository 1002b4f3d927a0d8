"""Byte frames between two processes, in order, at most once; TCP or a simulation carries them.

A frame is a protobuf header and a body beside it (performance.md, "Transport").
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, Protocol

from tierlog.ports.files import Buffer


class Frame(NamedTuple):
    """One frame as it arrived. ``body`` is valid for as long as it is referenced."""

    header: bytes
    body: memoryview


class Channel(Protocol):
    """One connection. After ``close``, or when the peer went, both calls raise RetryableError."""

    @property
    def peer(self) -> str:
        """The address of the other side, from the socket."""
        ...

    @property
    def certificate_names(self) -> Sequence[str]:
        """The names in the certificate of the other side, if the transport has verified one."""
        ...

    @property
    def frame_len_max(self) -> int:
        """Bytes that a frame may have on this side, those of its first length field apart."""
        ...

    def send(self, header: bytes, body: Sequence[Buffer] = ()) -> None:
        """Queue a frame; frames arrive in the order of the calls."""
        ...

    async def drain(self) -> None:
        """Wait until the queue of unsent bytes is below its limit."""
        ...

    async def receive(self) -> Frame | None:
        """Wait for the next frame; None when the peer closed in order.

        ``CorruptError`` when what came is no frame, RetryableError when the connection was lost.
        """
        ...

    def close(self) -> None:
        """Give up the connection; what is queued may be lost."""
        ...

    def hang_up(self) -> None:
        """Give it up at once, since nothing that was sent still matters."""
        ...


ChannelHandler = Callable[[Channel], Awaitable[None]]


class Listener(Protocol):
    """An open server socket."""

    @property
    def address(self) -> str:
        """``host:port`` that it listens on."""
        ...

    async def close(self) -> None:
        """Stop listening and close every connection made through it."""
        ...


class Transport(Protocol):
    """Makes connections, and takes them."""

    async def connect(self, address: str) -> Channel:
        """Connect to ``host:port``, or raise RetryableError UNAVAILABLE."""
        ...

    async def listen(self, address: str, handler: ChannelHandler) -> Listener:
        """Run ``handler`` for each connection made to ``address`` (port 0: any free one)."""
        ...
