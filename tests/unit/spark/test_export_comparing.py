"""An export of raw single objects, whose payloads no read compares, compares each as a whole."""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.unit.offload.test_single import BLOCK, ENTRIES, KEY, LEDGER, UUID_1, driver_of
from tests.unit.offload.world import ListHandle, World, metadata_of
from tests.unit.spark.bucket_kit import HEAD, STREAM, ManifestBucket
from tierlog.format.manifest import keep
from tierlog.model.errors import CorruptError
from tierlog.model.ids import EntryId
from tierlog.model.manifest import ManifestCopy, ManifestLedger
from tierlog.model.stream import ListedLedger
from tierlog.runtime.settings import S3Settings
from tierlog_spark.jobs import fanout
from tierlog_spark.jobs.export import ExportOptions, committed_files, tasks
from tierlog_spark.jobs.export.comparing import uncompared
from tierlog_spark.jobs.export.job import export_to
from tierlog_spark.jobs.export.targets import FolderTarget
from tierlog_spark.jobs.frame import JobRun
from tierlog_spark.planning import StoredLedger

S3 = S3Settings(bucket="b")
Work = Callable[[Iterable[Any]], Iterator[Any]]


@dataclass
class Here:
    """As much of a Spark context as a job asks, in this process."""

    items: tuple[Any, ...] = ()
    work: Work = iter
    defaultParallelism = 2  # noqa: N815 - Spark's name

    def parallelize(self, items: Iterable[Any], _: int) -> "Here":
        return Here(tuple(items))

    def mapPartitions(self, work: Work) -> "Here":  # noqa: N802 - Spark's name
        return Here(self.items, work)

    def collect(self) -> list[Any]:
        return [row for item in self.items for row in self.work([item])]


async def raw_copy(bucket: ManifestBucket) -> StoredLedger:
    """Write a raw stream's ledger as a single object, and the manifest that names it."""
    world = World()
    world.bucket = bucket.objects
    driver = driver_of(world)
    metadata = metadata_of(ENTRIES, block_size=BLOCK)
    copy = await driver.offload(ListHandle(LEDGER, ENTRIES, metadata), UUID_1, {})
    location = driver.location(LEDGER, UUID_1)
    ledger = ManifestLedger(
        listed=ListedLedger(
            ledger_id=LEDGER,
            opened_ms=1,
            block_size=BLOCK,
            owner_epoch=1,
            closed=True,
            last_entry_id=EntryId(len(ENTRIES) - 1),
            length=sum(map(len, ENTRIES)),
            closed_ms=2,
        ),
        copy=ManifestCopy(uuid=UUID_1, location=location, complete_ms=3, copy=copy),
    )
    manifests = bucket.manifests()
    known = await manifests.newest(STREAM, HEAD.incarnation)
    await manifests.write(known, replace(HEAD, raw=True), put={LEDGER: keep(ledger)}, removed=[])
    return StoredLedger(
        stream=STREAM, raw=True, ledger_id=LEDGER, uuid=UUID_1, location=location, copy=copy
    )


def test_a_flipped_byte_of_a_raw_single_object_is_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = ManifestBucket(monkeypatch)
    asyncio.run(raw_copy(bucket))
    monkeypatch.setattr(tasks, "_attempt", lambda: 1)
    for module in (tasks, fanout):
        monkeypatch.setattr(module, "configure_logging", lambda *_, **__: None)
    run = JobRun(spark=SimpleNamespace(sparkContext=Here()))  # type: ignore[arg-type]
    options = ExportOptions(streams=(STREAM,), to=str(tmp_path), s3=S3)
    last_byte = bucket.objects.objects[KEY][1].index(ENTRIES[-1]) + len(ENTRIES[-1]) - 1
    bucket.objects.damage(KEY, last_byte)
    with pytest.raises(CorruptError, match=f"{KEY} has other blocks.*scrub --repair --deep"):
        export_to(run, options, FolderTarget(tmp_path))
    assert not list(tmp_path.rglob("*.parquet"))
    assert not committed_files(str(tmp_path), STREAM, S3)

    bucket.objects.damage(KEY, last_byte)
    export_to(run, options, FolderTarget(tmp_path))
    found = committed_files(str(tmp_path), STREAM, S3)
    payloads = pa.concat_tables(pq.ParquetFile(one.path).read(["payload"]) for one in found)
    assert payloads["payload"].to_pylist() == ENTRIES


async def test_only_what_nothing_else_vouches_for_is_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ledger = await raw_copy(ManifestBucket(monkeypatch))
    assert ledger.copy is not None
    assert uncompared([ledger, ledger]) == [ledger]
    assert uncompared([replace(ledger, raw=False)]) == [], "entries have their own checksums"
    assert uncompared([replace(ledger, copy=replace(ledger.copy, side_len=9))]) == []
    assert uncompared([replace(ledger, copy=None)]) == [], "nothing says what it must be"
