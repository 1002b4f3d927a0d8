"""Where in the entry logs each entry lies: the indexes of all ledgers behind one pool of pages.

Owns the headers in memory, loading, writing and syncing of index files. Does not own frames
(``page_pool``), names and handles (``index_files``), bytes (``index_format``), nor what a slot
points to. When to flush, and rebuilding of what is damaged, are the node's.

Invariants:
    * Zeros are answered only under a whole header, from a whole page or from none that it lists.
      All else that has no slot is ``CorruptError``.
    * A header is written after all pages that it lists, so that a process that is killed leaves
      an index that is whole. What a power cut tears is found by its checksum.
    * After ``flush``, all that was put before it is durable.
    * Pages in memory are bounded by the pool, headers by ``headers_max`` and by dirty pages. What
      has to go first is written, not synced, and stays in ``unsynced``.
    * One task at a time writes a ledger's file; one at a time reads a page or a header from it.
    * A read never writes, so a reader may be cancelled at any time.

Cancellation: a write that was cut short may still reach the file, and would race with the next.
From then on nothing is written any more; ``flush`` says so, and the mark stays where it is.
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
from tierlog.model.ids import NO_ENTRY, EntryId, LedgerId
from tierlog.ports.files import Buffer, DiskFailedError, File, Files
from tierlog_ingest.storage.index_files import IndexFiles
from tierlog_ingest.storage.index_format import (
    ENTRY_ID_MAX,
    EXTENTS_MAX,
    FIRST_SLOT_WORD,
    PAGE_LEN,
    SLOTS_PER_PAGE,
    WORD,
    HeaderPage,
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
from tierlog_ingest.storage.page_pool import PagePool

log = structlog.get_logger()

_WRITE_PAGES_MAX: Final = 256
_WRITERS: Final = 8
_PRESSURE_LEDGERS: Final = 32
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


class _Ledger:
    """The header of one ledger in memory."""

    __slots__ = (
        "bounds", "gone", "header_dirty", "last_add_confirmed", "last_entry_id", "ledger_id",
        "lock", "new", "users", "whole",
    )  # fmt: skip

    def __init__(self, ledger_id: int, header: HeaderPage | None) -> None:
        self.ledger_id = ledger_id
        self.last_add_confirmed: int = header.last_add_confirmed if header else NO_ENTRY
        self.last_entry_id: int = header.last_entry_id if header else NO_ENTRY
        self.bounds = list(header.bounds) if header else []
        self.new = header is None
        """The file may not be there yet."""
        self.header_dirty = header is None
        self.whole = True
        self.gone = False
        self.users = 0
        self.lock = asyncio.Lock()

    def pack(self) -> bytes:
        """Return the header page as it should be in the file."""
        return HeaderPage(
            ledger_id=LedgerId(self.ledger_id),
            last_add_confirmed=EntryId(self.last_add_confirmed),
            last_entry_id=EntryId(self.last_entry_id),
            bounds=tuple(self.bounds),
            state=State.WHOLE if self.whole else State.REBUILDING,
        ).pack()

    @property
    def header(self) -> IndexHeader:
        """What the index says of its ledger."""
        return IndexHeader(
            EntryId(self.last_add_confirmed),
            EntryId(self.last_entry_id),
            self.bounds[-1] if self.bounds else 0,
        )


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
        self._ledgers: OrderedDict[int, _Ledger] = OrderedDict()
        self._dirty_headers: dict[int, None] = {}
        self._unsynced: set[int] = set()
        self._loads: dict[tuple[int, int], asyncio.Event] = {}
        self._room = asyncio.Event()
        self._making_room = asyncio.Lock()
        self._flushing = asyncio.Lock()
        self._cut_short = False
        self._pages_read = self._headers_read = self._writes = self._syncs = 0

    def __repr__(self) -> str:
        return f"<LedgerCache {self._files!r}, {self._pool!r}, unsynced={len(self._unsynced)}>"

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
            headers=len(self._ledgers),
            unsynced_files=len(self._unsynced),
            open_files=self._files.open_count,
            pages_read=self._pages_read,
            headers_read=self._headers_read,
            writes=self._writes,
            syncs=self._syncs,
        )

    def check(self) -> None:
        """Assert that counts reconcile; for tests."""
        self._pool.check()
        assert all(ledger_id in self._ledgers for ledger_id in self._pool.dirty_ledgers())
        dirty = {one for one, ledger in self._ledgers.items() if ledger.header_dirty}
        assert dirty == set(self._dirty_headers)
        assert self._ledgers.keys() <= self._files.ledger_ids()
        assert self._unsynced <= self._files.ledger_ids()

    def ledger_ids(self) -> KeysView[int]:
        """Return all ledgers that have an index, whole or not."""
        return self._files.ledger_ids()

    def __contains__(self, ledger_id: int) -> bool:
        return ledger_id in self._files.ledger_ids()

    # Reading

    async def header(self, ledger_id: LedgerId) -> IndexHeader | None:
        """Return what an index says of its ledger; None if there is no index."""
        ledger = await self._load(ledger_id)
        if ledger is None:
            return None
        if not ledger.whole:
            raise damaged(ledger_id, "it is being rebuilt")
        return ledger.header

    async def slots(
        self, ledger_id: LedgerId, first_entry_id: EntryId, count_max: int
    ) -> NDArray[np.uint64]:
        """Return slots from an entry on, to the end of its page at most; 0: no such entry.

        The header is read only if an entry isn't there: a slot proves itself by its run.
        """
        page_no, start = divmod(first_entry_id, SLOTS_PER_PAGE)
        stop = min(start + count_max, SLOTS_PER_PAGE)
        while True:
            ledger = self._ledgers.get(ledger_id)
            if ledger is None and await self._waited(ledger_id, _HEADER):
                continue
            found: NDArray[np.uint64] | None = np.zeros(stop - start, np.uint64)
            if ledger_id in self and (ledger is None or has_page(ledger.bounds, page_no)):
                frame = self._pool.find(ledger_id, page_no)
                if frame is not None:
                    found = self._pool.slots(frame, start, stop)
                elif await self._waited(ledger_id, page_no):
                    continue
                else:
                    found = await self._read_slots(ledger_id, page_no, start, stop)
            if found is not None and (found.all() or _may_lack(ledger, known=ledger_id in self)):
                return found
            if found is None and ledger is not None and not ledger.gone:
                raise damaged(ledger_id, f"page {page_no} can't be read")
            await self._load(ledger_id)

    async def _read_slots(
        self, ledger_id: int, page_no: int, start: int, stop: int
    ) -> NDArray[np.uint64] | None:
        """Return slots of a page that no frame holds; None if it is damaged, or never was."""
        with self._loading(ledger_id, page_no):
            try:
                data = await self._read_page(ledger_id, page_no)
            except (CorruptError, FileNotFoundError) as error:
                log.info("index.unreadable", ledger_id=ledger_id, page_no=page_no, cause=str(error))
                return None
            frame = self._pool.take()  # or none: it is only read
            if frame is not None:
                self._pool.add(frame, ledger_id, page_no, data)
        first = FIRST_SLOT_WORD + start
        return np.frombuffer(data, WORD)[first : first + stop - start].astype(np.uint64)

    async def _read_page(self, ledger_id: int, page_no: int) -> bytes:
        async with self._files.use(ledger_id) as file:
            data = await file.read(page_offset(page_no), PAGE_LEN)
        self._pages_read += 1
        check_page(data, LedgerId(ledger_id), page_no)
        return data

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
            self._room.set()

    async def _waited(self, ledger_id: int, page_no: int) -> bool:
        """Wait until nobody reads a page, or a header; False if nobody did."""
        if (done := self._loads.get((ledger_id, page_no))) is None:
            return False
        await done.wait()
        return True

    async def _load(self, ledger_id: int) -> _Ledger | None:
        """Return a ledger's header; None if it has no index."""
        while (ledger := self._ledgers.get(ledger_id)) is None:
            if await self._waited(ledger_id, _HEADER):
                continue
            if ledger_id not in self:
                return None
            with self._loading(ledger_id, _HEADER):
                await self._read_header(ledger_id)
        self._ledgers.move_to_end(ledger_id)
        return ledger

    async def _read_header(self, ledger_id: int) -> None:
        if self._files.is_doubled(ledger_id):
            raise damaged(ledger_id, "several directories have one")
        async with self._files.use(ledger_id) as file:
            data = await file.read(0, PAGE_LEN)
            size = await file.size()
        self._headers_read += 1
        header = decode_header(data, LedgerId(ledger_id))
        if header.state is not State.WHOLE:
            raise damaged(ledger_id, "its rebuilding did not come to an end")
        if size < page_offset(header.page_count):
            raise damaged(ledger_id, f"its file is cut at {size} bytes")
        assert ledger_id not in self._ledgers
        self._ledgers[ledger_id] = _Ledger(ledger_id, header)
        self._forget_headers(keep=ledger_id)

    def _forget_headers(self, *, keep: int) -> None:
        """Drop headers that were not used for long; those in use, or dirty, stay."""
        for _ in range(min(8, len(self._ledgers) - self._headers_max)):
            ledger_id, ledger = self._ledgers.popitem(last=False)
            is_busy = ledger_id == keep or ledger.users or ledger.lock.locked() or not ledger.whole
            if is_busy or ledger.header_dirty or self._pool.is_dirty(ledger_id):
                self._ledgers[ledger_id] = ledger

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
            ledger = await self._load_or_create(ledger_id, create_in)
            with _used(ledger):
                for first, count, slot in placements:
                    await self._set(ledger, first, first + count, slot)
                if last_add_confirmed > ledger.last_add_confirmed:
                    ledger.last_add_confirmed = last_add_confirmed
                    self._mark_header(ledger)
                if not ledger.gone or ledger_id not in self:
                    return

    async def _load_or_create(self, ledger_id: int, create_in: int) -> _Ledger:
        if len(self._ledgers) > 2 * self._headers_max:
            await self._write_out(list(islice(self._ledgers, _PRESSURE_LEDGERS)))
        ledger = await self._load(ledger_id)
        if ledger is None:
            self._files.add(ledger_id, create_in)
            ledger = self._ledgers[ledger_id] = _Ledger(ledger_id, None)
            self._dirty_headers[ledger_id] = None
            self._forget_headers(keep=ledger_id)
        return ledger

    async def _set(self, ledger: _Ledger, start: int, stop: int, slot: int) -> None:
        """Set the slots of entries ``start`` to ``stop - 1``."""
        pool, words = self._pool, self._pool.words
        while start < stop:
            page_no, at = divmod(start, SLOTS_PER_PAGE)
            end = min(at + stop - start, SLOTS_PER_PAGE)
            frame = pool.find(ledger.ledger_id, page_no)
            if frame is None or not has_page(ledger.bounds, page_no):
                is_covered = end - at == SLOTS_PER_PAGE
                frame = await self._frame_of(ledger, page_no, is_covered=is_covered)
                if frame is None:
                    return
            words[frame, FIRST_SLOT_WORD + at : FIRST_SLOT_WORD + end] = slot
            pool.mark_dirty(frame)
            start += end - at
            if start > ledger.last_entry_id + 1:
                ledger.last_entry_id = start - 1
                self._mark_header(ledger)

    def _mark_header(self, ledger: _Ledger) -> None:
        if not ledger.header_dirty and not ledger.gone:
            ledger.header_dirty = True
            self._dirty_headers[ledger.ledger_id] = None

    async def _frame_of(self, ledger: _Ledger, page_no: int, *, is_covered: bool) -> int | None:
        """Return the frame of a page, loaded or new; None if the ledger is gone.

        The caller changes it at once. A page that is overwritten as a whole needs no loading.
        """
        ledger_id, pool = ledger.ledger_id, self._pool
        while not ledger.gone:
            is_new = not has_page(ledger.bounds, page_no)
            if is_new:
                await self._fill_gaps(ledger)
            frame = pool.find(ledger_id, page_no)
            if frame is not None and not is_new:
                return frame
            if frame is None:
                frame = await self._load_frame(ledger, page_no, is_empty=is_new or is_covered)
            if frame is not None and not ledger.gone:
                self._add_page(ledger, page_no, frame)
                return frame
        return None

    async def _load_frame(self, ledger: _Ledger, page_no: int, *, is_empty: bool) -> int | None:
        """Bring a page into a frame; None if all may be different now."""
        ledger_id, pool = ledger.ledger_id, self._pool
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
                if ledger.gone and isinstance(error, (CorruptError, FileNotFoundError)):
                    return None
                raise
            pool.add(frame, ledger_id, page_no, data)
        return frame

    async def _fill_gaps(self, ledger: _Ledger) -> None:
        """Make room in the header for one more extent: write empty pages in the smallest gap."""
        while len(ledger.bounds) >= 2 * EXTENTS_MAX and not ledger.gone:
            page_no = smallest_gap(ledger.bounds)[0]
            frame = self._pool.find(ledger.ledger_id, page_no)
            if frame is None:
                frame = await self._load_frame(ledger, page_no, is_empty=True)
            if frame is not None:
                self._add_page(ledger, page_no, frame)

    def _add_page(self, ledger: _Ledger, page_no: int, frame: int) -> None:
        """Begin a page, unless that was done meanwhile."""
        if ledger.gone or has_page(ledger.bounds, page_no):
            return
        self._pool.clear(frame)  # the file may have one that the header does not list
        add_page(ledger.bounds, page_no)
        self._pool.mark_dirty(frame)
        self._mark_header(ledger)

    async def _make_room(self) -> None:
        """Wait until a frame can be taken; write pages out if that is what it needs."""
        async with self._making_room:
            if self._pool.has_room:
                return
            dirty = (one for one in self._pool.dirty_ledgers() if one in self._ledgers)
            due = list(islice(dirty, _PRESSURE_LEDGERS))
            if due:
                await self._write_out(due)
                return
            self._room.clear()
            await self._room.wait()

    async def replace(
        self,
        ledger_id: LedgerId,
        first_entry_id: EntryId,
        count: int,
        old_slot: int,
        new_slot: int,
    ) -> bool:
        """Let entries that have ``old_slot`` have ``new_slot``; False if there was none."""
        ledger = await self._load(ledger_id)
        if ledger is None:
            return False
        was_found = False
        with _used(ledger):
            start, stop = first_entry_id, first_entry_id + count
            while start < stop:
                page_no, at = divmod(start, SLOTS_PER_PAGE)
                end = min(at + stop - start, SLOTS_PER_PAGE)
                start = EntryId(start + end - at)
                if not has_page(ledger.bounds, page_no):
                    continue
                frame = await self._frame_of(ledger, page_no, is_covered=False)
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
            await self._empty(ledger_id)
            ledger = self._ledgers[ledger_id] = _Ledger(ledger_id, None)
            ledger.whole = False
            self._dirty_headers[ledger_id] = None

    async def _empty(self, ledger_id: int) -> None:
        with self._uncut():
            async with self._files.use(ledger_id, create=True) as file:
                await file.truncate(0)
                await file.sync()

    def complete(self, ledger_id: LedgerId) -> None:
        """Say that everything was put since ``discard``: what has no slot is not there."""
        ledger = self._ledgers.get(ledger_id)
        if ledger is not None and not ledger.whole:
            ledger.whole = True
            self._mark_header(ledger)

    async def _forget(self, ledger_id: int) -> None:
        """Drop all that is in memory of a ledger, when nobody reads or writes its file any more."""
        ledger = self._ledgers.pop(ledger_id, None)
        self._dirty_headers.pop(ledger_id, None)
        if ledger is not None:
            ledger.gone = True
            async with ledger.lock:
                pass
        for key in [one for one in self._loads if one[0] == ledger_id and one[1] != _HEADER]:
            await self._waited(*key)
        self._pool.drop_ledger(ledger_id)
        self._unsynced.discard(ledger_id)
        self._room.set()

    # Writing

    async def flush(self) -> None:
        """Make durable what was put before: pages, then headers, then names."""
        async with self._flushing:
            due = dict.fromkeys(self._pool.dirty_ledgers())
            due.update(self._dirty_headers)
            due.update(dict.fromkeys(self._unsynced))
            await self._in_parallel(due, sync=True)
            await self._files.sync_folders()

    async def _write_out(self, ledger_ids: Sequence[int]) -> None:
        """Write, but don't sync, what is dirty of some ledgers."""
        await self._in_parallel(dict.fromkeys(ledger_ids), sync=False)

    async def _in_parallel(self, ledger_ids: dict[int, None], *, sync: bool) -> None:
        waiting = iter(ledger_ids)
        errors: list[Exception] = []
        if len(ledger_ids) <= 1:
            await self._write_each(waiting, errors, sync=sync)
        else:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(min(_WRITERS, len(ledger_ids))):
                    tasks.create_task(self._write_each(waiting, errors, sync=sync))
        if errors:
            raise errors[0]

    async def _write_each(
        self, ledger_ids: Iterator[int], errors: list[Exception], *, sync: bool
    ) -> None:
        """Write ledgers until there is an error. It is not raised: that would cancel others."""
        for ledger_id in ledger_ids:
            if errors:
                return
            try:
                await self._write_ledger(ledger_id, sync=sync)
            except Exception as error:  # noqa: BLE001 - whatever it is, the caller raises it
                errors.append(error)

    async def _write_ledger(self, ledger_id: int, *, sync: bool) -> None:
        if self._cut_short:
            raise DiskFailedError(
                "a write to an index was cancelled and may come yet. Start the node anew"
            )
        ledger = self._ledgers.get(ledger_id)
        if ledger is None:
            if sync and ledger_id in self._unsynced:
                await self._sync_file(ledger_id)
            return
        with _used(ledger):
            async with ledger.lock:
                if not ledger.gone:
                    await self._write_locked(ledger, sync=sync)

    async def _write_locked(self, ledger: _Ledger, *, sync: bool) -> None:
        ledger_id = ledger.ledger_id
        if ledger.header_dirty or self._pool.is_dirty(ledger_id):
            try:
                await self._write_dirty(ledger, sync=sync)
            except FileNotFoundError:
                if not ledger.gone:
                    raise
        elif sync and ledger_id in self._unsynced:
            await self._sync_file(ledger_id)

    async def _sync_file(self, ledger_id: int) -> None:
        self._unsynced.discard(ledger_id)  # first: what is written meanwhile is due again
        try:
            async with self._files.use(ledger_id) as file:
                await file.sync()
        except FileNotFoundError:
            return  # removed meanwhile
        except BaseException:
            self._unsynced.add(ledger_id)
            raise
        self._syncs += 1

    async def _write_dirty(self, ledger: _Ledger, *, sync: bool) -> None:
        """Write a ledger's dirty pages, then its header."""
        ledger_id = ledger.ledger_id
        header = ledger.pack() if ledger.header_dirty else None
        runs = _adjacent(self._pool.dirty_pages(ledger_id))
        if header is not None:
            ledger.header_dirty = False
            del self._dirty_headers[ledger_id]
            if len(runs) != 1 or runs[0][0] != 0:
                runs.append([])
        self._unsynced.add(ledger_id)
        try:
            async with self._files.use(ledger_id, create=ledger.new) as file:
                ledger.new = False
                for run in runs:
                    is_last = run is runs[-1]
                    head = header if is_last else None
                    await self._write(file, ledger_id, run, head, sync=sync and is_last)
        except BaseException:
            if header is not None:
                self._mark_header(ledger)
            raise
        if sync:
            self._unsynced.discard(ledger_id)

    async def _write(
        self, file: File, ledger_id: int, run: list[int], header: bytes | None, *, sync: bool
    ) -> None:
        """Write adjacent pages, and the header if they come behind it."""
        buffers: list[Buffer] = [] if header is None else [header]
        offset = 0 if header is not None else page_offset(run[0])
        if run:
            buffers.append(self._pool.begin_write(ledger_id, run))
        is_written = False
        try:
            with self._uncut():
                await (file.write_and_sync if sync else file.write)(offset, buffers)
            is_written = True
        finally:
            self._pool.end_write(ledger_id, run, written=is_written)
            self._room.set()
        self._writes += 1
        self._syncs += sync

    @contextlib.contextmanager
    def _uncut(self) -> Iterator[None]:
        """Take note if a change of a file is cancelled: it may come yet."""
        try:
            yield
        except asyncio.CancelledError:
            self._cut_short = True
            raise


def _adjacent(page_nos: list[int]) -> list[list[int]]:
    """Cut ascending numbers into runs without gaps."""
    runs: list[list[int]] = []
    for page_no in page_nos:
        if runs and runs[-1][-1] == page_no - 1 and len(runs[-1]) < _WRITE_PAGES_MAX:
            runs[-1].append(page_no)
        else:
            runs.append([page_no])
    return runs


def _may_lack(ledger: _Ledger | None, *, known: bool) -> bool:
    """Tell whether zeros are an answer; ``CorruptError`` if there is none."""
    if ledger is None:
        return not known
    if not ledger.whole:
        raise damaged(ledger.ledger_id, "it is being rebuilt")
    return not ledger.gone


@contextlib.contextmanager
def _used(ledger: _Ledger) -> Iterator[None]:
    """Keep a header in memory."""
    ledger.users += 1
    try:
        yield
    finally:
        ledger.users -= 1
