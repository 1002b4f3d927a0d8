"""HTTP for every service: the application with health and errors, and the server around it.

Liveness says that the loop turns; readiness names what is missing. Errors are problem+json,
those of the framework too.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Final

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from tierlog.model.errors import (
    IndeterminateError,
    Reason,
    RefusedError,
    RetryableError,
    TierlogError,
)
from tierlog.runtime.errors import PROBLEM_TYPE, problem_of
from tierlog.runtime.openapi import describe_api

Checks = Mapping[str, Callable[[], Awaitable[bool]]]

START_S_MAX: Final = 30.0


class Readiness(BaseModel):
    """Whether a service can work, and what it needs for that."""

    ready: bool
    checks: dict[str, bool]


def build_http_app(title: str, *, checks: Checks) -> FastAPI:
    """Return an application with /livez, /readyz, /metrics and the error handlers."""
    app = FastAPI(title=title, docs_url="/docs", redoc_url=None)

    async def livez() -> Response:
        return PlainTextResponse("ok\n")

    async def readyz() -> Response:
        results = {name: await check() for name, check in checks.items()}
        status = 200 if all(results.values()) else 503
        body = Readiness(ready=status == 200, checks=results)
        return JSONResponse(body.model_dump(), status_code=status)

    async def metrics() -> Response:
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest  # noqa: PLC0415

        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    app.add_api_route("/livez", livez, include_in_schema=False)
    app.add_api_route("/readyz", readyz, include_in_schema=False)
    app.add_api_route("/metrics", metrics, include_in_schema=False)
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
    refused = RefusedError(str(error.detail), remedy="See /docs for what is served here")
    problem = problem_of(refused).model_copy(update={"status": error.status_code})
    return Response(
        problem.model_dump_json(exclude_none=True),
        status_code=error.status_code,
        media_type=PROBLEM_TYPE,
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
async def serve_http(app: FastAPI, *, host: str, port: int) -> AsyncIterator[int]:
    """Serve ``app`` inside the running loop and give its port; drains at the end."""
    config = uvicorn.Config(
        app, log_config=None, access_log=False, timeout_graceful_shutdown=5, lifespan="off"
    )
    server = _EmbeddedServer(config)
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


class _EmbeddedServer(uvicorn.Server):
    """Leaves signals to the service, and says when it accepts connections."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.accepting = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.accepting.set()
