"""Answers of 200 that say nothing: no body, or a page for people, as proxies give them.

The library takes each for one in which everything is empty. Must hold: unknown is not empty, and no
success: a list that came so would hide what must not be deleted, or lose streams of a restore.
"""

import pytest

from tests.unit.s3.scripted import Answer, ScriptedS3, error
from tests.unit.s3.test_s3_faults import BUFFERS, CRC, LAST, PARTS, STAMP, opened, ranged
from tierlog.model.errors import RetryableError

NOTHING = (b"", b"<html><body>Welcome</body></html>")


def list_of(*keys: str, more: bool = False) -> Answer:
    inside = "".join(
        f"<Contents><Key>{key}</Key><Size>1</Size>"
        "<LastModified>2026-11-21T10:00:00Z</LastModified></Contents>"
        for key in keys
    )
    cut = "<IsTruncated>true</IsTruncated><NextContinuationToken>t</NextContinuationToken>"
    inside += cut if more else LAST.decode()
    return Answer(200, None, f"<ListBucketResult>{inside}</ListBucketResult>".encode())


@pytest.mark.parametrize("nothing", NOTHING)
async def test_they_are_no_empty_list(nothing):
    empty = Answer(200, None, nothing)
    script = [list_of("a", more=True), empty, list_of("b"), empty, list_of()]
    async with ScriptedS3(*script) as server, opened(server) as store:
        assert [one.key async for one in store.list()] == ["a", "b"]
        assert [one.key async for one in store.list()] == []
    async with ScriptedS3(*[empty] * 6) as server, opened(server) as store:
        with pytest.raises(RetryableError, match="says nothing"):
            _ = [one async for one in store.list()]
        with pytest.raises(RetryableError, match="says nothing"):
            await store.list_uploads()


@pytest.mark.parametrize("nothing", NOTHING)
async def test_they_are_no_upload_and_none_that_was_completed(nothing):
    empty = Answer(200, {"x-amz-server-side-encryption": "AES256"}, nothing)
    async with ScriptedS3(*[empty] * 6) as server, opened(server) as store:
        with pytest.raises(RetryableError, match="says nothing"):
            await store.create_upload("k", metadata={}, content_type="t")
        with pytest.raises(RetryableError, match="says nothing"):
            await store.upload_part("k", "u", 1, BUFFERS, crc32c=CRC)
    script = [*[empty] * 3, error(404, "404"), error(404, "NoSuchKey")]
    async with ScriptedS3(*script) as server, opened(server) as store:
        with pytest.raises(RetryableError, match="says nothing"):
            await store.complete_upload("k", "u", PARTS)


@pytest.mark.parametrize("nothing", NOTHING)
@pytest.mark.parametrize("if_none_match", [False, True])
async def test_they_are_no_object_that_was_put(nothing, if_none_match):
    """Attributes and manifests are put so: a record would name what is not there."""
    empty = Answer(200, None, nothing)
    async with ScriptedS3(*[empty] * 3) as server, opened(server) as store:
        with pytest.raises(RetryableError, match="says nothing"):
            await store.put("k", b"body", metadata={}, if_none_match=if_none_match)
    async with ScriptedS3(empty, Answer(200, STAMP)) as server, opened(server) as store:
        put = await store.put("k", b"body", metadata={}, if_none_match=if_none_match)
        assert put.etag == STAMP["ETag"]


@pytest.mark.parametrize("nothing", NOTHING)
async def test_nor_one_that_is_there(nothing):
    empty, there = Answer(200, None, nothing), Answer(200, STAMP, b"body")
    some = ranged(b"body", 4)
    script = [empty, there, empty, there, empty, some]
    async with ScriptedS3(*script) as server, opened(server) as store:
        found = await store.get("k")
        assert found is not None
        assert found[1] == b"body"
        assert await store.head("k") is not None
        assert await store.get_range("k", 0, 4) == b"body"
    async with ScriptedS3(*[empty] * 9) as server, opened(server) as store:
        for read in (store.get, store.head, lambda key: store.get_range(key, 0, 4)):
            with pytest.raises(RetryableError, match="does not say of when"):
                await read("k")


@pytest.mark.parametrize("nothing", NOTHING)
async def test_nor_is_anything_deleted_or_aborted_by_them(nothing):
    """Nobody would look for what a trimmed ledger left."""
    page, done = Answer(200, None, nothing), Answer(204)
    async with ScriptedS3(page, done, page, done) as server, opened(server) as store:
        await store.delete("k")
        await store.abort_upload("k", "u")
        assert not server.script
    async with ScriptedS3(*[page] * 6) as server, opened(server) as store:
        with pytest.raises(RetryableError, match="says nothing"):
            await store.delete("k")
        with pytest.raises(RetryableError, match="says nothing"):
            await store.abort_upload("k", "u")


async def test_a_store_that_deletes_with_200_says_that_it_is_one():
    done = Answer(200, {"x-amz-request-id": "REQ-1"})
    async with ScriptedS3(done, done) as server, opened(server) as store:
        await store.delete("k")
        await store.abort_upload("k", "u")
        assert not server.script
