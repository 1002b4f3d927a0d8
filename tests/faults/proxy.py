"""Proxies before real servers that know what a request is, and do to it what a test says.

One ``Judge`` stands for one process: all its proxies ask it about each request, in the order of
their arrival. It counts by server and kind, so that "the third ``set`` to ZooKeeper" is a point
that the next run has too, and it is told once at which point what is to happen.

Invariants:
    * A request that is held before it is sent on has not reached the server; one whose reply is
      held was answered by the server. Neither moves before the test says so.
    * What is cut is cut on both sides, without a word to either.
    * Requests of one connection are sent on in their order, replies too.
"""

import asyncio
import contextlib
from collections import Counter
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple, Self

from tests.faults.frames import (
    FRAME_LEN_MAX,
    IDLE,
    LENGTH_LEN,
    Framing,
    HttpRequest,
    KafkaFraming,
    ZooKeeperFraming,
    parse_http,
)

DELAY_S = 2.0


class Act(Enum):
    """What becomes of one request."""

    PASS = "sent on, and answered"
    HOLD_REQUEST = "held before it is sent on"
    HOLD_REPLY = "done, its answer is held"
    DROP_REQUEST = "cut before it is sent on"
    DROP_REPLY = "done, and cut before its answer"
    DELAY = "sent on later"
    TWICE = "sent twice, where that is legal"


COUNTED: Final = frozenset({Act.DROP_REQUEST, Act.DROP_REPLY, Act.DELAY, Act.TWICE})
"""What a proxy does by itself; of what is held the test knows."""


class Place(NamedTuple):
    """The ``nth`` request of a kind to a server, from 0, since the count began."""

    server: str
    kind: str
    nth: int

    def __str__(self) -> str:
        return f"{self.server}.{self.kind}#{self.nth}"


@dataclass(frozen=True, slots=True)
class Asked:
    """One request."""

    place: Place
    about: str


class CutError(ConnectionError):
    """The connection is to go."""


