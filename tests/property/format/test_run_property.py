"""Runs carry frames whole, and say so: structure and checksum, whatever arrives.

The naive reader below follows the byte tables of the docstrings and shares no code with them;
only the checksum is the library's, pinned by its published check value elsewhere.
"""

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierlog.format.checksum import crc32c
from tierlog.format.frame import check_frames, frames_end, pack_entries, walk_frames
from tierlog.format.run import (
    RUN_COUNT_MAX,
    RUN_FRAMES_LEN_MAX,
    RUN_HEADER_LEN,
    RUN_PREFIX_LEN,
    Run,
    build_run,
    cut_runs,
    take_runs,
)
from tierlog.model.errors import CorruptError, Reason, RefusedError

words = st.sampled_from([b"TLRN", b"\xfe\xdc\xde\xad", b"\xfb\xdb\xab\xcb", bytes(4), b"\xff" * 4])
entry_datas = st.lists(words, max_size=5).map(b"".join) | st.binary(max_size=40)
batches = st.lists(entry_datas, min_size=1, max_size=30)
ids = st.integers(0, 2**40) | st.just(2**63 - 100)


def naive_run(raw: bytes) -> tuple[dict[str, int], list[tuple[int, bytes]]]:
    """Read a run by its byte table, one frame at a time."""
    assert raw[:4] == b"TLRN"
    assert raw[4:8] == bytes([1, 0, 0, 80])
    count, frames_len = struct.unpack(">II", raw[8:16])
    names = ("ledger", "first", "lac", "epoch", "low", "high", "ledger_len")
    fields = dict(zip(names, struct.unpack(">7q", raw[16:72]), strict=True))
    assert raw[72:76] == bytes(4)
    assert struct.unpack(">I", raw[76:80])[0] == crc32c(raw[:76] + raw[80:])
    frames, entries, at = raw[80 + 4 * count :], [], 0
    assert len(frames) == frames_len
    for number in range(count):
        assert struct.unpack(">I", raw[80 + 4 * number : 84 + 4 * number])[0] == at
        length, entry_id = struct.unpack(">iq", frames[at : at + 12])
        entries.append((entry_id, frames[at + 12 : at + 12 + length]))
        at += 12 + length
    assert at == frames_len
    return fields, entries


@pytest.mark.covers("D04", "D05", "D06", "D07")
@given(batches, ids)
def test_a_run_is_what_its_table_says(entries: list[bytes], first: int) -> None:
    frames, offsets = pack_entries(entries, first)
    run = build_run(
        frames,
        offsets,
        ledger_id=3,
        first_entry_id=first,
        last_add_confirmed=first - 1,
        owner_epoch=9,
        publish_ms_min=5,
        publish_ms_max=6,
        ledger_len=10_000,
    )
    fields, found = naive_run(bytes(run.encoded))
    expected = {"ledger": 3, "first": first, "lac": first - 1, "epoch": 9, "low": 5, "high": 6}
    assert fields == {**expected, "ledger_len": 10_000}
    assert found == [(first + i, entry) for i, entry in enumerate(entries)]
    assert run.payload_len == sum(map(len, entries))
    assert run.last_entry_id == first + len(entries) - 1
    for readable in (bytes(run.encoded), bytearray(run.encoded), memoryview(bytes(run.encoded))):
        again = Run.decode(readable)
        assert again == run
        assert again.header == run.header
        assert list(again.entries()) == entries
        assert again.offsets.dtype == np.uint32


