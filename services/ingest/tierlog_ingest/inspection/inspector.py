"""Checks every record, checksum, slot and mark of a storage node's directories.

Owns: reading all of it, and comparing the parts with each other. Does not own repair (a node's
start does that), nor any format.

Invariants:
    * Nothing is written but what a sync of a file makes durable anyway.
    * Every problem is reported; one never hides those behind it.
    * Memory: 40 bytes a run in the logs, and the pages of one ledger's index.
"""

import re
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tierlog.format import records
from tierlog.format.run import Run
from tierlog.model.errors import CorruptError, RefusedError, TierlogError
from tierlog.model.ids import EntryId, LedgerId
from tierlog.ports.files import File, Files
from tierlog_ingest.inspection.report import LogFound, NodeFound, Verdict
from tierlog_ingest.storage.cookies import COOKIE_PATH
from tierlog_ingest.storage.entrylog.entry_log import LOGS_DIRECTORY, LogLength, log_path
from tierlog_ingest.storage.entrylog.entry_log_format import (
    LOG_HEADER_LEN,
    MAP_TRAILER_LEN,
    LogHeader,
    map_offset_of,
    unpack_map,
)
from tierlog_ingest.storage.entrylog.entry_log_scan import Found, LogScan
from tierlog_ingest.storage.index.index_files import IndexFiles, index_path
from tierlog_ingest.storage.index.index_format import (
    FIRST_SLOT_WORD,
    PAGE_LEN,
    SLOTS_PER_PAGE,
    WORD,
    HeaderPage,
    State,
    check_page,
    decode_header,
    page_offset,
    unpack_slot,
)
from tierlog_ingest.storage.intervals import IntervalSet
from tierlog_ingest.storage.journal.format import JournalPosition, Kind, Record, decode_ledger_id
from tierlog_ingest.storage.journal.replay import record_groups, scan_journal
from tierlog_ingest.storage.journal.segments import JOURNAL_DIRECTORY, list_segments
from tierlog_ingest.storage.state_file import NO_LIMBO, STATE_PATH, NodeState, read_states

_JOURNAL_DAMAGE: Final = re.compile(r"(\S+) at byte (\d+): (.*)", re.DOTALL)
_RUN: Final = np.dtype(
    [("ledger", "i8"), ("first", "i8"), ("last", "i8"), ("log", "i8"), ("offset", "i8")]
)

Tell = Callable[[str], None]
Runs = NDArray[np.void]
Pages = dict[int, NDArray[np.uint64]]

_DAMAGED_PAGE: Final = np.zeros(0, np.uint64)


@dataclass(frozen=True, slots=True)
class Directories:
    """A node's directories as its settings have them; without ``logs`` the first has all."""

    first: Files
    logs: tuple[Files, ...] = ()

    @property
    def all(self) -> tuple[Files, ...]:
        """Every directory, in the order in which ``state`` counts them."""
        return (self.first, *self.logs)

    @property
    def with_logs(self) -> tuple[Files, ...]:
        """Those that have entry logs and indexes."""
        return self.logs or (self.first,)


async def inspect_node(directories: Directories, tell: Tell) -> NodeFound:
    """Look at everything; raises only what makes looking impossible."""
    inspector = _Inspector(directories, tell)
    await inspector.run()
    return inspector.found


