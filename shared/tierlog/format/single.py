"""The layout of PIP-17's first text: one object, its index in part 1 (seeds/001).

The index, part 1 of the upload:

    offset  size  field
         0     4  index_magic_word      DE 47 DE 04
         4     4  index_len             the whole part, its padding included
         8     4  index_entry_count     blocks
        12     4  segment_metadata_len
        16     …  segment_metadata      LedgerMetadataFormat (tierlog.format.ledger_metadata)
         …     …  mappings              index_entry_count x
               8    first_entry_id      of the block
               4    block               the number of its part, from 2 on
               8    offset              of the block, from the start of the object
         …     …  padding               DE AD 12 34 over and over, up to index_len

A block, each a part from 2 on; block number n begins at index_len + (n - 2) x block length:

    offset  size  field
         0     4  magic_word            FB DB AB 04
         4     4  block_len             the whole block: header, entries and padding
         8     4  block_entry_count
        12     8  first_entry_id
        20     …  entries               block_entry_count x
               4    entry_len
               …    entry_data          entry_len bytes
         …     …  padding               DE AD 12 34 over and over; may be cut

Integers are big-endian and signed. The text names no magic words, so that these are Tierlog's. S3
takes no part below 5 MiB but the last, so that part 1 is padded to that.

Owns the layout, and the filling of blocks. Does not own their upload.

Invariants, checked whenever an ``SingleIndex`` is made, written or read:
    * Blocks are 2, 3, 4, …; the first holds entry 0; first entry ids grow.
    * All blocks but the last have one length, the last no more.
    * The object is long enough for every entry that the ledger's metadata promises.
    * Magic words and padding are negative as lengths: neither is taken for an entry.
"""

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from struct import Struct
from typing import Final, NoReturn, Self

import numpy as np

from tierlog.format import block
from tierlog.format.checksum import Buffer, crc32c_of
from tierlog.format.frame import ENTRY_ID_LEN, ENTRY_ID_OFFSET, Offsets
from tierlog.format.index import MAPPING_LEN, BlockTable, IndexEntry, mappings_in
from tierlog.format.ledger_metadata import METADATA_LEN_MAX, decode_bare, encode_bare
from tierlog.format.run import Run
from tierlog.model.errors import CorruptError, Reason, RefusedError
from tierlog.model.ids import INT64_MAX, EntryId
from tierlog.model.ledger import LedgerMetadata, LedgerState
from tierlog.model.policy import BLOCK_SIZE_MAX, BLOCK_SIZE_MIN
from tierlog.model.scrub import REPAIR_COPY

INDEX_MAGIC: Final = 0xDE47DE04
BLOCK_MAGIC: Final = 0xFBDBAB04
PADDING: Final = bytes.fromhex("dead1234")

MAGIC_OFFSET: Final = 0
MAGIC_LEN: Final = 4
INDEX_LEN_OFFSET: Final = MAGIC_OFFSET + MAGIC_LEN
INDEX_LEN_LEN: Final = 4
COUNT_OFFSET: Final = INDEX_LEN_OFFSET + INDEX_LEN_LEN
COUNT_LEN: Final = 4
METADATA_LEN_OFFSET: Final = COUNT_OFFSET + COUNT_LEN
METADATA_LEN_LEN: Final = 4
INDEX_HEADER_LEN: Final = METADATA_LEN_OFFSET + METADATA_LEN_LEN

BLOCK_LEN_OFFSET: Final = MAGIC_OFFSET + MAGIC_LEN
BLOCK_LEN_LEN: Final = 4
ENTRY_COUNT_OFFSET: Final = BLOCK_LEN_OFFSET + BLOCK_LEN_LEN
ENTRY_COUNT_LEN: Final = 4
FIRST_ENTRY_ID_OFFSET: Final = ENTRY_COUNT_OFFSET + ENTRY_COUNT_LEN
FIRST_ENTRY_ID_LEN: Final = 8
BLOCK_HEADER_LEN: Final = FIRST_ENTRY_ID_OFFSET + FIRST_ENTRY_ID_LEN
ENTRY_LEN_LEN: Final = 4
BLOCK_LEN_MIN: Final = BLOCK_HEADER_LEN + ENTRY_LEN_LEN

