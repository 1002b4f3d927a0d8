"""Blocks hold whole entries, and are as long as was said before their first byte was known.

Layouts of a few hundred bytes, so that every edge comes soon; the payloads carry magic words and
padding. The oracle (tests/golden/oracle.py) shares no code with the codecs.
"""

import weakref

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from tests.golden.objects import offload, runs_of
from tests.golden.oracle import naive_read, naive_write
from tierlog.format.block import (
    BLOCK_HEADER_LEN,
    BLOCK_MAGIC,
    Block,
    BlockBuilder,
    BlockHeader,
    bad_padding_at,
    block_len_for_remaining,
    entry_len_max,
    padding,
)
from tierlog.format.frame import FRAME_HEADER_LEN
from tierlog.model.errors import CorruptError, Reason, RefusedError
from tierlog.model.ids import EntryId
from tierlog.model.policy import BLOCK_SIZE_DEFAULT, BLOCK_SIZE_MAX

SIZE = 256
"""Room for one entry of 116 bytes, or ten empty ones."""
LARGEST = SIZE - 140

words = st.sampled_from(
    [b"\xfb\xdb\xab\xcb", b"\xfe\xdc\xde\xad", b"\xde\x47\xde\x47", bytes(4), b"\x00\x00\x00\x01"]
)
lengths = st.sampled_from([0, 1, 2, 3, 11, 12, 13, LARGEST - 1, LARGEST]) | st.integers(0, LARGEST)


@st.composite
def entry_data(draw) -> bytes:
    length: int = draw(lengths)
    pattern: bytes = b"".join(draw(st.lists(words, min_size=1, max_size=4)))
    return (pattern * (length + 1))[:length]


ledgers = st.lists(entry_data(), min_size=1, max_size=40)


def around(*edges: int) -> st.SearchStrategy[int]:
    """Each edge and both its neighbours: where the off-by-one lives."""
    return st.sampled_from(sorted({edge + step for edge in edges for step in (-1, 0, 1)}))


@pytest.mark.covers("A43", "A44", "A45", "A46", "A56", "A75", "A76")
@given(ledgers, st.sampled_from([1, 30, 200, 65536]))
def test_any_ledger_becomes_the_blocks_of_the_naive_writer(
    entries: list[bytes], run_bytes_max: int
) -> None:
    blocks, index = offload(entries, SIZE, run_bytes_max=run_bytes_max)
    assert blocks == naive_write(entries, SIZE)
    found = naive_read(b"".join(blocks))
    assert [entry for block in found for _, entry in block.entries] == entries
    assert [(block.first_entry_id, block.offset) for block in found] == [
        (one.first_entry_id, one.offset) for one in index.entries
    ]


@given(ledgers)
def test_any_block_is_read_as_the_naive_reader_does(entries: list[bytes]) -> None:
    blocks, _ = offload(entries, SIZE)
    for raw, naive in zip(blocks, naive_read(b"".join(blocks)), strict=True):
        block = Block.decode(raw)
        assert block.header.first_entry_id == naive.first_entry_id
        assert len(block.offsets) == len(naive.entries)
        assert block.padding_len == len(naive.padding)
        assert block.payload_len == sum(len(entry) for _, entry in naive.entries)
        starts = [*block.offsets.tolist(), len(block.frames)]
        for (_, entry), start, end in zip(naive.entries, starts, starts[1:], strict=False):
            assert bytes(block.frames[start + 12 : end]) == entry


@pytest.mark.covers("A44", "A56")
@pytest.mark.parametrize("over", range(-13, 14))
def test_an_entry_that_ends_around_the_blocks_end(over: int) -> None:
    """The second entry ends ``over`` bytes behind the end of the first block."""
    first = b"\xfe\xdc\xde\xad" * 10
    second = bytes(LARGEST - len(first) - FRAME_HEADER_LEN + over)
    third = b"z" * LARGEST
    blocks, index = offload([first, second, third], SIZE)
    assert blocks == naive_write([first, second, third], SIZE)
    starts = [one.first_entry_id for one in index.entries]
    assert starts == ([0, 2] if over <= 0 else [0, 1, 2])
    pad = Block.decode(blocks[0]).padding_len
    assert pad == (-over if over <= 0 else SIZE - 128 - 12 - len(first))


