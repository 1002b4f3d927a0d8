"""Compaction: entry logs whose ledgers were deleted go, and give back their space.

Owns: carrying out what ``compaction_plan`` decides, in an order that a crash may interrupt
anywhere (ADR-0014, point 6). Does not own logs, index and mark (``EntryLogs``, ``LedgerCache``,
the node), nor which ledgers exist (``gc``), nor when space is low (``space``).

A run of an old log is live if its slots name it. Live runs are copied to a new log ("target");
then, for a batch of old logs ("sources"):

    1. the targets are sealed; a mark lists them in ``state``, as unsettled
    2. each run's slots are set to its copy, but only if they still name the old place
    3. sources are retired in the next mark, before it flushes the index; that mark's
       ``state`` neither lists them nor calls the targets unsettled
    4. the sources' files go

Consistency
    * Whether a run is live is asked of the index alone, after a mark: before it, a sealed log
      may hold runs whose slots are not set yet.
    * A source is retired only if each of its runs was copied, named a place elsewhere, or was of
      a freed ledger, and if no index was rebuilt meanwhile (a rebuild may choose the old place).
    * A log with a damaged place goes only when no slot of the ledgers that its map names points
      into it. Where the map can't be read, it stays.
    * Absent slots of a ledger that was not freed are a doubt, never garbage: the log stays.

Crash
    Before 1, the targets are unlisted, and removed at the start. Before 3, both copies are there,
    whichever the index names; ``unsettled`` comes back from ``state``, and those logs are
    compacted again whatever their live share, since their maps tell nothing about it. After it,
    the sources are unlisted, and removed at the start.

Cancellation
    As a crash, but that the process still knows: what is ``unsettled`` or retired is done later.

Errors: a full disk ends a round; what was settled stays settled. ``DiskFailedError`` passes.
"""