INDEX_PART: Final = 1
FIRST_BLOCK_PART: Final = 2
# S3 takes 10,000 parts, and the index is one of them.
BLOCK_COUNT_MAX: Final = 9_999
INDEX_LEN_MIN: Final = BLOCK_SIZE_MIN
USED_LEN_MAX: Final = INDEX_HEADER_LEN + METADATA_LEN_MAX + MAPPING_LEN * BLOCK_COUNT_MAX
INT32_MAX: Final = 2**31 - 1

_INDEX_HEADER: Final = Struct(">Iiii")
_BLOCK_HEADER: Final = Struct(">Iiiq")
_ENTRY_LEN: Final = Struct(">i")

assert _INDEX_HEADER.size == INDEX_HEADER_LEN == 16
assert _BLOCK_HEADER.size == BLOCK_HEADER_LEN == 20
assert min(INDEX_MAGIC, BLOCK_MAGIC) >= 2**31
assert PADDING[0] >= 0x80
assert USED_LEN_MAX < INT32_MAX

padding: Final = partial(block.padding, pattern=PADDING)
bad_padding_at: Final = partial(block.bad_padding_at, pattern=PADDING)


def block_len_for_remaining(block_size: int, *, payload_left: int, entries_left: int) -> int:
    """Return the next block's length, known before its first byte is sent."""
    assert entries_left > 0, "a block without entries is never written"
    return min(block_size, BLOCK_HEADER_LEN + payload_left + ENTRY_LEN_LEN * entries_left)


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleBlockHeader:
    """What a reader must know before the first entry of a block."""

    block_len: int
    entry_count: int
    first_entry_id: EntryId

    def __post_init__(self) -> None:
        # Checked here, so that what we refuse to read, we cannot write.
        if not BLOCK_LEN_MIN <= self.block_len <= BLOCK_SIZE_MAX:
            _corrupt("block_len out of bounds", BLOCK_LEN_OFFSET, self.block_len)
        room = (self.block_len - BLOCK_HEADER_LEN) // ENTRY_LEN_LEN
        if not 1 <= self.entry_count <= room:
            _corrupt("block_entry_count out of bounds", ENTRY_COUNT_OFFSET, self.entry_count)
        if not 0 <= self.first_entry_id <= INT64_MAX - self.entry_count:
            _corrupt("first_entry_id out of bounds", FIRST_ENTRY_ID_OFFSET, self.first_entry_id)

    @property
    def last_entry_id(self) -> EntryId:
        """The id of the last entry."""
        return EntryId(self.first_entry_id + self.entry_count - 1)

    def encode(self) -> bytes:
        """Return exactly ``BLOCK_HEADER_LEN`` bytes."""
        return _BLOCK_HEADER.pack(
            BLOCK_MAGIC, self.block_len, self.entry_count, self.first_entry_id
        )

    @classmethod
    def decode(cls, buffer: Buffer) -> Self:
        """Read the header at the start of ``buffer``, or raise ``CorruptError``."""
        if len(buffer) < BLOCK_HEADER_LEN:
            _corrupt("truncated block header", MAGIC_OFFSET, len(buffer))
        magic, block_len, entry_count, first_entry_id = _BLOCK_HEADER.unpack_from(buffer)
        if magic != BLOCK_MAGIC:
            _corrupt("not a block of the single-object layout", MAGIC_OFFSET, magic)
        return cls(
            block_len=block_len, entry_count=entry_count, first_entry_id=EntryId(first_entry_id)
        )


