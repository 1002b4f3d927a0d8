"""The job ``export``: what became readable since the run before, to Parquet files.

Owns the order: what is there, the claim, what the run before left, then batch by batch the files
and the commit that names them. Does not own the decisions (``steps``, ``log``), nor how a
batch is written (``tasks``).

Invariants:
    * A batch counts when its commit is written, all of it at once. A run that is killed before
      leaves files that no commit names; the next one deletes them. One that fails deletes its own,
      as far as it can.
    * One run writes at a time: another one that claims the log overtakes it.
    * A stream that can't be exported keeps no other one from being exported.
"""

import asyncio
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from tierlog.model.errors import (
    IndeterminateError,
    Reason,
    RefusedError,
    RetryableError,
    TierlogError,
)
from tierlog.model.ids import StreamName
from tierlog_spark.bucket import opened
from tierlog_spark.jobs.export.log import (
    ExportedFile,
    Kind,
    Record,
    encode_record,
    files_of_run,
    left_behind,
    live_numbers,
    record_name,
)
from tierlog_spark.jobs.export.options import ExportOptions
from tierlog_spark.jobs.export.records import read_records, shorten
from tierlog_spark.jobs.export.steps import (
    Source,
    Step,
    beginning,
    behind_trimmed,
    check_incarnations,
    incarnations_of,
    is_missing_some,
    steps,
    was_lost_unread,
)
from tierlog_spark.jobs.export.targets import Target, target_of
from tierlog_spark.jobs.export.tasks import write_batch
from tierlog_spark.jobs.export.writing import FileRow, WriteTask, file_of
from tierlog_spark.jobs.frame import JobReport, JobRun, plain_spark_errors
from tierlog_spark.options import FETCH_BYTES
from tierlog_spark.streaming import readable_of

_COUNTS = ("entries", "source_bytes", "events", "bad", "files", "file_bytes", "commits", "removed")


@dataclass(slots=True)
class _Done:
    """What was done for one stream, up to ``error`` if there was one."""

    stream: str
    start: dict[str, str] = field(default_factory=dict)
    to: dict[str, str] = field(default_factory=dict)
    trimmed_unread: bool = False
    entries: int = 0
    source_bytes: int = 0
    events: int = 0
    bad: int = 0
    files: int = 0
    file_bytes: int = 0
    commits: int = 0
    removed: int = 0
    error: str | None = None

    def take(self, step: Step) -> None:
        """Count a batch that is exported, or would be."""
        self.to = _text(step.to)
        self.entries += step.entries
        self.source_bytes += step.length

    def row(self) -> dict[str, Any]:
        return {
            "stream": self.stream,
            "from": self.start,
            "to": self.to,
            **{name: getattr(self, name) for name in _COUNTS},
            "trimmed_unread": self.trimmed_unread,
            "error": self.error,
        }


def export(run: JobRun, options: ExportOptions) -> JobReport:
    """Export streams; not to be called on a running loop.

    Raises the error of a stream only if all of them failed: of others ``counts["failed"]`` and the
    ``error`` of their rows tell.
    """
    return export_to(run, options, target_of(options.to, options.s3))


def export_to(run: JobRun, options: ExportOptions, target: Target) -> JobReport:
    """Export streams to an opened place; raise if none of them can be exported."""
    names = options.names()
    if options.schema is not None:
        options.schema.check()
    begun_s = run.clock.monotonic_s()
    run_id = run.ids.uuid().hex
    streams = [_Stream(run, options, target.below(name), name, run_id) for name in names]
    errors = [error for one in streams if (error := _error_of(one)) is not None]
    if len(errors) == len(streams):
        raise errors[0]
    rows = [one.done.row() for one in streams]
    counts: dict[str, int | float] = {name: sum(int(row[name]) for row in rows) for name in _COUNTS}
    counts["failed"] = len(errors)
    counts["seconds"] = round(run.clock.monotonic_s() - begun_s, 3)
    return JobReport(job="export", dry_run=run.dry_run, counts=counts, rows=rows)


def _error_of(stream: "_Stream") -> Exception | None:
    """Export a stream; return what ended it, which may concern no other one."""
    try:
        with plain_spark_errors():
            stream.export()
    except TierlogError as error:
        if error.reason is Reason.FENCED:
            # The other run goes on with all of them.
            raise
        stream.done.error = str(error)
        return error
    except (OSError, PySparkException, Py4JError) as error:
        # Pages of Spark's begin with what happened.
        stream.done.error = str(error).partition("\n")[0]
        return error
    return None


@dataclass(frozen=True, slots=True)
class _Known:
    """What the log says: its newest record, and those among whose files something may be left."""

    newest: Record | None
    doubtful: Sequence[Record]
    files: Sequence[str]

    @property
    def cleaned_below(self) -> int:
        return 0 if self.newest is None else self.newest.cleaned_below

    def left_below(self, number: int) -> list[str]:
        """Return the files that no commit names, once that number is claimed."""
        return left_behind(
            self.files, self.doubtful, cleaned_below=self.cleaned_below, below=number
        )


