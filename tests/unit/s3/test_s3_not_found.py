"""What is not there: said by the store, or by whoever answers in its place.

Must hold: an object, or an upload, is missing only where the store names it. A 404 without a name
is what a balancer says that has no store behind it, now and then perhaps: it is asked again, and
nothing is concluded of it, neither that there is no object, nor no bucket, nor that anything was
deleted.
"""

import pytest

from tests.unit.s3.scripted import Answer, ScriptedS3, error
from tests.unit.s3.test_s3_faults import BUFFERS, CRC, STAMP, opened, ranged
from tierlog.model.errors import RefusedError, RetryableError

PAGES = (
    b"",
    b"<html>There is no such service<br></html>",
    b"<html><body><h1>404 Not Found</h1></body></html>",
)
HEADED = error(404, "404")
GONE = error(404, "NoSuchKey")


async def test_head_of_a_missing_bucket_is_not_a_missing_object():
    async with ScriptedS3(HEADED, GONE) as server, opened(server) as store:
        assert await store.head("k") is None
    async with ScriptedS3(HEADED, error(404, "NoSuchBucket")) as server, opened(server) as store:
        with pytest.raises(RefusedError, match="NoSuchBucket") as caught:
            await store.head("k")
        assert "Create the bucket" in caught.value.remedy


@pytest.mark.parametrize("there", [ranged(b"x", 4), error(416, "InvalidRange")])
async def test_nor_is_an_object_that_the_store_has_itself(there):
    """One of several balancers has no store behind it; an empty object has no first byte."""
    async with ScriptedS3(HEADED, there) as server, opened(server) as store:
        with pytest.raises(RetryableError, match="404"):
            await store.head("k")


@pytest.mark.parametrize("page", PAGES)
async def test_a_404_that_does_not_say_what_is_missing_is_asked_again(page):
    bare = Answer(404, None, page)
    script = [bare, GONE, bare, bare, GONE, bare, Answer(200, STAMP, b"body"), HEADED, bare, GONE]
    async with ScriptedS3(*script) as server, opened(server) as store:
        assert await store.get("k") is None
        assert await store.get_range("k", 0, 10) is None
        assert await store.get("k") is not None
        assert await store.head("k") is None
        assert not server.script


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("status", [404, 408])
async def test_and_says_nothing_of_what_was_asked(status, page):
    bare = Answer(status, None, page)

    async def listed(store):
        return [one async for one in store.list()]

    every = (
        lambda store: store.get("k"),
        lambda store: store.get_range("k", 0, 10),
        lambda store: store.delete("k"),
        lambda store: store.abort_upload("k", "u"),
        lambda store: store.put("k", b"body", metadata={}),
        lambda store: store.create_upload("k", metadata={}, content_type="t"),
        lambda store: store.upload_part("k", "u", 1, BUFFERS, crc32c=CRC),
        lambda store: store.list_uploads(),
        listed,
    )
    async with ScriptedS3(*[bare] * 3 * len(every)) as server, opened(server) as store:
        for left, asked in zip(reversed(range(len(every))), every, strict=True):
            with pytest.raises(RetryableError, match=str(status)):
                await asked(store)
            assert len(server.script) == 3 * left


async def test_what_the_store_itself_says_is_gone_needs_no_second_request():
    script = [GONE, GONE, error(404, "NoSuchUpload")]
    async with ScriptedS3(*script) as server, opened(server) as store:
        await store.delete("k")
        await store.abort_upload("k", "u")
        await store.abort_upload("k", "u")