@given(batches, ids, st.integers(1, 120), st.integers(1, 12))
def test_cutting_gives_every_entry_its_id_and_keeps_stripes_whole(
    entries: list[bytes], first: int, run_bytes_max: int, stripe_entries: int
) -> None:
    frames, offsets = pack_entries(entries)  # a draft: ids from zero
    before = bytes(frames)
    runs = cut_runs(
        frames,
        offsets,
        ledger_id=1,
        first_entry_id=first,
        last_add_confirmed=-1,
        owner_epoch=0,
        run_bytes_max=run_bytes_max,
        stripe_entries=stripe_entries,
        length_before=1000,
    )
    assert bytes(frames) == before, "the draft is left alone"
    found = [entry for run in runs for entry in naive_run(bytes(run.encoded))[1]]
    assert found == [(first + i, entry) for i, entry in enumerate(entries)]
    so_far = 1000
    for run, follower in zip(runs, [*runs[1:], None], strict=True):
        so_far += run.payload_len
        assert run.header.ledger_len == so_far
        assert run.first_entry_id // stripe_entries == run.last_entry_id // stripe_entries
        assert run.header.count == 1 or run.header.frames_len <= run_bytes_max
        if follower is not None and follower.first_entry_id % stripe_entries:
            longer = run.header.frames_len + 12 + len(follower.entry(follower.first_entry_id))
            assert longer > run_bytes_max, "runs are as long as they may be"
    assert take_runs(b"".join(run.encoded for run in runs)).runs == runs


@pytest.mark.parametrize(
    ("run_bytes_max", "counts"), [(59, [2, 2, 1]), (60, [3, 2]), (61, [3, 2]), (19, [1] * 5)]
)
def test_a_run_may_be_filled_exactly(run_bytes_max: int, counts: list[int]) -> None:
    frames, offsets = pack_entries([bytes(8)] * 5)  # 20 bytes a frame
    runs = cut_runs(
        frames,
        offsets,
        ledger_id=1,
        first_entry_id=0,
        last_add_confirmed=-1,
        owner_epoch=0,
        run_bytes_max=run_bytes_max,
        stripe_entries=100,
    )
    assert [run.header.count for run in runs] == counts


@given(batches, st.data())
def test_frames_between_are_the_frames_asked_for(entries: list[bytes], data) -> None:
    frames, offsets = pack_entries(entries, 10)
    run = build_run(frames, offsets, first_entry_id=10)
    low = data.draw(st.integers(10, run.last_entry_id))
    high = data.draw(st.integers(low, run.last_entry_id))
    expected, _ = pack_entries(entries[low - 10 : high - 9], low)
    part = run.frames_between(low, high)
    assert bytes(part) == expected
    assert part.obj is run.frames.obj
    assert bytes(run.entry(low)) == entries[low - 10]


@pytest.mark.covers("D08")
@given(batches, st.data())
def test_every_flip_and_every_truncation_is_refused(entries: list[bytes], data) -> None:
    frames, offsets = pack_entries(entries)
    raw = bytearray(build_run(frames, offsets).encoded)
    cut = data.draw(st.integers(0, len(raw) - 1))
    with pytest.raises(CorruptError):
        Run.decode(raw[:cut])
    with pytest.raises(CorruptError):
        Run.decode(raw + b"\0")
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(CorruptError):
        Run.decode(raw)


def with_checksum(raw: bytearray) -> bytearray:
    """A hostile peer computes checksums too."""
    struct.pack_into(">I", raw, 76, crc32c(bytes(raw[:76] + raw[80:])))
    return raw


@settings(max_examples=300)
@given(batches, st.data())
def test_a_hostile_run_with_a_right_checksum_is_refused(entries: list[bytes], data) -> None:
    frames, offsets = pack_entries(entries)
    raw = bytearray(build_run(frames, offsets).encoded)
    frames_at = RUN_HEADER_LEN + 4 * len(entries)
    heads = [
        place
        for offset in offsets.tolist()
        for place in range(frames_at + offset, frames_at + offset + 12)
    ]
    place = data.draw(st.sampled_from([*range(16), *range(72, 76), *range(80, frames_at), *heads]))
    value = data.draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]))
    if raw[place] == value:
        return
    raw[place] = value
    with pytest.raises(CorruptError):
        Run.decode(with_checksum(raw))


@pytest.mark.parametrize(
    ("offset", "value"),
    [
        (16, -1),  # ledger_id
        (24, -1),  # first_entry_id
        (24, 2**63 - 1),
        (32, -2),  # last_add_confirmed
        (40, -1),  # owner_epoch
        (48, -1),  # publish_ms_min
        (48, 8),  #  above publish_ms_max
        (56, -1),
        (64, -2),  # ledger_len
        (64, 1),  #  below the run's own payload
    ],
)
def test_fields_out_of_bounds_are_refused(offset: int, value: int) -> None:
    frames, offsets = pack_entries([b"a", b"b"])
    raw = bytearray(build_run(frames, offsets).encoded)
    struct.pack_into(">q", raw, offset, value)
    with pytest.raises(CorruptError):
        Run.decode(with_checksum(raw))


