"""An answer whose first byte can't go out is left like any other: its room is free again.

A client that sends a request behind another, and takes nothing of the first answer, holds up the
head of the second.
"""

import asyncio

import pytest

from tests.unit.reader.world import on_virtual_time
from tierlog_reader.sending import PIECE_BYTES, HeldResponse, HeldStream
from tierlog_reader.served import HeldRoom
from tierlog_reader.shares import Shares

SCOPE = {"type": "http", "asgi": {"spec_version": "2.3"}, "method": "GET", "path": "/"}


async def never(*_):
    await asyncio.Event().wait()


async def in_time(answer):
    async with asyncio.timeout(11):
        await answer(SCOPE, never, never)


@on_virtual_time
async def test_an_answer_that_can_not_begin_gives_its_room_back():
    shares = Shares(10_000_000, wait_s_max=5)
    room = HeldRoom(shares, "client", 1_000_000)
    await room.enter()
    assert shares.used_bytes > 0
    await in_time(HeldResponse(b"frames", room, send_s_max=10, headers={}, media_type="a/b"))
    assert shares.used_bytes == 0


@on_virtual_time
async def test_a_slow_client_has_its_time_for_each_piece_and_is_left_when_it_takes_none():
    shares = Shares(10_000_000, wait_s_max=5)
    taken = 0

    async def slow(message):
        nonlocal taken
        await asyncio.sleep(6 if taken < 3 * PIECE_BYTES else 11)
        taken += len(message.get("body", b""))

    async def to_slow(size):
        nonlocal taken
        taken, room = 0, HeldRoom(shares, "client", 5_000_000)
        await room.enter()
        answer = HeldResponse(bytes(size), room, send_s_max=10, headers={}, media_type="a/b")
        async with asyncio.timeout(60):
            await answer(SCOPE, never, slow)
        assert shares.used_bytes == 0
        return taken

    assert await to_slow(3 * PIECE_BYTES) == 3 * PIECE_BYTES
    assert await to_slow(4 * PIECE_BYTES) == 3 * PIECE_BYTES


@pytest.mark.parametrize("sent_before", [0, 1, 2])
@on_virtual_time
async def test_a_stream_that_can_not_begin_or_go_on_or_end_is_closed(sent_before):
    closed = False
    sent = list[object]()

    async def pieces():
        nonlocal closed
        try:
            yield b"data: 1\n\n"
        finally:
            closed = True

    async def send(message):
        if len(sent) == sent_before:
            await never()
        sent.append(message)

    answer = HeldStream(pieces(), send_s_max=10, media_type="text/event-stream")
    async with asyncio.timeout(11):
        await answer(SCOPE, never, send)
    assert len(sent) == sent_before
    assert closed == (sent_before > 0), "what never began has nothing to close"
    assert [one async for one in answer.body_iterator] == [], "and begins no more"
