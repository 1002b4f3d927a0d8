"""Blocks and indexes of the single-object layout, against a naive reading of its tables."""

import struct
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.golden.objects import closed_ledger, runs_of
from tests.golden.test_golden_single import TINY_BLOCKS, TINY_INDEX_PART, TINY_OBJECT
from tierlog.format import single
from tierlog.format.frame import pack_entries
from tierlog.format.inspect import inspect_object
from tierlog.format.single import (
    BLOCK_COUNT_MAX,
    SingleBlock,
    SingleBlockBuilder,
    SingleIndex,
    index_of,
    walk_entries,
    without_ids,
)
from tierlog.model.errors import CorruptError, Reason, RefusedError
from tierlog.model.ids import EntryId

SIZE = 200
BIGGEST = SIZE - 24

ledgers = st.lists(
    st.binary(max_size=40) | st.sampled_from([BIGGEST, BIGGEST - 1, 100, 76, 77, 78, 0]).map(bytes),
    min_size=1,
    max_size=60,
)


def blocks_of(entries: list[bytes], run_bytes_max: int) -> list[bytes]:
    """Fill blocks as an offloader does."""
    blocks: list[bytes] = []
    builder: SingleBlockBuilder | None = None
    at, written = 0, 0
    for run in runs_of(entries, run_bytes_max=run_bytes_max):
        at = run.first_entry_id
        while at <= run.last_entry_id:
            if builder is None:
                builder = SingleBlockBuilder(
                    single.block_len_for_remaining(
                        SIZE,
                        payload_left=sum(map(len, entries)) - written,
                        entries_left=len(entries) - at,
                    ),
                    at,
                )
            if at == run.first_entry_id and builder.take_whole(run):
                at = run.last_entry_id + 1
            else:
                at = builder.take(run, at)
            if builder.full or at == len(entries):
                written += builder.payload_len
                blocks.append(b"".join(builder.finish()))
                builder = None
    assert builder is None
    return blocks


def naive_entries(raw: bytes) -> list[bytes]:
    """Read a block in the fewest lines."""
    magic, block_len, count, _ = struct.unpack_from(">Iiiq", raw)
    assert (magic, block_len) == (0xFBDBAB04, len(raw))
    found, at = [], 20
    for _ in range(count):
        (length,) = struct.unpack_from(">i", raw, at)
        found.append(raw[at + 4 : at + 4 + length])
        at += 4 + length
    assert raw[at:] == (bytes.fromhex("dead1234") * SIZE)[: len(raw) - at]
    return found


@pytest.mark.covers("B15", "B16", "B19", "B25")
@settings(max_examples=200, deadline=None)
@given(ledgers, st.integers(13, 400))
def test_blocks_tile_the_ledger(entries: list[bytes], run_bytes_max: int) -> None:
    blocks = blocks_of(entries, run_bytes_max)
    assert [entry for block in blocks for entry in naive_entries(block)] == entries
    assert all(len(block) == SIZE for block in blocks[:-1])
    assert len(blocks[-1]) <= SIZE
    firsts, count = [], 0
    for block in blocks:
        decoded = SingleBlock.decode(block)
        assert list(map(bytes, decoded.entries)) == naive_entries(block)
        assert decoded.header.first_entry_id == count
        firsts.append(EntryId(count))
        count += decoded.header.entry_count
    ledger = closed_ledger(last_entry_id=len(entries) - 1, length=sum(map(len, entries)))
    starts = [(first, SIZE * number) for number, first in enumerate(firsts)]
    index = index_of(ledger, starts, blocks_len=sum(map(len, blocks)), index_len_min=777)
    whole = index.encode() + b"".join(blocks)
    assert (index.index_len, len(whole)) == (777, index.object_len)
    assert SingleIndex.decode(whole, len(whole)) == index
    for entry_id, entry in enumerate(entries):
        place = index.block_of(entry_id)
        assert place.first_entry_id <= entry_id <= place.last_entry_id
        raw = whole[place.offset : place.offset + place.length]
        assert naive_entries(raw)[entry_id - place.first_entry_id] == entry
    report = inspect_object(lambda at, length: whole[at : at + length], len(whole))
    assert report.sound, report.problems
    assert report.entry_count == len(entries)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.binary(max_size=30), min_size=1, max_size=40), st.data())
