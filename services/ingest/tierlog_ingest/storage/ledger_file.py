"""One ledger on this node: its file of encoded runs back to back, its index, its buffer.

    offset  size  field
         0     …  runs, each as tierlog.format.run has it, in the order of their arrival

Owns: the lengths that say what is where, buffering, flushing, and finding runs in a file after a
restart. Does not own durability of acknowledged runs: the journal does, until a checkpoint.

    0 <= synced_len <= flushed_len <= journaled_len <= logical_len
         synced_len     durable in the file
         flushed_len    given to the file
         journaled_len  durable in the journal, or in the file since before the last mark
         logical_len    where the next run goes; what is not in the file is in ``buffer``
         mark_len       logical_len at the last mark: what BASE records

Invariants:
    * ``index`` and ``buffer`` hold exactly the runs below ``logical_len``.
    * Nothing reaches the file that the journal does not know of (BASE, too), so that whatever a
      crash does to the file's tail, the journal says where the tail begins.
    * What scanning can't read makes ``damaged``: nothing of the ledger is called absent then.
"""

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final

import structlog

from tierlog.format.run import RUN_MAGIC, RUN_PREFIX_LEN, Run
from tierlog.model.errors import CorruptError
from tierlog.model.ids import NO_ENTRY, EntryId, LedgerId
from tierlog.ports.files import Buffer, File, Files
from tierlog_ingest.storage.run_index import RunIndex

log = structlog.get_logger()

LEDGERS_DIRECTORY: Final = "ledgers"
_SUFFIX: Final = ".runs"
_SCAN_LEN: Final = 4 * 1024 * 1024
_RESYNC_LEN: Final = 8 * 1024 * 1024


def ledger_file_path(ledger_id: int) -> str:
    """Return a ledger's file name."""
    return f"{LEDGERS_DIRECTORY}/{ledger_id:020d}{_SUFFIX}"


async def list_ledger_files(files: Files) -> list[LedgerId]:
    """Return the ids of all ledgers that have a file."""
    names = await files.list(LEDGERS_DIRECTORY)
    stems = [name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX)]
    return [LedgerId(int(stem)) for stem in stems if stem.isdigit()]


class OpenFiles:
    """A bounded number of open ledger files; those in use are never closed."""

    def __init__(self, files: Files, *, open_max: int) -> None:
        self._files = files
        self._open_max = open_max
        self._open: OrderedDict[int, File] = OrderedDict()
        self._users: dict[int, int] = {}
        self._opening: dict[int, asyncio.Lock] = {}

    def __repr__(self) -> str:
        return f"<OpenFiles {len(self._open)}/{self._open_max}>"

    @contextlib.asynccontextmanager
    async def use(self, ledger_id: int, *, create: bool = False) -> AsyncIterator[File]:
        """Lend a ledger's file."""
        self._users[ledger_id] = self._users.get(ledger_id, 0) + 1
        try:
            yield await self._get(ledger_id, create=create)
        finally:
            self._users[ledger_id] -= 1
            if not self._users[ledger_id]:
                del self._users[ledger_id]
            await self._close_surplus()

    async def drop(self, ledger_id: int) -> None:
        """Close a ledger's file, whoever uses it."""
        file = self._open.pop(ledger_id, None)
        if file is not None:
            await file.close()

    async def close(self) -> None:
        """Close all."""
        for ledger_id in list(self._open):
            await self.drop(ledger_id)

    async def _get(self, ledger_id: int, *, create: bool) -> File:
        lock = self._opening.setdefault(ledger_id, asyncio.Lock())
        async with lock:
            file = self._open.get(ledger_id)
            if file is None:
                file = await self._files.open(ledger_file_path(ledger_id), create=create)
                self._open[ledger_id] = file
            self._open.move_to_end(ledger_id)
        if not lock.locked():
            self._opening.pop(ledger_id, None)
        return file

    async def _close_surplus(self) -> None:
        while len(self._open) > self._open_max:
            idle = next((one for one in self._open if one not in self._users), None)
            if idle is None:
                return
            await self.drop(idle)


@dataclass(slots=True)
class Gauge:
    """Bytes in the buffers of all ledgers."""

    bytes: int = 0


