"""Which bytes of a stream's ledger, or of an object, are in memory: offset to cache entry.

Owns a sorted map from where an entry begins to the entry, and the promise that views of it stay
what they are. Does not own the bytes (``cache.store``), nor when they go (``cache.manager``).

Invariants:
    * Entries never overlap, and what is present is never replaced: what comes twice fills gaps.
    * An entry can be evicted if and only if its end is at or below ``stored_end``: what tier 2
      does not have stays.
    * The newest entry grows by appending, nothing is read for it. It stays one entry up to
      ``entry_bytes_max``.
    * While a lease is out, no block that it shows is reused, whatever is evicted or dropped.
    * A full cache is a miss: nothing here raises because of it, or waits.

Consistency: one loop; index and cache change together, between two awaits.
"""

import sys
from collections import deque
from collections.abc import Iterator
from typing import Final, Self

from sortedcontainers import SortedDict

from tierlog.format.checksum import Buffer
from tierlog_reader.cache.layout import NO_ADDRESS
from tierlog_reader.cache.manager import Asks, CacheManager, Entry, Line
from tierlog_reader.cache.store import StreamingCache

ENTRY_BYTES_MAX: Final = 1024 * 1024
# What an entry takes of Python's heap beside its blocks: the object, its place in the sorted map
# and in a line; 273 were measured at 20,000. Counted where many are kept.
ENTRY_OBJECT_BYTES: Final = 300
# The same for an index that has none; 2,830 were measured.
INDEX_OBJECT_BYTES: Final = 3000
ALL_STORED: Final = sys.maxsize


