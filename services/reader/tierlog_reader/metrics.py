"""What the reader counts, for /metrics."""

import collections
from functools import partial
from typing import Final

from prometheus_client import Counter, Gauge

from tierlog.offload.ranges import Ranges
from tierlog_reader.cache.manager import Asks
from tierlog_reader.cache.store import COMPILED
from tierlog_reader.cached_ranges import CachedRanges
from tierlog_reader.chunk import Answer
from tierlog_reader.memory import Parts
from tierlog_reader.places import Tier
from tierlog_reader.shares import Shares
from tierlog_reader.tail import TailMemory
from tierlog_reader.tier2 import ObjectTier

_served: Final[collections.Counter[Tier]] = collections.Counter()

READS: Final = Counter("tierlog_reader_reads_total", "Reads that were answered", ["tier"])
ENTRIES: Final = Counter("tierlog_reader_entries_total", "Entries that were served", ["tier"])
BYTES: Final = Counter("tierlog_reader_bytes_total", "Bytes of frames that were served", ["tier"])
_FETCHES: Final = Gauge(
    "tierlog_reader_ranges_fetched", "Ranges that were asked of the object store"
)
_FETCHED: Final = Gauge("tierlog_reader_range_bytes_fetched", "Bytes that the object store gave")
_MISMATCHES: Final = Gauge(
    "tierlog_reader_ranges_differed",
    "Ranges that were not what was written, and were fetched once more",
)
_HITS: Final = Gauge("tierlog_reader_cache_hit_bytes", "Bytes of objects that were in the cache")
_MISSES: Final = Gauge(
    "tierlog_reader_cache_miss_bytes", "Bytes of objects that a read had to wait for"
)
_USED: Final = Gauge(
    "tierlog_reader_cache_used_bytes", "What the cache holds, with all metadata and promised room"
)
_LIMIT: Final = Gauge("tierlog_reader_cache_limit_bytes", "What the cache may hold")
_ENTRIES: Final = Gauge("tierlog_reader_cache_entries", "Entries in the cache")
_COMPILED: Final = Gauge(
    "tierlog_reader_cache_compiled", "1: the cache runs compiled; 0: as plain Python, slower"
)
_EVICTIONS: Final = Gauge(
    "tierlog_reader_cache_evictions",
    "Entries that went from the cache, by who asked for their room; idle: nobody did",
    ["why"],
)
_OVERFLOW: Final = Gauge(
    "tierlog_reader_cache_overflow_bytes", "Bytes of the pool above its limit; always 0"
)
_OCCUPANCY: Final = Gauge(
    "tierlog_reader_cache_occupancy", "How full the cache is, promised room included: 0 to 1"
)
_AHEAD: Final = Gauge(
    "tierlog_reader_ahead_bytes", "Bytes that were fetched before anybody wanted them"
)
_AHEAD_READ: Final = Gauge("tierlog_reader_ahead_read_bytes", "Those of them that were read then")
_AHEAD_SHARE: Final = Gauge(
    "tierlog_reader_ahead_efficiency", "The share of what was fetched ahead that was read: 0 to 1"
)
_GETS_PER_MB: Final = Gauge(
    "tierlog_reader_gets_per_mb",
    "Ranges asked of the object store for each 10^6 bytes of tier 2 that were served",
)
_FOLLOWED: Final = Gauge("tierlog_reader_ledgers_followed", "Open ledgers that are subscribed to")
_TAIL_HITS: Final = Gauge(
    "tierlog_reader_tail_hit_bytes", "Bytes served from the tails of streams in memory"
)
_TAIL_TAKEN: Final = Gauge(
    "tierlog_reader_tail_taken_bytes", "Bytes that subscriptions took from tier 1"
)
_MEMORY: Final = Gauge(
    "tierlog_reader_memory_bytes", "What the process holds for its clients, by part", ["part"]
)
_MEMORY_LIMIT: Final = Gauge(
    "tierlog_reader_memory_limit_bytes", "What each part may hold; together the budget", ["part"]
)
_ROOM_WAITING: Final = Gauge("tierlog_reader_room_waiting", "Answers that wait for room")
_ROOM_WAITS: Final = Gauge("tierlog_reader_room_waits", "Answers that had to wait for room")
_ROOM_REFUSED: Final = Gauge(
    "tierlog_reader_room_refused", "Answers that got none in time: RESOURCE_EXHAUSTED"
)
_REFUSALS: Final = Gauge(
    "tierlog_reader_cache_refusals",
    "Times that the cache had no room: for what is fetched ahead, or what a reader waits for",
    ["who"],
)


