"""The client of runs against servers that frame, cut and close as HTTP allows, and as it doesn't.

The server below writes bytes as a test says, cut anywhere; what the client makes of them is held
against the runs that were sent.
"""

import asyncio
import contextlib
import gc
import mmap
import os
import random
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from tierlog.adapters.pieces import Pieces
from tierlog.adapters.rpc.run_http import LISTS_AHEAD, BrokenHttpError, RunsHttp
from tierlog.adapters.rpc.run_inflow import PIECE_BYTES, RunInflow, receiving_pieces
from tierlog.format.frame import pack_entries
from tierlog.format.run import build_run
from tierlog.format.run_stream import end_mark
from tierlog.model.errors import CorruptError, Reason, RefusedError, RetryableError

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/vnd.tierlog.runs\r\n"


def runs_of(*sizes):
    runs = []
    for entry_id, size in enumerate(sizes):
        frames, offsets = pack_entries([os.urandom(size)], entry_id)
        runs.append(build_run(frames, offsets, ledger_id=7, first_entry_id=entry_id))
    return runs


def body_of(runs):
    return b"".join(run.encoded for run in runs) + end_mark(len(runs))


def by_length(body):
    return HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body


def until_closed(body):
    return HEAD + b"\r\n" + body


def chunked(body, sizes, *, extension=b"", trailer=b""):
    parts, at = [HEAD + b"Transfer-Encoding: chunked\r\n\r\n"], 0
    while at < len(body):
        size = min(next(sizes), len(body) - at)
        parts.append(b"%x%b\r\n" % (size, extension) + body[at : at + size] + b"\r\n")
        at += size
    return b"".join([*parts, b"0\r\n", trailer, b"\r\n"])


class Server:
    """Answers each request with the next of its answers, in these steps, on as many connections."""

    def __init__(self, *answers, step=1 << 30, close=False, linger_s=0.0):
        self.answers = list(answers)
        self.step = step
        self.close = close
        self.linger_s = linger_s
        self.connections = 0
        self.requests = []

    async def _serve(self, reader, writer):
        self.connections += 1
        try:
            while self.answers:
                self.requests.append(await reader.readuntil(b"\r\n\r\n"))
                answer = self.answers.pop(0)
                for at in range(0, len(answer), self.step):
                    writer.write(answer[at : at + self.step])
                    await writer.drain()
                    if self.step < 1 << 30:
                        await asyncio.sleep(0)
                if self.close:
                    break
            await asyncio.sleep(self.linger_s)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    @contextlib.asynccontextmanager
    async def client(self):
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        client = RunsHttp(f"{host}:{port}", source="node n1", connect_s_max=5.0)
        try:
            yield client
        finally:
            await client.close()
            server.close()


async def read(client, *, silence_s_max=5.0):
    """Return what came, and the error behind it."""
    got, error = [], None
    read = client.get("/v1/ledgers/7/runs?first=0", silence_s_max=silence_s_max)
    try:
        async with contextlib.aclosing(read):
            async for runs in read:
                assert runs
                got += runs
    except (CorruptError, RefusedError, RetryableError, BrokenHttpError, OSError) as caught:
        error = caught
    return got, error


SIZES = [0, 1, 60_000, 3 * PIECE_BYTES, 1, PIECE_BYTES - 96, PIECE_BYTES, 5, 700_000, 900_000, 2]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("framing", ["length", "closed", "chunks", "small chunks"])
async def test_runs_come_whole_whatever_the_framing_and_the_cuts(framing, seed):
    rng = random.Random(seed)
    small = framing == "small chunks"
    runs = runs_of(*([100, 0, 3000] * 5 if small else rng.sample(SIZES, 8)))
    body = body_of(runs)
    sizes = iter(lambda: rng.choice([1, 2, 7, 300] if small else [70_000, 1 << 19, 1 << 21]), 0)
    answer = {
        "length": lambda: by_length(body),
        "closed": lambda: until_closed(body),
        "chunks": lambda: chunked(body, sizes),
        "small chunks": lambda: chunked(body, sizes, extension=b";x=1", trailer=b"A: b\r\n"),
    }[framing]()
    step = rng.choice([1, 3, 40] if small else [1999, 65536, 1 << 30])
    server = Server(answer, step=step, close=framing == "closed")
    async with server.client() as client:
        got, error = await read(client)
    assert error is None
    assert got == runs


