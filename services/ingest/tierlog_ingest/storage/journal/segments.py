"""The journal's files: segments under their ids, and spares that become the next ones.

Owns: names, sizes, zero-filling, recycling. Does not own what groups say (``journal`` writes them,
``replay`` reads them), nor when a segment is needless (the mark, which is ``node``'s).

A spare is filled with zeros up to the size of a segment before it is used, because writing over
what is there costs a sync of half the time that a growing file needs. A segment that the mark has
passed becomes a spare as it is, old groups and all: the next header's generation outdates them.

Invariants:
    * A name ``….journal`` appears only with a whole header of that very segment behind it: the
      header is durable under the spare's name before the file is renamed.
    * A segment is used only after its name is durable.
    * No more than ``spares_max`` spares are kept, and none is made of the last free bytes.

Crash: a spare of any size and content may be left. It is filled up, or removed.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final

import structlog

from tierlog.model.errors import TierlogError
from tierlog.ports.files import File, Files
from tierlog_ingest.storage.journal.format import ALIGNMENT, SegmentHeader

log = structlog.get_logger()

JOURNAL_DIRECTORY: Final = "journal"
_SEGMENT_SUFFIX: Final = ".journal"
_SPARE_SUFFIX: Final = ".spare"
_ID_DIGITS: Final = 16
_ZEROS: Final = bytes(1024 * 1024)
"""So much of a spare is synced at once that a group beside it does not wait for long."""


class Segments:
    """The folder of one journal. ``open`` it, then keep ``run`` going."""

    def __init__(
        self,
        files: Files,
        *,
        segment_bytes: int,
        spares_max: int,
        free_bytes_min: int,
        direct_writes: bool,
    ) -> None:
        self._files = files
        self._direct_writes = direct_writes
        self._segment_bytes = -(-segment_bytes // ALIGNMENT) * ALIGNMENT
        self._spares_max = spares_max
        self._free_bytes_min = free_bytes_min
        self._sizes: dict[int, int] = {}
        self._ready: list[str] = []
        self._unfilled: list[str] = []
        self._filling = 0
        self._next_spare = 1
        self._wanted = asyncio.Event()
        self.on_take: Callable[[int], Awaitable[object]] = _ignore
        """Called before a segment begins, with the bytes that its file lacks, and with 0 when a
        spare was made or there was no room for it."""

    def __repr__(self) -> str:
        return (
            f"<Segments {len(self._sizes)}, {self.bytes_on_disk} bytes,"
            f" spares={len(self._ready)} ready + {len(self._unfilled)}>"
        )

    @property
    def segment_bytes(self) -> int:
        """How long a segment is."""
        return self._segment_bytes

    @property
    def bytes_on_disk(self) -> int:
        """Bytes of all segments, without spares."""
        return sum(self._sizes.values())

    @property
    def spare_count(self) -> int:
        """How many spares wait, ready or not."""
        return len(self._ready) + len(self._unfilled) + self._filling

    async def open(self) -> None:
        """Look what is there."""
        await self._files.make_directory(JOURNAL_DIRECTORY)
        for segment_id in await list_segments(self._files):
            self._sizes[segment_id] = await self._size(segment_path(segment_id))
        for number in await _list_numbers(self._files, _SPARE_SUFFIX):
            self._next_spare = number + 1
            path = _spare_path(number)
            if self.spare_count < self._spares_max:
                size = await self._size(path)
                (self._ready if size == self._segment_bytes else self._unfilled).append(path)
            else:
                await self._files.remove(path)
        self._wanted.set()

    async def begin(self, header: SegmentHeader) -> File:
        """Make the segment of ``header`` from a spare, or from nothing, durably."""
        is_filled = bool(self._ready)
        spare = self._ready.pop(0) if is_filled else self._new_spare()
        try:
            await self.on_take(0 if is_filled else self._segment_bytes)
            file = await self._files.open(spare, create=True, direct=self._direct_writes)
            try:
                if is_filled:
                    header = replace(header, filled_len=self._segment_bytes)
                await file.write_and_sync(0, [header.pack()])
                await self._files.rename(spare, segment_path(header.segment_id))
                await self._files.sync_directory(JOURNAL_DIRECTORY)
                size = await file.size()
            except BaseException:
                await file.close()
                raise
        except TierlogError:
            await self._discard(spare)
            raise
        self._sizes[header.segment_id] = size
        self._wanted.set()
        return file

    def note_written(self, segment_id: int, end: int) -> None:
        """Take note that a segment reaches up to ``end``."""
        self._sizes[segment_id] = max(self._sizes[segment_id], end)

    async def release_before(self, segment_id: int) -> None:
        """Make spares of the segments before ``segment_id``, or remove them."""
        released = sorted(one for one in self._sizes if one < segment_id)
        for one in released:
            if self.spare_count < self._spares_max:
                spare = self._new_spare()
                await self._files.rename(segment_path(one), spare)
                self._unfilled.append(spare)
            else:
                await self._files.remove(segment_path(one))
            self._sizes.pop(one, None)
        if released:
            await self._files.sync_directory(JOURNAL_DIRECTORY)
            self._wanted.set()

    async def shed_spares(self) -> None:
        """Give the space of all spares back: the disk is full, and needed for something else.

        None is made again before there is space for it, and a segment begins.
        """
        spares = [*self._ready, *self._unfilled]
        self._ready.clear()
        self._unfilled.clear()
        for spare in spares:
            await self._discard(spare)

    async def run(self) -> None:
        """Keep a spare ready, until cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            try:
                while self._unfilled or (self._spares_max and not self._ready):
                    if not await self._fill_one():
                        break  # asked for again when a segment was begun or released
            except TierlogError as error:
                log.warning("journal.spare_failed", cause=str(error))

    async def _fill_one(self) -> bool:
        """Fill a spare with zeros; tell whether there was space."""
        spare = self._unfilled.pop(0) if self._unfilled else self._new_spare()
        self._filling += 1
        try:
            filled = await self._fill(spare)
        except TierlogError:
            await self._discard(spare)
            raise
        finally:
            self._filling -= 1
        if filled:
            self._ready.append(spare)
        else:
            await self._discard(spare)
        await self.on_take(0)
        return filled

    async def _fill(self, spare: str) -> bool:
        file = await self._files.open(spare, create=True, direct=self._direct_writes)
        try:
            size = await file.size()
            if size > self._segment_bytes:
                await file.truncate(self._segment_bytes)
            elif size < self._segment_bytes:
                missing = self._segment_bytes - size
                if await self._files.free_bytes() < missing + self._free_bytes_min:
                    return False
                await self._write_zeros(file, size)
        finally:
            await file.close()
        return True

    async def _write_zeros(self, file: File, offset: int) -> None:
        while offset < self._segment_bytes:
            length = min(len(_ZEROS), self._segment_bytes - offset)
            await file.write_and_sync(offset, [memoryview(_ZEROS)[:length]])
            offset += length

    async def _discard(self, spare: str) -> None:
        with contextlib.suppress(TierlogError, FileNotFoundError):
            await self._files.remove(spare)

    async def _size(self, path: str) -> int:
        file = await self._files.open(path)
        try:
            return await file.size()
        finally:
            await file.close()

    def _new_spare(self) -> str:
        number, self._next_spare = self._next_spare, self._next_spare + 1
        return _spare_path(number)


async def _ignore(_taken: int) -> None:
    """Do nothing: nobody watches the disk."""


def segment_path(segment_id: int) -> str:
    """Return a segment's file name."""
    return f"{JOURNAL_DIRECTORY}/{segment_id:0{_ID_DIGITS}x}{_SEGMENT_SUFFIX}"


async def list_segments(files: Files) -> list[int]:
    """Return the ids of the segments that exist, in order."""
    return await _list_numbers(files, _SEGMENT_SUFFIX)


def _spare_path(number: int) -> str:
    return f"{JOURNAL_DIRECTORY}/{number:0{_ID_DIGITS}x}{_SPARE_SUFFIX}"


async def _list_numbers(files: Files, suffix: str) -> list[int]:
    found = []
    for name in await files.list(JOURNAL_DIRECTORY):
        stem = name.removesuffix(suffix)
        if stem != name and len(stem) == _ID_DIGITS:
            with contextlib.suppress(ValueError):
                found.append(int(stem, 16))
    return sorted(found)
