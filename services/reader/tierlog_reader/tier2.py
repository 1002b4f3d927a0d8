"""Frames of ledgers in the object store, for ``source`` (seeds/000: opening, reading, offsets).

Owns finding an entry's bytes in a data object: the block from the index by binary search, then
the frame, from the nearest offset that is known. Does not own the bytes' memory (``ranges``).

Invariants:
    * What is returned was walked: lengths fit, ids grow by one from the asked entry on.
    * An index that is not the one whose digest the context holds is never used, wherever it
      came from; without a digest it is read from the store and never from the shared cache.
    * At most ``handles_max`` indexes and ``OFFSETS_MAX`` offsets of each are kept.
"""

import asyncio
import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final
from uuid import UUID

import structlog
from sortedcontainers import SortedDict

from tierlog.format.block import BlockHeader
from tierlog.format.frame import FRAME_HEADER_LEN, entry_len_at, frames_end, walk_frames
from tierlog.format.index import BlockRange, ObjectIndex
from tierlog.format.keys import ObjectRole, check_object_metadata
from tierlog.model.errors import CorruptError, Reason, RefusedError, RetryableError
from tierlog.model.ids import EntryId, LedgerId
from tierlog.model.offload import OffloadContext, Tier2Location
from tierlog.model.stream import ListedLedger
from tierlog.ports.cache import SharedCache
from tierlog.ports.objects import ObjectStore
from tierlog_reader.chunk import Budget, Chunk
from tierlog_reader.places import Tier
from tierlog_reader.ranges import RangeCache

log = structlog.get_logger()

OFFSETS_MAX: Final = 4096
WALK_BYTES: Final = 4 * 1024 * 1024


@dataclass(slots=True)
class Handle:
    """An open ledger: its index, and where some entries begin in the data object."""

    uuid: UUID
    ledger_id: LedgerId
    data_key: str
    index: ObjectIndex
    offsets: "SortedDict[int, int]" = field(default_factory=SortedDict)
    """Entry id to byte offset; an end of an earlier read is one, so going on needs no walk."""

    def learn(self, entry_id: int, offset: int) -> None:
        """Keep where an entry begins; the oldest entries go first when there are too many."""
        self.offsets[entry_id] = offset
        if len(self.offsets) > OFFSETS_MAX:
            self.offsets.popitem(0)

    def nearest(self, entry_id: EntryId) -> tuple[BlockRange, int, int]:
        """Return the entry's block, and the last known (entry, offset) in it before it."""
        block = self.index.block_of(entry_id)
        place = self.offsets.bisect_right(entry_id) - 1
        if place >= 0:
            known, offset = self.offsets.peekitem(place)
            if known >= block.first_entry_id:
                return block, known, offset
        return block, block.first_entry_id, block.offset


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier2Limits:
    """Every bound of tier-2 reads, but for the memory of ranges."""

    handles_max: int
    index_ttl_s: int
    prefetch_ranges_max: int


