"""Jobs over whole buckets on real servers: back-fill, scrub, usage and cost, copy, restore.

Workers are killed in a back-fill whose tasks run twice at once; a bucket is copied, damaged,
and brought back; what is wrong is said once, with its name and what to do.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
import uuid
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pytest
from pydantic import SecretStr
from typer.testing import CliRunner

from tests.integration.spark_bulk import taking_turns
from tests.integration.spark_hosts import BEGUN, outside_spark, two_hosts
from tests.integration.spark_kit import (
    T0,
    blocks_of,
    entries_of,
    expected,
    made_bucket,
    options_of,
    plain,
    rows_read,
    spoil,
)
from tests.integration.test_reader_tiers import append, numbered, payloads
from tests.plugins.fix_cluster import ServiceCluster
from tierlog.catalog import Catalog
from tierlog.client import open_client
from tierlog.format.keys import parse_key
from tierlog.model.errors import TierlogError
from tierlog.model.ids import StreamName
from tierlog.model.manifest import ClusterManifest
from tierlog.model.node import Cluster
from tierlog.model.offload import AttemptOutcome, OffloadContext, OffloadState
from tierlog.model.policy import MIB, Policy
from tierlog.model.prices import Prices
from tierlog.runtime.settings import Settings
from tierlog.wiring.build import open_catalog
from tierlog.wiring.objects import open_bucket
from tierlog_spark.cli.main import app
from tierlog_spark.jobs import session
from tierlog_spark.jobs.bulk_offload import BackFill, bulk_offload
from tierlog_spark.jobs.cost import WhatIf, cost
from tierlog_spark.jobs.frame import JobReport, JobRun
from tierlog_spark.jobs.moving import Move, copy, restore
from tierlog_spark.jobs.scrub import scrub
from tierlog_spark.jobs.site import open_site
from tierlog_spark.jobs.usage import usage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pyspark.sql import SparkSession

    from tests.integration.spark_kit import MadeBucket, MadeStream
    from tests.plugins.fix_cli import CommandLine
    from tierlog.embedded.supervisor import EmbeddedServers
    from tierlog.ports.objects import ObjectStore

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to" / "run-jobs-with-spark.md"
STREAM = StreamName("old")
# Nothing is offloaded by itself, and no local copy goes.
POLICY = Policy(ledger_bytes_max=12 * MIB, block_size=5 * MIB, deletion_lag_ms=-1)
LARGE, SMALL_LEDGERS = 1, 5
PRICES = Prices(
    write_per_1000=0.005, read_per_1000=0.0004, received_per_gb=0.0, stored_per_gb_month=0.023
)


async def run(job: Callable[..., JobReport], *given: Any, **named: Any) -> JobReport:
    """Run a job on a thread of its own, since it has a loop of its own."""
    return await asyncio.to_thread(job, *given, **named)


def plainly(settings: Settings) -> dict[str, Any]:
    """The settings as another process takes them."""
    s3, found = settings.s3, settings.model_dump(mode="json", include={"zookeeper"})
    assert s3.secret_key is not None
    found["s3"] = {
        "endpoint_url": s3.endpoint_url,
        "access_key": s3.access_key,
        "secret_key": s3.secret_key.get_secret_value(),
        "bucket": s3.bucket,
    }
    return found


async def lived(site: ServiceCluster) -> list[bytes]:
    """Let a stream have sealed ledgers that nobody offloaded."""
    events: list[bytes] = []
    async with open_client(site.settings) as client:
        await client.create_stream(STREAM, policy=POLICY)
        for number in range(LARGE + SMALL_LEDGERS):
            some = numbered(10**5 * number, 6_000 if number < LARGE else 60)
            await append(client, STREAM, some)
            await client.seal(STREAM)
            events += some
    return events


async def is_known(site: ServiceCluster) -> bool:
    async with open_site(site.settings) as found:
        return found.cluster.cluster_id in await found.manifests.clusters()


async def contexts_of(catalog: Catalog, name: StreamName = STREAM) -> list[OffloadContext]:
    snapshot = await catalog.streams.snapshot(name)
    found = [await catalog.contexts.get(one.ledger_id) for one in snapshot.ledgers if one.closed]
    return [one for one in found if one is not None]


async def attempts_in(store: ObjectStore) -> set[tuple[int, uuid.UUID | None]]:
    parsed = [parse_key("", info.key) async for info in store.list("")]
    return {(one.ledger_id, one.uuid) for one in parsed if one is not None}


def attempts_of(contexts: Sequence[OffloadContext]) -> set[tuple[int, uuid.UUID | None]]:
    return {(one.ledger_id, one.uuid) for one in contexts}


async def killed_back_fill(site: ServiceCluster, marks: Path) -> list[dict[str, Any]]:
    """Run the back-fill whose workers die, in a process of its own."""
    marks.mkdir()
    given = {
        "settings": plainly(site.settings),
        "stream": STREAM,
        "marks": str(marks),
        "task_bytes": MIB,
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.integration.spark_bulk",
        json.dumps(given),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=taking_turns(),
        cwd=Path(__file__).parents[2],
    )
    stdout, stderr = await process.communicate()
    assert process.returncode == 0, stderr.decode()[-4000:]
    assert {one.name for one in marks.iterdir()} == {"part", "index"}, "both died"
    found: list[dict[str, Any]] = json.loads(stdout.splitlines()[-1])
    return found


async def test_a_back_fill_with_killed_workers_and_a_scrub_that_feeds_a_repair(
    servers: EmbeddedServers,
    spark: SparkSession,
    cli: CommandLine,
    tmp_path: Path,
    free_port: int,
) -> None:
    name = f"bulk-{uuid.uuid4().hex[:12]}"
    env = {"TIERLOG_SCHEDULER__SCRUB_INTERVAL_S": "0"}
    site = ServiceCluster(servers, tmp_path / "cluster", name=name, env=env)
    try:
        await site.start()
        events = await lived(site)
        await site.until(lambda: is_known(site), what="whose the bucket is")
        job = JobRun(spark=spark)
        planned = await run(bulk_offload, replace(job, dry_run=True), site.settings)
        assert planned.counts["ledgers"] == len(planned.rows) == LARGE + SMALL_LEDGERS
        for job_of in (bulk_offload, scrub):
            await check_refused(servers, site, job, job_of)
        again = await run(bulk_offload, replace(job, dry_run=True), site.settings)
        assert again.rows == planned.rows

        for done in await killed_back_fill(site, tmp_path / "marks"):
            assert (done["complete"], done["incomplete"]) == (done["ledgers"], 0)
            assert done["ledgers"] == LARGE + SMALL_LEDGERS, "both began with all of them"
        async with (
            open_catalog(site.settings) as catalog,
            open_bucket(site.settings, name) as store,
        ):
            await check_complete_once(catalog, store)
            again = await run(bulk_offload, job, site.settings)
            assert (again.counts["ledgers"], again.counts["incomplete"]) == (0, 0)
            async with open_client(site.settings) as client:
                assert await payloads(client, STREAM) == events
            await check_scrubs(site, store, job, cli, tmp_path)
        await check_twice_on_two_machines(site, tmp_path, free_port)
        with pytest.raises(TierlogError, match="nothing"):
            await run(bulk_offload, job, site.settings, BackFill(streams=(StreamName("nothing"),)))
    finally:
        await site.stop()


async def check_refused(
    servers: EmbeddedServers, site: ServiceCluster, job: JobRun, job_of: Callable[..., JobReport]
) -> None:
    """Neither begins with a bucket or a metadata store that is not the cluster's."""
    settings, nobody = site.settings, uuid.uuid4()
    async with two_buckets(servers, "not-ours") as (other, empty):
        manifests = other.stream("s").manifests
        manifest = ClusterManifest(cluster=Cluster(cluster_id=nobody, created_ms=1))
        await manifests.write_cluster(1, manifest)
        roots = settings.zookeeper.model_copy(
            update={"hosts": f"{servers.endpoints.zookeeper_hosts}/none-{nobody}"}
        )
        for words, more in (
            (f"is of cluster {nobody}", {"bucket": other.s3.bucket}),
            ("is of cluster none", {"bucket": empty.s3.bucket}),
            ("is of cluster none", {"key_prefix": "elsewhere"}),
            ("no-such-bucket", {"bucket": "no-such-bucket-here"}),
            ("the keys", {"secret_key": SecretStr("wrong")}),
        ):
            s3 = settings.s3.model_copy(update=more)
            with pytest.raises(TierlogError, match=words) as caught:
                await run(job_of, job, settings.model_copy(update={"s3": s3}))
            assert caught.value.remedy
        with pytest.raises(TierlogError, match="there is no cluster in ZooKeeper"):
            await run(job_of, job, settings.model_copy(update={"zookeeper": roots}))