class Judge:
    """Counts the requests of one process; decides about one of them."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.met = asyncio.Event()
        """The place that was armed has come."""
        self.away: set[str] = set()
        """Servers that the process does not reach: whatever it asks of them is cut."""
        self.done: Counter[Act] = Counter()
        """What was dropped, sent on later or sent twice indeed, since the count began."""
        self._counts: Counter[tuple[str, str]] = Counter()
        self._armed: tuple[Place, Act] | None = None
        self._go_on: asyncio.Future[bool] | None = None

    def __repr__(self) -> str:
        return f"<Judge asked={len(self.asked)} armed={self._armed}>"

    def count_anew(self) -> None:
        """Begin to count, with nothing armed."""
        self.asked, self._armed = [], None
        self._counts.clear()
        self.done.clear()
        self.met.clear()

    def arm(self, place: Place, act: Act) -> None:
        """Say what is to happen, once, at a place that has not come yet."""
        self._armed = (place, act)

    def places(self) -> list[Place]:
        """Return what was asked, of what clients always send the first of each kind alone."""
        return [
            one.place
            for one in self.asked
            if (one.place.server, one.place.kind) not in IDLE or one.place.nth == 0
        ]

    def ask(self, server: str, kind: str, about: str) -> Act:
        """Take a request; return what becomes of it."""
        place = Place(server, kind, self._counts[server, kind])
        self._counts[server, kind] += 1
        self.asked.append(Asked(place, about))
        if server in self.away:
            return Act.DROP_REQUEST
        if self._armed is None or self._armed[0] != place:
            return Act.PASS
        act, self._armed = self._armed[1], None
        if act in {Act.HOLD_REQUEST, Act.HOLD_REPLY}:
            self._go_on = asyncio.get_running_loop().create_future()
            if act is Act.HOLD_REQUEST:
                self.met.set()
        else:
            self.met.set()
        return act

    async def held(self, *, reply: bool = False) -> None:
        """Wait until the test lets go on what is held, or raise when it is to be cut."""
        assert self._go_on is not None
        if reply:
            self.met.set()
        if not await asyncio.shield(self._go_on):
            raise CutError

    def let_go(self, *, cut: bool) -> None:
        """Let what is held go on, or cut its connection."""
        if self._go_on is not None and not self._go_on.done():
            self._go_on.set_result(not cut)


class FaultProxy:
    """Listens, and forwards each connection to ``target`` (``host:port``) as its kind says."""

    def __init__(
        self,
        server: str,
        target: str,
        judge: Judge | None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self.server = server
        self.judge = judge
        self._target = target.partition(":")[0], int(target.partition(":")[2])
        self._listen = host, port
        self._tasks: set[asyncio.Task[None]] = set()
        self.address = ""

    async def __aenter__(self) -> Self:
        host, port = self._listen
        self._listener = await asyncio.start_server(self._accept, host, port, limit=2**20)
        self._listen = host, self._listener.sockets[0].getsockname()[1]
        self.address = f"{host}:{self._listen[1]}"
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._listener.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.wait([*self._tasks, asyncio.create_task(asyncio.sleep(0))])

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        with contextlib.suppress(OSError, EOFError, asyncio.CancelledError, ExceptionGroup):
            try:
                if self.judge is not None and self.server in self.judge.away:
                    raise CutError
                await self._serve(reader, writer)
            except (OSError, EOFError):
                writer.transport.abort()
            else:
                with contextlib.suppress(OSError):
                    await writer.drain()
        writer.close()
        self._tasks.discard(task)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.server in {"s3", "node"}:
            await self._serve_http(reader, writer)
            return
        far_reader, far_writer = await asyncio.open_connection(*self._target)
        try:
            async with asyncio.TaskGroup() as group:
                if self.judge is None:
                    group.create_task(_pump(reader, far_writer))
                    group.create_task(_pump(far_reader, writer))
                    return
                wire = _Wire(self.server, self.judge, self._framing())
                group.create_task(wire.requests(reader, far_writer))
                group.create_task(wire.replies(far_reader, writer))
        finally:
            far_writer.transport.abort()
            writer.transport.abort()

    def _framing(self) -> Framing:
        if self.server == "zookeeper":
            return ZooKeeperFraming()
        assert self.server == "kafka"
        return KafkaFraming(self._target, self._listen)

    # HTTP: a connection of its own for each request, as the server ends its answer by closing.

    async def _serve_http(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        request, judge = parse_http(head), self.judge
        act = Act.PASS
        if judge is not None:
            act = judge.ask(self.server, request.kind, request.about)
        if act is Act.DROP_REQUEST:
            self._did(act)
            raise CutError
        if act is Act.HOLD_REQUEST and judge is not None:
            await judge.held()
        if act is Act.DELAY:
            await asyncio.sleep(DELAY_S)
            self._did(act)
        if request.expects:
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await reader.readexactly(request.body_len)
        if act is Act.TWICE and request.repeatable:
            await self._forwarded(request, body)
        answer = await self._forwarded(request, body)
        if act is Act.TWICE and request.repeatable:
            self._did(act)
        if act is Act.DROP_REPLY:
            self._did(act)
            raise CutError
        if act is Act.HOLD_REPLY and judge is not None:
            await judge.held(reply=True)
        writer.write(answer)
        await writer.drain()

    def _did(self, act: Act) -> None:
        if self.judge is not None:
            self.judge.done[act] += 1

    async def _forwarded(self, request: HttpRequest, body: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(*self._target)
        try:
            writer.write(request.head + body)
            await writer.drain()
            return await reader.read(-1)
        finally:
            writer.transport.abort()


class _Wire:
    """One connection whose frames begin with their length."""

    def __init__(self, server: str, judge: Judge, framing: Framing) -> None:
        self._server = server
        self._judge = judge
        self._framing = framing
        self._acts: dict[int, Act] = {}

    async def requests(
        self, reader: asyncio.StreamReader, far_writer: asyncio.StreamWriter
    ) -> None:
        first = True
        while True:
            frame = await _frame(reader)
            request = self._framing.request(frame, first=first)
            first = False
            act = self._judge.ask(self._server, request.kind, request.about)
            if act is Act.DROP_REQUEST:
                self._judge.done[act] += 1
                raise CutError
            if act is Act.HOLD_REQUEST:
                await self._judge.held()
            if act is Act.DELAY:
                await asyncio.sleep(DELAY_S)
                self._judge.done[act] += 1
            if act in {Act.DROP_REPLY, Act.HOLD_REPLY}:
                self._acts[request.number] = act
            await _send(far_writer, frame)

    async def replies(self, far_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = True
        while True:
            frame = await _frame(far_reader)
            number = self._framing.reply_to(frame, first=first)
            first = False
            act = self._acts.pop(number, Act.PASS) if number is not None else Act.PASS
            if act is Act.DROP_REPLY:
                self._judge.done[act] += 1
                raise CutError
            if act is Act.HOLD_REPLY:
                await self._judge.held(reply=True)
            await _send(writer, self._framing.for_client(frame))


async def _frame(reader: asyncio.StreamReader) -> bytes:
    length = int.from_bytes(await reader.readexactly(LENGTH_LEN), "big")
    if length > FRAME_LEN_MAX:
        raise CutError
    return await reader.readexactly(length)


async def _send(writer: asyncio.StreamWriter, frame: bytes) -> None:
    writer.write(len(frame).to_bytes(LENGTH_LEN, "big") + frame)
    await writer.drain()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    raise CutError
