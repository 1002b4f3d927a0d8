"""The inspector tells what lies in an object, and where it is wrong; it never fails on damage."""

from collections.abc import Callable
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.golden.objects import offload
from tierlog.format import inspect
from tierlog.format.block import BlockBuilder
from tierlog.format.checksum import Buffer
from tierlog.format.frame import pack_entries
from tierlog.format.inspect import (
    ObjectKind,
    Report,
    compare,
    inspect_object,
    inspect_object_async,
)
from tierlog.format.run import build_run
from tierlog.format.side import SideBuilder, SideHeader
from tierlog.model.errors import RefusedError, RetryableError
from tierlog.model.ids import LedgerId

SIZE = 256
OBJECTS = offload([bytes([65 + i]) * (20 + 7 * i) for i in range(12)], SIZE)
DATA = b"".join(OBJECTS.blocks)
INDEX = OBJECTS.object_index.encode()


def reader(raw: bytes | bytearray) -> Callable[[int, int], Buffer]:
    return lambda offset, length: memoryview(raw)[offset : offset + length]


def look(raw: bytes | bytearray) -> Report:
    return inspect_object(reader(raw), len(raw))


def test_a_sound_data_object() -> None:
    report = look(DATA)
    assert report.sound
    assert report.kind is ObjectKind.DATA
    assert [(one.offset, one.block_len) for one in report.blocks] == [
        (one.offset, one.length) for one in OBJECTS.object_index.blocks()
    ]
    assert [(one.first_entry_id, one.last_entry_id) for one in report.blocks] == [
        (one.first_entry_id, one.last_entry_id) for one in OBJECTS.object_index.blocks()
    ]
    assert report.entry_count == 12
    assert sum(one.payload_len for one in report.blocks) == OBJECTS.object_index.metadata.length
    assert report.blocks[-1].padding_len == 0


def test_a_sound_index_object() -> None:
    report = look(INDEX)
    assert report.sound
    assert report.kind is ObjectKind.INDEX
    assert tuple(report.mappings) == OBJECTS.object_index.entries
    assert report.metadata == OBJECTS.object_index.metadata
    assert compare(report, look(DATA)) == []


async def test_ranges_may_be_waited_for() -> None:
    async def read(offset: int, length: int) -> bytes:
        return DATA[offset : offset + length]

    assert await inspect_object_async(read, len(DATA)) == look(DATA)


@pytest.mark.parametrize("raw", [b"", b"abc", b"PK\x03\x04" + bytes(500), bytes(500), b"\xff" * 99])
def test_what_is_not_ours_is_refused(raw: bytes) -> None:
    with pytest.raises(RefusedError, match="neither a data, nor an index, nor a side"):
        look(raw)


@given(st.integers(4, len(DATA) - 1))
def test_every_cut_of_a_data_object_is_reported(cut: int) -> None:
    assert not look(DATA[:cut]).sound or cut in {
        one.offset for one in OBJECTS.object_index.blocks()
    }


@pytest.mark.parametrize("cut", [SIZE + 128, SIZE + 131, SIZE + 145, 2 * SIZE - 1])
def test_a_cut_is_one_problem_and_not_two(cut: int) -> None:
    """What a cut leaves of an entry is not bad padding."""
    report = look(DATA[:cut])
    found = [(one.offset, one.message) for one in report.problems]
    whole = [one for one in found if "without entries" not in one[1]]
    assert whole == [(cut, f"object is cut: block 1 goes to byte {2 * SIZE}")]
    assert report.blocks[1].padding_len == 0


@given(st.integers(4, len(INDEX) - 1))
def test_every_cut_of_an_index_object_is_reported(cut: int) -> None:
    report = look(INDEX[:cut])
    assert not report.sound
    assert all(problem.offset <= len(INDEX) for problem in report.problems)


def test_an_object_cut_at_a_block_shows_beside_its_index() -> None:
    report = look(DATA[: 2 * SIZE])
    assert report.sound
    problems = compare(look(INDEX), report)
    assert any("blocks, the index names" in one.message for one in problems)
    assert any("the index promises 12 of" in one.message for one in problems)


@given(st.data())
def test_flipped_structure_is_reported_where_it_is(data) -> None:
    """Headers, entry lengths and ids, padding; the index tells the rest."""
    places: list[int] = []
    for block in look(DATA).blocks:
        places += range(block.offset, block.offset + 128)
        end = block.offset + block.block_len
        places += range(end - block.padding_len, end)
    place = data.draw(st.sampled_from(places))
    raw = bytearray(DATA)
    raw[place] ^= 1 << data.draw(st.integers(0, 7))
    report = look(raw)
    assert not report.sound or compare(look(INDEX), report)
    assert all(0 <= problem.offset <= len(DATA) for problem in report.problems)


