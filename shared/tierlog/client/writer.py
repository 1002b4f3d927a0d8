"""Appends to one stream: batched, pipelined, and decided when an answer is lost.

Owns the batches in flight and what becomes of them over reconnections. Does not own reading back
(``resolve``), nor where the owner is (the connections it is given).

Invariants:
    * Bytes of events without an acknowledgement stay within ``in_flight_bytes_max``, or are one
      batch; ``send`` waits for room.
    * A batch is sent again only when it is certain that its entry is in no ledger: the node said
      so, or everything that the writer's events could have become was read back.
    * ``flush`` returns only when every event sent before is acknowledged; else it raises.

Consistency: entries of one connection keep their order. When some of several batches in flight
were refused, or lost with a connection, those go again behind the ones that landed.
Silence: an owner that owes answers for ``doubt_s`` is asked for at other nodes; when there is
another one, what was sent to the silent one is as lost as with a connection.
Retries: without any progress for ``retry_s_max`` the last error is told to whoever sends.
Cancellation, Crash: what was in flight is then neither known to be there nor not.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Protocol, Self
from uuid import UUID

import structlog

from tierlog.client.batches import Batch, BatchBuilder, Event
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
from tierlog.model.position import AppendedRange, Edge, Position
from tierlog.ports.clock import Clock
from tierlog.ports.progress import Progress
from tierlog.ports.streams import AppendChannel

log = structlog.get_logger()

BACKOFF_S_FIRST: Final = 0.1
BACKOFF_S_MAX: Final = 0.5
WAKE_S_MIN: Final = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterLimits:
    """Every bound of a writer."""

    batch_bytes: int
    in_flight_bytes_max: int
    append_s_max: float
    retry_s_max: float
    doubt_s: float = 1.0
    """An owner that owes answers and is silent for so long may have been replaced."""


class OwnerConnections(Protocol):
    """Finds the owner of a stream and connects to it."""

    async def connect(self, stream: StreamName, tasks: asyncio.TaskGroup) -> AppendChannel:
        """Return a channel to whoever owns ``stream`` now."""
        ...

    async def moved(self, stream: StreamName) -> bool:
        """Tell whether ``stream`` has another owner than the one last connected to."""
        ...


Resolve = Callable[[Position | Edge, Sequence[Batch], float], Awaitable[None]]
"""Reads back from a position and settles those of the batches that are there; they were lost at
that time of the loop."""


class StreamWriter:
    """Appends events to one stream; an async context manager that flushes at its end."""

    def __init__(
        self,
        stream: StreamName,
        *,
        writer_id: UUID,
        raw: bool,
        start: Position | Edge,
        connections: OwnerConnections,
        resolve: Resolve,
        clock: Clock,
        limits: WriterLimits,
        progress: Progress | None = None,
    ) -> None:
        """Take the position behind which nothing of this writer is, as ``start``."""
        self.stream = stream
        self.writer_id = writer_id
        self.acked_events = 0
        self.acked_bytes = 0
        self.resolved_count = 0
        """How often lost answers were read back."""
        self._raw = raw
        self._acked_to: Position | Edge = start
        self._last: Position | None = None
        self._connections = connections
        self._resolve = resolve
        self._clock = clock
        self._limits = limits
        self._progress = progress
        self._builder = BatchBuilder(writer_id, raw, limits.batch_bytes)
        self._batches: deque[Batch] = deque()
        self._unsent: deque[Batch] = deque()
        self._in_flight_bytes = 0
        self._changed = asyncio.Event()
        self._failed: TierlogError | None = None
        self._closing = False
        self._lost_s = 0.0
        self._flying = 0
        self._flew = asyncio.Event()
        self._heard_s = 0.0
        self._tasks: asyncio.TaskGroup | None = None

    def __repr__(self) -> str:
        return (
            f"<StreamWriter {self.stream} acked={self.acked_events} "
            f"in_flight={len(self._batches)}/{self._in_flight_bytes} bytes>"
        )

    async def __aenter__(self) -> Self:
        self._tasks = asyncio.TaskGroup()
        await self._tasks.__aenter__()
        self._tasks.create_task(self._run(), name=f"writer {self.stream}")
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
        """Where the last acknowledged entry is."""
        return self._last

    async def send(self, event: Event) -> None:
        """Take an event; waits while too much is in flight. Acknowledged only after a flush."""
        self._raise_failure()
        if self._builder.add(event):
            await self._cut()

    async def flush(self) -> Position | None:
        """Wait until all is acknowledged; return where the last entry is."""
        if len(self._builder):
            await self._cut()
        await self._until(lambda: not self._batches)
        return self._last

    async def _cut(self) -> None:
        batch = self._builder.build(now_ms=self._clock.wall_ms())
        size = len(batch.draft.encoded)
        room = self._limits.in_flight_bytes_max
        await self._until(lambda: not self._batches or self._in_flight_bytes + size <= room)
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
            if trouble is None:
                continue
            if not self._worth_trying(trouble) or (
                loop.time() - progress_s > self._limits.retry_s_max
            ):
                self._failed = self._final(trouble)
                self._changed.set()
                return
            log.info("writer.interrupted", stream=self.stream, cause=str(trouble))
            await asyncio.sleep(backoff_s)
            backoff_s = min(BACKOFF_S_MAX, 2 * backoff_s)

    async def _try_once(self) -> TierlogError | None:
        """Connect and send until something goes wrong or nothing is left; return what went."""
        try:
            lost = [one for one in self._batches if isinstance(one.error, IndeterminateError)]
            if lost and not self._raw:
                await self._resolve(self._acked_to, lost, self._lost_s)
                self.resolved_count += 1
                self._settle()
            self._unsent = deque(one for one in self._batches if one.ranges is None)
            for batch in self._batches:
                batch.error = None
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
        return next((one.error for one in self._batches if one.error is not None), None)

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
            while not any(one.error for one in self._batches):
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
        try:
            batch.ranges = await channel.append(
                self.stream, batch.draft, deadline_s=self._limits.append_s_max
            )
        except TierlogError as error:
            batch.error = error
            self._lost_s = loop.time()
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
            assert batch.ranges is not None
            self._in_flight_bytes -= len(batch.draft.encoded)
            self.acked_events += batch.event_count
            self.acked_bytes += batch.payload_len
            self._note_place(batch.ranges[-1])
        self._changed.set()
        if self._progress is not None:
            self._progress("bytes appended", self.acked_bytes, None)

    def _note_place(self, place: AppendedRange) -> None:
        here = Position(place.ledger_id, place.last_entry_id)
        # Batches that went again lie behind later ones: never step back.
        if self._last is None or here > self._last:
            self._last = here
        if not isinstance(self._acked_to, Position) or here > self._acked_to:
            self._acked_to = here

    def _worth_trying(self, trouble: TierlogError) -> bool:
        if isinstance(trouble, IndeterminateError):
            return not self._raw
        if isinstance(trouble, RefusedError):
            return trouble.reason is Reason.FENCED
        return not isinstance(trouble, CorruptError)

    def _final(self, trouble: TierlogError) -> TierlogError:
        """Return what the writer ends with, naming what is known."""
        unknown = sum(
            one.event_count for one in self._batches if isinstance(one.error, IndeterminateError)
        )
        known = {"acknowledged_events": str(self.acked_events)}
        if not unknown:
            trouble.details.update(known)
            return trouble
        return IndeterminateError(
            f"{unknown} events were sent to {self.stream} and their answer was lost: {trouble}",
            remedy=f"The {self.acked_events} events before them are there; read back which of "
            "these are before you append them again",
            details=known | {"unknown_events": str(unknown)},
        )