@dataclass(slots=True)
class _Stream:
    """The export of one stream, its partitions together."""

    run: JobRun
    options: ExportOptions
    target: Target
    name: StreamName
    run_id: str
    newest: Record | None = field(default=None, init=False)
    done: _Done = field(init=False)

    def __post_init__(self) -> None:
        self.done = _Done(stream=self.name)

    def export(self) -> None:
        known = self._known()
        self.newest = known.newest
        sources = asyncio.run(_sources(self.options, self.name))
        exported = {} if self.newest is None else self.newest.to
        before = beginning(sources, exported)
        streams = {} if self.newest is None else self.newest.incarnations
        place, skip = self.target.place, self.options.skip_trimmed
        missing = is_missing_some(sources, exported, skip=skip, place=place)
        check_incarnations(sources, before, streams, place)
        gaps = [
            was_lost_unread(
                one, before[one.stream], streams.get(one.stream), skip=skip, place=place
            )
            for one in sources
        ]
        start = behind_trimmed(sources, before)
        wanted = list(steps(sources, start, batch_bytes=self.options.batch_bytes))
        done = self.done
        done.start, done.to = _text(before), _text(start)
        done.trimmed_unread = missing or any(gaps)
        claimed = self._next_number
        left = known.left_below(claimed + 1)
        if self.run.dry_run:
            done.removed = len(left)
            for step in wanted:
                done.take(step)
            return
        if not (wanted or left or any(gaps)):
            return
        incarnations = incarnations_of(sources, streams)
        self._append(self._record(Kind.CLAIM, before, start, incarnations, known.cleaned_below))
        # Whoever wrote these can't name them any more: the number for that is taken.
        self.target.delete(left)
        done.removed = len(left)
        shorten(self.target, known.files, cleaned_below=known.cleaned_below)
        for step, files, bad in self._batches(wanted):
            record = self._record(Kind.COMMIT, step.start, step.to, incarnations, claimed)
            self._append(replace(record, files=tuple(files), bad=bad))
            done.take(step)
            done.commits += 1
            done.events += sum(one.rows for one in files)
            done.bad += bad
            done.files += len(files)
            done.file_bytes += sum(one.bytes for one in files)

    def _batches(self, wanted: Sequence[Step]) -> Iterator[tuple[Step, list[ExportedFile], int]]:
        done, total = 0, sum(step.length for step in wanted)
        what = f"export {self.name}"
        self.run.progress(what, done, total)
        for step in wanted:
            rows = self._rows(step)
            files = sorted((file_of(row) for row in rows), key=lambda one: one.name)
            yield step, files, sum(row["bad"] for row in rows)
            done += step.length
            self.run.progress(what, done, total)

    def _rows(self, step: Step) -> Sequence[FileRow]:
        """Have a batch written; of one that fails, take away what is there of it."""
        try:
            rows = write_batch(self.run, self.options, step, self._task())
            self._check_seen(rows)
        except Exception:
            # What a task writes that is still at work, or can't be deleted now, the next run finds.
            with contextlib.suppress(TierlogError, OSError):
                names = self.target.names()
                self.target.delete(files_of_run(names, self._next_number, self.run_id))
            raise
        return rows

    def _check_seen(self, rows: Sequence[FileRow]) -> None:
        """Refuse to name what lies elsewhere: each executor has a folder of its own."""
        unseen = self.target.unseen({row["name"]: row["bytes"] for row in rows})
        if not unseen:
            return
        # A run that took our number has deleted our files: it is told of when we want to commit.
        (taken,) = self.target.get([record_name(self._next_number)])
        if taken is None:
            raise RefusedError(
                f"executors wrote {len(unseen)} files that are not there for the driver, as "
                f"{self.target.place}/{unseen[0]}: they don't share that folder",
                remedy="Export to a folder that is mounted on the driver and on all executors, or "
                "to s3://BUCKET/PREFIX",
                details={"stream": self.name},
            )

    def _task(self) -> WriteTask:
        return WriteTask(
            target=self.target,
            number=self._next_number,
            run=self.run_id,
            file_bytes=self.options.file_bytes,
            schema=self.options.schema,
            keep_bad=self.options.keep_bad,
            payload=self.options.payload,
        )

    @property
    def _next_number(self) -> int:
        return 1 if self.newest is None else self.newest.number + 1

    def _known(self) -> _Known:
        names = self.target.names()
        _, numbers = live_numbers(names, self.target.place)
        if not numbers:
            return _Known(None, (), names)
        [newest] = read_records(self.target, numbers[-1:])
        wanted = [one for one in numbers if one >= newest.cleaned_below]
        return _Known(newest, read_records(self.target, wanted), names)

    def _record(
        self,
        kind: Kind,
        start: Mapping[StreamName, Any],
        to: Mapping[StreamName, Any],
        incarnations: Mapping[StreamName, Any],
        cleaned_below: int,
    ) -> Record:
        return Record(
            number=self._next_number,
            kind=kind,
            run=self.run_id,
            start=start,
            to=to,
            incarnations=incarnations,
            cleaned_below=cleaned_below,
            written_ms=self.run.clock.wall_ms(),
        )

    def _append(self, record: Record) -> None:
        name, body = record_name(record.number), encode_record(record)
        try:
            is_ours = self.target.put_new(name, body)
        except (RetryableError, IndeterminateError):
            # It may be there all the same.
            is_ours = self.target.get([name]) == [body]
            if not is_ours:
                raise
        if not is_ours:
            raise RefusedError(
                f"another run took number {record.number} of the export's log "
                f"{self.target.place}, and goes on with it",
                reason=Reason.FENCED,
                remedy="Let one run at a time export a stream to a place",
            )
        self.newest = record


async def _sources(options: ExportOptions, name: StreamName) -> list[Source]:
    async with opened(options.s3, fetch_bytes=FETCH_BYTES) as bucket:
        found = []
        for known in await bucket.streams([name]):
            assert known.head is not None
            found.append(
                Source(
                    stream=known.stream,
                    incarnation=known.head.incarnation,
                    trimmed_through=known.head.trimmed_through,
                    ledgers=readable_of(bucket.ledgers_of(known)),
                )
            )
        return found


def _text(offsets: Mapping[StreamName, Any]) -> dict[str, str]:
    return {name: str(where) for name, where in sorted(offsets.items())}
