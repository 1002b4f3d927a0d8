"""HTTP for every service: the application with health and errors, and the server around it.

Liveness says that the loop turns; readiness names what is missing. Errors are problem+json,
those of the framework too.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping
from importlib.metadata import version
from typing import Final, cast
from uuid import UUID

import structlog
import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import Counter, Gauge
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from uvicorn.protocols.http.h11_impl import H11Protocol

from tierlog.format.versions import Format, current
from tierlog.model.errors import (
    IndeterminateError,
    Reason,
    RefusedError,
    RetryableError,
    TierlogError,
)
from tierlog.ports.ids import Ids
from tierlog.runtime.clusters import OwnCluster
from tierlog.runtime.errors import PROBLEM_TYPE, problem_of
from tierlog.runtime.openapi import describe_api
from tierlog.runtime.requests import App, Message, Receive, RequestContext, RequestIds, Send
from tierlog.runtime.rpc import SEND_BYTES
from tierlog.runtime.tls import ServerTls, peer_names

log = structlog.get_logger()

Checks = Mapping[str, Callable[[], Awaitable[bool]]]
"""By name what a service needs. A check that raises a ``TierlogError`` says what to do about it."""

NO_CHECKS: Final[Checks] = {}
ACCEPT_TURNS: Final = 3
"""So many turns of the loop it takes from accepting to the connection that is made."""
DRAIN_S_MAX: Final = 5
START_S_MAX: Final = 30.0
HEAD_BYTES_MAX: Final = 16 * 1024
HEAD_S_MAX: Final = 10.0
"""So long a client may take for a request's head, of the first and of all others."""
BODY_S_MAX: Final = 60.0
BODY_BYTES_MAX: Final = 8 * 1024 * 1024
TAKEN_S_MAX: Final = 300.0
"""A client that takes less than ``SEND_BYTES`` of what waits for it in so long is cut off. Those
who read runs pause for as long as the store does that they write to."""
_TOO_LARGE: Final = 413
CONNECTIONS_MAX: Final = 2048
ALWAYS_ANSWERED: Final = frozenset({"/livez", "/readyz", "/metrics"})
"""What those ask who watch a process, who are not to end it because many others ask it."""
READS: Final = frozenset({"GET", "HEAD"})
"""What changes nothing, and is worth nothing without its answer."""
_TASK: Final = "tierlog.task"
_LEFT: Final = "tierlog.left"
CERTIFICATE_NAMES: Final = "certificate_names"
"""In the state of a request: the names in the client's certificate, where TLS has verified one."""
UNKNOWN_CALLER: Final = "tierlog.unknown_caller"
"""In the scope of a request: it was let through, and nobody asked who calls."""
BUILD: Final = Gauge(
    "tierlog_build_info",
    "Always 1: the version of this process, and that of the wire that it speaks",
    ["version", "wire"],
)
REFUSED: Final = Counter(
    "tierlog_http_refused", "Requests that were refused: this process had all its connections"
)
BUILD.labels(version("tierlog"), str(current(Format.WIRE))).set(1)


class Readiness(BaseModel):
    """Whether a service can work, and what it asks for; with ``?verbose`` what to do, too."""

    ready: bool
    checks: dict[str, bool]
    remedies: dict[str, str] | None = None


def build_http_app(
    title: str,
    *,
    checks: Checks,
    told: Checks = NO_CHECKS,
    ids: Ids | None = None,
    cluster_id: UUID | None = None,
) -> FastAPI:
    """Return an application with /livez, /readyz, /metrics and the error handlers.

    ``told``: checks of what most of the service works without: they are told beside the others.
    ``ids`` tell requests of this process from those of others. What is meant for another cluster
    than ``cluster_id`` is refused.
    """
    app = FastAPI(title=title, docs_url="/docs", redoc_url=None, max_body_size=BODY_BYTES_MAX)
    if cluster_id is not None:
        app.add_middleware(_OneCluster, cluster=OwnCluster(cluster_id))
    app.add_middleware(RequestContext, request_ids=RequestIds(ids))

    async def livez() -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(verbose: str | None = None) -> Response:
        results, remedies = dict[str, bool](), dict[str, str]()
        for name, check in {**checks, **told}.items():
            try:
                results[name] = await check()
            except TierlogError as error:
                # Whoever asks may be a stranger: the log alone has addresses and causes.
                results[name], remedies[name] = False, error.remedy
        status = 200 if all(results[name] for name in checks) else 503
        body = Readiness(
            ready=status == 200,
            checks=results,
            remedies=remedies if verbose is not None else None,
        )
        return JSONResponse(body.model_dump(exclude_none=True), status_code=status)

    async def metrics() -> Response:
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest  # noqa: PLC0415

        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    for path, answer in (("/livez", livez), ("/readyz", readyz), ("/metrics", metrics)):
        # Some balancers probe with HEAD.
        app.add_api_route(path, answer, methods=["GET", "HEAD"], include_in_schema=False)
    app.add_exception_handler(TierlogError, _tierlog_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _bug)
    describe_api(app)
    return app


