"""What reads, put together from the settings, behind all transports.

Owns how the reader's parts are joined and run. Does not own where they come from (``wiring``), nor
who is answered (``main``).
"""

import contextlib
from collections.abc import AsyncIterator, Hashable, Mapping
from functools import partial

from tierlog.offload.drivers import MakeDriver
from tierlog.offload.pacing import ReadPace
from tierlog.offload.ranges import RangeLimits, Ranges
from tierlog.runtime.settings import ReaderSettings, Settings
from tierlog.wiring.build import system_clock
from tierlog.wiring.drivers import open_with, reading_drivers
from tierlog.wiring.keys import ledger_keys
from tierlog.wiring.reader import ReaderParts
from tierlog_reader import metrics
from tierlog_reader.cache.store import StreamingCache
from tierlog_reader.cached_ranges import CachedRanges
from tierlog_reader.memory import Held, Parts, held_of
from tierlog_reader.served import ServedReads
from tierlog_reader.shares import Client, GroupOf, Shares
from tierlog_reader.source import StreamSource
from tierlog_reader.tail import TailLimits, TailMemory
from tierlog_reader.tier1 import StorageNodeTier
from tierlog_reader.tier2 import ObjectTier, OpenOther, Tier2Limits
from tierlog_reader.trace import TracedMemory, TracedPace, TracedReads
from tierlog_reader.views import Views


@contextlib.asynccontextmanager
async def running_reads(
    settings: Settings,
    parts: ReaderParts,
    budget: Parts,
    drivers: Mapping[str, MakeDriver] | None = None,
) -> AsyncIterator[ServedReads]:
    """Read for clients while open; ``budget``: memory of each part, ``drivers``: more by name."""
    limits = settings.reader
    known = reading_drivers(settings, parts.objects, cache=parts.shared, others=drivers)
    memory = CachedRanges(StreamingCache(budget.cache), objects_max=limits.handles_max)
    pace, group_of = _pace(parts, limits)
    walks = _walks(limits, budget.walks, group_of)
    ranges = _ranges(parts, settings, memory, walks, pace)
    tier2 = _tier2(parts, settings, partial(open_with, known), ranges)
    views = _views(parts, limits)
    tier1 = StorageNodeTier(views, parts.nodes, keys=ledger_keys(settings), on_damage=parts.damage)
    tails = TailLimits(ledgers_max=limits.handles_max)
    tail = TailMemory(tier1, memory.store, memory.manager, tails)
    source = StreamSource(views, tier1, tier2, tail)
    held = held_of(budget, ranges, memory, tier2, views)
    shares = _answers(limits, held, group_of)
    metrics.watch(ranges, memory, parts.meter)
    metrics.watch_memory(held)
    metrics.watch_clients(shares, walks, tail)
    async with memory.run(), ranges.run(), tier2.run(), tail.run():
        yield ServedReads(source, shares)


def _group_of(pace: ReadPace | None, client: Client) -> Hashable:
    """Return the namespace whose limit a client waits for; see ``limits.client_of``."""
    if pace is None or not isinstance(client, tuple):
        return None
    return pace.limited(client[1])


def _answers(limits: ReaderSettings, held: Held, group_of: GroupOf) -> Shares:
    return Shares(
        held.parts.answers,
        wait_s_max=limits.room_wait_ms_max / 1000,
        beyond=lambda: held.beyond,
        group_of=group_of,
    )


def _views(parts: ReaderParts, limits: ReaderSettings) -> Views:
    return Views(
        parts.catalog,
        age_s_max=limits.metadata_age_ms_max / 1000,
        entries_max=limits.handles_max,
    )


def _walks(limits: ReaderSettings, bytes_max: int, group_of: GroupOf) -> Shares:
    return Shares(
        bytes_max,
        wait_s_max=limits.room_wait_ms_max / 1000,
        what="a walk to an entry",
        remedy="Come again; begin fewer reads at once within copies that have no side object",
        group_of=group_of,
    )


def _ranges(
    parts: ReaderParts,
    settings: Settings,
    memory: CachedRanges,
    walks: Shares,
    pace: ReadPace | None,
) -> Ranges:
    limits = settings.reader
    return Ranges(
        TracedReads(parts.reads),
        RangeLimits(
            range_bytes=limits.range_bytes,
            in_flight_max=limits.ranges_in_flight_max,
            kept_bytes_max=limits.cache_bytes_max,
            growth_max=limits.range_growth_max,
        ),
        TracedMemory(memory),
        walks,
        None if pace is None else TracedPace(pace),
    )


def _pace(parts: ReaderParts, limits: ReaderSettings) -> tuple[ReadPace | None, GroupOf]:
    """Return what reads wait for, and which clients wait for one limit together."""
    per_s, namespaces = limits.tier2_bytes_per_s_max, limits.tier2_namespace_bytes_per_s_max
    pace = None
    if per_s or namespaces:
        pace = ReadPace(system_clock(), parts.meter, per_s=per_s, namespaces=namespaces)
    return pace, partial(_group_of, pace)


def _tier2(
    parts: ReaderParts, settings: Settings, open_other: OpenOther, ranges: Ranges
) -> ObjectTier:
    limits = settings.reader
    return ObjectTier(
        TracedReads(parts.reads),
        ranges,
        parts.shared,
        Tier2Limits(
            handles_max=limits.handles_max,
            index_ttl_s=settings.redis.index_ttl_s,
            ahead_bytes=limits.range_bytes * limits.ranges_in_flight_max,
            index_bytes_max=limits.index_bytes_max,
        ),
        bucket=settings.s3.bucket,
        endpoint_name=settings.s3.endpoint_name,
        open_other=open_other,
    )
