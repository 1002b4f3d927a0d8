"""What benchmarks of reading share: many readers, plain clients of S3, what the reader says.

What is called ``read_…`` runs in children, as all that is measured does.
"""

import asyncio
import contextlib
import http.client
import itertools
import os
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import SplitResult, urlsplit

import aioboto3
import aiohttp
import grpc
from aiobotocore.config import AioConfig

from common import MIB, Bench, Meter, Result, begun
from tierlog.proto.v1 import reader_pb2 as pb
from tierlog.proto.v1 import reader_pb2_grpc
from tierlog.runtime.settings import load_settings

T = TypeVar("T")

RANGE_BYTES: Final = MIB
IN_FLIGHT: Final = 8
"""As the reader fetches by default (``reader.range_bytes``, ``reader.ranges_in_flight_max``)."""
READ_BYTES: Final = 4 * MIB
"""What a client of the reader asks for at once."""
COMPLETE_S_MAX: Final = 300.0
COME_AGAIN: Final = frozenset({429, 503})
LOOK_S: Final = 0.05
ACCEPTED: Final = {
    "ndjson": "application/x-ndjson",
    "arrow": "application/vnd.apache.arrow.stream",
}
"""Ways to read pages of entries; any other way is runs."""
PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


# In children


class Readers:
    """Readers over HTTP, and how many bytes they have."""

    def __init__(
        self, session: aiohttp.ClientSession, stream: str, read_bytes: int, way: str = "runs"
    ) -> None:
        address = load_settings().client.reader_http_address
        self._session, self._read_bytes = session, read_bytes
        kind = "entries" if way in ACCEPTED else "runs"
        self._url = f"http://{address}/v1/streams/{stream}/{kind}"
        self._headers = {"Accept": ACCEPTED[way]} if way in ACCEPTED else {}
        self.length = 0

    async def read(self, where: str, byte_count: int) -> None:
        """Read so many bytes from a place on, or to the end."""
        enough = 0
        while enough < byte_count:
            query = {"from": where, "bytes_max": str(self._read_bytes)}
            asked = self._session.get(self._url, params=query, headers=self._headers)
            async with asked as answer:
                if answer.status in COME_AGAIN:
                    await asyncio.sleep(LOOK_S)
                    continue
                if answer.status == 204:
                    return
                assert answer.status == 200, answer.status
                async for piece in answer.content.iter_any():
                    enough += len(piece)
                    self.length += len(piece)
                where = answer.headers["Tierlog-Next"]

    async def read_again_and_again(self, where: str, byte_count: int) -> None:
        """Read from a place on, and from there again, until it is cancelled."""
        while True:
            await self.read(where, byte_count)


@contextlib.asynccontextmanager
async def _readers(parameters: Mapping[str, Any]) -> AsyncIterator[Readers]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(read_bufsize=MIB, connector=connector) as session:
        way = parameters.get("way", "runs")
        yield Readers(session, parameters["stream"], parameters["read_bytes"], way)


async def read_many(parameters: Mapping[str, Any]) -> Result:
    """Read from each of some places at once, over HTTP, so many bytes each (in a child)."""
    async with _readers(parameters) as readers:
        meter = Meter()
        async with asyncio.TaskGroup() as group:
            for place in parameters["places"]:
                group.create_task(readers.read(place, parameters["bytes_each"]))
        return meter.result(readers.length)


async def read_many_by_grpc(parameters: Mapping[str, Any]) -> Result:
    """Follow from each of some places at once, so many bytes each (in a child)."""
    async with grpc.aio.insecure_channel(parameters["address"]) as channel:
        stub: Any = reader_pb2_grpc.ReaderStub(channel)

        async def read(where: str) -> int:
            length, at_end = 0, False
            while length < parameters["bytes_each"] and not at_end:
                asked = pb.FollowRequest(
                    stream=parameters["stream"],
                    resume=where,
                    bytes_max=parameters["read_bytes"],
                    stop_at_end=True,
                )
                try:
                    at_end = True
                    call = stub.Follow(asked)
                    async for answer in call:
                        length, where = length + answer.ByteSize(), answer.resume
                        if length >= parameters["bytes_each"]:
                            call.cancel()
                            break
                except grpc.aio.AioRpcError as error:
                    if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                        raise
                    at_end = False
                    await asyncio.sleep(LOOK_S)
            return length

        meter = Meter()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(read(place)) for place in parameters["places"]]
        return meter.result(sum(task.result() for task in tasks))


async def read_on(parameters: Mapping[str, Any]) -> Result:
    """Read from each of some places, again and again, until it is enough (in a child)."""
    async with _readers(parameters) as readers, asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(readers.read_again_and_again(place, parameters["bytes_each"]))
            for place in parameters["places"]
        ]
        done, meter = begun(), Meter()
        await done.wait()
        result = meter.result(max(1, readers.length), cpu_share=meter.cpu_share())
        for task in tasks:
            task.cancel()
    return result


@contextlib.asynccontextmanager
async def largest_object() -> AsyncIterator[tuple[Any, dict[str, str], int]]:
    """Give the SDK's client, where the largest object is, and its length."""
    settings = load_settings().s3
    assert settings.secret_key is not None
    session = aioboto3.Session(
        aws_access_key_id=settings.access_key,
        aws_secret_access_key=settings.secret_key.get_secret_value(),
        region_name=settings.region,
    )
    config = AioConfig(
        s3={"addressing_style": "path"},
        signature_version="s3v4",
        max_pool_connections=IN_FLIGHT,
    )
    async with session.client("s3", endpoint_url=settings.endpoint_url, config=config) as s3:
        listed = await s3.list_objects_v2(Bucket=settings.bucket)
        largest = max(listed["Contents"], key=lambda one: int(one["Size"]))
        yield s3, {"Bucket": settings.bucket, "Key": largest["Key"]}, int(largest["Size"])


