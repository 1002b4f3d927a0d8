"""Where in the entry logs each entry lies: the indexes of all ledgers behind one pool of pages.

Owns the headers in memory, loading, answering, changing. Does not own frames (``page_pool``),
writing and syncing (``index_writer``), names and handles (``index_files``), bytes
(``index_format``), nor what a slot points to. When to flush, and rebuilding of what is damaged,
are the node's.

Invariants:
    * Zeros are answered only under a whole header, from a whole page or from none that it lists.
      All else that has no slot is ``CorruptError``.
    * Pages in memory are bounded by the pool, headers by ``headers_max`` and by dirty pages. What
      has to go first is written, and synced with the next flush.
    * One task at a time reads a page or a header from the disk; others wait for it.
    * A read never writes, so a reader may be cancelled at any time.
"""

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Iterator, KeysView, Sequence
from itertools import islice
from typing import Final, NamedTuple

import numpy as np
import structlog
from numpy.typing import NDArray

from tierlog.model.errors import CorruptError, RefusedError
from tierlog.model.ids import EntryId, LedgerId
from tierlog.ports.files import Buffer, Files
from tierlog_ingest.storage.index.cached_index import CachedIndex
from tierlog_ingest.storage.index.index_files import IndexFiles
from tierlog_ingest.storage.index.index_format import (
    ENTRY_ID_MAX,
    EXTENTS_MAX,
    FIRST_SLOT_WORD,
    PAGE_LEN,
    SLOTS_PER_PAGE,
    WORD,
    IndexHeader,
    State,
    add_page,
    check_page,
    damaged,
    decode_header,
    has_page,
    page_offset,
    smallest_gap,
)
from tierlog_ingest.storage.index.index_writer import IndexWriter
from tierlog_ingest.storage.index.page_pool import PagePool

log = structlog.get_logger()

_PRESSURE_LEDGERS: Final = 128
_PAGES_AT_ONCE: Final = 16
"""Who comes to the beginning of a page in the middle of its read gets those behind it, too."""
_HEADER: Final = -1
"""Stands for the header where a page's number is asked for."""


class CacheStatistics(NamedTuple):
    """What the cache holds and did."""

    pages: int
    dirty_pages: int
    pages_max: int
    headers: int
    unsynced_files: int
    open_files: int
    pages_read: int
    headers_read: int
    writes: int
    syncs: int


