"""The storage node: runs, fences and LACs, durable before they are answered.

Run → ledger buffer → index → journal (group commit) → answer; then the buffer may go to the
ledger's file. A checkpoint rolls the journal, makes every ledger file durable that changed,
persists the mark, and removes the older journals.

Owns: the order of these steps, fences, what is absent and what is unknown, and what the disk's
state means for callers. Does not own bytes on disk (``journal``, ``replay``, ``ledger_file``),
nor which ledgers still exist (``gc``).

Consistency
    * An add is answered once its journal record is durable; then a restart finds it.
    * A run that could not be journaled leaves no trace: it was not stored.
    * A fence is answered once it is durable. Adds that came before it are durable before it.
    * An id that was freed stays fenced for ever.
    * Nothing is called absent (NO_SUCH_ENTRY) that damage may have taken: then it is UNKNOWN.

Crash
    On start, the journal is replayed from the mark; BASE says how long each ledger's file was
    then, what is behind is cut, and the journal brings it back. All of it is durable (a
    checkpoint) before anything is served.

Cancellation
    Callers may go; what they asked for is done all the same.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import structlog

from tierlog.format.run import Run
from tierlog.model.errors import (
    CorruptError,
    Reason,
    RetryableError,
    TierlogError,
)
from tierlog.model.ids import INT64_MAX, EntryId, LedgerId
from tierlog.ports.files import Files
from tierlog.ports.ids import Ids
from tierlog.ports.storage_node import LacAnswer
from tierlog.runtime.settings import StorageSettings
from tierlog_ingest.storage.answers import (
    copy_outcome,
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
from tierlog_ingest.storage.journal import Journal
from tierlog_ingest.storage.journal_format import (
    Kind,
    decode_base,
    decode_ledger_id,
    encode_base,
    encode_ledger_id,
)
from tierlog_ingest.storage.ledger_file import (
    LEDGERS_DIRECTORY,
    Gauge,
    Ledger,
    OpenFiles,
    list_ledger_files,
)
from tierlog_ingest.storage.node_state import (
    NO_LIMBO,
    IntervalSet,
    NodeState,
    read_state,
    write_state,
)
from tierlog_ingest.storage.reads import read_runs
from tierlog_ingest.storage.replay import Replay, cut_tail, records, scan_journal

log = structlog.get_logger()


class StorageNode:
    """One node over one folder. ``open`` it, then keep ``run`` going while it serves."""

    def __init__(self, files: Files, ids: Ids, settings: StorageSettings) -> None:
        self._files = files
        self._settings = settings
        self._journal = Journal(files, ids, settings)
        self._journal.on_durable = self._journaled
        self._journal.on_rollback = self._roll_back
        self._open_files = OpenFiles(files, open_max=settings.open_files_max)
        self._ledgers: dict[LedgerId, Ledger] = {}
        self._fenced: set[LedgerId] = set()
        self._fences_under_way: dict[LedgerId, asyncio.Future[None]] = {}
        self._freed = IntervalSet()
        self._quarantined: set[LedgerId] = set()
        self._limbo_ceiling = NO_LIMBO
        self._era = 0
        self._gauge = Gauge()
        self._checkpointing = asyncio.Lock()
        self._journal_at_mark = 0
        self._flush_wanted = asyncio.Event()
        self._checkpoint_wanted = asyncio.Event()
        self._flushed = asyncio.Event()
        self._tasks: asyncio.TaskGroup | None = None
        self._serving = False
        self._read_only = False
        self.state_changed = asyncio.Event()
        """Set once ``read_only`` changes; then a new event takes its place."""
        self.damages: list[str] = []
        """What the last replay found damaged."""

    def __repr__(self) -> str:
        return f"<StorageNode {self.statistics()}>"

    def statistics(self) -> dict[str, int]:
        """Return how much of everything there is."""
        return {
            "ledgers": len(self._ledgers),
            "ledgers_loaded": sum(one.loaded for one in self._ledgers.values()),
            "buffered_bytes": self._gauge.bytes,
            "journal_queued_bytes": self._journal.queued_bytes,
            "journal_written_bytes": self._journal.written_bytes,
            "journal_groups": self._journal.group_count,
            "fences": len(self._fenced),
            "quarantined": len(self._quarantined),
            "read_only": int(self._read_only),
        }

    @property
    def read_only(self) -> bool:
        """Whether ordinary adds are refused until there is space again."""
        return self._read_only

    @classmethod
    async def open(cls, files: Files, ids: Ids, settings: StorageSettings) -> "StorageNode":
        """Read what is there, replay the journal, and make it all durable."""
        node = cls(files, ids, settings)
        await node._start()
        return node

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until ``stop``, then make everything durable. ``DiskFailedError`` ends it."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                self._serving = True
                writer = tasks.create_task(self._journal.run(), name="journal")
                loops = [
                    tasks.create_task(self._flush_loop(), name="flush"),
                    tasks.create_task(self._checkpoint_loop(), name="checkpoint"),
                    tasks.create_task(self._space_loop(), name="space"),
                ]
                await stop.wait()
                self._serving = False
                for loop in loops:
                    loop.cancel()
                try:
                    await self.checkpoint()
                except TierlogError as error:
                    log.warning("checkpoint.failed", cause=str(error))  # the journal has it all
                self._journal.stop()
                await writer
        finally:
            self._serving = False
            await self._open_files.close()

    # Writing

    async def ready(self) -> None:
        """Wait until the node takes more."""
        await self._journal.ready()
        while self._gauge.bytes >= 4 * self._settings.ledger_buffer_bytes_max:
            if self._read_only:
                return  # refused at once, then
            self._flush_wanted.set()
            self._flushed.clear()
            await self._flushed.wait()

    def add(self, run: Run, *, recovery: bool = False) -> "asyncio.Future[None]":
        try:
            ledger = self._check_add(run, recovery=recovery)
            if ledger.loaded:
                return self._add_loaded(ledger, run)
        except TierlogError as error:
            return failed(error)
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def add_late(loading: "asyncio.Future[None]") -> None:
            error = loading.exception()
            added = failed(error) if error is not None else self.add(run, recovery=recovery)
            added.add_done_callback(lambda done: copy_outcome(done, answer))

        self._start_loading(ledger).add_done_callback(add_late)
        return answer

    def confirm(self, ledger_id: LedgerId, last_add_confirmed: EntryId) -> None:
        ledger = self._ledgers.get(ledger_id)
        if ledger is not None:
            ledger.confirm(last_add_confirmed)

    async def fence(self, ledger_id: LedgerId) -> LacAnswer:
        self._check_serving()
        if ledger_id in self._freed:
            raise no_such_ledger(ledger_id)
        if ledger_id not in self._fenced:
            self._fenced.add(ledger_id)
            fence = self._journal.append(Kind.FENCE, [encode_ledger_id(ledger_id)])
            self._fences_under_way[ledger_id] = fence
        fence_under_way = self._fences_under_way.get(ledger_id)
        if fence_under_way is not None:
            try:
                await asyncio.shield(fence_under_way)
            except TierlogError:
                if self._fences_under_way.get(ledger_id) is fence_under_way:
                    del self._fences_under_way[ledger_id]
                    self._fenced.discard(ledger_id)
                raise
            if self._fences_under_way.get(ledger_id) is fence_under_way:
                del self._fences_under_way[ledger_id]
        return await self.last_add_confirmed(ledger_id)

    async def last_add_confirmed(self, ledger_id: LedgerId) -> LacAnswer:
        self._check_serving()
        ledger = await self._loaded(ledger_id)
        if ledger is None:
            return LacAnswer(EntryId(-1), EntryId(-1))
        return LacAnswer(ledger.last_add_confirmed, ledger.index.last_entry_id)

    def _check_add(self, run: Run, *, recovery: bool) -> Ledger:
        self._check_serving()
        ledger_id = run.header.ledger_id
        if ledger_id in self._freed or (ledger_id in self._fenced and not recovery):
            raise fenced(ledger_id)
        if self._read_only and not recovery:
            raise read_only()
        waiting = self._journal.queued_bytes + len(run.encoded)
        if waiting > 2 * self._settings.journal_queue_bytes_max:
            raise queue_full(waiting)
        return self._known(ledger_id)

    def _add_loaded(self, ledger: Ledger, run: Run) -> "asyncio.Future[None]":
        offset = ledger.logical_len
        placed = ledger.place(run)
        ledger.confirm(run.header.last_add_confirmed)
        if ledger.based_in_era != self._era:
            ledger.based_in_era = self._era
            base = encode_base(ledger.ledger_id, ledger.mark_len)
            self._journal.append(Kind.BASE, [base], tag=(ledger, offset, offset))
        if self._journal_since_mark() >= self._settings.checkpoint_journal_bytes:
            self._checkpoint_wanted.set()
        # Also what is there already: it may not be durable yet, and then must not be answered.
        tag = (ledger, offset, ledger.logical_len) if placed else None
        return self._journal.append(Kind.RUN, [run.encoded], tag=tag)

    def _journaled(self, tags: list[object]) -> None:
        """Let the runs that are durable now go to their files."""
        for tag in tags:
            assert isinstance(tag, tuple)
            ledger, _, end = tag
            ledger.journaled_len = end
        if self._gauge.bytes >= self._settings.ledger_buffer_bytes_max:
            self._flush_wanted.set()

    def _roll_back(self, tags: list[object]) -> None:
        """Forget the runs that could not be journaled: the disk is full."""
        offsets: dict[Ledger, int] = {}
        for tag in tags:
            assert isinstance(tag, tuple)
            ledger, offset, _ = tag
            offsets[ledger] = min(offset, offsets.get(ledger, offset))
        for ledger, offset in offsets.items():
            ledger.roll_back(offset)
        self._set_read_only(value=True)

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
        ledger = await self._loaded(ledger_id)
        if ledger is None:
            if recovery:
                raise self._absent(ledger_id, first_entry_id, None)
            ledger = self._known(ledger_id)  # so that whoever waits hears of its LAC
        ledger.in_use += 1
        try:
            bound = await self._bound(ledger, first_entry_id, last_entry_id, wait_s, recovery)
            if ledger.index.find(first_entry_id) is None:
                raise self._absent(ledger_id, first_entry_id, ledger)
            limits = {"bytes_max": bytes_max, "read_len": self._settings.read_bytes}
            read = read_runs(ledger, self._open_files, first_entry_id, bound=bound, **limits)
            async for runs in read:
                yield runs
        finally:
            ledger.in_use -= 1
            if not ledger.in_use and not ledger.logical_len and not ledger.damaged:
                self._ledgers.pop(ledger_id, None)  # only waited for

    async def list_ledgers(self) -> list[LedgerId]:
        self._check_serving()
        return sorted(one.ledger_id for one in self._ledgers.values() if one.has_entries)

    async def _bound(
        self,
        ledger: Ledger,
        first_entry_id: EntryId,
        last_entry_id: EntryId | None,
        wait_s: float,
        recovery: bool,  # noqa: FBT001 - as its caller has it
    ) -> EntryId:
        """Return the last entry that may be read."""
        asked = last_entry_id if last_entry_id is not None else EntryId(INT64_MAX)
        if recovery:
            return asked
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while ledger.last_add_confirmed < first_entry_id:
                    await ledger.lac_moved.wait()
        if ledger.last_add_confirmed < first_entry_id:
            raise not_yet(ledger.ledger_id, first_entry_id, ledger.last_add_confirmed)
        return min(ledger.last_add_confirmed, asked)

    def _absent(
        self, ledger_id: LedgerId, entry_id: EntryId, ledger: Ledger | None
    ) -> TierlogError:
        """Say that an entry isn't there, if that is known."""
        if ledger_id in self._freed:
            return no_such_ledger(ledger_id)
        doubtful = ledger is not None and (ledger.damaged or ledger.gone)
        if doubtful or ledger_id <= self._limbo_ceiling or ledger_id in self._quarantined:
            return unknown_entry(ledger_id, entry_id)
        return no_such_entry(ledger_id, entry_id)

    # Deleting

    def held_ledgers(self) -> list[LedgerId]:
        """Return every ledger that garbage collection must judge, fenced ones too."""
        return sorted({*self._ledgers, *self._fenced})

    def quarantine(self, ledger_id: LedgerId) -> None:
        """Serve nothing of a ledger, but keep it: it seems to be deleted."""
        self._quarantined.add(ledger_id)

    def restore(self, ledger_id: LedgerId) -> None:
        """Serve a quarantined ledger again."""
        self._quarantined.discard(ledger_id)

    async def free(self, ledger_id: LedgerId) -> None:
        """Forget a deleted ledger for ever, durably; its id stays fenced."""
        self._check_serving()
        async with self._checkpointing:  # or its record could be in a journal that just goes
            if ledger_id not in self._freed:
                await self._journal.append(Kind.FREED, [encode_ledger_id(ledger_id)])
                await self._drop(ledger_id)

    @property
    def limbo_unlimited(self) -> bool:
        """Whether damage to the journal casts doubt on every ledger, future ones too."""
        return self._limbo_ceiling == INT64_MAX

    def limit_limbo(self, ledger_id_max: LedgerId) -> None:
        """Take note that ledgers above this id were made after the journal was damaged."""
        self._limbo_ceiling = min(self._limbo_ceiling, ledger_id_max)

    async def _drop(self, ledger_id: LedgerId) -> None:
        self._freed.add(ledger_id)
        self._fenced.discard(ledger_id)
        self._quarantined.discard(ledger_id)
        ledger = self._ledgers.pop(ledger_id, None)
        if ledger is not None:
            await ledger.delete(self._files, self._open_files)

    # Ledgers

    def _known(self, ledger_id: LedgerId) -> Ledger:
        ledger = self._ledgers.get(ledger_id)
        if ledger is None:
            ledger = Ledger(ledger_id, self._gauge, on_disk=False)
            self._ledgers[ledger_id] = ledger
        return ledger

    async def _loaded(self, ledger_id: LedgerId) -> Ledger | None:
        if ledger_id in self._freed:
            raise no_such_ledger(ledger_id)
        ledger = self._ledgers.get(ledger_id)
        while ledger is not None and not ledger.loaded:  # it may be unloaded again meanwhile
            await asyncio.shield(self._start_loading(ledger))
        return ledger

    def _start_loading(self, ledger: Ledger) -> "asyncio.Future[None]":
        """Load a ledger, unless that is under way."""
        if ledger.loading is None:
            loading = ledger.loading = asyncio.get_running_loop().create_future()
            assert self._tasks is not None
            self._tasks.create_task(self._load(ledger, loading))
        return ledger.loading

    async def _load(self, ledger: Ledger, loading: "asyncio.Future[None]") -> None:
        error: TierlogError | None = RetryableError("the node stops", remedy="Use another node")
        try:
            await ledger.load(self._open_files)
            error = None
        except (TierlogError, FileNotFoundError) as caught:
            error = unreadable(ledger.ledger_id, caught)
        finally:
            ledger.loading = None
            if error is None:
                loading.set_result(None)
            else:
                loading.set_exception(error)
                loading.exception()

    def _unload_surplus(self) -> None:
        """Forget indexes of ledgers that nothing was done with; the oldest ids first."""
        loaded = [one for one in self._ledgers.values() if one.loaded]
        surplus = len(loaded) - self._settings.open_files_max
        for ledger in sorted(loaded, key=lambda one: one.ledger_id):
            if surplus <= 0:
                return
            if not ledger.dirty and not ledger.buffer and not ledger.in_use and len(ledger.index):
                ledger.unload()
                surplus -= 1

    # Checkpoints

    async def checkpoint(self) -> None:
        """Make every ledger file durable, and move the mark."""
        async with self._checkpointing:
            self._era += 1
            for ledger in self._ledgers.values():
                if ledger.loaded:
                    ledger.mark_len = ledger.logical_len
            fences, freed = tuple(sorted(self._fenced)), self._freed.intervals()
            segment_id = await self._journal.roll()
            await self._persist(segment_id, fences, freed)
            self._unload_surplus()

    async def _persist(
        self, segment_id: int, fences: tuple[int, ...], freed: tuple[tuple[int, int], ...]
    ) -> None:
        written = self._journal.written_bytes
        dirty = [one for one in self._ledgers.values() if one.loaded and one.dirty and one.begun]
        for ledger in dirty:
            await ledger.flush(self._open_files, sync=True)
        await self._files.sync_directory(LEDGERS_DIRECTORY)
        for ledger in dirty:
            ledger.new_name = False
        ceiling = self._limbo_ceiling
        state = NodeState(
            mark_segment=segment_id, limbo_ceiling=ceiling, fences=fences, freed=freed
        )
        await write_state(self._files, state)
        self._journal_at_mark = written
        await self._journal.remove_before(segment_id)

    async def _flush_loop(self) -> None:
        while True:
            await self._flush_wanted.wait()
            self._flush_wanted.clear()
            buffered = self._gauge.bytes
            try:
                await self._flush_largest()
            except TierlogError as error:
                log.warning("flush.failed", cause=str(error))
                self._set_read_only(value=True)
            if self._gauge.bytes < buffered:
                self._flushed.set()

    async def _flush_largest(self) -> None:
        buffered = [one for one in self._ledgers.values() if one.buffer]
        for ledger in sorted(buffered, key=lambda one: one.flushed_len - one.logical_len):
            if self._gauge.bytes <= self._settings.ledger_buffer_bytes_max // 2:
                return
            await ledger.flush(self._open_files)

    async def _checkpoint_loop(self) -> None:
        settings = self._settings
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(settings.checkpoint_interval_s):
                    await self._checkpoint_wanted.wait()
            self._checkpoint_wanted.clear()
            if self._journal_since_mark() == 0:
                continue
            try:
                await self.checkpoint()
            except TierlogError as error:
                log.warning("checkpoint.failed", cause=str(error))
                if error.reason is Reason.READ_ONLY:
                    self._set_read_only(value=True)

    def _journal_since_mark(self) -> int:
        return self._journal.written_bytes - self._journal_at_mark

    async def _space_loop(self) -> None:
        settings = self._settings
        while True:
            free_bytes = await self._files.free_bytes()
            if free_bytes < settings.free_bytes_min:
                self._set_read_only(value=True)
            elif self._read_only and free_bytes >= settings.free_bytes_resume:
                self._set_read_only(value=False)
                self._flush_wanted.set()
            await asyncio.sleep(settings.space_check_s)

    def _set_read_only(self, *, value: bool) -> None:
        if self._read_only != value:
            self._read_only = value
            log.warning("node.read_only" if value else "node.writable")
            self._flushed.set()
            changed, self.state_changed = self.state_changed, asyncio.Event()
            changed.set()

    # The start

    async def _start(self) -> None:
        await self._files.make_directory(LEDGERS_DIRECTORY)
        state = await read_state(self._files)
        if state is not None:
            self._fenced = {LedgerId(one) for one in state.fences}
            self._freed = IntervalSet(state.freed)
            self._limbo_ceiling = state.limbo_ceiling
        for ledger_id in await list_ledger_files(self._files):
            self._ledgers[ledger_id] = Ledger(ledger_id, self._gauge, on_disk=True)
        mark = state.mark_segment if state is not None else None
        replay = await scan_journal(self._files, first_segment_id=mark)
        await self._replay(replay)
        await cut_tail(replay)
        for ledger_id in [one for one in self._ledgers if one in self._freed]:
            await self._drop(ledger_id)
        await self._journal.start(replay.next_segment_id, synced=replay.end)
        fences, freed = tuple(sorted(self._fenced)), self._freed.intervals()
        await self._persist(self._journal.segment_id, fences, freed)
        for ledger in self._ledgers.values():
            ledger.mark_len = ledger.logical_len
        self._unload_surplus()
        log.info("node.opened", ledgers=len(self._ledgers), replayed_to=tuple(replay.end))

    async def _replay(self, replay: Replay) -> None:
        based: set[LedgerId] = set()
        async for kind, payload in records(replay):
            if kind is Kind.BASE:
                number, base_len = decode_base(payload)
                ledger_id = LedgerId(number)
                if ledger_id not in based and ledger_id not in self._freed:
                    based.add(ledger_id)
                    await self._known(ledger_id).restore(self._open_files, base_len)
            elif kind is Kind.RUN:
                await self._replay_run(Run.decode(payload), replay, based)
            elif kind is Kind.FENCE:
                self._fenced.add(LedgerId(decode_ledger_id(payload)))
            else:
                await self._drop(LedgerId(decode_ledger_id(payload)))
        self.damages = replay.damages
        if replay.damages:
            self._limbo_ceiling = INT64_MAX

    async def _replay_run(self, run: Run, replay: Replay, based: set[LedgerId]) -> None:
        ledger_id = run.header.ledger_id
        if ledger_id in self._freed:
            return
        ledger = self._known(ledger_id)
        if ledger_id not in based:  # damage took its BASE
            replay.damages.append(f"ledger {ledger_id}: its base is missing")
            based.add(ledger_id)
            if not ledger.loaded:
                await ledger.load(self._open_files)
        try:
            ledger.place(run)
        except CorruptError as error:
            replay.damages.append(str(error))
            log.error("journal.conflict", cause=str(error))  # noqa: TRY400 - no bug of ours
        ledger.journaled_len = ledger.logical_len
        ledger.confirm(run.header.last_add_confirmed)
        if self._gauge.bytes >= self._settings.ledger_buffer_bytes_max:
            await self._flush_largest()

    def _check_serving(self) -> None:
        if not self._serving:
            raise RetryableError("the storage node is not serving", remedy="Use another node")