class _Inspector:
    def __init__(self, directories: Directories, tell: Tell) -> None:
        self.found = NodeFound()
        self._directories = directories
        self._tell = tell
        self._runs = array("q")
        """Of each run the fields of ``_RUN``, one behind the other."""
        self._replayed: dict[int, IntervalSet] = {}
        self._freed = IntervalSet()
        """Ids that ``state`` or the journal behind the mark calls freed."""

    async def run(self) -> None:
        await self._cookies()
        state = await self._state()
        self._freed = IntervalSet(state.freed if state is not None else ())
        self._tell("reading the journal")
        await self._journal(state)
        await self._logs(state)
        self._tell("comparing the indexes with the entry logs")
        await self._indexes(state)
        if state is None:
            self._report_missing_state()
        else:
            self.found.limbo = state.limbo_ceiling != NO_LIMBO
            self.found.doubtful = list(state.doubtful)
            for ledger_id in state.fences:
                self.found.ledger(ledger_id).fenced = True
        self.found.freed_ids = sum(last - first + 1 for first, last in self._freed.intervals())
        for ledger_id in [one for one in self.found.ledgers if one in self._freed]:
            del self.found.ledgers[ledger_id]

    # Identity and state

    async def _cookies(self) -> None:
        for at, files in enumerate(self._directories.all):
            try:
                records.decode_cookie(await read_file(files, COOKIE_PATH))
            except FileNotFoundError:
                self._report(at, COOKIE_PATH, 0, "there is no cookie", Verdict.REFUSED)
            except TierlogError as error:
                self._report(at, COOKIE_PATH, 0, error.message, Verdict.REFUSED)

    async def _state(self) -> NodeState | None:
        log_directories = len(self._directories.with_logs)
        try:
            state, damages = await read_states(
                self._directories.all, log_directories=log_directories
            )
        except (CorruptError, RefusedError) as error:
            self.found.report(STATE_PATH, 0, error.message, Verdict.REFUSED)
            return None
        for damage in damages:
            self.found.report(STATE_PATH, 0, damage)
        return state

    def _report_missing_state(self) -> None:
        """Report that ``state`` is gone: a node that never had one has nothing else either."""
        found = self.found
        is_told = any(one.path == STATE_PATH for one in found.problems)
        if not is_told and (found.logs or found.index_files or found.journal.records):
            what = "it is missing, and there is data"
            found.report(STATE_PATH, 0, what, Verdict.REFUSED)

    # Journal

    async def _journal(self, state: NodeState | None) -> None:
        journal = self.found.journal
        if state is None and not await self._directories.first.list(JOURNAL_DIRECTORY):
            return
        mark = state.mark if state is not None else await journal_start(self._directories.first)
        replay = await scan_journal(self._directories.first, mark)
        journal.segments, journal.mark = len(replay.segments), replay.mark
        async for group in record_groups(replay):
            for record in group:
                self._record(record)
        journal.end, journal.torn = replay.end, replay.torn
        for damage in replay.damages:
            match = _JOURNAL_DAMAGE.fullmatch(damage)
            path, offset, what = match.groups() if match else (JOURNAL_DIRECTORY, "0", damage)
            self.found.report(path, int(offset), what)

    def _record(self, record: Record) -> None:
        journal = self.found.journal
        journal.records[record.kind.name.lower()] += 1
        if record.kind is not Kind.RUN:
            ledger_id = decode_ledger_id(record.payload)
            if record.kind is Kind.FENCE:
                self.found.ledger(ledger_id).fenced = True
            else:
                self._freed.add(ledger_id)
            return
        try:
            run = Run.decode(record.payload)
        except CorruptError as error:
            self.found.report(JOURNAL_DIRECTORY, 0, error.message)
            return
        journal.run_bytes += len(run.encoded)
        journal.entries += run.header.count
        ledger = self.found.ledger(run.header.ledger_id)
        ledger.journal_entries += run.header.count
        self._note_end(run)
        known = self._replayed.setdefault(run.header.ledger_id, IntervalSet())
        for entry_id in (run.first_entry_id, run.last_entry_id):
            known.add(entry_id)

    def _note_end(self, run: Run) -> None:
        ledger = self.found.ledger(run.header.ledger_id)
        ledger.last_entry_id = max(ledger.last_entry_id, run.last_entry_id)
        ledger.last_add_confirmed = max(ledger.last_add_confirmed, run.header.last_add_confirmed)

    # Entry logs

    async def _logs(self, state: NodeState | None) -> None:
        for directory, logs in enumerate(await self._listed(state)):
            files = self._directories.with_logs[directory]
            there = set(await files.list(LOGS_DIRECTORY))
            for at, one in enumerate(logs):
                path = log_path(one.log_id)
                self._tell(f"reading entry log {at + 1} of {len(logs)} of directory {directory}")
                if path.rpartition("/")[2] not in there:
                    self._report(directory, path, 0, "the entry log is missing")
                    continue
                file = await files.open(path)
                try:
                    await self._log(directory, one, file)
                finally:
                    await file.close()

    async def _listed(self, state: NodeState | None) -> Sequence[Sequence[LogLength]]:
        """Return the logs of each directory: without ``state``, those that are there."""
        if state is not None:
            return state.logs
        return [await _logs_there(files) for files in self._directories.with_logs]

    async def _log(self, directory: int, listed: LogLength, file: File) -> None:
        path = log_path(listed.log_id)
        size = await file.size()
        if size < listed.length:
            self._report(directory, path, size, f"cut: {listed.length} bytes were durable")
        try:
            header = LogHeader.unpack(await file.read(0, LOG_HEADER_LEN))
            if header.log_id != listed.log_id:
                self._report(directory, path, 8, f"this is entry log {header.log_id}")
        except TierlogError as error:
            self._report(directory, path, 0, error.message)

        def bad(start: int, end: int) -> None:
            self._report(directory, path, start, f"no good run in {end - start} bytes")

        scan = LogScan(
            file.read,
            start=LOG_HEADER_LEN,
            end=min(size, listed.length),
            ledger_id=None,
            holds=None,
            on_bad=bad,
        )
        sizes: dict[int, int] = {}
        runs = entries = 0
        async for found in scan.runs():
            runs += len(found)
            entries += self._note_runs(listed.log_id, found, sizes)
        self.found.logs.append(
            LogFound(
                directory=directory,
                listed=listed,
                runs=runs,
                entries=entries,
                run_bytes=sum(sizes.values()),
                ledgers=len(sizes),
            )
        )
        if listed.sealed:
            await self._map(directory, listed, file, size, sizes)

    def _note_runs(self, log_id: int, found: Found, sizes: dict[int, int]) -> int:
        entries = 0
        for offset, run in found:
            ledger_id = run.header.ledger_id
            self._runs.extend((ledger_id, run.first_entry_id, run.last_entry_id, log_id, offset))
            sizes[ledger_id] = sizes.get(ledger_id, 0) + len(run.encoded)
            entries += run.header.count
            self.found.ledger(ledger_id).payload_bytes += run.payload_len
            self._note_end(run)
        return entries

    async def _map(
        self, directory: int, listed: LogLength, file: File, size: int, sizes: dict[int, int]
    ) -> None:
        path = log_path(listed.log_id)
        try:
            data = await file.read(listed.length, max(size - listed.length, MAP_TRAILER_LEN))
            ids, counted = unpack_map(
                data, log_id=listed.log_id, map_offset=listed.length
            ).columns()
        except TierlogError as error:
            self._report(directory, path, listed.length, error.message, Verdict.REBUILT)
            return
        for ledger_id, length in zip(ids.tolist(), counted.tolist(), strict=True):
            if sizes.get(ledger_id, 0) < length:
                what = f"the map says {length} bytes of ledger {ledger_id}, there are fewer"
                self._report(directory, path, listed.length, what)

    # Indexes

    async def _indexes(self, state: NodeState | None) -> None:
        files = IndexFiles(self._directories.with_logs, open_files_max=1)
        await files.list_all()
        unfinished = set(state.unfinished if state is not None else ())
        runs = np.frombuffer(self._runs, _RUN)
        runs = runs[np.argsort(runs["ledger"], kind="stable")]
        of_ledgers = np.ascontiguousarray(runs["ledger"])
        known = {*files.ledger_ids(), *np.unique(of_ledgers).tolist()}
        try:
            for ledger_id in sorted(one for one in known if one not in self._freed):
                low, high = np.searchsorted(of_ledgers, (ledger_id, ledger_id + 1))
                await self._index(files, LedgerId(ledger_id), runs[low:high], unfinished)
        finally:
            await files.close()

    async def _index(
        self, files: IndexFiles, ledger_id: LedgerId, runs: Runs, unfinished: set[int]
    ) -> None:
        path = index_path(ledger_id)
        if ledger_id in unfinished or files.is_doubled(ledger_id):
            self.found.report(path, 0, "it was being built anew", Verdict.REBUILT)
            return
        if ledger_id not in files.ledger_ids():
            if not self._all_replayed(ledger_id, runs):
                self.found.report(path, 0, "the index is missing", Verdict.REBUILT)
            return
        self.found.index_files += 1
        async with files.use(ledger_id) as file:
            pages = await self._pages(file, ledger_id)
        if pages is None:
            return
        ledger = self.found.ledger(ledger_id)
        ledger.entries = sum(int((page != 0).sum()) for page in pages.values())
        self.found.index_slots += ledger.entries
        self._compare(ledger_id, pages, runs)

    def _all_replayed(self, ledger_id: LedgerId, runs: Runs) -> bool:
        known = self._replayed.get(ledger_id, IntervalSet())
        return all(int(one) in known for one in runs["first"])

    async def _pages(self, file: File, ledger_id: LedgerId) -> Pages | None:
        path = index_path(ledger_id)
        try:
            header: HeaderPage = decode_header(await file.read(0, PAGE_LEN), ledger_id)
        except TierlogError as error:
            self.found.report(path, 0, error.message, Verdict.REBUILT)
            return None
        if header.state is not State.WHOLE:
            self.found.report(path, 0, "it was being built anew", Verdict.REBUILT)
            return None
        ledger = self.found.ledger(ledger_id)
        ledger.last_entry_id = max(ledger.last_entry_id, header.last_entry_id)
        confirmed = EntryId(max(ledger.last_add_confirmed, header.last_add_confirmed))
        ledger.last_add_confirmed = confirmed
        pages: Pages = {}
        for first, end in zip(header.bounds[::2], header.bounds[1::2], strict=True):
            for page_no in range(first, end):
                data = await file.read(page_offset(page_no), PAGE_LEN)
                try:
                    check_page(data, ledger_id, page_no)
                except CorruptError as error:
                    self.found.report(path, page_offset(page_no), error.message, Verdict.REBUILT)
                    pages[page_no] = _DAMAGED_PAGE
                    continue
                words = np.frombuffer(data, WORD).astype(np.uint64)
                pages[page_no] = words[FIRST_SLOT_WORD : FIRST_SLOT_WORD + SLOTS_PER_PAGE]
        self.found.index_pages += len(pages)
        return pages

    def _compare(self, ledger_id: LedgerId, pages: Pages, runs: Runs) -> None:
        """Every slot must name a run that is there, every run must be named."""
        path = index_path(ledger_id)
        places = {(int(one["log"]), int(one["offset"])): one for one in runs}
        replayed = self._replayed.get(ledger_id, IntervalSet())
        for page_no, page in pages.items():
            for slot in np.unique(page[page != 0]).tolist():
                at = np.flatnonzero(page == slot) + page_no * SLOTS_PER_PAGE
                first, last = int(at[0]), int(at[-1])
                place = unpack_slot(slot)
                run = places.get((place.log_id, place.offset))
                if run is not None and run["first"] <= first and last <= run["last"]:
                    continue
                if first in replayed or last in replayed:
                    continue  # written behind the mark: it comes back from the journal
                what = f"entries {first} to {last} point to no run in log {place.log_id}"
                self.found.report(path, page_offset(page_no), what)
        for run in runs:
            first, last = int(run["first"]), int(run["last"])
            if not (_has_slot(pages, first) and _has_slot(pages, last)) and first not in replayed:
                what = f"entries {first} to {last} lack a slot"
                self.found.report(path, 0, what, Verdict.REBUILT)

    def _report(
        self, directory: int, path: str, offset: int, what: str, verdict: Verdict = Verdict.DAMAGED
    ) -> None:
        place = f"directory {directory}: {path}" if len(self._directories.all) > 1 else path
        self.found.report(place, offset, what, verdict)


