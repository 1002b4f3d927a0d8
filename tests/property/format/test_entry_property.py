"""Entry data says all of itself: header and events come back, and damage is refused."""

import struct
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierlog.adapters.compression import lz4_frames, zstd
from tierlog.format.checksum import crc32c
from tierlog.format.entry import (
    AttributeUpdate,
    Codec,
    Compress,
    Entry,
    StructuredEvent,
    Verb,
    decode_entry,
    encode_entry,
)
from tierlog.model.errors import CorruptError, Reason, RefusedError
from tierlog.proto.v1 import entry_pb2 as pb
from tierlog.wiring.compression import decompressors

WRITER = UUID("11111111-2222-3333-4444-555555555555")


COMPRESSORS: dict[Codec, Compress] = {Codec.ZSTD: zstd.compress, Codec.LZ4: lz4_frames.compress}
DECOMPRESSORS = decompressors()

codecs = st.sampled_from(Codec)
i64s = st.integers(-(2**63), 2**63 - 1)
updates = st.builds(
    AttributeUpdate, key=st.uuids(), verb=st.sampled_from(Verb), value=i64s, expected=i64s
)
plain = st.lists(st.binary(max_size=60), max_size=10)
structured = st.lists(
    st.builds(
        StructuredEvent,
        payload=st.binary(max_size=30),
        key=st.none() | st.binary(max_size=5),
        event_time_ms=st.none() | st.integers(-(2**63), 2**63 - 1),
        properties=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
    ),
    min_size=1,
    max_size=6,
)


def naive_entry(raw: bytes) -> tuple[pb.AppendHeader, bytes]:
    """Read entry data by its byte table."""
    assert raw[:4] == b"TE\x01\x00"
    header_len, crc = struct.unpack(">II", raw[4:12])
    assert crc == crc32c(raw[:8] + raw[12:])
    return pb.AppendHeader.FromString(raw[12 : 12 + header_len]), raw[12 + header_len :]


@given(
    plain, codecs, st.none() | st.uuids(), st.integers(0, 2**63 - 1), st.lists(updates, max_size=3)
)
def test_plain_events_come_back(
    events: list[bytes],
    codec: Codec,
    writer_id: UUID | None,
    number: int,
    changes: list[AttributeUpdate],
) -> None:
    raw = encode_entry(
        events,
        publish_time_ms=number,
        writer_id=writer_id,
        event_number=number,
        attribute_updates=changes,
        codec=codec,
        compress=COMPRESSORS.get(codec),
    )
    header, packed = naive_entry(raw)
    assert header.event_count == len(events)
    if codec is Codec.NONE:
        framed = b"".join(struct.pack(">I", len(event)) + event for event in events)
        assert packed == framed
    for data in (raw, bytearray(raw), memoryview(raw)):
        entry = decode_entry(data)
        assert entry.events(DECOMPRESSORS) == events
        assert entry.header.writer_id == writer_id
        assert entry.header.event_number == entry.header.publish_time_ms == number
        assert entry.header.attribute_updates == tuple(changes)
        assert [one.payload for one in entry.structured_events(DECOMPRESSORS)] == events


@given(structured, codecs)
def test_structured_events_come_back(events: list[StructuredEvent], codec: Codec) -> None:
    raw = encode_entry(events, publish_time_ms=0, codec=codec, compress=COMPRESSORS.get(codec))
    entry = decode_entry(raw)
    assert entry.header.structured
    assert entry.structured_events(DECOMPRESSORS) == events


@pytest.mark.parametrize("codec", list(Codec))
def test_no_events_and_attribute_updates_alone_are_legal(codec: Codec) -> None:
    change = AttributeUpdate(key=WRITER, verb=Verb.ACCUMULATE, value=3)
    raw = encode_entry(
        [],
        publish_time_ms=5,
        writer_id=WRITER,
        attribute_updates=[change],
        codec=codec,
        compress=COMPRESSORS.get(codec),
    )
    entry = decode_entry(raw)
    assert entry.header.event_count == 0
    assert entry.events(DECOMPRESSORS) == []
    assert entry.header.attribute_updates == (change,)


@pytest.mark.covers("E10")
def test_a_writer_id_has_16_bytes_and_an_event_number_8() -> None:
    raw = encode_entry([b"x"], publish_time_ms=0, writer_id=WRITER, event_number=2**63 - 1)
    header, _ = naive_entry(raw)
    assert header.writer_id == WRITER.bytes
    assert len(header.writer_id) == 16
    assert decode_entry(raw).header.event_number == 2**63 - 1


@given(plain, codecs, st.data())
def test_every_flip_and_every_cut_is_refused(events: list[bytes], codec: Codec, data) -> None:
    raw = bytearray(
        encode_entry(events, publish_time_ms=1, codec=codec, compress=COMPRESSORS.get(codec))
    )
    with pytest.raises(CorruptError):
        decode_entry(raw[: data.draw(st.integers(0, len(raw) - 1))])
    with pytest.raises(CorruptError):
        decode_entry(raw + b"\0")
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(CorruptError):
        decode_entry(raw)


