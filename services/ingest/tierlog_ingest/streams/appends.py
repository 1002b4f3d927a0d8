"""Appends between their arrival and their answer.

Owns the queue of what was not sent, the list of what was sent and is not confirmed, the budget
of bytes, and each append's deadline. Does not own where entries go: the stream's owner does.

Invariants:
    * An append is answered exactly once: with its ranges, or with one error.
    * What was sent, even in part, is never answered as a plain failure: only confirmed or
      APPEND_INDETERMINATE. What was not sent at all never reaches a ledger after its error.
    * The budget's use is the sum of the frames of all appends that have no answer.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np

from tierlog.format.attribute_changes import Change
from tierlog.format.block import entry_len_max
from tierlog.format.frame import FRAME_HEADER_LEN, Offsets
from tierlog.format.run import Run
from tierlog.model.attributes import AppendCondition, AttributeKey
from tierlog.model.durations import Durations
from tierlog.model.errors import IndeterminateError, Reason, RetryableError, TierlogError
from tierlog.model.ids import EntryId, LedgerId
from tierlog.model.policy import BLOCK_SIZE_MIN, MIB
from tierlog.model.position import AppendedRange, Position

ENTRY_LEN_SURE: Final = 4 * MIB
"""No stream's limit lies below: an append that is no longer needs no look at its entries."""

assert entry_len_max(BLOCK_SIZE_MIN) > ENTRY_LEN_SURE

Answer = asyncio.Future[list[AppendedRange]]


class QueueBudget:
    """Bytes of appends without an answer, over all streams of a process."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.used = 0
        self.durations = Durations()
        """How long appends waited for their answer, whatever it was."""
        self.conditions_failed = 0
        self._room = asyncio.Event()
        self._room.set()

    async def ready(self) -> None:
        """Wait until there is room for at least one more append."""
        await self._room.wait()

    def take(self, size: int) -> None:
        """Count an append in, or raise RESOURCE_EXHAUSTED above twice the limit."""
        if self.used and self.used + size > 2 * self.bytes_max:
            raise RetryableError(
                f"{self.used} bytes of appends have no answer yet, the limit is {self.bytes_max}",
                reason=Reason.RESOURCE_EXHAUSTED,
                remedy="Send less at once; try again",
                details={"budget": "appends.unanswered_bytes"},
                retry_after_s=0.1,
            )
        self.used += size
        if self.used >= self.bytes_max:
            self._room.clear()

    def give_back(self, size: int, answer: Answer, took_s: float) -> None:
        """Count an append out, with what came of it."""
        self.durations.add(took_s)
        if not answer.cancelled():
            error = answer.exception()
            self.conditions_failed += (
                isinstance(error, TierlogError) and error.reason is Reason.CONDITIONAL_APPEND_FAILED
            )
        self.used -= size
        assert self.used >= 0
        if self.used < self.bytes_max:
            self._room.set()


@dataclass(slots=True, eq=False)
class Append:
    """One append: a draft, how much of it was sent, and where to."""

    draft: Run
    entry_len_max: int
    answer: Answer
    condition: AppendCondition | None = None
    changes: Sequence[Change | None] | None = None
    """What its entries change of the stream's attributes; None: not read yet."""
    is_checked: bool = False
    """Whether it depends on attributes, or on its place: by a condition, or by its updates."""
    made: Mapping[AttributeKey, int] = field(default_factory=dict)
    """What it makes of attributes, where it is checked."""
    timer: asyncio.TimerHandle | None = None
    taken: int = 0
    """Entries that were sent."""
    ranges: list[AppendedRange] = field(default_factory=list)

    @property
    def left(self) -> int:
        """Entries that were not sent yet."""
        return self.draft.header.count - self.taken

    @property
    def left_bytes(self) -> int:
        """Bytes of the frames that were not sent yet."""
        return len(self.draft.frames) - self.start

    @property
    def start(self) -> int:
        """Where the first frame begins that was not sent."""
        whole = self.left == 0
        return len(self.draft.frames) if whole else int(self.draft.offsets[self.taken])

    @property
    def publish_ms(self) -> tuple[int, int]:
        """Smallest and largest publish time; 0, 0: none known."""
        return self.draft.header.publish_ms_min, self.draft.header.publish_ms_max

    def finish(self, error: TierlogError | None = None) -> None:
        """Answer, unless it was answered already."""
        if self.timer is not None:
            self.timer.cancel()
        if self.answer.done():
            return
        if error is None:
            self.answer.set_result(self.ranges)
        else:
            self.answer.set_exception(error)