class Ledger:
    """What the node knows of one ledger. The index is there once it is ``loaded``."""

    def __init__(self, ledger_id: LedgerId, gauge: Gauge, *, on_disk: bool) -> None:
        self.ledger_id = ledger_id
        self.gone = False
        self._gauge = gauge
        self.index = RunIndex()
        self.loaded = not on_disk
        self.loading: asyncio.Future[None] | None = None
        self.damaged = False
        self.new_name = not on_disk
        """The file's name may not be durable yet."""
        self.buffer: dict[int, Run] = {}
        self.logical_len = 0
        self.journaled_len = 0
        self.flushed_len = 0
        self.synced_len = 0
        self.mark_len = 0
        self.based_in_era = -1
        """In which era (between two marks) BASE was journaled."""
        self.last_add_confirmed: EntryId = NO_ENTRY
        self.lac_moved = asyncio.Event()
        self.in_use = 0
        self._flushing = asyncio.Lock()

    def __repr__(self) -> str:
        return (
            f"<Ledger {self.ledger_id} {self.synced_len}/{self.flushed_len}/{self.logical_len},"
            f" {self.index!r}, LAC {self.last_add_confirmed}>"
        )

    @property
    def dirty(self) -> bool:
        """Whether something is not durable in the file."""
        return self.synced_len < self.logical_len or self.new_name

    @property
    def begun(self) -> bool:
        """Whether anything ever went to the file, or should."""
        return self.journaled_len > 0

    @property
    def has_entries(self) -> bool:
        """Whether the node holds, or may hold, entries of it."""
        return not self.loaded or len(self.index) > 0 or self.damaged

    def place(self, run: Run) -> bool:
        """Index and buffer a run; False when it is there already."""
        assert self.loaded
        if not self.index.insert(run, self.logical_len):
            return False
        self.buffer[self.logical_len] = run
        self._gauge.bytes += len(run.encoded)
        self.logical_len += len(run.encoded)
        return True

    def confirm(self, last_add_confirmed: EntryId) -> None:
        """Move the LAC, which never goes back."""
        if last_add_confirmed > self.last_add_confirmed:
            self.last_add_confirmed = last_add_confirmed
            self.lac_moved.set()
            self.lac_moved = asyncio.Event()

    def roll_back(self, offset: int) -> None:
        """Forget what lies at ``offset`` and behind: it could not be journaled."""
        assert offset >= self.journaled_len
        self.index.drop_from(offset)
        for found in [one for one in self.buffer if one >= offset]:
            self._unbuffer(found)
        self.logical_len = offset
        self.mark_len = min(self.mark_len, offset)
        self.based_in_era = -1

    async def flush(self, open_files: OpenFiles, *, sync: bool = False) -> None:
        """Give the buffer to the file, and with ``sync`` make the file durable."""
        async with self._flushing:
            if self.gone:
                return
            async with open_files.use(self.ledger_id, create=True) as file:
                await self._flush(file, sync=sync)

    async def _flush(self, file: File, *, sync: bool) -> None:
        target = self.journaled_len
        offsets = sorted(at for at in self.buffer if at < target)
        if offsets:
            assert offsets[0] == self.flushed_len
            await file.write(self.flushed_len, [self.buffer[at].encoded for at in offsets])
            self.flushed_len = target
        for at in offsets:
            self._unbuffer(at)
        if sync:
            await file.sync()
            self.synced_len = target

    def _unbuffer(self, at: int) -> None:
        self._gauge.bytes -= len(self.buffer.pop(at).encoded)

    async def delete(self, files: Files, open_files: OpenFiles) -> None:
        """Remove the file; nothing comes back."""
        async with self._flushing:
            self.gone = True
            for at in list(self.buffer):
                self._unbuffer(at)
            await open_files.drop(self.ledger_id)
            with contextlib.suppress(FileNotFoundError):
                await files.remove(ledger_file_path(self.ledger_id))

    async def load(self, open_files: OpenFiles) -> None:
        """Build the index from the whole file, all of which is durable."""
        async with open_files.use(self.ledger_id) as file:
            size = await file.size()
            await self._scan(file, size)
        self.logical_len = self.journaled_len = self.flushed_len = size
        self.synced_len = self.mark_len = size
        self.loaded = True

    async def restore(self, open_files: OpenFiles, base_len: int) -> None:
        """Cut the file to what was durable at the mark, and load it; replay brings the rest."""
        self.new_name = True
        async with open_files.use(self.ledger_id, create=True) as file:
            size = await file.size()
            if size < base_len:
                log.error("ledger.cut", ledger_id=self.ledger_id, size=size, expected=base_len)
                self.damaged = True
            elif size > base_len:
                await file.truncate(base_len)
        await self.load(open_files)

    def unload(self) -> None:
        """Forget the index; the file has everything."""
        assert self.loaded
        assert not self.dirty
        assert not self.buffer
        self.index = RunIndex()
        self.loaded = False

    async def _scan(self, file: File, size: int) -> None:
        at, window, window_at = 0, memoryview(b""), 0
        while at < size:
            inside = at - window_at
            length = _run_len(window[inside : inside + RUN_PREFIX_LEN], size - at)
            wanted = length if length is not None else min(RUN_PREFIX_LEN, size - at)
            if len(window) - inside < wanted:
                window = memoryview(await file.read(at, max(_SCAN_LEN, wanted)))
                window_at = at
                if len(window) < wanted:
                    self.damaged = True
                    return
                continue
            run = _decode(window[inside : inside + length]) if length is not None else None
            if run is None or run.header.ledger_id != self.ledger_id:
                at = await self._resync(file, at, size)
                window, window_at = memoryview(b""), at
                continue
            self._note(run, at)
            at += len(run.encoded)

    def _note(self, run: Run, at: int) -> None:
        try:
            self.index.insert(run, at)
        except CorruptError as error:
            log.error("ledger.conflict", ledger_id=self.ledger_id, offset=at, cause=str(error))  # noqa: TRY400
            self.damaged = True
        self.confirm(run.header.last_add_confirmed)

    async def _resync(self, file: File, at: int, size: int) -> int:
        """Find the next good run behind a bad place."""
        self.damaged = True
        log.error("ledger.damaged", ledger_id=self.ledger_id, offset=at)
        start = at + 1
        while start < size:
            window = await file.read(start, _RESYNC_LEN)
            found = window.find(RUN_MAGIC)
            while found >= 0:
                length = _run_len(window[found : found + RUN_PREFIX_LEN], size - start - found)
                if length is not None:
                    run = _decode(await file.read(start + found, length))
                    if run is not None and run.header.ledger_id == self.ledger_id:
                        return start + found
                found = window.find(RUN_MAGIC, found + 1)
            start += max(1, len(window) - len(RUN_MAGIC) + 1)
        return size


def _run_len(prefix: Buffer, len_max: int) -> int | None:
    try:
        return Run.encoded_len(prefix, len_max=len_max)
    except CorruptError:
        return None


def _decode(data: Buffer) -> Run | None:
    try:
        return Run.decode(data)
    except CorruptError:
        return None
