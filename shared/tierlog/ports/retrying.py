"""Sending a request again: capped exponential back-off with full jitter, bounded twice.

Owns how long to wait and when to give up. Does not own which failures may be sent again: callers
say so.

Invariants:
    * At most ``tries_max`` tries, and no try begins later than ``time_s_max`` after the first.
    * A wait is drawn evenly from zero to its cap, so that many who failed at once spread; what the
      server asked for (``retry_after_s``) is waited at least, up to ``wait_s_max``.
"""

import asyncio
import math
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

from tierlog.model.errors import IndeterminateError, RetryableError, TierlogError
from tierlog.ports.clock import Clock
from tierlog.ports.ids import Ids

Result = TypeVar("Result")


class Come(Protocol):
    """Gives what ``ask`` returns of a server, called by the name that readiness has for it."""

    async def __call__(self, server: str, ask: Callable[[], Awaitable[Result]]) -> Result: ...


async def asked_once(server: str, ask: Callable[[], Awaitable[Result]]) -> Result:
    """Return what ``ask`` returns, or raise why not: of whoever does not wait."""
    del server
    return await ask()


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryLimits:
    """How patient to be."""

    tries_max: int = 5
    time_s_max: float = 60.0
    wait_s_first: float = 0.2
    wait_s_max: float = 10.0

    def __post_init__(self) -> None:
        assert self.tries_max >= 1, "the first try counts"
        assert 0 <= self.wait_s_first <= self.wait_s_max, "waits grow"

    def cap_s(self, failures: int) -> float:
        """Return the longest wait after so many failures."""
        # The exponent is bounded too, else patience ends in an overflow.
        grown: float = self.wait_s_first * 2 ** min(failures - 1, 60)
        return min(self.wait_s_max, grown)


class Retries:
    """The tries of one request: ``wait_s`` after each failure says what to do."""

    def __init__(self, limits: RetryLimits, *, clock: Clock, ids: Ids) -> None:
        self._limits = limits
        self._clock = clock
        self._ids = ids
        self._begun_s = clock.monotonic_s()
        self.failures = 0
        """How many tries failed so far."""

    def __repr__(self) -> str:
        return f"<Retries {self.failures} of {self._limits.tries_max} failed>"

    def wait_s(self, retry_after_s: float | None = None) -> float | None:
        """Count a failure; return how long to wait before the next try, or None: no more."""
        limits = self._limits
        self.failures += 1
        wait_s = self._ids.uniform(0.0, limits.cap_s(self.failures))
        if retry_after_s is not None:
            wait_s = max(wait_s, min(retry_after_s, limits.wait_s_max))
        elapsed_s = self._clock.monotonic_s() - self._begun_s
        if self.failures >= limits.tries_max or elapsed_s + wait_s > limits.time_s_max:
            return None
        return wait_s


PATIENT: Final = RetryLimits(
    tries_max=sys.maxsize, time_s_max=math.inf, wait_s_first=0.5, wait_s_max=10.0
)
"""Of whoever has nothing to do before something is there."""


async def until_there(
    ask: Callable[[], Awaitable[Result]],
    *,
    clock: Clock,
    ids: Ids,
    tell: Callable[[TierlogError, float], None],
) -> Result:
    """Return what ``ask`` returns, however long that takes; ``tell`` why not yet, and when again.

    What no later try can mend is raised at once.
    """
    retries = Retries(PATIENT, clock=clock, ids=ids)
    while True:
        try:
            return await ask()
        except (RetryableError, IndeterminateError) as error:
            wait_s = retries.wait_s()
            assert wait_s is not None, "there is no last try"
            tell(error, wait_s)
        await asyncio.sleep(wait_s)