@given(st.data())
def test_damage_of_any_kind_never_fails(data) -> None:
    raw = bytearray(data.draw(st.sampled_from([DATA, INDEX])))
    for _ in range(data.draw(st.integers(1, 8))):
        raw[data.draw(st.integers(4, len(raw) - 1))] = data.draw(
            st.sampled_from([0, 1, 0x7F, 0x80, 0xFF])
        )
    try:
        report = look(raw)
    except RefusedError as error:
        pytest.fail(f"the magic word was left alone: {error}")
    assert report.size == len(raw)


def test_damage_in_one_block_does_not_hide_the_others() -> None:
    raw = bytearray(DATA)
    raw[SIZE] ^= 1  # the second block's magic word
    report = look(raw)
    assert [(one.offset, one.message.split(":")[0]) for one in report.problems] == [
        (SIZE, "not a data block")
    ]
    offsets = [one.offset for one in OBJECTS.object_index.blocks()]
    assert [one.offset for one in report.blocks] == [offsets[0], *offsets[2:]]


def test_a_damaged_entry_is_reported_at_its_byte() -> None:
    raw = bytearray(DATA)
    second = 128 + 12 + 20
    raw[second + 11] ^= 1  # the last byte of the second entry's id
    report = look(raw)
    assert [(one.offset, one.message) for one in report.problems] == [
        (second, "entry id 0 where 1 belongs")
    ]
    assert report.blocks[0].entry_count == 1


def test_a_first_block_without_its_magic_word_is_still_recognised() -> None:
    raw = bytearray(DATA)
    raw[0] = 0
    report = look(raw)
    assert report.kind is ObjectKind.DATA
    assert report.problems[0].message.startswith("not a data block")


@pytest.mark.parametrize("chunk_len", [129, 130, 140, 141, 200, 255])
def test_chunks_of_any_length_see_the_same(monkeypatch, chunk_len: int) -> None:
    entries = [bytes(i % 5) + b"\xfe\xdc\xde\xad" * (i * 13 % 160) for i in range(40)]
    blocks, index = offload(entries, 1000)
    raw = b"".join(blocks)
    whole = look(raw)
    assert whole.sound
    monkeypatch.setattr(inspect, "CHUNK_LEN", chunk_len)
    asked = []

    def read(offset: int, length: int) -> bytes:
        asked.append(length)
        return raw[offset : offset + length]

    assert inspect_object(read, len(raw)) == whole
    assert max(asked) <= max(chunk_len, 128), "an object is never held whole"
    assert compare(look(index.encode()), whole) == []


def test_a_flood_of_tiny_blocks_is_bounded() -> None:
    header = bytes.fromhex("fbdbabcb00000000000000800000000000000080") + bytes(108)
    report = look(header * 12_000)
    assert len(report.problems) == 1000
    assert len(report.blocks) == 10_000


def test_an_object_that_changes_meanwhile_is_retryable() -> None:
    with pytest.raises(RetryableError, match="where the object has"):
        inspect_object(lambda offset, length: DATA[offset : offset + length - 1], len(DATA))


# --- side objects ---------------------------------------------------------------------------------


def side_of(entries: int, grain_len: int) -> bytes:
    frames, offsets = pack_entries([b"x" * 50] * entries)
    run = build_run(frames, offsets, ledger_id=7, publish_ms_min=5, publish_ms_max=9)
    builder = SideBuilder(LedgerId(7), UUID(int=5), grain_len=grain_len)
    block = BlockBuilder(128 + len(frames), 0, sums=builder.sums)
    block.take(run, 0)
    block.finish()
    return builder.finish(entries).encode()


def test_a_sound_side_object_of_many_pages() -> None:
    raw = side_of(400, 64)
    report = look(raw)
    assert report.sound
    assert report.kind is ObjectKind.SIDE
    shown = {one.name: one.value for one in report.fields}
    assert shown["page_count"] == "4"
    assert shown["page[1]"] == "grains 127 to 253"
    assert shown["page[2].publish_ms_max"] == "9 to 9"
    assert not [name for name in shown if name.startswith("grain[")]


def test_damage_of_a_side_object_is_told_with_its_page() -> None:
    raw = bytearray(side_of(400, 64))
    header = SideHeader.decode(raw)
    start, end = header.page_place(2)
    raw[start + 100] ^= 1
    report = look(raw)
    assert [(one.offset, "page 2" in one.message) for one in report.problems] == [(start, True)]
    # The pages behind it are shown all the same.
    assert "page[3]" in {one.name for one in report.fields}
    cut = look(raw[: end - 1])
    assert [one.message for one in cut.problems] == [
        f"object of {len(raw)} bytes has {end - 1}",
        "object is cut in page 2 of 4",
    ]


def test_a_side_object_without_its_header_says_so() -> None:
    raw = side_of(3, 64)
    for damaged in (raw[:50], raw[:20] + b"\xff" + raw[21:], raw[:100]):
        report = look(damaged)
        assert not report.sound
        assert report.fields == []
