"""One budget for all that the process holds for its clients, and what each part of it gets.

    part        bounded by                                  held
    cache       ``cache_bytes_max``                         ranges, tails, and where they are
    in flight   2 x ``ranges_in_flight_max`` ranges         what libraries have of bodies, and those
                                                            that the cache has no room for
    indexes     ``index_bytes_max``                         indexes and headers of open copies
    pages       ``side_reader.PAGES_BYTES_MAX``             pages of side objects
    offsets     ``offsets.BYTES_MAX``                       offsets learned where there is no side
    answers     what is left                                answers until clients have taken them

Invariant: the parts together are ``memory_bytes_max``, and answers have room for two at least.
"""

from dataclasses import dataclass
from typing import Final

from tierlog.model.errors import RefusedError
from tierlog.offload.offsets import BYTES_MAX as OFFSETS_BYTES_MAX
from tierlog.offload.side_reader import PAGES_BYTES_MAX
from tierlog.runtime.settings import ReaderSettings

# Frames as they were read, and the one buffer that is sent.
COPIES_OF_AN_ANSWER: Final = 2
ANSWERS_MIN: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Bytes of each part."""

    cache: int
    in_flight: int
    indexes: int
    pages: int
    offsets: int
    answers: int

    @property
    def total(self) -> int:
        """All of them."""
        kept = self.cache + self.in_flight + self.indexes + self.pages + self.offsets
        return kept + self.answers


def parts_of(limits: ReaderSettings) -> Parts:
    """Share the budget out, or refuse settings that leave too little for answers."""
    in_flight = 2 * limits.ranges_in_flight_max * limits.range_bytes
    kept = limits.cache_bytes_max + in_flight + limits.index_bytes_max
    kept += PAGES_BYTES_MAX + OFFSETS_BYTES_MAX
    answers = limits.memory_bytes_max - kept
    least = ANSWERS_MIN * COPIES_OF_AN_ANSWER * limits.response_bytes_max
    if answers < least:
        raise RefusedError(
            f"reader.memory_bytes_max = {limits.memory_bytes_max} leaves {answers} bytes for "
            f"answers beside {kept} for the cache, ranges on their way and indexes, and {least} "
            f"are needed",
            remedy=f"Set reader.memory_bytes_max to {kept + least} or more, or lower "
            "reader.cache_bytes_max",
        )
    return Parts(
        cache=limits.cache_bytes_max,
        in_flight=in_flight,
        indexes=limits.index_bytes_max,
        pages=PAGES_BYTES_MAX,
        offsets=OFFSETS_BYTES_MAX,
        answers=answers,
    )
