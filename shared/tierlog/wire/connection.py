"""The caller's side of the wire: one connection, many requests in flight, in order.

Owns: HELLO and WELCOME, request ids, credit, which request an answer belongs to, and what becomes
of requests when the connection goes. Does not own reconnecting: whoever holds a client does.

Invariants:
    * Requests leave in the order of the calls. Runs that wait at the same time share messages.
    * ``in_flight_bytes <= credit_bytes``, or a single larger request is in flight. What counts
      is bodies.
    * Every request ends: with its answer, with its deadline, or with the connection.
    * A request that was sent and has no answer ends as ``IndeterminateError``; one that was not
      sent ends as ``RetryableError``, or as the refusal of the whole connection.

Cancellation: a caller that goes leaves its request in flight; its answer is dropped, its credit
comes back with the answer.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import UUID

from tierlog.format.run import Run
from tierlog.format.versions import GATE, Format, Versions, check_version, readable_of
from tierlog.model.attributes import AppendCondition
from tierlog.model.errors import (
    CorruptError,
    IndeterminateError,
    Reason,
    RefusedError,
    RetryableError,
    TierlogError,
)
from tierlog.model.ids import EntryId, LedgerId, NodeId, StreamName
from tierlog.model.node import another_cluster
from tierlog.model.position import AppendedRange
from tierlog.ports.files import Buffer
from tierlog.ports.tracing import apart
from tierlog.ports.transport import Channel, Frame, Transport
from tierlog.proto.v1 import wire_pb2 as pb
from tierlog.wire.codec import HEADER_LEN_LEN
from tierlog.wire.messages import (
    ADDS_HEADER_LEN_MAX,
    RUNS_MAX,
    Credentials,
    Welcome,
    condition_to_record,
    error_of,
    parse_frame,
    ranges_of,
    uuid_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    """Every bound of a client, in one place."""

    hello_s_max: float = 5.0
    unsent_bytes_max: int = 64 * 1024 * 1024
    message_bytes_max: int = 256 * 1024
    """So many bytes of runs share a message, or it is a single larger one. More would save
    little, and a node begins with a message when all of it is there."""
    silence_s_max: float = 60.0
    """A peer that owes answers and says nothing for so long is given up."""


DEFAULT_CLIENT_LIMITS: Final = ClientLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Who calls."""

    cluster_id: UUID
    role: str
    client_name: str = ""
    credentials: Credentials = field(default_factory=Credentials)
    show: Callable[[], Credentials] | None = None
    """Gives the credentials of each connection anew, where they change meanwhile."""


@dataclass(slots=True, eq=False)
class _Request:
    body: Buffer
    answer: asyncio.Future[Any]
    append: pb.WireAppend | None
    """None: the body is a run to be stored."""
    recovery: bool
    cost: int
    sent_s: float = 0.0

    def may_share(self, other: "_Request") -> bool:
        """Tell whether one message may carry both."""
        return self.append is None and other.append is None and self.recovery == other.recovery


