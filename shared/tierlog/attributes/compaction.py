"""Progressive compaction: with each update, the oldest pages of the index move to its end.

What lies below the lowest page of a version is needed no more. So that this point moves on, and
with it what may be deleted, an update writes some of the lowest leaves once more that it does not
write anyway. There is no other compaction: nothing runs in the background, and nothing takes long.

Owns how many pages move, and which ones are the lowest. Does not own writing them.

Invariants:
    * At most ``Compaction.most(updated)`` pages move with an update.
    * Pages are found by the lowest offsets that index pages have of their sub-trees.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import Final, NamedTuple

import numpy as np

from tierlog.attributes.tree import Node, PageRef, Steps, child_ref, pages_of
from tierlog.model.attributes import IndexRoot
from tierlog.model.ids import INT64_MAX

_WHOLE: Final = -1
"""In place of a slot: all children of a page, not looked at yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compaction:
    """How many pages an update moves, by what is kept for each byte that is needed.

    None up to ``quiet_factor``; one up to ``busy_factor``; above that ``share`` of the leaves that
    the update itself writes, and one. ``lowest_only`` is the article's way: exactly one, the
    lowest page of all, unless the update writes that one anyway.
    """

    quiet_factor: float = 1.5
    busy_factor: float = 2.25
    share: float = 0.08
    lowest_only: bool = False

    def most(self, updated: int) -> int:
        """Return how many pages may move with an update that writes so many leaves."""
        return 1 if self.lowest_only else 1 + -int(-self.share * updated // 1)


PROGRESSIVE: Final = Compaction()


class Old(NamedTuple):
    """A leaf that is one of the lowest, and is not part of the update."""

    offset: int
    length: int
    parent: Node
    slot: int


def moves(
    policy: Compaction, lowest: Sequence[Old], *, root: IndexRoot, written: int, live: int
) -> int:
    """Return how many of the lowest leaves move.

    ``written`` are the bytes of the update without them, ``live`` those that are needed.
    """
    if policy.lowest_only:
        return 1 if lowest and lowest[0].offset == root.start else 0
    end = root.end + written
    for number, one in enumerate(lowest):
        factor = policy.busy_factor if number else policy.quiet_factor
        if end - one.offset <= factor * live:
            return number
        end += one.length
    return len(lowest)


def is_quiet(policy: Compaction, *, root: IndexRoot, written: int, live: int) -> bool:
    """Tell that nothing moves, whatever the lowest pages are."""
    if policy.lowest_only:
        return False
    return root.end + written - root.start <= policy.quiet_factor * live


def lowest_leaves(top: Node, wanted: int) -> Steps[list[Old]]:
    """Return the lowest leaves that the update does not write, the lowest first.

    ``top`` is the root of the pages that the update writes.
    """
    numbers = count()
    heap = [(0, next(numbers), top, _WHOLE)]
    while True:
        wave: list[tuple[int, int, Node, int]] = []
        while heap and len(wave) < wanted:
            one = heappop(heap)
            if one[3] == _WHOLE:
                for low, node, slot in _children(one[2], wanted):
                    heappush(heap, (low, next(numbers), node, slot))
            else:
                wave.append(one)
        unknown = [one for one in wave if one[2].page.level > 1]
        if not unknown:
            return [_old(node, slot) for _, _, node, slot in wave]
        refs = [child_ref(node.page, slot) for _, _, node, slot in unknown]
        pages = yield from pages_of(refs)
        for (low, _, parent, slot), page in zip(unknown, pages, strict=True):
            child = Node(page, parent, slot, 0, 0)
            child.is_in = False
            heappush(heap, (low, next(numbers), child, _WHOLE))
        for one in wave:
            if one[2].page.level == 1:
                heappush(heap, one)


def _children(node: Node, wanted: int) -> list[tuple[int, Node, int]]:
    """Return the lowest children of an index page; those of the update as pages to look into."""
    lows = node.page.entries["min_offset"].astype(np.int64)
    lows[[child.slot for child in node.children]] = INT64_MAX
    rows = np.argpartition(lows, wanted)[:wanted] if wanted < len(lows) else np.arange(len(lows))
    found = [
        (low, node, slot)
        for low, slot in zip(lows[rows].tolist(), rows.tolist(), strict=True)
        if low != INT64_MAX
    ]
    if node.page.level > 1:
        found += [
            (int(child.page.entries["min_offset"].min()), child, _WHOLE) for child in node.children
        ]
    return found


def _old(parent: Node, slot: int) -> Old:
    ref: PageRef = child_ref(parent.page, slot)
    return Old(ref.offset, ref.length, parent, slot)
