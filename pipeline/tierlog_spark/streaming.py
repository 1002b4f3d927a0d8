"""Streaming reads: each batch is what became readable since the one before.

Owns asking the bucket, or the readers, how far a batch may go, and planning it between two
offsets. Does not own offsets (``offsets``), nor the parts' cutting (``driving``).

Invariant: what lies between two offsets is the same rows whenever it is planned, or an error.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final
from uuid import UUID

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
from tierlog.model.ids import EntryId, LedgerId, StreamName
from tierlog.model.manifest import ManifestHead, ManifestLedger
from tierlog.model.partitions import whole_of
from tierlog.model.position import Position
from tierlog_spark.bucket import opened
from tierlog_spark.columns import Table
from tierlog_spark.driving import (
    Part,
    has_wanted_rows,
    manifest_of,
    service_parts,
    store_parts_of,
    with_times,
)
from tierlog_spark.offsets import (
    BEGINNING,
    Budget,
    Offsets,
    ReadableLedger,
    advanced_all,
    capped,
    from_json,
    incarnations_in,
    is_another,
    normal,
    to_json,
)
from tierlog_spark.options import ReadMode, ReadOptions
from tierlog_spark.parts import read_part
from tierlog_spark.planning import (
    ALL,
    Bounds,
    Range,
    check_range,
    check_single,
    copied_alone,
    intersection,
    trimmed_end_of,
    wanted_of,
)
from tierlog_spark.service import ListedStream, listed, reads_of

log = structlog.get_logger()
Readable = dict[StreamName, Sequence[ReadableLedger]]
_LAGS: Final = (
    "Read the bucket that the query began with; what it read through readers and is not offloaded "
    "yet comes with readMode=auto"
)


class EventStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads events batch by batch."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        _check(options)
        self.options = options
        self.schema = schema
        self._target: dict[StreamName, Position] | None = None
        self._target_of: dict[StreamName, UUID | None] = {}
        self._latest: dict[str, str] | None = None

    def initialOffset(self) -> dict[str, str]:  # noqa: N802 - Spark's names
        return asyncio.run(_initial(self.options))

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
        streams = asyncio.run(_found(self.options))
        readable = _readable(streams)
        incarnations = {**incarnations_in(start), **{one.name: one.incarnation for one in streams}}
        before = _before(streams, start, fail=self.options.fail_on_data_loss)
        # What comes to the others begins where this batch says, which takes nothing of it.
        new = _beginnings(streams, self.options, besides=before)
        everything = advanced_all({**before, **new}, readable, Budget())
        self._latest = to_json(everything, incarnations)
        found = advanced_all(before, readable, _budget(self.options, limit))
        if self._target is not None:
            # Of one that was made anew since, it says nothing.
            target = {
                name: where
                for name, where in self._target.items()
                if not is_another(self._target_of.get(name), incarnations.get(name))
            }
            found = capped(before, found, target)
        return to_json({**found, **new}, incarnations)

    def reportLatestOffset(self) -> dict[str, str] | None:  # noqa: N802
        return self._latest

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        streams = asyncio.run(_found(self.options))
        readable = _readable(streams)
        self._target = advanced_all(dict.fromkeys(readable, BEGINNING), readable, Budget())
        self._target_of = {one.name: one.incarnation for one in streams}

    def partitions(
        self, start: Mapping[str, str], end: Mapping[str, str]
    ) -> Sequence[InputPartition]:
        return [InputPartition(one) for one in asyncio.run(_plan(self.options, start, end))]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return read_part(partition.value, self.options, self.schema)


def _check(options: ReadOptions) -> None:
    if options.table is not Table.EVENTS or not options.streams:
        what = "only events of streams are read as a stream"
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


async def _initial(options: ReadOptions) -> dict[str, str]:
    if options.start is not None:
        name, incarnation = await _starting(options, options.start)
        return to_json({name: options.start}, {name: incarnation})
    found = await _found(options)
    where = {one.name: _beginning(one) for one in found}
    return to_json(where, {one.name: one.incarnation for one in found})


def _beginning(stream: ListedStream) -> Position:
    """Return where a stream begins now: what was trimmed before nobody misses."""
    if stream.ledgers:
        return Position(stream.ledgers[0].ledger_id, BEGINNING.entry_id)
    return stream.trimmed_end or BEGINNING


def _beginnings(
    streams: Sequence[ListedStream], options: ReadOptions, *, besides: Offsets
) -> dict[StreamName, Position]:
    """Return where those begin that the query has no offset of.

    One that was named since begins where it does now. A partition of which the bucket had nothing
    when the query began, and had something of another one, begins at 0:0: what came, and was
    trimmed, meanwhile is lost. Readers know all partitions from the start.
    """
    whole_besides = {whole_of(name) for name in besides} - {None}

    def beginning(one: ListedStream) -> Position:
        came_later = options.mode is ReadMode.DIRECT and whole_of(one.name) in whole_besides
        return BEGINNING if came_later else _beginning(one)

    return {one.name: beginning(one) for one in streams if one.name not in besides}


async def _starting(options: ReadOptions, start: Position) -> tuple[StreamName, UUID | None]:
    """Return the stream that a position is one of, and its incarnation; or refuse it."""
    name, within = options.streams[0], Range(start=start)
    if options.mode is not ReadMode.DIRECT:
        found = await _served(options)
        check_single(name, len(found), within)
        check_start(found[0], start)
        return found[0].name, found[0].incarnation
    async with opened(options.s3, fetch_bytes=options.fetch_bytes) as bucket:
        known = await bucket.streams(options.streams)
        check_single(name, len(known), within)
        assert known[0].head is not None
        try:
            check_range(known[0].head, bucket.ledgers_of(known[0]), within, to_the_end=False)
        except RefusedError as error:
            # A batch tells of what was trimmed, or goes on behind it.
            if error.reason is not Reason.TRIMMED:
                raise
        return known[0].stream, known[0].incarnation


def _readable(streams: Sequence[ListedStream]) -> Readable:
    return {one.name: one.ledgers for one in streams}


def _before(
    streams: Sequence[ListedStream], start: Mapping[str, str], *, fail: bool
) -> dict[StreamName, Position]:
    """Return where each stream is gone on with, from its beginning if the offset is another's."""
    before, incarnations = from_json(start), incarnations_in(start)
    for one in streams:
        was, where = incarnations.get(one.name), before.get(one.name, BEGINNING)
        if is_another(was, one.incarnation) and where != BEGINNING:
            _tell_another(one.name, where, was, one.incarnation, fail=fail)
            before[one.name] = BEGINNING
    return before


