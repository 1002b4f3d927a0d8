"""The side object on a real S3 server and a real Redis: damage is found, places are known."""

import hashlib
import random
import uuid
from collections.abc import AsyncIterator

import pytest

from tests.unit.offload.world import CLUSTER, ListHandle, entries_of, metadata_of
from tierlog.embedded.supervisor import EmbeddedServers
from tierlog.model.errors import CorruptError
from tierlog.model.ids import EntryId, LedgerId
from tierlog.model.policy import MIB
from tierlog.offload.driver import BlockOffloader, Tier2Settings
from tierlog.offload.verify import ReadBack
from tierlog.ports.objects import ObjectStore
from tierlog.runtime.settings import RedisSettings, Settings
from tierlog.wiring.build import open_objects
from tierlog.wiring.reader import open_cache

pytestmark = pytest.mark.integration

LEDGER = LedgerId(9)
BLOCK = 5 * MIB
RNG = random.Random(5)
ENTRIES = [RNG.randbytes(RNG.choice([0, 10, 1000, 30_000, 65_536])) for _ in range(600)]


@pytest.fixture
async def objects(corner: Settings) -> AsyncIterator[ObjectStore]:
    async with open_objects(corner) as opened:
        yield opened


async def test_a_copy_is_read_back_and_a_flipped_byte_is_never_served(
    corner: Settings, objects: ObjectStore, servers: EmbeddedServers
):
    redis = RedisSettings(url=servers.endpoints.redis_url)
    async with open_cache(corner.model_copy(update={"redis": redis})) as cache:

        def offloader(read_back: ReadBack = ReadBack.SAMPLE) -> BlockOffloader:
            settings = Tier2Settings(
                bucket=corner.s3.bucket,
                cluster_id=CLUSTER,
                key_prefix=corner.s3.key_prefix,
                data_sha256=True,
                read_back=read_back,
            )
            return BlockOffloader(objects, settings, cache=cache)

        attempt = uuid.uuid4()
        metadata = metadata_of(ENTRIES, block_size=BLOCK)
        handle = ListHandle(LEDGER, ENTRIES, metadata, run_bytes_max=65_536)
        copy = await offloader().offload(handle, attempt, {})
        for read_back in ReadBack:
            await offloader(read_back).verify(LEDGER, attempt, None, copy)
        location = offloader().location(LEDGER, attempt)
        name = f"side:default:{corner.s3.bucket}:{location.side_key}"
        assert await cache.get(name) is None
        # The second one finds index and side object in Redis.
        for _ in range(2):
            opened = await offloader().read_offloaded(LEDGER, attempt, copy=copy)
            assert await entries_of(opened) == ENTRIES
            cached = await cache.get(name)
            assert cached is not None
            assert hashlib.sha256(cached).digest() == copy.side_sha256
        found = await objects.get(location.data_key)
        assert found is not None
        info, raw = found
        at = 7 * MIB + 12_345
        damaged = raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]
        await objects.put(location.data_key, damaged, metadata=info.metadata)
        opened = await offloader().read_offloaded(LEDGER, attempt, copy=copy)
        with pytest.raises(CorruptError) as refused:
            await entries_of(opened)
        assert refused.value.details == {
            "object": location.data_key,
            "offset": str(at // 65_536 * 65_536),
            "grain": str(at // 65_536),
        }
        # What lies elsewhere is read all the same, each entry for itself.
        read = await opened.read_frames(EntryId(3), MIB, entries_max=1)
        assert bytes(read.frames[12 : 12 + len(ENTRIES[3])]) == ENTRIES[3]
        with pytest.raises(CorruptError):
            await offloader(ReadBack.FULL).verify(LEDGER, attempt, None, copy)
