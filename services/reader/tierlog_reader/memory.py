"""One budget for all that the process holds for its clients, and what each part of it gets.

    part        bounded by                                  held
    cache       ``cache_bytes_max``                         ranges, tails, and where they are
    in flight   2 x ``ranges_in_flight_max`` ranges         what libraries have of bodies, and those
                                                            that the cache has no room for
    walks       ``WALKS_MAX`` of a range, and its copy      what is walked over to find an entry of
                                                            a copy without a side object
    indexes     ``index_bytes_max``                         indexes and headers of open copies
    pages       ``side_reader.PAGES_BYTES_MAX``             pages of side objects, kept and coming
    offsets     ``offsets.BYTES_MAX``                       offsets learned where there is no side
    views       ``views.BYTES_MAX``                         metadata of streams and ledgers
    tails       ``tail.asked_bytes_max(handles_max)``       what subscriptions wait for in tier 1
    pieces      ``PIECES_BYTES``                            memory that waits to receive what comes
                                                            from tier 1; then it is an answer's
    answers     what is left                                answers until clients have taken them

Invariants:
    * The parts together are ``memory_bytes_max``, which the container may take beside the process
      itself, and answers have room for two of frames at least.
    * What a part holds beyond its own (the list of a stream of 100,000 ledgers, indexes of more
      copies in use than there is room for: nobody could read without) answers have less for,
      until they go out one at a time. So all is within the budget as long as they can give.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from tierlog.model.errors import RefusedError
from tierlog.offload.offsets import BYTES_MAX as OFFSETS_BYTES_MAX
from tierlog.offload.ranges import WALK_COPIES, Ranges
from tierlog.offload.side_reader import PAGES_BYTES_MAX
from tierlog.runtime.settings import ReaderSettings
from tierlog_reader.cached_ranges import CachedRanges
from tierlog_reader.tail import asked_bytes_max
from tierlog_reader.tier2 import ObjectTier
from tierlog_reader.views import BYTES_MAX as VIEWS_BYTES_MAX
from tierlog_reader.views import Views

# Frames as they were read, and the one buffer that is sent.
COPIES_OF_AN_ANSWER: Final = 2
ANSWERS_MIN: Final = 2
# Apart from answers, whose room a read that walks holds already: it would wait for itself.
WALKS_MAX: Final = 4
PIECES_BYTES: Final = 16 * 1024 * 1024
# What the process takes before it holds anything: Python, its libraries, connections.
PROCESS_BYTES: Final = 100 * 10**6
# What the kernel ends a container at, by version 2 and 1 of cgroups. Without a limit there is no
# file, or "max", or a number that no machine has.
LIMIT_PATHS: Final = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Bytes of each part."""

    cache: int
    in_flight: int
    walks: int
    indexes: int
    pages: int
    offsets: int
    views: int
    tails: int
    pieces: int
    answers: int

    @property
    def total(self) -> int:
        """All of them."""
        return sum(asdict(self).values())


@dataclass(frozen=True, slots=True)
class Held:
    """What parts hold now, of those that do not wait for room: bytes by part."""

    parts: Parts
    sizes: Mapping[str, Callable[[], int]]

    @property
    def beyond(self) -> int:
        """What they hold above their own, together."""
        limits = asdict(self.parts)
        return sum(max(0, size() - limits[part]) for part, size in self.sizes.items())


def held_of(
    parts: Parts, ranges: Ranges, memory: CachedRanges, tier2: ObjectTier, views: Views
) -> Held:
    """Say where to ask what each part holds."""
    manager, range_bytes = memory.manager, ranges.limits.range_bytes
    return Held(
        parts,
        {
            "cache": lambda: manager.used_bytes + manager.promised_bytes,
            "in_flight": lambda: 2 * range_bytes * ranges.in_flight,
            "indexes": lambda: tier2.index_bytes,
            "pages": lambda: tier2.side_pages.size_bytes,
            "offsets": lambda: tier2.offsets.size_bytes,
            "views": lambda: views.size_bytes,
        },
    )


def parts_of(limits: ReaderSettings, limit_paths: Sequence[Path] = LIMIT_PATHS) -> Parts:
    """Share the budget out, or refuse settings that leave too little for answers.

    Refuses a budget that with the process itself is above the container's limit, too, which
    stands in one of ``limit_paths``.
    """
    for path in limit_paths:
        _check_limit(limits.memory_bytes_max, path)
    beside = {
        "cache": limits.cache_bytes_max,
        "in_flight": 2 * limits.ranges_in_flight_max * limits.range_bytes,
        "walks": WALKS_MAX * WALK_COPIES * limits.range_bytes,
        "indexes": limits.index_bytes_max,
        "pages": PAGES_BYTES_MAX,
        "offsets": OFFSETS_BYTES_MAX,
        "views": VIEWS_BYTES_MAX,
        "tails": asked_bytes_max(limits.handles_max),
        "pieces": PIECES_BYTES,
    }
    kept = sum(beside.values())
    answers = limits.memory_bytes_max - kept
    least = ANSWERS_MIN * COPIES_OF_AN_ANSWER * limits.response_bytes_max
    if answers < least:
        raise RefusedError(
            f"reader.memory_bytes_max = {limits.memory_bytes_max} leaves {answers} bytes for "
            f"answers beside {kept} for the cache, ranges on their way, indexes and all else, and "
            f"{least} are needed",
            remedy=f"Set reader.memory_bytes_max to {kept + least} or more, or lower "
            "reader.cache_bytes_max",
        )
    return Parts(**beside, answers=answers)


def _check_limit(memory_bytes_max: int, path: Path) -> None:
    try:
        limit = path.read_text("ascii").strip()
    except OSError:
        return
    needed = memory_bytes_max + PROCESS_BYTES
    if limit.isdecimal() and needed > int(limit):
        raise RefusedError(
            f"reader.memory_bytes_max = {memory_bytes_max}, and {PROCESS_BYTES} for the process "
            f"itself, are more than the {limit} bytes that this container may take, as {path} "
            "says: it would be killed once it is filled",
            remedy=f"Raise the container's memory limit to {needed} bytes or more, or lower "
            "reader.memory_bytes_max, and reader.cache_bytes_max with it",
        )