import asyncio
import contextlib
from array import array
from collections.abc import (
    AsyncGenerator,
    Collection,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, NamedTuple

import numpy as np
import structlog
from numpy.typing import NDArray

from tierlog.format.run import Run
from tierlog.model.errors import CorruptError, Reason, TierlogError
from tierlog.model.ids import EntryId, LedgerId
from tierlog.ports.clock import Clock
from tierlog_ingest.storage.compaction.compaction_plan import (
    LogUse,
    Rules,
    Trigger,
    below,
    due,
    for_space,
    without_live_ledgers,
)
from tierlog_ingest.storage.compaction.compaction_ports import (
    Found,
    Index,
    Logs,
    Node,
    Rebuilds,
    Space,
)
from tierlog_ingest.storage.compaction.throttle import TokenBucket
from tierlog_ingest.storage.index.index_format import SLOTS_PER_PAGE, pack_slot, unpack_slot
from tierlog_ingest.storage.priorities import DiskGate, Work
from tierlog_ingest.storage.space import Level

log = structlog.get_logger()

MOVES_MAX: Final = 100_000
"""Runs in a batch: 40 bytes of memory each."""
_ATTEMPTS: Final = 3
_STEPS: Final = 256
"""So many runs are looked at before others get the processor."""
_WINDOW_LEN: Final = 256 * 1024
"""So much is read and decoded in one turn; appends wait behind it."""
_RETRY_S: Final = 5.0


class _KnownSlots(NamedTuple):
    """Slots that were looked up for one run, and may do for the next."""

    ledger_id: int
    first_entry_id: int
    slots: NDArray[np.uint64]

    def of(self, run: Run) -> NDArray[np.uint64] | None:
        """Return the slots of a run, if they are here."""
        start = run.first_entry_id - self.first_entry_id
        end = start + run.header.count
        if run.header.ledger_id != self.ledger_id or start < 0 or end > len(self.slots):
            return None
        return self.slots[start:end]


@dataclass(slots=True)
class _Batch:
    """What was copied and is not settled yet."""

    targets: set[int] = field(default_factory=set)
    sources: dict[int, int | None] = field(default_factory=dict)
    """Those that were looked through, and the stamp from before that."""
    moves: "array[int]" = field(default_factory=lambda: array("Q"))
    """Ledger, first entry, count, old slot, new slot; again and again."""

    def __len__(self) -> int:
        return len(self.moves) // 5

    def __iter__(self) -> Iterator[tuple[int, int, int, int, int]]:
        columns = iter(self.moves)
        return zip(columns, columns, columns, columns, columns, strict=True)


class _IndexDamagedError(Exception):
    """A ledger's index must be rebuilt before the log can be judged."""

    def __init__(self, ledger_id: LedgerId) -> None:
        super().__init__(ledger_id)
        self.ledger_id = ledger_id


class Compactor:
    """Frees space, one round at a time."""

    def __init__(  # noqa: PLR0913 - its parts
        self,
        logs: Logs,
        index: Index,
        node: Node,
        space: Space,
        *,
        rules: Rules,
        clock: Clock,
        gate: DiskGate,
        bucket: TokenBucket,
        rebuilds: Rebuilds,
        unsettled: Collection[int] = (),
        moves_max: int = MOVES_MAX,
    ) -> None:
        self._logs = logs
        self._index = index
        self._node = node
        self._space = space
        self._rules = rules
        self._clock = clock
        self._gate = gate
        self._bucket = bucket
        self._rebuilds = rebuilds
        self._moves_max = moves_max
        self._working = asyncio.Lock()
        self._wanted = asyncio.Event()
        self._done_s = dict.fromkeys(Trigger, clock.monotonic_s())
        self._retired: dict[int, int] = {}
        """Logs that ``state`` may still list, and their lengths."""
        self._kept: dict[int, int] = {}
        """Logs that can't be compacted, and the live bytes they had then."""
        self.unsettled: set[int] = set(unsettled)
        """Logs whose maps may count runs that the index finds elsewhere; ``state`` keeps them."""
        self._counts = dict.fromkeys(
            (
                "rounds_minor",
                "rounds_major",
                "rounds_space",
                "rounds_failed",
                "logs_removed",
                "logs_compacted",
                "read_bytes",
                "copied_bytes",
                "copied_runs",
                "freed_bytes",
            ),
            0,
        )

    def __repr__(self) -> str:
        return f"<Compactor unsettled={len(self.unsettled)} kept={len(self._kept)}>"

    def statistics(self) -> dict[str, float]:
        """Return what was done since the start."""
        counts: dict[str, float] = {f"compaction_{name}": n for name, n in self._counts.items()}
        counts["compaction_logs_kept"] = len(self._kept)
        counts["compaction_logs_unsettled"] = len(self.unsettled)
        counts["compaction_throttled_s"] = self._bucket.waited_s
        return counts

    def want(self) -> None:
        """Have a round soon: space is low, or ledgers were freed."""
        self._wanted.set()

    async def run(self, *, interval_s: float) -> None:
        """Look for work for ever. An error ends a round, never the loop."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await self._wanted.wait()
            self._wanted.clear()
            try:
                await self.work()
            except TierlogError as error:
                self._counts["rounds_failed"] += 1
                log.warning("compaction.failed", cause=str(error))
                if error.reason is Reason.READ_ONLY:
                    self._space.refused()
                await asyncio.sleep(_RETRY_S)

    async def work(self) -> None:
        """Do what is due now."""
        async with self._working:
            await self._prepare()
            trigger = due(self._rules, now_s=self._clock.monotonic_s(), done_s=self._done_s)
            threshold = 0.0 if trigger is None else self._rules.threshold(trigger)
            await self._compact_below(threshold)
            if trigger is not None:
                self._finished(trigger)
            if self._space.level is not Level.OK:
                await self._make_room()

    async def compact(self, *, threshold: float) -> None:
        """Do a round at once, of all logs below a live share."""
        async with self._working:
            await self._prepare()
            await self._compact_below(threshold)

    def _finished(self, trigger: Trigger) -> None:
        self._counts[f"rounds_{trigger.value}"] += 1
        self._done_s[trigger] = self._clock.monotonic_s()
        if trigger is Trigger.MAJOR:
            self._done_s[Trigger.MINOR] = self._done_s[trigger]

    async def _prepare(self) -> None:
        """Finish what an earlier round left, and remove what no live ledger has anything in."""
        await self._drop_retired()
        self.unsettled.intersection_update(one.log_id for one in self._logs.logs())
        if self.unsettled:
            await self._logs.seal("compaction")
        if any(not one.ended and one.garbage_bytes and not one.live_bytes for one in self._uses()):
            await self._logs.seal("flush")
        await self._read_maps()
        empty = without_live_ledgers(self._uses())
        if empty:
            await self._retire(empty)

    # Which

    def _uses(self) -> list[LogUse]:
        open_logs = self._logs.written_to()
        uses = [
            LogUse(
                log_id=one.log_id,
                length=one.length,
                ended=one.log_id not in open_logs,
                live_bytes=one.live_bytes,
            )
            for one in self._logs.logs()
        ]
        self._kept = {
            one.log_id: one.live_bytes
            for one in uses
            if self._kept.get(one.log_id) == one.live_bytes
        }
        return [one for one in uses if one.log_id not in self._kept]

    async def _read_maps(self) -> None:
        """Find out what logs without a readable map hold; those that are damaged stay."""
        known = {one.log_id for one in self._uses()}
        for log_id in sorted(known.intersection(self._logs.unmapped)):
            if await self._logs.scan_map(log_id):
                ledger_ids = [LedgerId(one) for one in self._logs.usage[log_id]]
                self._logs.forget_ledgers([one for one in ledger_ids if self._node.is_freed(one)])
            else:
                self._keep(log_id, "neither its map nor all of its runs can be read")

    async def _compact_below(self, threshold: float) -> None:
        chosen = below(self._uses(), threshold=threshold, besides=self.unsettled)
        if chosen:
            await self._compact(chosen)

    async def _make_room(self) -> None:
        """Compact one log after another, the cheapest first, until there is space."""
        threshold = self._rules.threshold(Trigger.SPACE, self._space.level)
        if any(
            not one.ended and one.garbage_bytes and one.live_share < threshold / 2
            for one in self._uses()
        ):
            await self._logs.seal("flush")
        tried: set[int] = set()
        while True:
            threshold = self._rules.threshold(Trigger.SPACE, self._space.level)
            room = await self._space.copy_room()
            uses = [one for one in self._uses() if one.log_id not in tried]
            chosen = for_space(uses, threshold=threshold, copy_bytes_max=room)
            if chosen is None:
                return
            tried.add(chosen)
            await self._compact([chosen])
            self._finished(Trigger.SPACE)
            if await self._space.look() is Level.OK:
                return

    # Copying

    async def _compact(self, log_ids: Sequence[int]) -> None:
        await self._node.mark()  # now the index knows all that lies in sealed logs
        batch = _Batch()
        for log_id in log_ids:
            use = next((one for one in self._uses() if one.log_id == log_id), None)
            if use is None:
                continue
            if batch.moves and await self._space.copy_room() < use.copy_bytes:
                await self._settle(batch)
                batch = _Batch()
            if await self._space.copy_room() < use.copy_bytes:
                log.warning("compaction.no_room", log_id=log_id, needed_bytes=use.copy_bytes)
                continue
            await self._look_through(log_id, batch)
            if len(batch) >= self._moves_max or self._space.level is Level.READ_ONLY:
                await self._settle(batch)
                batch = _Batch()
        await self._settle(batch)

    async def _look_through(self, log_id: int, batch: _Batch) -> None:
        """Copy what is live in a log; settles the batch when it becomes too large."""
        for _ in range(_ATTEMPTS):
            stamp = self._rebuilds.stamp()
            try:
                await self._copy_live(log_id, batch)
                doubt = await self._doubt(log_id, batch)
            except _IndexDamagedError as damage:
                await self._settle(batch)
                await self._rebuild(damage.ledger_id)
                continue
            if doubt is None:
                batch.sources[log_id] = stamp
            else:
                self._keep(log_id, doubt)
            return
        self._keep(log_id, "the index of a ledger can't be rebuilt")

    async def _rebuild(self, ledger_id: LedgerId) -> None:
        try:
            with self._rebuilds.one():  # however far it comes
                await self._node.rebuild_index(ledger_id)
        except TierlogError as error:
            if error.reason is Reason.READ_ONLY:
                raise
            log.warning("compaction.no_index", ledger_id=ledger_id, cause=str(error))

    async def _copy_live(self, log_id: int, batch: _Batch) -> None:
        async with contextlib.aclosing(self._windows(log_id)) as windows:
            async for window in windows:
                await self._copy_window(log_id, window, batch)

    async def _windows(self, log_id: int) -> AsyncGenerator[Found, None]:
        """Scan a log, each window in its turn at the disk."""
        async with contextlib.aclosing(self._logs.scan(log_id, window_len=_WINDOW_LEN)) as windows:
            while True:
                async with self._gate.turn(Work.COMPACTION):
                    window = await anext(windows, None)
                if window is None:
                    return
                yield window

    async def _copy_window(self, log_id: int, window: Found, batch: _Batch) -> None:
        read_bytes = sum(len(run.encoded) for _, run in window)
        live = await self._live(log_id, window)
        copied_bytes = sum(len(run.encoded) for _, run in live)
        self._counts["read_bytes"] += read_bytes
        if self._space.level is not Level.READ_ONLY:  # nothing is appended then
            await self._bucket.take(read_bytes + copied_bytes)
        if live:
            await self._copy(log_id, live, batch)
            self._counts["copied_runs"] += len(live)
            self._counts["copied_bytes"] += copied_bytes
        if len(batch) >= self._moves_max:
            await self._settle(batch)

    async def _live(self, log_id: int, window: Found) -> Found:
        """Return the runs that the index finds in this log."""
        live: Found = []
        known = _KnownSlots(-1, 0, np.empty(0, np.uint64))
        for count, (offset, run) in enumerate(window):
            if count % _STEPS == 0:
                await asyncio.sleep(0)
            if self._node.is_freed(run.header.ledger_id):
                continue
            slots = known.of(run)
            if slots is None:
                known = await self._slots_from(run)
                slots = known.of(run)
                assert slots is not None
            if not slots.all() and not self._node.is_freed(run.header.ledger_id):
                raise _IndexDamagedError(run.header.ledger_id)
            if (slots == pack_slot(log_id, offset, len(run.encoded))).any():
                live.append((offset, run))
        return live

    async def _slots_from(self, run: Run) -> "_KnownSlots":
        """Look up the slots of a run, and those behind it in its last page."""
        ledger_id, entry_id = run.header.ledger_id, int(run.first_entry_id)
        if not self._node.has_whole_index(ledger_id):
            raise _IndexDamagedError(ledger_id)
        pages = []
        try:
            while entry_id <= run.last_entry_id:
                pages.append(await self._index.slots(ledger_id, EntryId(entry_id), SLOTS_PER_PAGE))
                entry_id += len(pages[-1])
        except CorruptError as error:
            raise _IndexDamagedError(ledger_id) from error
        return _KnownSlots(ledger_id, run.first_entry_id, np.concatenate(pages))

    async def _copy(self, log_id: int, live: Found, batch: _Batch) -> None:
        runs = [run for _, run in live]
        async with self._gate.turn(Work.COMPACTION):
            locations = await self._logs.append(runs, writer="compaction")
        targets = {one.log_id for one in locations}
        # Before anything else: a mark may list the targets as soon as they are written.
        self.unsettled |= targets
        batch.targets |= targets
        freed = {run.header.ledger_id for run in runs if self._node.is_freed(run.header.ledger_id)}
        if freed:  # meanwhile; the targets' maps learn of it
            self._logs.forget_ledgers(freed)
        for (offset, run), location in zip(live, locations, strict=True):
            old_slot = pack_slot(log_id, offset, len(run.encoded))
            one = run.header
            batch.moves.extend(
                (one.ledger_id, one.first_entry_id, one.count, old_slot, pack_slot(*location))
            )
        self.unsettled.add(log_id)

    async def _doubt(self, log_id: int, batch: _Batch) -> str | None:
        """Say why a log that was looked through must stay all the same."""
        if log_id in self._logs.unmapped:
            return "its map can't be read"
        if not self._logs.damaged_logs.get(log_id):
            return None
        await self._settle(batch)
        for ledger_id in list(self._logs.usage[log_id]):
            if await self._names(LedgerId(ledger_id), log_id):
                return f"ledger {ledger_id} has entries in a place that can't be read"
        return None

    async def _names(self, ledger_id: LedgerId, log_id: int) -> bool:
        """Tell whether any slot of a ledger points into a log."""
        try:
            header = await self._index.header(ledger_id)
            entry_id = 0
            while header is not None and entry_id <= header.last_entry_id:
                count = header.last_entry_id - entry_id + 1
                slots = await self._index.slots(ledger_id, EntryId(entry_id), count)
                if any(unpack_slot(slot)[0] == log_id for slot in set(slots.tolist()) - {0}):
                    return True
                entry_id += len(slots)
        except CorruptError as error:
            raise _IndexDamagedError(ledger_id) from error
        return False

    def _keep(self, log_id: int, cause: str) -> None:
        """Leave a log alone until something changes: its ledgers, or the process."""
        log.error("compaction.log_kept", log_id=log_id, cause=cause)
        live = {one.log_id: one.live_bytes for one in self._logs.logs()}
        if log_id in live:
            self._kept[log_id] = live[log_id]

    # Settling

    async def _settle(self, batch: _Batch) -> None:
        """Let the index name the copies, durably; then the sources go. Empties the batch."""
        if batch.moves:
            await self._logs.seal("compaction")
            await self._node.mark()
            moves = iter(batch)
            while some := list(islice(moves, _STEPS)):
                # To its end, whoever stops this: a write to an index that was cut short may come
                # yet, and ends the node.
                await self._node.finish(self._move_all(some))
        targets, sources = set(batch.targets), dict(batch.sources)
        batch.moves = array("Q")
        batch.targets.clear()
        batch.sources.clear()
        if targets or sources:
            await self._retire(sources, settled=targets)

    async def _move_all(self, moves: Sequence[tuple[int, int, int, int, int]]) -> None:
        for move in moves:
            await self._move(*move)

    async def _move(
        self, ledger_id: int, first_entry_id: int, count: int, old_slot: int, new_slot: int
    ) -> None:
        ledger, first = LedgerId(ledger_id), EntryId(first_entry_id)
        if self._node.is_freed(ledger):
            return
        try:
            await self._index.replace(ledger, first, count, old_slot, new_slot)
        except CorruptError:
            # The rebuild finds both copies, and so the source is not retired this time.
            await self._rebuild(ledger)

    async def _retire(
        self, sources: Mapping[int, int | None] | Sequence[int], *, settled: Collection[int] = ()
    ) -> None:
        """Have ``state`` forget logs, then remove them."""
        lengths = {one.log_id: one.length for one in self._logs.logs()}

        def begin() -> None:
            self.unsettled.difference_update(settled)
            for log_id in sources:
                if isinstance(sources, Mapping) and not self._rebuilds.none_since(sources[log_id]):
                    self.unsettled.add(log_id)  # looked through once more, later
                    continue
                if isinstance(sources, Mapping):
                    self._counts["logs_compacted"] += 1
                self.unsettled.discard(log_id)
                self._kept.pop(log_id, None)
                self._retired[log_id] = lengths[log_id]
                self._logs.retire(log_id)

        await self._node.mark(begin)
        await self._remove_retired()

    async def _drop_retired(self) -> None:
        """Remove what an earlier round retired and could not remove."""
        if self._retired:
            await self._node.mark()
            await self._remove_retired()

    async def _remove_retired(self) -> None:
        for log_id, length in list(self._retired.items()):
            await self._logs.remove(log_id)
            del self._retired[log_id]
            self._counts["logs_removed"] += 1
            self._counts["freed_bytes"] += length
            log.info("compaction.log_removed", log_id=log_id, length=length)
