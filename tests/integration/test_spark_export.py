"""Exports hold each event once: run by run, batch by batch, whatever was killed in between.

What counts is what commits name; rows are compared with what the client's own code makes of the
same entries.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import random
import signal
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from uuid import UUID

import pyarrow.parquet as pq
import pytest
from pydantic import SecretStr
from pyiceberg.utils.config import Config
from typer.testing import CliRunner

from tests.contracts.s3_proxy import Asked, Fault, S3Proxy
from tests.integration.spark_hosts import outside_spark, two_hosts
from tests.integration.spark_kit import (
    T0,
    blocks_of,
    entries_of,
    environment_of,
    expected,
    made_bucket,
    plain,
    spoil,
)
from tests.integration.spark_targets import DeafTarget, OvertakenTarget, WatchedTarget
from tierlog.format.entry import encode_entry
from tierlog.model.errors import CorruptError, Reason, RefusedError, RetryableError, TierlogError
from tierlog.model.ids import LedgerId
from tierlog_spark.jobs import session
from tierlog_spark.jobs.export import ExportOptions, committed_files, export
from tierlog_spark.jobs.export.job import export_to
from tierlog_spark.jobs.export.log import NO_DATE
from tierlog_spark.jobs.export.targets import FolderTarget, target_of
from tierlog_spark.jobs.export.values import JsonSchema
from tierlog_spark.jobs.frame import JobReport, JobRun

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pyspark.sql import SparkSession

    from tests.integration.spark_kit import MadeBucket
    from tierlog.embedded.supervisor import EmbeddedServers
    from tierlog.runtime.settings import S3Settings

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
DAY_MS = 86_400_000
MIB = 1024 * 1024


def options_for(bucket: MadeBucket, to: object, *streams: str, **more: Any) -> ExportOptions:
    return ExportOptions(streams=streams, to=str(to), s3=bucket.s3, **more)


async def exported(spark: SparkSession, options: ExportOptions, **how: Any) -> JobReport:
    return await asyncio.to_thread(export, JobRun(spark=spark, **how), options)


async def rows_in(options: ExportOptions, stream: str) -> list[dict[str, Any]]:
    """What the files hold that count, in the order of positions."""

    def read() -> list[dict[str, Any]]:
        found = committed_files(options.to, stream, options.s3, verify=True)
        target = target_of(options.to, options.s3)
        names = [one.path.removeprefix(f"{target.place}/") for one in found]
        rows: list[dict[str, Any]] = []
        for body, file in zip(target.get(names), found, strict=True):
            assert body is not None
            some = pq.ParquetFile(io.BytesIO(body)).read().to_pylist()
            assert len(some) == file.rows
            rows += some
        return sorted(
            rows,
            key=lambda row: tuple(
                row[name] for name in ("stream", "ledger_id", "entry_id", "event_index")
            ),
        )

    return await asyncio.to_thread(read)


def unnamed(folder: Path, stream: str, s3: S3Settings) -> list[str]:
    """Data files that lie there and do not count."""
    named = {one.path for one in committed_files(str(folder), stream, s3)}
    return sorted(
        str(path) for path in (folder / stream).rglob("*.parquet") if str(path) not in named
    )


async def test_runs_follow_each_other_and_export_each_event_once(
    servers: EmbeddedServers, spark: SparkSession, tmp_path: Path
) -> None:
    rng = random.Random(21)
    ledgers = {
        11: entries_of(rng, 60, at_ms=T0),
        12: entries_of(rng, 4, at_ms=T0 + 40 * DAY_MS),
    }
    async with made_bucket(servers, "export") as bucket:
        stream = bucket.stream("orders")
        for ledger_id, entries in ledgers.items():
            await stream.add(ledger_id, entries)
        await stream.add(16, [b"not copied yet"], copied=False)
        await stream.write()
        options = options_for(bucket, tmp_path / "out", "orders")

        told: list[tuple[str, int, int | None]] = []
        dry = await exported(spark, options, dry_run=True)
        assert not (tmp_path / "out").exists()
        done = await exported(spark, options, progress=lambda *one: told.append(one))
        assert [row["to"] for row in (*dry.rows, *done.rows)] == [{"orders": "13:0"}] * 2
        assert dry.counts["entries"] == done.counts["entries"] == 64
        assert (done.counts["events"], done.counts["commits"]) == (64 * 20, 1)
        assert told[-1][1] == told[-1][2] == done.counts["source_bytes"] > 10**5
        found = await rows_in(options, "orders")
        assert [plain(row) for row in found] == expected("orders", ledgers)
        # Two days at the least: the entries of the last ledger were published 40 days later.
        assert len({path.name for path in (tmp_path / "out" / "orders").glob("date=*")}) >= 2

        # Through Spark's own rows, which a schema of JSON wants, they are the same.
        others = options_for(
            bucket, tmp_path / "rows", "orders", schema=JsonSchema("id INT"), keep_bad=True
        )
        assert (await exported(spark, others)).counts["bad"] == 64 * 20
        rows = await rows_in(others, "orders")
        assert {row.pop("value") for row in rows} == {None}
        assert rows == found

        # Nothing is new: nothing is written.
        before = FolderTarget(tmp_path).names()
        assert (await exported(spark, options)).counts["events"] == 0
        assert FolderTarget(tmp_path).names() == before

        ledgers[16] = entries_of(rng, 5, at_ms=T0 + 41 * DAY_MS)
        await stream.add(16, ledgers[16])
        await stream.write()
        again = await exported(spark, options)
        assert (again.counts["events"], again.rows[0]["from"]) == (100, {"orders": "13:0"})
        found = await rows_in(options, "orders")
        assert [plain(row) for row in found] == expected("orders", ledgers)
        # Whoever follows it asks for what is behind the commit that it knows.
        new = committed_files(options.to, "orders", bucket.s3, since=2)
        assert sum(one.rows for one in new) == 100


async def test_partitions_and_raw_streams_go_into_a_bucket_in_several_commits(
    servers: EmbeddedServers, spark: SparkSession
) -> None:
    rng = random.Random(22)
    shops = {
        f"shop-partition-{number}": {31 + number: entries_of(rng, 30, at_ms=T0 + DAY_MS * number)}
        for number in (0, 1)
    }
    async with made_bucket(servers, "export-s3") as bucket:
        await bucket.stream("shop", partitions=2).write()
        for name, ledgers in shops.items():
            stream = bucket.stream(name)
            for ledger_id, entries in ledgers.items():
                await stream.add(ledger_id, entries)
            await stream.write()
        raw = bucket.stream("raw", raw=True)
        await raw.add(41, [b"one", b"two"])
        await raw.write()
        to = f"s3://{bucket.s3.bucket}/some/exports"
        options = options_for(bucket, to, "shop", "raw", batch_bytes=700_000)
        done = await exported(spark, options)
        assert done.rows[0]["commits"] >= 2
        assert done.rows[0]["to"] == {"shop-partition-0": "32:0", "shop-partition-1": "33:0"}
        found = await rows_in(options, "shop")
        assert [plain(row) for row in found] == [
            row for name, ledgers in sorted(shops.items()) for row in expected(name, ledgers)
        ]
        assert [row["payload"] for row in await rows_in(options, "raw")] == [b"one", b"two"]
        [file] = await asyncio.to_thread(committed_files, to, "raw", bucket.s3)
        assert file.path.startswith(f"{to}/raw/date={NO_DATE}/")
        assert (await exported(spark, options)).counts["commits"] == 0


async def test_a_killed_worker_and_a_killed_driver_leave_each_event_once(
    servers: EmbeddedServers, spark: SparkSession, tmp_path: Path
) -> None:
    rng = random.Random(23)
    ledgers = {51 + number: entries_of(rng, 40, at_ms=T0) for number in range(3)}
    wanted = expected("s", ledgers)
    async with made_bucket(servers, "export-kill") as bucket:
        stream = bucket.stream("s")
        for ledger_id, entries in ledgers.items():
            await stream.add(ledger_id, entries)
        await stream.write()
        length = sum(len(entry) for entry in ledgers[51])
        options = options_for(
            bucket, tmp_path / "out", "s", batch_bytes=length + 100_000, file_bytes=MIB // 4
        )
        given = {
            "to": options.to,
            "marks": str(tmp_path),
            "s3": _plainly(bucket.s3),
            "batch_bytes": options.batch_bytes,
            "file_bytes": options.file_bytes,
        }
        victim = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.integration.spark_targets",
            json.dumps(given),
            cwd=ROOT,
            env=outside_spark() | {"TMPDIR": str(tmp_path)},
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        _, said = await victim.communicate()
        assert victim.returncode == -signal.SIGKILL, said.decode()
        assert (tmp_path / "worker").exists()
        # One batch counts, though a worker of it was killed; the next one was written in vain.
        first = await rows_in(options, "s")
        assert 0 < len(first) < len(wanted)
        assert [plain(row) for row in first] == wanted[: len(first)]
        lost = unnamed(tmp_path / "out", "s", bucket.s3)
        assert {Path(one).name[:25] for one in lost} == {f"part-{n:020d}" for n in (2, 3)}

        done = await exported(spark, options)
        assert done.counts["removed"] == len(lost)
        assert done.counts["events"] == len(wanted) - len(first)
        assert [plain(row) for row in await rows_in(options, "s")] == wanted
        assert unnamed(tmp_path / "out", "s", bucket.s3) == []


async def test_a_killed_worker_and_a_task_run_twice_on_two_machines_count_once(
    servers: EmbeddedServers, spark: SparkSession, tmp_path: Path, free_port: int
) -> None:
    rng = random.Random(26)
    ledgers = {61 + number: entries_of(rng, 10, at_ms=T0) for number in range(2)}
    async with (
        made_bucket(servers, "export-twice") as bucket,
        two_hosts(tmp_path, outside_spark(), free_port) as master,
    ):
        stream = bucket.stream("s")
        for ledger_id, entries in ledgers.items():
            await stream.add(ledger_id, entries)
        await stream.write()
        options = options_for(bucket, tmp_path / "out", "s")
        given = {
            "master": master,
            "folder": str(tmp_path),
            "to": options.to,
            "marks": str(tmp_path),
            "s3": _plainly(bucket.s3),
        }
        driver = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.integration.spark_hosts",
            json.dumps(given),
            cwd=ROOT,
            env=outside_spark(),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        said, errors = await driver.communicate()
        assert driver.returncode == 0, errors.decode()[-4000:]
        assert json.loads(said.splitlines()[-1])["events"] == len(expected("s", ledgers))
        assert [plain(row) for row in await rows_in(options, "s")] == expected("s", ledgers)
        # What the killed one wrote, and the stuck one, is of the same events, and does not count.
        lost = unnamed(tmp_path / "out", "s", bucket.s3)
        assert [pq.ParquetFile(one).metadata.num_rows for one in lost] == [200, 200]
        done = await exported(spark, options)
        assert (done.counts["removed"], done.counts["events"]) == (2, 0)
        assert unnamed(tmp_path / "out", "s", bucket.s3) == []


def _plainly(s3: S3Settings) -> dict[str, Any]:
    """The settings as another process takes them."""
    assert s3.secret_key is not None
    found: dict[str, Any] = json.loads(s3.model_dump_json())
    return found | {"secret_key": s3.secret_key.get_secret_value()}


async def test_a_run_that_is_overtaken_ends_and_nothing_is_there_twice(
    servers: EmbeddedServers, spark: SparkSession, tmp_path: Path
) -> None:
    rng = random.Random(24)
    ledgers = {61: entries_of(rng, 10, at_ms=T0)}
    async with made_bucket(servers, "export-two") as bucket:
        stream = bucket.stream("s")
        await stream.add(61, ledgers[61])
        await stream.write()
        options = options_for(bucket, tmp_path / "out", "s")
        target = FolderTarget(tmp_path / "out")

        def other() -> None:
            # It finds files of a run that has not ended, and makes sure that it never will.
            assert export_to(JobRun(spark=spark), options, target).counts["removed"] == 1

        slow = OvertakenTarget(target.folder, other)
        with pytest.raises(RefusedError, match="another run took number 2") as caught:
            await asyncio.to_thread(export_to, JobRun(spark=spark), options, slow)
        assert caught.value.reason is Reason.FENCED
        assert [plain(row) for row in await rows_in(options, "s")] == expected("s", ledgers)
        assert unnamed(tmp_path / "out", "s", bucket.s3) == []

        # An answer that was lost is no other run.
        ledgers[62] = entries_of(rng, 2, at_ms=T0)
        await stream.add(62, ledgers[62])
        await stream.write()
        deaf = DeafTarget(target.folder, RetryableError("no answer"))
        await asyncio.to_thread(export_to, JobRun(spark=spark), options, deaf)
        assert [plain(row) for row in await rows_in(options, "s")] == expected("s", ledgers)


GOOD = [
    b'{"id": 1, "tags": ["a", "b"], "more": 0, "at": "2026-11-01 10:00:00"}',
    b'{"tags": null}',
]
BAD = [
    *(b'{"id": "x"}', b"no json", b"", b"[1]", b"null"),
    # Spark itself looks at nothing behind the first value.
    *(b'{"id": 1}{"id": 2}', b'{"id": 1} garbage', b"{'id': 1}}"),
    # It would put U+FFFD into the text.
    b'{"id": 1, "tags": ["\xff"]}',
]


async def test_a_schema_gives_values_and_tells_what_is_not_of_it(
    servers: EmbeddedServers, spark: SparkSession, tmp_path: Path
) -> None:
    entry = encode_entry([*GOOD, *BAD], publish_time_ms=T0, writer_id=UUID(int=1), event_number=7)
    async with made_bucket(servers, "export-json") as bucket:
        stream = bucket.stream("s")
        await stream.add(71, [entry])
        await stream.write()
        schema = JsonSchema("id BIGINT, tags ARRAY<STRING>, at TIMESTAMP")
        options = options_for(bucket, tmp_path, "s", schema=schema)
        with pytest.raises(RefusedError, match=r"s: event 2 of entry 71:0 is not a JSON object"):
            await exported(spark, options)
        assert committed_files(str(tmp_path), "s", bucket.s3) == []
        kept = replace(options, keep_bad=True)
        spark.conf.set("spark.sql.session.timeZone", "America/New_York")
        done = await exported(spark, kept)
        spark.conf.set("spark.sql.session.timeZone", "UTC")
        assert (done.counts["events"], done.counts["bad"]) == (len(GOOD) + len(BAD), len(BAD))
        rows = await rows_in(kept, "s")
        assert [row["value"] for row in rows] == [
            {"id": 1, "tags": ["a", "b"], "at": datetime(2026, 11, 1, 10, tzinfo=UTC)},
            {"id": None, "tags": None, "at": None},
            *[None] * len(BAD),
        ]
        assert [row["payload"] for row in rows] == [*GOOD, *BAD]
        wrong = replace(options, schema=JsonSchema("id BIGGEST"))
        with pytest.raises(RefusedError, match="'id BIGGEST' is no schema"):
            await exported(spark, wrong)


async def test_a_run_that_fails_takes_away_what_it_wrote(
    servers: EmbeddedServers, spark: SparkSession, tmp_path: Path
) -> None:
    # More than Spark hands a task at once, so that a file is there before the bad event is met.
    events = [*[GOOD[0]] * 25_000, BAD[0]]
    entry = encode_entry(events, publish_time_ms=T0, writer_id=UUID(int=1), event_number=1)
    async with made_bucket(servers, "export-failed") as bucket:
        stream = bucket.stream("s")
        await stream.add(76, [entry])
        await stream.write()
        schema = JsonSchema("id BIGINT")
        options = options_for(bucket, tmp_path, "s", schema=schema, file_bytes=1)
        deleted: list[str] = []
        target = WatchedTarget(tmp_path, deleted)
        with pytest.raises(RefusedError, match="event 25000 of entry 76:0"):
            await asyncio.to_thread(export_to, JobRun(spark=spark), options, target)
        assert deleted
        assert unnamed(tmp_path, "s", bucket.s3) == []


async def test_bad_input_is_one_error_and_no_commit(
    servers: EmbeddedServers, spark: SparkSession, tmp_path: Path
) -> None:
    rng = random.Random(25)
    async with (
        made_bucket(servers, "export-bad") as bucket,
        made_bucket(servers, "export-none") as nobodys,
    ):
        stream = bucket.stream("s")
        before = entries_of(rng, 5, at_ms=T0)
        await stream.add(81, before)
        key = await stream.add(82, entries_of(rng, 5, at_ms=T0))
        await stream.write()
        options = options_for(bucket, tmp_path, "s")

        async def fails(kind: type[TierlogError], words: str, given: ExportOptions) -> None:
            with pytest.raises(kind, match=words):
                await exported(spark, given)

        await fails(RefusedError, "there is no stream t", replace(options, streams=("t",)))
        no_bucket = bucket.s3.model_copy(update={"bucket": "no-such-bucket-here"})
        await fails(RefusedError, "no-such-bucket-here", replace(options, s3=no_bucket))
        await fails(RefusedError, "not a bucket of Tierlog", replace(options, s3=nobodys.s3))
        assert FolderTarget(tmp_path).names() == []

        await spoil(bucket, key)
        await fails(CorruptError, f"{key}.*another checksum", options)
        assert committed_files(str(tmp_path), "s", bucket.s3) == []

        # What comes before it counts, when it is a batch by itself.
        length = sum(len(entry) for entry in before)
        await fails(CorruptError, key, replace(options, batch_bytes=length + 10))
        assert [plain(row) for row in await rows_in(options, "s")] == expected("s", {81: before})
        await bucket.objects.delete(key)
        await fails(RefusedError, f"{key} is not there", options)
        assert [plain(row) for row in await rows_in(options, "s")] == expected("s", {81: before})

        # Behind what was exported, retention took something.
        stream.head = replace(stream.head, trimmed_through=LedgerId(82))
        gone = {number for number in stream.copies if number <= 82}
        for number in gone:
            del stream.copies[number]
        await stream.add(84, entries_of(rng, 3, at_ms=T0))
        await stream.write(removed=sorted(gone))
        await fails(RefusedError, "trimmed up to ledger 82", options)
        done = await exported(spark, replace(options, skip_trimmed=True))
        assert done.rows[0]["trimmed_unread"]
        assert done.counts["events"] == 60
        again = await exported(spark, options)
        assert (again.rows[0]["trimmed_unread"], again.counts["events"]) == (False, 0)


async def test_what_went_from_a_partition_that_was_empty_is_told_once(
    servers: EmbeddedServers, spark: SparkSession, tmp_path: Path
) -> None:
    async with made_bucket(servers, "export-lost") as bucket:
        await bucket.stream("shop", partitions=2).write()
        busy, idle = (bucket.stream(f"shop-partition-{number}") for number in (0, 1))
        await busy.add(71, entries_of(random.Random(28), 2, at_ms=T0))
        await busy.write()
        await idle.write()
        options = options_for(bucket, tmp_path, "shop")
        done = await exported(spark, options)
        assert done.rows[0]["to"] == {"shop-partition-0": "72:0", "shop-partition-1": "0:0"}
        idle.head = replace(idle.head, trimmed_through=LedgerId(75))
        await idle.write()
        with pytest.raises(RefusedError, match="shop-partition-1 was trimmed up to ledger 75"):
            await exported(spark, options)
        told = await exported(spark, replace(options, skip_trimmed=True))
        assert (told.rows[0]["trimmed_unread"], told.counts["events"]) == (True, 0)
        # Though nothing was there to export, the log says how far it is.
        after = await exported(spark, options)
        assert after.rows[0]["from"]["shop-partition-1"] == "76:0"
        assert not after.rows[0]["trimmed_unread"]


async def test_an_export_that_may_not_write_says_so_and_no_commit_names_anything(
    servers: EmbeddedServers, spark: SparkSession
) -> None:
    rng = random.Random(27)
    url = servers.endpoints.s3_endpoint_url
    async with (
        made_bucket(servers, "export-denied") as bucket,
        S3Proxy(urlsplit(url).netloc) as proxy,
    ):
        stream = bucket.stream("s")
        entries = entries_of(rng, 3, at_ms=T0)
        await stream.add(81, entries)
        await stream.write()
        s3 = bucket.s3.model_copy(update={"endpoint_url": proxy.url})
        options = options_for(bucket, f"s3://{bucket.s3.bucket}/exports", "s")
        options = replace(options, s3=s3)

        async def written() -> list[str]:
            return [info.key async for info in bucket.objects.list("exports/")]

        # Who may read the bucket may not write there; the keys of nobody open nothing.
        proxy.rule = lambda asked: Fault.DENIED if asked.operation == "put_object" else None
        wrong = s3.model_copy(update={"secret_key": SecretStr("wrong")})
        for given, words in (
            (options, "AccessDenied"),
            (replace(options, s3=wrong), "s3.endpoint_url, s3.bucket and the keys"),
        ):
            with pytest.raises(RefusedError) as caught:
                await exported(spark, given)
            assert words in f"{caught.value} {caught.value.remedy}"
            assert await written() == []

        # The driver may, and the executors may not.
        def no_data(asked: Asked) -> Fault | None:
            return Fault.DENIED if asked.key.endswith(".parquet") else None

        proxy.rule = no_data
        with pytest.raises(RefusedError, match="AccessDenied"):
            await exported(spark, options)
        assert await asyncio.to_thread(committed_files, options.to, "s", s3) == []
        proxy.rule = lambda _: None
        await exported(spark, options)
        assert [plain(row) for row in await rows_in(options, "s")] == expected("s", {81: entries})


def settings_of(bucket: MadeBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Say in the environment where the bucket is."""
    for name, value in environment_of(bucket.s3).items():
        monkeypatch.setenv(name, value)


