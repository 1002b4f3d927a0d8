"""The mark: up to where the journal is needless. And building a damaged index anew.

Owns: the order of flushing, syncing and writing ``state``; what ``state`` says of indexes; taking
entry logs out of it. Does not own flushing itself (``store``) nor the file (``state_file``).

    journal's durable position taken → buffer flushed up to there → logs synced → index pages
    written and synced → ``state`` in every directory → older journal segments given back

Invariants:
    * The mark never goes back, and never passes what logs and index hold durably.
    * Fences in ``state`` may be ahead of the journal; freed ids are in it only when journaled.
    * An index that is being built anew is in ``state`` as unfinished, from before its old content
      goes until a mark after it was complete.
    * One at a time: a mark, a repair, the freeing of a ledger.

Crash: between any two steps, the older ``state`` holds, and nothing it needs is gone.

Repair: all logs that hold, or may hold, the ledger are read from the oldest to the newest, so that
the newest copy of a run gets the slot. Where they have bad places, the ledger is *doubtful* from
then on: what its index lacks is unknown, not absent.
"""

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Final

import structlog

from tierlog.model.errors import CorruptError, RetryableError
from tierlog.model.ids import LedgerId
from tierlog.ports.files import Files
from tierlog_ingest.storage.compaction.compaction_ports import Rebuilds
from tierlog_ingest.storage.entrylog.log_table import Location
from tierlog_ingest.storage.fences import Fences
from tierlog_ingest.storage.journal.format import JournalPosition
from tierlog_ingest.storage.journal.journal import Journal
from tierlog_ingest.storage.ledgers import Ledgers
from tierlog_ingest.storage.seen_ids import NOTHING_SEEN
from tierlog_ingest.storage.state_file import NO_LIMBO, NodeState, ascending, write_states
from tierlog_ingest.storage.store import RunStore

log = structlog.get_logger()

_TRIES_MAX: Final = 3


