"""How many values of attributes all streams of a process keep in memory together.

Owns whose go of those that the indexes tell again: those of the stream that took any in longest
ago; how many more may wait for a flush; and who flushes early when these become many. Does not own
which of a stream's values are kept, nor who may change any (``state``), nor flushes (``keeper``).

Invariants:
    * After ``note`` no more than ``limit`` are kept that can be fetched again, unless more are
      pinned.
    * Who holds no more than is ``left`` of ``unflushed_max`` leaves room to others, and the sum
      stays below it. What is replayed may take all that is left.
    * A state that is gone holds none: nobody has to say so.
"""

import weakref
from collections import OrderedDict
from typing import Final, Protocol

from tierlog.model.errors import Reason, RetryableError

EARLY_SHARE: Final = 2
"""From this part of ``unflushed_max`` on, more is flushed before its time."""
AT_ONCE_SHARE: Final = 8
"""Each time that this part of it came since: as much as that."""


class Keeps(Protocol):
    """Keeps values, some of which can be fetched again."""

    def drop(self, count: int) -> int:
        """Drop up to so many of those, the ones used longest ago; return how many went."""
        ...

    def flush_soon(self) -> bool:
        """Begin to flush the others. False: that is under way, or can't be."""
        ...


class NoRoomError(RetryableError):
    """There is no room to replay more, and none is to be had just now."""


class Room:
    """The room of one process."""

    def __init__(self, limit: int, *, unflushed_max: int) -> None:
        self.limit = limit
        self.used = 0
        self.unflushed_max = unflushed_max
        self.unflushed = 0
        self._counts: OrderedDict[weakref.ref[Keeps], int] = OrderedDict()
        self._unflushed: dict[weakref.ref[Keeps], int] = {}
        self._at_last = 0
        """How many waited when flushes were begun last; less, if they became less since."""

    def __repr__(self) -> str:
        return (
            f"<Room {self.used} of {self.limit} in {len(self._counts)} streams, "
            f"{self.unflushed} of {self.unflushed_max} unflushed in {len(self._unflushed)}>"
        )

    @property
    def left(self) -> int:
        """How many more may wait for a flush."""
        return max(0, self.unflushed_max - self.unflushed)

    def exhausted(self, why: str = "") -> NoRoomError:
        """Say that nothing is left, and why what waits is not flushed."""
        return NoRoomError(
            f"no room for more attributes: {self.unflushed} of the streams of this node wait to "
            "be written to tier 2" + (f": {why}" if why else ""),
            reason=Reason.RESOURCE_EXHAUSTED,
            remedy="It goes on once they are written; see whether tier 2 is within reach, or raise "
            "ingest.owner.attributes.unflushed_all_max",
        )

    def note(self, one: Keeps, count: int) -> None:
        """Take note of how many somebody keeps now, who was the last to change it."""
        ref = weakref.ref(one, self._left)
        self.used += count - self._counts.pop(ref, 0)
        if count:
            self._counts[ref] = count
        for other in list(self._counts) if self.used > self.limit else ():
            keeps = other()
            if keeps is not None:
                dropped = keeps.drop(self.used - self.limit)
                self._counts[other] -= dropped
                self.used -= dropped
            if self.used <= self.limit:
                return

    def note_unflushed(self, one: Keeps, count: int) -> None:
        """Take note of how many of somebody's wait for a flush now."""
        ref = weakref.ref(one, self._left)
        self.unflushed += count - self._unflushed.pop(ref, 0)
        if count:
            self._unflushed[ref] = count
        self._at_last = min(self._at_last, self.unflushed)
        came = self.unflushed - self._at_last
        if (
            self.unflushed * EARLY_SHARE >= self.unflushed_max
            and came * AT_ONCE_SHARE >= self.unflushed_max
        ):
            self._at_last = self.unflushed
            self._flush(came)

    def _flush(self, count: int) -> None:
        """Have about so many flushed, by those who hold most."""
        counts = self._unflushed
        for ref in sorted(counts, key=counts.__getitem__, reverse=True):
            keeps = ref()
            if keeps is not None and keeps.flush_soon():
                count -= counts[ref]
            if count <= 0:
                return

    def _left(self, ref: "weakref.ref[Keeps]") -> None:
        self.used -= self._counts.pop(ref, 0)
        self.unflushed -= self._unflushed.pop(ref, 0)
