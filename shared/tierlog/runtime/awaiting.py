"""Servers that may be away when a service starts, and are waited for.

Owns when they are asked again, and what is said meanwhile: in the log, and over HTTP at the port
that the service itself takes later. Does not own what is asked (``tierlog.wiring``), nor the queue,
without which a service starts (``tierlog.offload.awaited_publisher``).

Invariants:
    * What no later try can mend (refused credentials, say) is raised at once.
    * Who asks the process to end has it end at once, by ``StoppedError``.
    * It lives until the service itself takes the port (``leave``), and is never ready.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Final, Self, TypeVar

import structlog

from tierlog.model.errors import RetryableError, TierlogError, from_reason
from tierlog.ports.clock import Clock
from tierlog.ports.ids import Ids
from tierlog.ports.retrying import until_there
from tierlog.runtime.access import COMMON_HTTP_RULES, Gate
from tierlog.runtime.http import build_http_app, serve_http
from tierlog.runtime.http_access import guard_http
from tierlog.runtime.service import StoppedError
from tierlog.runtime.settings import HttpListenSettings
from tierlog.runtime.tls import ServerTls

log = structlog.get_logger()

Result = TypeVar("Result")

QUIET_S: Final = 1.0
"""Who is there within it is not spoken of."""


class AwaitedServers:
    """The servers of one service. ``come`` waits for one of them."""

    def __init__(
        self,
        title: str,
        listen: HttpListenSettings,
        *,
        stop: asyncio.Event,
        tls: ServerTls | None,
        gate: Gate | None,
        clock: Clock,
        ids: Ids,
    ) -> None:
        self._title = title
        self._listen = listen
        self._stop = stop
        self._tls = tls
        self._gate = gate
        self._clock = clock
        self._ids = ids
        self._missing: dict[str, TierlogError | None] = {}
        """By name: None for what has come."""
        self._checks: dict[str, Callable[[], Awaitable[bool]]] = {}
        self._serving: AsyncExitStack | None = None

    def __repr__(self) -> str:
        return f"<AwaitedServers {self._missing}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.leave()

    async def leave(self) -> None:
        """Give the port back; a second time does nothing."""
        serving, self._serving = self._serving, None
        if serving is not None:
            await serving.aclose()

    async def come(self, server: str, ask: Callable[[], Awaitable[Result]]) -> Result:
        """Return what ``ask`` returns, however long that takes; see ``Come`` of the ports."""
        self._missing[server] = RetryableError(
            f"{server} has not answered yet", remedy="Wait, or look into the service's log"
        )
        self._checks.pop("serving", None)  # comes last
        self._checks |= {server: partial(self._is_there, server), "serving": _not_yet}

        def tell(error: TierlogError, wait_s: float) -> None:
            self._missing[server] = error
            log.warning("server.awaited", server=server, cause=str(error), again_s=round(wait_s, 1))

        # Both have ended before this returns.
        coming = asyncio.ensure_future(  # noqa: TID251
            until_there(ask, clock=self._clock, ids=self._ids, tell=tell)
        )
        stopping = asyncio.ensure_future(self._stop.wait())  # noqa: TID251
        both, first = {coming, stopping}, asyncio.FIRST_COMPLETED
        try:
            done, _ = await asyncio.wait(both, timeout=QUIET_S, return_when=first)
            if not done:
                await self._serve()
                await asyncio.wait(both, return_when=first)
            if not coming.done():
                raise StoppedError(server)
            self._missing[server] = None
            return coming.result()
        finally:
            coming.cancel()
            stopping.cancel()
            await asyncio.wait({coming})

    async def _serve(self) -> None:
        """Say what is missing, and nothing else."""
        if self._serving is not None:
            return
        app = build_http_app(self._title, checks=self._checks, ids=self._ids)
        guard_http(app, COMMON_HTTP_RULES, self._gate)
        host, port = self._listen.host, self._listen.http_port
        self._serving = AsyncExitStack()
        await self._serving.enter_async_context(
            serve_http(app, host=host, port=port, tls=self._tls)
        )

    async def _is_there(self, server: str) -> bool:
        error = self._missing[server]
        if error is not None:
            # Anew: one that is raised again and again keeps all traces.
            raise from_reason(error.reason, error.message, remedy=error.remedy)
        return True


async def _not_yet() -> bool:
    return False
