"""What lies in a topic of the queue, for people: read outside any group, changed by nothing.

Errors: ``RetryableError`` UNAVAILABLE, also when there is no such topic: unknown is not empty.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from tierlog.ports.events import Event


class EventPlace(NamedTuple):
    """Where in its topic an event lies, as long as it is kept."""

    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.partition}:{self.offset}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredEvent:
    """An event with its place, and when the queue took it."""

    place: EventPlace
    stored_ms: int
    event: Event


class EventLog(Protocol):
    """Reads topics."""

    def scan(self, topic: str, *, newest_max: int) -> AsyncIterator[StoredEvent]:
        """Iterate over what was there when it began: of each partition the newest, oldest first."""
        ...

    async def get(self, topic: str, place: EventPlace) -> StoredEvent | None:
        """Return the event at a place; None when nothing is there, or no longer."""
        ...
