"""A server that is away when a service starts: it waits, says for what, and ends when asked to.

Design: reliability.md C1, I10 (ready soon after faults stop, no flood in the log).
"""

from __future__ import annotations

import asyncio
import random
import socket

import aiohttp
import pytest
from structlog.testing import capture_logs

from tierlog.adapters.memory.ids import SeededIds
from tierlog.adapters.system import SystemClock
from tierlog.model.errors import IndeterminateError, Reason, RefusedError, RetryableError
from tierlog.runtime.awaiting import AwaitedServers
from tierlog.runtime.http import listen
from tierlog.runtime.service import StoppedError
from tierlog.runtime.settings import HttpListenSettings


class Server:
    def __init__(self, error=None):
        self.error = error
        self.asked = 0
        self.given_up = False

    async def ask(self):
        self.asked += 1
        if self.error is not None:
            raise self.error
        return "here"

    async def hang(self):
        try:
            await asyncio.sleep(3600)
        finally:
            self.given_up = True


@pytest.fixture
def port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture
def stop():
    return asyncio.Event()


@pytest.fixture
async def awaited(port, stop):
    async with AwaitedServers(
        "test",
        HttpListenSettings(http_port=port),
        stop=stop,
        tls=None,
        gate=None,
        clock=SystemClock(),
        ids=SeededIds(random.Random(1)),
    ) as awaited:
        yield awaited


async def asked(port, path):
    """Return what is answered, as soon as anybody listens."""
    async with asyncio.timeout(10), aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(f"http://127.0.0.1:{port}{path}") as answer:
                    return answer.status, await answer.text()
            except aiohttp.ClientError:
                await asyncio.sleep(0.02)


def free_again(port):
    listen("127.0.0.1", port).close()
    return True


async def test_who_is_there_is_not_spoken_of(awaited):
    with capture_logs() as logged:
        assert await awaited.come("metadata", Server().ask) == "here"
    assert logged == []


async def test_it_lives_says_what_is_missing_and_goes_on_by_itself(awaited, port):
    server = Server(RetryableError("10.1.2.3 is away", remedy="Start it"))
    with capture_logs() as logged:
        await awaited.come("metadata", Server().ask)
        async with asyncio.TaskGroup() as tasks:
            coming = tasks.create_task(awaited.come("objects", server.ask))
            assert await asked(port, "/livez") == (200, "ok\n")
            status, told = await asked(port, "/readyz?verbose")
            assert status == 503
            assert told == (
                '{"ready":false,"checks":{"metadata":true,"objects":false,"serving":false},'
                '"remedies":{"objects":"Start it"}}'
            )
            assert (await asked(port, "/metrics"))[0] == 200
            server.error = IndeterminateError("the answer was lost")
            tries = server.asked
            while server.asked < tries + 2:
                await asyncio.sleep(0.05)
            server.error = None
        assert coming.result() == "here"
    # Until the service itself takes the port; it is not ready before.
    status, told = await asked(port, "/readyz")
    assert (status, told) == (
        503,
        '{"ready":false,"checks":{"metadata":true,"objects":true,"serving":false}}',
    )
    await awaited.leave()
    assert free_again(port)
    waits = [line for line in logged if line["event"] == "server.awaited"]
    assert waits[0]["server"] == "objects"
    assert waits[0]["cause"] == "10.1.2.3 is away. Start it"
    assert len(waits) == server.asked - 1


async def test_a_server_that_hangs_is_told_of_too_and_given_up_at_once(awaited, port, stop):
    server, loop = Server(), asyncio.get_running_loop()

    async def waiting():
        with pytest.raises(StoppedError):
            await awaited.come("metadata", server.hang)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(waiting())
        assert (await asked(port, "/readyz"))[
            1
        ] == '{"ready":false,"checks":{"metadata":false,"serving":false}}'
        began_s = loop.time()
        stop.set()
    assert loop.time() - began_s < 2
    assert server.given_up


@pytest.mark.parametrize("early", [True, False])
async def test_what_is_refused_ends_it(awaited, port, early):
    server = Server(None if early else RetryableError("away"))
    refused = RefusedError("no such key", reason=Reason.UNAUTHENTICATED, remedy="Correct it")
    if early:
        server.error = refused

    async def waiting():
        with pytest.raises(RefusedError, match="Correct it"):
            await awaited.come("objects", server.ask)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(waiting())
        if not early:
            await asked(port, "/livez")
            server.error = refused
    assert server.asked == 1 or not early
