"""The transport port in memory: one network, any number of addresses, faults by hooks.

Owns which frames arrive, and when. Does not own faults: the network asks its hooks.

Invariants:
    * Frames of one connection arrive in order, at most once; a lost frame cuts the connection
      (as TCP would: bytes behind a gap are never handed out).
    * After ``cut``, both sides find out. What was on its way is lost; or, where a hook says so,
      what the caller sent arrives late: the caller knows nothing of that, and may have sent the
      same again by another connection meanwhile (as the kernel's retransmissions would).
    * Bodies are copied once, into buffers of their own, as they would be by a socket.
"""

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import structlog

from tierlog.model.errors import RetryableError, TierlogError
from tierlog.ports.files import Buffer
from tierlog.ports.transport import ChannelHandler, Frame
from tierlog.wire.codec import DEFAULT_LIMITS, FrameLimits, encode_head, frame_len

log = structlog.get_logger()

_FIRST_PORT: Final = 20_000
SEND_QUEUE_HIGH: Final = 1024 * 1024


class MemoryNetwork:
    """All that can reach each other."""

    def __init__(
        self, *, latency_s: Callable[[], float] = lambda: 0.0, limits: FrameLimits = DEFAULT_LIMITS
    ) -> None:
        self.latency_s = latency_s
        self.limits = limits
        self.loses: Callable[[str, str], bool] = lambda _source, _target: False
        """Asked for each frame, with the names of both ends: whether it is lost."""
        self.lingers: Callable[[str, str], float | None] = lambda _caller, _called: None
        """Asked at a cut: in how many seconds what the caller sent arrives; None: it is lost."""
        self.lingered = 0
        """How many frames arrived late."""
        self.unreachable: set[tuple[str, str]] = set()
        """Pairs (source, target) of names that can't connect nor send."""
        self.listeners: dict[str, MemoryListener] = {}
        self.channels: dict[MemoryChannel, None] = {}  # in the order of their making
        self._port = _FIRST_PORT

    def __repr__(self) -> str:
        return f"<MemoryNetwork {sorted(self.listeners)}, ends={len(self.channels)}>"

    def transport(self, name: str) -> "MemoryTransport":
        """Return what the process ``name`` connects and listens with."""
        return MemoryTransport(self, name)

    def free_port(self) -> int:
        """Return a port that nobody has."""
        self._port += 1
        return self._port

    def cut(self, name: str) -> None:
        """Cut every connection of the process ``name``, without a word to it."""
        for channel in list(self.channels):
            if channel.name == name:
                channel.cut()

    def crash(self, name: str) -> None:
        """End the process ``name``: its connections and its listeners are gone."""
        for channel in list(self.channels):
            if channel.name == name:
                if channel.is_caller:
                    channel.cut()
                else:
                    channel.lose_all()
        for address, listener in list(self.listeners.items()):
            if listener.name == name:
                del self.listeners[address]


class MemoryTransport:
    """The network as one process sees it."""

    def __init__(self, network: MemoryNetwork, name: str) -> None:
        self._network = network
        self._name = name

    async def connect(self, address: str) -> "MemoryChannel":
        network = self._network
        await asyncio.sleep(network.latency_s())
        listener = network.listeners.get(address)
        if listener is None or (self._name, listener.name) in network.unreachable:
            raise RetryableError(f"can't connect to {address}", remedy="Check that the node runs")
        ours = MemoryChannel(network, self._name, peer=address, is_caller=True)
        theirs = MemoryChannel(network, listener.name, peer=self._name)
        ours.other, theirs.other = theirs, ours
        network.channels.update({ours: None, theirs: None})
        listener.accept(theirs)
        return ours

    async def listen(self, address: str, handler: ChannelHandler) -> "MemoryListener":
        host, _, port = address.rpartition(":")
        if port == "0":
            address = f"{host}:{self._network.free_port()}"
        if address in self._network.listeners:
            raise RetryableError(f"can't listen on {address}", remedy="Choose another port")
        listener = MemoryListener(self._network, self._name, address, handler)
        self._network.listeners[address] = listener
        return listener


class MemoryListener:
    """An address that is listened on."""

    def __init__(
        self, network: MemoryNetwork, name: str, address: str, handler: ChannelHandler
    ) -> None:
        self._network = network
        self._handler = handler
        self._address = address
        self._tasks: dict[asyncio.Task[None], MemoryChannel] = {}
        self._context = contextvars.copy_context()
        self.name = name

    @property
    def address(self) -> str:
        return self._address

    def accept(self, channel: "MemoryChannel") -> None:
        """Serve a new connection in a task that ends with it, or with ``close``."""
        # In the listener's context: the caller's says who called, not who serves.
        task = asyncio.get_running_loop().create_task(
            self._serve(channel), context=self._context.copy()
        )
        self._tasks[task] = channel
        task.add_done_callback(self._tasks.pop)

    async def close(self) -> None:
        if self._network.listeners.get(self._address) is self:
            del self._network.listeners[self._address]
        tasks = dict(self._tasks)
        for task, channel in tasks.items():
            channel.close()
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _serve(self, channel: "MemoryChannel") -> None:
        try:
            await self._handler(channel)
        except TierlogError as error:
            log.info("connection.failed", peer=channel.peer, cause=str(error))
        except Exception:
            log.exception("connection.failed", peer=channel.peer)
        finally:
            channel.close()


