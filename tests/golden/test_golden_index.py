"""The index file of a ledger, byte for byte, by hand from the table of ``index_format``.

Checksums were computed bit by bit from the polynomial, not by this repository's code. Never
regenerate these bytes from the code.
"""

from __future__ import annotations

import random

import pytest

from tierlog.adapters.memory.files import MemoryDisk
from tierlog.model.ids import EntryId, LedgerId
from tierlog_ingest.storage.index.index_format import pack_slot, unpack_slot
from tierlog_ingest.storage.index.ledger_cache import LedgerCache

pytestmark = pytest.mark.covers("D27")

PATH = "index/07/0000000000000007.idx"
NEAR_SLOT = bytes.fromhex(
    "000001"  #    log_id 1
    "00000020"  #  offset 32
    "01"  #        hint 1: read 4,096 bytes
)
FAR_SLOT = bytes.fromhex(
    "abcdef"  #    log_id
    "fedcba98"  #  offset
    "89"  #        hint 137: read 9 * 2 ** 17 bytes
)
HEADER = (
    bytes.fromhex(
        "544c4958"  #          0  magic               "TLIX"
        "00000001"  #          4  version             1
        "0000000000000007"  #  8  ledger_id           7
        "0000000000000004"  # 16  page_count          4
        "00000000000005f6"  # 24  last_add_confirmed  1,526
        "00000000000005f7"  # 32  last_entry_id       1,527
        "00000000"  #         40  state               whole
        "00000002"  #         44  extent_count        2
        "00000000 00000001"  # 48 page 0
        "00000003 00000001"  # 56 page 3
    )
    + bytes(4028)
    + bytes.fromhex("a94d38b8")  # 4,092  crc32c
)
FIRST_PAGE = (
    bytes.fromhex(
        "544c4950"  #          0  magic      "TLIP"
        "00000000"  #          4  page_no    0
        "0000000000000007"  #  8  ledger_id  7
    )
    + NEAR_SLOT * 2  #        16  entries 0 and 1
    + bytes(505 * 8)
    + FAR_SLOT  #          4,072  entry 507
    + bytes(12)
    + bytes.fromhex("5871a4ff")  # 4,092  crc32c
)
LAST_PAGE = (
    bytes.fromhex("544c4950 00000003 0000000000000007")
    + bytes(3 * 8)
    + FAR_SLOT  # entry 1,527
    + bytes(504 * 8)
    + bytes(12)
    + bytes.fromhex("367bdecc")
)
GAP = bytes(2 * 4096)


async def opened(disk):
    cache = LedgerCache([disk.mount()], bytes_max=4 * 4096, open_files_max=1)
    await cache.open()
    return cache


async def test_the_index_is_read():
    disk = MemoryDisk(random.Random(1))
    await disk.mount().make_directory("index/07")
    disk.write_whole(PATH, HEADER + FIRST_PAGE + GAP + LAST_PAGE)
    cache = await opened(disk)
    near, far = int.from_bytes(NEAR_SLOT, "big"), int.from_bytes(FAR_SLOT, "big")
    assert await cache.header(LedgerId(7)) == (1526, 1527, 4)
    first = await cache.slots(LedgerId(7), EntryId(0), 1000)
    assert first.tolist() == [near, near, *[0] * 505, far]
    assert not (await cache.slots(LedgerId(7), EntryId(508), 508)).any()
    last = await cache.slots(LedgerId(7), EntryId(3 * 508), 508)
    assert last.tolist() == [0, 0, 0, far, *[0] * 504]
    assert unpack_slot(near) == (1, 32, 4096)
    assert unpack_slot(far) == (0xABCDEF, 0xFEDCBA98, 9 * 2**17)


async def test_the_index_is_written():
    disk = MemoryDisk(random.Random(1))
    cache = await opened(disk)
    near = pack_slot(1, 32, 131)
    far = pack_slot(0xABCDEF, 0xFEDCBA98, 2**20 + 1)
    await cache.put(
        LedgerId(7),
        [(0, 2, near), (507, 1, far), (1527, 1, far)],
        last_add_confirmed=EntryId(1526),
        create_in=0,
    )
    await cache.flush()
    assert disk.read_whole(PATH) == HEADER + FIRST_PAGE + GAP + LAST_PAGE