async def test_a_connection_is_used_again_and_replaced_when_it_was_closed_meanwhile():
    runs = runs_of(10, 20)
    server = Server(*[by_length(body_of(runs))] * 3)
    async with server.client() as client:
        for _ in range(3):
            assert await read(client) == (runs, None)
        assert server.connections == 1
        # The server ends the connection; the next request finds out and makes another.
        server.answers = [by_length(body_of(runs))]
        assert await read(client) == (runs, None)
        assert server.connections == 2
    assert all(b"GET /v1/ledgers/7/runs?first=0 HTTP/1.1" in one for one in server.requests)


@pytest.mark.parametrize("framing", [by_length, until_closed])
@pytest.mark.parametrize("missing", [1, 8, 9, 70, 500, 700, 800])
async def test_a_cut_body_gives_what_came_whole_and_then_unknown(framing, missing):
    runs = runs_of(100, 200, 300)
    whole = framing(body_of(runs))
    async with Server(whole[:-missing], close=True).client() as client:
        got, error = await read(client)
    assert isinstance(error, RetryableError)
    assert error.reason is Reason.UNKNOWN
    assert got == runs[: len(got)]
    ends = np.cumsum([len(run.encoded) for run in runs])
    assert len(got) == int((ends <= len(body_of(runs)) - missing).sum())


async def test_a_body_of_the_right_length_without_its_mark_is_cut():
    runs = runs_of(100, 200)
    async with Server(by_length(body_of(runs)[:-8])).client() as client:
        got, error = await read(client)
    assert got == runs
    assert isinstance(error, RetryableError)
    for mark in (end_mark(1), end_mark(3), end_mark(2) + b"x", end_mark(2) * 3):
        async with Server(by_length(body_of(runs)[:-8] + mark)).client() as client:
            got, error = await read(client)
        assert got == runs
        assert error is not None


@pytest.mark.parametrize("size", [100, 700_000])
async def test_a_damaged_run_ends_the_read_behind_the_good_ones(size):
    runs = runs_of(*[size] * 9)
    body = bytearray(body_of(runs))
    at = sum(len(run.encoded) for run in runs[:6]) + 90
    body[at] ^= 1
    async with Server(by_length(bytes(body))).client() as client:
        got, error = await read(client)
    assert isinstance(error, CorruptError)
    assert got == runs[:6]


async def test_what_the_node_says_instead_is_raised_as_it_is():
    problem = b'{"type":"about:blank","title":"no","status":404,"detail":"no such entry",'
    problem += b'"reason":"NO_SUCH_ENTRY","remedy":"none"}'
    head = b"HTTP/1.1 404 Not Found\r\nContent-Type: application/problem+json\r\n"
    answer = head + b"Content-Length: %d\r\n\r\n" % len(problem) + problem
    runs = runs_of(5)
    server = Server(answer, by_length(body_of(runs)))
    async with server.client() as client:
        got, error = await read(client)
        assert got == []
        assert isinstance(error, RefusedError)
        assert error.reason is Reason.NO_SUCH_ENTRY
        assert await read(client) == (runs, None)
    assert server.connections == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-nothing\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\nabc\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1" * 5000,
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\nx\r\n",
        HEAD + b"X: " + b"y" * 70_000,
        b"",
    ],
)
async def test_what_is_no_http_is_an_error_and_never_an_empty_answer(answer):
    async with Server(answer, close=True).client() as client:
        got, error = await read(client)
    assert got == []
    assert error is not None


async def test_more_than_was_asked_for_spoils_the_connection_and_not_the_answer():
    runs = runs_of(5, 6)
    server = Server(by_length(body_of(runs)) + b"HTTP/1.1 200 OK\r\n\r\n", by_length(body_of(runs)))
    async with server.client() as client:
        assert (await read(client))[0] == runs
        assert await read(client) == (runs, None)
    assert server.connections == 2


async def test_a_silent_server_and_one_that_is_not_there():
    async with Server(HEAD, linger_s=1.0).client() as client:
        _, error = await read(client, silence_s_max=0.1)
        assert isinstance(error, TimeoutError)
        await client.close()
    client = RunsHttp("127.0.0.1:1", source="node n1", connect_s_max=5.0)
    _, error = await read(client)
    assert isinstance(error, OSError)


async def test_a_slow_reader_holds_the_server_back():
    runs = runs_of(*[900_000] * 60)
    async with Server(by_length(body_of(runs)), step=1 << 16).client() as client:
        reading = client.get("/", silence_s_max=5.0)
        async with contextlib.aclosing(reading):
            got = await anext(reading)
            await asyncio.sleep(0.3)
            (connection,) = client._open
            answer = connection.answer
            assert len(answer.inflow.lists) <= LISTS_AHEAD
            assert answer.received < 20 * PIECE_BYTES
            async for more in reading:
                got = [*got, *more]
        assert got == runs


