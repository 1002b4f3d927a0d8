"""Limits of bytes a second for what readers fetch out of tier 2: a process's, and a namespace's.

Owns who waits for how long. Does not own what is fetched (``ranges``), nor the bucket
(``tierlog.ports.throttle``).

Invariants:
    * Who waits comes in order, in each line, those that a reader waits for first. So no read is
      behind what is fetched ahead, but for one request that pays just now; that is no longer than
      what its limits let through in ``AT_ONCE_S``, unless one range is.
    * Nothing is refused. Who is cancelled here pays nothing: what it waited helps whoever comes
      next, so that also a client gets there in the end whose own timeout is shorter than its wait.
      Nor does what paid, and was then given up before the store was asked (``give_back``).
    * A request waits for its namespace before it waits in the process's line, which it therefore
      does not hold up.
"""

import asyncio
from collections.abc import Sequence
from typing import Final

from tierlog.model.ids import INT64_MAX
from tierlog.offload.turns import Turns, Urgent
from tierlog.ports.clock import Clock
from tierlog.ports.spending import IN, NAMESPACE, PROCESS, CostMeter, purpose
from tierlog.ports.throttle import BURST_BYTES, NamespaceBuckets, TokenBucket

AT_ONCE_S: Final = 1.0


class _Line(TokenBucket):
    """A bucket at which one pays at a time."""

    def __init__(self, clock: Clock, per_s: float) -> None:
        super().__init__(clock, per_s=per_s, burst=BURST_BYTES)
        self.per_s = per_s
        self._turns = Turns(1)
        # The longest payment that was given back, until one as long is made.
        self._given_back = 0.0

    async def wait(self, length: int, request: Urgent) -> None:
        await self._turns.take(request)
        try:
            # What was waited for a range counts also where that is longer than the burst, and
            # shorter ones come between its tries.
            await self.take(length, burst=max(length, self._given_back))
            if length >= self._given_back:
                self._given_back = 0.0
        except asyncio.CancelledError:
            self.give_back(length)  # what it waited is there for whoever comes next
            raise
        finally:
            self._turns.give_back()

    def give_back(self, count: float) -> None:
        super().give_back(count)
        self._given_back = max(self._given_back, count)


class ReadPace:
    """``Pace`` of a process's reads."""

    def __init__(
        self, clock: Clock, meter: CostMeter, *, per_s: float, namespaces: Sequence[str] = ()
    ) -> None:
        self._clock = clock
        self._meter = meter
        self._process = _Line(clock, per_s) if per_s else None
        self._namespaces = NamespaceBuckets(namespaces, lambda rate: _Line(clock, rate))

    def __repr__(self) -> str:
        return f"<ReadPace {self._process}, {self._namespaces}>"

    @property
    def at_once(self) -> int | None:
        """How long one request ahead of its reader may be; None: as long as it likes."""
        rates = [line.per_s for line, _ in self._lines()]
        # A rate may be infinite, as settings have floats.
        return int(min(INT64_MAX, *rates) * AT_ONCE_S) if rates else None

    def limited(self, stream: str) -> str | None:
        """Return a stream's namespace; None: it has no limit of its own."""
        return self._namespaces.limited(stream)

    async def take(self, length: int, request: Urgent) -> None:
        """Wait until so many bytes may come, for the stream that this task spends on."""
        paid = list[_Line]()
        try:
            for line, reason in self._lines():
                begun_s = self._clock.monotonic_s()
                try:
                    await line.wait(length, request)
                finally:
                    self._meter.throttled_s[IN, reason] += self._clock.monotonic_s() - begun_s
                paid.append(line)
        except asyncio.CancelledError:
            for line in paid:
                line.give_back(length)
            raise

    def give_back(self, length: int) -> None:
        """Take back a payment of this task's stream: the bytes are not asked for."""
        for line, _ in self._lines():
            line.give_back(length)

    def _lines(self) -> list[tuple[_Line, str]]:
        found = [(self._namespaces.of(purpose().stream), NAMESPACE), (self._process, PROCESS)]
        return [(line, reason) for line, reason in found if line is not None]
