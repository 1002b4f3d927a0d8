"""Many small entries over gRPC: within their room, and nobody else waits for them."""

import asyncio
import subprocess
import sys
from typing import Any

from tierlog.format.frame import pack_entries
from tierlog.model.ids import EntryId, LedgerId
from tierlog.model.position import Edge, Position
from tierlog.proto.v1 import reader_pb2 as pb
from tierlog_reader.chunk import Answer, Chunk
from tierlog_reader.grpc_server import ReaderServicer
from tierlog_reader.limits import ReadLimits
from tierlog_reader.memory import COPIES_OF_AN_ANSWER
from tierlog_reader.pages import OBJECT_BYTES
from tierlog_reader.places import Tier
from tierlog_reader.seek import TimeSeek
from tierlog_reader.sending import PIECE_BYTES
from tierlog_reader.served import ServedReads
from tierlog_reader.shares import Shares

MIB = 1024 * 1024
COUNT = 20_000
FRAME_LEN = 13


class Call:
    """A call that is over when the test says so."""

    def __init__(self):
        self.over = []

    def peer(self):
        return "ipv4:10.0.0.1:1"

    def add_done_callback(self, callback):
        self.over.append(callback)


class Source:
    """One ledger of entries of one byte, in two buffers for each answer."""

    async def read(self, stream, where, budget):
        assert stream == "small"
        first = where.entry_id if isinstance(where, Position) else 0
        count = min(COUNT - first, budget.entries_max, budget.bytes_max // FRAME_LEN)
        if count == 0:
            return Answer(chunk=None, resume=where)
        await budget.room.enter()
        parts = [(first, count // 2), (first + count // 2, count - count // 2)]
        frames = [bytes(pack_entries([b"x"] * many, begin)[0]) for begin, many in parts if many]
        chunk = Chunk(
            ledger_id=LedgerId(7),
            first_entry_id=EntryId(first),
            count=count,
            frames=tuple(frames),
            tier=Tier.TIER2,
        )
        return Answer(chunk=chunk, resume=chunk.end)

    async def bounds(self, stream):
        return Edge.EARLIEST, Position(LedgerId(7), EntryId(COUNT))


def servicer_of():
    shares = Shares(64 * MIB, wait_s_max=5)
    source: Any = Source()
    reads = ServedReads(source, shares)
    limits = ReadLimits(response_bytes_max=8 * MIB, wait_ms_max=0)
    return ReaderServicer(reads, TimeSeek(reads), limits), shares


async def test_an_answer_has_room_for_its_objects_and_gives_up_the_loop_between_them():
    servicer, shares = servicer_of()
    turns = 0

    async def others():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    found, resume = 0, "earliest"
    while found < COUNT:
        turns = 0
        asked = pb.ReadRequest(stream="small", bytes_max=MIB, resume=resume)
        call: Any = Call()
        answer = pb.ReadResponse.FromString(await servicer.Read(asked, call))
        count = len(answer.entries)
        assert count == min(COUNT - found, MIB // OBJECT_BYTES)
        assert turns >= count // 1000
        ids = [one.position.entry_id for one in answer.entries]
        assert ids == list(range(found, found + count))
        assert shares.used_bytes == count * (COPIES_OF_AN_ANSWER * FRAME_LEN + OBJECT_BYTES)
        call.over[0](call)
        assert shares.used_bytes == 0
        found, resume = found + count, answer.resume
        assert resume == f"7:{found}"
    task.cancel()
    last: Any = Call()
    one = await servicer.Read(pb.ReadRequest(stream="small", entries_max=1), last)
    assert len(pb.ReadResponse.FromString(one).entries) == 1


async def test_what_follows_comes_in_pieces_of_so_many_objects():
    servicer, shares = servicer_of()
    asked = pb.FollowRequest(stream="small", bytes_max=MIB, stop_at_end=True)
    call: Any = Call()
    pieces = [pb.ReadResponse.FromString(one) async for one in servicer.Follow(asked, call)]
    counts = [len(one.entries) for one in pieces]
    assert sum(counts) == COUNT
    assert max(counts) <= PIECE_BYTES // OBJECT_BYTES
    assert shares.used_bytes == 0
    assert shares.most_used_bytes <= (COPIES_OF_AN_ANSWER + 1) * MIB


# In a process of its own: what is freed again shows in nothing but the most that was resident.
RESIDENT = """
import asyncio, pathlib, re
import numpy as np
from tierlog.model.ids import EntryId, LedgerId
from tierlog_reader import grpc_server
from tierlog_reader.chunk import Answer, Chunk
from tierlog_reader.places import Tier

def most():
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\\s*([0-9]+)", status)[1])

async def sent(answer):
    return len(await grpc_server._response(answer))

def made(count):
    # Packed as others do it, they would leave more free memory behind than is measured here.
    frames = np.zeros(count, np.dtype([("length", ">i4"), ("id", ">i8"), ("data", "u1")]))
    frames["length"], frames["id"] = 1, np.arange(count)
    chunk = Chunk(ledger_id=LedgerId(7), first_entry_id=EntryId(0), count=count,
                  frames=(frames.tobytes(),), tier=Tier.TIER2)
    answer = Answer(chunk=chunk, resume=chunk.end)
    before = most()
    asyncio.run(sent(answer))
    return most() - before

made(100)
print(made(131072))
"""


def test_what_is_made_of_small_entries_takes_no_more_than_its_room():
    grown = subprocess.run(
        [sys.executable, "-c", RESIDENT], check=True, capture_output=True, text=True
    )
    assert int(grown.stdout) < 131072 * (FRAME_LEN + OBJECT_BYTES)
