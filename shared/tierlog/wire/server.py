"""The called side of the wire: one loop per connection, requests in order, answers as they come.

Owns: HELLO with its deadline, who is let in, credit, limits, and the answers on their way. Does
not own what requests do: a ``WireHandler`` does.

Invariants, per connection:
    * Nothing is dispatched before a HELLO of this version, this cluster and good credentials.
    * Requests are dispatched in the order of their ids, which count up from 1.
    * Bytes of requests without an answer stay within the credit (or it is a single request).
    * A cumulative answer covers only requests that succeeded or were answered before.
    * While the peer does not read its answers, or the handler is full, nothing more is read.

Crash, Cancellation: what was dispatched goes on without its connection; its answer is dropped.
"""

import asyncio
import functools
import itertools
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar
from uuid import UUID

import structlog

from tierlog.format.run import Run
from tierlog.format.versions import Format, check_version, current
from tierlog.model.errors import (
    CorruptError,
    IndeterminateError,
    Reason,
    RefusedError,
    RetryableError,
    TierlogError,
)
from tierlog.model.ids import (
    INT64_MAX,
    NO_ENTRY,
    EntryId,
    LedgerId,
    NodeId,
    StreamName,
    stream_name,
)
from tierlog.model.position import AppendedRange
from tierlog.ports.transport import Channel, Frame
from tierlog.proto.v1 import wire_pb2 as pb
from tierlog.wire.auth import Authenticator
from tierlog.wire.codec import frame_len
from tierlog.wire.messages import (
    ROLE_OWNER,
    ROLE_PRODUCER,
    Credentials,
    appended_of,
    parse_frame,
    uuid_of,
    wire_error,
)

log = structlog.get_logger()

T = TypeVar("T")


class WireHandler(Protocol):
    """What a node does with requests. Calls come in order and must return at once."""

    async def ready(self) -> None:
        """Wait until the handler takes more."""
        ...

    def append(
        self, stream: StreamName, draft: Run, *, deadline_s: float | None
    ) -> "asyncio.Future[list[AppendedRange]]":
        """Append a draft run; its bytes may be written over."""
        ...

    def add_run(self, run: Run, *, recovery: bool) -> "asyncio.Future[None]":
        """Store a run."""
        ...

    def lac(self, ledger_id: LedgerId, last_add_confirmed: EntryId) -> None:
        """Take note of a LAC."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Every bound of the server, in one place."""

    connections_max: int = 256
    hello_s_max: float = 5.0
    credit_bytes: int = 16 * 1024 * 1024
    frame_len_max: int = 8 * 1024 * 1024
    stall_s_max: float = 60.0
    """A peer that does not read its answers for so long is hung up on."""


DEFAULT_SERVER_LIMITS: Final = ServerLimits()
SENT_BETWEEN_DRAINS: Final = 64
_MESSAGES_OF_ROLE: Final = {ROLE_PRODUCER: {"append"}, ROLE_OWNER: {"add_run", "lac"}}


class WireServer:
    """Takes connections: ``transport.listen(address, server.serve)``."""

    def __init__(
        self,
        handler: WireHandler,
        *,
        cluster_id: UUID,
        node_id: NodeId,
        authenticator: Authenticator,
        limits: ServerLimits = DEFAULT_SERVER_LIMITS,
    ) -> None:
        self.handler = handler
        self.cluster_id = cluster_id
        self.node_id = node_id
        self.authenticator = authenticator
        self.limits = limits
        self._connections: set[_Connection] = set()

    def __repr__(self) -> str:
        return f"<WireServer {self.node_id}, {self.statistics()}>"

    def statistics(self) -> dict[str, int]:
        """Return how much is going on."""
        return {
            "connections": len(self._connections),
            "in_flight_bytes": sum(one.in_flight_bytes for one in self._connections),
        }

    async def serve(self, channel: Channel) -> None:
        """Serve one connection to its end. Raises only what is a bug."""
        connection = _Connection(self, channel)
        full = len(self._connections) >= self.limits.connections_max
        self._connections.add(connection)
        try:
            if full:
                raise RetryableError(
                    f"the node has {self.limits.connections_max} connections already",
                    reason=Reason.RESOURCE_EXHAUSTED,
                    remedy="Use fewer connections, or raise the limit",
                    details={"budget": "wire.connections"},
                )
            await connection.serve()
        except TierlogError as error:
            log.info("connection.refused", peer=channel.peer, cause=str(error))
            connection.say_goodbye(error)
        finally:
            connection.closed = True
            self._connections.discard(connection)
            channel.close()


