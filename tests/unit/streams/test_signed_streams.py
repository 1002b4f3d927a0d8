"""A stream whose ledgers have a key, from append to both tiers, by who has it and who has not."""

# Ids are plain numbers and names here; what is None fails the test anyway.
# mypy: disable-error-code="index,arg-type,union-attr,var-annotated,assignment"

import asyncio
import contextlib
from uuid import UUID

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.ledger.small_cluster import ALONE, STREAM, SmallCluster, draft
from tests.unit.ledger.test_keys import forged, last_byte
from tests.unit.reader.world import budget, payloads
from tierlog.adapters.memory.cache import MemoryCache
from tierlog.adapters.memory.events import MemoryEvents
from tierlog.adapters.memory.objects import MemoryObjects
from tierlog.format.frame import pack_entries
from tierlog.format.run import build_run
from tierlog.ledger.keys import NO_KEYS, LedgerKeys
from tierlog.ledger.reader import Tier1ReadHandle
from tierlog.model.errors import Reason, RefusedError, RetryableError, TierlogError
from tierlog.model.ledger import DigestType
from tierlog.model.offload import OffloadState
from tierlog.model.position import Edge
from tierlog.offload.driver import BlockOffloader, Tier2Settings
from tierlog.offload.manifests import BucketGuard, ManifestStore
from tierlog.offload.messages import OffloadRequest, Stationery, Topics, Trigger, parse_result
from tierlog.offload.ranges import RangeLimits, Ranges
from tierlog.ports.events import Event
from tierlog.proto.v1 import events_pb2 as pb
from tierlog.proto.v1 import wire_pb2
from tierlog.wire.codec import HEAD_LEN
from tierlog.wire.messages import ADDS_HEADER_LEN_MAX, RUNS_MAX
from tierlog_ingest.app import FRAME_BYTES_BESIDE_ENTRY
from tierlog_ingest.streams.appends import QueueBudget
from tierlog_ingest.streams.owners import Owners
from tierlog_ingest.streams.parts import OwnerParts
from tierlog_offloader.worker import OffloadWorker, WorkerSettings
from tierlog_reader.source import StreamSource
from tierlog_reader.tier1 import StorageNodeTier
from tierlog_reader.tier2 import ObjectTier, Tier2Limits
from tierlog_reader.views import Views

pytestmark = pytest.mark.covers("D08")

KEYS = LedgerKeys({"k1": b"1" * 32})
SIGNING = ALONE.model_copy(update={"ledger_key_id": "k1"})
TOPICS = Topics.of("t")
ENTRIES = [b"%d" % number * 50 for number in range(20)]


