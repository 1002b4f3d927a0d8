"""The tail of streams, in memory: one subscription a ledger, shared by all who follow it.

Owns the newest entries of ledgers that somebody waits at: a subscription takes what is confirmed
and adds it to a read index over the streaming cache; who waits is woken, and reads it there. Does
not own how tier 1 is read (``tier1``), when bytes go (``cache.manager``), nor who may read them:
whoever asks has looked the ledger up.

Bytes of a ledger are counted from the first frame that its subscription took. Where an entry
begins is noted once for each ``NOTE_EACH_BYTES``, at the first entry of what came; from the
nearest note before it the rest is walked, in steps. So however small what comes is, a read walks
over that much and over one piece that came.

Invariants:
    * Only what tier 1 gave as confirmed is here: the LAC is never passed.
    * Memory never has a gap: entries ``first`` to before ``next_id`` were all taken, and one that
      went again is a miss, which tier 1 or tier 2 answers.
    * However many follow a ledger, one read of it waits at tier 1.
    * A ledger that left tier 1 is served from here for as long as its bytes stay.
    * A cache without room is no failure: the subscription forgets what it had and goes on. Without
      any for what a ledger takes of Python's heap it is not followed: who waits there asks tier 1.
    * What subscriptions ask of tier 1 at once is within ``asked_bytes_max``: each asks for the less
      the more others do. (Runs come whole: of a longer one as much comes on top.)
    * At most ``ledgers_max`` ledgers are held; what they take of Python's heap counts as used.
      Where somebody was at each of them just now, no other is followed: who waits asks tier 1.

Cancellation: who waits may be cancelled; the subscription ends when nobody has asked for
``idle_s``, when its ledger is dropped, with ``run``, or with any trouble in tier 1, which whoever
reads next then meets; a bug that it meets is logged, and ends nothing else.
"""

import asyncio
import contextlib
import itertools
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Final, Protocol, Self

import structlog

from tierlog.format.checksum import Buffer
from tierlog.format.frame import FRAME_HEADER_LEN, entry_len_at, frames_end, walk_frames
from tierlog.model.errors import Reason, TierlogError
from tierlog.model.ids import EntryId, LedgerId
from tierlog.model.stream import ListedLedger
from tierlog.offload.tier2_reader import EntryTooLongError
from tierlog_reader.cache.manager import Asks, CacheManager
from tierlog_reader.cache.store import StreamingCache
from tierlog_reader.chunk import Budget, Chunk, without_rest
from tierlog_reader.places import Tier
from tierlog_reader.read_index import INDEX_OBJECT_BYTES, ReadIndex

log = structlog.get_logger()

POLL_S: Final = 1.0
"""So long a subscription waits in tier 1 at once; a closed ledger is noticed that late at most."""
UNUSED_S: Final = 1.0
"""A ledger at which nobody was for so long may give its place to another one."""
PAUSE_S: Final = 0.005
"""At least so much is between two answers that there is nothing yet."""
TAKE_ENTRIES: Final = 100_000
TAKE_BYTES: Final = 1024 * 1024
TAKE_BYTES_MIN: Final = 8 * 1024
"""A subscription may always ask for so much, however many there are."""
MORE_BYTES_MAX: Final = 8 * 1024 * 1024
"""And for some of this: a quarter of what others leave."""
# Where an entry begins is noted after so many bytes; to find one, so many are walked at once.
NOTE_EACH_BYTES: Final = 64 * 1024
WALK_BYTES: Final = 64 * 1024
# From so many notes on, those of bytes that went are looked for; then at twice what is left.
NOTES_MAX_FIRST: Final = 64
NOTE_BYTES: Final = 96
HELD_BYTES: Final = INDEX_OBJECT_BYTES + 2000


def asked_bytes_max(ledgers_max: int) -> int:
    """Return what as many subscriptions ask for at once, at most."""
    return ledgers_max * TAKE_BYTES_MIN + MORE_BYTES_MAX


