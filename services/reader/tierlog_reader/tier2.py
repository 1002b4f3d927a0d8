"""Frames of ledgers in the object store, for ``source``: open handles, and reading ahead.

Owns which ledgers are open and what is fetched before it is asked for. Does not own how an entry
is found in an object (``tierlog.offload.tier2_reader``), nor the memory of ranges.

Invariants:
    * At most ``handles_max`` indexes are kept, of ``index_bytes_max`` together; one that turned out
      damaged or gone is not. ``index_bytes`` are of all that are open: one that was put aside
      counts until the last who uses it has let it go. Those in use may pass the bound alone.
    * Only who went on where an earlier read ended is read ahead for (or begins a ledger, and asks
      for more than ``FEW_ENTRIES_MAX`` entries), over the border of the ledger too, a few fetches
      a ledger at a time; a failed one is forgotten, for whoever needs the range asks again. Who
      has read on for as long as is read ahead is given longer requests, and more ahead.
    * A copy is opened once at a time, and is held for each who waited for it, so that others who
      open theirs do not close it. It is opened when whoever asked has gone, too.
    * A failure to open is told to all who waited, and is not kept.
    * When ``run`` has ended, nothing is being fetched or opened.
"""

import asyncio
import contextlib
import itertools
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Final
from uuid import UUID

import structlog

from tierlog.ledger.reader import ReadHandle
from tierlog.model.errors import CorruptError, RefusedError, RetryableError, TierlogError
from tierlog.model.ids import EntryId
from tierlog.model.offload import OffloadContext, Tier2Location
from tierlog.model.scrub import REPAIR_COPY
from tierlog.model.stream import ListedLedger
from tierlog.offload.drivers import known_here
from tierlog.offload.frames import FrameHandle, FramesOfRuns
from tierlog.offload.groups import Outlasting
from tierlog.offload.index_loader import index_cache_key, load_index
from tierlog.offload.offsets import OffsetsCache
from tierlog.offload.ranges import Ranges
from tierlog.offload.side_reader import SidePages, open_side, side_cache_key
from tierlog.offload.single_reader import SingleHandle, load_single_index, single_cache_key
from tierlog.offload.tier2_reader import FEW_ENTRIES_MAX, ObjectHandle, Tier2Handle
from tierlog.ports.cache import SharedCache
from tierlog.ports.objects import ObjectReads
from tierlog_reader.chunk import Budget, Chunk, without_rest
from tierlog_reader.places import Following, Tier
from tierlog_reader.timings import INDEX_READ

log = structlog.get_logger()

ENDS_MAX: Final = 4096
# Ledgers that are opened ahead for one reader; more would send away what others have open.
LEDGERS_AHEAD_MAX: Final = 2
# So many fetches ahead of those who read one copy: who reads on does not wait for the last of one
# before the next begins.
FETCHES_AHEAD_MAX: Final = 3
# What is read ahead grows twofold at least, and holds two requests, as long as those grow.
AHEAD_GROWTH_MAX: Final = 2
DOUBLINGS_MAX: Final = 10
# A handle with its metadata; a block of an index, and a page in a side object's header.
HANDLE_BYTES: Final = 4096
BLOCK_BYTES: Final = 200

