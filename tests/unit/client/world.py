"""Ingest and reader as a writer sees them, in memory, with answers that get lost."""

import asyncio
from uuid import UUID

from tests.unit.catalog.world import on_virtual_time
from tierlog.adapters.memory.clock import SimClock
from tierlog.client.resolve import ReadBack
from tierlog.client.writer import StreamWriter, WriterLimits
from tierlog.format.entry import decode_entry
from tierlog.format.frame import pack_entries
from tierlog.model.errors import IndeterminateError, RetryableError
from tierlog.model.ids import EntryId, LedgerId, NodeId, StreamName
from tierlog.model.position import AppendedRange, Edge, Position
from tierlog.ports.reads import FramesAnswer
from tierlog.ports.streams import OwnerInfo

__all__ = ["LOGS", "Service", "on_virtual_time", "writer_of"]

LOGS = StreamName("logs")
WRITER = UUID(int=9)
APPEND_S = 10.0


class Service:
    """A stream as a list of ledgers, with switches for what goes wrong."""

    def __init__(self) -> None:
        self.ledgers: list[list[bytes]] = [[]]
        self.epoch = 1
        self.up = True
        self.script: list[str | Exception] = []
        """What becomes of the next appends: ok, lost-landed, lost-gone, late, refused, or an
        exception to raise."""
        self.seals = 0
        self.late: list[bytes] = []
        self.connects = 0

    # StreamControl

    async def create_stream(self, stream, *, raw, policy, exist_ok):
        return True

    async def find_owner(self, stream):
        if not self.up:
            raise RetryableError("ingest is away", remedy="wait")
        return OwnerInfo(
            node_id=NodeId("n1"),
            wire_address="n1:1",
            grpc_address="n1:2",
            http_address="n1:3",
            owner_epoch=self.epoch,
            cluster_id=UUID(int=1),
        )

    async def seal(self, stream):
        await self.find_owner(stream)
        self.seals += 1
        if self.ledgers[-1]:
            self.ledgers.append([])

    # AppendChannel and OwnerConnections

    async def connect(self, stream, tasks):
        await self.find_owner(stream)
        self.connects += 1
        return self

    async def close(self, *, drain_s_max=5.0):
        pass

    async def append(self, stream, draft, *, deadline_s):
        fate = self.script.pop(0) if self.script else "ok"
        entries = [bytes(entry) for entry in draft.entries()]
        if isinstance(fate, Exception):
            raise fate
        if fate == "late":
            # The owner took it, and will store it at the end of its deadline.
            asyncio.get_running_loop().call_later(deadline_s - 1, self._store, entries)
        elif fate in {"ok", "lost-landed"}:
            self._store(entries)
        ledger, last = len(self.ledgers) - 1, len(self.ledgers[-1]) - 1
        await asyncio.sleep(0.01)
        if fate == "refused":
            raise RetryableError("not now", remedy="again")
        if fate != "ok":
            raise IndeterminateError("the connection went before the answer", remedy="read back")
        return [
            AppendedRange(
                ledger_id=LedgerId(ledger),
                first_entry_id=EntryId(last - len(entries) + 1),
                last_entry_id=EntryId(last),
            )
        ]

    def _store(self, entries):
        self.ledgers[-1] += entries

    # StreamReads

    async def read(self, stream, where, *, bytes_max, entries_max=None, wait_s=0.0):
        ledger, entry = (0, 0) if isinstance(where, Edge) else (where.ledger_id, where.entry_id)
        while ledger < len(self.ledgers) and entry >= len(self.ledgers[ledger]):
            ledger, entry = ledger + 1, 0
        if ledger >= len(self.ledgers):
            return FramesAnswer(resume=where)
        # In small pieces, so that reading back has to go on.
        entries = self.ledgers[ledger][entry : entry + min(3, entries_max or 3)]
        frames, _ = pack_entries(entries, entry)
        return FramesAnswer(
            resume=Position(LedgerId(ledger), EntryId(entry + len(entries))),
            ledger_id=LedgerId(ledger),
            first_entry_id=EntryId(entry),
            count=len(entries),
            frames=memoryview(bytes(frames)),
            tier="tier1",
        )

    async def bounds(self, stream):
        return Edge.EARLIEST, Edge.EARLIEST

    def events(self) -> list[bytes]:
        """Return all events of the stream, in order."""
        return [
            bytes(event)
            for ledger in self.ledgers
            for entry in ledger
            for event in decode_entry(entry).events()
        ]


class _Owners:
    def __init__(self, service, read_back):
        self._service, self._read_back = service, read_back

    async def connect(self, stream, tasks):
        channel = await self._service.connect(stream, tasks)
        self._read_back.owner_epoch = self._service.epoch
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
