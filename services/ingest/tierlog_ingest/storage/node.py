"""The storage node: runs, fences and LACs, durable before they are answered (ADR-0014).

Run → write buffer → journal (group commit) → answer; then the buffer goes to an entry log, the
index learns of it, and the mark moves.

Owns: the order of these steps, fences, what is absent and what is unknown, and what the disk's
state means for callers. Does not own bytes on disk (``journal``, ``entrylog``, ``index``), the way
from the buffer to the index (``store``), the mark (``marking``), nor which ledgers still exist
(``gc``).

Consistency
    * An add is answered once its journal record is durable; then a restart finds it.
    * A run that could not be journaled leaves no trace: it was not stored.
    * A fence is answered once it is durable. Adds that came before it are durable before it.
    * An id that was freed stays fenced for ever.
    * Nothing is called absent (NO_SUCH_ENTRY) that damage may have taken: then it is UNKNOWN.
      Nor is a fence: ledgers that damage to the journal casts doubt on take no ordinary adds.
    * Adds of one ledger are taken in the order of their calls.

Crash
    On start, the journal is replayed from the mark; entry logs are cut to what they were then, and
    the journal brings the rest back. All of it is durable (a mark) before anything is served.

Cancellation
    Callers may go; what they asked for is done all the same.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import structlog

from tierlog.format.run import Run
from tierlog.model.errors import CorruptError, Reason, RefusedError, RetryableError, TierlogError
from tierlog.model.ids import INT64_MAX, NO_ENTRY, EntryId, LedgerId
from tierlog.model.spans import Spans
from tierlog.ports.clock import Clock
from tierlog.ports.files import Files
from tierlog.ports.ids import Ids
from tierlog.ports.storage_node import LacAnswer
from tierlog.runtime.settings import StorageSettings
from tierlog_ingest.storage.answers import (
    done,
    failed,
    fenced,
    no_such_entry,
    no_such_ledger,
    not_yet,
    queue_full,
    read_only,
    unknown_entry,
    unreadable,
)
from tierlog_ingest.storage.compaction.compaction import Compactor
from tierlog_ingest.storage.compaction.compaction_plan import Rules
from tierlog_ingest.storage.fences import Fences
from tierlog_ingest.storage.holdings import held_spans
from tierlog_ingest.storage.index.index_format import ENTRY_ID_MAX
from tierlog_ingest.storage.journal.format import Kind, encode_ledger_id
from tierlog_ingest.storage.journal.journal import GroupFuture, Journal
from tierlog_ingest.storage.ledgers import Held, Ledgers
from tierlog_ingest.storage.marking import Marks
from tierlog_ingest.storage.own_tasks import OwnTasks
from tierlog_ingest.storage.parts import compaction_bucket, logs_and_cache
from tierlog_ingest.storage.priorities import DiskGate
from tierlog_ingest.storage.range_reader import RangeReader, ReadLimits
from tierlog_ingest.storage.seen_ids import SeenIds
from tierlog_ingest.storage.space import SpaceLimits, SpaceWatch
from tierlog_ingest.storage.starting import Start
from tierlog_ingest.storage.state_file import NO_LIMBO
from tierlog_ingest.storage.store import RunStore, Slots, conflict
from tierlog_ingest.storage.turns import Turns
from tierlog_ingest.storage.upkeep import Upkeep

log = structlog.get_logger()

T = TypeVar("T")

_DISK_WIDTH: Final = 4
_DISK_AGE_S: Final = 0.1
_REPAIRS_MAX: Final = 3


class StorageNode:
    """One node over one folder or several. ``open`` it, then keep ``run`` going while it serves."""

    def __init__(
        self,
        files: Files,
        ids: Ids,
        settings: StorageSettings,
        *,
        clock: Clock,
        ledger_dirs: Sequence[Files] = (),
    ) -> None:
        self._settings = settings
        log_dirs = tuple(ledger_dirs) or (files,)
        all_dirs = (files, *ledger_dirs)
        self._journal = Journal(files, ids, clock, settings)
        self._journal.on_rollback = self._roll_back
        self._ledgers = Ledgers()
        self._fences = Fences()
        self._quarantined: set[LedgerId] = set()
        self._tasks = OwnTasks()
        self._gate = DiskGate(clock, width=_DISK_WIDTH, age_s=_DISK_AGE_S)
        logs, cache = logs_and_cache(log_dirs, ids, settings)
        self._store = RunStore(logs, cache, self._ledgers, self._gate)
        self._space = SpaceWatch(all_dirs, SpaceLimits.of(settings))
        self._marks = Marks(
            all_dirs,
            log_dirs,
            store=self._store,
            journal=self._journal,
            ledgers=self._ledgers,
            fences=self._fences,
        )
        self._upkeep = Upkeep(
            self._store,
            self._marks,
            self._journal,
            self._space,
            settings,
            journal_apart=bool(ledger_dirs),
        )
        self._compactor = Compactor(
            logs,
            cache,
            self,
            self._space,
            rules=Rules.of(settings),
            clock=clock,
            gate=self._gate,
            bucket=compaction_bucket(clock, settings),
            rebuilds=self._marks.rebuilds,
        )
        self._journal.watch_space(self._space.look_ahead)
        self._space.on_low = self._on_low_space
        self._space.on_refused = self._on_refused_write
        self._reader = RangeReader(
            self._store,
            self._gate,
            ReadLimits(
                read_bytes=settings.read_bytes,
                read_ahead_bytes_max=settings.read_ahead_bytes_max,
            ),
            read_slots=self._read_slots,
            spawn=self._tasks.spawn,
        )
        self._turns = Turns(self._add_checked, self._tasks)
        self._late_lacs: dict[LedgerId, EntryId] = {}
        self._serving = False
        self.damages: list[str] = []
        """What the start found damaged."""

    def __repr__(self) -> str:
        return f"<StorageNode {self.statistics()}>"

    def statistics(self) -> dict[str, float]:
        """Return how much of everything there is."""
        journal, cache = self._journal, self._store.cache.statistics()
        logs = self._store.logs.logs()
        return {
            "ledgers": len(self._store.ledger_ids()),
            "ledgers_held": len(self._ledgers),
            "buffered_bytes": self._store.buffer.bytes,
            "journal_queued_bytes": journal.queued_bytes,
            "journal_written_bytes": journal.written_bytes,
            "journal_bytes_on_disk": journal.bytes_on_disk,
            "journal_groups": journal.group_count,
            "journal_sync_s": journal.sync_s_total,
            "journal_sync_s_max": journal.sync_s_max,
            "journal_slow_syncs": journal.slow_sync_count,
            "entry_logs": len(logs),
            "entry_log_bytes": sum(one.length for one in logs),
            "index_pages": cache.pages,
            "index_pages_dirty": cache.dirty_pages,
            "index_pages_read": cache.pages_read,
            "index_doubtful": len(self._marks.doubtful),
            "limbo": int(self._marks.limbo_ceiling != NO_LIMBO),
            "read_ahead_bytes": self._reader.ahead_bytes,
            "fences": len(self._fences),
            "quarantined": len(self._quarantined),
            **self._space.statistics(),
            **self._gate.statistics(),
            **self._compactor.statistics(),
        }

    @property
    def read_only(self) -> bool:
        """Whether ordinary adds are refused until there is space again."""
        return self._space.read_only

    @property
    def state_changed(self) -> asyncio.Event:
        """Set once ``read_only`` may have changed; then a new event takes its place."""
        return self._space.changed

    @property
    def compactor(self) -> Compactor:
        """What gives the space of freed ledgers back."""
        return self._compactor

    @classmethod
    async def open(
        cls,
        files: Files,
        ids: Ids,
        settings: StorageSettings,
        *,
        clock: Clock,
        ledger_dirs: Sequence[Files] = (),
    ) -> "StorageNode":
        """Read what is there, replay the journal, and make it all durable.

        The journal lies in ``files``; entry logs and indexes in ``ledger_dirs``, or there too.
        """
        node = cls(files, ids, settings, clock=clock, ledger_dirs=ledger_dirs)
        start = Start(
            (files, *ledger_dirs),
            len(ledger_dirs) or 1,
            store=node._store,
            marks=node._marks,
            fences=node._fences,
            journal=node._journal,
            buffer_bytes_max=settings.write_buffer_bytes_max,
        )
        node._marks.unsettled_logs = lambda: start.unsettled_logs  # the start marks, too
        node.damages = await start.run()
        node._compactor.unsettled |= start.unsettled_logs
        node._marks.unsettled_logs = lambda: node._compactor.unsettled
        return node

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until ``stop``, then make everything durable. ``DiskFailedError`` ends it."""
        settings = self._settings
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks.begin(tasks)
                self._serving = True
                writer = tasks.create_task(self._journal.run(), name="journal")
                upkeep = tasks.create_task(self._upkeep.run(), name="upkeep")
                loops = [
                    tasks.create_task(
                        self._space.run(interval_s=settings.space_check_s), name="space"
                    ),
                    tasks.create_task(
                        self._compactor.run(interval_s=settings.gc_interval_s), name="compaction"
                    ),
                ]
                await stop.wait()
                self._serving = False
                for loop in loops:
                    loop.cancel()
                await asyncio.wait(loops)
                self._upkeep.stop()
                await upkeep
                self._journal.stop()
                await writer
                try:
                    await self._marks.mark()
                except TierlogError as error:
                    log.warning("checkpoint.failed", cause=str(error))  # the journal has it all
        finally:
            self._serving = False
            self._upkeep.stop()  # nobody may wait for what will not come
            await self._store.logs.close()
            await self._store.cache.close()

    # Writing

    async def ready(self) -> None:
        """Wait until the node takes more."""
        await self._upkeep.ready()

    def add(self, run: Run, *, recovery: bool = False) -> "asyncio.Future[None]":
        try:
            self._check_add(run, recovery=recovery)
        except TierlogError as error:
            return failed(error)
        ledger_id = run.header.ledger_id
        held = self._ledgers.get(ledger_id)
        if held is None and not self._store.holds(ledger_id):
            held = self._ledgers.hold(ledger_id, indexed_to=NO_ENTRY, last_add_confirmed=NO_ENTRY)
        if (
            held is not None
            and run.first_entry_id > held.last_entry_id
            and ledger_id not in self._turns
        ):
            return self._append_run(held, run)
        return self._turns.queue(run, recovery=recovery)

    def confirm(self, ledger_id: LedgerId, last_add_confirmed: EntryId) -> None:
        if self._ledgers.get(ledger_id) is not None:
            self._ledgers.confirm(ledger_id, last_add_confirmed)
        elif ledger_id in self._late_lacs:
            self._late_lacs[ledger_id] = max(self._late_lacs[ledger_id], last_add_confirmed)
        elif self._serving and self._store.holds(ledger_id):
            self._late_lacs[ledger_id] = last_add_confirmed
            self._tasks.spawn(self._confirm_late(ledger_id))

    async def fence(self, ledger_id: LedgerId) -> LacAnswer:
        self._check_serving()
        if ledger_id in self._store.freed:
            raise no_such_ledger(ledger_id)
        if ledger_id not in self._fences:
            appended = self._journal.append(Kind.FENCE, [encode_ledger_id(ledger_id)])
            self._fences.begin(ledger_id, appended)
            self._upkeep.note_appended(appended.done)
        under_way = self._fences.under_way(ledger_id)
        if under_way is not None:
            await under_way
        return await self.last_add_confirmed(ledger_id)

    async def last_add_confirmed(self, ledger_id: LedgerId) -> LacAnswer:
        self._check_serving()
        held, doubtful = await self._look_up(ledger_id), self._marks.is_doubtful(ledger_id)
        if held is None:
            return LacAnswer(NO_ENTRY, NO_ENTRY, doubtful)
        return LacAnswer(held.last_add_confirmed, held.last_entry_id, doubtful)

    def _check_add(self, run: Run, *, recovery: bool) -> None:
        self._check_serving()
        ledger_id = run.header.ledger_id
        # Damage to the journal may have taken a fence as well as an entry.
        is_fenced = ledger_id in self._fences or ledger_id <= self._marks.limbo_ceiling
        if ledger_id in self._store.freed or (is_fenced and not recovery):
            raise fenced(ledger_id)
        if self._space.read_only and not recovery:
            raise read_only()
        settings, run_len = self._settings, len(run.encoded)
        waiting = self._journal.queued_bytes + self._turns.bytes + run_len
        if waiting > 2 * settings.journal_queue_bytes_max:
            raise queue_full(waiting, budget="storage.journal_queue")
        buffered = self._store.buffer.bytes + run_len
        if buffered > 2 * settings.write_buffer_bytes_max + settings.journal_queue_bytes_max:
            raise queue_full(buffered, budget="storage.write_buffer")
        if run.last_entry_id > ENTRY_ID_MAX:
            raise RefusedError(
                f"entry {run.last_entry_id} of ledger {ledger_id} is beyond what a ledger holds",
                reason=Reason.TOO_LARGE,
                remedy=f"Close the ledger before it has {ENTRY_ID_MAX} entries",
            )

    def _append_run(self, held: Held, run: Run) -> GroupFuture:
        appended = self._journal.append(Kind.RUN, [run.encoded])
        self._store.buffer.add(run, appended.seq)
        held.extend(run.last_entry_id)
        self._ledgers.confirm(run.header.ledger_id, run.header.last_add_confirmed)
        self._upkeep.note_appended(appended.done)
        return appended.done

    async def _add_checked(self, run: Run, recovery: bool) -> "asyncio.Future[None]":  # noqa: FBT001
        """Add a run of which something may be there already."""
        ledger_id = run.header.ledger_id
        await self._look_up(ledger_id)
        self._check_add(run, recovery=recovery)
        held = self._ledgers.hold(ledger_id, indexed_to=NO_ENTRY, last_add_confirmed=NO_ENTRY)
        if run.first_entry_id > held.last_entry_id:
            return self._append_run(held, run)
        if self._store.buffered_twin(run):
            # It may not be durable yet, and then must not be answered: a record of its own.
            appended = self._journal.append(Kind.RUN, [run.encoded])
            self._upkeep.note_appended(appended.done)
            return appended.done
        stored = await self._with_index(ledger_id, lambda: self._store.overlapping(run))
        self._check_add(run, recovery=recovery)
        held = self._ledgers.hold(ledger_id, indexed_to=NO_ENTRY, last_add_confirmed=NO_ENTRY)
        if stored is not None:
            if stored != run:
                raise conflict(run)
            self._ledgers.confirm(ledger_id, run.header.last_add_confirmed)
            return done()
        return self._append_run(held, run)

    async def _confirm_late(self, ledger_id: LedgerId) -> None:
        try:
            await self._look_up(ledger_id)
        except TierlogError:
            return
        finally:
            last_add_confirmed = self._late_lacs.pop(ledger_id)
        if self._ledgers.get(ledger_id) is not None:
            self._ledgers.confirm(ledger_id, last_add_confirmed)

    def _roll_back(self, seq: int) -> None:
        """Forget what could not be journaled: the disk is full."""
        buffer = self._store.buffer
        touched = buffer.ledger_ids()
        buffer.roll_back(seq)
        for ledger_id in touched:
            held = self._ledgers.get(ledger_id)
            if held is not None:
                held.last_entry_id = max(held.indexed_to, buffer.last_entry_id(ledger_id))
        self._fences.roll_back(seq)
        self._space.refused()

    # Reading

    async def read(
        self,
        ledger_id: LedgerId,
        first_entry_id: EntryId,
        *,
        last_entry_id: EntryId | None = None,
        bytes_max: int,
        wait_s: float = 0.0,
        recovery: bool = False,
    ) -> AsyncIterator[list[Run]]:
        self._check_serving()
        if ledger_id in self._quarantined:
            raise unknown_entry(ledger_id, first_entry_id)
        if recovery:
            await self.fence(ledger_id)
        held = await self._look_up(ledger_id)
        bound = last_entry_id if last_entry_id is not None else EntryId(INT64_MAX)
        if not recovery:
            confirmed = await self._ledgers.wait_for(ledger_id, first_entry_id, wait_s=wait_s)
            if confirmed < first_entry_id:
                raise not_yet(ledger_id, first_entry_id, confirmed)
            bound = min(bound, confirmed)
        elif held is None:
            raise self._absent(ledger_id, first_entry_id)
        else:
            bound = min(bound, held.last_entry_id)
        is_found = False
        runs = self._reader.read(ledger_id, first_entry_id, bound=bound, bytes_max=bytes_max)
        async with contextlib.aclosing(runs):
            async for some in runs:
                is_found = True
                yield some
        if not is_found:
            raise self._absent(ledger_id, first_entry_id)

    async def list_ledgers(self) -> list[LedgerId]:
        self._check_serving()
        return sorted(self._store.ledger_ids())

    async def held_entries(self, ledger_id: LedgerId) -> Spans:
        self._check_serving()
        if ledger_id in self._quarantined:
            raise unknown_entry(ledger_id, EntryId(0))
        held, buffered = await self._look_up(ledger_id), self._store.buffer.spans(ledger_id)
        last = NO_ENTRY if held is None else held.last_entry_id
        return await held_spans(buffered, last, partial(self._read_slots, ledger_id))

    def _absent(self, ledger_id: LedgerId, entry_id: EntryId) -> TierlogError:
        """Say that an entry isn't there, if that is known."""
        if ledger_id in self._store.freed:
            return no_such_ledger(ledger_id)
        if self._marks.is_doubtful(ledger_id) or ledger_id in self._quarantined:
            return unknown_entry(ledger_id, entry_id)
        return no_such_entry(ledger_id, entry_id)

    async def _look_up(self, ledger_id: LedgerId) -> Held | None:
        """Return what is known of a ledger's end; None: nothing of it was ever here."""
        if ledger_id in self._store.freed:
            raise no_such_ledger(ledger_id)
        held = self._ledgers.get(ledger_id)
        if held is not None or not self._store.holds(ledger_id):
            return held
        try:
            header = await self._with_index(ledger_id, lambda: self._store.cache.header(ledger_id))
        except RetryableError as error:
            raise unreadable(ledger_id, error) from error
        if ledger_id in self._store.freed:
            raise no_such_ledger(ledger_id)
        held = self._ledgers.hold(
            ledger_id,
            indexed_to=NO_ENTRY if header is None else header.last_entry_id,
            last_add_confirmed=NO_ENTRY if header is None else header.last_add_confirmed,
        )
        held.extend(self._store.buffer.last_entry_id(ledger_id))
        return held

    async def _read_slots(self, ledger_id: LedgerId, first_entry_id: int, count_max: int) -> Slots:
        first = EntryId(first_entry_id)
        return await self._with_index(
            ledger_id, lambda: self._store.cache.slots(ledger_id, first, count_max)
        )

    async def _with_index(self, ledger_id: LedgerId, use: Callable[[], Awaitable[T]]) -> T:
        """Return what ``use`` finds in a whole index: a damaged one is built anew first."""
        for _ in range(_REPAIRS_MAX):
            if ledger_id in self._store.unfinished:
                await self._tasks.finish(self._marks.repair(ledger_id))
            count = self._marks.repair_count(ledger_id)
            try:
                found = await use()
            except (CorruptError, FileNotFoundError) as error:
                if count == self._marks.repair_count(ledger_id):
                    log.warning("index.damaged", ledger_id=ledger_id, cause=str(error))
                    self._store.unfinished.add(ledger_id)
                continue
            if count == self._marks.repair_count(ledger_id):
                return found
        raise RetryableError(
            f"the index of ledger {ledger_id} is damaged, and stays so",
            reason=Reason.UNKNOWN,
            remedy="Read another copy; look into the node's log",
        )

    # Deleting

    def held_ledgers(self) -> list[LedgerId]:
        """Return every ledger that garbage collection must judge, fenced ones too."""
        return sorted(self._store.ledger_ids() | self._fences.fenced)

    def quarantine(self, ledger_id: LedgerId) -> None:
        """Serve nothing of a ledger, but keep it: it seems to be deleted."""
        self._quarantined.add(ledger_id)

    def restore(self, ledger_id: LedgerId) -> None:
        """Serve a quarantined ledger again."""
        self._quarantined.discard(ledger_id)

    async def free(self, ledger_id: LedgerId) -> None:
        """Forget a deleted ledger for ever, durably; its id stays fenced."""
        self._check_serving()
        await self._tasks.finish(self._free(ledger_id))

    async def _free(self, ledger_id: LedgerId) -> None:
        async with self._marks.lock:  # or a mark could pass the record before its effect
            if ledger_id not in self._store.freed:
                appended = self._journal.append(Kind.FREED, [encode_ledger_id(ledger_id)])
                await appended.done
                await self._marks.drop(ledger_id)
                self._quarantined.discard(ledger_id)

    @property
    def limbo_unlimited(self) -> bool:
        """Whether damage to the journal casts doubt on every ledger, future ones too."""
        return self._marks.limbo_ceiling == INT64_MAX

    def limit_limbo(self, ledger_id_max: LedgerId) -> None:
        """Take note that ledgers above this id were made after the journal was damaged."""
        self._marks.limbo_ceiling = min(self._marks.limbo_ceiling, ledger_id_max)

    @property
    def seen_ids(self) -> SeenIds:
        """What the node saw of the ledger ids that the metadata store gave."""
        return self._marks.seen_ids

    async def keep_seen_ids(self, seen_ids: SeenIds) -> None:
        """Keep that durably."""
        self._marks.seen_ids = seen_ids
        await self.mark()

    # The mark, and what compaction asks

    async def checkpoint(self) -> None:
        """Bring all that was added before to logs and index, durably, and move the mark."""
        await self._upkeep.settled()
        await self.mark()

    async def mark(self, begin: Callable[[], None] | None = None) -> None:
        """Move the mark to where the journal is durable now (``Marks.mark``)."""
        await self._tasks.finish(self._marks.mark(begin))

    async def finish(self, work: Coroutine[Any, Any, T]) -> T:
        """Do ``work`` to its end, whatever becomes of the caller."""
        return await self._tasks.finish(work)

    def is_freed(self, ledger_id: LedgerId) -> bool:
        """Tell whether a ledger was deleted for ever, durably."""
        return ledger_id in self._store.freed

    def has_whole_index(self, ledger_id: LedgerId) -> bool:
        """Tell whether a ledger's index may be asked, as far as is known."""
        return ledger_id not in self._store.unfinished

    async def rebuild_index(self, ledger_id: LedgerId) -> None:
        """Build an index anew from the logs."""
        self._store.unfinished.add(ledger_id)
        await self._tasks.finish(self._marks.repair(ledger_id))

    def _on_low_space(self) -> None:
        self._upkeep.look_again()
        self._compactor.want()

    def _on_refused_write(self) -> None:
        if self._serving:
            self._tasks.spawn(self._journal.shed_spares())

    def _check_serving(self) -> None:
        if not self._serving:
            raise RetryableError("the storage node is not serving", remedy="Use another node")