async def _found(options: ReadOptions) -> list[ListedStream]:
    """Return the ledgers of each stream that can be read now, in order."""
    if options.mode is not ReadMode.DIRECT:
        return await _served(options)
    async with opened(options.s3, fetch_bytes=options.fetch_bytes) as bucket:
        found = []
        for known in await bucket.streams(options.streams):
            assert known.head is not None
            ledgers = readable_of(bucket.ledgers_of(known))
            trimmed_end = trimmed_end_of(known.head)
            found.append(ListedStream(known.stream, ledgers, trimmed_end, known.incarnation))
        return found


async def _served(options: ReadOptions) -> list[ListedStream]:
    retry_s = options.client.timeout_s
    async with reads_of(options.client, options.security) as reads:
        return await listed(reads, options.streams, retry_s=retry_s)


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


class Batch:
    """What lies between two offsets."""

    def __init__(
        self, start: Mapping[str, str], end: Mapping[str, str], *, fail_on_data_loss: bool
    ) -> None:
        self._start, self._end = from_json(start), from_json(end)
        self._start_of, self._end_of = incarnations_in(start), incarnations_in(end)
        self._fail = fail_on_data_loss
        self.names: Final = tuple(self._end)

    def of(self, stream: StreamName, there: UUID | None = None) -> Range | None:
        """Return what the batch takes of a stream; None: nothing.

        ``there``: the incarnation that is to be read. What is of another one is lost.
        """
        start, end = self._start.get(stream, BEGINNING), self._end.get(stream, BEGINNING)
        begun, ended = self._start_of.get(stream), self._end_of.get(stream)
        if start == end and not is_another(begun, ended):
            return None
        if stream not in self._start and ended is not None:
            # It says where the stream begins. Earlier versions, who name no incarnation, took it
            # from 0:0.
            return None
        if is_another(ended, there):
            _tell_another(stream, end, ended, there, fail=self._fail)
            return None
        if is_another(begun, there):
            if start != BEGINNING:
                _tell_another(stream, start, begun, there, fail=self._fail)
                start = BEGINNING
            if end == BEGINNING:
                # A bucket is not asked that may not know the stream yet that was made anew.
                return None
        return Range(start=start, end=end)


