"""A Redis whose answers nobody can understand is an empty cache: nothing raises, and it is left.

Design: reliability.md C2 (down, slow, flushed, poisoned). The server below talks as Redis does
until a test says what it answers instead.
"""

import asyncio
import contextlib

import pytest
from structlog.testing import capture_logs

from tierlog.adapters.memory.clock import SimClock
from tierlog.adapters.redis.cache import RedisCache

NO_ANSWERS = {
    "number": b":abc\r\n",
    "length": b"$abc\r\n",
    "count": b"*x\r\n",
    "big number": b"(zz\r\n",
    "double": b",abc\r\n",
    "list as key": b"%1\r\n*0\r\n:1\r\n",
    "nested": b"*1\r\n" * 3000 + b":1\r\n",
    "kind": b"?\r\n",
    "much": b"?" * 100_000 + b"\r\n",
}
GREETING = {b"HELLO": b"%1\r\n+proto\r\n:3\r\n", b"CLIENT": b"+OK\r\n"}


class Confused:
    """Answers all that is asked with ``answer``, but greets as it should unless told otherwise."""

    def __init__(self, answer):
        self.answer = answer
        self.greeting = dict(GREETING)
        self.asked = []

    @contextlib.asynccontextmanager
    async def cache(self, clock):
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        cache = RedisCache(f"redis://127.0.0.1:{port}", clock=clock, timeout_s=2.0)
        try:
            yield cache
        finally:
            await cache.close()
            server.close()
            await server.wait_closed()

    async def _serve(self, reader, writer):
        with contextlib.suppress(OSError, asyncio.IncompleteReadError), contextlib.closing(writer):
            while head := await reader.readline():
                words = [await self._word(reader) for _ in range(int(head[1:]))]
                known = self.greeting.get(words[0].upper())
                if known is None:
                    self.asked.append(words[0].upper())
                writer.write(self.answer if known is None else known)
                await writer.drain()

    async def _word(self, reader):
        length = int((await reader.readline())[1:])
        return (await reader.readexactly(length + 2))[:-2]


async def called(cache, name):
    match name:
        case "get":
            return await cache.get("k")
        case "put":
            return await cache.put("k", b"value", ttl_s=60)
        case "drop":
            return await cache.drop("k")


@pytest.mark.parametrize("name", ["get", "put", "drop"])
@pytest.mark.parametrize("answer", NO_ANSWERS.values(), ids=NO_ANSWERS)
async def test_what_cannot_be_understood_is_no_redis(answer, name):
    clock, server = SimClock(), Confused(answer)
    async with server.cache(clock) as cache:
        with capture_logs() as logs:
            assert await called(cache, name) is None
        assert len(server.asked) == 1
        (lost,) = logs
        assert lost["event"] == "cache.lost"
        assert 0 < len(lost["cause"]) < 500
        for other in ("get", "put", "drop"):
            assert await called(cache, other) is None
        assert len(server.asked) == 1  # not asked again so soon
        server.answer = b"$5\r\nvalue\r\n"
        clock.advance(1.0)
        for again in range(3):
            await called(cache, "get")
            assert len(server.asked) == 2 + again  # it came to its senses


async def test_a_greeting_that_cannot_be_understood_is_no_redis():
    server = Confused(b"+OK\r\n")
    server.greeting[b"HELLO"] = b":abc\r\n"
    async with server.cache(SimClock()) as cache:
        assert await cache.get("k") is None
    assert not server.asked


async def test_a_refusal_is_no_outage():
    server = Confused(b"-OOM command not allowed\r\n")
    async with server.cache(SimClock()) as cache:
        for number, name in enumerate(("put", "get", "drop"), start=1):
            assert await called(cache, name) is None
            assert len(server.asked) == number


async def test_a_wrong_argument_is_not_taken_for_an_outage():
    server = Confused(b"+OK\r\n")
    async with server.cache(SimClock()) as cache:
        with pytest.raises(TypeError):
            await cache.get(None)