async def test_the_how_to_runs_as_it_stands(
    servers: EmbeddedServers,
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    read, run, fill = blocks_of(ROOT / "docs" / "how-to" / "export-with-spark.md")
    async with made_bucket(servers, "export-howto") as bucket:
        stream = bucket.stream("orders")
        await stream.add(86, entries_of(random.Random(27), 3, at_ms=T0))
        await stream.write()
        settings_of(bucket, monkeypatch)
        known: dict[str, Any] = {"spark": spark, "exports": str(tmp_path)}
        await asyncio.to_thread(exec, run, known)
        assert capsys.readouterr().out.endswith("\n60\n")
        await asyncio.to_thread(exec, read, known)
        assert [row["count"] for row in known["by_day"]] == [60]
        monkeypatch.setenv("PYICEBERG_CATALOG__LOCAL__URI", f"sqlite:///{tmp_path}/catalog.db")
        monkeypatch.setenv("PYICEBERG_CATALOG__LOCAL__WAREHOUSE", f"file://{tmp_path}/warehouse")
        monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG", Config())
        await asyncio.to_thread(exec, fill, known)
        assert capsys.readouterr().out == "60\n"


async def test_the_command_exports_and_lists_what_counts(
    servers: EmbeddedServers,
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tierlog_spark.cli.main import app

    @contextlib.contextmanager
    def here(**_: Any) -> Iterator[SparkSession]:
        yield spark

    monkeypatch.setattr(session, "job_session", here)
    # Logs of this process stay as they are.
    monkeypatch.setattr("tierlog.cli.session._quiet_logs", lambda _: None)
    monkeypatch.setenv("TIERLOG_STATE_DIR", str(tmp_path / "none"))

    def run(*words: str) -> Any:
        return CliRunner().invoke(app, words)

    async def answer(words: Sequence[str], code: int = 0) -> Any:
        done = await asyncio.to_thread(run, *words)
        assert done.exit_code == code, done.output
        return done

    async with made_bucket(servers, "export-cli") as bucket:
        stream = bucket.stream("s")
        await stream.add(91, entries_of(random.Random(26), 3, at_ms=T0))
        await stream.write()
        settings_of(bucket, monkeypatch)
        to, prom = str(tmp_path / "out"), tmp_path / "export.prom"
        words = ("export", "s", "--to", to, "-o", "json")
        dry = json.loads((await answer([*words, "--dry-run"])).stdout)
        assert (dry["dry_run"], dry["entries"], dry["events"]) == (True, 3, 0)
        done = json.loads((await answer([*words, "--metrics", str(prom)])).stdout)
        assert (done["events"], done["rows"][0]["to"]) == (60, {"s": "92:0"})
        assert 'tierlog_spark_job_events{job="export"} 60.0' in prom.read_text(encoding="utf-8")
        assert "s" in (await answer(["export", "s", "--to", to])).stdout
        [file] = json.loads((await answer(["exported", "s", "--from", to, "-o", "json"])).stdout)
        assert file["rows"] == 60
        Path(file["path"]).write_bytes(b"")
        damaged = await answer(["exported", "s", "--from", to, "--verify"], code=6)
        assert "is not what was written" in damaged.stderr
        for wrong, code in (
            (["exported", "t", "--from", to], 3),
            (["export", "s", "--to", to, "--message", "a.B"], 2),
            (["export", "s", "--to", to, "--no-payload"], 2),
        ):
            assert "remedy: " in (await answer(wrong, code=code)).stderr
