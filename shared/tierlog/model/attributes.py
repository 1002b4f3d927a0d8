"""Attributes of a stream: names, values, verbs, checkpoints (seeds/004, "Segment Attributes").

Owns the values. Does not own what a verb does to a stream's state (the owner's pipeline does), nor
how a checkpoint is kept (``tierlog.attributes``).

Invariants:
    * A key has 16 bytes, a value is a signed number of 64 bits.
    * The ids of core attributes are those whose first eight bytes are zero; no writer id and no
      attribute of an application lies among them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NewType

from tierlog.model.ids import INT64_MAX
from tierlog.model.position import Edge, Position

AttributeKey = NewType("AttributeKey", bytes)

KEY_LEN: Final = 16
VALUE_MIN: Final = -INT64_MAX - 1
VALUE_MAX: Final = INT64_MAX

CORE_PREFIX: Final = bytes(8)


def _core(number: int) -> AttributeKey:
    return AttributeKey(CORE_PREFIX + number.to_bytes(8, "big"))


EVENT_COUNT: Final = _core(1)
"""Events of all appends of the stream, those of trimmed ledgers included."""
CREATION_TIME: Final = _core(2)
"""Milliseconds since 1970 when the stream was created."""
# The others are in no checkpoint, but derived when they are read (``core_attributes``).
SCALE_POLICY_TYPE: Final = _core(3)
"""0: fixed, the stream does not scale by itself; there is no other type."""
SCALE_POLICY_RATE: Final = _core(4)
"""The rate at which it would scale: 0."""
SCALE_POLICY_SEGMENTS_MIN: Final = _core(5)
"""So many segments it has at least: 1; each partition is a stream of its own."""
ROLL_OVER_BYTES: Final = _core(6)
"""A ledger of so many bytes is sealed, by the policy that holds for the stream."""
ROLL_OVER_ENTRIES: Final = _core(7)
"""A ledger of so many entries is sealed."""
ROLL_OVER_AGE_MS: Final = _core(8)
"""A ledger is sealed so many milliseconds after it was opened, if it has entries."""
INDEX_ROOT_OFFSET: Final = _core(9)
"""Where the root page of the attribute index begins, in the index; -1: there is no index."""
INDEX_ROOT_LENGTH: Final = _core(10)
"""The bytes of that page; 0: there is no index."""

NO_EVENT_NUMBER: Final = 0
"""A writer of which nothing is known; event numbers begin at 1."""


def is_core(key: bytes) -> bool:
    """Tell whether a key is a core attribute's: pinned, and clients can't set it."""
    return key[:8] == CORE_PREFIX


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexObject:
    """One flush in tier 2: a piece of the attribute index, immutable."""

    key: str
    start: int
    length: int
    sha256: bytes

    @property
    def end(self) -> int:
        """The offset right behind it."""
        return self.start + self.length


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexChunk:
    """A group of flushes that is closed: one object lists them, so that records stay small."""

    key: str
    sha256: bytes
    start: int
    end: int
    object_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexRoot:
    """Where a version of the index lies: ``root_length`` bytes at ``root_offset`` are its root.

    ``start`` is the lowest offset of any node of it; nothing below is needed by this version.
    An empty index has ``root_length`` 0.
    """

    root_offset: int = 0
    root_length: int = 0
    start: int = 0
    end: int = 0
    count: int = 0
    """Attributes in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The attributes exactly as of one confirmed position: all entries through it, none after it.

    ``through`` None: as of the stream's creation. ``core`` holds the pinned attributes, the index
    the others.
    """

    through: Position | None = None
    core: Mapping[AttributeKey, int] = field(default_factory=dict)
    root: IndexRoot = IndexRoot()
    chunks: tuple[IndexChunk, ...] = ()
    """Closed groups of the objects that hold the index from ``root.start`` on, ascending."""
    objects: tuple[IndexObject, ...] = ()
    """Those behind the chunks, ascending, up to ``root.end``."""
    generation: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendCondition:
    """What must hold, in the order of the stream, right before an append; both when both are given.

    ``last_event_number`` is what the writer's attribute must be (0: not there); ``after`` is the
    position of the stream's last entry, ``Edge.EARLIEST`` for a stream that has none. A conditional
    append is a draft of one entry, whose header names the writer and its new number.
    """

    last_event_number: int | None = None
    after: Position | Edge | None = None
