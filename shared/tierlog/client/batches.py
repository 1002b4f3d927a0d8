"""Events to entries: what a writer sends, and what it still waits for (pure).

Invariants:
    * Events keep their order; an entry of a stream with append headers carries the number of
      its last event, and numbers grow by one from event to event of a writer.
    * Events are compressed where the entry gets shorter by it, and else are as they are.
    * A batch is settled exactly once: with the places of its entries, with the knowledge that it
      is there, or never.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final
from uuid import UUID

from tierlog.format.entry import (
    EVENT_LEN_LEN,
    AttributeUpdate,
    Packing,
    StructuredEvent,
    decode_entry,
    encode_entry,
)
from tierlog.format.frame import pack_entries
from tierlog.format.run import Run, build_run
from tierlog.model.errors import RefusedError, TierlogError
from tierlog.model.position import AppendedRange
from tierlog.ports.files import Buffer

Event = Buffer | StructuredEvent

PLACE_UNKNOWN: Final[Sequence[AppendedRange]] = ()
"""The places of a batch that is there, whose owner told its number and not where it is."""


@dataclass(slots=True, eq=False)
class Batch:
    """One append: a draft run of one entry, or of many raw ones.

    Its events have the numbers from ``after`` + 1 to ``last_number``. ``ranges`` None: not known
    to be there; ``PLACE_UNKNOWN``: there, but not known where.
    """

    draft: Run
    after: int
    last_number: int
    payload_len: int
    ranges: Sequence[AppendedRange] | None = None
    error: TierlogError | None = None
    doubtful: bool = False
    """It was sent, and its answer lost: it may be there, or land yet."""

    @property
    def event_count(self) -> int:
        """How many events it has."""
        return self.last_number - self.after


@dataclass(slots=True)
class BatchBuilder:
    """Collects events until they make a batch.

    ``writer_id`` None: entries say nothing of their writer. ``updates`` go with every entry.
    """

    writer_id: UUID | None
    raw: bool
    batch_bytes: int
    last_number: int = 0
    updates: tuple[AttributeUpdate, ...] = ()
    packing: Packing | None = None
    _events: list[Event] = field(default_factory=list)
    _bytes: int = 0

    def __len__(self) -> int:
        return len(self._events)

    @property
    def is_full(self) -> bool:
        """Whether there is enough for a batch."""
        return self._bytes >= self.batch_bytes

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
        self._bytes += _payload_len(event) + EVENT_LEN_LEN
        return self.is_full

    def build(self, *, now_ms: int) -> Batch:
        """Return what was collected as one batch, and begin the next."""
        events, payload_len = self._events, self._bytes - EVENT_LEN_LEN * len(self._events)
        self._events, self._bytes = [], 0
        after, self.last_number = self.last_number, self.last_number + len(events)
        return self._batch(events, after, payload_len=payload_len, now_ms=now_ms)

    def rest(self, batch: Batch, number: int) -> Batch:
        """Return a batch of those events of ``batch`` that have higher numbers."""
        assert not self.raw, "entries of raw streams have no numbers"
        assert batch.after < number < batch.last_number
        (data,) = batch.draft.entries()
        entry = decode_entry(data)
        packing = self.packing
        known = {packing.codec: packing.decompress} if packing is not None else {}
        found = entry.structured_events(known)[number - batch.after :]
        events: list[Event] = [one if entry.header.structured else one.payload for one in found]
        return self._batch(
            events,
            number,
            payload_len=sum(_payload_len(one) for one in events),
            now_ms=entry.header.publish_time_ms,
        )

    def _batch(
        self, events: Sequence[Event], after: int, *, payload_len: int, now_ms: int
    ) -> Batch:
        entries: list[Buffer]
        if self.raw:
            entries = [one for one in events if not isinstance(one, StructuredEvent)]
            now_ms = 0
        else:
            entries = [self._entry(events, after, now_ms=now_ms)]
        return Batch(
            draft=draft_of(entries, now_ms=now_ms),
            after=after,
            last_number=after + len(events),
            payload_len=payload_len,
        )

    def _entry(self, events: Sequence[Event], after: int, *, now_ms: int) -> bytes:
        encode = partial(
            encode_entry,
            events,
            publish_time_ms=now_ms,
            writer_id=self.writer_id,
            event_number=after + len(events) if self.writer_id is not None else 0,
            attribute_updates=self.updates,
        )
        plain, packing = encode(), self.packing
        if packing is None:
            return plain
        return min(plain, encode(codec=packing.codec, compress=packing.compress), key=len)


def draft_of(entries: Sequence[Buffer], *, now_ms: int) -> Run:
    """Return entries as the draft of a run: the owner gives the ids."""
    frames, offsets = pack_entries(list(entries))
    return build_run(frames, offsets, publish_ms_min=now_ms, publish_ms_max=now_ms)


def updates_alone(updates: Sequence[AttributeUpdate], *, now_ms: int) -> Run:
    """Return the draft of an entry that has no events and changes attributes."""
    return draft_of(
        [encode_entry([], publish_time_ms=now_ms, attribute_updates=updates)], now_ms=now_ms
    )


def _payload_len(event: Event) -> int:
    return len(event.payload) if isinstance(event, StructuredEvent) else len(event)
