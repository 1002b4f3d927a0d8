"""The reader's memory of ranges: a read index for each object, over one streaming cache.

Owns which objects have an index, and the cache's ticks. Does not own the bytes (``cache.store``),
when they go (``cache.manager``), nor fetching (``tierlog.offload.ranges``).

Invariants:
    * Pool, its metadata and room that is promised to fetches stay within the cache's limit; what
      entries and indexes take of Python's heap counts as used.
    * At most ``objects_max`` objects have an index; few of these hold nothing, for long none.
    * Bytes are copied out, so that nothing is pinned between two awaits: what was given out stays
      what it is, and whatever is in tier 2 can always be evicted.
    * A cache that is full refuses what is fetched ahead first, and never fails a read.

Cancellation: nothing here waits, but for the ticks, which end with ``run``.
"""

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator
from typing import Final

from tierlog.offload.range_memory import Extent
from tierlog_reader.cache.manager import Asks, CacheManager, Thresholds
from tierlog_reader.cache.store import StreamingCache
from tierlog_reader.read_index import ENTRY_OBJECT_BYTES, INDEX_OBJECT_BYTES, ReadIndex

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

    def promise(self, size: int, *, ahead: bool) -> bool:
        return self.manager.promise(size, _asks(ahead=ahead))

    def settle(self, size: int) -> None:
        self.manager.settle(size)

    def put(self, extent: Extent, *, ahead: bool) -> None:
        index = self._indexes.get(extent.key)
        if index is None:
            if len(self._indexes) >= self.store.entries + EMPTY_MAX:
                self._forget_empty()
            index = self._indexes[extent.key] = ReadIndex(self.store, self.manager)
            self.manager.owners_bytes += INDEX_OBJECT_BYTES
        self._indexes.move_to_end(extent.key)
        index.fill(extent.start, extent.body, _asks(ahead=ahead))
        if len(index) == 0:
            self.forget(extent.key)
        elif len(self._indexes) > self._objects_max:
            self.forget(next(iter(self._indexes)))

    def forget(self, key: str) -> None:
        index = self._indexes.pop(key, None)
        if index is not None:
            index.clear()
            self.manager.owners_bytes -= INDEX_OBJECT_BYTES

    def _forget_empty(self) -> None:
        for key in [key for key, index in self._indexes.items() if len(index) == 0]:
            self.forget(key)


def _asks(*, ahead: bool) -> Asks:
    return Asks.AHEAD if ahead else Asks.WANTED
