"""The streaming cache's memory: one anonymous mapping, reserved when it is made.

Owns the mapping. Its pages are the kernel's to give when they are first touched, and are given
back buffer by buffer. Nothing of it is on Python's heap.
"""

import contextlib
import mmap
from typing import Final

# Not among the names of the module: reserve addresses alone, no memory.
MAP_NORESERVE: Final = 0x4000


class Pool:
    """``length`` bytes of zeros."""

    def __init__(self, length: int, *, reserve: bool = True) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self.map = mmap.mmap(-1, length, flags=flags if reserve else flags | MAP_NORESERVE)
        if hasattr(mmap, "MADV_HUGEPAGE"):  # a buffer is as long as a huge page
            with contextlib.suppress(OSError):  # a kernel without them
                self.map.madvise(mmap.MADV_HUGEPAGE)
        self.writable = memoryview(self.map)
        self.words = self.writable.cast("Q")
        self.view = self.writable.toreadonly()

    def __repr__(self) -> str:
        return f"<Pool of {len(self.map)} bytes>"

    def give_back(self, start: int, length: int) -> bool:
        """Give pages back, which are zeros from then on; or say that the machine can't."""
        if start % mmap.PAGESIZE or length % mmap.PAGESIZE or not hasattr(mmap, "MADV_DONTNEED"):
            return False
        self.map.madvise(mmap.MADV_DONTNEED, start, length)
        return True

    def close(self) -> None:
        """Give it all back; whoever still holds a view of it keeps it alive."""
        self.words.release()
        self.view.release()
        self.writable.release()
        try:
            self.map.close()
        except BufferError:  # a response that is still being sent: its last view closes the map
            return
