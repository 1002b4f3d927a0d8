"""The node's entry logs: shared files of runs, in one or several data directories.

Owns: which logs there are, how long each is, which ledgers they hold, appending, sealing, reading,
scanning, removing. Does not own where a run is found (the index), which logs ``state`` lists, nor
when anything is synced, compacted or removed: the node decides.

    synced.length <= length
        length         where the next run goes, or where the map begins
        synced.length  durable; what ``lengths`` says, and what ``state`` may list

A log is open (a writer appends to it), then full (waiting for its map), then sealed, and at last
retired (``state`` must not list it any more) and removed.

Invariants:
    * A new log's id is above all that any directory or ``state`` knows, and above all of this
      process: nothing can point to an older log of that id, which the mark outlived.
    * ``lengths`` and ``open_maps`` fit together at each instant, and say only what is durable:
      bytes, map and name.
    * What ``append`` did not return has no place: a later append overwrites it, sealing cuts it.
    * A log whose map can't be read holds every ledger, as far as anybody is told.
    * Nothing is written to a log that was found damaged, so that it is found again at each start.

Crash: ``open`` cuts each log to what ``state`` says, and removes logs that it does not list. The
caller must know ``state`` for sure.

Cancellation: a write that was cancelled may still go on. Nothing more is appended to its log, and
the log is sealed at the next start.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from typing import Final, Literal

import numpy as np
import structlog

from tierlog.format.run import RUN_PREFIX_LEN, Run
from tierlog.model.errors import CorruptError, Reason, RetryableError, TierlogError
from tierlog.ports.files import Buffer, File, Files
from tierlog.ports.ids import Ids
from tierlog_ingest.storage.entrylog.entry_log_format import (
    LOG_HEADER_LEN,
    LOG_ID_MAX,
    MAP_ROW_LEN,
    MAP_TRAILER_LEN,
    LogHeader,
    pack_map,
    unpack_map,
)
from tierlog_ingest.storage.entrylog.entry_log_scan import SCAN_LEN, Found, LogScan
from tierlog_ingest.storage.entrylog.ledger_map import LedgerMap, all_ids
from tierlog_ingest.storage.entrylog.log_table import (
    LOGS_DIRECTORY,
    Location,
    Log,
    LogInfo,
    LogLength,
    Usage,
    columns_of,
    log_id_of,
    log_path,
)
from tierlog_ingest.storage.entrylog.open_files import OpenFiles

__all__ = [
    "LOGS_DIRECTORY", "EntryLogs", "Location", "LogInfo", "LogLength", "Writer", "log_path",
]  # fmt: skip

events = structlog.get_logger()

_BURST_BYTES_MAX: Final = 8 * 1024 * 1024

Writer = Literal["flush", "compaction"]


class EntryLogs:
    """All entry logs of a node."""

    def __init__(
        self,
        dirs: Sequence[Files],
        ids: Ids,
        *,
        log_bytes_max: int,
        open_files_max: int,
        direct_writes: bool = True,
    ) -> None:
        assert dirs
        assert LOG_HEADER_LEN < log_bytes_max < 2**32
        self._dirs = list(dirs)
        self._ids = ids
        self._log_bytes_max = log_bytes_max
        self._direct_writes = direct_writes
        self._logs: dict[int, Log] = {}
        self._removed: set[int] = set()
        self._next_id = 1
        self._counts = Counter[int]()
        """Logs ever made in each directory, and found there at the start."""
        self._current: dict[Writer, Log] = {}
        self._full: dict[int, Log] = {}
        self._writing: dict[Writer, asyncio.Lock] = {
            "flush": asyncio.Lock(),
            "compaction": asyncio.Lock(),
        }
        self._sealing = asyncio.Lock()
        self._syncing = asyncio.Lock()
        self._open_files = OpenFiles(self._open_file, open_max=open_files_max)
        self.damaged_logs: dict[int, set[tuple[int, int]]] = {}
        """Places (from, to) of each log that were found to hold no good run."""
        self.usage: Mapping[int, Mapping[int, int]] = Usage(self._logs)

    def __repr__(self) -> str:
        return (
            f"<EntryLogs {len(self._logs)} logs, {self.bytes_on_disk} bytes,"
            f" damaged={len(self.damaged_logs)}, unmapped={len(self.unmapped)}>"
        )

    # Start and end

    async def open(
        self,
        lengths: Sequence[Sequence[LogLength]],
        maps: Mapping[int, Mapping[int, int]],
        *,
        next_log_id: int = 1,
    ) -> list[str]:
        """Make the directories what ``state`` says; return damages, in words.

        ``lengths`` by directory. ``maps`` of the logs that were not sealed. ``next_log_id`` as
        it was, where logs with the highest ids may have been removed. Nothing is durable before
        the next ``sync``; a crash before it leads here again.
        """
        assert not self._logs
        assert len(lengths) == len(self._dirs)
        self._next_id = next_log_id
        damages: list[str] = []
        for directory, (files, listed) in enumerate(zip(self._dirs, lengths, strict=True)):
            await files.make_directory(LOGS_DIRECTORY)
            await self._remove_unlisted(files, {one.log_id for one in listed})
            for one in listed:
                if one.log_id in self._logs:
                    damages.append(f"entry log {one.log_id} is listed by two directories")
                    continue
                damages += await self._admit(directory, one, maps.get(one.log_id))
        await self._seal_full()
        return damages

    async def close(self) -> None:
        """Close all files; syncs nothing."""
        for log in self._logs.values():
            if log.file is not None:
                await log.file.close()
        await self._open_files.close()

    async def _remove_unlisted(self, files: Files, listed: set[int]) -> None:
        found = [log_id_of(name) for name in await files.list(LOGS_DIRECTORY)]
        known = [one for one in found if one is not None]
        self._next_id = max([self._next_id - 1, *known, *listed]) + 1
        for log_id in known:
            if log_id not in listed:
                await files.remove(log_path(log_id))

    async def _admit(
        self, directory: int, listed: LogLength, ledgers: Mapping[int, int] | None
    ) -> list[str]:
        """Take a log in as it is; return what is wrong with it."""
        own_map = None if listed.sealed or ledgers is None else LedgerMap(ledgers)
        log = Log(
            log_id=listed.log_id,
            directory=directory,
            length=listed.length,
            sealed=listed.sealed,
            synced=listed,
            map=own_map,
        )
        self._logs[log.log_id] = log
        self._counts[directory] += 1
        damages: list[str] = []
        if not listed.sealed and ledgers is None:
            damages.append("its ledgers map is not in the node's state")
        try:
            file = await self._dirs[directory].open(log_path(log.log_id))
        except FileNotFoundError:
            damages.append("its file is missing")
            return _named(damages, log)
        try:
            damages += await self._check(log, file)
            if not listed.sealed and not damages:
                # Sealing cuts it to its length.
                log.file, self._full[log.log_id] = file, log
        finally:
            if log.file is None:
                await file.close()
        return _named(damages, log)

    async def _check(self, log: Log, file: File) -> list[str]:
        damages: list[str] = []
        size = await file.size()
        if size < log.length:
            damages.append(f"it has {size} bytes in place of {log.length}")
        try:
            header = LogHeader.unpack(await file.read(0, LOG_HEADER_LEN))
            if header.log_id != log.log_id:
                damages.append(f"its header is that of log {header.log_id}")
        except CorruptError as error:
            damages.append(error.message)
        if log.sealed:
            try:
                log.map = await _read_map(log, file, size)
            except CorruptError as error:
                damages.append(error.message)
        return damages

    @property
    def next_log_id(self) -> int:
        """Above the id of every log there ever was."""
        return self._next_id

    # Appending

    async def append(self, runs: Sequence[Run], *, writer: Writer) -> list[Location]:
        """Write runs, not synced; on an error none of them counts as appended."""
        if not runs:
            return []
        async with self._writing[writer]:
            try:
                pieces = await self._write(runs, writer)
            except RetryableError:
                if not await self._leave_full_disk(writer):
                    raise
                pieces = await self._write(runs, writer)
            locations = []
            for log, part in pieces:
                self._logs[log.log_id] = log
                locations += log.note(part)
            for log, _ in pieces[:-1]:
                self._full[log.log_id] = log
            self._current[writer] = pieces[-1][0]
            if len(pieces) > 1:
                await self._seal_full()
        return locations

    async def _leave_full_disk(self, writer: Writer) -> bool:
        """End the writer's log, which took no more, if another directory has more room."""
        log = self._current.get(writer)
        if log is None or await self._roomiest() == log.directory:
            return False
        self._full[log.log_id] = self._current.pop(writer)
        return True

    async def seal(self, writer: Writer) -> None:
        """End the writer's log; its next append makes a new one."""
        async with self._writing[writer]:
            log = self._current.pop(writer, None)
            if log is not None:
                self._full[log.log_id] = log
                await self._seal_full()

    async def _write(self, runs: Sequence[Run], writer: Writer) -> list[tuple[Log, Sequence[Run]]]:
        log = self._current.get(writer)
        pieces: list[tuple[Log, Sequence[Run]]] = []
        try:
            for part in self._cut(runs, LOG_HEADER_LEN if log is None else log.length):
                log = await self._create() if log is None else log
                pieces.append((log, part))
                await _write_runs(log, part)
                log = None
        except RetryableError:
            for log, _ in pieces:
                await self._take_back(log)
            raise
        except BaseException:
            # It may be written to still.
            self._current.pop(writer, None)
            raise
        return pieces

    def _cut(self, runs: Sequence[Run], length: int) -> Iterator[Sequence[Run]]:
        """Cut runs into what goes to each log; the first part may be empty."""
        lengths = [len(run.encoded) for run in runs]
        if length + sum(lengths) <= self._log_bytes_max:
            yield runs
            return
        start = 0
        for at, run_len in enumerate(lengths):
            if length + run_len > self._log_bytes_max and length > LOG_HEADER_LEN:
                yield runs[start:at]
                start, length = at, LOG_HEADER_LEN
            length += run_len
        yield runs[start:]

    async def _create(self) -> Log:
        directory = await self._roomiest()
        log_id = self._next_id
        if log_id > LOG_ID_MAX:
            raise RetryableError(
                f"all {LOG_ID_MAX} ids of entry logs are used",
                reason=Reason.READ_ONLY,
                remedy="Format the node, and let the others repair what it held",
            )
        self._next_id += 1
        self._counts[directory] += 1
        header = LogHeader(log_id=log_id, generation=self._ids.uuid().int >> 65).pack()
        files, path = self._dirs[directory], log_path(log_id)
        file = await files.open(path, create=True, direct=self._direct_writes)
        return Log(log_id=log_id, directory=directory, file=file, header=header)

    async def _roomiest(self) -> int:
        """Return the directory with most free bytes; of those on one disk, that of fewest logs."""
        free = [await files.free_bytes() for files in self._dirs]
        return max(range(len(free)), key=lambda one: (free[one], -self._counts[one]))

    async def _take_back(self, log: Log) -> None:
        """Give back the room of what could not be written whole."""
        assert log.file is not None
        with contextlib.suppress(TierlogError, FileNotFoundError):
            if log.log_id in self._logs:
                await log.file.truncate(log.length)
            else:
                await log.file.close()
                await self._dirs[log.directory].remove(log_path(log.log_id))

    async def _seal_full(self) -> None:
        async with self._sealing:
            for log in list(self._full.values()):
                try:
                    await self._seal(log)
                except RetryableError as error:
                    # The runs are safe without their map; each sync tries again.
                    events.warning("entry_log.unsealed", log_id=log.log_id, cause=str(error))

    async def _seal(self, log: Log) -> None:
        assert log.file is not None
        data = pack_map(log.whole_map(), log_id=log.log_id, map_offset=log.length)
        try:
            await log.file.truncate(log.length)
            await log.file.write(log.length, [data])
        except RetryableError:
            raise
        except BaseException:
            del self._full[log.log_id]
            raise
        del self._full[log.log_id]
        log.sealed = True

    # Durability

    async def sync(self) -> None:
        """Make durable what was appended and sealed before: bytes, then names."""
        async with self._syncing:
            await self._seal_full()
            dirty = [log for log in self._logs.values() if log.synced != log.now]
            reached = [log.begin_sync() for log in dirty]
            for log in dirty:
                assert log.file is not None
                await log.file.sync()
            for directory in sorted({log.directory for log in dirty if log.synced is None}):
                await self._dirs[directory].sync_directory(LOGS_DIRECTORY)
            for log, point in zip(dirty, reached, strict=True):
                log.end_sync(point)
            for log in dirty:
                if log.sealed and log.synced == log.now and log.file is not None:
                    file, log.file = log.file, None
                    await file.close()

    def lengths(self, directory: int) -> list[LogLength]:
        """Return what ``state`` is to say of a directory's logs."""
        found = (log for log in self._logs.values() if log.directory == directory)
        return [log.synced for log in found if log.synced is not None and not log.retired]

    def open_maps(self) -> Mapping[int, LedgerMap]:
        """Return the maps of the logs that ``lengths`` calls unsealed; read them at once."""
        return {
            log.log_id: log.map
            for log in self._logs.values()
            if log.map is not None
            and log.synced is not None
            and not log.synced.sealed
            and not log.retired
        }

    # Reading

    async def read(self, log_id: int, offset: int, length: int) -> Buffer:
        """Return up to ``length`` bytes; fewer only where the runs end.

        ``RetryableError`` (UNKNOWN) when compaction removed the log: the index knows the new
        place. ``CorruptError`` when nothing can be there.
        """
        log = self._get(log_id)
        length = min(length, log.length - offset)
        if offset < LOG_HEADER_LEN or length < RUN_PREFIX_LEN:
            raise _damaged(log_id, "nothing begins there", offset=offset)
        try:
            data = await self._read(log, offset, length)
        except FileNotFoundError as error:
            raise _damaged(log_id, "its file is missing", offset=offset) from error
        if len(data) < RUN_PREFIX_LEN:
            raise _damaged(log_id, "the file is too short", offset=offset)
        return data

    async def scan(
        self, log_id: int, *, ledger_id: int | None = None, window_len: int = SCAN_LEN
    ) -> AsyncGenerator[Found, None]:
        """Iterate over all good runs with their offsets, or those of one ledger.

        The runs of a window are decoded in one go: a small one is for who must not hold others up.
        Once all was taken, bad places are in ``damaged_logs``; so is the whole log when its file
        is missing, and when its runs are not as many bytes of each ledger as its map says. The
        runs are views of the windows.
        """
        log = self._get(log_id)
        expected = None if log.map is None else log.map_of(ledger_id)
        found = LedgerMap()
        bad: set[tuple[int, int]] = set()
        scan = LogScan(
            lambda offset, length: self._read(log, offset, length),
            start=LOG_HEADER_LEN,
            end=log.length,
            ledger_id=ledger_id,
            holds=None if log.map is None else log.holds,
            on_bad=lambda start, end: bad.add((start, end)),
            window_len=window_len,
        )
        whole = (LOG_HEADER_LEN, log.length)
        try:
            async with contextlib.aclosing(scan.runs()) as windows:
                async for window in windows:
                    found.add(*columns_of([run for _, run in window]))
                    yield window
        except FileNotFoundError:
            bad.add(whole)
        if not bad and expected is not None and not found.agrees_with(expected):
            bad.add(whole)
        self._note_damage(log_id, bad)

    def _note_damage(self, log_id: int, bad: set[tuple[int, int]]) -> None:
        known = self.damaged_logs.get(log_id, set())
        if log_id in self._logs and not bad <= known:
            events.error("entry_log.damaged", log_id=log_id, places=sorted(bad - known))
            self.damaged_logs[log_id] = known | bad

    async def scan_map(self, log_id: int) -> bool:
        """Find out what an unmapped log holds; False when it has bad places and stays unmapped.

        Ledgers that were forgotten before are in the map again. A sealed log is unsealed then, so
        that the next start writes the map that could not be read.
        """
        log = self._get(log_id)
        if log.map is not None:
            return True
        ledgers = LedgerMap()
        async for window in self.scan(log_id):
            ledgers.add(*columns_of([run for _, run in window]))
        if self.damaged_logs.get(log_id):
            return False
        log.map = ledgers
        # As one that was never sealed: the next start writes its map again.
        log.sealed = False
        log.synced = log.now
        return True

    async def _read(self, log: Log, offset: int, length: int) -> Buffer:
        if log.file is not None:
            return await log.file.read(offset, length)
        async with self._open_files.use(log.log_id) as file:
            return await file.read(offset, length)

    async def _open_file(self, log_id: int) -> File:
        files = self._dirs[self._get(log_id).directory]
        return await files.open(log_path(log_id), direct=self._direct_writes)

    def _get(self, log_id: int) -> Log:
        log = self._logs.get(log_id)
        if log is not None:
            return log
        if log_id in self._removed:
            raise RetryableError(
                f"entry log {log_id} was compacted",
                reason=Reason.UNKNOWN,
                remedy="Look up the entry's place again",
            )
        raise _damaged(log_id, "there is no such log", offset=0)

    # What holds which ledger

    @property
    def bytes_on_disk(self) -> int:
        """Bytes of all logs, without maps."""
        return sum(log.length for log in self._logs.values())

    @property
    def unmapped(self) -> set[int]:
        """Logs whose ledgers are not known."""
        return {log.log_id for log in self._logs.values() if log.map is None}

    def logs(self) -> list[LogInfo]:
        """Return all logs that are not retired."""
        return [
            LogInfo(log.log_id, log.directory, log.length, log.sealed, log.live_bytes)
            for log in self._logs.values()
            if not log.retired
        ]

    def is_written(self, log_id: int) -> bool:
        """Tell whether a log is one that runs are appended to."""
        return any(log.log_id == log_id for log in self._current.values())

    def written_to(self) -> set[int]:
        """Return the logs that a writer appends to; nothing comes to any other."""
        return {log.log_id for log in self._current.values()}

    def live_bytes(self, log_id: int) -> int:
        """Return the bytes of runs whose ledger was not forgotten."""
        return self._get(log_id).live_bytes

    def logs_of(self, ledger_id: int) -> list[int]:
        """Return the logs that hold, or may hold, runs of a ledger."""
        return sorted(
            log.log_id for log in self._logs.values() if not log.retired and log.holds(ledger_id)
        )

    def ledger_ids(self) -> set[int]:
        """Return every ledger that a map names."""
        return all_ids(one for log in self._logs.values() for one in log.maps())

    def forget_ledger(self, ledger_id: int) -> None:
        """Count a deleted ledger's runs as dead."""
        self.forget_ledgers([ledger_id])

    def forget_ledgers(self, ledger_ids: Iterable[int]) -> None:
        """Count the runs of many ledgers as dead, at once."""
        ids = np.fromiter(ledger_ids, np.int64)
        for log in self._logs.values():
            for one in log.maps():
                one.forget(ids)

    # Removing

    def retire(self, log_id: int) -> None:
        """Leave a log out of ``lengths`` from now on; it can be read until it is removed."""
        log = self._get(log_id)
        assert log not in self._current.values(), "a log that is appended to is not retired"
        log.retired = True

    async def remove(self, log_id: int) -> None:
        """Remove a retired log, once ``state`` does not list it any more, durably."""
        log = self._get(log_id)
        assert log.retired, "state must forget a log before its file goes"
        async with self._syncing, self._sealing:
            self._logs.pop(log_id, None)
            self._full.pop(log_id, None)
            self._removed.add(log_id)
            self.damaged_logs.pop(log_id, None)
            if log.file is not None:
                await log.file.close()
            await self._open_files.drop(log_id)
            with contextlib.suppress(FileNotFoundError):
                await self._dirs[log.directory].remove(log_path(log_id))
            await self._dirs[log.directory].sync_directory(LOGS_DIRECTORY)


