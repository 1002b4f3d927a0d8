"""The write side of ``format("tierlog")``: staged by tasks, attached by the driver (ADR-0031).

Owns Spark's classes of it, and who a write's writer is: a streaming query by its id, and its
batches by theirs; a batch write by an id of its own, or what the options say. Does not own
staging, attaching or cleaning up (``tierlog.client.staging``), nor the entries (``encoding``).

Invariants:
    * Nothing is in the stream before the driver commits, and then all is.
    * A commit that is repeated, by the same writer with the same number, changes nothing. Spark
      repeats none but a query's last batch, so a query whose number is higher is refused.
    * What an aborted write staged is deleted, but never what a commit attached: whether a failed
      commit did is not known here, and the metadata store knows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from tierlog.client.staging import SyncStaging, number_update
from tierlog.model.errors import RefusedError
from tierlog.model.ids import LedgerId
from tierlog.wiring.build import system_clock, system_ids
from tierlog_spark.encoding import EntryPacker, check_columns, events_of
from tierlog_spark.write_options import WriteOptions, number_of, writer_of

QUERY_ID: Final = "sql.streaming.queryId"
BATCH_ID: Final = "streaming.sql.batchId"


@dataclass(frozen=True)
class Wrote(WriterCommitMessage):
    """What a task staged; ``ledger_id`` None: it had no rows."""

    writer_id: UUID
    ledger_id: LedgerId | None
    size: int


def checked_schema(schema: StructType, *, overwrite: bool) -> None:
    """Refuse rows that can't be events, and to replace what a stream has."""
    check_columns([(field.name, field.dataType.simpleString()) for field in schema.fields])
    if overwrite:
        raise RefusedError(
            "a stream is only appended to, and this write is to replace what it has",
            remedy='Write with mode("append"); let retention trim what is old',
        )


class EventWriter(DataSourceArrowWriter):
    """Writes a batch, once."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options
        self._writer_id = options.writer_id or system_ids().uuid()
        self._number = options.number or 1
        # Refused here, with one error, and not by each task.
        with SyncStaging(options.settings) as staging:
            staging.check(options.stream)

    def write(self, iterator: Iterator[Any]) -> Wrote:
        return stage(self._options, self._writer_id, self._number, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        commit(self._options, self._writer_id, self._number, messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        del messages
        abandon(self._options, self._writer_id, self._number)


class EventStreamWriter(DataSourceStreamArrowWriter):
    """Writes the batches of a streaming query, each once."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[Any]) -> Wrote:
        context = TaskContext.get()
        query = context.getLocalProperty(QUERY_ID) if context is not None else None
        batch = context.getLocalProperty(BATCH_ID) if context is not None else None
        if query is None or batch is None:
            raise RefusedError(
                "Spark does not say which batch of which query a task writes",
                remedy="Use PySpark 4.2, and writeStream",
            )
        return stage(self._options, writer_of(query), number_of(int(batch)), iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        writer_id = _writer_of(messages)
        if writer_id is not None:
            number = number_of(batchId)
            there = commit(self._options, writer_id, number, messages, tell_newest=True)
            check_newest(self._options.stream, batchId, ahead=there - number)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        writer_id = _writer_of(messages)
        if writer_id is not None:
            abandon(self._options, writer_id, number_of(batchId))


def _writer_of(messages: Sequence[WriterCommitMessage | None]) -> UUID | None:
    """Return the query's id; None: no task ended, so that none is known."""
    return next((one.writer_id for one in wrote(messages)), None)


def wrote(messages: Sequence[WriterCommitMessage | None]) -> list[Wrote]:
    """Return what those tasks say that ended."""
    return [one for one in messages if isinstance(one, Wrote)]


def stage(options: WriteOptions, writer_id: UUID, number: int, batches: Iterator[Any]) -> Wrote:
    """Write the rows of one task to a staging ledger of its own, if there are any."""
    packer = EntryPacker(number_update(writer_id, number), options.entry_bytes)
    clock = system_clock()

    def entries() -> Iterator[tuple[bytes, int]]:
        for batch in batches:
            yield from packer.pack(events_of(batch), now_ms=clock.wall_ms())
        yield from packer.rest(now_ms=clock.wall_ms())

    made = entries()
    first = next(made, None)
    if first is None:
        return Wrote(writer_id, None, 0)

    def all_entries() -> Iterator[tuple[bytes, int]]:
        yield first
        yield from made

    with SyncStaging(options.settings) as staging:
        staged = staging.write(
            options.stream,
            all_entries(),
            writer_id=writer_id,
            number=number,
            key_id=options.key_id,
        )
    return Wrote(writer_id, staged.ledger_id, staged.size)


def commit(
    options: WriteOptions,
    writer_id: UUID,
    number: int,
    messages: Sequence[WriterCommitMessage | None],
    *,
    tell_newest: bool = False,
) -> int:
    """Attach what the tasks staged, unless the number, or a higher one, is in the stream already.

    ``tell_newest``: return the number that the stream has then, else the one given.
    """
    done = wrote(messages)
    ledger_ids = [one.ledger_id for one in done if one.ledger_id is not None]
    if not ledger_ids:
        return number
    size = sum(one.size for one in done)
    with SyncStaging(options.settings) as staging:
        return staging.attach(
            options.stream,
            ledger_ids,
            writer_id=writer_id,
            number=number,
            size=size,
            tell_newest=tell_newest,
        )


def check_newest(stream: str, batch_id: int, *, ahead: int) -> None:
    """Refuse a batch of a query of which the stream has one that is ``ahead`` of it."""
    if ahead > 0:
        raise RefusedError(
            f"stream {stream} has batch {batch_id + ahead} of this query already, and this is "
            f"batch {batch_id}, which is not written behind it: the query's checkpoint is older "
            "than the stream, or another query goes on with a copy of it",
            remedy="Give this query a new checkpoint, and have its source begin behind what is in "
            "the stream; or stop it, where the other one goes on",
        )


def abandon(options: WriteOptions, writer_id: UUID, number: int) -> None:
    """Delete what tasks staged in vain."""
    with SyncStaging(options.settings) as staging:
        staging.sweep(options.stream, writer_id=writer_id, through=number)
