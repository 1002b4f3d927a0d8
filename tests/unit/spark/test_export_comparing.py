"""An export of raw single objects, whose payloads no read compares, compares each as a whole."""

import asyncio
import contextlib
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
from tierlog.model.scrub import REPAIR_COPY
from tierlog.model.stream import ListedLedger
from tierlog.runtime.settings import S3Settings
from tierlog_spark.bucket import opened
from tierlog_spark.jobs import fanout
from tierlog_spark.jobs.export import ExportOptions, committed_files, tasks
from tierlog_spark.jobs.export.comparing import uncompared
from tierlog_spark.jobs.export.job import export_to
from tierlog_spark.jobs.export.targets import FolderTarget
from tierlog_spark.jobs.frame import JobRun
from tierlog_spark.planning import ALL, StoredLedger, StorePart, store_parts
from tierlog_spark.reading import store_batches

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


def parts_of(ledger: StoredLedger, *pieces: tuple[int, int]) -> list[StorePart]:
    return store_parts(ledger, [(EntryId(one), EntryId(last)) for one, last in pieces], ALL)


async def test_only_what_nothing_else_vouches_for_is_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ledger = await raw_copy(ManifestBucket(monkeypatch))
    assert ledger.copy is not None
    last = len(ENTRIES) - 1
    some = parts_of(ledger, (0, 0), (1, last - 1))
    assert uncompared([*some, *some]) == [ledger]
    whole = parts_of(ledger, (0, 0), (1, last))
    assert [one.compared for one in whole] == [False, True]
    assert uncompared(whole) == [], "its last part does"
    for other in (
        # Entries have their own checksums; grains have theirs; nothing says what it must be.
        replace(ledger, raw=False),
        replace(ledger, copy=replace(ledger.copy, side_len=9)),
        replace(ledger, copy=replace(ledger.copy, data_sha256=b"")),
        replace(ledger, copy=None),
    ):
        assert not any(one.compared for one in parts_of(other, (0, last)))
        assert uncompared(parts_of(other, (0, 0))) == []


async def test_a_read_of_a_whole_raw_single_object_tells_a_flipped_byte(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bucket = ManifestBucket(monkeypatch)
    ledger = await raw_copy(bucket)
    last = len(ENTRIES) - 1
    schema = pa.schema([("payload", pa.binary())])

    async def read(*pieces: tuple[int, int]) -> list[bytes]:
        found: list[bytes] = []
        for part in parts_of(ledger, *pieces):
            async with contextlib.aclosing(
                store_batches(part, S3, schema, fetch_bytes=4096)
            ) as batches:
                async for batch in batches:
                    found += batch["payload"].to_pylist()
        return found

    assert await read((0, 0), (1, last)) == ENTRIES
    last_byte = bucket.objects.objects[KEY][1].index(ENTRIES[-1]) + len(ENTRIES[-1]) - 1
    bucket.objects.damage(KEY, last_byte)
    for pieces in ([(0, last)], [(0, 0), (1, last)]):
        with pytest.raises(CorruptError, match=f"ledger {LEDGER} of stream .*{KEY}") as caught:
            await read(*pieces)
        assert caught.value.remedy == REPAIR_COPY
    # Of a part of it nothing tells.
    assert await read((0, 0)) == ENTRIES[:1]


async def test_a_single_object_is_read_by_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = ManifestBucket(monkeypatch)
    await raw_copy(bucket)
    async with opened(S3) as found:
        [(ledger, blocks)] = await found.by_keys([KEY, KEY])
    assert (ledger.ledger_id, ledger.location.is_single) == (LEDGER, True)
    last = blocks[-1].last_entry_id
    schema = pa.schema([("payload", pa.binary())])
    [part] = parts_of(ledger, (0, last))
    rows = [
        row
        async for batch in store_batches(part, S3, schema, fetch_bytes=4096)
        for row in batch["payload"].to_pylist()
    ]
    assert rows == ENTRIES


async def test_what_pulsar_offloaded_is_of_the_managed_ledger_that_it_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bucket, name = ManifestBucket(monkeypatch), "public/default/persistent/orders"
    world = World()
    world.bucket = bucket.objects
    metadata = metadata_of(ENTRIES, block_size=BLOCK)
    # Its own name for it; no stream is named.
    metadata = replace(metadata, custom={"pulsar/managed-ledger": name.encode()})
    await driver_of(world).offload(ListHandle(LEDGER, ENTRIES, metadata), UUID_1, {})
    async with opened(S3) as found:
        [(ledger, _)] = await found.by_keys([KEY])
    assert ledger.stream == name