class WireClient:
    """One connection to a node; ``connect`` makes it."""

    def __init__(self, channel: Channel, welcome: Welcome, limits: ClientLimits) -> None:
        self._channel = channel
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._request_count = 0
        self._pending: dict[int, _Request] = {}  # in the order of request ids
        self._unsent: deque[_Request] = deque()
        self._pump_planned = False
        self._in_flight_bytes = 0
        self._unsent_bytes = 0
        self._error: TierlogError | None = None
        self._ended = asyncio.Event()
        self._idle = asyncio.Event()
        self._frame_len_max = min(welcome.frame_len_max, channel.frame_len_max)
        self._runs_len_max = min(
            limits.message_bytes_max,
            self._frame_len_max - HEADER_LEN_LEN - ADDS_HEADER_LEN_MAX,
        )
        self.welcome = welcome

    def __repr__(self) -> str:
        state = "open" if self._error is None else "closed"
        return (
            f"<WireClient {self._channel.peer} {state}, in_flight={len(self._pending)}"
            f"/{self._in_flight_bytes} bytes, unsent={len(self._unsent)}>"
        )

    @classmethod
    async def connect(
        cls,
        transport: Transport,
        address: str,
        hello: Hello,
        *,
        tasks: asyncio.TaskGroup,
        limits: ClientLimits = DEFAULT_CLIENT_LIMITS,
        versions: Versions = GATE[Format.WIRE],
    ) -> "WireClient":
        """Connect, say HELLO, and read answers in a task of ``tasks`` until ``close``.

        A node that does not read our version yet is called again in the newest that both read.
        """
        try:
            async with asyncio.timeout(limits.hello_s_max):
                try:
                    channel, welcome = await _call(transport, address, hello, versions)
                except RefusedError as error:
                    older = versions.common_with(readable_of(error, Format.WIRE))
                    if older is None or older == versions.current:
                        raise
                    spoken = versions._replace(current=older)
                    channel, welcome = await _call(transport, address, hello, spoken)
        except TimeoutError as error:
            raise RetryableError(
                f"{address} took no connection within {limits.hello_s_max} s",
                remedy="Check that the node runs and that the address is its wire address",
            ) from error
        client = cls(channel, welcome, limits)
        reading = tasks.create_task(client._read(), name=f"wire {address}", context=apart())
        # Whatever ended it, a group that went before it began too: its loop may be about to end.
        reading.add_done_callback(lambda _: channel.hang_up())
        return client

    @property
    def closed(self) -> bool:
        """Whether every further request would be refused."""
        return self._error is not None

    async def append(
        self,
        stream: StreamName,
        draft: Run,
        *,
        deadline_s: float,
        condition: AppendCondition | None = None,
    ) -> list[AppendedRange]:
        """Append a draft run to a stream; return where its entries went."""
        append = pb.WireAppend(
            stream=stream,
            deadline_ms=max(1, int(deadline_s * 1000)),
            condition=condition_to_record(condition),
        )
        request = self._submit(draft.encoded, append=append)
        try:
            async with asyncio.timeout(deadline_s):
                ranges: list[AppendedRange] = await asyncio.shield(request.answer)
        except TimeoutError as error:
            raise self._overdue(request, deadline_s) from error
        return ranges

    def add(self, run: Run, *, recovery: bool = False) -> "asyncio.Future[None]":
        """Store a run on a node. Runs are taken in the order of the calls.

        It leaves when this step of the loop is over, with all that was added until then.
        """
        return self._submit(run.encoded, recovery=recovery).answer

    def confirm(self, ledger_id: LedgerId, last_add_confirmed: EntryId) -> None:
        """Tell the node the LAC; there is no answer, and none is missed."""
        self._pump()
        if self._error is None:
            lac = pb.WireLac(ledger_id=ledger_id, last_add_confirmed=last_add_confirmed)
            self._send(pb.WireFrame(lac=lac), ())

    async def close(self, *, drain_s_max: float = 5.0) -> None:
        """Let what is in flight be answered, then hang up."""
        try:
            self._pump()
            if self._error is None:
                self._refuse_more(
                    RetryableError("the connection was closed here", remedy="Connect again")
                )
                if self._pending:
                    self._idle.clear()  # it may have been idle before
                    async with asyncio.timeout(drain_s_max):
                        await self._idle.wait()
        except TimeoutError:
            pass  # what is left ends as indeterminate below
        finally:
            self._channel.hang_up()  # though nobody waits for the end
        await self._ended.wait()

    # Sending

    def _submit(
        self, body: Buffer, *, append: pb.WireAppend | None = None, recovery: bool = False
    ) -> _Request:
        cost = len(body)
        request = _Request(body, self._loop.create_future(), append, recovery, cost)
        refusal = self._refusal(request)
        if refusal is not None:
            _fail(request, refusal)
            return request
        self._unsent.append(request)
        self._unsent_bytes += cost
        if not self._pump_planned:
            self._pump_planned = True
            self._loop.call_soon(self._pump)
        return request

    def _refusal(self, request: _Request) -> TierlogError | None:
        if self._error is not None:
            return self._error
        beside = ADDS_HEADER_LEN_MAX
        if request.append is not None:
            beside += request.append.ByteSize()
        if HEADER_LEN_LEN + beside + request.cost > self._frame_len_max:
            return RefusedError(
                f"a request of {request.cost} bytes is over the limit of a frame",
                reason=Reason.TOO_LARGE,
                remedy=f"Send at most {self._frame_len_max} bytes at once, header included, in "
                "smaller events or batches; or raise TIERLOG_WIRE__FRAME_BYTES_MAX on both sides",
            )
        if self._unsent_bytes + request.cost > self._limits.unsent_bytes_max:
            return RetryableError(
                f"{self._unsent_bytes} bytes already wait for {self._channel.peer}",
                reason=Reason.RESOURCE_EXHAUSTED,
                remedy="Wait for answers before sending more",
                details={"budget": "wire.unsent_bytes"},
            )
        return None

    def _pump(self) -> None:
        """Send what the credit allows."""
        self._pump_planned = False
        while self._unsent and self._error is None:
            requests = self._take_message()
            if not requests:
                return
            self._send_requests(requests)

    def _take_message(self) -> list[_Request]:
        """Take what goes as one message out of what waits; nothing: there is no credit."""
        taken: list[_Request] = []
        taken_bytes = 0
        credit = self.welcome.credit_bytes
        while self._unsent and len(taken) < RUNS_MAX:
            request = self._unsent[0]
            cost = request.cost
            if (taken or self._pending) and self._in_flight_bytes + cost > credit:
                break
            if taken and not (
                request.may_share(taken[0]) and taken_bytes + cost <= self._runs_len_max
            ):
                break
            taken.append(self._unsent.popleft())
            taken_bytes += cost
            self._in_flight_bytes += cost
        self._unsent_bytes -= taken_bytes
        return taken

    def _send_requests(self, requests: Sequence[_Request]) -> None:
        """Send requests that share a message."""
        first, now_s = requests[0], self._loop.time()
        message = pb.WireFrame(request_id=self._request_count + 1)
        if first.append is not None:
            message.append.CopyFrom(first.append)
        else:
            message.add_runs.count = len(requests)
            message.add_runs.recovery = first.recovery
        bodies = []
        for request in requests:
            self._request_count += 1
            self._pending[self._request_count] = request
            bodies.append(request.body)
            request.sent_s, request.body = now_s, b""
        self._send(message, bodies)

    def _send(self, message: pb.WireFrame, body: Sequence[Buffer]) -> None:
        try:
            self._channel.send(message.SerializeToString(), body)
        except TierlogError as error:
            self._end(error)

    def _overdue(self, request: _Request, deadline_s: float) -> TierlogError:
        if request in self._unsent:
            self._unsent.remove(request)
            self._unsent_bytes -= request.cost
            return RetryableError(
                f"the append could not be sent within {deadline_s} s",
                remedy="Try again; the node takes less than it is sent",
            )
        return IndeterminateError(
            f"the append was not answered within {deadline_s} s",
            remedy="Read back what arrived before appending it again",
        )

    # Answers

    async def _read(self) -> None:
        # What is said when this task is cancelled: no caller is left waiting.
        error: TierlogError = RetryableError("the connection was given up", remedy="Connect again")
        try:
            while (frame := await self._receive()) is not None:
                self._take(frame)
            error = RetryableError(f"{self._channel.peer} hung up", remedy="Connect again")
        except TierlogError as caught:
            error = caught
        finally:
            self._end(error)
            self._ended.set()

    async def _receive(self) -> Frame | None:
        silence_s_max = self._limits.silence_s_max
        while True:
            try:
                async with asyncio.timeout(silence_s_max):
                    return await self._channel.receive()
            except TimeoutError:
                oldest = next(iter(self._pending.values()), None)
                if oldest is not None and self._loop.time() - oldest.sent_s >= silence_s_max:
                    raise RetryableError(
                        f"{self._channel.peer} said nothing for {silence_s_max} s",
                        remedy="Check that the node is alive",
                    ) from None

    def _take(self, frame: Frame) -> None:
        answer = parse_frame(frame.header)
        kind = answer.WhichOneof("message")
        if kind == "error" and answer.request_id == 0:
            raise error_of(answer.error, answers_request=False)
        if kind == "added" and answer.cumulative:
            covered = itertools.takewhile(lambda one: one <= answer.request_id, self._pending)
            for request_id in list(covered):
                self._answer(request_id, None)
        elif kind == "added":
            self._answer(answer.request_id, None)
        elif kind == "appended":
            self._answer(answer.request_id, ranges_of(answer.appended))
        elif kind == "error":
            self._answer(answer.request_id, error_of(answer.error, answers_request=True))
        else:
            raise CorruptError(
                f"{self._channel.peer} sent {kind or 'an unknown message'} as an answer",
                remedy="Upgrade this process to the version of its peer",
            )
        self._pump()

    def _answer(self, request_id: int, result: list[AppendedRange] | TierlogError | None) -> None:
        request = self._pending.pop(request_id, None)
        if request is None:
            raise CorruptError(
                f"{self._channel.peer} answered request {request_id}, which has no answer to get",
                remedy="Check what listens on this address",
            )
        self._in_flight_bytes -= request.cost
        assert self._in_flight_bytes >= 0
        if not self._pending:
            self._idle.set()
        if isinstance(result, TierlogError):
            _fail(request, result)
        elif not request.answer.done():
            request.answer.set_result(result)

    # The end

    def _refuse_more(self, error: TierlogError) -> None:
        self._error = error
        unsent, self._unsent, self._unsent_bytes = self._unsent, deque(), 0
        for request in unsent:
            _fail(request, error)

    def _end(self, error: TierlogError) -> None:
        """Give the connection up; whoever still waits is told what is known."""
        if self._error is None:
            # Corrupt bytes from a peer say nothing about a request that was never sent.
            usable = not isinstance(error, CorruptError | IndeterminateError)
            self._refuse_more(
                error if usable else RetryableError(error.message, remedy=error.remedy)
            )
        pending, self._pending, self._in_flight_bytes = self._pending, {}, 0
        for request in pending.values():
            _fail(
                request,
                IndeterminateError(
                    f"the connection to {self._channel.peer} went before the answer"
                    f" ({error.message})",
                    remedy="Read back what arrived before sending it again",
                ),
            )
        self._idle.set()
        self._channel.close()