class World(SmallCluster):
    """A small cluster with a bucket, and services that have ``keys``."""

    def __init__(self) -> None:
        super().__init__(1)
        self.bucket = MemoryObjects(self.clock)
        self.queue = MemoryEvents(self.rng)
        self.stationery = Stationery(TOPICS, source="test", clock=self.clock, ids=self.ids)

    @property
    def node(self):
        return self.nodes["n1"]

    @contextlib.asynccontextmanager
    async def owners(self, keys, *, settings=SIGNING, drain=True):
        catalog = self.catalog()
        owners = Owners(
            OwnerParts(
                node_id="n1",
                catalog=catalog,
                nodes=self.directory(catalog),
                recovery=self.recovery(catalog, keys=keys),
                clock=self.clock,
                ids=self.ids,
                settings=settings,
                budget=QueueBudget(1 << 20),
                keys=keys,
            )
        )
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(owners.run())
            await asyncio.sleep(0)
            yield owners
            if drain:
                await owners.drain()
            else:
                running.cancel()

    async def offload(self, keys, ledger_id):
        """Handle a request as a worker with ``keys`` does; return how it ended."""
        catalog = self.catalog()
        snapshot = await catalog.streams.snapshot(STREAM)
        nodes = self.directory(catalog)
        worker = OffloadWorker(
            catalog=catalog,
            open_ledger=lambda one, metadata: Tier1ReadHandle(one, metadata, nodes, keys=keys),
            offloader=BlockOffloader(
                self.bucket.connect(), Tier2Settings(bucket="b", cluster_id=UUID(int=7))
            ),
            guard=BucketGuard(
                ManifestStore(
                    self.bucket.connect(),
                    cluster_id=UUID(int=7),
                    clock=self.clock,
                    ids=self.ids,
                )
            ),
            publisher=self.queue.publisher(),
            stationery=self.stationery,
            clock=self.clock,
            ids=self.ids,
            settings=WorkerSettings(name="w1"),
        )
        topic, key, value, headers = self.stationery.request(
            OffloadRequest(
                stream=STREAM,
                incarnation=snapshot.stream.incarnation,
                ledger_id=ledger_id,
                trigger=Trigger.TIME,
                requested_ms=self.clock.wall_ms(),
            )
        )
        await worker.handle(Event(topic=topic, key=key, value=value, headers=headers))
        return parse_result(self.queue.events(TOPICS.completed)[-1])

    async def read(self, keys):
        """Read the stream from its beginning, as a reader with ``keys`` does."""
        catalog = self.catalog()
        views = Views(catalog, age_s_max=0.0, entries_max=100)
        objects = self.bucket.connect()
        tier2 = ObjectTier(
            objects,
            Ranges(objects, RangeLimits(range_bytes=256, in_flight_max=4, kept_bytes_max=4096)),
            MemoryCache(self.clock).connect(),
            Tier2Limits(handles_max=4, index_ttl_s=60, ahead_bytes=1024),
            bucket="b",
        )
        tier1 = StorageNodeTier(views, self.directory(catalog), keys=keys)
        found, where, trouble = [], Edge.EARLIEST, None
        async with tier2.run():
            source = StreamSource(views, tier1, tier2)
            while trouble is None:
                try:
                    answer = await source.read(STREAM, where, budget())
                except TierlogError as error:
                    trouble = error
                    break
                if answer.chunk is None:
                    return found
                found += payloads(answer)
                where = answer.resume
        raise trouble


async def appended(world, *, drain=True):
    await world.start()
    async with world.owners(KEYS, drain=drain) as owners:
        (span,) = await owners.submit(STREAM, draft(*ENTRIES))
    return span.ledger_id


def test_a_signed_stream_is_read_from_both_tiers():
    async def main():
        world = World()
        ledger_id = await appended(world)
        metadata = await world.catalog().ledgers.get(ledger_id)
        assert metadata.digest_type is DigestType.HMAC
        assert metadata.custom["tierlog/key-id"] == b"k1"
        for run in world.node.runs[ledger_id].values():
            run.check_mac(KEYS.named("k1"))
        assert await world.read(KEYS) == ENTRIES
        result = await world.offload(KEYS, ledger_id)
        assert result.outcome == pb.OffloadResult.OUTCOME_COMPLETED
        world.node.down = True
        assert await world.read(KEYS) == ENTRIES
        # The copy is in Pulsar's format, which has no codes: whoever may read the bucket reads it.
        assert await world.read(NO_KEYS) == ENTRIES

    run_virtual(main())


def test_the_secret_is_in_no_metadata():
    async def main():
        world = World()
        await appended(world)
        stored = b"".join(
            found.data for found in [await each(world, path) for path in await tree(world)] if found
        )
        assert b"tierlog/key-id" in stored
        assert b"1" * 32 not in stored

    async def each(world, path):
        return await world.metadata.connect().get(path)

    async def tree(world):
        store, found = world.metadata.connect(), [""]
        for path in found:
            names = await store.children(path or "/") or []
            found += [f"{path}/{name}" for name in names]
        return found[1:]

    run_virtual(main())


def test_a_reader_without_the_key_is_refused_tier_1():
    async def main():
        world = World()
        ledger_id = await appended(world, drain=False)
        for state in ("open", "closed"):
            with pytest.raises(RefusedError) as caught:
                await world.read(NO_KEYS)
            assert caught.value.reason is Reason.PERMISSION_DENIED, state
            if state == "open":
                async with world.owners(KEYS) as owners:
                    await owners.seal(STREAM)
                assert (await world.catalog().ledgers.get(ledger_id)).last_entry_id >= 0

    run_virtual(main())


