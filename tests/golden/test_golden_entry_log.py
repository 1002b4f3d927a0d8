"""An entry log, byte for byte, by hand from the table of ``entry_log_format``.

Checksums were computed bit by bit from the polynomial, not by this repository's code. Never
regenerate these bytes from the code.
"""

from __future__ import annotations

import random
from uuid import UUID

import pytest

from tierlog.adapters.memory.files import MemoryDisk
from tierlog.adapters.memory.ids import SeededIds
from tierlog.format.run import Run
from tierlog.model.errors import CorruptError
from tierlog_ingest.storage.entrylog.entry_log import EntryLogs, LogLength
from tierlog_ingest.storage.entrylog.entry_log_format import LogHeader, pack_map, unpack_map
from tierlog_ingest.storage.entrylog.ledger_map import LedgerMap

HEADER = bytes.fromhex(
    "544c454c"  #          0  magic       "TLEL"
    "00000001"  #          4  version     1
    "0000000000000007"  #  8  log_id      7
    "0102030405060708"  # 16  generation
    "00000000"  #         24  zeros
    "c593c9dc"  #         28  crc32c      over bytes 0 to 27
)
FIRST_RUN = bytes.fromhex(
    "544c524e 01 00 0050"  # 32  magic "TLRN", version, flags, header_len 80
    "00000001 0000000f"  #       count 1, frames_len 15
    "0000000000000005"  #        ledger_id 5
    "0000000000000000"  #        first_entry_id 0
    "ffffffffffffffff"  #        last_add_confirmed -1
    "0000000000000001"  #        owner_epoch 1
    "0000000000000000"  #        publish_ms_min
    "0000000000000000"  #        publish_ms_max
    "0000000000000003"  #        ledger_len 3
    "00000000 5f06f559"  #       zeros, crc32c
    "00000000"  #                offset of the frame
    "00000003 0000000000000000 616263"  # entry 0, "abc"
)
SECOND_RUN = bytes.fromhex(
    "544c524e 01 00 0050"  # 131
    "00000002 0000001d"  #       count 2, frames_len 29
    "0000000000000009"  #        ledger_id 9
    "0000000000000004"  #        first_entry_id 4
    "0000000000000003"  #        last_add_confirmed 3
    "0000000000000002"  #        owner_epoch 2
    "0000018bcfe56800"  #        publish_ms_min
    "0000018bcfe56801"  #        publish_ms_max
    "ffffffffffffffff"  #        ledger_len unknown
    "00000000 84ac576d"  #       zeros, crc32c
    "00000000 00000010"  #       offsets of the frames
    "00000004 0000000000000004 31323334"  # entry 4, "1234"
    "00000001 0000000000000005 58"  #       entry 5, "X"
)
MAP = bytes.fromhex(
    "0000000000000005 0000000000000063"  # 248  ledger 5: 99 bytes
    "0000000000000009 0000000000000075"  # 264  ledger 9: 117 bytes
    "544c454d"  #         280  magic       "TLEM"
    "00000001"  #         284  version     1
    "0000000000000007"  # 288  log_id      7
    "00000000000000f8"  # 296  map_offset  248
    "00000002"  #         304  count       2
    "c733771f"  #         308  crc32c      over bytes 248 to 307
)
LOG = HEADER + FIRST_RUN + SECOND_RUN + MAP


class OneId:
    def uuid(self) -> UUID:
        return UUID(int=0x0102030405060708 << 65)

    def uniform(self, low: float, high: float) -> float:
        raise NotImplementedError


def test_the_lengths_are_those_of_the_table():
    assert [len(one) for one in (HEADER, FIRST_RUN, SECOND_RUN, MAP)] == [32, 99, 117, 64]


@pytest.mark.covers("D47")
def test_header_and_map():
    header = LogHeader(log_id=7, generation=0x0102030405060708)
    assert header.pack() == HEADER
    assert LogHeader.unpack(HEADER) == header
    ledgers = LedgerMap({9: 117, 5: 99})
    assert pack_map(ledgers, log_id=7, map_offset=248) == MAP
    assert unpack_map(MAP, log_id=7, map_offset=248) == {5: 99, 9: 117}


@pytest.mark.covers("D04", "D05", "D06", "D07", "D24")
async def test_a_log_is_written_so():
    disk = MemoryDisk(random.Random(1))
    logs = EntryLogs([disk.mount()], OneId(), log_bytes_max=1000, open_files_max=1)
    await logs.open([[]], {}, next_log_id=7)
    runs = [Run.decode(FIRST_RUN), Run.decode(SECOND_RUN)]
    places = await logs.append(runs, writer="flush")
    assert places == [(7, 32, 99), (7, 131, 117)]
    await logs.seal("flush")
    assert disk.paths() == ["logs/00000007.log"]
    assert disk.read_whole("logs/00000007.log") == LOG


@pytest.mark.covers("D04", "D05", "D06", "D07", "D24")
async def test_a_log_is_read_so():
    disk = MemoryDisk(random.Random(1))
    disk.mount()
    disk.write_whole("logs/00000007.log", LOG)
    ids = SeededIds(random.Random(1))
    logs = EntryLogs([disk.mount()], ids, log_bytes_max=1000, open_files_max=1)
    assert await logs.open([[LogLength(7, 248, True)]], {}) == []
    assert logs.usage == {7: {5: 99, 9: 117}}
    [window] = [window async for window in logs.scan(7)]
    assert [(at, bytes(run.encoded)) for at, run in window] == [(32, FIRST_RUN), (131, SECOND_RUN)]


@pytest.mark.parametrize("at", range(len(HEADER)))
def test_every_byte_of_the_header_counts(at):
    damaged = bytearray(HEADER)
    damaged[at] ^= 1
    with pytest.raises(CorruptError):
        LogHeader.unpack(damaged)


@pytest.mark.parametrize("at", range(len(MAP)))
def test_every_byte_of_the_map_counts(at):
    damaged = bytearray(MAP)
    damaged[at] ^= 0x80
    with pytest.raises(CorruptError):
        unpack_map(damaged, log_id=7, map_offset=248)


@pytest.mark.parametrize(
    "how", [{"log_id": 8, "map_offset": 248}, {"log_id": 7, "map_offset": 232}]
)
def test_a_map_of_another_place_is_no_map(how):
    with pytest.raises(CorruptError):
        unpack_map(MAP, **how)


@pytest.mark.parametrize("length", range(len(MAP)))
def test_a_cut_map_is_no_map(length):
    for part in (MAP[:length], MAP[len(MAP) - length :]):
        with pytest.raises(CorruptError):
            unpack_map(part, log_id=7, map_offset=248)
