"""A page of entries: several reads of a stream put together, within one budget.

Invariants:
    * Entries follow each other without a gap, over the borders of ledgers; ``resume`` is right
      behind the last one; of an empty page that came to ``until``, it is not before that.
    * At least one entry is returned where there is one before ``until``, and what comes with it
      passes neither ``entries_max`` nor ``bytes_max``.
    * Only an empty page waits at the tail, and only an empty one is an error: what lies before a
      place that can't be read, or an entry that can't be decoded, is returned.
"""

from collections import deque
from dataclasses import dataclass, replace
from typing import Final

from tierlog.format.frame import FRAME_HEADER_LEN
from tierlog.model.errors import CorruptError, RefusedError, TierlogError
from tierlog.model.ids import EntryId, StreamName
from tierlog.model.position import Edge, Position
from tierlog.offload.tier2_reader import EntryTooLongError
from tierlog_reader.chunk import NO_ROOM, Budget
from tierlog_reader.documents import (
    FoundEntry,
    Unpacking,
    entries_of,
    escapes_len,
    events_of,
    properties_len,
)
from tierlog_reader.source import StreamSource

# What an entry or an event counts as beside its bytes: of each its objects on Python's heap, and
# what is written of it around its payload, in a room that has several times what is counted.
OBJECT_BYTES: Final = 128
# An entry is much of a page from this part of it on.
LONG: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Entries, and where to go on."""

    entries: list[FoundEntry]
    resume: Position | Edge
    raw: bool
    at_end: bool
    """Nothing more is there for now, or before ``until``."""

    @property
    def frames_len(self) -> int:
        """Bytes of the entries' frames."""
        return sum(FRAME_HEADER_LEN + len(one.data) for one in self.entries)

    @property
    def unpacked_len(self) -> int:
        """Bytes of the entries' frames, the events decompressed."""
        return sum(FRAME_HEADER_LEN + one.unpacked_size[0] for one in self.entries)

    @property
    def objects_len(self) -> int:
        """What entries and events count as beside their bytes."""
        return sum(_objects_len(one.unpacked_size[1]) for one in self.entries)

    def properties_len(self, unpacking: Unpacking) -> int:
        """Return what its widest event's properties count as: events are made one at a time.

        Those that are compressed are decompressed for it, each entry by itself.
        """
        return max((properties_len(one, unpacking) for one in self.entries), default=0)

    def text_len(self, unpacked_len: int, unpacking: Unpacking) -> int:
        """Return what its entries and their JSON take at once, where an event is much of them.

        Of one that is all there is: its payload and that as a text, and its line three times, while
        that gets into the body, or out. Of many small ones there is no more than the body.
        """
        longest = max((len(one.data) for one in self.entries), default=0)
        if unpacked_len <= self.frames_len and LONG * longest < self.frames_len:
            return 0
        return 4 * unpacked_len + 3 * escapes_len(self.entries, unpacking)

    def cut(self, bytes_max: int) -> "Page":
        """Return its first entries, so many that they count as ``bytes_max``, but at least one."""
        total = 0
        for number, entry in enumerate(self.entries):
            unpacked_len, events = entry.unpacked_size
            total += FRAME_HEADER_LEN + unpacked_len + _objects_len(events)
            if number and total > bytes_max:
                kept = self.entries[:number]
                return replace(self, entries=kept, resume=entry.position, at_end=False)
        return self

    def before_bad(self, unpacking: Unpacking) -> "Page":
        """Return its entries before the first one that can't be decoded; all, if that is it."""
        for number, entry in enumerate(self.entries):
            try:
                deque(events_of(entry, unpacking), maxlen=0)
            except (CorruptError, RefusedError):
                if not number:
                    break
                kept = self.entries[:number]
                return replace(self, entries=kept, resume=entry.position, at_end=False)
        return self


def _objects_len(events: int) -> int:
    return OBJECT_BYTES * (1 + events)


async def read_page(
    source: StreamSource,
    stream: StreamName,
    where: Position | Edge,
    budget: Budget,
    *,
    until: Position | None = None,
) -> Page:
    """Return what follows ``where`` and lies before ``until``."""
    entries: list[FoundEntry] = []
    left, raw = budget, False
    while not _reached(where, until):
        try:
            answer = await source.read(stream, where, left)
            raw = answer.raw
            chunk = answer.chunk
            if chunk is None:
                return Page(entries=entries, resume=answer.resume, raw=raw, at_end=True)
            if entries and chunk.frames_len > left.bytes_max:
                break
            found = entries_of(chunk, raw=raw)
        except (TierlogError, EntryTooLongError):
            # What came is good. The next page begins here, and tells it.
            if not entries:
                raise
            break
        for entry in found:
            if _reached(entry.position, until):
                # ``where`` may name the same place by the end of the ledger before.
                resume = where if entries else entry.position
                return Page(entries=entries, resume=resume, raw=raw, at_end=True)
            entries.append(entry)
            where = Position(chunk.ledger_id, EntryId(entry.position.entry_id + 1))
        entries_left = left.entries_max - chunk.count
        bytes_left = left.bytes_max - chunk.frames_len
        if entries_left <= 0 or bytes_left <= 0:
            break
        # The room is this page's until it was sent: no later read may leave it.
        left = replace(
            left,
            entries_max=entries_left,
            bytes_max=bytes_left,
            wait_s=0.0,
            room=NO_ROOM,
            alone_max=bytes_left,
        )
    return Page(entries=entries, resume=where, raw=raw, at_end=_reached(where, until))


def _reached(where: Position | Edge, until: Position | None) -> bool:
    return until is not None and isinstance(where, Position) and where >= until