def walk_entries(buffer: Buffer, count_max: int) -> tuple[list[int], int]:
    """Return where the whole entries at the start of ``buffer`` begin, and where the last ends.

    Stops at padding (a negative length), at an entry that the buffer cuts, and after
    ``count_max``.
    """
    starts: list[int] = []
    at, last = 0, len(buffer) - ENTRY_LEN_LEN
    unpack, keep = _ENTRY_LEN.unpack_from, starts.append
    while at <= last and len(starts) < count_max:
        (entry_len,) = unpack(buffer, at)
        if entry_len < 0 or entry_len > last - at:
            break
        keep(at)
        at += ENTRY_LEN_LEN + entry_len
    return starts, at


def entries_within(buffer: Buffer, starts: list[int], end: int) -> list[memoryview]:
    """Return the data of entries that begin at ``starts``, the last of which ends at ``end``."""
    view = memoryview(buffer)
    return [
        view[start + ENTRY_LEN_LEN : stop]
        for start, stop in zip(starts, [*starts[1:], end], strict=True)
    ]


def without_ids(frames: Buffer, offsets: Offsets) -> memoryview:
    """Return the entries of frames at ``offsets`` as this layout has them: without their ids."""
    keep = np.ones(len(frames), np.bool_)
    ids = offsets.astype(np.int64)[:, None] + np.arange(
        ENTRY_ID_OFFSET, ENTRY_ID_OFFSET + ENTRY_ID_LEN
    )
    keep[ids.ravel()] = False
    return np.frombuffer(frames, np.uint8)[keep].data


class SingleBlockBuilder(block.BlockFilling):
    """Fills one block out of runs; ``finish`` gives the buffers to send.

    Entries lose their ids, so that they are copied, once.
    """

    def __init__(self, block_len: int, first_entry_id: int) -> None:
        super().__init__(block_len, first_entry_id, header_len=BLOCK_HEADER_LEN)
        self._entries_len = 0

    @property
    def payload_len(self) -> int:
        """Bytes of entry data taken."""
        return self._entries_len - ENTRY_LEN_LEN * self.entry_count

    def take_whole(self, run: Run) -> bool:
        """Take all of the run that comes next if another entry may follow it; say whether."""
        header = run.header
        length = header.frames_len - ENTRY_ID_LEN * header.count
        if header.first_entry_id != self._next or length + ENTRY_LEN_LEN > self._room:
            return False
        self._add(run.frames, run.offsets)
        return True

    def take(self, run: Run, from_entry_id: int) -> int:
        """Take what fits of ``run`` from an entry on; return the first entry not taken."""
        assert not self._full
        assert from_entry_id == self._next, "entries come in sequence"
        assert run.header.first_entry_id <= from_entry_id <= run.header.last_entry_id
        start = from_entry_id - run.header.first_entry_id
        bounds = np.append(run.offsets[start:].astype(np.int64), len(run.frames))
        begin, count = int(bounds[0]), len(bounds) - 1
        lens = bounds[1:] - begin - ENTRY_ID_LEN * np.arange(1, count + 1)
        fits = int(np.searchsorted(lens, self._room, "right"))
        self._full = fits < count
        if fits:
            frames = run.frames[begin : int(bounds[fits])]
            self._add(frames, (bounds[:fits] - begin).astype(np.uint32))
        elif self.entry_count == 0:
            raise RefusedError(
                f"entry {from_entry_id} of ledger {run.header.ledger_id} is longer than the "
                f"{self.block_len - BLOCK_LEN_MIN} bytes that a block has for it",
                reason=Reason.TOO_LARGE,
                remedy="Offload the ledger with the block size that it was created with",
            )
        self._full |= self._room < ENTRY_LEN_LEN
        return self._next

    def _add(self, frames: memoryview, offsets: Offsets) -> None:
        entries = without_ids(frames, offsets)
        self._buffers.append(entries)
        self._entries_len += len(entries)
        self._room -= len(entries)
        self._next += len(offsets)

    def finish(self) -> list[Buffer]:
        """Return header, entries and padding: exactly ``block_len`` bytes."""
        header = SingleBlockHeader(
            block_len=self.block_len,
            entry_count=self.entry_count,
            first_entry_id=self.first_entry_id,
        )
        buffers: list[Buffer] = [header.encode(), *self._buffers]
        if self._room:
            buffers.append(padding(self._room))
        assert sum(map(len, buffers)) == self.block_len
        self._crc = crc32c_of(buffers)
        self._buffers = []
        return buffers


