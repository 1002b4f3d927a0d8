"""A stream of which a manifest, or the metadata, can't be read keeps back no other one."""

import asyncio
import contextlib
from uuid import UUID

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.world import STREAM, World
from tests.unit.offloader.test_worker import ENTRIES
from tests.unit.spark.bucket_kit import ManifestBucket
from tests.unit.spark.test_bulk_offload import patience
from tierlog.adapters.memory.faults import no_faults
from tierlog.format import paths
from tierlog.model.errors import RefusedError
from tierlog.model.ids import StreamName
from tierlog.runtime.settings import S3Settings
from tierlog_spark.jobs import moving
from tierlog_spark.jobs.bulk_offload import BackFill, plan_streams
from tierlog_spark.jobs.frame import Unread, without_unread
from tierlog_spark.jobs.moving import Move
from tierlog_spark.jobs.moving_plan import StreamPair
from tierlog_spark.jobs.usage import StreamLedgers, _read_manifests, wanted_of

SOURCE, TARGET = S3Settings(bucket="b"), S3Settings(bucket="t")
NAMES = [(StreamName(name), UUID(int=1 + at)) for at, name in enumerate("abc")]


class Damaged:
    """A source whose manifest of ``a`` is damaged, and a target where that of ``b`` is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.buckets = {"b": ManifestBucket(monkeypatch), "t": ManifestBucket(monkeypatch)}

        @contextlib.asynccontextmanager
        async def opened(_, name, **__):
            yield self.buckets[name].objects.connect(no_faults())

        monkeypatch.setattr(moving, "open_bucket", opened)
        monkeypatch.setattr("tierlog_spark.bucket.open_bucket", opened)

    async def write(self) -> None:
        for bucket, damaged in (("b", "a"), ("t", "b")):
            made = self.buckets[bucket]
            for name, incarnation in NAMES:
                await made.write(4, 5, stream=name, incarnation=incarnation)
            store = made.objects.connect(no_faults())
            (key,) = [one async for one in keys_of(store, f"streams/{damaged}/")]
            await store.put(key, b"no manifest", metadata={})


async def keys_of(store, prefix):
    async for info in store.list(prefix):
        yield info.key


def test_a_manifest_that_can_not_be_read_is_told_and_the_others_are_moved(monkeypatch):
    buckets = Damaged(monkeypatch)

    async def main():
        await buckets.write()
        rows = await moving._read_pairs(Move(source=SOURCE, target=TARGET), NAMES)
        return without_unread(one for one in rows if isinstance(one, StreamPair | Unread))

    pairs, unread = asyncio.run(main())
    assert [pair.source.stream for pair in pairs] == ["c"]
    assert [one.stream for one in unread] == ["a", "b"]
    for one, bucket in zip(unread, ("s3://b", "s3://t"), strict=True):
        assert f"in {bucket}: " in one.error
        assert f"streams/{one.stream}/" in one.error


def test_a_manifest_that_can_not_be_read_keeps_back_none_that_is_named_beside_it(monkeypatch):
    buckets = Damaged(monkeypatch)
    names = [StreamName(name) for name in "acp"]

    async def main():
        await buckets.write()
        source = buckets.buckets["b"]
        await source.write(stream="p", partitions=2)
        await source.write(6, stream="p-partition-1")
        found = await moving._prepared(Move(source=SOURCE, target=TARGET, streams=tuple(names)))
        with pytest.raises(RefusedError, match="no stream x"):
            await wanted_of(SOURCE, [names[0], StreamName("x")])
        return found, await wanted_of(SOURCE, names)

    found, counted = asyncio.run(main())
    assert found == counted
    assert [name for name, _ in found] == ["a", "c", "p", "p-partition-1"]


def test_a_manifest_that_can_not_be_read_is_told_and_the_others_are_counted(monkeypatch):
    buckets = Damaged(monkeypatch)

    async def main():
        await buckets.write()
        rows = await _read_manifests(SOURCE, NAMES)
        return without_unread(one for one in rows if isinstance(one, StreamLedgers | Unread))

    found, unread = asyncio.run(main())
    assert [one.head.stream for one in found] == ["b", "c"]
    assert [one.stream for one in unread] == ["a"]


def test_what_of_the_metadata_can_not_be_read_is_told_and_all_else_is_offloaded():
    async def main():
        world = World()
        claimed = await world.stream()
        for _ in range(2):
            await world.seal(claimed, ENTRIES)
        catalog, bad = world.catalog(), StreamName("bad")
        await catalog.streams.create(bad)
        store = catalog.store
        await store.set(paths.stream_path(bad), b"\xff", version=-1)
        plan = await plan_streams(catalog, [bad, STREAM], BackFill())
        items = plan.items
        assert (len(items), plan.lost) == (2, [])
        assert [one.stream for one in plan.left_out] == [bad]
        named = BackFill(streams=(bad, STREAM))
        assert await plan_streams(catalog, [bad, STREAM], named) == plan
        # A context is told by the attempt: the next ledger is offloaded.
        spoilt = paths.context_path(items[0].ledger_id)
        await store.set(spoilt, b"\xff", version=-1)
        assert (await plan_streams(catalog, [STREAM], BackFill())).items == items
        first, second = [await patience(world).offload(one) for one in items]
        assert (first.outcome, second.outcome) == ("failed", "completed")
        assert "context record" in first.error

    run_virtual(main(), until_s=1000)
