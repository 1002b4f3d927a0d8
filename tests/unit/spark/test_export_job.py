"""One stream that can't be exported keeps none behind it from being exported, and is told."""

import asyncio
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import pytest
import typer
from py4j.protocol import Py4JError

from tests.unit.spark.bucket_kit import ManifestBucket
from tests.unit.spark.test_export_writing import descriptors
from tierlog.adapters.memory.faults import no_faults
from tierlog.format.manifest import stream_folder
from tierlog.model.errors import CorruptError, Reason, RefusedError
from tierlog.model.ids import StreamName
from tierlog.runtime.settings import S3Settings
from tierlog_spark.cli import export as command
from tierlog_spark.cli.running import EXIT_INCOMPLETE
from tierlog_spark.jobs import export as jobs_export
from tierlog_spark.jobs.export import job
from tierlog_spark.jobs.export.job import export_to
from tierlog_spark.jobs.export.log import record_name
from tierlog_spark.jobs.export.options import ExportOptions
from tierlog_spark.jobs.export.protobufs import ProtobufSchema
from tierlog_spark.jobs.export.targets import FolderTarget
from tierlog_spark.jobs.export.writing import FileRow, WriteTask
from tierlog_spark.jobs.frame import JobRun

STREAMS = ("a", "b", "c")
SPOILT = CorruptError("ledger 12 is cut", remedy="Repair it")


class TakenTarget(FolderTarget):
    """Another run always has the next number."""

    def put_new(self, name: str, body: bytes) -> bool:
        del name, body
        return False


@pytest.fixture
def run_of(monkeypatch, tmp_path):
    """Give what exports streams of two ledgers each; ``raised`` comes of the second one."""
    bucket = ManifestBucket(monkeypatch)
    for name in STREAMS:
        asyncio.run(bucket.write(11, 12, stream=name))

    def run(
        *streams: str,
        raised: Mapping[str, Exception] = MappingProxyType({}),
        target: Any = FolderTarget,
        dry_run: bool = False,
        write: Callable[[WriteTask], list[FileRow]] = lambda _: [],
    ) -> Any:
        def write_batch(_run, _options, step, task):
            (name,) = step.to
            if name in raised and step.start[name].ledger_id == 12:
                raise raised[name]
            return write(task)

        monkeypatch.setattr(job, "write_batch", write_batch)
        # As many bytes as the kit's ledgers have entries: a batch is one of these.
        s3 = S3Settings(bucket="b")
        options = ExportOptions(streams=streams, to="", s3=s3, batch_bytes=10)
        spark: Any = None
        return export_to(JobRun(spark=spark, dry_run=dry_run), options, target(tmp_path))

    return run


def test_streams_behind_one_that_can_not_be_exported_are_exported(run_of):
    report = run_of(*STREAMS, raised={"a": SPOILT, "b": Py4JError("Job aborted.\n\tat x.Y")})
    told = [(row["stream"], row["commits"], row["to"][row["stream"]]) for row in report.rows]
    # Of those that failed, what was done before counts.
    assert told == [("a", 1, "12:0"), ("b", 1, "12:0"), ("c", 2, "13:0")]
    assert [row["entries"] for row in report.rows] == [10, 10, 20]
    assert [row["error"] for row in report.rows] == [str(SPOILT), "Job aborted.", None]
    assert (report.counts["failed"], report.counts["commits"]) == (2, 4)
    again = run_of(*STREAMS)
    assert [row["from"][row["stream"]] for row in again.rows] == ["12:0", "12:0", "13:0"]
    assert (again.counts["failed"], again.counts["commits"]) == (0, 2)


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_stream_that_is_not_there_is_told_too(run_of, dry_run):
    report = run_of("x", "a", dry_run=dry_run)
    missing, there = report.rows
    assert "no stream x" in missing["error"]
    assert (missing["to"], missing["entries"]) == ({}, 0)
    assert (there["from"], there["to"], there["entries"]) == ({"a": "0:0"}, {"a": "13:0"}, 20)
    assert (report.counts["failed"], report.counts["commits"]) == (1, 0 if dry_run else 2)


@pytest.mark.parametrize("streams", [("a",), ("a", "b")])
def test_a_run_that_can_export_nothing_ends_with_the_error_itself(run_of, streams):
    raised = dict.fromkeys(streams, SPOILT) | {"b": OSError(28, "No space")}
    with pytest.raises(CorruptError) as caught:
        run_of(*streams, raised=raised)
    assert caught.value is SPOILT


def row_of(name: str, length: int) -> FileRow:
    return {"name": name, "rows": 1, "bad": 0, "bytes": length, "sha256": "0" * 64}


def test_files_that_executors_wrote_to_a_folder_of_their_own_are_not_committed(run_of, tmp_path):
    def write(folder):
        def written(task):
            name = f"date=2026-11-22/part-{task.number}.parquet"
            (folder or task.target.folder).joinpath(name).parent.mkdir(parents=True, exist_ok=True)
            (folder or task.target.folder).joinpath(name).write_bytes(b"rows")
            return [row_of(name, 4)]

        return written

    with pytest.raises(RefusedError, match=r"1 files .*/a/date=2026-11-22/part-2") as caught:
        run_of("a", write=write(tmp_path / "of-an-executor"))
    assert "mounted" in caught.value.remedy
    # Half of it is as little.
    with pytest.raises(RefusedError, match="don't share that folder"):
        run_of("a", write=lambda task: [row_of(write(None)(task)[0]["name"], 5)])
    report = run_of("a", write=write(None))
    assert (report.counts["failed"], report.counts["commits"], report.counts["files"]) == (0, 2, 2)


