"""A read is planned of what the readers and the bucket tell: whole, or refused."""

import contextlib
from dataclasses import dataclass

import pytest

from tests.unit.reader.world import STREAM, ReaderWorld, on_virtual_time
from tests.unit.spark.bucket_kit import ManifestBucket, options
from tierlog.model.errors import Reason, RefusedError
from tierlog.model.ids import LedgerId, StreamName
from tierlog.model.position import Edge, Position
from tierlog.ports.reads import ServedLedgers
from tierlog_reader.source import StreamSource
from tierlog_spark import driving
from tierlog_spark.driving import plan
from tierlog_spark.planning import ALL, ServicePart


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
