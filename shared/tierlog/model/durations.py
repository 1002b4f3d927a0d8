"""How long things took, counted in classes; pure, and cheap enough for every append.

Owns the counts. Does not own names nor how they are shown (a service's ``metrics``).
"""

from bisect import bisect_left
from itertools import accumulate
from typing import Final

BOUNDS_S: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


class Durations:
    """So many took at most so long, for each bound; the last class has none."""

    __slots__ = ("_counts", "sum_s")

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self.sum_s = 0.0

    def __repr__(self) -> str:
        return f"<Durations {sum(self._counts)}, {self.sum_s:.3f} s>"

    def add(self, took_s: float) -> None:
        """Count one."""
        self._counts[bisect_left(BOUNDS_S, took_s)] += 1
        self.sum_s += took_s

    def buckets(self) -> list[tuple[str, float]]:
        """Return bounds and how many took no longer, as a histogram of Prometheus has them."""
        names = [*map(str, BOUNDS_S), "+Inf"]
        return list(zip(names, map(float, accumulate(self._counts)), strict=True))
