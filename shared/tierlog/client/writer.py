"""Appends to one stream: batched, pipelined, and exactly once where entries have headers.

Owns the batches in flight and what becomes of them over reconnections. Does not own what answers
tell of them (``idempotent``), nor where the owner is (the connections it is given).

Invariants:
    * Bytes of events without an acknowledgement stay within ``in_flight_bytes_max``, or are one
      batch; ``send`` waits for room.
    * With a writer id every append is conditional on the number before it: whatever becomes of
      answers, each event is in the stream once, in the order in which it was sent.
    * Without one, and in raw streams, a batch goes again only when it is certain that it is in no
      ledger; in doubt, the doubt is told.
    * ``flush`` returns only when every event sent before is acknowledged; else it raises.

Consistency: without a writer id, batches that were refused go again behind those that landed.
Silence: an owner that owes answers for ``doubt_s`` is asked for at other nodes; when there is
another one, what was sent to the silent one is as lost as with a connection.
Retries: without any progress for ``retry_s_max`` the last error is told to whoever sends.
Cancellation, Crash: what was in flight is then neither known to be there nor not; a writer that
is resumed asks.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self
from uuid import UUID

import structlog

from tierlog.client.batches import Batch, BatchBuilder, Event
from tierlog.client.idempotent import (
    Numbers,
    is_failed_condition,
    session_over,
    session_update,
    settle,
)
from tierlog.client.owners import BACKOFF_S_FIRST, BACKOFF_S_MAX, OwnerConnections
from tierlog.client.resuming import Taken, WriterState
from tierlog.format.entry import Packing
from tierlog.model.attributes import NO_EVENT_NUMBER, AppendCondition
from tierlog.model.errors import (
    CorruptError,
    IndeterminateError,
    Reason,
    RefusedError,
    RetryableError,
    TierlogError,
    first_error,
)
from tierlog.model.ids import StreamName
from tierlog.model.position import Position
from tierlog.ports.clock import Clock
from tierlog.ports.progress import Progress
from tierlog.ports.streams import AppendChannel

log = structlog.get_logger()

WAKE_S_MIN: Final = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterLimits:
    """Every bound of a writer."""

    batch_bytes: int
    in_flight_bytes_max: int
    append_s_max: float
    retry_s_max: float
    linger_s: float = 0.0
    """An event goes so soon, however few there are; 0: only a full batch, or a flush, goes."""
    doubt_s: float = 1.0
    """An owner that owes answers and is silent for so long may have been replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Acked:
    """Events of a writer that are there for good: those up to a number, ``count`` more than before.

    ``position``: the entry of the last one; None where the owner told no more than its number.
    """

    stream: StreamName
    event_number: int
    count: int
    position: Position | None


OnAcked = Callable[[Acked], None]
"""Told of each batch, in the order of the events, on the event loop; must not block."""


