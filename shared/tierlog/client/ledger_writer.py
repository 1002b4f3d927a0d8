"""The writer of one bare ledger: entries in the order of the calls, each with its id.

    async with await ledgers.create() as ledger:
        await ledger.append(b"one")             # waits until it is acknowledged
        for line in lines:
            await ledger.send(line)             # goes on at once; many are in flight

Owns the queue before the quorum writer, and whose answer comes with which id. Does not own
quorums, runs and ensembles (``tierlog.ledger.writer``), nor recovery of what it leaves open.

Invariants:
    * Entries get their ids in the order of the calls of ``send``, without a gap.
    * An answer is given once: the entry's id when it is acknowledged; INDETERMINATE when it was
      sent and will not be; RETRYABLE or FENCED when it was not sent.
    * What waits in the queue stays below its limit, but for a single entry.
    * After a failure nothing more is taken. The ledger is then as after a crash of its writer:
      whoever recovers it decides which of its last entries are there.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from tierlog.format.checksum import Buffer
from tierlog.format.frame import FRAME_HEADER_LEN, pack_entries
from tierlog.ledger.writer import LedgerWriter
from tierlog.model.errors import (
    IndeterminateError,
    Reason,
    RefusedError,
    RetryableError,
    TierlogError,
)
from tierlog.model.ids import EntryId, LedgerId
from tierlog.model.ledger import LedgerMetadata

Answer = asyncio.Future[EntryId]
MakeWriter = Callable[[Callable[[EntryId], None]], LedgerWriter]


@dataclass(frozen=True, slots=True, kw_only=True)
class AppenderLimits:
    """Every bound of an appender."""

    entry_len_max: int
    queue_bytes_max: int
    batch_bytes_max: int
    """So much of the queue is handed on at once; what is handed on together shares runs."""
    linger_s: float = 0.001
    """While others are on their way, an entry waits so long for more to share its run with. The
    nodes' journals are busy then anyway, and a run of one entry costs as much as one of many."""


@dataclass(slots=True, eq=False)
class _Queued:
    """An entry before it has an id."""

    entry: Buffer
    answer: Answer
    publish_ms: int

    @property
    def size(self) -> int:
        return len(self.entry) + FRAME_HEADER_LEN


