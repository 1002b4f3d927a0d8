"""The queue (Kafka): a hint, never the truth. It may repeat, delay, reorder and lose.

Errors: ``RetryableError`` UNAVAILABLE.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A message as it was taken. ``receipt`` is the adapter's own.

    ``attempt`` counts how often this source handed it out, from 1: whoever takes an event that
    keeps failing decides from it when to put it aside (another process starts at 1 again).
    """

    topic: str
    key: bytes
    value: bytes
    headers: Mapping[str, bytes]
    attempt: int = field(default=1, compare=False)
    receipt: Any = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicMark:
    """What a topic was at one moment: a later one tells whether the queue has lost what was in it.

    ``topic_id``: another one when it is made anew; empty when it is not there. ``ends``: how many
    events each partition has had.
    """

    topic_id: str = ""
    ends: Mapping[int, int] = field(default_factory=dict)

    def is_lost_in(self, later: "TopicMark") -> bool:
        """Tell whether events that were there are not there any more."""
        if self.topic_id and self.topic_id != later.topic_id:
            return True
        return any(later.ends.get(partition, 0) < end for partition, end in self.ends.items())


class EventPublisher(Protocol):
    """Puts events into topics."""

    async def publish(
        self, topic: str, *, key: bytes, value: bytes, headers: Mapping[str, bytes]
    ) -> None:
        """Return once the queue has acknowledged the event."""
        ...

    async def mark(self, topic: str) -> TopicMark:
        """Return what a topic is now; of one that is not there an empty one."""
        ...

    async def close(self) -> None:
        """Send what is queued, within a bound, and give the connection back."""
        ...


class EventSource(Protocol):
    """A member of a consumer group."""

    async def take(self) -> Event:
        """Wait for the next event. If cancelled, the event it held is offered again."""
        ...

    async def ack(self, event: Event) -> None:
        """Never deliver ``event`` again; offsets are committed as contiguous prefixes."""
        ...

    async def retry_later(self, event: Event) -> None:
        """Deliver ``event`` again, after the source's back-off, with ``attempt`` one higher."""
        ...

    async def close(self) -> None:
        """Leave the group in order."""
        ...
