"""What the reader counts, for /metrics."""

import collections
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Final

from prometheus_client import REGISTRY, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from tierlog.format.frame import FRAME_HEADER_LEN
from tierlog.offload.ranges import Ranges
from tierlog.ports.spending import CostMeter
from tierlog_reader.cache.manager import Asks
from tierlog_reader.cache.store import COMPILED
from tierlog_reader.cached_ranges import CachedRanges
from tierlog_reader.chunk import Answer
from tierlog_reader.documents import FoundEntry
from tierlog_reader.memory import Held
from tierlog_reader.places import Tier
from tierlog_reader.shares import Shares
from tierlog_reader.tail import TailMemory

# What a meter calls a GET, of a range or whole.
GET: Final = "get_object"

_served: Final[collections.Counter[Tier]] = collections.Counter()


class Grows(Collector):
    """A counter that somebody else counts; 0 until it is said who does.

    With ``label`` one for each of ``values``, which are there from the start: of what appears with
    its first increase nobody sees an increase.
    """

    def __init__(self, name: str, what: str, label: str = "", values: tuple[str, ...] = ()) -> None:
        self._name, self._what = name, what
        self._labels = [label] if label else []
        self._asked: dict[str, Callable[[], float]] = dict.fromkeys(values or ("",), lambda: 0)
        REGISTRY.register(self)

    def set_function(self, asked: Callable[[], float], value: str = "") -> None:
        """Say where the number is."""
        assert value in self._asked, value
        self._asked[value] = asked

    def collect(self) -> Iterator[Metric]:
        """Give the numbers as they are now."""
        family = CounterMetricFamily(self._name, self._what, labels=self._labels)
        for value, asked in self._asked.items():
            family.add_metric([value] if self._labels else [], asked())
        yield family


_ASKERS: Final = tuple(one.value for one in Asks)