def problem_response(error: TierlogError) -> Response:
    """Return ``error`` as problem+json."""
    problem = problem_of(error)
    headers = (
        {}
        if error.retry_after_s is None
        else {"Retry-After": str(max(1, int(error.retry_after_s)))}
    )
    return Response(
        problem.model_dump_json(exclude_none=True),
        status_code=problem.status,
        media_type=PROBLEM_TYPE,
        headers=headers,
    )


class _Bounded:
    """Refuses requests while there are as many connections as a process takes.

    A read ends with its connection (``_Connection``), which is no error: else a client that goes
    and asks again would have any number of them under way.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self.connections: Collection[object] = ()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if len(self.connections) < CONNECTIONS_MAX or scope["path"] in ALWAYS_ANSWERED:
            scope[_TASK] = asyncio.current_task()
            try:
                await self._app(scope, receive, send)
            except asyncio.CancelledError:
                if _LEFT not in scope:
                    raise
            return
        REFUSED.inc()
        response = problem_response(
            RetryableError(
                f"this process has {len(self.connections)} connections, and takes no more",
                remedy="Ask again, and end connections that ask nothing; or run more processes",
                retry_after_s=1.0,
            )
        )
        response.headers["Connection"] = "close"
        await response(scope, receive, send)


class _OneCluster:
    """Refuses requests that are meant for another cluster, and says of answers whose they are.

    Stands behind what asks who calls: who is not known is told nothing.
    """

    def __init__(self, app: App, cluster: OwnCluster) -> None:
        self._app = app
        self._cluster = cluster

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or scope.get(UNKNOWN_CALLER):
            await self._app(scope, receive, send)
            return
        name, _ = self._cluster.header

        async def send_told(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), self._cluster.header]
            await send(message)

        named = next((value for key, value in scope["headers"] if key == name), None)
        try:
            self._cluster.admit(None if named is None else named.decode("latin-1"))
        except TierlogError as error:
            response = problem_response(error)
            # Of a body that nobody reads the next request could not be told apart.
            response.headers["Connection"] = "close"
            await response(scope, receive, send_told)
            return
        await self._app(scope, receive, send_told)


async def _tierlog_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, TierlogError)
    return problem_response(error)


async def _invalid(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    return problem_response(
        RefusedError(f"{where}: {first['msg']}", remedy="See /docs for what is expected")
    )


async def _http_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    reason = Reason.TOO_LARGE if error.status_code == _TOO_LARGE else None
    refused = RefusedError(
        str(error.detail), reason=reason, remedy="See /docs for what is served here"
    )
    problem = problem_of(refused).model_copy(update={"status": error.status_code})
    return Response(
        problem.model_dump_json(exclude_none=True),
        status_code=error.status_code,
        media_type=PROBLEM_TYPE,
        headers=error.headers,  # of 405: Allow
    )


async def _bug(_request: Request, _error: Exception) -> Response:
    # The server logs the trace; the caller learns that the outcome is unknown.
    return problem_response(
        IndeterminateError(
            "the service failed while it worked on this request",
            reason=Reason.APPEND_INDETERMINATE,
            remedy="Look into the service's log",
        )
    )


@contextlib.asynccontextmanager
async def serve_http(
    app: FastAPI,
    *,
    host: str,
    port: int,
    tls: ServerTls | None = None,
    taken_s_max: float = TAKEN_S_MAX,
) -> AsyncIterator[int]:
    """Serve ``app`` inside the running loop and give its port; drains at the end.

    Who takes hardly anything of an answer for ``taken_s_max`` is cut off, the answer whole or not.
    """
    bounded = _Bounded(app)
    config = _Config(
        bounded,
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=DRAIN_S_MAX,
        lifespan="off",
        http=_Connection,
        ws="none",
        # What headers say of a client's address anybody can write.
        proxy_headers=False,
        server_header=False,
        h11_max_incomplete_event_size=HEAD_BYTES_MAX,
        # Probes have no certificate; what is not public asks for one, or for a token.
        ssl_context_factory=None if tls is None else lambda *_: tls.context(required=False),
    )
    config.taken_s_max = taken_s_max
    server = _EmbeddedServer(config)
    bounded.connections = server.server_state.connections
    listening = listen(host, port)
    bound_port: int = listening.getsockname()[1]
    # Awaited below, whatever happens in between.
    serving = asyncio.ensure_future(server.serve(sockets=[listening]))  # noqa: TID251
    try:
        await asyncio.wait_for(server.accepting.wait(), START_S_MAX)
        yield bound_port
    finally:
        server.should_exit = True
        await serving
        listening.close()


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens, or raise an error that names the port and the remedy."""
    # asyncio turns Nagle's algorithm off only where the protocol is named; with it, the small
    # last piece of a streamed answer waits 40 ms for an acknowledgement of the one before it.
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise RetryableError(
            f"can't listen on {host}:{port}: {error.strerror}",
            remedy="Stop what uses the port, or choose another one in the settings",
        ) from error
    listening.listen(512)
    listening.setblocking(False)  # noqa: FBT003 - the socket module's own signature
    return listening


