"""Room on the disks: ok, warning, read-only; and back by itself.

Owns: what free space means for the node. Does not own what frees it (``compaction``), nor telling
others (``app`` waits for ``changed``). Besides every few seconds, the journal lets it look when a
segment or a spare is made, and ``upkeep`` before each flush: no writer outruns it.

A node is read-only when the journal's directory is low: nothing could be answered soon; and when
no directory can take another log. A segment that begins with no zero-filled spare behind it counts
as full. Any other directory that is low, or that has less than a share
of its disk free, is a warning.

Invariants:
    * No level is left at the bound at which it was entered (hysteresis): between
      ``free_bytes_min`` and ``free_bytes_resume``, and between ``warn_free_share`` and
      ``WARN_CLEARS`` times it, the level stays.
    * What the disk refused counts more than what it says is free: ``refused`` makes the node
      read-only at once, until the next look.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple, Self

import structlog

from tierlog.ports.files import Files
from tierlog.runtime.settings import StorageSettings

log = structlog.get_logger()

WARN_CLEARS: Final = 1.1


class Level(IntEnum):
    """How the node stands; higher is worse."""

    OK = 0
    WARNING = 1
    READ_ONLY = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceLimits:
    """The bounds of the levels."""

    free_bytes_min: int
    free_bytes_resume: int
    warn_free_share: float

    def __post_init__(self) -> None:
        assert 0 <= self.free_bytes_min <= self.free_bytes_resume, "it resumes later than it ends"
        assert 0 <= self.warn_free_share < 1, "a share of the disk"

    @classmethod
    def of(cls, settings: StorageSettings) -> Self:
        """Return what the settings say."""
        return cls(
            free_bytes_min=settings.free_bytes_min,
            free_bytes_resume=settings.free_bytes_resume,
            warn_free_share=settings.warn_free_share,
        )


class Room(NamedTuple):
    """What a directory's disk has."""

    free_bytes: int
    total_bytes: int


def judge(
    before: Level, rooms: Sequence[Room], limits: SpaceLimits, *, taken_bytes: int = 0
) -> Level:
    """Return the level; the first directory is the journal's, which takes logs if it is alone.

    ``taken_bytes``: what the journal is about to take of it; of that no more counts than is to
    stay free anyway, so that a small disk with small bounds is used.
    """
    taken_bytes = min(taken_bytes, limits.free_bytes_min)
    resume = before is Level.READ_ONLY
    writable_from = limits.free_bytes_resume if resume else limits.free_bytes_min
    for_logs = max(room.free_bytes for room in rooms[1:] or rooms)
    if min(rooms[0].free_bytes - taken_bytes, for_logs) < writable_from:
        return Level.READ_ONLY
    warned = before is not Level.OK
    bytes_min = limits.free_bytes_resume if warned else limits.free_bytes_min
    share_min = limits.warn_free_share * (WARN_CLEARS if warned else 1.0)
    for room in rooms:
        if room.free_bytes < bytes_min or room.free_bytes < share_min * room.total_bytes:
            return Level.WARNING
    return Level.OK


class SpaceWatch:
    """Looks at the disks of all directories, again and again."""

    def __init__(self, directories: Sequence[Files], limits: SpaceLimits) -> None:
        assert directories, "a node has a directory"
        self._directories = tuple(directories)
        self._limits = limits
        self._rooms: list[Room] = []
        self.level = Level.OK
        self.changed = asyncio.Event()
        """Set once ``level`` changes; then a new event takes its place."""
        self.on_low: Callable[[], None] = lambda: None
        """Called after each look at which the level was not OK, and when a write was refused."""
        self.on_refused: Callable[[], None] = lambda: None
        """Called when a write was refused: whatever can be spared is to be given back."""

    def __repr__(self) -> str:
        return f"<SpaceWatch {self.level.name}, free={[room.free_bytes for room in self._rooms]}>"

    @property
    def read_only(self) -> bool:
        """Whether ordinary adds are to be refused until there is space again."""
        return self.level is Level.READ_ONLY

    def statistics(self) -> dict[str, int]:
        """Return the level, and what is free in each directory, as of the last look."""
        found = {"space_level": int(self.level), "read_only": int(self.read_only)}
        for at, room in enumerate(self._rooms):
            found[f"directory_{at}_free_bytes"] = room.free_bytes
            found[f"directory_{at}_total_bytes"] = room.total_bytes
        return found

    async def run(self, *, interval_s: float) -> None:
        """Look for ever."""
        while True:
            await self.look()
            await asyncio.sleep(interval_s)

    async def look_ahead(self, taken_bytes: int = 0) -> None:
        """Look before something is written that takes room; only ``run`` makes it writable."""
        if not self.read_only:
            await self.look(taken_bytes=taken_bytes)

    async def look(self, *, taken_bytes: int = 0) -> Level:
        """Measure, and judge; ``taken_bytes`` is what the journal is about to take."""
        rooms = [
            Room(await files.free_bytes(), await files.total_bytes()) for files in self._directories
        ]
        self._rooms = rooms
        self._set(judge(self.level, rooms, self._limits, taken_bytes=taken_bytes))
        if self.level is not Level.OK:
            self.on_low()
        return self.level

    def refused(self) -> None:
        """Take note that a disk was full when something had to be written."""
        self._set(Level.READ_ONLY)
        self.on_refused()
        self.on_low()

    async def copy_room(self) -> int:
        """Return how many bytes compaction may write now.

        As it copies before it frees, it leaves what keeps the node writable, while it is; once it
        isn't, all but a rest goes to getting it back.
        """
        free_bytes = max([await files.free_bytes() for files in self._directories])
        kept = self._limits.free_bytes_min
        return max(0, free_bytes - (kept // 8 if self.read_only else kept))

    def _set(self, level: Level) -> None:
        before, self.level = self.level, level
        if before is level:
            return
        free = [room.free_bytes for room in self._rooms]
        if level is Level.READ_ONLY:
            log.warning("node.read_only", free_bytes=free)
        elif before is Level.READ_ONLY:
            log.warning("node.writable", free_bytes=free)
        elif level is Level.WARNING:
            log.warning("space.low", free_bytes=free)
        else:
            log.info("space.ample", free_bytes=free)
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()