def _fail(request: _Request, error: TierlogError) -> None:
    if not request.answer.done():
        request.answer.set_exception(error)
        request.answer.exception()  # a caller that went away need not look at it


async def _call(
    transport: Transport, address: str, hello: Hello, versions: Versions
) -> tuple[Channel, Welcome]:
    channel = await transport.connect(address)
    try:
        return channel, await _exchange_hello(channel, hello, versions)
    except BaseException:
        channel.hang_up()
        raise


async def _exchange_hello(channel: Channel, hello: Hello, versions: Versions) -> Welcome:
    shown = hello.show() if hello.show is not None else hello.credentials
    message = pb.WireHello(
        version=versions.current,
        cluster_id=hello.cluster_id.bytes,
        role=hello.role,
        client_name=hello.client_name,
        auth_method=shown.method,
        auth_data=shown.data,
    )
    channel.send(pb.WireFrame(hello=message).SerializeToString())
    frame = await channel.receive()
    if frame is None:
        raise RetryableError(
            f"{channel.peer} hung up instead of saying WELCOME",
            remedy="Check that the address is a node's wire address",
        )
    answer = parse_frame(frame.header)
    if answer.HasField("error"):
        raise error_of(answer.error, answers_request=False)
    if not answer.HasField("welcome"):
        raise RefusedError(
            f"{channel.peer} did not say WELCOME",
            remedy="Check that the address is a node's wire address",
        )
    welcome = answer.welcome
    check_version(Format.WIRE, welcome.version, versions=versions)
    cluster_id = uuid_of(welcome.cluster_id)
    if cluster_id != hello.cluster_id:
        answering = cluster_id or "what is no id"
        raise another_cluster(channel.peer, answering=answering, wanted=hello.cluster_id)
    return Welcome(
        node_id=NodeId(welcome.node_id),
        version=welcome.version,
        credit_bytes=welcome.credit_bytes,
        frame_len_max=welcome.frame_len_max,
    )
