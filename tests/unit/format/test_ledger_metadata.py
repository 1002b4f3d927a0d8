"""A ledger's metadata: BookKeeper's message, read whatever optional field is missing."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierlog.format.ledger_metadata import (
    METADATA_LEN_MAX,
    decode_bare,
    decode_znode,
    encode_bare,
    encode_znode,
)
from tierlog.model.errors import CorruptError, RefusedError
from tierlog.model.ids import NO_ENTRY, EntryId, NodeId
from tierlog.model.ledger import DigestType, LedgerMetadata, LedgerState, Segment

int64s = st.integers(0, 2**63 - 1)


@st.composite
def ledgers(draw) -> LedgerMetadata:
    ensemble_size = draw(st.integers(1, 5))
    write_quorum = draw(st.integers(1, ensemble_size))
    firsts = sorted(draw(st.sets(st.integers(1, 2**40), max_size=3)))
    ensemble = st.lists(
        st.text("abc-:.019", min_size=1), min_size=ensemble_size, max_size=ensemble_size
    )
    return LedgerMetadata(
        ensemble_size=ensemble_size,
        write_quorum=write_quorum,
        ack_quorum=draw(st.integers(1, write_quorum)),
        segments=tuple(
            Segment(first_entry_id=EntryId(first), ensemble=tuple(map(NodeId, draw(ensemble))))
            for first in [0, *firsts]
        ),
        state=draw(st.sampled_from(LedgerState)),
        length=draw(int64s),
        last_entry_id=EntryId(draw(st.just(-1) | int64s)),
        digest_type=draw(st.none() | st.sampled_from(DigestType)),
        password=draw(st.none() | st.binary(max_size=20)),
        ctime_ms=draw(st.none() | int64s),
        custom=draw(st.dictionaries(st.text(max_size=10), st.binary(max_size=10), max_size=4)),
        ctoken=draw(st.none() | int64s),
    )


@given(ledgers())
def test_both_forms_are_read_back(metadata: LedgerMetadata) -> None:
    assert decode_bare(encode_bare(metadata)) == metadata
    assert decode_znode(encode_znode(metadata)) == metadata
    assert encode_znode(decode_znode(encode_znode(metadata))) == encode_znode(metadata)


@given(ledgers(), st.data())
def test_every_cut_of_the_znode_is_refused(metadata: LedgerMetadata, data) -> None:
    raw = encode_znode(metadata)
    with pytest.raises(CorruptError):
        decode_znode(raw[: data.draw(st.integers(0, len(raw) - 1))])
    with pytest.raises(CorruptError):
        decode_znode(raw + b"\0")


@given(st.binary(max_size=80))
def test_bytes_of_any_kind_are_read_or_refused(raw: bytes) -> None:
    for decode, data in (
        (decode_bare, raw),
        (decode_znode, b"BookieMetadataFormatVersion\t3\n" + raw),
    ):
        with suppress(CorruptError):
            assert decode(data).segments


SIX = bytes.fromhex("0801100118032000280332050a01611000")
"""The fields 1 to 6 and no others: quorum 1, ensemble 1, length 3, last 0, CLOSED, node a."""


def test_the_first_six_fields_are_enough() -> None:
    metadata = decode_bare(SIX)
    assert (metadata.ensemble_size, metadata.write_quorum, metadata.ack_quorum) == (1, 1, 1)
    assert metadata.segments == (Segment(first_entry_id=EntryId(0), ensemble=(NodeId("a"),)),)
    assert (metadata.length, metadata.last_entry_id) == (3, 0)
    assert metadata.digest_type is None
    assert metadata.ctime_ms is None
    assert metadata.custom == {}


def test_a_ledger_that_was_just_opened() -> None:
    metadata = LedgerMetadata(
        ensemble_size=1,
        write_quorum=1,
        ack_quorum=1,
        segments=(Segment(first_entry_id=EntryId(0), ensemble=(NodeId("a"),)),),
    )
    message = bytes.fromhex("08011001180020ffffffffffffffffff01280132050a0161")
    message += bytes.fromhex("100038034801")
    assert encode_bare(metadata) == message
    assert decode_bare(message).last_entry_id == NO_ENTRY


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "lacks a required field"),
        (SIX[2:], "lacks a required field"),
        (SIX[:8] + SIX[10:], "lacks a required field"),
        (SIX[:10], "segments that begin at"),
        (SIX.replace(b"\x10\x00", b"\x10\x01"), "segments that begin at"),
        (SIX + SIX[10:], "segments that begin at"),
        (SIX.replace(b"\x10\x01", b"\x10\x02"), "another size"),
        (SIX.replace(b"\x08\x01", b"\x08\x02"), "quorums"),
        (SIX.replace(b"\x18\x03", b"\x18\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"), "last entry"),
        (SIX + b"\x5a\x1b\x0a\x16tierlog/stripe-entries\x12\x010", "stripes of b'0'"),
        (
            SIX + b"\x5a\x33\x0a\x16tierlog/stripe-entries\x12\x19" + b"1" * 25,
            "stripes of b'1111",
        ),
        (SIX.replace(b"\x61", b"\x80"), "not UTF-8"),
        (SIX + b"\x5a\x06\x0a\x01\xff\x12\x010", "not UTF-8"),
        (b"\xff", "is not a LedgerMetadataFormat"),
        (bytes(METADATA_LEN_MAX + 1), "of 1048577 bytes"),
    ],
)
def test_metadata_that_makes_no_sense_is_refused(raw: bytes, message: str) -> None:
    with pytest.raises(CorruptError, match=message):
        decode_bare(raw)


@pytest.mark.parametrize("version", ["1", "2", "4", "999999999"])
def test_other_versions_are_refused(version: str) -> None:
    with pytest.raises(RefusedError, match=f"version {version}, and this Tierlog reads 3"):
        decode_znode(f"BookieMetadataFormatVersion\t{version}\n".encode() + b"\x13" + SIX)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"BookieMetadataFormatVersion\t3",
        b"BookieMetadataFormatVersion\t3\n",
        b"BookieMetadataFormatVersion\t\n" + b"\x13" + SIX,
        b"BookieMetadataFormatVersion\t-3\n" + b"\x13" + SIX,
        b"bookieMetadataFormatVersion\t3\n" + b"\x13" + SIX,
        b"BookieMetadataFormatVersion\t3\n" + b"\x12" + SIX,
        b"BookieMetadataFormatVersion\t3\n" + b"\xff\xff\xff\xff\xff\x01" + SIX,
        # A whole field too many.
        b"BookieMetadataFormatVersion\t3\n" + bytes([len(SIX)]) + SIX + b"\x50\x01",
        b"\x13" + SIX,
    ],
)
def test_a_znode_without_its_first_line_or_length_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptError):
        decode_znode(data)
