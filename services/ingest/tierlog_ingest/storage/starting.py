"""The start of a node: from what its directories hold to a mark behind all of it.

Owns: the order of the start, and what counts as damage then. Does not own reading any of the files
(``state_file``, ``entry_log``, ``ledger_cache``, ``journal.replay``).

    states read → entry logs cut to what they were at the mark → indexes listed → journal replayed
    into buffer, logs and index → its tail cut → a new segment → a mark

Invariants:
    * Nothing is served, and nothing removed that the mark before needs, until the new mark is
      durable. A crash on the way leads here again.
    * What can't be proved absent is doubtful: an index that a log's map names and that isn't
      there is built anew; a journal, a ``state`` or a map that is damaged sets the limbo ceiling.
    * A node whose ``state`` is gone everywhere is refused: its fences are not known.
"""

import asyncio
from collections.abc import Sequence

import structlog

from tierlog.format.run import Run
from tierlog.model.errors import CorruptError, TierlogError
from tierlog.model.ids import INT64_MAX, LedgerId
from tierlog.ports.files import Files
from tierlog_ingest.storage.fences import Fences
from tierlog_ingest.storage.intervals import IntervalSet
from tierlog_ingest.storage.journal.format import Kind, Record, decode_ledger_id
from tierlog_ingest.storage.journal.journal import Journal
from tierlog_ingest.storage.journal.replay import Replay, cut_tail, record_groups, scan_journal
from tierlog_ingest.storage.marking import Marks
from tierlog_ingest.storage.state_file import NodeState, read_states
from tierlog_ingest.storage.store import RunStore

log = structlog.get_logger()

_DURABLE = 0
"""The number of all records of a replay: durable before the first of this process."""


class Start:
    """One start. ``run`` it once."""

    def __init__(
        self,
        directories: Sequence[Files],
        log_directory_count: int,
        *,
        store: RunStore,
        marks: Marks,
        fences: Fences,
        journal: Journal,
        buffer_bytes_max: int,
    ) -> None:
        self._directories = directories
        self._log_directory_count = log_directory_count
        self._store = store
        self._marks = marks
        self._fences = fences
        self._journal = journal
        self._buffer_bytes_max = buffer_bytes_max
        self._damages: list[str] = []
        self._error: TierlogError | None = None
        self.unsettled_logs: frozenset[int] = frozenset()
        """What compaction had not done with."""

    async def run(self) -> list[str]:
        """Do it all; return damages, in words."""
        state, self._damages = await read_states(
            self._directories, log_directories=self._log_directory_count
        )
        if self._damages:
            self._cast_doubt()
        await self._open(state)
        replay = await scan_journal(self._directories[0], state.mark if state is not None else None)
        await self._replay(replay, is_fresh=state is None)
        await cut_tail(replay)
        await self._journal.start(replay.next_segment_id, synced=replay.end)
        await self._marks.mark()
        log.info(
            "node.opened",
            ledgers=len(self._store.ledger_ids()),
            replayed_to=tuple(replay.end),
            damages=len(self._damages),
        )
        return self._damages

    def _cast_doubt(self) -> None:
        self._marks.limbo_ceiling = INT64_MAX

    # What there was at the mark

    async def _open(self, state: NodeState | None) -> None:
        store, logs, cache = self._store, self._store.logs, self._store.cache
        if state is None:
            await self._check_fresh()
            state = NodeState(
                generation=0,
                mark=self._marks.mark_position,
                logs=((),) * self._log_directory_count,
                maps={},
            )
        doubt = self._marks.limbo_ceiling
        self._marks.restore(state)
        self._marks.limbo_ceiling = max(doubt, state.limbo_ceiling)
        self._fences.fenced.update(LedgerId(one) for one in state.fences)
        store.freed = IntervalSet(state.freed)
        self.unsettled_logs = state.unsettled_logs
        damages = await logs.open(state.logs, state.maps)
        for damage in damages:
            log.error("entry_log.damaged_at_start", cause=damage)
        self._damages += damages
        for log_id in sorted(logs.unmapped):
            await self._read_map(log_id)
        await cache.open()
        named = logs.ledger_ids()
        logs.forget_ledgers([one for one in named if one in store.freed])
        for ledger_id in [one for one in cache.ledger_ids() if one in store.freed]:
            await cache.remove(LedgerId(ledger_id))
        lost = named - set(cache.ledger_ids())
        store.unfinished = {
            LedgerId(one) for one in (*lost, *state.unfinished) if one not in store.freed
        }
        if store.unfinished:
            log.warning("index.unfinished", ledgers=len(store.unfinished))

    async def _read_map(self, log_id: int) -> None:
        """Find out what a log holds whose map can't be read."""
        try:
            is_whole = await self._store.logs.scan_map(log_id)
        except (CorruptError, FileNotFoundError) as error:
            log.error("entry_log.unreadable", log_id=log_id, cause=str(error))  # noqa: TRY400
            is_whole = False
        if not is_whole:
            self._damages.append(f"entry log {log_id}: neither map nor all runs can be read")
            self._cast_doubt()

    async def _check_fresh(self) -> None:
        """Refuse a node that has data and no ``state``."""
        for files in self._directories:
            if await files.list("logs") or await files.list("index"):
                raise _no_state()

    # What came behind it

    async def _replay(self, replay: Replay, *, is_fresh: bool) -> None:
        flushing: asyncio.Task[TierlogError | None] | None = None
        async with asyncio.TaskGroup() as tasks:
            try:
                async for group in record_groups(replay):
                    if is_fresh:
                        raise _no_state()
                    for record in group:
                        await self._apply(record)
                    if self._store.buffer.bytes >= self._buffer_bytes_max // 2:
                        await _raise_error_of(flushing)
                        flushing = tasks.create_task(self._flush())
                await _raise_error_of(flushing)
            except TierlogError as error:
                self._error = error
        if self._error is not None:
            raise self._error
        self._damages += replay.damages
        if replay.damages:
            self._cast_doubt()

    async def _flush(self) -> TierlogError | None:
        """Write and sync what was replayed so far, while more of it is read."""
        try:
            async with self._marks.lock:
                await self._marks.flush(_DURABLE)
            await self._store.logs.sync()
        except TierlogError as error:
            return error
        return None

    async def _apply(self, record: Record) -> None:
        if record.kind is Kind.RUN:
            self._apply_run(record.payload)
        elif record.kind is Kind.FENCE:
            self._fences.fenced.add(LedgerId(decode_ledger_id(record.payload)))
        else:
            async with self._marks.lock:
                await self._marks.drop(LedgerId(decode_ledger_id(record.payload)))

    def _apply_run(self, payload: memoryview) -> None:
        try:
            run = Run.restore(payload)  # the record's checksum was right
            if run.header.ledger_id not in self._store.freed:
                self._store.buffer.add(run, _DURABLE)
        except CorruptError as error:
            log.error("journal.conflict", cause=str(error))  # noqa: TRY400 - no bug of ours
            self._damages.append(str(error))
            self._cast_doubt()


async def _raise_error_of(flushing: "asyncio.Task[TierlogError | None] | None") -> None:
    error = None if flushing is None else await flushing
    if error is not None:
        raise error


def _no_state() -> CorruptError:
    return CorruptError(
        "the node has data, but its file 'state' is missing",
        remedy="Format the node anew, and let the others repair what it held",
    )
