"""Ranged reads of objects, 1 MiB at a time, shared by all who read (seeds/000, "Reading from S3").

Owns which ranges are being fetched and a small, bounded memory of the last ones, so that a read
that goes on where another ended fetches nothing twice. Does not own caching for longer: the
reader's cache does.

Objects are read in *units*: grains, where a side object says what each must be, and whole ranges
where none does. One request fetches as many units as a range holds. Where grains are known, a
read that begins anywhere fetches only its own; one that goes on from what is kept, or that is
longer than a range, fetches its last range to the end.

Invariants:
    * A unit is fetched once at a time, however many want it.
    * At most ``in_flight_max`` fetches run, over all objects; at most ``kept_bytes_max`` are kept.
    * A range has exactly the length that the object's size says, or the read fails.
    * What has grains is checked against them before anything is made of it, or kept. What differs
      is fetched once more, since most damage happens on the way.

Cancellation: who is cancelled gives up its own fetch; those that waited for it fetch anew.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import structlog

from tierlog.model.errors import CorruptError, Reason, RefusedError
from tierlog.model.scrub import REPAIR_COPY
from tierlog.offload.groups import plain_errors
from tierlog.ports.objects import ObjectStore

log = structlog.get_logger()

RANGE_BYTES: Final = 1024 * 1024
IN_FLIGHT_MAX: Final = 8
KEPT_BYTES_MAX: Final = 16 * RANGE_BYTES
# What remembering a unit takes beside its bytes; counts where a request brings many.
UNIT_BYTES: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeLimits:
    """Every bound of ranged reads."""

    range_bytes: int = RANGE_BYTES
    in_flight_max: int = IN_FLIGHT_MAX
    kept_bytes_max: int = KEPT_BYTES_MAX


class GrainChecks(Protocol):
    """What the grains of an object must be."""

    @property
    def grain_len(self) -> int:
        """How long each is, but the last."""
        ...

    async def check(self, start: int, body: bytes) -> None:
        """Raise ``CorruptError`` unless ``body`` belongs at ``start``, where a grain begins."""
        ...


class Source(NamedTuple):
    """An immutable object and its size; ``grains`` when something says what they must be."""

    key: str
    size: int
    grains: GrainChecks | None = None


class _UnitId(NamedTuple):
    key: str
    number: int


@dataclass(frozen=True, slots=True, eq=False)
class _Extent:
    """Units ``first`` to before ``stop`` of an object, as one request brought them."""

    key: str
    first: int
    stop: int
    body: bytes

    @property
    def size_bytes(self) -> int:
        return len(self.body) + UNIT_BYTES * (self.stop - self.first - 1)

    def ids(self) -> list[_UnitId]:
        return [_UnitId(self.key, number) for number in range(self.first, self.stop)]


class Ranges:
    """Reads of byte ranges over one object store."""

    def __init__(self, objects: ObjectStore, limits: RangeLimits) -> None:
        self._objects = objects
        self.limits = limits
        self._slots = asyncio.Semaphore(limits.in_flight_max)
        self._flying: dict[_UnitId, asyncio.Future[None]] = {}
        self._kept: dict[_UnitId, _Extent] = {}
        # The extent used longest ago first.
        self._order: OrderedDict[_Extent, None] = OrderedDict()
        self._kept_bytes = 0
        self.fetches = 0
        self.bytes_fetched = 0
        self.mismatches = 0

    def __repr__(self) -> str:
        return f"<Ranges fetches={self.fetches} flying={len(self._flying)} kept={len(self._order)}>"

    async def read(
        self, source: Source, start: int, end: int, *, exact: bool = False
    ) -> memoryview:
        """Return bytes ``start`` to ``end`` of an object, as one buffer.

        ``exact``: nobody will go on from there, so that nothing else is to be fetched.
        """
        assert 0 <= start < end <= source.size, (start, end, source)
        extents = await self._covering(source, start, end, exact=exact)
        unit, at, pieces = self._unit_of(source), start, []
        for extent in extents:
            base = extent.first * unit
            upto = min(end, base + len(extent.body))
            pieces.append(memoryview(extent.body)[at - base : upto - base])
            at = upto
        assert at == end
        return pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))

    async def warm(self, source: Source, start: int, end: int) -> None:
        """Fetch the ranges that hold these bytes, as far as they will be kept."""
        size, kept = self.limits.range_bytes, self.limits.kept_bytes_max
        end = min(end, source.size, start + max(kept // 2, size))
        if start < end:
            await self._covering(source, start, end, exact=False)

    def forget(self, key: str) -> None:
        """Drop what is kept of an object, which turned out damaged on its way or at its place."""
        for extent in [one for one in self._order if one.key == key]:
            self._drop(extent)

    def _unit_of(self, source: Source) -> int:
        return self.limits.range_bytes if source.grains is None else source.grains.grain_len

    async def _covering(
        self, source: Source, start: int, end: int, *, exact: bool
    ) -> list[_Extent]:
        """Return extents that hold these bytes, in order."""
        unit = self._unit_of(source)
        spans = self._spans(source, start // unit, (end - 1) // unit + 1, exact=exact)
        if len(spans) == 1:
            found = [await self._held(source, *spans[0])]
        else:
            with plain_errors():
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(self._held(source, *span)) for span in spans]
            found = [task.result() for task in tasks]
        extents = [extent for held in found for extent in held]
        # A neighbour may have brought more than its own span.
        covering, at = [], start
        for extent in extents:
            if at < end and extent.stop * unit > at:
                covering.append(extent)
                at = extent.stop * unit
        return covering

    def _spans(
        self, source: Source, first: int, stop: int, *, exact: bool
    ) -> list[tuple[int, int]]:
        """Cut units at the borders of ranges, or only where a request would be too long."""
        unit = self._unit_of(source)
        length = max(1, self.limits.range_bytes // unit)
        borders = range(first if exact else first // length * length, stop, length)
        spans = [(max(first, border), min(stop, border + length)) for border in borders]
        if exact or source.grains is None:
            return spans
        last_first, last_stop = spans[-1]
        goes_on = len(spans) > 1 or self._known(source, last_first - 1)
        goes_on = goes_on and not self._known(source, last_stop - 1)
        range_end = min(borders[-1] + length, -(-source.size // unit))
        while goes_on and last_stop < range_end and not self._known(source, last_stop):
            last_stop += 1
        return [*spans[:-1], (last_first, last_stop)]

    def _known(self, source: Source, number: int) -> bool:
        unit_id = _UnitId(source.key, number)
        return unit_id in self._kept or unit_id in self._flying

    async def _held(self, source: Source, first: int, stop: int) -> Sequence[_Extent]:
        """Return extents that hold these units, some of which are fetched now."""
        found, number = [], first
        while number < stop:
            unit_id = _UnitId(source.key, number)
            extent, flying = self._kept.get(unit_id), self._flying.get(unit_id)
            if extent is not None:
                self._order.move_to_end(extent)
            elif flying is not None:
                await asyncio.wait({flying})
                continue
            else:
                end = number + 1
                while end < stop and not self._known(source, end):
                    end += 1
                extent = await self._fetch(source, number, end)
            found.append(extent)
            number = extent.stop
        return found

    async def _fetch(self, source: Source, first: int, stop: int) -> _Extent:
        landed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        unit_ids = [_UnitId(source.key, number) for number in range(first, stop)]
        self._flying.update(dict.fromkeys(unit_ids, landed))
        try:
            async with self._slots:
                body = await self._get_checked(source, first, stop)
            extent = _Extent(source.key, first, stop, body)
            self._keep(extent)
            return extent
        finally:
            for unit_id in unit_ids:
                del self._flying[unit_id]
            landed.set_result(None)

    async def _get_checked(self, source: Source, first: int, stop: int) -> bytes:
        body = await self._get(source, first, stop)
        if source.grains is None:
            return body
        start = first * source.grains.grain_len
        try:
            await source.grains.check(start, body)
        except CorruptError as error:
            self.mismatches += 1
            log.warning("range.differs", key=source.key, offset=start, cause=str(error))
            body = await self._get(source, first, stop)
            await source.grains.check(start, body)
        return body

    async def _get(self, source: Source, first: int, stop: int) -> bytes:
        unit = self._unit_of(source)
        start = first * unit
        length = min(stop * unit, source.size) - start
        body = await self._objects.get_range(source.key, start, length)
        if body is None:
            raise object_gone(source.key)
        if len(body) != length:
            raise CorruptError(
                f"object {source.key} ends at byte {start + len(body)} of {source.size}",
                remedy=REPAIR_COPY,
                details={"object": source.key, "offset": str(start + len(body))},
            )
        self.fetches += 1
        self.bytes_fetched += length
        return body

    def _keep(self, extent: _Extent) -> None:
        self._kept.update(dict.fromkeys(extent.ids(), extent))
        self._order[extent] = None
        self._kept_bytes += extent.size_bytes
        while self._kept_bytes > self.limits.kept_bytes_max and len(self._order) > 1:
            self._drop(next(iter(self._order)))

    def _drop(self, extent: _Extent) -> None:
        del self._order[extent]
        self._kept_bytes -= extent.size_bytes
        for unit_id in extent.ids():
            del self._kept[unit_id]


def object_gone(key: str) -> RefusedError:
    """Say that an object is not where it should be, so that its place is looked up again."""
    return RefusedError(
        f"object {key} is not there",
        reason=Reason.LEDGER_NOT_FOUND,
        remedy="Look the ledger up again: it may have been trimmed, or offloaded anew. If it was"
        " not, repair its copy with: tierlog scrub --repair",
        details={"object": key},
    )
