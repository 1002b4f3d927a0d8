"""Events as a frame of LZ4, whose window is a few megabytes at most."""

import lz4.frame

from tierlog.adapters.compression.bounded import read_up_to
from tierlog.format.checksum import Buffer


def compress(data: bytes) -> bytes:
    """Return the frame."""
    found: bytes = lz4.frame.compress(data)
    return found


def decompress(data: Buffer, length_max: int) -> bytes:
    """Return what the frame holds; an error when that is over the bound."""
    decompressor = lz4.frame.LZ4FrameDecompressor()
    source = bytes(data)

    def read(size: int) -> bytes:
        nonlocal source
        if decompressor.eof:
            return b""
        found: bytes = decompressor.decompress(source, max_length=size)
        source = b""  # it keeps what it has not used yet
        return found

    return read_up_to(read, length_max)