@dataclass(frozen=True, slots=True, eq=False)
class SingleBlock:
    """A whole block as it was read: its entries, in place."""

    header: SingleBlockHeader
    entries: list[memoryview]
    padding_len: int

    @property
    def payload_len(self) -> int:
        """Bytes of entry data."""
        return sum(map(len, self.entries))

    @classmethod
    def decode(cls, buffer: Buffer) -> Self:
        """Read the block that is exactly ``buffer``; everything but payloads is checked."""
        header = SingleBlockHeader.decode(buffer)
        if len(buffer) != header.block_len:
            _corrupt(f"block of {header.block_len} bytes cut or followed", 0, len(buffer))
        body = memoryview(buffer)[BLOCK_HEADER_LEN:]
        starts, end = walk_entries(body, header.entry_count)
        if len(starts) != header.entry_count:
            at = BLOCK_HEADER_LEN + end
            _corrupt(f"block of {header.entry_count} entries ends early", at, len(starts))
        bad = bad_padding_at(body[end:])
        if bad is not None:
            _corrupt("bytes behind the last entry are not padding", BLOCK_HEADER_LEN + end, bad)
        return cls(header, entries_within(body, starts, end), len(body) - end)


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleIndex(BlockTable):
    """The index of a single object as a value; ``object_len`` is the object's whole length."""

    object_len: int
    index_len: int

    @property
    def end(self) -> int:
        return self.object_len

    @property
    def used_len(self) -> int:
        """The bytes of part 1 that say something; padding follows them."""
        return INDEX_HEADER_LEN + len(self.metadata_raw) + MAPPING_LEN * len(self.entries)

    def encode_used(self) -> bytes:
        """Return part 1 without its padding."""
        header = _INDEX_HEADER.pack(
            INDEX_MAGIC, self.index_len, len(self.entries), len(self.metadata_raw)
        )
        encoded = self._encode(header)
        assert len(encoded) == self.used_len
        return encoded

    def encode(self) -> bytes:
        """Return part 1, ``index_len`` bytes."""
        return self.encode_used() + padding(self.index_len - self.used_len)

    @classmethod
    def decode(cls, buffer: Buffer, object_len: int) -> Self:
        """Read the index at the start of ``buffer``, or raise ``CorruptError``.

        What lies behind ``used_len_at`` is not looked at.
        """
        used_len = used_len_at(buffer)
        if len(buffer) < used_len:
            _corrupt("truncated index", MAGIC_OFFSET, len(buffer))
        _, index_len, count, metadata_len = _INDEX_HEADER.unpack_from(buffer)
        mappings_offset = INDEX_HEADER_LEN + metadata_len
        raw = bytes(buffer[INDEX_HEADER_LEN:mappings_offset])
        entries = mappings_in(buffer[mappings_offset:used_len])
        assert len(entries) == count
        return cls(
            object_len=object_len,
            index_len=index_len,
            metadata=decode_bare(raw),
            metadata_raw=raw,
            entries=entries,
        )

    def _check_blocks(self) -> None:
        at, count = INDEX_HEADER_LEN + len(self.metadata_raw), len(self.entries)
        if not 1 <= count <= BLOCK_COUNT_MAX:
            _corrupt("index of so many blocks", COUNT_OFFSET, count)
        if not self.used_len <= self.index_len <= INT32_MAX:
            _corrupt("index_len out of bounds", INDEX_LEN_OFFSET, self.index_len)
        if not self.index_len + BLOCK_LEN_MIN <= self.object_len <= INT64_MAX:
            _corrupt("object too short for its index", INDEX_LEN_OFFSET, self.object_len)
        first, size = self.entries[0], self.block_size
        if (first.first_entry_id, first.offset) != (0, self.index_len):
            _corrupt(f"first block with entry {first.first_entry_id}", at, first.offset)
        if not BLOCK_LEN_MIN <= size <= BLOCK_SIZE_MAX:
            _corrupt("blocks of another length than can be", at, size)
        for number, entry in enumerate(self.entries):
            if entry.part_number != FIRST_BLOCK_PART + number:
                _corrupt(f"block in place {number}", at, entry.part_number)
            if entry.offset != self.index_len + number * size:
                _corrupt(f"offset of a block, which are {size} bytes each", at, entry.offset)
            at += MAPPING_LEN
        last_len = self.object_len - self.entries[-1].offset
        if not BLOCK_LEN_MIN <= last_len <= size:
            _corrupt(f"last block, others are {size} bytes", at - MAPPING_LEN, last_len)

    def _check_ledger(self) -> None:
        at, ledger = INDEX_HEADER_LEN + len(self.metadata_raw), self.metadata
        if ledger.state is not LedgerState.CLOSED:
            _corrupt(f"ledger that is {ledger.state.name}", INDEX_HEADER_LEN, ledger.state.value)
        firsts = [one.first_entry_id for one in self.entries]
        if any(left >= right for left, right in pairwise([*firsts, ledger.last_entry_id + 1])):
            _corrupt("entry ids that do not grow", at, ledger.last_entry_id)
        needed = len(firsts) * BLOCK_HEADER_LEN + ledger.length
        needed += ENTRY_LEN_LEN * (ledger.last_entry_id + 1)
        blocks_len = self.object_len - self.index_len
        if blocks_len < needed or (len(firsts) == 1 and blocks_len != needed):
            _corrupt(f"blocks for entries that need {needed} bytes", INDEX_LEN_OFFSET, blocks_len)


