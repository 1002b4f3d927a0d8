"""Which compressed events this process can read and write: those whose library is installed."""

import contextlib
from collections.abc import Mapping
from functools import cache

from tierlog.format.entry import Codec, Decompress


@cache
def decompressors() -> Mapping[Codec, Decompress]:
    """Return what decompresses events, by codec."""
    found: dict[Codec, Decompress] = {}
    with contextlib.suppress(ModuleNotFoundError):
        from tierlog.adapters.compression import zstd

        found[Codec.ZSTD] = zstd.decompress
    with contextlib.suppress(ModuleNotFoundError):
        from tierlog.adapters.compression import lz4_frames

        found[Codec.LZ4] = lz4_frames.decompress
    return found