async def check_complete_once(catalog: Catalog, store: ObjectStore) -> None:
    """Every ledger has one complete copy, and the bucket nothing else."""
    contexts = await contexts_of(catalog)
    assert [one.state for one in contexts] == [OffloadState.COMPLETE] * (LARGE + SMALL_LEDGERS)
    for one in contexts:
        ended = [past.outcome for past in one.history]
        assert ended.count(AttemptOutcome.COMPLETE) == 1
        assert ended[-1] is AttemptOutcome.COMPLETE
    assert sum(len(one.history) for one in contexts) >= LARGE + SMALL_LEDGERS + 2, "two died"
    assert await attempts_in(store) == attempts_of(contexts)
    assert not await store.list_uploads("")


async def check_twice_on_two_machines(site: ServiceCluster, folder: Path, port: int) -> None:
    """A worker is killed, a task that is late is begun elsewhere too, each ledger has one copy."""
    name, marks = StreamName("twice"), folder / "twice"
    marks.mkdir()
    async with open_client(site.settings) as client:
        await client.create_stream(name, policy=POLICY)
        for number in range(3):
            await append(client, name, numbered(100 * number, 20))
            await client.seal(name)
    given = {
        "folder": str(marks),
        "settings": plainly(site.settings),
        "stream": name,
        "marks": str(marks),
    }
    async with two_hosts(marks, outside_spark(), port) as master:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.integration.spark_hosts",
            json.dumps({**given, "master": master}),
            cwd=Path(__file__).parents[2],
            env=outside_spark(),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        said, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()[-4000:]
    counts = json.loads(said.splitlines()[-1])
    assert (counts["ledgers"], counts["complete"], counts["incomplete"]) == (3, 3, 0)
    assert len(list(marks.glob("task-*"))) == BEGUN, "one of three was late"
    async with (
        open_catalog(site.settings) as catalog,
        open_bucket(site.settings, site.settings.s3.bucket) as store,
    ):
        contexts = await contexts_of(catalog, name)
        assert [one.state for one in contexts] == [OffloadState.COMPLETE] * 3
        # The killed attempt is on record; who found the late one's ledger locked began none.
        assert sorted(len(one.history) for one in contexts) == [1, 1, 2]
        ids = {one.ledger_id for one in contexts}
        left = {one for one in await attempts_in(store) if one[0] in ids}
        assert left == attempts_of(contexts)
        assert not await store.list_uploads("")