class _Config(uvicorn.Config):
    """What a server and its connections share."""

    ends = False
    """Set once the server takes nothing new."""
    taken_s_max = TAKEN_S_MAX


class _Connection(H11Protocol):
    """One connection: knows who TLS says the client is, and waits for no client for ever.

    Neither for a request, nor for what was sent to be taken: a transport that is closed stays, and
    counts, until its last byte was.
    """

    config: _Config

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._timer: asyncio.TimerHandle | None = None
        self._taking: asyncio.TimerHandle | None = None
        super().connection_made(transport)
        # Whatever waits for the client is seen, and not only much of it.
        transport.set_write_buffer_limits(high=1)
        if self.config.ends:
            # Over TLS it comes this late: another server answers at this port by now.
            transport.abort()
            return
        if transport.get_extra_info("ssl_object") is not None:
            # Of this connection's own, from which each request's state is made.
            self.app_state = {**self.app_state, CERTIFICATE_NAMES: peer_names(transport)}
        self._expect()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._timer is None:
            self._expect()

    def _phase(self) -> tuple[object, str]:
        """Return what the client is sending now; nothing while its request is worked on."""
        if self.cycle is None or self.cycle.response_complete:
            return self.cycle, "head"
        return self.cycle, "body" if self.cycle.more_body else ""

    def _expect(self) -> None:
        """Give what is on its way its time."""
        phase = self._phase()
        if phase[1]:
            limit_s = HEAD_S_MAX if phase[1] == "head" else BODY_S_MAX
            self._timer = self.loop.call_later(limit_s, self._check, phase)

    def _check(self, before: tuple[object, str]) -> None:
        self._timer = None
        if self.transport.is_closing():
            return  # over TLS a second time would take from it what an abort needs
        if self._phase() == before:
            self.transport.close()
        elif self.timeout_keep_alive_task is None:
            # Something came since then, and perhaps not all of it.
            self._expect()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_taking()

    def resume_writing(self) -> None:
        self._cancel_taking()
        super().resume_writing()

    def _expect_taking(self) -> None:
        """Give the client its time to take what waits for it, or a good part of it."""
        untaken = self.transport.get_write_buffer_size()
        self._taking = self.loop.call_later(self.config.taken_s_max, self._check_taking, untaken)

    def _check_taking(self, before: int) -> None:
        untaken = self.transport.get_write_buffer_size()
        if before - untaken >= SEND_BYTES:
            self._expect_taking()
            return
        if not self.transport.is_closing():
            # Else whoever made the answer has said so, or it is whole.
            log.info("client.left", cause="it takes nothing", untaken_bytes=untaken)
        self.transport.abort()

    def _cancel_taking(self) -> None:
        if self._taking is not None:
            self._taking.cancel()
            self._taking = None

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._cancel_taking()
        super().connection_lost(exc)
        self._end_read()

    def _end_read(self) -> None:
        """End a read whose answer has not begun: nobody is there to take it.

        What is sent already ends by itself; and at its end the server ends all that is left.
        """
        cycle = self.cycle
        if cycle is None or not cycle.disconnected or cycle.response_started or self.config.ends:
            return
        scope = cast("Message", cycle.scope)
        if scope["method"] in READS and (task := scope.get(_TASK)) is not None:
            scope[_LEFT] = True
            task.cancel()


class _EmbeddedServer(uvicorn.Server):
    """Leaves signals to the service, says when it accepts connections, and outlives none."""

    config: _Config

    def __init__(self, config: _Config) -> None:
        super().__init__(config)
        self.accepting = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.accepting.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.config.ends = True
        loop = asyncio.get_running_loop()
        for one in sockets or ():
            loop.remove_reader(one)
        # What was accepted becomes a connection first: asyncio forgets it in a server that closed.
        for _ in range(ACCEPT_TURNS):
            await asyncio.sleep(0)
        await super().shutdown(sockets=sockets)
        # Those that did not end in time: kept alive they would ask this one for ever.
        for connection in list(self.server_state.connections):
            connection.transport.abort()
