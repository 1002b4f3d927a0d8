"""A ledger in a single object as a read handle (seeds/001, "Reading from S3").

Owns the index of such an object, from a cache or the bucket, and the way from an entry id to its
bytes: block by binary search, then from the nearest remembered offset a walk over entries, whose
ids stand nowhere and are counted. Does not own fetching (``ranges``).

Invariants:
    * A block is believed only after its header was compared with the index, and all its lengths
      were walked, once for a handle: exactly as many entries as both say end where its padding
      begins, or the object. Anything else is ``CorruptError`` with the object and the byte. So one
      flipped length gives nobody another entry under an id, which stands nowhere in this layout.
      Lengths that are spoilt after that, or several that make up for each other, may.
    * A walk holds no more than a range at once, and has room for it, but while what comes next
      waits for its pace.
    * Payloads have no checksum in this layout: only a full verification finds a flipped one.
    * No state is tied to one reader: any number may use a handle at once.

Retries: what turned out damaged is forgotten, so that the next try reads the bucket again.
"""

import asyncio
import hashlib
from bisect import bisect_right
from dataclasses import dataclass, field

import structlog

from tierlog.format import keys
from tierlog.format.frame import FRAME_HEADER_LEN, pack_entries
from tierlog.format.index import BlockRange
from tierlog.format.keys import ObjectRole
from tierlog.format.single import (
    BLOCK_HEADER_LEN,
    ENTRY_LEN_LEN,
    SingleBlockHeader,
    SingleIndex,
    bad_padding_at,
    entries_within,
    used_len_at,
    walk_entries,
)
from tierlog.model.errors import CorruptError, TierlogError
from tierlog.model.ids import EntryId, LedgerId
from tierlog.model.offload import Tier2Copy, Tier2Location
from tierlog.model.scrub import REPAIR_COPY
from tierlog.offload.index_loader import INDEX_TTL_S
from tierlog.offload.offsets import Note, OffsetsCache
from tierlog.offload.ranges import Ranges, Walk, object_gone
from tierlog.offload.tier2_reader import FramesRead, ObjectHandle, Steps
from tierlog.ports.cache import SharedCache
from tierlog.ports.objects import ObjectReads

log = structlog.get_logger()

# The first request for an index brings the mappings of three thousand blocks.
HEAD_BYTES = 64 * 1024
PADDING_CHECKED = 4


@dataclass(slots=True, eq=False)
class _BlockWalk:
    """A walk over a block's lengths: who has its turn does it for all who wait behind."""

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    error: TierlogError | None = None
    """How it ended, unless well: who waited then is told so, and who comes later begins anew."""


