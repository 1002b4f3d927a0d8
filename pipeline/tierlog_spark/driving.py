"""What the driver does before the tasks: finds streams, and cuts what is wanted into parts.

Owns the order of it, for each way to read. Does not own the decisions (``planning``).
"""

from collections.abc import Sequence
from dataclasses import replace
from uuid import UUID

from tierlog.model.errors import Reason, RefusedError
from tierlog.model.ids import EntryId, StreamName
from tierlog.model.position import Position
from tierlog.offload.manifests import KnownManifest
from tierlog_spark.bucket import Bucket, opened, stored
from tierlog_spark.options import ReadMode, ReadOptions
from tierlog_spark.planning import (
    Bounds,
    Range,
    ServicePart,
    StorePart,
    Wanted,
    behind,
    check_not_trimmed,
    check_range,
    check_single,
    copied_alone,
    cut,
    intersection,
    store_parts,
    wanted_of,
)
from tierlog_spark.service import checked_range, incarnation_of, placed, reads_of, served

Part = StorePart | ServicePart


async def plan(options: ReadOptions, bounds: Bounds) -> Sequence[Part]:
    """Return the parts of a read, in the order of what they hold."""
    bounds = with_times(bounds, options)
    if options.keys:
        return await _plan_keys(options, bounds)
    if options.mode is ReadMode.DIRECT:
        return await _plan_direct(options, bounds)
    return await _plan_served(options, bounds)


def with_times(bounds: Bounds, options: ReadOptions) -> Bounds:
    """Return the bounds within the times that the options say."""
    low = bounds.ms_min if options.start_ms is None else max(bounds.ms_min, options.start_ms)
    high = bounds.ms_max if options.end_ms is None else min(bounds.ms_max, options.end_ms - 1)
    return replace(bounds, ms_min=low, ms_max=high)


async def _plan_direct(options: ReadOptions, bounds: Bounds) -> list[Part]:
    within = Range(start=options.start, end=options.end)
    async with opened(options.s3, fetch_bytes=options.fetch_bytes) as bucket:
        found: list[Part] = []
        whole = bounds if options.fail_on_data_loss else None
        streams = await bucket.streams(options.streams, whole=whole)
        if len(options.streams) == 1:
            check_single(options.streams[0], len(streams), within)
        for known in streams:
            assert known.head is not None
            ledgers = bucket.ledgers_of(known)
            check_range(known.head, ledgers, within, to_the_end=True)
            if not has_wanted_rows(known, bounds, options):
                continue
            wanted = copied_alone(ledgers, within, bounds)
            found += await store_parts_of(bucket, known, wanted, bounds, options)
        return found


def has_wanted_rows(known: KnownManifest, bounds: Bounds, options: ReadOptions) -> bool:
    """Tell whether anything of a stream may be wanted; refuse to look for times it has not."""
    assert known.head is not None
    if known.head.raw and (options.start_ms is not None or options.end_ms is not None):
        raise RefusedError(
            f"option startTime: stream {known.stream} is raw, and its entries have no time",
            remedy="Read it by positions: start and end",
        )
    if known.head.raw and bounds.has_times:
        return False
    return bounds.wants_stream(known.stream)


async def store_parts_of(
    bucket: Bucket,
    known: KnownManifest,
    wanted: Sequence[Wanted],
    bounds: Bounds,
    options: ReadOptions,
) -> list[StorePart]:
    """Cut what is wanted of a stream's copies; small ones are read whole by one task."""
    ledgers = [stored(known, one.ledger) for one in wanted]
    large = [one for one in ledgers if one.data_len > options.partition_bytes]
    blocks = {
        one.ledger_id: found
        for one, found in zip(large, await bucket.blocks_of(large), strict=True)
    }
    parts: list[StorePart] = []
    for ledger, one in zip(ledgers, wanted, strict=True):
        if ledger.ledger_id in blocks:
            pieces = list(
                cut(
                    blocks[ledger.ledger_id],
                    one.first,
                    one.last,
                    bytes_target=options.partition_bytes,
                )
            )
        else:
            pieces = [(EntryId(one.first), EntryId(one.last))]
        parts += store_parts(ledger, pieces, bounds)
    return parts


