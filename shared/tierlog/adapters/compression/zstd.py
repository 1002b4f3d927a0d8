"""Events as a frame of zstd (RFC 8878)."""

from typing import Final

import zstandard

from tierlog.adapters.compression.bounded import read_up_to
from tierlog.format.checksum import Buffer

WINDOW_BYTES_MIN: Final = 8 * 1024 * 1024
"""What every decoder is to support (RFC 8878, 3.1.1.1.2); a frame's own may be as large as it."""


def compress(data: bytes) -> bytes:
    """Return the frame."""
    return zstandard.ZstdCompressor().compress(data)


def decompress(data: Buffer, length_max: int) -> bytes:
    """Return what the frame holds; an error when that, or its window, is over the bound."""
    window_bytes_max = max(WINDOW_BYTES_MIN, length_max)
    decompressor = zstandard.ZstdDecompressor(max_window_size=window_bytes_max)
    with decompressor.stream_reader(data) as reader:
        return read_up_to(reader.read, length_max)
