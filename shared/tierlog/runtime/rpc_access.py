"""Authorisation in front of all calls of a gRPC server.

Invariants:
    * Who asks is known before the request is received; what it asks for is checked before the
      call. To gRPC each call has a stream of requests, of which one is read, and only then.
    * What everybody may call is received from few at once, within a time, and is small.
    * Answers that go on end with the token that was shown.
    * A method without a rule is refused, those of health and reflection too.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Any, Final, TypeVar

import grpc
from google.protobuf.message import DecodeError

from tierlog.model.access import Rule, Rules, Subject, unauthenticated
from tierlog.model.errors import Reason, RefusedError, RetryableError, TierlogError
from tierlog.runtime.access import Gate, audit, bearer_token, is_audited, outcome_of
from tierlog.runtime.errors import grpc_status_of

PUBLIC_BYTES_MAX: Final = 1024
PUBLIC_READS_MAX: Final = 8
PUBLIC_READ_S_MAX: Final = 5.0
_NAMES: Final = ("x509_subject_alternative_name", "x509_common_name")
Context = grpc.aio.ServicerContext[Any, Any]
T = TypeVar("T")


class AccessInterceptor(grpc.aio.ServerInterceptor):
    """Asks ``gate`` before every call."""

    def __init__(self, rules: Rules, gate: Gate) -> None:
        self._rules = rules
        self._gate = gate
        self._public = asyncio.Semaphore(PUBLIC_READS_MAX)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:  # noqa: ANN401 - grpc's own handler type
        """Wrap handlers of the kinds that there are."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        rule = self._rules.get(method)
        if handler is None:
            return handler  # there is no such method, and the server says so
        call = _Call(method, rule, self._gate, handler.request_deserializer)
        if rule is not None and rule.permission is None:
            return _public(call, handler, self._public)
        if handler.unary_unary is not None:
            return grpc.stream_unary_rpc_method_handler(
                call.unary(handler.unary_unary), response_serializer=handler.response_serializer
            )
        if handler.unary_stream is not None:
            return grpc.stream_stream_rpc_method_handler(
                call.streaming(handler.unary_stream),
                response_serializer=handler.response_serializer,
            )
        if handler.stream_stream is not None and (rule is None or not rule.stream):
            return grpc.stream_stream_rpc_method_handler(
                call.both_streaming(handler.stream_stream),
                request_deserializer=handler.request_deserializer,
                response_serializer=handler.response_serializer,
            )
        # Of any other kind there is none, and how to guard it nobody has said.
        return grpc.stream_unary_rpc_method_handler(call.refuse)


def _public(call: "_Call", handler: Any, reads: asyncio.Semaphore) -> Any:  # noqa: ANN401
    """Return a handler of a call that everybody may make; one that goes on writes by itself."""
    inner = handler.unary_unary or handler.unary_stream
    assert inner is not None, "health has no other kind of call"

    async def guarded(_requests: object, context: Context) -> Any:  # noqa: ANN401
        data = await _small(context, reads)
        request = await _or_abort(context, lambda: call.parsed(data))
        return await inner(request, context)

    made = (
        grpc.stream_unary_rpc_method_handler
        if handler.unary_unary is not None
        else grpc.stream_stream_rpc_method_handler
    )
    return made(guarded, response_serializer=handler.response_serializer)


async def _small(context: Context, reads: asyncio.Semaphore) -> Any:  # noqa: ANN401
    """Return the request of somebody who may be anybody, or end the call."""
    try:
        async with asyncio.timeout(PUBLIC_READ_S_MAX), reads:
            data: Any = await context.read()
    except TimeoutError:
        late = RetryableError(
            f"no request came in {PUBLIC_READ_S_MAX:g} s",
            reason=Reason.RESOURCE_EXHAUSTED,
            remedy="Ask again, and send the request at once",
        )
        await context.abort_with_status(grpc_status_of(late))
        raise
    if data is not grpc.aio.EOF and len(data) > PUBLIC_BYTES_MAX:
        large = RefusedError(
            f"a request of {len(data)} bytes",
            reason=Reason.TOO_LARGE,
            remedy=f"Send {PUBLIC_BYTES_MAX} at most",
        )
        await context.abort_with_status(grpc_status_of(large))
    return data


