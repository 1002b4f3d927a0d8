"""A read is planned of what the readers and the bucket tell: whole, or refused."""

import asyncio
import contextlib
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

import pytest
from pyspark.sql.types import StructType

from tests.unit.offload.world import bare_ledger
from tests.unit.reader.world import STREAM, ReaderWorld, at, budget, on_virtual_time
from tests.unit.spark.bucket_kit import INCARNATION, ManifestBucket, options
from tierlog.model.errors import Reason, RefusedError
from tierlog.model.ids import LedgerId, StreamName
from tierlog.model.partitions import is_partitioned
from tierlog.model.position import Edge, Position
from tierlog.model.stream import StreamLifecycle
from tierlog.ports.reads import ServedLedger, ServedLedgers
from tierlog_reader.source import StreamSource
from tierlog_spark import driving
from tierlog_spark.driving import plan
from tierlog_spark.planning import ALL, ServicePart
from tierlog_spark.service import listed, place_of, served
from tierlog_spark.streaming import EventStreamReader


@dataclass
class SourceReads:
    """What a reader in memory tells of its streams; few ledgers at a time."""

    source: StreamSource

    async def bounds(self, stream: StreamName) -> tuple[Position | Edge, Position | Edge]:
        return await self.source.bounds(stream)

    async def ledgers(self, stream: StreamName, first: LedgerId) -> ServedLedgers:
        return await self.source.ledgers(stream, first, count_max=2)


@contextlib.asynccontextmanager
async def readers(world, monkeypatch):
    async with world.reader() as source:

        @contextlib.asynccontextmanager
        async def reads_of(*_):
            yield SourceReads(source)

        monkeypatch.setattr(driving, "reads_of", reads_of)
        yield source


def shown(parts):
    """Return parts in few words: what is read of the bucket's ledgers, or between positions."""
    return [
        f"{one.start} to {one.until}"
        if isinstance(one, ServicePart)
        else (one.ledger.ledger_id, one.first_entry_id, one.last_entry_id)
        for one in parts
    ]


async def planned(**given):
    return shown(await plan(options(stream=STREAM, **given), ALL))


@on_virtual_time
async def test_auto_refuses_what_was_trimmed_since_the_readers_told_of_it(monkeypatch):
    world, bucket = ReaderWorld(), ManifestBucket(monkeypatch)
    await world.start()
    incarnation = world.claimed.incarnation
    one, other, third = [await world.sealed([b"x"] * 10) for _ in range(3)]
    async with readers(world, monkeypatch):
        await bucket.write(one, other, stream=STREAM, incarnation=incarnation)
        tail = f"{other}:10 to {third}:10"
        assert await planned(readMode="auto") == [(one, 0, 9), (other, 0, 9), tail]
        await bucket.write(
            removed=[one], stream=STREAM, incarnation=incarnation, trimmed_through=one
        )
        for start in ({}, {"start": f"{one}:0"}, {"start": f"{one}:9"}):
            with pytest.raises(RefusedError) as caught:
                await planned(readMode="auto", **start)
            assert caught.value.reason is Reason.TRIMMED
        # Nothing of it was wanted.
        assert await planned(readMode="auto", start=f"{one}:10") == [(other, 0, 9), tail]


@on_virtual_time
async def test_positions_that_offsets_print_can_be_read_from_and_up_to(monkeypatch):
    world, bucket = ReaderWorld(), ManifestBucket(monkeypatch)
    await world.start()
    incarnation = world.claimed.incarnation
    one = await world.sealed([b"x"] * 10)
    await bare_ledger(world)
    other, last = [await world.sealed([b"x"] * 10) for _ in range(2)]
    assert other > one + 1, "the next id is another stream's"
    await bucket.write(one, other, last, stream=STREAM, incarnation=incarnation)
    between, end = f"{one + 1}:0", f"{last + 1}:0"
    first = {"start": "0:0", "end": between}
    rest = {"start": between, "end": end}
    async with readers(world, monkeypatch) as source:
        for mode in ("direct", "auto"):
            assert await planned(readMode=mode, **first) == [(one, 0, 9)]
            assert await planned(readMode=mode, **rest) == [(other, 0, 9), (last, 0, 9)]
            assert await planned(readMode=mode, start=end) == []
        assert await planned(readMode="service", **first) == [f"{one}:0 to {one}:10"]
        assert await planned(readMode="service", start=end) == []
        assert await planned(readMode="service", **rest) == [f"{one}:10 to {last}:10"]
        found = await source.read(STREAM, at(one, 10), budget())
        assert found.chunk is not None
        assert found.chunk.ledger_id == other
        for mode in ("direct", "auto", "service"):
            with pytest.raises(RefusedError):
                await planned(readMode=mode, start=f"{last + 2}:0")


@on_virtual_time
async def test_a_filter_hides_no_ledger_that_the_read_without_it_refuses_to_leave_out(monkeypatch):
    bucket = ManifestBucket(monkeypatch)
    await bucket.write(14, 16, uncopied=[15, 17])
    for bounds in (
        ALL,
        replace(ALL, ledger_max=15),
        replace(ALL, ledgers=frozenset({15})),
        replace(ALL, ledgers=frozenset({14, 15}), entry_max=3),
    ):
        with pytest.raises(RefusedError, match="ledger 15 is wanted"):
            await plan(options(), bounds)
    for bounds, found in (
        (replace(ALL, ledger_max=14), [(14, 0, 9)]),
        (replace(ALL, ledger_min=16), [(16, 0, 9)]),
        # Nothing is left out but the tail that has no copy yet.
        (replace(ALL, ledgers=frozenset({17})), []),
        # It has ten entries: none of these is in it.
        (replace(ALL, entry_min=10), []),
    ):
        assert shown(await plan(options(), bounds)) == found


