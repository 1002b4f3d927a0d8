"""Walking an entry log from end to end: every good run, and every place that holds none.

Owns: windows, and finding the next good run behind a bad place. Does not own the file: ``read``
does, and it may answer less than it was asked for only at the file's end.

Invariants:
    * A run is handed out only if its checksum is right, also when it was only walked over.
    * What was neither handed out nor walked over is told to ``on_bad``.
    * The work is bounded: behind a bad place, candidates are checked in at most
      ``_RESYNC_FACTOR`` times the bytes that are left, and ``_RESYNC_LEN_MIN``.

An entry may itself contain what looks like a run. Inside of a good run it is never looked at;
behind a bad place a candidate must be of a ledger that the log's map names, and must be followed
by another run or by the end.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable
from itertools import accumulate
from struct import Struct
from typing import Final, NamedTuple

from tierlog.format.checksum import Buffer, crc32c
from tierlog.format.run import (
    CRC_OFFSET,
    IDS_OFFSET,
    RUN_HEADER_LEN,
    RUN_MAGIC,
    RUN_PREFIX_LEN,
    Run,
    take_runs,
)
from tierlog.model.errors import CorruptError

SCAN_LEN: Final = 4 * 1024 * 1024
_SECTOR_LEN: Final = 4096
_FAILURES_MAX: Final = 64  # sectors; what lies behind them is not asked for
_RESYNC_FACTOR: Final = 4
_RESYNC_LEN_MIN: Final = 64 * 1024 * 1024
_CANDIDATE_LEN: Final = 1024  # what looking at one costs, in bytes
_LEDGER_ID: Final = Struct(">q")
_CRC: Final = Struct(">I")

Read = Callable[[int, int], Awaitable[Buffer]]
Found = list[tuple[int, Run]]


class _Cut(NamedTuple):
    """What a window holds: runs, the bytes they and skipped ones take, and what comes then."""

    found: Found
    used: int
    wanted: int | None
    """Length of the next run, which the window does not hold whole; None: a bad place."""


class LogScan:
    """One walk over the runs between ``start`` and ``end``."""

    def __init__(
        self,
        read: Read,
        *,
        start: int,
        end: int,
        ledger_id: int | None,
        holds: Callable[[int], bool] | None,
        on_bad: Callable[[int, int], None],
        window_len: int = SCAN_LEN,
    ) -> None:
        self._read = read
        self._window_len = window_len
        self._start = start
        self._end = end
        self._ledger_id = ledger_id
        self._holds = holds
        self._on_bad = on_bad

    async def runs(self) -> AsyncGenerator[Found, None]:
        """Iterate over windows of (offset, run), never an empty one."""
        at, wanted = self._start, 0
        while at < self._end:
            asked = min(max(self._window_len, wanted), self._end - at)
            data = await self._read_what_can_be(at, asked)
            cut = _cut(memoryview(data), self._end - at, self._ledger_id)
            if cut.found:
                yield [(at + offset, run) for offset, run in cut.found]
            at += cut.used
            wanted = cut.wanted or 0
            if cut.wanted is None:
                after = await self._resync(at)
            elif len(data) < asked:
                after = self._end
            else:
                continue
            if at < after:
                self._on_bad(at, after)
            at = after

    async def _read_what_can_be(self, offset: int, length: int) -> Buffer:
        """Read, with zeros in place of what the disk can't read."""
        try:
            return await self._read(offset, length)
        except CorruptError:
            pieces: list[Buffer] = []
        failures, at, end = 0, offset, offset + length
        while at < end and failures < _FAILURES_MAX:
            wanted = min(_SECTOR_LEN, end - at)
            try:
                pieces.append(await self._read(at, wanted))
            except CorruptError:
                failures += 1
                pieces.append(bytes(wanted))
            at += wanted
        return b"".join([*pieces, bytes(end - at)])

    async def _resync(self, bad: int) -> int:
        """Return where the next good run begins behind ``bad``, or the end."""
        budget = max(_RESYNC_LEN_MIN, _RESYNC_FACTOR * (self._end - bad))
        length = await self._length_at(bad)
        # Its length may well be right: then nothing inside of it is looked at.
        if length is not None and (bad + length == self._end or await self._is_good(bad + length)):
            return bad + length
        start = bad + 1
        while start + RUN_HEADER_LEN <= self._end:
            window = bytes(await self._read_what_can_be(start, min(SCAN_LEN, self._end - start)))
            view = memoryview(window)
            found = window.find(RUN_MAGIC)
            while 0 <= found <= len(window) - RUN_HEADER_LEN:
                length = self._length_of(view[found : found + RUN_HEADER_LEN], start + found)
                budget -= length or _CANDIDATE_LEN
                if budget < 0:
                    return self._end
                if length is not None and await self._is_good(start + found):
                    return start + found
                found = window.find(RUN_MAGIC, found + 1)
            start += max(1, len(window) - RUN_HEADER_LEN + 1)
        return self._end

    async def _length_at(self, offset: int) -> int | None:
        if offset + RUN_HEADER_LEN > self._end:
            return None
        head = await self._read_what_can_be(offset, RUN_HEADER_LEN)
        return self._length_of(memoryview(head), offset) if len(head) == RUN_HEADER_LEN else None

    def _length_of(self, head: memoryview, offset: int) -> int | None:
        """Return how long the run is that begins with ``head``, if one can."""
        if self._holds is not None and not self._holds(_ledger_id(head)):
            return None
        return _run_len(head[:RUN_PREFIX_LEN], self._end - offset)

    async def _is_good(self, offset: int) -> bool:
        length = await self._length_at(offset)
        if length is None:
            return False
        if _decode(await self._read_what_can_be(offset, length)) is None:
            return False
        after = offset + length
        if after == self._end or self._holds is None:
            return True
        prefix = await self._read_what_can_be(after, RUN_PREFIX_LEN)
        return _run_len(prefix, self._end - after) is not None


