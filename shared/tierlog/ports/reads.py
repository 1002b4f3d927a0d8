"""The reader service as its callers see it: frames from anywhere in a stream."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from uuid import UUID

from tierlog.model.ids import EntryId, LedgerId, StreamName
from tierlog.model.position import Edge, Position

_NO_LEDGER, _NO_ENTRY, _NO_FRAMES = LedgerId(0), EntryId(0), memoryview(b"")


@dataclass(frozen=True, slots=True, kw_only=True)
class FramesAnswer:
    """Frames of one ledger back to back, and where to go on; ``count`` 0: nothing yet."""

    resume: Position | Edge
    ledger_id: LedgerId = _NO_LEDGER
    first_entry_id: EntryId = _NO_ENTRY
    count: int = 0
    frames: memoryview = _NO_FRAMES
    tier: str = ""
    raw: bool = False
    """Entry data is the application's, without an append header."""
    partition: int | None = None
    """Which one of a partitioned stream, where such a stream is read whole."""


class StreamReads(Protocol):
    """Reads of streams. Errors: the reasons of protocols.md section 6."""

    async def read(
        self,
        stream: StreamName,
        where: Position | Edge,
        *,
        bytes_max: int,
        entries_max: int | None = None,
        wait_s: float = 0.0,
    ) -> FramesAnswer:
        """Return what follows ``where``; at the tail wait up to ``wait_s`` for it."""
        ...

    async def bounds(self, stream: StreamName) -> tuple[Position | Edge, Position | Edge]:
        """Return the first readable position, and the one behind the last confirmed entry."""
        ...

    async def close(self) -> None:
        """Give the connections back."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedLedger:
    """A ledger of a stream as far as it is confirmed; ``length`` 0: not known of an open one."""

    ledger_id: LedgerId
    entry_count: int
    length: int
    closed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedLedgers:
    """Ledgers of a stream in order, those without an entry left out.

    ``trimmed_end``: where the newest trimmed ledger ended. ``resume``: from which ledger on there
    are more; None: there are none.
    """

    incarnation: UUID
    ledgers: Sequence[ServedLedger]
    trimmed_end: Position | None = None
    resume: LedgerId | None = None


class ReadDesk(Protocol):
    """What a reader tells beside the entries."""

    async def position_at(self, stream: StreamName, time: str) -> Position | Edge:
        """Return where a time of publishing begins: ISO 8601, or milliseconds since 1970."""
        ...

    async def explain(
        self, stream: StreamName, start: str, *, entries_max: int, bytes_max: int
    ) -> Mapping[str, Any]:
        """Read once, and tell which tier, which objects and requests, and how long each took."""
        ...

    async def ledgers(self, stream: StreamName, first: LedgerId) -> ServedLedgers:
        """Return a stream's ledgers from an id on, the open one to its last confirmed entry."""
        ...


class ReaderService(StreamReads, ReadDesk, Protocol):
    """All that a reader does."""
