"""The journal's bytes as its byte tables say, by hand; and that nothing else passes."""

from __future__ import annotations

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from tierlog.model.errors import CorruptError, RefusedError
from tierlog_ingest.storage.journal.format import (
    ALIGNMENT,
    GroupHeader,
    JournalPosition,
    Kind,
    SegmentHeader,
    align,
    decode_ledger_id,
    decode_records,
    encode_ledger_id,
    encode_record,
)

SEGMENT = SegmentHeader(
    segment_id=2, generation=3, synced=JournalPosition(1, 4096), filled_len=65536
)


def record_bytes(kind, payload, salt):
    return encode_record(kind, [payload[:7], payload[7:]], len(payload), salt) + payload


def test_golden_bytes():
    packed = SEGMENT.pack()
    assert len(packed) == ALIGNMENT
    head = bytes.fromhex(
        "544c4a53 00000001"  # magic, version
        "0000000000000002 0000000000000003"  # segment id, generation
        "0000000000000001 0000000000001000"  # synced segment, synced offset
        "0000000000010000"  # filled_len
    )
    assert packed[:48] == head
    assert packed[48:52] == crc32c(head).to_bytes(4, "big")
    assert packed[52:] == bytes(ALIGNMENT - 52)
    assert SegmentHeader.unpack(packed) == SEGMENT
    salt = crc32c(bytes.fromhex("0000000000000002 0000000000000003"))
    assert SEGMENT.salt == salt
    position = JournalPosition(2, 8192)
    group = GroupHeader(records_len=5, record_count=1, position=position)
    head = bytes.fromhex("544c4a47 00000005 0000000000000002 0000000000002000 00000001")
    assert group.pack(salt) == head + crc32c(head, salt).to_bytes(4, "big")
    assert GroupHeader.unpack(group.pack(salt), salt, position) == group
    assert group.end == 12288
    fence = bytes.fromhex("0000000000000007")
    assert encode_ledger_id(7) == fence
    crc = crc32c(bytes.fromhex("02 000000 00000008") + fence, salt)
    encoded = encode_record(Kind.FENCE, [fence], 8, salt)
    assert encoded == bytes.fromhex("00000008") + crc.to_bytes(4, "big") + b"\x02\0\0\0"
    assert [kind.value for kind in Kind] == [1, 2, 3]


@given(st.binary(max_size=300), st.sampled_from(Kind), st.integers(0, 2**32 - 1), st.data())
def test_a_record_passes_only_as_it_was(payload, kind, salt, data):
    encoded = record_bytes(kind, payload, salt)
    assert decode_records(memoryview(encoded), 1, salt) == ([(kind, payload)], [])
    assert decode_records(memoryview(encoded), 1, salt ^ 1) == ([], [0]), "an older generation"
    cut = data.draw(st.integers(0, len(encoded) - 1))
    assert decode_records(memoryview(encoded)[:cut], 1, salt)[0] == []
    flipped = bytearray(encoded)
    at = data.draw(st.integers(0, len(encoded) - 1))
    flipped[at] ^= data.draw(st.integers(1, 255))
    found, damaged = decode_records(memoryview(flipped), 1, salt)
    assert found == []
    assert damaged == [0]


@given(st.lists(st.binary(max_size=40), min_size=2, max_size=5), st.data())
def test_a_damaged_payload_costs_one_record(payloads, data):
    pieces = [record_bytes(Kind.RUN, one, 7) for one in payloads]
    number = data.draw(st.integers(0, len(payloads) - 1))
    start = sum(map(len, pieces[:number]))
    encoded = bytearray(b"".join(pieces))
    encoded[start + data.draw(st.integers(4, len(pieces[number]) - 1))] ^= 1
    found, damaged = decode_records(memoryview(encoded), len(pieces), 7)
    assert damaged == [start]
    assert [bytes(one.payload) for one in found] == payloads[:number] + payloads[number + 1 :]
    too_long = memoryview(b"".join(pieces) + b"x")
    assert decode_records(too_long, len(pieces), 7)[1] == [len(too_long) - 1]


def test_a_group_passes_only_where_it_was_written():
    group = GroupHeader(records_len=5, record_count=1, position=JournalPosition(2, 8192))
    packed = group.pack(SEGMENT.salt)
    for position in ((2, 4096), (2, 12288), (3, 8192)):
        assert GroupHeader.unpack(packed, SEGMENT.salt, JournalPosition(*position)) is None
    assert GroupHeader.unpack(packed, SEGMENT.salt ^ 1, group.position) is None
    assert GroupHeader.unpack(packed[:31], SEGMENT.salt, group.position) is None
    for at in range(len(packed)):
        flipped = bytearray(packed)
        flipped[at] ^= 0x40
        assert GroupHeader.unpack(bytes(flipped), SEGMENT.salt, group.position) is None


def test_a_damaged_segment_header_and_a_newer_version():
    packed = SEGMENT.pack()
    with pytest.raises(CorruptError):
        SegmentHeader.unpack(packed[:100])
    for at in range(52):
        flipped = bytearray(packed)
        flipped[at] ^= 1
        with pytest.raises(CorruptError):
            SegmentHeader.unpack(bytes(flipped))
    newer = packed[:4] + (99).to_bytes(4, "big") + packed[8:48]
    newer += crc32c(newer).to_bytes(4, "big")
    with pytest.raises(RefusedError):
        SegmentHeader.unpack(newer.ljust(ALIGNMENT, b"\0"))


def test_alignment_and_ids():
    assert [align(n) for n in (0, 1, 4096, 4097)] == [0, 4096, 4096, 8192]
    assert decode_ledger_id(encode_ledger_id(2**40)) == 2**40
