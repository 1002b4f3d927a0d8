"""Index objects: which block of a data object holds which entry (seeds/000, "Index format").

    offset  size  field
         0     4  index_magic_word      DE 47 DE 47
         4     4  index_len             the whole index object
         8     8  data_object_length    the whole data object
        16     8  data_header_length    of each of its blocks: 128
        24     4  index_entry_count     blocks
        28     4  segment_metadata_len
        32     …  segment_metadata      LedgerMetadataFormat (tierlog.format.ledger_metadata)
         …     …  mappings              index_entry_count x
               8    first_entry_id      of the block
               4    part_number         from 1 on: the number of the part in its upload
               8    offset              of the block, from the start of the data object

Integers are big-endian and signed.

Invariants, checked whenever an ``ObjectIndex`` is made, written or read:
    * Parts are 1, 2, 3, …; the first block holds entry 0; first entry ids grow.
    * ``offset[i] == i * offset[1]``: all blocks but the last have one length, the last no more.
    * The data object is long enough for every entry that the ledger's metadata promises.
"""

from abc import ABC, abstractmethod
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from struct import Struct
from typing import Final, NoReturn, Self

from tierlog.format.block import BLOCK_HEADER_LEN
from tierlog.format.checksum import Buffer
from tierlog.format.frame import FRAME_HEADER_LEN
from tierlog.format.ledger_metadata import METADATA_LEN_MAX, decode_bare, encode_bare
from tierlog.model.errors import CorruptError, Reason, RefusedError
from tierlog.model.ids import INT64_MAX, EntryId
from tierlog.model.ledger import LedgerMetadata, LedgerState
from tierlog.model.policy import BLOCK_SIZE_MAX
from tierlog.model.scrub import REPAIR_COPY

INDEX_MAGIC: Final = 0xDE47DE47

MAGIC_OFFSET: Final = 0
MAGIC_LEN: Final = 4
INDEX_LEN_OFFSET: Final = MAGIC_OFFSET + MAGIC_LEN
INDEX_LEN_LEN: Final = 4
DATA_LEN_OFFSET: Final = INDEX_LEN_OFFSET + INDEX_LEN_LEN
DATA_LEN_LEN: Final = 8
DATA_HEADER_LEN_OFFSET: Final = DATA_LEN_OFFSET + DATA_LEN_LEN
DATA_HEADER_LEN_LEN: Final = 8
COUNT_OFFSET: Final = DATA_HEADER_LEN_OFFSET + DATA_HEADER_LEN_LEN
COUNT_LEN: Final = 4
METADATA_LEN_OFFSET: Final = COUNT_OFFSET + COUNT_LEN
METADATA_LEN_LEN: Final = 4
INDEX_HEADER_LEN: Final = METADATA_LEN_OFFSET + METADATA_LEN_LEN
MAPPING_LEN: Final = 8 + 4 + 8

# S3 takes 10,000 parts; Pulsar holds index_len in a Java int.
BLOCK_COUNT_MAX: Final = 10_000
INDEX_LEN_MAX: Final = INDEX_HEADER_LEN + METADATA_LEN_MAX + MAPPING_LEN * BLOCK_COUNT_MAX

_HEADER: Final = Struct(">Iiqqii")
_MAPPING: Final = Struct(">qiq")

