"""The body of an upload: buffers that lie anywhere, sent without a copy of the whole.

The HTTP library takes any object with ``read``, ``__len__``, ``seek``, ``tell`` and asynchronous
iteration for a body, and sends what iteration gives. That is duck typing inside a library that
is pinned for it; tests hold it fast (content, checksum, replay after a cut connection).

Invariants:
    * Iteration starts at the first byte, however often: a request that is sent again is whole.
    * No chunk is larger than ``CHUNK_BYTES``: the event loop copies what a socket doesn't take.
    * Buffers that are smaller are joined: a chunk costs more on its way through the libraries
      than a copy of its bytes.
"""

import io
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Final

from tierlog.ports.files import Buffer

CHUNK_BYTES: Final = 512 * 1024
JOIN_BELOW_BYTES: Final = 128 * 1024

Pace = Callable[[int], Awaitable[None]]


class BuffersBody:
    """``buffers`` back to back, as a file that the S3 library can send."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self.pace: Pace | None = None
        """Waits before so many bytes are given."""
        self._buffers = buffers
        self._len = sum(len(buffer) for buffer in buffers)
        self._at = 0

    def __repr__(self) -> str:
        return f"BuffersBody(buffers={len(self._buffers)}, len={self._len})"

    def __len__(self) -> int:
        return self._len

    def __bool__(self) -> bool:
        return True

    def tell(self) -> int:
        """Return where ``read`` goes on."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to ``offset``; iteration is not concerned."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._len}[whence]
        self._at = min(max(base + offset, 0), self._len)
        return self._at

    def read(self, size: int = -1) -> bytes:
        """Return up to ``size`` bytes; only for libraries that want to hash the body."""
        end = self._len if size < 0 else min(self._at + size, self._len)
        taken = b"".join(self._between(self._at, end))
        self._at = end
        return taken

    def _between(self, start: int, end: int) -> Iterator[memoryview]:
        at = 0
        for buffer in self._buffers:
            low, high = max(start - at, 0), min(end - at, len(buffer))
            if low < high:
                yield memoryview(buffer)[low:high]
            at += len(buffer)

    async def __aiter__(self) -> AsyncIterator[Buffer]:
        for chunk in chunks(self._buffers):
            if self.pace is not None:
                await self.pace(len(chunk))
            yield chunk


def chunks(buffers: Sequence[Buffer]) -> Iterator[Buffer]:
    """Cut and join ``buffers`` to pieces of a size that sockets like."""
    joined: list[Buffer] = []
    joined_len = 0
    for buffer in buffers:
        large = len(buffer) > JOIN_BELOW_BYTES
        if joined and (large or joined_len + len(buffer) > CHUNK_BYTES):
            yield b"".join(joined)
            joined, joined_len = [], 0
        if large:
            view = memoryview(buffer)
            for start in range(0, len(view), CHUNK_BYTES):
                yield view[start : start + CHUNK_BYTES]
        else:
            joined.append(buffer)
            joined_len += len(buffer)
    if joined:
        yield b"".join(joined)
