"""Data blocks, the unit of upload and of lookup (seeds/000, "Payload format").

    offset  size  field
         0     4  magic_word       FB DB AB CB
         4     8  header_len       128 today; readers must skip this many bytes, not 128
        12     8  block_len        whole block: header, entries and padding
        20     8  first_entry_id   entry ids inside the block grow by one from here
        28   100  zeros            up to header_len
       128     …  frames           whole ones, back to back (tierlog.format.frame)
         …     …  padding          FE DC DE AD over and over from its first byte; may be cut

Integers are big-endian and signed, as Pulsar reads them. A data object is its blocks back to
back: each but the last has the same length, and the last is exactly as long as it needs to be.

Owns the layout, and the filling of blocks with slices of runs. Does not own their upload.

Invariants:
    * ``sum(map(len, builder.finish())) == block_len``, and nothing was copied.
    * A block has at least one entry; an entry never crosses into the next block.
    * The magic word and the padding are negative as lengths: neither is taken for a frame.
"""

from dataclasses import dataclass
from struct import Struct
from typing import Final, NoReturn, Self

import numpy as np

from tierlog.format.checksum import Buffer, crc32c
from tierlog.format.frame import FRAME_HEADER_LEN, Offsets, entry_len_at, frames_end, walk_frames
from tierlog.format.grains import GrainSums
from tierlog.format.run import Run
from tierlog.model.errors import CorruptError, Reason, RefusedError
from tierlog.model.ids import INT64_MAX, EntryId
from tierlog.model.policy import BLOCK_OVERHEAD, BLOCK_SIZE_MAX, ENTRY_OVERHEAD
from tierlog.model.scrub import REPAIR_COPY

BLOCK_MAGIC: Final = 0xFBDBABCB
PADDING: Final = bytes.fromhex("fedcdead")

MAGIC_OFFSET: Final = 0
MAGIC_LEN: Final = 4
HEADER_LEN_OFFSET: Final = MAGIC_OFFSET + MAGIC_LEN
HEADER_LEN_LEN: Final = 8
BLOCK_LEN_OFFSET: Final = HEADER_LEN_OFFSET + HEADER_LEN_LEN
BLOCK_LEN_LEN: Final = 8
FIRST_ENTRY_ID_OFFSET: Final = BLOCK_LEN_OFFSET + BLOCK_LEN_LEN
FIRST_ENTRY_ID_LEN: Final = 8
ZEROS_OFFSET: Final = FIRST_ENTRY_ID_OFFSET + FIRST_ENTRY_ID_LEN
ZEROS_LEN: Final = 100
BLOCK_HEADER_LEN: Final = ZEROS_OFFSET + ZEROS_LEN

_FIXED: Final = Struct(">Iqqq")
_ZEROS: Final = bytes(ZEROS_LEN)

# The offsets above are promises to objects already in S3. Break the import, not the objects.
assert _FIXED.size == ZEROS_OFFSET == 28
assert BLOCK_HEADER_LEN == 128 == BLOCK_OVERHEAD
assert FRAME_HEADER_LEN == ENTRY_OVERHEAD
assert BLOCK_MAGIC >= 2**31
assert PADDING[0] >= 0x80


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockHeader:
    """What a reader must know before the first entry of a block."""

    block_len: int
    first_entry_id: EntryId
    header_len: int = BLOCK_HEADER_LEN

    def __post_init__(self) -> None:
        # Checked here, so that both sides of the codec enforce it: what we refuse to read,
        # we cannot write.
        if not BLOCK_HEADER_LEN <= self.header_len <= self.block_len:
            _corrupt("header_len outside its block", HEADER_LEN_OFFSET, self.header_len)
        if self.block_len > BLOCK_SIZE_MAX:
            _corrupt("block_len over its limit", BLOCK_LEN_OFFSET, self.block_len)
        if not 0 <= self.first_entry_id <= INT64_MAX:
            _corrupt("first_entry_id out of bounds", FIRST_ENTRY_ID_OFFSET, self.first_entry_id)

    def encode(self) -> bytes:
        """Return exactly ``BLOCK_HEADER_LEN`` bytes."""
        # Only this version's header is written; longer ones are read, from a later version.
        assert self.header_len == BLOCK_HEADER_LEN
        fixed = _FIXED.pack(BLOCK_MAGIC, self.header_len, self.block_len, self.first_entry_id)
        return fixed + _ZEROS

    @classmethod
    def decode(cls, buffer: Buffer) -> Self:
        """Read the header at the start of ``buffer``, or raise ``CorruptError``."""
        if len(buffer) < BLOCK_HEADER_LEN:
            _corrupt("truncated block header", MAGIC_OFFSET, len(buffer))
        magic, header_len, block_len, first_entry_id = _FIXED.unpack_from(buffer)
        if magic != BLOCK_MAGIC:
            _corrupt("not a data block", MAGIC_OFFSET, magic)
        return cls(
            header_len=header_len, block_len=block_len, first_entry_id=EntryId(first_entry_id)
        )


