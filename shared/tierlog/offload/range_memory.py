"""What was fetched of objects and is still in memory: the port, and the plain one behind it.

Owns which bytes are kept and for how long. Does not own fetching (``ranges``). The reader has a
larger memory of its own, with a hard bound, behind the same port.

What is fetched is written where it will lie: into a ``Blank``, which is found by nobody before all
of it is there and was checked.

Invariants of every memory:
    * What is given out stays what it is, whatever is dropped or put in afterwards.
    * Having no room is no failure: what does not fit is not kept.
    * A blank is kept or given up, once; until then its room is taken.

Invariant of ``LastRanges``: at most ``bytes_max`` are kept, or what came last.
"""

from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class Extent:
    """Bytes of an object, from ``start`` on."""

    key: str
    start: int
    body: memoryview

    @property
    def end(self) -> int:
        """Right behind its last byte."""
        return self.start + len(self.body)


class Blank(Protocol):
    """Room for bytes of an object that are on their way."""

    @property
    def targets(self) -> Sequence[memoryview]:
        """What they are written into, back to back; not once it was kept or given up."""
        ...

    def part(self, start: int, end: int) -> memoryview:
        """Return bytes ``start`` to ``end`` of the object, all of which were written by now.

        They stay what they are. Few of them by themselves: who is slow holds no more than that.
        """
        ...

    def keep(self, *, ahead: bool) -> None:
        """Let the bytes be found. ``ahead``: nobody waited for them."""
        ...

    def give_up(self) -> None:
        """Give the room back."""
        ...


class RangeMemory(Protocol):
    """Bytes of immutable objects by key and offset. Nothing here waits."""

    def get(self, key: str, start: int, end: int) -> memoryview | None:
        """Return what is kept from ``start`` on, ``end`` at most; None: not even its first byte.

        There may be more behind what is returned: whoever wants it asks again.
        """
        ...

    def known(self, key: str, at: int) -> bool:
        """Say whether this byte is kept."""
        ...

    def known_end(self, key: str, at: int, end: int) -> int:
        """Return up to where all is kept from ``at`` on, ``end`` at most; ``at``: not that byte."""
        ...

    def unknown_end(self, key: str, at: int, end: int) -> int:
        """Return up to where nothing is kept from ``at`` on, ``end`` at most."""
        ...

    def blank(self, key: str, start: int, size: int, *, ahead: bool) -> Blank | None:
        """Return room for what is about to be fetched; None: there is none.

        ``ahead``: nobody waits for it yet.
        """
        ...

    def forget(self, key: str) -> None:
        """Drop all of an object."""
        ...


class LooseBlank:
    """A blank on Python's heap, of which ``keep`` tells whoever is to have it."""

    def __init__(
        self, start: int, size: int, kept: Callable[[memoryview], None] | None = None
    ) -> None:
        # Not set to zeros first: nobody has it before it is filled.
        body = np.empty(size, np.uint8).data
        self.targets = [body]
        self._start = start
        self._body = body.toreadonly()
        self._kept = kept

    def __repr__(self) -> str:
        return f"<LooseBlank of {len(self._body)} bytes>"

    def part(self, start: int, end: int) -> memoryview:
        part = self._body[start - self._start : end - self._start]
        return part if 2 * len(part) >= len(self._body) else memoryview(bytes(part))

    def keep(self, *, ahead: bool) -> None:
        if self._kept is not None:
            self._kept(self._body)

    def give_up(self) -> None:
        """Nobody has it."""


class LastRanges:
    """The extents that were used last, just as they came."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._by_key: dict[str, list[Extent]] = {}  # each in the order of their starts
        # The extent used longest ago first.
        self._order: OrderedDict[Extent, None] = OrderedDict()
        self.kept_bytes = 0

    def __repr__(self) -> str:
        return f"<LastRanges {len(self._order)} extents, {self.kept_bytes} bytes>"

    def extents(self) -> list[Extent]:
        """Return all that is kept, what was used longest ago first."""
        return list(self._order)

    def get(self, key: str, start: int, end: int) -> memoryview | None:
        extent = self._at(key, start)
        if extent is None:
            return None
        self._order.move_to_end(extent)
        return extent.body[start - extent.start : end - extent.start]

    def known(self, key: str, at: int) -> bool:
        return self._at(key, at) is not None

    def known_end(self, key: str, at: int, end: int) -> int:
        while at < end and (extent := self._at(key, at)) is not None:
            at = extent.end
        return min(at, end)

    def unknown_end(self, key: str, at: int, end: int) -> int:
        if self._at(key, at) is not None:
            return at
        extents = self._by_key.get(key, [])
        number = bisect_right(extents, at, key=attrgetter("start"))
        return min(end, extents[number].start) if number < len(extents) else end

    def blank(self, key: str, start: int, size: int, *, ahead: bool) -> Blank | None:
        return LooseBlank(start, size, lambda body: self._put(Extent(key, start, body)))

    def forget(self, key: str) -> None:
        for extent in list(self._by_key.get(key, ())):
            self._drop(extent)

    def _put(self, extent: Extent) -> None:
        insort(self._by_key.setdefault(extent.key, []), extent, key=attrgetter("start"))
        self._order[extent] = None
        self.kept_bytes += len(extent.body)
        while self.kept_bytes > self._bytes_max and len(self._order) > 1:
            self._drop(next(iter(self._order)))

    def _at(self, key: str, at: int) -> Extent | None:
        extents = self._by_key.get(key, [])
        number = bisect_right(extents, at, key=attrgetter("start")) - 1
        return extents[number] if number >= 0 and at < extents[number].end else None

    def _drop(self, extent: Extent) -> None:
        del self._order[extent]
        self.kept_bytes -= len(extent.body)
        extents = self._by_key[extent.key]
        extents.remove(extent)
        if not extents:
            del self._by_key[extent.key]
