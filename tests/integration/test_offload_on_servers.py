"""Offloading on a real S3, a real Kafka and a real ZooKeeper, and while they fail.

The queue may lose everything, the store may be away: the scheduler asks until the metadata says
complete. What is copied reads back byte for byte.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import pytest

from tests.unit.offload.world import ListHandle, entries_of, metadata_of
from tierlog.adapters.kafka.source import KafkaEventSource
from tierlog.format.keys import ROLE
from tierlog.format.manifest import is_manifest_key
from tierlog.model.errors import RetryableError
from tierlog.model.ids import EntryId, LedgerId, NodeId, StreamName
from tierlog.model.ledger import LedgerState
from tierlog.model.offload import OffloadContext
from tierlog.model.policy import MIB, Policy
from tierlog.model.stream import Stream
from tierlog.offload.manifests import BucketGuard
from tierlog.offload.messages import OffloadRequest, Stationery, Topics, Trigger
from tierlog.runtime.settings import Settings
from tierlog.runtime.worker import WorkerLimits, run_worker
from tierlog.wiring.build import open_offload_requests, system_clock, system_ids
from tierlog.wiring.manifests import manifest_store
from tierlog.wiring.offload import OffloadParts, open_offload_parts
from tierlog_offloader.worker import OffloadWorker, WorkerSettings
from tierlog_scheduler.manifests import BucketManifests
from tierlog_scheduler.scheduler import Scheduler, SchedulerLimits

pytestmark = pytest.mark.integration

STREAM = StreamName("logs")
BLOCK = 5 * MIB


@dataclass
class Place:
    """Services in this process, over real servers; tier 1 is a list."""

    settings: Settings
    parts: OffloadParts
    ledgers: dict[LedgerId, list[bytes]]

    @property
    def topics(self) -> Topics:
        return Topics.of(self.settings.kafka.topic_prefix)

    @property
    def stationery(self) -> Stationery:
        return Stationery(self.topics, source="test", clock=system_clock(), ids=system_ids())

    async def stream(self, policy: Policy | None = None) -> Stream:
        catalog = self.parts.catalog
        await catalog.streams.create(STREAM, policy=policy)
        return await catalog.streams.claim(STREAM, NodeId("n1"))

    async def seal(self, claimed: Stream, entries: list[bytes]) -> LedgerId:
        catalog = self.parts.catalog
        ledger_id = await catalog.ledgers.new_id()
        closed = metadata_of(entries, block_size=BLOCK)
        opened = replace(closed, state=LedgerState.OPEN, last_entry_id=EntryId(-1), length=0)
        await catalog.ledgers.open(claimed, ledger_id, opened, block_size=BLOCK)
        await catalog.ledgers.close(
            claimed, ledger_id, last_entry_id=closed.last_entry_id, length=closed.length
        )
        self.ledgers[ledger_id] = entries
        return ledger_id

    async def ask(self, claimed: Stream, ledger_id: LedgerId) -> None:
        topic, key, value, headers = self.stationery.request(
            OffloadRequest(
                stream=claimed.name,
                incarnation=claimed.incarnation,
                ledger_id=ledger_id,
                trigger=Trigger.ADMIN,
                requested_ms=0,
            )
        )
        await self.parts.publisher.publish(topic, key=key, value=value, headers=headers)

    @contextlib.asynccontextmanager
    async def working(
        self, *, scheduler: SchedulerLimits | None = None
    ) -> AsyncIterator[Scheduler | None]:
        """Run a worker, and a scheduler if asked, which is given, while the context lasts."""
        stop = asyncio.Event()
        worker = OffloadWorker(
            catalog=self.parts.catalog,
            open_ledger=lambda ledger_id, metadata: ListHandle(
                ledger_id, self.ledgers[ledger_id], metadata, run_bytes_max=65536
            ),
            offloader=self.parts.offloader,
            guard=BucketGuard(
                manifest_store(self.settings, self.parts.objects, self.parts.cluster)
            ),
            publisher=self.parts.publisher,
            stationery=self.stationery,
            clock=system_clock(),
            ids=system_ids(),
            settings=WorkerSettings(name="w", deliveries_max=3),
        )
        limits = WorkerLimits(in_flight_max=1, drain_s_max=10)
        async with open_offload_requests(self.settings) as source, asyncio.TaskGroup() as group:
            group.create_task(run_worker(source, worker.handle, stop=stop, limits=limits))
            leader: Scheduler | None = None
            if scheduler is not None:
                leader = Scheduler(
                    catalog=self.parts.catalog,
                    offloader=self.parts.offloader,
                    publisher=self.parts.publisher,
                    stationery=self.stationery,
                    manifests=BucketManifests(
                        manifest_store(self.settings, self.parts.objects, self.parts.cluster),
                        self.parts.catalog,
                    ),
                    clock=system_clock(),
                    ids=system_ids(),
                    limits=scheduler,
                )
                group.create_task(leader.run(stop))
            try:
                yield leader
            finally:
                stop.set()

    async def until_complete(self, ledger_id: LedgerId, *, seconds: float = 60) -> OffloadContext:
        async with asyncio.timeout(seconds):
            while True:
                with contextlib.suppress(RetryableError):
                    context = await self.parts.catalog.contexts.get(ledger_id)
                    if context is not None and context.complete:
                        return context
                await asyncio.sleep(0.1)

    async def check(self, ledger_id: LedgerId) -> None:
        """The copy is whole, reads back the same, and nothing else lies under the prefix."""
        context = await self.parts.catalog.contexts.get(ledger_id)
        assert context is not None
        assert context.uuid is not None
        handle = await self.parts.offloader.read_offloaded(
            ledger_id, context.uuid, context.location, copy=context.copy
        )
        assert await entries_of(handle) == self.ledgers[ledger_id]

    async def check_bucket(self) -> None:
        named = set()
        for ledger_id in self.ledgers:
            context = await self.parts.catalog.contexts.get(ledger_id)
            assert context is not None
            if context.complete:
                assert context.location is not None
                named |= set(context.location.keys)
        prefix = self.settings.s3.key_prefix
        listed = {info.key async for info in self.parts.objects.list(prefix)}
        assert {key for key in listed if not is_manifest_key(prefix, key)} == named
        assert not await self.parts.objects.list_uploads(prefix)

    async def dead_letters(self, count: int) -> list[dict[str, bytes]]:
        source = KafkaEventSource(
            self.settings.kafka.bootstrap_servers, [self.topics.dead_letter], group="aside"
        )
        try:
            async with asyncio.timeout(30):
                return [dict((await source.take()).headers) for _ in range(count)]
        finally:
            await source.close()


@pytest.fixture
async def place(corner: Settings):
    async with open_offload_parts(corner) as parts:
        yield Place(corner, parts, {})


def some_entries(seed: int, *, total: int) -> list[bytes]:
    rng = random.Random(seed)
    entries, size = [], 0
    while size < total:
        entries.append(rng.randbytes(rng.choice([0, 1, 100, 10_000, 100_000])))
        size += len(entries[-1])
    return entries


@pytest.mark.covers("A11", "A12", "A19", "A39", "A41", "A42", "A43", "A77")
async def test_a_ledger_goes_over_the_queue_into_the_bucket_and_back(place: Place):
    claimed = await place.stream()
    ledger_id = await place.seal(claimed, some_entries(1, total=12 * MIB))
    async with place.working():
        await place.ask(claimed, ledger_id)
        context = await place.until_complete(ledger_id)
    assert context.location is not None
    assert context.copy is not None
    assert context.copy.block_count == 3
    for key, role in zip(context.location.keys, ("data", "index", "side"), strict=True):
        info = await place.parts.objects.head(key)
        assert info is not None
        assert info.metadata[ROLE] == role
        assert info.metadata["s3managedledgeroffloaderformatversion"] == "1"
    data = await place.parts.objects.head(context.location.data_key)
    assert data is not None
    assert data.etag.strip('"').endswith("-3")
    await place.check(ledger_id)
    await place.check_bucket()


async def test_duplicates_and_requests_for_nothing(place: Place):
    claimed = await place.stream()
    ledger_id = await place.seal(claimed, some_entries(2, total=MIB))
    async with place.working():
        for _ in range(3):
            await place.ask(claimed, ledger_id)
        await place.ask(claimed, LedgerId(987654))
        await place.parts.publisher.publish(
            place.topics.requested, key=b"?", value=b"\xff garbage", headers={}
        )
        context = await place.until_complete(ledger_id)
        aside = await place.dead_letters(2)
    assert context.attempt_count == 1
    reasons = {headers["tierlog_error_reason"] for headers in aside}
    assert reasons == {b"LEDGER_NOT_FOUND", b"CORRUPT"}
    await place.check_bucket()


async def test_the_store_is_away_for_half_a_minute(place: Place, servers):
    claimed = await place.stream(policy=Policy(offload_time_ms=0))
    ledger_id = await place.seal(claimed, some_entries(3, total=6 * MIB))
    limits = SchedulerLimits(interval_s=1, request_again_s=10, sweep_again_s=5)
    servers.kill("s3")
    try:
        async with place.working(scheduler=limits):
            await asyncio.sleep(30)
            context = await place.parts.catalog.contexts.get(ledger_id)
            assert context is not None
            assert not context.complete
            await servers.restart("s3")
            context = await place.until_complete(ledger_id, seconds=90)
            await place.check(ledger_id)
            async with asyncio.timeout(60):
                while (await place.parts.catalog.contexts.get(ledger_id)).abandoned:  # type: ignore[union-attr]
                    await asyncio.sleep(0.5)
    finally:
        await servers.restart("s3")
    await place.check_bucket()


async def test_a_queue_that_comes_back_empty(place: Place, servers):
    claimed = await place.stream(policy=Policy(offload_time_ms=0, deletion_lag_ms=-1))
    ledger_id = await place.seal(claimed, some_entries(4, total=MIB))
    # Asked for, and lost with the broker's disk before anyone took it.
    await place.ask(claimed, ledger_id)
    await servers.restart("kafka", empty=True)
    async with place.working(
        scheduler=SchedulerLimits(interval_s=1, request_again_s=2, sweep_again_s=5)
    ):
        await place.until_complete(ledger_id, seconds=90)
    await place.check(ledger_id)
    await place.check_bucket()
