"""The attribute index: a B+Tree for media that only grow, as steps that somebody drives.

Every function here is a generator: it asks for the pages that it needs next, gets them, and
returns its outcome. So one tree stands on memory (``drive``) and on S3 (``drive_async``), and
whoever drives it decides what is cached and what is fetched at once.

Owns reading: keys to values, ranges. Does not own changes (``tierlog.attributes.update``), nor
where pages lie.

Invariants:
    * A version is its root: nothing of it ever changes, and who began with it ends with it.
    * All leaves are equally deep; an index entry's key is the first key of its child.
    * A page is written behind its children, so the lowest page of a version is a leaf, and
      ``IndexRoot.start`` is its offset.
    * What a page promises of its children (offset, length, level) is checked.
"""

from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from itertools import compress
from struct import Struct
from typing import Final, NamedTuple, TypeVar

import numpy as np

from tierlog.format.attribute_page import INDEX_ENTRY_LEN, PAGE_HEADER_LEN, Keys, Page
from tierlog.model.attributes import KEY_LEN, AttributeKey, IndexRoot
from tierlog.model.errors import CorruptError, RefusedError

T = TypeVar("T")

ANY_LEVEL: Final = -1
"""What is known of a root's level before it is read."""

FEW: Final = 3
"""Up to so many entries of a page are handled one by one: numpy takes longer to begin."""

_CHILD: Final = Struct(">qH")


class PageRef(NamedTuple):
    """Which page is needed."""

    offset: int
    length: int
    level: int


Steps = Generator[Sequence[PageRef], Sequence[Page], T]


def drive(steps: Steps[T], read: Callable[[PageRef], Page]) -> T:
    """Run steps whose pages are at hand."""
    try:
        wanted = next(steps)
        while True:
            wanted = steps.send([read(ref) for ref in wanted])
    except StopIteration as stop:
        outcome: T = stop.value
        return outcome


async def drive_async(
    steps: Steps[T], read: Callable[[Sequence[PageRef]], Awaitable[Sequence[Page]]]
) -> T:
    """Run steps whose pages are fetched, all of one step at once."""
    try:
        wanted = next(steps)
        while True:
            wanted = steps.send(await read(wanted))
    except StopIteration as stop:
        outcome: T = stop.value
        return outcome


class Scan(NamedTuple):
    """A run of attributes, ascending; ``next_key`` is where the next one begins, None: the end."""

    items: list[tuple[AttributeKey, int]]
    next_key: AttributeKey | None


class Row(NamedTuple):
    """What an update puts in a slot of an index page."""

    slot: int
    row: bytes
    is_changed: bool


class Node:
    """A page on the way of an operation; ``lo`` to ``hi`` of its keys lie below it."""

    __slots__ = ("children", "hi", "is_in", "lo", "page", "parent", "rows", "slot")

    def __init__(self, page: Page, parent: "Node | None", slot: int, lo: int, hi: int) -> None:
        self.page = page
        self.parent = parent
        self.slot = slot
        self.lo = lo
        self.hi = hi
        self.is_in = True
        if page.level:
            # Those of the next level that an update writes; and what stands for them then.
            self.children: list[Node] = []
            self.rows: list[Row] = []

    @property
    def is_rightmost(self) -> bool:
        """Whether no key of the tree lies behind this page."""
        node = self
        while node.parent is not None:
            if node.slot != node.parent.page.count - 1:
                return False
            node = node.parent
        return True


def root_ref(root: IndexRoot) -> PageRef:
    """Return the page that is the root of a version that is not empty."""
    return PageRef(root.root_offset, root.root_length, ANY_LEVEL)


def child_ref(page: Page, slot: int) -> PageRef:
    """Return a child of an index page."""
    at = PAGE_HEADER_LEN + slot * INDEX_ENTRY_LEN + KEY_LEN
    offset, length = _CHILD.unpack_from(page.raw, at)
    return PageRef(offset, length, page.level - 1)


def pages_of(refs: Sequence[PageRef]) -> Steps[Sequence[Page]]:
    """Ask for pages, and check that they are those."""
    pages = yield refs
    for (offset, length, level), page in zip(refs, pages, strict=True):
        if page.offset != offset or len(page.raw) != length or level not in (ANY_LEVEL, page.level):
            raise CorruptError(
                f"{page} of the attribute index is not the {length} bytes of level {level} at"
                f" {offset} that its parent has",
                remedy="Rebuild the attributes from an older checkpoint and the entries after it",
                details={"offset": str(offset)},
            )
    return pages


def sorted_keys(keys: Iterable[bytes]) -> list[bytes]:
    """Return keys in their order; ``RefusedError`` if one is none."""
    ordered = sorted(keys)
    if not {KEY_LEN}.issuperset(map(len, ordered)):
        raise RefusedError(
            f"a key of an attribute has {KEY_LEN} bytes, and here is one with another length",
            remedy="Use a UUID, or a digest of a name",
        )
    return ordered


