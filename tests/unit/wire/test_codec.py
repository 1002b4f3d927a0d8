"""The wire's frames: "every length checked against a limit before anything is allocated"."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierlog.model.errors import CorruptError, Reason, RefusedError
from tierlog.wire.codec import FrameDecoder, FrameLimits, encode_head, frame_len

SMALL = FrameLimits(frame_len_max=64, header_len_max=20, chunk_len=16)


def encode(header: bytes, body: bytes, limits: FrameLimits = SMALL) -> bytes:
    head = encode_head(header_len=len(header), body_len=len(body), limits=limits)
    return head + header + body


def test_golden_bytes():
    # frame_len 4 + 2 + 3, header_len 2, header "hd", body "bod"
    assert encode(b"hd", b"bod") == bytes.fromhex("00000009 00000002 6864 626f64")
    assert frame_len(b"hd", [b"b", b"od"]) == 13


frames = st.lists(st.tuples(st.binary(max_size=20), st.binary(max_size=40)), max_size=12)


@given(frames, st.lists(st.integers(1, 40), min_size=1))
def test_frames_come_out_however_the_bytes_are_cut(sent, cuts):
    data = b"".join(encode(*one) for one in sent)
    decoder, at, turn = FrameDecoder(SMALL), 0, 0
    while at < len(data):
        step = cuts[turn % len(cuts)]
        decoder.feed(data[at : at + step])
        at, turn = at + step, turn + 1
    assert [(frame.header, bytes(frame.body)) for frame in decoder.frames] == sent
    assert decoder.partial_len == 0
    assert repr(decoder)


@given(st.binary(max_size=60))
def test_every_truncation_waits_and_never_invents(body):
    data = encode(b"h", body[:40])
    for cut in range(len(data)):
        decoder = FrameDecoder(SMALL)
        decoder.feed(data[:cut])
        assert not decoder.frames
        assert decoder.partial_len == cut


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.binary(max_size=80))
def test_a_head_that_lies_is_refused_before_memory_is_given(length, header_len, rest):
    decoder = FrameDecoder(SMALL)
    head = length.to_bytes(4, "big") + header_len.to_bytes(4, "big")
    if length <= 64 and header_len <= 20 and header_len + 4 <= length:
        decoder.feed(head)
        assert len(decoder.buffer()) <= 64 + 4
        return
    with pytest.raises(CorruptError) as caught:
        decoder.feed(head)
    assert caught.value.remedy
    decoder.feed(rest)  # goes nowhere
    assert not decoder.frames
    assert decoder.partial_len == 0


@given(st.binary(min_size=8, max_size=400))
def test_garbage_ends_in_frames_or_in_corrupt(data):
    decoder = FrameDecoder(SMALL)
    with contextlib.suppress(CorruptError):
        decoder.feed(data)
    total = sum(frame_len(one.header, [one.body]) for one in decoder.frames)
    assert total + decoder.partial_len <= len(data)
    assert len(decoder.buffer()) <= 64 + 4


def test_the_largest_frame_fits_and_one_more_does_not():
    decoder = FrameDecoder(SMALL)
    decoder.feed(encode(b"", bytes(60)))
    assert len(decoder.frames[0].body) == 60
    for header, body in ((b"", bytes(61)), (bytes(21), b"")):
        with pytest.raises(RefusedError) as caught:
            encode(header, body)
        assert caught.value.reason is Reason.TOO_LARGE


def test_bodies_are_views_that_later_frames_leave_alone():
    decoder = FrameDecoder(SMALL)
    decoder.feed(encode(b"1", b"first"))
    first = decoder.frames.popleft().body
    for _ in range(20):
        decoder.feed(encode(b"2", b"second"))
    assert bytes(first) == b"first"
    first[:] = b"FIRST"
    assert [bytes(frame.body) for frame in decoder.frames] == [b"second"] * 20
