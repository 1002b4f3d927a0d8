"""A token bucket: so many a second, a burst at once. Bytes or requests, whichever is counted.

Invariant: in any span of t seconds, at most ``per_s`` * t + ``burst`` begin that are paid for
before they move, plus one take (which may be larger than the burst: it then waits longer, and is
never refused).
"""

import asyncio
from typing import Final

from tierlog.ports.clock import Clock

# A second's worth may go at once: a cap on requests is about cost, not about smoothness.
REQUESTS_BURST_S: Final = 1.0


class TokenBucket:
    """Callers pay in the order in which they come, each for what it is about to move."""

    def __init__(self, clock: Clock, *, per_s: float, burst: float = 0) -> None:
        assert per_s > 0, "a rate of nothing would wait for ever"
        assert burst >= 0, "a burst is not negative"
        self._clock = clock
        self._per_s = per_s
        self._burst_s = burst / per_s
        self._paid_until_s = clock.monotonic_s() - self._burst_s
        self.waited_s = 0.0
        """How long callers were held up so far."""

    def __repr__(self) -> str:
        return f"<TokenBucket {self._per_s:.0f}/s, waited {self.waited_s:.1f} s>"

    async def take(self, count: float) -> None:
        """Wait until ``count`` may move. Who is cancelled meanwhile has paid all the same."""
        assert count >= 0, "a count is not negative"
        now_s = self._clock.monotonic_s()
        self._paid_until_s = max(self._paid_until_s, now_s - self._burst_s)
        self._paid_until_s += count / self._per_s
        if self._paid_until_s > now_s:
            self.waited_s += self._paid_until_s - now_s
            await asyncio.sleep(self._paid_until_s - now_s)


def requests_pace(clock: Clock, *, per_s_max: float) -> TokenBucket | None:
    """Return what all requests of a process wait for; None: it sends as many as it likes."""
    if not per_s_max:
        return None
    return TokenBucket(clock, per_s=per_s_max, burst=per_s_max * REQUESTS_BURST_S)
