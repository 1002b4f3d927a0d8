"""A task's read of a bucket: each byte is fetched once, and what is kept of it is bounded."""

import contextlib
import itertools
import random

import pyarrow as pa
import pytest

from tests.unit.offload.side_kit import LEDGER, UUID_1, opened, written
from tests.unit.offload.world import World
from tierlog.format.frame import FRAME_HEADER_LEN
from tierlog.model.ids import INT64_MAX, EntryId, StreamName
from tierlog.offload.range_memory import LastRanges
from tierlog.offload.ranges import Ranges
from tierlog.runtime.settings import S3Settings
from tierlog_spark import reading
from tierlog_spark.bucket import KEPT_FETCHES, Bucket
from tierlog_spark.planning import StoredLedger, StorePart
from tierlog_spark.reading import store_batches

FETCH = 256
SCHEMA = pa.schema([("entry_id", pa.int64()), ("payload", pa.binary())])


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("with_side", [True, False])
@pytest.mark.parametrize("fetch", [256, 1280])
async def test_no_byte_of_a_part_is_fetched_twice_and_few_are_copied(
    seed, with_side, fetch, monkeypatch
):
    rng, world = random.Random(seed), World()
    entries = [rng.randbytes(rng.choice([0, 5, 60, 200, 300])) for _ in range(fetch // 4)]
    copy = await written(world, entries, block_size=100_000)
    store = world.bucket.connect((await opened(world, copy)).faults)
    asked, kept, joined, get = [], [], [], store.get_range_into

    async def noted(key, start, targets):
        asked.append((start, start + sum(map(len, targets))))
        return await get(key, start, targets)

    monkeypatch.setattr(store, "get_range_into", noted)
    put = LastRanges._put

    def noted_put(memory, extent):
        put(memory, extent)
        kept.append(memory.kept_bytes)

    monkeypatch.setattr(LastRanges, "_put", noted_put)
    read = Ranges.read

    async def noted_read(*named, **options):
        found = await read(*named, **options)
        joined.extend([len(found)] * isinstance(found.obj, bytes))
        return found

    monkeypatch.setattr(Ranges, "read", noted_read)

    @contextlib.asynccontextmanager
    async def opened_copy(ledger, s3, *, fetch_bytes):
        yield await Bucket(store, s3, fetch_bytes=fetch_bytes).open(ledger)

    monkeypatch.setattr(reading, "opened_copy", opened_copy)
    ledger = StoredLedger(
        stream=StreamName("s"),
        raw=True,
        ledger_id=LEDGER,
        uuid=UUID_1,
        location=world.offloader().location(LEDGER, UUID_1),
        copy=copy if with_side else None,
    )
    part = StorePart(
        ledger=ledger,
        first_entry_id=EntryId(0),
        last_entry_id=EntryId(len(entries) - 1),
        ms_min=-1,
        ms_max=INT64_MAX,
    )
    settings = S3Settings(bucket="b")
    batches = [one async for one in store_batches(part, settings, SCHEMA, fetch_bytes=fetch)]
    table = pa.Table.from_batches(batches)
    assert table["payload"].to_pylist() == entries
    assert table["entry_id"].to_pylist() == list(range(len(entries)))
    spans = sorted(asked)
    assert len(spans) > 3 * KEPT_FETCHES
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans)), spans
    assert max(kept) <= KEPT_FETCHES * fetch
    longest = FRAME_HEADER_LEN + max(map(len, entries))
    assert sum(joined) <= len(spans) * (longest + FRAME_HEADER_LEN), "a frame that lies in two"


async def test_an_object_whose_key_is_named_twice_is_read_once():
    world = World()
    copy = await written(world, [b"x"] * 3, block_size=100_000)
    store = world.bucket.connect((await opened(world, copy)).faults)
    location = world.offloader().location(LEDGER, UUID_1)
    keys = [location.data_key, location.index_key, location.data_key]
    found = await Bucket(store, S3Settings(bucket="b"), fetch_bytes=FETCH).by_keys(keys)
    assert [ledger.ledger_id for ledger, _ in found] == [LEDGER]
