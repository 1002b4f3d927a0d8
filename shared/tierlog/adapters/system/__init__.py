"""The clock and ids ports over the operating system."""

import random
import time
from uuid import UUID, uuid4


class SystemClock:
    """The machine's clocks."""

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_s(self) -> float:
        return time.monotonic()


class SystemIds:
    """The machine's randomness."""

    def __init__(self) -> None:
        self._rng = random.SystemRandom()

    def uuid(self) -> UUID:
        return uuid4()

    def uniform(self, low: float, high: float) -> float:
        return self._rng.uniform(low, high)
