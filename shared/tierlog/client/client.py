"""The asynchronous client: streams, writers, readers, administration.

    async with open_client() as client:
        async with client.writer("orders") as writer:
            await writer.send(b"one")
        async for event in client.reader("orders").events():
            print(event.payload)

Owns putting together what a writer and a reader need. Everything else is theirs.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from uuid import UUID

from tierlog.client.attributes import StreamAttributes
from tierlog.client.batches import Event
from tierlog.client.endpoints import find_endpoints
from tierlog.client.owners import Owners
from tierlog.client.partitioned import PartitionedWriter
from tierlog.client.reading import StreamReader
from tierlog.client.resuming import WriterState, take_over
from tierlog.client.single import append_events
from tierlog.client.writer import OnAcked, StreamWriter, WriterLimits
from tierlog.format.entry import AttributeUpdate, Packing
from tierlog.model.attributes import AppendCondition
from tierlog.model.errors import IndeterminateError, RefusedError, RetryableError
from tierlog.model.ids import LedgerId, StreamName, stream_name
from tierlog.model.partitions import count_told, is_partitioned, partition_names
from tierlog.model.policy import Policy
from tierlog.model.position import Edge, Position
from tierlog.ports.admin import DeadLetterDesk, Document, ScrubDesk
from tierlog.ports.progress import Progress
from tierlog.runtime.settings import Settings, load_settings
from tierlog.wiring.client import ClientConnections, open_client_connections
from tierlog.wiring.compression import packing_of

APPEND_S_MAX = 10.0
OFFLOAD_POLL_S = 0.5


class Client:
    """All that an application does with Tierlog; ``open_client`` makes one."""

    def __init__(self, connections: ClientConnections) -> None:
        self._connections = connections
        self._settings = connections.settings.client

    async def create_stream(
        self,
        name: str,
        *,
        raw: bool = False,
        policy: Policy | None = None,
        partitions: int = 0,
        exist_ok: bool = True,
    ) -> bool:
        """Create a stream; False when one of the same shape is there already.

        With ``partitions``, these many streams are created, and one that stands for all.
        """
        try:
            return await self._connections.control.create_stream(
                stream_name(name), raw=raw, policy=policy, exist_ok=exist_ok, partitions=partitions
            )
        except IndeterminateError as error:
            if not exist_ok:
                raise
            # Creating twice is creating once.
            raise RetryableError(error.message, remedy=error.remedy) from error

    @contextlib.asynccontextmanager
    async def writer(
        self,
        name: str,
        *,
        raw: bool = False,
        batch_bytes: int | None = None,
        linger_s: float | None = None,
        compression: str | None = None,
        exactly_once: bool = True,
        state: WriterState | None = None,
        from_start: bool = False,
        progress: Progress | None = None,
        on_acked: OnAcked | None = None,
    ) -> AsyncIterator[StreamWriter | PartitionedWriter]:
        """Give a writer to the stream, which is created if need be; flushed at the end.

        To a partitioned stream it is a ``PartitionedWriter``: the key of an event decides.
        ``state`` resumes a writer: ``resumed_event_number`` tells how many of its events are there;
        with ``from_start`` they are sent again from the first on, and those are passed over.
        ``compression`` of events: none, zstd or lz4; those of a raw stream are never compressed.
        Without ``exactly_once``, and to a raw stream, appends are plain: a lost answer is told.
        ``on_acked`` is called, on the event loop, with what is acknowledged.
        """
        stream = stream_name(name)
        if state is not None and (raw or not exactly_once):
            raise RefusedError(
                "a writer that is resumed needs numbers in its entries",
                remedy="Leave out raw, and exactly_once=False",
            )
        options = _Options(
            raw=raw,
            batch_bytes=batch_bytes or self._settings.batch_bytes,
            linger_s=self._settings.linger_s if linger_s is None else linger_s,
            in_flight_bytes_max=self._settings.in_flight_bytes_max,
            writer_id=self._writer_id(state) if exactly_once and not raw else None,
            resumed=state is not None,
            from_start=from_start,
            on_acked=on_acked,
            packing=packing_of(compression or self._settings.compression),
        )
        try:
            await self.create_stream(stream, raw=raw)
        except RefusedError as error:
            count = count_told(error)
            if count is None:
                raise
        else:
            async with await self._writer(stream, options, progress) as one:
                yield one
            return
        told = _sum_of(progress)
        share = replace(options, in_flight_bytes_max=max(1, options.in_flight_bytes_max // count))
        partitioned = PartitionedWriter(
            stream,
            partition_names(stream, count),
            lambda partition: self._writer(partition, share, told(partition)),
        )
        async with partitioned:
            yield partitioned

    def _writer_id(self, state: WriterState | None) -> UUID:
        return state.writer_id if state is not None else self._connections.ids.uuid()

    def new_writer_state(self) -> WriterState:
        """Return the state of a writer that has sent nothing yet, to be stored before it does."""
        return WriterState(writer_id=self._connections.ids.uuid())

    async def _writer(
        self, stream: StreamName, options: "_Options", progress: Progress | None
    ) -> StreamWriter:
        """Return a writer to one stream, to be entered."""
        connections, owners, taken = self._connections, self._owners(), None
        if options.resumed and options.writer_id is not None:
            taken = await take_over(
                stream,
                options.writer_id,
                owners=owners,
                control=connections.control,
                clock=connections.clock,
                ids=connections.ids,
                append_s_max=APPEND_S_MAX,
                retry_s_max=self._settings.timeout_s,
            )
        return StreamWriter(
            stream,
            writer_id=options.writer_id,
            raw=options.raw,
            connections=owners,
            clock=connections.clock,
            limits=WriterLimits(
                batch_bytes=options.batch_bytes,
                in_flight_bytes_max=options.in_flight_bytes_max,
                append_s_max=APPEND_S_MAX,
                retry_s_max=self._settings.timeout_s,
                linger_s=options.linger_s,
                doubt_s=self._settings.doubt_s,
            ),
            taken=taken,
            from_start=options.from_start,
            progress=progress,
            on_acked=options.on_acked,
            packing=options.packing,
        )

    def _owners(self) -> Owners:
        return Owners(self._connections.control, self._connections.connect_owner)

    def attributes(self, name: str) -> StreamAttributes:
        """Return the attributes of a stream that is no raw one: to be read, listed and updated."""
        return StreamAttributes(
            stream_name(name),
            control=self._connections.control,
            owners=self._owners(),
            clock=self._connections.clock,
            append_s_max=APPEND_S_MAX,
            retry_s_max=self._settings.timeout_s,
        )

    async def append(
        self,
        name: str,
        events: Sequence[Event],
        *,
        writer_id: UUID | None = None,
        last_event_number: int | None = None,
        after: Position | Edge | None = None,
        updates: Sequence[AttributeUpdate] = (),
    ) -> Position | None:
        """Append events as one entry, if what is given holds: all of them, or nothing.

        ``last_event_number``: of the last event of ``writer_id`` in the stream, 0 for none; the
        numbers of these events follow it. Where an answer was lost and the number then tells that
        they are there, they are acknowledged without a position. ``after``: where the stream's last
        entry is, ``Edge.EARLIEST``: it has none. CONDITIONAL_APPEND_FAILED tells what is there
        instead. A writer's id is for one process at a time, and for no ``writer`` besides.
        """
        # Entries of a raw stream have no place for what makes them conditional.
        await self.create_stream(name, raw=False)
        return await append_events(
            stream_name(name),
            events,
            owners=self._owners(),
            clock=self._connections.clock,
            writer_id=writer_id,
            condition=AppendCondition(last_event_number=last_event_number, after=after),
            updates=updates,
            append_s_max=APPEND_S_MAX,
            retry_s_max=self._settings.timeout_s,
        )

    def reader(
        self,
        name: str,
        *,
        start: Position | Edge = Edge.EARLIEST,
        until: Position | None = None,
        limit: int | None = None,
        follow: bool = False,
    ) -> StreamReader:
        """Return a reader: ``until`` is not included, ``limit`` counts entries.

        Of a partitioned stream all partitions are read.
        """
        return StreamReader(
            stream_name(name),
            self._connections.reads,
            start=start,
            until=until,
            limit=limit,
            follow=follow,
            retry_s_max=self._settings.timeout_s,
            decompressors=self._connections.decompressors,
        )

    async def bounds(self, name: str) -> tuple[Position | Edge, Position | Edge]:
        """Return a stream's first position, and the one behind its last confirmed entry."""
        return await self._connections.reads.bounds(stream_name(name))

    async def position_at(self, name: str, time: str) -> Position | Edge:
        """Return where a time of publishing begins: ISO 8601, or milliseconds since 1970.

        That is the first entry published then or later, or the end.
        """
        return await self._connections.read_desk.position_at(stream_name(name), time)

    async def explain_read(
        self, name: str, start: str = "earliest", *, entries: int = 1, bytes_max: int = 1024 * 1024
    ) -> Document:
        """Read once; return which tier, objects and requests answered, and how long each took."""
        return await self._connections.read_desk.explain(
            stream_name(name), start, entries_max=entries, bytes_max=bytes_max
        )

    async def partitions(self, name: str) -> list[StreamName]:
        """Return the names of a stream's partitions; of one that has none, its own."""
        stream = stream_name(name)
        try:
            await self._confirmed_end(stream)
        except RefusedError as error:
            count = count_told(error)
            if count is None:
                raise
            return partition_names(stream, count)
        return [stream]

    async def seal(self, name: str) -> LedgerId | None:
        """Close the stream's open ledger; None when none was open."""
        return await self._connections.control.seal(stream_name(name))

    async def streams(self) -> Sequence[Document]:
        """Return all streams."""
        return await self._connections.admin.streams()

    async def stream(self, name: str) -> Document:
        """Return a stream with its ledgers and where each lies."""
        return await self._connections.admin.stream(stream_name(name))

    async def ledger(self, ledger_id: int) -> Document:
        """Return a ledger with its offload context."""
        return await self._connections.admin.ledger(LedgerId(ledger_id))

    async def offload(self, name: str, before: Position | None = None) -> Document:
        """Ask for the offload of what is closed, or of what is closed before a position.

        A position that the stream does not have is refused.
        """
        return await self._connections.admin.offload(stream_name(name), before)

    async def offload_prefix(
        self, name: str, before: Position | None = None, *, timeout_s: float = 600.0
    ) -> Position | None:
        """Offload what is sealed before a position, and return the position that was reached.

        All before it is in tier 2; None in a stream without ledgers. After ``timeout_s`` it is how
        far things have come: lower than what was asked for, which goes on. A partitioned stream is
        refused: its partitions have positions.
        """
        stream, admin = stream_name(name), self._connections.admin
        reached = await self._offloaded_to(stream)
        asked = (await admin.offload(stream, before))["position"]
        if asked is None:
            return None
        wanted, clock = Position.parse(asked), self._connections.clock
        deadline_s = clock.monotonic_s() + timeout_s
        while (reached is None or reached < wanted) and clock.monotonic_s() < deadline_s:
            await asyncio.sleep(OFFLOAD_POLL_S)
            reached = await self._offloaded_to(stream)
        return reached

    async def _offloaded_to(self, stream: StreamName) -> Position | None:
        """Return the first position that is not in tier 2."""
        status, *more = await self._connections.admin.offload_status(stream)
        if more or status["stream"] != stream:
            raise is_partitioned(stream, 1 + len(more))
        return Position.parse(status["position"]) if status["position"] is not None else None

    async def offloads(self, stream: str | None = None) -> Sequence[Document]:
        """Return what is due, running, failed or done; of ``stream`` and its partitions alone."""
        name = stream_name(stream) if stream is not None else None
        return await self._connections.admin.offloads(name)

    async def offload_status(self, name: str) -> Sequence[Document]:
        """Return how far a stream's offload has come; of one with partitions, for each."""
        return await self._connections.admin.offload_status(stream_name(name))

    async def pause_offload(self, name: str, cause: str = "") -> Sequence[Document]:
        """Let no offload of the stream begin, and none of its copies be deleted."""
        return await self._connections.admin.pause_offload(stream_name(name), cause)

    async def resume_offload(self, name: str) -> Sequence[Document]:
        """Let a paused stream go on."""
        return await self._connections.admin.resume_offload(stream_name(name))

    async def attempts(self, name: str) -> Sequence[Document]:
        """Return the attempts at each ledger of a stream."""
        return await self._connections.admin.attempts(stream_name(name))

    async def leftovers(self, name: str) -> Sequence[Document]:
        """Return what attempts left that is still to be deleted."""
        return await self._connections.admin.leftovers(stream_name(name))

    @property
    def dead_letters(self) -> DeadLetterDesk:
        """The offload requests that kept failing."""
        return self._connections.dead_letters

    @property
    def scrubs(self) -> ScrubDesk:
        """Comparisons of the bucket with the metadata."""
        return self._connections.scrubs

    async def policy(self, name: str) -> Document:
        """Return a stream's thresholds."""
        return await self._connections.admin.policy(stream_name(name))

    async def set_policy(self, name: str, policy: Document) -> Document:
        """Replace a stream's own thresholds."""
        return await self._connections.admin.set_policy(stream_name(name), policy)

    async def change_policy(self, name: str, changes: Document) -> Document:
        """Change those of a stream's own thresholds that are given; None unsets one."""
        return await self._connections.admin.change_policy(stream_name(name), changes)

    async def level(self, namespace: str | None = None) -> Document:
        """Return the thresholds of a namespace, or of the cluster."""
        return await self._connections.admin.level(namespace)

    async def set_level(self, namespace: str | None, policy: Document) -> Document:
        """Replace the thresholds of a namespace, or, for None, of the cluster."""
        return await self._connections.admin.set_level(namespace, policy)

    async def change_level(self, namespace: str | None, changes: Document) -> Document:
        """Change those of a level's thresholds that are given; None unsets one."""
        return await self._connections.admin.change_level(namespace, changes)

    async def explain(self, name: str) -> Document:
        """Return which level gives each threshold, and what happens next to each ledger."""
        return await self._connections.admin.explain(stream_name(name))

    async def delete_stream(self, name: str) -> Document:
        """Begin to delete a stream with all its data, or tell how much of it is left."""
        return await self._connections.admin.delete_stream(stream_name(name))

    async def _confirmed_end(self, stream: StreamName) -> Position | Edge:
        """Return an end that may be short of what was acknowledged just now, without waiting.

        ``bounds`` would not say any while the stream's owner is gone.
        """
        reads = self._connections.reads
        return (await reads.read(stream, Edge.LATEST, bytes_max=1, entries_max=1)).resume


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """How a writer to each of some streams is made."""

    raw: bool
    batch_bytes: int
    linger_s: float
    in_flight_bytes_max: int
    writer_id: UUID | None
    resumed: bool
    from_start: bool
    on_acked: OnAcked | None
    packing: Packing | None


def _sum_of(progress: Progress | None) -> Callable[[StreamName], Progress | None]:
    """Return what makes a ``Progress`` of each partition that tells of their sum."""
    done_of: dict[StreamName, int] = {}

    def of(partition: StreamName) -> Progress | None:
        if progress is None:
            return None

        def tell(what: str, done: int, total: int | None) -> None:
            done_of[partition] = done
            progress(what, sum(done_of.values()), total)

        return tell

    return of


@contextlib.asynccontextmanager
async def open_client(settings: Settings | None = None) -> AsyncIterator[Client]:
    """Give a client of the services that the settings, or ``tierlog up``, name."""
    if settings is None:
        settings = load_settings()
    found = find_endpoints(settings.client, settings.state_dir)
    async with open_client_connections(
        settings,
        ingest_grpc=found.ingest_grpc,
        reader_http=found.reader_http,
        scheduler_http=found.scheduler_http,
    ) as connections:
        yield Client(connections)
