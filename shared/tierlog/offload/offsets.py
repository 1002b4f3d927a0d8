"""Offsets of some entries, remembered to enhance the index (seeds/000, "Reading from S3").

One cache for all handles of a process, bounded in bytes, so that many readers of many ledgers
don't grow it. Holds only what can be found again by reading.

Invariants:
    * ``floor`` gives the nearest remembered entry at or before the one asked for.
    * ``size_bytes <= bytes_max`` after every call. The object used longest ago goes first; an
      object alone is thinned out.
"""

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from tierlog.model.ids import EntryId

# Two integers, their places in two lists, and the lists' slack.
NOTE_BYTES: Final = 96
OBJECT_BYTES: Final = 512
BYTES_MAX: Final = 4 * 1024 * 1024


class Note(NamedTuple):
    """Where in its data object an entry's frame begins."""

    entry_id: EntryId
    offset: int


@dataclass(slots=True)
class _Notes:
    entry_ids: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)

    @property
    def size_bytes(self) -> int:
        return OBJECT_BYTES + NOTE_BYTES * len(self.entry_ids)


class OffsetsCache:
    """Remembered offsets by object key."""

    def __init__(self, *, bytes_max: int = BYTES_MAX) -> None:
        assert bytes_max >= OBJECT_BYTES + 4 * NOTE_BYTES
        self._bytes_max = bytes_max
        self._by_key: OrderedDict[str, _Notes] = OrderedDict()
        self.size_bytes = 0

    def __repr__(self) -> str:
        return f"<OffsetsCache {len(self._by_key)} objects, {self.size_bytes} bytes>"

    def note(self, key: str, entry_id: int, offset: int) -> None:
        """Remember one offset."""
        notes = self._by_key.get(key)
        if notes is None:
            notes = self._by_key[key] = _Notes()
            self.size_bytes += OBJECT_BYTES
        self._by_key.move_to_end(key)
        at = bisect_left(notes.entry_ids, entry_id)
        if at < len(notes.entry_ids) and notes.entry_ids[at] == entry_id:
            notes.offsets[at] = offset
            return
        notes.entry_ids.insert(at, entry_id)
        notes.offsets.insert(at, offset)
        self.size_bytes += NOTE_BYTES
        self._shrink()

    def floor(self, key: str, entry_id: int) -> Note | None:
        """Return the nearest remembered entry that is not behind ``entry_id``."""
        notes = self._by_key.get(key)
        if notes is None:
            return None
        self._by_key.move_to_end(key)
        at = bisect_right(notes.entry_ids, entry_id) - 1
        if at < 0:
            return None
        return Note(EntryId(notes.entry_ids[at]), notes.offsets[at])

    def forget(self, key: str) -> None:
        """Drop what is known of an object."""
        notes = self._by_key.pop(key, None)
        if notes is not None:
            self.size_bytes -= notes.size_bytes

    def _shrink(self) -> None:
        while self.size_bytes > self._bytes_max:
            if len(self._by_key) > 1:
                self.forget(next(iter(self._by_key)))
                continue
            (notes,) = self._by_key.values()
            before = notes.size_bytes
            del notes.entry_ids[1::2]
            del notes.offsets[1::2]
            self.size_bytes += notes.size_bytes - before