class SingleHandle(ObjectHandle[SingleIndex]):
    """``ReadHandle`` over a single object, which knows no times."""

    def __init__(
        self,
        ledger_id: LedgerId,
        location: Tier2Location,
        index: SingleIndex,
        *,
        ranges: Ranges,
        offsets: OffsetsCache,
    ) -> None:
        super().__init__(ledger_id, location, index, ranges=ranges, offsets=offsets)
        self._walked: set[int] = set()
        """Where the blocks begin whose lengths were walked."""
        self._walks: dict[int, _BlockWalk] = {}

    @property
    def _block_header_len(self) -> int:
        return BLOCK_HEADER_LEN

    async def prefetch(self, first_entry_id: EntryId, bytes_max: int, *, growth: int = 1) -> int:
        """Fetch what a read from there will want; see ``Tier2Handle.prefetch``."""
        if not 0 <= first_entry_id <= self.index.last_entry_id:
            return 0
        note = self._note_in(self.index.block_of(first_entry_id), first_entry_id)
        if note.entry_id == first_entry_id:
            end = note.offset + bytes_max
            await self._ranges.warm(self._source, note.offset, end, growth=growth)
        return min(bytes_max, self._source.size - note.offset)

    async def read_frames(
        self,
        first_entry_id: EntryId,
        bytes_max: int,
        *,
        entries_max: int | None = None,
        alone_max: int | None = None,
    ) -> FramesRead:
        """Return frames from an entry on: at least one, else up to ``bytes_max``, of one block.

        ``alone_max``: an entry whose frame is longer is not fetched, but ``EntryTooLongError``.
        Raises NO_SUCH_ENTRY behind the last entry, LEDGER_NOT_FOUND when the object is gone.
        """
        block = self.index.block_of(first_entry_id)
        wanted = block.last_entry_id - first_entry_id + 1
        if entries_max is not None:
            wanted = min(wanted, max(1, entries_max))
        try:
            await self._check_block(block)
            at = await self._find(block, first_entry_id)
            return await self._take(block, first_entry_id, at, bytes_max, wanted, alone_max)
        except CorruptError:
            self._forget()
            raise

    def _forget(self) -> None:
        super()._forget()
        self._walked.clear()

    async def _check_block(self, block: BlockRange) -> None:
        """Compare a block with the index, and walk all its lengths, once for all who read it."""
        if block.offset in self._walked:
            return
        walk = self._walks.setdefault(block.offset, _BlockWalk())
        # The turn first: who waits for it has no room, and is told with the first who is refused.
        async with walk.turn:
            if walk.error is not None:
                raise walk.error  # no walk each for all who waited
            if block.offset in self._walked:
                return
            try:
                await self._walk_block(block)
                self._walked.add(block.offset)
            except TierlogError as error:
                walk.error = error
                raise
            finally:
                if walk.error is not None or block.offset in self._walked:
                    self._walks.pop(block.offset, None)

    async def _walk_block(self, block: BlockRange) -> None:
        async with self._ranges.walking(self._source) as walk:
            async with walk.left(block.offset, block.offset + BLOCK_HEADER_LEN):
                pass  # for the header, too
            await self._check_header(block)
            await self._check_lengths(block, walk)

    async def _check_lengths(self, block: BlockRange, walk: Walk) -> None:
        known, at = block.first_entry_id, block.offset + BLOCK_HEADER_LEN
        steps = Steps(self._ranges, self._source, block.offset + block.length, walk)
        while known <= block.last_entry_id:
            stop = await steps.end(at)
            starts, at = await self._walk(block, at, stop, block.last_entry_id + 1 - known)
            known = EntryId(known + len(starts))
            if known <= block.last_entry_id:
                self._offsets.note(self._source.key, known, at)
        await self._check_end(block, at)

    async def _check_header(self, block: BlockRange) -> None:
        start = Note(block.first_entry_id, block.offset + BLOCK_HEADER_LEN)
        raw = await self._ranges.read(self._source, block.offset, block.offset + BLOCK_HEADER_LEN)
        try:
            header = SingleBlockHeader.decode(raw)
        except CorruptError as error:
            where = block.offset + int(error.details.get("offset", "0"))
            self._corrupt(error.message.partition(" at byte")[0], where, error)
        found = (header.block_len, header.first_entry_id, header.last_entry_id)
        if found != (block.length, block.first_entry_id, block.last_entry_id):
            self._corrupt("another block than the index says", block.offset)
        self._offsets.note(self._source.key, *start)

    async def _find(self, block: BlockRange, entry_id: EntryId) -> int:
        """Return where an entry begins, walking from a known place."""
        known, at = self._note_in(block, entry_id)
        if known == entry_id:
            return at
        async with self._ranges.walking(self._source) as walk:
            steps = Steps(self._ranges, self._source, block.offset + block.length, walk)
            while known < entry_id:
                stop = await steps.end(at)
                starts, at = await self._walk(block, at, stop, entry_id - known)
                known = EntryId(known + len(starts))
                self._offsets.note(self._source.key, known, at)
        return at

    async def _walk(
        self, block: BlockRange, at: int, stop: int, count_max: int
    ) -> tuple[list[int], int]:
        """Return where entries from ``at`` on begin, at least one, and where the last one ends."""
        if at >= stop:
            self._corrupt("an entry is missing at its block's end", at)
        buffer = await self._ranges.read(self._source, at, stop)
        starts, end = walk_entries(buffer, count_max)
        if not starts:
            return [at], at + await self._entry_len(block, at)
        return [at + start for start in starts], at + end

    async def _entry_len(self, block: BlockRange, at: int) -> int:
        """Return the length of one entry, with what stands before it, which must be there."""
        left = block.offset + block.length - at
        if left < ENTRY_LEN_LEN:
            self._corrupt("an entry is missing at its block's end", at)
        raw = await self._ranges.read(self._source, at, at + ENTRY_LEN_LEN)
        entry_len = int.from_bytes(raw, "big", signed=True)
        if entry_len < 0:
            self._corrupt("padding where an entry belongs", at)
        if ENTRY_LEN_LEN + entry_len > left:
            self._corrupt(f"an entry of {entry_len} bytes crosses its block's end", at)
        return ENTRY_LEN_LEN + entry_len

    async def _take(
        self,
        block: BlockRange,
        first_entry_id: EntryId,
        at: int,
        bytes_max: int,
        wanted: int,
        alone_max: int | None,
    ) -> FramesRead:
        stop = min(block.offset + block.length, at + max(bytes_max, ENTRY_LEN_LEN))
        if stop - at < ENTRY_LEN_LEN:
            self._corrupt("an entry is missing at its block's end", at)
        buffer = await self._ranges.read(self._source, at, stop)
        starts, end = walk_entries(buffer, wanted)
        if not starts:
            length = await self._entry_len(block, at)
            frame_len = length + FRAME_HEADER_LEN - ENTRY_LEN_LEN
            self._check_room(first_entry_id, frame_len, alone_max)
            buffer = await self._ranges.read(self._source, at, at + length)
            starts, end = [0], length
        starts, end = _fitting(starts, end, bytes_max)
        last = EntryId(first_entry_id + len(starts) - 1)
        if last == block.last_entry_id:
            await self._check_end(block, at + end)
        else:
            if len(starts) < wanted:
                # What stopped the walk must be the budget: an entry goes on there.
                await self._entry_len(block, at + end)
            self._offsets.note(self._source.key, last + 1, at + end)
        frames, offsets = pack_entries(entries_within(buffer, starts, end), first_entry_id)
        return FramesRead(memoryview(frames), first_entry_id, last, offsets, at)

    async def _check_end(self, block: BlockRange, at: int) -> None:
        """Check that padding, or the object's end, follows the last entry of a block."""
        end = block.offset + block.length
        if at < end and end == self._source.size:
            self._corrupt("the last entry ends before the object does", at)
        if at < end:
            stop = min(end, at + PADDING_CHECKED)
            if bad_padding_at(await self._ranges.read(self._source, at, stop)) is not None:
                self._corrupt("no padding behind the last entry of a block", at)