@pytest.mark.covers("A44")
def test_an_entry_fills_a_block_exactly_and_one_byte_more_does_not_fit() -> None:
    assert entry_len_max(SIZE) == LARGEST
    blocks, _ = offload([bytes(LARGEST), b"x"], SIZE)
    assert [Block.decode(one).padding_len for one in blocks] == [0, 0]

    (run,) = runs_of([bytes(LARGEST + 1)])
    builder = BlockBuilder(SIZE, 0)
    with pytest.raises(RefusedError, match="longer than the 116 bytes") as refused:
        builder.take(run, 0)
    assert refused.value.reason is Reason.TOO_LARGE


@pytest.mark.parametrize("entries", [[b""], [b"x"], [bytes(LARGEST)], [b""] * 40])
def test_one_entry_in_the_ledger_and_empty_entries(entries: list[bytes]) -> None:
    blocks, index = offload(entries, SIZE)
    assert blocks == naive_write(entries, SIZE)
    assert index.last_entry_id == len(entries) - 1


def test_the_largest_entry_of_the_default_block() -> None:
    assert entry_len_max(BLOCK_SIZE_DEFAULT) == 64 * 1024 * 1024 - 140
    remaining = block_len_for_remaining(
        BLOCK_SIZE_DEFAULT, payload_left=BLOCK_SIZE_DEFAULT - 140, entries_left=1
    )
    assert remaining == BLOCK_SIZE_DEFAULT


@pytest.mark.covers("A46", "A48")
@given(
    payload_left=st.integers(0, 10**12) | around(SIZE - 128 - 12, SIZE - 128 - 24),
    entries_left=st.integers(1, 10**9) | around(1, 2),
)
@example(payload_left=SIZE - 140, entries_left=1)
def test_the_next_blocks_length_is_known_beforehand(payload_left: int, entries_left: int) -> None:
    assume(entries_left >= 1)
    found = block_len_for_remaining(SIZE, payload_left=payload_left, entries_left=entries_left)
    exact = 128 + payload_left + entries_left * 4 + entries_left * 8
    assert found == (min(SIZE, exact))


@given(ledgers)
def test_taking_copies_nothing_and_counts_right(entries: list[bytes]) -> None:
    (run,) = runs_of(entries)
    builder = BlockBuilder(SIZE, 0)
    follower = builder.take(run, 0)
    assert follower == builder.entry_count == builder.last_entry_id + 1
    assert builder.full == (follower < len(entries) or builder.padding_len < FRAME_HEADER_LEN)
    assert builder.payload_len == sum(map(len, entries[:follower]))
    header, frames, *pads = builder.finish()
    assert len(header) == BLOCK_HEADER_LEN
    assert isinstance(frames, memoryview)
    assert frames.obj is run.frames.obj
    assert sum(map(len, [header, frames, *pads])) == SIZE


@pytest.mark.parametrize("entry", [bytes(LARGEST), bytes(LARGEST - 1)])
def test_who_knows_a_builder_keeps_no_finished_block(entry: bytes) -> None:
    builder = BlockBuilder(SIZE, 0)
    builder.take(runs_of([entry])[0], 0)
    buffers = builder.finish()
    frames = weakref.ref(buffers[1])
    buffers.clear()  # as when a part was sent
    assert frames() is None
    assert builder.entry_count == 1


@pytest.mark.covers("A45")
@given(st.integers(0, 40), st.integers(0, 60))
def test_padding_is_the_pattern_and_only_the_pattern(length: int, at: int) -> None:
    pad = padding(length)
    assert pad == (b"\xfe\xdc\xde\xad" * 11)[:length]
    assert bad_padding_at(pad) is None
    if at < length:
        bad = bytearray(pad)
        bad[at] ^= 0x10
        assert bad_padding_at(bad) == at


