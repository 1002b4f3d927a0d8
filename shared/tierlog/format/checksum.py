"""CRC32C (Castagnoli), over one buffer or several, and as S3 wants it written.

Invariant: ``crc32c_of([a, b]) == crc32c_of([a + b])``, whatever the cut.
"""

from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Iterable
from typing import Final, Protocol

from crc32c import crc32c as _crc32c

from tierlog.model.errors import CorruptError

Buffer = bytes | bytearray | memoryview

CRC32C_LEN: Final = 4


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
