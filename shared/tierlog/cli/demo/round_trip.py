"""What the demo's jobs have in common: events go in, come back, and are the same.

Owns how events are counted, hashed and read back. What breaks in between is the jobs' own.
"""

import asyncio
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from tierlog.cli.demo.records import Source, replayed
from tierlog.cli.demo.stage import Stage
from tierlog.format.entry import StructuredEvent
from tierlog.model.errors import CorruptError
from tierlog.model.ids import StreamName
from tierlog.model.position import Edge

STREAM: Final = StreamName("changelogs")
STEP_BYTES: Final = 10 * 1000 * 1000


class Digest:
    """SHA-256 over events: key, time and payload of each, with their lengths."""

    def __init__(self) -> None:
        self.count = 0
        self.payload_bytes = 0
        self._sha256 = hashlib.sha256()

    def add(self, key: bytes | None, event_time_ms: int | None, payload: bytes) -> None:
        """Take one event."""
        head = f"{key!r} {event_time_ms} {len(payload)} ".encode()
        self._sha256.update(head + payload)
        self.count += 1
        self.payload_bytes += len(payload)

    def hex(self) -> str:
        """Return the digest so far."""
        return self._sha256.hexdigest()


@dataclass(slots=True)
class RoundTrip:
    """What was appended and what was read."""

    source: str
    appended: Digest = field(default_factory=Digest)
    read: Digest = field(default_factory=Digest)
    tiers_read: dict[str, int] = field(default_factory=dict)
    acknowledged: int = 0
    resolved_count: int = 0
    append_s: float = 0.0
    read_s: float = 0.0
    ledgers: list[dict[str, Any]] = field(default_factory=list)

    @property
    def same(self) -> bool:
        """Whether what was read is what was appended."""
        return (self.read.count, self.read.hex()) == (self.appended.count, self.appended.hex())

    @property
    def lost_count(self) -> int:
        """How many events were acknowledged and are not there."""
        return max(0, self.acknowledged - self.read.count)

    @property
    def doubled_count(self) -> int:
        """How many more events are there than were appended."""
        return max(0, self.read.count - self.appended.count)

    def events(self, source: Source, bytes_min: int) -> Iterator[StructuredEvent]:
        """Yield what is to be appended, counted as it goes."""
        for event in replayed(source, bytes_min):
            self.appended.add(event.key, event.event_time_ms, event.payload)
            yield event

    def document(self) -> dict[str, Any]:
        """Return the part of the report that all jobs share."""
        return {
            "same": self.same,
            "source": self.source,
            "appended": _document_of(self.appended, self.append_s),
            "read": _document_of(self.read, self.read_s),
        }


def _document_of(digest: Digest, seconds: float) -> dict[str, Any]:
    return {
        "events": digest.count,
        "bytes": digest.payload_bytes,
        "sha256": digest.hex(),
        "seconds": round(seconds, 2),
    }


async def read_back(stage: Stage, outcome: RoundTrip) -> None:
    """Read the whole stream; raises ``CorruptError`` when it is not what was appended."""
    loop = asyncio.get_running_loop()
    begun_s, told = loop.time(), 0
    stage.tell("reading the whole stream back")
    async for event in stage.client.reader(STREAM, start=Edge.EARLIEST).events():
        outcome.read.add(event.key, event.event_time_ms, event.payload)
        outcome.tiers_read[event.tier] = outcome.tiers_read.get(event.tier, 0) + 1
        if outcome.read.payload_bytes // STEP_BYTES > told:
            told = outcome.read.payload_bytes // STEP_BYTES
            stage.tell(f"{outcome.read.payload_bytes / 1e6:.0f} MB read")
    outcome.read_s = loop.time() - begun_s
    if not outcome.same:
        raise differs(
            f"{outcome.read.count} events with SHA-256 {outcome.read.hex()} were read, "
            f"{outcome.appended.count} with {outcome.appended.hex()} were appended"
        )
    stage.tell(f"{outcome.read.count} events, SHA-256 {outcome.read.hex()[:16]}…: the same")


def differs(what: str) -> CorruptError:
    """Return the error that ends the demo with exit 6."""
    return CorruptError(
        f"the demo found a difference: {what}",
        remedy="Run it with --keep and look into the logs of its state directory",
    )
