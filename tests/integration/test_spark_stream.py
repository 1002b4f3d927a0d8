"""Streaming reads with `format("tierlog")`: batches, restarts, and what was trimmed unread."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.datasource import CaseInsensitiveDict
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows

from tests.integration.spark_kit import made_bucket, options_of, places
from tierlog.model.errors import RefusedError
from tierlog.model.ids import EntryId, LedgerId
from tierlog_spark import TierlogDataSource

if TYPE_CHECKING:
    from tierlog.embedded.supervisor import EmbeddedServers

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


def entries(first: int, count: int) -> list[bytes]:
    return [str(number).encode() for number in range(first, first + count)]


def stream_reader(given: dict[str, str]) -> Any:
    source = TierlogDataSource(CaseInsensitiveDict(given))
    return source.streamReader(schema=source.schema())


def numbers(reader: Any, start: Any, end: Any) -> list[int]:
    return [
        int(row["payload"])
        for part in reader.partitions(start, end)
        for batch in reader.read(part)
        for row in batch.to_pylist()
    ]


async def test_what_was_trimmed_unread_is_told_and_what_was_read_is_not_missed(
    servers: EmbeddedServers,
) -> None:
    async with made_bucket(servers, "trimmed") as bucket:
        stream = bucket.stream("s", raw=True)
        for ledger_id in (21, 23, 25):
            await stream.add(ledger_id, entries(ledger_id, 2))
        await stream.add(27, [b"not yet"], copied=False)
        await stream.write()
        given = options_of(bucket.s3, stream="s")
        reader = stream_reader(given)

        def before() -> tuple[Any, Any, Any]:
            start = reader.initialOffset()
            one = reader.latestOffset(start, ReadMaxRows(2))
            return start, one, reader.latestOffset(start, ReadAllAvailable())

        start, one, last = await asyncio.to_thread(before)
        assert [places(offset)["s"] for offset in (start, one, last)] == ["21:0", "22:0", "26:0"]
        assert reader.reportLatestOffset() == last
        assert await asyncio.to_thread(numbers, reader, start, last) == [21, 22, 23, 24, 25, 26]

        stream.head = replace(stream.head, trimmed_through=LedgerId(21))
        del stream.copies[LedgerId(21)]
        await stream.write(removed=[LedgerId(21)])
        # All of it had been read.
        assert await asyncio.to_thread(numbers, reader, one, last) == [23, 24, 25, 26]
        with pytest.raises(RefusedError, match="failOnDataLoss=false") as caught:
            await asyncio.to_thread(numbers, reader, {"s": "21:1"}, last)
        assert "21:1" in str(caught.value)
        lax = stream_reader({**given, "failOnDataLoss": "false"})
        assert await asyncio.to_thread(numbers, lax, {"s": "21:1"}, last) == [23, 24, 25, 26]

        # A query that begins when all was trimmed begins behind it.
        stream.head = replace(stream.head, trimmed_through=LedgerId(25), trimmed_last=EntryId(1))
        for ledger_id in (23, 25):
            del stream.copies[LedgerId(ledger_id)]
        await stream.write(removed=[LedgerId(23), LedgerId(25)])
        begun = await asyncio.to_thread(reader.initialOffset)
        assert places(begun) == {"s": "25:2"}
        await stream.add(27, [b"27"])
        await stream.write()
        assert await asyncio.to_thread(numbers, reader, begun, {"s": "28:0"}) == [27]


async def test_a_stream_that_was_made_anew_is_not_taken_for_the_one_before(
    servers: EmbeddedServers,
) -> None:
    async with made_bucket(servers, "anew") as bucket:
        stream = bucket.stream("s", raw=True)
        await stream.add(43, entries(43, 2))
        await stream.write()
        given = options_of(bucket.s3, stream="s")
        reader = stream_reader(given)
        # Where a query stands that read the stream of this name that was there before.
        where, last = {"s": "41:1"}, {"s": "44:0"}
        with pytest.raises(RefusedError, match="was made anew") as caught:
            await asyncio.to_thread(numbers, reader, where, last)
        assert "failOnDataLoss=false" in str(caught.value)
        lax = stream_reader({**given, "failOnDataLoss": "false"})
        assert await asyncio.to_thread(numbers, lax, where, last) == [43, 44]
        for start in ({}, {"s": "0:0"}, {"s": "43:0"}):
            assert await asyncio.to_thread(numbers, reader, start, last) == [43, 44]


async def test_a_position_is_of_one_stream_and_limits_are_of_all(servers: EmbeddedServers) -> None:
    async with made_bucket(servers, "parts") as bucket:
        await bucket.stream("p", partitions=2).write()
        for index in range(2):
            one = bucket.stream(f"p-partition-{index}", raw=True)
            await one.add(31 + index, entries(0, 5))
            await one.write()
        given = options_of(bucket.s3, stream="p")
        with pytest.raises(RefusedError, match="has 2 partitions"):
            await asyncio.to_thread(stream_reader({**given, "start": "31:0"}).initialOffset)
        reader = stream_reader({**given, "maxBytesPerTrigger": "7"})
        assert reader.getDefaultReadLimit() == ReadMaxBytes(7)

        def steps() -> tuple[Any, Any]:
            first = reader.latestOffset(reader.initialOffset(), ReadMaxBytes(7))
            reader.prepareForTriggerAvailableNow()
            return first, reader.latestOffset(first, ReadAllAvailable())

        first, last = await asyncio.to_thread(steps)
        assert places(first) == {"p-partition-0": "32:0", "p-partition-1": "32:2"}
        assert places(last) == {"p-partition-0": "32:0", "p-partition-1": "33:0"}
        assert await asyncio.to_thread(numbers, reader, first, last) == [2, 3, 4]


@pytest.mark.parametrize("more", [{"end": "3:0"}, {"table": "ledgers"}], ids=str)
def test_what_a_streaming_read_is_not(more: dict[str, str]) -> None:
    with pytest.raises(RefusedError, match="readStream"):
        stream_reader({"stream": "s", **more})
