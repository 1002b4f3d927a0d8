"""Writes what is dirty of the ledgers' indexes, and makes it durable.

Owns: which headers are dirty, which files were written and not synced, and the order of writes.
Does not own pages (``page_pool``), headers (``cached_index``), nor when it is time to flush.

Invariants:
    * A header is written after all pages that it lists, or with them in one write, so that a
      process that is killed leaves an index that is whole.
    * One task at a time writes a ledger's file; what is changed meanwhile is dirty again.
    * What was written is in ``unsynced`` from before the write until it is synced.
    * After ``flush``, all that was dirty or unsynced before it is durable, names included.

Cost: adjacent pages are one write. Where many ledgers are due, those that need little go to the
disk many at a time, in one step.

Cancellation: a write that was cut short may still reach the file, and would race with the next.
From then on nothing is written any more; ``flush`` says so, and the mark stays where it is.
"""

import asyncio
import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Final, NamedTuple

from tierlog.model.errors import TierlogError
from tierlog.ports.files import Buffer, DiskFailedError, File, FileWrite
from tierlog_ingest.storage.index.cached_index import CachedIndex
from tierlog_ingest.storage.index.index_files import IndexFiles, index_path
from tierlog_ingest.storage.index.index_format import page_offset
from tierlog_ingest.storage.index.page_pool import PagePool

_WRITE_PAGES_MAX: Final = 256
_WRITERS: Final = 8
_BATCH_MIN: Final = 16
_BATCH_MAX: Final = 1024
_BATCH_WRITES_MAX: Final = 4
_BATCH_PAGES_MAX: Final = 4
"""What a ledger may need to go with others; more is worth a step of its own."""


class _Job(NamedTuple):
    """One write to one file: adjacent pages, the header alone, or both from the beginning on."""

    ledger: CachedIndex
    page_nos: list[int]
    header: bytes | None

    @property
    def offset(self) -> int:
        """Where it goes."""
        return 0 if self.header is not None else page_offset(self.page_nos[0])


