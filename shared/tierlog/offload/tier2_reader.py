"""A ledger in the object store as a read handle (seeds/000, "Reading from S3").

Owns the way from an entry id to frames: block by binary search, then the nearest offset that is
remembered or that the side object tells, then a walk over frames in ranges; and what handles on
any layout have in common. Does not own fetching (``ranges``), nor longer caching.

Invariants:
    * With a side object, no byte is looked at whose grain was not checked against it.
    * Every frame that is walked over has the next entry id and lies in its block; anything else
      is ``CorruptError`` with the object and the byte. A walk ends, and never early in silence.
      (One thing the data object alone can't tell: a last entry's length that took in some words
      of the padding behind it. Without a side object that, and payloads, go unchecked.)
    * Reading on behind the last entry that was read fetches nothing before it. Reading a few
      entries anywhere fetches their grains, where a side object tells which these are.
    * A walk holds no more than a range (with a side object: a grain) at once, and where no side
      object tells places it has room for that. What it will walk over next is fetched as far as
      the memory keeps it, and fails nobody who does not come there.
    * An entry that is longer than there is room for is not fetched, once its header told.
    * No state is tied to one reader: any number may use a handle at once.

Retries: what turned out damaged is forgotten, so that the next try reads the bucket again. A read
that meets damage is tried once more with the grains of its first entry alone.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import nullcontext, suppress
from typing import Final, Generic, NamedTuple, NoReturn, TypeVar

import numpy as np

from tierlog.format.block import BLOCK_HEADER_LEN, PADDING, BlockHeader, padding
from tierlog.format.frame import (
    ENTRY_LEN_LEN,
    FRAME_HEADER_LEN,
    Offsets,
    entry_len_at,
    frames_end,
    walk_frames,
)
from tierlog.format.index import BlockRange, BlockTable, ObjectIndex
from tierlog.format.run import Run, cut_runs
from tierlog.ledger.reader import runs_within
from tierlog.model.errors import CorruptError, TierlogError
from tierlog.model.ids import EntryId, LedgerId
from tierlog.model.ledger import LedgerMetadata
from tierlog.model.offload import Tier2Location
from tierlog.model.scrub import REPAIR_COPY
from tierlog.offload.offsets import Note, OffsetsCache
from tierlog.offload.ranges import Ranges, Source, Walk
from tierlog.offload.side_reader import SideReader

Table = TypeVar("Table", bound=BlockTable)
NOTE_EVERY_BYTES: Final = 64 * 1024
RUNS_BYTES: Final = 4 * 1024 * 1024
# Room for one entry of any usual length, and for the grains that it lies in.
ALONE_BYTES: Final = 8 * 1024 * 1024
# So few entries are fetched with their grains alone; who wants more will go on behind them.
FEW_ENTRIES_MAX: Final = 32


class FramesRead(NamedTuple):
    """Consecutive frames of one block; ``offsets`` are from the first byte of ``frames``.

    ``place``: where in the data object they begin.
    """

    frames: memoryview
    first_entry_id: EntryId
    last_entry_id: EntryId
    offsets: Offsets
    place: int


class EntryTooLongError(Exception):
    """An entry alone is longer than whoever reads it has room for. Nothing of it was kept."""

    def __init__(self, ledger_id: LedgerId, entry_id: EntryId, frame_len: int) -> None:
        super().__init__(f"entry {ledger_id}:{entry_id} alone needs room for {frame_len} bytes")
        self.ledger_id = ledger_id
        self.entry_id = entry_id
        self.frame_len = frame_len


class Steps:
    """Where the steps of one walk end: a unit each, of which more and more are fetched at once."""

    def __init__(self, ranges: Ranges, source: Source, end: int, walk: Walk | None = None) -> None:
        self._ranges = ranges
        self._source = source
        self._end = end
        self._walk = walk
        grains = source.grains
        self._unit = ranges.limits.range_bytes if grains is None else grains.grain_len
        self._window, self._fetched = 1, 0

    def __repr__(self) -> str:
        return f"<Steps of {self._unit} bytes, fetched to {self._fetched} of {self._end}>"

    async def end(self, at: int) -> int:
        """Return where a step from ``at`` ends."""
        number = at // self._unit
        stop = (number + 1) * self._unit
        needed = min(self._end, max(stop, at + FRAME_HEADER_LEN))
        async with nullcontext() if self._walk is None else self._walk.left(at, needed):
            if stop > self._fetched:
                self._fetched = (number + self._window) * self._unit
                if self._window > 1:
                    upto = min(self._end, self._fetched)
                    # What fails here is met again where it is walked over, if it ever is.
                    with suppress(TierlogError):
                        await self._ranges.warm(self._source, at, upto, waited_for=True)
                self._window = min(2 * self._window, self._ranges.limits.in_flight_max)
        return min(self._end, stop)


class ObjectHandle(ABC, Generic[Table]):
    """``ReadHandle`` over blocks in one object: all but the way from an entry to its bytes."""

    def __init__(
        self,
        ledger_id: LedgerId,
        location: Tier2Location,
        index: Table,
        *,
        ranges: Ranges,
        offsets: OffsetsCache,
        side: SideReader | None = None,
    ) -> None:
        self._ledger_id = ledger_id
        self.location = location
        self.index = index
        self._source = Source(location.data_key, index.end, side)
        self._side = side
        self._ranges = ranges
        self._offsets = offsets

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._source.key} {len(self.index.entries)} blocks>"

    @property
    def ledger_id(self) -> LedgerId:
        return self._ledger_id

    @property
    def ledger_metadata(self) -> LedgerMetadata:
        return self.index.metadata

    @property
    def side_header_bytes(self) -> int:
        """What the header of its side object takes; 0: it has none."""
        return self._side.header.header_len if self._side is not None else 0

    async def last_add_confirmed(self) -> EntryId:
        return self.index.last_entry_id

    async def close(self) -> None:
        """Nothing is held: ranges and offsets are shared."""

    async def read_runs(
        self, first: EntryId, last: EntryId, *, bytes_max: int | None = None, wait_s: float = 0.0
    ) -> AsyncIterator[Sequence[Run]]:
        position, budget = first, bytes_max
        while position <= last and (budget is None or budget > 0):
            wanted = RUNS_BYTES if budget is None else min(RUNS_BYTES, budget)
            read = await self.read_frames(position, wanted)
            count = min(last, read.last_entry_id) - position + 1
            end = len(read.frames) if count == len(read.offsets) else int(read.offsets[count])
            times = (0, 0)
            if self._side is not None:
                times = await self._side.times_of(read.place, read.place + end)
            runs = cut_runs(
                read.frames[:end],
                read.offsets[:count],
                ledger_id=self._ledger_id,
                first_entry_id=position,
                last_add_confirmed=self.index.last_entry_id,
                owner_epoch=0,
                publish_ms_min=times[0],
                publish_ms_max=times[1],
                stripe_entries=self.ledger_metadata.stripe_entries,
            )
            if budget is None:
                yield runs
            else:
                within, budget = runs_within(runs, budget)
                yield within
            position = EntryId(runs[-1].last_entry_id + 1)

    async def entry_at_time(self, publish_ms: int) -> EntryId | None:
        """Return an entry before which all were published before that time, and not far before.

        One behind the last where all were; None where no times are known.
        """
        return None if self._side is None else await self._side.entry_at_time(publish_ms)

    @property
    def is_verified(self) -> bool:
        """Whether every byte is compared with a checksum before it is given out."""
        return self._side is not None

    async def times_of(self, start: int, end: int) -> tuple[int, int]:
        """Return the smallest and largest publish time of these bytes' entries; 0, 0: unknown."""
        return (0, 0) if self._side is None else await self._side.times_of(start, end)

    @property
    @abstractmethod
    def _block_header_len(self) -> int: ...

    @abstractmethod
    async def read_frames(
        self,
        first_entry_id: EntryId,
        bytes_max: int,
        *,
        entries_max: int | None = None,
        alone_max: int | None = None,
    ) -> FramesRead:
        """Return frames from an entry on: at least one, else up to ``bytes_max``, of one block.

        ``entries_max``: how many will be used at most; others may come along.
        ``alone_max``: an entry whose frame is longer is not fetched, but ``EntryTooLongError``.
        Raises NO_SUCH_ENTRY behind the last entry, LEDGER_NOT_FOUND when the object is gone.
        """

    def _note_in(self, block: BlockRange, entry_id: EntryId) -> Note:
        """Return the nearest known place at or before an entry; the block's start at the least."""
        note = self._offsets.floor(self._source.key, entry_id)
        if note is not None and note.entry_id >= block.first_entry_id:
            return note
        return Note(block.first_entry_id, block.offset + self._block_header_len)

    def _check_room(self, entry_id: EntryId, frame_len: int, alone_max: int | None) -> None:
        if alone_max is not None and frame_len > alone_max:
            raise EntryTooLongError(self._ledger_id, entry_id, frame_len)

    def _forget(self) -> None:
        """Forget what turned out damaged, so that the next try reads the bucket again."""
        self._ranges.forget(self._source.key)
        self._offsets.forget(self._source.key)
        if self._side is not None:
            self._side.forget()

    def _corrupt(self, what: str, at: int, cause: Exception | None = None) -> NoReturn:
        raise CorruptError(
            f"object {self._source.key}, byte {at}: {what}",
            remedy=REPAIR_COPY,
            details={"object": self._source.key, "offset": str(at)},
        ) from cause