def largest_entry_len(draft: Run, *, sure: int = ENTRY_LEN_SURE) -> int:
    """Return the length of the draft's largest entry, or a bound of at most ``sure``."""
    if draft.payload_len <= sure:
        return draft.payload_len
    ends = np.append(draft.offsets[1:], len(draft.frames)).astype(np.int64)
    return int((ends - draft.offsets).max()) - FRAME_HEADER_LEN


@dataclass(frozen=True, slots=True)
class Piece:
    """What is sent as one: frames of one append or of several small ones, with their offsets."""

    frames: memoryview | bytes
    offsets: Offsets
    publish_ms: tuple[int, int]
    shares: list[tuple[Append, int]]
    """Which appends, and how many entries of each, in order."""


class Gate(Protocol):
    """Decides which appends may be sent, in their order."""

    def lets(self, append: Append, first: Position | None = None, ahead: int = 0) -> bool:
        """Tell whether an append may be sent now; if not, the gate has taken charge of it.

        ``ahead``: so many entries go before it in the same piece, the first of them to ``first``.
        """
        ...

    def enter(self, append: Append, count: int) -> None:
        """Take note that the next ``count`` entries of an append are in the piece under way."""
        ...

    def sent(self, end: Position, size: int) -> None:
        """Take note of where the piece under way ends."""
        ...

    def fail_waiting(self, error: TierlogError) -> None:
        """Answer those of which the gate has charge, and which may go on in the queue."""
        ...


class AppendQueue:
    """The appends of one stream, in the order in which they came.

    ``gate``, if there is one, is asked for each before it is sent.
    """

    def __init__(self, budget: QueueBudget, *, wake: Callable[[], None]) -> None:
        self.gate: Gate | None = None
        self._budget = budget
        self._wake = wake
        self._waiting: deque[Append] = deque()
        self._sent: deque[tuple[Append, EntryId]] = deque()
        self.trouble = ""
        """Why nothing is sent at present, for those whose time is up."""
        self.disk_full: TierlogError | None = None
        """The error, if ``trouble`` is that the storage nodes' disks are full."""

    def __repr__(self) -> str:
        return f"<AppendQueue {len(self._waiting)} waiting, {len(self._sent)} sent>"

    @property
    def waiting_count(self) -> int:
        """How many appends were not sent wholly."""
        return len(self._waiting)

    @property
    def sent_count(self) -> int:
        """How many shares of appends wait for their confirmation."""
        return len(self._sent)

    def add(
        self,
        draft: Run,
        *,
        entry_len: int,
        timeout_s: float,
        condition: AppendCondition | None = None,
    ) -> Answer:
        """Put an append at the end; its answer comes within ``timeout_s``."""
        size = len(draft.frames)
        self._budget.take(size)
        loop = asyncio.get_running_loop()
        append = Append(draft, entry_len, loop.create_future(), condition)
        # Whoever ends it, a caller that goes away included.
        begun_s = loop.time()
        append.answer.add_done_callback(
            lambda answer: self._budget.give_back(size, answer, loop.time() - begun_s)
        )
        append.timer = loop.call_later(timeout_s, self._expire, append, timeout_s)
        self._waiting.append(append)
        self._wake()
        return append.answer

    def _expire(self, append: Append, timeout_s: float) -> None:
        append.timer = None
        if append.taken:
            append.finish(indeterminate(f"was not confirmed within {timeout_s:g} s"))
        else:
            why = f" ({self.trouble})" if self.trouble else ""
            append.finish(not_sent(f"was not sent within {timeout_s:g} s{why}", self.disk_full))
        self._wake()

    def give_back(self, appends: Sequence[Append]) -> None:
        """Put appends that the gate took back to where they are sent next, in this order."""
        head = self._waiting[0] if self._waiting else None
        begun = self._waiting.popleft() if head is not None and head.taken else None
        self._waiting.extendleft(reversed(appends))
        if begun is not None:
            self._waiting.appendleft(begun)
        self._wake()

    def head(self) -> Append | None:
        """Return the first append that is to be sent, and that the gate lets through."""
        while (append := self._first()) is not None:
            if append.taken or self.gate is None or self.gate.lets(append):
                return append
            self._waiting.popleft()
        return None

    def _first(self) -> Append | None:
        """Return the first append that waits; those that were given up are dropped."""
        while self._waiting:
            append = self._waiting[0]
            if not append.answer.done():
                return append
            # Of one that was sent in part the rest must not follow much later.
            append.taken = append.draft.header.count
            self._waiting.popleft()
        return None

    def take(self, count_max: int, bytes_max: int, at: Position) -> Piece:
        """Take up to ``count_max`` entries off the queue's front as one piece, to go to ``at``.

        Small appends are put together up to ``bytes_max`` of frames, as long as all or none of
        them tell their publish times.
        """
        first, gate = self.head(), self.gate
        assert first is not None
        assert count_max > 0
        count, size = min(first.left, count_max), first.left_bytes
        shares = [(first, count)]
        if gate is not None:
            gate.enter(first, count)
        if count == first.left:
            self._waiting.popleft()
            while (other := self._follower(first, count_max - count, bytes_max - size)) is not None:
                self._waiting.popleft()
                if gate is not None:
                    if not gate.lets(other, at, count):
                        continue
                    gate.enter(other, other.left)
                size += other.left_bytes
                count += other.left
                shares.append((other, other.left))
        piece = _piece(shares)
        for append, taken in shares:
            append.taken += taken
        return piece

    def _follower(self, first: Append, count_max: int, bytes_max: int) -> Append | None:
        """Return the next append, if it may follow ``first`` in one piece."""
        other = self._waiting[0] if self._waiting else None
        if other is None or other.answer.done() or not _alike(first, other):
            return None
        return other if other.left <= count_max and other.left_bytes <= bytes_max else None

    def note_sent(self, piece: Piece, ledger_id: LedgerId, first_entry_id: EntryId) -> None:
        """Note where a piece went."""
        if self.gate is not None:
            last = EntryId(first_entry_id + len(piece.offsets) - 1)
            self.gate.sent(Position(ledger_id, last), len(piece.frames))
        entry_id = first_entry_id
        for append, count in piece.shares:
            last = EntryId(entry_id + count - 1)
            append.ranges.append(
                AppendedRange(ledger_id=ledger_id, first_entry_id=entry_id, last_entry_id=last)
            )
            self._sent.append((append, last))
            entry_id = EntryId(last + 1)

    def confirm(self, last_add_confirmed: EntryId) -> None:
        """Answer the appends that are confirmed wholly."""
        while self._sent and self._sent[0][1] <= last_add_confirmed:
            append, last = self._sent.popleft()
            if not append.left and append.ranges[-1].last_entry_id == last:
                append.finish()

    def fail_sent(self, cause: str) -> None:
        """Answer everything that was sent, in whole or in part, as indeterminate."""
        while self._sent:
            append, _ = self._sent.popleft()
            append.finish(indeterminate(cause))
        head = self._waiting[0] if self._waiting else None
        if head is not None and head.taken:
            head.finish(indeterminate(cause))
        self._first()

    def fail_waiting(self, error: TierlogError) -> None:
        """Answer everything that was not sent with ``error``."""
        if self.gate is not None:
            self.gate.fail_waiting(error)
        while (append := self._first()) is not None:
            append.finish(indeterminate(error.message) if append.taken else error)

    def fail_head(self, error: TierlogError) -> None:
        """Answer the first append alone."""
        append = self._first()
        assert append is not None
        append.finish(indeterminate(error.message) if append.taken else error)
        self._first()


