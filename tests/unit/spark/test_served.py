"""Rows through readers are those that options and filters want: by time, by stream, by place."""

import contextlib
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)

from tests.unit.spark.bucket_kit import INCARNATION, ManifestBucket, options
from tierlog.format.entry import encode_entry
from tierlog.format.frame import pack_entries
from tierlog.model.errors import CorruptError, Reason, RetryableError
from tierlog.model.ids import EntryId, LedgerId, StreamName
from tierlog.model.partitions import is_partitioned
from tierlog.model.position import Edge, Position
from tierlog.ports.reads import FramesAnswer, ServedLedger, ServedLedgers
from tierlog_spark import driving, service
from tierlog_spark.columns import Table
from tierlog_spark.parts import read_part
from tierlog_spark.planning import ALL, ServicePart
from tierlog_spark.source import FilteringReader, schema_of

T0 = datetime(2026, 11, 22, tzinfo=UTC)
T0_MS = round(T0.timestamp() * 1000)
ENTRIES, AN_ANSWER = 10, 4
PARTITIONS = ("s-partition-0", "s-partition-1")
COLUMNS = ("stream", "entry_id", "publish_time")


def at(entry_id: int) -> Position:
    return Position(LedgerId(11), EntryId(entry_id))


def seconds(number: float) -> datetime:
    return T0 + timedelta(seconds=number)


class TimedReads:
    """Readers of a stream with two partitions, whose entries were published a second apart."""

    async def bounds(self, stream: StreamName) -> tuple[Position, Position]:
        if stream == "s":
            raise is_partitioned(stream, len(PARTITIONS))
        return at(0), at(ENTRIES)

    async def ledgers(self, stream: StreamName, first: LedgerId) -> ServedLedgers:
        del stream, first
        one = ServedLedger(ledger_id=LedgerId(11), entry_count=ENTRIES, length=1, closed=False)
        return ServedLedgers(incarnation=INCARNATION, ledgers=(one,))

    async def read(self, stream: StreamName, where: Position | Edge, **how: Any) -> FramesAnswer:
        del how
        assert stream in PARTITIONS
        assert isinstance(where, Position)
        first, last = where.entry_id, min(where.entry_id + AN_ANSWER, ENTRIES)
        data = [
            encode_entry(
                [b"x"], publish_time_ms=T0_MS + 1000 * one, writer_id=UUID(int=1), event_number=one
            )
            for one in range(first, last)
        ]
        frames, _ = pack_entries(data, first)
        return FramesAnswer(
            resume=at(last),
            ledger_id=where.ledger_id,
            first_entry_id=EntryId(first),
            count=last - first,
            frames=memoryview(frames),
        )