class Tier2Handle(ObjectHandle[ObjectIndex]):
    """``ReadHandle`` over a data object, its index, and its side object where it has one."""

    @property
    def _block_header_len(self) -> int:
        return self.index.data_header_len

    async def read_frames(
        self,
        first_entry_id: EntryId,
        bytes_max: int,
        *,
        entries_max: int | None = None,
        alone_max: int | None = None,
    ) -> FramesRead:
        """Return frames from an entry on: at least one, else up to ``bytes_max``, of one block.

        ``entries_max``: how many will be used at most; others may come along.
        ``alone_max``: an entry whose frame is longer is not fetched, but ``EntryTooLongError``.
        Raises NO_SUCH_ENTRY behind the last entry, LEDGER_NOT_FOUND when the object is gone.
        """
        block = self.index.block_of(first_entry_id)
        try:
            return await self._read_frames(block, first_entry_id, bytes_max, entries_max, alone_max)
        except CorruptError:
            if self._side is None:
                raise
        # The damage may lie behind this entry: what is good is read up to its grain's end.
        bytes_max = max(bytes_max, ALONE_BYTES)
        return await self._read_frames(block, first_entry_id, bytes_max, 1, alone_max)

    async def _read_frames(
        self,
        block: BlockRange,
        first_entry_id: EntryId,
        bytes_max: int,
        entries_max: int | None,
        alone_max: int | None,
    ) -> FramesRead:
        try:
            known = await self._nearest(block, first_entry_id)
            if alone_max is not None and alone_max < bytes_max:
                await self._look_at(block, first_entry_id, known, alone_max)
            few_end = await self._few_end(block, first_entry_id, entries_max)
            if few_end is not None and known.offset < few_end <= known.offset + bytes_max:
                # At once: what is walked over and what is wanted.
                await self._ranges.read(self._source, known.offset, few_end, exact=True)
            else:
                few_end = None
            start = await self._find(block, first_entry_id, known)
            return await self._take(block, first_entry_id, start, bytes_max, few_end, alone_max)
        except CorruptError:
            self._forget()
            raise

    async def prefetch(self, first_entry_id: EntryId, bytes_max: int, *, growth: int = 1) -> int:
        """Fetch what a read from there will want, where its place is known already.

        ``growth``: by so many ranges at once. Returns how many of these bytes there are: fewer at
        the ledger's end. Of little use beyond what ``RangeLimits.kept_bytes_max`` keeps.
        """
        if not 0 <= first_entry_id <= self.index.last_entry_id:
            return 0
        block = self.index.block_of(first_entry_id)
        note = await self._nearest(block, first_entry_id)
        if note.entry_id == first_entry_id or self._side is not None:
            end = note.offset + bytes_max
            await self._ranges.warm(self._source, note.offset, end, growth=growth)
        return min(bytes_max, self._source.size - note.offset)

    async def _nearest(self, block: BlockRange, entry_id: EntryId) -> Note:
        """Return the nearest place at or before an entry, asking the side object if need be."""
        note = self._note_in(block, entry_id)
        if self._side is None or note.entry_id == entry_id:
            return note
        told = await self._side.place_before(entry_id)
        if told.entry_id <= note.entry_id:
            return note
        if not block.offset < told.offset < block.offset + block.length:
            self._corrupt(f"entry {told.entry_id} in another block, the side object says", 0)
        return told

    async def _few_end(
        self, block: BlockRange, first_entry_id: EntryId, entries_max: int | None
    ) -> int | None:
        """Return up to where few entries are worth to be fetched at once; None: not known."""
        if self._side is None or entries_max is None or entries_max > FEW_ENTRIES_MAX:
            return None
        last = min(EntryId(first_entry_id + entries_max - 1), block.last_entry_id)
        end = await self._side.likely_end(first_entry_id, last)
        return None if end is None else min(end, block.offset + block.length)

    async def _find(self, block: BlockRange, entry_id: EntryId, note: Note) -> int:
        """Return where an entry's frame begins, walking from a known place."""
        if note.entry_id == block.first_entry_id and self._side is None:
            await self._check_header(block)
        if note.entry_id == entry_id:
            return note.offset
        if self._side is not None:
            return await self._walk_to(block, entry_id, note)
        async with self._ranges.walking(self._source) as walk:
            return await self._walk_to(block, entry_id, note, walk)

    async def _look_at(
        self, block: BlockRange, entry_id: EntryId, note: Note, alone_max: int
    ) -> None:
        """Look at an entry's header alone, where more would be fetched than there is room for."""
        at = await self._find(block, entry_id, note)
        if block.offset + block.length - at >= FRAME_HEADER_LEN:
            stop = at + FRAME_HEADER_LEN
            header = await self._ranges.read(self._source, at, stop, exact=True)
            frame_len = self._frame_len(block, header, at)
            assert frame_len is not None, "a header was read"
            self._check_room(entry_id, frame_len, alone_max)

    async def _walk_to(
        self, block: BlockRange, entry_id: EntryId, note: Note, walk: Walk | None = None
    ) -> int:
        known, at = note
        steps = Steps(self._ranges, self._source, block.offset + block.length, walk)
        while known < entry_id:
            walked, at = await self._step(block, at, await steps.end(at), known)
            known = EntryId(known + walked.size)
            if known > entry_id:
                return int(walked[entry_id - known + walked.size])
            self._offsets.note(self._source.key, known, at)
        return at

    async def _step(
        self, block: BlockRange, at: int, stop: int, entry_id: EntryId
    ) -> tuple["np.ndarray[tuple[int], np.dtype[np.int64]]", int]:
        """Walk from ``at`` to ``stop``; return where frames begin, and where the last ends."""
        if at >= stop:
            self._corrupt("an entry is missing at its block's end", at)
        buffer = await self._ranges.read(self._source, at, stop)
        offsets = self._walk(buffer, entry_id, at)
        self._note_some(buffer, offsets, entry_id, at)
        if len(offsets):
            walked_len = frames_end(buffer, offsets)
            if entry_id + len(offsets) <= block.last_entry_id:
                self._frame_len(block, buffer[walked_len:], at + walked_len)
            return offsets.astype(np.int64) + at, at + walked_len
        # One frame is longer than the window, or its header is cut: its length is enough.
        frame_len = self._frame_len(block, buffer, at)
        if frame_len is None:
            header = await self._ranges.read(self._source, at, at + FRAME_HEADER_LEN)
            self._walk(header, entry_id, at)
            frame_len = self._frame_len(block, header, at)
            assert frame_len is not None
        return np.array([at], np.int64), at + frame_len

    async def _take(
        self,
        block: BlockRange,
        first_entry_id: EntryId,
        at: int,
        bytes_max: int,
        few_end: int | None,
        alone_max: int | None,
    ) -> FramesRead:
        end, exact = block.offset + block.length, few_end is not None
        wanted = at + bytes_max if few_end is None else few_end
        stop = min(end, max(wanted, at + FRAME_HEADER_LEN))
        if stop - at < FRAME_HEADER_LEN:
            self._corrupt("an entry is missing at its block's end", at)
        buffer = await self._ranges.read(self._source, at, stop, exact=exact)
        offsets = self._walk(buffer, first_entry_id, at)
        if len(offsets) == 0:
            frame_len = self._frame_len(block, buffer, at)
            assert frame_len is not None, "a header was read"
            self._check_room(first_entry_id, frame_len, alone_max)
            buffer = await self._ranges.read(self._source, at, at + frame_len, exact=exact)
            offsets = self._walk(buffer, first_entry_id, at)
            assert len(offsets) == 1, "one frame, as long as it said"
        frames_len = frames_end(buffer, offsets)
        last = EntryId(first_entry_id + len(offsets) - 1)
        if last > block.last_entry_id:
            self._corrupt(
                f"an entry lies behind {block.last_entry_id}, the last of its block",
                at + int(offsets[block.last_entry_id - first_entry_id + 1]),
            )
        if last == block.last_entry_id:
            await self._check_end(block, at + frames_len)
        else:
            # What stopped the walk must be the budget: a frame goes on there.
            self._frame_len(block, buffer[frames_len:], at + frames_len)
            self._offsets.note(self._source.key, last + 1, at + frames_len)
        self._note_some(buffer, offsets, first_entry_id, at)
        return FramesRead(buffer[:frames_len], first_entry_id, last, offsets, at)

    async def _check_end(self, block: BlockRange, at: int) -> None:
        """Check that padding, or the object's end, follows the last entry of a block."""
        end = block.offset + block.length
        if at < end and end == self._source.size:
            self._corrupt("the last entry ends before the object does", at)
        if self._side is not None:
            return
        follows = padding(min(end - at, len(PADDING)))
        if follows and await self._ranges.read(self._source, at, at + len(follows)) != follows:
            self._corrupt("no padding behind the last entry of a block", at)

    def _frame_len(self, block: BlockRange, buffer: memoryview, at: int) -> int | None:
        """Check the frame header at ``at``; return the frame's length, None when it is cut."""
        left = block.offset + block.length - at
        if left < FRAME_HEADER_LEN:
            self._corrupt("an entry is missing at its block's end", at)
        if len(buffer) < ENTRY_LEN_LEN:
            return None
        entry_len = entry_len_at(buffer, 0)
        if entry_len < 0:
            self._corrupt("padding where an entry belongs", at)
        if FRAME_HEADER_LEN + entry_len > left:
            self._corrupt(f"an entry of {entry_len} bytes crosses its block's end", at)
        return FRAME_HEADER_LEN + entry_len if len(buffer) >= FRAME_HEADER_LEN else None

    def _walk(self, buffer: memoryview, entry_id: EntryId, at: int) -> Offsets:
        try:
            return walk_frames(buffer, entry_id)
        except CorruptError as error:
            where = at + int(error.details.get("offset", "0"))
            self._corrupt(error.message.partition(", at byte")[0], where, error)

    def _note_some(
        self, buffer: memoryview, offsets: Offsets, first_entry_id: EntryId, at: int
    ) -> None:
        """Remember about one offset in ``NOTE_EVERY_BYTES`` of what was walked over."""
        if self._side is not None:
            return
        steps = np.arange(0, len(buffer), NOTE_EVERY_BYTES)
        for number in np.unique(np.searchsorted(offsets, steps)):
            if number < len(offsets):
                self._offsets.note(
                    self._source.key, first_entry_id + int(number), at + int(offsets[number])
                )

    async def _check_header(self, block: BlockRange) -> None:
        stop = block.offset + min(BLOCK_HEADER_LEN, block.length)
        raw = await self._ranges.read(self._source, block.offset, stop)
        try:
            header = BlockHeader.decode(raw)
        except CorruptError as error:
            where = block.offset + int(error.details.get("offset", "0"))
            self._corrupt(error.message.partition(" at byte")[0], where, error)
        found = (header.block_len, header.first_entry_id, header.header_len)
        if found != (block.length, block.first_entry_id, self.index.data_header_len):
            self._corrupt("another block than the index says", block.offset)