async def read_by_sdk(parameters: Mapping[str, Any]) -> Result:
    """Get the largest object with aioboto3, so many ranges at a time (in a child)."""
    async with largest_object() as (s3, where, size):

        async def get(start: int, length: int) -> int:
            asked = f"bytes={start}-{start + length - 1}"
            answer = await s3.get_object(**where, Range=asked)
            async with answer["Body"] as body:
                return len(await body.read())

        return await _get_all(get, size, in_flight=parameters["in_flight"])


async def read_by_obstore(parameters: Mapping[str, Any]) -> Result:
    """Get the largest object with obstore, so many ranges at a time (in a child)."""
    from obstore.store import S3Store  # noqa: PLC0415 - need not be there

    settings = load_settings().s3
    assert settings.secret_key is not None
    store = S3Store(
        settings.bucket,
        config={
            "access_key_id": settings.access_key,
            "endpoint": settings.endpoint_url,
            "region": settings.region,
            "secret_access_key": settings.secret_key.get_secret_value(),
            "virtual_hosted_style_request": False,
        },
        client_options={"allow_http": True},
    )
    async with largest_object() as (_, where, size):
        key = where["Key"]

    async def get(start: int, length: int) -> int:
        return len(await store.get_range_async(key, start=start, length=length))

    return await _get_all(get, size, in_flight=parameters["in_flight"])


async def _get_all(
    get: Callable[[int, int], Awaitable[int]], size: int, *, in_flight: int
) -> Result:
    """Get all ranges of an object, in order, so many at a time."""
    starts = itertools.count(0, RANGE_BYTES)

    async def go_on() -> int:
        length = 0
        while (start := next(starts)) < size:
            length += await get(start, min(RANGE_BYTES, size - start))
        return length

    meter = Meter()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(go_on()) for _ in range(in_flight)]
    length = sum(task.result() for task in tasks)
    assert length == size, (length, size)
    return meter.result(length)


async def read_by_threads(parameters: Mapping[str, Any]) -> Result:
    """Get the largest object by ranges, so many at a time, and drop it (in a child).

    A thread a connection, the standard library's client, one buffer each. The address is signed
    before the clock starts.
    """
    async with largest_object() as (s3, where, size):
        signed = await s3.generate_presigned_url("get_object", Params=where)
    number, starts = parameters["in_flight"], itertools.count(0, RANGE_BYTES)
    # Threads of its own: the loop has no more than the cores and four.
    with ThreadPoolExecutor(number) as threads:
        meter = Meter()
        asked = [threads.submit(_get_ranges, signed, size, starts) for _ in range(number)]
        length = sum([await asyncio.wrap_future(one) for one in asked])
        assert length == size, (length, size)
        return meter.result(length)


def _get_ranges(url: str, size: int, starts: "itertools.count[int]") -> int:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port)
    buffer, length = memoryview(bytearray(RANGE_BYTES)), 0
    while (start := next(starts)) < size:
        length += received(connection, parts, start, buffer[: size - start])
    connection.close()
    return length


def received(
    connection: http.client.HTTPConnection, parts: SplitResult, start: int, target: memoryview
) -> int:
    """Get an object's bytes from ``start`` on into all of ``target``; return how many."""
    headers = {"Range": f"bytes={start}-{start + len(target) - 1}"}
    connection.request("GET", f"{parts.path}?{parts.query}", headers=headers)
    response = connection.getresponse()
    assert response.status == 206, response.status
    at = 0
    while at < len(target):
        got = response.readinto(target[at:])
        assert got, "cut body"
        at += got
    assert not response.read(), "more than was asked"
    return at


# Around them


async def offload(bench: Bench, stream: str) -> None:
    """Ask for the offload of a stream, and wait until nothing is left to do."""
    async with bench.client() as client:
        await client.offload(stream)
        deadline_s = time.monotonic() + COMPLETE_S_MAX
        while time.monotonic() < deadline_s:
            ledgers = (await client.stream(stream))["ledgers"]
            if ledgers and all(one["complete"] for one in ledgers):
                return
            await asyncio.sleep(0.5)
    raise SystemExit(f"the ledger was not offloaded within {COMPLETE_S_MAX:.0f} s")


async def cold_reader(bench: Bench, **changed: str) -> None:
    """Start the reader anew, which keeps nothing then; ``changed``: settings."""
    await bench.cluster.services.restart("reader", env=changed or None)


async def reader_says(bench: Bench, name: str) -> float:
    """Return one of the reader's metrics."""
    address = bench.cluster.address("reader", "http")
    async with aiohttp.ClientSession() as session, session.get(f"http://{address}/metrics") as got:
        found = re.search(rf"^{name} (\S+)$", await got.text(), re.MULTILINE)
    assert found is not None, name
    return float(found[1])


def resident_bytes(pid: int) -> int:
    """Return what a process has in memory now."""
    pages = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * PAGE_BYTES


async def peak_of(pid: int, work: Awaitable[T]) -> tuple[T, int]:
    """Return what some work gave, and the most that a process had in memory meanwhile."""
    peak = resident_bytes(pid)

    async def look() -> None:
        nonlocal peak
        while True:
            await asyncio.sleep(LOOK_S)
            peak = max(peak, resident_bytes(pid))

    async with asyncio.TaskGroup() as group:
        looking = group.create_task(look())
        outcome = await work
        looking.cancel()
    return outcome, peak


def places_in(ledger_id: int, entry_count: int, number: int) -> list[str]:
    """Return so many places of a ledger, equally far from each other."""
    return [f"{ledger_id}:{entry_count * one // number}" for one in range(number)]
