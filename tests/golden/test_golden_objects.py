"""What is in S3 already: objects that Apache Pulsar 4.0.8 wrote, byte for byte.

The tiny ledger (three entries of 10 bytes) is here whole, both objects. Of the large one (12,000
entries of 100 to 3,000 bytes in blocks of 5 MiB) the edge between two blocks is, with the digest
over all its entries. Entries follow a fixed formula. Never regenerate these bytes from the code.
"""

import hashlib

import numpy as np
import pytest

from tests.golden.objects import offload
from tests.golden.oracle import naive_read
from tierlog.format.block import Block, BlockHeader
from tierlog.format.index import IndexEntry, ObjectIndex
from tierlog.format.inspect import inspect_object
from tierlog.format.ledger_metadata import decode_bare, decode_znode, encode_bare, encode_znode
from tierlog.model.errors import CorruptError
from tierlog.model.ids import EntryId
from tierlog.model.ledger import DigestType, LedgerState

TINY_ENTRIES = [
    bytes.fromhex("07dc930b302278a812c0"),
    bytes.fromhex("3cd62d7b0fa3ce29f117"),
    bytes.fromhex("7206384cbbff7488ca9d"),
]
TINY_DATA = bytes.fromhex(
    "fbdbabcb"  #           0  magic_word
    "0000000000000080"  #   4  header_len      128
    "00000000000000c2"  #  12  block_len       194
    "0000000000000000"  #  20  first_entry_id  0
    + "00"
    * 100  #        28  zeros
    + "0000000a"  #       128  entry_len       10
    "0000000000000000"  # 132  entry_id        0
    "07dc930b302278a812c0"
    "0000000a"  #         150
    "0000000000000001"
    "3cd62d7b0fa3ce29f117"
    "0000000a"  #         172
    "0000000000000002"
    "7206384cbbff7488ca9d"
)
TINY_METADATA = bytes.fromhex(
    "0802"  # quorumSize 2
    "1003"  # ensembleSize 3
    "181e"  # length 30
    "2002"  # lastEntryId 2
    "2803"  # state CLOSED
    "3232"  # segment
    "0a0e3132372e302e302e313a33313831"  # 127.0.0.1:3181
    "0a0e3132372e302e302e313a33313832"
    "0a0e3132372e302e302e313a33313833"
    "1000"  # firstEntryId 0
    "3803"  # digestType CRC32C
    "4802"  # ackQuorumSize 2
    "5080d095ffbc31"  # ctime 1700000000000
    "5a1b0a09636f6d706f6e656e74120e6d616e616765642d6c6564676572"
    "5a150a0b6170706c69636174696f6e120670756c736172"
    "5a380a1570756c7361722f6d616e616765642d6c6564676572"
    "121f7075626c69632f64656661756c742f70657273697374656e742f6a75646765"
)
TINY_INDEX = (
    bytes.fromhex(
        "de47de47"  #          0  index_magic_word
        "000000eb"  #          4  index_len             235
        "00000000000000c2"  #  8  data_object_length    194
        "0000000000000080"  # 16  data_header_length    128
        "00000001"  #         24  index_entry_count     1
        "000000b7"  #         28  segment_metadata_len  183
    )
    + TINY_METADATA  #        32
    + bytes.fromhex(
        "0000000000000000"  # 215  first_entry_id  0
        "00000001"  #         223  part_number     1
        "0000000000000000"  # 227  offset          0
    )
)

LARGE_BLOCK_SIZE = 5 * 1024 * 1024
LARGE_DIGEST = "1909464d0940bddee2ebcc7ec5894e7abce6c755d55af1c9edada44d1fd4ed04"
# Bytes 0x4fff87 to 0x50001f of the large data object, but for the padding between them.
LARGE_ENTRY_END = bytes.fromhex("68dcebb6")  # 0x4fff87
LARGE_PADDING_LEN = 117  #                     0x4fff8b
LARGE_SECOND_HEADER = bytes.fromhex(
    "fbdbabcb"  #         0x500000
    "0000000000000080"
    "0000000000500000"
    "0000000000000d44"
    "00000000"
)

GAMMA, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
MASK = 2**64 - 1


def mix(z: int) -> int:
    """The finaliser of splitmix64."""
    z = (z ^ z >> 30) * FIRST & MASK
    z = (z ^ z >> 27) * SECOND & MASK
    return z ^ z >> 31