assert _HEADER.size == INDEX_HEADER_LEN == 32
assert _MAPPING.size == MAPPING_LEN == 20
assert INDEX_LEN_MAX < 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexEntry:
    """Where a block begins, and with which entry."""

    first_entry_id: EntryId
    part_number: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRange:
    """A block's bytes in the data object, and its entries, both ends included."""

    part_number: int
    offset: int
    length: int
    first_entry_id: EntryId
    last_entry_id: EntryId


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTable(ABC):
    """Which block of an object holds which entry. ``metadata_raw``: what ``metadata`` came from."""

    metadata: LedgerMetadata
    entries: tuple[IndexEntry, ...]
    metadata_raw: bytes = b""

    def __post_init__(self) -> None:
        if not self.metadata_raw:
            object.__setattr__(self, "metadata_raw", encode_bare(self.metadata))
        # Checked here, so that what we refuse to read, we cannot write.
        self._check_blocks()
        self._check_ledger()

    @abstractmethod
    def _check_blocks(self) -> None: ...

    @abstractmethod
    def _check_ledger(self) -> None: ...

    @property
    @abstractmethod
    def end(self) -> int:
        """Where the last block ends, and the object with it."""

    @property
    def last_entry_id(self) -> EntryId:
        """The ledger's last entry."""
        return self.metadata.last_entry_id

    @property
    def block_size(self) -> int:
        """The length of every block but the last; of the only one, if there is only one."""
        first, *others = self.entries
        return (others[0].offset if others else self.end) - first.offset

    def block_of(self, entry_id: int) -> BlockRange:
        """Return the block that holds an entry, or raise ``RefusedError`` NO_SUCH_ENTRY."""
        if not 0 <= entry_id <= self.last_entry_id:
            raise RefusedError(
                f"there is no entry {entry_id}, the last one is {self.last_entry_id}",
                reason=Reason.NO_SUCH_ENTRY,
                remedy="Read a position that exists",
            )
        return self.block(bisect_right(self.entries, entry_id, key=_first_entry_id) - 1)

    def block(self, number: int) -> BlockRange:
        """Return the block of that number, counted from zero."""
        entry, is_last = self.entries[number], number == len(self.entries) - 1
        end = self.end if is_last else self.entries[number + 1].offset
        last = self.last_entry_id if is_last else self.entries[number + 1].first_entry_id - 1
        return BlockRange(
            part_number=entry.part_number,
            offset=entry.offset,
            length=end - entry.offset,
            first_entry_id=entry.first_entry_id,
            last_entry_id=EntryId(last),
        )

    def blocks(self) -> tuple[BlockRange, ...]:
        """Return all blocks in order."""
        return tuple(self.block(number) for number in range(len(self.entries)))

    def _encode(self, header: bytes) -> bytes:
        mappings = (
            _MAPPING.pack(one.first_entry_id, one.part_number, one.offset) for one in self.entries
        )
        return b"".join((header, self.metadata_raw, *mappings))


