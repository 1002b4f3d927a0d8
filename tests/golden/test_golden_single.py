"""The layout of PIP-17's first text (seeds/001), a whole object written by hand from its tables.

The tiny ledger of three entries of 10 bytes, with the ledger metadata that Pulsar wrote for it, in
blocks of 51 bytes; part 1 is padded to 248 bytes. Never regenerate these bytes from the code.
"""

import pytest

from tests.golden.objects import runs_of
from tests.golden.test_golden_objects import TINY_DATA, TINY_ENTRIES, TINY_INDEX, TINY_METADATA
from tierlog.format import keys, single
from tierlog.format.block import Block
from tierlog.format.index import IndexEntry, ObjectIndex
from tierlog.format.inspect import ObjectKind, inspect_object
from tierlog.format.keys import ObjectRole
from tierlog.format.ledger_metadata import decode_bare
from tierlog.format.single import SingleBlock, SingleBlockBuilder, SingleBlockHeader, SingleIndex
from tierlog.format.versions import Format, current
from tierlog.model.errors import CorruptError, RefusedError
from tierlog.model.ids import EntryId

INDEX_LEN = 248
TINY_INDEX_PART = (
    bytes.fromhex(
        "de47de04"  #   0  index_magic_word
        "000000f8"  #   4  index_len             248, the padding included
        "00000002"  #   8  index_entry_count     2
        "000000b7"  #  12  segment_metadata_len  183
    )
    + TINY_METADATA  #  16
    + bytes.fromhex(
        "0000000000000000"  # 199  first_entry_id  0
        "00000002"  #         207  block           2: part 1 is the index
        "00000000000000f8"  # 211  offset          248: the index's length
        "0000000000000002"  # 219  first_entry_id  2
        "00000003"  #         227  block           3
        "000000000000012b"  # 231  offset          299: 248 + 1 block of 51
        "dead1234dead1234de"  # 239  padding
    )
)
TINY_BLOCKS = [
    bytes.fromhex(
        "fbdbab04"  #         248  magic_word
        "00000033"  #         252  block_len          51
        "00000002"  #         256  block_entry_count  2
        "0000000000000000"  # 260  first_entry_id     0
        "0000000a"  #         268  entry_len          10, and no entry id
        "07dc930b302278a812c0"
        "0000000a"  #         282
        "3cd62d7b0fa3ce29f117"
        "dead12"  #           296  padding, cut
    ),
    bytes.fromhex(
        "fbdbab04"  #         299
        "00000022"  #         303  block_len          34 = 20 + 10 + 1 x 4
        "00000001"  #         307
        "0000000000000002"  # 311  first_entry_id     2
        "0000000a"  #         319
        "7206384cbbff7488ca9d"
    ),
]
TINY_OBJECT = TINY_INDEX_PART + b"".join(TINY_BLOCKS)


def tiny_index() -> SingleIndex:
    """The index as a value."""
    return SingleIndex(
        object_len=333,
        index_len=INDEX_LEN,
        metadata=decode_bare(TINY_METADATA),
        metadata_raw=TINY_METADATA,
        entries=(
            IndexEntry(first_entry_id=EntryId(0), part_number=2, offset=248),
            IndexEntry(first_entry_id=EntryId(2), part_number=3, offset=299),
        ),
    )


@pytest.mark.covers("B20", "B21", "B22")
def test_the_index_is_written_and_read() -> None:
    assert len(TINY_INDEX_PART) == INDEX_LEN
    assert tiny_index().encode() == TINY_INDEX_PART
    assert tiny_index().encode_used() == TINY_INDEX_PART[:239]
    assert SingleIndex.decode(TINY_OBJECT, len(TINY_OBJECT)) == tiny_index()
    # Offsets are (index length) + (number of preceding blocks) * (block size).
    assert [one.offset for one in tiny_index().entries] == [248 + 0 * 51, 248 + 1 * 51]
    blocks = tiny_index().blocks()
    assert [TINY_OBJECT[one.offset : one.offset + one.length] for one in blocks] == TINY_BLOCKS
    assert [(one.first_entry_id, one.last_entry_id) for one in blocks] == [(0, 1), (2, 2)]


