"""The called side of the wire: one loop per connection, requests in order, answers as they come.

Owns: HELLO with its deadline, who is let in, credit, limits, and the answers on their way. Does
not own what requests do: a ``WireHandler`` does.

Invariants, per connection:
    * Nothing is dispatched before a HELLO of this version, this cluster and good credentials.
    * Requests are dispatched in the order of their ids, which count up from 1. Of a message of
      several runs each is a request: what becomes of one says nothing of the others, but that
      behind a damaged one nothing is believed.
    * Bytes of requests without an answer stay within the credit (or it is a single request).
    * A cumulative answer covers only requests that succeeded or were answered before.
    * While the peer does not read its answers, nothing more is read; while the handler is full,
      nor is a further run dispatched.

Crash, Cancellation: what was dispatched goes on without its connection; its answer is dropped.
"""

import asyncio
import functools
from collections import deque
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar
from uuid import UUID

import structlog

from tierlog.format.run import Run
from tierlog.format.versions import GATE, Format, Versions, check_version
from tierlog.model.attributes import AppendCondition
from tierlog.model.errors import (
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
from tierlog.model.node import another_cluster
from tierlog.model.position import AppendedRange
from tierlog.ports.transport import Channel, Frame
from tierlog.proto.v1 import wire_pb2 as pb
from tierlog.wire.access import MESSAGES_OF_ROLE
from tierlog.wire.auth import Admission, Authenticator, FullAdmission
from tierlog.wire.messages import (
    RUNS_MAX,
    Credentials,
    appended_of,
    condition_of,
    parse_frame,
    runs_of,
    uuid_of,
    wire_error,
)

log = structlog.get_logger()

T = TypeVar("T")


class WireHandler(Protocol):
    """What a node does with requests. Calls come in order and must return at once."""

    async def ready(self, *, appends: bool) -> None:
        """Wait until the handler takes more: appends of a producer, or runs of an owner."""
        ...

    def append(
        self,
        stream: StreamName,
        draft: Run,
        *,
        deadline_s: float | None,
        condition: AppendCondition | None,
    ) -> "asyncio.Future[list[AppendedRange]]":
        """Append a draft run if the condition holds; its bytes may be written over."""
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
STREAMS_KNOWN_MAX: Final = 1024
"""So many names a connection remembers to be well-formed and allowed."""


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
        versions: Versions = GATE[Format.WIRE],
    ) -> None:
        self.handler = handler
        self.versions = versions
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


@dataclass(slots=True, eq=False)
class _Adds:
    """Runs one after the other that one future answers, as a journal's group does."""

    outcome: "asyncio.Future[None]"
    first_id: int
    last_id: int
    cost: int
    done: bool = False


