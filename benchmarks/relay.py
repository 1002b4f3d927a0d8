"""A plain client of S3 behind one more process, as whoever reads through a service is.

The process between gets ranges as ``read_by_threads`` does, by as many threads, and passes them on
in their order over TCP, and that is all: nothing is checked, kept, or put into HTTP. So what it
gives, beside what the plain client gives, is what the way through one more process costs on this
machine, before any work is done there.

What is called ``read_…`` runs in children; the file itself, run, is the process between.
"""

import asyncio
import http.client
import json
import socket
import sys
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from threading import local
from typing import Any, Final
from urllib.parse import urlsplit

from common import MIB, Meter, Result
from reading import RANGE_BYTES, largest_object, received

AHEAD: Final = 2
"""So many times as many ranges as are on their way may lie there, got and not passed on yet."""


async def read_by_relay(parameters: Mapping[str, Any]) -> Result:
    """Get the largest object through a process that only passes it on (in a child)."""
    async with largest_object() as (s3, where, size):
        signed = await s3.generate_presigned_url("get_object", Params=where)
    told = {"url": signed, "size": size, "in_flight": parameters["in_flight"]}
    between = await asyncio.create_subprocess_exec(
        sys.executable, __file__, json.dumps(told), stdout=asyncio.subprocess.PIPE
    )
    assert between.stdout is not None
    port = int(await between.stdout.readline())
    buffer, length = memoryview(bytearray(MIB)), 0
    with socket.create_connection(("127.0.0.1", port)) as connection:
        meter = Meter()
        connection.sendall(b"\n")  # it begins now
        while got := connection.recv_into(buffer):
            length += got
        result = meter.result(length)
    assert length == size, (length, size)
    assert await between.wait() == 0
    return result


def pass_on(url: str, size: int, in_flight: int) -> None:
    """Wait for whoever connects, get all ranges, and send them in their order."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        print(listening.getsockname()[1], flush=True)
        connection, _ = listening.accept()
    starts, mine = iter(range(0, size, RANGE_BYTES)), local()
    parts = urlsplit(url)

    def get(start: int) -> bytearray:
        if not hasattr(mine, "connection"):
            mine.connection = http.client.HTTPConnection(parts.hostname or "", parts.port)
        body = bytearray(min(RANGE_BYTES, size - start))
        received(mine.connection, parts, start, memoryview(body))
        return body

    with connection, ThreadPoolExecutor(in_flight) as threads:
        connection.recv(1)
        coming: deque[Future[bytearray]] = deque()
        while True:
            while len(coming) < AHEAD * in_flight and (start := next(starts, None)) is not None:
                coming.append(threads.submit(get, start))
            if not coming:
                return
            connection.sendall(coming.popleft().result())


if __name__ == "__main__":
    pass_on(**json.loads(sys.argv[1]))
