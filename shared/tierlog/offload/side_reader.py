"""Side objects as readers use them: the header once, pages as they are needed.

Owns a bounded memory of pages, shared by all handles of a process, and the questions that
columns answer: where an entry is, where it ends at the latest, what grains must be, where a time
begins. Does not own the layout (``tierlog.format.side``), nor the data object's bytes.

Invariants:
    * A header is of the ledger, the attempt and the index that it is used with, and has the
      digest that the ledger's context names, wherever it came from. Pages were made for it.
    * ``size_bytes <= bytes_max`` always: pages on their way have their room before they are asked
      for, which pages that are kept give up. Where others on their way have all of it, they are
      waited for, in turns; who has room waits for nothing but the store, so that all get some.
    * A page is fetched once at a time, and all who waited for it get it, or the error. It comes
      when whoever asked for it goes, too, within ``Outlasting.run``.
    * Damage is ``CorruptError`` with the object and the byte, and is never remembered.

Without a digest of what is wanted the shared cache is not used.
"""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, NoReturn

import numpy as np
import structlog

from tierlog.format.checksum import Buffer
from tierlog.format.frame import FRAME_HEADER_LEN
from tierlog.format.grains import GrainColumns, GrainSums
from tierlog.format.index import ObjectIndex
from tierlog.format.side import (
    PAGE_LEN,
    ROWS_A_PAGE,
    SIDE_FIXED_LEN,
    SideHeader,
    last_at_or_before,
)
from tierlog.model.errors import CorruptError, RefusedError
from tierlog.model.ids import EntryId
from tierlog.model.offload import Tier2Copy, Tier2Location
from tierlog.model.scrub import REPAIR_COPY
from tierlog.offload.groups import Outlasting
from tierlog.offload.offsets import Note
from tierlog.offload.ranges import object_gone
from tierlog.offload.semaphore import WeightedSemaphore
from tierlog.ports.cache import SharedCache
from tierlog.ports.filling import length_of
from tierlog.ports.objects import ObjectReads

log = structlog.get_logger()

# The first request brings a header, and of small objects all of it.
HEAD_BYTES: Final = 64 * 1024
PAGES_BYTES_MAX: Final = 4 * 1024 * 1024
# A page of 127 rows as arrays, and its place in the memory.
PAGE_BYTES: Final = PAGE_LEN + 1024
# A grain's neighbours may stand in the next page, so that two come at once; who goes on from the
# page before gets what a hundred megabytes need.
PAGES_A_FETCH: Final = 2
PAGES_AHEAD: Final = 16
# Entries up to this length are fetched whole at once, wherever they begin.
LONG_BYTES: Final = 64 * 1024
SIDE_TTL_S: Final = 3600


class _PageId(NamedTuple):
    key: str
    number: int


class _Flight(NamedTuple):
    """Pages on their way, from the ``first`` on; None lands when who fetched them gave up."""

    first: int
    landed: asyncio.Future[list[GrainColumns] | None]


