"""How a batch of an export becomes tasks, each of which reads a part of it and writes its files.

Owns the two ways. Where Spark has nothing to do with the events, a task hands what it reads to
what it writes in its own process: as rows of Java, which they would be between two processes of
Python, small ones took nine tenths of the time. JSON is parsed by Spark, so there they are rows.
Does not own what a task reads (``tierlog_spark.reading``), nor its files (``writing``).

Invariants:
    * Both ways write the same events, and tell the same of each file.
    * Of copies in which a read finds no flipped byte nothing is told before they were compared.
"""

import asyncio
import contextlib
import functools
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from tierlog.runtime.logs import configure_logging
from tierlog.runtime.sections import LogSettings
from tierlog.runtime.settings import S3Settings, Settings
from tierlog_spark.columns import TYPES, Table
from tierlog_spark.driving import plan
from tierlog_spark.jobs.export.comparing import compare
from tierlog_spark.jobs.export.options import ExportOptions
from tierlog_spark.jobs.export.steps import Piece, Step
from tierlog_spark.jobs.export.writing import FileRow, WriteTask, written
from tierlog_spark.jobs.frame import JobRun
from tierlog_spark.options import FETCH_BYTES, ReadOptions, parse_options, place_options
from tierlog_spark.parts import arrow_schema
from tierlog_spark.planning import ALL, StorePart
from tierlog_spark.reading import store_batches
from tierlog_spark.source import schema_of
from tierlog_spark.worker import in_steps

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_RESULT_DDL: Final = "name string, rows bigint, bytes bigint, sha256 string, bad bigint"
_RESULT: Final = pa.schema(
    [
        ("name", pa.string()),
        ("rows", pa.int64()),
        ("bytes", pa.int64()),
        ("sha256", pa.string()),
        ("bad", pa.int64()),
    ]
)


def write_batch(
    run: JobRun, options: ExportOptions, step: Step, task: WriteTask
) -> Sequence[FileRow]:
    """Have a batch written; return what there is to know of each file."""
    parts = asyncio.run(_parts(options, step))
    if not parts:
        return []
    schema = options.schema
    rows: Sequence[FileRow]
    if schema is not None and schema.needs_rows:
        frame = schema.prepared(_frame(run, options, step))
        found = frame.mapInArrow(functools.partial(_write_rows, task), _RESULT_DDL).collect()
        rows = [row.asDict() for row in found]
    else:
        reads = run.spark.sparkContext.parallelize(parts, len(parts))
        rows = reads.mapPartitions(_ReadAndWrite(options.s3, task)).collect()
    # Behind the reads: what is right by then was so when it was read. Parts that compare did.
    compare(run, options.s3, parts)
    return rows


def _said(options: ExportOptions, piece: Piece) -> dict[str, str]:
    """Return what a read of a piece is told beside the place."""
    return {
        "stream": piece.stream,
        "start": str(piece.start),
        "end": str(piece.stop),
        "partitionBytes": str(options.file_bytes),
    }


def _frame(run: JobRun, options: ExportOptions, step: Step) -> "DataFrame":
    frames = [
        run.spark.read.format("tierlog")
        .options(**place_options(options.s3))
        .options(**_said(options, piece))
        .load()
        for piece in step.pieces
    ]
    return functools.reduce(lambda one, other: one.union(other), frames)


def _write_rows(task: WriteTask, batches: Iterable[Any]) -> Iterator[Any]:
    for row in written(task, batches, attempt=_attempt()):
        yield pa.RecordBatch.from_pylist([row], schema=_RESULT)


async def _parts(options: ExportOptions, step: Step) -> list[StorePart]:
    parts = [part for piece in step.pieces for part in await plan(_read(options, piece), ALL)]
    found = [part for part in parts if isinstance(part, StorePart)]
    assert len(found) == len(parts), "nobody is asked but the bucket"
    return found


def _read(options: ExportOptions, piece: Piece) -> ReadOptions:
    return parse_options(_said(options, piece), Settings.model_construct(s3=options.s3))


@dataclass(frozen=True, slots=True)
class _ReadAndWrite:
    """What a task does; pickled to it with no other settings than those of the bucket."""

    s3: S3Settings
    task: WriteTask

    def __call__(self, parts: Iterable[StorePart]) -> Iterator[FileRow]:
        configure_logging(LogSettings(level="warning"), service="spark")
        for part in parts:
            with contextlib.closing(_events(part, self.s3)) as batches:
                yield from written(self.task, batches, attempt=_attempt())


def _events(part: StorePart, s3: S3Settings) -> Generator[Any]:
    schema = arrow_schema(schema_of(Table.EVENTS, TYPES[Table.EVENTS]))
    return in_steps(store_batches(part, s3, schema, fetch_bytes=FETCH_BYTES))


def _attempt() -> int:
    """Return the number of the attempt that this task is; another one has another."""
    from pyspark import TaskContext  # noqa: PLC0415 - asked in the task

    context = TaskContext.get()
    assert context is not None
    return int(context.taskAttemptId())
