"""A ledger's runs as the blocks of its data object, one at a time (seeds/000, "writeToS3").

Owns the cutting and the counting. Does not own the layout (``tierlog.format.block``, or
``tierlog.format.single``), nor the upload.

Invariants:
    * Blocks tile the ledger: the first begins with entry 0, each with the entry behind the last
      one of the block before it.
    * Every block but the last is ``block_size`` long; the last is exactly as long as it must be.
    * Counts are of what was read. Where the ledger's metadata says otherwise, nothing is made
      of it: ``CorruptError``.
"""

from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from typing import Final, NoReturn, Protocol

from tierlog.format import single
from tierlog.format.block import (
    BLOCK_HEADER_LEN,
    BlockBuilder,
    block_len_for_remaining,
    entry_len_max,
)
from tierlog.format.checksum import Buffer
from tierlog.format.frame import FRAME_HEADER_LEN
from tierlog.format.grains import GrainSums
from tierlog.format.run import OFFSET_LEN, Run
from tierlog.ledger.reader import ReadHandle, closing_runs
from tierlog.model.errors import CorruptError, Reason, RefusedError
from tierlog.model.ids import EntryId, LedgerId
from tierlog.model.ledger import DIGITS_MAX, KEY_BLOCK_SIZE, LedgerMetadata, LedgerState
from tierlog.model.policy import BLOCK_SIZE_DEFAULT, BLOCK_SIZE_MAX

# Runs are received into pieces of 1 MiB; a block holds on to those that its first and its last
# run lie in as a whole.
BESIDE_BYTES: Final = 2 * 1024 * 1024
PART_NUMBER_MAX: Final = 10_000
"""S3 takes no more."""


class Filling(Protocol):
    """A block that takes runs until it is full."""

    @property
    def block_len(self) -> int: ...
    @property
    def first_entry_id(self) -> EntryId: ...
    @property
    def full(self) -> bool: ...
    @property
    def entry_count(self) -> int: ...
    @property
    def last_entry_id(self) -> EntryId: ...
    @property
    def payload_len(self) -> int: ...
    @property
    def crc32c(self) -> int: ...
    def take_whole(self, run: Run) -> bool: ...
    def take(self, run: Run, from_entry_id: int) -> int: ...
    def finish(self) -> list[Buffer]: ...


class BlockLayout(Protocol):
    """How long blocks are, and who fills them; ``first_part``: the number of the first one."""

    @property
    def first_part(self) -> int: ...
    @property
    def beside_block(self) -> int: ...
    @property
    def beside_entry(self) -> int: ...
    def block_len(self, block_size: int, *, payload_left: int, entries_left: int) -> int: ...
    def builder(self, block_len: int, first_entry_id: EntryId) -> Filling: ...


class DataObjectLayout:
    """Blocks of a data object; ``sums`` counts the bytes of all of them on the way."""

    first_part: Final = 1
    beside_block: Final = BLOCK_HEADER_LEN
    beside_entry: Final = FRAME_HEADER_LEN

    def __init__(self, sums: GrainSums | None = None) -> None:
        self._sums = sums

    def block_len(self, block_size: int, *, payload_left: int, entries_left: int) -> int:
        """Return the next block's length, known before its first byte is sent."""
        return block_len_for_remaining(
            block_size, payload_left=payload_left, entries_left=entries_left
        )

    def builder(self, block_len: int, first_entry_id: EntryId) -> Filling:
        """Return an empty block."""
        return BlockBuilder(block_len, first_entry_id, sums=self._sums)