class LedgerAppender:
    """Writes one bare ledger, its only writer ever. Leaving its context closes the ledger."""

    def __init__(
        self,
        make_writer: MakeWriter,
        *,
        limits: AppenderLimits,
        close: Callable[[LedgerWriter], Awaitable[LedgerMetadata]],
    ) -> None:
        self._writer = make_writer(self._confirm)
        self._limits = limits
        self._close = close
        self._queue: deque[_Queued] = deque()
        self._queue_bytes = 0
        self._sent: deque[tuple[EntryId, Answer]] = deque()
        self._arrived = asyncio.Event()
        self._changed = asyncio.Event()
        self._closing = False

    def __repr__(self) -> str:
        return f"<LedgerAppender {self._writer!r} queued={len(self._queue)}>"

    @property
    def ledger_id(self) -> LedgerId:
        """The ledger's id."""
        return self._writer.ledger_id

    @property
    def last_add_confirmed(self) -> EntryId:
        """The last entry that is acknowledged, as are all before it; -1: none."""
        return self._writer.last_add_confirmed

    @property
    def failure(self) -> TierlogError | None:
        """What ended the writing, other than ``close``."""
        return self._writer.failure

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait to be sent, frames included."""
        return self._queue_bytes

    async def run(self) -> None:
        """Hand entries on and take answers until the writer ended. Whoever opened it runs it."""
        async with asyncio.TaskGroup() as tasks:
            pumping = tasks.create_task(self._pump())
            try:
                await self._writer.run()
            finally:
                pumping.cancel()
                self._fail_rest()

    async def send(self, entry: Buffer, *, publish_ms: int = 0) -> Answer:
        """Queue an entry, waiting for room; the answer comes later, and need not be looked at.

        What becomes of entries whose answers nobody looks at, ``flush`` and ``close`` tell.
        ``publish_ms``: when its events were published, where they have such a time.
        """
        self._check_len(len(entry))
        size = len(entry) + FRAME_HEADER_LEN
        while self._queue and self._queue_bytes + size > self._limits.queue_bytes_max:
            self._check_open()
            self._changed.clear()
            await self._changed.wait()
        self._check_open()
        answer: Answer = asyncio.get_running_loop().create_future()
        answer.add_done_callback(_look)
        # A buffer that its owner may write over is copied now, not when it is sent.
        kept = entry if isinstance(entry, bytes) else bytes(entry)
        self._queue.append(_Queued(kept, answer, publish_ms))
        self._queue_bytes += size
        self._arrived.set()
        return answer

    async def append(self, entry: Buffer) -> EntryId:
        """Append an entry; return its id once it is acknowledged."""
        return await (await self.send(entry))

    async def flush(self) -> EntryId:
        """Wait until all that was sent is acknowledged; return the last entry's id, -1: none."""
        while (self._queue or self._sent) and not self._writer.ended.is_set():
            self._changed.clear()
            await self._changed.wait()
        if self._writer.failure is not None:
            raise self._writer.failure
        return self._writer.last_add_confirmed

    async def close(self) -> LedgerMetadata:
        """Flush, close the ledger and return its metadata. Closing again is legal.

        Raises what ended the writing: then the ledger is still open, and is closed by recovery.
        """
        self._closing = True
        await self.flush()
        return await self._close(self._writer)

    def abandon(self) -> None:
        """End without closing the ledger, as a crash would."""
        self._closing = True
        self._writer.break_off(_abandoned(self.ledger_id))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            await self.close()
        elif isinstance(error, Exception):
            # What went wrong first is what is told.
            with contextlib.suppress(TierlogError):
                await self.close()
        else:
            self.abandon()

    async def _pump(self) -> None:
        """Hand entries on as the writer has room for them."""
        while True:
            while not self._queue:
                self._arrived.clear()
                await self._arrived.wait()
            if self._writer.in_flight_bytes and self._queue_bytes < self._limits.batch_bytes_max:
                await asyncio.sleep(self._limits.linger_s)
            await self._writer.wait_room(self._next_batch()[1])
            if self._writer.ended.is_set():
                return
            self._hand_on()

    def _next_batch(self) -> tuple[int, int]:
        """Return how many entries go together, and their size."""
        count = size = 0
        for one in self._queue:
            if count and size + one.size > self._limits.batch_bytes_max:
                break
            count += 1
            size += one.size
        return count, size

    def _hand_on(self) -> None:
        count, size = self._next_batch()
        batch = [self._queue.popleft() for _ in range(count)]
        self._queue_bytes -= size
        first = self._writer.next_entry_id
        # Noted first: an answer may come before the call returns.
        self._sent.extend((EntryId(first + at), one.answer) for at, one in enumerate(batch))
        frames, offsets = pack_entries([one.entry for one in batch])
        times = [one.publish_ms for one in batch]
        self._writer.append(frames, offsets, publish_ms_min=min(times), publish_ms_max=max(times))
        self._changed.set()

    def _confirm(self, last_add_confirmed: EntryId) -> None:
        while self._sent and self._sent[0][0] <= last_add_confirmed:
            entry_id, answer = self._sent.popleft()
            if not answer.done():
                answer.set_result(entry_id)
        self._changed.set()

    def _fail_rest(self) -> None:
        """Answer everybody who still waits."""
        cause = self._writer.failure or _abandoned(self.ledger_id)
        while self._sent:
            entry_id, answer = self._sent.popleft()
            if not answer.done():
                answer.set_exception(_unknown(self.ledger_id, entry_id, cause))
        while self._queue:
            answer = self._queue.popleft().answer
            if not answer.done():
                answer.set_exception(_not_sent(self.ledger_id, cause))
        self._queue_bytes = 0
        self._changed.set()

    def _check_open(self) -> None:
        if self._closing or self._writer.ended.is_set():
            raise _not_sent(self.ledger_id, self._writer.failure)

    def _check_len(self, entry_len: int) -> None:
        limit = self._limits.entry_len_max
        if entry_len > limit:
            raise RefusedError(
                f"an entry of {entry_len} bytes is above the limit of {limit} bytes",
                reason=Reason.TOO_LARGE,
                remedy="Append smaller entries, or raise wire.frame_bytes_max everywhere",
                details={"limit": str(limit), "entry_len": str(entry_len)},
            )


def _look(answer: Answer) -> None:
    """Take an answer that nobody may ever look at; ``flush`` and ``close`` raise the cause."""
    if not answer.cancelled():
        answer.exception()


def _unknown(ledger_id: LedgerId, entry_id: EntryId, cause: TierlogError) -> IndeterminateError:
    return IndeterminateError(
        f"whether entry {ledger_id}:{entry_id} is there is not known: {cause.message}",
        remedy="Open the ledger for recovery; what it then holds is there for ever",
        details={"ledger_id": str(ledger_id), "entry_id": str(entry_id)},
    )


def _not_sent(ledger_id: LedgerId, cause: TierlogError | None) -> TierlogError:
    details = {"ledger_id": str(ledger_id)}
    remedy = "Nothing was appended; append to another ledger"
    if cause is not None and cause.reason is Reason.FENCED:
        return RefusedError(
            f"ledger {ledger_id} is fenced", reason=Reason.FENCED, remedy=remedy, details=details
        )
    if cause is not None:
        return RetryableError(
            f"ledger {ledger_id} takes no entry any more: {cause.message}",
            remedy=remedy,
            details=details,
        )
    return RefusedError(f"ledger {ledger_id} is closed", remedy=remedy, details=details)


def _abandoned(ledger_id: LedgerId) -> IndeterminateError:
    return IndeterminateError(
        f"the writer of ledger {ledger_id} was given up",
        remedy="Open the ledger for recovery to close it",
        details={"ledger_id": str(ledger_id)},
    )