def _cut(view: memoryview, rest: int, ledger_id: int | None) -> _Cut:
    """Cut a window of the ``rest`` that is left into runs; only those of ``ledger_id``, if any."""
    found: Found = []
    if ledger_id is None:
        taken = take_runs(view, len_max=rest)
        ends = accumulate(len(run.encoded) for run in taken.runs)
        found = [(end - len(run.encoded), run) for end, run in zip(ends, taken.runs, strict=True)]
        at, is_bad = taken.length, taken.error is not None
    else:
        at, is_bad = _pick(view, rest, ledger_id, found)
    if is_bad:
        return _Cut(found, at, None)
    if at == rest:
        return _Cut(found, at, 0)
    prefix = view[at : at + RUN_PREFIX_LEN]
    if len(prefix) < RUN_PREFIX_LEN <= rest - at:
        return _Cut(found, at, RUN_PREFIX_LEN)
    return _Cut(found, at, _run_len(prefix, rest - at))


def _pick(view: memoryview, rest: int, ledger_id: int, found: Found) -> tuple[int, bool]:
    """Add the runs of one ledger to ``found``; return where it ends, and whether that is bad.

    Every other run's checksum is verified too: a flipped ledger id would hide a run.
    """
    at = 0
    while len(view) - at >= RUN_PREFIX_LEN:
        length = _run_len(view[at : at + RUN_PREFIX_LEN], rest - at)
        if length is None:
            return at, True
        encoded = view[at : at + length]
        if len(encoded) < length:
            break
        if _ledger_id(encoded) == ledger_id:
            run = _decode(encoded)
            if run is None:
                return at, True
            found.append((at, run))
        elif not _checksum_is_right(encoded):
            return at, True
        at += length
    return at, False


def _ledger_id(encoded: memoryview) -> int:
    (ledger_id,) = _LEDGER_ID.unpack_from(encoded, IDS_OFFSET)
    return int(ledger_id)


def _checksum_is_right(encoded: memoryview) -> bool:
    (expected,) = _CRC.unpack_from(encoded, CRC_OFFSET)
    return bool(crc32c(encoded[RUN_HEADER_LEN:], crc32c(encoded[:CRC_OFFSET])) == expected)


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