def entry_len_max(block_size: int) -> int:
    """Return the longest entry data that a block of ``block_size`` holds."""
    return block_size - BLOCK_HEADER_LEN - FRAME_HEADER_LEN


def block_len_for_remaining(block_size: int, *, payload_left: int, entries_left: int) -> int:
    """Return the next block's length, known before its first byte is sent."""
    assert entries_left > 0, "a block without entries is never written"
    needed = BLOCK_HEADER_LEN + payload_left + FRAME_HEADER_LEN * entries_left
    return min(block_size, needed)


def padding(length: int, pattern: bytes = PADDING) -> bytes:
    """Return ``length`` bytes of padding, from its first byte on."""
    return (pattern * (length // len(pattern) + 1))[:length]


def bad_padding_at(buffer: Buffer, pattern: bytes = PADDING) -> int | None:
    """Return where ``buffer``, which should be all padding, first is not; None: it is."""
    found = np.frombuffer(buffer, np.uint8)
    wrong = found != np.frombuffer(padding(len(found), pattern), np.uint8)
    return int(np.argmax(wrong)) if bool(wrong.any()) else None


class BlockFilling:
    """How far a block is that is being filled; what fills it, its layout knows."""

    def __init__(self, block_len: int, first_entry_id: int, *, header_len: int) -> None:
        self.block_len: Final = block_len
        self.first_entry_id: Final = EntryId(first_entry_id)
        self._buffers: list[Buffer] = []
        self._room = block_len - header_len
        self._next = first_entry_id
        self._full = False
        self._crc = 0

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.first_entry_id}-{self.last_entry_id}, "
            f"{self._room} of {self.block_len} bytes free>"
        )

    @property
    def full(self) -> bool:
        """Whether the next entry belongs into the next block."""
        return self._full

    @property
    def entry_count(self) -> int:
        """How many entries were taken."""
        return self._next - self.first_entry_id

    @property
    def last_entry_id(self) -> EntryId:
        """The last entry taken; one before the first while there is none."""
        return EntryId(self._next - 1)

    @property
    def crc32c(self) -> int:
        """The block's checksum, once it is finished."""
        return self._crc


