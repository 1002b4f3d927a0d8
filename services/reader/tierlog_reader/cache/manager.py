"""What goes when the cache fills, and what is not let in; pure (seeds/002, figure 1).

Owns the order in which entries go, room that is promised to fetches, and who gets some. Does not
own the entries (``read_index``) nor the bytes (``store``). It asks for no time: its owner ticks.

Each entry carries the *generation* in which it was last used; a tick begins a new one. It carries
too how much had come into the cache until then, for who reads all of the cache in less than a
generation has a past as well. Entries stand in lines, the longest unused first:

    line      entries                                  go for
    UNSTORED  bytes that tier 2 does not have          nothing
    AHEAD     fetched ahead, not read yet              what is needed now, once ``patience``
                                                       generations old
    READ      all others                               what is needed now; for fetching ahead only
                                                       once *past*: not used in this generation, or
                                                       not while ``past`` of the cache came in

    who asks for room                        is let in up to  and may send away
    TAIL    the newest bytes of a stream     all              READ, then AHEAD of any age
    WANTED  what a reader waits for          ``full``         READ, then AHEAD that is old
    AHEAD   what it will want next           ``target``       READ that is past, AHEAD that is old

So a cache that fills slows fetching ahead first, then what is read is served without being kept,
and only the tail uses the last of it. What is not let in is no failure.

Invariants:
    * An entry goes only when all of it is in tier 2, or is not wanted any more; never while it
      is pinned. Pinned entries stand in no line, so nothing is looked at twice.
    * Room that was promised counts as used until it is settled, and so does what entries take
      beside the pool (``entry_bytes`` each), and what their owners take there. Whoever takes any of
      it has asked for room before, so that all of it is never above the limit.
    * One call sends away ``victims_max`` entries at most: nobody waits for long. What would not
      be enough is not sent away.
    * Fetching ahead never sends away what was fetched ahead and is still to be read: a working
      set larger than the cache is read once through, not round and round.
"""

import enum
import itertools
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from tierlog_reader.cache.store import StreamingCache


class Line(enum.Enum):
    """Where an entry waits for its end."""

    UNSTORED = "unstored"
    AHEAD = "ahead"
    READ = "read"


class Asks(enum.Enum):
    """Who asks for room."""

    TAIL = "tail"
    WANTED = "wanted"
    AHEAD = "ahead"


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """When room gets scarce, as shares of the cache; and for how many generations to wait."""

    target: float = 0.75
    full: float = 0.90
    past: float = 0.25
    patience: int = 10
    """Generations that what was fetched ahead may go unread."""
    idle: int = 1800
    """Generations after which what nobody used goes anyway."""
    victims_max: int = 256

    def __post_init__(self) -> None:
        assert 0 < self.past < self.target < self.full < 1, self
        assert 0 < self.patience <= self.idle, self
        assert self.victims_max > 0, self


class Owner(Protocol):
    """Whoever keeps an entry findable."""

    def evict(self, entry: "Entry") -> None:
        """Forget the entry and delete its bytes. Asks for no room and waits for nothing."""
        ...


@dataclass(slots=True, eq=False)
class Entry:
    """One entry of the cache: bytes ``start`` to ``end`` of its owner."""

    owner: Owner
    start: int
    length: int
    address: int
    line: Line
    generation: int
    came_bytes: int = 0
    """What had come into the cache when it was last used."""
    pins: int = 0
    forgotten: bool = False
    """Its owner has it no more; its bytes go with the last pin."""
    unread: int = 0
    """So many of its bytes, at most, were fetched ahead and not read yet."""

    @property
    def end(self) -> int:
        """Right behind its last byte."""
        return self.start + self.length


