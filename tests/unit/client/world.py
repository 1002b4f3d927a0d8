"""Ingest and reader as a writer sees them, in memory, with answers that get lost."""

import asyncio
import contextlib
from uuid import UUID

from tests.unit.catalog.world import on_virtual_time
from tierlog.adapters.memory.clock import SimClock
from tierlog.adapters.memory.reads import MemoryReads
from tierlog.adapters.memory.streams import (
    MemoryAppendChannel,
    MemoryStream,
    MemoryStreamControl,
    MemoryStreams,
)
from tierlog.client.resolve import ReadBack
from tierlog.client.writer import StreamWriter, WriterLimits
from tierlog.format.entry import decode_entry
from tierlog.model.errors import IndeterminateError, RetryableError
from tierlog.model.ids import StreamName
from tierlog.model.position import Edge

__all__ = ["LOGS", "Service", "on_virtual_time", "writer_of"]

LOGS = StreamName("logs")
WRITER = UUID(int=9)
APPEND_S = 10.0


class Service:
    """The memory twins of ingest and reader with one stream, and switches for what goes wrong."""

    def __init__(self) -> None:
        self.streams = MemoryStreams()
        self.stream = self.streams.by_name[LOGS] = MemoryStream(name=LOGS)
        self._control = MemoryStreamControl(self.streams)
        self._channel = MemoryAppendChannel(self.streams)
        self._reads = MemoryReads(self.streams)
        self.up = True
        self.doubts = 0
        """How often a writer asked whether the owner is another one now."""
        self.hung_up = asyncio.Event()
        self.script: list[str | Exception] = []
        """What becomes of the next appends: ok, lost-landed, lost-gone, late, refused, silent (no
        answer until the caller hangs up, then as if lost), or an exception to raise."""

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

    # AppendChannel and OwnerConnections

    async def connect(self, stream, tasks):
        await self.find_owner(stream)
        return self

    async def close(self, *, drain_s_max=5.0):
        if drain_s_max == 0:
            self.hung_up.set()

    async def append(self, stream, draft, *, deadline_s):
        fate = self.script.pop(0) if self.script else "ok"
        if isinstance(fate, Exception):
            raise fate
        if fate == "late":
            # The owner took it, and will store it at the end of its deadline.
            entries = [bytes(entry) for entry in draft.entries()]
            loop = asyncio.get_running_loop()
            loop.call_later(deadline_s - 1, self.streams.store, stream, entries)
        if fate in {"ok", "lost-landed"}:
            ranges = await self._channel.append(stream, draft, deadline_s=deadline_s)
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
        # In small pieces, so that reading back has to go on.
        return await self._reads.read(
            stream, where, bytes_max=bytes_max, entries_max=min(3, entries_max or 3), wait_s=wait_s
        )

    async def bounds(self, stream):
        return await self._reads.bounds(stream)

    def events(self) -> list[bytes]:
        """Return all events of the stream, in order."""
        return [
            bytes(event)
            for entries in self.ledgers
            for entry in entries
            for event in decode_entry(entry).events()
        ]


class _Owners:
    def __init__(self, service, read_back):
        self._service, self._read_back = service, read_back

    async def moved(self, stream):
        self._service.doubts += 1
        await self._service.find_owner(stream)
        return self._service.stream.owner_epoch > self._read_back.owner_epoch

    async def connect(self, stream, tasks):
        channel = await self._service.connect(stream, tasks)
        self._read_back.owner_epoch = self._service.stream.owner_epoch
        return channel


def writer_of(service: Service, *, raw=False, batch_bytes=30, retry_s_max=60.0, **more):
    """Return a writer of about two ten-byte events a batch."""
    read_back = ReadBack(LOGS, WRITER, control=service, reads=service, append_s_max=APPEND_S)
    return StreamWriter(
        LOGS,
        writer_id=WRITER,
        raw=raw,
        start=Edge.EARLIEST,
        connections=_Owners(service, read_back),
        resolve=read_back.settle,
        clock=SimClock(),
        limits=WriterLimits(
            batch_bytes=batch_bytes,
            in_flight_bytes_max=1000,
            append_s_max=APPEND_S,
            retry_s_max=retry_s_max,
        ),
        **more,
    )
