"""What was fetched of objects and is still in memory: the port, and the plain one behind it.

Owns which bytes are kept and for how long. Does not own fetching (``ranges``). The reader has a
larger memory of its own, with a hard bound, behind the same port.

Invariants of every memory:
    * What is given out stays what it is, whatever is dropped or put in afterwards.
    * Having no room is no failure: what does not fit is not kept.

Invariant of ``LastRanges``: at most ``bytes_max`` are kept, or what came last.
"""

from bisect import bisect_right, insort
from collections import OrderedDict
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol


@dataclass(frozen=True, slots=True, eq=False)
class Extent:
    """Bytes of an object, from ``start`` on."""

    key: str
    start: int
    body: bytes

    @property
    def end(self) -> int:
        """Right behind its last byte."""
        return self.start + len(self.body)


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

    def promise(self, size: int, *, ahead: bool) -> bool:
        """Keep room for what is about to be fetched, until it is settled; or say there is none.

        ``ahead``: nobody waits for it yet.
        """
        ...

    def settle(self, size: int) -> None:
        """End a promise, right before the bytes are put in or when they won't be."""
        ...

    def put(self, extent: Extent, *, ahead: bool) -> None:
        """Keep these bytes, as far as there is room."""
        ...

    def forget(self, key: str) -> None:
        """Drop all of an object."""
        ...


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
        return memoryview(extent.body)[start - extent.start : end - extent.start]

    def known(self, key: str, at: int) -> bool:
        return self._at(key, at) is not None

    def promise(self, size: int, *, ahead: bool) -> bool:
        return True

    def settle(self, size: int) -> None:
        """Nothing was kept free."""

    def put(self, extent: Extent, *, ahead: bool) -> None:
        insort(self._by_key.setdefault(extent.key, []), extent, key=attrgetter("start"))
        self._order[extent] = None
        self.kept_bytes += len(extent.body)
        while self.kept_bytes > self._bytes_max and len(self._order) > 1:
            self._drop(next(iter(self._order)))

    def forget(self, key: str) -> None:
        for extent in list(self._by_key.get(key, ())):
            self._drop(extent)

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
