"""What the reader knows of streams and ledgers, never older than a bound.

Owns a short-lived copy of the metadata: a stream's list of ledgers, a ledger's own metadata and
its offload context. Does not own the truth, which is in the metadata store.

Invariants:
    * Nothing older than ``age_s_max`` is answered.
    * Calls at once for one name cause one read of the metadata store.
    * At most ``entries_max`` names are kept of each kind.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from tierlog.catalog import Catalog
from tierlog.catalog.streams import StreamSnapshot
from tierlog.model.ids import LedgerId, StreamName
from tierlog.model.ledger import LedgerMetadata
from tierlog.model.offload import OffloadContext

Key = TypeVar("Key")
Value = TypeVar("Value")


class AgedCache(Generic[Key, Value]):
    """Values by key, each read again once it is too old."""

    def __init__(
        self,
        read: Callable[[Key], Awaitable[Value]],
        *,
        age_s_max: float,
        entries_max: int,
    ) -> None:
        self._read = read
        self._age_s_max = age_s_max
        self._entries_max = entries_max
        self._kept: OrderedDict[Key, tuple[float, Value]] = OrderedDict()
        self._reading: dict[Key, asyncio.Lock] = {}

    async def get(self, key: Key, *, fresh: bool = False) -> Value:
        """Return the value; ``fresh``: as of this call or later."""
        asked_s = asyncio.get_running_loop().time()
        oldest_s = asked_s if fresh else asked_s - self._age_s_max
        kept = self._kept.get(key)
        if kept is not None and kept[0] >= oldest_s:
            self._kept.move_to_end(key)
            return kept[1]
        lock = self._reading.setdefault(key, asyncio.Lock())
        try:
            async with lock:
                kept = self._kept.get(key)
                if kept is not None and kept[0] >= oldest_s:
                    return kept[1]
                begun_s = asyncio.get_running_loop().time()
                value = await self._read(key)
                self._keep(key, begun_s, value)
                return value
        finally:
            if not lock.locked():
                self._reading.pop(key, None)

    def _keep(self, key: Key, begun_s: float, value: Value) -> None:
        self._kept[key] = (begun_s, value)
        self._kept.move_to_end(key)
        while len(self._kept) > self._entries_max:
            self._kept.popitem(last=False)


class Views:
    """The reader's copies of the metadata."""

    def __init__(self, catalog: Catalog, *, age_s_max: float, entries_max: int) -> None:
        self._streams: AgedCache[StreamName, StreamSnapshot] = AgedCache(
            catalog.streams.snapshot, age_s_max=age_s_max, entries_max=entries_max
        )
        self._ledgers: AgedCache[LedgerId, LedgerMetadata | None] = AgedCache(
            catalog.ledgers.get, age_s_max=age_s_max, entries_max=entries_max
        )
        self._contexts: AgedCache[LedgerId, OffloadContext | None] = AgedCache(
            catalog.contexts.get, age_s_max=age_s_max, entries_max=entries_max
        )

    async def stream(self, name: StreamName, *, fresh: bool = False) -> StreamSnapshot:
        """Return the stream with its whole list, or raise STREAM_NOT_FOUND."""
        return await self._streams.get(name, fresh=fresh)

    async def ledger(self, ledger_id: LedgerId, *, fresh: bool = False) -> LedgerMetadata | None:
        """Return a ledger's metadata; None: it is gone from tier 1."""
        return await self._ledgers.get(ledger_id, fresh=fresh)

    async def context(self, ledger_id: LedgerId, *, fresh: bool = False) -> OffloadContext | None:
        """Return a ledger's offload context, or None."""
        return await self._contexts.get(ledger_id, fresh=fresh)
