"""How many values that the indexes tell again all streams of a process keep in memory together.

Owns whose go: those of the stream that took any in longest ago. Does not own which of a stream's
values are kept (``state``): what waits for a flush, or is pinned, is never asked for here.

Invariants:
    * After ``note`` no more than ``limit`` are kept, unless more are pinned.
    * A state that is gone holds none: nobody has to say so.
"""

import weakref
from collections import OrderedDict
from typing import Protocol


class Keeps(Protocol):
    """Keeps values that can be fetched again."""

    def drop(self, count: int) -> int:
        """Drop up to so many of them, those used longest ago; return how many went."""
        ...


class Room:
    """The room of one process."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._counts: OrderedDict[weakref.ref[Keeps], int] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Room {self.used} of {self.limit} in {len(self._counts)} streams>"

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

    def _left(self, ref: "weakref.ref[Keeps]") -> None:
        self.used -= self._counts.pop(ref, 0)
