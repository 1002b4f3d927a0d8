"""The ids port over a seeded random source."""

import random
from uuid import UUID


class SeededIds:
    """The same seed gives the same ids, in the same order."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def uuid(self) -> UUID:
        return UUID(int=self._rng.getrandbits(128), version=4)

    def uniform(self, low: float, high: float) -> float:
        return self._rng.uniform(low, high)
