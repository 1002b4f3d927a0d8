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

from tierlog.client.endpoints import find_endpoints
from tierlog.client.partitioned import PartitionedWriter
from tierlog.client.reading import StreamReader
from tierlog.client.resolve import ReadBack
from tierlog.client.writer import StreamWriter, WriterLimits
from tierlog.model.errors import IndeterminateError, RefusedError, RetryableError
from tierlog.model.ids import LedgerId, StreamName, stream_name
from tierlog.model.partitions import count_told, is_partitioned, partition_names
from tierlog.model.policy import Policy
from tierlog.model.position import Edge, Position
from tierlog.ports.admin import DeadLetterDesk, Document, ScrubDesk
from tierlog.ports.progress import Progress
from tierlog.ports.streams import AppendChannel
from tierlog.runtime.settings import Settings, load_settings
from tierlog.wiring.client import ClientConnections, open_client_connections

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
        progress: Progress | None = None,
    ) -> AsyncIterator[StreamWriter | PartitionedWriter]:
        """Give a writer to the stream, which is created if need be; flushed at the end.

        To a partitioned stream it is a ``PartitionedWriter``: the key of an event decides.
        """
        stream = stream_name(name)
        batch_bytes = batch_bytes or self._settings.batch_bytes
        in_flight = self._settings.in_flight_bytes_max
        try:
            await self.create_stream(stream, raw=raw)
        except RefusedError as error:
            count = count_told(error)
            if count is None:
                raise
        else:
            one = await self._writer(stream, raw, batch_bytes, in_flight, progress)
            async with one:
                yield one
            return
        told = _sum_of(progress)
        partitioned = PartitionedWriter(
            stream,
            partition_names(stream, count),
            lambda partition: self._writer(
                partition, raw, batch_bytes, max(1, in_flight // count), told(partition)
            ),
            batch_bytes=batch_bytes,
        )
        async with partitioned:
            yield partitioned

    async def _writer(
        self,
        stream: StreamName,
        raw: bool,  # noqa: FBT001 - called here alone
        batch_bytes: int,
        in_flight_bytes_max: int,
        progress: Progress | None,
    ) -> StreamWriter:
        """Return a writer to one stream, to be entered."""
        connections = self._connections
        writer_id = connections.ids.uuid()
        read_back = ReadBack(
            stream,
            writer_id,
            control=connections.control,
            reads=connections.reads,
            append_s_max=APPEND_S_MAX,
        )
        return StreamWriter(
            stream,
            writer_id=writer_id,
            raw=raw,
            start=Edge.EARLIEST if raw else await self._tail(stream),
            connections=_Owners(connections, read_back),
            resolve=read_back.settle,
            clock=connections.clock,
            limits=WriterLimits(
                batch_bytes=batch_bytes,
                in_flight_bytes_max=in_flight_bytes_max,
                append_s_max=APPEND_S_MAX,
                retry_s_max=self._settings.timeout_s,
                doubt_s=self._settings.doubt_s,
            ),
            progress=progress,
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
        )

    async def bounds(self, name: str) -> tuple[Position | Edge, Position | Edge]:
        """Return a stream's first position, and the one behind its last confirmed entry."""
        return await self._connections.reads.bounds(stream_name(name))

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

    async def offloads(self) -> Sequence[Document]:
        """Return what is due, running, failed or done."""
        return await self._connections.admin.offloads()

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

    async def level(self, namespace: str | None = None) -> Document:
        """Return the thresholds of a namespace, or of the cluster."""
        return await self._connections.admin.level(namespace)

    async def set_level(self, namespace: str | None, policy: Document) -> Document:
        """Replace the thresholds of a namespace, or, for None, of the cluster."""
        return await self._connections.admin.set_level(namespace, policy)

    async def explain(self, name: str) -> Document:
        """Return which level gives each threshold, and what happens next to each ledger."""
        return await self._connections.admin.explain(stream_name(name))

    async def delete_stream(self, name: str) -> Document:
        """Begin to delete a stream with all its data, or tell how much of it is left."""
        return await self._connections.admin.delete_stream(stream_name(name))

    async def _tail(self, stream: StreamName) -> Position | Edge:
        """Return the end of the stream, from where lost answers would be read back."""
        try:
            return await self._confirmed_end(stream)
        except RetryableError:
            # A writer does without a reader until it has to read back; then it reads it all.
            return Edge.EARLIEST

    async def _confirmed_end(self, stream: StreamName) -> Position | Edge:
        """Return an end that may be short of what was acknowledged just now, without waiting.

        ``bounds`` would not say any while the stream's owner is gone.
        """
        reads = self._connections.reads
        return (await reads.read(stream, Edge.LATEST, bytes_max=1, entries_max=1)).resume


class _Owners:
    """Finds the owner of a stream and connects to it, noting its epoch for reading back."""

    def __init__(self, connections: ClientConnections, read_back: ReadBack) -> None:
        self._connections = connections
        self._read_back = read_back

    async def connect(self, stream: StreamName, tasks: asyncio.TaskGroup) -> AppendChannel:
        owner = await self._connections.control.find_owner(stream)
        channel = await self._connections.connect_owner(owner, tasks)
        self._read_back.owner_epoch = owner.owner_epoch
        return channel

    async def moved(self, stream: StreamName) -> bool:
        owner = await self._connections.control.find_owner(stream)
        return owner.owner_epoch > self._read_back.owner_epoch


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
