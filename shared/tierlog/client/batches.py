"""Events to entries: what a writer sends, and what it still waits for (pure).

Invariants:
    * Events keep their order; an entry of a stream with append headers carries the number of
      its last event, and numbers grow by one from event to event of a writer.
    * A batch is settled exactly once: with the places of its entries, or never.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from uuid import UUID

from tierlog.format.entry import EVENT_LEN_LEN, StructuredEvent, encode_entry
from tierlog.format.frame import pack_entries
from tierlog.format.run import Run, build_run
from tierlog.model.errors import RefusedError, TierlogError
from tierlog.model.ids import EntryId
from tierlog.model.position import AppendedRange, Position
from tierlog.ports.files import Buffer

Event = Buffer | StructuredEvent


@dataclass(slots=True, eq=False)
class Batch:
    """One append: a draft run of one entry, or of many raw ones."""

    draft: Run
    last_number: int
    event_count: int
    payload_len: int
    ranges: Sequence[AppendedRange] | None = None
    error: TierlogError | None = None

    @property
    def end(self) -> Position | None:
        """The position right behind its last entry, once it is acknowledged."""
        if self.ranges is None:
            return None
        last = self.ranges[-1]
        return Position(last.ledger_id, EntryId(last.last_entry_id + 1))


@dataclass(slots=True)
class BatchBuilder:
    """Collects events until they make a batch."""

    writer_id: UUID
    raw: bool
    batch_bytes: int
    last_number: int = 0
    _events: list[Event] = field(default_factory=list)
    _bytes: int = 0

    def __len__(self) -> int:
        return len(self._events)

    def add(self, event: Event) -> bool:
        """Take one event; True when there is enough for a batch."""
        if self.raw and isinstance(event, StructuredEvent):
            raise RefusedError(
                "a raw stream takes bytes and no structured events",
                remedy="Send bytes, or create the stream without raw",
            )
        if self._events and isinstance(event, StructuredEvent) != isinstance(
            self._events[0], StructuredEvent
        ):
            raise RefusedError(
                "plain and structured events do not share an entry",
                remedy="Send one kind, or flush() in between",
            )
        self._events.append(event)
        size = len(event.payload) if isinstance(event, StructuredEvent) else len(event)
        self._bytes += size + EVENT_LEN_LEN
        return self._bytes >= self.batch_bytes

    def build(self, *, now_ms: int) -> Batch:
        """Return what was collected as one batch, and begin the next."""
        events, payload_len = self._events, self._bytes - EVENT_LEN_LEN * len(self._events)
        self._events, self._bytes = [], 0
        self.last_number += len(events)
        entries: list[Buffer]
        if self.raw:
            entries = [one for one in events if not isinstance(one, StructuredEvent)]
            now_ms = 0
        else:
            entries = [
                encode_entry(
                    events,
                    publish_time_ms=now_ms,
                    writer_id=self.writer_id,
                    event_number=self.last_number,
                )
            ]
        frames, offsets = pack_entries(entries)
        draft = build_run(frames, offsets, publish_ms_min=now_ms, publish_ms_max=now_ms)
        return Batch(
            draft=draft,
            last_number=self.last_number,
            event_count=len(events),
            payload_len=payload_len,
        )
