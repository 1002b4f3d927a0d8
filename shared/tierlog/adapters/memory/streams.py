"""The ports of ingest in memory: streams, their owner, and appends to them.

Owns the streams that the twins of the reader and of the administration look at too. Does not
own what goes wrong with answers: a test lays that over it.

Invariants:
    * Ledger ids grow over all streams; at most the last ledger of a stream is open.
    * A ledger is opened by the first append to it, so that none is empty.
    * ``changed`` is set, and replaced, at every append and seal.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from uuid import UUID

from tierlog.catalog.streams import stream_not_found
from tierlog.format.attribute_changes import (
    Failed,
    change_in_stream,
    change_of,
    changed,
    check_shape,
    failed_check,
    failed_position,
    replayed,
)
from tierlog.format.run import Run
from tierlog.model.attributes import (
    CREATION_TIME,
    EVENT_COUNT,
    AppendCondition,
    AttributeKey,
    IndexRoot,
)
from tierlog.model.core_attributes import derived
from tierlog.model.errors import IndeterminateError, Reason, RefusedError, RetryableError
from tierlog.model.ids import EntryId, LedgerId, NodeId, StreamName, stream_name
from tierlog.model.partitions import is_partitioned, partition_names
from tierlog.model.policy import NO_LEVELS, Policy
from tierlog.model.position import AppendedRange, Edge, Position
from tierlog.model.stream import OffloadPause
from tierlog.ports.streams import (
    ATTRIBUTES_MAX,
    FIRST_KEY,
    LAST_KEY,
    AttributeValues,
    OwnerInfo,
)

NODE = NodeId("memory")


@dataclass(slots=True, kw_only=True)
class MemoryLedger:
    """A ledger; ``offloaded``: tier 2 has it too."""

    ledger_id: LedgerId
    entries: list[bytes]
    closed: bool = False
    offloaded: bool = False

    @property
    def end(self) -> Position:
        """Right behind the last entry."""
        return Position(self.ledger_id, EntryId(len(self.entries)))


@dataclass(slots=True, kw_only=True)
class MemoryStream:
    """A stream; ``owner`` other than ``NODE``: another node's, which takes its appends."""

    name: StreamName
    raw: bool = False
    policy: Policy = Policy()
    owner: NodeId = NODE
    owner_epoch: int = 1
    ledgers: list[MemoryLedger] = field(default_factory=list)
    partitions: int = 0
    pause: OffloadPause | None = None
    attributes: dict[AttributeKey, int] = field(default_factory=dict)
    """As of the last entry, but for what is derived."""

    @property
    def last(self) -> Position | None:
        """The last entry; None: there is none."""
        end = self.ledgers[-1].end if self.ledgers else None
        return Position(end.ledger_id, EntryId(end.entry_id - 1)) if end is not None else None


class MemoryStreams:
    """All streams of one cluster."""

    def __init__(self) -> None:
        self.by_name: dict[StreamName, MemoryStream] = {}
        self.levels = NO_LEVELS
        self.changed = asyncio.Event()
        self._ledger_count = 0

    def __repr__(self) -> str:
        return f"<MemoryStreams {len(self.by_name)} streams, {self._ledger_count} ledgers>"

    def stream(self, name: StreamName) -> MemoryStream:
        """Return a stream, or raise STREAM_NOT_FOUND."""
        found = self.by_name.get(stream_name(name))
        if found is None:
            raise stream_not_found(name)
        return found

    def written(self, name: StreamName) -> MemoryStream:
        """Return a stream that has entries itself, or raise PARTITIONED or STREAM_NOT_FOUND."""
        found = self.stream(name)
        if found.partitions:
            raise is_partitioned(name, found.partitions)
        return found

    def store(self, name: StreamName, entries: list[bytes]) -> AppendedRange:
        """Put entries behind the last one, in the open ledger or in a new one."""
        ledgers = self.written(name).ledgers
        if not ledgers or ledgers[-1].closed:
            ledgers.append(MemoryLedger(ledger_id=LedgerId(self._ledger_count), entries=[]))
            self._ledger_count += 1
        ledger = ledgers[-1]
        first = len(ledger.entries)
        ledger.entries += entries
        if not self.written(name).raw:
            _count_in(self.written(name).attributes, entries)
        self._wake()
        return AppendedRange(
            ledger_id=ledger.ledger_id,
            first_entry_id=EntryId(first),
            last_entry_id=EntryId(len(ledger.entries) - 1),
        )

    def check(
        self, name: StreamName, entries: list[bytes], condition: AppendCondition | None
    ) -> None:
        """Raise what an append of these entries would be refused with."""
        found = self.written(name)
        if found.raw and condition is not None:
            raise _is_raw(name)
        changes = [] if found.raw else [change_of(entry) for entry in entries]
        if changes:
            check_shape(changes, condition)
        for change in changes:
            number = condition.last_event_number if condition is not None else None
            if change is not None:
                made = changed(change, found.attributes.get, last_event_number=number)
                if isinstance(made, Failed):
                    raise failed_check(made, writer=change.writer)
        wanted = condition.after if condition is not None else None
        if wanted is not None and wanted != (found.last or Edge.EARLIEST):
            raise failed_position(wanted, found.last)

    def attributes(self, name: StreamName) -> AttributeValues:
        """Return all attributes of a stream, as its owner would; here are no clock and no index."""
        found = self.written(name)
        if found.raw:
            raise _is_raw(name)
        values = {
            EVENT_COUNT: 0,
            CREATION_TIME: 0,
            **derived(name, found.policy, self.levels, IndexRoot()),
            **found.attributes,
        }
        return AttributeValues(
            values={key: values[key] for key in sorted(values)}, as_of=found.last
        )

    def seal(self, name: StreamName) -> LedgerId | None:
        """Close the open ledger; None when none was open."""
        ledgers = self.written(name).ledgers
        if not ledgers or ledgers[-1].closed:
            return None
        ledgers[-1].closed = True
        self._wake()
        return ledgers[-1].ledger_id

    def _wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


