"""What the reader knows of streams and ledgers, never older than a bound.

Owns a short-lived copy of the metadata: a stream's list of ledgers, a ledger's own metadata and
its offload context. Does not own the truth, which is in the metadata store.

Invariants:
    * Nothing is answered that was older than ``age_s_max`` when it was asked for.
    * Calls at once for one name cause one read of the metadata store, and all who came before it
      have what came of it, or its error: where the store is slow or away, nobody waits for turns.
    * At most ``entries_max`` names are kept of each kind, and what they take of memory is within
      the kind's part of ``BYTES_MAX``, so that a stream of many ledgers sends others away. One
      alone may be larger, since its stream could not be read without: ``size_bytes`` says so, and
      answers have less (``memory``).
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from tierlog.catalog import Catalog
from tierlog.catalog.streams import StreamSnapshot
from tierlog.model.errors import TierlogError
from tierlog.model.ids import LedgerId, StreamName
from tierlog.model.ledger import LedgerMetadata
from tierlog.model.offload import OffloadContext

BYTES_MAX: Final = 16 * 1024 * 1024
# Of these for lists of streams; the rest is for ledgers and for contexts, half of it each.
STREAMS_BYTES_MAX: Final = BYTES_MAX * 3 // 4
# A value with its key and its place, whichever it is; a listed ledger with its numbers; a segment
# and a node of its ensemble; an attempt.
VALUE_BYTES: Final = 2048
LISTED_BYTES: Final = 280
SEGMENT_BYTES: Final = 160
NODE_BYTES: Final = 80
ATTEMPT_BYTES: Final = 800

Key = TypeVar("Key")
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class _Kept(Generic[Value]):
    """A value, when its reading began, the how-manieth reading it was, and what it takes."""

    number: int
    begun_s: float
    value: Value
    size: int


@dataclass(frozen=True, slots=True)
class _Reading:
    """A reading on its way; it lands with an error, or when whoever began it is done or gone."""

    number: int
    landed: asyncio.Future[None]


class AgedCache(Generic[Key, Value]):
    """Values by key, each read again once it is too old."""

    def __init__(
        self,
        read: Callable[[Key], Awaitable[Value]],
        *,
        age_s_max: float,
        entries_max: int,
        bytes_max: int = BYTES_MAX,
        size_of: Callable[[Value], int] = lambda _: VALUE_BYTES,
    ) -> None:
        self._read = read
        self._age_s_max = age_s_max
        self._entries_max = entries_max
        self._bytes_max = bytes_max
        self._size_of = size_of
        self.size_bytes = 0
        self._kept: OrderedDict[Key, _Kept[Value]] = OrderedDict()
        self._read_count = 0
        self._reading: dict[Key, _Reading] = {}

    async def get(self, key: Key, *, fresh: bool = False) -> Value:
        """Return the value; ``fresh``: as of this call or later."""
        asked, asked_s = self._read_count, asyncio.get_running_loop().time()
        newer_than = asked if fresh else -1
        while True:
            kept = self._kept.get(key)
            if (
                kept is not None
                and kept.number > newer_than
                and asked_s - kept.begun_s <= self._age_s_max
            ):
                self._kept.move_to_end(key)
                return kept.value
            reading = self._reading.get(key)
            if reading is None:
                return await self._read_now(key)
            await asyncio.wait({reading.landed})
            error = reading.landed.exception()
            # Of one that began before the call it says nothing: what was not there then may be now.
            if error is not None and reading.number > asked:
                raise error

    async def _read_now(self, key: Key) -> Value:
        loop = asyncio.get_running_loop()
        self._read_count += 1
        number, begun_s = self._read_count, loop.time()
        landed: asyncio.Future[None] = loop.create_future()
        self._reading[key] = _Reading(number, landed)
        try:
            value = await self._read(key)
        except TierlogError as error:
            landed.set_exception(error)
            landed.exception()  # perhaps nobody else waits
            raise
        else:
            self._keep(key, _Kept(number, begun_s, value, self._size_of(value)))
            return value
        finally:
            del self._reading[key]
            if not landed.done():
                landed.set_result(None)

    def _keep(self, key: Key, kept: _Kept[Value]) -> None:
        self._drop(key)
        self._kept[key] = kept
        self.size_bytes += kept.size
        while len(self._kept) > 1 and self._is_too_much():
            self._drop(next(iter(self._kept)))

    def _is_too_much(self) -> bool:
        return self.size_bytes > self._bytes_max or len(self._kept) > self._entries_max

    def _drop(self, key: Key) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            self.size_bytes -= kept.size


class Views:
    """The reader's copies of the metadata."""

    def __init__(
        self,
        catalog: Catalog,
        *,
        age_s_max: float,
        entries_max: int,
        bytes_max: int = BYTES_MAX,
    ) -> None:
        streams = bytes_max * STREAMS_BYTES_MAX // BYTES_MAX
        others = (bytes_max - streams) // 2
        self._streams: AgedCache[StreamName, StreamSnapshot] = AgedCache(
            catalog.streams.snapshot,
            age_s_max=age_s_max,
            entries_max=entries_max,
            bytes_max=streams,
            size_of=_bytes_of_stream,
        )
        self._ledgers: AgedCache[LedgerId, LedgerMetadata | None] = AgedCache(
            catalog.ledgers.get,
            age_s_max=age_s_max,
            entries_max=entries_max,
            bytes_max=others,
            size_of=_bytes_of_ledger,
        )
        self._contexts: AgedCache[LedgerId, OffloadContext | None] = AgedCache(
            catalog.contexts.get,
            age_s_max=age_s_max,
            entries_max=entries_max,
            bytes_max=others,
            size_of=_bytes_of_context,
        )

    @property
    def size_bytes(self) -> int:
        """About what all of it takes."""
        return self._streams.size_bytes + self._ledgers.size_bytes + self._contexts.size_bytes

    async def stream(self, name: StreamName, *, fresh: bool = False) -> StreamSnapshot:
        """Return the stream with its whole list, or raise STREAM_NOT_FOUND."""
        return await self._streams.get(name, fresh=fresh)

    async def ledger(self, ledger_id: LedgerId, *, fresh: bool = False) -> LedgerMetadata | None:
        """Return a ledger's metadata; None: it is gone from tier 1."""
        return await self._ledgers.get(ledger_id, fresh=fresh)

    async def context(self, ledger_id: LedgerId, *, fresh: bool = False) -> OffloadContext | None:
        """Return a ledger's offload context, or None."""
        return await self._contexts.get(ledger_id, fresh=fresh)


def _bytes_of_stream(snapshot: StreamSnapshot) -> int:
    return VALUE_BYTES + LISTED_BYTES * len(snapshot.ledgers)


def _bytes_of_ledger(metadata: LedgerMetadata | None) -> int:
    if metadata is None:
        return VALUE_BYTES
    nodes = metadata.ensemble_size
    custom = sum(len(key) + len(value) for key, value in metadata.custom.items())
    return VALUE_BYTES + custom + (SEGMENT_BYTES + NODE_BYTES * nodes) * len(metadata.segments)


def _bytes_of_context(context: OffloadContext | None) -> int:
    if context is None:
        return VALUE_BYTES
    attempts = len(context.abandoned) + len(context.history)
    errors = len(context.last_error) + sum(len(one.error) for one in context.history)
    return VALUE_BYTES + ATTEMPT_BYTES * attempts + errors
