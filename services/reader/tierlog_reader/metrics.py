"""What the reader counts, for /metrics."""

from functools import partial
from typing import Final

from prometheus_client import Counter, Gauge

from tierlog.offload.ranges import Ranges
from tierlog_reader.cache.manager import Asks
from tierlog_reader.cached_ranges import CachedRanges
from tierlog_reader.chunk import Answer

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
_EVICTIONS: Final = Gauge(
    "tierlog_reader_cache_evictions",
    "Entries that went from the cache, by who asked for their room; idle: nobody did",
    ["why"],
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
    _ENTRIES.set_function(lambda: store.entries)
    askers = [Asks.WANTED.value, Asks.AHEAD.value]
    for why in [*askers, "idle"]:
        _EVICTIONS.labels(why).set_function(partial(manager.evictions.__getitem__, why))
    for who in askers:
        _REFUSALS.labels(who).set_function(partial(manager.refusals.__getitem__, who))


def count(answer: Answer) -> None:
    """Count one answer; an empty one has no tier."""
    chunk = answer.chunk
    tier = chunk.tier.value if chunk is not None else "none"
    READS.labels(tier).inc()
    if chunk is not None:
        ENTRIES.labels(tier).inc(chunk.count)
        BYTES.labels(tier).inc(chunk.frames_len)