class MemoryChannel:
    """One end of a connection."""

    def __init__(
        self, network: MemoryNetwork, name: str, *, peer: str, is_caller: bool = False
    ) -> None:
        self._network = network
        self._peer = peer
        self._loop = asyncio.get_running_loop()
        self._arrived: deque[Frame] = deque()
        self._under_way: deque[tuple[float, Frame | None]] = deque()
        self._under_way_bytes = 0
        self._changed = asyncio.Event()
        self._error: TierlogError | None = None
        self._end_of_stream = False
        self._closed = False
        self._last_arrival_s = 0.0
        self.is_unheard = False
        """The other end is gone, and this one doesn't know yet."""
        self.other: MemoryChannel = self
        self.is_caller = is_caller
        self.name = name

    def __repr__(self) -> str:
        return f"<MemoryChannel {self.name} to {self._peer}{' closed' if self._closed else ''}>"

    @property
    def peer(self) -> str:
        return self._peer

    @property
    def certificate_names(self) -> Sequence[str]:
        return ()

    @property
    def frame_len_max(self) -> int:
        return self._network.limits.frame_len_max

    def send(self, header: bytes, body: Sequence[Buffer] = ()) -> None:
        self._check_open()
        copied = bytearray(b"").join(body)
        encode_head(header_len=len(header), body_len=len(copied), limits=self._network.limits)
        if self.is_unheard:
            return
        self._pass_on(Frame(bytes(header), memoryview(copied)))
        blocked = (self.name, self.other.name) in self._network.unreachable
        if blocked or self._network.loses(self.name, self.other.name):
            self.cut()

    async def drain(self) -> None:
        self._check_open()
        while self._under_way_bytes >= SEND_QUEUE_HIGH:
            self._changed.clear()
            await self._changed.wait()
            self._check_open()

    async def receive(self) -> Frame | None:
        while not self._arrived:
            if self._error is not None:
                raise self._error
            if self._end_of_stream:
                return None
            self._check_open()
            self._changed.clear()
            await self._changed.wait()
        frame = self._arrived.popleft()
        # As on a socket, a sender is held back by a receiver that takes nothing.
        self.other.arrived_at_peer(frame)
        return frame

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._network.channels.pop(self, None)
            self._pass_on(None)
            self._changed.set()

    def hang_up(self) -> None:
        self.close()

    def cut(self) -> None:
        """Lose the connection; what the caller sent may still arrive."""
        caller, called = (self, self.other) if self.is_caller else (self.other, self)
        if called.is_unheard:
            return
        sent = caller.on_its_way()
        late_s = self._network.lingers(caller.name, called.name) if sent else None
        if late_s is None:
            self.lose_all()
            return
        caller.lose()
        called.await_late(late_s, sent)

    def lose_all(self) -> None:
        """Lose the connection and all that is on its way, in both directions."""
        for end in (self, self.other):
            end.lose()

    def on_its_way(self) -> list[Frame]:
        """Return what this end sent and the other one has not got."""
        return [frame for _, frame in self._under_way if frame is not None]

    def await_late(self, late_s: float, frames: Sequence[Frame]) -> None:
        """Get these frames after a time, and learn then that the other end is gone."""
        self.is_unheard = True
        self._under_way.clear()
        self._loop.call_later(late_s, self._take_late, frames)

    def _take_late(self, frames: Sequence[Frame]) -> None:
        if self._closed:
            return  # the process died meanwhile, or hung up
        self._network.lingered += len(frames)
        for frame in frames:
            self.take(frame)
        # Whoever reads finds the end behind these; what it answers meanwhile goes nowhere.
        self._error = self._lost()

    def lose(self) -> None:
        """Take note that the connection is lost."""
        self._network.channels.pop(self, None)
        self._under_way.clear()
        if not self._closed or self._error is None:
            self._error = self._lost()
        self._closed = True
        self._changed.set()

    def _lost(self) -> RetryableError:
        return RetryableError(f"the connection to {self._peer} is lost", remedy="Connect again")

    def arrived_at_peer(self, frame: Frame) -> None:
        """Take note that the peer took a frame."""
        self._under_way_bytes -= frame_len(frame.header, (frame.body,))
        self._changed.set()

    def _pass_on(self, frame: Frame | None) -> None:
        arrival_s = max(self._last_arrival_s, self._loop.time() + self._network.latency_s())
        self._last_arrival_s = arrival_s
        if frame is not None:
            self._under_way_bytes += frame_len(frame.header, (frame.body,))
        self._under_way.append((arrival_s, frame))
        self._loop.call_at(arrival_s, self._arrive)

    def _arrive(self) -> None:
        if not self._under_way:
            return  # lost meanwhile
        _, frame = self._under_way.popleft()
        self.other.take(frame)

    def take(self, frame: Frame | None) -> None:
        """Let a frame, or the end, in."""
        if frame is None:
            self._end_of_stream = self._closed = True
            self._network.channels.pop(self, None)
        else:
            self._arrived.append(frame)
        self._changed.set()

    def _check_open(self) -> None:
        if self._closed:
            raise self._error or RetryableError(
                f"the connection to {self._peer} is closed", remedy="Connect again"
            )
