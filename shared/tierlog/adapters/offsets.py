"""Which events of a partition are done, and how far a consumer may commit; pure.

Used by the Kafka source and by its memory twin.

Invariants:
    * ``commit_offset`` is the lowest offset that was delivered and is not done, or, when all
      are done, one above the highest delivered: whoever resumes there misses nothing.
    * ``commit_offset`` never goes back.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """How long to wait before the next try: doubled each time, up to a bound."""

    first_s: float
    max_s: float

    def __post_init__(self) -> None:
        assert 0 < self.first_s <= self.max_s, "a wait is positive and within its bound"

    def after(self, attempt: int) -> float:
        """Return the wait after try number ``attempt`` (from 1) failed."""
        assert attempt >= 1, "tries are counted from 1"
        return float(min(self.max_s, self.first_s * 2 ** min(attempt - 1, 62)))


class PartitionProgress:
    """The delivered and the done offsets of one partition, as one member sees them."""

    def __init__(self) -> None:
        self._open: dict[int, None] = {}  # in the order of delivery, which is that of offsets
        self._end: int | None = None

    def __repr__(self) -> str:
        return f"PartitionProgress(open={len(self._open)}, end={self._end})"

    @property
    def end(self) -> int | None:
        """One above the highest offset delivered; None when none was."""
        return self._end

    def deliver(self, offset: int) -> None:
        """Note that ``offset`` was handed out. Offsets rise, and may have gaps."""
        assert self._end is None or offset >= self._end, "offsets rise"
        self._open[offset] = None
        self._end = offset + 1

    def done(self, offset: int) -> None:
        """Note that ``offset`` is done. Repeating it is legal."""
        assert self._end is not None, "nothing was delivered yet"
        assert offset < self._end, "only what was delivered can be done"
        self._open.pop(offset, None)

    @property
    def commit_offset(self) -> int | None:
        """The offset to commit; None when nothing was delivered."""
        return next(iter(self._open), self._end)

    @property
    def window(self) -> int:
        """How many offsets lie between the commit offset and the end of what was delivered."""
        commit_offset = self.commit_offset
        return 0 if commit_offset is None or self._end is None else self._end - commit_offset
