"""Following over gRPC: pieces that go on where the one before ended, and clients that take nothing.

Design: reliability.md C15 (slow and stuck readers).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import Any

import grpc
import pytest

from tests.contracts.proxy import Proxy
from tests.unit.reader.test_source import numbered
from tests.unit.reader.test_tail import tails_of
from tests.unit.reader.world import STREAM, ReaderWorld
from tierlog.proto.v1 import reader_pb2 as pb
from tierlog.proto.v1 import reader_pb2_grpc
from tierlog.runtime.rpc import MESSAGE_BYTES_MAX, serve_grpc
from tierlog_reader.grpc_server import BYTES_MAX, REQUEST_BYTES_MAX, ReaderServicer
from tierlog_reader.limits import ReadLimits
from tierlog_reader.memory import COPIES_OF_AN_ANSWER
from tierlog_reader.seek import TimeSeek
from tierlog_reader.sending import PIECE_BYTES
from tierlog_reader.served import ServedReads
from tierlog_reader.shares import Shares

MIB = 1024 * 1024
ENTRIES = numbered(0, 3000, size=2000)


@contextlib.asynccontextmanager
async def serving(entries, *, send_s_max, proxies=None, wait_ms_max=30_000):
    """Give a stub of a reader of ``entries``, and its shares; one of ``proxies`` is between."""
    world = ReaderWorld()
    await world.start(raw=True)
    await world.opened(entries)
    shares = Shares(64 * MIB, wait_s_max=5)
    limits = ReadLimits(response_bytes_max=8 * MIB, wait_ms_max=wait_ms_max, send_s_max=send_s_max)
    async with world.reader(tails=tails_of()) as source:
        reads = ServedReads(source, shares)
        servicer = ReaderServicer(reads, TimeSeek(reads), limits)
        async with serve_grpc(
            servicer.add_to,
            host="127.0.0.1",
            port=0,
            drain_s_max=0.5,
            request_bytes_max=REQUEST_BYTES_MAX,
            send_s_max=send_s_max,
        ) as port:
            # A window that stays as it is: how much a client takes unasked is known.
            options = [
                ("grpc.http2.bdp_probe", 0),
                ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
            ]
            async with contextlib.AsyncExitStack() as stack:
                address = f"127.0.0.1:{port}"
                if proxies is not None:
                    proxies.append(await stack.enter_async_context(Proxy(address)))
                    address = proxies[0].address
                channel = grpc.aio.insecure_channel(address, options=options)
                await stack.enter_async_context(channel)
                yield reader_pb2_grpc.ReaderStub(channel), shares


def follow(**named) -> pb.FollowRequest:
    return pb.FollowRequest(stream=STREAM, bytes_max=8 * MIB, stop_at_end=True, **named)


async def taken(call: Any) -> tuple[list[pb.ReadResponse], grpc.aio.AioRpcError]:
    """Take what is left of a call, and how it ends."""
    pieces: list[pb.ReadResponse] = []
    try:
        while (one := await call.read()) is not grpc.aio.EOF:
            pieces.append(one)
    except grpc.aio.AioRpcError as error:
        return pieces, error
    raise AssertionError("it ended as if all had been sent")


async def test_an_answer_comes_in_pieces_that_each_say_where_to_go_on():
    async with serving(ENTRIES, send_s_max=30) as (stub, shares), asyncio.timeout(60):
        pieces = [one async for one in stub.Follow(follow())]
        assert [entry.data for one in pieces for entry in one.entries] == ENTRIES
        assert len(pieces) > 10
        assert max(one.ByteSize() for one in pieces) < 1.1 * PIECE_BYTES
        for one, after in itertools.pairwise(pieces):
            assert one.next == after.entries[0].position
            assert one.resume == f"{one.next.ledger_id}:{one.next.entry_id}"
        # Whoever breaks off goes on there, and whoever says where to stop stops there.
        middle = pieces[5]
        rest = [
            entry.data
            async for one in stub.Follow(follow(resume=middle.resume))
            for entry in one.entries
        ]
        before = [
            entry.data
            async for one in stub.Follow(follow(until=middle.next))
            for entry in one.entries
        ]
        assert before + rest == ENTRIES
        assert shares.used_bytes == 0


async def test_who_stops_at_the_end_does_not_wait_there_for_more():
    async with serving(ENTRIES[:3], send_s_max=30) as (stub, _), asyncio.timeout(5):
        found = [entry.data async for one in stub.Follow(follow()) for entry in one.entries]
    assert found == ENTRIES[:3]


async def test_who_follows_does_not_ask_without_a_pause_where_no_read_may_wait(monkeypatch):
    reads, read = [], ServedReads.read

    async def counted(self, *asked, **named):
        reads.append(asked)
        return await read(self, *asked, **named)

    monkeypatch.setattr(ServedReads, "read", counted)
    async with serving(ENTRIES[:3], send_s_max=30, wait_ms_max=0) as (stub, _):
        call = stub.Follow(pb.FollowRequest(stream=STREAM))
        assert len((await call.read()).entries) == 3
        await asyncio.sleep(0.7)
        assert len(reads) <= 2
        call.cancel()


LONGEST = BYTES_MAX - 100


async def test_entries_that_each_fit_a_message_are_given_however_many_were_read_at_once():
    entries = [b"a" * 900_000, b"b" * LONGEST, b"c" * 7 * MIB, b"d" * 7 * MIB, b"e"]
    async with serving(entries, send_s_max=30) as (stub, shares), asyncio.timeout(60):
        followed = [one async for one in stub.Follow(follow())]
        assert [entry.data for one in followed for entry in one.entries] == entries
        found: list[bytes] = []
        resume = "earliest"
        while len(found) < len(entries):
            asked = pb.ReadRequest(stream=STREAM, bytes_max=8 * MIB, resume=resume)
            answer = await stub.Read(asked)
            assert 0 < sum(len(one.data) for one in answer.entries) <= BYTES_MAX
            found += [one.data for one in answer.entries]
            resume = answer.resume
            assert f"{answer.next.ledger_id}:{answer.next.entry_id}" == resume
        assert found == entries
        while shares.used_bytes:  # a call is over a moment after its answer is there
            await asyncio.sleep(0.01)


async def test_what_is_before_an_entry_that_fits_no_message_is_given_and_then_it_is_refused():
    entries = [b"a" * 900_000, b"b" * (BYTES_MAX + 1), b"c"]
    async with serving(entries, send_s_max=30) as (stub, _), asyncio.timeout(60):
        pieces, error = await taken(stub.Follow(follow()))
        assert [entry.data for one in pieces for entry in one.entries] == entries[:1]
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error
        answer = await stub.Read(pb.ReadRequest(stream=STREAM, bytes_max=8 * MIB))
        assert [one.data for one in answer.entries] == entries[:1]
        with pytest.raises(grpc.aio.AioRpcError, match="bytes"):
            await stub.Read(pb.ReadRequest(stream=STREAM, resume=answer.resume))


async def test_entries_without_bytes_are_entries_too():
    entries = [b""] * 5
    async with serving(entries, send_s_max=30) as (stub, _), asyncio.timeout(60):
        found = [entry.data async for one in stub.Follow(follow()) for entry in one.entries]
        assert found == entries


@pytest.mark.covers("C15")
async def test_who_takes_nothing_is_left_and_its_room_is_free_again_but_for_one_piece():
    async with serving(ENTRIES, send_s_max=1.0) as (stub, shares), asyncio.timeout(60):
        call: Any = stub.Follow(follow())
        first = await call.read()
        held = 0
        while shares.used_bytes == 0 or held < 2 * MIB:
            held = max(held, shares.used_bytes)
            await asyncio.sleep(0.01)
        while shares.used_bytes > 1.2 * COPIES_OF_AN_ANSWER * PIECE_BYTES:
            await asyncio.sleep(0.05)
        assert shares.used_bytes > 0, "what the transport still has counts until the call is over"
        # It comes back: what was on its way, then why there is no more, and where to go on.
        pieces, error = await taken(call)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "taken" in str(error.details())
        found = [entry.data for one in (first, *pieces) for entry in one.entries]
        while shares.used_bytes:
            await asyncio.sleep(0.01)
        assert 0 < len(found) < len(ENTRIES)
        rest = [
            entry.data
            async for one in stub.Follow(follow(resume=(first, *pieces)[-1].resume))
            for entry in one.entries
        ]
        assert found + rest == ENTRIES


async def test_who_takes_nothing_and_goes_leaves_no_room_behind():
    async with serving(ENTRIES, send_s_max=1.0) as (stub, shares), asyncio.timeout(60):
        for patience_s in (0.3, 2.0):  # before it is left, and after
            call: Any = stub.Follow(follow())
            await call.read()
            while shares.used_bytes == 0:
                await asyncio.sleep(0.01)
            await asyncio.sleep(patience_s)
            call.cancel()
            while shares.used_bytes:
                await asyncio.sleep(0.01)


async def test_a_request_of_the_reader_is_small():
    async with serving(ENTRIES, send_s_max=30) as (stub, _), asyncio.timeout(60):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Read(pb.ReadRequest(stream="x" * 2 * REQUEST_BYTES_MAX))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("how", ["it cancels", "its connection breaks", "it vanishes"])
async def test_who_goes_while_one_answer_is_on_its_way_leaves_no_room_behind(how):
    """Its machine may be gone without a word: then nobody ends the call but its deadline."""
    proxies: list[Proxy] = []
    async with (
        serving(ENTRIES, send_s_max=1.0, proxies=proxies) as (stub, shares),
        asyncio.timeout(60),
    ):
        await stub.GetBounds(pb.GetBoundsRequest(stream=STREAM))
        proxies[0].hold()
        call: Any = stub.Read(pb.ReadRequest(stream=STREAM, bytes_max=8 * MIB), timeout=3600)
        while shares.used_bytes <= 8 * MIB:  # the transport has it
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        if how == "it cancels":
            call.cancel()
        elif how == "its connection breaks":
            proxies[0].cut()
        async with asyncio.timeout(40):
            while shares.used_bytes:
                await asyncio.sleep(0.05)
        call.cancel()


async def test_from_latest_the_first_message_says_where_that_is():
    async with serving(ENTRIES[:3], send_s_max=30) as (stub, _), asyncio.timeout(60):
        (told,) = [one async for one in stub.Follow(follow(resume="latest"))]
    assert not told.entries
    assert told.resume == f"{told.next.ledger_id}:3"
