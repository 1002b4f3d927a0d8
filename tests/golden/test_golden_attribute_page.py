"""Pages of the attribute index, written by hand from the byte table.

The checksums are those of a bit-by-bit CRC32C over the offset and the page. Never regenerate these
bytes from the code.
"""

import pytest

from tierlog.attributes.memory import MemoryMedium, MemoryTree
from tierlog.attributes.tree import child_ref
from tierlog.attributes.update import Shape
from tierlog.format.attribute_page import Page, capacity, new_page, seal
from tierlog.model.attributes import AttributeKey
from tierlog.model.errors import CorruptError, RefusedError

LEAF_AT = 4096
LEAF_PAGE = bytes.fromhex(
    "544c4150"  #          0  magic        TLAP
    "01"  #                4  version      1
    "00"  #                5  level        a leaf
    "0002"  #              6  entry_count  2
    "ae2b42d2"  #          8  crc32c       with the offset before it
    "0000000000000044"  # 12  tree_len     68: it is a root, and all there is
    "00000000000000000000000000000000"  # 20  key
    "000000000000002a"  #                      42
    "0123456789abcdeffedcba9876543200"
    "ffffffffffffffff"  #                      -1
)
INDEX_AT = 4208
INDEX_PAGE = bytes.fromhex(
    "544c4150"
    "01"
    "01"  #                5  level        above leaves
    "0002"  #              6  entry_count  2
    "28c6cdc3"
    "00000000000000c8"  # 12  tree_len     200 = 68 + 44 + 88
    "00000000000000000000000000000000"  # 20  key
    "0000000000001000"  # offset           4096
    "0044"  #             length           68
    "0000000000001000"  # min_offset       4096
    "ffeeddccbbaa99887766554433221100"
    "0000000000001044"  # offset           4164
    "002c"  #             length           44
    "0000000000001044"
)
LOW = AttributeKey(bytes(16))
HIGH = AttributeKey(bytes.fromhex("0123456789abcdeffedcba9876543200"))


@pytest.mark.covers("E30", "E42")
def test_a_leaf_and_an_index_page_are_read():
    leaf = Page(LEAF_PAGE, LEAF_AT)
    assert (leaf.level, leaf.count, leaf.tree_len) == (0, 2, 68)
    assert [leaf.key(0), leaf.key(1)] == [LOW, HIGH]
    assert leaf.entries["value"].tolist() == [42, -1]
    index = Page(INDEX_PAGE, INDEX_AT)
    assert (index.level, index.count, index.tree_len) == (1, 2, 200)
    assert index.key(1) == bytes.fromhex("ffeeddccbbaa99887766554433221100")
    assert [child_ref(index, slot) for slot in (0, 1)] == [(4096, 68, 0), (4164, 44, 0)]
    assert index.entries["min_offset"].tolist() == [4096, 4164]


@pytest.mark.parametrize(("page", "at"), [(LEAF_PAGE, LEAF_AT), (INDEX_PAGE, INDEX_AT)])
def test_a_page_is_written(page, at):
    made = new_page(page[5], page[20:])
    seal(made, at, int.from_bytes(page[12:20], "big"))
    assert bytes(made) == page


def test_a_tree_of_one_leaf_is_that_leaf():
    medium = MemoryMedium()
    medium.append([bytes(LEAF_AT)])
    tree = MemoryTree(Shape(), medium)
    tree.root = type(tree.root)(end=LEAF_AT)
    assert [bytes(page) for page in tree.update({HIGH: -1, LOW: 42}).pages] == [LEAF_PAGE]


@pytest.mark.parametrize(("page", "at"), [(LEAF_PAGE, LEAF_AT), (INDEX_PAGE, INDEX_AT)])
def test_a_page_with_any_other_byte_or_at_another_place_is_damaged(page, at):
    for number in range(len(page)):
        for bit in range(8):
            other = bytearray(page)
            other[number] ^= 1 << bit
            with pytest.raises(CorruptError):
                Page(other, at)
    for end in range(len(page)):
        with pytest.raises(CorruptError):
            Page(page[:end], at)
    with pytest.raises(CorruptError):
        Page(page + b"\0" * 24, at)
    with pytest.raises(CorruptError):
        Page(page, at + 1)


def test_a_page_of_a_version_to_come_is_refused():
    page = bytearray(LEAF_PAGE)
    page[4] = 2
    seal(page, LEAF_AT, 68)
    with pytest.raises(RefusedError, match="format version 2"):
        Page(page, LEAF_AT)


@pytest.mark.covers("E31", "E32")
def test_a_page_of_32_kib_has_as_many_entries_as_the_table_says():
    assert (capacity(0), capacity(1), capacity(2)) == (1364, 963, 963)
    assert 20 + 24 * 1364 <= 32_768
    assert 20 + 34 * 963 <= 32_768