@given(
    magic=st.just(BLOCK_MAGIC) | around(BLOCK_MAGIC),
    header_len=st.just(128) | around(0, 128, 4096, BLOCK_SIZE_MAX),
    block_len=st.integers(128, BLOCK_SIZE_MAX) | around(0, 128, 4096, BLOCK_SIZE_MAX),
    first=st.integers(0, 2**63 - 1) | around(0, -(2**62), 2**62),
)
@pytest.mark.covers("A49", "A50", "A51", "A52", "A53")
def test_header_fields_are_accepted_exactly_when_the_format_allows_them(
    magic: int, header_len: int, block_len: int, first: int
) -> None:
    raw = b"".join(
        value.to_bytes(size, "big", signed=size == 8)
        for value, size in ((magic, 4), (header_len, 8), (block_len, 8), (first, 8))
    ) + bytes(100)
    if magic == 0xFBDBABCB and 128 <= header_len <= block_len < 2**31 and first >= 0:
        header = BlockHeader.decode(raw)
        assert (header.header_len, header.block_len) == (header_len, block_len)
        assert header.first_entry_id == first
        if header_len == 128:
            assert header.encode() == raw
    else:
        with pytest.raises(CorruptError):
            BlockHeader.decode(raw)


@given(ledgers)
def test_every_truncation_of_a_block_is_refused(entries: list[bytes]) -> None:
    raw = offload(entries, SIZE).blocks[0]
    for cut in range(len(raw)):
        with pytest.raises(CorruptError):
            Block.decode(raw[:cut])
    with pytest.raises(CorruptError):
        Block.decode(raw + b"\xfe")


@given(ledgers, st.integers(0, 2**31))
def test_a_flipped_bit_of_the_structure_is_refused(entries: list[bytes], choice: int) -> None:
    """Block length, first id, every entry's length and id, and the padding; not payloads."""
    raw = offload(entries, SIZE).blocks[0]
    block = Block.decode(raw)
    places = [*range(4), *range(4, 28)]
    for offset in block.offsets.tolist():
        places += range(128 + offset, 128 + offset + 12)
    places += range(len(raw) - block.padding_len, len(raw))
    place, bit = places[choice % len(places)], 1 << (choice // 1000) % 8
    damaged = bytearray(raw)
    damaged[place] ^= bit
    try:
        found = Block.decode(damaged)
    except CorruptError:
        return
    # A last entry's length may lie about padding, when what it leaves is padding again: the
    # ledger's length, which the index object holds, is what gives that away.
    assert found.payload_len != block.payload_len


def test_a_header_that_a_later_version_made_longer_is_skipped_by_its_length() -> None:
    header = BlockHeader(block_len=200, first_entry_id=EntryId(5))
    longer = bytearray(header.encode()) + bytes(32)
    longer[4:12] = (160).to_bytes(8, "big")
    entry = (28).to_bytes(4, "big") + (5).to_bytes(8, "big") + b"v" * 28
    block = Block.decode(bytes(longer) + entry)
    assert block.header.header_len == 160
    assert bytes(block.frames) == entry


def test_an_entry_that_crosses_the_end_of_its_block_is_refused() -> None:
    raw = bytearray(offload([b"a" * 50, b"b" * LARGEST], SIZE).blocks[0])
    raw[128:132] = (200).to_bytes(4, "big")
    with pytest.raises(CorruptError, match="crosses the end"):
        Block.decode(raw)


def test_a_block_without_entries_is_refused() -> None:
    raw = BlockHeader(block_len=SIZE, first_entry_id=EntryId(0)).encode() + padding(SIZE - 128)
    with pytest.raises(CorruptError, match="without entries"):
        Block.decode(raw)
