"""Where the body of an HTTP answer is received to: memory that is used again, or its own."""

import asyncio
import contextlib
import gzip
import random
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from aiohttp.typedefs import Handler

from tierlog.adapters.pieces import Pieces
from tierlog.adapters.rpc.rest import PIECED_MIN, RestService
from tierlog.model.errors import Reason, RefusedError, RetryableError
from tierlog.runtime.errors import problem_of

LOOPBACK = "127.0.0.1"
PIECE_BYTES = 4 * PIECED_MIN
BODY = random.Random(1).randbytes(PIECE_BYTES + 1)


async def body(request: web.Request) -> web.StreamResponse:
    length = int(request.query["length"])
    if request.query.get("how") == "coded":
        coded = gzip.compress(BODY[:length])
        return web.Response(body=coded, headers={"Content-Encoding": "gzip"})
    if request.query.get("how") == "refused":
        error = RefusedError("x" * length, reason=Reason.STREAM_NOT_FOUND, remedy="none")
        text = problem_of(error).model_dump_json()
        return web.Response(status=404, text=text, content_type="application/problem+json")
    response = web.StreamResponse(headers={"Content-Length": str(length)})
    await response.prepare(request)
    await response.write(BODY[: length // 2])
    if request.query.get("how") == "cut":
        assert request.transport is not None
        request.transport.abort()
        return response
    await asyncio.sleep(0.01)
    await response.write(BODY[length // 2 : length])
    return response


@contextlib.asynccontextmanager
async def served(
    held: Handler | None = None, *, timeout_s: float = 10.0
) -> AsyncIterator[RestService]:
    app = web.Application()
    app.router.add_get("/body", body)
    if held is not None:
        app.router.add_get("/held", held)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, LOOPBACK, 0)
    await site.start()
    address = f"{LOOPBACK}:{runner.addresses[0][1]}"
    service = RestService(address, name="test", timeout_s=timeout_s)
    try:
        yield service
    finally:
        await service.close()
        await runner.cleanup()


def asked(length: int, how: str = "") -> dict[str, str]:
    return {"length": str(length), "how": how}


@pytest.mark.parametrize("length", [0, 1, PIECED_MIN - 1, PIECED_MIN, PIECE_BYTES, PIECE_BYTES + 1])
@pytest.mark.parametrize("how", ["", "coded"])
async def test_a_body_is_what_was_sent_wherever_it_is_received_to(length: int, how: str) -> None:
    pieces = Pieces(piece_bytes=PIECE_BYTES, kept_bytes_max=PIECE_BYTES)
    async with served() as service:
        answer = await service.call("GET", "/body", params=asked(length, how), pieces=pieces)
    assert answer.body == BODY[:length]
    pieced = not how and PIECED_MIN <= length <= PIECE_BYTES
    assert isinstance(answer.body, memoryview) == pieced
    if pieced:
        with pytest.raises(TypeError, match="read-only"):
            answer.body[0] = 0  # type: ignore[index]  # what is tried


async def test_a_piece_is_used_again_once_nobody_looks_at_the_body() -> None:
    pieces = Pieces(piece_bytes=PIECE_BYTES, kept_bytes_max=2 * PIECE_BYTES)
    async with served() as service:
        first = await service.call("GET", "/body", params=asked(PIECED_MIN), pieces=pieces)
        second = await service.call("GET", "/body", params=asked(PIECE_BYTES), pieces=pieces)
        held = first.body[:1]
        del first
        assert (pieces.kept_bytes, held) == (0, BODY[:1])
        del held, second
        assert pieces.kept_bytes == 2 * PIECE_BYTES
        await service.call("GET", "/body", params=asked(PIECE_BYTES), pieces=pieces)
        assert pieces.kept_bytes == 2 * PIECE_BYTES


async def test_a_body_that_is_cut_or_an_error_of_any_length_is_told() -> None:
    pieces = Pieces(piece_bytes=PIECE_BYTES, kept_bytes_max=PIECE_BYTES)
    async with served() as service:
        with pytest.raises(RetryableError, match="broke off"):
            await service.call("GET", "/body", params=asked(PIECE_BYTES, "cut"), pieces=pieces)
        with pytest.raises(RefusedError, match=f"x{{{PIECED_MIN}}}"):
            await service.call("GET", "/body", params=asked(PIECED_MIN, "refused"), pieces=pieces)


async def test_each_call_has_a_connection_though_others_wait_for_long() -> None:
    """Who follows many partitions waits at one of its own for each of them."""
    count, waiting, all_wait = 250, 0, asyncio.Event()

    async def held(request: web.Request) -> web.Response:
        nonlocal waiting
        waiting += 1
        if waiting == count:
            all_wait.set()
        await all_wait.wait()
        return web.Response(body=b"came")

    async with served(held) as service, asyncio.timeout(20), asyncio.TaskGroup() as group:
        calls = [group.create_task(service.call("GET", "/held")) for _ in range(count)]
    assert {bytes(one.result().body) for one in calls} == {b"came"}


async def test_an_answer_that_comes_slowly_is_waited_for_and_one_that_stops_is_not() -> None:
    """Whoever reads over a slow line would never get an answer of 4 MiB."""
    stops, goes_on = False, asyncio.Event()

    async def slow(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": str(len(BODY))})
        await response.prepare(request)
        for at in range(0, len(BODY), 32 * 1024):
            await asyncio.sleep(0.15)
            if stops and at:
                await goes_on.wait()
            await response.write(BODY[at : at + 32 * 1024])
        return response

    async with served(slow, timeout_s=1.0) as service:
        answer = await service.call("GET", "/held")
        assert answer.body == BODY
        stops = True
        with pytest.raises(RetryableError, match="broke off"):
            async with asyncio.timeout(5):
                await service.call("GET", "/held")
        goes_on.set()