def test_a_partition_named_beside_its_stream_is_read_once_from_the_bucket(monkeypatch):
    bucket, named = ManifestBucket(monkeypatch), "s-partition-1,s,s-partition-0,s-partition-1"
    asyncio.run(bucket.write(partitions=2))
    for ledger_id in (11, 12):
        partition = f"s-partition-{ledger_id - 11}"
        asyncio.run(bucket.write(ledger_id, stream=partition, incarnation=UUID(int=ledger_id)))
    given = {"streams": named}
    both = [(12, 0, 9), (11, 0, 9)]
    assert shown(asyncio.run(plan(options(**given), ALL))) == both
    reader = EventStreamReader(options(**given), StructType())
    begin, end = ({f"s-partition-{one}": text for one in range(2)} for text in ("0:0", "13:0"))
    end["s-partition-0"] = "12:0"
    assert shown(one.value for one in reader.partitions(begin, end)) == both


def test_a_partition_whose_manifests_are_lost_is_not_passed_over(monkeypatch):
    """Its stream's manifest says how many there are; nothing else says what it had."""
    bucket, one, lost = ManifestBucket(monkeypatch), "s-partition-0", "s-partition-1"
    asyncio.run(bucket.write(partitions=2))
    asyncio.run(bucket.write(11, stream=one))
    with pytest.raises(RefusedError, match=f"2 partitions, and .* no manifest of {lost}") as told:
        asyncio.run(plan(options(), ALL))
    assert (told.value.reason, told.value.details) == (Reason.STREAM_NOT_FOUND, {"stream": lost})
    assert "failOnDataLoss=false" in told.value.remedy
    some = [(11, 0, 9)]
    assert shown(asyncio.run(plan(options(failOnDataLoss="false"), ALL))) == some
    # A filter by it wants nothing of the other one, and one that is named by itself is alone.
    alone = replace(ALL, streams=frozenset({one}))
    assert shown(asyncio.run(plan(options(), alone))) == some
    assert shown(asyncio.run(plan(options(stream=one), ALL))) == some
    # One that was deleted says so, and one without ledgers is there, and empty.
    deleting = StreamLifecycle.DELETING
    asyncio.run(bucket.write(stream=lost, incarnation=UUID(int=9), lifecycle=deleting))
    assert shown(asyncio.run(plan(options(), ALL))) == some
    asyncio.run(bucket.write(stream=lost, incarnation=UUID(int=10)))
    assert shown(asyncio.run(plan(options(), ALL))) == some


class PartitionedReads:
    """Readers of one stream with partitions, of an entry each."""

    async def bounds(self, stream: StreamName) -> tuple[Position, Position]:
        self._check(stream)
        return at(11, 0), at(11, 1)

    async def ledgers(self, stream: StreamName, first: LedgerId) -> ServedLedgers:
        del first
        self._check(stream)
        told: ServedLedgers = page((11, True))
        return told

    def _check(self, stream: StreamName) -> None:
        if stream == "s":
            raise is_partitioned(stream, 2)


def test_a_partition_named_beside_its_stream_is_read_once_through_readers():
    names = [StreamName(name) for name in ("s-partition-1", "s", "s-partition-0")]
    both = ["s-partition-1", "s-partition-0"]
    reads: Any = PartitionedReads()
    assert [one.name for one in asyncio.run(served(reads, names))] == both
    assert [one.name for one in asyncio.run(listed(reads, names, retry_s=1))] == both


def page(*rows, trimmed_end=None):
    ledgers = [
        ServedLedger(ledger_id=LedgerId(one), entry_count=10, length=1, closed=closed)
        for one, closed in rows
    ]
    return ServedLedgers(incarnation=INCARNATION, ledgers=ledgers, trimmed_end=trimmed_end)


@pytest.mark.parametrize(
    ("where", "told", "meant"),
    [
        (at(13, 0), page((12, True), (17, True)), at(12, 10)),
        (at(13, 0), page((12, True), (13, False)), at(13, 0)),
        (at(18, 0), page((17, True)), at(17, 10)),
        # More comes there.
        (at(18, 0), page((17, False)), at(18, 0)),
        # All that was before it was trimmed, and nothing that is behind it.
        (at(13, 0), page((17, True), trimmed_end=at(12, 5)), at(17, 0)),
        (at(13, 0), page(trimmed_end=at(12, 5)), at(99, 9)),
        (at(13, 0), page((17, True), trimmed_end=at(15, 5)), at(13, 0)),
        (at(0, 0), page((17, True)), at(17, 0)),
        (at(0, 0), page((17, True), trimmed_end=at(15, 5)), at(0, 0)),
        (at(5, 0), page((17, True)), at(5, 0)),
    ],
)
def test_a_ledgers_end_as_offsets_write_it_is_found_in_what_readers_list(where, told, meant):
    assert place_of(where, told, at(99, 9)) == meant