class _Connection:
    def __init__(self, server: WireServer, channel: Channel) -> None:
        self._server = server
        self._channel = channel
        self._loop = asyncio.get_running_loop()
        self._allowed: frozenset[str] = frozenset()
        self._admission: Admission = FullAdmission()
        self._streams: dict[str, StreamName] = {}
        self._request_count = 0
        self._adds: deque[_Adds] = deque()  # without an answer, in order
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
            await handler.ready(appends="append" in self._allowed)
            frame = await self._channel.receive()
            if frame is None:
                return
            await self._dispatch(frame)

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
        # Before all else: who is not known learns nothing of this node.
        credentials = Credentials(method=hello.auth_method, data=hello.auth_data)
        channel = self._channel
        self._admission = self._server.authenticator.check(
            credentials, role=hello.role, peer=channel.peer, names=channel.certificate_names
        )
        check_version(Format.WIRE, hello.version, versions=self._server.versions)
        cluster_id = uuid_of(hello.cluster_id)
        if cluster_id != self._server.cluster_id:
            raise another_cluster(
                "this address",
                answering=self._server.cluster_id,
                wanted=cluster_id or "what is no id",
            )
        if hello.role not in MESSAGES_OF_ROLE:
            raise RefusedError(
                f"the role {hello.role[:40]!r} is unknown",
                remedy=f"Use one of {', '.join(MESSAGES_OF_ROLE)}",
            )
        self._allowed = MESSAGES_OF_ROLE[hello.role]
        welcome = pb.WireWelcome(
            # Both sides read it: an older caller is answered as it speaks.
            version=hello.version,
            cluster_id=self._server.cluster_id.bytes,
            node_id=self._server.node_id,
            credit_bytes=limits.credit_bytes,
            frame_len_max=limits.frame_len_max,
        )
        self._send(pb.WireFrame(welcome=welcome))

    async def _dispatch(self, frame: Frame) -> None:
        message = parse_frame(frame.header)
        kind = message.WhichOneof("message") or "unknown"
        is_allowed = kind in self._allowed
        if is_allowed and kind == "lac":
            self._take_lac(message.lac)
            return
        if is_allowed and kind == "add_runs":
            await self._take_adds(message.request_id, message.add_runs, frame.body)
            return
        cost = len(frame.body)
        self._take_request_ids(message.request_id, 1, cost)
        try:
            answer = self._append(kind, message.append, frame.body)
        except TierlogError as error:
            self._answer_error(message.request_id, error, cost)
        else:
            answer.add_done_callback(functools.partial(self._appended, message.request_id, cost))

    def _take_request_ids(self, first_id: int, count: int, cost: int) -> None:
        if first_id != self._request_count + 1:
            raise RefusedError(
                f"request {first_id} came after request {self._request_count}",
                remedy="Count requests up from 1",
            )
        limits, is_single = self._server.limits, count == 1 and not self.in_flight_bytes
        if self.in_flight_bytes + cost > limits.credit_bytes and not is_single:
            raise RetryableError(
                f"the caller has {self.in_flight_bytes} bytes in flight and sent {cost} more",
                reason=Reason.RESOURCE_EXHAUSTED,
                remedy=f"Keep within the credit of {limits.credit_bytes} bytes",
                details={"budget": "wire.credit"},
            )
        self._request_count += count
        self.in_flight_bytes += cost

    def _append(
        self, kind: str, append: pb.WireAppend, body: memoryview
    ) -> "asyncio.Future[list[AppendedRange]]":
        if kind not in self._allowed:
            raise RefusedError(
                f"the message {kind!r} is not for this connection",
                reason=Reason.INVALID_ARGUMENT,
                remedy=f"Its role may send {', '.join(sorted(self._allowed))}",
            )
        run = Run.decode(body)
        _check_draft(run)
        return self._server.handler.append(
            self._streams.get(append.stream) or self._stream(append.stream),
            run,
            deadline_s=append.deadline_ms / 1000 if append.deadline_ms > 0 else None,
            condition=condition_of(append.condition) if append.HasField("condition") else None,
        )

    def _stream(self, text: str) -> StreamName:
        """Return a stream's name that may be appended to, or refuse it; remember that."""
        name = stream_name(text)
        self._admission.authorise(name)
        if len(self._streams) >= STREAMS_KNOWN_MAX:
            self._streams.clear()
        self._streams[text] = name
        return name

    async def _take_adds(self, first_id: int, adds: pb.WireAddRuns, body: memoryview) -> None:
        """Hand the runs of a message on, each as soon as the handler takes more."""
        if not 1 <= adds.count <= RUNS_MAX:
            raise RefusedError(
                f"a message speaks of {adds.count} runs",
                remedy=f"Send 1 to {RUNS_MAX} runs at once",
            )
        self._take_request_ids(first_id, adds.count, len(body))
        runs, error = runs_of(body, adds.count)
        handler, rest = self._server.handler, len(body)
        for request_id, run in enumerate(runs, first_id):
            if request_id > first_id:
                await handler.ready(appends=False)
            cost = len(run.encoded)
            rest -= cost
            try:
                outcome = handler.add_run(run, recovery=adds.recovery)
            except TierlogError as refusal:
                self._answer_error(request_id, refusal, cost)
            else:
                self._expect(request_id, outcome, cost)
        if error is not None:
            for request_id in range(first_id + len(runs), first_id + adds.count):
                self._answer_error(request_id, error, rest)
                rest = 0

    def _expect(self, request_id: int, outcome: "asyncio.Future[None]", cost: int) -> None:
        """Answer a run when ``outcome`` is there."""
        newest = self._adds[-1] if self._adds else None
        if (
            newest is not None
            and newest.outcome is outcome
            and newest.last_id == request_id - 1
            and not newest.done
        ):
            newest.last_id = request_id
            newest.cost += cost
            return
        adds = _Adds(outcome, request_id, request_id, cost)
        self._adds.append(adds)
        outcome.add_done_callback(functools.partial(self._added, adds))

    def _take_lac(self, lac: pb.WireLac) -> None:
        if lac.ledger_id < 0 or not NO_ENTRY <= lac.last_add_confirmed <= INT64_MAX:
            raise RefusedError(
                f"LAC {lac.last_add_confirmed} of ledger {lac.ledger_id} is out of bounds",
                remedy="Speak the wire's protocol",
            )
        self._server.handler.lac(LedgerId(lac.ledger_id), EntryId(lac.last_add_confirmed))

    # Answers

    def _appended(
        self, request_id: int, cost: int, answer: "asyncio.Future[list[AppendedRange]]"
    ) -> None:
        error = self._error_of(answer)
        if self.closed:
            return
        if error is not None:
            self._answer_error(request_id, error, cost)
        else:
            appended = appended_of(answer.result())
            self._release(cost)
            self._send(pb.WireFrame(request_id=request_id, appended=appended))

    def _added(self, adds: _Adds, outcome: "asyncio.Future[None]") -> None:
        error = self._error_of(outcome)
        if self.closed:
            return
        adds.done = True
        if error is not None:
            self._adds.remove(adds)
            for request_id in range(adds.first_id, adds.last_id + 1):
                self._answer_error(request_id, error, 0)
            self._release(adds.cost)
        if self._adds and not self._flush_planned:
            self._flush_planned = True
            self._loop.call_soon(self._flush_adds)

    def _error_of(self, answer: "asyncio.Future[Any]") -> TierlogError | None:
        is_cancelled = answer.cancelled()
        error = None if is_cancelled else answer.exception()
        if (error is None and not is_cancelled) or self.closed:
            return None
        return _as_tierlog_error(error, peer=self._channel.peer)

    def _flush_adds(self) -> None:
        """Answer all adds at the front that are done, with one frame."""
        self._flush_planned = False
        last: _Adds | None = None
        while self._adds and self._adds[0].done:
            last = self._adds.popleft()
            self._release(last.cost)
        if last is not None and not self.closed:
            self._send(pb.WireFrame(request_id=last.last_id, cumulative=True, added=pb.WireAdded()))

    def _answer_error(self, request_id: int, error: TierlogError, cost: int) -> None:
        self._release(cost)
        self._send(pb.WireFrame(request_id=request_id, error=wire_error(error)))

    def _release(self, cost: int) -> None:
        self.in_flight_bytes -= cost
        assert self.in_flight_bytes >= 0

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
