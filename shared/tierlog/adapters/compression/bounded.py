"""Decompression in pieces, up to a length.

Invariant: no more than the length and one byte is ever there, whatever would come.
"""

from collections.abc import Callable
from typing import Final

PIECE_BYTES: Final = 1024 * 1024


def read_up_to(read: Callable[[int], bytes], length_max: int) -> bytes:
    """Return all that ``read`` gives; ``ValueError`` when that is more than ``length_max`` bytes.

    ``read(size)`` gives at most so many bytes, and none at the end.
    """
    pieces, left = [], length_max + 1
    while left and (piece := read(min(left, PIECE_BYTES))):
        pieces.append(piece)
        left -= len(piece)
    if not left:
        raise ValueError(f"more than {length_max} bytes")
    return b"".join(pieces)
