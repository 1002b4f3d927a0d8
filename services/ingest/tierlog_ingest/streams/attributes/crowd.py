"""How much of all streams' attributes waits for a checkpoint, in one process.

Owns the sum, looked at each second, and from it who makes a checkpoint early, and who takes no
further attribute for now. Does not own flushes (``keeper``), nor what waits (``state``), of which
nothing is ever let go here.

    of ``limit`` wait           those with most, until the others together have no more than …
    more than half              … half of it, make a checkpoint
    more than three quarters    … what is left of it, take no new attribute, and make one, too;
                                else nobody does

Invariants:
    * What waits passes ``limit`` by what is sent within ``LOOK_S``, and by what is replayed: a
      rebuild counts, and neither waits nor makes a checkpoint on its way.
    * Whoever ``join``s and goes is forgotten.
"""

import asyncio
import weakref
from typing import Final, Protocol

from tierlog.model.ids import StreamName

LOOK_S: Final = 1.0


class Member(Protocol):
    """Somebody whose attributes wait for a checkpoint."""

    @property
    def name(self) -> StreamName:
        """Whose they are."""
        ...

    @property
    def unflushed(self) -> int:
        """How many wait."""
        ...

    def crowd(self, *, is_full: bool) -> None:
        """Take no further attributes until a flush, or take them again."""
        ...

    def flush_soon(self) -> None:
        """Flush what can be flushed, unless that is under way."""
        ...


class Crowd:
    """All streams of one process."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._members: weakref.WeakSet[Member] = weakref.WeakSet()
        self._was_crowded = False

    def __repr__(self) -> str:
        return f"<Crowd of {len(self._members)}, at most {self.limit}>"

    def join(self, one: Member) -> None:
        """Count somebody in."""
        self._members.add(one)

    def leave(self, one: Member) -> None:
        """Count somebody out."""
        self._members.discard(one)

    async def run(self) -> None:
        """Look each second, until it is cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        """Say to each what it is to do."""
        sizes = [(one.unflushed, one) for one in self._members]
        total, half = sum(size for size, _ in sizes), self.limit // 2
        if total <= half:
            if self._was_crowded:
                for _, one in sizes:
                    one.crowd(is_full=False)
            self._was_crowded = False
            return
        self._was_crowded = True
        sizes.sort(key=lambda found: (-found[0], found[1].name))
        others = total
        for size, one in sizes:
            is_full = total > 3 * self.limit // 4 and others >= self.limit - total
            # In this order: who is full by its flush is not full any more once that is done.
            one.crowd(is_full=is_full)
            # Also who is full for others: of these, one may never come to the end of its own.
            if size and (is_full or others > half):
                one.flush_soon()
            others -= size