class Confirmed(Protocol):
    """Tier 1 as a subscription wants it: what is confirmed, and nothing else."""

    async def read(self, ledger: ListedLedger, first_entry_id: EntryId, budget: Budget) -> Chunk:
        """Return frames up to the LAC; NOT_YET after ``budget.wait_s`` without any."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TailLimits:
    """Every bound of the tail in memory, but for the cache's own."""

    ledgers_max: int = 1024
    idle_s: float = 5.0


@dataclass(slots=True, eq=False)
class _Held:
    """One ledger's newest entries; ``starts`` and ``offsets`` say where some of them begin."""

    index: ReadIndex
    first: EntryId
    next_id: EntryId
    end: int = 0
    starts: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    notes_max: int = NOTES_MAX_FIRST
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    live: bool = False
    task: asyncio.Task[None] | None = None
    waiters: int = 0
    used_s: float = 0.0

    def wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


class TailMemory:
    """The newest entries of all ledgers that are followed."""

    def __init__(
        self,
        tier1: Confirmed,
        store: StreamingCache,
        manager: CacheManager,
        limits: TailLimits | None = None,
    ) -> None:
        self._tier1 = tier1
        self._store = store
        self._manager = manager
        self._limits = limits if limits is not None else TailLimits()
        # The ledger used longest ago first.
        self._held: OrderedDict[LedgerId, _Held] = OrderedDict()
        self._group: asyncio.TaskGroup | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.asked_bytes = 0
        """What subscriptions wait for in tier 1 may be as much."""
        self._more_bytes = 0
        self.hits = 0
        self.bytes_served = 0
        self.bytes_taken = 0

    def __repr__(self) -> str:
        return f"<TailMemory of {len(self._held)} ledgers, {self.subscriptions} followed>"

    @property
    def subscriptions(self) -> int:
        """How many ledgers are followed now."""
        return sum(held.live for held in self._held.values())

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncIterator[Self]:
        """Follow ledgers for as long as the context lasts."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            try:
                yield self
            finally:
                self._group = None
                for task in self._tasks:
                    task.cancel()
        for ledger_id in list(self._held):
            self._drop(ledger_id)

    # Reading

    def get(self, ledger_id: LedgerId, first_entry_id: EntryId, budget: Budget) -> Chunk | None:
        """Return what is in memory from an entry on; None: not even that one."""
        held = self._held.get(ledger_id)
        if held is None or not held.first <= first_entry_id < held.next_id:
            return None
        self._used(ledger_id, held)
        found = self._frames(ledger_id, held, first_entry_id, budget)
        if found is None:
            return None
        frames, count = found
        self.hits += 1
        self.bytes_served += len(frames)
        return Chunk(
            ledger_id=ledger_id,
            first_entry_id=first_entry_id,
            count=count,
            frames=(frames,),
            tier=Tier.MEMORY,
        )

    def _frames(
        self, ledger_id: LedgerId, held: _Held, first_entry_id: EntryId, budget: Budget
    ) -> tuple[Buffer, int] | None:
        """Return frames from an entry on and how many; None where its bytes went."""
        offset = self._place_of(held, first_entry_id)
        body = None if offset is None else self._copied(held, offset, budget.bytes_max)
        if offset is None or body is None:
            return None
        starts = walk_frames(body, first_entry_id)
        if not len(starts):
            # Longer than was asked for: one entry at least is returned, if all of it is here.
            frame_len = self._frame_len(held, offset)
            if budget.alone_max is not None and frame_len > budget.alone_max:
                raise EntryTooLongError(ledger_id, first_entry_id, frame_len)
            alone = self._alone(held, offset, frame_len)
            return None if alone is None else (alone, 1)
        ends = [*starts[1:].tolist(), frames_end(body, starts)]
        count = min(len(ends), budget.entries_max)
        return without_rest(body[: ends[count - 1]]), count

    def _place_of(self, held: _Held, sought: EntryId) -> int | None:
        """Return where an entry begins, walking from the nearest note; None where bytes went."""
        at = bisect_right(held.starts, sought) - 1
        if at < 0:
            return None
        entry_id, offset = held.starts[at], held.offsets[at]
        while entry_id < sought:
            body = self._copied(held, offset, WALK_BYTES)
            if body is None:
                return None
            starts = walk_frames(body, entry_id)
            if sought - entry_id < len(starts):
                return offset + int(starts[sought - entry_id])
            if len(starts):
                entry_id, offset = entry_id + len(starts), offset + frames_end(body, starts)
            elif len(body) >= FRAME_HEADER_LEN:  # an entry that is longer than a step
                entry_id, offset = entry_id + 1, offset + FRAME_HEADER_LEN + entry_len_at(body, 0)
            else:
                return None
        return offset

    def _frame_len(self, held: _Held, offset: int) -> int:
        """Return the length of the frame that begins at ``offset``; 0: its header went."""
        header = self._copied(held, offset, FRAME_HEADER_LEN)
        if header is None or len(header) < FRAME_HEADER_LEN:
            return 0
        return FRAME_HEADER_LEN + entry_len_at(header, 0)

    def _alone(self, held: _Held, offset: int, frame_len: int) -> memoryview | None:
        """Return the one frame that begins at ``offset``, if all of it is here."""
        body = self._copied(held, offset, frame_len) if frame_len else None
        return body if body is not None and len(body) == frame_len else None

    def _copied(self, held: _Held, offset: int, length_max: int) -> memoryview | None:
        lease = held.index.read(offset, length_max)
        if lease is None:
            return None
        with lease:
            return memoryview(b"".join(lease.views))

    def _used(self, ledger_id: LedgerId, held: _Held) -> None:
        held.used_s = asyncio.get_running_loop().time()
        self._held.move_to_end(ledger_id)

    # Following

    def awaited(self, ledger_id: LedgerId) -> EntryId | None:
        """Return the entry that a subscription waits for in tier 1; None: there is none."""
        held = self._held.get(ledger_id)
        return held.next_id if held is not None and held.live else None

    def follow(self, ledger: ListedLedger, entry_id: EntryId) -> None:
        """Begin to take what comes in an open ledger from its end on, unless it is taken.

        ``entry_id`` is the one behind its LAC: a subscription never begins beyond what may come.
        """
        held = self._held.get(ledger.ledger_id)
        if self._group is None or (held is not None and held.live):
            return
        self.tick()
        held = self._held.get(ledger.ledger_id)
        if held is not None and held.next_id != entry_id:
            self._drop(ledger.ledger_id)
            held = None
        if held is None:
            if not self._make_room() or not self._manager.take(HELD_BYTES, Asks.TAIL):
                return
            held = _Held(ReadIndex(self._store, self._manager), entry_id, entry_id)
            self._held[ledger.ledger_id] = held
        held.live = True
        self._used(ledger.ledger_id, held)
        held.task = self._group.create_task(self._take(ledger, held))
        self._tasks.add(held.task)
        held.task.add_done_callback(self._tasks.discard)

    async def wait(self, ledger_id: LedgerId, entry_id: EntryId, wait_s: float) -> bool:
        """Wait for an entry; False: its subscription ended, and somebody else must be asked."""
        held = self._held.get(ledger_id)
        if held is None:
            return False
        self._used(ledger_id, held)
        held.waiters += 1
        try:
            if held.live and held.next_id <= entry_id:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await held.changed.wait()
        finally:
            held.waiters -= 1
        return held.live or held.next_id > entry_id

    async def _take(self, ledger: ListedLedger, held: _Held) -> None:
        loop = asyncio.get_running_loop()
        try:
            while held.live and (held.waiters or loop.time() - held.used_s < self._limits.idle_s):
                try:
                    with self._asking() as size:
                        budget = Budget(entries_max=TAKE_ENTRIES, bytes_max=size, wait_s=POLL_S)
                        chunk = await self._tier1.read(ledger, held.next_id, budget)
                except TierlogError as error:
                    if error.reason is not Reason.NOT_YET:
                        log.debug("tail.ended", ledger_id=ledger.ledger_id, cause=str(error))
                        return
                    await asyncio.sleep(PAUSE_S)
                    continue
                if held.live:
                    self._add(held, chunk)
        except Exception:
            # A bug: no end for those who are served meanwhile. What was added in part is forgotten.
            log.exception("unexpected_error", work="follow", ledger_id=ledger.ledger_id)
            self._forget(held)
            held.first = held.next_id
        finally:
            held.live = False
            held.wake()

    @contextlib.contextmanager
    def _asking(self) -> Iterator[int]:
        """Give how much one may ask for now; it counts until what came is taken over."""
        more = min(TAKE_BYTES - TAKE_BYTES_MIN, (MORE_BYTES_MAX - self._more_bytes) // 4)
        self._more_bytes += more
        self.asked_bytes += TAKE_BYTES_MIN + more
        try:
            yield TAKE_BYTES_MIN + more
        finally:
            self._more_bytes -= more
            self.asked_bytes -= TAKE_BYTES_MIN + more

    def _add(self, held: _Held, chunk: Chunk) -> None:
        assert chunk.first_entry_id == held.next_id, "the newest entries follow the ones before"
        self.bytes_taken += chunk.frames_len
        # The note first: what comes would else go to make room for it.
        noted = self._note(held, chunk.first_entry_id)
        if noted and all(self._append(held, piece) for piece in chunk.frames):
            held.next_id = chunk.end.entry_id
        else:
            self._forget(held)
            held.first = held.next_id = chunk.end.entry_id
        held.wake()

    def _append(self, held: _Held, piece: Buffer) -> bool:
        fitted = held.index.append(held.end, piece)
        held.end += len(piece)
        return fitted

    def _note(self, held: _Held, entry_id: EntryId) -> bool:
        """Note where the next entry begins, unless that is near; say whether there was room."""
        if held.offsets and held.end - held.offsets[-1] < NOTE_EACH_BYTES:
            return True
        if len(held.starts) >= held.notes_max:
            self._forget_notes(held)
        if not self._manager.take(NOTE_BYTES, Asks.TAIL):
            return False
        held.starts.append(entry_id)
        held.offsets.append(held.end)
        return True

    def _forget_notes(self, held: _Held) -> None:
        """Forget notes of bytes that went: nothing can be walked from there."""
        here = [held.index.holds(offset) for offset in held.offsets]
        held.starts = list(itertools.compress(held.starts, here))
        held.offsets = list(itertools.compress(held.offsets, here))
        self._manager.give_back(NOTE_BYTES * (len(here) - sum(here)))
        held.notes_max = max(NOTES_MAX_FIRST, 2 * sum(here))

    def _make_room(self) -> bool:
        """Have a place for one more, unless somebody was at each of them just now.

        Who waits where it was taken away would come back at once, and take the next one's.
        """
        unused_since_s = asyncio.get_running_loop().time() - UNUSED_S
        while len(self._held) >= self._limits.ledgers_max:
            ledger_id, held = next(iter(self._held.items()))
            if held.waiters or held.used_s > unused_since_s:
                return False
            self._drop(ledger_id)
        return True

    def tick(self) -> None:
        """Drop ledgers that nobody follows and of which nothing is left."""
        for ledger_id, held in list(self._held.items()):
            if not held.live and not held.waiters and len(held.index) == 0:
                self._drop(ledger_id)

    def _forget(self, held: _Held) -> None:
        held.index.clear()
        self._manager.give_back(NOTE_BYTES * len(held.starts))
        held.starts.clear()
        held.offsets.clear()

    def _drop(self, ledger_id: LedgerId) -> None:
        held = self._held.pop(ledger_id)
        self._forget(held)
        self._manager.give_back(HELD_BYTES)
        held.live = False
        if held.task is not None:
            held.task.cancel()  # what it asks of tier 1 counts
        held.wake()
