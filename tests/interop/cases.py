"""Ledgers around the edges of the block format, drawn from a seed.

Owns which sizes of entries and of blocks are tried. Every draw has each gap of ``GAPS`` once
before a block's end, so that the padding, an entry's header and its last byte are cut everywhere.
Does not own what is done with them.

Invariants:
    * No entry is longer than a block holds.
    * A ledger of more than one block has blocks of at least 5 MiB, which S3 demands of parts.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Final

from tierlog.format.block import BLOCK_HEADER_LEN, entry_len_max
from tierlog.format.frame import FRAME_HEADER_LEN
from tierlog.model.policy import MIB

PART_MIN: Final = 5 * MIB
# Above: so many bytes are left in a block. Below: an entry is so many bytes too long for it.
GAPS: Final = range(-FRAME_HEADER_LEN - 1, FRAME_HEADER_LEN + 2)
GAPS_A_LEDGER: Final = 3
LARGE: Final = 400_000
TINY_BYTES: Final = 250_000
READ_SINGLY: Final = 25


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One ledger."""

    name: str
    block_size: int
    sizes: tuple[int, ...]

    @property
    def pairs(self) -> list[list[int]]:
        """The sizes as pairs of how many and how long."""
        return [[len(list(same)), size] for size, same in groupby(self.sizes)]

    def payload(self, rng: random.Random) -> tuple[bytes, list[bytes]]:
        """Draw the bytes: all of them, and each entry's."""
        whole, ends = rng.randbytes(sum(self.sizes)), [0]
        for size in self.sizes:
            ends.append(ends[-1] + size)
        return whole, [whole[start:end] for start, end in pairwise(ends)]

    def singly(self, rng: random.Random) -> list[int]:
        """Draw entries to read one by one: the first, the last, and some between."""
        last = len(self.sizes) - 1
        return [0, last, *(rng.randint(0, last) for _ in range(READ_SINGLY)), 0]


def cases(seed: int) -> list[Case]:
    """Return the ledgers of a seed."""
    rng = random.Random(seed)
    small, odd = rng.randint(200, 64 * 1024), PART_MIN + rng.randrange(1, MIB, 2)
    drawn = [
        Case(name="one-empty-entry", block_size=small, sizes=(0,)),
        Case(name="empty-ones-and-a-byte", block_size=small, sizes=(0, 0, 1, 0)),
        Case(name="one-byte", block_size=small, sizes=(1,)),
        Case(name="one-entry-fills-its-block", block_size=small, sizes=(entry_len_max(small),)),
        Case(name="one-byte-is-left", block_size=small, sizes=(entry_len_max(small) - 1,)),
        _filled(rng, small),
        _each_fills_a_block(rng, odd, left=0),
        _each_fills_a_block(rng, odd, left=1),
        _tiny(rng),
        _any(rng, odd),
        _any(rng, PART_MIN),
    ]
    gaps = list(GAPS)
    rng.shuffle(gaps)
    for start in range(0, len(gaps), GAPS_A_LEDGER):
        block_size = rng.choice((PART_MIN, odd))
        drawn.append(_gaps(rng, block_size, gaps[start : start + GAPS_A_LEDGER]))
    return drawn


def _filled(rng: random.Random, block_size: int) -> Case:
    """Draw entries that fill one small block to its last byte."""
    sizes, left = [], block_size - BLOCK_HEADER_LEN
    while left > 2 * FRAME_HEADER_LEN:
        size = rng.randint(0, min(left // 4, left - 2 * FRAME_HEADER_LEN))
        sizes.append(size)
        left -= FRAME_HEADER_LEN + size
    sizes.append(left - FRAME_HEADER_LEN)
    return Case(name="many-fill-their-block", block_size=block_size, sizes=tuple(sizes))


def _each_fills_a_block(rng: random.Random, block_size: int, *, left: int) -> Case:
    sizes = [entry_len_max(block_size) - left] * 2 + [rng.choice((0, 1, 1000))]
    return Case(name=f"each-leaves-{left}", block_size=block_size, sizes=tuple(sizes))


def _tiny(rng: random.Random) -> Case:
    """Draw entries of next to nothing on both sides of a block's end, behind a large one."""
    count = 2 * TINY_BYTES // FRAME_HEADER_LEN
    tiny = rng.choices((0, 1, 2, 3), weights=(4, 3, 2, 1), k=count)
    return Case(name="tiny-entries", block_size=PART_MIN, sizes=(PART_MIN - TINY_BYTES, *tiny))


def _any(rng: random.Random, block_size: int) -> Case:
    """Draw three to four blocks of entries of any size."""
    sizes, left = [], rng.randint(2 * block_size, 3 * block_size)
    while left > 0:
        sizes.append(rng.choice((0, 1, 100, rng.randint(0, 5000), rng.randint(0, LARGE))))
        left -= FRAME_HEADER_LEN + sizes[-1]
    return Case(name=f"any-size-in-{block_size}", block_size=block_size, sizes=tuple(sizes))


def _gaps(rng: random.Random, block_size: int, gaps: list[int]) -> Case:
    """Draw blocks whose ends have these gaps, or are overrun by as much."""
    sizes: list[int] = []
    carried = 0  # the frame that did not fit into the block before
    for gap in gaps:
        left = block_size - BLOCK_HEADER_LEN - carried
        while left > LARGE:
            sizes.append(rng.choice((0, 5, 70, rng.randint(0, 3000), rng.randint(0, LARGE // 8))))
            left -= FRAME_HEADER_LEN + sizes[-1]
        sizes.append(left - gap - FRAME_HEADER_LEN)
        if gap >= FRAME_HEADER_LEN:
            sizes.append(gap)  # does not fit, as an empty one would
        fits = 0 <= gap < FRAME_HEADER_LEN
        carried = 0 if fits else FRAME_HEADER_LEN + sizes[-1]
    sizes.append(rng.choice((0, 0, 1, 2, 500)))
    text = "_".join(f"{gap:+d}" for gap in gaps)
    return Case(name=f"gaps{text}", block_size=block_size, sizes=tuple(sizes))