async def test_a_read_that_is_left_early_drops_its_connection():
    runs = runs_of(*[900_000] * 40)
    server = Server(by_length(body_of(runs)), by_length(body_of(runs[:1])), step=1 << 16)
    async with server.client() as client:
        reading = client.get("/", silence_s_max=5.0)
        async with contextlib.aclosing(reading):
            await anext(reading)
        assert await read(client) == (runs[:1], None)
    assert server.connections == 2


def test_a_piece_comes_back_only_when_no_view_of_it_is_left():
    pieces = receiving_pieces(kept_bytes_max=2 * PIECE_BYTES)
    inflow = RunInflow(pieces)
    runs = runs_of(*[700_000] * 12)
    body = memoryview(body_of(runs))
    space = body[:0]
    while body:
        space = inflow.space()
        count = min(len(space), len(body))
        space[:count] = body[:count]
        inflow.received(count)
        body = body[count:]
    inflow.finish()
    assert inflow.error is None
    got = [run for runs in inflow.lists for run in runs]
    del inflow, space
    gc.collect()
    held = [run.frames for run in got]
    expected = [bytes(run.frames) for run in runs]
    del got
    for _ in range(4):
        # Whatever is lent now is not what these views show.
        pieces.lend()[:] = bytes(PIECE_BYTES)
    assert [bytes(one) for one in held] == expected
    del held
    gc.collect()
    assert pieces.kept_bytes == 2 * PIECE_BYTES


class Counting(Pieces):
    """Pieces that count how often one was lent."""

    lent = 0

    def lend(self):
        self.lent += 1
        return super().lend()


async def test_answers_that_are_waited_for_hold_no_memory():
    """A reader waits at a storage node for each ledger that is followed."""
    pieces = Counting(piece_bytes=PIECE_BYTES, kept_bytes_max=0)
    server = Server(linger_s=30.0)
    async with server.client() as client:
        client._pieces = pieces
        reads = [asyncio.create_task(read(client)) for _ in range(20)]
        while server.connections < len(reads):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        for one in reads:
            one.cancel()
        await asyncio.wait(reads)
    assert pieces.lent == 0


@pytest.mark.parametrize("size", [10, PIECE_BYTES // 2 - 1000, PIECE_BYTES // 2 + 1000])
def test_no_more_is_held_than_twice_what_came(size):
    pieces = receiving_pieces()
    inflow = RunInflow(pieces)
    pour(inflow, body_of(runs_of(size)))
    inflow.finish()
    gc.collect()
    held = 0 if pieces.kept_bytes else PIECE_BYTES
    assert held <= 2 * size
    assert len(inflow.lists) == 1


def test_a_small_body_holds_no_piece():
    pieces = receiving_pieces()
    inflow = RunInflow(pieces)
    body = body_of(runs_of(10, 20))
    inflow.space()[: len(body)] = body
    inflow.received(len(body))
    inflow.finish()
    (runs,) = inflow.lists
    del inflow
    gc.collect()
    assert pieces.kept_bytes == PIECE_BYTES
    assert len(runs) == 2


def resident_bytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * mmap.PAGESIZE


def pour(inflow, body):
    body = memoryview(body)
    while body:
        space = inflow.space()
        count = min(len(space), len(body))
        space[:count] = body[:count]
        inflow.received(count)
        body = body[count:]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident sizes are Linux's")
def test_a_length_alone_takes_no_memory():
    (run,) = runs_of(3_000_000)
    liar = bytearray(run.encoded[: 2 * PIECE_BYTES])
    liar[12:16] = (256 << 20).to_bytes(4, "big")  # under no checksum until all of it came
    inflow = RunInflow(receiving_pieces())
    began = resident_bytes()
    pour(inflow, liar)
    assert len(inflow.space()) > 250 << 20
    assert resident_bytes() - began < 8 << 20
    inflow.finish()
    assert resident_bytes() - began < 8 << 20
    assert inflow.error is not None
    assert inflow.error.reason is Reason.UNKNOWN
    assert not inflow.lists


def test_a_cut_run_is_not_copied_to_find_that_it_is_cut():
    (run,) = runs_of(8_000_000)
    inflow = RunInflow(receiving_pieces())
    pour(inflow, run.encoded[:-1])
    tracemalloc.start()
    inflow.finish()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < PIECE_BYTES
    assert inflow.error is not None
    assert inflow.error.reason is Reason.UNKNOWN


def test_a_run_longer_than_a_piece_comes_whole_between_others():
    runs = runs_of(10, 3_000_000, 20)
    inflow = RunInflow(receiving_pieces())
    pour(inflow, body_of(runs))
    inflow.finish()
    assert inflow.error is None
    assert [run for some in inflow.lists for run in some] == runs
