"""Which compressed events this process can read and write: those whose library is installed."""

import contextlib
from collections.abc import Mapping
from functools import cache

from tierlog.format.entry import Codec, Compress, Decompress, Packing
from tierlog.model.errors import RefusedError


@cache
def packings() -> Mapping[Codec, Packing]:
    """Return what compresses and decompresses events, by codec."""
    found: list[tuple[Codec, Compress, Decompress]] = []
    with contextlib.suppress(ModuleNotFoundError):
        from tierlog.adapters.compression import zstd

        found.append((Codec.ZSTD, zstd.compress, zstd.decompress))
    with contextlib.suppress(ModuleNotFoundError):
        from tierlog.adapters.compression import lz4_frames

        found.append((Codec.LZ4, lz4_frames.compress, lz4_frames.decompress))
    return {one[0]: Packing(codec=one[0], compress=one[1], decompress=one[2]) for one in found}


def decompressors() -> Mapping[Codec, Decompress]:
    """Return what decompresses events, by codec."""
    return {codec: one.decompress for codec, one in packings().items()}


def packing_of(name: str) -> Packing | None:
    """Return how events are compressed, by the codec's name; None: they are not."""
    names = {codec.name.lower(): codec for codec in Codec}
    if name not in names:
        raise RefusedError(
            f"{name!r} is no compression of events", remedy=f"Name one of: {', '.join(names)}"
        )
    codec = names[name]
    if codec is Codec.NONE:
        return None
    if codec not in packings():
        raise RefusedError(
            f"events can't be compressed with {name} here", remedy="Install tierlog[compression]"
        )
    return packings()[codec]