class _Call:
    """One method of the server."""

    def __init__(
        self,
        method: str,
        rule: Rule | None,
        gate: Gate,
        parse: Callable[[bytes], Any] | None,
    ) -> None:
        self._method = method
        self._rule = rule
        self._gate = gate
        self._parse = parse

    def unary(self, inner: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def guarded(_requests: object, context: Context) -> Any:  # noqa: ANN401
            subject, request, told = await self._admitted(context)
            if not is_audited(self._rule):
                return await inner(request, context)
            try:
                answer = await inner(request, context)
            except BaseException as error:
                audit(subject, outcome=outcome_of(error), **told)
                raise
            audit(subject, outcome="done", **told)
            return answer

        return guarded

    def streaming(self, inner: Callable[..., AsyncGenerator[Any, None]]) -> Callable[..., Any]:
        async def guarded(_requests: object, context: Context) -> AsyncIterator[Any]:
            subject, request, _ = await self._admitted(context)
            async with aclosing(inner(request, context)) as answers:
                async for answer in answers:
                    await _or_abort(context, lambda: self._gate.check_still(subject))
                    yield answer
                    del answer  # the next one may be long in coming

        return guarded

    def both_streaming(self, inner: Callable[..., AsyncIterator[Any]]) -> Callable[..., Any]:
        async def guarded(requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
            subject = await _or_abort(context, lambda: self._who(context))
            await _or_abort(context, lambda: self._admit(subject, ""))
            async for answer in inner(requests, context):
                await _or_abort(context, lambda: self._gate.check_still(subject))
                yield answer

        return guarded

    async def refuse(self, _requests: object, context: Context) -> None:
        await context.abort_with_status(
            grpc_status_of(RefusedError(f"{self._method} has no rule", remedy="Report this"))
        )

    async def _admitted(self, context: Context) -> tuple[Subject, Any, dict[str, str]]:
        """Return who asks and for what, or end the call."""
        subject = await _or_abort(context, lambda: self._who(context))
        data = await context.read()
        request = await _or_abort(context, lambda: self.parsed(data))
        name = self._rule.stream if self._rule is not None else ""
        stream = str(getattr(request, name)) if name else ""
        told = {
            "action": self._method,
            "target": stream[:140],
            "peer": context.peer(),
        }
        try:
            self._admit(subject, stream)
        except TierlogError as error:
            if is_audited(self._rule):
                audit(subject, outcome=outcome_of(error), **told)
            await context.abort_with_status(grpc_status_of(error))
        return subject, request, told

    def _admit(self, subject: Subject, stream: str) -> None:
        self._gate.admit(subject, self._rule, operation=self._method, stream=stream)

    def _who(self, context: Context) -> Subject:
        token = bearer_token(_metadata(context, "authorization"))
        subject = self._gate.identify(token=token, names=_names_of(context))
        if subject is None:
            raise unauthenticated("neither a token nor a certificate was shown")
        return subject

    def parsed(self, data: Any) -> Any:  # noqa: ANN401 - a message of any kind, or none
        """Return the request that was received."""
        if data is grpc.aio.EOF:
            raise RefusedError(
                f"{self._method} was called without a request", remedy="Send one, or an empty one"
            )
        try:
            return self._parse(data) if self._parse is not None else data
        except (DecodeError, ValueError) as error:
            raise RefusedError(
                f"the request of {self._method} can't be read",
                remedy="Send what its .proto file says",
            ) from error


async def _or_abort(context: Context, step: Callable[[], T]) -> T:
    """Do a step; what it refuses ends the call."""
    try:
        return step()
    except TierlogError as error:
        await context.abort_with_status(grpc_status_of(error))
        raise


def _metadata(context: Context, wanted: str) -> str | None:
    pairs: Iterable[tuple[str, Any]] = context.invocation_metadata() or ()
    for key, value in pairs:
        if key == wanted:
            return value if isinstance(value, str) else bytes(value).decode("latin-1")
    return None


def _names_of(context: Context) -> Sequence[str]:
    """Return the names of the client's certificate, which the handshake has verified."""
    known = context.auth_context()
    return [one.decode("utf-8", "replace") for kind in _NAMES for one in known.get(kind, ()) if one]
