"""The client for programs without an event loop: the same calls, blocking.

    with SyncClient() as client, client.writer("orders") as writer:
        writer.send(b"one")

How calls get to an event loop, and their results back, is ``tierlog.client.blocking``'s.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from uuid import UUID

from tierlog.client.attributes import FIRST, LAST
from tierlog.client.batches import Event
from tierlog.client.blocking import BACKGROUND, Blocking, iterate, send_all
from tierlog.client.client import Client, open_client
from tierlog.client.partitioned import PartitionedWriter
from tierlog.client.reading import ReadEntry, ReadEvent
from tierlog.client.resuming import WriterState
from tierlog.client.writer import StreamWriter
from tierlog.format.entry import AttributeUpdate
from tierlog.model.ids import LedgerId, StreamName
from tierlog.model.policy import Policy
from tierlog.model.position import Edge, Position
from tierlog.ports.admin import Document
from tierlog.ports.progress import Progress
from tierlog.runtime.settings import Settings


class SyncWriter(Blocking):
    """``StreamWriter`` or ``PartitionedWriter``, blocking."""

    def __init__(self, client: Client, name: str, **options: Any) -> None:  # noqa: ANN401
        super().__init__()
        self._writer: StreamWriter | PartitionedWriter = self.enter(client.writer(name, **options))

    def send(self, event: Event) -> None:
        """See ``StreamWriter.send``."""
        BACKGROUND.run(self._writer.send(event))

    def send_all(self, events: Iterable[Event]) -> None:
        """Send many, with few hops to the loop; ``events`` is iterated over here."""
        send_all(events, self._writer.send)

    @property
    def acked_events(self) -> int:
        """Events that are acknowledged."""
        return self._writer.acked_events

    @property
    def acked_bytes(self) -> int:
        """Bytes of events that are acknowledged."""
        return self._writer.acked_bytes

    @property
    def last_positions(self) -> Mapping[StreamName, Position]:
        """Where the last acknowledged entry is, of the stream or of each of its partitions."""
        if isinstance(self._writer, PartitionedWriter):
            return self._writer.last_positions
        last = self._writer.last_position
        return {self._writer.stream: last} if last is not None else {}

    @property
    def resumed_event_numbers(self) -> Mapping[StreamName, int]:
        """How many of its events the stream had, or each partition, when it was resumed."""
        if isinstance(self._writer, PartitionedWriter):
            return self._writer.resumed_event_numbers
        return {self._writer.stream: self._writer.resumed_event_number}

    @property
    def skipped_events(self) -> int:
        """Events that were passed over since they were there."""
        return self._writer.skipped_events

    def state(self) -> WriterState:
        """See ``StreamWriter.state``."""
        return self._writer.state()

    def flush(self) -> Position | None:
        """See ``StreamWriter.flush``; None of a partitioned stream: see ``last_positions``."""
        return BACKGROUND.run(self._writer.flush())


class SyncClient(Blocking):
    """``Client``, blocking."""

    def __init__(self, settings: Settings | None = None) -> None:
        super().__init__()
        self._client: Client = self.enter(open_client(settings))

    def create_stream(
        self,
        name: str,
        *,
        raw: bool = False,
        policy: Policy | None = None,
        partitions: int = 0,
        exist_ok: bool = True,
    ) -> bool:
        """See ``Client.create_stream``."""
        return BACKGROUND.run(
            self._client.create_stream(
                name, raw=raw, policy=policy, partitions=partitions, exist_ok=exist_ok
            )
        )

    def writer(
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
    ) -> SyncWriter:
        """Return a writer; a context manager that flushes at its end. See ``Client.writer``."""
        return SyncWriter(
            self._client,
            name,
            raw=raw,
            batch_bytes=batch_bytes,
            linger_s=linger_s,
            compression=compression,
            exactly_once=exactly_once,
            state=state,
            from_start=from_start,
            progress=progress,
        )

    def new_writer_state(self) -> WriterState:
        """See ``Client.new_writer_state``."""
        return self._client.new_writer_state()

    def append(
        self,
        name: str,
        events: Sequence[Event],
        *,
        writer_id: UUID | None = None,
        last_event_number: int | None = None,
        after: Position | Edge | None = None,
        updates: Sequence[AttributeUpdate] = (),
    ) -> Position | None:
        """See ``Client.append``."""
        return BACKGROUND.run(
            self._client.append(
                name,
                events,
                writer_id=writer_id,
                last_event_number=last_event_number,
                after=after,
                updates=updates,
            )
        )

    def get_attributes(self, name: str, keys: Sequence[UUID]) -> Mapping[UUID, int]:
        """See ``StreamAttributes.get``."""
        return BACKGROUND.run(self._client.attributes(name).get(keys))

    def list_attributes(
        self, name: str, *, first: UUID = FIRST, last: UUID = LAST
    ) -> Iterator[tuple[UUID, int]]:
        """See ``StreamAttributes.list``."""
        return iterate(self._client.attributes(name).list(first, last))

    def update_attributes(
        self,
        name: str,
        updates: Sequence[AttributeUpdate],
        *,
        after: Position | Edge | None = None,
    ) -> Position:
        """See ``StreamAttributes.update``."""
        return BACKGROUND.run(self._client.attributes(name).update(updates, after=after))

    def entries(
        self,
        name: str,
        *,
        start: Position | Edge = Edge.EARLIEST,
        until: Position | None = None,
        limit: int | None = None,
        follow: bool = False,
    ) -> Iterator[ReadEntry]:
        """Iterate over entries."""
        reader = self._client.reader(name, start=start, until=until, limit=limit, follow=follow)
        return iterate(reader.entries())

    def events(
        self,
        name: str,
        *,
        start: Position | Edge = Edge.EARLIEST,
        until: Position | None = None,
        limit: int | None = None,
        follow: bool = False,
    ) -> Iterator[ReadEvent]:
        """Iterate over events."""
        reader = self._client.reader(name, start=start, until=until, limit=limit, follow=follow)
        return iterate(reader.events())

    def bounds(self, name: str) -> tuple[Position | Edge, Position | Edge]:
        """See ``Client.bounds``."""
        return BACKGROUND.run(self._client.bounds(name))

    def partitions(self, name: str) -> list[StreamName]:
        """See ``Client.partitions``."""
        return BACKGROUND.run(self._client.partitions(name))

    def seal(self, name: str) -> LedgerId | None:
        """See ``Client.seal``."""
        return BACKGROUND.run(self._client.seal(name))

    def streams(self) -> Sequence[Document]:
        """See ``Client.streams``."""
        return BACKGROUND.run(self._client.streams())

    def stream(self, name: str) -> Document:
        """See ``Client.stream``."""
        return BACKGROUND.run(self._client.stream(name))

    def ledger(self, ledger_id: int) -> Document:
        """See ``Client.ledger``."""
        return BACKGROUND.run(self._client.ledger(ledger_id))

    def offload(self, name: str, before: Position | None = None) -> Document:
        """See ``Client.offload``."""
        return BACKGROUND.run(self._client.offload(name, before))

    def offload_prefix(
        self, name: str, before: Position | None = None, *, timeout_s: float = 600.0
    ) -> Position | None:
        """See ``Client.offload_prefix``."""
        return BACKGROUND.run(self._client.offload_prefix(name, before, timeout_s=timeout_s))

    def offload_status(self, name: str) -> Sequence[Document]:
        """See ``Client.offload_status``."""
        return BACKGROUND.run(self._client.offload_status(name))

    def pause_offload(self, name: str, cause: str = "") -> Sequence[Document]:
        """See ``Client.pause_offload``."""
        return BACKGROUND.run(self._client.pause_offload(name, cause))

    def resume_offload(self, name: str) -> Sequence[Document]:
        """See ``Client.resume_offload``."""
        return BACKGROUND.run(self._client.resume_offload(name))

    def attempts(self, name: str) -> Sequence[Document]:
        """See ``Client.attempts``."""
        return BACKGROUND.run(self._client.attempts(name))

    def offloads(self, stream: str | None = None) -> Sequence[Document]:
        """See ``Client.offloads``."""
        return BACKGROUND.run(self._client.offloads(stream))

    def policy(self, name: str) -> Document:
        """See ``Client.policy``."""
        return BACKGROUND.run(self._client.policy(name))

    def set_policy(self, name: str, policy: Document) -> Document:
        """See ``Client.set_policy``."""
        return BACKGROUND.run(self._client.set_policy(name, policy))

    def change_policy(self, name: str, changes: Document) -> Document:
        """See ``Client.change_policy``."""
        return BACKGROUND.run(self._client.change_policy(name, changes))

    def level(self, namespace: str | None = None) -> Document:
        """See ``Client.level``."""
        return BACKGROUND.run(self._client.level(namespace))

    def set_level(self, namespace: str | None, policy: Document) -> Document:
        """See ``Client.set_level``."""
        return BACKGROUND.run(self._client.set_level(namespace, policy))

    def change_level(self, namespace: str | None, changes: Document) -> Document:
        """See ``Client.change_level``."""
        return BACKGROUND.run(self._client.change_level(namespace, changes))

    def explain(self, name: str) -> Document:
        """See ``Client.explain``."""
        return BACKGROUND.run(self._client.explain(name))

    def delete_stream(self, name: str) -> Document:
        """See ``Client.delete_stream``."""
        return BACKGROUND.run(self._client.delete_stream(name))
