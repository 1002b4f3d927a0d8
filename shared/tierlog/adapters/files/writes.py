"""Writing to descriptors: whole, and where it is wanted, round the system's page cache.

Owns: how a write is cut, going on after short ones, a file's second descriptor (O_DIRECT), and the
memory for it. Does not own what errors mean, nor when descriptors are closed: ``disk`` does.

    offset       a page's border            a page's border       end
      |---- head ------|--------- middle ----------|---- tail -----|
        through cache     round it, by whole pages    through cache

A page of the cache costs a copy, and a virtual machine whose host gives it memory page by page
pays for a fresh one many times over. What goes round it costs a copy into memory that is used
again. What is read soon after comes from the disk, though.

Invariants:
    * Each write has the pages of its middle for itself; those that it shares with the write before
      or behind it go through the cache. So writes that don't overlap never meet in a page both
      ways. The system drops what its cache has of a middle, before and after it is written.
    * A file system that refuses (O_DIRECT, or its alignment) gets the same bytes the other way.
    * ``fdatasync`` of either descriptor makes all of it durable.
"""

import contextlib
import errno
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from tierlog.ports.files import Buffer

_IOV_MAX: Final = min(os.sysconf("SC_IOV_MAX"), 1024)
_PAGE_LEN: Final = 4096
"""Every logical block is as long, or shorter; where one is not, the system refuses."""
_DIRECT_LEN_MIN: Final = 16 * 1024
"""A shorter middle gains nothing."""
_PIECE_LEN_MAX: Final = 2 * 1024 * 1024
_REFUSED: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP})
_O_DIRECT: Final = getattr(os, "O_DIRECT", 0)


class DirectCalls(NamedTuple):
    """The system's calls round the cache."""

    open: Callable[[str, int], int] = os.open
    write: Callable[[int, Buffer, int], int] = os.pwrite


class AlignedMemory:
    """Memory at borders of pages, lent and used again; as many pieces as were lent at once."""

    def __init__(self) -> None:
        self._spare: list[mmap.mmap] = []

    def __repr__(self) -> str:
        return f"<AlignedMemory spare={len(self._spare)}>"

    @contextlib.contextmanager
    def lend(self) -> Iterator[memoryview]:
        """Lend one piece, to a thread."""
        try:
            memory = self._spare.pop()
        except IndexError:
            memory = mmap.mmap(-1, _PIECE_LEN_MAX)
        try:
            with memoryview(memory) as view:
                yield view
        finally:
            self._spare.append(memory)


class DirectWriter:
    """A file's way round the cache."""

    def __init__(self, fd: int, memory: AlignedMemory, calls: DirectCalls) -> None:
        self.fd = fd
        self._memory = memory
        self._calls = calls
        self._is_refused = False

    def write(self, plain_fd: int, offset: int, buffers: Sequence[Buffer]) -> None:
        """Write all of it; what is no whole page, or too little, by ``plain_fd``."""
        length = sum(map(_length, buffers))
        start, end = -(-offset // _PAGE_LEN) * _PAGE_LEN, (offset + length) // _PAGE_LEN * _PAGE_LEN
        if self._is_refused or end - start < _DIRECT_LEN_MIN:
            write_all(plain_fd, offset, buffers)
            return
        rest = _Rest(buffers)
        write_all(plain_fd, offset, rest.take(start - offset))
        pieces = -(-(end - start) // _PIECE_LEN_MAX)
        piece_len = -(-(end - start) // pieces // _PAGE_LEN) * _PAGE_LEN
        for at in range(start, end, piece_len):
            self._write_middle(plain_fd, at, rest, min(piece_len, end - at))
        write_all(plain_fd, end, rest.take(offset + length - end))

    def _write_middle(self, plain_fd: int, offset: int, rest: "_Rest", length: int) -> None:
        with self._memory.lend() as memory:
            at = 0
            for view in rest.take(length):
                memory[at : at + len(view)] = view
                at += len(view)
            written = self._write_pages(memory[:length], offset)
            if written < length:
                write_all(plain_fd, offset + written, [memory[written:length]])

    def _write_pages(self, pages: memoryview, offset: int) -> int:
        """Write what the system takes; return how much that was."""
        written = 0
        while written < len(pages) and not self._is_refused:
            try:
                got = self._calls.write(self.fd, pages[written:], offset + written)
            except OSError as error:
                if error.errno not in _REFUSED:
                    raise
                self._is_refused = True
                break
            written += got
            if not got or written % _PAGE_LEN:
                break
        return written


def open_direct(
    full: str, flags: int, plain_fd: int, memory: AlignedMemory, calls: DirectCalls
) -> DirectWriter | None:
    """Return the way round the cache to the file that is open; None where there is none."""
    if not _O_DIRECT:
        return None
    try:
        fd = calls.open(full, flags | _O_DIRECT)
    except OSError:
        # It is a hint, and the file is open: what is wrong with the disk shows there.
        return None
    if os.path.samestat(os.fstat(fd), os.fstat(plain_fd)):
        return DirectWriter(fd, memory, calls)
    os.close(fd)
    return None


class _Rest:
    """What is left of buffers that are taken piece by piece."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self._views = [memoryview(one).cast("B") for one in buffers if _length(one)]
        self._next = 0
        """The first view of which something is left."""

    def take(self, length: int) -> list[memoryview]:
        """Return the next ``length`` bytes, which are there."""
        taken: list[memoryview] = []
        while length:
            view = self._views[self._next]
            if len(view) > length:
                self._views[self._next] = view[length:]
                taken.append(view[:length])
                break
            taken.append(view)
            length -= len(view)
            self._next += 1
        return taken


def write_all(fd: int, offset: int, buffers: Sequence[Buffer]) -> None:
    """Write all of it, through the cache."""
    for start in range(0, len(buffers), _IOV_MAX):
        part = buffers[start : start + _IOV_MAX]
        length = sum(map(_length, part))
        written = os.pwritev(fd, part, offset) if length else 0
        if written < length:
            _write_rest(fd, offset, part, written)
        offset += length


def _write_rest(fd: int, offset: int, part: Sequence[Buffer], written: int) -> None:
    """Go on where the system stopped early."""
    views = [memoryview(one).cast("B") for one in part if _length(one)]
    offset += written
    while views:
        while views and written >= len(views[0]):
            written -= len(views.pop(0))
        if views:
            views[0] = views[0][written:]
            written = os.pwritev(fd, views, offset)
            offset += written


def _length(buffer: Buffer) -> int:
    return buffer.nbytes if isinstance(buffer, memoryview) else len(buffer)