def test_walks_stop_at_a_cut_and_nowhere_else(entries: list[bytes], data: st.DataObject) -> None:
    frames, offsets = pack_entries(entries, 5)
    raw = bytes(without_ids(frames, offsets))
    assert raw == b"".join(struct.pack(">i", len(one)) + one for one in entries)
    cut = data.draw(st.integers(0, len(raw)))
    starts, end = walk_entries(raw[:cut], 10**6)
    bounds = [0]
    for one in entries:
        bounds.append(bounds[-1] + 4 + len(one))
    whole = [start for start, stop in pairwise(bounds) if stop <= cut]
    assert starts == whole
    assert end == (bounds[len(whole)])
    few = data.draw(st.integers(0, len(entries)))
    assert walk_entries(raw, few) == (bounds[:few], bounds[few])
    padded = raw + single.padding(9)
    assert walk_entries(padded, 10**6) == (bounds[:-1], len(raw))


def test_an_entry_that_no_block_can_hold_is_refused() -> None:
    (run,) = runs_of([bytes(BIGGEST + 1)])
    with pytest.raises(RefusedError) as refused:
        SingleBlockBuilder(SIZE, 0).take(run, 0)
    assert refused.value.reason is Reason.TOO_LARGE


@pytest.mark.covers("B13")
def test_an_index_is_padded_to_what_s3_takes_and_grows_beyond() -> None:
    ledger = closed_ledger(last_entry_id=0, length=7)
    index = index_of(ledger, [(EntryId(0), 0)], blocks_len=31)
    assert index.index_len == 5 * 1024 * 1024 == len(index.encode())
    assert index.entries[0].offset == index.index_len
    short = index_of(ledger, [(EntryId(0), 0)], blocks_len=31, index_len_min=1)
    assert short.index_len == short.used_len == len(short.encode())


def test_there_are_no_more_blocks_than_parts() -> None:
    def index(count: int) -> SingleIndex:
        firsts = [(EntryId(number), 30 * number) for number in range(count)]
        ledger = closed_ledger(last_entry_id=count - 1, length=6 * count)
        return index_of(ledger, firsts, blocks_len=30 * count)

    most = index(BLOCK_COUNT_MAX)
    last = SingleIndex.decode(most.encode(), most.object_len)
    assert last.block_of(BLOCK_COUNT_MAX - 1).part_number == 10_000
    with pytest.raises(CorruptError):
        index(BLOCK_COUNT_MAX + 1)


hostile = st.integers(0, len(TINY_OBJECT) - 1)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(hostile, st.integers(1, 255)), min_size=1, max_size=4))
def test_a_flipped_byte_is_corrupt_or_of_no_matter(flips: list[tuple[int, int]]) -> None:
    raw = bytearray(TINY_OBJECT)
    for at, mask in flips:
        raw[at] ^= mask
    try:
        index = SingleIndex.decode(bytes(raw[: len(TINY_INDEX_PART)]), len(raw))
    except CorruptError:
        pass
    else:
        # What could be read is consistent: no block goes beyond the object.
        assert index.index_len == index.entries[0].offset
        assert sum(block.length for block in index.blocks()) == len(raw) - index.index_len
    for number, block in enumerate(TINY_BLOCKS):
        start = len(TINY_INDEX_PART) + len(TINY_BLOCKS[0]) * number
        found = bytes(raw[start : start + len(block)])
        try:
            decoded = SingleBlock.decode(found)
        except CorruptError:
            continue
        assert list(map(bytes, decoded.entries)) == naive_entries(found)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300), st.booleans())
def test_arbitrary_bytes_are_corrupt(raw: bytes, with_magic: bool) -> None:
    if with_magic:
        raw = bytes.fromhex("de47de04") + raw
    with pytest.raises(CorruptError):
        SingleIndex.decode(raw, max(len(raw), 1000))
    block = bytes.fromhex("fbdbab04") + struct.pack(">i", len(raw) + 8) + raw
    try:
        decoded = SingleBlock.decode(block)
    except CorruptError:
        return
    assert list(map(bytes, decoded.entries)) == naive_entries(block)
