"""The write side of `format("tierlog")` beside running services: staged by tasks, attached once.

Spark's part is played here (`Write`): what it pickles is pickled, a task is a call, and a commit
may be repeated, lost or forgotten. One test in `test_spark_session.py` has Spark itself do it.
"""

from __future__ import annotations

import asyncio
import pickle
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.sql.datasource import CaseInsensitiveDict
from pyspark.sql.types import (
    BinaryType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from tests.integration.spark_kit import rows_read
from tests.integration.test_reader_tiers import SMALL, append, numbered, offloaded_and_gone
from tests.integration.test_spark_service import given_by, in_manifest
from tierlog.client import open_client, open_ledgers
from tierlog.client.staging import open_staging
from tierlog.model.errors import RefusedError, RetryableError
from tierlog.runtime.settings import Settings
from tierlog.wiring.build import open_catalog
from tierlog_spark import TierlogDataSource
from tierlog_spark.sink import BATCH_ID, QUERY_ID

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tests.plugins.fix_cluster import ServiceCluster
    from tierlog.client import Client

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

PLAIN = StructType([StructField("payload", BinaryType())])
FULL = StructType(
    [
        StructField("key", BinaryType()),
        StructField("event_time", TimestampType()),
        StructField("properties", MapType(StringType(), StringType())),
        StructField("payload", BinaryType()),
    ]
)
QUERY = "0f8fad5b-d9cb-469f-a165-70867728950e"


def place_of(cluster: ServiceCluster, **more: str) -> dict[str, str]:
    """What a user says of where to write."""
    return {
        "zookeeperHosts": cluster.settings.zookeeper.hosts,
        "ingestAddress": cluster.settings.client.ingest_address,
        **more,
    }


def plain(payloads: Sequence[bytes]) -> Any:
    return pa.RecordBatch.from_pydict({"payload": pa.array(payloads, pa.binary())})


class Write:
    """One write, as Spark goes about it; each call takes what was pickled before."""

    def __init__(
        self, given: Mapping[str, str], schema: StructType = PLAIN, *, streaming: bool = False
    ) -> None:
        source = TierlogDataSource(CaseInsensitiveDict(given))
        make: Any = source.streamWriter if streaming else source.writer
        self._pickled = pickle.dumps(make(schema, overwrite=False))

    @property
    def _writer(self) -> Any:
        return pickle.loads(self._pickled)

    async def task(self, *batches: Any) -> Any:
        return await asyncio.to_thread(self._writer.write, iter(batches))

    async def commit(self, messages: Sequence[Any], *batch_id: int) -> None:
        kept = pickle.loads(pickle.dumps(list(messages)))
        await asyncio.to_thread(self._writer.commit, kept, *batch_id)

    async def abort(self, messages: Sequence[Any], *batch_id: int) -> None:
        await asyncio.to_thread(self._writer.abort, list(messages), *batch_id)


async def writing(given: Mapping[str, str], *more: Any, **named: Any) -> Write:
    return await asyncio.to_thread(lambda: Write(given, *more, **named))


async def staged_for(cluster: ServiceCluster, stream: str) -> list[int]:
    """The staging ledgers that are there for a stream."""
    async with open_catalog(cluster.settings) as catalog:
        found = await catalog.bare.list_staging()
    return [one for one, metadata in found.items() if stream.encode() in metadata.custom.values()]


async def payloads(client: Client, stream: str) -> list[bytes]:
    return [event.payload async for event in client.reader(stream).events()]


async def served_rows(cluster: ServiceCluster, stream: str) -> list[dict[str, Any]]:
    return await rows_read(given_by(cluster, stream=stream, readMode="service"))


async def test_what_is_written_is_in_the_stream_as_if_it_had_been_appended(
    cluster: ServiceCluster,
) -> None:
    name = "sink-batch"
    parts = [numbered(100 * part, 100, size=8000) for part in range(1, 4)]
    async with open_client(cluster.settings) as client:
        await client.create_stream(name, policy=SMALL)
        await append(client, name, numbered(0, 50))
        follower = client.reader(name, follow=True)
        following = asyncio.create_task(first_of(follower, 350 + 20))
        write = await writing(place_of(cluster, stream=name))
        done = [await write.task(plain(part[:60]), plain(part[60:])) for part in parts]
        # Another try at the first task, that Spark takes no notice of; one without rows.
        await write.task(plain(parts[0]))
        empty = await write.task(plain([]))
        with pytest.raises(RuntimeError, match="the source of the rows"):
            await write.task(*failing(parts[0]))
        assert len(await staged_for(cluster, name)) == 4, "a task that fails leaves nothing"
        assert await payloads(client, name) == numbered(0, 50), "nothing is there before"
        await write.commit([*done, empty])
        assert await staged_for(cluster, name) == []
        await append(client, name, numbered(9000, 20))

        wanted = [*numbered(0, 50), *parts[0], *parts[1], *parts[2], *numbered(9000, 20)]
        assert await payloads(client, name) == wanted
        assert await following == wanted
        served = await served_rows(cluster, name)
        assert [bytes(row["payload"]) for row in served] == wanted
        document = await client.stream(name)
        ledger_ids = [one["ledger_id"] for one in document["ledgers"]]
        assert [one.ledger_id for one in done] == ledger_ids[1:4]
        # Again, as after an answer that was lost: nothing changes.
        await write.commit([*done, empty])
        assert len(await payloads(client, name)) == 370

        # In tier 2, by manifests alone, checked, and trimmed at last: ledgers as any other.
        await offloaded_and_gone(cluster, client, name)
        await in_manifest(cluster, name, len(ledger_ids))
        assert await rows_read(given_by(cluster, stream=name)) == served
        since = served[200]["publish_time"].isoformat()
        later = await rows_read(given_by(cluster, stream=name, startTime=since))
        assert {bytes(row["payload"]) for row in later} >= set(wanted[200:])
        assert not await found_by_a_scrub(cluster, client, ledger_ids)
        await trimmed(cluster, client, name, ledger_ids[:4])
        left = await served_rows(cluster, name)
        assert [bytes(row["payload"]) for row in left] == numbered(9000, 20)


async def first_of(reader: Any, count: int) -> list[bytes]:
    found: list[bytes] = []
    async for event in reader.events():
        found.append(event.payload)
        if len(found) == count:
            break
    return found


def failing(payload: Sequence[bytes]) -> Iterator[Any]:
    yield plain(payload)
    raise RuntimeError("the source of the rows")


async def found_by_a_scrub(
    cluster: ServiceCluster, client: Client, ledger_ids: Sequence[int]
) -> list[Any]:
    begun: list[Any] = []

    async def begin() -> bool:
        try:
            begun.append(await client.scrubs.begin(repair=False, deep=True))
        except RetryableError:
            return False
        return True

    await cluster.until(begin, what="a scrub that begins")
    report: dict[str, Any] = {}

    async def ended() -> bool:
        report.update(await client.scrubs.get(begun[-1]["scrub_id"]))
        return bool(report["state"] == "done")

    await cluster.until(ended, what="a scrub that ends")
    return [one for one in report["findings"] if one["ledger_id"] in ledger_ids]


async def trimmed(
    cluster: ServiceCluster, client: Client, name: str, ledger_ids: Sequence[int]
) -> None:
    """Have retention take these, the oldest ones."""
    await client.set_policy(name, {"retention_size_bytes": 1, "deletion_lag_ms": 500})

    async def gone() -> bool:
        left = {one["ledger_id"] for one in (await client.stream(name))["ledgers"]}
        return not left & set(ledger_ids)

    await cluster.until(gone, what=f"retention of {name}")


async def test_every_column_comes_back(cluster: ServiceCluster) -> None:
    name = "sink-columns"
    async with open_client(cluster.settings) as client:
        await client.create_stream(name)
        write = await writing(place_of(cluster, stream=name, entryBytes="40"), FULL)
        rows = [
            {"key": b"k", "event_time": 1000 * at, "properties": [("a", "b")], "payload": b"p"}
            for at in range(50)
        ]
        rows.append({"key": None, "event_time": None, "properties": None, "payload": b""})
        schema = pa.schema(
            [
                ("key", pa.binary()),
                ("event_time", pa.timestamp("us", "UTC")),
                ("properties", pa.map_(pa.string(), pa.string())),
                ("payload", pa.binary()),
            ]
        )
        await write.commit([await write.task(pa.RecordBatch.from_pylist(rows, schema=schema))])
    found = await served_rows(cluster, name)
    assert len({row["entry_id"] for row in found}) > 5
    assert {row["writer_id"] for row in found} == {None}
    assert [dict(row["properties"] or []) or None for row in found[:1]] == [{"a": "b"}]
    assert [row["event_time"].microsecond for row in found[:50]] == [1000 * at for at in range(50)]
    last = found[-1]
    assert (last["key"], last["event_time"], last["payload"]) == (None, None, b"")


@pytest.fixture
def as_task(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Have `TaskContext` name a query and a batch, as in a task of Spark."""

    def of(batch_id: int, query: str = QUERY) -> None:
        class Context:
            @staticmethod
            def getLocalProperty(name: str) -> str | None:  # noqa: N802
                return {QUERY_ID: query, BATCH_ID: str(batch_id)}.get(name)

        monkeypatch.setattr(TaskContext, "get", lambda: Context)

    return of


async def test_batches_of_a_query_are_there_once_whatever_is_repeated_or_breaks(
    cluster: ServiceCluster, as_task: Any
) -> None:
    name = "sink-query"
    async with open_client(cluster.settings) as client:
        await client.create_stream(name)
        write = await writing(place_of(cluster, stream=name), streaming=True)

        async def staged(batch_id: int) -> list[Any]:
            as_task(batch_id)
            return [await write.task(plain([b"%d.%d" % (batch_id, part)])) for part in range(2)]

        await write.commit(await staged(0), 0)
        # The driver dies behind its commit: the same batch comes again, and the abort of it.
        await write.commit(await staged(0), 0)
        await write.abort(await staged(0), 0)
        # It dies before its commit: nobody hears of these.
        await staged(1)
        # The owner dies with everything staged, and once more behind the commit.
        again = await staged(1)
        cluster.kill("ingest")
        await cluster.restart("ingest")
        await write.commit(again, 1)
        cluster.kill("ingest")
        await cluster.restart("ingest")
        await write.commit(again, 1)
        await write.commit(await staged(1), 1)
        # A batch that fails leaves nothing; the next ones come in order.
        await write.abort([*await staged(2), None], 2)
        await write.commit([], 2)
        await write.commit(await staged(3), 3)
        # Its checkpoint is set back: batches of other rows come under numbers that were.
        older = await staged(2)
        with pytest.raises(RefusedError, match=r"has batch 3 of this query already.* batch 2,"):
            await write.commit(older, 2)
        await write.abort(older, 2)
        # Another query has numbers of its own.
        as_task(0, "7c9e6679-7425-40de-944b-e07fc1f90ae7")
        await write.commit([await write.task(plain([b"other"]))], 0)
        wanted = [b"0.0", b"0.1", b"1.0", b"1.1", b"3.0", b"3.1", b"other"]
        assert sorted(await payloads(client, name)) == wanted
        assert await staged_for(cluster, name) == []


async def test_a_named_writer_numbers_what_it_writes(cluster: ServiceCluster) -> None:
    name = "sink-named"
    async with open_client(cluster.settings) as client:
        await client.create_stream(name)
        for batch_id, payload in ((0, b"a"), (0, b"a"), (1, b"b"), (0, b"late")):
            given = place_of(cluster, stream=name, writerId="nightly", batchId=str(batch_id))
            write = await writing(given)
            await write.commit([await write.task(plain([payload]))])
        assert await payloads(client, name) == [b"a", b"b"]


async def test_what_an_owner_appends_meanwhile_is_kept_and_so_is_what_is_written(
    cluster: ServiceCluster,
) -> None:
    """Appends all the time, in ledgers that roll: what is attached is copied behind them."""
    name, appended = "sink-busy", numbered(0, 3000, size=4000)
    async with open_client(cluster.settings) as client:
        await client.create_stream(name, policy=SMALL)
        appending = asyncio.create_task(append(client, name, appended))
        written, staged = [], set()
        for batch_id in range(4):
            given = place_of(cluster, stream=name, writerId="busy", batchId=str(batch_id))
            write = await writing(given)
            done = [await write.task(plain([b"%d.%d" % (batch_id, part)])) for part in range(2)]
            written += [b"%d.%d" % (batch_id, part) for part in range(2)]
            staged |= {one.ledger_id for one in done}
            # Surely the stream opens another ledger before the commit.
            await client.seal(name)
            await client.append(name, [b"between"])
            await write.commit(done)
        await appending
        found = await payloads(client, name)
        assert [one for one in found if len(one) > 10] == appended
        short = sorted(one for one in found if len(one) < 10)
        assert short == sorted([*written, *[b"between"] * 4])
        listed = {one["ledger_id"] for one in (await client.stream(name))["ledgers"]}
        assert not staged & listed, "they were copied"
        assert await staged_for(cluster, name) == []


async def test_what_a_job_left_that_is_gone_is_deleted_by_the_scheduler(
    cluster: ServiceCluster,
) -> None:
    name = "sink-left"
    async with open_client(cluster.settings) as client:
        await client.create_stream(name)
        write = await writing(place_of(cluster, stream=name))
        done = [await write.task(plain([b"kept"]))]
        await write.commit(done)
        # A task that ended, and one that was killed while it wrote; nobody asks for them.
        await write.task(plain([b"lost"]))
        async with open_staging(cluster.settings) as staging:
            killed = await staging.stage(name, writer_id=UUID(QUERY), number=1)
            await killed.append(b"half")
        assert len(await staged_for(cluster, name)) == 2
        await cluster.restart("scheduler", TIERLOG_SCHEDULER__STAGING_S="0.5")
        try:

            async def gone() -> bool:
                return not await staged_for(cluster, name)

            await cluster.until(gone, what="what was staged in vain is deleted")
        finally:
            await cluster.restart("scheduler")
        assert await payloads(client, name) == [b"kept"]
    async with open_ledgers(cluster.settings) as ledgers:
        assert killed.ledger_id not in await ledgers.ledgers()


async def test_what_is_wrong_is_said_once_and_leaves_nothing(
    cluster: ServiceCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_client(cluster.settings) as client:
        await client.create_stream("sink-raw", raw=True)
        await client.create_stream("sink-parts", partitions=2)
        await client.create_stream("sink-bad")
        for words, stream, schema in (
            ("there is no stream sink-none", "sink-none", PLAIN),
            ("is raw", "sink-raw", PLAIN),
            ("partition", "sink-parts", PLAIN),
            (
                "ledger_id is given by the stream",
                "sink-bad",
                StructType([*PLAIN.fields, StructField("ledger_id", LongType())]),
            ),
        ):
            with pytest.raises(RefusedError, match=words) as caught:
                await writing(place_of(cluster, stream=stream), schema)
            assert caught.value.remedy
        source = TierlogDataSource(CaseInsensitiveDict(place_of(cluster, stream="sink-bad")))
        with pytest.raises(RefusedError, match="append"):
            source.writer(PLAIN, overwrite=True)
        write = await writing(place_of(cluster, stream="sink-bad"))
        too_large = plain([b"x", bytes(cluster_limit(cluster.settings))])
        with pytest.raises(RefusedError, match="above the limit"):
            await write.task(too_large)
        with pytest.raises(RefusedError, match="no payload"):
            await write.task(plain([b"x", None]))  # type: ignore[list-item]
        assert await staged_for(cluster, "sink-bad") == []
        # Deleted by an admin, or swept: the commit says so, and takes nothing of it.
        done = [await write.task(plain([b"%d" % part])) for part in range(2)]
        async with open_catalog(cluster.settings) as catalog:
            await catalog.bare.delete(done[0].ledger_id)
        with pytest.raises(RefusedError, match="there is no ledger"):
            await write.commit(done)
        await write.abort(done)
        assert await payloads(client, "sink-bad") == []
        assert await staged_for(cluster, "sink-bad") == []
        nowhere = place_of(cluster, stream="sink-bad", zookeeperHosts="127.0.0.1:1")
        monkeypatch.setenv("TIERLOG_ZOOKEEPER__CONNECT_TIMEOUT_S", "1")
        with pytest.raises(RetryableError, match=r"127\.0\.0\.1:1"):
            await writing(nowhere)


def cluster_limit(settings: Settings) -> int:
    """So many bytes are more than a frame of the wire takes."""
    return settings.wire.frame_bytes_max + 1