OpenOther = Callable[[OffloadContext], Awaitable[ReadHandle]]
"""Opens a copy that a driver wrote which isn't one of Tierlog's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier2Limits:
    """Every bound of tier-2 reads, but for the memory of ranges."""

    handles_max: int
    index_ttl_s: int
    ahead_bytes: int
    index_bytes_max: int = 16 * 1024 * 1024
    """What the indexes of all open copies take, but for what those in use take above it."""


@dataclass(slots=True, eq=False)
class _Open:
    """An open copy. Once it is put aside, the last who uses it closes it."""

    handle: FrameHandle
    index_bytes: int
    users: int = 0
    aside: bool = False


@dataclass(slots=True, eq=False)
class _Opening:
    """A copy that is being opened. Once it is, each who waits is one of its users."""

    landed: asyncio.Future[None]
    """Has the error. Neither an error nor a copy: whoever opened it gave up."""
    waiting: int = 0
    opened: _Open | None = None


class ObjectTier:
    """Tier 2 as ``source`` wants it."""

    def __init__(
        self,
        objects: ObjectReads,
        ranges: Ranges,
        shared: SharedCache,
        limits: Tier2Limits,
        *,
        bucket: str,
        endpoint_name: str = "default",
        open_other: OpenOther | None = None,
    ) -> None:
        self._objects = objects
        self._ranges = ranges
        self.offsets = OffsetsCache()
        self._outlasting = Outlasting()
        self.side_pages = SidePages(objects, outlasting=self._outlasting)
        self.index_bytes = 0
        """What the indexes of all open copies take, also of those that are kept no more."""
        self._shared = shared
        self._limits = limits
        self._here = (endpoint_name, bucket)
        self._open_other = open_other
        self._handles: OrderedDict[UUID, _Open] = OrderedDict()
        self._opening: dict[UUID, _Opening] = {}
        # Where reads ended, and how much was read up to there without a gap.
        self._ends: OrderedDict[tuple[UUID, int], int] = OrderedDict()
        self._group: asyncio.TaskGroup | None = None
        self._ahead: dict[UUID, set[asyncio.Task[None]]] = {}

    def __repr__(self) -> str:
        return f"<ObjectTier {len(self._handles)} open, {len(self._ahead)} read ahead>"

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Read ahead for as long as the context lasts, and close what was opened."""
        try:
            async with self._outlasting.run(), asyncio.TaskGroup() as group:
                self._group = group
                try:
                    yield
                finally:
                    self._group = None
                    for task in itertools.chain.from_iterable(self._ahead.values()):
                        task.cancel()
        finally:
            for uuid in list(self._handles):
                await self._put_aside(uuid)

    async def read(
        self,
        ledger: ListedLedger,
        context: OffloadContext,
        first_entry_id: EntryId,
        budget: Budget,
        following: Following | None = None,
    ) -> Chunk:
        """Return what follows ``first_entry_id`` in its block, within the budget.

        ``following``: into which ledger to read ahead behind the end of this one.
        """
        assert context.uuid is not None
        opened = await self._open(ledger, context)
        async with self._using(opened) as handle:
            try:
                read = await handle.read_frames(
                    first_entry_id,
                    budget.bytes_max,
                    entries_max=budget.entries_max,
                    alone_max=budget.alone_max,
                )
            except (CorruptError, RefusedError):
                await self._disown(context)
                raise
        count = min(len(read.offsets), budget.entries_max)
        frames = read.frames
        if count < len(read.offsets):
            frames = frames[: int(read.offsets[count])]
        after = EntryId(first_entry_id + count)
        gone_on = self._gone_on(context.uuid, first_entry_id, budget)
        if gone_on is not None:
            self._read_ahead(context.uuid, opened, after, following, gone_on)
        self._note_end(context.uuid, after, (gone_on or 0) + len(frames))
        return Chunk(
            ledger_id=ledger.ledger_id,
            first_entry_id=first_entry_id,
            count=count,
            frames=(without_rest(frames),),
            tier=Tier.TIER2,
        )

    async def entry_at_time(
        self, ledger: ListedLedger, context: OffloadContext, publish_ms: int
    ) -> EntryId | None:
        """Return an entry before which all are older; None: no times are known."""
        assert context.uuid is not None
        async with self._using(await self._open(ledger, context)) as handle:
            if not isinstance(handle, ObjectHandle):
                return None
            try:
                return await handle.entry_at_time(publish_ms)
            except (CorruptError, RefusedError):
                await self._disown(context)
                raise

    def _note_end(self, uuid: UUID, entry_id: EntryId, gone_on: int) -> None:
        self._ends[uuid, entry_id] = gone_on
        self._ends.move_to_end((uuid, entry_id))
        if len(self._ends) > ENDS_MAX:
            self._ends.popitem(last=False)

    def _gone_on(self, uuid: UUID, entry_id: EntryId, budget: Budget) -> int | None:
        """Return how much was read without a gap up to an entry; None: who reads it jumped.

        Who begins with a ledger's first entry goes on from there, unless a few are all it wants.
        """
        begins = entry_id == 0 and budget.entries_max > FEW_ENTRIES_MAX
        return self._ends.get((uuid, entry_id), 0 if begins else None)

    def _read_ahead(
        self,
        uuid: UUID,
        opened: _Open,
        entry_id: EntryId,
        following: Following | None,
        gone_on: int,
    ) -> None:
        if self._group is None or len(self._ahead.get(uuid, ())) >= FETCHES_AHEAD_MAX:
            return
        tasks = self._ahead.setdefault(uuid, set())
        # Who reads beside others leaves them room in memory. Powers of two have common borders.
        share = self._ranges.limits.growth_max // len(self._ahead)
        doublings = min(gone_on // self._limits.ahead_bytes, DOUBLINGS_MAX)
        growth = 1 << min(doublings, max(0, share.bit_length() - 1))
        task = self._group.create_task(self._fetch_ahead(opened, entry_id, following, growth))
        tasks.add(task)
        task.add_done_callback(partial(self._fetched_ahead, uuid))

    def _fetched_ahead(self, uuid: UUID, task: asyncio.Task[None]) -> None:
        self._ahead[uuid].discard(task)
        if not self._ahead[uuid]:
            del self._ahead[uuid]

    async def _fetch_ahead(
        self, opened: _Open, entry_id: EntryId, following: Following | None, growth: int
    ) -> None:
        left = max(
            self._limits.ahead_bytes * min(growth, AHEAD_GROWTH_MAX),
            AHEAD_GROWTH_MAX * growth * self._ranges.limits.range_bytes,
        )
        ledger_id = opened.handle.ledger_id
        if opened.aside:
            return
        opened.users += 1
        try:
            for others_left in reversed(range(LEDGERS_AHEAD_MAX + 1)):
                async with self._using(opened) as handle:
                    left -= await handle.prefetch(entry_id, left, growth=growth)
                if left <= 0 or following is None or not others_left:
                    return
                found = await following(ledger_id)
                if found is None:
                    return
                ledger_id, entry_id = found[0].ledger_id, EntryId(0)
                opened = await self._open(*found)
        except TierlogError as error:
            log.debug("read_ahead.failed", ledger_id=ledger_id, cause=str(error))
        except Exception:
            # A bug, perhaps a driver's: no end for those who are served meanwhile.
            log.exception("unexpected_error", work="read ahead", ledger_id=ledger_id)

    @contextlib.asynccontextmanager
    async def _using(self, opened: _Open) -> AsyncIterator[FrameHandle]:
        """Give the handle to a user that was counted already."""
        try:
            yield opened.handle
        finally:
            await self._let_go(opened)

    async def _let_go(self, opened: _Open) -> None:
        """Take back that somebody uses it."""
        opened.users -= 1
        assert opened.users >= 0, "more let it go than used it"
        if opened.users:
            return
        if opened.aside:
            self.index_bytes -= opened.index_bytes
            await _close_all([opened])
        else:
            await _close_all(self._unused_beyond(at_least=1))

    async def _disown(self, context: OffloadContext) -> None:
        """Let nobody go on with what is known of a copy: neither here nor in another reader."""
        assert context.uuid is not None
        await self._put_aside(context.uuid)
        location = context.location
        if location is None or not known_here(location):
            return
        if location.is_single:
            await self._shared.drop(single_cache_key(location))
            return
        await self._shared.drop(index_cache_key(location))
        await self._shared.drop(side_cache_key(location))

    async def _put_aside(self, uuid: UUID) -> None:
        if uuid in self._handles:
            await _close_all(self._taken_out(uuid))

    def _taken_out(self, uuid: UUID) -> list[_Open]:
        """Put a copy aside; return it for being closed, unless somebody uses it."""
        opened = self._handles.pop(uuid)
        opened.aside = True
        if opened.users:
            return []
        self.index_bytes -= opened.index_bytes
        return [opened]

    async def _open(self, ledger: ListedLedger, context: OffloadContext) -> _Open:
        """Return an open copy, of which whoever asks is a user: see ``_using``."""
        uuid = context.uuid
        assert uuid is not None
        while (kept := self._handles.get(uuid)) is None:
            opening, work = self._opening.get(uuid), None
            if opening is None:
                opening = _Opening(asyncio.get_running_loop().create_future())
                self._opening[uuid] = opening
                work = self._open_for_all(ledger, context, opening)
            opening.waiting += 1
            try:
                if work is not None:
                    await self._outlasting.begin(work)
                await asyncio.wait({opening.landed})
            except asyncio.CancelledError:
                opening.waiting -= 1
                if opening.opened is not None:
                    await self._let_go(opening.opened)
                raise
            opening.landed.result()
            if opening.opened is not None:
                return opening.opened
        self._handles.move_to_end(uuid)
        kept.users += 1
        return kept

    async def _open_for_all(
        self, ledger: ListedLedger, context: OffloadContext, opening: _Opening
    ) -> None:
        uuid, location = context.uuid, context.location
        assert uuid is not None
        assert location is not None
        others: list[_Open] = []
        try:
            handle = await self._opened(ledger, context, location)
            opened = _Open(handle, _index_bytes_of(handle), users=opening.waiting)
            others = self._unused_beyond(opened.index_bytes)
            while len(self._handles) >= self._limits.handles_max:
                others += self._taken_out(self._first_to_go())
            self._handles[uuid] = opened
            self.index_bytes += opened.index_bytes
            opening.opened = opened
        except Exception as error:  # noqa: BLE001 - who waits raises it
            opening.landed.set_exception(error)
            opening.landed.exception()  # perhaps nobody waits any more
        finally:
            del self._opening[uuid]
            if not opening.landed.done():
                opening.landed.set_result(None)
        await _close_all(others)

    def _unused_beyond(self, index_bytes: int = 0, *, at_least: int = 0) -> list[_Open]:
        """Take out whom nobody uses, as long as there is no room for one of that size.

        Whoever is in use gives back nothing by going, and would be opened once more beside itself.
        ``at_least`` so many stay: one alone may be larger than all that there is.
        """
        found: list[_Open] = []
        for uuid, one in list(self._handles.items()):
            enough = self.index_bytes + index_bytes <= self._limits.index_bytes_max
            if enough or len(self._handles) <= at_least:
                break
            if not one.users:
                found += self._taken_out(uuid)
        return found

    def _first_to_go(self) -> UUID:
        """Return the longest unused of those that nobody uses, or of all."""
        unused = (uuid for uuid, one in self._handles.items() if not one.users)
        return next(unused, next(iter(self._handles)))

    async def _opened(
        self, ledger: ListedLedger, context: OffloadContext, location: Tier2Location
    ) -> FrameHandle:
        if not known_here(location):
            return await self._opened_other(ledger, context, location)
        if (location.endpoint_name, location.bucket) != self._here:
            endpoint_name, bucket = self._here
            raise RetryableError(
                f"object {location.data_key} lies in bucket {location.bucket} of endpoint "
                f"{location.endpoint_name}, and this reader reads {bucket} of {endpoint_name}",
                remedy="Start a reader whose s3 settings name that bucket and endpoint",
                details={"bucket": location.bucket, "endpoint_name": location.endpoint_name},
            )
        if location.is_single:
            return await self._opened_single(ledger, context, location)
        with INDEX_READ.time():
            index = await load_index(
                self._objects,
                location,
                copy=context.copy,
                cache=self._shared,
                ttl_s=self._limits.index_ttl_s,
            )
        _check_last(index.last_entry_id, ledger, location)
        side = await open_side(
            self._objects,
            location,
            index,
            self.side_pages,
            copy=context.copy,
            cache=self._shared,
            ttl_s=self._limits.index_ttl_s,
        )
        return Tier2Handle(
            ledger.ledger_id,
            location,
            index,
            ranges=self._ranges,
            offsets=self.offsets,
            side=side,
        )

    async def _opened_other(
        self, ledger: ListedLedger, context: OffloadContext, location: Tier2Location
    ) -> FrameHandle:
        if self._open_other is None:
            raise RefusedError(
                f"ledger {ledger.ledger_id} was copied by driver {location.driver!r}, which this "
                f"reader does not have",
                remedy="Start a reader that was given this driver",
                details={"driver": location.driver},
            )
        handle = await self._open_other(context)
        try:
            _check_last(handle.ledger_metadata.last_entry_id, ledger, location)
        except CorruptError:
            await handle.close()
            raise
        return FramesOfRuns(handle)

    async def _opened_single(
        self, ledger: ListedLedger, context: OffloadContext, location: Tier2Location
    ) -> FrameHandle:
        with INDEX_READ.time():
            index = await load_single_index(
                self._objects,
                location,
                copy=context.copy,
                cache=self._shared,
                ttl_s=self._limits.index_ttl_s,
            )
        _check_last(index.last_entry_id, ledger, location)
        return SingleHandle(
            ledger.ledger_id, location, index, ranges=self._ranges, offsets=self.offsets
        )


def _index_bytes_of(handle: FrameHandle) -> int:
    """Return about what a handle's tables take."""
    if not isinstance(handle, ObjectHandle):
        return HANDLE_BYTES
    return HANDLE_BYTES + BLOCK_BYTES * len(handle.index.entries) + handle.side_header_bytes


async def _close_all(unused: Iterable[_Open]) -> None:
    for one in unused:
        try:
            await one.handle.close()
        except Exception as error:  # noqa: BLE001 - nobody who reads has to do with it
            log.warning("handle.not_closed", ledger_id=one.handle.ledger_id, cause=str(error))


def _check_last(found: EntryId, ledger: ListedLedger, location: Tier2Location) -> None:
    if found != ledger.last_entry_id:
        raise CorruptError(
            f"index object {location.index_key} ends with entry {found}, "
            f"its ledger with {ledger.last_entry_id}",
            remedy=REPAIR_COPY,
            details={"object": location.index_key, "offset": "0"},
        )
