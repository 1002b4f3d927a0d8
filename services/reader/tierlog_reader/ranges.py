"""Ranges of data objects, fetched once for all who want them and kept for a while.

Owns the memory of tier-2 reads. Does not own what the bytes mean, nor who wants which next.

Invariants:
    * Kept and arriving bytes together never pass ``bytes_max``; a prefetch that would is not
      begun, and a read that needs the room waits for it.
    * A range that several readers want at once is fetched once.
    * A read that waits for room holds none, so reads never wait for each other in a circle.
    * When ``run`` has ended, nothing is being fetched.
"""

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import NamedTuple

import structlog

from tierlog.model.errors import Reason, RefusedError, TierlogError
from tierlog.ports.objects import ObjectStore

log = structlog.get_logger()


class RangeKey(NamedTuple):
    """The ``number``-th range of an object."""

    object_key: str
    number: int


@dataclass(slots=True)
class _Range:
    """A range that is kept, or arriving. ``wanted``: reads that wait for it now."""

    length: int
    arrived: asyncio.Future[bytes | None]
    wanted: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeLimits:
    """Every bound of the ranges."""

    range_len: int
    bytes_max: int
    in_flight_max: int

    def __post_init__(self) -> None:
        assert 0 < self.range_len <= self.bytes_max
        assert self.in_flight_max >= 1


class RangeCache:
    """Least recently used ranges of all objects, within one limit of memory."""

    def __init__(self, objects: ObjectStore, limits: RangeLimits) -> None:
        self.limits = limits
        self._objects = objects
        self._ranges: OrderedDict[RangeKey, _Range] = OrderedDict()
        self._bytes = 0
        self._slots = asyncio.Semaphore(limits.in_flight_max)
        self._room = asyncio.Event()
        self._group: asyncio.TaskGroup | None = None
        self._fetching: set[asyncio.Task[None]] = set()
        self.fetched = 0

    def __repr__(self) -> str:
        return f"<RangeCache {self._bytes}/{self.limits.bytes_max} in {len(self._ranges)}>"

    @property
    def bytes_kept(self) -> int:
        """Bytes of ranges that are kept or arriving."""
        return self._bytes

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Fetch on behalf of callers for as long as the context lasts."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            try:
                yield
            finally:
                self._group = None
                for task in self._fetching:
                    task.cancel()
                for one in self._ranges.values():
                    one.arrived.cancel()
                self._ranges.clear()
                self._bytes = 0

    async def read(self, object_key: str, start: int, end: int, *, object_len: int) -> memoryview:
        """Return bytes ``start`` to ``end`` of an object of ``object_len`` bytes.

        Raises LEDGER_NOT_FOUND when there is no such object.
        """
        assert 0 <= start < end <= object_len
        range_len = self.limits.range_len
        first, last = start // range_len, (end - 1) // range_len
        pieces: list[bytes] = []
        for number in range(first, last + 1):
            one = await self._want(RangeKey(object_key, number), object_len=object_len)
            try:
                ahead = min(self.limits.in_flight_max, last - number)
                self.prefetch(
                    object_key, (number + 1) * range_len, ranges=ahead, object_len=object_len
                )
                # Shielded: the range is wanted by others too.
                piece = await asyncio.shield(one.arrived)
            finally:
                one.wanted -= 1
                self._room.set()
            if piece is None or len(piece) != one.length:
                raise _gone(RangeKey(object_key, number))
            pieces.append(piece)
        base = first * range_len
        if len(pieces) == 1:
            return memoryview(pieces[0])[start - base : end - base]
        return memoryview(b"".join(pieces))[start - base : end - base]

    def prefetch(self, object_key: str, start: int, *, ranges: int, object_len: int) -> None:
        """Begin to fetch the ranges from ``start`` on, as far as there is room."""
        first = start // self.limits.range_len
        last = -(-object_len // self.limits.range_len)
        for number in range(first, min(first + ranges, last)):
            key = RangeKey(object_key, number)
            if key not in self._ranges and not self._begin(key, object_len=object_len):
                return

    async def _want(self, key: RangeKey, *, object_len: int) -> _Range:
        while True:
            one = self._ranges.get(key)
            if one is not None or self._begin(key, object_len=object_len):
                one = self._ranges[key]
                self._ranges.move_to_end(key)
                one.wanted += 1
                return one
            self._room.clear()
            await self._room.wait()

    def _begin(self, key: RangeKey, *, object_len: int) -> bool:
        """Make room for a range and fetch it; False: there is no room now."""
        assert self._group is not None, "run() first"
        start = key.number * self.limits.range_len
        length = min(self.limits.range_len, object_len - start)
        if not self._evict(self.limits.bytes_max - length):
            return False
        arrived: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()
        self._ranges[key] = _Range(length, arrived)
        self._bytes += length
        task = self._group.create_task(self._fetch(key, start, self._ranges[key]))
        self._fetching.add(task)
        task.add_done_callback(self._fetching.discard)
        return True

    def _evict(self, bytes_max: int) -> bool:
        if self._bytes <= bytes_max:
            return True
        idle = [key for key, one in self._ranges.items() if one.arrived.done() and not one.wanted]
        for key in idle:
            self._drop(key, self._ranges[key])
            if self._bytes <= bytes_max:
                return True
        return False

    def _drop(self, key: RangeKey, one: _Range) -> None:
        if self._ranges.get(key) is one:
            del self._ranges[key]
            self._bytes -= one.length
            self._room.set()

    async def _fetch(self, key: RangeKey, start: int, one: _Range) -> None:
        try:
            async with self._slots:
                self.fetched += 1
                data = await self._objects.get_range(key.object_key, start, one.length)
        except TierlogError as error:
            # Told to whoever waits; nobody may, and then nobody misses it.
            self._drop(key, one)
            if not one.arrived.done():
                one.arrived.set_exception(error)
                one.arrived.exception()
            return
        if data is None or len(data) != one.length:
            self._drop(key, one)
        if not one.arrived.done():
            one.arrived.set_result(data)
        self._room.set()


def _gone(key: RangeKey) -> RefusedError:
    return RefusedError(
        f"range {key.number} of object {key.object_key} is not there (any more)",
        remedy="The ledger is looked up again",
        reason=Reason.LEDGER_NOT_FOUND,
        details={"key": key.object_key},
    )