@pytest.fixture(params=["service", "auto"])
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Give a way to read; nothing is in the bucket yet, so that readers are asked for all."""

    @contextlib.asynccontextmanager
    async def reads_of(*_: Any) -> AsyncIterator[TimedReads]:
        yield TimedReads()

    ManifestBucket(monkeypatch)
    for module in (driving, service):
        monkeypatch.setattr(module, "reads_of", reads_of)
    return str(request.param)


def rows(mode: str, *filters: Filter, **given: str) -> list[tuple[str, int]]:
    """Read, and return streams and entries, before Spark has filtered anything itself."""
    reader = FilteringReader(options(readMode=mode, **given), schema_of(Table.EVENTS, COLUMNS))
    reader.pushFilters(list(filters))
    found = [
        row
        for part in reader.partitions()
        for batch in reader.read(part)
        for row in batch.to_pylist()
    ]
    assert all(row["publish_time"] == seconds(row["entry_id"]) for row in found)
    return [(row["stream"], row["entry_id"]) for row in found]


def both(*numbers: int) -> list[tuple[str, int]]:
    return [(name, one) for name in PARTITIONS for one in numbers]


TIME = ("publish_time",)
HALF = timedelta(microseconds=500)


@pytest.mark.parametrize(
    ("filters", "wanted"),
    [
        ([GreaterThanOrEqual(TIME, seconds(7))], both(7, 8, 9)),
        ([GreaterThan(TIME, seconds(7))], both(8, 9)),
        ([LessThan(TIME, seconds(2))], both(0, 1)),
        ([LessThanOrEqual(TIME, seconds(2))], both(0, 1, 2)),
        ([LessThan(TIME, seconds(2) + HALF)], both(0, 1, 2)),
        ([EqualTo(TIME, seconds(5))], both(5)),
        ([EqualTo(TIME, seconds(5) + HALF)], []),
        ([GreaterThanOrEqual(TIME, seconds(3)), LessThan(TIME, seconds(5))], both(3, 4)),
        ([GreaterThan(TIME, seconds(20))], []),
        ([EqualTo(("stream",), PARTITIONS[1]), LessThan(TIME, seconds(1))], [(PARTITIONS[1], 0)]),
        ([In(("stream",), (PARTITIONS[0], "t")), EqualTo(("entry_id",), 4)], [(PARTITIONS[0], 4)]),
        ([EqualTo(("stream",), "s")], []),
    ],
)
def test_pushed_times_and_streams_choose_rows_of_readers(
    mode: str, filters: Sequence[Filter], wanted: list[tuple[str, int]]
) -> None:
    assert rows(mode, *filters) == wanted


def test_times_of_options_choose_rows_of_readers_and_the_end_is_not_included(mode: str) -> None:
    first, last = seconds(3).isoformat(), seconds(6).isoformat()
    assert rows(mode, startTime=first, endTime=last) == both(3, 4, 5)
    assert rows(mode, endTime=first) == both(0, 1, 2)
    assert rows(mode, startTime=last) == both(6, 7, 8, 9)
    # With a filter what both want.
    assert rows(mode, GreaterThan(TIME, seconds(4)), startTime=first, endTime=last) == both(5)
    one = EqualTo(("stream",), PARTITIONS[0])
    assert rows(mode, one, endTime=first) == [(PARTITIONS[0], number) for number in range(3)]
    within = {"stream": PARTITIONS[0], "start": "11:2", "end": "11:5"}
    assert rows(mode, **within, startTime=first) == [(PARTITIONS[0], 3), (PARTITIONS[0], 4)]


@pytest.mark.parametrize(
    ("ledgers", "trimmed_end", "whole"),
    [
        (((11, 4, True), (13, 0, True)), None, True),
        (((11, 4, True), (17, 2, False)), None, True),
        (((11, 9, True), (17, 2, False)), None, False),
        (((11, 4, True), (13, 1, True)), None, False),
        # Nobody knows yet how it ends.
        (((11, 4, False),), None, False),
        (((17, 2, False),), Position(LedgerId(11), EntryId(4)), True),
        (((17, 2, False),), Position(LedgerId(11), EntryId(9)), False),
        (((17, 2, False),), Position(LedgerId(13), EntryId(1)), False),
    ],
)
def test_a_part_that_ends_where_a_ledger_does_is_read_to_that_end_or_fails(
    monkeypatch: pytest.MonkeyPatch,
    ledgers: tuple[tuple[int, int, bool], ...],
    trimmed_end: Position | None,
    whole: bool,
) -> None:
    asked = list[LedgerId]()

    class Stalled(TimedReads):
        """A reader that has four entries of a ledger, and knows of no other."""

        async def bounds(self, stream: StreamName) -> tuple[Position, Position]:
            del stream
            return at(0), at(AN_ANSWER)

        async def ledgers(self, stream: StreamName, first: LedgerId) -> ServedLedgers:
            assert (stream, first) == (PARTITIONS[0], 11)
            asked.append(first)
            if len(asked) < 3:
                raise RetryableError("the owner of the tail went just now", reason=Reason.UNKNOWN)
            found = (
                ServedLedger(ledger_id=LedgerId(one), entry_count=count, length=1, closed=closed)
                for one, count, closed in ledgers
            )
            return ServedLedgers(
                incarnation=INCARNATION, ledgers=tuple(found), trimmed_end=trimmed_end
            )

        async def read(
            self, stream: StreamName, where: Position | Edge, **how: Any
        ) -> FramesAnswer:
            if where == at(AN_ANSWER):
                return FramesAnswer(resume=where)
            return await super().read(stream, where, **how)

    @contextlib.asynccontextmanager
    async def reads_of(*_: Any) -> AsyncIterator[TimedReads]:
        yield Stalled()

    monkeypatch.setattr(service, "reads_of", reads_of)
    monkeypatch.setattr(service, "RETRY_PAUSE_S", 0.0)
    read = options(readMode="service")
    until = Position(LedgerId(17), EntryId(0))
    part = ServicePart(stream=StreamName(PARTITIONS[0]), start=at(0), until=until, bounds=ALL)
    schema = schema_of(Table.EVENTS, COLUMNS)
    if whole:
        assert sum(one.num_rows for one in read_part(part, read, schema)) == AN_ANSWER
        return
    with pytest.raises(CorruptError, match="ended at 11:4, before 17:0"):
        list(read_part(part, read, schema))