async def check_scrubs(
    site: ServiceCluster, store: ObjectStore, job: JobRun, cli: CommandLine, folder: Path
) -> None:
    dry = await run(scrub, replace(job, dry_run=True), site.settings)
    assert dry.counts["streams"] == 1
    assert dry.counts["ledgers"] >= LARGE + SMALL_LEDGERS
    clean = await run(scrub, job, site.settings)
    assert (clean.counts["remaining"], clean.counts["unread"], clean.rows) == (0, 0, [])
    assert clean.counts["copies_checked"] == LARGE + SMALL_LEDGERS
    assert clean.counts["bytes_read"] > LARGE * 5 * MIB
    async with open_catalog(site.settings) as catalog:
        contexts = await contexts_of(catalog)
    spoilt = [one.location for one in (contexts[0], contexts[3]) if one.location is not None]
    for location in spoilt:
        found = await store.get(location.data_key)
        assert found is not None
        body = bytearray(found[1])
        body[5000] ^= 1
        await store.put(location.data_key, bytes(body), metadata=found[0].metadata)
    told = await run(scrub, job, site.settings)
    damaged = [contexts[0].ledger_id, contexts[3].ledger_id]
    assert [(row["kind"], row["ledger_id"]) for row in sorted(told.rows, key=by_ledger)] == [
        ("damaged-data", one) for one in damaged
    ]
    report = folder / "report.json"
    report.write_bytes(orjson.dumps(told.document(), default=str))
    done = await cli(
        "scrub", "--repair", "--from-report", str(report), "-q", "-o", "json",
        state_dir=site.state_dir,
    )  # fmt: skip
    mended = orjson.loads(done.check(0).stdout)
    assert {one["repaired"] for one in mended["findings"]} == {"copied anew, from the local copy"}
    last = await run(scrub, job, site.settings)
    assert (last.counts["remaining"], last.counts["unread"]) == (0, 0)


