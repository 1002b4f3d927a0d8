"""Where everything in the streaming cache's pool lies; pure (seeds/002, figures 2 to 4).

The pool is a row of *buffers* of ``blocks_per_buffer`` *blocks* each. The address of a block is
its number in the whole pool, 32 bits: ``buffer << block_bits | block``, so that its bytes begin
at ``address * block_len``. Block 0 of each buffer holds no data but one word of 8 bytes, in the
machine's byte order, for each block of the buffer, itself included. Address 0 is thus never an
entry's, and says "none".

An *entry* is a chain of blocks; its address is that of the last. All its blocks are full, but the
last one. A *run* is blocks beside each other in one buffer: of one entry and in its order, or free.

    word of block 0, the buffer's own
    bits    field
    0-9     next    first free block, 0: none
    32-41   run     how many blocks are free
    56      used    1; a word of all zeros is that of a buffer that was never used

    word of a used block
    bits    field
    0-31    prev    in the first block of a run: address of the block before it in the chain,
                    0: the entry begins here. 0 in all others: theirs is the address before
    32-41   run     its number in the run, from 1
    42-55   length  bytes of data in it
    56      used    1

    word of a free block
    bits    field
    0-9     next    next free block, 0: none
    10-19   back    in the first block of a run: last block of the run before it in the list,
                    0: the list begins here
    32-41   run     in the first and the last block of a run: how many blocks it has, 0 between
    56      used    0

So a chain is walked run by run, and a free run's neighbours are known from its two ends: nothing
takes time by the block but writing the words of a run, which is one copy from a template.
All words stay below 2**60, which Python holds in two digits, and C in a signed word.
``blocks.pxd`` repeats the numbers below for the compiler.
"""

from dataclasses import dataclass
from typing import Final, NamedTuple

WORD_LEN: Final = 8
BLOCK_LEN: Final = 4096
BLOCKS_PER_BUFFER: Final = 512
ADDRESSES: Final = 2**32
NO_ADDRESS: Final = 0

FIELD_MASK: Final = (1 << 10) - 1
PREV_MASK: Final = (1 << 32) - 1
BACK_SHIFT: Final = 10
RUN_SHIFT: Final = 32
LENGTH_SHIFT: Final = 42
LENGTH_MASK: Final = (1 << 14) - 1
USED: Final = 1 << 56

# What is added to a word: a block more in its run; ``back`` one block further; and what one block
# less at a run's front changes in a word that points to that and counts it.
ONE_IN_RUN: Final = 1 << RUN_SHIFT
ONE_BACK: Final = 1 << BACK_SHIFT
STEP: Final = 1 - ONE_IN_RUN

# How many free runs of a buffer are looked at for one that holds an entry whole.
LOOKS_MAX: Final = 8


class UsedBlock(NamedTuple):
    """The word of a used block, its ``prev`` made whole."""

    length: int
    prev: int
    run: int


class FreeBlock(NamedTuple):
    """The word of a free block."""

    next: int
    back: int
    run: int


class BufferHead(NamedTuple):
    """The word of block 0."""

    next: int
    free: int


def _is_power_of_two(number: int) -> bool:
    return number > 0 and not number & (number - 1)


@dataclass(frozen=True, slots=True)
class Layout:
    """The two lengths that all else follows from; powers of two."""

    block_len: int = BLOCK_LEN
    blocks_per_buffer: int = BLOCKS_PER_BUFFER

    def __post_init__(self) -> None:
        assert _is_power_of_two(self.block_len), self
        assert _is_power_of_two(self.blocks_per_buffer), self
        assert 2 <= self.blocks_per_buffer <= FIELD_MASK, self
        assert self.block_len <= LENGTH_MASK, self
        # The words of a buffer fit into its first block.
        assert self.blocks_per_buffer * WORD_LEN <= self.block_len, self

    @property
    def buffer_len(self) -> int:
        """Bytes of a buffer."""
        return self.block_len * self.blocks_per_buffer

    @property
    def data_blocks(self) -> int:
        """Blocks of a buffer that hold data: all but the first."""
        return self.blocks_per_buffer - 1

    @property
    def block_shift(self) -> int:
        """``address << block_shift`` is where a block's bytes begin."""
        return self.block_len.bit_length() - 1

    @property
    def block_bits(self) -> int:
        """``address >> block_bits`` is a block's buffer."""
        return self.blocks_per_buffer.bit_length() - 1

    @property
    def word_shift(self) -> int:
        """``buffer << word_shift`` is the number of the buffer's first word in the pool."""
        return self.block_shift + self.block_bits - 3

    @property
    def buffers_max(self) -> int:
        """How many buffers 32 bits can tell apart: 16 TiB of 4 KiB blocks."""
        return ADDRESSES >> self.block_bits

    def buffers_within(self, limit_bytes: int) -> int:
        """How many whole buffers, their metadata included, fit into a limit."""
        return min(limit_bytes // self.buffer_len, self.buffers_max)

    def address(self, buffer: int, block: int) -> int:
        """Return the address of a block."""
        assert 0 <= buffer < self.buffers_max, buffer
        assert 0 < block < self.blocks_per_buffer, block
        return buffer << self.block_bits | block

    def place(self, address: int) -> tuple[int, int]:
        """Return buffer and block of an address."""
        return address >> self.block_bits, address & (self.blocks_per_buffer - 1)

    def blocks_of(self, length: int) -> int:
        """How many blocks an entry of this length takes; an empty one takes one too."""
        return max(1, -(-length >> self.block_shift))


def read_used(word: int, address: int) -> UsedBlock:
    """Decode the word of a used block."""
    assert word & USED, f"block {address} is free"
    run = word >> RUN_SHIFT & FIELD_MASK
    prev = word & PREV_MASK if run == 1 else address - 1
    return UsedBlock(length=word >> LENGTH_SHIFT & LENGTH_MASK, prev=prev, run=run)


def read_free(word: int) -> FreeBlock:
    """Decode the word of a free block."""
    assert not word & USED
    return FreeBlock(
        next=word & FIELD_MASK,
        back=word >> BACK_SHIFT & FIELD_MASK,
        run=word >> RUN_SHIFT & FIELD_MASK,
    )


def read_head(word: int) -> BufferHead:
    """Decode the word of block 0."""
    assert word & USED
    return BufferHead(next=word & FIELD_MASK, free=word >> RUN_SHIFT & FIELD_MASK)


def used_words(layout: Layout) -> list[int]:
    """Words of the full blocks of a run, by their number in it; an entry that begins with it."""
    full = USED | layout.block_len << LENGTH_SHIFT
    return [full | run << RUN_SHIFT for run in range(layout.blocks_per_buffer)]


def free_words(layout: Layout) -> list[int]:
    """Words of a buffer's blocks between the ends of a free run: each points to the next."""
    return [(block + 1) & (layout.blocks_per_buffer - 1) for block in range(1 << layout.block_bits)]


def empty_words(layout: Layout) -> list[int]:
    """Words of a buffer all of whose blocks are free."""
    count = layout.data_blocks
    words = free_words(layout)
    words[0] = USED | count << RUN_SHIFT | 1
    words[1] |= count << RUN_SHIFT
    if count > 1:
        words[-1] |= count << RUN_SHIFT
    return words