class LedgerCache:
    """The indexes of a node. ``open`` comes first."""

    def __init__(
        self,
        dirs: Sequence[Files],
        *,
        bytes_max: int,
        open_files_max: int,
        headers_max: int = 4096,
    ) -> None:
        self._files = IndexFiles(dirs, open_files_max=open_files_max)
        self._pool = PagePool(max(1, bytes_max // PAGE_LEN))
        self._headers_max = headers_max
        self._indexes: OrderedDict[int, CachedIndex] = OrderedDict()
        self._writer = IndexWriter(self._files, self._pool, self._indexes)
        self._loads: dict[tuple[int, int], asyncio.Event] = {}
        self._making_room = asyncio.Lock()
        self._pages_read = self._headers_read = 0

    def __repr__(self) -> str:
        return f"<LedgerCache {self._files!r}, {self._pool!r}, {self._writer!r}>"

    async def open(self) -> None:
        """List the index files of all directories; none is read."""
        await self._files.list_all()

    async def close(self) -> None:
        """Close the files; writes nothing."""
        await self._files.close()

    def statistics(self) -> CacheStatistics:
        """Return what the cache holds and did."""
        return CacheStatistics(
            pages=self._pool.used_count,
            dirty_pages=self._pool.dirty_count,
            pages_max=self._pool.frame_count,
            headers=len(self._indexes),
            unsynced_files=self._writer.unsynced_count,
            open_files=self._files.open_count,
            pages_read=self._pages_read,
            headers_read=self._headers_read,
            writes=self._writer.write_count,
            syncs=self._writer.sync_count,
        )

    def check(self) -> None:
        """Assert that counts reconcile; for tests."""
        self._pool.check()
        self._writer.check()
        assert self._indexes.keys() <= self._files.ledger_ids()

    def ledger_ids(self) -> KeysView[int]:
        """Return all ledgers that have an index, whole or not."""
        return self._files.ledger_ids()

    def __contains__(self, ledger_id: int) -> bool:
        return ledger_id in self._files.ledger_ids()

    # Reading

    async def header(self, ledger_id: LedgerId) -> IndexHeader | None:
        """Return what an index says of its ledger; None if there is no index."""
        index = await self._load(ledger_id)
        if index is None:
            return None
        if not index.whole:
            raise damaged(ledger_id, "it is being rebuilt")
        return index.header

    async def slots(
        self, ledger_id: LedgerId, first_entry_id: EntryId, count_max: int
    ) -> NDArray[np.uint64]:
        """Return slots from an entry on, to the end of its page at most; 0: no such entry.

        The header is read only if an entry isn't there: a slot proves itself by its run.
        """
        page_no, start = divmod(first_entry_id, SLOTS_PER_PAGE)
        stop = min(start + count_max, SLOTS_PER_PAGE)
        while True:
            index = self._indexes.get(ledger_id)
            if index is None and await self._waited(ledger_id, _HEADER):
                continue
            found: NDArray[np.uint64] | None
            if ledger_id not in self or (index is not None and not has_page(index.bounds, page_no)):
                found = np.zeros(stop - start, np.uint64)
            elif (frame := self._pool.find(ledger_id, page_no)) is not None:
                found = self._pool.slots(frame, start, stop)
            elif await self._waited(ledger_id, page_no):
                continue
            else:
                # In order, entries of 100 bytes need a page for each 50 KB that are read.
                wanted = 1 if start else -(-count_max // SLOTS_PER_PAGE)
                count = self._count_missing(index, ledger_id, page_no, wanted)
                found = await self._read_slots(ledger_id, page_no, count, start, stop)
            if found is not None and _is_answer(index, found, known=ledger_id in self):
                return found
            if found is None and index is not None and not index.gone:
                raise damaged(ledger_id, f"page {page_no} can't be read")
            await self._load(ledger_id)

    def _count_missing(
        self, index: CachedIndex | None, ledger_id: int, page_no: int, wanted: int
    ) -> int:
        """Return how many pages from ``page_no`` on the file has, and nothing else yet."""
        count, count_max = 1, min(wanted, _PAGES_AT_ONCE, self._pool.frame_count // 4)
        while (
            count < count_max
            and index is not None
            and has_page(index.bounds, page_no + count)
            and self._pool.find(ledger_id, page_no + count) is None
            and (ledger_id, page_no + count) not in self._loads
        ):
            count += 1
        return count

    async def _read_slots(
        self, ledger_id: int, page_no: int, count: int, start: int, stop: int
    ) -> NDArray[np.uint64] | None:
        """Return slots of a page that no frame holds; None if it is damaged, or never was.

        The pages behind it come with it, up to the first that is damaged.
        """
        with contextlib.ExitStack() as loads:
            for number in range(page_no, page_no + count):
                loads.enter_context(self._loading(ledger_id, number))
            try:
                pages = await self._read_pages(ledger_id, page_no, count)
            except (CorruptError, FileNotFoundError) as error:
                log.debug(
                    "index.unreadable", ledger_id=ledger_id, page_no=page_no, cause=str(error)
                )
                return None
            for number, data in enumerate(pages, page_no):
                frame = self._pool.take()
                if frame is None:
                    break  # it is only read
                self._pool.add(frame, ledger_id, number, data)
        first = FIRST_SLOT_WORD + start
        return np.frombuffer(pages[0], WORD)[first : first + stop - start].astype(np.uint64)

    async def _read_pages(self, ledger_id: int, page_no: int, count: int) -> list[memoryview]:
        """Return pages that one read brings, up to a damaged one; is it the first, it is told."""
        async with self._files.use(ledger_id) as file:
            data = memoryview(await file.read(page_offset(page_no), count * PAGE_LEN))
        self._pages_read += count
        pages = [data[at : at + PAGE_LEN] for at in range(0, count * PAGE_LEN, PAGE_LEN)]
        for number, page in enumerate(pages):
            try:
                check_page(page, LedgerId(ledger_id), page_no + number)
            except CorruptError:
                if number:
                    return pages[:number]
                raise
        return pages

    async def _read_page(self, ledger_id: int, page_no: int) -> Buffer:
        (page,) = await self._read_pages(ledger_id, page_no, 1)
        return page

    @contextlib.contextmanager
    def _loading(self, ledger_id: int, page_no: int) -> Iterator[None]:
        """Keep others from reading a page, or a header, of which nobody is."""
        done = asyncio.Event()
        assert (ledger_id, page_no) not in self._loads
        self._loads[ledger_id, page_no] = done
        try:
            yield
        finally:
            del self._loads[ledger_id, page_no]
            done.set()
            self._writer.room.set()

    async def _waited(self, ledger_id: int, page_no: int) -> bool:
        """Wait until nobody reads a page, or a header; False if nobody did."""
        if (done := self._loads.get((ledger_id, page_no))) is None:
            return False
        await done.wait()
        return True

    async def _load(self, ledger_id: int) -> CachedIndex | None:
        """Return a ledger's header; None if it has no index."""
        while (index := self._indexes.get(ledger_id)) is None:
            if await self._waited(ledger_id, _HEADER):
                continue
            if ledger_id not in self:
                return None
            with self._loading(ledger_id, _HEADER):
                await self._read_header(ledger_id)
        self._indexes.move_to_end(ledger_id)
        return index

    async def _read_header(self, ledger_id: int) -> None:
        if self._files.is_doubled(ledger_id):
            raise damaged(ledger_id, "several directories have one")
        async with self._files.use(ledger_id) as file:
            data = await file.read(0, page_offset(1))
            size = await file.size()
        self._headers_read += 1
        header = decode_header(data[:PAGE_LEN], LedgerId(ledger_id))
        if header.state is not State.WHOLE:
            raise damaged(ledger_id, "its rebuilding did not come to an end")
        if size < page_offset(header.page_count):
            raise damaged(ledger_id, f"its file is cut at {size} bytes")
        assert ledger_id not in self._indexes
        self._indexes[ledger_id] = CachedIndex(ledger_id, header)
        self._forget_headers(keep=ledger_id)
        if header.page_count == 1:
            self._keep_only_page(ledger_id, data[PAGE_LEN:])

    def _keep_only_page(self, ledger_id: int, data: Buffer) -> None:
        """Keep a page that came with its header: a small ledger costs one read of the disk."""
        if self._pool.find(ledger_id, 0) is not None or (ledger_id, 0) in self._loads:
            return
        try:
            check_page(data, LedgerId(ledger_id), 0)
        except CorruptError:
            return  # said when it is asked for
        frame = self._pool.take()
        if frame is not None:
            self._pool.add(frame, ledger_id, 0, data)

    def _forget_headers(self, *, keep: int, busy_max: int = 2) -> None:
        """Drop headers that were not used for long, up to so many that are needed; those stay."""
        while len(self._indexes) > self._headers_max and busy_max > 0:
            ledger_id, index = self._indexes.popitem(last=False)
            if ledger_id == keep or index.is_busy or self._pool.is_dirty(ledger_id):
                self._indexes[ledger_id] = index
                busy_max -= 1

    # Changing

    async def put(
        self,
        ledger_id: LedgerId,
        placements: Sequence[tuple[int, int, int]],
        *,
        last_add_confirmed: EntryId,
        create_in: int,
    ) -> None:
        """Set slots; each placement is a first entry id, a count, and the slot of all of them.

        A ledger without index gets one, in the directory ``create_in``. May be repeated.
        """
        for first, count, slot in placements:
            if not (0 <= first <= first + count - 1 <= ENTRY_ID_MAX and slot):
                raise RefusedError(
                    f"entries {first} to {first + count - 1} have no place in an index",
                    remedy=f"Use entry ids up to {ENTRY_ID_MAX}",
                )
        while True:
            index = await self._load_or_create(ledger_id, create_in)
            with index.used():
                for first, count, slot in placements:
                    await self._set(index, first, first + count, slot)
                if last_add_confirmed > index.last_add_confirmed:
                    index.last_add_confirmed = last_add_confirmed
                    self._writer.mark_header(index)
                if not index.gone or ledger_id not in self:
                    return

    async def _load_or_create(self, ledger_id: int, create_in: int) -> CachedIndex:
        if len(self._indexes) > 2 * self._headers_max:
            await self._writer.write(list(islice(self._indexes, _PRESSURE_LEDGERS)), sync=False)
            self._forget_headers(keep=ledger_id, busy_max=_PRESSURE_LEDGERS)
        index = await self._load(ledger_id)
        if index is None:
            self._files.add(ledger_id, create_in)
            index = self._indexes[ledger_id] = CachedIndex(ledger_id, None)
            self._writer.mark_header(index)
            self._forget_headers(keep=ledger_id)
        return index

    async def _set(self, index: CachedIndex, start: int, stop: int, slot: int) -> None:
        """Set the slots of entries ``start`` to ``stop - 1``."""
        pool, words = self._pool, self._pool.words
        while start < stop:
            page_no, at = divmod(start, SLOTS_PER_PAGE)
            end = min(at + stop - start, SLOTS_PER_PAGE)
            frame = pool.find(index.ledger_id, page_no)
            if frame is None or not has_page(index.bounds, page_no):
                is_covered = end - at == SLOTS_PER_PAGE
                frame = await self._frame_of(index, page_no, is_covered=is_covered)
                if frame is None:
                    return
            words[frame, FIRST_SLOT_WORD + at : FIRST_SLOT_WORD + end] = slot
            pool.mark_dirty(frame)
            start += end - at
            if start > index.last_entry_id + 1:
                index.last_entry_id = start - 1
                self._writer.mark_header(index)

    async def _frame_of(self, index: CachedIndex, page_no: int, *, is_covered: bool) -> int | None:
        """Return the frame of a page, loaded or new; None if the ledger is gone.

        The caller changes it at once. A page that is overwritten as a whole needs no loading.
        """
        ledger_id, pool = index.ledger_id, self._pool
        while not index.gone:
            is_new = not has_page(index.bounds, page_no)
            if is_new:
                await self._fill_gaps(index)
            frame = pool.find(ledger_id, page_no)
            if frame is not None and not is_new:
                return frame
            if frame is None:
                frame = await self._load_frame(index, page_no, is_empty=is_new or is_covered)
            if frame is not None and not index.gone:
                self._add_page(index, page_no, frame)
                return frame
        return None

    async def _load_frame(self, index: CachedIndex, page_no: int, *, is_empty: bool) -> int | None:
        """Bring a page into a frame; None if all may be different now."""
        ledger_id, pool = index.ledger_id, self._pool
        if await self._waited(ledger_id, page_no):
            return None
        frame = pool.take()
        if frame is None:
            await self._make_room()
            return None
        with self._loading(ledger_id, page_no):
            try:
                data = None if is_empty else await self._read_page(ledger_id, page_no)
            except BaseException as error:
                pool.give_back(frame)
                if index.gone and isinstance(error, (CorruptError, FileNotFoundError)):
                    return None
                raise
            pool.add(frame, ledger_id, page_no, data)
        return frame

    async def _fill_gaps(self, index: CachedIndex) -> None:
        """Make room in the header for one more extent: write empty pages in the smallest gap."""
        while len(index.bounds) >= 2 * EXTENTS_MAX and not index.gone:
            page_no = smallest_gap(index.bounds)[0]
            frame = self._pool.find(index.ledger_id, page_no)
            if frame is None:
                frame = await self._load_frame(index, page_no, is_empty=True)
            if frame is not None:
                self._add_page(index, page_no, frame)

    def _add_page(self, index: CachedIndex, page_no: int, frame: int) -> None:
        """Begin a page, unless that was done meanwhile."""
        if index.gone or has_page(index.bounds, page_no):
            return
        self._pool.clear(frame)  # the file may have one that the header does not list
        add_page(index.bounds, page_no)
        self._pool.mark_dirty(frame)
        self._writer.mark_header(index)

    async def _make_room(self) -> None:
        """Wait until a frame can be taken; write pages out if that is what it needs."""
        async with self._making_room:
            if self._pool.has_room:
                return
            dirty = (one for one in self._pool.dirty_ledgers() if one in self._indexes)
            due = list(islice(dirty, _PRESSURE_LEDGERS))
            if due:
                await self._writer.write(due, sync=False)
                return
            self._writer.room.clear()
            await self._writer.room.wait()

    async def replace(
        self,
        ledger_id: LedgerId,
        first_entry_id: EntryId,
        count: int,
        old_slot: int,
        new_slot: int,
    ) -> bool:
        """Let entries that have ``old_slot`` have ``new_slot``; False if there was none."""
        index = await self._load(ledger_id)
        if index is None:
            return False
        was_found = False
        with index.used():
            start, stop = first_entry_id, first_entry_id + count
            while start < stop:
                page_no, at = divmod(start, SLOTS_PER_PAGE)
                end = min(at + stop - start, SLOTS_PER_PAGE)
                start = EntryId(start + end - at)
                if not has_page(index.bounds, page_no):
                    continue
                frame = await self._frame_of(index, page_no, is_covered=False)
                if frame is None:
                    again = self.replace(ledger_id, first_entry_id, count, old_slot, new_slot)
                    return await again or was_found
                part = self._pool.words[frame, FIRST_SLOT_WORD + at : FIRST_SLOT_WORD + end]
                is_old = part == old_slot
                if is_old.any():
                    part[is_old] = new_slot
                    self._pool.mark_dirty(frame)
                    was_found = True
        return was_found

    # Removing

    async def remove(self, ledger_id: LedgerId) -> None:
        """Remove an index; the name is gone for good after the next ``flush``."""
        while await self._waited(ledger_id, _HEADER):
            pass
        with self._loading(ledger_id, _HEADER):
            directories = self._files.forget(ledger_id)
            await self._forget(ledger_id)
            await self._files.remove(ledger_id, directories)

    async def discard(self, ledger_id: LedgerId, *, create_in: int = 0) -> None:
        """Make an index empty before it is rebuilt by ``put``; ``complete`` is to follow.

        Until then the index says of no entry that it is not there, also after a restart. A ledger
        whose index was lost gets one, in the directory ``create_in``.
        """
        while await self._waited(ledger_id, _HEADER):
            pass
        with self._loading(ledger_id, _HEADER):
            await self._forget(ledger_id)
            if ledger_id not in self:
                self._files.add(ledger_id, create_in)
            await self._files.remove_doubles(ledger_id)
            await self._writer.empty(ledger_id)
            index = self._indexes[ledger_id] = CachedIndex(ledger_id, None)
            index.whole = False
            self._writer.mark_header(index)

    def complete(self, ledger_id: LedgerId) -> None:
        """Say that everything was put since ``discard``: what has no slot is not there."""
        index = self._indexes.get(ledger_id)
        if index is not None and not index.whole:
            index.whole = True
            self._writer.mark_header(index)

    async def _forget(self, ledger_id: int) -> None:
        """Drop all that is in memory of a ledger, when nobody reads or writes its file any more."""
        index = self._indexes.pop(ledger_id, None)
        if index is not None:
            index.gone = True
            await index.written()
        for key in [one for one in self._loads if one[0] == ledger_id and one[1] != _HEADER]:
            await self._waited(*key)
        self._pool.drop_ledger(ledger_id)
        self._writer.forget(ledger_id)

    async def flush(self) -> None:
        """Make durable what was put before: pages, then headers, then names."""
        await self._writer.flush()


def _is_answer(index: CachedIndex | None, found: NDArray[np.uint64], *, known: bool) -> bool:
    """Tell whether what was found is the answer; ``CorruptError`` if there is none."""
    if index is not None and index.whole:
        return not index.gone
    if found.all():
        return True
    if index is not None:
        raise damaged(index.ledger_id, "it is being rebuilt")
    return not known