def mappings_in(buffer: Buffer) -> tuple[IndexEntry, ...]:
    """Return the mappings that are exactly ``buffer``."""
    return tuple(
        IndexEntry(first_entry_id=EntryId(first), part_number=part, offset=offset)
        for first, part, offset in _MAPPING.iter_unpack(buffer)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectIndex(BlockTable):
    """An index object as a value."""

    data_len: int
    data_header_len: int = BLOCK_HEADER_LEN

    @property
    def end(self) -> int:
        return self.data_len

    @property
    def index_len(self) -> int:
        """The length of the whole index object."""
        return INDEX_HEADER_LEN + len(self.metadata_raw) + MAPPING_LEN * len(self.entries)

    def encode(self) -> bytes:
        """Return the index object."""
        header = _HEADER.pack(
            INDEX_MAGIC,
            self.index_len,
            self.data_len,
            self.data_header_len,
            len(self.entries),
            len(self.metadata_raw),
        )
        encoded = self._encode(header)
        assert len(encoded) == self.index_len
        return encoded

    @classmethod
    def decode(cls, buffer: Buffer) -> Self:
        """Read the index object that is exactly ``buffer``, or raise ``CorruptError``."""
        count, metadata_len, data_len, data_header_len = _checked_header(buffer)
        mappings_offset = INDEX_HEADER_LEN + metadata_len
        raw = bytes(buffer[INDEX_HEADER_LEN:mappings_offset])
        entries = mappings_in(buffer[mappings_offset:])
        assert len(entries) == count
        return cls(
            data_len=data_len,
            data_header_len=data_header_len,
            metadata=decode_bare(raw),
            metadata_raw=raw,
            entries=entries,
        )

    def _check_blocks(self) -> None:
        at = INDEX_HEADER_LEN + len(self.metadata_raw)
        count, block_min = len(self.entries), self.data_header_len + FRAME_HEADER_LEN
        if not 1 <= count <= BLOCK_COUNT_MAX:
            _corrupt(f"{count} blocks", COUNT_OFFSET)
        if not BLOCK_HEADER_LEN <= self.data_header_len <= BLOCK_SIZE_MAX:
            _corrupt(f"block headers of {self.data_header_len} bytes", DATA_HEADER_LEN_OFFSET)
        if not block_min <= self.data_len <= INT64_MAX:
            _corrupt(f"a data object of {self.data_len} bytes", DATA_LEN_OFFSET)
        first = self.entries[0]
        if (first.first_entry_id, first.offset) != (0, 0):
            _corrupt(f"first block {first.first_entry_id} at {first.offset}", at)
        size = self.block_size
        if not block_min <= size <= BLOCK_SIZE_MAX:
            _corrupt(f"blocks of {size} bytes", at)
        for number, entry in enumerate(self.entries):
            if entry.part_number != number + 1:
                _corrupt(f"part {entry.part_number} in place {number + 1}", at)
            if entry.offset != number * size:
                _corrupt(f"block {number + 1} at {entry.offset}, blocks of {size} bytes", at)
            at += MAPPING_LEN
        last_len = self.data_len - self.entries[-1].offset
        if not block_min <= last_len <= size:
            _corrupt(f"last block of {last_len} bytes, others of {size}", DATA_LEN_OFFSET)

    def _check_ledger(self) -> None:
        at, ledger = INDEX_HEADER_LEN + len(self.metadata_raw), self.metadata
        if ledger.state is not LedgerState.CLOSED:
            _corrupt(f"a ledger that is {ledger.state.name}", INDEX_HEADER_LEN)
        firsts = [one.first_entry_id for one in self.entries]
        if any(left >= right for left, right in pairwise([*firsts, ledger.last_entry_id + 1])):
            _corrupt("entry ids that do not grow", at)
        needed = len(firsts) * self.data_header_len + ledger.length
        needed += FRAME_HEADER_LEN * (ledger.last_entry_id + 1)
        if self.data_len < needed or (len(firsts) == 1 and self.data_len != needed):
            _corrupt(
                f"a data object of {self.data_len} bytes for entries that need {needed}",
                DATA_LEN_OFFSET,
            )


def _checked_header(buffer: Buffer) -> tuple[int, int, int, int]:
    """Return count, metadata_len, data_len, data_header_len, which agree with the length."""
    if len(buffer) < INDEX_HEADER_LEN:
        _corrupt(f"{len(buffer)} bytes", MAGIC_OFFSET)
    magic, index_len, data_len, header_len, count, metadata_len = _HEADER.unpack_from(buffer)
    if magic != INDEX_MAGIC:
        _corrupt(f"magic word {magic:08x}, so it is none", MAGIC_OFFSET)
    if index_len != len(buffer) or index_len > INDEX_LEN_MAX:
        _corrupt(f"index_len {index_len} in {len(buffer)} bytes", INDEX_LEN_OFFSET)
    # Lengths before anything is made of them.
    if not 1 <= count <= BLOCK_COUNT_MAX:
        _corrupt(f"{count} blocks", COUNT_OFFSET)
    if metadata_len < 1 or INDEX_HEADER_LEN + metadata_len + MAPPING_LEN * count != index_len:
        _corrupt(f"{count} mappings and {metadata_len} bytes of metadata", METADATA_LEN_OFFSET)
    return count, metadata_len, data_len, header_len


def _first_entry_id(entry: IndexEntry) -> int:
    return entry.first_entry_id


def _corrupt(what: str, offset: int) -> NoReturn:
    raise CorruptError(
        f"index object with {what} (byte {offset})",
        remedy=REPAIR_COPY,
        details={"offset": str(offset)},
    )
