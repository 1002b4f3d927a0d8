"""`format("tierlog")` in a real Spark session: batch, streaming, and the how-to as it stands.

All tests with a session that are of no job are here, so that one process starts one.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import runpy
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest

from tests.integration.spark_kit import (
    T0,
    Row,
    blocks_of,
    entries_of,
    environment_of,
    expected,
    made_bucket,
    options_of,
    places,
    plain,
    spoil,
)
from tests.integration.test_spark_sink import place_of, staged_for
from tierlog.client import StreamWriter, StructuredEvent, SyncClient, open_client
from tierlog.format.entry import encode_entry
from tierlog.model.errors import Reason, RefusedError
from tierlog.model.ids import EntryId, LedgerId
from tierlog.model.policy import MIB, Policy
from tierlog.model.position import Position
from tierlog_spark.jobs.frame import plain_spark_errors

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from tests.plugins.fix_cluster import ServiceCluster
    from tierlog.client import Client
    from tierlog.embedded.supervisor import EmbeddedServers

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

DOCS = Path(__file__).parents[2] / "docs"
HOW_TO = DOCS / "how-to" / "read-with-spark.md"


async def test_the_how_to_runs_as_it_stands(
    servers: EmbeddedServers, spark: SparkSession, tmp_path: Path
) -> None:
    rng = random.Random(6)
    async with made_bucket(servers, "howto") as bucket:
        stream = bucket.stream("orders")
        await stream.add(81, entries_of(rng, 110, at_ms=T0))
        await stream.write()
        # What the how-to has from the settings, here as options.
        place = options_of(bucket.s3)
        known: dict[str, Any] = {
            "spark": spark,
            "path": str(tmp_path / "out"),
            "checkpoint": str(tmp_path / "checkpoint"),
        }
        for block in blocks_of(HOW_TO):
            given = block.replace('.format("tierlog")', f'.format("tierlog").options(**{place!r})')
            await asyncio.to_thread(exec, given, known)
        assert known["by_writer"][0]["count"] == 2200
        assert known["keys"] == 2
        assert known["size"][0][0] > 10**6
        assert spark.read.parquet(known["path"]).count() == 2200


async def test_a_spark_session_reads_it_with_neither_a_service_nor_zookeeper(
    servers: EmbeddedServers, spark: SparkSession
) -> None:
    rng = random.Random(4)
    ledgers = {71: entries_of(rng, 50, at_ms=T0), 72: entries_of(rng, 5, at_ms=T0)}
    wanted = expected("s", ledgers)
    async with made_bucket(servers, "alone") as bucket:
        stream = bucket.stream("s")
        keys = [await stream.add(ledger_id, entries) for ledger_id, entries in ledgers.items()]
        await stream.write()
        given = options_of(bucket.s3, stream="s")
        for name in ("zookeeper", "kafka", "redis"):
            servers.kill(name)
        try:
            frame = spark.read.format("tierlog").options(**given).load()
            assert [plain(row) for row in frame.collect()] == wanted
            low = T0 + 3000
            some = frame.where(
                f"ledger_id = 71 AND publish_time < timestamp_millis({low}) AND key IS NULL"
            )
            assert [plain(row) for row in some.collect()] == [
                row for row in wanted if row[1] == 71 and row[4] < low
            ]
            # Spark's own plan says what it still applies itself.
            plan = some._jdf.queryExecution().executedPlan().toString()
            assert "ledger_id" not in plan.partition("Filter")[2].partition("\n")[0]
            shown = some._jdf.queryExecution().toString()
            assert given["secretKey"] not in shown
        finally:
            for name in ("zookeeper", "kafka", "redis"):
                await servers.restart(name)
        await spoil(bucket, keys[1])
        # Times are pushed down, too: nothing of the spoilt ledger, which ended before, is read.
        since = T0 + 40_000
        late = frame.where(f"publish_time >= timestamp_millis({since})")
        assert [plain(row) for row in late.collect()] == [row for row in wanted if row[4] >= since]
        with pytest.raises(Exception, match=f"{keys[1]}.*another checksum") as caught:
            frame.where("ledger_id = 72").collect()
        assert given["secretKey"] not in str(caught.value)
        # Of an error that a plan ends with, too, Spark shows the words and the remedy.
        nothing = spark.read.format("tierlog").options(**{**given, "stream": "t"}).load()
        with pytest.raises(Exception, match="there is no stream t") as caught:
            nothing.collect()
        with pytest.raises(RefusedError) as plainly, plain_spark_errors():
            nothing.collect()
        assert plainly.value.reason is Reason.STREAM_NOT_FOUND
        assert "there is no stream t" in plainly.value.message
        assert plainly.value.remedy
        assert plainly.value.remedy in str(caught.value)


def entries(first: int, count: int) -> list[bytes]:
    return [str(number).encode() for number in range(first, first + count)]


async def test_a_query_and_its_restart_read_each_entry_once(
    servers: EmbeddedServers, spark: SparkSession, tmp_path: Path
) -> None:
    async with made_bucket(servers, "streaming") as bucket:
        stream = bucket.stream("s", raw=True)
        await stream.add(11, entries(0, 25))
        await stream.write()
        given = options_of(
            bucket.s3, stream="s", columns="entry_id,payload", maxEntriesPerTrigger="10"
        )

        def run() -> Any:
            frame = spark.readStream.format("tierlog").options(**given).load()
            query = (
                frame.selectExpr("cast(payload as string) as text")
                .coalesce(1)
                .writeStream.format("parquet")
                .option("path", str(tmp_path / "out"))
                .option("checkpointLocation", str(tmp_path / "checkpoint"))
                .trigger(availableNow=True)
                .start()
            )
            query.awaitTermination()
            return query

        first = await asyncio.to_thread(run)
        batches = [one["numInputRows"] for one in first.recentProgress if one["numInputRows"]]
        assert batches == [10, 10, 5]
        await stream.add(14, entries(25, 3))
        await stream.write()
        await asyncio.to_thread(run)
        rows = await asyncio.to_thread(spark.read.parquet(str(tmp_path / "out")).collect)
        assert sorted(int(row["text"]) for row in rows) == list(range(28))
        offsets = sorted(
            (tmp_path / "checkpoint" / "offsets").glob("[0-9]*"), key=lambda p: int(p.name)
        )
        assert [places(json.loads(one.read_text().splitlines()[2])) for one in offsets] == [
            {"s": "11:10"},
            {"s": "11:20"},
            {"s": "12:0"},
            {"s": "15:0"},
        ]
        secret = given["secretKey"].encode()
        kept = [one for one in (tmp_path / "checkpoint").rglob("*") if one.is_file()]
        assert not [one for one in kept if secret in one.read_bytes()]


def rows_there(client: SyncClient) -> list[tuple[bytes | None, bytes]]:
    return [(event.key, event.payload) for event in client.events("sink-orders")]


def test_the_how_to_of_writing_runs_as_it_stands_and_a_lost_commit_is_made_again(
    cluster: ServiceCluster, spark: SparkSession, tmp_path: Path
) -> None:
    # On the thread of the session: Spark looks up where to stream to in the session of the thread.
    place = place_of(cluster)
    known: dict[str, Any] = {
        "spark": spark,
        "incoming": str(tmp_path / "incoming"),
        "checkpoint": str(tmp_path / "checkpoint"),
    }
    blocks = [
        # What the how-to has from the settings, here as options; other tests have streams, too.
        re.sub(
            r'(write|writeStream)\.format\("tierlog"\)', rf"\g<0>.options(**{place!r})", block
        ).replace('"orders"', '"sink-orders"')
        for block in blocks_of(DOCS / "how-to" / "write-with-spark.md")
    ]
    assert len(blocks) == 3
    with SyncClient(cluster.settings) as client:
        client.create_stream("sink-orders")
        spark.createDataFrame([("three",)], "payload string").write.json(known["incoming"])
        for block in blocks:
            exec(block, known)
        rows = rows_there(client)
        written = [(b"a", b"one"), (b"b", b"two")]
        assert sorted(rows, key=str) == sorted([*written, (None, b"three"), *written], key=str)

        # The driver dies between the commit in the stream and Spark's own note of it.
        (commit,) = (tmp_path / "checkpoint" / "commits").glob("[0-9]*")
        for one in (commit, commit.with_name(f".{commit.name}.crc")):
            one.unlink()
        exec(blocks[1], known)
        assert commit.exists()
        assert rows_there(client) == rows
        # What a task refuses is one error, with its name, and nothing of the write is there.
        # One task, since what another one stages while the write is given up stays for the sweep.
        bad = spark.createDataFrame([("x",), (None,)], "payload string").coalesce(1)
        write = bad.write.format("tierlog").options(stream="sink-orders", **place).mode("append")
        with pytest.raises(Exception, match="a row has no payload"):
            write.save()
        assert rows_there(client) == rows
    assert asyncio.run(staged_for(cluster, "sink-orders")) == []


async def test_the_notebook_plots_what_the_changelogs_of_this_machine_say(
    servers: EmbeddedServers,
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    printed = runpy.run_path(str(DOCS / "examples" / "changelog_records.py"))["lines"]
    payloads = [line.encode() for line in printed()]
    entries = []
    for start in range(0, len(payloads), 200):
        some = payloads[start : start + 200]
        entries.append(
            encode_entry(
                some,
                publish_time_ms=T0,
                writer_id=UUID(int=1),
                event_number=start + len(some),
            )
        )
    async with made_bucket(servers, "notebook") as bucket:
        stream = bucket.stream("changelogs")
        await stream.add(91, entries)
        await stream.write()
        for name, value in environment_of(bucket.s3).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("PLOTS", str(tmp_path))
        # Logs of this process stay as they are.
        monkeypatch.setattr("tierlog.cli.session._quiet_logs", lambda _: None)
        notebook = str(DOCS / "examples" / "changelogs.py")
        known = await asyncio.to_thread(runpy.run_path, notebook, {"spark": spark})
    assert known["total"] == len(payloads) > 100
    assert f"{len(payloads)} uploads" in capsys.readouterr().out
    for name in ("by-year", "by-topic"):
        plot = (tmp_path / f"changelogs-{name}.png").read_bytes()
        assert plot.startswith(b"\x89PNG")
        assert len(plot) > 10_000


LEDGER_EVENTS = 40


class Moving:
    """A stream whose ledgers, of eight entries, are offloaded and deleted locally by themselves."""

    POLICY = Policy(ledger_entries_max=8, block_size=5 * MIB, offload_time_ms=0, deletion_lag_ms=0)

    def __init__(self, cluster: ServiceCluster, client: Client, writer: StreamWriter) -> None:
        self.cluster = cluster
        self.client = client
        self.name = writer.stream
        self.sent: list[bytes] = []
        self.end = Position(LedgerId(0), EntryId(0))
        self._writer = writer

    async def append(self, entries: int) -> None:
        """Append entries of five events, one after the other."""
        for _ in range(entries):
            number = len(self.sent)
            some = [f"{number + one}".encode() * 20 for one in range(5)]
            for payload in some:
                await self._writer.send(StructuredEvent(payload=payload, key=payload[:2]))
            last = await self._writer.flush()
            assert last is not None
            self.sent += some
            self.end = Position(last.ledger_id, EntryId(last.entry_id + 1))
            await asyncio.sleep(0.05)

    async def gone(self) -> int:
        """How many ledgers are in tier 2 alone."""
        ledgers = (await self.client.stream(self.name))["ledgers"]
        return sum(bool(one["complete"] and not one["tier1"]) for one in ledgers)

    async def until_gone(self, count: int) -> None:
        """Wait until so many ledgers are in tier 2 alone."""

        async def enough() -> bool:
            return await self.gone() >= count

        await self.cluster.until(enough, what=f"{count} ledgers of {self.name} in tier 2 alone")


class ThreeWays:
    """One stream by `direct`, `service` and `auto`, in a session."""

    def __init__(self, spark: SparkSession, given: dict[str, str], folder: Path) -> None:
        self._spark = spark
        self._given = given
        self._folder = folder

    def planned(self, mode: str, **more: str) -> tuple[DataFrame, int]:
        """A read whose tasks are fixed, and how many these are."""
        given = {**self._given, "readMode": mode, **more}
        spark: Any = self._spark
        frame = spark.read.format("tierlog").options(**given).load()
        # What ``collect`` does before it plans, or another thread's session is asked for settings.
        spark._get_j_spark_session_class(spark._jvm).setActiveSession(spark._jsparkSession)
        return frame, frame._jdf.queryExecution().toRdd().getNumPartitions()

    def rows(self, mode: str, **more: str) -> list[Row]:
        return rows_of(self.planned(mode, **more)[0])

    def streamed(self, into: str, mode: str, **more: str) -> tuple[list[Row], int]:
        """Go on with a query until it has what is there now; all its rows, and its batches."""
        given = {**self._given, "readMode": mode, **more}
        out, checkpoint = self._folder / into, self._folder / f"{into}-checkpoint"
        query = (
            self._spark.readStream.format("tierlog")
            .options(**given)
            .load()
            .writeStream.format("parquet")
            .option("path", str(out))
            .option("checkpointLocation", str(checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        batches = sum(one["numInputRows"] > 0 for one in query.recentProgress)
        return sorted(
            rows_of(self._spark.read.parquet(str(out))), key=lambda row: row[1:4]
        ), batches


def rows_of(frame: DataFrame) -> list[Row]:
    return [plain(row) for row in frame.collect()]


def payloads_in(rows: list[Row]) -> list[bytes]:
    return [row[-1] for row in rows]


async def test_direct_service_and_auto_agree_while_ledgers_are_offloaded_and_deleted(
    cluster: ServiceCluster, spark: SparkSession, tmp_path: Path
) -> None:
    name = "spark-three-ways"
    reader = cluster.address("reader", "http")
    given = options_of(cluster.settings.s3, stream=name, readerAddress=reader)
    ways = ThreeWays(spark, given, tmp_path)
    async with open_client(cluster.settings) as client:
        await client.create_stream(name, policy=Moving.POLICY)
        async with client.writer(name) as writer:
            assert isinstance(writer, StreamWriter)
            moving = Moving(cluster, client, writer)
            await moving.append(19)
            await moving.until_gone(2)
            await agree_in_batches(moving, ways)
            for mode in ("auto", "service"):
                await agrees_as_a_stream(moving, ways, mode)
        await client.seal(name)
        await moving.until_gone(len((await client.stream(name))["ledgers"]))
        every = await asyncio.to_thread(ways.rows, "direct")
        assert payloads_in(every) == moving.sent
        for into, mode in (("auto", "direct"), ("service", "auto")):
            # The checkpoint goes on with another way.
            assert (await asyncio.to_thread(ways.streamed, into, mode))[0] == every


async def agree_in_batches(moving: Moving, ways: ThreeWays) -> None:
    """Plan reads; write, offload and delete; read what was planned."""
    async with asyncio.TaskGroup() as group:
        there, sent, end = await moving.gone(), len(moving.sent), str(moving.end)
        auto, tasks = await asyncio.to_thread(ways.planned, "auto", end=end)
        service, single = await asyncio.to_thread(ways.planned, "service", end=end)
        assert tasks > there, "each ledger of the bucket has a task, and the tail has one"
        assert single == 1
        group.create_task(moving.append(24))
        # The tail was in tier 1 when it was planned, and is in tier 2 alone now.
        await moving.until_gone(there + 2)
        served = await asyncio.to_thread(rows_of, service)
        assert payloads_in(served) == moving.sent[:sent]
        assert await asyncio.to_thread(rows_of, auto) == served
        # Of what is complete in the bucket nothing is left out; where that ends, it ends.
        direct = await asyncio.to_thread(ways.rows, "direct")
        assert payloads_in(direct) == moving.sent[: len(direct)]
        assert len(direct) >= (there + 2) * LEDGER_EVENTS
        assert len(direct) % LEDGER_EVENTS == 0, "whole ledgers"
        both = min(len(direct), len(served))
        assert direct[:both] == served[:both]


async def agrees_as_a_stream(moving: Moving, ways: ThreeWays, mode: str) -> None:
    async with asyncio.TaskGroup() as group:
        sent = len(moving.sent)
        group.create_task(moving.append(16))
        limit = str(sent // 5 // 2)
        some, batches = await asyncio.to_thread(
            ways.streamed, mode, mode, maxEntriesPerTrigger=limit
        )
        assert batches > 1
        assert len(some) >= sent
        assert payloads_in(some) == moving.sent[: len(some)]


def test_what_an_executor_raises_of_ours_comes_as_what_it_is(spark: SparkSession) -> None:
    def fail(batches: Any) -> Any:
        yield from batches
        raise RefusedError("entry 7:1 is gone", reason=Reason.TRIMMED, remedy="Begin later")

    with pytest.raises(RefusedError) as caught, plain_spark_errors():
        spark.range(1).mapInArrow(fail, "id long").collect()
    assert caught.value.reason is Reason.TRIMMED
    assert caught.value.message == "entry 7:1 is gone"
    assert caught.value.remedy == "Begin later"
