"""Reading a range of one ledger's entries: from the write buffer, or in windows off the logs.

Owns: how much is read at once, reading ahead, and when a run counts as unreadable. Does not own
who may read what (``node``), nor which bytes a window has (``windows``).

Invariants:
    * Runs come in order, without a gap between them, up to the bound.
    * Every run that comes off the disk was verified by its checksum, each time.
    * At least one run comes, or an error, or nothing because the first entry isn't there; a bad
      run further on ends the read before it.
    * What was read ahead and not handed on is at most ``read_ahead_bytes_max``, over all readers.

Cancellation: a reader that goes takes its reading ahead with it.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import structlog

from tierlog.format.run import Run
from tierlog.model.errors import CorruptError, Reason, RetryableError, TierlogError
from tierlog.model.ids import EntryId, LedgerId
from tierlog.ports.files import Buffer
from tierlog_ingest.storage.priorities import DiskGate, Work
from tierlog_ingest.storage.store import RunStore
from tierlog_ingest.storage.windows import Slots, Window

log = structlog.get_logger()

_TRIES_MAX: Final = 3
_AHEAD_FACTOR: Final = 4
"""Reads ahead are so much larger, where there is room: each costs as much as 100 KB do."""
_AHEAD_COUNT: Final = 2
"""So many are under way at once, so that the disk has the next one while one is handed on."""

ReadSlots = Callable[[LedgerId, int, int], Awaitable[Slots]]
Spawn = Callable[[Coroutine[Any, Any, Any]], "asyncio.Task[Any]"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadLimits:
    """How much at once, and how much ahead."""

    read_bytes: int
    read_ahead_bytes_max: int


class RangeReader:
    """Reads for many at once."""

    def __init__(
        self,
        store: RunStore,
        gate: DiskGate,
        limits: ReadLimits,
        *,
        read_slots: ReadSlots,
        spawn: Spawn,
    ) -> None:
        self._store = store
        self._gate = gate
        self._limits = limits
        self._read_slots = read_slots
        self._spawn = spawn
        self.ahead_bytes = 0
        """Reserved by reads ahead."""

    def __repr__(self) -> str:
        return f"<RangeReader ahead={self.ahead_bytes} bytes>"

    async def read(
        self, ledger_id: LedgerId, first_entry_id: EntryId, *, bound: EntryId, bytes_max: int
    ) -> AsyncGenerator[list[Run], None]:
        """Iterate over the runs from the one that holds ``first_entry_id``; nothing: absent."""
        entry_id, left, is_sequential = int(first_entry_id), bytes_max, False
        ahead: deque[_Ahead] = deque()
        size = self._limits.read_bytes
        try:
            while left > 0 and entry_id <= bound:
                brought = None
                if ahead:
                    brought = await ahead[0].task
                    self.ahead_bytes -= ahead.popleft().reserved
                if brought is None or brought.entry_id != entry_id:
                    self._forget(ahead)
                    brought = await self._bring(ledger_id, entry_id, bound, min(size, left))
                if is_sequential and brought is not None:
                    # Before this is decoded, so that the disk works meanwhile.
                    await self._ask_ahead(ahead, ledger_id, brought, bound, left)
                    await asyncio.sleep(0)  # or its call of the disk would begin afterwards
                runs = None if brought is None else brought.decode(ledger_id)
                if runs is None:
                    runs = await self._next(ledger_id, entry_id, bound, min(size, left))
                if not runs:
                    return
                left -= sum(len(run.encoded) for run in runs)
                entry_id = runs[-1].last_entry_id + 1
                yield runs
                is_sequential = True
        except RetryableError as error:
            if entry_id == first_entry_id or error.reason is not Reason.UNKNOWN:
                raise
            # The read ends before what can't be read; who asks for that gets the error.
        finally:
            self._forget(ahead)

    async def _ask_ahead(
        self,
        ahead: "deque[_Ahead]",
        ledger_id: LedgerId,
        brought: "_Brought",
        bound: EntryId,
        left: int,
    ) -> None:
        """Begin to read what follows, if it is wanted and there is room for it."""
        limits = self._limits
        last, left = ahead[-1] if ahead else brought, left - brought.length
        left -= sum(one.reserved for one in ahead)
        while len(ahead) < _AHEAD_COUNT:
            entry_id, before = last.next_entry_id, last.entry_id
            room, size = limits.read_ahead_bytes_max - self.ahead_bytes, limits.read_bytes
            if room >= _AHEAD_FACTOR * size:
                size *= _AHEAD_FACTOR
            if room < size or left <= 0 or not before < entry_id <= bound:
                return
            self.ahead_bytes += size
            try:
                found = await self._plan(ledger_id, entry_id, bound, min(size, left))
            except BaseException as error:
                self.ahead_bytes -= size
                if isinstance(error, TierlogError | FileNotFoundError):
                    return  # whoever comes to it hears of it
                raise
            task = self._spawn(self._bring_found(entry_id, found))
            last = _Ahead(entry_id, _next_entry_id(entry_id, found), task, size)
            ahead.append(last)
            left -= size

    def _forget(self, ahead: "deque[_Ahead]") -> None:
        """Call reads ahead off."""
        while ahead:
            one = ahead.popleft()
            one.task.cancel()
            self.ahead_bytes -= one.reserved

    async def _bring(
        self, ledger_id: LedgerId, entry_id: int, bound: EntryId, len_max: int
    ) -> "_Brought | None":
        """Return what one call of the disk brings; None where ``_next`` must say what is wrong."""
        try:
            found = await self._plan(ledger_id, entry_id, bound, len_max)
        except (TierlogError, FileNotFoundError):
            return None
        return await self._bring_found(entry_id, found)

    async def _bring_found(self, entry_id: int, found: list[Run] | Window) -> "_Brought | None":
        if isinstance(found, list):
            return _Brought(entry_id, found)
        try:
            return _Brought(entry_id, (), found, await self._fetch(found))
        except (TierlogError, FileNotFoundError):
            return None

    async def _next(
        self, ledger_id: LedgerId, entry_id: int, bound: EntryId, len_max: int
    ) -> list[Run]:
        """Return the runs from ``entry_id`` on that one call of the disk brings."""
        slot_before = 0
        cause: Exception = AssertionError("nothing was tried")
        for _ in range(_TRIES_MAX):
            found = await self._plan(ledger_id, entry_id, bound, len_max)
            if isinstance(found, list):
                return found
            try:
                return found.decode(await self._fetch(found), ledger_id=ledger_id)
            except (TierlogError, FileNotFoundError) as error:
                # Compaction may have moved the run meanwhile; then its slot says so.
                slot, cause = found.pieces[0].slot, error
                if slot == slot_before:
                    break
                slot_before = slot
        log.error("run.damaged", ledger_id=ledger_id, entry_id=entry_id, cause=str(cause))
        raise RetryableError(
            f"the node can't read entry {entry_id} of ledger {ledger_id} ({cause})",
            reason=Reason.UNKNOWN,
            remedy="Read another copy",
            details={"ledger_id": str(ledger_id), "entry_id": str(entry_id)},
        ) from cause

    async def _plan(
        self, ledger_id: LedgerId, entry_id: int, bound: EntryId, len_max: int
    ) -> list[Run] | Window:
        """Return runs of the buffer (none at all: absent), or a window."""
        buffer = self._store.buffer
        runs, length = list[Run](), 0
        while entry_id <= bound and length < len_max:
            run = buffer.find(ledger_id, EntryId(entry_id))
            if run is None:
                break
            runs.append(run)
            length += len(run.encoded)
            entry_id = run.last_entry_id + 1
        if runs:
            return runs
        buffered = buffer.first_after(ledger_id, EntryId(entry_id))
        end = bound if buffered is None else min(bound, buffered - 1)
        window = Window(len_max=len_max)
        while entry_id <= end and not window.full:
            slots = await self._read_slots(ledger_id, entry_id, end - entry_id + 1)
            window.extend(slots, entry_id)
            entry_id += len(slots)
        return window if window.pieces else []

    async def _fetch(self, window: Window) -> Buffer:
        logs = self._store.logs
        work = Work.TAIL_READ if logs.is_written(window.log_id) else Work.CATCH_UP_READ
        async with self._gate.turn(work):
            return await logs.read(window.log_id, window.offset, window.length)


class _Ahead(NamedTuple):
    """A read that was begun before it was asked for, and what it may bring."""

    entry_id: int
    next_entry_id: int
    """The entry behind it, if all of it is good."""
    task: "asyncio.Task[_Brought | None]"
    reserved: int


class _Brought(NamedTuple):
    """Runs of the buffer, or a window and its bytes."""

    entry_id: int
    runs: Sequence[Run]
    window: Window | None = None
    data: Buffer = b""

    @property
    def length(self) -> int:
        return len(self.data) + sum(len(run.encoded) for run in self.runs)

    @property
    def next_entry_id(self) -> int:
        """The entry behind it, if all of it is good."""
        return _next_entry_id(self.entry_id, self.runs if self.window is None else self.window)

    def decode(self, ledger_id: LedgerId) -> list[Run] | None:
        """Return the runs; None when the first one is bad."""
        if self.window is None:
            return list(self.runs)
        try:
            return self.window.decode(self.data, ledger_id=ledger_id)
        except CorruptError:
            return None


def _next_entry_id(entry_id: int, found: Sequence[Run] | Window) -> int:
    if isinstance(found, Window):
        return found.next_entry_id
    return found[-1].last_entry_id + 1 if found else entry_id
