"""A TCP proxy on the test's own loop that drops what a test wants dropped, and cuts."""

import asyncio
import contextlib
from typing import Self


class Proxy:
    """Forwards to ``host:port``; ``address`` is where clients connect."""

    def __init__(self, target: str) -> None:
        self._host, _, port = target.partition(":")
        self._port = int(port)
        self._drop_replies = self._drop_requests = False
        self._passing = asyncio.Event()
        self._passing.set()
        self.held = asyncio.Event()
        """Set when a reply is kept back."""
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.address = ""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc_info) -> None:
        await self.stop()

    def drop_replies_and_cut(self) -> None:
        """Let the next request through, then cut instead of passing its reply on."""
        self._drop_replies = True

    def drop_requests_and_cut(self) -> None:
        """Cut instead of passing the next request on."""
        self._drop_requests = True

    def hold(self) -> None:
        """Keep replies back, connections open: a server that hangs."""
        self.held.clear()
        self._passing.clear()

    def restore(self) -> None:
        self._drop_replies = self._drop_requests = False
        self._passing.set()

    def cut(self) -> None:
        """Cut all connections; new ones are taken."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def stop(self) -> None:
        """Cut all connections and take no more."""
        self._server.close()
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.wait([*self._tasks, asyncio.create_task(asyncio.sleep(0))])

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        ends = [writer]
        with contextlib.suppress(OSError, asyncio.CancelledError, ExceptionGroup):
            try:
                far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
                ends.append(far_writer)
                self._writers.add(far_writer)
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._pump(reader, far_writer, requests=True))
                    group.create_task(self._pump(far_reader, writer, requests=False))
            finally:
                for each in ends:
                    each.transport.abort()
                    self._writers.discard(each)
                self._tasks.discard(task)

    async def _pump(self, reader, writer, *, requests: bool) -> None:
        while data := await reader.read(1 << 16):
            if self._drop_requests if requests else self._drop_replies:
                raise ConnectionResetError
            if not requests:
                if not self._passing.is_set():
                    self.held.set()
                await self._passing.wait()
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError
