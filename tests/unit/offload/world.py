"""A cluster in memory for tests of offloading: metadata, bucket, queue, sealed ledgers."""

import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial
from uuid import UUID

from tierlog.adapters.memory.clock import SimClock
from tierlog.adapters.memory.events import MemoryEvents
from tierlog.adapters.memory.faults import Faults, no_faults
from tierlog.adapters.memory.ids import SeededIds
from tierlog.adapters.memory.metadata import MemoryMetadata
from tierlog.adapters.memory.objects import MemoryObjects
from tierlog.catalog import Catalog
from tierlog.format.frame import pack_entries
from tierlog.format.run import Run, cut_runs
from tierlog.model.ids import EntryId, LedgerId, NodeId, StreamName
from tierlog.model.ledger import (
    KEY_BLOCK_SIZE,
    KEY_INCARNATION,
    KEY_STREAM,
    KEY_STRIPE_ENTRIES,
    LedgerMetadata,
    LedgerState,
    Segment,
)
from tierlog.model.offload import OffloadContext
from tierlog.model.policy import Policy
from tierlog.model.stream import Stream
from tierlog.model.trimming import TrimGrounds
from tierlog.offload.budget import UploadBudget
from tierlog.offload.driver import BlockOffloader, Tier2Settings
from tierlog.offload.interface import LedgerOffloader
from tierlog.offload.manifests import BucketGuard, ManifestStore
from tierlog.offload.messages import OffloadRequest, Stationery, Topics, Trigger
from tierlog.offload.ranges import RangeLimits
from tierlog.offload.timed import CopyTime, TimedOffloader
from tierlog.ports.events import Event
from tierlog.ports.retrying import Retries, RetryLimits
from tierlog.ports.spending import CostMeter
from tierlog_offloader.worker import OffloadWorker, WorkerSettings

STREAM = StreamName("logs")
BLOCK = 512
CLUSTER = UUID(int=77)
TOPICS = Topics.of("t")
SMALL_RANGES = RangeLimits(range_bytes=64, in_flight_max=4, kept_bytes_max=512)


def metadata_of(
    entries: Sequence[bytes], *, block_size: int = BLOCK, stripe_entries: int = 10**9
) -> LedgerMetadata:
    """Return the metadata of the closed ledger of these entries."""
    return LedgerMetadata(
        ensemble_size=1,
        write_quorum=1,
        ack_quorum=1,
        segments=(Segment(first_entry_id=EntryId(0), ensemble=(NodeId("n1"),)),),
        state=LedgerState.CLOSED,
        last_entry_id=EntryId(len(entries) - 1),
        length=sum(map(len, entries)),
        custom={
            KEY_BLOCK_SIZE: str(block_size).encode(),
            KEY_STREAM: STREAM.encode(),
            KEY_STRIPE_ENTRIES: str(stripe_entries).encode(),
        },
    )


async def bare_ledger(world: "World") -> LedgerId:
    """Make a closed ledger that belongs to no stream."""
    catalog = world.catalog()
    closed = metadata_of([b"bare"])
    opened = replace(closed, state=LedgerState.OPEN, last_entry_id=EntryId(-1), length=0, custom={})
    ledger_id = await catalog.bare.create(opened)
    await catalog.bare.close(ledger_id, last_entry_id=EntryId(0), length=4)
    return ledger_id


class ListHandle:
    """A read handle over entries in a list."""

    def __init__(
        self,
        ledger_id: LedgerId,
        entries: Sequence[bytes],
        metadata: LedgerMetadata | None = None,
        *,
        run_bytes_max: int = 200,
        runs_a_list: int = 2,
    ) -> None:
        self.ledger_id = ledger_id
        self.entries = list(entries)
        self.ledger_metadata = metadata or metadata_of(entries)
        self.run_bytes_max = run_bytes_max
        self.runs_a_list = runs_a_list
        self.closed = False

    async def last_add_confirmed(self) -> EntryId:
        return EntryId(len(self.entries) - 1)

    async def read_runs(
        self, first: EntryId, last: EntryId, *, bytes_max: int | None = None, wait_s: float = 0.0
    ) -> AsyncIterator[Sequence[Run]]:
        runs = runs_of(self.ledger_id, self.entries, run_bytes_max=self.run_bytes_max)
        wanted = [one for one in runs if one.last_entry_id >= first and one.first_entry_id <= last]
        for start in range(0, len(wanted), self.runs_a_list):
            yield wanted[start : start + self.runs_a_list]

    async def close(self) -> None:
        self.closed = True


def runs_of(
    ledger_id: LedgerId, entries: Sequence[bytes], *, run_bytes_max: int = 200
) -> list[Run]:
    """Return the runs of a ledger."""
    frames, offsets = pack_entries(entries)
    return cut_runs(
        frames,
        offsets,
        ledger_id=ledger_id,
        first_entry_id=0,
        last_add_confirmed=len(entries) - 1,
        owner_epoch=1,
        run_bytes_max=run_bytes_max,
        stripe_entries=10**9,
    )


async def entries_of(handle, first: int = 0, last: int | None = None) -> list[bytes]:
    """Read entries through any read handle."""
    last = handle.ledger_metadata.last_entry_id if last is None else last
    found: dict[int, bytes] = {}
    async for runs in handle.read_runs(EntryId(first), EntryId(last)):
        for run in runs:
            ids = range(run.first_entry_id, run.last_entry_id + 1)
            found |= zip(ids, map(bytes, run.entries()), strict=True)
    return [found[entry_id] for entry_id in range(first, last + 1)]


