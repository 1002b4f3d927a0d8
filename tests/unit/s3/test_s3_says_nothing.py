"""Answers of 200 that say nothing: no body, or a page for people, as proxies give them.

The library takes each for one in which everything is empty. Must hold: unknown is not empty, and no
success: a list that came so would hide what must not be deleted, or lose streams of a restore.
"""

import pytest

from tests.unit.s3.scripted import Answer, ScriptedS3, error
from tests.unit.s3.test_s3_faults import BUFFERS, CRC, LAST, PARTS, opened
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
    script = [*[empty] * 3, error(404, "404"), Answer()]
    async with ScriptedS3(*script) as server, opened(server) as store:
        with pytest.raises(RetryableError, match="says nothing"):
            await store.complete_upload("k", "u", PARTS)
