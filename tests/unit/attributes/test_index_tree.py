"""How large the attribute index may be, what a lookup reads, and what an update writes."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tierlog.attributes.compaction import PROGRESSIVE, Compaction
from tierlog.attributes.memory import MemoryMedium, MemoryTree
from tierlog.attributes.tree import ANY_LEVEL, PageRef, drive, drive_async, lookup, root_ref, scan
from tierlog.attributes.update import SEED, Shape, update
from tierlog.format.attribute_page import PAGE_BYTES_MAX, Page, capacity, check_pages
from tierlog.model.attributes import VALUE_MAX, VALUE_MIN, AttributeKey, IndexRoot
from tierlog.model.errors import CorruptError, RefusedError

BILLION = 10**9
SMALL = Shape(page_bytes=122)


def key(number: int) -> AttributeKey:
    return AttributeKey(number.to_bytes(8, "big") * 2)


def filled(count: int, shape: Shape = SMALL) -> MemoryTree:
    tree = MemoryTree(shape)
    tree.update({key(number): number for number in range(count)})
    return tree


def pages_by_level(attributes: int, share: float) -> list[int]:
    """Return how many pages each level has, leaves first, when pages are filled to a share."""
    counts: list[int] = []
    entries, level = attributes, 0
    while not counts or entries > 1:
        entries = -(-entries // int(capacity(level) * share))
        counts.append(entries)
        level = 1
    return counts


class Reading:
    """Reads pages of a tree, and notes which."""

    def __init__(self, tree: MemoryTree) -> None:
        self.tree = tree
        self.steps = 0
        self.levels: list[int] = []
        self.offsets: list[int] = []

    def __call__(self, ref: PageRef) -> Page:
        page = self.tree.read(ref)
        self.levels.append(page.level)
        self.offsets.append(ref.offset)
        return page

    async def many(self, refs: Sequence[PageRef]) -> list[Page]:
        self.steps += 1
        return [self(ref) for ref in refs]


@pytest.mark.covers("E21", "E33", "E34")
def test_a_billion_attributes_are_four_reads_away_and_the_second_level_fits_in_32_mb():
    full, half_full = pages_by_level(BILLION, 1.0), pages_by_level(BILLION, 0.5)
    assert (len(full), len(half_full)) == (3, 4)
    assert full[-2] * PAGE_BYTES_MAX <= 32_000_000
    assert half_full[-2] * PAGE_BYTES_MAX <= 32_000_000
    # And there can't be more of them in any tree.
    assert capacity(1) * PAGE_BYTES_MAX <= 32_000_000
    # Offsets are numbers of 64 bits: what is written of it in years has room.
    assert 10_000 * BILLION * 34 < 2**63


@pytest.mark.covers("E33")
def test_the_model_of_heights_is_right():
    for count in (1, 4, 5, 12, 13, 36, 37, 300):
        tree = filled(count)
        pages = [-(-count // 4)]
        while pages[-1] > 1:
            pages.append(-(-pages[-1] // 3))
        reading = Reading(tree)
        assert drive(lookup(tree.root, [key(count - 1)]), reading) == {key(count - 1): count - 1}
        assert len(reading.levels) == len(pages)


@pytest.mark.covers("E35", "E36")
def test_a_lookup_reads_the_root_one_page_of_each_level_and_one_leaf():
    """With index pages in memory it is one read; each of the second level is as likely."""
    tree = filled(400)
    reading, rng = Reading(tree), random.Random(5)
    for _ in range(900):
        number = rng.randrange(400)
        assert drive(lookup(tree.root, [key(number)]), reading) == {key(number): number}
    assert set(Counter(reading.levels).values()) == {900}
    assert reading.levels[:: len(set(reading.levels))] == [max(reading.levels)] * 900
    assert reading.offsets.count(tree.root.root_offset) == 900
    second = Counter(
        offset
        for level, offset in zip(reading.levels, reading.offsets, strict=True)
        if level == max(reading.levels) - 1
    )
    assert len(second) == 2
    assert min(second.values()) > 100


def test_a_lookup_of_many_keys_reads_each_page_once():
    tree = filled(200)
    reading = Reading(tree)
    wanted = [key(number) for number in range(0, 260, 2)]
    found = drive(lookup(tree.root, [*wanted, *wanted]), reading)
    assert found == {key(number): number for number in range(0, 200, 2)}
    assert len(reading.offsets) == len(set(reading.offsets))


async def test_pages_of_a_level_are_asked_for_at_once():
    tree = filled(200)
    reading = Reading(tree)
    wanted = [key(number) for number in range(200)]
    assert await drive_async(lookup(tree.root, wanted), reading.many) == tree.get(wanted)
    assert reading.steps == max(reading.levels) + 1
    reading.steps = 0
    done = await drive_async(update(tree.root, dict.fromkeys(wanted, 7), SMALL), reading.many)
    assert reading.steps == max(reading.levels) + 1
    assert tree.update(dict.fromkeys(wanted, 7)) == done


def test_a_scan_gives_runs_of_so_many_leaves_and_where_the_next_begins():
    tree = filled(30)
    first = drive(scan(tree.root, key(2), key(29), leaves=2), tree.read)
    assert first.items == [(key(number), number) for number in range(2, 8)]
    assert first.next_key == key(8)
    last = drive(scan(tree.root, key(28), key(10**6), leaves=2), tree.read)
    assert (last.items, last.next_key) == ([(key(28), 28), (key(29), 29)], None)
    assert drive(scan(tree.root, key(5), key(4)), tree.read) == ([], None)
    assert drive(scan(IndexRoot(), key(4), key(5)), tree.read) == ([], None)


def test_values_have_64_bits_and_keys_16_bytes():
    tree = MemoryTree()
    tree.update({key(1): VALUE_MIN, key(2): VALUE_MAX})
    assert tree.get([key(1), key(2)]) == {key(1): VALUE_MIN, key(2): VALUE_MAX}
    assert tree.get([key(1)]) == {key(1): VALUE_MIN}
    assert tree.get([key(0)]) == tree.get([key(3)]) == tree.get([]) == {}
    for wrong in (b"", bytes(15), bytes(17)):
        with pytest.raises(RefusedError, match="16 bytes"):
            tree.update({AttributeKey(wrong): 1})
        with pytest.raises(RefusedError, match="16 bytes"):
            tree.get([AttributeKey(wrong)])


def test_an_update_of_nothing_writes_nothing():
    tree = filled(30)
    before = (tree.root, tree.medium.end)
    assert tree.update({}).pages == ()
    assert (tree.root, tree.medium.end) == before


@pytest.mark.covers("E29")
def test_an_update_that_was_not_appended_changed_nothing():
    tree = filled(50)
    changes = {key(3): -1, key(100): -2}
    lost = drive(update(tree.root, changes, SMALL), tree.read)
    assert tree.get([key(3), key(100)]) == {key(3): 3}
    assert tree.update(changes) == lost


def test_a_page_that_is_another_than_its_parent_says_is_damage():
    tree = filled(30)
    leaf = tree.read(PageRef(0, 116, 0))
    with pytest.raises(CorruptError, match="its parent has"):
        drive(lookup(tree.root, [key(1)]), lambda _: leaf)
    reads = iter([tree.read(root_ref(tree.root)), *[leaf] * 9])
    with pytest.raises(CorruptError, match="its parent has"):
        drive(lookup(tree.root, [key(1)]), lambda _: next(reads))
    assert root_ref(tree.root).level == ANY_LEVEL


@pytest.mark.covers("E28")
def test_every_page_on_the_way_to_a_change_is_written_again():
    tree = filled(200, replace(SMALL, compaction=None))
    before = Reading(tree)
    drive(lookup(tree.root, [key(77)]), before)
    done = tree.update({key(77): 0})
    assert len(done.pages) == len(before.offsets)
    assert sorted(ref.offset for ref in done.replaced) == sorted(before.offsets)


def test_keys_in_order_leave_full_pages_behind_and_others_equal_halves():
    in_order = MemoryTree(replace(SMALL, compaction=None))
    for number in range(40):
        in_order.update({key(number): 0})
    assert in_order.read(root_ref(in_order.root)).tree_len == filled(40).medium.end
    halves = MemoryTree(Shape(page_bytes=122, is_tail_split=False, compaction=None))
    for number in range(40):
        halves.update({key(number): 0})
    size = halves.read(root_ref(halves.root)).tree_len
    assert size > 1.4 * filled(40).medium.end


# ------------------------------------------------------------------------ what is kept


def _updated(shape: Shape, updates: int, *, attributes: int = 400) -> MemoryTree:
    tree = MemoryTree(shape, MemoryMedium(chunk_bytes=4096))
    tree.update({key(number): 0 for number in range(attributes)})
    rng = random.Random(9)
    for _ in range(updates):
        tree.update({key(rng.randrange(attributes)): 1 for _ in range(4)})
    return tree


@pytest.mark.covers("E37", "E38", "E39", "E43")
def test_what_is_kept_stays_small_by_updates_alone():
    """Whole chunks go, none that holds a needed page, and it is no more after more updates."""
    for shape in (Shape(page_bytes=512), replace(SEED, page_bytes=512)):
        tree = _updated(shape, 600)
        needed = tree.read(root_ref(tree.root)).tree_len
        assert tree.medium.kept < 3 * needed < tree.medium.end / 40
        assert 0 <= tree.root.start - tree.medium.start < 4096
        assert len(list(tree.items())) == 400
        assert _updated(shape, 1200).medium.kept < 3 * needed
        without = _updated(replace(shape, compaction=None), 600)
        assert without.medium.kept > 5 * needed


@pytest.mark.covers("E40", "E41")
def test_the_lowest_page_moves_for_32_to_100_kb_an_update():
    """Whole pages, three levels: the same change from the same version, with and without."""
    numbers, rng = range(0, 1_400_000, 2), random.Random(4)
    seed, plain = replace(SEED, is_tail_split=True), Shape(compaction=None)
    tree = MemoryTree(plain, MemoryMedium(chunk_bytes=1 << 20))
    tree.update(dict.fromkeys(map(key, numbers), 0))
    # The leaves are full: one more key in each makes two of it, too many for the root.
    tree.update({key(number + 1): 0 for number in numbers[::500]})
    assert tree.read(root_ref(tree.root)).level == 2
    tree = MemoryTree(seed, tree.medium, tree.root)
    moved = 0
    for _ in range(50):
        changes = {key(2 * rng.randrange(len(numbers))): 1 for _ in range(3)}
        alone = drive(update(tree.root, changes, plain), tree.read)
        lowest = tree.root.start
        done = tree.update(changes)
        more = done.root.end - alone.root.end
        if done.moved:
            assert lowest in {ref.offset for ref in done.replaced}
            assert tree.root.start > lowest
            assert 12_000 <= more <= 100_000
            moved += 1
        else:
            assert more == 0
    assert moved > 40


def test_how_many_pages_may_move_follows_the_update():
    assert [PROGRESSIVE.most(leaves) for leaves in (1, 10, 13, 100, 547)] == [2, 2, 3, 9, 45]
    assert Compaction(lowest_only=True).most(547) == 1


def test_no_page_moves_while_little_is_kept():
    tree = filled(400, replace(SMALL, compaction=Compaction(quiet_factor=1e9)))
    assert tree.update({key(1): 1}).moved == 0
    busy = MemoryTree(replace(SMALL, compaction=Compaction(quiet_factor=0)), tree.medium, tree.root)
    assert busy.update({key(1): 2}).moved == 1


def test_a_flush_that_was_cut_is_not_whole_though_each_of_its_pages_is():
    tree = filled(20)
    start = tree.root.end
    pages = tree.update({key(3): 1, key(30): 2}).pages
    check_pages(b"".join(pages), start)
    for count in range(len(pages)):
        with pytest.raises(CorruptError, match="is not there"):
            check_pages(b"".join(pages[:count]), start)