class Lease:
    """Read-only views of cached bytes, good until it is released."""

    __slots__ = ("_entries", "_manager", "views")

    def __init__(
        self, manager: CacheManager, entries: list[Entry], views: list[memoryview]
    ) -> None:
        self._manager = manager
        self._entries = entries
        self.views = views

    def __repr__(self) -> str:
        return f"<Lease of {len(self)} bytes in {len(self.views)} pieces>"

    def __len__(self) -> int:
        return sum(map(len, self.views))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Give the views up; a second time does nothing.

        Views that were made of them are the caller's to give up first: nobody sees them here.
        """
        for view in self.views:
            view.release()
        self.views = []
        entries, self._entries = self._entries, []
        for entry in entries:
            self._manager.unpin(entry)


class ReadIndex:
    """The cached bytes of one thing that offsets count."""

    def __init__(
        self,
        store: StreamingCache,
        manager: CacheManager,
        *,
        stored_end: int = ALL_STORED,
        entry_bytes_max: int = ENTRY_BYTES_MAX,
    ) -> None:
        self._store = store
        self._manager = manager
        self._entry_bytes_max = entry_bytes_max
        self._entries: SortedDict = SortedDict()
        self._unstored: deque[Entry] = deque()
        self.stored_end = stored_end

    def __repr__(self) -> str:
        return f"<ReadIndex {len(self._entries)} entries, stored to {self.stored_end}>"

    def __len__(self) -> int:
        return len(self._entries)

    def entries(self) -> list[tuple[int, int]]:
        """Return start and end of each entry, in order."""
        return [(entry.start, entry.end) for entry in self._entries.values()]

    # Bytes come

    def append(self, offset: int, data: Buffer) -> bool:
        """Take the newest bytes of a stream, which tier 1 has already; say whether they fitted."""
        last: Entry | None = self._entries.peekitem()[1] if self._entries else None
        assert last is None or offset >= last.end, "the newest bytes are behind all others"
        size = len(data)
        if not size:
            return True
        if last is None or last.end != offset or last.length + size > self._entry_bytes_max:
            return self._put(offset, data, Asks.TAIL)
        if not self._manager.promise(size, Asks.TAIL):
            return False
        self._manager.settle(size)
        if last.forgotten:  # it went to make room for its own growth
            return self._put(offset, data, Asks.TAIL)
        address = self._store.append(last.address, data)
        if address == NO_ADDRESS:
            return False
        last.address = address
        last.length += size
        self._manager.grew(last, size)
        if last.line is not Line.UNSTORED and last.end > self.stored_end:
            self._manager.move(last, Line.UNSTORED)
            self._unstored.append(last)
        return True

    def fill(self, offset: int, data: Buffer, who: Asks) -> int:
        """Take bytes from where they are stored, as far as they are missing; return how many."""
        assert offset + len(data) <= self.stored_end, "tier 2 is not known to have these bytes"
        taken = 0
        with memoryview(data) as source:
            for start, end in self.missing(offset, offset + len(source)):
                for at in range(start, end, self._entry_bytes_max):
                    upto = min(end, at + self._entry_bytes_max)
                    if self._put(at, source[at - offset : upto - offset], who):
                        taken += upto - at
        return taken

    def adopt(self, start: int, address: int, length: int, who: Asks) -> None:
        """Take an entry whose bytes were written in the cache already; only what is missing."""
        if self.missing(start, start + length) == [(start, start + length)]:
            self._enter(start, length, address, who)
            return
        for view in self._store.get(address):
            self.fill(start, view, who)
            start += len(view)
        self._store.delete(address)

    def missing(self, start: int, end: int) -> list[tuple[int, int]]:
        """Return the gaps of a range, in order."""
        gaps = []
        at = start
        for entry in self._from(start):
            if entry.start >= end:
                break
            if entry.start > at:
                gaps.append((at, entry.start))
            at = max(at, entry.end)
        if at < end:
            gaps.append((at, end))
        return gaps

    def _put(self, start: int, data: Buffer, who: Asks) -> bool:
        size = len(data)
        if not size or not self._manager.promise(size, who):
            return False
        self._manager.settle(size)
        address = self._store.insert(data)
        if address == NO_ADDRESS:
            return False
        self._enter(start, size, address, who)
        return True

    def _enter(self, start: int, size: int, address: int, who: Asks) -> None:
        line = Line.AHEAD if who is Asks.AHEAD else Line.READ
        entry = Entry(self, start, size, address, line, self._manager.generation)
        if entry.end > self.stored_end:
            entry.line = Line.UNSTORED
            self._unstored.append(entry)
        self._entries[start] = entry
        self._manager.add(entry)

    # Bytes are read

    def read(self, offset: int, length_max: int) -> Lease | None:
        """Lend what is in memory from ``offset`` on without a gap; None: not one byte is."""
        entries: list[Entry] = []
        views: list[memoryview] = []
        at, end = offset, offset + length_max
        for entry in self._from(offset):
            if entry.start > at or at >= end:
                break
            skip, lent_from = at - entry.start, at
            pieces = self._store.get(entry.address)
            self._manager.note_read(len(pieces))
            for view in pieces:
                if skip >= len(view):
                    skip -= len(view)
                elif at < end:
                    piece = view[skip : skip + end - at]
                    at, skip = at + len(piece), 0
                    views.append(piece)
            self._manager.pin(entry, at - lent_from)
            entries.append(entry)
        return Lease(self._manager, entries, views) if views else None

    def copy(self, start: int, end: int) -> bytes | None:
        """Return bytes of their own, for those who need few of them; None: not all are here."""
        lease = self.read(start, end - start)
        if lease is None:
            return None
        with lease:
            return b"".join(lease.views) if len(lease) == end - start else None

    def holds(self, offset: int) -> bool:
        """Say whether this byte is in memory."""
        entry = next(self._from(offset), None)
        return entry is not None and entry.start <= offset

    def held_end(self, offset: int, end: int) -> int:
        """Return up to where all bytes from this one on are in memory, ``end`` at most."""
        for entry in self._from(offset):
            if entry.start > offset or offset >= end:
                break
            offset = entry.end
        return min(offset, end)

    def missing_end(self, offset: int, end: int) -> int:
        """Return up to where no byte from this one on is in memory, ``end`` at most."""
        entry = next(self._from(offset), None)
        return end if entry is None else min(end, max(offset, entry.start))

    def _from(self, offset: int) -> Iterator[Entry]:
        """Yield entries in order, from the one that holds ``offset`` or is the next behind it."""
        at = self._entries.bisect_right(offset) - 1
        item = self._entries.peekitem
        if at < 0 or item(at)[1].end <= offset:
            at += 1
        while at < len(self._entries):
            yield item(at)[1]
            at += 1

    # Bytes go

    def stored(self, upto: int) -> None:
        """Note that tier 2 has all before ``upto``."""
        self.stored_end = max(self.stored_end, upto)
        while self._unstored and self._unstored[0].end <= self.stored_end:
            entry = self._unstored.popleft()
            if not entry.forgotten:
                self._manager.move(entry, Line.READ)

    def truncate(self, before: int) -> None:
        """Drop entries that end at or before this offset: nobody may read them any more."""
        for entry in list(self._entries.values()):
            if entry.end > before:
                return
            self._drop(entry)

    def clear(self) -> None:
        """Drop everything: what it indexed is gone, or turned out to be damaged."""
        for entry in list(self._entries.values()):
            self._drop(entry)
        self._unstored.clear()

    def _drop(self, entry: Entry) -> None:
        self._manager.remove(entry)
        self.evict(entry)

    def evict(self, entry: Entry) -> None:
        """Forget an entry; its bytes go at once, or with the last lease of it."""
        del self._entries[entry.start]
        entry.forgotten = True
        if entry.pins == 0:
            self._store.delete(entry.address)