def _count_in(attributes: dict[AttributeKey, int], entries: list[bytes]) -> None:
    for change in map(change_in_stream, entries):
        if change is not None:
            attributes[EVENT_COUNT] = attributes.get(EVENT_COUNT, 0) + change.event_count
            attributes |= replayed(change, attributes.get)


class MemoryStreamControl:
    """``StreamControl`` over streams in memory."""

    def __init__(self, streams: MemoryStreams) -> None:
        self._streams = streams

    async def create_stream(
        self,
        stream: StreamName,
        *,
        raw: bool,
        policy: Policy | None,
        exist_ok: bool,
        partitions: int = 0,
    ) -> bool:
        name = stream_name(stream)
        wanted = policy if policy is not None else Policy()
        self._streams.levels.check(name, wanted)
        found = self._streams.by_name.get(name)
        if found is None:
            for one in partition_names(name, partitions) if partitions else ():
                await self.create_stream(one, raw=raw, policy=policy, exist_ok=True)
            self._streams.by_name[name] = MemoryStream(
                name=name, raw=raw, policy=wanted, partitions=partitions
            )
            return True
        if found.partitions and not partitions and found.raw == raw:
            raise is_partitioned(name, found.partitions)
        shape = (raw, partitions) == (found.raw, found.partitions)
        same = shape and (policy is None or found.policy == policy)
        if not exist_ok or not same:
            raise RefusedError(
                f"stream {name} exists already",
                remedy="Use another name, or set exist_ok and leave its shape as it is",
            )
        return False

    async def find_owner(self, stream: StreamName) -> OwnerInfo:
        found = self._streams.written(stream)
        return OwnerInfo(
            node_id=found.owner,
            wire_address=f"{found.owner}:1",
            grpc_address=f"{found.owner}:2",
            http_address=f"{found.owner}:3",
            owner_epoch=found.owner_epoch,
            cluster_id=UUID(int=1),
        )

    async def seal(self, stream: StreamName) -> LedgerId | None:
        return self._streams.seal(stream)

    async def get_attributes(
        self, stream: StreamName, keys: Sequence[AttributeKey]
    ) -> AttributeValues:
        found = self._streams.attributes(stream)
        values = {key: found.values[key] for key in sorted(keys) if key in found.values}
        return AttributeValues(values=values, as_of=found.as_of)

    async def list_attributes(
        self,
        stream: StreamName,
        *,
        first: AttributeKey = FIRST_KEY,
        last: AttributeKey = LAST_KEY,
        limit: int = ATTRIBUTES_MAX,
    ) -> AttributeValues:
        found = self._streams.attributes(stream)
        within = [(key, value) for key, value in found.values.items() if first <= key <= last]
        return AttributeValues(values=dict(within[:limit]), as_of=found.as_of)

    async def close(self) -> None:
        pass


class MemoryAppendChannel:
    """``AppendChannel`` over streams in memory; an answer takes ``delay_s``."""

    def __init__(self, streams: MemoryStreams, *, delay_s: float = 0.01) -> None:
        self._streams = streams
        self._delay_s = delay_s
        self._closing = False
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._closed = asyncio.Event()

    async def append(
        self,
        stream: StreamName,
        draft: Run,
        *,
        deadline_s: float,
        condition: AppendCondition | None = None,
    ) -> list[AppendedRange]:
        if self._closing:
            raise RetryableError("the connection was closed here", remedy="Connect again")
        found = self._streams.written(stream)
        if found.owner != NODE:
            raise RetryableError(
                f"stream {stream} is owned by {found.owner}",
                reason=Reason.NOT_OWNER,
                remedy="Nothing was appended; find the stream's owner and retry",
                details={"owner": found.owner, "owner_epoch": str(found.owner_epoch)},
            )
        entries = [bytes(entry) for entry in draft.entries()]
        self._streams.check(stream, entries, condition)
        stored = self._streams.store(stream, entries)
        self._in_flight += 1
        self._idle.clear()
        try:
            async with asyncio.timeout(min(deadline_s, self._delay_s)):
                await self._closed.wait()
        except TimeoutError:
            if deadline_s < self._delay_s:
                raise _no_answer() from None
            return [stored]
        else:
            raise _no_answer()
        finally:
            self._in_flight -= 1
            if self._in_flight == 0:
                self._idle.set()

    async def close(self, *, drain_s_max: float = 5.0) -> None:
        self._closing = True
        if self._in_flight:
            try:
                async with asyncio.timeout(drain_s_max):
                    await self._idle.wait()
            except TimeoutError:
                pass  # what is left ends as indeterminate
        self._closed.set()


def _is_raw(name: StreamName) -> RefusedError:
    return RefusedError(
        f"stream {name} is raw and has no attributes",
        remedy="Append without a condition, or create a stream that is not raw",
    )


def _no_answer() -> IndeterminateError:
    return IndeterminateError("an append has no answer", remedy="Read back what is there")
