"""A stream over one storage node, metadata and a bucket, all in memory, and a reader of it."""

import contextlib

from tests.unit.catalog.world import on_virtual_time
from tests.unit.ledger.small_cluster import NoConnector
from tests.unit.offload.world import STREAM, World
from tierlog.adapters.memory.cache import MemoryCache
from tierlog.adapters.memory.faults import Faults, no_faults
from tierlog.adapters.memory.storage_node import MemoryStorageNode
from tierlog.format.frame import FRAME_HEADER_LEN, pack_entries, walk_frames
from tierlog.format.run import cut_runs
from tierlog.ledger.directory import NodeDirectory
from tierlog.ledger.reader import Tier1ReadHandle
from tierlog.model.ids import EntryId, LedgerId, NodeId
from tierlog.model.position import Edge, Position
from tierlog.model.stream import Stream
from tierlog.offload.interface import LedgerOffloader
from tierlog.offload.range_memory import LastRanges, RangeMemory
from tierlog.offload.ranges import RangeLimits, Ranges
from tierlog.offload.turns import Pace
from tierlog_reader.cached_ranges import CachedRanges
from tierlog_reader.chunk import NO_ROOM, Answer, Budget, ReadRoom
from tierlog_reader.source import StreamSource
from tierlog_reader.tail import TailMemory
from tierlog_reader.tier1 import StorageNodeTier
from tierlog_reader.tier2 import ObjectTier, Tier2Limits
from tierlog_reader.trace import TracedMemory, TracedReads
from tierlog_reader.views import Views

__all__ = ["STREAM", "ReaderWorld", "at", "budget", "on_virtual_time", "payloads"]

N1 = NodeId("n1")
LIMITS = RangeLimits(range_bytes=256, in_flight_max=4, kept_bytes_max=2048)


def at(ledger_id: int, entry_id: int) -> Position:
    return Position(LedgerId(ledger_id), EntryId(entry_id))


def budget(
    *, entries: int = 1000, size: int = 100_000, wait_s: float = 0.0, room: ReadRoom = NO_ROOM
) -> Budget:
    return Budget(entries_max=entries, bytes_max=size, wait_s=wait_s, room=room)


def payloads(answer: Answer) -> list[bytes]:
    """Return the entries of an answer."""
    assert answer.chunk is not None
    frames = b"".join(answer.chunk.frames)
    starts = walk_frames(frames, answer.chunk.first_entry_id).tolist()
    assert len(starts) == answer.chunk.count
    ends = [*starts[1:], len(frames)]
    return [frames[a + FRAME_HEADER_LEN : b] for a, b in zip(starts, ends, strict=True)]


class ReaderWorld(World):
    """The offload world with a storage node that really keeps the runs."""

    def __init__(self, **named) -> None:
        super().__init__(**named)
        self.node = MemoryStorageNode(N1)
        self.cache = MemoryCache(self.clock)
        self.claimed: Stream

    async def start(self, policy=None, *, raw=False) -> None:
        self.claimed = await self.stream(policy=policy, raw=raw)

    async def write(
        self, ledger_id: LedgerId, entries, *, first=0, lac=None, times=(0, 0), run_bytes_max=200
    ) -> None:
        """Store entries as an owner does, and confirm them up to ``lac`` (all of them)."""
        frames, offsets = pack_entries(entries)
        runs = cut_runs(
            frames,
            offsets,
            ledger_id=ledger_id,
            first_entry_id=first,
            last_add_confirmed=first - 1,
            owner_epoch=1,
            run_bytes_max=run_bytes_max,
            publish_ms_min=times[0],
            publish_ms_max=times[1],
            stripe_entries=2**40,
            length_before=None if first else 0,
        )
        for run in runs:
            await self.node.add(run)
        self.node.confirm(ledger_id, EntryId(first + len(entries) - 1 if lac is None else lac))

    async def sealed(self, entries, **named) -> LedgerId:
        """Write a ledger and close it."""
        ledger_id = await self.seal(self.claimed, entries)
        await self.write(ledger_id, entries, **named)
        return ledger_id

    async def opened(self, entries=(), **named) -> LedgerId:
        """Open a ledger with some entries."""
        ledger_id = await self.seal(self.claimed, list(entries), close=False)
        if entries:
            await self.write(ledger_id, list(entries), **named)
        return ledger_id

    async def offloaded(
        self, ledger_id: LedgerId, offloader: LedgerOffloader | None = None
    ) -> None:
        """Copy a sealed ledger to the bucket and complete its context."""
        catalog, offloader = self.catalog(), offloader or self.offloader()
        uuid = self.ids.uuid()
        await catalog.contexts.begin_attempt(
            ledger_id, uuid=uuid, location=offloader.location(ledger_id, uuid), worker="w"
        )
        metadata = await catalog.ledgers.get(ledger_id)
        assert metadata is not None
        nodes = NodeDirectory(catalog.nodes.live, NoConnector(), local={N1: self.node})
        handle = Tier1ReadHandle(ledger_id, metadata, nodes)
        copy = await offloader.offload(handle, uuid, {})
        await catalog.contexts.complete_attempt(ledger_id, uuid=uuid, copy=copy)

    async def gone_locally(self, ledger_id: LedgerId) -> None:
        """Delete the local copy, as the scheduler does after the lag."""
        catalog = self.catalog()
        context = await self.context(ledger_id)
        assert context.uuid is not None
        deleting = await catalog.contexts.begin_tier1_deletion(ledger_id, uuid=context.uuid)
        await catalog.ledgers.delete_tier1(ledger_id, deleting)
        self.node.runs.pop(ledger_id, None)

    @contextlib.asynccontextmanager
    async def reader(
        self,
        *,
        objects_faults: Faults | None = None,
        age_s: float = 0.5,
        memory: RangeMemory | None = None,
        tails: CachedRanges | None = None,
        limits: RangeLimits = LIMITS,
        handles_max: int = 4,
        pace: Pace | None = None,
        **place,
    ):
        """Give a source over all of it; ``tails``: where the tails that it follows are kept."""
        catalog = self.catalog()
        views = Views(catalog, age_s_max=age_s, entries_max=100)
        nodes = NodeDirectory(catalog.nodes.live, NoConnector(), local={N1: self.node})
        objects = TracedReads(self.bucket.connect(objects_faults or no_faults()))
        kept = memory or LastRanges(limits.kept_bytes_max)
        ranges = Ranges(objects, limits, TracedMemory(kept), pace=pace)
        tier2 = ObjectTier(
            objects,
            ranges,
            self.cache.connect(),
            Tier2Limits(handles_max=handles_max, index_ttl_s=60, ahead_bytes=1024),
            **{"bucket": "b", **place},
        )
        tier1 = StorageNodeTier(views, nodes)
        async with ranges.run(), tier2.run():
            if tails is None:
                yield StreamSource(views, tier1, tier2)
                return
            async with TailMemory(tier1, tails.store, tails.manager).run() as tail:
                yield StreamSource(views, tier1, tier2, tail)

    async def read_all(self, source: StreamSource, *, size: int = 600) -> list[bytes]:
        """Read the stream from its beginning until nothing more is there."""
        where: Position | Edge = Edge.EARLIEST
        found: list[bytes] = []
        while True:
            answer = await source.read(STREAM, where, budget(size=size))
            if answer.chunk is None:
                return found
            found += payloads(answer)
            assert answer.resume != where
            where = answer.resume