class World:
    """One of each server, and what connects to them."""

    def __init__(self, *, seed: int = 1, block_size: int = BLOCK) -> None:
        self.rng = random.Random(seed)
        self.clock = SimClock()
        self.ids = SeededIds(self.rng)
        self.metadata = MemoryMetadata()
        self.bucket = MemoryObjects(self.clock)
        self.meter = CostMeter()
        """Counts what offloaders, manifests and sweepers ask."""
        self.queue = MemoryEvents(self.rng)
        self.block_size = block_size
        self.ledgers: dict[LedgerId, list[bytes]] = {}
        self.stationery = Stationery(TOPICS, source="test", clock=self.clock, ids=self.ids)

    def catalog(self, faults: Faults | None = None) -> Catalog:
        """Return a catalog with a session of its own."""
        store = self.metadata.connect(faults or no_faults())
        return Catalog.over(store, clock=self.clock, ids=self.ids)

    async def stream(
        self, name: StreamName = STREAM, policy: Policy | None = None, *, raw: bool = False
    ) -> Stream:
        """Create a stream that someone owns."""
        catalog = self.catalog()
        await catalog.nodes.ensure_cluster()
        await catalog.streams.ensure_roots()
        await catalog.streams.create(name, raw=raw, policy=policy)
        return await catalog.streams.claim(name, NodeId("n1"))

    async def seal(
        self, claimed: Stream, entries: Sequence[bytes], *, close: bool = True
    ) -> LedgerId:
        """Make a ledger of these entries, and close it."""
        catalog = self.catalog()
        ledger_id = await catalog.ledgers.new_id()
        closed = metadata_of(entries, block_size=self.block_size)
        opened = replace(
            closed,
            custom={**closed.custom, KEY_INCARNATION: str(claimed.incarnation).encode()},
            state=LedgerState.OPEN,
            last_entry_id=EntryId(-1),
            length=0,
        )
        await catalog.ledgers.open(claimed, ledger_id, opened, block_size=self.block_size)
        self.ledgers[ledger_id] = list(entries)
        if close:
            await catalog.ledgers.close(
                claimed,
                ledger_id,
                last_entry_id=EntryId(len(entries) - 1),
                length=sum(map(len, entries)),
            )
        return ledger_id

    def open_ledger(self, ledger_id: LedgerId, metadata: LedgerMetadata) -> ListHandle:
        """Return a handle on tier 1."""
        return ListHandle(ledger_id, self.ledgers[ledger_id], metadata)

    def offloader(
        self,
        faults: Faults | None = None,
        *,
        budget: UploadBudget | None = None,
        limits: RetryLimits | None = None,
        **settings,
    ) -> BlockOffloader:
        """Return an offloader into the bucket; ``limits``: how patient it is."""
        settings.setdefault("grain_len", 64)
        again = partial(Retries, limits, clock=self.clock, ids=self.ids) if limits else None
        return BlockOffloader(
            self.bucket.connect(faults or no_faults(), meter=self.meter),
            Tier2Settings(bucket="b", cluster_id=CLUSTER, ranges=SMALL_RANGES, **settings),
            budget=budget,
            retries=again,
        )

    def manifests(self, faults: Faults | None = None) -> ManifestStore:
        """Return the manifests in the bucket."""
        return ManifestStore(
            self.bucket.connect(faults or no_faults(), meter=self.meter),
            cluster_id=CLUSTER,
            clock=self.clock,
            ids=self.ids,
        )

    def worker(
        self,
        faults: Faults | None = None,
        *,
        name: str = "w1",
        deliveries_max: int = 5,
        copy_time: CopyTime | None = None,
        **settings,
    ) -> OffloadWorker:
        """Return a worker whose every call suffers ``faults``."""
        offloader: LedgerOffloader = self.offloader(faults, **settings)
        if copy_time is not None:
            offloader = TimedOffloader(offloader, copy_time)
        return OffloadWorker(
            catalog=self.catalog(faults),
            open_ledger=self.open_ledger,
            offloader=offloader,
            guard=BucketGuard(self.manifests(faults)),
            publisher=self.queue.publisher(faults),
            stationery=self.stationery,
            clock=self.clock,
            ids=self.ids,
            settings=WorkerSettings(name=name, deliveries_max=deliveries_max),
        )

    def request(self, claimed: Stream, ledger_id: LedgerId, trigger: Trigger = Trigger.TIME):
        """Return the event that asks for a ledger."""
        topic, key, value, headers = self.stationery.request(
            OffloadRequest(
                stream=claimed.name,
                incarnation=claimed.incarnation,
                ledger_id=ledger_id,
                trigger=trigger,
                requested_ms=self.clock.wall_ms(),
            )
        )
        return Event(topic=topic, key=key, value=value, headers=headers)

    async def context(self, ledger_id: LedgerId) -> OffloadContext:
        """Return a ledger's context, which is there."""
        found = await self.catalog().contexts.get(ledger_id)
        assert found is not None
        return found

    async def grounds(self, name: StreamName = STREAM) -> TrimGrounds:
        """Return what a decision to trim a stream stands on now."""
        catalog = self.catalog()
        return TrimGrounds.of(await catalog.streams.get(name), await catalog.policies.levels())

    async def expected_keys(self) -> set[str]:
        """Return the keys of all objects that the metadata names as complete copies."""
        catalog = self.catalog()
        named: set[str] = set()
        for ledger_id in self.ledgers:
            context = await catalog.contexts.get(ledger_id)
            if context is not None and context.complete:
                assert context.location is not None
                named |= set(context.location.keys)
        return named
