"""Reads by obstore keep the object store's contract: run with ``make test-obstore``.

What they can't do, writing, the SDK does beside them, so that the whole suite runs.
"""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest
from pydantic import SecretStr

from tests.contracts.bodies_suite import BODY, STAMP, BodiesContract, answer
from tests.contracts.objects_suite import ObjectsContract
from tests.unit.s3.scripted import Answer, ScriptedS3, error
from tierlog.adapters.obstore import ObstoreReads, open_obstore
from tierlog.adapters.s3 import open_s3
from tierlog.adapters.system import SystemClock, SystemIds
from tierlog.model.errors import RefusedError, RetryableError
from tierlog.ports.spending import CostMeter
from tierlog.ports.throttle import requests_pace
from tierlog.runtime.settings import S3Settings

pytestmark = pytest.mark.integration


class Both:
    """Writes with the SDK, reads with obstore."""

    def __init__(self, writes: Any, reads: ObstoreReads) -> None:
        self._writes = writes
        self.head, self.get = reads.head, reads.get
        self.get_range, self.get_range_into = reads.get_range, reads.get_range_into

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writes, name)


def settings_of(servers, **changed) -> S3Settings:
    where = servers.endpoints
    return S3Settings(
        **{
            "endpoint_url": where.s3_endpoint_url,
            "access_key": where.s3_access_key,
            "secret_key": SecretStr(where.s3_secret_key),
            "bucket": where.s3_bucket,
            **changed,
        }
    )


def scripted(server: ScriptedS3) -> S3Settings:
    return S3Settings(
        endpoint_url=server.url,
        access_key="a",
        secret_key=SecretStr("s"),
        bucket="b",
        attempts_max=3,
        retry_wait_s_first=0.001,
        retry_wait_s_max=0.01,
    )


@pytest.fixture
async def store(servers):
    settings = settings_of(servers)
    async with open_s3(settings, clock=SystemClock(), ids=SystemIds()) as writes:
        yield Both(
            writes, open_obstore(settings, meter=CostMeter(), clock=SystemClock(), ids=SystemIds())
        )


@pytest.fixture
def prefix():
    return f"contract-obstore/{uuid.uuid4()}/"


class TestObstoreReads(ObjectsContract):
    pass


class TestObstoreBodies(BodiesContract):
    @contextlib.asynccontextmanager
    async def opened(self, server: ScriptedS3) -> AsyncIterator[ObstoreReads]:
        settings = scripted(server)
        yield open_obstore(settings, meter=CostMeter(), clock=SystemClock(), ids=SystemIds())


async def test_requests_and_bytes_are_counted(store, servers, prefix):
    await store.put(f"{prefix}a", b"x" * 1000, metadata={})
    meter = CostMeter()
    reads = open_obstore(settings_of(servers), meter=meter, clock=SystemClock(), ids=SystemIds())
    assert await reads.get_range(f"{prefix}a", 10, 20) == b"x" * 20
    found = await reads.get(f"{prefix}a")
    assert found is not None
    assert found[1] == b"x" * 1000
    (amount,) = meter.amounts.values()
    assert (amount.requests, amount.bytes_received) == (2, 1020)


async def test_how_long_requests_took_and_how_they_ended_is_counted():
    script = [answer(), error(404, "NoSuchKey"), error(403, "AccessDenied")]
    async with ScriptedS3(*script) as server, TestObstoreBodies().opened(server) as reads:
        assert await reads.get_range("k", 0, len(BODY)) == BODY
        assert await reads.get_range("k", 0, 1) is None
        with pytest.raises(RefusedError):
            await reads.get_range("k", 0, 1)
    meter = reads._meter
    assert [(*key, count) for key, count in meter.answers.items()] == [
        ("get_object", "ok", 1),
        ("get_object", "FileNotFoundError", 1),
        ("get_object", "PermissionDeniedError", 1),
    ]
    assert meter.durations["get_object"].sum_s > 0


