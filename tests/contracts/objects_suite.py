"""What every object store must do (ports/objects.py), whoever it is.

A module that runs the suite subclasses ``ObjectsContract`` and gives a fixture ``store`` and a
fixture ``prefix``, below which keys are its own.
"""

import asyncio

import crc32c
import pytest

from tierlog.model.errors import CorruptError, TierlogError
from tierlog.ports.files import Buffer
from tierlog.ports.objects import NoSuchUploadError, ObjectExistsError, ObjectStore, Part

MIB = 1024 * 1024
PART = 5 * MIB  # the smallest that S3 takes, but for the last


class ObjectsContract:
    async def test_put_head_get_delete(self, store: ObjectStore, prefix: str):
        key = f"{prefix}a"
        assert await store.head(key) is None
        assert await store.get(key) is None
        assert await store.get_range(key, 0, 1) is None
        put = await store.put(key, b"body", metadata={"Role": "Data", "n": "1"})
        assert (put.key, put.size) == (key, 4)
        info = await store.head(key)
        assert info is not None
        assert (info.key, info.size, info.metadata) == (key, 4, {"role": "Data", "n": "1"})
        assert info.modified_ms > 1_500_000_000_000
        found = await store.get(key)
        assert found is not None
        assert found[1] == b"body"
        assert found[0].metadata == info.metadata
        assert found[0].etag == info.etag == put.etag
        await store.delete(key)
        assert await store.head(key) is None
        await store.delete(key)

    async def test_an_object_that_is_longer_than_wanted_is_refused(
        self, store: ObjectStore, prefix: str
    ):
        key = f"{prefix}a"
        assert await store.get(key, bytes_max=3) is None
        await store.put(key, b"body", metadata={})
        with pytest.raises(CorruptError, match="4 bytes") as raised:
            await store.get(key, bytes_max=3)
        assert raised.value.details["object"] == key
        for enough in (4, 5):
            found = await store.get(key, bytes_max=enough)
            assert found is not None
            assert found[1] == b"body"

    async def test_an_empty_object(self, store: ObjectStore, prefix: str):
        await store.put(f"{prefix}empty", b"", metadata={})
        found = await store.get(f"{prefix}empty")
        assert found is not None
        assert found[1] == b""
        assert await store.get_range(f"{prefix}empty", 0, 10) == b""

    async def test_put_replaces_unless_told_not_to(self, store: ObjectStore, prefix: str):
        key = f"{prefix}a"
        await store.put(key, b"one", metadata={}, if_none_match=True)
        with pytest.raises(ObjectExistsError):
            await store.put(key, b"two", metadata={}, if_none_match=True)
        found = await store.get(key)
        assert found is not None
        assert found[1] == b"one"
        await store.put(key, b"three", metadata={})
        found = await store.get(key)
        assert found is not None
        assert found[1] == b"three"

    async def test_ranges_are_exact_and_end_with_the_object(self, store: ObjectStore, prefix: str):
        key, body = f"{prefix}a", bytes(range(256)) * 4096
        await store.put(key, body, metadata={})
        end = len(body)
        for start, length in [(0, 1), (0, end), (1, 255), (end - 1, 1), (70_000, 900_000)]:
            assert await store.get_range(key, start, length) == body[start : start + length]
        assert await store.get_range(key, end - 10, 100) == body[-10:]
        assert await store.get_range(key, end, 1) == b""
        assert await store.get_range(key, end + 100, 1) == b""

    async def test_a_range_is_written_into_buffers_back_to_back(
        self, store: ObjectStore, prefix: str
    ):
        key, body = f"{prefix}a", bytes(range(256)) * 4096
        room = bytearray(b"?" * 1000)
        targets = [memoryview(room)[10:20], memoryview(room)[500:500], memoryview(room)[900:990]]
        assert await store.get_range_into(key, 0, targets) is None
        assert room == b"?" * 1000
        await store.put(key, body, metadata={})
        assert await store.get_range_into(key, 5, targets) == 100
        assert room[10:20] + room[900:990] == body[5:105]
        assert room[:10] + room[20:900] + room[990:] == b"?" * 900
        assert await store.get_range_into(key, len(body) - 30, targets) == 30
        assert room[10:20] + room[900:920] == body[-30:]
        assert await store.get_range_into(key, len(body), targets) == 0
        large = memoryview(bytearray(len(body)))
        assert await store.get_range_into(key, 0, [large[:700_000], large[700_000:]]) == len(body)
        assert large == body

    async def test_what_is_given_up_is_not_written_any_more(self, store: ObjectStore, prefix: str):
        key, body = f"{prefix}a", bytes(range(1, 256)) * 20_000
        await store.put(key, body, metadata={})
        room = memoryview(bytearray(len(body)))
        for pause_s in (0.0, 0.001, 0.003, 0.01):
            read = asyncio.ensure_future(store.get_range_into(key, 0, [room]))
            await asyncio.sleep(pause_s)
            read.cancel()
            await asyncio.wait({read})
            room[:] = bytes(len(body))
            await asyncio.sleep(0.02)
            assert room == bytes(len(body)), "somebody still writes"
        assert await store.get_range_into(key, 0, [room]) == len(body)
        assert room == body

    async def test_listing_is_in_the_order_of_keys(self, store: ObjectStore, prefix: str):
        names = [f"{prefix}{kind}/{number:04d}" for kind in "ba" for number in range(3)]
        for name in names:
            await store.put(name, name.encode(), metadata={"m": "1"})
        await store.put(f"{prefix}c", b"", metadata={})
        listed = [info async for info in store.list(prefix)]
        assert [info.key for info in listed] == [*sorted(names), f"{prefix}c"]
        assert [info.size for info in listed[:-1]] == [len(name) for name in names]
        assert all(info.metadata == {} and info.modified_ms > 0 for info in listed)
        assert [info.key async for info in store.list(f"{prefix}a/")] == names[3:]
        assert [info async for info in store.list(f"{prefix}nothing")] == []

    async def test_parts_become_one_object(self, store: ObjectStore, prefix: str):
        key, metadata = f"{prefix}big", {"role": "data", "uuid": "x"}
        upload_id = await _begin(store, key, metadata)
        assert [u.upload_id for u in await store.list_uploads(prefix)] == [upload_id]
        bodies = [bytes([65 + n]) * PART for n in range(2)] + [b"tail"]
        parts = [
            await _send(store, key, upload_id, number, bodies[number - 1]) for number in (3, 1, 2)
        ]
        assert await store.head(key) is None
        await store.complete_upload(key, upload_id, sorted(parts, key=lambda part: part.number))
        info = await store.head(key)
        assert info is not None
        assert (info.size, info.metadata) == (2 * PART + 4, metadata)
        assert await store.get_range(key, PART - 2, 4) == b"AABB"
        assert await store.get_range(key, 2 * PART - 1, 100) == b"Btail"
        assert await store.list_uploads(prefix) == []

    async def test_completing_again_is_a_success(self, store: ObjectStore, prefix: str):
        key = f"{prefix}big"
        upload_id = await _begin(store, key, {})
        parts = [await _send(store, key, upload_id, 1, b"all of it")]
        await store.complete_upload(key, upload_id, parts)
        await store.complete_upload(key, upload_id, parts)
        assert await store.get_range(key, 0, 100) == b"all of it"

    async def test_a_part_sent_again_replaces_itself(self, store: ObjectStore, prefix: str):
        key = f"{prefix}big"
        upload_id = await _begin(store, key, {})
        await _send(store, key, upload_id, 1, b"first try")
        part = await _send(store, key, upload_id, 1, b"second try")
        await store.complete_upload(key, upload_id, [part])
        assert await store.get_range(key, 0, 100) == b"second try"

    async def test_a_damaged_part_is_refused_by_the_store(self, store: ObjectStore, prefix: str):
        key = f"{prefix}big"
        upload_id = await _begin(store, key, {})
        with pytest.raises(CorruptError):
            await store.upload_part(key, upload_id, 1, [b"what was sent"], crc32c=12345)
        await store.abort_upload(key, upload_id)

    async def test_an_aborted_upload_leaves_nothing(self, store: ObjectStore, prefix: str):
        key = f"{prefix}big"
        upload_id = await _begin(store, key, {})
        part = await _send(store, key, upload_id, 1, b"x")
        await store.abort_upload(key, upload_id)
        await store.abort_upload(key, upload_id)
        assert await store.list_uploads(prefix) == []
        with pytest.raises(NoSuchUploadError):
            await store.complete_upload(key, upload_id, [part])
        with pytest.raises(NoSuchUploadError):
            await _send(store, key, upload_id, 1, b"x")
        assert await store.head(key) is None

    async def test_a_part_that_was_never_sent_can_not_be_completed(
        self, store: ObjectStore, prefix: str
    ):
        key = f"{prefix}big"
        upload_id = await _begin(store, key, {})
        part = await _send(store, key, upload_id, 1, b"x")
        made_up = Part(number=1, etag='"00000000000000000000000000000000"', crc32c=1, size=1)
        with pytest.raises(TierlogError):
            await store.complete_upload(key, upload_id, [made_up])
        await store.complete_upload(key, upload_id, [part])

    async def test_uploads_of_one_key_are_apart(self, store: ObjectStore, prefix: str):
        key = f"{prefix}big"
        one, other = await _begin(store, key, {}), await _begin(store, key, {})
        assert one != other
        assert {u.upload_id for u in await store.list_uploads(prefix)} == {one, other}
        assert all(u.initiated_ms > 1_500_000_000_000 for u in await store.list_uploads(prefix))
        part = await _send(store, key, other, 1, b"other")
        await store.complete_upload(key, other, [part])
        await store.abort_upload(key, one)
        assert await store.get_range(key, 0, 100) == b"other"
        assert await store.list_uploads(f"{prefix}nothing") == []


async def _begin(store: ObjectStore, key: str, metadata: dict[str, str]) -> str:
    return await store.create_upload(key, metadata=metadata, content_type="application/x-test")


async def _send(store: ObjectStore, key: str, upload_id: str, number: int, body: bytes) -> Part:
    middle = len(body) // 2  # several buffers, of several kinds
    pieces: list[Buffer] = [bytearray(body[:middle]), memoryview(body)[middle:]]
    crc = crc32c.crc32c(body)
    part = await store.upload_part(key, upload_id, number, pieces, crc32c=crc)
    assert (part.number, part.crc32c, part.size) == (number, crc, len(body))
    return part