class BlockBuilder(BlockFilling):
    """Fills one block with slices of runs; ``finish`` gives the buffers to send.

    ``sums`` counts the bytes of a whole data object on their way through its blocks, and makes
    the block's checksum out of what it counts.
    """

    def __init__(
        self, block_len: int, first_entry_id: int, *, sums: GrainSums | None = None
    ) -> None:
        header = BlockHeader(block_len=block_len, first_entry_id=EntryId(first_entry_id))
        super().__init__(block_len, first_entry_id, header_len=BLOCK_HEADER_LEN)
        self._buffers.append(header.encode())
        self._sums = sums
        self._count(self._buffers[0])
        self._frames_len = 0

    @property
    def payload_len(self) -> int:
        """Bytes of entry data taken, without frames."""
        return self._frames_len - FRAME_HEADER_LEN * self.entry_count

    @property
    def padding_len(self) -> int:
        """Bytes that ``finish`` pads."""
        return self._room

    def take_whole(self, run: Run) -> bool:
        """Take all of the run that comes next if another frame may follow it; say whether."""
        header = run.header
        frames_len = header.frames_len
        if header.first_entry_id != self._next or frames_len + FRAME_HEADER_LEN > self._room:
            return False
        self._add(run, run.frames, run.offsets, frames_len)
        self._next += header.count
        return True

    def _add(self, run: Run, frames: memoryview, offsets: Offsets, frames_len: int) -> None:
        self._buffers.append(frames)
        # Now, while the frames that were just received are in the processor's caches.
        if self._sums is None:
            self._crc = crc32c(frames, self._crc)
        else:
            header = run.header
            self._sums.add_frames(
                frames, offsets, self._next, header.publish_ms_min, header.publish_ms_max
            )
        self._frames_len += frames_len
        self._room -= frames_len

    def take(self, run: Run, from_entry_id: int) -> int:
        """Take what fits of ``run`` from an entry on; return the first entry not taken."""
        assert not self._full
        assert from_entry_id == self._next, "entries come in sequence"
        assert run.header.first_entry_id <= from_entry_id <= run.header.last_entry_id
        first, stop = run.header.first_entry_id, run.header.count
        start = from_entry_id - first
        begin = int(run.offsets[start]) if start else 0
        end = len(run.frames)
        if end - begin > self._room:
            # The last bound within the room: frames before it fit, the one from it on does not.
            stop = int(np.searchsorted(run.offsets, np.uint32(begin + self._room), "right")) - 1
            end = int(run.offsets[stop])
            self._full = True
        if end > begin:
            self._add(run, run.frames[begin:end], run.offsets[start:stop], end - begin)
        elif self.entry_count == 0:
            raise RefusedError(
                f"entry {from_entry_id} of ledger {run.header.ledger_id} is longer than "
                f"the {entry_len_max(self.block_len)} bytes that a block has for it",
                reason=Reason.TOO_LARGE,
                remedy="Offload the ledger with the block size that it was created with",
            )
        self._full |= self._room < FRAME_HEADER_LEN
        self._next = first + stop
        return self._next

    def _count(self, buffer: Buffer) -> None:
        if self._sums is None:
            self._crc = crc32c(buffer, self._crc)
        else:
            self._sums.add(buffer)

    def finish(self) -> list[Buffer]:
        """Return header, slices of runs and padding: exactly ``block_len`` bytes."""
        assert self.entry_count > 0
        # Whoever still knows the builder keeps no block alive by it.
        buffers, self._buffers = self._buffers, []
        if self._room:
            buffers.append(padding(self._room))
            self._count(buffers[-1])
        if self._sums is not None:
            self._crc = self._sums.end_part()
        assert sum(map(len, buffers)) == self.block_len
        return buffers


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A whole block as it was read: its frames, in place, and where each begins."""

    header: BlockHeader
    frames: memoryview
    offsets: Offsets
    padding_len: int

    @property
    def last_entry_id(self) -> EntryId:
        """The id of the last entry."""
        return EntryId(self.header.first_entry_id + len(self.offsets) - 1)

    @property
    def payload_len(self) -> int:
        """Bytes of entry data, without frames."""
        return len(self.frames) - FRAME_HEADER_LEN * len(self.offsets)

    @classmethod
    def decode(cls, buffer: Buffer) -> Self:
        """Read the block that is exactly ``buffer``; everything but payloads is checked."""
        header = BlockHeader.decode(buffer)
        if len(buffer) != header.block_len:
            _corrupt(f"block of {header.block_len} bytes cut or followed", 0, len(buffer))
        body = memoryview(buffer)[header.header_len :]
        offsets = walk_frames(body, header.first_entry_id)
        end = frames_end(body, offsets)
        if len(body) - end >= FRAME_HEADER_LEN and entry_len_at(body, end) >= 0:
            _corrupt("entry crosses the end of its block", header.header_len + end, end)
        if len(offsets) == 0:
            _corrupt("block without entries", header.header_len, len(body))
        bad = bad_padding_at(body[end:])
        if bad is not None:
            _corrupt("bytes behind the last entry are not padding", header.header_len + end, bad)
        return cls(header, body[:end], offsets, len(body) - end)


def _corrupt(message: str, offset: int, found: int) -> NoReturn:
    raise CorruptError(
        f"{message}: found {found} at byte {offset} of the block",
        remedy=REPAIR_COPY,
        details={"offset": str(offset), "found": str(found)},
    )
