"""Objects of the attribute index: names and lists, byte by byte, and the record that names them."""

import hashlib
from dataclasses import replace
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierlog.format import attribute_objects as fmt
from tierlog.format.attribute_records import (
    RECORD_LEN_MAX,
    decode_attributes,
    encode_attributes,
)
from tierlog.format.keys import parse_key
from tierlog.format.manifest import is_manifest_key, manifest_key
from tierlog.model.attribute_record import AttributesRecord, GivenUp, KeptRoot
from tierlog.model.attributes import EVENT_COUNT, IndexChunk, IndexObject, IndexRoot
from tierlog.model.errors import CorruptError, Reason, RefusedError
from tierlog.model.ids import EntryId, LedgerId, StreamName
from tierlog.model.position import Position
from tierlog.proto.v1 import metadata_pb2 as pb

STREAM = StreamName("orders")
INCARNATION = UUID(int=5)
FOLDER = fmt.attributes_folder("p", STREAM, INCARNATION)
SUFFIX = UUID("00112233-4455-6677-8899-aabbccddeeff")


def an_object(start: int, length: int, *, folder: str = FOLDER) -> IndexObject:
    key = fmt.attribute_key(folder, start=start, owner_epoch=3, suffix=SUFFIX)
    return IndexObject(key=key, start=start, length=length, sha256=bytes([start % 256]) * 32)


def test_a_key_says_where_its_bytes_lie_and_whose_they_are() -> None:
    key = fmt.attribute_key(FOLDER, start=1946, owner_epoch=3, suffix=SUFFIX)
    assert key == (
        "p/streams/orders/00000000-0000-0000-0000-000000000005/attributes/"
        "00000000000000001946-3-00112233-4455-6677-8899-aabbccddeeff"
    )
    expected = fmt.AttributeObjectKey(STREAM, INCARNATION, 1946, 3, SUFFIX, is_list=False)
    assert fmt.parse_attribute_key("p", key) == expected
    listing = fmt.list_key(FOLDER, start=1946, owner_epoch=3, suffix=SUFFIX)
    assert listing == key + ".list"
    assert fmt.parse_attribute_key("p", listing) == expected._replace(is_list=True)
    moved = fmt.attributes_folder("", STREAM, INCARNATION)
    assert fmt.parse_attribute_key("", fmt.moved_key(moved, listing)) is not None


def test_no_key_is_taken_for_another_kind() -> None:
    key = fmt.attribute_key(FOLDER, start=0, owner_epoch=1, suffix=SUFFIX)
    for one in (key, key + ".list"):
        assert parse_key("p", one) is None
        assert not is_manifest_key("p", one)
        for wrong in (one[1:], one + "x", one.replace("-1-", "-01-"), one.replace("orders", "a/b")):
            assert fmt.parse_attribute_key("p", wrong) is None
    assert fmt.parse_attribute_key("p", manifest_key("p", STREAM, INCARNATION, 1)) is None
    assert fmt.parse_attribute_key("", key) is None


def test_a_list_is_these_bytes() -> None:
    raw = fmt.encode_list([an_object(0, 10), an_object(10, 5)])
    head = bytes.fromhex("544c414c 0001 0000 00000002")
    entry = bytes(8) + (10).to_bytes(8, "big") + (3).to_bytes(8, "big") + SUFFIX.bytes + bytes(32)
    other = (10).to_bytes(8, "big") + (5).to_bytes(8, "big") + (3).to_bytes(8, "big")
    body = entry + other + SUFFIX.bytes + bytes([10]) * 32
    assert raw == head + hashlib.sha256(head + body).digest() + body
    assert len(raw) == fmt.HEADER_LEN + 2 * fmt.ENTRY_LEN
    listed = fmt.decode_list(raw, key=FOLDER + "any.list")
    assert listed == (an_object(0, 10), an_object(10, 5))


def test_a_list_that_is_moved_names_objects_beside_it() -> None:
    elsewhere = fmt.attributes_folder("q/r", STREAM, INCARNATION)
    raw = fmt.encode_list([an_object(7, 10)])
    assert fmt.decode_list(raw, key=elsewhere + "x") == (an_object(7, 10, folder=elsewhere),)


@given(st.integers(min_value=0), st.integers(min_value=1, max_value=255), st.data())
def test_a_list_with_any_byte_changed_is_refused(at: int, flip: int, data) -> None:
    whole = fmt.encode_list([an_object(0, 10), an_object(10, 5)])
    raw = bytearray(whole)
    raw[at % len(raw)] ^= flip
    with pytest.raises(CorruptError):
        fmt.decode_list(bytes(raw), key="k/x")
    cut = data.draw(st.integers(min_value=0, max_value=len(raw) - 1))
    with pytest.raises(CorruptError):
        fmt.decode_list(whole[:cut], key="k/x")


def test_a_list_of_the_future_is_refused_and_not_called_damaged() -> None:
    raw = bytearray(fmt.encode_list([an_object(0, 10)]))
    raw[5] = 2
    raw[12:44] = hashlib.sha256(bytes(raw[:12]) + bytes(raw[44:])).digest()
    with pytest.raises(RefusedError, match="version 2"):
        fmt.decode_list(bytes(raw), key="k/x")


def a_record(*, objects: int = 2) -> AttributesRecord:
    root = IndexRoot(root_offset=180, root_length=20, start=100, end=200, count=4)
    return AttributesRecord(
        incarnation=INCARNATION,
        generation=6,
        newest=KeptRoot(
            through=Position(LedgerId(4), EntryId(0)), core={EVENT_COUNT: -3}, root=root
        ),
        ends=(KeptRoot(through=Position(LedgerId(2), EntryId(9)), root=IndexRoot()),),
        chunks=(IndexChunk(key="c", sha256=bytes(32), start=50, end=150, object_count=2),),
        objects=tuple(an_object(150 + one, 1) for one in range(objects)),
        loss_accepted="1700000000000 admin",
        given_up=(GivenUp(LedgerId(3), EntryId(5), EntryId(7)),),
    )


def test_a_record_comes_back_as_it_was() -> None:
    for record in (a_record(), AttributesRecord(incarnation=INCARNATION)):
        assert decode_attributes(encode_attributes(record)) == record


def test_a_record_that_makes_no_sense_is_damage() -> None:
    whole = pb.AttributesRecord.FromString(encode_attributes(a_record()))
    for break_it in (
        lambda one: setattr(one, "incarnation", b"short"),
        lambda one: setattr(one.newest, "end", 3),
        lambda one: setattr(one.chunks[0], "end", 10),
        lambda one: setattr(one.objects[1], "start", 100),
        lambda one: setattr(one.objects[0], "sha256", b""),
        lambda one: setattr(one.newest.core[0], "key", b"short"),
        lambda one: setattr(one.newest.through, "ledger_id", 1),
        lambda one: setattr(one.given_up[0], "first_entry_id", 8),
    ):
        broken = pb.AttributesRecord()
        broken.CopyFrom(whole)
        break_it(broken)
        with pytest.raises(CorruptError):
            decode_attributes(broken.SerializeToString())
    whole.version = 9
    with pytest.raises(RefusedError, match="version 9"):
        decode_attributes(whole.SerializeToString())


def test_a_record_too_long_for_a_znode_is_refused_with_what_helps() -> None:
    long = replace(a_record(), objects=tuple(an_object(150 + one, 1) for one in range(4000)))
    with pytest.raises(RefusedError, match=f"more than {RECORD_LEN_MAX}") as error:
        encode_attributes(long)
    assert error.value.reason is Reason.TOO_LARGE
    assert "CHUNK_OBJECTS_MAX" in error.value.remedy
