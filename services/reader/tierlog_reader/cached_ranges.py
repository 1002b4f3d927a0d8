"""The reader's memory of ranges: a read index for each object, over one streaming cache.

Owns which objects have an index, and the cache's ticks. Does not own the bytes (``cache.store``),
when they go (``cache.manager``), nor fetching (``tierlog.offload.ranges``).

Invariants:
    * What is fetched is written into the pool, and is found once all of it was. Pool and metadata
      stay within the cache's limit; what entries and indexes take of Python's heap counts as used.
    * At most ``objects_max`` objects have an index; few of these hold nothing, for long none.
    * Bytes are copied out, so that nothing is pinned between two awaits: what was given out stays
      what it is, and whatever is in tier 2 can always be evicted.
    * A cache that is full refuses what is fetched ahead first, and never fails a read.

Cancellation: nothing here waits, but for the ticks, which end with ``run``.
"""

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from typing import Final

from tierlog.offload.range_memory import Blank
from tierlog.ports.filling import cut
from tierlog_reader.cache.layout import NO_ADDRESS
from tierlog_reader.cache.manager import Asks, CacheManager, Thresholds
from tierlog_reader.cache.store import StreamingCache
from tierlog_reader.read_index import (
    ENTRY_BYTES_MAX,
    ENTRY_OBJECT_BYTES,
    INDEX_OBJECT_BYTES,
    ReadIndex,
)

TICK_S: Final = 1.0
# Pages that are given back sooner are touched again at once, by a cache at work: that costs more
# than what is then copied into them.
GIVE_BACK_TICKS: Final = 60
EMPTY_MAX: Final = 16


class CachedRanges:
    """``RangeMemory`` in a streaming cache."""

    def __init__(
        self, store: StreamingCache, *, objects_max: int, thresholds: Thresholds | None = None
    ) -> None:
        assert objects_max > 0
        self.store = store
        self.manager = CacheManager(store, thresholds, entry_bytes=ENTRY_OBJECT_BYTES)
        self._objects_max = objects_max
        # The object used longest ago first.
        self._indexes: OrderedDict[str, ReadIndex] = OrderedDict()
        self.blanks: set[_CachedBlank] = set()
        """What is on its way into the pool."""

    def __repr__(self) -> str:
        return f"<CachedRanges of {len(self._indexes)} objects in {self.store}>"

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Tick for as long as the context lasts; the memory is given back at its end."""
        try:
            async with asyncio.TaskGroup() as group:
                ticking = group.create_task(self._tick_on())
                try:
                    yield
                finally:
                    ticking.cancel()
        finally:
            self.store.close()

    async def _tick_on(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.tick()

    def tick(self) -> None:
        """Begin a generation; indexes that hold nothing any more go, and now and then pages."""
        self.manager.tick()
        if self.manager.generation % GIVE_BACK_TICKS == 0:
            self.store.give_back()
        self._forget_empty()

    def get(self, key: str, start: int, end: int) -> memoryview | None:
        index = self._indexes.get(key)
        lease = None if index is None else index.read(start, end - start)
        if lease is None:
            return None
        self._indexes.move_to_end(key)
        with lease:
            return memoryview(b"".join(lease.views))

    def known(self, key: str, at: int) -> bool:
        index = self._indexes.get(key)
        return index is not None and index.holds(at)

    def known_end(self, key: str, at: int, end: int) -> int:
        index = self._indexes.get(key)
        return at if index is None else index.held_end(at, end)

    def unknown_end(self, key: str, at: int, end: int) -> int:
        index = self._indexes.get(key)
        return end if index is None else index.missing_end(at, end)

    def blank(self, key: str, start: int, size: int, *, ahead: bool) -> Blank | None:
        who, addresses = _asks(ahead=ahead), list[int]()
        if not self._have_index(key, who):
            return None
        for at in range(0, size, ENTRY_BYTES_MAX):
            address = self._reserve(min(size - at, ENTRY_BYTES_MAX), who)
            if address == NO_ADDRESS:
                self._free(addresses)
                if not self._is_used(key):
                    self.forget(key)
                return None
            addresses.append(address)
        blank = _CachedBlank(self, key, start, addresses)
        self.blanks.add(blank)
        return blank

    def _have_index(self, key: str, who: Asks) -> bool:
        """Have an index of an object, which counts from here on, if there is room for one."""
        if key not in self._indexes:
            if len(self._indexes) >= self.store.entries + EMPTY_MAX:
                self._forget_empty()
            if not self.manager.take(INDEX_OBJECT_BYTES, who):
                return False
            self._indexes[key] = ReadIndex(self.store, self.manager)
            if len(self._indexes) > self._objects_max:
                self.forget(next(iter(self._indexes)))
        self._indexes.move_to_end(key)
        return True

    def _is_used(self, key: str) -> bool:
        return len(self._indexes[key]) > 0 or any(blank.key == key for blank in self.blanks)

    def _reserve(self, size: int, who: Asks) -> int:
        if not self.manager.promise(size, who):
            return NO_ADDRESS
        self.manager.settle(size)
        return self.store.reserve(size)

    def _free(self, addresses: Sequence[int]) -> None:
        for address in addresses:
            self.store.delete(address)

    def keep(self, blank: "_CachedBlank", *, ahead: bool) -> None:
        """Let the bytes of a blank be found, unless its object was forgotten meanwhile."""
        self.blanks.remove(blank)
        index, start = self._indexes.get(blank.key), blank.start
        if index is None:
            self._free(blank.addresses)
            return
        for address in blank.addresses:
            length = self.store.length(address)
            index.adopt(start, address, length, _asks(ahead=ahead))
            start += length

    def give_up(self, blank: "_CachedBlank") -> None:
        """Free the blocks of a blank."""
        self.blanks.remove(blank)
        self._free(blank.addresses)

    def forget(self, key: str) -> None:
        index = self._indexes.pop(key, None)
        if index is not None:
            index.clear()
            self.manager.give_back(INDEX_OBJECT_BYTES)

    def _forget_empty(self) -> None:
        for key in [key for key in self._indexes if not self._is_used(key)]:
            self.forget(key)


def _asks(*, ahead: bool) -> Asks:
    return Asks.AHEAD if ahead else Asks.WANTED


class _CachedBlank:
    """Blocks of the cache that are in no index yet, so that nothing but this shows them."""

    def __init__(self, memory: CachedRanges, key: str, start: int, addresses: list[int]) -> None:
        self._memory = memory
        self.key = key
        self.start = start
        self.addresses = addresses

    def __repr__(self) -> str:
        return f"<_CachedBlank at byte {self.start} of {self.key}>"

    @property
    def targets(self) -> Sequence[memoryview]:
        store = self._memory.store
        return [view for address in self.addresses for view in store.writable(address)]

    def part(self, start: int, end: int) -> memoryview:
        pieces = cut(self.targets, start - self.start, end - self.start)
        return memoryview(b"".join(pieces))

    def keep(self, *, ahead: bool) -> None:
        self._memory.keep(self, ahead=ahead)

    def give_up(self) -> None:
        self._memory.give_up(self)
