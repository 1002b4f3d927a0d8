"""Streaming reads: each batch is what became complete in the bucket since the one before.

Owns asking the bucket how far a batch may go, and planning it between two offsets. Does not own
offsets (``offsets``), nor the parts' cutting (``driving``).

Invariant: what lies between two offsets is the same rows whenever it is planned, or an error.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import structlog
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from tierlog.model.errors import Reason, RefusedError
from tierlog.model.ids import StreamName
from tierlog.model.manifest import ManifestLedger
from tierlog.model.position import Position
from tierlog.offload.manifests import KnownManifest
from tierlog_spark.bucket import opened
from tierlog_spark.columns import Table
from tierlog_spark.driving import Part, has_wanted_rows, store_parts_of, with_times
from tierlog_spark.offsets import (
    BEGINNING,
    Budget,
    ReadableLedger,
    advanced_all,
    capped,
    from_json,
    to_json,
)
from tierlog_spark.options import ReadMode, ReadOptions
from tierlog_spark.parts import read_part
from tierlog_spark.planning import ALL, Range, check_single, copied_alone, wanted_of

log = structlog.get_logger()
Readable = dict[StreamName, list[ReadableLedger]]


class EventStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads events batch by batch."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        _check(options)
        self.options = options
        self.schema = schema
        self._target: dict[StreamName, Position] | None = None
        self._latest: dict[str, str] | None = None

    def initialOffset(self) -> dict[str, str]:  # noqa: N802 - Spark's names
        return to_json(asyncio.run(_initial(self.options)))

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        options = self.options
        if options.trigger_entries is not None:
            return ReadMaxRows(options.trigger_entries)
        if options.trigger_bytes is not None:
            return ReadMaxBytes(options.trigger_bytes)
        return ReadAllAvailable()

    def latestOffset(  # noqa: N802
        self, start: Mapping[str, str], limit: ReadLimit
    ) -> dict[str, str]:
        readable = asyncio.run(_readable(self.options))
        # A partition that had nothing when the query began has something by now.
        before = {**dict.fromkeys(readable, BEGINNING), **from_json(start)}
        everything = advanced_all(before, readable, Budget())
        self._latest = to_json(everything)
        found = advanced_all(before, readable, _budget(self.options, limit))
        return to_json(found if self._target is None else capped(before, found, self._target))

    def reportLatestOffset(self) -> dict[str, str] | None:  # noqa: N802
        return self._latest

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        readable = asyncio.run(_readable(self.options))
        self._target = advanced_all(dict.fromkeys(readable, BEGINNING), readable, Budget())

    def partitions(
        self, start: Mapping[str, str], end: Mapping[str, str]
    ) -> Sequence[InputPartition]:
        return [InputPartition(one) for one in asyncio.run(_plan(self.options, start, end))]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return read_part(partition.value, self.options, self.schema)


def _check(options: ReadOptions) -> None:
    if options.table is not Table.EVENTS or not options.streams:
        what = "only events of streams are read as a stream"
    elif options.mode is not ReadMode.DIRECT:
        what = f"readMode={options.mode} is for reads that end: a streaming read is direct"
    elif options.end is not None:
        what = "a streaming read has no end: stop the query, or trigger it with availableNow"
    else:
        return
    raise RefusedError(f"readStream: {what}", remedy="See the how-to read-with-spark")


def _budget(options: ReadOptions, limit: ReadLimit) -> Budget:
    if isinstance(limit, ReadAllAvailable):
        return Budget()
    entries, length = options.trigger_entries, options.trigger_bytes
    if isinstance(limit, ReadMaxRows):
        entries = limit.max_rows
    if isinstance(limit, ReadMaxBytes):
        length = limit.max_bytes
    return Budget(entries, length)


async def _initial(options: ReadOptions) -> dict[StreamName, Position]:
    readable = await _readable(options)
    if options.start is not None:
        check_single(options.streams[0], len(readable), Range(start=options.start))
        return {options.streams[0]: options.start}
    return {
        name: Position(ledgers[0].ledger_id, BEGINNING.entry_id) if ledgers else BEGINNING
        for name, ledgers in readable.items()
    }


async def _readable(options: ReadOptions) -> Readable:
    """Return the ledgers of each stream that can be read now, in order."""
    async with opened(options.s3, fetch_bytes=options.fetch_bytes) as bucket:
        return {
            known.stream: readable_of(bucket.ledgers_of(known))
            for known in await bucket.streams(options.streams)
        }


def readable_of(ledgers: Sequence[ManifestLedger]) -> list[ReadableLedger]:
    """Return those before the first that has no copy yet."""
    found = []
    for one in ledgers:
        listed = one.listed
        if one.copy is None and listed.entry_count:
            break
        found.append(
            ReadableLedger(
                ledger_id=listed.ledger_id, entry_count=listed.entry_count, length=listed.length
            )
        )
    return found


async def _plan(
    options: ReadOptions, start: Mapping[str, str], end: Mapping[str, str]
) -> list[Part]:
    first, behind = from_json(start), from_json(end)
    bounds, found = with_times(ALL, options), list[Part]()
    async with opened(options.s3, fetch_bytes=options.fetch_bytes) as bucket:
        for known in await bucket.streams(options.streams):
            stop = behind.get(known.stream, BEGINNING)
            within = Range(start=first.get(known.stream, BEGINNING), end=stop)
            if within.start == stop:
                continue
            _check_loss(known, within, options)
            if has_wanted_rows(known, bounds, options):
                wanted = copied_alone(wanted_of(bucket.ledgers_of(known), within, bounds), within)
                found += await store_parts_of(bucket, known, wanted, bounds, options)
    return found


def _check_loss(known: KnownManifest, within: Range, options: ReadOptions) -> None:
    """Refuse to go on where entries were trimmed that nobody has read; or say so and go on."""
    assert known.head is not None
    assert within.start is not None
    trimmed = known.head.trimmed_through
    if within.start == BEGINNING or within.start.ledger_id > trimmed:
        return
    if options.fail_on_data_loss:
        raise RefusedError(
            f"stream {known.stream} was trimmed up to ledger {trimmed}, and the query had read "
            f"up to {within.start}",
            reason=Reason.TRIMMED,
            remedy="Go on without what was trimmed: failOnDataLoss=false",
            details={"stream": known.stream},
        )
    log.warning(
        "spark.entries_lost", stream=known.stream, position=str(within.start), trimmed=trimmed
    )