def key_column(ordered: Sequence[bytes]) -> Keys:
    """Return keys as pages are searched for them."""
    return np.frombuffer(b"".join(ordered), "S16")


def descend(root: IndexRoot, keys: Keys) -> Steps[list[list[Node]]]:
    """Return the pages on the way to all keys, level by level, the root first."""
    (page,) = yield from pages_of([root_ref(root)])
    levels = [[Node(page, None, 0, 0, len(keys))]]
    while levels[-1][0].page.level:
        refs: list[PageRef] = []
        places: list[tuple[Node, int, int, int]] = []
        for node in levels[-1]:
            for slot, lo, hi in _shares(node, keys):
                refs.append(child_ref(node.page, slot))
                places.append((node, slot, lo, hi))
        pages = yield from pages_of(refs)
        found = []
        for page, (parent, slot, lo, hi) in zip(pages, places, strict=True):
            child = Node(page, parent, slot, lo, hi)
            parent.children.append(child)
            found.append(child)
        levels.append(found)
    return levels


def _shares(node: Node, keys: Keys) -> Iterable[tuple[int, int, int]]:
    """Return which children of an index page have which of its keys."""
    lo, hi = node.lo, node.hi
    slots = node.page.keys.searchsorted(keys[lo:hi], "right") - 1
    if hi - lo == 1:
        return [(max(int(slots[0]), 0), lo, hi)]
    # Keys below the first one belong to the first child.
    np.maximum(slots, 0, out=slots)
    starts = np.flatnonzero(slots[1:] != slots[:-1]) + 1
    cuts = [lo, *(starts + lo).tolist(), hi]
    picked = [int(slots[0]), *slots[starts].tolist()]
    return zip(picked, cuts[:-1], cuts[1:], strict=True)


def lookup(root: IndexRoot, keys: Iterable[AttributeKey]) -> Steps[dict[AttributeKey, int]]:
    """Return the values of those keys that are there."""
    ordered = sorted_keys(set(keys))
    if not root.root_length or not ordered:
        return {}
    column = key_column(ordered)
    found: dict[AttributeKey, int] = {}
    if len(ordered) == 1:
        (page,) = yield from pages_of([root_ref(root)])
        while page.level:
            (page,) = yield from pages_of([child_ref(page, _slot(page, column))])
        _find(page, ordered, column, found)
        return found
    levels = yield from descend(root, column)
    for leaf in levels[-1]:
        _find(leaf.page, ordered[leaf.lo : leaf.hi], column[leaf.lo : leaf.hi], found)
    return found


def _find(
    page: Page, ordered: Sequence[bytes], column: Keys, found: dict[AttributeKey, int]
) -> None:
    """Take from a leaf what it has of some keys."""
    at = page.keys.searchsorted(column)
    if len(ordered) <= FEW:
        for key, place in zip(ordered, at.tolist(), strict=True):
            if page.key(place) == key:
                found[AttributeKey(key)] = page.value(place)
        return
    np.minimum(at, page.count - 1, out=at)
    hits = page.keys[at] == column
    values = page.entries["value"][at[hits]].tolist()
    present = compress(ordered, hits.tolist())
    found.update(zip(map(AttributeKey, present), values, strict=True))


def scan(
    root: IndexRoot, first: AttributeKey, last: AttributeKey, *, leaves: int = 8
) -> Steps[Scan]:
    """Return the attributes from ``first`` on in up to so many leaves, none behind ``last``."""
    low, high = (key_column(sorted_keys([key])) for key in (first, last))
    if not root.root_length or first > last:
        return Scan([], None)
    (page,) = yield from pages_of([root_ref(root)])
    beyond: bytes | None = None
    while page.level > 1:
        slot = _slot(page, low)
        if slot + 1 < page.count:
            beyond = page.key(slot + 1)
        (page,) = yield from pages_of([child_ref(page, slot)])
    pages: Sequence[Page] = [page]
    if page.level:
        slot = _slot(page, low)
        stop = min(slot + leaves, _slot(page, high) + 1)
        if stop < page.count:
            beyond = page.key(stop)
        pages = yield from pages_of([child_ref(page, one) for one in range(slot, stop)])
    items: list[tuple[AttributeKey, int]] = []
    for leaf in pages:
        start, end = leaf.keys.searchsorted(low)[0], leaf.keys.searchsorted(high, "right")[0]
        raw = leaf.keys[start:end].tobytes()
        keys = [AttributeKey(raw[at : at + KEY_LEN]) for at in range(0, len(raw), KEY_LEN)]
        items += zip(keys, leaf.entries["value"][start:end].tolist(), strict=True)
    is_end = beyond is None or beyond > last
    return Scan(items, None if is_end or beyond is None else AttributeKey(beyond))


def _slot(page: Page, key: Keys) -> int:
    return max(int(page.keys.searchsorted(key, "right")[0]) - 1, 0)
