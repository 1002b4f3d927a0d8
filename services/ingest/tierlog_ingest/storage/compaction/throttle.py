"""A token bucket: so many bytes a second, a burst at once.

Invariant: in any span of t seconds, at most ``bytes_per_s`` * t + ``burst_bytes`` bytes begin that
are paid for before they move, plus one take (which may be larger than the burst: it then waits
longer, and is never refused).
"""

import asyncio

from tierlog.ports.clock import Clock


class TokenBucket:
    """Callers pay in the order in which they come, each for what it is about to move."""

    def __init__(self, clock: Clock, *, bytes_per_s: float, burst_bytes: int = 0) -> None:
        assert bytes_per_s > 0, "a rate of nothing would wait for ever"
        assert burst_bytes >= 0, "a burst is not negative"
        self._clock = clock
        self._bytes_per_s = bytes_per_s
        self._burst_s = burst_bytes / bytes_per_s
        self._paid_until_s = clock.monotonic_s() - self._burst_s
        self.waited_s = 0.0
        """How long callers were held up so far."""

    def __repr__(self) -> str:
        return f"<TokenBucket {self._bytes_per_s:.0f} bytes/s, waited {self.waited_s:.1f} s>"

    async def take(self, count: int) -> None:
        """Wait until ``count`` bytes may move. Who is cancelled meanwhile has paid all the same."""
        assert count >= 0, "bytes are not negative"
        now_s = self._clock.monotonic_s()
        self._paid_until_s = max(self._paid_until_s, now_s - self._burst_s)
        self._paid_until_s += count / self._bytes_per_s
        if self._paid_until_s > now_s:
            self.waited_s += self._paid_until_s - now_s
            await asyncio.sleep(self._paid_until_s - now_s)