class ObjectTier:
    """Tier 2 as ``source`` wants it."""

    def __init__(
        self,
        objects: ObjectStore,
        ranges: RangeCache,
        shared: SharedCache,
        limits: Tier2Limits,
        *,
        bucket: str,
    ) -> None:
        self._objects = objects
        self._ranges = ranges
        self._shared = shared
        self._limits = limits
        self._bucket = bucket
        self._handles: OrderedDict[UUID, Handle] = OrderedDict()
        self._opening: dict[UUID, asyncio.Lock] = {}
        self.index_hits = 0
        self.index_misses = 0

    async def read(
        self,
        ledger: ListedLedger,
        context: OffloadContext,
        first_entry_id: EntryId,
        budget: Budget,
    ) -> Chunk:
        """Return what follows ``first_entry_id`` in its block, within the budget."""
        handle = await self._open(ledger, context)
        sequential = first_entry_id == 0 or first_entry_id in handle.offsets
        try:
            start = await self._find(handle, first_entry_id)
            chunk, end = await self._take(handle, first_entry_id, start, budget)
        except RefusedError as error:
            if error.reason is Reason.LEDGER_NOT_FOUND:
                self._handles.pop(handle.uuid, None)
            raise
        except CorruptError as error:
            error.details.update(key=handle.data_key, ledger_id=str(handle.ledger_id))
            raise
        if sequential:
            self._ranges.prefetch(
                handle.data_key,
                end,
                ranges=self._limits.prefetch_ranges_max,
                object_len=handle.index.data_len,
            )
        return chunk

    async def _find(self, handle: Handle, entry_id: EntryId) -> int:
        """Return where the frame of ``entry_id`` begins, walking from what is nearest."""
        block, known, offset = handle.nearest(entry_id)
        block_end = block.offset + block.length
        if offset == block.offset:
            offset = await self._enter(handle, block)
        while known < entry_id:
            span = await self._frames(handle, offset, block_end, WALK_BYTES)
            starts = walk_frames(span, known)
            if len(starts) == 0:
                raise _cut(handle, offset)
            if known + len(starts) > entry_id:
                offset += int(starts[entry_id - known])
                known = entry_id
            else:
                offset += frames_end(span, starts)
                known += len(starts)
        handle.learn(entry_id, offset)
        return offset

    async def _enter(self, handle: Handle, block: BlockRange) -> int:
        """Check a block's header against the index; return where its first frame begins."""
        length = min(handle.index.data_header_len, block.length)
        span = await self._ranges.read(
            handle.data_key,
            block.offset,
            block.offset + length,
            object_len=handle.index.data_len,
        )
        header = BlockHeader.decode(span)
        if header.first_entry_id != block.first_entry_id or header.block_len != block.length:
            raise CorruptError(
                f"block {block.part_number} of {handle.data_key} is not the one in its index",
                remedy="Read another copy, or offload the ledger again",
                details={"key": handle.data_key, "offset": str(block.offset)},
            )
        return block.offset + header.header_len

    async def _take(
        self, handle: Handle, first_entry_id: EntryId, start: int, budget: Budget
    ) -> tuple[Chunk, int]:
        """Return whole frames from ``start`` on, and where they end in the object."""
        block = handle.index.block_of(first_entry_id)
        block_end = block.offset + block.length
        span = await self._frames(handle, start, block_end, budget.bytes_max)
        starts = walk_frames(span, first_entry_id)
        count = min(len(starts), budget.entries_max, block.last_entry_id - first_entry_id + 1)
        if count == 0:
            raise _cut(handle, start)
        end = frames_end(span, starts[:count])
        after = first_entry_id + count
        if after <= block.last_entry_id:
            handle.learn(after, start + end)
        elif after <= handle.index.last_entry_id:
            # So that the next read is seen to go on; its block's header is checked then.
            following = handle.index.block_of(after)
            handle.learn(after, following.offset)
        chunk = Chunk(
            ledger_id=handle.ledger_id,
            first_entry_id=first_entry_id,
            count=count,
            frames=(span[:end],),
            tier=Tier.TIER2,
        )
        return chunk, start + end

    async def _frames(
        self, handle: Handle, start: int, block_end: int, bytes_max: int
    ) -> memoryview:
        """Return bytes from ``start`` on: the first frame whole, even above ``bytes_max``."""
        if block_end - start < FRAME_HEADER_LEN:
            raise _cut(handle, start)
        object_len = handle.index.data_len
        end = min(block_end, start + max(bytes_max, FRAME_HEADER_LEN))
        span = await self._ranges.read(handle.data_key, start, end, object_len=object_len)
        frame_len = FRAME_HEADER_LEN + max(0, entry_len_at(span, 0))
        if frame_len <= len(span):
            return span
        if start + frame_len > block_end:
            raise _cut(handle, start)
        return await self._ranges.read(
            handle.data_key, start, start + frame_len, object_len=object_len
        )

    async def _open(self, ledger: ListedLedger, context: OffloadContext) -> Handle:
        uuid, location = context.uuid, context.location
        assert uuid is not None
        assert location is not None
        kept = self._handles.get(uuid)
        if kept is not None:
            self._handles.move_to_end(uuid)
            return kept
        lock = self._opening.setdefault(uuid, asyncio.Lock())
        try:
            async with lock:
                kept = self._handles.get(uuid)
                if kept is not None:
                    return kept
                self._check_location(location)
                index = await self._read_index(context, location)
                _check_index(index, ledger, location)
                handle = Handle(uuid, ledger.ledger_id, location.data_key, index)
                self._handles[uuid] = handle
                while len(self._handles) > self._limits.handles_max:
                    self._handles.popitem(last=False)
                return handle
        finally:
            if not lock.locked():
                self._opening.pop(uuid, None)

    def _check_location(self, location: Tier2Location) -> None:
        if location.bucket != self._bucket:
            raise RetryableError(
                f"object {location.data_key} lies in bucket {location.bucket}, "
                f"and this reader reads {self._bucket}",
                remedy="Start a reader whose settings name that bucket",
                details={"bucket": location.bucket},
            )

    async def _read_index(self, context: OffloadContext, location: Tier2Location) -> ObjectIndex:
        digest = context.copy.index_sha256 if context.copy is not None else b""
        cache_key = f"index:{location.bucket}:{location.index_key}"
        cached = await self._shared.get(cache_key) if digest else None
        if cached is not None and hashlib.sha256(cached).digest() == digest:
            self.index_hits += 1
            return ObjectIndex.decode(cached)
        self.index_misses += 1
        found = await self._objects.get(location.index_key)
        if found is None:
            raise RefusedError(
                f"index object {location.index_key} is not there (any more)",
                reason=Reason.LEDGER_NOT_FOUND,
                remedy="The ledger is looked up again",
                details={"key": location.index_key},
            )
        info, data = found
        check_object_metadata(info.metadata, ObjectRole.INDEX, key=location.index_key)
        if digest and hashlib.sha256(data).digest() != digest:
            raise CorruptError(
                f"index object {location.index_key} is not the one that was written",
                remedy="Read another copy, or offload the ledger again",
                details={"key": location.index_key},
            )
        index = ObjectIndex.decode(data)
        await self._shared.put(cache_key, data, ttl_s=self._limits.index_ttl_s)
        return index


def _check_index(index: ObjectIndex, ledger: ListedLedger, location: Tier2Location) -> None:
    if index.last_entry_id != ledger.last_entry_id:
        raise CorruptError(
            f"index object {location.index_key} ends with entry {index.last_entry_id}, "
            f"its ledger with {ledger.last_entry_id}",
            remedy="Read another copy, or offload the ledger again",
            details={"key": location.index_key},
        )


def _cut(handle: Handle, offset: int) -> CorruptError:
    return CorruptError(
        f"object {handle.data_key} has no whole entry at byte {offset}",
        remedy="Read another copy, or offload the ledger again",
        details={"key": handle.data_key, "offset": str(offset)},
    )
