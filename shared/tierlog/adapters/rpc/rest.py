"""One HTTP service as its callers see it: answers, or the errors that it tells.

Owns the session, its limits and the translation of failures. Does not own what is asked.

Errors: what the service tells as problem+json; UNAVAILABLE when it can't be reached, breaks off or
is of another cluster; ``IndeterminateError`` when that happens to a call that changes something.
"""

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import aiohttp
import orjson
from aiohttp.connector import NEEDS_CLEANUP_CLOSED

from tierlog.adapters.pieces import Pieces
from tierlog.model.errors import IndeterminateError, RetryableError, TierlogError
from tierlog.runtime.calling import PLAIN, Calling
from tierlog.runtime.clusters import CLUSTER_ID
from tierlog.runtime.errors import error_of_problem

CONNECT_S_MAX: Final = 5.0
PIECED_MIN: Final = 64 * 1024
SLOW_BYTES: Final = 256 * 1024
"""An answer may take the time of a call for each so many bytes, as long as they come."""


class HttpAnswer(NamedTuple):
    """A successful answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes | memoryview


async def _received(response: aiohttp.ClientResponse, pieces: Pieces | None) -> bytes | memoryview:
    """Return the body, in a piece where it is worth one."""
    length = response.content_length
    coded = "Content-Encoding" in response.headers
    if pieces is None or coded or length is None or not PIECED_MIN <= length <= pieces.piece_bytes:
        return await response.read()
    body, at = pieces.lend()[:length], 0
    async for came in response.content.iter_any():
        body[at : at + len(came)] = came
        at += len(came)
    if at != length:
        raise aiohttp.ClientPayloadError(f"{at} bytes came of {length}")
    return body.toreadonly()


class RestService:
    """A session with the service at ``address`` (``host:port``)."""

    def __init__(
        self, address: str, *, name: str, timeout_s: float, calling: Calling = PLAIN
    ) -> None:
        self._base = f"{calling.scheme}://{address}"
        self._calling = calling
        self._name = name
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    def __repr__(self) -> str:
        return f"<RestService {self._name} {self._base}>"

    async def call(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: object = None,
        wait_s: float = 0.0,
        pieces: Pieces | None = None,
    ) -> HttpAnswer:
        """Send one request; ``wait_s`` is how long the service was asked to wait by itself.

        ``pieces``: where a long body is received to; fresh memory costs more than its checksum.
        """
        if self._session is None:
            # Connections that are dropped over TLS go with the session, not with their farewell.
            # As many as there are calls: each partition that is followed waits at one of its own.
            connector = aiohttp.TCPConnector(limit=0, enable_cleanup_closed=NEEDS_CLEANUP_CLOSED)
            self._session = aiohttp.ClientSession(read_bufsize=1024 * 1024, connector=connector)
        patience_s = self._timeout_s + wait_s
        timeout = aiohttp.ClientTimeout(
            total=None, connect=min(CONNECT_S_MAX, self._timeout_s), sock_read=patience_s
        )
        changes = method not in {"GET", "HEAD"}
        data = orjson.dumps(body) if body is not None else None
        headers = self._calling.headers()
        if data is not None:
            headers["Content-Type"] = "application/json"
        context = self._calling.ssl_context()
        try:
            async with (
                asyncio.timeout(patience_s) as limit,
                self._session.request(
                    method,
                    self._base + path,
                    params=params,
                    data=data,
                    headers=headers,
                    timeout=timeout,
                    ssl=True if context is None else context,
                    # A redirect would carry what is shown elsewhere.
                    allow_redirects=False,
                ) as response,
            ):
                more = (response.content_length or 0) // SLOW_BYTES
                limit.reschedule((limit.when() or 0.0) + more * self._timeout_s)
                told = response.headers.get(CLUSTER_ID)
                self._calling.check(told, where=f"{self._name} at {self._base}")
                content = await _received(response, pieces)
                if response.status >= 400:
                    raise error_of_problem(
                        bytes(content), status=response.status, source=self._name
                    )
                return HttpAnswer(response.status, response.headers, content)
        except (aiohttp.ClientConnectorError, aiohttp.InvalidURL) as error:
            raise self._unreachable(error) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._broken_off(error, changes=changes) from error

    async def json(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: object = None,
    ) -> Any:  # noqa: ANN401 - JSON; callers validate it with their models
        """Send one request and return its answer's JSON."""
        answer = await self.call(method, path, params=params, body=body)
        try:
            return orjson.loads(answer.body)
        except orjson.JSONDecodeError as error:
            raise RetryableError(
                f"{self._name} at {self._base} did not answer with JSON",
                remedy="Check that the address is that of a Tierlog service",
            ) from error

    async def close(self) -> None:
        """Give the connections back."""
        if self._session is not None:
            # Python 3.11.2, and others of its age, fail to abort TLS that has ended by itself.
            with contextlib.suppress(AttributeError):
                await self._session.close()

    def _unreachable(self, error: Exception) -> TierlogError:
        return RetryableError(
            f"{self._name} at {self._base} can't be reached: {error}",
            remedy="Start it with: tierlog up; or give its address in the settings",
            details={"service": self._name},
        )

    def _broken_off(self, error: Exception, *, changes: bool) -> TierlogError:
        what = str(error) or type(error).__name__
        kind = IndeterminateError if changes else RetryableError
        return kind(
            f"{self._name} at {self._base} broke off: {what}",
            remedy="Check that it runs, and ask it again",
            details={"service": self._name},
        )