async def _plan_served(options: ReadOptions, bounds: Bounds) -> list[Part]:
    """Plan a read whose end is what the readers have now."""
    within, found = Range(start=options.start, end=options.end), list[Part]()
    async with reads_of(options.client, options.security) as reads:
        streams = await served(reads, options.streams)
        if len(options.streams) == 1:
            check_single(options.streams[0], len(streams), within)
        for stream in streams:
            fixed = checked_range(stream, await placed(reads, stream, within))
            if fixed is None or not bounds.wants_stream(stream.name):
                continue
            if options.mode is ReadMode.SERVICE:
                found += service_parts(stream.name, fixed, bounds, options)
            else:
                incarnation = await incarnation_of(reads, stream)
                found += await _plan_auto(stream.name, incarnation, fixed, bounds, options)
    return found


async def _plan_auto(
    stream: StreamName, incarnation: UUID, fixed: Range, bounds: Bounds, options: ReadOptions
) -> list[Part]:
    """Take what has a copy from the bucket, and all else of the range through the readers.

    Ledger ids grow, and a manifest lists every ledger that was closed when it was written: what
    lies behind its last one is the rest, whatever was offloaded since.
    """
    async with opened(options.s3, fetch_bytes=options.fetch_bytes) as bucket:
        known = await manifest_of(bucket, stream, incarnation)
        if known is None:
            return service_parts(stream, fixed, bounds, options)
        if not has_wanted_rows(known, bounds, options):
            return []
        # The readers told of ledgers that a manifest written since may list no more.
        assert known.head is not None
        check_not_trimmed(known.head, fixed)
        ledgers, found = bucket.ledgers_of(known), list[Part]()
        for one in wanted_of(ledgers, fixed, bounds):
            if one.ledger.copy is not None:
                found += await store_parts_of(bucket, known, [one], bounds, options)
                continue
            ledger_id = one.ledger.listed.ledger_id
            start = Position(ledger_id, EntryId(one.first))
            until = Position(ledger_id, EntryId(one.last + 1))
            found += service_parts(stream, Range(start=start, end=until), bounds, options)
    return found + service_parts(stream, behind(ledgers, fixed), bounds, options)


async def manifest_of(
    bucket: Bucket, stream: StreamName, incarnation: UUID | None
) -> KnownManifest | None:
    """Return what the bucket knows of a stream; None: nothing. Refuse another one of that name."""
    try:
        found = await bucket.streams([stream])
    except RefusedError as error:
        if error.reason is not Reason.STREAM_NOT_FOUND:
            raise
        return None
    if not found:
        return None
    if found[0].incarnation != incarnation:
        raise RefusedError(
            f"stream {stream} below {bucket.place} is another one than the readers': of "
            f"incarnation {found[0].incarnation}, and theirs is {incarnation}",
            remedy="Correct bucket and prefix. Or was it made anew just now? Then the bucket knows "
            "soon; until then read with readMode=service",
            details={"stream": stream},
        )
    return found[0]


def service_parts(
    stream: StreamName, within: Range, bounds: Bounds, options: ReadOptions
) -> list[Part]:
    """Return what reads a range through the readers, if anything of it is wanted."""
    assert within.start is not None
    assert within.end is not None
    if within.start >= within.end or bounds.ms_min > bounds.ms_max:
        return []
    asked = options.start_ms is not None or options.end_ms is not None
    return [
        ServicePart(
            stream=stream,
            start=within.start,
            until=within.end,
            bounds=bounds,
            times_asked=asked,
        )
    ]


async def _plan_keys(options: ReadOptions, bounds: Bounds) -> list[Part]:
    async with opened(options.s3, fetch_bytes=options.fetch_bytes) as bucket:
        found: list[Part] = []
        if bounds.has_times:
            return found
        for ledger, blocks in await bucket.by_keys(options.keys):
            if not bounds.wants_stream(ledger.stream):
                continue
            last = blocks[-1].last_entry_id
            entries = intersection((0, last), bounds.entries_of(ledger.ledger_id, last))
            if entries is not None:
                pieces = cut(blocks, *entries, bytes_target=options.partition_bytes)
                found += store_parts(ledger, pieces, bounds)
        return found