def _alike(one: Append, other: Append) -> bool:
    return (one.publish_ms == (0, 0)) == (other.publish_ms == (0, 0))


def _piece(shares: list[tuple[Append, int]]) -> Piece:
    append, count = shares[0]
    if len(shares) == 1:
        offsets, start = append.draft.offsets, append.start
        stop = append.taken + count
        end = int(offsets[stop]) if stop < len(offsets) else len(append.draft.frames)
        own = offsets[append.taken : stop] - np.uint32(start)
        return Piece(append.draft.frames[start:end], own, append.publish_ms, shares)
    joined, columns, at = [], [], 0
    for one, _ in shares:
        start = one.start
        joined.append(one.draft.frames[start:])
        columns.append(one.draft.offsets[one.taken :] + np.uint32(at) - np.uint32(start))
        at += len(joined[-1])
    times = [one.publish_ms for one, _ in shares]
    span = min(low for low, _ in times), max(high for _, high in times)
    return Piece(b"".join(joined), np.concatenate(columns), span, shares)


def not_sent(what: str, cause: TierlogError | None) -> RetryableError:
    """Say that nothing was appended; a full disk is told as such, with what to do about it."""
    if cause is None or cause.reason is not Reason.READ_ONLY:
        return RetryableError(f"the append {what}", remedy="Nothing was appended; try again")
    return RetryableError(
        f"the append {what}",
        reason=Reason.READ_ONLY,
        remedy=f"{cause.remedy}; nothing was appended, try again then",
    )


def indeterminate(cause: str) -> IndeterminateError:
    """Say that an append may or may not be there."""
    return IndeterminateError(
        f"the append may or may not be in the stream: {cause}",
        remedy="Read the stream's end to see whether it is there before appending it again",
    )
