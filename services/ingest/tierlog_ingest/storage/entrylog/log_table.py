"""What is known of each entry log: where it is, how long, what is durable, which ledgers it holds.

Owns: the values, and which of a log's bytes are counted where. Does not own files, nor when
anything becomes durable: ``entry_log`` does.

Invariants:
    * ``map``, ``syncing`` and ``newer`` together count every run below ``length`` whose ledger was
      not forgotten; ``map`` those that are durable.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Final, NamedTuple

import numpy as np

from tierlog.format.run import Run
from tierlog.ports.files import File
from tierlog_ingest.storage.entrylog.entry_log_format import LOG_HEADER_LEN
from tierlog_ingest.storage.entrylog.ledger_map import Ids, LedgerMap, Sizes

LOGS_DIRECTORY: Final = "logs"
_SUFFIX: Final = ".log"


def log_path(log_id: int) -> str:
    """Return a log's file name."""
    return f"{LOGS_DIRECTORY}/{log_id:08d}{_SUFFIX}"


def log_id_of(name: str) -> int | None:
    """Return the log that a name in its folder means, if it means one."""
    stem = name.removesuffix(_SUFFIX)
    return int(stem) if stem != name and stem.isdecimal() and stem.isascii() else None


class Location(NamedTuple):
    """Where an encoded run lies."""

    log_id: int
    offset: int
    length: int


class LogLength(NamedTuple):
    """What ``state`` says of a log: where its runs end, and whether a map follows them."""

    log_id: int
    length: int
    sealed: bool


class LogInfo(NamedTuple):
    """A log as compaction sees it."""

    log_id: int
    directory: int
    length: int
    sealed: bool
    live_bytes: int


@dataclass(slots=True, eq=False, kw_only=True)
class Log:
    """One log; written by ``EntryLogs`` alone."""

    log_id: int
    directory: int
    length: int = LOG_HEADER_LEN
    sealed: bool = False
    synced: LogLength | None = None
    """What is durable; None: not even the name."""
    map: LedgerMap | None = field(default_factory=LedgerMap)
    """The runs below ``synced.length``; None: could not be read."""
    newer: LedgerMap = field(default_factory=LedgerMap)
    """The runs behind them."""
    syncing: LedgerMap = field(default_factory=LedgerMap)
    """Those that the sync under way covers."""
    file: File | None = None
    """Kept open while anything is not durable, so that no error of the disk is missed."""
    header: bytes = b""
    """To be written with the first runs."""
    unwritten_bytes: int = 0
    """What the system may keep from the disk yet."""
    retired: bool = False

    @property
    def now(self) -> LogLength:
        return LogLength(self.log_id, self.length, self.sealed)

    @property
    def live_bytes(self) -> int:
        if self.map is None:
            return self.length - LOG_HEADER_LEN
        return self.map.total + self.syncing.total + self.newer.total

    def maps(self) -> Iterator[LedgerMap]:
        if self.map is not None:
            yield self.map
        yield from (self.syncing, self.newer)

    def whole_map(self) -> LedgerMap:
        whole = LedgerMap()
        for one in self.maps():
            whole.merge(one)
        return whole

    def map_of(self, ledger_id: int | None) -> LedgerMap:
        """Return the part of the whole map that names one ledger, or all of it."""
        if ledger_id is None:
            return self.whole_map()
        size = sum(one.get(ledger_id, 0) for one in self.maps())
        return LedgerMap({ledger_id: size} if size else {})

    def holds(self, ledger_id: int) -> bool:
        return self.map is None or any(ledger_id in one for one in self.maps())

    def note(self, runs: Sequence[Run]) -> list[Location]:
        """Count written runs; return where they lie."""
        ids, lengths = columns_of(runs)
        offsets = self.length + np.cumsum(lengths) - lengths
        self.newer.add(ids, lengths)
        self.length += int(lengths.sum())
        return list(map(Location, repeat(self.log_id), offsets.tolist(), lengths.tolist()))

    def begin_sync(self) -> LogLength:
        # Something is in it still when the sync before was cancelled.
        self.syncing.merge(self.newer)
        self.newer = LedgerMap()
        return self.now

    def end_sync(self, reached: LogLength) -> None:
        if self.map is not None:
            self.map.merge(self.syncing)
        self.syncing = LedgerMap()
        self.synced = reached


class Usage(Mapping[int, Mapping[int, int]]):
    """Log id → ledger id → bytes, as they are at the moment of asking; mapped logs only."""

    def __init__(self, logs: Mapping[int, Log]) -> None:
        self._logs = logs

    def __getitem__(self, log_id: int) -> Mapping[int, int]:
        log = self._logs[log_id]
        if log.map is None:
            raise KeyError(log_id)
        return log.whole_map()

    def __iter__(self) -> Iterator[int]:
        return (log_id for log_id, log in self._logs.items() if log.map is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def columns_of(runs: Sequence[Run]) -> tuple[Ids, Sizes]:
    """Return the ledger and the length of each run."""
    ids = [run.header.ledger_id for run in runs]
    lengths = [len(run.encoded) for run in runs]
    return np.array(ids, np.int64), np.array(lengths, np.int64)