async def test_a_body_that_stops_coming_has_its_deadline_and_is_asked_for_again():
    stuck = answer(stops_at=len(BODY) // 2)
    async with ScriptedS3(stuck, answer(), *[stuck] * 3) as server, asyncio.timeout(30):
        settings = scripted(server).model_copy(
            update={"request_s_max": 0.3, "bytes_per_s_min": 10**8}
        )
        reads = open_obstore(settings, meter=CostMeter(), clock=SystemClock(), ids=SystemIds())
        assert await reads.get_range("k", 0, len(BODY)) == BODY
        with pytest.raises(RetryableError):
            await reads.get_range("k", 0, len(BODY))
        assert len(server.requests) == 5
        server.goes_on.set()


async def test_a_body_that_comes_slowly_has_the_time_that_its_length_allows():
    async with ScriptedS3(answer(stops_at=len(BODY) // 2)) as server, asyncio.timeout(30):
        settings = scripted(server).model_copy(
            update={"request_s_max": 0.3, "bytes_per_s_min": max(1, len(BODY) // 20)}
        )
        reads = open_obstore(settings, meter=CostMeter(), clock=SystemClock(), ids=SystemIds())
        asyncio.get_running_loop().call_later(0.9, server.goes_on.set)
        assert await reads.get_range("k", 0, len(BODY)) == BODY
        assert len(server.requests) == 1


async def test_its_requests_wait_for_the_pace_that_the_sdk_waits_for_too():
    script = [answer(), error(503, "SlowDown"), *[answer()] * 6]
    async with ScriptedS3(*script) as server:
        settings = scripted(server)
        pace = requests_pace(SystemClock(), per_s_max=5)
        reads = open_obstore(
            settings, meter=CostMeter(), clock=SystemClock(), ids=SystemIds(), pace=pace
        )
        async with open_s3(settings, clock=SystemClock(), ids=SystemIds(), pace=pace) as other:
            begun_s = asyncio.get_running_loop().time()
            for one in (reads, other, reads, other, reads, reads, reads):
                assert await one.get_range("k", 0, len(BODY)) == BODY
        # Five may go at once, and there are eight with the one that was sent again.
        assert asyncio.get_running_loop().time() - begun_s > 0.55
        assert len(server.requests) == 8


async def test_a_cap_on_requests_holds_without_a_pace_of_others_too():
    async with ScriptedS3(*[answer()] * 7) as server:
        settings = scripted(server).model_copy(update={"requests_per_s_max": 5.0})
        reads = open_obstore(settings, meter=CostMeter(), clock=SystemClock(), ids=SystemIds())
        begun_s = asyncio.get_running_loop().time()
        for _ in range(7):
            await reads.get_range("k", 0, len(BODY))
        assert asyncio.get_running_loop().time() - begun_s > 0.35


async def test_trouble_is_one_of_our_errors(servers):
    nowhere = open_obstore(
        settings_of(
            servers,
            endpoint_url="http://127.0.0.1:1",
            attempts_max=2,
            retry_wait_s_first=0.01,
            retry_wait_s_max=0.01,
        ),
        meter=CostMeter(),
        clock=SystemClock(),
        ids=SystemIds(),
    )
    with pytest.raises(RetryableError):
        await nowhere.get_range("a", 0, 1)
    for changed in ({"bucket": "never-made"}, {"secret_key": SecretStr("wrong")}):
        reads = open_obstore(
            settings_of(servers, **changed), meter=CostMeter(), clock=SystemClock(), ids=SystemIds()
        )
        with pytest.raises(RefusedError):
            await reads.get_range("a", 0, 1)


async def test_a_404_that_does_not_say_what_is_missing_is_no_missing_object():
    bare = Answer(404, None, b"<html>nothing here</html>")
    script = [bare, error(404, "404"), answer(), *[bare] * 3]
    async with ScriptedS3(*script) as server, TestObstoreBodies().opened(server) as reads:
        assert await reads.get_range("k", 0, len(BODY)) == BODY
        with pytest.raises(RetryableError, match="404"):
            await reads.get_range("k", 0, 10)
    assert not server.script


async def test_nor_is_one_that_the_store_has_itself_after_a_404_to_head():
    there = Answer(206, {**STAMP, "Content-Range": "bytes 0-0/4"}, b"b")
    script = [error(404, "404"), there, error(404, "404"), error(404, "NoSuchKey")]
    async with ScriptedS3(*script) as server, TestObstoreBodies().opened(server) as reads:
        with pytest.raises(RetryableError, match="404"):
            await reads.head("k")
        assert await reads.head("k") is None
    assert not server.script