async def _plan(
    options: ReadOptions, start: Mapping[str, str], end: Mapping[str, str]
) -> list[Part]:
    batch = Batch(start, end, fail_on_data_loss=options.fail_on_data_loss)
    bounds = with_times(ALL, options)
    if options.mode is ReadMode.DIRECT:
        return await _plan_direct(options, bounds, batch)
    found, streams = list[Part](), await _served(options)
    check_all_found(frozenset(one.name for one in streams), batch, options)
    for one in streams:
        wanted = batch.of(one.name, one.incarnation)
        if wanted is not None:
            check_served(one, wanted, fail_on_data_loss=options.fail_on_data_loss)
            found += await _parts_of(one, wanted, bounds, options)
    return found


async def _plan_direct(options: ReadOptions, bounds: Bounds, batch: Batch) -> list[Part]:
    found = list[Part]()
    async with opened(options.s3, fetch_bytes=options.fetch_bytes) as bucket:
        streams = await bucket.streams(options.streams)
        names = frozenset(known.stream for known in streams)
        check_all_found(names, batch, options)
        for known in streams:
            wanted = batch.of(known.stream, known.incarnation)
            if wanted is None:
                continue
            assert known.head is not None
            ledgers = bucket.ledgers_of(known)
            check_stored(known.head, ledgers, wanted, fail_on_data_loss=options.fail_on_data_loss)
            if has_wanted_rows(known, bounds, options):
                some = copied_alone(ledgers, wanted, bounds)
                found += await store_parts_of(bucket, known, some, bounds, options)
    return found


async def _parts_of(
    stream: ListedStream, within: Range, bounds: Bounds, options: ReadOptions
) -> list[Part]:
    """Cut a batch: with ``auto`` what has a copy comes from the bucket, all else from a reader."""
    if options.mode is ReadMode.SERVICE:
        return _parts_served(stream, within, bounds, options)
    async with opened(options.s3, fetch_bytes=options.fetch_bytes) as bucket:
        known = await manifest_of(bucket, stream.name, stream.incarnation)
        if known is None:
            return _parts_served(stream, within, bounds, options)
        if not has_wanted_rows(known, bounds, options):
            return []
        copied = {
            one.listed.ledger_id: one for one in bucket.ledgers_of(known) if one.copy is not None
        }
        found = list[Part]()
        for one in stream.ledgers:
            ledger = copied.get(one.ledger_id)
            if ledger is None:
                alone = stream._replace(ledgers=[one])
                found += _parts_served(alone, within, bounds, options)
            else:
                wanted = wanted_of([ledger], within, bounds)
                found += await store_parts_of(bucket, known, wanted, bounds, options)
        return found


