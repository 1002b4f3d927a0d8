"""Claim: Spark reads a stream out of the bucket nearly as fast as it reads Parquet.

direct    ``format("tierlog")``, the payload alone: fetched, verified, taken apart, as Arrow batches
parquet   the same payloads as an uncompressed binary column in local files, Spark's own reader
s3a       the same files in the same bucket, by Hadoop's connector: ``--s3a`` names its jars
ready     as many bytes, one Arrow batch given again and again: what Python's API itself gives
tuples    the same as ``direct``, but handed over row by row
export    the job ``tierlog spark export`` to a local folder: all columns, as Parquet with zstd
worker    ``direct`` as one task, of all and of 0.3 of it: the most memory that it ever held

``--elsewhere`` is as on a machine that the store shares no processor with: ranges of objects come
out of the page cache (``lean_s3.py``), and one core is one, which Spark's JVM and workers share.

Events have 200 B or 10 KB; the first three run on one core and on two. The stream went the whole
way: appended by a client, sealed, offloaded, named by the manifest. Each run is a session of its
own that reads everything once before it is measured, into Spark's sink that goes nowhere.
"""

import argparse
import asyncio
import contextlib
import functools
import os
import tempfile
import time
from collections.abc import Awaitable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs as pa_fs
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from common import (
    HOUR_MS,
    MB,
    MIB,
    Bench,
    Claim,
    Result,
    arguments_parser,
    child_mode,
    entries_of,
    folder_of,
    median_claim,
    parse,
    positive,
    positives,
    random_pool,
    ratio_claim,
    report,
    rss_peak_bytes,
    run_child,
    say,
    take_turns,
)
from lean_s3 import lean_s3
from tierlog.client import Client
from tierlog.model.ids import StreamName
from tierlog.model.policy import Policy
from tierlog.model.stream import ListedLedger
from tierlog.runtime.settings import S3Settings, Settings, load_settings
from tierlog_spark import TierlogDataSource
from tierlog_spark.bucket import opened
from tierlog_spark.columns import TYPES, Table
from tierlog_spark.jobs.export import ExportOptions, export
from tierlog_spark.jobs.frame import JobRun
from tierlog_spark.local import local_session, spark_environment
from tierlog_spark.source import EventReader

FILES = 8
SIZES = (200, 10_000)
KINDS = ("direct", "ready", "parquet", "s3a", "tuples", "export", "worker")
CORES = (1, 2)
COMPLETE_S_MAX = 300.0
# A partition so large is a whole ledger, whatever there is of it.
ONE_TASK = {"partitionBytes": str(10**12)}
PART = 0.3
READY_BYTES = MIB
# What forks Spark's workers has this in its command, and so have they.
DAEMON = b"tierlog_spark.daemon"


class TuplesReader(EventReader):
    """Hands over rows where the source has batches."""

    def read(self, partition: InputPartition) -> Iterator[Any]:
        for batch in super().read(partition):
            yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


class TuplesSource(TierlogDataSource):
    """The source as it would be without Arrow."""

    @classmethod
    def name(cls) -> str:
        return "tierlog-tuples"

    def reader(self, schema: StructType) -> DataSourceReader:
        return TuplesReader(self._options(), schema)