READS: Final = Counter("tierlog_reads_total", "Reads that were answered", ["tier"])
ENTRIES: Final = Counter("tierlog_read_entries_total", "Entries that were served", ["tier"])
BYTES: Final = Counter("tierlog_read_bytes_total", "Bytes of frames that were served", ["tier"])
_FETCHES: Final = Grows(
    "tierlog_reader_ranges_fetched_total", "Ranges that were asked of the object store"
)
_FETCHED: Final = Grows(
    "tierlog_reader_range_bytes_fetched_total", "Bytes that the object store gave"
)
_MISMATCHES: Final = Grows(
    "tierlog_reader_ranges_differed_total",
    "Ranges that were not what was written, and were fetched once more",
)
_READ_HITS: Final = Grows(
    "tierlog_cache_hits_total", "Ranges of objects that were in the cache as a whole"
)
_READ_MISSES: Final = Grows(
    "tierlog_cache_misses_total", "Ranges of objects that a read had to wait for"
)
_HITS: Final = Grows("tierlog_cache_hit_bytes_total", "Bytes of objects that were in the cache")
_MISSES: Final = Grows(
    "tierlog_cache_miss_bytes_total", "Bytes of objects that a read had to wait for"
)
_CACHE_BYTES: Final = Gauge(
    "tierlog_cache_bytes",
    "The cache's room: used, with all metadata and what is being fetched, and free",
    ["state"],
)
_LIMIT: Final = Gauge("tierlog_cache_limit_bytes", "What the cache may hold")
_STORED: Final = Gauge(
    "tierlog_cache_stored_bytes",
    "Bytes of entries alone; what is used above that is metadata, and what blocks have left over",
)
_ENTRIES: Final = Gauge("tierlog_cache_entries", "Entries in the cache")
_GENERATION: Final = Gauge(
    "tierlog_cache_generation",
    "The cache's generation: entries that were not used for some of them go",
)
_COMPILED: Final = Gauge(
    "tierlog_cache_compiled", "1: the cache runs compiled; 0: as plain Python, slower"
)
_EVICTIONS: Final = Grows(
    "tierlog_cache_evictions_total",
    "Entries that went from the cache, by who asked for their room; idle: nobody did",
    "reason",
    (*_ASKERS, "idle"),
)
_EARLY: Final = Grows(
    "tierlog_cache_early_evictions_total",
    "Entries that went although all entries together were below the cache's target",
)
_ENTRIES_READ: Final = Grows(
    "tierlog_cache_entries_read_total", "Entries of the cache that were read, each time"
)
_RUNS_READ: Final = Grows(
    "tierlog_cache_runs_read_total",
    "Contiguous runs in which these lay; one for each entry is best",
)
_OVERFLOW: Final = Gauge(
    "tierlog_cache_overflow_bytes",
    "Bytes of all that the cache holds above its limit, metadata included: always 0",
)
_OCCUPANCY: Final = Gauge(
    "tierlog_cache_occupancy", "How full the cache is, with all metadata: 0 to 1"
)
_AHEAD: Final = Grows(
    "tierlog_reader_ahead_bytes_total", "Bytes that were fetched before anybody wanted them"
)
_AHEAD_READ: Final = Grows(
    "tierlog_reader_ahead_read_bytes_total", "Those of them that were read then"
)
_AHEAD_SHARE: Final = Gauge(
    "tierlog_reader_ahead_efficiency", "The share of what was fetched ahead that was read: 0 to 1"
)
_GETS_PER_MB: Final = Gauge(
    "tierlog_reader_gets_per_mb",
    "GETs sent to the object store, also for indexes, headers and pages, and those that were "
    "repeated, for each 10^6 bytes of tier 2 that were served",
)
_FOLLOWED: Final = Gauge("tierlog_reader_ledgers_followed", "Open ledgers that are subscribed to")
_TAIL_HITS: Final = Grows(
    "tierlog_reader_tail_hit_bytes_total", "Bytes served from the tails of streams in memory"
)
_TAIL_TAKEN: Final = Grows(
    "tierlog_reader_tail_taken_bytes_total", "Bytes that subscriptions took from tier 1"
)
_MEMORY: Final = Gauge(
    "tierlog_reader_memory_bytes", "What the process holds for its clients, by part", ["part"]
)
_MEMORY_LIMIT: Final = Gauge(
    "tierlog_reader_memory_limit_bytes", "What each part may hold; together the budget", ["part"]
)
_MEMORY_BEYOND: Final = Gauge(
    "tierlog_reader_memory_beyond_bytes",
    "What parts hold above their limits, together: answers have so much less",
)
_ROOM_WAITING: Final = Gauge("tierlog_reader_room_waiting", "Answers and walks that wait for room")
_ROOM_WAITS: Final = Grows(
    "tierlog_reader_room_waits_total", "Answers and walks that had to wait for room"
)
_ROOM_REFUSED: Final = Grows(
    "tierlog_reader_room_refused_total",
    "Answers and walks that got none in time: RESOURCE_EXHAUSTED",
)
_REFUSALS: Final = Grows(
    "tierlog_cache_refusals_total",
    "Times that the cache had no room: for what is fetched ahead, or what a reader waits for",
    "who",
    _ASKERS,
)


