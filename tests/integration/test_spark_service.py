"""`format("tierlog")` beside running services: direct, service and auto give the same rows.

A read ends where the stream ended when it was planned, whatever is appended, offloaded and deleted
locally between its plan and its tasks.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.datasource import EqualTo, GreaterThanOrEqual
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from tests.integration.spark_kit import (
    T0,
    Read,
    entries_of,
    made_bucket,
    options_of,
    places,
    planned,
    rows_read,
)
from tests.integration.test_reader_tiers import SMALL, append, numbered, offloaded_and_gone
from tests.integration.test_spark_stream import stream_reader
from tierlog.client import StructuredEvent, open_client
from tierlog.model.errors import RefusedError
from tierlog_spark.planning import ServicePart, StorePart

if TYPE_CHECKING:
    from tests.plugins.fix_cluster import ServiceCluster
    from tierlog.client import Client

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


def given_by(cluster: ServiceCluster, **more: str) -> dict[str, str]:
    reader = cluster.address("reader", "http")
    return options_of(cluster.settings.s3, readerAddress=reader, **more)


async def in_manifest(cluster: ServiceCluster, stream: str, count: int) -> None:
    """Wait until the bucket itself knows of so many copies."""

    async def known() -> bool:
        try:
            rows = await rows_read(given_by(cluster), table="ledgers", stream=stream)
        except RefusedError:
            return False
        return sum(row["data_object"] is not None for row in rows) >= count

    await cluster.until(known, what=f"{stream} in its manifest")


def kinds(read: Read) -> list[type]:
    return [type(part.value) for part in read.parts]


async def rows_of(read: Read) -> list[dict[str, Any]]:
    return await asyncio.to_thread(read.rows)


async def as_the_client_reads(client: Client, stream: str) -> list[tuple[Any, ...]]:
    return [
        (
            event.position.ledger_id,
            event.position.entry_id,
            event.batch_index,
            event.key,
            event.payload,
        )
        async for event in client.reader(stream).events()
    ]


def shown(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    names = ("ledger_id", "entry_id", "event_index", "key", "payload")
    return [tuple(row[name] for name in names) for row in rows]


@pytest.mark.parametrize("raw", [False, True])
async def test_direct_service_and_auto_give_the_same_rows(
    cluster: ServiceCluster, raw: bool
) -> None:
    name = f"spark-{'raw' if raw else 'events'}"
    given = given_by(cluster, stream=name)
    async with open_client(cluster.settings) as client:
        await client.create_stream(name, raw=raw, policy=SMALL)
        # Two ledgers that are in the bucket alone, one that is closed and isn't, one that is open.
        await append(client, name, numbered(0, 8000), raw=raw)
        await offloaded_and_gone(cluster, client, name)
        copied = len((await client.stream(name))["ledgers"])
        await in_manifest(cluster, name, copied)
        if not raw:
            with_keys = [StructuredEvent(payload=b"x", key=b"k")] * 5
            await append(client, name, with_keys)
        await append(client, name, numbered(9000, 100), raw=raw)
        await client.seal(name)
        await append(client, name, numbered(9500, 10), raw=raw)
        wanted = await as_the_client_reads(client, name)

        auto, service = [await planned(given, readMode=mode) for mode in ("auto", "service")]
        assert kinds(auto)[:copied] == [StorePart] * copied
        assert set(kinds(auto)[copied:]) == {ServicePart}
        assert kinds(service) == [ServicePart]
        # What comes after the plan is not of this read, and what moves meanwhile still is.
        await append(client, name, [b"later"], raw=raw)
        await offloaded_and_gone(cluster, client, name)
        served = await rows_of(service)
        assert shown(served) == wanted
        assert await rows_of(auto) == served
        await in_manifest(cluster, name, copied + 2)
        again = await rows_read(given)
        assert again[:-1] == served
        assert again[-1]["payload"] == b"later"

        middle = served[len(served) // 2]["ledger_id"]
        bounds = {"start": f"{middle}:3", "end": f"{middle}:5"}
        for filters in (
            [],
            [EqualTo(("ledger_id",), middle), GreaterThanOrEqual(("entry_id",), 4)],
        ):
            some = [
                await rows_read(given, *filters, readMode=mode, **bounds)
                for mode in ("direct", "service", "auto")
            ]
            ids = {3, 4} if not filters else {4}
            assert {row["entry_id"] for row in some[0]} == ids
            assert some[0] == some[1] == some[2]


async def test_partitions_times_and_what_is_wrong(cluster: ServiceCluster) -> None:
    async with open_client(cluster.settings) as client:
        # The first ledgers are another stream's, also where this test runs alone.
        await client.create_stream("spark-other")
        await append(client, "spark-other", numbered(0, 1))
        await client.create_stream("spark-parts", partitions=2, policy=SMALL)
        async with client.writer("spark-parts") as writer:
            for number in range(20):
                text = str(number).encode()
                await writer.send(StructuredEvent(payload=text, key=text))
        await client.create_stream("spark-empty")
        given = given_by(cluster, stream="spark-parts")
        for mode in ("service", "auto"):
            rows = await rows_read(given, readMode=mode)
            assert sorted(int(row["payload"]) for row in rows) == list(range(20))
            last = max(row["publish_time"] for row in rows)
            few = await rows_read(
                given, readMode=mode, startTime=last.isoformat(), columns="publish_time"
            )
            assert {row["publish_time"] for row in few} == {last}
            before = [row for row in rows if row["publish_time"] < last]
            assert await rows_read(given, readMode=mode, endTime=last.isoformat()) == before
            since = GreaterThanOrEqual(("publish_time",), last)
            pushed = await rows_read(given, since, readMode=mode, columns="publish_time")
            assert pushed == few
            one = EqualTo(("stream",), "spark-parts-partition-0")
            assert await rows_read(given, one, readMode=mode) == [
                row for row in rows if row["stream"] == "spark-parts-partition-0"
            ]
            assert await rows_read(given, readMode=mode, stream="spark-empty") == []

        partition = "spark-parts-partition-0"
        for words, more in (
            ("there is no stream spark-none", {"stream": "spark-none"}),
            ("it ends at", {"stream": partition, "end": "999999999:0"}),
            ("it was trimmed", {"stream": partition, "start": "0:1"}),
            ("is empty", {"stream": "spark-empty", "start": "1:0"}),
            ("option readerAddress", {"readerAddress": ""}),
        ):
            with pytest.raises(RefusedError, match=words):
                await planned({**given, "readMode": "auto", **more})


async def test_another_buckets_stream_of_the_same_name_is_not_mixed_in(
    cluster: ServiceCluster,
) -> None:
    name = "spark-namesake"
    async with (
        open_client(cluster.settings) as client,
        made_bucket(cluster.servers, "namesake") as other,
    ):
        await client.create_stream(name)
        await append(client, name, numbered(0, 5))
        stream = other.stream(name)
        await stream.add(1, entries_of(random.Random(9), 2, at_ms=T0))
        await stream.write()
        reader = cluster.address("reader", "http")
        given = options_of(other.s3, readerAddress=reader, stream=name, readMode="auto")
        with pytest.raises(RefusedError, match="is another one than the readers'") as caught:
            await planned(given)
        assert caught.value.remedy
        query = stream_reader(given)
        start = {name: "0:0"}
        end = await asyncio.to_thread(query.latestOffset, start, ReadAllAvailable())
        with pytest.raises(RefusedError, match="is another one than the readers'"):
            await asyncio.to_thread(query.partitions, start, end)


Batch = tuple[Any, Any, list[dict[str, Any]]]


def batch_of(reader: Any, start: Any, end: Any) -> list[dict[str, Any]]:
    return [
        row
        for part in reader.partitions(start, end)
        for batch in reader.read(part)
        for row in batch.to_pylist()
    ]


def batches_from(reader: Any, start: Any) -> list[Batch]:
    """Take batches of a few entries until there is nothing more."""
    found: list[Batch] = []
    while (end := reader.latestOffset(start, ReadMaxRows(5))) != start:
        found.append((start, end, batch_of(reader, start, end)))
        start = end
    return found


@pytest.mark.parametrize("mode", ["service", "auto"])
async def test_a_query_has_each_event_once_while_the_stream_is_written_offloaded_and_deleted(
    cluster: ServiceCluster, mode: str
) -> None:
    name = f"spark-live-{mode}"
    given = given_by(cluster, stream=name)
    async with open_client(cluster.settings) as client:
        await client.create_stream(name, policy=SMALL)
        reader = stream_reader({**given, "readMode": mode})
        start = await asyncio.to_thread(reader.initialOffset)
        assert places(start) == {name: "0:0"}
        batches: list[Batch] = []

        async def take() -> None:
            where = batches[-1][1] if batches else start
            batches.extend(await asyncio.to_thread(batches_from, reader, where))
            rows = [row for _, _, some in batches for row in some]
            assert shown(rows) == await as_the_client_reads(client, name)

        await take()
        await append(client, name, numbered(0, 8000))
        await append(client, name, numbered(8000, 5))
        await take()
        assert len(batches) > 2
        # The ledger was open where the query stands, and more comes into it.
        await append(client, name, numbered(8005, 5))
        await take()
        await offloaded_and_gone(cluster, client, name)
        await in_manifest(cluster, name, len((await client.stream(name))["ledgers"]))
        await append(client, name, numbered(9000, 100))
        await take()
        for first, last, rows in batches:
            assert await asyncio.to_thread(batch_of, reader, first, last) == rows
        if mode == "auto":
            first, last, _ = batches[0]
            parts = await asyncio.to_thread(reader.partitions, first, last)
            assert {type(one.value) for one in parts} == {StorePart}

        # The checkpoint goes on with another mode.
        await offloaded_and_gone(cluster, client, name)
        await in_manifest(cluster, name, len((await client.stream(name))["ledgers"]))
        await append(client, name, [b"last"])
        await client.seal(name)
        await offloaded_and_gone(cluster, client, name)
        await in_manifest(cluster, name, len((await client.stream(name))["ledgers"]))
        reader = stream_reader(given)
        await take()
        assert batches[-1][2][-1]["payload"] == b"last"