async def _write_runs(log: Log, runs: Sequence[Run]) -> None:
    assert log.file is not None
    buffers: list[Buffer] = [run.encoded for run in runs]
    offset = log.length
    if offset == LOG_HEADER_LEN:
        offset, buffers = 0, [log.header, *buffers]
    if not buffers:
        return
    # Written back bit by bit: all at once would keep the journal from the disk for long.
    log.unwritten_bytes += sum(map(len, buffers))
    if log.unwritten_bytes < _BURST_BYTES_MAX:
        await log.file.write(offset, buffers)
    else:
        await log.file.write_and_sync(offset, buffers)
        log.unwritten_bytes = 0


async def _read_map(log: Log, file: File, size: int) -> LedgerMap:
    map_len = size - log.length
    # Each ledger has at least one run, which is longer than its row.
    if not 0 <= map_len <= log.length // RUN_PREFIX_LEN * MAP_ROW_LEN + MAP_TRAILER_LEN:
        raise _damaged(log.log_id, f"{map_len} bytes in place of a map", offset=log.length)
    data = await file.read(log.length, map_len)
    return unpack_map(data, log_id=log.log_id, map_offset=log.length)


def _named(damages: Iterable[str], log: Log) -> list[str]:
    return [f"entry log {log.log_id}: {one}" for one in damages]


def _damaged(log_id: int, what: str, *, offset: int) -> CorruptError:
    return CorruptError(
        f"entry log {log_id} can't be read at byte {offset}: {what}",
        remedy="Read another copy",
        details={"log_id": str(log_id), "offset": str(offset)},
    )