def by_ledger(row: Any) -> int:
    return int(row["ledger_id"])


@contextlib.asynccontextmanager
async def two_buckets(servers: EmbeddedServers, name: str) -> Any:
    async with made_bucket(servers, name) as one, made_bucket(servers, f"{name}-to") as other:
        yield one, other


async def keys_in(bucket: MadeBucket) -> set[str]:
    return {info.key async for info in bucket.objects.list("") if "-ledger-" in info.key}


async def test_a_bucket_is_counted_copied_and_brought_back(
    servers: EmbeddedServers, spark: SparkSession
) -> None:
    rng = random.Random(31)
    ledgers = {11: entries_of(rng, 420, at_ms=T0), 12: entries_of(rng, 3, at_ms=T0)}
    ledgers |= {number: entries_of(rng, 2, at_ms=T0) for number in range(13, 19)}
    async with two_buckets(servers, "move") as (bucket, other):
        stream = bucket.stream("orders", policy=Policy(offload_size_bytes=0))
        keys = [await stream.add(ledger_id, some) for ledger_id, some in ledgers.items()]
        await stream.add(40, [b"not copied yet"], copied=False)
        await stream.write()
        await bucket.objects.put(keys[0].replace("ledger-11", "ledger-99"), b"left", metadata={})
        await bucket.objects.put("holiday.jpg", b"x", metadata={})
        told: list[tuple[str, int, int | None]] = []
        job = JobRun(spark=spark, progress=lambda *one: told.append(one))
        await check_counts(bucket, stream, job)
        assert told[-1][1] == told[-1][2]

        move = Move(source=bucket.s3, target=other.s3)
        dry = await run(copy, replace(job, dry_run=True), move)
        assert (dry.counts["missing"], await keys_in(other)) == (8, set())
        done = await run(copy, job, move)
        assert (done.counts["brought"], done.counts["failed"]) == (8, 0)
        again = await run(copy, job, move)
        assert (again.counts["there"], again.counts["bytes_moved"], again.rows) == (8, 0, [])
        assert await keys_in(other) == {
            key + suffix for key in keys for suffix in ("", "-index", "-side")
        }
        rows = await rows_read(options_of(other.s3, stream="orders"))
        assert [plain(row) for row in rows] == expected("orders", ledgers)

        await spoil(bucket, keys[0])
        await bucket.objects.delete(f"{keys[3]}-index")
        back = Move(source=other.s3, target=bucket.s3, deep=True)
        done = await run(restore, job, back)
        assert (done.counts["brought"], done.counts["there"]) == (2, 6)
        rows = await rows_read(options_of(bucket.s3, stream="orders"))
        assert [plain(row) for row in rows] == expected("orders", ledgers)
        await check_errors(bucket, other, job, keys)


async def check_counts(bucket: MadeBucket, stream: MadeStream, job: JobRun) -> None:
    found = await run(usage, job, bucket.s3)
    by_kind = {row["kind"]: row for row in found.rows}
    assert by_kind["copy"]["ledgers"] == 8
    assert by_kind["copy"]["objects"] == 24
    assert by_kind["unnamed"]["bytes"] == 4
    assert by_kind["foreign"]["objects"] == 1
    sizes = [info.size async for info in bucket.objects.list("")]
    assert (found.counts["objects"], found.counts["bytes"]) == (len(sizes), sum(sizes))
    only = await run(usage, job, bucket.s3, streams=[StreamName("orders")])
    assert {row["kind"] for row in only.rows} == {"copy", "manifest"}
    dry = await run(usage, replace(job, dry_run=True), bucket.s3)
    assert (dry.counts, dry.rows) == ({"streams": 1}, ())
    dry = await run(cost, replace(job, dry_run=True), bucket.s3, PRICES)
    assert (dry.counts, dry.rows) == ({"streams": 1}, ())
    asked = WhatIf(policy=Policy(offload_size_bytes=MIB))
    priced = await run(cost, job, bucket.s3, PRICES, what_if=asked)
    row = next(one for one in priced.rows if one["stream"] == "orders")
    assert row["bytes"] == by_kind["copy"]["bytes"] + by_kind["manifest"]["bytes"]
    assert row["price_of_bytes"] == pytest.approx(row["bytes"] / 10**9 * 0.023)
    length = sum(one.listed.length for one in stream.copies.values())
    assert row["if_tier2_bytes"] == length - MIB