def large_entry(entry_id: int, *, seed: int = 42, low: int = 100, high: int = 3000) -> bytes:
    """An entry of the large ledger, by its formula."""
    base = (seed * GAMMA + entry_id * FIRST) & MASK
    size = low + mix(base) % (high - low + 1)
    u64 = np.uint64
    with np.errstate(over="ignore"):
        z = u64(base) + np.arange(1, (size + 7) // 8 + 1, dtype=u64) * u64(GAMMA)
        z = (z ^ (z >> u64(30))) * u64(FIRST)
        z = (z ^ (z >> u64(27))) * u64(SECOND)
        z ^= z >> u64(31)
    return z.astype(">u8").tobytes()[:size]


@pytest.mark.covers("A46", "A47", "A49", "A50", "A51", "A52", "A53", "A54", "A55")
def test_the_tiny_data_object_is_written_as_pulsar_wrote_it() -> None:
    objects = offload(TINY_ENTRIES, LARGE_BLOCK_SIZE)
    assert b"".join(objects.blocks) == TINY_DATA
    assert len(TINY_DATA) == 194 == 128 + 30 + 3 * 12


@pytest.mark.covers("A49", "A55", "A57")
def test_the_tiny_data_object_is_read() -> None:
    block = Block.decode(TINY_DATA)
    assert block.header == BlockHeader(block_len=194, first_entry_id=EntryId(0))
    assert block.offsets.tolist() == [0, 22, 44]
    assert bytes(block.frames) == TINY_DATA[128:]
    assert (block.last_entry_id, block.payload_len, block.padding_len) == (2, 30, 0)
    assert [entry for _, entry in naive_read(TINY_DATA)[0].entries] == TINY_ENTRIES


@pytest.mark.covers(
    "A57", "A58", "A59", "A60", "A61", "A62", "A63", "A64", "A65", "A66", "A69", "A70"
)
def test_the_tiny_index_object_is_read_and_written_back() -> None:
    index = ObjectIndex.decode(TINY_INDEX)
    assert len(TINY_INDEX) == index.index_len == 235
    assert (index.data_len, index.data_header_len) == (194, 128)
    assert index.entries == (IndexEntry(first_entry_id=EntryId(0), part_number=1, offset=0),)
    assert index.metadata_raw == TINY_METADATA
    assert index.encode() == TINY_INDEX


@pytest.mark.covers("A65")
def test_pulsars_ledger_metadata_is_read() -> None:
    metadata = decode_bare(TINY_METADATA)
    assert (metadata.ensemble_size, metadata.write_quorum, metadata.ack_quorum) == (3, 2, 2)
    assert (metadata.length, metadata.last_entry_id) == (30, 2)
    assert metadata.state is LedgerState.CLOSED
    assert metadata.digest_type is DigestType.CRC32C
    assert metadata.ctime_ms == 1_700_000_000_000
    assert metadata.segments[0].ensemble == tuple(f"127.0.0.1:318{n}" for n in (1, 2, 3))
    assert metadata.custom == {
        "component": b"managed-ledger",
        "application": b"pulsar",
        "pulsar/managed-ledger": b"public/default/persistent/judge",
    }
    assert metadata.password is None
    assert metadata.ctoken is None


def test_ledger_metadata_is_written_with_pulsars_fields_and_no_others() -> None:
    encoded = encode_bare(decode_bare(TINY_METADATA))
    # The order of the custom metadata carries nothing; every other byte must be the same.
    custom_at = TINY_METADATA.index(b"\x5a\x1b")
    assert encoded[:custom_at] == TINY_METADATA[:custom_at]
    assert sorted(encoded) == sorted(TINY_METADATA)
    assert decode_bare(encoded) == decode_bare(TINY_METADATA)


def test_in_zookeeper_a_first_line_and_a_length_stand_before_the_metadata() -> None:
    metadata = decode_bare(TINY_METADATA)
    golden = b"BookieMetadataFormatVersion\t3\n" + b"\xb7\x01" + encode_bare(metadata)
    assert encode_znode(metadata) == golden
    assert decode_znode(golden) == metadata
    assert decode_znode(golden[:32] + TINY_METADATA) == metadata


@pytest.mark.covers("A43", "A44", "A45", "A48", "A52", "A56", "A68", "A71", "A75")
def test_the_edge_between_two_blocks_is_where_pulsar_put_it() -> None:
    entries = [large_entry(entry_id) for entry_id in range(12_000)]
    digest = hashlib.sha256()
    for entry_id, entry in enumerate(entries):
        digest.update(entry_id.to_bytes(8, "big") + entry)
    assert digest.hexdigest() == LARGE_DIGEST, "the formula itself"

    blocks, index = offload(entries, LARGE_BLOCK_SIZE)
    data = b"".join(blocks)
    end = 0x4FFF8B
    assert data[end - 4 : end] == LARGE_ENTRY_END
    assert data[end:0x500000] == (bytes.fromhex("fedcdead") * 30)[:LARGE_PADDING_LEN]
    # As in the dump: the pattern begins anew at its first byte, whatever the address.
    assert data[0x4FFFF0:0x500000].hex() == "dcdeadfedcdeadfedcdeadfedcdeadfe"
    assert data[0x500000:0x500020] == LARGE_SECOND_HEADER

    assert {len(block) for block in blocks[:-1]} == {LARGE_BLOCK_SIZE}
    assert [one.offset for one in index.entries] == [
        number * LARGE_BLOCK_SIZE for number in range(len(blocks))
    ]
    read = [entry for block in naive_read(data) for _, entry in block.entries]
    assert read == entries
    assert naive_read(data)[-1].padding == b"", "the last block is exactly as long as it must be"


def test_the_inspector_shows_the_tiny_objects_field_by_field() -> None:
    report = inspect_object(lambda at, length: TINY_DATA[at : at + length], len(TINY_DATA))
    assert report.sound
    assert [(one.offset, one.length, one.name, one.value) for one in report.fields] == [
        (0, 4, "block[0].magic_word", "fbdbabcb"),
        (4, 8, "block[0].header_len", "128"),
        (12, 8, "block[0].block_len", "194"),
        (20, 8, "block[0].first_entry_id", "0"),
    ]
    report = inspect_object(lambda at, length: TINY_INDEX[at : at + length], len(TINY_INDEX))
    assert report.sound
    shown = {one.name: (one.offset, one.length, one.value) for one in report.fields}
    assert shown["data_object_length"] == (8, 8, "194")
    assert shown["segment_metadata.last_entry_id"] == (32, 183, "2")
    assert shown["mapping[0].part_number"] == (223, 4, "1")


@pytest.mark.covers("B15", "B16", "B17", "B18", "B19", "B22", "B25")
def test_the_older_text_is_not_what_is_written() -> None:
    """The mail of April 2018 has another layout, which is a driver of its own (ADR-0023)."""
    entries = [b"a" * 100, b"b" * 150]
    blocks, index = offload(entries, 300)
    # Padding is not DE AD 12 34, and lengths count 12 bytes an entry, not 4.
    assert blocks[0][240:244] == bytes.fromhex("fedcdead")
    assert b"\xde\xad\x12\x34" not in b"".join(blocks)
    assert len(blocks[1]) == 128 + 150 + 12
    # Behind the magic word stand 8 bytes of header_len; there is no count of entries.
    assert blocks[0][4:28].hex() == "0000000000000080" + "000000000000012c" + "0000000000000000"
    # Offsets do not begin behind an index.
    assert [one.offset for one in index.entries] == [0, 300]


@pytest.mark.covers("B17", "B28")
def test_a_block_of_the_older_text_is_refused() -> None:
    older = (
        bytes.fromhex(
            "fbdbabcb"  #         magic_word
            "0000001f"  #         block_len          31
            "00000001"  #         block_entry_count  1
            "0000000000000000"  # first_entry_id
            "00000007"  #         entry_len, and no entry_id
        )
        + b"payload"
    )
    with pytest.raises(CorruptError):
        BlockHeader.decode(older)
    with pytest.raises(CorruptError):
        BlockHeader.decode(older + bytes(200))


@pytest.mark.covers("B20", "B21")
def test_an_index_of_the_older_text_is_refused() -> None:
    older = (
        bytes.fromhex("de47de47000000db00000001000000b7")
        + TINY_METADATA
        + bytes.fromhex("0000000000000000000000020000000000000000")
    )
    with pytest.raises(CorruptError):
        ObjectIndex.decode(older)
