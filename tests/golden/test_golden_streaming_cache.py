"""Figure 4 of the seed: four buffers of eight 4 KB blocks, built as its text and table tell.

The words are written by hand from the byte table of ``layout``, never computed by its code.
"""

import pytest

from tests.unit.reader.cache.audit import audit, chain, free_list, word
from tierlog_reader.cache.layout import Layout, read_free, read_head, read_used

KB4 = 4096


def at(buffer: int, block: int) -> int:
    return buffer * 8 + block


@pytest.fixture
def figure(streaming_cache):
    """E1 to E4 as the figure shows them; X, which held 1-5 and so on, came and went."""
    cache = streaming_cache(4 * 8 * KB4, Layout(KB4, 8))
    e1 = cache.insert(b"1" * (6 * KB4))
    e4 = cache.insert(b"4" * KB4)  # 0-7, and later 1-4
    e2 = cache.insert(b"2" * (3 * KB4))  # 1-1 to 1-3
    e4 = cache.append(e4, b"4" * 100)
    rest = cache.insert(b"x" * (3 * KB4))  # 1-5 to 1-7: buffer 1 is full, 2 comes next
    e2 = cache.append(e2, b"2" * (2 * KB4))  # 2-1 and 2-2
    e3 = cache.insert(b"")  # 2-3
    cache.delete(rest)
    yield cache, {"E1": e1, "E2": e2, "E3": e3, "E4": e4}
    cache.close()


@pytest.mark.covers("C39", "C40", "C41", "C42", "C68")
def test_the_entries_lie_where_the_figure_says(figure):
    cache, entries = figure
    assert entries == {"E1": at(0, 6), "E2": at(2, 2), "E3": at(2, 3), "E4": at(1, 4)}
    assert chain(cache, entries["E1"]) == [at(0, block) for block in range(1, 7)]
    assert chain(cache, entries["E2"]) == [at(1, 1), at(1, 2), at(1, 3), at(2, 1), at(2, 2)]
    assert chain(cache, entries["E3"]) == [at(2, 3)]
    assert chain(cache, entries["E4"]) == [at(0, 7), at(1, 4)]
    lengths = {name: cache.length(address) for name, address in entries.items()}
    assert lengths == {"E1": 6 * KB4, "E2": 5 * KB4, "E3": 0, "E4": KB4 + 100}
    for address in chain(cache, entries["E2"]):
        assert read_used(word(cache, *cache.layout.place(address)), address).length == KB4
    assert audit(cache, entries.values()).used == 6 + 5 + 1 + 2


@pytest.mark.covers("C31", "C42", "C43", "C44")
def test_the_metadata_is_that_of_sections_c_to_e(figure):
    cache, _ = figure
    assert read_head(word(cache, 0, 0)).next == 0, "buffer 0 has no free block"
    assert read_head(word(cache, 1, 0)).next == 5, "the first free block of buffer 1 is 5"
    assert free_list(cache, 1) == [5, 6, 7]
    assert read_head(word(cache, 2, 0)).next == 4
    assert read_used(word(cache, 1, 4), at(1, 4)).prev == at(0, 7)
    assert read_used(word(cache, 0, 7), at(0, 7)).prev == 0
    assert read_used(word(cache, 0, 1), at(0, 1)).prev == 0
    assert [read_used(word(cache, 0, block), at(0, block)).prev for block in range(2, 7)] == [
        at(0, block - 1) for block in range(2, 7)
    ]
    assert cache.state().touched == 3 * 8 * KB4, "buffer 3 is not even touched"
    # Once buffer 2 is full, the next of the queue is 3: 1 got room again, so it comes after it.
    for _ in range(4):
        cache.insert(b"y" * KB4)
    assert free_list(cache, 2) == []
    assert free_list(cache, 1) == [5, 6, 7]
    assert [read_free(word(cache, 3, block)).next for block in range(1, 8)] == [
        2, 3, 4, 5, 6, 7, 0,
    ]  # fmt: skip
    assert read_head(word(cache, 3, 0)).next == 1


@pytest.mark.covers("C34")
def test_the_words_bit_by_bit(figure):
    cache, _ = figure
    used = 1 << 56
    # used, length << 42, number in its run << 32, prev
    assert word(cache, 0, 1) == used | 4096 << 42 | 1 << 32
    assert word(cache, 0, 6) == used | 4096 << 42 | 6 << 32
    assert word(cache, 1, 4) == used | 100 << 42 | 1 << 32 | 7
    assert word(cache, 2, 1) == used | 4096 << 42 | 1 << 32 | 11
    assert word(cache, 2, 3) == used | 0 << 42 | 1 << 32
    # free blocks << 32, first free one
    assert word(cache, 0, 0) == used
    assert word(cache, 1, 0) == used | 3 << 32 | 5
    assert word(cache, 2, 0) == used | 4 << 32 | 4
    # blocks of the run << 32 at its ends, last block of the run before << 10, next
    assert [word(cache, 1, block) for block in (5, 6, 7)] == [3 << 32 | 6, 7, 3 << 32]
    assert word(cache, 3, 0) == 0, "never used"
