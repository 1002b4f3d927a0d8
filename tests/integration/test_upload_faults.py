"""An upload to a real S3 server through a proxy that fails each of its requests in every way.

Afterwards the copy is complete and reads back, its three objects are all that there is, and no
upload is open; or the attempt failed, and deleting it leaves nothing.
"""

import asyncio
import contextlib
import random
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from urllib.parse import urlsplit

import pytest
from pydantic import SecretStr

from tests.contracts.s3_proxy import Asked, Fault, S3Proxy
from tests.golden.objects import offload as golden_offload
from tests.unit.offload.world import CLUSTER, ListHandle, entries_of, metadata_of
from tierlog.adapters.memory.ids import SeededIds
from tierlog.adapters.s3 import S3ObjectStore, open_s3
from tierlog.adapters.system import SystemClock
from tierlog.model.errors import RetryableError
from tierlog.model.ids import LedgerId
from tierlog.model.policy import MIB
from tierlog.offload.budget import UploadBudget
from tierlog.offload.driver import BlockOffloader, Tier2Settings
from tierlog.ports.objects import NoSuchUploadError, ObjectStore
from tierlog.ports.retrying import Retries, RetryLimits
from tierlog.ports.spending import CostMeter
from tierlog.runtime.settings import S3Settings

pytestmark = pytest.mark.integration

BLOCK = 5 * MIB
LEDGER = LedgerId(9)
ENTRIES = [random.Random(n).randbytes(1_200_000) for n in range(9)]  # three blocks, one short
DATA = b"".join(golden_offload(ENTRIES, BLOCK).blocks)
FAULTS = [
    Fault.DROP_REQUEST,
    Fault.CUT_REQUEST,
    Fault.DROP_REPLY,
    Fault.CUT_REPLY,
    Fault.SLOW_DOWN,
    Fault.EXPIRED,
]


@dataclass
class Place:
    """A store behind a proxy, the same store directly, and a prefix of one's own."""

    proxy: S3Proxy
    store: ObjectStore
    direct: ObjectStore
    prefix: str
    meter: CostMeter

    def offloader(self, *, patience_s: float | None = None) -> BlockOffloader:
        """Return an offloader that goes through the proxy."""
        limits = RetryLimits(
            tries_max=10_000, time_s_max=patience_s or 1, wait_s_first=0.05, wait_s_max=2
        )
        again = partial(Retries, limits, clock=SystemClock(), ids=SeededIds(random.Random(1)))
        return BlockOffloader(
            self.store,
            Tier2Settings(bucket="b", cluster_id=CLUSTER, key_prefix=self.prefix),
            budget=UploadBudget(bytes_max=32 * MIB),
            retries=again if patience_s else None,
        )

    async def offload(
        self, offloader: BlockOffloader, entries: Sequence[bytes] = ENTRIES
    ) -> uuid.UUID:
        """Offload the ledger of this module under a fresh prefix."""
        attempt = uuid.uuid4()
        handle = ListHandle(
            LEDGER, entries, metadata_of(entries, block_size=BLOCK), run_bytes_max=65536
        )
        await offloader.offload(handle, attempt, {})
        return attempt

    async def check_whole(self, offloader: BlockOffloader, attempt: uuid.UUID) -> None:
        """The copy and nothing but the copy is there."""
        self.proxy.rule = lambda _: None
        location = offloader.location(LEDGER, attempt)
        assert {info.key async for info in self.direct.list(self.prefix)} == {
            location.data_key,
            location.index_key,
            location.side_key,
        }
        assert await self.direct.list_uploads(self.prefix) == []
        found = await self.direct.get(location.data_key)
        assert found is not None
        assert found[1] == DATA

    async def clear(self) -> None:
        """Take away what is there."""
        async for info in self.direct.list(self.prefix):
            await self.direct.delete(info.key)


@contextlib.asynccontextmanager
async def opened(servers, url: str, meter: CostMeter, **more) -> AsyncIterator[S3ObjectStore]:
    where = servers.endpoints
    quick = {"retry_wait_s_first": 0.01, "retry_wait_s_max": 0.1, "attempts_max": 3}
    settings = S3Settings(
        endpoint_url=url,
        access_key=where.s3_access_key,
        secret_key=SecretStr(where.s3_secret_key),
        bucket=where.s3_bucket,
        **{**quick, **more},
    )
    ids = SeededIds(random.Random(1))
    async with open_s3(settings, clock=SystemClock(), ids=ids, meter=meter) as store:
        yield store


@pytest.fixture
async def place(servers):
    url, meter = servers.endpoints.s3_endpoint_url, CostMeter()
    async with (
        S3Proxy(urlsplit(url).netloc) as proxy,
        opened(servers, proxy.url, meter, request_s_max=20) as store,
        opened(servers, url, CostMeter()) as direct,
    ):
        yield Place(proxy, store, direct, f"faults/{uuid.uuid4()}/", meter)


