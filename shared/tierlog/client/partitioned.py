"""Writes to a partitioned stream, over writers of its partitions.

Owns which partition an event goes to. Does not own what a partition is
(``tierlog.model.partitions``), nor a writer of one.

Invariants:
    * Events of one key are in one partition, in the order in which they were sent.
    * Events without a key go to one partition after the other, ``TURN_BYTES`` to each.
    * The writers have one id between them, and each its own numbers: a stream each, after
      seeds/004. Sent again from the first one on, events get to the partitions they were in: by
      their keys and sizes alone, whatever the settings are by then.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self

from tierlog.client.batches import Event
from tierlog.client.resuming import WriterState
from tierlog.client.writer import StreamWriter
from tierlog.format.entry import StructuredEvent
from tierlog.model.errors import TierlogError, first_error
from tierlog.model.ids import StreamName
from tierlog.model.partitions import partition_of
from tierlog.model.position import Position

TURN_BYTES: Final = 256 * 1024
"""So much without a key goes to a partition before it is the next one's turn. It never changes: by
another number, a writer that is resumed would pass over events that are in no partition."""

MakeWriter = Callable[[StreamName], Coroutine[Any, Any, StreamWriter]]


class PartitionedWriter:
    """Appends events to the partitions of one stream; an async context manager that flushes."""

    def __init__(
        self,
        stream: StreamName,
        partitions: Sequence[StreamName],
        make_writer: MakeWriter,
    ) -> None:
        self.stream = stream
        self._names = partitions
        self._make_writer = make_writer
        self._writers: list[StreamWriter] = []
        self._stack = contextlib.AsyncExitStack()
        self._turn = 0
        self._turn_bytes = 0

    def __repr__(self) -> str:
        return f"<PartitionedWriter {self.stream} acked={self.acked_events} {self._writers}>"

    async def __aenter__(self) -> Self:
        async with _first_told(), asyncio.TaskGroup() as tasks:
            making = [tasks.create_task(self._make_writer(name)) for name in self._names]
        async with contextlib.AsyncExitStack() as stack:
            for made in making:
                self._writers.append(await stack.enter_async_context(made.result()))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            await self._stack.__aexit__(kind, error, traceback)
            return
        async with self._stack:
            await self.flush()

    @property
    def acked_events(self) -> int:
        """Events that are acknowledged, over all partitions."""
        return sum(one.acked_events for one in self._writers)

    @property
    def acked_bytes(self) -> int:
        """Bytes of events that are acknowledged."""
        return sum(one.acked_bytes for one in self._writers)

    @property
    def in_flight_events(self) -> int:
        """Events that were sent, or wait to be, and are not acknowledged yet."""
        return sum(one.in_flight_events for one in self._writers)

    @property
    def resolved_count(self) -> int:
        """Batches without an answer of which an owner's number told that they are there."""
        return sum(one.resolved_count for one in self._writers)

    @property
    def resumed_event_numbers(self) -> Mapping[StreamName, int]:
        """So many events of this writer were in each partition when it was resumed."""
        return {one.stream: one.resumed_event_number for one in self._writers}

    @property
    def skipped_events(self) -> int:
        """Events that were passed over since they were there."""
        return sum(one.skipped_events for one in self._writers)

    def state(self) -> WriterState:
        """Return what resumes this writer, with its numbers in each partition.

        One that was not opened with a state has none.
        """
        states = [one.state() for one in self._writers]
        streams = {name: numbers for one in states for name, numbers in one.streams.items()}
        return WriterState(writer_id=states[0].writer_id, streams=streams)

    @property
    def last_positions(self) -> Mapping[StreamName, Position]:
        """Where the last acknowledged entry of each partition is, of those that have one."""
        places = {one.stream: one.last_position for one in self._writers}
        return {name: place for name, place in places.items() if place is not None}

    async def send(self, event: Event, *, key: bytes | None = None) -> None:
        """Take an event; ``key``, or else the event's own, decides its partition."""
        if key is None and isinstance(event, StructuredEvent):
            key = event.key
        if key is not None:
            index = partition_of(key, len(self._writers))
        else:
            index = self._next(len(event.payload if isinstance(event, StructuredEvent) else event))
        await self._writers[index].send(event)

    def _next(self, size: int) -> int:
        """Return whose turn it is: events that are sent one after the other share an entry."""
        if self._turn_bytes >= TURN_BYTES:
            self._turn, self._turn_bytes = (self._turn + 1) % len(self._writers), 0
        self._turn_bytes += max(1, size)
        return self._turn

    async def flush(self) -> None:
        """Wait until all is acknowledged; ``last_positions`` says where."""
        async with _first_told(), asyncio.TaskGroup() as tasks:
            for one in self._writers:
                tasks.create_task(one.flush())


@contextlib.asynccontextmanager
async def _first_told() -> AsyncIterator[None]:
    """Raise the first of Tierlog's errors where several tasks may fail."""
    try:
        yield
    except BaseExceptionGroup as group:
        first = first_error(group)
        if isinstance(first, TierlogError):
            raise first from group
        raise