def watch(ranges: Ranges, memory: CachedRanges, meter: CostMeter) -> None:
    """Show what is fetched, what ``meter`` counts of it, and how full its memory is."""
    manager, store = memory.manager, memory.store
    _FETCHES.set_function(lambda: ranges.fetches)
    _FETCHED.set_function(lambda: ranges.bytes_fetched)
    _MISMATCHES.set_function(lambda: ranges.mismatches)
    _HITS.set_function(lambda: ranges.bytes_from_memory)
    _MISSES.set_function(lambda: ranges.bytes_waited_for)
    _READ_HITS.set_function(lambda: ranges.hits)
    _READ_MISSES.set_function(lambda: ranges.misses)
    _CACHE_BYTES.labels("used").set_function(lambda: manager.used_bytes)
    _CACHE_BYTES.labels("free").set_function(lambda: max(0, store.bytes_max - manager.used_bytes))
    _LIMIT.set(store.bytes_max)
    _COMPILED.set(COMPILED)
    _STORED.set_function(lambda: store.state().stored)
    _ENTRIES.set_function(lambda: store.entries)
    _GENERATION.set_function(lambda: manager.generation)
    _EARLY.set_function(lambda: manager.early_evictions)
    _ENTRIES_READ.set_function(lambda: manager.entries_read)
    _RUNS_READ.set_function(lambda: manager.runs_read)
    _OVERFLOW.set_function(lambda: manager.overflow_bytes)
    _OCCUPANCY.set_function(lambda: manager.used)
    _AHEAD.set_function(lambda: manager.ahead_bytes)
    _AHEAD_READ.set_function(lambda: manager.ahead_read_bytes)
    _AHEAD_SHARE.set_function(lambda: manager.ahead_read_bytes / max(1, manager.ahead_bytes))
    _GETS_PER_MB.set_function(lambda: _gets_per_mb(meter))
    for why in (*_ASKERS, "idle"):
        _EVICTIONS.set_function(partial(manager.evictions.__getitem__, why), why)
    for who in _ASKERS:
        _REFUSALS.set_function(partial(manager.refusals.__getitem__, who), who)


def _gets_per_mb(meter: CostMeter) -> float:
    """Return the share; 0 before the first byte was served, when there is none."""
    served = _served[Tier.TIER2]
    return 1e6 * _gets(meter) / served if served else 0.0


def _gets(meter: CostMeter) -> int:
    amounts = meter.amounts.items()
    return sum(amount.requests for spent, amount in amounts if spent.operation == GET)


def watch_memory(held: Held) -> None:
    """Show what each part of the budget holds, but for answers and walks."""
    for part, size in held.sizes.items():
        _MEMORY.labels(part).set_function(size)
    for part, limit in asdict(held.parts).items():
        _MEMORY_LIMIT.labels(part).set(limit)
    _MEMORY_BEYOND.set_function(lambda: held.beyond)


def watch_clients(shares: Shares, walks: Shares, tail: TailMemory) -> None:
    """Show who waits for room, and what is followed."""
    _MEMORY.labels("answers").set_function(lambda: shares.used_bytes)
    _MEMORY.labels("tails").set_function(lambda: tail.asked_bytes)
    _MEMORY.labels("walks").set_function(lambda: walks.used_bytes)
    _ROOM_WAITING.set_function(lambda: shares.waiting + walks.waiting)
    _ROOM_WAITS.set_function(lambda: shares.waits + walks.waits)
    _ROOM_REFUSED.set_function(lambda: shares.refusals + walks.refusals)
    _FOLLOWED.set_function(lambda: tail.subscriptions)
    _TAIL_HITS.set_function(lambda: tail.bytes_served)
    _TAIL_TAKEN.set_function(lambda: tail.bytes_taken)


def count(answer: Answer) -> None:
    """Count one answer; an empty one has no tier."""
    chunk = answer.chunk
    if chunk is None:
        READS.labels("none").inc()
    else:
        _count(chunk.tier, chunk.count, chunk.frames_len)


def count_entries(entries: Sequence[FoundEntry]) -> None:
    """Count what is served of a page, as a read of each tier."""
    for tier in sorted({one.tier for one in entries}):
        lengths = [FRAME_HEADER_LEN + len(one.data) for one in entries if one.tier == tier]
        _count(Tier(tier), len(lengths), sum(lengths))


def _count(tier: Tier, entries: int, frames_len: int) -> None:
    READS.labels(tier.value).inc()
    ENTRIES.labels(tier.value).inc(entries)
    BYTES.labels(tier.value).inc(frames_len)
    _served[tier] += frames_len
