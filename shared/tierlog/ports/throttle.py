"""A token bucket: so many a second, a burst at once. Bytes or requests, whichever is counted.

Invariant: in any span of t seconds, at most ``per_s`` * t + ``burst`` begin that are paid for
before they move, plus one take (which may be larger than the burst: it then waits longer, and is
never refused).
"""

import asyncio

from tierlog.ports.clock import Clock


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