class _Connection:
    def __init__(self, server: WireServer, channel: Channel) -> None:
        self._server = server
        self._channel = channel
        self._loop = asyncio.get_running_loop()
        self._allowed: set[str] = set()
        self._request_count = 0
        self._costs: dict[int, int] = {}  # of requests without an answer
        self._adds: dict[int, bool] = {}  # in order; True: done, its answer not sent yet
        self._flush_planned = False
        self._sent_since_drain = 0
        self.in_flight_bytes = 0
        self.closed = False

    async def serve(self) -> None:
        await self._take_hello()
        handler, stall_s_max = self._server.handler, self._server.limits.stall_s_max
        while True:
            if self._sent_since_drain >= SENT_BETWEEN_DRAINS:
                self._sent_since_drain = 0
                await _within(stall_s_max, self._channel.drain(), "read its answers")
            await handler.ready()
            frame = await self._channel.receive()
            if frame is None:
                return
            self._dispatch(frame)

    def say_goodbye(self, error: TierlogError) -> None:
        """Tell the peer why this is the end, if it still listens."""
        self._send(pb.WireFrame(error=wire_error(error)))

    async def _take_hello(self) -> None:
        limits = self._server.limits
        frame = await _within(limits.hello_s_max, self._channel.receive(), "say HELLO")
        if frame is None:
            return
        message = parse_frame(frame.header)
        if not message.HasField("hello"):
            raise RefusedError("the first message was not HELLO", remedy="Say HELLO first")
        hello = message.hello
        check_version(Format.WIRE, hello.version)
        if uuid_of(hello.cluster_id) != self._server.cluster_id:
            raise RefusedError(
                "the caller belongs to another cluster",
                remedy="Check the address that it was given",
                details={"cluster_id": str(self._server.cluster_id)},
            )
        if hello.role not in _MESSAGES_OF_ROLE:
            raise RefusedError(
                f"the role {hello.role[:40]!r} is unknown",
                remedy=f"Use one of {', '.join(_MESSAGES_OF_ROLE)}",
            )
        credentials = Credentials(method=hello.auth_method, data=hello.auth_data)
        self._server.authenticator.check(credentials, role=hello.role, peer=self._channel.peer)
        self._allowed = _MESSAGES_OF_ROLE[hello.role]
        welcome = pb.WireWelcome(
            version=current(Format.WIRE),
            cluster_id=self._server.cluster_id.bytes,
            node_id=self._server.node_id,
            credit_bytes=limits.credit_bytes,
            frame_len_max=limits.frame_len_max,
        )
        self._send(pb.WireFrame(welcome=welcome))

    def _dispatch(self, frame: Frame) -> None:
        message = parse_frame(frame.header)
        kind = message.WhichOneof("message") or "unknown"
        if kind == "lac" and kind in self._allowed:
            self._take_lac(message.lac)
            return
        self._take_request_id(message.request_id, frame)
        try:
            answer = self._call(kind, message, frame.body)
        except TierlogError as error:
            self._answer_error(message.request_id, error)
            return
        if kind == "add_run":
            self._adds[message.request_id] = False
        answer.add_done_callback(functools.partial(self._finished, message.request_id))

    def _take_request_id(self, request_id: int, frame: Frame) -> None:
        if request_id != self._request_count + 1:
            raise RefusedError(
                f"request {request_id} came after request {self._request_count}",
                remedy="Count requests up from 1",
            )
        cost = frame_len(frame.header, (frame.body,))
        limits = self._server.limits
        if self._costs and self.in_flight_bytes + cost > limits.credit_bytes:
            raise RetryableError(
                f"the caller has {self.in_flight_bytes} bytes in flight and sent {cost} more",
                reason=Reason.RESOURCE_EXHAUSTED,
                remedy=f"Keep within the credit of {limits.credit_bytes} bytes",
                details={"budget": "wire.credit"},
            )
        self._request_count = request_id
        self._costs[request_id] = cost
        self.in_flight_bytes += cost

    def _call(self, kind: str, message: pb.WireFrame, body: memoryview) -> "asyncio.Future[Any]":
        if kind not in self._allowed:
            raise RefusedError(
                f"the message {kind!r} is not for this connection",
                reason=Reason.INVALID_ARGUMENT,
                remedy=f"Its role may send {', '.join(sorted(self._allowed))}",
            )
        run = Run.decode(body)
        handler = self._server.handler
        if kind == "append":
            _check_draft(run)
            deadline_ms = message.append.deadline_ms
            return handler.append(
                stream_name(message.append.stream),
                run,
                deadline_s=deadline_ms / 1000 if deadline_ms > 0 else None,
            )
        if run.header.ledger_id != message.add_run.ledger_id:
            raise CorruptError(
                f"the header names ledger {message.add_run.ledger_id},"
                f" its run ledger {run.header.ledger_id}",
                remedy="Send the run again",
            )
        return handler.add_run(run, recovery=message.add_run.recovery)

    def _take_lac(self, lac: pb.WireLac) -> None:
        if lac.ledger_id < 0 or not NO_ENTRY <= lac.last_add_confirmed <= INT64_MAX:
            raise RefusedError(
                f"LAC {lac.last_add_confirmed} of ledger {lac.ledger_id} is out of bounds",
                remedy="Speak the wire's protocol",
            )
        self._server.handler.lac(LedgerId(lac.ledger_id), EntryId(lac.last_add_confirmed))

    # Answers

    def _finished(self, request_id: int, answer: "asyncio.Future[Any]") -> None:
        error = None if answer.cancelled() else answer.exception()
        if self.closed:
            return
        if answer.cancelled() or error is not None:
            self._adds.pop(request_id, None)
            self._answer_error(request_id, _as_tierlog_error(error, peer=self._channel.peer))
        elif request_id in self._adds:
            self._adds[request_id] = True
        else:
            appended = appended_of(answer.result())
            self._answer(request_id, pb.WireFrame(request_id=request_id, appended=appended))
        if self._adds and not self._flush_planned:
            self._flush_planned = True
            self._loop.call_soon(self._flush_adds)

    def _flush_adds(self) -> None:
        """Answer all adds at the front that are done, with one frame."""
        self._flush_planned = False
        finished = list(itertools.takewhile(self._adds.__getitem__, self._adds))
        for request_id in finished:
            del self._adds[request_id]
            self.in_flight_bytes -= self._costs.pop(request_id)
        if finished and not self.closed:
            added = pb.WireFrame(request_id=finished[-1], cumulative=True, added=pb.WireAdded())
            self._send(added)

    def _answer(self, request_id: int, message: pb.WireFrame) -> None:
        self.in_flight_bytes -= self._costs.pop(request_id)
        assert self.in_flight_bytes >= 0
        self._send(message)

    def _answer_error(self, request_id: int, error: TierlogError) -> None:
        self._answer(request_id, pb.WireFrame(request_id=request_id, error=wire_error(error)))

    def _send(self, message: pb.WireFrame) -> None:
        self._sent_since_drain += 1
        try:
            self._channel.send(message.SerializeToString())
        except TierlogError:
            self.closed = True  # the loop finds out by itself


async def _within(limit_s: float, work: Awaitable[T], what: str) -> T:
    try:
        async with asyncio.timeout(limit_s):
            return await work
    except TimeoutError as error:
        raise RefusedError(
            f"the peer did not {what} within {limit_s} s", remedy="Connect again"
        ) from error


def _check_draft(run: Run) -> None:
    header = run.header
    if header.ledger_id or header.first_entry_id or header.owner_epoch:
        raise RefusedError(
            "an append carries a run that has its ids already",
            remedy="Send a draft: ledger 0, first entry 0, epoch 0",
        )


def _as_tierlog_error(error: BaseException | None, *, peer: str) -> TierlogError:
    if isinstance(error, TierlogError):
        return error
    log.error("request.failed", peer=peer, exc_info=error)
    return IndeterminateError(
        "the node failed while it worked on this request", remedy="Look into the node's log"
    )
