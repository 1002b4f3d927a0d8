"""The attribute index against a dict, on pages so small that all of it happens soon."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from tierlog.attributes.compaction import Compaction
from tierlog.attributes.memory import FIRST_KEY, LAST_KEY, MemoryMedium, MemoryTree
from tierlog.attributes.tree import PageRef, child_ref, root_ref
from tierlog.attributes.update import Shape
from tierlog.model.attributes import VALUE_MAX, VALUE_MIN, AttributeKey, IndexRoot
from tierlog.model.errors import CorruptError

PAGE_BYTES = 122

# Ends that are zero, bytes that are no text, neighbours: whatever an order could get wrong.
keys = st.one_of(
    st.integers(0, 60).map(lambda number: bytes([number]) + bytes(15)),
    st.integers(0, 60).map(lambda number: b"\xff" * 15 + bytes([number])),
    st.binary(min_size=16, max_size=16),
).map(AttributeKey)
values = st.integers(VALUE_MIN, VALUE_MAX)
batches = st.dictionaries(keys, values, max_size=12)
shapes = st.builds(
    Shape,
    page_bytes=st.sampled_from([PAGE_BYTES, 200, 512]),
    is_tail_split=st.booleans(),
    compaction=st.none()
    | st.builds(
        Compaction,
        quiet_factor=st.sampled_from([0.0, 1.5]),
        busy_factor=st.sampled_from([1.0, 2.25]),
        share=st.sampled_from([0.1, 1.0, 3.0]),
        lowest_only=st.booleans(),
    ),
)


def reachable(tree: MemoryTree, root: IndexRoot) -> list[PageRef]:
    """Return all pages of a version, having looked at what they promise each other."""
    found: list[PageRef] = []

    def walk(ref: PageRef, low: bytes, high: bytes) -> tuple[int, int]:
        page = tree.read(ref)
        found.append(PageRef(ref.offset, ref.length, page.level))
        own = [page.key(number) for number in range(page.count)]
        assert own == sorted(set(own))
        assert low <= own[0]
        assert own[-1] <= high
        if not page.level:
            return ref.offset, len(page.raw)
        lows, size = [], len(page.raw)
        for slot, key in enumerate(own):
            child = child_ref(page, slot)
            assert child.offset < ref.offset
            last = own[slot + 1] if slot + 1 < page.count else high
            child_low, child_size = walk(child, key, last)
            assert tree.read(child).key(0) == key
            assert page.entries["min_offset"][slot] == child_low
            lows.append(child_low)
            size += child_size
        return min(lows), size

    if root.root_length:
        low, size = walk(root_ref(root), bytes(16), b"\xff" * 16)
        assert low == root.start
        assert tree.read(root_ref(root)).tree_len == size
    return found


class TreeMachine(RuleBasedStateMachine):
    """Batches, lookups, ranges, truncation and new beginnings, beside a dict."""

    @initialize(shape=shapes)
    def begin(self, shape: Shape) -> None:
        self.tree = MemoryTree(shape, MemoryMedium(chunk_bytes=16))
        self.model: dict[AttributeKey, int] = {}
        self.former = (self.tree.root, dict(self.model))

    @rule(batch=batches)
    def update(self, batch: dict[AttributeKey, int]) -> None:
        end, length = self.tree.root.end, self.tree.medium.end
        done = self.tree.update(batch, is_truncated=False)
        assert self.tree.medium.end == length + sum(map(len, done.pages)) == self.tree.root.end
        assert bool(done.pages) == bool(batch)
        assert all(len(page) <= self.tree.shape.page_bytes for page in done.pages)
        compaction = self.tree.shape.compaction
        assert done.moved <= (compaction.most(len(batch)) if compaction else 0)
        assert all(ref.offset < end for ref in done.replaced)
        self.model |= batch

    @rule(numbers=st.lists(st.integers(0, 10_000), max_size=6), others=st.lists(keys, max_size=3))
    def get(self, numbers: list[int], others: list[AttributeKey]) -> None:
        known = list(self.model)
        wanted = [known[number % len(known)] for number in numbers if known] + others
        expected = {key: self.model[key] for key in wanted if key in self.model}
        assert self.tree.get(wanted) == expected

    @rule(first=keys, last=keys)
    def iterate(self, first: AttributeKey, last: AttributeKey) -> None:
        expected = [(key, self.model[key]) for key in sorted(self.model) if first <= key <= last]
        assert list(self.tree.items(first, last)) == expected

    @rule(batch=batches)
    def iterate_beside_an_update(self, batch: dict[AttributeKey, int]) -> None:
        run = self.tree.items()
        before, expected = [next(run, None)], sorted(self.model.items())
        self.update(batch)
        assert [*filter(None, before), *run] == expected

    @rule()
    def remember(self) -> None:
        self.former = (self.tree.root, dict(self.model))

    @rule()
    def truncate(self) -> None:
        root, model = self.former
        self.tree.medium.truncate(min(root.start, self.tree.root.start))
        assert dict(self.tree.items(root=root)) == model

    @rule()
    def truncate_all_that_is_needless(self) -> None:
        self.remember()
        self.tree.medium.truncate(self.tree.root.start)
        assert self.tree.root.start - self.tree.medium.start < self.tree.medium.chunk_bytes

    @rule(shape=shapes)
    def reopen(self, shape: Shape) -> None:
        larger = max(shape.page_bytes, self.tree.shape.page_bytes)
        shape = Shape(
            page_bytes=larger, is_tail_split=shape.is_tail_split, compaction=shape.compaction
        )
        self.tree = MemoryTree(shape, self.tree.medium, self.tree.root)

    @invariant()
    def is_whole(self) -> None:
        assert dict(self.tree.items(FIRST_KEY, LAST_KEY)) == self.model
        assert self.tree.root.count == len(self.model)
        reachable(self.tree, self.tree.root)


SETTINGS = settings(
    max_examples=60,
    stateful_step_count=30,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.mark.covers("E28", "E29", "E39")
def test_the_tree_is_a_dict():
    run_state_machine_as_test(TreeMachine, settings=SETTINGS)


class _Damaged(MemoryMedium):
    """Flips one byte of what is read."""

    at = -1

    def read(self, offset: int, length: int) -> bytes:
        raw = bytearray(super().read(offset, length))
        if offset <= self.at < offset + length:
            raw[self.at - offset] ^= 0x40
        return bytes(raw)


def test_every_flipped_byte_is_found_by_whoever_reads_it():
    """Reading all, updating all: the damage is named, and there is never a wrong answer."""
    medium = _Damaged(chunk_bytes=1 << 16)
    tree = MemoryTree(Shape(page_bytes=PAGE_BYTES), medium)
    model = {AttributeKey(bytes([number * 7 % 251]) + bytes(15)): number for number in range(30)}
    for key, value in model.items():
        tree.update({key: value}, is_truncated=False)
    refs = reachable(tree, tree.root)
    assert {ref.level for ref in refs} == {0, 1, 2}
    needed = [at for ref in refs for at in range(ref.offset, ref.offset + ref.length)]
    for at in needed:
        medium.at = at
        with pytest.raises(CorruptError):
            tree.get(model)
        with pytest.raises(CorruptError):
            list(tree.items())
        root, end = tree.root, medium.end
        with pytest.raises(CorruptError):
            tree.update(dict.fromkeys(model, 1), is_truncated=False)
        assert (tree.root, medium.end) == (root, end)
    for at in set(range(medium.end)) - set(needed):
        medium.at = at
        assert dict(tree.items()) == model
