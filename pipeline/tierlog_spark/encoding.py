"""Rows to entries: the columns that a write takes, packed as a client packs events (pure).

    payload      binary or string       the event; never null
    key          binary or string       of the application, as the three that follow
    event_time   timestamp
    properties   map<string,string>     no null values

They are the columns that a read yields and that are the application's; where an event stands
(``ledger_id``, ``entry_id``, …) and when it was published is the stream's to say.

Invariants:
    * Rows keep their order; each is one event.
    * Only the first entry carries the attribute update, and there is one as soon as there is a row.
    * With the payload alone events are plain, as a read gives them back.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa

from tierlog.format.entry import EVENT_LEN_LEN, AttributeUpdate, StructuredEvent, encode_entry
from tierlog.model.errors import RefusedError
from tierlog_spark.columns import PAYLOAD, TYPES, Table

TAKEN: Final[Mapping[str, tuple[str, ...]]] = {
    PAYLOAD: ("binary", "string"),
    "key": ("binary", "string"),
    "event_time": ("timestamp",),
    "properties": ("map<string,string>",),
}
"""By name, the types that a column may have, as Spark's DDL has them."""
assert all(TYPES[Table.EVENTS][name] in types for name, types in TAKEN.items())

_US_A_MS: Final = 1000

Batch = Any  # pyarrow ships no types
Event = bytes | StructuredEvent


def check_columns(columns: Sequence[tuple[str, str]]) -> None:
    """Refuse columns, names with their types, that can't be written."""
    known = ", ".join(f"{name} {' or '.join(types)}" for name, types in TAKEN.items())
    for name, kind in columns:
        if name in TAKEN and kind in TAKEN[name]:
            continue
        if name in TAKEN:
            what = f"column {name} is {kind}"
        elif name in TYPES[Table.EVENTS]:
            what = f"column {name} is given by the stream, and can't be written"
        else:
            what = f"there is no place for column {name}"
        raise RefusedError(
            f"{what}: a write takes {known}", remedy="Choose columns with select, and cast them"
        )
    if PAYLOAD not in [name for name, _ in columns]:
        raise RefusedError(
            "there is no column payload to write",
            remedy=f"Name it so with alias; there are {known}",
        )


def events_of(batch: Batch) -> Iterator[Event]:
    """Return the events of a batch of rows; refuse one that can't be an event."""
    names = batch.schema.names
    payloads = _binary(batch.column(PAYLOAD))
    if names == [PAYLOAD]:
        for payload in payloads:
            yield _present(payload)
        return
    nulls = [None] * batch.num_rows
    keys = _binary(batch.column("key")) if "key" in names else nulls
    times = _times_ms(batch.column("event_time")) if "event_time" in names else nulls
    attached = batch.column("properties").to_pylist() if "properties" in names else nulls
    for payload, key, time_ms, pairs in zip(payloads, keys, times, attached, strict=True):
        yield StructuredEvent(
            payload=_present(payload),
            key=key,
            event_time_ms=time_ms,
            properties=_properties(pairs),
        )


def _binary(column: Any) -> list[bytes | None]:  # noqa: ANN401
    # Of a string these are the bytes in UTF-8.
    found: list[bytes | None] = column.cast(pa.binary()).to_pylist()
    return found


def _times_ms(column: Any) -> list[int | None]:  # noqa: ANN401
    times = column.cast(pa.timestamp("us", column.type.tz)).cast(pa.int64()).to_pylist()
    return [None if one is None else one // _US_A_MS for one in times]


def _present(payload: bytes | None) -> bytes:
    if payload is None:
        raise RefusedError(
            "a row has no payload, and an event has one",
            remedy="Leave such rows out: where payload is not null",
        )
    return payload


def _properties(pairs: Sequence[tuple[str, str | None]] | None) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in pairs or ():
        if value is None:
            raise RefusedError(
                f"property {name[:80]!r} of a row has no value, and properties are texts",
                remedy="Leave it out: map_filter(properties, (k, v) -> v is not null)",
            )
        found[name] = value
    return found


def _size_of(event: Event) -> int:
    if isinstance(event, bytes):
        return EVENT_LEN_LEN + len(event)
    named = sum(len(name) + len(value) for name, value in event.properties.items())
    return EVENT_LEN_LEN + len(event.payload) + len(event.key or b"") + named


@dataclass(slots=True)
class EntryPacker:
    """Makes entries of about ``entry_bytes``; an event that is larger has one of its own."""

    update: AttributeUpdate
    entry_bytes: int
    entries: int = 0
    _events: list[Event] = field(default_factory=list)
    _size: int = 0

    def pack(self, events: Iterable[Event], *, now_ms: int) -> Iterator[tuple[bytes, int]]:
        """Return the entries that are full, each with its time of publishing."""
        for event in events:
            size = _size_of(event)
            if self._events and self._size + size > self.entry_bytes:
                yield self._entry(now_ms)
            self._events.append(event)
            self._size += size

    def rest(self, *, now_ms: int) -> Iterator[tuple[bytes, int]]:
        """Return what is left, if anything is."""
        if self._events:
            yield self._entry(now_ms)

    def _entry(self, now_ms: int) -> tuple[bytes, int]:
        updates = () if self.entries else (self.update,)
        data = encode_entry(self._events, publish_time_ms=now_ms, attribute_updates=updates)
        self.entries += 1
        self._events, self._size = [], 0
        return data, now_ms
