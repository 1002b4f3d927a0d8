"""An index finds the block of every entry, and one that contradicts itself is refused."""

import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.golden.objects import closed_ledger, offload
from tests.golden.oracle import naive_read
from tierlog.format.index import BLOCK_COUNT_MAX, IndexEntry, ObjectIndex
from tierlog.model.errors import CorruptError, Reason, RefusedError
from tierlog.model.ids import EntryId
from tierlog.model.ledger import LedgerState

SIZE = 256
ledgers = st.lists(st.integers(0, SIZE - 140).map(bytes), min_size=1, max_size=40)
FOUR = offload([bytes(100)] * 4, SIZE).object_index


@pytest.mark.covers("A40", "A66", "A69", "A71", "A72", "A78")
@given(ledgers)
def test_block_of_finds_what_the_naive_reader_finds(entries: list[bytes]) -> None:
    blocks, index = offload(entries, SIZE)
    assert ObjectIndex.decode(index.encode()) == index
    for number, block in enumerate(naive_read(b"".join(blocks))):
        for entry_id, _ in block.entries:
            found = index.block_of(entry_id)
            assert found.part_number == number + 1
            assert (found.offset, found.length) == (block.offset, block.block_len)
            assert found.first_entry_id == block.entries[0][0]
            assert found.last_entry_id == block.entries[-1][0]
    assert len(index.blocks()) == len(blocks)


@given(ledgers)
def test_entries_that_do_not_exist_are_refused(entries: list[bytes]) -> None:
    index = offload(entries, SIZE).object_index
    for entry_id in (-1, len(entries), 2**63 - 1):
        with pytest.raises(RefusedError) as refused:
            index.block_of(entry_id)
        assert refused.value.reason is Reason.NO_SUCH_ENTRY


@given(ledgers)
def test_every_truncation_is_refused(entries: list[bytes]) -> None:
    raw = offload(entries, SIZE).object_index.encode()
    for cut in range(len(raw)):
        with pytest.raises(CorruptError):
            ObjectIndex.decode(raw[:cut])
    with pytest.raises(CorruptError):
        ObjectIndex.decode(raw + b"\0")


@given(st.data())
def test_a_flipped_bit_is_refused_or_shows(data) -> None:
    """All of the header and the mappings is redundant; the metadata's own fields are not."""
    index = FOUR
    raw = bytearray(index.encode())
    mappings_at = 32 + len(index.metadata_raw)
    place = data.draw(st.sampled_from([*range(32), *range(mappings_at, len(raw))]))
    raw[place] ^= 1 << data.draw(st.integers(0, 7))
    try:
        found = ObjectIndex.decode(raw)
    except CorruptError:
        return
    # What no rule of the index itself can refuse: how long the last block is, how long block
    # headers are, and which entry a later block begins with. The data object tells.
    in_mapping = place - mappings_at
    assert place in range(8, 24) or (in_mapping >= 20 and in_mapping % 20 < 8)
    assert found != index


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"entries": ()}, "0 blocks"),
        ({"data_header_len": 127}, "block headers of 127"),
        ({"data_header_len": 2**40}, "block headers of"),
        ({"data_len": 139}, "a data object of 139"),
        ({"data_len": 4 * SIZE + 1}, "last block"),
        ({"data_len": 3 * SIZE + 139}, "last block"),
        ({"data_len": 3 * SIZE + 140}, "for entries that need"),
    ],
)
def test_contradictions_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(CorruptError, match=message):
        replace(FOUR, **change)  # type: ignore[arg-type]


@pytest.mark.covers("A68", "A71")
@pytest.mark.parametrize(
    ("number", "change", "message"),
    [
        (0, {"offset": 1}, "first block"),
        (0, {"first_entry_id": 1}, "first block"),
        (0, {"part_number": 2}, "part 2 in place 1"),
        (1, {"part_number": 3}, "part 3 in place 2"),
        (1, {"offset": 139}, "blocks of 139 bytes"),
        (1, {"offset": 2**31}, "blocks of"),
        (2, {"offset": 2 * SIZE + 1}, "block 3 at 513"),
        (2, {"offset": 12345}, "block 3 at 12345"),
        (2, {"first_entry_id": 1}, "do not grow"),
        (3, {"first_entry_id": 4}, "do not grow"),
    ],
)
def test_mappings_that_break_a_rule_are_refused(
    number: int, change: dict[str, int], message: str
) -> None:
    entries = list(FOUR.entries)
    entries[number] = replace(entries[number], **change)  # type: ignore[arg-type]
    with pytest.raises(CorruptError, match=message):
        replace(FOUR, entries=tuple(entries))


@pytest.mark.parametrize("state", [LedgerState.OPEN, LedgerState.IN_RECOVERY])
def test_a_ledger_that_is_not_closed_has_no_index(state: LedgerState) -> None:
    ledger = replace(FOUR.metadata, state=state)
    with pytest.raises(CorruptError, match=state.name):
        replace(FOUR, metadata=ledger, metadata_raw=b"")


@given(
    st.sampled_from([4, 8, 16, 24, 28]),
    st.sampled_from([0, 1, 2**15, 2**31 - 1, 2**31, 2**32 - 1]),
)
def test_hostile_lengths_are_refused_before_they_are_believed(offset: int, value: int) -> None:
    raw = bytearray(FOUR.encode())
    struct.pack_into(">I", raw, offset, value)
    if bytes(raw) == FOUR.encode():
        return
    with pytest.raises(CorruptError):
        ObjectIndex.decode(raw)


def test_the_most_blocks_that_an_upload_has() -> None:
    def index(count: int) -> ObjectIndex:
        return ObjectIndex(
            data_len=count * SIZE,
            metadata=closed_ledger(last_entry_id=count - 1, length=count * (SIZE - 140)),
            entries=tuple(
                IndexEntry(first_entry_id=EntryId(i), part_number=i + 1, offset=i * SIZE)
                for i in range(count)
            ),
        )

    assert ObjectIndex.decode(index(BLOCK_COUNT_MAX).encode()).block_of(9_999).part_number == 10_000
    with pytest.raises(CorruptError, match="10001 blocks"):
        index(BLOCK_COUNT_MAX + 1)
