"""Ranged reads of objects, 1 MiB at a time, shared by all who read (seeds/000, "Reading from S3").

Owns which ranges are being fetched and a small, bounded memory of the last ones, so that a read
that goes on where another ended fetches nothing twice. Does not own caching for longer: the
reader's cache does.

Invariants:
    * A range is fetched once at a time, however many want it.
    * At most ``in_flight_max`` fetches run, over all objects; at most ``bytes_max`` are kept.
    * A range has exactly the length that the object's size says, or the read fails.

Cancellation: who is cancelled gives up its own fetch; those that waited for it fetch anew.
"""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final, NamedTuple

from tierlog.model.errors import CorruptError, Reason, RefusedError
from tierlog.offload.groups import plain_errors
from tierlog.ports.objects import ObjectStore

RANGE_BYTES: Final = 1024 * 1024
IN_FLIGHT_MAX: Final = 8
KEPT_BYTES_MAX: Final = 16 * RANGE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeLimits:
    """Every bound of ranged reads."""

    range_bytes: int = RANGE_BYTES
    in_flight_max: int = IN_FLIGHT_MAX
    kept_bytes_max: int = KEPT_BYTES_MAX


class Source(NamedTuple):
    """An immutable object and its size."""

    key: str
    size: int


class _RangeId(NamedTuple):
    key: str
    number: int


class Ranges:
    """Reads of byte ranges over one object store."""

    def __init__(self, objects: ObjectStore, limits: RangeLimits) -> None:
        self._objects = objects
        self.limits = limits
        self._slots = asyncio.Semaphore(limits.in_flight_max)
        self._flying: dict[_RangeId, asyncio.Future[None]] = {}
        self._kept: OrderedDict[_RangeId, bytes] = OrderedDict()
        self._kept_bytes = 0
        self.fetches = 0
        self.bytes_fetched = 0

    def __repr__(self) -> str:
        return f"<Ranges fetches={self.fetches} flying={len(self._flying)} kept={len(self._kept)}>"

    async def read(self, source: Source, start: int, end: int) -> memoryview:
        """Return bytes ``start`` to ``end`` of an object, as one buffer."""
        assert 0 <= start < end <= source.size, (start, end, source)
        size = self.limits.range_bytes
        first, last = start // size, (end - 1) // size
        bodies = await self._bodies(source, first, last)
        if len(bodies) == 1:
            return memoryview(bodies[0])[start - first * size : end - first * size]
        head = memoryview(bodies[0])[start - first * size :]
        tail = memoryview(bodies[-1])[: end - last * size]
        return memoryview(b"".join((head, *bodies[1:-1], tail)))

    async def warm(self, source: Source, start: int, end: int) -> None:
        """Fetch the ranges that hold these bytes, as far as they will be kept."""
        size, kept = self.limits.range_bytes, self.limits.kept_bytes_max
        end = min(end, source.size, start + max(kept // 2, size))
        if start < end:
            await self._bodies(source, start // size, (end - 1) // size)

    def forget(self, key: str) -> None:
        """Drop what is kept of an object, which turned out damaged on its way or at its place."""
        for range_id in [one for one in self._kept if one.key == key]:
            self._kept_bytes -= len(self._kept.pop(range_id))

    async def _bodies(self, source: Source, first: int, last: int) -> list[bytes]:
        if first == last:
            return [await self._range(source, first)]
        with plain_errors():
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._range(source, number))
                    for number in range(first, last + 1)
                ]
        return [task.result() for task in tasks]

    async def _range(self, source: Source, number: int) -> bytes:
        range_id = _RangeId(source.key, number)
        while True:
            kept = self._kept.get(range_id)
            if kept is not None:
                self._kept.move_to_end(range_id)
                return kept
            flying = self._flying.get(range_id)
            if flying is None:
                return await self._fetch(source, range_id)
            await asyncio.wait({flying})

    async def _fetch(self, source: Source, range_id: _RangeId) -> bytes:
        landed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._flying[range_id] = landed
        try:
            async with self._slots:
                body = await self._get(source, range_id.number)
            self._keep(range_id, body)
            return body
        finally:
            del self._flying[range_id]
            landed.set_result(None)

    async def _get(self, source: Source, number: int) -> bytes:
        start = number * self.limits.range_bytes
        length = min(self.limits.range_bytes, source.size - start)
        body = await self._objects.get_range(source.key, start, length)
        if body is None:
            raise object_gone(source.key)
        if len(body) != length:
            raise CorruptError(
                f"object {source.key} ends at byte {start + len(body)} of {source.size}",
                remedy="Read another copy, or offload the ledger again",
                details={"object": source.key, "offset": str(start + len(body))},
            )
        self.fetches += 1
        self.bytes_fetched += length
        return body

    def _keep(self, range_id: _RangeId, body: bytes) -> None:
        self._kept[range_id] = body
        self._kept_bytes += len(body)
        while self._kept_bytes > self.limits.kept_bytes_max and len(self._kept) > 1:
            _, dropped = self._kept.popitem(last=False)
            self._kept_bytes -= len(dropped)


def object_gone(key: str) -> RefusedError:
    """Say that an object is not where it should be, so that its place is looked up again."""
    return RefusedError(
        f"object {key} is not there",
        reason=Reason.LEDGER_NOT_FOUND,
        remedy="Look the ledger up again: it may have been trimmed, or offloaded anew",
        details={"object": key},
    )
