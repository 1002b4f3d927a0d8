"""What a client takes of a reader's answer: frames whose checksum says that they arrived whole."""

import contextlib
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from tierlog.adapters.rpc.reader import HttpReads
from tierlog.adapters.rpc.rest import PIECED_MIN
from tierlog.format.checksum import crc32c
from tierlog.format.frame import pack_entries
from tierlog.model.errors import CorruptError, RetryableError
from tierlog.model.ids import LedgerId, StreamName
from tierlog.model.position import Edge, Position, parse_position

LOOPBACK = "127.0.0.1"
SMALL, _ = pack_entries([b"one", b"two"], 5)
# Received into a piece that is lent.
LARGE, _ = pack_entries([b"x" * PIECED_MIN, b"y"], 5)


def headers_of(frames: bytes) -> dict[str, str]:
    return {
        "Tierlog-Crc32c": f"{crc32c(frames):08x}",
        "Tierlog-Ledger-Id": "12",
        "Tierlog-First-Entry-Id": "5",
        "Tierlog-Entry-Count": "2",
        "Tierlog-Next": "12:7",
        "Tierlog-Tier": "tier2",
        "Tierlog-Raw": "0",
    }


@contextlib.asynccontextmanager
async def reads_of(body: bytes, headers: dict[str, str]) -> AsyncIterator[HttpReads]:
    """A reader that gives one answer, whatever it is asked."""

    async def runs(_: web.Request) -> web.Response:
        return web.Response(body=body, headers=headers)

    app = web.Application()
    app.router.add_get("/{path:.*}", runs)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, LOOPBACK, 0).start()
    reads = HttpReads(f"{LOOPBACK}:{runner.addresses[0][1]}", timeout_s=10.0)
    try:
        yield reads
    finally:
        await reads.close()
        await runner.cleanup()


@pytest.mark.parametrize("frames", [SMALL, LARGE])
async def test_frames_that_were_damaged_on_their_way_are_refused(frames: bytes) -> None:
    frames = bytes(frames)
    async with reads_of(frames, headers_of(frames)) as reads:
        answer = await reads.read(StreamName("s"), Edge.EARLIEST, bytes_max=1)
        assert (bytes(answer.frames), answer.count, answer.resume) == (
            frames,
            2,
            parse_position("12:7"),
        )
    for at in (0, len(frames) // 2, len(frames) - 1):
        damaged = bytearray(frames)
        damaged[at] ^= 1
        async with reads_of(bytes(damaged), headers_of(frames)) as reads:
            with pytest.raises(CorruptError, match="12:5 on were damaged on their way") as caught:
                await reads.read(StreamName("s"), Edge.EARLIEST, bytes_max=1)
            assert caught.value.details == {"ledger_id": "12", "entry_id": "5"}


@pytest.mark.parametrize("left_out", sorted(headers_of(b"")))
async def test_an_answer_without_a_header_of_a_read_is_no_readers(left_out: str) -> None:
    headers = headers_of(bytes(SMALL))
    del headers[left_out]
    async with reads_of(bytes(SMALL), headers) as reads:
        with pytest.raises(RetryableError, match=f"without the headers of a read: '{left_out}'"):
            await reads.read(StreamName("s"), Position.parse("12:5"), bytes_max=1)


@pytest.mark.parametrize(
    "body",
    [
        *(b"{}", b"[]", b"null", b'"ok"', b"1"),
        b'{"first": 1, "next": 1, "position": [], "trimmed_end": null, "incarnation": 1}',
    ],
)
async def test_json_of_something_else_is_no_readers_answer(body: bytes) -> None:
    stream = StreamName("s")
    async with reads_of(body, {"Content-Type": "application/json"}) as reads:
        for asked, what in (
            (reads.bounds(stream), "a stream's bounds"),
            (reads.ledgers(stream, LedgerId(0)), "a stream's ledgers"),
            (reads.position_at(stream, "2026-01-31T12:00:00Z"), "a position"),
        ):
            with pytest.raises(RetryableError, match=f"answered without {what}: ") as caught:
                await asked
            assert "address is that of a Tierlog reader" in caught.value.remedy
