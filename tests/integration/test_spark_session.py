"""`format("tierlog")` in a real Spark session: batch, streaming, and the how-to as it stands.

All tests with a session are here, so that one process starts one.
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
from tierlog.client import SyncClient
from tierlog.format.entry import encode_entry
from tierlog.model.errors import Reason, RefusedError
from tierlog_spark.jobs.frame import plain_spark_errors

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.plugins.fix_cluster import ServiceCluster
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


def test_what_an_executor_raises_of_ours_comes_as_what_it_is(spark: SparkSession) -> None:
    def fail(batches: Any) -> Any:
        yield from batches
        raise RefusedError("entry 7:1 is gone", reason=Reason.TRIMMED, remedy="Begin later")

    with pytest.raises(RefusedError) as caught, plain_spark_errors():
        spark.range(1).mapInArrow(fail, "id long").collect()
    assert caught.value.reason is Reason.TRIMMED
    assert caught.value.message == "entry 7:1 is gone"
    assert caught.value.remedy == "Begin later"
