"""The object store's twin keeps the contract; its faults leave what S3's leave."""

import random

import crc32c
import pytest

from tests.contracts.objects_suite import ObjectsContract
from tierlog.adapters.memory.clock import SimClock
from tierlog.adapters.memory.faults import Faults, Outcome
from tierlog.adapters.memory.objects import MemoryObjects
from tierlog.model.errors import RefusedError, RetryableError


@pytest.fixture
def bucket():
    return MemoryObjects(SimClock())


@pytest.fixture
def store(bucket):
    return bucket.connect()


@pytest.fixture
def prefix():
    return "some/prefix/"


class TestMemoryObjects(ObjectsContract):
    pass


@pytest.fixture
def faults():
    return Faults(random.Random(0))


async def test_unavailable_is_retryable_and_changes_nothing(bucket, faults):
    store = bucket.connect(faults)
    faults.outages.add("objects")
    with pytest.raises(RetryableError):
        await store.put("a", b"x", metadata={})
    with pytest.raises(RetryableError):
        await store.head("a")
    assert bucket.objects == {}


async def test_an_ambiguous_complete_is_recognised_when_sent_again(bucket, faults):
    store = bucket.connect(faults)
    upload_id = await store.create_upload("a", metadata={}, content_type="x/y")
    part = await store.upload_part("a", upload_id, 1, [b"x"], crc32c=crc32c.crc32c(b"x"))
    faults.next("objects.complete_upload", Outcome.REPLY_LOST)
    with pytest.raises(RetryableError):
        await store.complete_upload("a", upload_id, [part])
    assert bucket.uploads == {}
    await store.complete_upload("a", upload_id, [part])
    assert bucket.objects["a"][1] == b"x"


async def test_an_upload_whose_answer_was_lost_stays_open(bucket, faults):
    store = bucket.connect(faults)
    faults.next("objects.create_upload", Outcome.REPLY_LOST)
    with pytest.raises(RetryableError):
        await store.create_upload("a", metadata={}, content_type="x/y")
    (lost,) = await store.list_uploads("a")
    await store.abort_upload("a", lost.upload_id)
    assert bucket.uploads == {}


async def test_listing_goes_on_over_pages_while_objects_come_and_go(bucket, store):
    for number in range(2500):
        await store.put(f"{number:04d}", b"", metadata={})
    seen: list[str] = []
    async for info in store.list():
        seen.append(info.key)
        if info.key == "0500":
            await store.delete("0501")  # of the page that was read already
            await store.delete("1501")
            await store.put("2499a", b"", metadata={})
    assert len(seen) == 2500
    assert seen == sorted(seen)
    assert "0501" in seen
    assert "1501" not in seen
    assert "2499a" in seen


async def test_damage_shows_and_small_parts_are_refused():
    bucket = MemoryObjects(SimClock(), part_bytes_min=10)
    store = bucket.connect()
    await store.put("a", b"abc", metadata={})
    bucket.damage("a", 1)
    assert await store.get_range("a", 0, 3) == b"a\x9dc"
    upload_id = await store.create_upload("b", metadata={}, content_type="x/y")
    parts = [
        await store.upload_part("b", upload_id, number, [b"x"], crc32c=crc32c.crc32c(b"x"))
        for number in (1, 2)
    ]
    with pytest.raises(RefusedError):
        await store.complete_upload("b", upload_id, parts)