class CacheManager:
    """Room in one streaming cache."""

    def __init__(
        self,
        store: StreamingCache,
        thresholds: Thresholds | None = None,
        *,
        entry_bytes: int = 0,
    ) -> None:
        self._store = store
        self._entry_bytes = entry_bytes
        self._at = thresholds if thresholds is not None else Thresholds()
        self._lines: dict[Line, OrderedDict[Entry, None]] = {
            Line.AHEAD: OrderedDict(),
            Line.READ: OrderedDict(),
        }
        self.generation = 1
        self.came_bytes = 0
        self.promised_bytes = 0
        self.owners_bytes = 0
        """What owners took beside the pool, and did not give back yet."""
        self.evictions: Counter[str] = Counter()
        """Entries that went, by who asked for their room; "idle": nobody did."""
        self.early_evictions = 0
        """Those for whom there was room below ``target``, had entries alone been counted: promises
        that nobody settled, or what owners say they take, send entries away."""
        self.refusals: Counter[str] = Counter()
        self.entries_read = 0
        """Entries that were lent to readers, each time; and in how many pieces they lay."""
        self.runs_read = 0
        self.ahead_bytes = 0
        """Bytes that were fetched before anybody wanted them."""
        self.ahead_read_bytes = 0
        """Those of them that were read then; what is read twice may stand for what never is."""

    def __repr__(self) -> str:
        lengths = ", ".join(f"{len(line)} {name.value}" for name, line in self._lines.items())
        return f"<CacheManager generation {self.generation}: {lengths}>"

    # Room

    @property
    def used_bytes(self) -> int:
        """What entries take, and all metadata."""
        return self._entries_bytes + self.owners_bytes

    @property
    def _entries_bytes(self) -> int:
        return self._store.used_bytes + self._store.entries * self._entry_bytes

    @property
    def used(self) -> float:
        """How full the cache is, promises and metadata included."""
        return (self.used_bytes + self.promised_bytes) / self._store.bytes_max

    @property
    def overflow_bytes(self) -> int:
        """What is above the limit, which nothing should be."""
        return max(0, self.used_bytes + self.promised_bytes - self._store.bytes_max)

    def promise(self, size: int, who: Asks) -> bool:
        """Keep room for ``size`` bytes until it is settled, or say that there is none."""
        size = self._cost(size)
        if not self._make_room(size, who):
            self.refusals[who.value] += 1
            return False
        self.promised_bytes += size
        return True

    def settle(self, size: int) -> None:
        """End a promise, right before the bytes are put in or when they won't be."""
        self.promised_bytes -= self._cost(size)
        assert self.promised_bytes >= 0, "more was settled than was promised"

    def take(self, size: int, who: Asks) -> bool:
        """Count bytes that an owner is to have beside the pool, or say that there is no room."""
        if not self._make_room(size, who):
            self.refusals[who.value] += 1
            return False
        self.owners_bytes += size
        return True

    def give_back(self, size: int) -> None:
        """Count so much less beside the pool."""
        self.owners_bytes -= size
        assert self.owners_bytes >= 0, "more was given back than was taken"

    def _cost(self, size: int) -> int:
        """Return what an entry of this size takes."""
        layout = self._store.layout
        return (layout.blocks_of(size) << layout.block_shift) + self._entry_bytes

    def _make_room(self, size: int, who: Asks) -> bool:
        top = {Asks.TAIL: 1.0, Asks.WANTED: self._at.full, Asks.AHEAD: self._at.target}[who]
        room = int(top * self._store.bytes_max) - self.promised_bytes - size
        if room < 0:
            return False
        victims, enough = self._victims(who, self.used_bytes - room)
        if self._entries_bytes + size <= self._at.target * self._store.bytes_max:
            self.early_evictions += len(victims)
        for victim in victims:
            self._send_away(victim, who.value)
        return enough

    def _victims(self, who: Asks, need: int) -> tuple[list[Entry], bool]:
        """Choose who goes for ``need`` bytes, and say whether that is enough.

        Where all that may go is not enough, nobody does. Where it is too much for one call, some
        go, so that another call gets on.
        """
        found: list[Entry] = []
        for entry in self._candidates(who):
            if need <= 0 or len(found) == self._at.victims_max:
                return found, need <= 0
            found.append(entry)
            need -= self._cost(entry.length)
        return (found, True) if need <= 0 else ([], False)

    def _candidates(self, who: Asks) -> Iterator[Entry]:
        """Yield who may go, who is to go first first."""
        for entry in self._lines[Line.READ]:
            if who is Asks.AHEAD and not self._is_past(entry):
                break
            yield entry
        for entry in self._lines[Line.AHEAD]:
            if who is not Asks.TAIL and self.generation - entry.generation < self._at.patience:
                break
            yield entry

    def _is_past(self, entry: Entry) -> bool:
        since = self.came_bytes - entry.came_bytes
        return entry.generation != self.generation or since >= self._at.past * self._store.bytes_max

    def _send_away(self, entry: Entry, why: str) -> None:
        del self._lines[entry.line][entry]
        self.evictions[why] += 1
        entry.owner.evict(entry)

    def tick(self) -> None:
        """Begin a generation; what nobody used for long goes, and what is above the target."""
        self.generation += 1
        idle = [
            entry
            for line in self._lines.values()
            for entry in itertools.takewhile(self._is_idle, line)
        ]
        for entry in idle[: self._at.victims_max]:
            self._send_away(entry, "idle")
        self._make_room(0, Asks.AHEAD)

    def _is_idle(self, entry: Entry) -> bool:
        return self.generation - entry.generation >= self._at.idle

    # Entries: owners say what becomes of them

    def add(self, entry: Entry) -> None:
        """Begin to watch an entry, as the last to go."""
        self.came_bytes += entry.length
        if entry.line is Line.AHEAD:
            self.ahead_bytes += entry.length
            entry.unread = entry.length
        self._enter(entry)

    def grew(self, entry: Entry, size: int) -> None:
        """Note that an entry is longer by so much, which is a use of it."""
        self.came_bytes += size
        self._leave(entry)
        self._enter(entry)

    def remove(self, entry: Entry) -> None:
        """Stop watching an entry; whoever pins it still does."""
        self._leave(entry)

    def move(self, entry: Entry, line: Line) -> None:
        """Put an entry into another line, at its end."""
        self._leave(entry)
        entry.line = line
        self._enter(entry)

    def pin(self, entry: Entry, lent: int) -> None:
        """Keep an entry until it is unpinned as often: somebody reads so many bytes of it."""
        self._leave(entry)
        entry.pins += 1
        read = min(lent, entry.unread)
        entry.unread -= read
        self.ahead_read_bytes += read
        if entry.line is Line.AHEAD:
            entry.line = Line.READ

    def unpin(self, entry: Entry) -> None:
        """Let go of an entry, which was used just now."""
        assert entry.pins > 0, "unpinned more often than pinned"
        entry.pins -= 1
        if entry.forgotten:
            if entry.pins == 0:
                self._store.delete(entry.address)
            return
        self._enter(entry)

    def note_read(self, runs: int) -> None:
        """Count that an entry was lent which lies in so many runs."""
        self.entries_read += 1
        self.runs_read += runs

    def _enter(self, entry: Entry) -> None:
        entry.generation, entry.came_bytes = self.generation, self.came_bytes
        if entry.pins == 0 and entry.line is not Line.UNSTORED:
            self._lines[entry.line][entry] = None

    def _leave(self, entry: Entry) -> None:
        if entry.line is not Line.UNSTORED:
            self._lines[entry.line].pop(entry, None)
