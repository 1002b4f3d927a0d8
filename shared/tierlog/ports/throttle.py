"""A token bucket: so many a second, a burst at once. Bytes or requests, whichever is counted.

Beside it one for each namespace of streams, as ``NAME=RATE`` says.

Invariant: in any span of t seconds, at most ``per_s`` * t + ``burst`` begin that are paid for
before they move, plus one take (which may be larger than the burst: it then waits longer, and is
never refused).
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

from tierlog.model.ids import StreamName, namespace_of
from tierlog.model.policy import check_namespace
from tierlog.ports.clock import Clock

# A second's worth may go at once: a cap on requests is about cost, not about smoothness.
REQUESTS_BURST_S: Final = 1.0
BURST_BYTES: Final = 1024 * 1024
EACH_OTHER: Final = "*"
"""Stands for each namespace that has no rate of its own; streams without any are one of these."""
NAMESPACES_MAX: Final = 10_000


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

    async def take(self, count: float, *, burst: float = 0) -> None:
        """Wait until ``count`` may move. Who is cancelled meanwhile has paid all the same.

        ``burst``: so much at once this time, where that is more than the bucket's own.
        """
        assert count >= 0, "a count is not negative"
        now_s = self._clock.monotonic_s()
        saved_s = max(self._burst_s, burst / self._per_s)
        self._paid_until_s = max(self._paid_until_s, now_s - saved_s)
        self._paid_until_s += count / self._per_s
        if self._paid_until_s > now_s:
            self.waited_s += self._paid_until_s - now_s
            await asyncio.sleep(self._paid_until_s - now_s)

    def give_back(self, count: float) -> None:
        """Take back a payment for what does not move; no use to who waits already."""
        self._paid_until_s -= count / self._per_s


def requests_pace(clock: Clock, *, per_s_max: float) -> TokenBucket | None:
    """Return what all requests of a process wait for; None: it sends as many as it likes."""
    if not per_s_max:
        return None
    return TokenBucket(clock, per_s=per_s_max, burst=per_s_max * REQUESTS_BURST_S)


def rate_of_namespace(text: str) -> tuple[str, float]:
    """Return what ``NAME=RATE`` says; raises ``ValueError``, or what refuses the name."""
    name, found, rate = text.partition("=")
    if not found or not rate.isascii() or not rate.isdigit():
        raise ValueError(
            f"{text[:140]!r} is no rate: write NAMESPACE=BYTES_PER_S, or *=BYTES_PER_S for each "
            "that isn't named; 0: no limit"
        )
    if name != EACH_OTHER:
        check_namespace(name)
    return name, float(rate)


Bucket = TypeVar("Bucket", bound=TokenBucket)


class NamespaceBuckets(Generic[Bucket]):
    """A bucket for each namespace that has a rate, made when it is first wanted.

    At most ``NAMESPACES_MAX`` are kept: the one used longest ago goes, and begins anew.
    """

    def __init__(self, rates: Sequence[str], make: Callable[[float], Bucket]) -> None:
        self._rates = dict(map(rate_of_namespace, rates))
        self._make = make
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()

    def __repr__(self) -> str:
        return f"<NamespaceBuckets {self._rates}, {len(self._buckets)} in use>"

    def limited(self, stream: str) -> str | None:
        """Return a stream's namespace; None: it has no limit."""
        name = namespace_of(StreamName(stream))
        return name if self._rates.get(name, self._rates.get(EACH_OTHER)) else None

    def of(self, stream: str) -> Bucket | None:
        """Return the bucket of a stream's namespace; None: it has no limit."""
        name = self.limited(stream)
        if name is None:
            return None
        rate = self._rates.get(name, self._rates.get(EACH_OTHER, 0))
        if name not in self._buckets:
            self._buckets[name] = self._make(rate)
            if len(self._buckets) > NAMESPACES_MAX:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(name)
        return self._buckets[name]