def forged(header: pb.AppendHeader, events: bytes, *, fixed: bytes = b"TE\x01\x00") -> bytes:
    """Entry data from a hostile writer, whose checksum is right."""
    message = header.SerializeToString()
    head = fixed + struct.pack(">I", len(message))
    return head + struct.pack(">I", crc32c(head + message + events)) + message + events


@pytest.mark.parametrize(
    ("header", "events"),
    [
        (pb.AppendHeader(event_count=1, events_len=3), b"\0\0\0"),
        (pb.AppendHeader(event_count=1, events_len=5), b"\0\0\0\x02a"),
        (pb.AppendHeader(event_count=1, events_len=5), b"\xff\xff\xff\xffa"),
        (pb.AppendHeader(event_count=1, events_len=5), b"\0\0\0\0a"),
        (pb.AppendHeader(event_count=2**31 - 1, events_len=2**40), b"\0\0\0\x01a"),
        (pb.AppendHeader(event_count=-1, events_len=0), b""),
        (pb.AppendHeader(event_count=0, events_len=4), b"\0\0\0\0"),
        (pb.AppendHeader(event_count=1, events_len=6), b"\0\0\0\x01a"),
        (pb.AppendHeader(event_count=1, events_len=-1), b"\0\0\0\x01a"),
        (pb.AppendHeader(event_count=1, events_len=5, codec=pb.CODEC_ZSTD), b"\0\0\0\x01a"),
        (pb.AppendHeader(event_count=1, events_len=5, codec=pb.CODEC_LZ4), b"\0\0\0\x01a"),
        (pb.AppendHeader(writer_id=b"short"), b""),
        (pb.AppendHeader(attribute_updates=[pb.AttributeUpdate(key=b"short")]), b""),
    ],
)
def test_hostile_headers_are_refused(header: pb.AppendHeader, events: bytes) -> None:
    with pytest.raises(CorruptError):
        decode_entry(forged(header, events)).events(DECOMPRESSORS)


@pytest.mark.parametrize(("codec", "encoding"), [(3, 0), (0, 2)])
def test_unknown_codecs_and_encodings_are_refused(codec: int, encoding: int) -> None:
    header = pb.AppendHeader()
    header.ParseFromString(bytes([5 << 3, codec, 7 << 3, encoding]))
    with pytest.raises(CorruptError):
        decode_entry(forged(header, b""))


def test_another_version_is_refused_and_unknown_flags_too() -> None:
    with pytest.raises(RefusedError, match="append header has format version 2"):
        decode_entry(forged(pb.AppendHeader(), b"", fixed=b"TE\x02\x00"))
    with pytest.raises(CorruptError, match="flags 0x1"):
        decode_entry(forged(pb.AppendHeader(), b"", fixed=b"TE\x01\x01"))


def test_entry_data_of_a_raw_stream_is_told_apart() -> None:
    with pytest.raises(CorruptError, match="of a raw stream"):
        decode_entry(b"just some text of the application")


@pytest.mark.parametrize("codec", [Codec.ZSTD, Codec.LZ4])
def test_a_decompression_bomb_is_refused(codec: Codec) -> None:
    """Ten megabytes of zeros in a few kilobytes, which claim to be ten bytes."""
    bomb = COMPRESSORS[codec](bytes(10_000_000))
    assert len(bomb) < 50_000
    header = pb.AppendHeader(event_count=1, events_len=10, codec=pb.Codec.ValueType(codec.value))
    with pytest.raises(CorruptError, match="more than 10 bytes"):
        decode_entry(forged(header, bomb)).events(DECOMPRESSORS)
    honest = pb.AppendHeader(
        event_count=1, events_len=10_000_000, codec=pb.Codec.ValueType(codec.value)
    )
    with pytest.raises(RefusedError, match="over the limit of 1000") as refused:
        decode_entry(forged(honest, bomb)).events(DECOMPRESSORS, events_len_max=1000)
    assert refused.value.reason is Reason.TOO_LARGE


def test_a_codec_that_is_not_installed_is_refused() -> None:
    raw = encode_entry(
        [b"x"], publish_time_ms=0, codec=Codec.ZSTD, compress=COMPRESSORS[Codec.ZSTD]
    )
    with pytest.raises(RefusedError, match="compressed with zstd") as refused:
        decode_entry(raw).events()
    assert "tierlog[compression]" in refused.value.remedy


def test_a_structured_event_that_is_none_is_refused() -> None:
    header = pb.AppendHeader(
        event_count=1, events_len=5, event_encoding=pb.EVENT_ENCODING_STRUCTURED
    )
    entry: Entry = decode_entry(forged(header, b"\0\0\0\x01\xff"))
    with pytest.raises(CorruptError, match="not a StructuredEvent"):
        entry.structured_events()