@pytest.mark.covers("B15", "B16", "B17", "B18", "B19", "B25")
def test_blocks_are_written_and_read() -> None:
    (run,) = runs_of(TINY_ENTRIES)
    left = single.block_len_for_remaining(51, payload_left=30, entries_left=3)
    first = SingleBlockBuilder(left, 0)
    assert first.take(run, 0) == 2
    assert first.full
    assert b"".join(first.finish()) == TINY_BLOCKS[0]
    # (header) + (length of segment - bytes written) + (entries to be written * 4)
    last_len = single.block_len_for_remaining(51, payload_left=30 - 20, entries_left=1)
    assert last_len == 20 + 10 + 4 == len(TINY_BLOCKS[1])
    last = SingleBlockBuilder(last_len, 2)
    assert last.take(run, 2) == 3
    assert b"".join(last.finish()) == TINY_BLOCKS[1]
    for raw, entries, header in [
        (TINY_BLOCKS[0], TINY_ENTRIES[:2], (51, 2, 0)),
        (TINY_BLOCKS[1], TINY_ENTRIES[2:], (34, 1, 2)),
    ]:
        block = SingleBlock.decode(raw)
        found = block.header
        assert (found.block_len, found.entry_count, found.first_entry_id) == header
        assert list(map(bytes, block.entries)) == entries
    assert SingleBlock.decode(TINY_BLOCKS[0]).padding_len == 3


@pytest.mark.covers("B28")
def test_neither_layout_is_taken_for_the_other() -> None:
    with pytest.raises(CorruptError):
        SingleIndex.decode(TINY_INDEX, 1000)
    with pytest.raises(CorruptError):
        ObjectIndex.decode(TINY_INDEX_PART)
    with pytest.raises(CorruptError):
        SingleBlockHeader.decode(TINY_DATA)
    with pytest.raises(CorruptError):
        Block.decode(TINY_BLOCKS[0] + bytes(200))


@pytest.mark.covers("B14", "B28")
def test_the_version_in_user_metadata_tells_the_layouts_apart() -> None:
    assert (current(Format.SINGLE_OBJECT), current(Format.DATA_OBJECT)) == (201804, 1)
    keys.check_object_metadata({keys.FORMAT_VERSION: "201804"}, ObjectRole.SINGLE)
    for role, version in [(ObjectRole.SINGLE, "1"), (ObjectRole.DATA, "201804")]:
        with pytest.raises(RefusedError):
            keys.check_object_metadata({keys.FORMAT_VERSION: version}, role)
    with pytest.raises(CorruptError):
        keys.check_object_metadata({}, ObjectRole.SINGLE)


def test_the_inspector_shows_the_object_field_by_field() -> None:
    report = inspect_object(lambda at, length: TINY_OBJECT[at : at + length], len(TINY_OBJECT))
    assert (report.kind, report.sound) == (ObjectKind.SINGLE, True)
    shown = {one.name: (one.offset, one.length, one.value) for one in report.fields}
    assert shown["index_len"] == (4, 4, "248")
    assert shown["mapping[1].block"] == (227, 4, "3")
    assert shown["mapping[1].offset"] == (231, 8, "299")
    assert shown["block[0].block_entry_count"] == (256, 4, "2")
    assert shown["block[1].first_entry_id"] == (311, 8, "2")
    assert [(one.offset, one.entry_count, one.padding_len) for one in report.blocks] == [
        (248, 2, 3),
        (299, 1, 0),
    ]
    assert report.entry_count == 3


@pytest.mark.parametrize("at", [0, 5, 11, 14, 206, 218, 240, 249, 253, 259, 267, 269, 297, 301])
def test_the_inspector_finds_damage_where_it_is(at: int) -> None:
    damaged = bytearray(TINY_OBJECT)
    damaged[at] ^= 0x40
    try:
        report = inspect_object(lambda start, length: damaged[start : start + length], 333)
    except RefusedError:
        assert at < 4, "only without its magic word it is nothing of ours"
    else:
        assert not report.sound


def test_a_cut_object_is_said_to_be_cut() -> None:
    for size in [*range(4, 250), 270, 299, 310, 332]:
        cut = TINY_OBJECT[:size]
        report = inspect_object(lambda at, length, cut=cut: cut[at : at + length], size)  # type: ignore[misc]
        assert not report.sound, size