class Marks:
    """What writes ``state``."""

    def __init__(
        self,
        directories: Sequence[Files],
        log_directories: Sequence[Files],
        *,
        store: RunStore,
        journal: Journal,
        ledgers: Ledgers,
        fences: Fences,
    ) -> None:
        self._directories = directories
        self._log_directories = log_directories
        self._store = store
        self._journal = journal
        self._ledgers = ledgers
        self._fences = fences
        self._generation = 0
        self._repaired: set[LedgerId] = set()
        self._repair_counts: dict[LedgerId, int] = {}
        self.mark_position = JournalPosition(1, 0)
        """Where a replay would begin."""
        self.mark_seq = 0
        """The last record of this process that lies before it."""
        self.limbo_ceiling = NO_LIMBO
        self.seen_ids = self._kept_ids = NOTHING_SEEN
        self.doubtful: set[LedgerId] = set()
        """What their index lacks may have been there."""
        self.rebuilds = Rebuilds()
        self.unsettled_logs: Callable[[], Collection[int]] = lambda: ()
        """Logs that compaction has not done with."""
        self.lock = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<Marks at {tuple(self.mark_position)}, doubtful={len(self.doubtful)}>"

    def restore(self, state: NodeState) -> None:
        """Begin with what was found at the start."""
        self._generation = state.generation
        self.mark_position = state.mark
        self.limbo_ceiling = state.limbo_ceiling
        self.seen_ids = self._kept_ids = state.seen_ids
        self.doubtful = {LedgerId(one) for one in state.doubtful}

    @property
    def needless(self) -> bool:
        """Whether a mark would change nothing that a restart could tell."""
        return (
            self._journal.durable_position == self.mark_position
            and not self._repaired
            and self.seen_ids == self._kept_ids
        )

    async def mark(self, begin: Callable[[], None] | None = None) -> None:
        """Move the mark to where the journal is durable now.

        ``begin`` is called once no other mark is under way, before the index is flushed; no index
        is repaired from then on until ``state`` is written.
        """
        async with self.lock:
            await self._mark(begin)

    async def repair(self, ledger_id: LedgerId) -> None:
        """Build a ledger's index anew, unless somebody else just did."""
        async with self.lock:
            if ledger_id in self._store.unfinished:
                await self._repair(ledger_id)

    async def flush(self, durable_seq: int) -> None:
        """Flush, and repair what turns out to be damaged; for who has the lock."""
        for _ in range(_TRIES_MAX):
            broken = await self._store.flush(durable_seq)
            if not broken:
                return
            for ledger_id in sorted(broken):
                await self._repair(ledger_id)
        raise RetryableError(
            "indexes of ledgers are damaged again after each repair", remedy="Replace the disk"
        )

    def repair_count(self, ledger_id: LedgerId) -> int:
        """Return how often a ledger's index was found to need building anew."""
        return self._repair_counts.get(ledger_id, 0) + (ledger_id in self._store.unfinished)

    async def _mark(self, begin: Callable[[], None] | None) -> None:
        journal, store = self._journal, self._store
        # One instant: what is durable, and which fences are.
        seq, position = journal.durable_seq, journal.durable_position
        fences = ascending(self._fences.fenced)
        await self._choose_index_directory()
        await self.flush(seq)
        # Not before the flush: a repair in it writes ``state``, which would lack the logs that
        # the index names on disk until its pages are flushed.
        if begin is not None:
            begin()
        unsettled = frozenset(self.unsettled_logs())
        await store.logs.sync()
        await store.cache.flush()
        complete, self._repaired = self._repaired, set()
        try:
            await self._write(position, fences, unsettled)
        except BaseException:
            self._repaired |= complete
            raise
        assert position >= self.mark_position, "the mark never goes back"
        self.mark_position, self.mark_seq = position, seq
        await journal.release_before(position.segment_id)

    async def _write(
        self,
        position: JournalPosition,
        fences: Collection[int],
        unsettled: frozenset[int] = frozenset(),
    ) -> None:
        store = self._store
        self._generation += 1
        state = NodeState(
            generation=self._generation,
            mark=position,
            limbo_ceiling=self.limbo_ceiling,
            fences=ascending(fences),
            freed=store.freed.intervals(),
            doubtful=ascending(self.doubtful),
            unfinished=ascending(store.unfinished | self._repaired),
            logs=tuple(tuple(store.logs.lengths(at)) for at in range(len(self._log_directories))),
            maps=store.logs.open_maps(),
            unsettled_logs=unsettled | frozenset(self.unsettled_logs()),
            seen_ids=self.seen_ids,
        )
        await write_states(self._directories, state)
        self._kept_ids = state.seen_ids

    async def _choose_index_directory(self) -> None:
        if len(self._log_directories) > 1:
            free = [await files.free_bytes() for files in self._log_directories]
            self._store.index_directory = free.index(max(free))

    # Repair

    async def _repair(self, ledger_id: LedgerId) -> None:
        store = self._store
        if ledger_id in store.freed:
            store.unfinished.discard(ledger_id)
            return
        log.warning("index.repairing", ledger_id=ledger_id)
        self._repair_counts[ledger_id] = self.repair_count(ledger_id) + 1
        with self.rebuilds.one():
            store.unfinished.add(ledger_id)
            # A mark that failed may have taken logs out of ``state`` that the index on disk names.
            await store.cache.flush()
            await self._write(self.mark_position, self._fences.fenced)
            async with store.flushing:
                """A flush that was under way has ended; the next leaves this ledger alone."""
            if not await self._rebuild(ledger_id):
                self.doubtful.add(ledger_id)
            self._repaired.add(ledger_id)
            store.unfinished.discard(ledger_id)
        log.info("index.repaired", ledger_id=ledger_id, doubtful=ledger_id in self.doubtful)

    async def _rebuild(self, ledger_id: LedgerId) -> bool:
        """Set all slots anew; False when a log could not be read everywhere."""
        store, logs = self._store, self._store.logs
        is_whole = True
        is_discarded = ledger_id in store.cache
        if is_discarded:
            await store.cache.discard(ledger_id)
        for log_id in logs.logs_of(ledger_id):
            try:
                await self._rebuild_from(ledger_id, log_id)
            except (CorruptError, FileNotFoundError) as error:
                log.error("entry_log.unreadable", log_id=log_id, cause=str(error))  # noqa: TRY400
                is_whole = False
            if logs.damaged_logs.get(log_id):
                is_whole = False
        if is_discarded:
            store.cache.complete(ledger_id)
        return is_whole

    async def _rebuild_from(self, ledger_id: LedgerId, log_id: int) -> None:
        async for found in self._store.logs.scan(log_id, ledger_id=ledger_id):
            if not found:
                continue
            confirmed = max(
                self._ledgers.last_add_confirmed(ledger_id),
                *(run.header.last_add_confirmed for _, run in found),
            )
            placed = [(run, Location(log_id, at, len(run.encoded))) for at, run in found]
            await self._store.put(ledger_id, placed, last_add_confirmed=confirmed)

    # Freeing

    def is_doubtful(self, ledger_id: LedgerId) -> bool:
        """Tell whether what a ledger's index lacks may have been there all the same."""
        return ledger_id in self.doubtful or ledger_id <= self.limbo_ceiling

    async def drop(self, ledger_id: LedgerId) -> None:
        """Forget a ledger whose freeing is journaled; for who has the lock."""
        self._store.freed.add(ledger_id)
        self._fences.forget(ledger_id)
        self.doubtful.discard(ledger_id)
        self._repaired.discard(ledger_id)
        self._ledgers.forget(ledger_id)
        await self._store.drop(ledger_id)