def watch(ranges: Ranges, memory: CachedRanges) -> None:
    """Show what is fetched, and how full its memory is."""
    manager, store = memory.manager, memory.store
    _FETCHES.set_function(lambda: ranges.fetches)
    _FETCHED.set_function(lambda: ranges.bytes_fetched)
    _MISMATCHES.set_function(lambda: ranges.mismatches)
    _HITS.set_function(lambda: ranges.bytes_from_memory)
    _MISSES.set_function(lambda: ranges.bytes_waited_for)
    _USED.set_function(lambda: manager.used_bytes + manager.promised_bytes)
    _LIMIT.set(store.bytes_max)
    _COMPILED.set(COMPILED)
    _ENTRIES.set_function(lambda: store.entries)
    _OVERFLOW.set_function(lambda: max(0, store.used_bytes - store.bytes_max))
    _OCCUPANCY.set_function(lambda: manager.used)
    _AHEAD.set_function(lambda: manager.ahead_bytes)
    _AHEAD_READ.set_function(lambda: manager.ahead_read_bytes)
    _AHEAD_SHARE.set_function(lambda: manager.ahead_read_bytes / max(1, manager.ahead_bytes))
    _GETS_PER_MB.set_function(lambda: 1e6 * ranges.fetches / max(1, _served[Tier.TIER2]))
    askers = [Asks.TAIL.value, Asks.WANTED.value, Asks.AHEAD.value]
    for why in [*askers, "idle"]:
        _EVICTIONS.labels(why).set_function(partial(manager.evictions.__getitem__, why))
    for who in askers:
        _REFUSALS.labels(who).set_function(partial(manager.refusals.__getitem__, who))


def watch_memory(parts: Parts, ranges: Ranges, memory: CachedRanges, tier2: ObjectTier) -> None:
    """Show what each part of the budget holds, but for answers."""
    manager, in_flight = memory.manager, ranges.limits.range_bytes
    held = {
        "cache": lambda: manager.used_bytes + manager.promised_bytes,
        "in_flight": lambda: 2 * in_flight * ranges.in_flight,
        "indexes": lambda: tier2.index_bytes,
        "pages": lambda: tier2.side_pages.size_bytes,
        "offsets": lambda: tier2.offsets.size_bytes,
    }
    for part, size in held.items():
        _MEMORY.labels(part).set_function(size)
    limits = {part: getattr(parts, part) for part in (*held, "answers")}
    for part, limit in limits.items():
        _MEMORY_LIMIT.labels(part).set(limit)


def watch_clients(shares: Shares, tail: TailMemory) -> None:
    """Show who waits for room, and what is followed."""
    _MEMORY.labels("answers").set_function(lambda: shares.used_bytes)
    _ROOM_WAITING.set_function(lambda: shares.waiting)
    _ROOM_WAITS.set_function(lambda: shares.waits)
    _ROOM_REFUSED.set_function(lambda: shares.refusals)
    _FOLLOWED.set_function(lambda: tail.subscriptions)
    _TAIL_HITS.set_function(lambda: tail.bytes_served)
    _TAIL_TAKEN.set_function(lambda: tail.bytes_taken)


def count(answer: Answer) -> None:
    """Count one answer; an empty one has no tier."""
    chunk = answer.chunk
    tier = chunk.tier.value if chunk is not None else "none"
    READS.labels(tier).inc()
    if chunk is not None:
        ENTRIES.labels(tier).inc(chunk.count)
        BYTES.labels(tier).inc(chunk.frames_len)
        _served[chunk.tier] += chunk.frames_len