def _fitting(starts: list[int], end: int, bytes_max: int) -> tuple[list[int], int]:
    """Return what of some entries fits as frames, which are longer: at least one, and its end."""
    ends = [*starts[1:], end]
    longer = FRAME_HEADER_LEN - ENTRY_LEN_LEN
    order = range(len(ends))
    count = max(1, bisect_right(order, bytes_max, key=lambda one: ends[one] + longer * (one + 1)))
    return starts[:count], ends[count - 1]


async def load_single_index(
    objects: ObjectReads,
    location: Tier2Location,
    *,
    copy: Tier2Copy | None = None,
    cache: SharedCache | None = None,
    ttl_s: int = INDEX_TTL_S,
) -> SingleIndex:
    """Return the index of a single object, checked; of part 1 only what says something is read.

    With a digest from the ledger's context nothing else is believed; without one, no cache is.
    """
    key = location.data_key
    digest = copy.index_sha256 if copy is not None else b""
    trusted = cache if digest else None
    cache_key = single_cache_key(location)
    raw = await trusted.get(cache_key) if trusted is not None else None
    if raw is not None and copy is not None:
        if hashlib.sha256(raw).digest() == digest:
            return _decoded(raw, key, copy.data_len)
        log.warning("index.cache_refused", key=key, length=len(raw))
    info = await objects.head(key)
    if info is None:
        raise object_gone(key)
    keys.check_object_metadata(info.metadata, ObjectRole.SINGLE, key=key)
    if copy is not None and copy.data_len != info.size:
        raise _differs(key, f"has {info.size} bytes and not {copy.data_len}")
    raw = await _used_of_part_1(objects, key, info.size)
    if digest and hashlib.sha256(raw).digest() != digest:
        raise _differs(key, "has an index of another digest than the ledger's context")
    index = _decoded(raw, key, info.size)
    if trusted is not None:
        await trusted.put(cache_key, raw, ttl_s=ttl_s)
    return index


def single_cache_key(location: Tier2Location) -> str:
    """Return under which key readers share a single object's index."""
    return f"single:{location.endpoint_name}:{location.bucket}:{location.data_key}"


async def _used_of_part_1(objects: ObjectReads, key: str, size: int) -> bytes:
    raw = await _range(objects, key, 0, min(size, HEAD_BYTES))
    try:
        used_len = used_len_at(raw)
    except CorruptError as error:
        raise _named(error, key) from error
    if used_len > size:
        raise _differs(key, f"ends within its index, which needs {used_len} bytes")
    if used_len > len(raw):
        raw += await _range(objects, key, len(raw), used_len - len(raw))
    return raw[:used_len]


async def _range(objects: ObjectReads, key: str, start: int, length: int) -> bytes:
    body = await objects.get_range(key, start, length)
    if body is None:
        raise object_gone(key)
    if len(body) != length:
        raise _differs(key, f"ends at byte {start + len(body)}")
    return body


def _decoded(raw: bytes, key: str, size: int) -> SingleIndex:
    try:
        return SingleIndex.decode(raw, size)
    except CorruptError as error:
        raise _named(error, key) from error


def _named(error: CorruptError, key: str) -> CorruptError:
    return CorruptError(
        f"{key}: {error.message}", remedy=error.remedy, details={**error.details, "object": key}
    )


def _differs(key: str, what: str) -> CorruptError:
    return CorruptError(
        f"object {key} {what}",
        remedy=REPAIR_COPY,
        details={"object": key, "offset": "0"},
    )