class SidePages:
    """Pages of side objects that were used lately."""

    def __init__(
        self,
        objects: ObjectReads,
        *,
        bytes_max: int = PAGES_BYTES_MAX,
        outlasting: Outlasting | None = None,
    ) -> None:
        assert bytes_max >= PAGES_AHEAD * PAGE_BYTES
        self._objects = objects
        self._outlasting = outlasting if outlasting is not None else Outlasting()
        self._bytes_max = bytes_max
        self._kept: OrderedDict[_PageId, GrainColumns] = OrderedDict()
        self._flying: dict[_PageId, _Flight] = {}
        self._rooms = WeightedSemaphore(bytes_max // PAGE_BYTES, self._make_room)
        self.fetches = 0

    def __repr__(self) -> str:
        coming = self._rooms.taken
        return f"<SidePages {len(self._kept)} kept, {coming} coming, fetches={self.fetches}>"

    @property
    def size_bytes(self) -> int:
        """What is kept, and what is on its way."""
        return PAGE_BYTES * (len(self._kept) + self._rooms.taken)

    async def page(self, key: str, header: SideHeader, number: int) -> GrainColumns:
        """Return the rows of a page."""
        page_id = _PageId(key, number)
        while (kept := self._kept.get(page_id)) is None:
            flight = self._flying.get(page_id) or await self._fetch(key, header, number)
            await asyncio.wait({flight.landed})
            pages = flight.landed.result()
            if pages is not None:
                return pages[number - flight.first]
        self._kept.move_to_end(page_id)
        return kept

    def put(self, key: str, number: int, rows: GrainColumns) -> None:
        """Keep a page."""
        self._kept[_PageId(key, number)] = rows
        self._kept.move_to_end(_PageId(key, number))
        self._make_room()

    def _make_room(self) -> None:
        while self.size_bytes > self._bytes_max:
            self._kept.popitem(last=False)

    def forget(self, key: str) -> None:
        """Drop what is kept of an object."""
        for page_id in [one for one in self._kept if one.key == key]:
            del self._kept[page_id]

    def _known(self, key: str, number: int) -> bool:
        page_id = _PageId(key, number)
        return page_id in self._kept or page_id in self._flying

    async def _fetch(self, key: str, header: SideHeader, number: int) -> _Flight:
        """Begin to fetch a page, and some behind it."""
        wanted = PAGES_AHEAD if self._known(key, number - 1) else PAGES_A_FETCH
        last, stop = min(number + wanted, header.page_count), number + 1
        while stop < last and not self._known(key, stop):
            stop += 1
        flight = _Flight(number, asyncio.get_running_loop().create_future())
        numbers = range(number, stop)
        self._flying.update(dict.fromkeys([_PageId(key, one) for one in numbers], flight))
        await self._outlasting.begin(self._bring(key, header, numbers, flight.landed))
        return flight

    async def _bring(
        self,
        key: str,
        header: SideHeader,
        numbers: range,
        landed: asyncio.Future[list[GrainColumns] | None],
    ) -> None:
        try:
            async with self._rooms.room(len(numbers)):
                pages = await self._get(key, header, numbers)
            for number, rows in zip(numbers, pages, strict=True):
                self.put(key, number, rows)
            landed.set_result(pages)
        except Exception as error:  # noqa: BLE001 - who waits raises it
            landed.set_exception(error)
            landed.exception()  # perhaps nobody waits any more
        finally:
            for number in numbers:
                del self._flying[_PageId(key, number)]
            if not landed.done():
                landed.set_result(None)

    async def _get(self, key: str, header: SideHeader, numbers: range) -> list[GrainColumns]:
        start, end = header.page_place(numbers[0])[0], header.page_place(numbers[-1])[1]
        body = await _range(self._objects, key, start, end - start)
        self.fetches += 1
        return _decoded_pages(key, header, numbers, body, start)


class SideReader:
    """One side object; says what its grains must be (``ranges.GrainChecks``)."""

    def __init__(self, location: Tier2Location, header: SideHeader, pages: SidePages) -> None:
        self._key = location.side_key
        self._data_key = location.data_key
        self.header = header
        self._pages = pages

    def __repr__(self) -> str:
        return f"<SideReader {self._key} {self.header.grain_count} grains>"

    @property
    def grain_len(self) -> int:
        """How long a grain is."""
        return self.header.grain_len

    async def place_before(self, entry_id: EntryId) -> Note:
        """Return the first entry of the grain in which an entry begins, and its place."""
        number = self.header.page_of_entry(entry_id)
        rows = await self._page(number)
        row = last_at_or_before(rows.first_entry_ids, entry_id)
        return self._note(number, rows, row)

    async def likely_end(self, first_entry_id: EntryId, last_entry_id: EntryId) -> int | None:
        """Return up to where these entries are worth to be fetched in one request.

        That is where the last has ended for sure, unless it may be longer than ``LONG_BYTES``.
        None where it is too far from the first to look for it.
        """
        number = self.header.page_of_entry(last_entry_id)
        if number > self.header.page_of_entry(first_entry_id) + 1:
            return None
        rows = await self._page(number)
        row = last_at_or_before(rows.first_entry_ids, last_entry_id)
        grain_end = (ROWS_A_PAGE * number + row + 1) * self.grain_len
        if row + 1 == len(rows.crcs) and number + 1 == self.header.page_count:
            return self.header.data_len
        if row + 1 == len(rows.crcs):
            number, row, rows = number + 1, -1, await self._page(number + 1)
        follower = self._note(number, rows, row + 1)
        if follower.entry_id > last_entry_id + 1:
            # The entry behind it begins in the same grain.
            return grain_end
        return min(follower.offset, grain_end + FRAME_HEADER_LEN + LONG_BYTES)

    async def entry_at_time(self, publish_ms: int) -> EntryId | None:
        """Return an entry before which all are older; None when no times are known.

        The first of a grain, so that whoever wants the exact one goes on from there.
        """
        header = self.header
        if int(header.publish_ms_max[-1]) == 0:
            return None
        number = header.page_of_time(publish_ms)
        if number is None:
            return EntryId(header.entry_count)
        rows = await self._page(number)
        row = int(np.argmax(rows.publish_ms_max >= publish_ms))
        return EntryId(int(rows.first_entry_ids[row]))

    async def times_of(self, start: int, end: int) -> tuple[int, int]:
        """Return the smallest and largest publish time of entries in these bytes; 0, 0: unknown.

        Of their grains, that is, so that they may be of entries nearby.
        """
        first, stop = start // self.grain_len, (end - 1) // self.grain_len + 1
        low = await self._column("publish_ms_min", first, stop)
        high = await self._column("publish_ms_max", first, stop)
        known = high > 0
        return (int(low[known].min()), int(high.max())) if bool(known.any()) else (0, 0)

    async def check(self, start: int, body: Sequence[Buffer]) -> None:
        """Raise ``CorruptError`` unless the grains of ``body`` are as they were written."""
        size = self.grain_len
        assert start % size == 0
        first = start // size
        expected = await self._column("crcs", first, first + -(-length_of(body) // size))
        found = GrainSums(size)
        for buffer in body:
            found.add(buffer)
        differs = found.crcs() != expected
        if differs.any():
            self._damaged(first + int(differs.argmax()))

    def forget(self) -> None:
        """Drop what is kept of the pages."""
        self._pages.forget(self._key)

    async def _column(
        self, name: str, first: int, stop: int
    ) -> "np.ndarray[tuple[int], np.dtype[np.integer[Any]]]":
        """Return a column of the grains from ``first`` on and before ``stop``."""
        parts = []
        for number in range(first // ROWS_A_PAGE, (stop - 1) // ROWS_A_PAGE + 1):
            rows, before = await self._page(number), ROWS_A_PAGE * number
            parts.append(getattr(rows, name)[max(first - before, 0) : stop - before])
        return np.concatenate(parts)

    async def _page(self, number: int) -> GrainColumns:
        return await self._pages.page(self._key, self.header, number)

    def _note(self, number: int, rows: GrainColumns, row: int) -> Note:
        grain_start = (ROWS_A_PAGE * number + row) * self.grain_len
        offset = grain_start + int(rows.entry_offsets[row])
        return Note(EntryId(int(rows.first_entry_ids[row])), offset)

    def _damaged(self, grain: int) -> NoReturn:
        start = grain * self.grain_len
        end = min(start + self.grain_len, self.header.data_len)
        raise CorruptError(
            f"object {self._data_key}, bytes {start} to {end}: grain {grain} has another "
            f"checksum than its side object says",
            remedy=REPAIR_COPY,
            details={"object": self._data_key, "offset": str(start), "grain": str(grain)},
        )


async def open_side(
    objects: ObjectReads,
    location: Tier2Location,
    index: ObjectIndex,
    pages: SidePages,
    *,
    copy: Tier2Copy | None,
    cache: SharedCache | None = None,
    ttl_s: int = SIDE_TTL_S,
) -> SideReader | None:
    """Return a reader of an attempt's side object; None when it has none."""
    if copy is None or copy.side_len == 0:
        return None
    head = _Head(location, copy)
    found = await head.cached(cache) if cache is not None and head.digest else None
    if found is None:
        found = await head.fetched(objects)
        if cache is not None and head.digest:
            await cache.put(head.cache_key, found, ttl_s=ttl_s)
    header = _decoded_header(location.side_key, found)
    check_side_header(header, location, index, copy)
    if head.is_whole:
        body = memoryview(found)[header.header_len :]
        numbers = range(header.page_count)
        for number, rows in enumerate(
            _decoded_pages(location.side_key, header, numbers, body, header.header_len)
        ):
            pages.put(location.side_key, number, rows)
    return SideReader(location, header, pages)


def check_side_header(
    header: SideHeader, location: Tier2Location, index: ObjectIndex, copy: Tier2Copy
) -> None:
    """Raise ``CorruptError`` unless a header is of this attempt, and agrees with its index."""
    key = location.side_key
    if not location.data_key.endswith(f"{header.uuid}-ledger-{header.ledger_id}"):
        _differs(key, f"is of attempt {header.uuid} of ledger {header.ledger_id}")
    if header.side_len != copy.side_len:
        _differs(key, f"says {header.side_len} bytes where the context has {copy.side_len}")
    if (header.data_len, header.entry_count) != (index.data_len, index.last_entry_id + 1):
        _differs(key, f"is of {header.entry_count} entries in {header.data_len} bytes")


def side_cache_key(location: Tier2Location) -> str:
    """Return under which key readers share an attempt's side header."""
    return f"side:{location.endpoint_name}:{location.bucket}:{location.side_key}"


class _Head:
    """The bytes that a header is read from: all of a small object, or the header alone."""

    def __init__(self, location: Tier2Location, copy: Tier2Copy) -> None:
        self._key = location.side_key
        self._side_len = copy.side_len
        self.is_whole = copy.side_len <= HEAD_BYTES
        self.digest = copy.side_sha256 if self.is_whole else copy.side_header_sha256
        self.cache_key = side_cache_key(location)

    async def cached(self, cache: SharedCache) -> bytes | None:
        raw = await cache.get(self.cache_key)
        if raw is not None and hashlib.sha256(raw).digest() != self.digest:
            log.warning("side.cache_refused", key=self._key, length=len(raw))
            return None
        return raw

    async def fetched(self, objects: ObjectReads) -> bytes:
        raw = await _range(objects, self._key, 0, min(self._side_len, HEAD_BYTES))
        if not self.is_whole:
            header_len = _header_len(self._key, raw)
            if header_len > len(raw):
                raw += await _range(objects, self._key, len(raw), header_len - len(raw))
            raw = raw[:header_len]
        if self.digest and hashlib.sha256(raw).digest() != self.digest:
            _differs(self._key, "has another digest than the ledger's context")
        return raw


async def _range(objects: ObjectReads, key: str, start: int, length: int) -> bytes:
    body = await objects.get_range(key, start, length)
    if body is None:
        raise object_gone(key)
    if len(body) != length:
        _differs(key, f"ends at byte {start + len(body)}", start + len(body))
    return body


def _header_len(key: str, raw: bytes) -> int:
    try:
        return SideHeader.header_len_at(raw[:SIDE_FIXED_LEN])
    except (CorruptError, RefusedError) as error:
        raise _named(error, key, 0) from error


def _decoded_header(key: str, raw: bytes) -> SideHeader:
    try:
        return SideHeader.decode(raw)
    except CorruptError as error:
        raise _named(error, key, 0) from error


def _decoded_pages(
    key: str, header: SideHeader, numbers: range, body: bytes | memoryview, start: int
) -> list[GrainColumns]:
    """Return the pages that lie back to back in ``body``, which begins at byte ``start``."""
    view = memoryview(body)
    places = [header.page_place(number) for number in numbers]
    try:
        return [
            header.decode_page(view[place - start : end - start], number)
            for number, (place, end) in zip(numbers, places, strict=True)
        ]
    except CorruptError as error:
        raise _named(error, key, start) from error


def _named(error: CorruptError | RefusedError, key: str, start: int) -> CorruptError:
    details = {"offset": str(start), **error.details, "object": key}
    return CorruptError(f"{key}: {error.message}", remedy=error.remedy, details=details)


def _differs(key: str, what: str, offset: int = 0) -> NoReturn:
    raise CorruptError(
        f"side object {key} {what}",
        remedy=REPAIR_COPY,
        details={"object": key, "offset": str(offset)},
    )