def index_of(
    metadata: LedgerMetadata,
    firsts: list[tuple[EntryId, int]],
    *,
    blocks_len: int,
    index_len_min: int = INDEX_LEN_MIN,
) -> SingleIndex:
    """Return the index of blocks that begin with these entries, so far behind the first block."""
    raw = encode_bare(metadata)
    used = INDEX_HEADER_LEN + len(raw) + MAPPING_LEN * len(firsts)
    index_len = max(used, index_len_min)
    return SingleIndex(
        object_len=index_len + blocks_len,
        index_len=index_len,
        metadata=metadata,
        metadata_raw=raw,
        entries=tuple(
            IndexEntry(
                first_entry_id=first,
                part_number=FIRST_BLOCK_PART + number,
                offset=index_len + offset,
            )
            for number, (first, offset) in enumerate(firsts)
        ),
    )


def used_len_at(buffer: Buffer) -> int:
    """Return how many bytes of part 1 say something, from its first ones."""
    if len(buffer) < INDEX_HEADER_LEN:
        _corrupt("truncated index header", MAGIC_OFFSET, len(buffer))
    magic, index_len, count, metadata_len = _INDEX_HEADER.unpack_from(buffer)
    if magic != INDEX_MAGIC:
        _corrupt("not the index of a single object", MAGIC_OFFSET, magic)
    # Lengths before anything is made of them.
    if not 1 <= count <= BLOCK_COUNT_MAX:
        _corrupt("index of so many blocks", COUNT_OFFSET, count)
    if not 1 <= metadata_len <= METADATA_LEN_MAX:
        _corrupt("ledger metadata of so many bytes", METADATA_LEN_OFFSET, metadata_len)
    used_len: int = INDEX_HEADER_LEN + metadata_len + MAPPING_LEN * count
    if index_len < used_len:
        _corrupt(f"index_len where {used_len} bytes are needed", INDEX_LEN_OFFSET, index_len)
    return used_len


def _corrupt(message: str, offset: int, found: int) -> NoReturn:
    raise CorruptError(
        f"{message}: found {found} at byte {offset}",
        remedy=REPAIR_COPY,
        details={"offset": str(offset), "found": str(found)},
    )
