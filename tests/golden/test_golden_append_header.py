"""An append header that changes attributes, by hand: values are signed, 64 bits, little-endian."""

from uuid import UUID

import pytest

from tierlog.format.attribute_changes import Change, change_of
from tierlog.format.entry import AttributeUpdate, Verb, decode_entry, encode_entry
from tierlog.model.attributes import VALUE_MAX, VALUE_MIN, AttributeKey

WRITER = UUID("00112233-4455-6677-8899-aabbccddeeff")
KEY = UUID("ffeeddcc-bbaa-9988-7766-554433221100")

HEADER = bytes.fromhex(
    "0a10 00112233445566778899aabbccddeeff"  # 1 writer_id
    "10 05"  # 2 event_number 5
    "20 07"  # 4 publish_time_ms 7
    "32 26"  # 6 attribute_updates, 38 bytes
    "0a10 ffeeddccbbaa99887766554433221100"  # 1 key
    "10 02"  # 2 verb REPLACE_IF_EQUALS
    "19 ffffffffffffffff"  # 3 value -1
    "21 0000000000000080"  # 4 expected, the smallest
    "32 1d"  # another one, 29 bytes
    "0a10 ffeeddccbbaa99887766554433221100"
    "10 04"  # ACCUMULATE
    "19 ffffffffffffff7f"  # the largest
)
UPDATES = (
    AttributeUpdate(key=KEY, verb=Verb.REPLACE_IF_EQUALS, value=-1, expected=VALUE_MIN),
    AttributeUpdate(key=KEY, verb=Verb.ACCUMULATE, value=VALUE_MAX),
)


@pytest.mark.covers("E10")
def test_updates_are_written_and_read_as_by_hand():
    entry = encode_entry(
        [], publish_time_ms=7, writer_id=WRITER, event_number=5, attribute_updates=UPDATES
    )
    assert entry[12:] == HEADER
    assert decode_entry(entry).header.attribute_updates == UPDATES
    assert change_of(entry) == Change(0, AttributeKey(WRITER.bytes), 5, UPDATES)


def test_what_can_not_be_read_changes_nothing():
    entry = encode_entry([], publish_time_ms=7, writer_id=WRITER, event_number=5)
    short = entry[:12] + entry[12:].replace(WRITER.bytes, WRITER.bytes[:15])
    for broken in (b"", entry[:11], b"XX" + entry[2:], entry[:2] + b"\x09" + entry[3:], short):
        assert change_of(broken) is None