def _parts_served(
    stream: ListedStream, within: Range, bounds: Bounds, options: ReadOptions
) -> list[Part]:
    """Return a part for each ledger: a range between two of them may name one that is gone."""
    found = list[Part]()
    for one in stream.ledgers:
        last = one.entry_count - 1
        wanted = intersection(
            within.within(one.ledger_id, last), bounds.entries_of(one.ledger_id, last)
        )
        if wanted is not None:
            start = Position(one.ledger_id, EntryId(wanted[0]))
            end = Position(one.ledger_id, EntryId(wanted[1] + 1))
            found += service_parts(stream.name, Range(start=start, end=end), bounds, options)
    return found


def check_start(stream: ListedStream, start: Position) -> None:
    """Refuse a position that the readers' stream has not; a batch tells of what was trimmed."""
    ledgers = {one.ledger_id: one for one in stream.ledgers}
    end = _end_of(stream)
    first = min(ledgers, default=end.ledger_id)
    if start.ledger_id < first or start == end:
        return
    there, before = ledgers.get(start.ledger_id), ledgers.get(LedgerId(start.ledger_id - 1))
    what = f"it ends at {end}"
    if there is not None:
        if start.entry_id <= there.entry_count:
            return
        if there.closed:
            what = f"that ledger ends at {there.ledger_id}:{there.entry_count}"
    elif before is not None and start == normal(before, before.entry_count):
        return
    raise RefusedError(
        f"option start: stream {stream.name} has no position {start}: {what}",
        reason=Reason.NO_SUCH_ENTRY,
        remedy="Begin at earliest, or at a position that a read or a checkpoint gave",
        details={"stream": stream.name},
    )


def _end_of(stream: ListedStream) -> Position:
    """Return where the readers' stream ends, as offsets write it."""
    trimmed = stream.trimmed_end
    ends = [normal(one, one.entry_count) for one in stream.ledgers[-1:]]
    if trimmed is not None:
        ends.append(Position(LedgerId(trimmed.ledger_id + 1), EntryId(0)))
    return max(ends, default=BEGINNING)


def check_served(stream: ListedStream, within: Range, *, fail_on_data_loss: bool) -> None:
    """Refuse a range of which entries went unread, or of which the readers lack the end."""
    trimmed = stream.trimmed_end
    ids = [one.ledger_id for one in stream.ledgers]
    _check_loss(stream.name, within, trimmed, ids, fail=fail_on_data_loss)
    remedy = "Ask the readers of the cluster that the query began with"
    _check_end(stream.name, within, _end_of(stream), remedy)
    _check_end_there(stream.name, within, trimmed, ids, fail=fail_on_data_loss)


def check_stored(
    head: ManifestHead,
    ledgers: Sequence[ManifestLedger],
    within: Range,
    *,
    fail_on_data_loss: bool,
) -> None:
    """Refuse a range of which entries went unread, or of which the manifest lacks the end."""
    ids, trimmed = [one.listed.ledger_id for one in ledgers], trimmed_end_of(head)
    _check_loss(head.stream, within, trimmed, ids, fail=fail_on_data_loss)
    # A manifest lists closed ledgers alone.
    last = max(ids, default=head.trimmed_through)
    _check_end(head.stream, within, Position(LedgerId(last + 1), EntryId(0)), _LAGS)
    _check_end_there(head.stream, within, trimmed, ids, fail=fail_on_data_loss)


def check_all_found(known: frozenset[StreamName], batch: Batch, options: ReadOptions) -> None:
    """Refuse a batch that takes something of a stream that was not found.

    It is a partition of which the bucket has no manifest, or the query reads it no more.
    """
    for name in batch.names:
        wanted = batch.of(name)
        if wanted is None or name in known:
            continue
        if options.mode is ReadMode.DIRECT and whole_of(name) in options.streams:
            # The bucket may lag; readers know all partitions.
            _check_end(name, wanted, BEGINNING, _LAGS)
        assert wanted.start is not None
        assert wanted.end is not None
        what = f"is to be read up to {wanted.end} by a batch that was begun: name it until that is"
        _lost(
            name,
            f"{what} done",
            Reason.NO_SUCH_ENTRY,
            position=wanted.start,
            begins=wanted.end,
            fail=options.fail_on_data_loss,
        )


