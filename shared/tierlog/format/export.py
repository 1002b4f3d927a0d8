"""Export copies: a ledger's events one by one, for whoever reads JSON (seeds/000, "break out").

One object, UTF-8, a line for each event in the order of the log, each a JSON object:

    ledger_id, entry_id    where it lies
    number                 from 0 on, within its entry; the batch is broken up
    event_number           its writer's number of it; left out where the writer keeps no state
    writer_id              likewise
    publish_time_ms        0 in a raw stream, which has none
    event_time_ms, key, properties    as the application attached them; left out where it did not
    value                  the event as text where it is UTF-8, else
    value_base64           its bytes; a key that is no text is a ``key_base64`` likewise

An entry of a raw stream is one event. Names are in this order, numbers are decimal integers.

Owns the lines. Does not own reading, nor writing objects.

Invariant: every event of an entry is one line, and nothing else is; what can't be read as entry
data is ``CorruptError``.
"""

import base64
import json
from collections.abc import Iterator, Mapping
from typing import Final

from tierlog.format.checksum import Buffer
from tierlog.format.entry import (
    EVENTS_LEN_MAX,
    Codec,
    Decompress,
    Entry,
    StructuredEvent,
    decode_entry,
)

CONTENT_TYPE: Final = "application/x-ndjson"


def lines_of(
    ledger_id: int,
    entry_id: int,
    data: Buffer,
    *,
    raw: bool,
    decompressors: Mapping[Codec, Decompress] | None = None,
    events_len_max: int = EVENTS_LEN_MAX,
) -> Iterator[bytes]:
    """Iterate over the lines of one entry; ``raw``: its stream was declared so.

    ``events_len_max``: compressed events that are longer are refused.
    """
    place: dict[str, object] = {"ledger_id": ledger_id, "entry_id": entry_id}
    if raw:
        line = {**place, "number": 0, "publish_time_ms": 0}
        yield _line(line, StructuredEvent(payload=bytes(data)))
        return
    entry = decode_entry(data)
    events = entry.structured_events(decompressors, events_len_max=events_len_max)
    for number, event in enumerate(events):
        line = {**place, "number": number, **_writer_of(entry, number)}
        line["publish_time_ms"] = entry.header.publish_time_ms
        yield _line(line, event)


def _writer_of(entry: Entry, number: int) -> dict[str, object]:
    header = entry.header
    if header.writer_id is None:
        return {}
    # The header's number is that of the last event of its append.
    event_number = header.event_number - header.event_count + 1 + number
    return {"event_number": event_number, "writer_id": str(header.writer_id)}


def _line(line: dict[str, object], event: StructuredEvent) -> bytes:
    if event.event_time_ms is not None:
        line["event_time_ms"] = event.event_time_ms
    if event.key is not None:
        line |= _text("key", event.key)
    if event.properties:
        line["properties"] = dict(sorted(event.properties.items()))
    line |= _text("value", event.payload)
    return json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def _text(name: str, value: bytes) -> dict[str, object]:
    try:
        return {name: value.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(value).decode("ascii")}
