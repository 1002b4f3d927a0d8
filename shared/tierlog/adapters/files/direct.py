"""Descriptors read and written: whole, and where it is wanted, round the system's page cache.

Owns: how a write is cut, going on after short ones, a file's second descriptor (O_DIRECT), and the
memory for it. Does not own what errors mean, nor when descriptors are closed: ``disk`` does.

A write:

    offset       a page's border            a page's border       end
      |---- head ------|--------- middle ----------|---- tail -----|
        through cache     round it, by whole pages    through cache

A page of the cache costs a copy, and a virtual machine whose host gives it memory page by page
pays for a fresh one many times over. What goes round it costs a copy into memory that is used
again. What is read soon after comes from the disk, though, so that long reads go round it too:
they take whole pages, into memory that is used again.

Invariants:
    * Each write has the pages of its middle for itself; those that it shares with the write before
      or behind it go through the cache. So writes that don't overlap never meet in a page both
      ways. The system drops what its cache has of a middle, before and after it is written.
    * A file system that refuses (O_DIRECT, or its alignment) is asked the other way, for the same.
    * ``fdatasync`` of either descriptor makes all of it durable.
"""

import errno
import os
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from tierlog.adapters.pieces import Pieces
from tierlog.ports.files import Buffer

_IOV_MAX: Final = min(os.sysconf("SC_IOV_MAX"), 1024)
_PAGE_LEN: Final = 4096
"""Every logical block is as long, or shorter; where one is not, the system refuses."""
_DIRECT_LEN_MIN: Final = 16 * 1024
"""A shorter middle gains nothing."""
_PIECE_LEN_MAX: Final = 2 * 1024 * 1024
_WRITING_KEPT_MAX: Final = 8 * _PIECE_LEN_MAX
_READ_LEN_MIN: Final = 256 * 1024
"""A shorter one is more likely to be one of many to the same pages."""
_READ_LEN_MAX: Final = 4 * 1024 * 1024
_HUGE_PAGE_LEN: Final = 2 * 1024 * 1024
_READING_KEPT_MAX: Final = 32 * 1024 * 1024
_REFUSED: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP})
_O_DIRECT: Final = getattr(os, "O_DIRECT", 0)


class DirectCalls(NamedTuple):
    """The system's calls round the cache."""

    open: Callable[[str, int], int] = os.open
    write: Callable[[int, Buffer, int], int] = os.pwrite
    read: Callable[[int, Sequence[memoryview], int], int] = os.preadv


class DirectMemory(NamedTuple):
    """What lies at borders of pages, for all files of a folder."""

    writing: Pieces
    reading: Pieces


def direct_memory() -> DirectMemory:
    """Return memory that is used again."""
    return DirectMemory(
        Pieces(piece_bytes=_PIECE_LEN_MAX, kept_bytes_max=_WRITING_KEPT_MAX),
        Pieces(
            piece_bytes=_READ_LEN_MAX + _HUGE_PAGE_LEN,
            kept_bytes_max=_READING_KEPT_MAX,
            huge=True,
        ),
    )


class DirectFile:
    """A file's way round the cache."""

    def __init__(self, fd: int, memory: DirectMemory, calls: DirectCalls) -> None:
        self.fd = fd
        self._memory = memory
        self._calls = calls
        self._is_refused = False
        self._is_refused_reading = False

    def __repr__(self) -> str:
        return f"<DirectFile {self.fd}>"

    def read(self, plain_fd: int, offset: int, length: int) -> Buffer:
        """Return up to ``length`` bytes, fewer only at the end; little, or too much: plainly."""
        start = offset // _PAGE_LEN * _PAGE_LEN
        wanted = -(-(offset + length) // _PAGE_LEN) * _PAGE_LEN - start
        pieces = self._memory.reading
        if self._is_refused_reading or not _READ_LEN_MIN <= length <= wanted <= pieces.piece_bytes:
            return read_all(plain_fd, offset, length)
        memory = pieces.lend()
        got = self._read_pages(memory[:wanted], start)
        if got <= offset - start:
            return read_all(plain_fd, offset, length)
        if got < wanted:
            # The end of the file, or the system stopped early: it says which.
            rest = read_all(plain_fd, start + got, wanted - got)
            memory[got : got + len(rest)] = rest
            got += len(rest)
        return memory[offset - start : min(got, offset - start + length)].toreadonly()

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
        memory, at = self._memory.writing.lend(), 0
        for view in rest.take(length):
            memory[at : at + len(view)] = view
            at += len(view)
        written = self._write_pages(memory[:length], offset)
        if written < length:
            write_all(plain_fd, offset + written, [memory[written:length]])

    def _read_pages(self, pages: memoryview, offset: int) -> int:
        """Read what the system gives; return how much that was."""
        got = 0
        while got < len(pages):
            try:
                count = self._calls.read(self.fd, [pages[got:]], offset + got)
            except OSError as error:
                if error.errno not in _REFUSED:
                    raise
                self._is_refused_reading = True
                break
            got += count
            if not count or got % _PAGE_LEN:
                break
        return got

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
    full: str, flags: int, plain_fd: int, memory: DirectMemory, calls: DirectCalls
) -> DirectFile | None:
    """Return the way round the cache to the file that is open; None where there is none."""
    if not _O_DIRECT:
        return None
    try:
        fd = calls.open(full, flags | _O_DIRECT)
    except OSError:
        # It is a hint, and the file is open: what is wrong with the disk shows there.
        return None
    if os.path.samestat(os.fstat(fd), os.fstat(plain_fd)):
        return DirectFile(fd, memory, calls)
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


def read_all(fd: int, offset: int, length: int) -> bytes:
    """Return up to ``length`` bytes, through the cache; fewer only at the end of the file."""
    data = os.pread(fd, length, offset)
    if len(data) in {0, length}:
        return data
    pieces = [data]
    while data and (got := sum(map(len, pieces))) < length:
        data = os.pread(fd, length - got, offset + got)
        pieces.append(data)
    return b"".join(pieces)


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
