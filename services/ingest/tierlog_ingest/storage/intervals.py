"""A set of integers as intervals: ids that were freed lie together, and stay for ever."""

from bisect import bisect_right
from collections.abc import Iterable


class IntervalSet:
    """Integers, kept as intervals that neither overlap nor touch."""

    def __init__(self, intervals: Iterable[tuple[int, int]] = ()) -> None:
        self._intervals = list(intervals)

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self._intervals, (number, 2**63)) - 1
        return at >= 0 and number <= self._intervals[at][1]

    def __repr__(self) -> str:
        return f"<IntervalSet of {len(self._intervals)} intervals>"

    def add(self, number: int) -> None:
        """Put a number in."""
        if number in self:
            return
        at = bisect_right(self._intervals, (number, number))
        first = last = number
        if at < len(self._intervals) and self._intervals[at][0] == number + 1:
            last = self._intervals.pop(at)[1]
        if at and self._intervals[at - 1][1] == number - 1:
            at -= 1
            first = self._intervals.pop(at)[0]
        self._intervals.insert(at, (first, last))

    def intervals(self) -> tuple[tuple[int, int], ...]:
        """Return all of it."""
        return tuple(self._intervals)