class SingleObjectLayout:
    """Blocks behind the index of a single object."""

    first_part: Final = single.FIRST_BLOCK_PART
    beside_block: Final = single.BLOCK_HEADER_LEN
    beside_entry: Final = single.ENTRY_LEN_LEN

    def block_len(self, block_size: int, *, payload_left: int, entries_left: int) -> int:
        """Return the next block's length, known before its first byte is sent."""
        return single.block_len_for_remaining(
            block_size, payload_left=payload_left, entries_left=entries_left
        )

    def builder(self, block_len: int, first_entry_id: EntryId) -> Filling:
        """Return an empty block."""
        return single.SingleBlockBuilder(block_len, first_entry_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class FilledBlock:
    """One block, ready to be sent as a part."""

    part_number: int
    offset: int
    length: int
    first_entry_id: EntryId
    entry_count: int
    payload_len: int
    buffers: list[Buffer]
    crc32c: int

    def release(self) -> None:
        """Give its memory up, whoever still refers to it."""
        self.buffers.clear()


def check_offloadable(ledger_id: LedgerId, metadata: LedgerMetadata, layout: BlockLayout) -> None:
    """Raise ``RefusedError`` unless the ledger is sealed, has an entry, and fits one upload.

    How much padding blocks have, only reading it shows: that is counted as it is sent.
    """
    if metadata.state is not LedgerState.CLOSED:
        raise RefusedError(
            f"ledger {ledger_id} is {metadata.state.name}, and only a closed one is offloaded",
            remedy="Wait until it is rolled over, or recover it",
            details={"ledger_id": str(ledger_id)},
        )
    if metadata.last_entry_id < 0:
        raise RefusedError(
            f"ledger {ledger_id} has no entries, so that there is nothing to offload",
            remedy="Nothing to do: empty ledgers leave their stream by themselves",
            details={"ledger_id": str(ledger_id)},
        )
    block_size = block_size_of(ledger_id, metadata)
    content = metadata.length + layout.beside_entry * (metadata.last_entry_id + 1)
    last_part = layout.first_part - 1 - content // -(block_size - layout.beside_block)
    if last_part > PART_NUMBER_MAX:
        raise RefusedError(
            f"ledger {ledger_id} needs {last_part} parts or more with blocks of {block_size} "
            f"bytes, and S3 takes {PART_NUMBER_MAX}",
            remedy="It stays in tier 1; append its events anew to a stream with larger blocks",
            details={"ledger_id": str(ledger_id)},
        )


def block_size_of(ledger_id: LedgerId, metadata: LedgerMetadata) -> int:
    """Return the block size that the ledger was created with."""
    text = metadata.custom.get(KEY_BLOCK_SIZE)
    if text is None:
        return BLOCK_SIZE_DEFAULT
    # How small is too small is the store's to say: S3 takes no parts below 5 MiB but the last.
    known = text.isdigit() and len(text) <= DIGITS_MAX
    if not (known and 0 < entry_len_max(int(text)) < BLOCK_SIZE_MAX):
        raise CorruptError(
            f"ledger {ledger_id} has blocks of {text[:40]!r} bytes",
            remedy="Repair the ledger's metadata",
            details={"ledger_id": str(ledger_id)},
        )
    return int(text)


class BlockFiller:
    """Cuts one ledger into blocks; ``entry_count`` and ``payload_len`` say what was read."""

    def __init__(self, handle: ReadHandle, layout: BlockLayout, *, block_size: int) -> None:
        self._handle = handle
        self._layout = layout
        self._block_size = block_size
        self._metadata = handle.ledger_metadata
        self._offset = 0
        self._parts = 0
        self._builder: Filling | None = None
        self.entry_count = 0
        self.payload_len = 0

    def __repr__(self) -> str:
        return f"<BlockFiller ledger={self._handle.ledger_id} entries={self.entry_count}>"

    @property
    def next_memory(self) -> int:
        """About how many bytes the next block takes while it is filled and sent; 0: none comes.

        That is its own, what its runs are received with, and the pieces that its ends share.
        """
        length = self._next_len()
        if length == 0:
            return 0
        entries = self._metadata.last_entry_id + 1 - self.entry_count
        left = self._metadata.length - self.payload_len + self._layout.beside_entry * entries
        return length + OFFSET_LEN * entries * length // max(left, length) + BESIDE_BYTES

    def _next_len(self) -> int:
        """Return the next block's length, which is known before its first byte; 0: none comes."""
        entries_left = self._metadata.last_entry_id + 1 - self.entry_count
        if entries_left <= 0:
            return 0
        payload_left = self._metadata.length - self.payload_len
        if payload_left < 0:
            self._mismatch()
        return self._layout.block_len(
            self._block_size, payload_left=payload_left, entries_left=entries_left
        )

    async def blocks(self) -> AsyncGenerator[FilledBlock, None]:
        """Iterate over the ledger's blocks; the next is filled only when it is asked for."""
        ledger_id, last = self._handle.ledger_id, self._metadata.last_entry_id
        read = self._handle.read_runs(EntryId(0), last)
        async with closing_runs(read):
            async for runs in read:
                for run in runs:
                    header, builder = run.header, self._builder
                    if (
                        builder is not None
                        and header.ledger_id == ledger_id
                        and header.first_entry_id + header.count <= last
                        and builder.take_whole(run)
                    ):
                        continue  # it ends no block, as nearly all don't
                    for block in self._filled_by(run):
                        yield block
        if self._builder is not None or self.entry_count != last + 1:
            self._mismatch()
        if self.payload_len != self._metadata.length:
            self._mismatch()

    def _filled_by(self, run: Run) -> Iterator[FilledBlock]:
        """Take a run; yield each block that it fills."""
        at, last = self._checked_start(run), run.header.last_entry_id
        while at <= last:
            if self._builder is None:
                self._builder = self._new_builder(at)
            at = EntryId(self._take(self._builder, run, at))
            if self._builder.full or at > self._metadata.last_entry_id:
                block, self._builder = self._filled(self._builder), None
                yield block

    def _checked_start(self, run: Run) -> EntryId:
        builder = self._builder
        expected = self.entry_count if builder is None else builder.last_entry_id + 1
        header = run.header
        outside = header.last_entry_id > self._metadata.last_entry_id
        if header.first_entry_id != expected or header.ledger_id != self._handle.ledger_id:
            raise CorruptError(
                f"ledger {self._handle.ledger_id} gave entries {run.first_entry_id} to "
                f"{run.last_entry_id} of ledger {run.header.ledger_id} where {expected} belongs",
                remedy="Check the ledger's storage nodes; the offload is tried again",
                details={"ledger_id": str(self._handle.ledger_id)},
            )
        if outside:
            self._mismatch()
        return header.first_entry_id

    def _new_builder(self, first_entry_id: EntryId) -> Filling:
        return self._layout.builder(self._next_len(), first_entry_id)

    def _take(self, builder: Filling, run: Run, from_entry_id: EntryId) -> int:
        try:
            return builder.take(run, from_entry_id)
        except RefusedError as error:
            if error.reason is Reason.TOO_LARGE and builder.block_len < self._block_size:
                self._mismatch()
            raise

    def _filled(self, builder: Filling) -> FilledBlock:
        part_number = self._layout.first_part + self._parts
        self._parts += 1
        self.entry_count += builder.entry_count
        self.payload_len += builder.payload_len
        is_last = self.entry_count == self._metadata.last_entry_id + 1
        if not is_last and builder.block_len != self._block_size:
            self._mismatch()
        if is_last and self.payload_len != self._metadata.length:
            # Said before the last part is sent, not after.
            self._mismatch()
        buffers = builder.finish()
        block = FilledBlock(
            part_number=part_number,
            offset=self._offset,
            length=builder.block_len,
            first_entry_id=builder.first_entry_id,
            entry_count=builder.entry_count,
            payload_len=builder.payload_len,
            buffers=buffers,
            crc32c=builder.crc32c,
        )
        self._offset += builder.block_len
        return block

    def _mismatch(self) -> NoReturn:
        raise CorruptError(
            f"ledger {self._handle.ledger_id} is said to have "
            f"{self._metadata.last_entry_id + 1} entries of {self._metadata.length} bytes, but "
            f"reading it gave others ({self.entry_count} of {self.payload_len} so far)",
            remedy="Keep the local copy, and compare it with the ledger's metadata",
            details={"ledger_id": str(self._handle.ledger_id)},
        )
