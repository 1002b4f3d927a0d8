"""Which request a line of the log belongs to, and in whose trace it is.

Who calls may say both: ``x-request-id`` and ``traceparent``, as headers of HTTP or as metadata of
gRPC. A request without an id gets one: the process's own part, and a number.

Invariant: what somebody else says is bound only if it is short and plain; it stands in every line.
"""

import itertools
import re
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, Final

import structlog

from tierlog.format.envelope import Traceparent
from tierlog.ports.ids import Ids
from tierlog.ports.tracing import CALLER

REQUEST_ID: Final = "x-request-id"
TRACEPARENT: Final = "traceparent"

_BOUND: Final = "request_id"
_PLAIN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,63}", re.ASCII)
_TRACEPARENT_LEN_MAX: Final = 64

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class RequestIds:
    """Ids for requests that have none; without ``ids`` they are the process's own alone."""

    def __init__(self, ids: Ids | None = None) -> None:
        self._own = ids.uuid().hex[:8] if ids is not None else "local"
        self._numbers = itertools.count(1)

    def named(self, given: str | None) -> str:
        """Return the id that was given, if it may be used, or a new one."""
        if given is not None and _PLAIN.fullmatch(given):
            return given
        return f"{self._own}-{next(self._numbers)}"


def bind_request(request_id: str, trace: Traceparent | None) -> None:
    """Have both in every line that this task logs from now on, and in those that it starts."""
    bound = {_BOUND: request_id}
    if trace is not None:
        bound["trace_id"] = trace.trace_id.hex()
    structlog.contextvars.bind_contextvars(**bound)
    CALLER.set(trace)


def bound_request_id() -> str:
    """Return the id of the request that this task works on; empty: of none."""
    return str(structlog.contextvars.get_contextvars().get(_BOUND, ""))


def trace_in(text: str | None) -> Traceparent | None:
    """Return the place that a header names; None when there is none that can be followed."""
    if text is None or len(text) > _TRACEPARENT_LEN_MAX:
        return None
    return Traceparent.parse(text)


def bind_metadata(request_ids: RequestIds, metadata: Iterable[tuple[str, str | bytes]]) -> None:
    """Bind what the metadata of a call say; a call has a task of its own."""
    said = {name: value for name, value in metadata if name in {REQUEST_ID, TRACEPARENT}}
    request_id, place = said.get(REQUEST_ID), said.get(TRACEPARENT)
    bind_request(
        request_ids.named(request_id if isinstance(request_id, str) else None),
        trace_in(place if isinstance(place, str) else None),
    )


class RequestContext:
    """Binds what the headers of a request say, and answers with its id; an ASGI application."""

    def __init__(self, app: App, request_ids: RequestIds) -> None:
        self._app = app
        self._request_ids = request_ids

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        said = {name: value for name, value in scope["headers"] if name in _HEADERS}
        request_id = self._request_ids.named(_text(said.get(_REQUEST_ID)))
        # Each request is served by a task of its own, which ends with it.
        bind_request(request_id, trace_in(_text(said.get(_TRACEPARENT))))

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message.get("headers", ()),
                    (_REQUEST_ID, request_id.encode()),
                ]
            await send(message)

        await self._app(scope, receive, send_named)


_REQUEST_ID: Final = REQUEST_ID.encode()
_TRACEPARENT: Final = TRACEPARENT.encode()
_HEADERS: Final = frozenset({_REQUEST_ID, _TRACEPARENT})


def _text(raw: bytes | None) -> str | None:
    return raw.decode("ascii", "replace") if raw is not None else None