class StreamWriter:
    """Appends events to one stream; an async context manager that flushes at its end."""

    def __init__(  # noqa: PLR0913 - each is a choice of its own
        self,
        stream: StreamName,
        *,
        writer_id: UUID | None,
        raw: bool,
        connections: OwnerConnections,
        clock: Clock,
        limits: WriterLimits,
        taken: Taken | None = None,
        from_start: bool = False,
        progress: Progress | None = None,
        on_acked: OnAcked | None = None,
        packing: Packing | None = None,
    ) -> None:
        """Take what is there of the writer, where it is resumed, as ``taken``.

        ``from_start``: events come from the first one on, and those that are there are passed over.
        """
        assert writer_id is None or not raw, "entries of raw streams name no writer"
        assert taken is None or writer_id is not None
        self.stream = stream
        self.writer_id = writer_id
        self.resumed_event_number = taken.event_number if taken is not None else NO_EVENT_NUMBER
        """So many events of this writer were in the stream when it was resumed."""
        self.skipped_events = 0
        """Events that were passed over since they were there."""
        self.acked_events = 0
        self.acked_bytes = 0
        self.resolved_count = 0
        """Batches without an answer of which the owner's number told that they are there."""
        self._conditional = writer_id is not None
        self._taken = taken
        self._skip = self.resumed_event_number if from_start else 0
        self._acked_number = self._sent_number = self.resumed_event_number
        self._last: Position | None = None
        self._connections = connections
        self._clock = clock
        self._limits = limits
        self._progress = progress
        self._on_acked = on_acked
        session = (session_update(writer_id, taken.session),) if writer_id and taken else ()
        self._builder = BatchBuilder(
            writer_id, raw, limits.batch_bytes, self.resumed_event_number, session, packing
        )
        self._built: Batch | None = None
        self._cutting = asyncio.Lock()
        self._begun = asyncio.Event()
        self._batches: deque[Batch] = deque()
        self._unsent: deque[Batch] = deque()
        self._in_flight_bytes = 0
        self._changed = asyncio.Event()
        self._failed: TierlogError | None = None
        self._closing = False
        self._interrupted = False
        self._flying = 0
        self._flew = asyncio.Event()
        self._heard_s = 0.0
        self._tasks: asyncio.TaskGroup | None = None
        self._lingering: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return (
            f"<StreamWriter {self.stream} acked={self.acked_events} "
            f"in_flight={len(self._batches)}/{self._in_flight_bytes} bytes>"
        )

    async def __aenter__(self) -> Self:
        self._tasks = asyncio.TaskGroup()
        await self._tasks.__aenter__()
        self._tasks.create_task(self._run(), name=f"writer {self.stream}")
        if self._limits.linger_s:
            self._lingering = self._tasks.create_task(
                self._linger(), name=f"writer {self.stream}: linger"
            )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._tasks is not None
        failure: TierlogError | None = None
        try:
            if error is None:
                await self.flush()
        except TierlogError as caught:
            failure = caught
        finally:
            self._closing = True
            if self._lingering is not None:
                self._lingering.cancel()
            if error is not None and self._failed is None:
                self._failed = RetryableError("the writer was given up", remedy="Open a new one")
            self._changed.set()
            await self._tasks.__aexit__(None, None, None)
        if failure is not None:
            raise failure

    @property
    def in_flight_events(self) -> int:
        """Events that were sent, or wait to be, and are not acknowledged yet."""
        return sum(one.event_count for one in self._batches)

    @property
    def last_position(self) -> Position | None:
        """Where the last acknowledged entry is; None, too, where only its number was told."""
        return self._last

    @property
    def acked_event_number(self) -> int:
        """The number of the last acknowledged event."""
        return self._acked_number

    def state(self) -> WriterState:
        """Return what resumes this writer, to be stored; one not opened with a state has none.

        Its appends expect no session, so that nothing holds them back once another process resumes.
        """
        if self.writer_id is None or self._taken is None:
            raise RefusedError(
                f"a writer of {self.stream} that was not opened with a state has none to store",
                remedy="Store that of new_writer_state() and open the writer with it, without raw",
            )
        return WriterState(writer_id=self.writer_id, streams={self.stream: self._numbers()})

    def _numbers(self) -> Numbers:
        return Numbers(acked=self._acked_number, sent=self._sent_number)

    async def send(self, event: Event) -> None:
        """Take an event; waits while too much is in flight. Acknowledged only after a flush."""
        self._raise_failure()
        if self._skip:
            self._skip -= 1
            self.skipped_events += 1
            return
        while self._builder.is_full:
            # Others wait for room already: their batch takes no more.
            await self._cut(only_full=True)
        if self._builder.add(event):
            await self._cut(only_full=True)
        elif len(self._builder) == 1:
            self._begun.set()

    async def room(self, events_max: int) -> None:
        """Wait until fewer events than that have no acknowledgement."""
        await self._until(lambda: self.in_flight_events < events_max)

    async def flush(self) -> Position | None:
        """Wait until all is acknowledged; return where the last entry is, if that was told."""
        await self._cut_all()
        await self._until(lambda: not self._batches)
        return self._last

    async def _linger(self) -> None:
        """Let no event wait for company for longer than ``linger_s``."""
        try:
            while True:
                await self._begun.wait()
                await asyncio.sleep(self._limits.linger_s)
                self._begun.clear()
                await self._cut_all()
        except TierlogError:
            # Whoever sends or flushes is told.
            return

    async def _cut_all(self) -> None:
        while self._built is not None or len(self._builder):
            await self._cut()

    async def _cut(self, *, only_full: bool = False) -> None:
        """Put what was collected behind the other batches, once there is room for it.

        One at a time, so that batches stay in order; whoever is cancelled meanwhile leaves the
        batch to the next one.
        """
        async with self._cutting:
            if self._built is None:
                if not (self._builder.is_full if only_full else len(self._builder)):
                    return
                self._built = self._builder.build(now_ms=self._clock.wall_ms())
            batch, room = self._built, self._limits.in_flight_bytes_max
            size = len(batch.draft.encoded)
            await self._until(lambda: not self._batches or self._in_flight_bytes + size <= room)
            self._built = None
            self._batches.append(batch)
            self._unsent.append(batch)
            self._in_flight_bytes += size
            self._changed.set()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while self._failed is None and not condition():
            self._changed.clear()
            await self._changed.wait()
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failed is not None:
            raise self._failed

    async def _run(self) -> None:
        """Keep a connection, send what is there, and settle what goes wrong."""
        backoff_s, loop = BACKOFF_S_FIRST, asyncio.get_running_loop()
        progress_s, acked = loop.time(), self.acked_events
        while self._failed is None and not (self._closing and not self._batches):
            if not self._batches:
                self._changed.clear()
                await self._changed.wait()
                progress_s = loop.time()
                continue
            trouble = await self._try_once()
            if self.acked_events != acked:
                backoff_s, progress_s, acked = BACKOFF_S_FIRST, loop.time(), self.acked_events
            if trouble is None or self._failed is not None:
                continue
            if not self._worth_trying(trouble) or (
                loop.time() - progress_s > self._limits.retry_s_max
            ):
                self._fail(trouble)
                return
            log.info("writer.interrupted", stream=self.stream, cause=str(trouble))
            await asyncio.sleep(backoff_s)
            backoff_s = min(BACKOFF_S_MAX, 2 * backoff_s)

    async def _try_once(self) -> TierlogError | None:
        """Send over one connection until something goes wrong or nothing is left.

        Return what went wrong, once the answers that came are settled.
        """
        self._unsent = deque(one for one in self._batches if one.ranges is None)
        self._interrupted = False
        for batch in self._batches:
            batch.error = None
        trouble = await self._send_over_connection()
        if self._conditional:
            try:
                self._settle_by_numbers(await self._own_number())
            except RefusedError as error:
                return self._fail(error)
            except TierlogError as error:
                # Whose the numbers are is not known yet; nothing is settled by them.
                return error
        if trouble is not None:
            return trouble
        return next((one.error for one in self._batches if one.error is not None), None)

    async def _send_over_connection(self) -> TierlogError | None:
        try:
            async with asyncio.TaskGroup() as tasks:
                channel = await self._connections.connect(self.stream, tasks)
                try:
                    await self._send_all(channel)
                finally:
                    await channel.close()
        except TierlogError as error:
            return error
        except BaseExceptionGroup as group:
            known, unknown = group.split(TierlogError)
            if known is None or unknown is not None:
                raise
            first = first_error(known)
            assert isinstance(first, TierlogError)
            return first
        return None

    async def _send_all(self, channel: AppendChannel) -> None:
        """Send batches in order, as they come, until one fails or the writer closes."""
        async with asyncio.TaskGroup() as beside:
            doubting = beside.create_task(self._doubt(channel))
            try:
                await self._send_until_failed(channel)
            finally:
                doubting.cancel()

    async def _doubt(self, channel: AppendChannel) -> None:
        """Hang up on an owner that fell silent, once the stream has another one.

        Asking brings that about: a node that is asked for a stream whose owner is away claims it.
        """
        loop = asyncio.get_running_loop()
        while True:
            await self._flew.wait()
            left_s = self._heard_s + self._limits.doubt_s - loop.time()
            if left_s > 0:
                # Never at once: by a rounding error nothing may be left to wait for.
                await asyncio.sleep(max(left_s, WAKE_S_MIN))
                continue
            try:
                moved = await self._connections.moved(self.stream)
            except TierlogError as error:
                log.info("writer.doubtful", stream=self.stream, cause=str(error))
                moved = False
            if moved:
                await channel.close(drain_s_max=0)
                return
            self._heard_s = loop.time()

    async def _send_until_failed(self, channel: AppendChannel) -> None:
        async with asyncio.TaskGroup() as sends:
            while not self._interrupted:
                if self._unsent:
                    sends.create_task(self._append(channel, self._unsent.popleft()))
                    # Requests leave in the order in which their tasks begin.
                    await asyncio.sleep(0)
                    continue
                if self._closing and not self._batches:
                    return
                if self._failed is not None:
                    return
                self._changed.clear()
                await self._changed.wait()

    async def _append(self, channel: AppendChannel, batch: Batch) -> None:
        loop = asyncio.get_running_loop()
        if not self._flying:
            self._heard_s = loop.time()
            self._flew.set()
        self._flying += 1
        self._sent_number = max(self._sent_number, batch.last_number)
        condition = AppendCondition(last_event_number=batch.after) if self._conditional else None
        try:
            batch.ranges = await channel.append(
                self.stream,
                batch.draft,
                deadline_s=self._limits.append_s_max,
                condition=condition,
            )
        except TierlogError as error:
            batch.error = error
            self._interrupted = True
            batch.doubtful |= isinstance(error, IndeterminateError)
        finally:
            self._flying -= 1
            self._heard_s = loop.time()
            if not self._flying:
                self._flew.clear()
        self._settle()
        self._changed.set()

    def _settle(self) -> None:
        """Let go of the batches at the head that are acknowledged."""
        while self._batches and self._batches[0].ranges is not None:
            batch = self._batches.popleft()
            self._in_flight_bytes -= len(batch.draft.encoded)
            self.acked_events += batch.event_count
            self.acked_bytes += batch.payload_len
            self._acked_number = batch.last_number
            place = self._note_place(batch)
            if self._on_acked is not None:
                told = Acked(
                    stream=self.stream,
                    event_number=batch.last_number,
                    count=batch.event_count,
                    position=place,
                )
                self._on_acked(told)
        self._changed.set()
        if self._progress is not None:
            self._progress("bytes appended", self.acked_bytes, None)

    async def _own_number(self) -> int | None:
        """Return the number of this session, where conditions failed; None without a session."""
        if self._taken is None or not any(is_failed_condition(one.error) for one in self._batches):
            return None
        number = await self._taken.number_now()
        if number is None:
            raise session_over(self.stream, self._numbers())
        return number

    def _settle_by_numbers(self, own: int | None) -> None:
        """Settle what failed conditions, and the answers behind a lost one, tell."""
        unknown = sum(one.ranges is None for one in self._batches)
        settled = settle(
            self._batches,
            self._builder,
            self._numbers(),
            stream=self.stream,
            own=own,
        )
        self.resolved_count += unknown - sum(one.ranges is None for one in settled)
        self._batches = deque(settled)
        self._in_flight_bytes = sum(len(one.draft.encoded) for one in settled)
        self._settle()

    def _note_place(self, batch: Batch) -> Position | None:
        if not batch.ranges:
            self._last = None
            return None
        here = Position(batch.ranges[-1].ledger_id, batch.ranges[-1].last_entry_id)
        # Batches that went again lie behind later ones where nothing orders them: no step back.
        if self._last is None or here > self._last:
            self._last = here
        return here

    def _worth_trying(self, trouble: TierlogError) -> bool:
        if isinstance(trouble, IndeterminateError):
            return self._conditional
        if isinstance(trouble, RefusedError):
            # What a failed condition tells is settled: what is not there goes again.
            return trouble.reason is Reason.FENCED or is_failed_condition(trouble)
        return not isinstance(trouble, CorruptError)

    def _fail(self, trouble: TierlogError) -> TierlogError:
        """End the writer; return what whoever sends is told, naming what is known."""
        self._failed = self._final(trouble)
        self._changed.set()
        return self._failed

    def _final(self, trouble: TierlogError) -> TierlogError:
        unknown = sum(one.event_count for one in self._batches if one.doubtful)
        known = {"acknowledged_events": str(self.acked_events)}
        if unknown:
            known["unknown_events"] = str(unknown)
        if not unknown or (self._conditional and isinstance(trouble, RefusedError)):
            trouble.details.update(known)
            return trouble
        if self._conditional:
            remedy = (
                f"The {self.acked_events} events before them are there; resume the writer from "
                "its state, and it tells how many of these are"
            )
        else:
            remedy = (
                f"The {self.acked_events} events before them are there; read back which of "
                "these are before you append them again"
            )
        return IndeterminateError(
            f"{unknown} events were sent to {self.stream} and their answer was lost: {trouble}",
            remedy=remedy,
            details=known,
        )
