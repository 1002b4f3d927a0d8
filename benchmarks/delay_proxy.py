"""A TCP proxy that adds a round trip: HOST PORT MILLISECONDS. It prints its port.

What comes in either direction goes out half a round trip later, and nothing else is held back:
there is no limit of bandwidth but the machine's. Threads, since an event loop's timers are too
coarse for half a millisecond. It ends when its standard input does.
"""

import asyncio
import contextlib
import queue
import socket
import socketserver
import sys
import threading
import time
from collections.abc import AsyncIterator
from typing import Final

RECEIVE_BYTES: Final = 256 * 1024


class Handler(socketserver.BaseRequestHandler):
    """One connection, to another one."""

    server: "Proxy"
    request: socket.socket

    def handle(self) -> None:
        with socket.create_connection(self.server.target) as other:
            for one in (self.request, other):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            carriers = [
                *_carry(self.request, other, self.server.delay_s),
                *_carry(other, self.request, self.server.delay_s),
            ]
            for thread in carriers:
                thread.join()


def _carry(source: socket.socket, target: socket.socket, delay_s: float) -> list[threading.Thread]:
    """Begin to carry what comes from one to the other."""
    waiting: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()

    def take() -> None:
        data = b"more"
        while data:
            try:
                data = source.recv(RECEIVE_BYTES)
            except OSError:
                data = b""
            waiting.put((time.perf_counter() + delay_s, data))

    def give() -> None:
        with contextlib.suppress(OSError):
            while True:
                due_s, data = waiting.get()
                if (left_s := due_s - time.perf_counter()) > 0:
                    time.sleep(left_s)
                if not data:
                    break
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    threads = [threading.Thread(target=work, daemon=True) for work in (take, give)]
    for thread in threads:
        thread.start()
    return threads


class Proxy(socketserver.ThreadingTCPServer):
    """Listens on a free port of the loopback."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, target: tuple[str, int], delay_s: float) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.target, self.delay_s = target, delay_s


@contextlib.asynccontextmanager
async def in_its_own_process(script: str, *arguments: str) -> AsyncIterator[str]:
    """Run a server that prints its port and ends with its standard input; give its host:port."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, script, *arguments,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        yield f"127.0.0.1:{int(await process.stdout.readline())}"
    finally:
        process.kill()
        await process.wait()


def delayed(address: str, round_trip_ms: float) -> contextlib.AbstractAsyncContextManager[str]:
    """Run one in a process of its own; give where it listens, as host:port."""
    host, _, port = address.partition(":")
    return in_its_own_process(__file__, host, port, str(round_trip_ms))


def main() -> None:
    """Carry until standard input ends, so that nothing is left when the parent goes."""
    host, port, milliseconds = sys.argv[1:]
    proxy = Proxy((host, int(port)), float(milliseconds) / 2000)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    print(proxy.server_address[1], flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
