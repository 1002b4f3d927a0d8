"""What is left of a damaged data object, grain by grain, as entries (protocols.md 3, step 9).

Owns reading good bytes out of one data object or several of the same ledger, walking over their
entries, and saying which entries are in none of them. Does not own what the grains must be (a side
object, ``tierlog.offload.vouching``), nor what becomes of the entries (``tierlog.offload.repair``).

Two attempts of one ledger have the same data object, byte for byte: blocks are cut by the
ledger's own block size. So a grain may come from whichever object has it right.

Invariants:
    * No byte is looked at whose grain has not the checksum that it was written with.
    * Pieces and losses come in the order of entries, without a gap and without an overlap.
    * A piece lies in one block, its entries begin in one grain: it has that grain's times.
    * "Not there" and "damaged" are losses; a store that does not answer raises.
    * Memory: one window of grains, and one entry.
"""

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from tierlog.format.block import BLOCK_HEADER_LEN, BlockHeader
from tierlog.format.checksum import crc32c
from tierlog.format.frame import (
    ENTRY_LEN_LEN,
    FRAME_HEADER_LEN,
    Offsets,
    entry_len_at,
    frames_end,
    walk_frames,
)
from tierlog.format.grains import GrainColumns
from tierlog.format.run import Run, cut_runs
from tierlog.ledger.reader import ReadHandle, closing_runs
from tierlog.model.errors import CorruptError, RefusedError
from tierlog.model.ids import EntryId, LedgerId
from tierlog.model.ledger import LedgerMetadata
from tierlog.model.replication import EntryRange
from tierlog.ports.objects import ObjectStore
from tierlog.ports.throttle import TokenBucket

WINDOW_BYTES: Final = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    """What a data object must be: a row for each grain, as in a side object."""

    data_len: int
    block_size: int
    entry_count: int
    grain_len: int
    columns: GrainColumns

    @property
    def grain_count(self) -> int:
        """How many grains there are."""
        return len(self.columns.crcs)


class Piece(NamedTuple):
    """Frames of consecutive entries, which begin in one grain.

    ``times``: the smallest and largest, 0, 0: unknown; ``place``: where in the data object.
    """

    frames: memoryview
    offsets: Offsets
    first_entry_id: EntryId
    times: tuple[int, int]
    place: int = 0


class Lost(NamedTuple):
    """Entries that no object has, both ends included."""

    first_entry_id: EntryId
    last_entry_id: EntryId


class GrainSource:
    """The data objects of a ledger's attempts, the best one first."""

    def __init__(
        self, objects: ObjectStore, keys: Sequence[str], layout: Layout, pace: TokenBucket
    ) -> None:
        assert keys
        self._objects = objects
        self._keys = tuple(dict.fromkeys(keys))
        self._layout = layout
        self._pace = pace
        self.bytes_read = 0

    def __repr__(self) -> str:
        return f"<GrainSource {self._keys[0]} and {len(self._keys) - 1} more>"

    async def read(self, first: int, stop: int) -> list[bytes | None]:
        """Return grains; None: no object has it as it was written."""
        found = await self._read(self._keys[0], first, stop)
        for number, grain in enumerate(found):
            if grain is None:
                found[number] = await self._elsewhere(first + number)
        return found

    async def _elsewhere(self, number: int) -> bytes | None:
        for key in self._keys[1:]:
            (grain,) = await self._read(key, number, number + 1)
            if grain is not None:
                return grain
        return None

    async def _read(self, key: str, first: int, stop: int) -> list[bytes | None]:
        layout, size = self._layout, self._layout.grain_len
        begin, end = first * size, min(stop * size, layout.data_len)
        await self._pace.take(end - begin)
        try:
            body = await self._objects.get_range(key, begin, end - begin) or b""
        except CorruptError:
            # The store itself says that it can't give these bytes.
            body = b""
        self.bytes_read += len(body)
        view, found = memoryview(body), list[bytes | None]()
        for number in range(first, stop):
            at = number * size - begin
            grain = view[at : min(at + size, end - begin)]
            good = crc32c(grain) == int(layout.columns.crcs[number])
            found.append(bytes(grain) if good and len(grain) else None)
        return found


class Salvage:
    """The entries of a ledger, out of what grains are good."""

    def __init__(self, source: GrainSource, layout: Layout) -> None:
        self._source = source
        self._layout = layout

    def __repr__(self) -> str:
        return f"<Salvage from {self._source!r}>"

    async def read(self) -> AsyncIterator[Piece | Lost]:
        """Iterate over all entries from the first on: those that are there, and those that aren't.

        Raises ``CorruptError`` where good grains make no entries.
        """
        layout, walk = self._layout, Walk(self._layout)
        step = max(1, WINDOW_BYTES // layout.grain_len)
        for first in range(0, layout.grain_count, step):
            grains = await self._source.read(first, min(first + step, layout.grain_count))
            for number, grain in enumerate(grains, first):
                if grain is None:
                    for piece in walk.pieces():
                        yield piece
                    walk.lose()
                    continue
                lost = walk.add(number, grain)
                if lost is not None:
                    yield lost
            for piece in walk.pieces():
                yield piece
        if walk.entry_id < layout.entry_count:
            yield Lost(walk.entry_id, EntryId(layout.entry_count - 1))


class Walk:
    """Where a walk over a data object is: the next entry, and the bytes from its place on."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self.entry_id = EntryId(0)
        self._at = 0
        self._kept: list[bytes] = []
        self._lost = False

    def lose(self) -> None:
        """Drop what was not walked over: its end is lost."""
        self._kept.clear()
        self._lost = True

    def add(self, number: int, grain: bytes) -> Lost | None:
        """Take the next grain; return what was lost, once it is known where entries go on."""
        if not self._lost:
            self._kept.append(grain)
            return None
        columns = self._layout.columns
        follower = EntryId(int(columns.first_entry_ids[number]))
        offset = int(columns.entry_offsets[number])
        if offset >= len(grain):
            # No entry begins in it.
            return None
        lost = Lost(self.entry_id, EntryId(follower - 1)) if follower > self.entry_id else None
        self.entry_id, self._lost = follower, False
        self._at = number * self._layout.grain_len + offset
        self._kept.append(grain[offset:])
        return lost

    def pieces(self) -> Iterator[Piece]:
        """Iterate over the whole entries that were added; keep what is behind them."""
        body = memoryview(b"".join(self._kept))
        self._kept.clear()
        while body:
            used = self._skipped(body)
            if used == 0:
                block_end = self._block_end()
                frames = body[: block_end - self._at]
                offsets = walk_frames(frames, self.entry_id)
                used = frames_end(frames, offsets)
                yield from self._cut(frames[:used], offsets)
            if used == 0:
                break
            self._at += used
            body = body[used:]
        if len(body):
            self._kept.append(bytes(body))

    def _skipped(self, body: memoryview) -> int:
        """Return how many bytes here are a block's header or its padding; 0: an entry is next."""
        size = self._layout.block_size
        if self._at % size == 0:
            if len(body) < BLOCK_HEADER_LEN:
                return 0
            header = BlockHeader.decode(body[:BLOCK_HEADER_LEN])
            length = self._block_end() - self._at
            expected = (length, self.entry_id, BLOCK_HEADER_LEN)
            if (header.block_len, header.first_entry_id, header.header_len) != expected:
                raise CorruptError(
                    f"a block of {header.block_len} bytes from entry {header.first_entry_id} on "
                    f"at byte {self._at}, where one of {length} from entry {self.entry_id} belongs",
                    remedy="Bring the object back from another copy of the bucket",
                )
            return BLOCK_HEADER_LEN
        left = self._block_end() - self._at
        padded = len(body) >= ENTRY_LEN_LEN and entry_len_at(body, 0) < 0
        return min(left, len(body)) if left < FRAME_HEADER_LEN or padded else 0

    def _block_end(self) -> int:
        size = self._layout.block_size
        return min((self._at // size + 1) * size, self._layout.data_len)

    def _cut(self, frames: memoryview, offsets: Offsets) -> Iterator[Piece]:
        """Cut frames where their entries begin in another grain."""
        if len(offsets) == 0:
            return
        grains = (self._at + offsets.astype(np.int64)) // self._layout.grain_len
        cuts = [0, *(np.flatnonzero(np.diff(grains)) + 1).tolist(), len(offsets)]
        bounds = np.append(offsets, np.uint32(len(frames))).astype(np.int64)
        for start, stop in pairwise(cuts):
            begin, end = int(bounds[start]), int(bounds[stop])
            piece = Piece(
                frames[begin:end],
                offsets[start:stop] - np.uint32(begin),
                self.entry_id,
                self._times(int(grains[start])),
                self._at + begin,
            )
            self.entry_id = EntryId(self.entry_id + stop - start)
            yield piece

    def _times(self, grain: int) -> tuple[int, int]:
        columns = self._layout.columns
        return int(columns.publish_ms_min[grain]), int(columns.publish_ms_max[grain])


class SalvageHandle:
    """``ReadHandle`` over what is left in tier 2, and over tier 1 for what is not."""

    def __init__(
        self,
        ledger_id: LedgerId,
        metadata: LedgerMetadata,
        salvage: Salvage,
        local: ReadHandle | None = None,
    ) -> None:
        self._ledger_id = ledger_id
        self._metadata = metadata
        self._salvage = salvage
        self._local = local

    def __repr__(self) -> str:
        return f"<SalvageHandle {self._ledger_id}>"

    @property
    def ledger_id(self) -> LedgerId:
        return self._ledger_id

    @property
    def ledger_metadata(self) -> LedgerMetadata:
        return self._metadata

    async def last_add_confirmed(self) -> EntryId:
        return self._metadata.last_entry_id

    async def close(self) -> None:
        """Nothing is held: the handle on tier 1 is its owner's."""

    async def read_runs(
        self, first: EntryId, last: EntryId, *, bytes_max: int | None = None, wait_s: float = 0.0
    ) -> AsyncIterator[Sequence[Run]]:
        """Read the whole ledger: nobody wants less of it."""
        del wait_s
        assert (first, last, bytes_max) == (0, self._metadata.last_entry_id, None)
        async for found in self._salvage.read():
            if isinstance(found, Piece):
                yield self._runs(found)
                continue
            async for piece in self._locally(found):
                yield self._runs(piece)

    async def missing(self) -> AsyncIterator[EntryRange]:
        """Read everything, and iterate over the entries that are nowhere."""
        async for found in self._salvage.read():
            if isinstance(found, Piece):
                continue
            at = found.first_entry_id
            try:
                async for piece in self._locally(found):
                    at = EntryId(piece.first_entry_id + len(piece.offsets))
            except (CorruptError, RefusedError):
                # That no node answers is no loss: it raises.
                pass
            if at <= found.last_entry_id:
                yield at, found.last_entry_id

    async def _locally(self, lost: Lost) -> AsyncIterator[Piece]:
        """Iterate over the local copy of these entries, or raise."""
        at, last = lost
        if self._local is not None:
            read = self._local.read_runs(at, last)
            async with closing_runs(read):
                async for runs in read:
                    for run in runs:
                        piece = _part_of(run, at, last)
                        if piece is not None:
                            at = EntryId(at + len(piece.offsets))
                            yield piece
        if at <= last:
            raise _nowhere(self._ledger_id, at, last)

    def _runs(self, piece: Piece) -> list[Run]:
        low, high = piece.times
        return cut_runs(
            piece.frames,
            piece.offsets,
            ledger_id=self._ledger_id,
            first_entry_id=piece.first_entry_id,
            last_add_confirmed=self._metadata.last_entry_id,
            owner_epoch=0,
            publish_ms_min=low,
            publish_ms_max=high,
            stripe_entries=self._metadata.stripe_entries,
        )


def _part_of(run: Run, at: EntryId, last: EntryId) -> Piece | None:
    """Return the entries of a run from ``at`` to ``last``; None where it has not the next one."""
    if not run.first_entry_id <= at <= run.last_entry_id:
        return None
    stop = EntryId(min(last, run.last_entry_id))
    frames = run.frames_between(at, stop)
    start = at - run.first_entry_id
    offsets = run.offsets[start : stop - run.first_entry_id + 1]
    times = run.header.publish_ms_min, run.header.publish_ms_max
    return Piece(frames, offsets - offsets[0], at, times)


def _nowhere(ledger_id: LedgerId, first: EntryId, last: EntryId) -> CorruptError:
    return CorruptError(
        f"entries {first} to {last} of ledger {ledger_id} are in no copy",
        remedy="Bring the damaged object back from another copy of the bucket",
        details={"ledger_id": str(ledger_id)},
    )