def failing_at(number: int, fault: Fault, begun: int):
    def rule(asked: Asked) -> Fault | None:
        return fault if asked.number == begun + number else None

    return rule


async def test_every_try_is_counted_and_the_copy_reads_back(place: Place):
    offloader = place.offloader()
    attempt = await place.offload(offloader)
    await place.check_whole(offloader, attempt)
    tier2 = await offloader.read_offloaded(LEDGER, attempt)
    assert await entries_of(tier2) == ENTRIES
    counted = sum(one.requests for one in place.meter.amounts.values())
    assert counted == len(place.proxy.asked)


@pytest.mark.covers("A16", "A42")
@pytest.mark.parametrize("fault", FAULTS)
async def test_each_request_of_an_upload_fails_once(place: Place, fault: Fault):
    offloader, number, asked = place.offloader(), 0, 1
    while number < asked:
        begun = len(place.proxy.asked)
        place.proxy.rule = failing_at(number, fault, begun)
        attempt = await place.offload(offloader)
        asked = len(place.proxy.asked) - begun - 1
        await place.check_whole(offloader, attempt)
        await place.clear()
        number += 1
    assert number >= 12


async def test_completing_is_answered_with_200_and_an_error_inside(place: Place):
    offloader, left = place.offloader(), 2

    def rule(asked: Asked) -> Fault | None:
        nonlocal left
        if asked.operation != "complete_multipart_upload" or not left:
            return None
        left -= 1
        return Fault.ERROR_IN_200

    place.proxy.rule = rule
    attempt = await place.offload(offloader)
    assert left == 0
    await place.check_whole(offloader, attempt)


async def test_a_storm_of_slow_downs_is_outlived_with_far_fewer_requests(place: Place):
    offloader = place.offloader(patience_s=60)
    begun_s = time.monotonic()
    while time.monotonic() < begun_s + 2:
        await place.offload(offloader, [b"small"])
    calm_per_s = len(place.proxy.asked) / (time.monotonic() - begun_s)
    await place.clear()
    rng, begun_s = random.Random(3), time.monotonic()

    def rule(asked: Asked) -> Fault | None:
        storm = 1.0 if time.monotonic() < begun_s + 8 else 0.3
        return Fault.SLOW_DOWN if rng.random() < storm else None

    place.proxy.rule = rule
    async with asyncio.TaskGroup() as group:
        attempt = group.create_task(place.offload(offloader))
        await asyncio.sleep(3)
        before = len(place.proxy.asked)
        await asyncio.sleep(5)
        storm_per_s = (len(place.proxy.asked) - before) / 5
        assert 0 < storm_per_s <= calm_per_s / 10
    await place.check_whole(offloader, attempt.result())


@pytest.mark.parametrize("operation", ["upload_part", "complete_multipart_upload", "put_object"])
async def test_a_store_that_fails_for_good_leaves_nothing_behind(place: Place, operation: str):
    offloader = place.offloader()
    place.proxy.rule = lambda asked: Fault.INTERNAL if asked.operation == operation else None
    with pytest.raises(RetryableError) as raised:
        await place.offload(offloader)
    assert raised.value.details["request_id"]
    place.proxy.rule = lambda _: None
    named = {info.key async for info in place.direct.list(place.prefix)}
    uploads = await place.direct.list_uploads(place.prefix)
    keys = {key.removesuffix("-side") for key in named} | {one.key for one in uploads}
    (data_key,) = keys
    attempt = uuid.UUID(data_key.removeprefix(place.prefix).partition("-ledger-")[0])
    await offloader.delete_offloaded(LEDGER, attempt)
    assert [info.key async for info in place.direct.list(place.prefix)] == []
    assert await place.direct.list_uploads(place.prefix) == []


async def test_an_upload_that_is_aborted_under_its_worker_is_refused(place: Place):
    offloader, begun = place.offloader(patience_s=20), asyncio.Event()

    def rule(asked: Asked) -> Fault | None:
        if asked.operation != "upload_part":
            return None
        begun.set()
        return Fault.SLOW_DOWN

    async def abort() -> None:
        await begun.wait()
        for upload in await place.direct.list_uploads(place.prefix):
            await place.direct.abort_upload(upload.key, upload.upload_id)
        place.proxy.rule = lambda _: None

    place.proxy.rule = rule
    async with asyncio.TaskGroup() as group:
        group.create_task(abort())
        with pytest.raises(NoSuchUploadError):
            await place.offload(offloader)
    assert [info.key async for info in place.direct.list(place.prefix)] == []
