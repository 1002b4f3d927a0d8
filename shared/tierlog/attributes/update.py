"""Changes to the attribute index: a batch in, pages to append and the next root out.

An update writes the leaves that it changes, the old ones that move along (compaction), and all
pages above both, level by level, the root last. Nothing that is there is touched.

Owns what is written, and how pages split. Does not own appending.

Invariants:
    * Until its pages are appended at ``IndexRoot.end`` an update has changed nothing; it can be
      made anew, with the same outcome.
    * Within a level, pages that only move come first, then halves of split pages that have no
      change, then what changed: what will soon be written again lies at the end.
    * A page that overflows is split into equal parts; at the tree's right end, where keys come
      in order, into full ones and a rest.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierlog.attributes.compaction import (
    PROGRESSIVE,
    Compaction,
    Old,
    is_quiet,
    lowest_leaves,
    moves,
)
from tierlog.attributes.tree import (
    FEW,
    Node,
    PageRef,
    Row,
    Steps,
    child_ref,
    descend,
    key_column,
    pages_of,
    sorted_keys,
)
from tierlog.format.attribute_page import (
    INDEX,
    INDEX_ENTRY_LEN,
    LEAF,
    LEAF_ENTRY_LEN,
    LEVEL_OFFSET,
    PAGE_BYTES_MAX,
    PAGE_HEADER_LEN,
    VALUE_LEN,
    Entries,
    Keys,
    capacity,
    leaf_entries,
    new_page,
    seal,
)
from tierlog.model.attributes import KEY_LEN, AttributeKey, IndexRoot

_ROW: Final = Struct(">16sqHq")

assert _ROW.size == INDEX_ENTRY_LEN


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How a tree is written. Any shape reads what any other wrote."""

    page_bytes: int = PAGE_BYTES_MAX
    is_tail_split: bool = True
    compaction: Compaction | None = PROGRESSIVE

    def __post_init__(self) -> None:
        assert self.page_bytes <= PAGE_BYTES_MAX
        assert capacity(1, self.page_bytes) >= 3, "a page that splits would have no children"


