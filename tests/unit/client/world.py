"""Ingest and reader as a client sees them, in memory: answers get lost, appends come late."""

import asyncio
import contextlib
import random
from uuid import UUID

from tests.unit.catalog.world import on_virtual_time
from tierlog.adapters.memory.clock import SimClock
from tierlog.adapters.memory.ids import SeededIds
from tierlog.adapters.memory.reads import MemoryReads
from tierlog.adapters.memory.streams import (
    MemoryAppendChannel,
    MemoryStream,
    MemoryStreamControl,
    MemoryStreams,
)
from tierlog.client.resuming import take_over
from tierlog.client.writer import StreamWriter, WriterLimits
from tierlog.format.entry import decode_entry
from tierlog.model.attributes import AttributeKey
from tierlog.model.errors import IndeterminateError, RetryableError, TierlogError
from tierlog.model.ids import StreamName
from tierlog.ports.streams import AttributeValues
from tierlog.wiring.compression import decompressors

__all__ = ["LOGS", "WRITER", "Service", "on_virtual_time", "resumed", "writer_of"]

LOGS = StreamName("logs")
WRITER = UUID(int=(9 << 64) + 9)
APPEND_S = 10.0


class Service:
    """The memory twins of ingest and reader with one stream, and switches for what goes wrong."""

    def __init__(self) -> None:
        self.streams = MemoryStreams()
        self.stream = self.streams.by_name[LOGS] = MemoryStream(name=LOGS)
        self._control = MemoryStreamControl(self.streams)
        self._channel = MemoryAppendChannel(self.streams)
        self._reads = MemoryReads(self.streams)
        self.ids = SeededIds(random.Random(1))
        self.up = True
        self.doubts = 0
        """How often a writer asked whether the owner is another one now."""
        self.hung_up = asyncio.Event()
        self.stale: list[dict[AttributeKey, int]] = []
        """What a former owner, who has not heard that it is none, answers first."""
        self.script: list[str | Exception] = []
        """What becomes of the next appends: ok, lost-landed, lost-gone, late (lost, and taken from
        the queue much later), refused, silent (no answer until the caller hangs up, then as if
        lost), or an exception to raise."""

    @property
    def ledgers(self) -> list[list[bytes]]:
        """The entries of each ledger."""
        return [ledger.entries for ledger in self.stream.ledgers]

    def lay(self, ledgers: list[list[bytes]]) -> None:
        """Put ledgers into the stream, all but the last one sealed."""
        for entries in ledgers:
            self.streams.seal(LOGS)
            self.streams.store(LOGS, entries)

    # StreamControl

    async def create_stream(self, stream, **shape):
        return await self._control.create_stream(stream, **shape)

    async def find_owner(self, stream):
        if not self.up:
            raise RetryableError("ingest is away", remedy="wait")
        return await self._control.find_owner(stream)

    async def seal(self, stream):
        await self.find_owner(stream)
        return await self._control.seal(stream)

    async def get_attributes(self, stream, keys):
        await self.find_owner(stream)
        if self.stale:
            values = self.stale.pop(0)
            return AttributeValues(values={k: values[k] for k in keys if k in values}, as_of=None)
        return await self._control.get_attributes(stream, keys)

    async def list_attributes(self, stream, **between):
        await self.find_owner(stream)
        return await self._control.list_attributes(stream, **between)

    # AppendChannel and OwnerConnections

    async def connect(self, stream, tasks):
        await self.find_owner(stream)
        return self

    async def close(self, *, drain_s_max=5.0):
        if drain_s_max == 0:
            self.hung_up.set()

    async def append(self, stream, draft, *, deadline_s, condition=None):
        fate = self.script.pop(0) if self.script else "ok"
        if isinstance(fate, Exception):
            raise fate
        if fate == "late":
            entries = [bytes(entry) for entry in draft.entries()]
            loop = asyncio.get_running_loop()
            loop.call_later(deadline_s - 1, self._land, stream, entries, condition)
        if fate in {"ok", "lost-landed"}:
            ranges = await self._channel.append(
                stream, draft, deadline_s=deadline_s, condition=condition
            )
            if fate == "ok":
                return ranges
        elif fate == "silent":
            self.hung_up.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(deadline_s):
                    await self.hung_up.wait()
        else:
            await asyncio.sleep(0.01)
        if fate == "refused":
            raise RetryableError("not now", remedy="again")
        raise IndeterminateError("the connection went before the answer", remedy="read back")

    # StreamReads

    async def read(self, stream, where, *, bytes_max, entries_max=None, wait_s=0.0):
        # In small pieces, so that a reader has to go on.
        return await self._reads.read(
            stream, where, bytes_max=bytes_max, entries_max=min(3, entries_max or 3), wait_s=wait_s
        )

    async def bounds(self, stream):
        return await self._reads.bounds(stream)

    def _land(self, stream, entries, condition):
        """Take an append from the queue whose caller is long gone."""
        with contextlib.suppress(TierlogError):
            self.streams.check(stream, entries, condition)
            self.streams.store(stream, entries)

    def events(self) -> list[bytes]:
        """Return all events of the stream, in order."""
        return [
            bytes(event)
            for entries in self.ledgers
            for entry in entries
            for event in decode_entry(entry).events(decompressors())
        ]


class _Owners:
    def __init__(self, service):
        self._service, self._epoch = service, -1

    async def moved(self, stream):
        self._service.doubts += 1
        await self._service.find_owner(stream)
        return self._service.stream.owner_epoch > self._epoch

    async def connect(self, stream, tasks):
        channel = await self._service.connect(stream, tasks)
        self._epoch = self._service.stream.owner_epoch
        return channel


def writer_of(
    service: Service,
    *,
    raw=False,
    plain=False,
    batch_bytes=30,
    retry_s_max=60.0,
    linger_s=0.0,
    **more,
):
    """Return a writer of about two ten-byte events a batch."""
    return StreamWriter(
        LOGS,
        writer_id=None if raw or plain else WRITER,
        raw=raw,
        connections=_Owners(service),
        clock=SimClock(),
        limits=WriterLimits(
            batch_bytes=batch_bytes,
            in_flight_bytes_max=1000,
            append_s_max=APPEND_S,
            retry_s_max=retry_s_max,
            linger_s=linger_s,
        ),
        **more,
    )


async def resumed(service: Service, **options):
    """Take the writer over and return it, to be entered."""
    taken = await take_over(
        LOGS,
        WRITER,
        owners=_Owners(service),
        control=service,
        clock=SimClock(),
        ids=service.ids,
        append_s_max=APPEND_S,
        retry_s_max=60.0,
    )
    return writer_of(service, taken=taken, **options)
