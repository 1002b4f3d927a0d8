"""Runs on this node, wherever they are: in the write buffer, or in an entry log with a slot.

Owns: the way of a run from the buffer to an entry log to the index, and finding runs again. Does
not own the three themselves (``write_buffer``, ``entry_log``, ``ledger_cache``), nor when the
buffer is flushed, nor what the mark is (``marking``).

Invariants:
    * Only what the journal holds durably is flushed.
    * A run leaves the buffer only after its slots are set, so that who first looks into the
      buffer and then into the index never misses it.
    * A ledger in ``unfinished`` has an index that lacks slots: nothing is put into it, nothing
      is read from it, until it was built anew.

Crash: what was flushed since the last mark is cut off the logs, and comes back from the journal.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Final

import numpy as np
import structlog
from numpy.typing import NDArray

from tierlog.format.run import Run
from tierlog.model.errors import CorruptError, RetryableError
from tierlog.model.ids import EntryId, LedgerId
from tierlog_ingest.storage.entrylog.entry_log import EntryLogs, Location
from tierlog_ingest.storage.index.index_format import pack_slot, unpack_slot
from tierlog_ingest.storage.index.ledger_cache import LedgerCache
from tierlog_ingest.storage.intervals import IntervalSet
from tierlog_ingest.storage.ledgers import Ledgers
from tierlog_ingest.storage.priorities import DiskGate, Work
from tierlog_ingest.storage.write_buffer import WriteBuffer

log = structlog.get_logger()

Slots = NDArray[np.uint64]
Placement = tuple[int, int, int]

_RUNS_A_STEP: Final = 512
_BYTES_A_STEP: Final = 1024 * 1024
_BYTES_A_STEP_BEHIND: Final = 4 * 1024 * 1024
"""What a flush writes and indexes at once: adds beside it wait no longer than for that. Larger
steps cost less; they are taken while more comes in than goes out."""
_TRIES_MAX: Final = 3


class RunStore:
    """Buffer, logs and index of one node."""

    def __init__(
        self, logs: EntryLogs, cache: LedgerCache, ledgers: Ledgers, gate: DiskGate
    ) -> None:
        self.buffer = WriteBuffer()
        self.logs = logs
        self.cache = cache
        self.freed = IntervalSet()
        self.unfinished: set[LedgerId] = set()
        """Their index must be built anew before it is used."""
        self.index_directory = 0
        """Where new index files are made."""
        self.flushing = asyncio.Lock()
        """Held while runs go from the buffer to logs and index, or a ledger goes."""
        self._ledgers = ledgers
        self._gate = gate
        self._index_is_full = False

    def __repr__(self) -> str:
        return f"<RunStore {self.buffer!r} {self.logs!r} {self.cache!r}>"

    def holds(self, ledger_id: LedgerId) -> bool:
        """Tell whether there is, or may be, an entry of this ledger.

        A log without a readable map may hold anything: that is what the limbo ceiling is for.
        """
        return ledger_id not in self.freed and (
            ledger_id in self.cache
            or ledger_id in self.unfinished
            or self.buffer.last_entry_id(ledger_id) >= 0
            or not self.logs.unmapped.issuperset(self.logs.logs_of(ledger_id))
        )

    def ledger_ids(self) -> set[LedgerId]:
        """Return the ledgers that there are, or may be, entries of."""
        found = {*self.cache.ledger_ids(), *self.buffer.ledger_ids(), *self.unfinished}
        return {LedgerId(one) for one in found if one not in self.freed}

    # Writing

    async def flush(self, durable_seq: int) -> set[LedgerId]:
        """Give the durable part of the buffer to the logs and the index.

        Returns the ledgers whose index turned out to be damaged: their runs stay in the buffer.
        """
        async with self.flushing:
            if self._index_is_full:
                # Otherwise each try would leave copies of runs in a log that has room for them.
                await self.cache.flush()
                self._index_is_full = False
            runs = self.buffer.snapshot(durable_seq)
            broken = {run.header.ledger_id for run in runs} & self.unfinished
            begun_bytes = self.buffer.bytes

            def step_bytes() -> int:
                is_behind = self.buffer.bytes > begun_bytes
                return _BYTES_A_STEP_BEHIND if is_behind else _BYTES_A_STEP

            for step in _steps(runs, step_bytes):
                some = [run for run in step if run.header.ledger_id not in broken]
                async with self._gate.turn(Work.APPEND):
                    locations = await self.logs.append(some, writer="flush")
                pairs = zip(some, locations, strict=True)
                for ledger_id, placed in groupby(pairs, key=lambda pair: pair[0].header.ledger_id):
                    if not await self._index(ledger_id, list(placed)):
                        broken.add(ledger_id)
            return broken

    async def _index(self, ledger_id: LedgerId, placed: Sequence[tuple[Run, Location]]) -> bool:
        """Set slots, and let the runs out of the buffer; False: the index is damaged."""
        runs = [run for run, _ in placed]
        held = self._ledgers.get(ledger_id)
        confirmed = max(run.header.last_add_confirmed for run in runs)
        if held is not None:
            confirmed = max(confirmed, held.last_add_confirmed)
        try:
            await self.put(ledger_id, placed, last_add_confirmed=confirmed)
        except CorruptError as error:
            log.warning("index.damaged", ledger_id=ledger_id, cause=str(error))
            self.unfinished.add(ledger_id)
            return False
        except RetryableError:
            self._index_is_full = True
            raise
        if held is not None:
            held.indexed(max(run.last_entry_id for run in runs))
        self.buffer.drop(runs)
        return True

    async def put(
        self,
        ledger_id: LedgerId,
        placed: Iterable[tuple[Run, Location]],
        *,
        last_add_confirmed: EntryId,
    ) -> None:
        """Set the slots of runs."""
        await self.cache.put(
            ledger_id,
            [placement(run, location) for run, location in placed],
            last_add_confirmed=last_add_confirmed,
            create_in=self.index_directory,
        )

    async def drop(self, ledger_id: LedgerId) -> None:
        """Forget a ledger that was freed."""
        async with self.flushing:
            self.buffer.forget_ledger(ledger_id)
            self.unfinished.discard(ledger_id)
            self.logs.forget_ledger(ledger_id)
            await self.cache.remove(ledger_id)

    # Finding

    def buffered_twin(self, run: Run) -> bool:
        """Tell whether the buffer has this very run; ``CorruptError`` when it has others there."""
        ledger_id, first = run.header.ledger_id, run.first_entry_id
        found = self.buffer.find(ledger_id, first)
        if found is not None:
            if found != run:
                raise conflict(run)
            return True
        following = self.buffer.first_after(ledger_id, first)
        if following is not None and following <= run.last_entry_id:
            raise conflict(run)
        return False

    async def overlapping(self, run: Run) -> Run | None:
        """Return a run in the logs that has entries of this one, if one can be read.

        What can't be read there is no obstacle: a run takes its place.
        """
        ledger_id, entry_id = run.header.ledger_id, int(run.first_entry_id)
        tries = 0
        while entry_id <= run.last_entry_id:
            slots = await self.cache.slots(
                ledger_id, EntryId(entry_id), run.last_entry_id - entry_id + 1
            )
            try:
                for slot in np.unique(slots[slots != 0]).tolist():
                    stored = await self._readable(slot)
                    if stored is not None and stored.header.ledger_id == ledger_id:
                        return stored
            except RetryableError:
                tries += 1
                if tries == _TRIES_MAX:
                    raise
                continue  # compaction moved it: the index knows the new place
            entry_id += len(slots)
        return None

    async def _readable(self, slot: int) -> Run | None:
        try:
            return await self.read_run(slot)
        except (CorruptError, FileNotFoundError):
            return None

    async def read_run(self, slot: int) -> Run:
        """Read the run that a slot names, by one call of the disk."""
        data = await self.logs.read(*unpack_slot(slot))
        return Run.decode(memoryview(data)[: Run.encoded_len(data, len_max=len(data))])


def _steps(runs: Sequence[Run], step_bytes: Callable[[], int]) -> Iterator[Sequence[Run]]:
    """Cut what a flush has to write into steps, each as large as is said when it begins."""
    start = length = 0
    wanted = step_bytes()
    for at, run in enumerate(runs):
        if at - start == _RUNS_A_STEP or (at > start and length >= wanted):
            yield runs[start:at]
            start, length, wanted = at, 0, step_bytes()
        length += len(run.encoded)
    if start < len(runs):
        yield runs[start:]


def placement(run: Run, location: Location) -> Placement:
    """Return what the index is told of a run."""
    return run.first_entry_id, run.header.count, pack_slot(*location)


def conflict(run: Run) -> CorruptError:
    """Say that other bytes have the run's entry ids."""
    return CorruptError(
        f"entries {run.first_entry_id} to {run.last_entry_id} of ledger {run.header.ledger_id}"
        " differ from those that the node has",
        remedy="Find out who writes this ledger beside its owner; nothing was stored",
        details={"ledger_id": str(run.header.ledger_id), "entry_id": str(run.first_entry_id)},
    )
