"""What one task of an export does: events to Parquet files, by the days of their publish times.

Owns cutting by day, and the files. Does not own which of them count: that says a commit
(``log``), which names what tasks hand back; what a lost attempt of a task wrote is in none.

Invariants:
    * Each event that comes in is in one file that is handed back, once.
    * About ``file_bytes`` of events are held, and one file beside them.
    * A file is handed back when it is there to stay.

Arrays are made of buffers here, too, so that nobody imports pandas (``tierlog_spark.batches``).
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from tierlog.model.errors import RefusedError
from tierlog_spark.jobs.export.log import NO_DATE, ExportedFile, file_name
from tierlog_spark.jobs.export.targets import Target
from tierlog_spark.jobs.export.values import VALUE, ValueSchema

COMPRESSION: Final = "zstd"
_US_A_DAY: Final = 86_400_000_000

Batch = Any  # pyarrow ships no types
FileRow = Mapping[str, Any]
"""What there is to know of a file: its name, rows, bytes and sha256, and how many rows are bad."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteTask:
    """What every task of a batch is told; ``target`` is the stream's."""

    target: Target
    number: int
    run: str
    file_bytes: int
    schema: ValueSchema | None = None
    keep_bad: bool = False
    payload: bool = True


def written(task: WriteTask, batches: Iterable[Batch], *, attempt: int) -> Iterator[FileRow]:
    """Write events; iterate over what there is to know of each file."""
    files = _Files(task, attempt)
    for batch in batches:
        if batch.num_rows == 0:
            continue
        events, bad = with_values(task, batch)
        for date, some in by_day(events, bad):
            yield from files.add(date, *some)
    yield from files.finish()


def with_values(task: WriteTask, batch: Batch) -> tuple[Batch, Any]:
    """Return a batch as it is written, and for each row whether it is not of the schema."""
    bad = np.zeros(batch.num_rows, np.bool_)
    if task.schema is not None:
        values, bad = task.schema.values(batch)
        if bad.any() and not task.keep_bad:
            raise _not_of(task.schema, batch, int(np.argmax(bad)))
        if VALUE in batch.schema.names:
            batch = batch.drop_columns([VALUE])
        batch = batch.append_column(VALUE, values)
    if not task.payload:
        batch = batch.drop_columns(["payload"])
    return batch, bad


def _not_of(schema: ValueSchema, batch: Batch, row: int) -> RefusedError:
    place = {
        name: batch.column(name)[row].as_py()
        for name in ("stream", "ledger_id", "entry_id", "event_index")
    }
    return RefusedError(
        f"stream {place['stream']}: event {place['event_index']} of entry "
        f"{place['ledger_id']}:{place['entry_id']} is not {schema.what}",
        remedy="Correct the schema; or keep such events, their value null: --keep-bad",
    )


def by_day(batch: Batch, bad: Any) -> Iterator[tuple[str, tuple[Batch, int]]]:  # noqa: ANN401
    """Cut a batch by the days of its publish times, and count what is bad of each day."""
    times = batch.column("publish_time")
    if times.null_count == len(times):
        yield NO_DATE, (batch, int(bad.sum()))
        return
    assert times.null_count == 0, "a stream is raw, or it is not"
    assert times.type.unit == "us", times.type
    days = np.frombuffer(times.buffers()[1], np.int64, len(times), 8 * times.offset) // _US_A_DAY
    for day in np.unique(days).tolist():
        wanted = days == day
        whole = bool(wanted.all())
        some = batch if whole else batch.filter(_bools(wanted))
        yield str(np.datetime64(day, "D")), (some, int(bad[wanted].sum()))


def _bools(values: NDArray[np.bool_]) -> Any:  # noqa: ANN401
    packed = pa.py_buffer(np.packbits(values, bitorder="little"))
    return pa.Array.from_buffers(pa.bool_(), len(values), [None, packed])


@dataclass(slots=True)
class _Held:
    batches: list[Batch]
    length: int = 0
    bad: int = 0


class _Files:
    """Events by day, until they are enough for a file."""

    def __init__(self, task: WriteTask, attempt: int) -> None:
        self._task = task
        self._attempt = attempt
        self._held: dict[str, _Held] = {}
        self._length = 0
        self._count = 0

    def add(self, date: str, batch: Batch, bad: int) -> Iterator[FileRow]:
        """Take events of a day; write what is too much, the largest first."""
        held = self._held.setdefault(date, _Held([]))
        held.batches.append(batch)
        held.length += batch.nbytes
        held.bad += bad
        self._length += batch.nbytes
        while self._length > self._task.file_bytes:
            largest = max(self._held, key=lambda one: self._held[one].length)
            yield self._write(largest)

    def finish(self) -> Iterator[FileRow]:
        """Write what is left."""
        for date in sorted(self._held):
            yield self._write(date)

    def _write(self, date: str) -> FileRow:
        held = self._held.pop(date)
        self._length -= held.length
        table = pa.Table.from_batches(held.batches)
        sink = pa.BufferOutputStream()
        # Without Arrow's own schema times are UTC's for every reader, whatever the session's zone.
        pq.write_table(table, sink, compression=COMPRESSION, store_schema=False)
        body = memoryview(sink.getvalue())
        task = self._task
        name = file_name(
            date=date, number=task.number, run=task.run, task=self._attempt, index=self._count
        )
        self._count += 1
        task.target.put(name, body)
        return {
            "name": name,
            "rows": table.num_rows,
            "bytes": len(body),
            "sha256": hashlib.sha256(body).hexdigest(),
            "bad": held.bad,
        }


def file_of(row: FileRow) -> ExportedFile:
    """Return what a task says of a file."""
    return ExportedFile(
        name=row["name"], rows=row["rows"], bytes=row["bytes"], sha256=row["sha256"]
    )
