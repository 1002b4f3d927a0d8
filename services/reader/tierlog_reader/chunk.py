"""What a read returns: whole frames of one ledger, back to back, and where to go on.

Invariant: ``frames`` hold exactly ``count`` whole frames, ids ``first_entry_id`` and up.
"""

from dataclasses import dataclass
from typing import Protocol

from tierlog.format.checksum import Buffer
from tierlog.model.ids import EntryId, LedgerId
from tierlog.model.position import Edge, Position
from tierlog_reader.places import Tier


class ReadRoom(Protocol):
    """Memory for what a read returns: entered before anything is read, left while it waits."""

    async def enter(self) -> None:
        """Have room from here on; a second time does nothing."""
        ...

    def leave(self) -> None:
        """Have none from here on; a second time does nothing."""
        ...


class _NoRoom:
    """For whoever bounds its reads by itself."""

    async def enter(self) -> None:
        """Ask nobody."""

    def leave(self) -> None:
        """Tell nobody."""


NO_ROOM = _NoRoom()


def without_rest(frames: Buffer) -> Buffer:
    """Return frames as they are, or copied where they are less than half of what they keep.

    The room of an answer is for its frames: it knows nothing of the buffer that they lie in.
    """
    with memoryview(frames) as view, memoryview(view.obj) as whole:
        return frames if 2 * view.nbytes >= whole.nbytes else memoryview(bytes(view))


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How much one read may return (one entry at least, if there is one), and how long wait."""

    entries_max: int
    bytes_max: int
    wait_s: float
    room: ReadRoom = NO_ROOM
    alone_max: int | None = None
    """A longer frame is ``EntryTooLongError`` where its length can be told before it is fetched or
    copied: in a tier-2 copy and in memory, but not in tier 1, where runs come whole."""

    def __post_init__(self) -> None:
        assert self.entries_max >= 1
        assert self.bytes_max >= 1
        assert self.wait_s >= 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chunk:
    """Frames as they were found; ``frames`` are views, never joined on the way."""

    ledger_id: LedgerId
    first_entry_id: EntryId
    count: int
    frames: tuple[Buffer, ...]
    tier: Tier

    @property
    def frames_len(self) -> int:
        """Bytes of all frames."""
        return sum(map(len, self.frames))

    @property
    def end(self) -> Position:
        """Right behind the last entry."""
        return Position(self.ledger_id, EntryId(self.first_entry_id + self.count))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answer:
    """A chunk, or None at the tail, and the position to go on from; whether entries are raw."""

    chunk: Chunk | None
    resume: Position | Edge
    raw: bool = False