@pytest.mark.parametrize(
    ("count", "frames_len"),
    [
        (RUN_COUNT_MAX + 1, 2**31 - 200),
        (1, RUN_FRAMES_LEN_MAX + 1),
        (2**32 - 1, 2**32 - 1),
        (1, 2**32 - 1),
    ],
)
def test_lengths_over_the_limit_are_refused_from_the_prefix_alone(
    count: int, frames_len: int
) -> None:
    prefix = b"TLRN" + bytes([1, 0, 0, 80]) + struct.pack(">II", count, frames_len)
    with pytest.raises(CorruptError, match="over its limit"):
        Run.encoded_len(prefix)


def test_the_length_is_told_by_the_prefix_and_bounded_by_the_caller() -> None:
    frames, offsets = pack_entries([b"abc"])
    encoded = build_run(frames, offsets).encoded
    prefix = encoded[:RUN_PREFIX_LEN]
    assert Run.encoded_len(prefix) == len(encoded) == 80 + 4 + 15
    assert Run.encoded_len(prefix, len_max=len(encoded)) == len(encoded)
    with pytest.raises(CorruptError, match="over its limit"):
        Run.encoded_len(prefix, len_max=len(encoded) - 1)
    with pytest.raises(CorruptError, match="cut"):
        Run.encoded_len(prefix[:15])


def test_unknown_versions_and_flags_are_refused() -> None:
    frames, offsets = pack_entries([b"abc"])
    raw = bytearray(build_run(frames, offsets).encoded)
    for offset, value, message in ((4, 2, "format version 2"), (5, 1, "flags 0x1"), (7, 92, "92")):
        changed = bytearray(raw)
        changed[offset] = value
        with pytest.raises(CorruptError, match=message):
            Run.decode(with_checksum(changed))


def test_no_frames_make_no_run() -> None:
    with pytest.raises(RefusedError) as refused:
        build_run(b"", np.zeros(0, np.uint32))
    assert refused.value.reason is Reason.TOO_LARGE
    assert take_runs(b"") == ([], 0, None)


@pytest.mark.covers("A47", "A55")
@given(st.lists(entry_datas, max_size=30), ids, st.binary(max_size=11))
def test_walking_finds_the_offsets_that_packing_gave(
    entries: list[bytes], first: int, tail: bytes
) -> None:
    frames, offsets = pack_entries(entries, first)
    assert walk_frames(frames, first).tolist() == offsets.tolist()
    # Padding, or a few bytes of a frame that is cut.
    for behind in (tail, b"\xfe\xdc\xde\xad" * 5, b"\xfb\xdb\xab\xcb" + bytes(124)):
        walked = walk_frames(frames + behind, first)
        assert walked.tolist() == offsets.tolist()
        assert frames_end(frames + behind, walked) == len(frames)
    moved = walk_frames(b"xyz" + frames, first, start=3)
    assert moved.tolist() == [offset + 3 for offset in offsets.tolist()]
    assert frames_end(b"xyz" + frames, moved, start=3) == len(frames) + 3
    check_frames(frames, offsets, first)


stretches = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 300)), min_size=1, max_size=6)


@given(stretches, st.integers(0, 2**40) | st.just(2**63 - 2000), st.data())
def test_walking_over_frames_of_one_length_finds_each_and_what_is_wrong(
    lengths: list[tuple[int, int]], first: int, data
) -> None:
    entries = [b"\xff" * length for length, count in lengths for _ in range(count)]
    frames, offsets = pack_entries(entries, first)
    starts = offsets.tolist()
    assert walk_frames(frames, first).tolist() == starts
    number = data.draw(st.integers(0, len(starts) - 1))
    begin = starts[number]
    cut = data.draw(st.integers(begin, [*starts, len(frames)][number + 1] - 1))
    assert walk_frames(frames[:cut], first).tolist() == starts[:number]
    padded = frames[:begin] + b"\xfe\xdc\xde\xad" * 500
    assert walk_frames(padded, first).tolist() == starts[:number]
    struct.pack_into(">q", frames, begin + 4, first + number + 1)
    with pytest.raises(CorruptError, match=f"id {first + number + 1} where {first + number}"):
        walk_frames(frames, first)