class IndexWriter:
    """The writing half of a ledger cache."""

    def __init__(
        self, files: IndexFiles, pool: PagePool, indexes: Mapping[int, CachedIndex]
    ) -> None:
        self._files = files
        self._pool = pool
        self._indexes = indexes
        self._dirty_headers: dict[int, None] = {}
        self._unsynced: set[int] = set()
        self._flushing = asyncio.Lock()
        self._cut_short = False
        self.room = asyncio.Event()
        """Set whenever frames may have become free."""
        self.write_count = 0
        self.sync_count = 0

    def __repr__(self) -> str:
        return f"<IndexWriter headers={len(self._dirty_headers)}, unsynced={len(self._unsynced)}>"

    @property
    def unsynced_count(self) -> int:
        """Files that were written and not synced."""
        return len(self._unsynced)

    def mark_header(self, index: CachedIndex) -> None:
        """Take note that a header was changed."""
        if not index.header_dirty and not index.gone:
            index.header_dirty = True
            self._dirty_headers[index.ledger_id] = None

    def forget(self, ledger_id: int) -> None:
        """Take note that a ledger's file is of no interest any more."""
        self._dirty_headers.pop(ledger_id, None)
        self._unsynced.discard(ledger_id)
        self.room.set()

    def check(self) -> None:
        """Assert the invariants; for tests."""
        assert all(ledger_id in self._indexes for ledger_id in self._pool.dirty_ledgers())
        dirty = {one for one, index in self._indexes.items() if index.header_dirty}
        assert dirty == set(self._dirty_headers)
        assert self._unsynced <= self._files.ledger_ids()

    async def flush(self) -> None:
        """Make durable what was changed before: pages, then headers, then names."""
        async with self._flushing:
            due = dict.fromkeys(self._pool.dirty_ledgers())
            due.update(self._dirty_headers)
            await self.write(due, sync=True)
            await self.write(list(self._unsynced), sync=True)
            await self._files.sync_folders()

    async def write(self, ledger_ids: Iterable[int], *, sync: bool) -> None:
        """Write what is dirty of some ledgers."""
        waiting = iter(ledger_ids)
        while part := list(islice(waiting, _BATCH_MAX)):
            if len(part) >= _BATCH_MIN:
                part = await self._write_batch(part, sync=sync)
            await self._write_in_parallel(part, sync=sync)

    async def empty(self, ledger_id: int) -> None:
        """Make a file empty, durably; it is made if need be."""
        with self._uncut():
            async with self._files.use(ledger_id, create=True) as file:
                await file.truncate(0)
                await file.sync()

    # One by one

    async def _write_in_parallel(self, ledger_ids: Sequence[int], *, sync: bool) -> None:
        waiting = iter(ledger_ids)
        errors: list[Exception] = []
        if len(ledger_ids) <= 1:
            await self._write_each(waiting, errors, sync=sync)
        else:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(min(_WRITERS, len(ledger_ids))):
                    tasks.create_task(self._write_each(waiting, errors, sync=sync))
        if errors:
            # A failed sync beside a full disk is not one more write to try again.
            raise next((one for one in errors if not isinstance(one, TierlogError)), errors[0])

    async def _write_each(
        self, ledger_ids: Iterator[int], errors: list[Exception], *, sync: bool
    ) -> None:
        """Write ledgers until there is an error. It is not raised: that would cancel others."""
        for ledger_id in ledger_ids:
            if errors:
                return
            try:
                await self._write_one(ledger_id, sync=sync)
            except Exception as error:  # noqa: BLE001 - whatever it is, the caller raises it
                errors.append(error)

    async def _write_one(self, ledger_id: int, *, sync: bool) -> None:
        self._check_uncut()
        index = self._indexes.get(ledger_id)
        if index is None:
            await self._sync_file(ledger_id, sync=sync)
            return
        with index.used():
            await index.written()
            if index.gone:
                return
            index.begin_write()
            try:
                jobs = self._jobs_of(index)
                if jobs:
                    await self._write_jobs(index, jobs, sync=sync)
                else:
                    await self._sync_file(ledger_id, sync=sync)
            finally:
                index.end_write()

    async def _sync_file(self, ledger_id: int, *, sync: bool) -> None:
        if not sync or ledger_id not in self._unsynced:
            return
        self._unsynced.discard(ledger_id)  # first: what is written meanwhile is due again
        try:
            async with self._files.use(ledger_id) as file:
                await file.sync()
        except FileNotFoundError:
            return  # removed meanwhile
        except BaseException:
            self._unsynced.add(ledger_id)
            raise
        self.sync_count += 1

    async def _write_jobs(self, index: CachedIndex, jobs: list[_Job], *, sync: bool) -> None:
        """Write a ledger's dirty pages, then its header."""
        ledger_id = index.ledger_id
        self._unsynced.add(ledger_id)
        self._take_header(jobs)
        try:
            async with self._files.use(ledger_id, create=index.new) as file:
                index.new = False
                for job in jobs:
                    await self._write_job(file, job, sync=sync and job is jobs[-1])
        except FileNotFoundError:
            self._give_back_header(jobs)
            if not index.gone:
                raise
        except BaseException:
            self._give_back_header(jobs)
            raise
        else:
            if sync:
                self._unsynced.discard(ledger_id)

    async def _write_job(self, file: File, job: _Job, *, sync: bool) -> None:
        buffers = self._begin(job)
        is_written = False
        try:
            with self._uncut():
                await (file.write_and_sync if sync else file.write)(job.offset, buffers)
            is_written = True
        finally:
            self._end(job, written=is_written, sync=sync)

    # Many at a time

    async def _write_batch(self, ledger_ids: list[int], *, sync: bool) -> list[int]:
        """Write the ledgers that need little; return those that are still to be done."""
        self._check_uncut()
        await self._files.make_folders(
            one for one in ledger_ids if (index := self._indexes.get(one)) and index.new
        )
        left: list[int] = []
        jobs: dict[int, list[_Job]] = {}
        only_sync: list[int] = []
        for ledger_id in ledger_ids:
            index = self._indexes.get(ledger_id)
            found = self._jobs_of(index) if index is not None and index.writing is None else []
            if found and _is_little(found):
                jobs[ledger_id] = found
            elif found or (index is not None and index.writing is not None):
                left.append(ledger_id)
            elif sync and ledger_id in self._unsynced:
                only_sync.append(ledger_id)
        is_done = await self._write_at_once(jobs, only_sync, sync=sync)
        return left if is_done else ledger_ids

    async def _write_at_once(
        self, due: dict[int, list[_Job]], only_sync: list[int], *, sync: bool
    ) -> bool:
        """Write and sync in one step; False if a file is missing: one by one it shows which."""
        jobs = [job for some in due.values() for job in some]
        indexes = [some[0].ledger for some in due.values()]
        self._unsynced.update(due)
        self._unsynced.difference_update(only_sync)
        self._take_header(jobs)
        is_written = False
        for index in indexes:
            index.begin_write()
        try:
            writes = {one: FileWrite(index_path(one), []) for one in only_sync}
            for ledger_id, some in due.items():
                pieces = [(job.offset, self._begin(job)) for job in some]
                create = some[0].ledger.new
                writes[ledger_id] = FileWrite(index_path(ledger_id), pieces, create=create)
            with self._uncut():
                is_written = await self._files.write(writes, sync=sync)
        finally:
            for job in jobs:
                self._end(job, written=is_written, sync=False)
            for index in indexes:
                index.end_write()
                index.new = index.new and not is_written
            if not is_written:
                self._give_back_header(jobs)
                self._unsynced.update(one for one in only_sync if one in self._files.ledger_ids())
            elif sync:
                self._unsynced.difference_update(due)
                self.sync_count += len(writes)
        return is_written

    # What is to be written

    def _jobs_of(self, index: CachedIndex) -> list[_Job]:
        """Return the writes that an index needs."""
        runs = _adjacent(self._pool.dirty_pages(index.ledger_id))
        header = index.pack() if index.header_dirty else None
        if header is not None and (len(runs) != 1 or runs[0][0] != 0):
            runs.append([])
        return [
            _Job(index, run, header if at == len(runs) - 1 else None) for at, run in enumerate(runs)
        ]

    def _take_header(self, jobs: list[_Job]) -> None:
        for job in jobs:
            if job.header is not None:
                job.ledger.header_dirty = False
                del self._dirty_headers[job.ledger.ledger_id]

    def _give_back_header(self, jobs: list[_Job]) -> None:
        for job in jobs:
            if job.header is not None:
                self.mark_header(job.ledger)

    def _begin(self, job: _Job) -> list[Buffer]:
        buffers: list[Buffer] = [] if job.header is None else [job.header]
        if job.page_nos:
            buffers.append(self._pool.begin_write(job.ledger.ledger_id, job.page_nos))
        return buffers

    def _end(self, job: _Job, *, written: bool, sync: bool) -> None:
        self._pool.end_write(job.ledger.ledger_id, job.page_nos, written=written)
        self.room.set()
        self.write_count += written
        self.sync_count += written and sync

    def _check_uncut(self) -> None:
        if self._cut_short:
            raise DiskFailedError(
                "a write to an index was cancelled and may come yet. Start the node anew"
            )

    @contextlib.contextmanager
    def _uncut(self) -> Iterator[None]:
        """Take note if a change of a file is cancelled: it may come yet."""
        try:
            yield
        except asyncio.CancelledError:
            self._cut_short = True
            raise


def _is_little(jobs: list[_Job]) -> bool:
    pages = sum(len(job.page_nos) for job in jobs)
    return len(jobs) <= _BATCH_WRITES_MAX and pages <= _BATCH_PAGES_MAX


def _adjacent(page_nos: list[int]) -> list[list[int]]:
    """Cut ascending numbers into runs without gaps."""
    runs: list[list[int]] = []
    for page_no in page_nos:
        if runs and runs[-1][-1] == page_no - 1 and len(runs[-1]) < _WRITE_PAGES_MAX:
            runs[-1].append(page_no)
        else:
            runs.append([page_no])
    return runs
