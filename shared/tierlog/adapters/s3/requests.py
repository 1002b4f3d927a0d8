"""One request to the store: paced, counted, given up in time, sent again where that may help.

Retries: all of them are here, the library makes none. Those that ``errors.sends_again`` names are
sent again after capped exponential back-off with full jitter, bounded in number and time.

Invariants:
    * A try ends within ``S3Settings.longest_request_s``, not counting what it waited for its own
      pace. It is cancelled then: the store may still have it, callers know that from the error.
    * Keys that are over are renewed, and the request is sent again with the new ones.
    * Each try is counted under the purpose of the task that sends it.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from aiohttp import ClientError as HttpError
from botocore.exceptions import BotoCoreError, ClientError

from tierlog.adapters.s3.body import BuffersBody, Pace
from tierlog.adapters.s3.credentials import Credentials
from tierlog.adapters.s3.errors import (
    CutBodyError,
    code_of,
    keys_are_over,
    retry_after_s,
    sends_again,
)
from tierlog.ports.clock import Clock
from tierlog.ports.ids import Ids
from tierlog.ports.retrying import Retries, RetryLimits
from tierlog.ports.spending import NAMESPACE, OUT, PROCESS, CostMeter, purpose
from tierlog.ports.throttle import BURST_BYTES, NamespaceBuckets, TokenBucket, requests_pace
from tierlog.runtime.settings import S3Settings

TROUBLE: Final = (
    ClientError, BotoCoreError, HttpError, OSError, TimeoutError, CutBodyError
)  # fmt: skip

Take = Callable[[Any], Awaitable[Any]]


def retry_limits(settings: S3Settings) -> RetryLimits:
    """Return how patient one request is."""
    return RetryLimits(
        tries_max=settings.attempts_max,
        time_s_max=settings.retry_s_max,
        wait_s_first=settings.retry_wait_s_first,
        wait_s_max=settings.retry_wait_s_max,
    )


class Requests:
    """What one client sends."""

    def __init__(
        self,
        client: Any,  # noqa: ANN401 - the library has no types
        settings: S3Settings,
        credentials: Credentials,
        *,
        clock: Clock,
        ids: Ids,
        meter: CostMeter,
        pace: TokenBucket | None = None,
    ) -> None:
        self._client = client
        self._settings = settings
        self._credentials = credentials
        self._limits = retry_limits(settings)
        self._clock = clock
        self._ids = ids
        self._meter = meter
        self._bytes: TokenBucket | None = None
        if settings.bytes_per_s_max:
            self._bytes = TokenBucket(clock, per_s=settings.bytes_per_s_max, burst=BURST_BYTES)
        self._namespaces = NamespaceBuckets(
            settings.namespace_bytes_per_s_max,
            lambda rate: TokenBucket(clock, per_s=rate, burst=BURST_BYTES),
        )
        self._pace = pace or requests_pace(clock, per_s_max=settings.requests_per_s_max)

    def __repr__(self) -> str:
        return f"<Requests {self._meter}>"

    async def send(
        self, operation: str, *, expects: int = 0, take: Take | None = None, **params: object
    ) -> Any:  # noqa: ANN401 - the library has no types
        """Return the answer, or what ``take`` makes of it while it may still be asked for again.

        ``expects``: so many bytes are to come back. Raises one of ``TROUBLE``.
        """
        retries = Retries(self._limits, clock=self._clock, ids=self._ids)
        while True:
            generation = self._credentials.generation
            try:
                return await self._once(operation, expects, take, params)
            except TROUBLE as error:
                again = sends_again(error, operation)
                if keys_are_over(error):
                    again |= await self._credentials.renew(generation)
                wait_s = retries.wait_s(retry_after_s(error)) if again else None
                if wait_s is None:
                    _note_tries(error, retries.failures + (not again))
                    raise
                await asyncio.sleep(wait_s)

    def received(self, operation: str, length: int) -> None:
        """Count bytes that came in."""
        self._meter.count(operation, requests=0, received=length)

    async def _once(
        self, operation: str, expects: int, take: Take | None, params: Mapping[str, object]
    ) -> Any:  # noqa: ANN401 - the library has no types
        if self._pace is not None:
            await self._pace.take(1)
        body = params.get("Body")
        length = len(body) if isinstance(body, BuffersBody) else 0
        self._meter.count(operation, sent=length)
        limit_s = self._settings.longest_request_s(max(length, expects))
        deadline = asyncio.timeout(limit_s)
        begun_s, code = self._clock.monotonic_s(), "cancelled"
        try:
            async with deadline:
                if isinstance(body, BuffersBody):
                    body.pace = self._body_pace(deadline)
                answer = await getattr(self._client, operation)(**params)
                found = answer if take is None else await take(answer)
                code = "ok"
                return found
        except TimeoutError as error:
            code = "timeout"
            if not deadline.expired():
                raise
            raise TimeoutError(f"not done within {limit_s:.0f} s") from error
        except TROUBLE as error:
            code = code_of(error) if isinstance(error, ClientError) else type(error).__name__
            raise
        finally:
            took_s = self._clock.monotonic_s() - begun_s
            self._meter.answered(operation, code=code, took_s=took_s)

    def _body_pace(self, deadline: asyncio.Timeout) -> Pace | None:
        """Return what waits before bytes are sent, and holds the deadline back meanwhile."""
        # A namespace's limit first: who waits for it takes nothing of the process's.
        found = ((self._namespaces.of(purpose().stream), NAMESPACE), (self._bytes, PROCESS))
        buckets = [(bucket, reason) for bucket, reason in found if bucket is not None]
        if not buckets:
            return None

        async def wait(count: int) -> None:
            loop = asyncio.get_running_loop()
            due_s = deadline.when()
            assert due_s is not None, "one chunk waits at a time"
            left_s = due_s - loop.time()
            # An answer that came before the body was sent has ended the deadline.
            with contextlib.suppress(RuntimeError):
                deadline.reschedule(None)
                for bucket, reason in buckets:
                    begun_s = self._clock.monotonic_s()
                    await bucket.take(count)
                    waited_s = self._clock.monotonic_s() - begun_s
                    self._meter.throttled_s[OUT, reason] += waited_s
                deadline.reschedule(loop.time() + left_s)

        return wait


def _note_tries(error: Exception, tries: int) -> None:
    """Write down how often the request was sent, where the library would have done so."""
    if isinstance(error, ClientError):
        error.response.setdefault("ResponseMetadata", {})["RetryAttempts"] = tries - 1