def test_an_offloader_refuses_before_it_begins_and_never_copies_what_was_forged():
    async def main():
        world = World()
        ledger_id = await appended(world)
        result = await world.offload(NO_KEYS, ledger_id)
        assert result.outcome == pb.OffloadResult.OUTCOME_REFUSED
        assert result.error_reason == "PERMISSION_DENIED"
        assert "TIERLOG_KEYS__K1" in result.error_message
        context = await world.catalog().contexts.get(ledger_id)
        assert (context.state, context.attempt_count) == (OffloadState.LOCAL, 0)

        held = world.node.runs[ledger_id]
        genuine = held[0]
        held[0] = forged(genuine, last_byte)
        with pytest.raises(TierlogError, match="not signed with key k1"):
            await world.offload(KEYS, ledger_id)
        context = await world.catalog().contexts.get(ledger_id)
        assert not context.complete
        assert not world.bucket.objects
        held[0] = genuine
        result = await world.offload(KEYS, ledger_id)
        assert result.outcome == pb.OffloadResult.OUTCOME_COMPLETED
        assert await world.read(KEYS) == ENTRIES

    run_virtual(main())


def test_an_owner_without_the_key_recovers_nothing_and_says_so():
    async def main():
        world = World()
        ledger_id = await appended(world, drain=False)
        async with world.owners(NO_KEYS, settings=ALONE) as owners:
            with pytest.raises(RefusedError) as caught:
                await owners.submit(STREAM, draft(b"more"))
            assert caught.value.reason is Reason.PERMISSION_DENIED
            assert "TIERLOG_KEYS__K1" in str(caught.value)
        assert not world.node.fenced
        async with world.owners(KEYS) as owners:
            await owners.submit(STREAM, draft(b"more"))
        assert (await world.catalog().ledgers.get(ledger_id)).last_entry_id == len(ENTRIES) - 1
        assert await world.read(KEYS) == [*ENTRIES, b"more"]

    run_virtual(main())


def test_an_owner_that_lacks_its_own_key_makes_no_ledger():
    async def main():
        world = World()
        await world.start()
        async with world.owners(NO_KEYS) as owners:
            with pytest.raises((RefusedError, RetryableError)) as caught:
                await owners.submit(STREAM, draft(b"more"))
            assert caught.value.reason is Reason.PERMISSION_DENIED
        assert (await world.catalog().streams.snapshot(STREAM)).ledgers == ()

    run_virtual(main())


def test_keys_may_change_from_ledger_to_ledger():
    async def main():
        world = World()
        await appended(world)
        both = LedgerKeys({"k1": b"1" * 32, "k2": b"2" * 32})
        other = ALONE.model_copy(update={"ledger_key_id": "k2"})
        for settings, entry in ((other, b"second"), (ALONE, b"unsigned")):
            async with world.owners(both, settings=settings) as owners:
                await owners.submit(STREAM, draft(entry))
        assert await world.read(both) == [*ENTRIES, b"second", b"unsigned"]
        catalog = world.catalog()
        ledgers = (await catalog.streams.snapshot(STREAM)).ledgers
        assert [(await catalog.ledgers.get(one.ledger_id)).digest_type for one in ledgers] == [
            DigestType.HMAC,
            DigestType.HMAC,
            DigestType.CRC32C,
        ]
        with pytest.raises(RefusedError, match="key k2"):
            await world.read(KEYS)

    run_virtual(main())


def test_what_lies_beside_an_entry_in_a_frame_to_a_node_is_within_what_is_kept_for_it():
    add = wire_pb2.WireFrame(
        request_id=2**64 - 1, add_runs=wire_pb2.WireAddRuns(count=RUNS_MAX, recovery=True)
    )
    assert add.ByteSize() == ADDS_HEADER_LEN_MAX
    run = build_run(*pack_entries([b"x" * 1000]), key=KEYS.named("k1"))
    beside = HEAD_LEN + add.ByteSize() + len(run.encoded) - 1000
    assert 0 < beside <= FRAME_BYTES_BESIDE_ENTRY