@given(batches, st.data())
def test_walking_stops_at_a_cut_frame_and_refuses_a_wrong_id(entries: list[bytes], data) -> None:
    frames, offsets = pack_entries(entries)
    cut = data.draw(st.integers(0, len(frames)))
    ends = [*offsets.tolist()[1:], len(frames)]
    whole = [start for start, end in zip(offsets.tolist(), ends, strict=True) if end <= cut]
    assert walk_frames(frames[:cut], 0).tolist() == whole
    with pytest.raises(CorruptError, match="entry id"):
        walk_frames(frames, 1)


@given(st.lists(st.integers(0, 200), min_size=1, max_size=6), st.binary(max_size=100))
def test_offsets_that_lie_are_refused(claimed: list[int], frames: bytes) -> None:
    """Nothing is read outside the buffer, whatever the offsets say."""
    offsets = np.array(claimed, np.uint32)
    try:
        check_frames(frames, offsets, 0)
    except CorruptError:
        return
    assert walk_frames(frames, 0).tolist() == claimed
    assert frames_end(frames, offsets) == len(frames)


@given(
    batch=batches,
    run_bytes_max=st.integers(1, 200),
    cut=st.integers(0, 400),
    at=st.integers(0, 2**16),
    flip=st.integers(1, 255),
)
def test_runs_taken_together_are_the_runs_taken_one_by_one(batch, run_bytes_max, cut, at, flip):
    frames, offsets = pack_entries(batch)
    runs = cut_runs(
        frames,
        offsets,
        ledger_id=7,
        first_entry_id=100,
        last_add_confirmed=99,
        owner_epoch=1,
        run_bytes_max=run_bytes_max,
        stripe_entries=10**6,
    )
    good = b"".join(run.encoded for run in runs)
    damaged = bytearray(good)
    damaged[at % len(good)] ^= flip
    for body in (good, good[: max(0, len(good) - cut)], bytes(damaged), good + b"TLRE" * 5):
        expected, length, error = [], 0, None
        view = memoryview(body)
        try:
            while len(view) - length >= RUN_PREFIX_LEN:
                end = length + Run.encoded_len(view[length : length + RUN_PREFIX_LEN])
                if end > len(view):
                    break
                expected.append(Run.decode(view[length:end]))
                length = end
        except CorruptError as damage:
            error = str(damage)
        taken = take_runs(body)
        assert (taken.runs, taken.length) == (expected, length)
        assert (str(taken.error) if taken.error else None) == error
        for run, same in zip(taken.runs, expected, strict=True):
            assert run.header == same.header
            assert run.offsets.tolist() == same.offsets.tolist()
            assert (run.frames, run.offsets.dtype) == (same.frames, same.offsets.dtype)


@given(batch=batches, where=st.integers(0, 2**16), value=st.integers(-(2**31), 2**31 - 1))
def test_frames_that_contradict_their_offsets_are_told_by_a_right_checksum_too(batch, where, value):
    """Whoever writes wrong frames may well write the right checksum over them."""
    draft = build_run(*pack_entries(batch))
    raw = bytearray(bytes(draft.encoded))
    start = RUN_HEADER_LEN + 4 * (where % (len(raw[RUN_HEADER_LEN:]) // 4))
    raw[start : start + 4] = value.to_bytes(4, "big", signed=True)
    crc = crc32c(raw[RUN_HEADER_LEN:], crc32c(raw[:76]))
    raw[76:80] = crc.to_bytes(4, "big")
    body = bytes(draft.encoded) + bytes(raw) + bytes(draft.encoded)
    taken, told = take_runs(body), None
    try:
        Run.decode(bytes(raw))
    except CorruptError as damage:
        told = str(damage)
    assert (str(taken.error) if taken.error else None) == told
    assert len(taken.runs) == (3 if told is None else 1)
