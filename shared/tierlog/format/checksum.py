"""CRC32C (Castagnoli), over one buffer or several, and as S3 wants it written.

Invariants:
    * ``crc32c_of([a, b]) == crc32c_of([a + b])``, whatever the cut.
    * ``crc32c_joined(crc32c(a), crc32c(b), len(b)) == crc32c(a + b)``, without another look at
      the bytes; ``CrcJoiner(len(b))`` says the same sooner, for many of one length.
"""

from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Iterable
from functools import lru_cache
from typing import Final, Protocol

import numpy as np
from crc32c import crc32c as _crc32c
from numpy.typing import NDArray

from tierlog.model.errors import CorruptError

Buffer = bytes | bytearray | memoryview

CRC32C_LEN: Final = 4
CRC32C_BITS: Final = 32

# The polynomial, the bit of the highest power last, as checksums have it.
_POLYNOMIAL: Final = 0x82F63B78
_ONE: Final = 1 << 31


class _Crc32c(Protocol):
    def __call__(self, buffer: Buffer, start: int = 0, /) -> int: ...


crc32c: Final[_Crc32c] = _crc32c
"""Return the CRC32C of ``buffer``; ``start`` is that of what came before it.

The library's own, since it is called for every run: a function around it would cost half as much.
"""


def crc32c_of(buffers: Iterable[Buffer]) -> int:
    """Return the CRC32C of ``buffers`` back to back, without joining them."""
    crc = 0
    for buffer in buffers:
        crc = _crc32c(buffer, crc)
    return int(crc)


def to_base64(crc: int) -> str:
    """Return ``crc`` as in ``x-amz-checksum-crc32c``: four big-endian bytes in base64."""
    return b64encode(crc.to_bytes(CRC32C_LEN, "big")).decode("ascii")


def from_base64(text: str) -> int:
    """Invert ``to_base64``, or raise ``CorruptError``."""
    try:
        raw = b64decode(text, validate=True)
    except (Base64Error, ValueError) as error:
        raise CorruptError(
            f"checksum {text[:40]!r} is not base64", remedy="Check what stands before the store"
        ) from error
    if len(raw) != CRC32C_LEN:
        raise CorruptError(
            f"checksum {text[:40]!r} is not a CRC32C", remedy="Check what stands before the store"
        )
    return int.from_bytes(raw, "big")


def crc32c_joined(first: int, second: int, second_len: int) -> int:
    """Return the checksum of two buffers back to back from the checksums of each."""
    return _times(_power_of_x(second_len), first) ^ second


class CrcJoiner:
    """Joins checksums of buffers whose second always has the same length, many at a time."""

    def __init__(self, second_len: int) -> None:
        power = _power_of_x(second_len)
        columns = [_times(power, 1 << bit) for bit in range(CRC32C_BITS)]
        self._tables = [
            np.array(_table(columns[start : start + 8]), np.uint32)
            for start in range(0, CRC32C_BITS, 8)
        ]

    def __call__(self, first: NDArray[np.uint32], second: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """Return the checksum of each pair back to back."""
        one, two, three, four = self._tables
        moved = one[first & 0xFF] ^ two[first >> 8 & 0xFF] ^ three[first >> 16 & 0xFF]
        joined: NDArray[np.uint32] = moved ^ four[first >> 24] ^ second
        return joined


def _table(columns: list[int]) -> list[int]:
    """Return what each byte gives, where ``columns`` says what each bit does."""
    table = [0]
    for column in columns:
        table += [column ^ known for known in table]
    return table


@lru_cache(maxsize=64)
def _power_of_x(byte_count: int) -> int:
    """Return x to the ``8 * byte_count``, modulo the polynomial."""
    power, square, left = _ONE, _ONE >> 8, byte_count
    while left:
        if left & 1:
            power = _times(power, square)
        square = _times(square, square)
        left >>= 1
    return power


def _times(left: int, right: int) -> int:
    """Return the product of two polynomials, modulo the polynomial."""
    product, bit = 0, _ONE
    while bit:
        if left & bit:
            product ^= right
        bit >>= 1
        right = right >> 1 ^ _POLYNOMIAL if right & 1 else right >> 1
    return product
