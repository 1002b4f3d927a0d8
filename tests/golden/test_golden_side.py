"""The side object of the tiny ledger whose other two objects Apache Pulsar wrote.

Written by hand from the byte table; the checksums are those of a bit-by-bit CRC32C. Grains of 64
bytes, so that the 194 bytes of data have four. Never regenerate these bytes from the code.
"""

from uuid import UUID

import pytest

from tests.golden.test_golden_objects import TINY_DATA, TINY_ENTRIES
from tierlog.format.block import BlockBuilder
from tierlog.format.checksum import crc32c
from tierlog.format.frame import pack_entries
from tierlog.format.inspect import ObjectKind, inspect_object
from tierlog.format.run import build_run
from tierlog.format.side import SideBuilder, SideHeader, SideObject
from tierlog.model.errors import CorruptError
from tierlog.model.ids import LedgerId

ATTEMPT = UUID("0d8f3a52-6d2b-4c1e-9b7a-2f1f4c9f7e11")
TINY_SIDE = bytes.fromhex(
    "544c5344"  #          0  magic            TLSD
    "01"  #                4  version          1
    "00"  #                5  zero
    "0060"  #              6  fixed_len        96
    "00000070"  #          8  header_len       112
    "83d7dfdd"  #         12  crc32c
    "0000000000000110"  # 16  side_len         272
    "00000000000000c2"  # 24  data_len         194
    "0000000000000003"  # 32  entry_count      3
    "000000000000000c"  # 40  ledger_id        12
    "0d8f3a526d2b4c1e9b7a2f1f4c9f7e11"  # 48  uuid
    "00000040"  #         64  grain_len        64
    "00000004"  #         68  grain_count      4
    "00001000"  #         72  page_len         4096
    "00000001"  #         76  page_count       1
    "00000000000000000000000000000000"
    "0000000000000000"  # 96  directory        entry 0
    "0000018bcfe569f4"  #                      1700000000500
    "9fafa85b"  #        112  page             crc32c, with uuid and ledger id before it
    "00000000"  #        116  page_number      0
    "00000004"  #        120  row_count        4
    "0000000000000000000000000000000000000000"
    "0000000000000000"  # first_entry_id       0, for the two grains of the block's header
    "0000000000000000"
    "0000000000000000"  #                      0, 1 and 2 begin in the third grain
    "0000000000000003"  #                      none begins in the last two bytes
    "00000080"  #         entry_offset         128 from byte 0
    "00000040"  #                              64 from byte 64
    "00000000"  #                              at byte 128
    "00000002"  #                              the object's end, 2 from byte 192
    "2fb3f8f6"  #         crc32c
    "03c8eb67"
    "9fdbf58e"
    "626408bd"
    "0000000000000000"  # publish_ms_min
    "0000000000000000"
    "0000018bcfe56800"  #                      1700000000000
    "0000000000000000"
    "0000000000000000"  # publish_ms_max
    "0000000000000000"
    "0000018bcfe569f4"  #                      1700000000500
    "0000000000000000"
)


def tiny_side() -> SideObject:
    """Count the tiny ledger's bytes on their way into its block."""
    frames, offsets = pack_entries(TINY_ENTRIES)
    run = build_run(
        frames,
        offsets,
        ledger_id=12,
        publish_ms_min=1_700_000_000_000,
        publish_ms_max=1_700_000_000_500,
    )
    builder = SideBuilder(LedgerId(12), ATTEMPT, grain_len=64)
    block = BlockBuilder(len(TINY_DATA), 0, sums=builder.sums)
    assert block.take(run, 0) == 3
    assert b"".join(block.finish()) == TINY_DATA
    assert block.crc32c == crc32c(TINY_DATA)
    return builder.finish(3)


def test_what_is_written() -> None:
    assert tiny_side().encode() == TINY_SIDE


def test_what_is_read() -> None:
    side = SideObject.decode(TINY_SIDE)
    header = side.header
    assert (header.ledger_id, header.uuid, header.entry_count) == (12, ATTEMPT, 3)
    assert (header.data_len, header.grain_len, header.grain_count) == (194, 64, 4)
    assert side.columns.first_entry_ids.tolist() == [0, 0, 0, 3]
    assert side.columns.entry_offsets.tolist() == [128, 64, 0, 2]
    assert side.columns.publish_ms_max.tolist() == [0, 0, 1_700_000_000_500, 0]
    assert SideHeader.decode(TINY_SIDE).page_place(0) == (112, 272)


def test_the_next_version_is_refused() -> None:
    with pytest.raises(CorruptError, match="format version 2"):
        SideObject.decode(TINY_SIDE[:4] + b"\x02" + TINY_SIDE[5:])


def test_what_is_shown() -> None:
    def read(offset: int, length: int) -> bytes:
        return TINY_SIDE[offset : offset + length]

    report = inspect_object(read, len(TINY_SIDE))
    assert report.sound
    assert report.kind is ObjectKind.SIDE
    shown = {one.name: (one.offset, one.length, one.value) for one in report.fields}
    assert shown["uuid"] == (48, 16, str(ATTEMPT))
    assert shown["grain[2].crcs"] == (200, 4, "9fdbf58e")
    assert shown["grain[2].publish_ms_max"] == (256, 8, "1700000000500")
    # All bytes are named, but for the zeros behind the fixed part, and twice in a single page.
    named = set()
    for offset, length, _ in shown.values():
        named |= set(range(offset, offset + length))
    assert set(range(len(TINY_SIDE))) - named == {*range(4, 16), *range(72, 76), *range(80, 96)}