DEFAULT: Final = Shape()
SEED: Final = Shape(is_tail_split=False, compaction=Compaction(lowest_only=True))
"""As the article has it: one page an update, pages split into equal parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """Pages to append where the former version ends, and the version that they make.

    ``replaced`` are the pages of the former version that the new one does not need.
    """

    pages: Sequence[bytearray]
    root: IndexRoot
    replaced: Sequence[PageRef] = ()
    moved: int = 0


@dataclass(slots=True)
class _Batch:
    """Changes, sorted: keys as bytes and as a column, entries as arrays and as bytes."""

    keys: Sequence[bytes]
    column: Keys
    entries: Entries
    raw: bytes


class _Part(NamedTuple):
    """A page of the new version, about to be written. Rank: 0 it moved, 1 no change, 2 changed."""

    rank: int
    page: bytearray
    parent: Node | None
    slot: int


def update(
    root: IndexRoot, changes: Mapping[AttributeKey, int], shape: Shape = DEFAULT
) -> Steps[Update]:
    """Return what makes a version with these changes out of one without."""
    if not changes:
        return Update(pages=(), root=root)
    batch = _batch_of(changes)
    levels: list[list[Node]] = []
    if root.root_length:
        levels = yield from descend(root, batch.column)
        if shape.compaction is not None and len(levels) > 1:
            yield from _move_oldest(root, levels, shape.compaction)
    return _written(root, levels, batch, shape)


def _batch_of(changes: Mapping[AttributeKey, int]) -> _Batch:
    keys = sorted_keys(changes)
    values: NDArray[np.int64] = np.fromiter(
        map(changes.__getitem__, map(AttributeKey, keys)), np.int64, len(keys)
    )
    column = key_column(keys)
    entries = leaf_entries(column.tobytes(), values)
    return _Batch(keys, column, entries, entries.tobytes())


def _move_oldest(root: IndexRoot, levels: list[list[Node]], policy: Compaction) -> Steps[None]:
    """Add the old leaves that move to what is written."""
    written = sum(len(node.page.raw) for nodes in levels for node in nodes)
    top = levels[0][0]
    live = top.page.tree_len
    if is_quiet(policy, root=root, written=written, live=live):
        return
    lowest = yield from lowest_leaves(top, policy.most(len(levels[-1])))
    chosen = lowest[: moves(policy, lowest, root=root, written=written, live=live)]
    if chosen:
        pages = yield from pages_of([child_ref(one.parent.page, one.slot) for one in chosen])
        for one, page in zip(chosen, pages, strict=True):
            levels[-1].append(Node(page, one.parent, one.slot, 0, 0))
            _take_in(one, levels)


def _take_in(one: Old, levels: list[list[Node]]) -> None:
    """Let what stands above an old leaf be written, too."""
    node: Node | None = one.parent
    depth = len(levels) - 2
    while node is not None and not node.is_in:
        node.is_in = True
        levels[depth].append(node)
        node, depth = node.parent, depth - 1


def _written(root: IndexRoot, levels: list[list[Node]], batch: _Batch, shape: Shape) -> Update:
    """Return the new version: bottom up, level by level."""
    out = _Out(root, levels)
    if levels:
        for leaf in levels[-1]:
            out.parts += _leaf_parts(leaf, batch, shape, out)
    else:
        out.added = len(batch.keys)
        out.parts += _first_parts(batch, shape)
    for nodes in reversed(levels[:-1]):
        out.end_level()
        for node in nodes:
            out.parts += _index_parts(node, shape)
    while len(out.parts) > 1:
        level = out.parts[0].page[LEVEL_OFFSET] + 1
        out.parts = list(_grown(out.end_level(), level, shape))
    out.end_level()
    return out.outcome(root, levels)


class _Out:
    """What an update writes, in its order."""

    def __init__(self, root: IndexRoot, levels: list[list[Node]]) -> None:
        self.pages: list[bytearray] = []
        self.parts: list[_Part] = []
        self.added = 0
        self._end = root.end
        self._low = 0
        self._top_at = 0
        self._live = levels[0][0].page.tree_len if levels else 0
        self._live -= sum(len(node.page.raw) for nodes in levels for node in nodes)

    def end_level(self) -> list[Row]:
        """Append the parts of a level; tell their parents, or return what these would be told."""
        self.parts.sort(key=_rank)
        rows: list[Row] = []
        for rank, page, parent, slot in self.parts:
            at, length = self._end, len(page)
            self._live += length
            is_root = parent is None and len(self.parts) == 1
            seal(page, at, self._live if is_root else 0)
            self.pages.append(page)
            self._end += length
            self._top_at, self._low = at, _low_of(page, at)
            key = page[PAGE_HEADER_LEN : PAGE_HEADER_LEN + KEY_LEN]
            row = Row(slot, _ROW.pack(key, at, length, self._low), rank == 2)
            (rows if parent is None else parent.rows).append(row)
        self.parts = []
        return rows

    def outcome(self, root: IndexRoot, levels: list[list[Node]]) -> Update:
        """Return it all, the root having been the last."""
        return Update(
            pages=self.pages,
            root=IndexRoot(
                root_offset=self._top_at,
                root_length=len(self.pages[-1]),
                start=self._low,
                end=self._end,
                count=root.count + self.added,
            ),
            replaced=[
                PageRef(node.page.offset, len(node.page.raw), node.page.level)
                for nodes in levels
                for node in nodes
            ],
            moved=sum(leaf.lo == leaf.hi for leaf in levels[-1]) if levels else 0,
        )


def _rank(part: _Part) -> int:
    return part.rank


def _low_of(page: bytearray, offset: int) -> int:
    if not page[LEVEL_OFFSET]:
        return offset
    return int(np.frombuffer(page, INDEX, -1, PAGE_HEADER_LEN)["min_offset"].min())


def _first_parts(batch: _Batch, shape: Shape) -> Iterator[_Part]:
    for start, stop in _cuts(len(batch.keys), 0, shape, is_tail=shape.is_tail_split):
        body = batch.raw[start * LEAF_ENTRY_LEN : stop * LEAF_ENTRY_LEN]
        yield _Part(2, new_page(0, body), None, 0)


def _leaf_parts(leaf: Node, batch: _Batch, shape: Shape, out: _Out) -> Iterator[_Part]:
    """Return the pages that a leaf becomes."""
    page, lo, hi = leaf.page, leaf.lo, leaf.hi
    if lo == hi:
        yield _Part(0, bytearray(page.raw), leaf.parent, leaf.slot)
        return
    at = page.keys.searchsorted(batch.column[lo:hi])
    places: list[int] = at.tolist() if hi - lo <= FEW else []
    present: list[bool] | NDArray[np.bool_]
    if places:
        # Behind the last entry there are no bytes, which are no key.
        present = [page.key(place) == batch.keys[number] for number, place in enumerate(places, lo)]
        absent = present.count(False)
    else:
        present = page.keys[np.minimum(at, page.count - 1)] == batch.column[lo:hi]
        absent = hi - lo - int(np.count_nonzero(present))
    out.added += absent
    if not absent:
        yield _Part(2, _replaced(leaf, batch, at, places), leaf.parent, leaf.slot)
        return
    if absent == hi - lo and at[0] == at[-1]:
        # All of them between the same two: as keys come that are in order.
        place = PAGE_HEADER_LEN + int(at[0]) * LEAF_ENTRY_LEN
        new = batch.raw[lo * LEAF_ENTRY_LEN : hi * LEAF_ENTRY_LEN]
        body = b"".join((page.raw[PAGE_HEADER_LEN:place], new, page.raw[place:]))
    else:
        hits = np.asarray(present)
        entries = page.entries.copy()
        entries["value"][at[hits]] = batch.entries["value"][lo:hi][hits]
        body = np.insert(entries, at[~hits], batch.entries[lo:hi][~hits]).tobytes()
    is_tail = shape.is_tail_split and int(at[-1]) == page.count and leaf.is_rightmost
    cuts = _cuts(len(body) // LEAF_ENTRY_LEN, 0, shape, is_tail=is_tail)
    for start, stop in cuts:
        part = body[start * LEAF_ENTRY_LEN : stop * LEAF_ENTRY_LEN]
        is_changed = len(cuts) == 1 or _has_any(part, batch.column[lo:hi])
        yield _Part(2 if is_changed else 1, new_page(0, part), leaf.parent, leaf.slot)


def _replaced(leaf: Node, batch: _Batch, at: NDArray[Any], places: Sequence[int]) -> bytearray:
    """Return a leaf with other values."""
    page = bytearray(leaf.page.raw)
    if places:
        for number, place in enumerate(places, leaf.lo):
            value = PAGE_HEADER_LEN + place * LEAF_ENTRY_LEN + KEY_LEN
            end = (number + 1) * LEAF_ENTRY_LEN
            page[value : value + VALUE_LEN] = batch.raw[end - VALUE_LEN : end]
    else:
        values = np.frombuffer(page, LEAF, -1, PAGE_HEADER_LEN)["value"]
        values[at] = batch.entries["value"][leaf.lo : leaf.hi]
    return page


def _has_any(part: bytes, column: Keys) -> bool:
    """Tell whether any of the sorted keys is in a part of a leaf."""
    keys = np.frombuffer(part, LEAF)["key"]
    return bool(column.searchsorted(keys[-1:], "right")[0] > column.searchsorted(keys[:1])[0])


def _cuts(entries: int, level: int, shape: Shape, *, is_tail: bool) -> list[tuple[int, int]]:
    """Return where each page begins and ends that so many entries need."""
    most = capacity(level, shape.page_bytes)
    parts = -(-entries // most)
    if is_tail:
        stops = [min(entries, (number + 1) * most) for number in range(parts)]
    else:
        stops = [(number + 1) * entries // parts for number in range(parts)]
    return list(zip([0, *stops[:-1]], stops, strict=True))


def _index_parts(node: Node, shape: Shape) -> Iterator[_Part]:
    """Return the pages that an index page becomes: its children's rows stand for the old ones."""
    page, rows = node.page, node.rows
    slots = [one.slot for one in rows]
    changed = [one.row for one in rows if one.is_changed]
    rank = 2 if changed else 0
    if len(set(slots)) == len(slots):
        raw = bytearray(page.raw)
        if len(rows) <= FEW:
            for slot, row, _ in rows:
                at = PAGE_HEADER_LEN + slot * INDEX_ENTRY_LEN
                raw[at : at + INDEX_ENTRY_LEN] = row
        else:
            new = np.frombuffer(b"".join(one.row for one in rows), INDEX)
            np.frombuffer(raw, INDEX, -1, PAGE_HEADER_LEN)[slots] = new
        yield _Part(rank, raw, node.parent, node.slot)
        return
    kept = np.ones(page.count, np.bool_)
    kept[slots] = False
    new = np.frombuffer(b"".join(one.row for one in rows), INDEX)
    # Not concatenated: that would turn the bytes of numbers.
    entries = np.empty(page.count - len(set(slots)) + len(new), INDEX)
    entries[: -len(new)], entries[-len(new) :] = page.entries[kept], new
    is_tail = shape.is_tail_split and node.is_rightmost and slots.count(page.count - 1) > 1
    for is_changed, part in _index_pages(entries, changed, page.level, shape, is_tail=is_tail):
        yield _Part(2 if is_changed else 1, part, node.parent, node.slot)


def _grown(rows: Sequence[Row], level: int, shape: Shape) -> Iterator[_Part]:
    """Return the level above pages that have nothing above them yet."""
    entries = np.frombuffer(b"".join(one.row for one in rows), INDEX)
    changed = [one.row for one in rows if one.is_changed]
    pages = _index_pages(entries, changed, level, shape, is_tail=shape.is_tail_split)
    for is_changed, part in pages:
        yield _Part(2 if is_changed else 1, part, None, 0)


def _index_pages(
    entries: Entries, changed: Sequence[bytes], level: int, shape: Shape, *, is_tail: bool
) -> Iterator[tuple[bool, bytearray]]:
    """Return index pages of those entries, and whether something changed below each."""
    entries = entries[np.argsort(entries["key"], kind="stable")]
    keys = np.frombuffer(b"".join(row[:KEY_LEN] for row in changed), "S16")
    places = entries["key"].searchsorted(keys)
    for start, stop in _cuts(len(entries), level, shape, is_tail=is_tail):
        is_changed = bool(np.any((places >= start) & (places < stop)))
        yield is_changed, new_page(level, entries[start:stop].tobytes())