class ReadyReader(DataSourceReader):
    """Hands over the same batch, made once a partition."""

    def __init__(self, size: int, count: int) -> None:
        self._size, self._count = size, count

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(number) for number in range(FILES)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        left = (self._count + FILES - 1 - partition.value) // FILES
        rows = max(1, READY_BYTES // self._size)
        places = np.arange(rows + 1, dtype=np.int32) * self._size
        buffers = [None, pa.py_buffer(places), pa.py_buffer(os.urandom(rows * self._size))]
        payloads = pa.Array.from_buffers(pa.binary(), rows, buffers)
        batch = pa.RecordBatch.from_arrays([payloads], ["payload"])
        while left > 0:
            yield batch.slice(0, min(left, rows))
            left -= rows


class ReadySource(DataSource):
    """Has all there is to read already: nothing is fetched, verified or taken apart."""

    @classmethod
    def name(cls) -> str:
        return "ready"

    def schema(self) -> str:
        return "payload binary"

    def reader(self, schema: StructType) -> DataSourceReader:
        return ReadyReader(int(self.options["size"]), int(self.options["count"]))


def frame_of(spark: SparkSession, parameters: Mapping[str, Any]) -> DataFrame:
    """Return what is read."""
    kind, count = parameters["kind"], parameters["count"]
    if kind in ("parquet", "s3a"):
        return spark.read.parquet(parameters[kind])
    if kind == "ready":
        size = str(round(parameters["bytes"] / count))
        return spark.read.format("ready").options(size=size, count=str(count)).load()
    name = "tierlog" if kind == "direct" else TuplesSource.name()
    return (
        spark.read.format(name)
        .options(stream=parameters["stream"], columns=parameters["columns"])
        .options(pushDownFilters="false")
        .options(**parameters["options"])
        .load()
    )


def s3a_arguments(jars: str) -> str:
    """Return what Spark is started with to read the bucket by Hadoop's connector."""
    s3 = load_settings().s3
    assert s3.secret_key is not None
    options = {
        "endpoint": s3.endpoint_url,
        "endpoint.region": s3.region,
        "path.style.access": "true",
        "connection.ssl.enabled": "false",
        "access.key": s3.access_key,
        "secret.key": s3.secret_key.get_secret_value(),
    }
    given = " ".join(
        f"--conf spark.hadoop.fs.s3a.{name}={value}" for name, value in options.items()
    )
    return f"--driver-class-path {jars}/* {given} pyspark-shell"


async def read_all(parameters: Mapping[str, Any]) -> Result:
    """Read everything, and then once more, measured (in a child)."""
    kind, cores = parameters["kind"], parameters["cores"]
    if parameters["bound"]:
        # The JVM, and the workers that it starts, have what this process has.
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    with tempfile.TemporaryDirectory(prefix="tierlog-bench-") as folder:
        os.environ.update(spark_environment(Path(folder), os.environ))
        if kind == "s3a":
            os.environ["PYSPARK_SUBMIT_ARGS"] = s3a_arguments(parameters["jars"])
        spark = local_session(Path(folder), cores=cores, memory_mb=2048)
        spark.dataSource.register(TuplesSource)
        spark.dataSource.register(ReadySource)
        if kind == "export":
            seconds = await export_all(spark, parameters["stream"], Path(folder))
            spark.stop()
            return _result(parameters, seconds)
        frame = frame_of(spark, parameters)
        for _ in range(parameters["warmups"]):
            frame.write.format("noop").mode("overwrite").save()
        started_s = time.perf_counter()
        frame.write.format("noop").mode("overwrite").save()
        seconds = time.perf_counter() - started_s
        count = frame.count() if parameters["counted"] else parameters["count"]
        assert count == parameters["count"], count
        worker_mib = workers_peak_bytes() / MIB
        spark.stop()
    return {**_result(parameters, seconds), "worker_mib": worker_mib}


def workers_peak_bytes() -> int:
    """Return the most memory that one of Spark's Python workers below this process ever held."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(stat.read_text(encoding="utf-8").rpartition(") ")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    left, found = [os.getpid()], 0
    while left:
        some = children.get(left.pop(), [])
        left += some
        for pid in some:
            with contextlib.suppress(OSError):
                if DAEMON in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found = max(found, rss_peak_bytes(pid))
    assert found, "no worker of Spark's runs below this process"
    return found


async def export_all(spark: SparkSession, stream: str, folder: Path) -> float:
    """Export a stream, and then once more to another folder; return the seconds of that."""
    seconds = 0.0
    for name in ("first", "second"):
        options = ExportOptions(streams=(stream,), to=str(folder / name), s3=load_settings().s3)
        report = await asyncio.to_thread(export, JobRun(spark=spark), options)
        seconds = float(report.counts["seconds"])
    return seconds


def _result(parameters: Mapping[str, Any], seconds: float) -> Result:
    return {
        "bytes": parameters["bytes"],
        "seconds": seconds,
        "mb_per_s": parameters["bytes"] / MB / seconds,
        "rows_per_s": parameters["count"] / seconds,
    }


async def fill(
    client: Client, s3: S3Settings, stream: str, payloads: list[memoryview]
) -> ListedLedger:
    """Append events, seal, offload, and wait until the bucket itself knows the one ledger."""
    policy = Policy(
        ledger_bytes_max=10**11, ledger_entries_max=10**9, ledger_age_ms_max=1000 * HOUR_MS
    )
    await client.create_stream(stream, policy=policy)
    async with client.writer(stream) as writer:
        for payload in payloads:
            await writer.send(payload)
    await client.seal(stream)
    await client.offload(stream)
    deadline_s = time.monotonic() + COMPLETE_S_MAX
    async with opened(s3, fetch_bytes=MB) as bucket:
        while time.monotonic() < deadline_s:
            found = [one for one in await bucket.every_stream() if one.stream == stream]
            ledgers = [one for known in found for one in bucket.ledgers_of(known)]
            if ledgers and all(one.copy is not None for one in ledgers):
                (ledger,) = ledgers
                return ledger.listed
            await asyncio.sleep(0.5)
    raise SystemExit(f"the ledger was not in the bucket within {COMPLETE_S_MAX:.0f} s")


def write_parquet(folder: Path, payloads: list[memoryview]) -> None:
    """Write the payloads as Spark would like them best."""
    folder.mkdir()
    step = -(-len(payloads) // FILES)
    for number in range(FILES):
        some = [bytes(one) for one in payloads[number * step : (number + 1) * step]]
        table = pa.table({"payload": pa.array(some, pa.binary())})
        pq.write_table(
            table, folder / f"{number}.parquet", compression="none", use_dictionary=False
        )


def claims_of(size: int, runs: Mapping[str, list[Result]]) -> list[Claim]:
    """Say what is promised of one size of events."""
    found: list[Claim] = []

    def ratio(name: str, of: str, to: str, **bound: Any) -> None:  # noqa: ANN401 - ratio_claim's
        if of in runs and to in runs:
            found.append(ratio_claim(f"{size} B{name}", runs, of=of, to=to, **bound))

    for kind, least in (("parquet", 0.7), ("s3a", None), ("ready", None)):
        for n in CORES:
            name = f", {n} cores: direct / {kind}"
            ratio(name, f"direct {n}", f"{kind} {n}", target=least)
    least = 3.0 if size == min(SIZES) else None
    ratio(", 1 core: direct / tuples", "direct 1", "tuples 1", target=least)
    ratio(": direct 2 / 1 cores", "direct 2", "direct 1", target=1.7)
    for name, results in runs.items():
        of_worker = name.startswith("worker")
        key, unit = ("worker_mib", "MiB") if of_worker else ("mb_per_s", "MB/s")
        found.append(median_claim(f"{size} B: {name}", results, key, unit=unit))
    all_and_part = "worker all", "worker part"
    name = f": worker, memory of all / {PART:g}"
    ratio(name, *all_and_part, key="worker_mib", target=1.1, at_most=True)
    return found


def _file_system(s3: S3Settings) -> pa_fs.S3FileSystem:
    assert s3.secret_key is not None
    return pa_fs.S3FileSystem(
        access_key=s3.access_key,
        secret_key=s3.secret_key.get_secret_value(),
        endpoint_override=s3.endpoint_url,
        region=s3.region,
    )


def copy_ledgers(s3: S3Settings, folder: Path) -> None:
    """Copy the bucket's data objects, which never change, into files under their keys."""
    store = _file_system(s3)
    for found in store.get_file_info(pa_fs.FileSelector(s3.bucket, recursive=True)):
        if found.type is pa_fs.FileType.File and found.size > MB:
            path = folder / found.path.removeprefix(f"{s3.bucket}/")
            path.parent.mkdir(parents=True, exist_ok=True)
            pa_fs.copy_files(found.path, str(path), source_filesystem=store)


def put_parquet(s3: S3Settings, folder: Path) -> str:
    """Put the files into the bucket; return where Hadoop's connector finds them."""
    store = _file_system(s3)
    pa_fs.copy_files(str(folder), f"{s3.bucket}/{folder.name}", destination_filesystem=store)
    return f"s3a://{s3.bucket}/{folder.name}/"


async def measure(
    bench: Bench, folder: Path, size: int, arguments: argparse.Namespace
) -> dict[str, list[Result]]:
    """Measure events of one size."""
    env = bench.env
    total, rounds, jars = arguments.size * MB, arguments.runs, arguments.s3a
    stream, count = f"events-{size}", total // size
    payloads = list(entries_of(random_pool(), size, count))
    say(f"appending {total / MB:,.0f} MB in events of {size:,} bytes")
    async with bench.client() as client:
        ledger = await fill(client, bench_s3(bench), StreamName(stream), payloads)
    write_parquet(folder / f"parquet-{size}", payloads)
    if arguments.elsewhere:
        copy_ledgers(bench_s3(bench), folder / "objects")
        env |= {"TIERLOG_S3__ENDPOINT_URL": arguments.lean_url}
    in_bucket = put_parquet(bench_s3(bench), folder / f"parquet-{size}") if jars else None

    def child(
        kind: str, cores: int, options: Mapping[str, str] | None = None, share: float = 1
    ) -> Awaitable[Result]:
        parameters = {
            "kind": kind,
            "cores": cores,
            "stream": stream,
            "parquet": str(folder / f"parquet-{size}"),
            "s3a": in_bucket,
            "jars": str(jars),
            "count": round(share * count),
            "counted": kind in ("direct", "ready") and cores == max(CORES),
            "bytes": share * count * size,
            "options": options or {},
            "bound": arguments.elsewhere,
            "warmups": arguments.warmups,
            "columns": arguments.columns,
        }
        return run_child(__file__, "read", parameters, env)

    compared = ["direct", "ready", "parquet"] + (["s3a"] if jars else [])
    kinds = [(kind, cores) for kind in compared for cores in CORES] + [
        ("tuples", 1),
        ("export", max(CORES)),
    ]
    kinds = [one for one in kinds if one[0] in arguments.kinds]
    part = f"{ledger.ledger_id}:{int(PART * ledger.entry_count)}"
    variants = {f"{kind} {cores}": functools.partial(child, kind, cores) for kind, cores in kinds}
    if "worker" in arguments.kinds:
        in_part = {**ONE_TASK, "end": part}
        variants["worker all"] = functools.partial(child, "direct", 1, ONE_TASK)
        variants["worker part"] = functools.partial(child, "direct", 1, in_part, PART)
    return await take_turns(variants, rounds)


def bench_s3(bench: Bench) -> S3Settings:
    """Return where the bucket is, as the children are told."""
    prefix = "TIERLOG_S3__"
    named = {
        name.removeprefix(prefix).lower(): value
        for name, value in bench.env.items()
        if name.startswith(prefix)
    }
    return S3Settings.model_validate({**Settings().s3.model_dump(exclude_unset=True), **named})


async def main() -> None:
    """Measure and tell."""
    parser = arguments_parser("Spark out of the bucket against Parquet", size_mb=1000)
    parser.add_argument("--sizes", type=positives, default=list(SIZES), help="bytes of an event")
    parser.add_argument(
        "--elsewhere", action="store_true", help="the store costs nothing, and Spark has its cores"
    )
    parser.add_argument("--warmups", type=positive, default=1, help="reads before the measured one")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="what to read")
    parser.add_argument(
        "--columns", default="payload", help="of direct and tuples: entry_id,payload, say"
    )
    parser.add_argument("--s3a", type=Path, help="folder of the jars of hadoop-aws")
    arguments = parse(parser, quick_mb=200)
    if unknown := set(arguments.columns.split(",")) - set(TYPES[Table.EVENTS]):
        parser.error(f"--columns: there is no {', '.join(sorted(unknown))}")
    if arguments.s3a is not None and not list(arguments.s3a.glob("hadoop-aws-*.jar")):
        parser.error(f"--s3a: there is no hadoop-aws-*.jar in {arguments.s3a}")
    # What the client packs events into.
    arguments.entry_size = Settings.model_fields["client"].default.batch_bytes
    claims: list[Claim] = []
    runs: dict[str, list[Result]] = {}
    kinds = ["ingest", "reader", "offloader", "scheduler"]
    with folder_of(arguments) as folder:
        async with (
            Bench(folder / "servers", kinds, {}) as bench,
            lean_s3(str(bench_s3(bench).endpoint_url), folder / "objects") as arguments.lean_url,
        ):
            for size in arguments.sizes:
                found = await measure(bench, folder, size, arguments)
                claims += claims_of(size, found)
                runs |= {f"{size} B: {name}": results for name, results in found.items()}
    report("spark_read", arguments, claims, runs)


if __name__ == "__main__":
    load_settings()
    if not child_mode({"read": read_all}):
        asyncio.run(main())
