"""The queue (Kafka): a hint, never the truth. It may repeat, delay, reorder and lose.

Errors: ``RetryableError`` UNAVAILABLE.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class OffloadTopics:
    """The names of the topics: lower case, dots only, the version of the values last."""

    prefix: str = "tierlog"

    @property
    def requested(self) -> str:
        """Values are ``OffloadRequest``, keyed by stream and ledger."""
        return f"{self.prefix}.offload.requested.v1"

    @property
    def completed(self) -> str:
        """Values are ``OffloadResult``, keyed likewise."""
        return f"{self.prefix}.offload.completed.v1"

    @property
    def requested_dead(self) -> str:
        """Requests that kept failing, with the error in their headers."""
        return f"{self.requested}.dlq"

    @property
    def all(self) -> tuple[str, ...]:
        """Every one of them."""
        return (self.requested, self.completed, self.requested_dead)


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


class EventPublisher(Protocol):
    """Puts events into topics."""

    async def publish(
        self, topic: str, *, key: bytes, value: bytes, headers: Mapping[str, bytes]
    ) -> None:
        """Return once the queue has acknowledged the event."""
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