async def check_errors(bucket: MadeBucket, other: MadeBucket, job: JobRun, keys: list[str]) -> None:
    """What is wrong is said once, with its name and what to do."""

    async def fails(words: str, function: Callable[..., JobReport], *given: Any, **named: Any):
        with pytest.raises(TierlogError, match=words):
            await run(function, job, *given, **named)

    await fails("there is no stream nothing", usage, bucket.s3, streams=[StreamName("nothing")])
    s3 = bucket.s3.model_copy(update={"bucket": "no-such-bucket-here"})
    await fails("no-such-bucket", usage, s3)
    await fails("no-such-bucket", copy, Move(source=bucket.s3, target=s3))
    wrong = bucket.s3.model_copy(update={"secret_key": SecretStr("wrong")})
    await fails("the keys", usage, wrong)
    empty = bucket.s3.model_copy(update={"key_prefix": "nothing/here"})
    await fails("not a bucket of Tierlog", copy, Move(source=empty, target=other.s3))
    await fails("both source and target", copy, Move(source=bucket.s3, target=bucket.s3))
    await spoil(bucket, keys[1])
    place = other.s3.model_copy(update={"key_prefix": "fresh"})
    moved = await run(copy, job, Move(source=bucket.s3, target=place))
    assert (moved.counts["failed"], moved.counts["brought"]) == (1, 7)
    (row,) = [one for one in moved.rows if one["error"]]
    assert row["ledger_id"] == 12
    for word in (keys[1], "damaged where it comes from", "scrub --repair --deep"):
        assert word in row["error"]
    assert not [info.key async for info in other.objects.list("fresh/streams/")]


async def test_each_job_is_a_command(
    servers: EmbeddedServers, spark: SparkSession, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    @contextlib.contextmanager
    def here(**_: Any) -> Iterator[SparkSession]:
        yield spark

    monkeypatch.setattr(session, "job_session", here)
    async with two_buckets(servers, "words") as (bucket, other):
        stream = bucket.stream("s", raw=True)
        await stream.add(3, [b"one", b"two"])
        await stream.write()
        s3 = bucket.s3
        assert s3.secret_key is not None
        env = {
            "TIERLOG_STATE_DIR": str(tmp_path),
            "TIERLOG_S3__ENDPOINT_URL": s3.endpoint_url or "",
            "TIERLOG_S3__ACCESS_KEY": s3.access_key or "",
            "TIERLOG_S3__SECRET_KEY": s3.secret_key.get_secret_value(),
            "TIERLOG_S3__BUCKET": s3.bucket,
        }

        async def words(*given: str, code: int = 0) -> Any:
            done = await asyncio.to_thread(CliRunner().invoke, app, list(given), env=env)
            assert done.exit_code == code, done.output
            return done

        metrics = tmp_path / "metrics.prom"
        found = await words("usage", "-o", "json", "-q", "--metrics", str(metrics))
        assert json.loads(found.stdout)["ledgers"] == 1
        assert 'tierlog_spark_job_bytes{job="usage"}' in metrics.read_text(encoding="utf-8")
        found = await words("cost", "--offload-size", "0", "-o", "json", "-q")
        assert json.loads(found.stdout)["rows"][0]["stream"] == "s"
        await words("cost", "--offload-time", "2d", "--retention-time", "1d", code=2)
        to = ("copy", "--to", f"s3://{other.s3.bucket}/there")
        found = await words(*to, "-o", "json", "-q", "--layout", "single-object")
        assert json.loads(found.stdout)["brought"] == 1
        source = ("restore", "--from", f"s3://{other.s3.bucket}/there", "--dry-run")
        found = await words(*source, "-q", "-o", "json")
        told = json.loads(found.stdout)
        assert (told["dry_run"], told["other_copy"], told["failed"]) == (True, 1, 0)
        await words("copy", "--to", "elsewhere", code=2)
        (block,) = blocks_of(HOW_TO)
        block = block.replace("logs-eu", other.s3.bucket)
        known: dict[str, Any] = {"spark": spark}
        with pytest.MonkeyPatch.context() as patch:
            for name, value in env.items():
                patch.setenv(name, value)
            await asyncio.to_thread(exec, block, known)
        assert known["planned"].counts["missing"] == 1
        await words("copy", "--to", "s3://x", "--access-key", "only", code=2)
