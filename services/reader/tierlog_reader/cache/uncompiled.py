"""What ``blocks`` is made of where it is not compiled; ``blocks.pxd`` has the same in C.

It also stands for the module ``cython``, of which nothing but ``compiled`` is asked.
"""

from mmap import mmap
from typing import TypeVar

from tierlog.format.checksum import Buffer

compiled: bool = False

T = TypeVar("T", mmap, memoryview)


def raw_bytes(whole: T) -> T:
    """Return what bytes are copied to or from; in C the address of the first."""
    return whole


def raw_words(whole: memoryview) -> memoryview:
    """Return words that are read and written one by one; in C the address of the first."""
    return whole


def copy_in(pool: mmap, at: int, source: Buffer, start: int, length: int) -> None:
    """Copy ``length`` bytes of ``source``, from ``start`` on, to ``at`` in the pool."""
    pool[at : at + length] = source[start : start + length]


def copy_out(
    pool: memoryview, at: int, target: memoryview, start: int, length: int, _step: int
) -> None:
    """Copy ``length`` bytes from ``at`` in the pool to ``start`` in ``target``.

    In C, what is ``_step`` bytes behind ``at`` is fetched as well, unless that is 0.
    """
    target[start : start + length] = pool[at : at + length]


def copy_words(words: memoryview, at: int, source: memoryview, start: int, count: int) -> None:
    """Copy ``count`` words of a template, from ``start`` on, to ``at``."""
    words[at : at + count] = source[start : start + count]