def test_a_run_whose_files_another_one_deleted_is_told_of_that_one(run_of):
    def overtaken(task):
        assert task.target.put_new(record_name(task.number), b"a claim")
        return [row_of("date=2026-11-22/part-2.parquet", 4)]

    with pytest.raises(RefusedError, match="another run took number 2") as caught:
        run_of("a", write=overtaken)
    assert caught.value.reason is Reason.FENCED


def test_a_run_that_another_one_overtakes_leaves_all_the_rest_to_it(run_of):
    with pytest.raises(RefusedError, match="another run took number 1") as caught:
        run_of(*STREAMS, target=TakenTarget)
    assert caught.value.reason is Reason.FENCED


ONE, OTHER = "p-partition-0", "p-partition-1"


@pytest.fixture
def parted(monkeypatch, tmp_path):
    """Give a bucket with a stream of two partitions, and what exports both of them."""
    bucket = ManifestBucket(monkeypatch)
    asyncio.run(bucket.write(stream="p", partitions=2))
    monkeypatch.setattr(job, "write_batch", lambda *_: [])

    def run(*, skip_trimmed: bool = False) -> Any:
        s3 = S3Settings(bucket="b")
        options = ExportOptions(streams=("p",), to="", s3=s3, skip_trimmed=skip_trimmed)
        spark: Any = None
        return export_to(JobRun(spark=spark), options, FolderTarget(tmp_path))

    return bucket, run


async def take_manifests(bucket: ManifestBucket, stream: str) -> dict[str, bytes]:
    """Take a stream's manifests out of the bucket; return them."""
    objects, taken = bucket.objects.connect(no_faults()), dict[str, bytes]()
    async for one in objects.list(stream_folder("", StreamName(stream))):
        got = await objects.get(one.key)
        assert got is not None
        _, taken[one.key] = got
        await objects.delete(one.key)
    assert taken
    return taken


def test_a_partition_that_was_exported_and_is_gone_is_not_taken_for_empty(parted, tmp_path):
    bucket, run = parted
    asyncio.run(bucket.write(11, stream=ONE))
    asyncio.run(bucket.write(12, stream=OTHER))
    assert run().rows[0]["to"] == {ONE: "12:0", OTHER: "13:0"}
    taken = asyncio.run(take_manifests(bucket, OTHER))
    asyncio.run(bucket.write(13, stream=ONE))
    before = FolderTarget(tmp_path).below(StreamName("p")).names()
    with pytest.raises(RefusedError, match=f"has stream {OTHER} no more") as caught:
        run()
    assert caught.value.reason is Reason.NO_SUCH_ENTRY
    assert "--skip-trimmed" in caught.value.remedy
    assert FolderTarget(tmp_path).below(StreamName("p")).names() == before, "nothing is committed"
    [row] = run(skip_trimmed=True).rows
    assert (row["to"], row["entries"]) == ({ONE: "14:0", OTHER: "13:0"}, 10)
    assert row["trimmed_unread"]
    # It is missing until it is back, and then goes on where it was.
    with pytest.raises(RefusedError, match=OTHER):
        run()

    async def put_back():
        objects = bucket.objects.connect(no_faults())
        for key, body in taken.items():
            await objects.put(key, body, metadata={})
        await bucket.write(14, stream=OTHER)

    asyncio.run(put_back())
    [row] = run().rows
    assert (row["from"][OTHER], row["to"][OTHER], row["entries"]) == ("13:0", "15:0", 10)
    assert not row["trimmed_unread"]


def test_what_was_trimmed_of_a_partition_that_came_later_is_told(parted):
    bucket, run = parted
    asyncio.run(bucket.write(11, stream=ONE))
    assert run().rows[0]["to"] == {ONE: "12:0"}
    asyncio.run(bucket.write(14, stream=OTHER, trimmed_through=13))
    with pytest.raises(RefusedError, match=f"{OTHER} was trimmed up to ledger 13") as caught:
        run()
    assert caught.value.reason is Reason.TRIMMED
    [row] = run(skip_trimmed=True).rows
    assert (row["to"][OTHER], row["entries"], row["trimmed_unread"]) == ("15:0", 10, True)
    assert not run().rows[0]["trimmed_unread"]


def test_the_command_takes_a_message_out_of_a_file_of_descriptors(monkeypatch, tmp_path, capsys):
    file, asked = tmp_path / "shop.desc", list[ExportOptions]()
    file.write_bytes(descriptors().SerializeToString())
    monkeypatch.setenv("TIERLOG_S3__BUCKET", "b")
    monkeypatch.setattr(command, "run_job", lambda work, **_: work(None))
    monkeypatch.setattr(jobs_export, "export", lambda _, given: asked.append(given))
    command.export(["a"], to=str(tmp_path), protobuf=file, message="shop.Order")
    [options] = asked
    assert options.schema == ProtobufSchema(file.read_bytes(), "shop.Order")
    options.schema.check()
    for more, words in (
        ({"protobuf": file}, "belong together"),
        ({"message": "shop.Order"}, "belong together"),
        ({"protobuf": file, "message": "shop.Order", "json_schema": "a INT"}, "two schemas"),
    ):
        with pytest.raises(typer.Exit):
            command.export(["a"], to=str(tmp_path), **more)
        assert words in capsys.readouterr().err


def test_the_command_exits_with_what_says_that_something_is_left(monkeypatch, tmp_path):
    said: dict[str, Any] = {}
    monkeypatch.setenv("TIERLOG_S3__BUCKET", "b")
    monkeypatch.setattr(command, "run_job", lambda _work, **given: said.update(given))
    command.export(["a", "b"], to=str(tmp_path))
    assert said["ends"] == {"failed": EXIT_INCOMPLETE}
