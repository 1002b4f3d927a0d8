"""One task of a read: entries of one ledger from the object store, or a range from a reader.

Owns the order: bytes are fetched by large ranges, ahead of what is taken apart; grains are
checked before anything is made of them (``tierlog.offload.ranges``). Does not own the decoding.

Invariants:
    * Memory is bounded by the ranges that are fetched ahead, whatever a part's length.
    * Each error names the object or the stream, and where in it.
    * A copy of which only its whole digest tells a flipped byte is compared behind a read of all of
      it: what is right by then was so when it was read. Where several tasks read it, the one that
      has its end compares it, behind its own part alone: others may still read theirs.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator
from typing import Any, Final

import numpy as np

from tierlog.format.frame import Offsets
from tierlog.model.errors import CorruptError, RefusedError, TierlogError
from tierlog.model.ids import INT64_MAX, EntryId
from tierlog.model.scrub import REPAIR_COPY
from tierlog.offload.single_reader import SingleHandle
from tierlog.offload.tier2_reader import FramesRead, ObjectHandle, Tier2Handle
from tierlog.offload.verify import ReadBack, verify_copy
from tierlog.ports.objects import ObjectStore
from tierlog.runtime.settings import S3Settings
from tierlog.wiring.compression import decompressors
from tierlog_spark.batches import record_batches
from tierlog_spark.bucket import opened_store
from tierlog_spark.decoding import EventColumns, events_in, raw_events
from tierlog_spark.planning import StoredLedger, StorePart
from tierlog_spark.worker import Batches, opened_copy

FETCHES_AHEAD: Final = 2
"""The one that is about to be read, and the one behind it."""


async def store_batches(
    part: StorePart,
    s3: S3Settings,
    schema: Any,  # noqa: ANN401
    *,
    fetch_bytes: int,
) -> Batches:
    """Read a part of a ledger out of the bucket."""
    ledger = part.ledger
    async with (
        opened_copy(ledger, s3, fetch_bytes=fetch_bytes) as handle,
        contextlib.aclosing(_frames(handle, part, fetch_bytes)) as reads,
    ):
        async for read in reads:
            with _naming(ledger.location.data_key, int(ledger.ledger_id)):
                for events in _events(
                    read, raw=ledger.raw, verify=not handle.is_verified, part=part
                ):
                    for batch in record_batches(
                        events, schema, stream=ledger.stream, ledger_id=ledger.ledger_id
                    ):
                        yield batch
    if part.compared:
        async with opened_store(s3) as objects:
            await compare_copy(objects, ledger)


async def compare_copy(objects: ObjectStore, ledger: StoredLedger) -> None:
    """Raise ``CorruptError`` unless a copy is what was written, read again as a whole."""
    assert ledger.copy is not None
    try:
        await verify_copy(objects, ledger.location, ledger.copy, read_back=ReadBack.FULL)
    except CorruptError as error:
        raise CorruptError(
            f"ledger {ledger.ledger_id} of stream {ledger.stream}: {error.message}",
            remedy=REPAIR_COPY,
            details=error.details,
        ) from error


async def _frames(
    handle: ObjectHandle[Any], part: StorePart, fetch_bytes: int
) -> AsyncGenerator[FramesRead, None]:
    """Iterate over the frames of a part, those of times that nobody wants left out."""
    position, last = int(part.first_entry_id), int(part.last_entry_id)
    if part.ms_min > 0:
        place = await handle.entry_at_time(part.ms_min)
        position = position if place is None else max(position, int(place))
    block = handle.index.block_of(last)
    end = block.offset + block.length
    at = handle.index.block_of(min(position, last)).offset
    ahead: asyncio.Task[None] | None = None
    try:
        while position <= last and not await _is_later(handle, at, end, part.ms_max):
            # What comes next is on its way while this is taken apart.
            fetched = at // fetch_bytes * fetch_bytes
            more_end = min(fetched + FETCHES_AHEAD * fetch_bytes, end)
            more = _fetch_ahead(handle, position, more_end - at)
            ahead = asyncio.get_running_loop().create_task(more)
            # Up to where a request ends: what is of two is joined, and all of it copied.
            read = await handle.read_frames(EntryId(position), fetched + fetch_bytes - at)
            position, at = read.last_entry_id + 1, read.place + len(read.frames)
            yield _cut(read, last)
            await ahead
    finally:
        if ahead is not None:
            ahead.cancel()
            await asyncio.wait({ahead})


async def _fetch_ahead(handle: ObjectHandle[Any], position: int, bytes_max: int) -> None:
    # What fails here is met again by whoever reads it, and told there.
    with contextlib.suppress(TierlogError):
        if isinstance(handle, Tier2Handle | SingleHandle):
            await handle.prefetch(EntryId(position), bytes_max)


async def _is_later(handle: ObjectHandle[Any], start: int, end: int, ms_max: int) -> bool:
    """Tell whether all entries in these bytes were published after that time."""
    if start >= end or ms_max == INT64_MAX:
        return False
    low, high = await handle.times_of(start, end)
    return high > 0 and low > ms_max


def _cut(read: FramesRead, last: int) -> FramesRead:
    if read.last_entry_id <= last:
        return read
    count = last - read.first_entry_id + 1
    end = int(read.offsets[count])
    return read._replace(
        frames=read.frames[:end], offsets=read.offsets[:count], last_entry_id=EntryId(last)
    )


def _events(
    read: FramesRead, *, raw: bool, verify: bool, part: StorePart
) -> Iterator[EventColumns]:
    return wanted_events(
        read.frames,
        read.offsets,
        int(read.first_entry_id),
        raw=raw,
        verify=verify,
        times=(part.ms_min, part.ms_max),
    )


def wanted_events(
    frames: memoryview,
    offsets: Offsets,
    first_entry_id: int,
    *,
    raw: bool,
    verify: bool,
    times: tuple[int, int],
) -> Iterator[EventColumns]:
    """Take frames apart, and leave out events of other times."""
    if raw:
        yield raw_events(frames, offsets, first_entry_id)
        return
    for events in events_in(
        frames, offsets, first_entry_id, verify=verify, decompressors=decompressors()
    ):
        publish_ms = events.entries.publish_ms
        assert publish_ms is not None
        wanted = (publish_ms >= times[0]) & (publish_ms <= times[1])
        yield events if bool(np.all(wanted)) else events.kept(wanted[events.entry_rows])


@contextlib.contextmanager
def _naming(object_key: str, ledger_id: int) -> Iterator[None]:
    """Say of an error in which object it was met."""
    try:
        yield
    except (CorruptError, RefusedError) as error:
        entry = error.details.get("entry_id", "")
        raise _with_place(error, f"object {object_key}, entry {ledger_id}:{entry}") from error


def _with_place(error: TierlogError, place: str) -> TierlogError:
    return type(error)(
        f"{place}: {error.message}",
        reason=error.reason,
        remedy=error.remedy,
        details=error.details,
    )
