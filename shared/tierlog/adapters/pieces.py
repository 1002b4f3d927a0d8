"""Memory that is lent in pieces and used again.

Owns the pieces that wait. Does not own what is in them.

Invariants:
    * A piece is lent out again only when no view of it is left.
    * No more wait than was said; more are lent when more are wanted.
    * Pieces begin at a page's border.

Any thread may ask, and any may let go.
"""

import contextlib
import mmap
import weakref

import numpy as np

_MAPPED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


class Pieces:
    """Buffers of ``piece_bytes`` that come back by themselves, when nothing looks at them any more.

    Fresh memory costs a page fault for every 4 KiB, which is more than receiving into it does.
    What is kept stays the process's (offering it to the system by MADV_FREE, to take it back only
    if need be, costs as much as the checksums of what is received into it).

    ``huge``: of huge pages where the system has them, for a device that is given few places in
    memory at once. Where a hypervisor takes free ones back, they cost five times as much as small
    ones when they are first written.
    """

    def __init__(self, *, piece_bytes: int, kept_bytes_max: int, huge: bool = False) -> None:
        self.piece_bytes = piece_bytes
        self._kept: list[mmap.mmap] = []
        self._huge = huge and hasattr(mmap, "MADV_HUGEPAGE")
        self._kept_max = kept_bytes_max // piece_bytes

    def __repr__(self) -> str:
        return f"<Pieces {len(self._kept)} of {self._kept_max} kept>"

    @property
    def kept_bytes(self) -> int:
        """Bytes that wait to be lent."""
        return len(self._kept) * self.piece_bytes

    def lend(self) -> memoryview:
        """Return a piece, whatever its bytes are."""
        try:
            memory = self._kept.pop()
        except IndexError:
            memory = mmap.mmap(-1, self.piece_bytes, _MAPPED)
            if self._huge:
                with contextlib.suppress(OSError):  # a system without them
                    memory.madvise(mmap.MADV_HUGEPAGE)
        lent = np.frombuffer(memory, np.uint8)
        # Views of views hold on to the array, so that it goes with the last of them.
        weakref.finalize(lent, self._take_back, memory).atexit = False
        return memoryview(lent)  # type: ignore[arg-type]  # arrays are buffers

    def _take_back(self, memory: mmap.mmap) -> None:
        if len(self._kept) < self._kept_max:
            self._kept.append(memory)