def _has_slot(pages: Pages, entry_id: int) -> bool:
    page_no, at = divmod(entry_id, SLOTS_PER_PAGE)
    page = pages.get(page_no)
    # A page that is damaged was reported already.
    return page is not None and (page is _DAMAGED_PAGE or bool(page[at]))


async def _logs_there(files: Files) -> list[LogLength]:
    found = []
    for name in await files.list(LOGS_DIRECTORY):
        stem = name.partition(".")[0]
        if not (stem.isascii() and stem.isdecimal() and log_path(int(stem)).endswith(f"/{name}")):
            continue
        file = await files.open(log_path(int(stem)))
        try:
            found.append(LogLength(int(stem), *await runs_end(file, int(stem))))
        finally:
            await file.close()
    return found


async def runs_end(file: File, log_id: int) -> tuple[int, bool]:
    """Return where a log's runs end, and whether its map lies there; else the file's end."""
    size = await file.size()
    trailer = await file.read(max(0, size - MAP_TRAILER_LEN), MAP_TRAILER_LEN)
    at = map_offset_of(trailer, log_id=log_id, size=size)
    return (size, False) if at is None else (at, True)


async def journal_start(files: Files) -> JournalPosition | None:
    """Return where the oldest segment begins that is there."""
    segments = await list_segments(files)
    return JournalPosition(segments[0], 0) if segments else None


async def read_file(files: Files, path: str) -> bytes:
    """Return a small file whole."""
    file = await files.open(path)
    try:
        return bytes(await file.read(0, await file.size()))
    finally:
        await file.close()
