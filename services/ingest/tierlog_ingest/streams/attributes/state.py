"""The attributes of one stream as its owner knows them: those sent over those confirmed. Pure.

Owns which values are known, in memory, and which of them are flushed. Does not own what a change
is (``tierlog.format.attribute_changes``), nor reading or writing the index (``keeper``).

Invariants:
    * ``value`` is what an attribute is once all that was sent is confirmed; ``confirmed`` is what
      it is at ``through``.
    * A key that is in no map is unknown, unless the base checkpoint's index is empty: then it is
      not there. The index is never asked here.
    * Whatever is not flushed is in memory; only what the base checkpoint's index tells again is
      dropped for room, and that never while its key is pinned.
    * What was fetched enters where nothing is known, and nowhere else.
    * ``through`` is the end of a piece, and every entry up to it is counted in, or given up.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Final, NamedTuple

from tierlog.format.attribute_changes import Change
from tierlog.model.attributes import CREATION_TIME, EVENT_COUNT, AttributeKey, Checkpoint, is_core
from tierlog.model.position import Position
from tierlog_ingest.streams.attributes.room import Room

_MISSING: Final = object()


class Sent:
    """A piece that was sent: what it changes, and where it ends."""

    __slots__ = ("end", "events", "size", "values")

    def __init__(self) -> None:
        self.values: dict[AttributeKey, int] = {}
        self.events = 0
        self.size = 0
        self.end: Position | None = None


class Flush(NamedTuple):
    """What is to be flushed."""

    base: Checkpoint
    changes: Mapping[AttributeKey, int]
    core: Mapping[AttributeKey, int]
    through: Position


class AttributeState:
    """The state from one rebuild to the next."""

    def __init__(
        self, base: Checkpoint, *, created_ms: int, capacity: int, room: Room | None = None
    ) -> None:
        assert capacity > 0
        self.base = base
        self.through = base.through
        self.last = base.through
        """The stream's last entry, confirmed or not; None: there is none."""
        self.core = {EVENT_COUNT: 0, CREATION_TIME: created_ms, **base.core}
        """As confirmed."""
        self.changes_since = 0
        """Changes that the base checkpoint lacks; more than attributes where some change often."""
        self.bytes_since = 0
        self.is_crowded = False
        """All streams of the process have so many waiting that this one is to have no more."""
        self._capacity = capacity
        self._room = room or Room(capacity)
        self._noted = 0
        """So many clean ones the room knows of."""
        self._piece = Sent()
        self._pieces: deque[Sent] = deque()
        self._sent: dict[AttributeKey, tuple[int, Sent]] = {}
        self._dirty: dict[AttributeKey, int] = {}
        self._flushing: dict[AttributeKey, int] = {}
        self._is_flushing = False
        self._clean: OrderedDict[AttributeKey, int | None] = OrderedDict()
        self._pins: Counter[AttributeKey] = Counter()

    def __repr__(self) -> str:
        return (
            f"<AttributeState through {self.through}, {len(self._sent)} sent, "
            f"{len(self._dirty)} dirty, {len(self._flushing)} flushing, {len(self._clean)} clean>"
        )

    def statistics(self) -> dict[str, int]:
        """Return how much is held."""
        return {
            "attributes_unflushed": self.unflushed_count,
            "attributes_cached": len(self._clean),
            "event_count": self.core[EVENT_COUNT],
        }

    # What is known

    def unknown(self, keys: Iterable[AttributeKey]) -> list[AttributeKey]:
        """Return those of the keys that have to be fetched before their values are asked for."""
        return [key for key in keys if self._found(key) is _MISSING]

    def value(self, key: AttributeKey) -> int | None:
        """Return what a known attribute is after all that was sent; None: it is not there."""
        found = self._found(key)
        assert found is not _MISSING, "unknown attributes are fetched first"
        return found  # type: ignore[return-value]

    def setter(self, key: AttributeKey) -> Sent | None:
        """Return the piece that set the attribute, while that is not confirmed."""
        sent = self._sent.get(key)
        return sent[1] if sent is not None else None

    def newest(self) -> Sent | None:
        """Return the last piece that is not confirmed."""
        return self._pieces[-1] if self._pieces else None

    def under_way(self) -> Sent:
        """Return the piece that takes the changes made now."""
        return self._piece

    @property
    def unflushed_count(self) -> int:
        """How many wait for a flush."""
        return len(self._sent) + len(self._dirty) + len(self._flushing)

    @property
    def is_at_capacity(self) -> bool:
        """Whether as many wait for a flush as one stream may have waiting."""
        return self.unflushed_count >= self._capacity

    @property
    def is_full(self) -> bool:
        """Whether no further attribute may change before a flush: what waits for one is bounded."""
        return self.is_crowded or self.is_at_capacity

    def has_all(self, keys: Iterable[AttributeKey]) -> bool:
        """Tell whether these wait for a flush already, so that they take no room."""
        return all(key in self._dirty or key in self._sent for key in keys)

    def confirmed(self, key: AttributeKey) -> tuple[bool, int | None]:
        """Tell whether an attribute is known as of ``through``, and what it is."""
        if is_core(key):
            return True, self.core.get(key)
        for values in (self._dirty, self._flushing):
            if key in values:
                return True, values[key]
        if key in self._clean:
            self._clean.move_to_end(key)
            return True, self._clean[key]
        return not self.base.root.count, None

    def unflushed(self, first: AttributeKey, last: AttributeKey) -> dict[AttributeKey, int]:
        """Return the confirmed attributes between two keys that the base checkpoint lacks."""
        values = {**self.core, **self._flushing, **self._dirty}
        return {key: values[key] for key in sorted(values) if first <= key <= last}

    def _found(self, key: AttributeKey) -> object:
        sent = self._sent.get(key)
        if sent is not None:
            return sent[0]
        if key in self._dirty:
            return self._dirty[key]
        if key in self._flushing:
            return self._flushing[key]
        if key in self._clean:
            self._clean.move_to_end(key)
            return self._clean[key]
        return _MISSING if self.base.root.count else None

    # Changes

    def change(self, values: Mapping[AttributeKey, int], events: int) -> None:
        """Make a checked change, as part of the piece that is under way."""
        piece = self._piece
        piece.events += events
        for key, value in values.items():
            piece.values[key] = value
            self._sent[key] = value, piece

    def sent(self, end: Position, size: int) -> None:
        """Note that the piece under way was sent, and where its last entry went."""
        assert self.last is None or self.last < end
        piece, self._piece = self._piece, Sent()
        piece.end, piece.size = end, size
        self.last = end
        self._pieces.append(piece)

    def confirm(self, through: Position) -> list[Sent]:
        """Count in the pieces that end at ``through`` or before it; return them."""
        confirmed = []
        while self._pieces:
            end = self._pieces[0].end
            assert end is not None
            if end > through:
                break
            piece = self._pieces.popleft()
            confirmed.append(piece)
            self._count_in(piece.values, piece.events, end, piece.size)
            for key in piece.values:
                if self._sent[key][1] is piece:
                    del self._sent[key]
        return confirmed

    def replay(
        self, made: Mapping[AttributeKey, int], events: int, *, end: Position, size: int
    ) -> None:
        """Count in an entry that is in the stream."""
        assert not self._pieces, "entries are replayed before anything is sent"
        self._count_in(made, events, end, size)
        self.last = end

    def rebuilt(self, last: Position | None) -> None:
        """Learn that all is replayed, up to the stream's last entry, but for what was given up."""
        self.last = last
        if last is not None and (self.through is None or self.through < last):
            self.through = last

    def _count_in(
        self, values: Mapping[AttributeKey, int], events: int, end: Position, size: int
    ) -> None:
        for key, value in values.items():
            self._dirty[key] = value
            self._clean.pop(key, None)
        self.core[EVENT_COUNT] += events
        self.through = end
        self._evict()
        self.changes_since += len(values)
        self.bytes_since += size

    def vanish(self) -> list[Sent]:
        """Return what was sent and is not confirmed; the state is not to be used any more."""
        vanished = list(self._pieces)
        self._pieces.clear()
        return vanished

    # The index

    def pin(self, keys: Sequence[AttributeKey]) -> None:
        """Keep what is known of these attributes, and what will be, until ``unpin``."""
        self._pins.update(keys)

    def unpin(self, keys: Sequence[AttributeKey]) -> None:
        """Undo a ``pin``."""
        for key in keys:
            self._pins[key] -= 1
            if not self._pins[key]:
                del self._pins[key]

    def absorb(self, keys: Sequence[AttributeKey], found: Mapping[AttributeKey, int]) -> None:
        """Take in what a checkpoint's index has of keys that were pinned ever since."""
        assert all(key in self._pins for key in keys)
        for key in keys:
            if self._found(key) is _MISSING:
                self._clean[key] = found.get(key)
        self._evict()

    @property
    def is_flushed(self) -> bool:
        """Whether the base checkpoint has all that is confirmed."""
        return self.through is None or self.through == self.base.through

    def begin_flush(self) -> Flush | None:
        """Return what the index lacks; None: nothing, or a flush is under way."""
        if self._is_flushing or self.is_flushed:
            return None
        assert self.through is not None
        self._is_flushing = True
        self._flushing, self._dirty = self._dirty, {}
        self.changes_since = self.bytes_since = 0
        return Flush(self.base, self._flushing, dict(self.core), self.through)

    def finish_flush(self, made: Checkpoint) -> None:
        """Take a checkpoint that holds what ``begin_flush`` gave as the new base."""
        self.base = made
        for key, value in self._flushing.items():
            if key not in self._dirty:
                self._clean[key] = value
        self._flushing, self._is_flushing = {}, False
        self._evict()

    def fail_flush(self, base: Checkpoint | None = None) -> None:
        """Keep what ``begin_flush`` gave for another flush, over ``base`` if that is another."""
        self.changes_since += len(self._flushing)
        self._dirty = self._flushing | self._dirty
        self._flushing, self._is_flushing = {}, False
        if base is not None:
            self.base = base

    def _evict(self) -> None:
        room = max(0, self._capacity - self.unflushed_count)
        if len(self._clean) > room:
            self._drop(len(self._clean) - room)
        if len(self._clean) != self._noted:
            self._noted = len(self._clean)
            self._room.note(self, self._noted)

    def drop(self, count: int) -> int:
        """Drop up to so many values that can be fetched again; return how many went."""
        dropped = self._drop(count)
        self._noted -= dropped
        return dropped

    def _drop(self, count: int) -> int:
        loose = (key for key in self._clean if key not in self._pins)
        dropped = list(islice(loose, count))
        for key in dropped:
            del self._clean[key]
        return len(dropped)


def events_of(changes: Sequence[Change | None]) -> int:
    """Return how many events these entries have."""
    return sum(change.event_count for change in changes if change is not None)
