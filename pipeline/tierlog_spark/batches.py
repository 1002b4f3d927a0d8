"""Columns of events as Arrow record batches (pure).

Owns the bytes that Spark is given: no row is ever a Python object, but for structured events.

Arrays are made of buffers: ``pa.array`` and ``pa.scalar`` ask whether they are given something of
pandas, and import it for that, which costs a fresh worker more than its first task.

Invariants:
    * A batch has the columns that are asked for, of exactly the types that Spark expects, and at
      most ``ROWS_MAX`` rows.
    * Bytes of payloads are copied once, and only when they are asked for.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final
from uuid import UUID

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tierlog.model.errors import RefusedError
from tierlog_spark.columns import PAYLOAD
from tierlog_spark.decoding import EventColumns
from tierlog_spark.headers import Int64s

ROWS_MAX: Final = 65_536
_US_A_MS: Final = 1000
# The end of the year 9999: a clock that was further off is shown as that.
_MS_MAX: Final = 253_402_300_799_999
# What an Arrow array of bytes can hold.
_BYTES_MAX: Final = 2**31 - 1

Array = Any  # pyarrow ships no types
Schema = Any


def record_batches(
    events: EventColumns, schema: Schema, *, stream: str, ledger_id: int
) -> Iterator[Any]:
    """Return the columns of ``schema``, in batches."""
    count = len(events.starts)
    for start in range(0, count, ROWS_MAX):
        some = events if count <= ROWS_MAX else events.between(start, start + ROWS_MAX)
        arrays = [_column(some, field, stream, ledger_id) for field in schema]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _column(events: EventColumns, field: Any, stream: str, ledger_id: int) -> Array:  # noqa: ANN401
    count = len(events.starts)
    if field.name == "stream":
        return pa.repeat(_texts([stream], field.type)[0], count)
    if field.name == "ledger_id":
        return _numbers(np.full(count, ledger_id, np.int64), field.type)
    return _MAKERS[field.name](events, field.type)


def _publish_time(events: EventColumns, kind: Any) -> Array:  # noqa: ANN401
    publish_ms = events.entries.publish_ms
    if publish_ms is None:
        return pa.nulls(len(events.starts), kind)
    times = np.clip(publish_ms, -_MS_MAX, _MS_MAX) * _US_A_MS
    return _numbers(times[events.entry_rows], kind)


def _writer_id(events: EventColumns, kind: Any) -> Array:  # noqa: ANN401
    names = _texts([str(UUID(bytes=one)) for one in events.entries.writers], kind)
    of_entries = events.entries.writer_rows
    if len(names) == 1 and bool((of_entries == 0).all()):
        return pa.repeat(names[0], len(events.starts))
    rows = of_entries[events.entry_rows]
    return names.take(_numbers(rows, pa.int64(), valid=rows >= 0))


def _event_number(events: EventColumns, kind: Any) -> Array:  # noqa: ANN401
    entries, rows = events.entries, events.entry_rows
    numbers = entries.first_numbers[rows] + events.event_indexes
    has_number = entries.writer_rows >= 0
    return _numbers(numbers, kind, valid=None if has_number.all() else has_number[rows])


def _entry_id(events: EventColumns, kind: Any) -> Array:  # noqa: ANN401
    return _numbers(events.entries.entry_ids[events.entry_rows], kind)


def _event_time(events: EventColumns, kind: Any) -> Array:  # noqa: ANN401
    if events.details is None:
        return pa.nulls(len(events.starts), kind)
    times = [
        one if one is None else max(-_MS_MAX, min(one, _MS_MAX)) * _US_A_MS
        for one in events.details.event_times_ms
    ]
    return pa.array(times, pa.int64()).cast(kind)


def _key(events: EventColumns, kind: Any) -> Array:  # noqa: ANN401
    if events.details is None:
        return pa.nulls(len(events.starts), kind)
    return pa.array(events.details.keys, kind)


def _properties(events: EventColumns, kind: Any) -> Array:  # noqa: ANN401
    if events.details is None:
        return pa.nulls(len(events.starts), kind)
    return pa.array([list(one.items()) for one in events.details.properties], kind)


def _payload(events: EventColumns, kind: Any) -> Array:  # noqa: ANN401
    count = len(events.starts)
    if count == 0:
        return pa.nulls(0, kind)
    ends = events.starts + events.lens
    if int(ends[-1]) > _BYTES_MAX:
        raise RefusedError(
            f"events of {int(ends[-1])} bytes at once are more than Spark takes",
            remedy="Leave the payload out: payload=false",
        )
    # Payloads and what lies between them, as one array over the bytes as they are; then every
    # other one of it, which copies them together.
    places = np.empty(2 * count, np.int32)
    places[0::2], places[1::2] = events.starts, ends
    buffers = [None, pa.py_buffer(places), pa.py_buffer(events.buffer)]
    everything = pa.Array.from_buffers(kind, 2 * count - 1, buffers)
    return everything.take(_numbers(np.arange(0, 2 * count - 1, 2), pa.int64()))


def _numbers(values: Int64s, kind: Any, *, valid: NDArray[np.bool_] | None = None) -> Array:  # noqa: ANN401
    """Return numbers as a type of 8 bytes, or as a shorter one; null where they are not valid."""
    present = None
    if valid is not None and not valid.all():
        present = pa.py_buffer(np.packbits(valid, bitorder="little"))
    of_long = kind if kind.bit_width == np.dtype(np.int64).itemsize * 8 else pa.int64()
    buffers = [present, pa.py_buffer(np.ascontiguousarray(values, np.int64))]
    return pa.Array.from_buffers(of_long, len(values), buffers).cast(kind)


def _texts(texts: Sequence[str], kind: Any) -> Array:  # noqa: ANN401
    encoded = [text.encode() for text in texts]
    bounds = np.cumsum([0, *map(len, encoded)], dtype=np.int32)
    buffers = [None, pa.py_buffer(bounds), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(kind, len(encoded), buffers)


_MAKERS: Final[Mapping[str, Callable[[EventColumns, Any], Array]]] = {
    "entry_id": _entry_id,
    "event_index": lambda events, kind: _numbers(events.event_indexes, kind),
    "publish_time": _publish_time,
    "writer_id": _writer_id,
    "event_number": _event_number,
    "event_time": _event_time,
    "key": _key,
    "properties": _properties,
    PAYLOAD: _payload,
}