def _check_end(stream: StreamName, within: Range, end: Position, remedy: str) -> None:
    assert within.end is not None
    if end < within.end:
        raise RefusedError(
            f"stream {stream} ends at {end}, and the query knows it up to {within.end}",
            reason=Reason.NO_SUCH_ENTRY,
            remedy=remedy,
            details={"stream": stream},
        )


def _check_end_there(
    stream: StreamName,
    within: Range,
    trimmed: Position | None,
    ids: Sequence[LedgerId],
    *,
    fail: bool,
) -> None:
    """Refuse a batch that was begun and whose last ledger is gone, with later ones behind it.

    What a batch takes ends in a ledger that has entries, or right behind one, as ``_check_loss``
    has it of where it starts.
    """
    start, end = within.start, within.end
    assert start is not None
    assert end is not None
    last = LedgerId(end.ledger_id if end.entry_id else end.ledger_id - 1)
    if last < 0 or last in ids or (trimmed is not None and last <= trimmed.ledger_id):
        return
    begins = next((Position(one, EntryId(0)) for one in ids if one > last), end)
    what = (
        f"goes on at {begins}, since its ledger {last} was lost, which a batch that was begun at "
        f"{start} is to read up to {end}"
    )
    _lost(stream, what, Reason.NO_SUCH_ENTRY, position=start, begins=begins, fail=fail)


def _check_loss(
    stream: StreamName,
    within: Range,
    trimmed: Position | None,
    ids: Sequence[LedgerId],
    *,
    fail: bool,
) -> None:
    """Refuse to go on where entries went that nobody has read; or say so and go on.

    ``ids``: the stream's ledgers, in order. An offset lies in a ledger that has entries, or right
    behind one, and only trimming takes such a ledger away; or a restore, which has not all.
    """
    start = within.start
    assert start is not None
    first = ids[0] if ids else None
    there = next((one for one in ids if one >= start.ledger_id), start.ledger_id)
    if trimmed is not None and start < trimmed:
        begins, reason = trimmed, Reason.TRIMMED
        what = f"was trimmed up to {trimmed}, and"
    elif trimmed is None and first is not None and BEGINNING.ledger_id < start.ledger_id < first:
        begins, reason = Position(first, EntryId(0)), Reason.NO_SUCH_ENTRY
        what = f"begins at {begins}, and was made anew or restored since"
    elif start.entry_id and there > start.ledger_id and start != trimmed:
        begins, reason = Position(there, EntryId(0)), Reason.NO_SUCH_ENTRY
        what = f"goes on at {begins}, since its ledger {start.ledger_id} was lost, and"
    else:
        return
    what = f"{what} the query had read up to {start}"
    _lost(stream, what, reason, position=start, begins=begins, fail=fail)


def _tell_another(
    stream: StreamName, where: Position, was: UUID | None, there: UUID | None, *, fail: bool
) -> None:
    what = (
        f"was made anew, or is another cluster's: it is incarnation {there}, and the query had "
        f"read incarnation {was} up to {where}"
    )
    reason = Reason.NO_SUCH_ENTRY
    _lost(stream, what, reason, position=where, begins=BEGINNING, fail=fail)


def _lost(
    stream: StreamName,
    what: str,
    reason: Reason,
    *,
    position: Position,
    begins: Position,
    fail: bool,
) -> None:
    if fail:
        raise RefusedError(
            f"stream {stream} {what}",
            reason=reason,
            remedy="Read where the query began, or go on with what is there: failOnDataLoss=false",
            details={"stream": stream},
        )
    log.warning("spark.entries_lost", stream=stream, position=str(position), begins=str(begins))
