"""Latencies in a few kilobytes: counts in buckets that grow with what they hold (pure).

    value in µs    bucket
    0 to 255       one for each
    from 256       128 for each power of two: no value is told wrong by more than 1/128

Owns counting and quantiles. Does not own measuring.
"""

from collections.abc import Mapping
from typing import Final

import numpy as np

SUB_BITS: Final = 7
EXACT: Final = 2 << SUB_BITS
VALUE_BITS_MAX: Final = 40
"""About 12 days; longer ones count as this."""
VALUE_MAX: Final = (1 << VALUE_BITS_MAX) - 1
BUCKETS: Final = EXACT + ((VALUE_BITS_MAX - SUB_BITS - 1) << SUB_BITS)

QUANTILES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}


class Histogram:
    """Counts of latencies."""

    def __init__(self) -> None:
        self._counts = np.zeros(BUCKETS, np.int64)
        self._sum_us = 0
        self._max_us = 0
        self.count = 0

    def add(self, seconds: float, count: int = 1) -> None:
        """Count a latency that so many had."""
        value = min(VALUE_MAX, max(0, round(seconds * 1e6)))
        self._counts[bucket_of(value)] += count
        self._sum_us += value * count
        self._max_us = max(self._max_us, value)
        self.count += count

    def average_ms(self) -> float:
        """Return the average, which is exact; 0 of nothing."""
        return self._sum_us / self.count / 1000 if self.count else 0.0

    def quantile_ms(self, quantile: float) -> float:
        """Return the highest value of the bucket where that share is reached; 0 of nothing."""
        if not self.count:
            return 0.0
        wanted = max(1, int(np.ceil(quantile * self.count)))
        bucket = int(np.searchsorted(np.cumsum(self._counts), wanted))
        return min(top_of(bucket), self._max_us) / 1000

    def document(self) -> Mapping[str, float]:
        """Return the average, the quantiles and the maximum, in milliseconds."""
        return {
            "average_ms": self.average_ms(),
            **{f"{name}_ms": self.quantile_ms(share) for name, share in QUANTILES.items()},
            "max_ms": self._max_us / 1000,
        }


def bucket_of(value: int) -> int:
    """Return the bucket of a number of microseconds."""
    if value < EXACT:
        return value
    shift = value.bit_length() - SUB_BITS - 1
    return (shift << SUB_BITS) + (value >> shift)


def top_of(bucket: int) -> int:
    """Return the highest number of microseconds of a bucket."""
    if bucket < EXACT:
        return bucket
    shift = (bucket >> SUB_BITS) - 1
    return (((bucket - (shift << SUB_BITS)) + 1) << shift) - 1
