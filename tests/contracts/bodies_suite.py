"""What reads of ranges must make of bodies that are not what was asked for (ports/objects.py).

A module that runs the suite subclasses ``BodiesContract`` and says how a bucket ``b`` of a server
is read, each request tried up to three times.
"""

import asyncio
import gc
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.s3.scripted import Answer, CutRequest, Request, ScriptedS3, error
from tierlog.model.errors import CorruptError, RefusedError, RetryableError, TierlogError
from tierlog.ports.objects import ObjectReads

BODY = bytes(range(1, 251)) * 2000  # no byte of it is zero
TOTAL = 2 * len(BODY)
STAMP = {"Last-Modified": "Sat, 21 Nov 2026 10:00:00 GMT", "ETag": '"e"'}


def answer(body: bytes = BODY, *, start: int = 0, **more: Any) -> Answer:
    """Answer a range with a body that may be another than it says."""
    span = f"bytes {start}-{start + len(BODY) - 1}/{TOTAL}"
    return Answer(206, {**STAMP, "Content-Range": span}, body, **more)


class BodiesContract:
    def opened(self, server: ScriptedS3) -> AbstractAsyncContextManager[ObjectReads]:
        raise NotImplementedError

    async def read(self, *script) -> tuple[int | None, bytes]:
        """Read into buffers that have more room behind them, which must stay as it is."""
        room = memoryview(bytearray(len(BODY) + 100))
        targets = [room[:70_001], room[70_001 : len(BODY)]]
        try:
            async with ScriptedS3(*script) as server, self.opened(server) as reads:
                found = await reads.get_range_into("k", 0, targets)
        finally:
            assert room[len(BODY) :] == bytes(100), "behind the buffers is somebody else's"
        return found, bytes(room[: len(BODY)])

    async def test_a_whole_body(self):
        assert await self.read(answer()) == (len(BODY), BODY)

    @pytest.mark.parametrize("cut", [1, 100_000, len(BODY) - 1])
    async def test_a_body_that_breaks(self, cut):
        assert await self.read(answer(cut_body=cut), answer()) == (len(BODY), BODY)
        with pytest.raises(RetryableError):
            await self.read(*[answer(cut_body=cut)] * 3)

    @pytest.mark.parametrize("cut", [1, 100_000, len(BODY) - 1])
    async def test_a_body_that_breaks_is_asked_for_again_however_it_is_read(self, cut):
        whole, cut_one = Answer(200, STAMP, BODY), Answer(200, STAMP, BODY, cut_body=cut)
        script = [answer(cut_body=cut), answer(), cut_one, whole]
        async with ScriptedS3(*script) as server:
            async with self.opened(server) as reads:
                assert await reads.get_range("k", 0, len(BODY)) == BODY
                found = await reads.get("k")
            assert found is not None
            assert found[1] == BODY
            assert len(server.requests) == 4

    @pytest.mark.parametrize(
        "trouble",
        [
            error(500, "InternalError"),
            error(503, "SlowDown"),
            error(429, "TooManyRequests"),
            error(400, "RequestTimeout"),
        ],
    )
    async def test_what_may_pass_is_asked_again_so_often(self, trouble):
        assert await self.read(trouble, answer(cut_body=9), answer()) == (len(BODY), BODY)
        async with ScriptedS3(*[trouble] * 3) as server, self.opened(server) as reads:
            with pytest.raises(RetryableError):
                await reads.get_range("an-object-of-416-bytes", 0, 10)
            assert len(server.requests) == 3

    async def test_a_connection_that_goes_before_the_answer(self):
        assert await self.read(CutRequest(0), answer()) == (len(BODY), BODY)

    @pytest.mark.parametrize(
        "refusal", [error(403, "AccessDenied"), error(400, "InvalidRequest"), error(400, "Odd")]
    )
    async def test_what_is_refused_for_good_is_asked_once(self, refusal):
        async with ScriptedS3(refusal) as server, self.opened(server) as reads:
            with pytest.raises(RefusedError):
                await reads.get_range("k", 0, 10)
            assert len(server.requests) == 1

    async def test_what_is_not_there_is_asked_for_once(self):
        script = [error(404, "NoSuchKey"), error(416, "InvalidRange")] * 2
        async with ScriptedS3(*script) as server, self.opened(server) as reads:
            assert await reads.get_range("k", 0, 10) is None
            assert await reads.get_range("k", 10**6, 10) == b""
            assert await reads.get_range_into("k", 0, [memoryview(bytearray(9))]) is None
            assert await reads.get_range_into("k", 10**6, [memoryview(bytearray(9))]) == 0
            assert len(server.requests) == 4

    async def test_a_body_that_is_shorter_than_it_says(self):
        assert await self.read(answer(BODY[:-1]), answer()) == (len(BODY), BODY)
        script = [answer(BODY[:-1]), answer()]
        async with ScriptedS3(*script) as server, self.opened(server) as reads:
            assert await reads.get_range("k", 0, len(BODY)) == BODY
        with pytest.raises(RetryableError):
            await self.read(*[answer(BODY[:-1])] * 3)

    @pytest.mark.parametrize("more", [1, 300_000])
    async def test_a_body_that_is_longer_than_it_says(self, more):
        longer = answer(BODY + b"x" * more)
        assert await self.read(longer, answer()) == (len(BODY), BODY)
        with pytest.raises(RetryableError):
            await self.read(*[longer] * 3)

    async def test_of_a_whole_object_that_is_too_long_no_byte_is_waited_for(self):
        whole = Answer(200, STAMP, BODY)
        async with ScriptedS3(replace(whole, stops_at=0), whole) as server:
            async with self.opened(server) as reads:
                with pytest.raises(CorruptError):
                    async with asyncio.timeout(5):
                        await reads.get("k", bytes_max=len(BODY) - 1)
                server.goes_on.set()
                found = await reads.get("k", bytes_max=len(BODY))
            assert found is not None
            assert found[1] == BODY
            assert len(server.requests) == 2
        gc.collect()  # which complains of a connection that was left open

    async def test_another_range_than_was_asked_for(self):
        with pytest.raises(TierlogError) as raised:
            await self.read(*[answer(start=7)] * 3)
        assert isinstance(raised.value, RefusedError | RetryableError)
        del raised
        gc.collect()  # which complains of a connection that was left open

    async def test_one_that_is_given_up_in_the_middle_of_its_body(self):
        halfway, room = asyncio.Event(), memoryview(bytearray(len(BODY)))

        async def stuck(_request: Request) -> Answer:
            halfway.set()
            return answer(stops_at=len(BODY) // 2)

        async with ScriptedS3(stuck, answer()) as server, self.opened(server) as reads:
            read = asyncio.ensure_future(reads.get_range_into("k", 0, [room]))
            await halfway.wait()
            await asyncio.sleep(0.1)
            read.cancel()
            await asyncio.wait({read})
            assert read.cancelled()
            room[:] = bytes(len(BODY))
            server.goes_on.set()
            await asyncio.sleep(0.1)
            assert room == bytes(len(BODY))
            assert await reads.get_range_into("k", 0, [room]) == len(BODY)
        assert room == BODY
