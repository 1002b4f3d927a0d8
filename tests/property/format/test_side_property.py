"""Side objects say of every grain what a naive look at the whole data object says.

The grains are tiny, so that entries, headers and padding cross them in every way.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple
from uuid import UUID

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.golden.objects import runs_of
from tests.golden.oracle import naive_read, naive_write
from tierlog.format.block import BlockBuilder, block_len_for_remaining
from tierlog.format.checksum import CrcJoiner, crc32c, crc32c_joined
from tierlog.format.grains import GrainColumns
from tierlog.format.run import Run, build_run
from tierlog.format.side import (
    GRAIN_LEN_MAX,
    ROWS_A_PAGE,
    SideBuilder,
    SideHeader,
    SideObject,
    grain_len_for,
)
from tierlog.model.errors import CorruptError
from tierlog.model.ids import LedgerId

SIZE = 512
ATTEMPT = UUID(int=5)

ledgers = st.lists(
    st.binary(max_size=40) | st.integers(0, SIZE - 140).map(bytes), min_size=1, max_size=60
)
grains = st.sampled_from([64, 128, 256, 512, 1024, 65536])


class Built(NamedTuple):
    """Blocks, checksums of the parts as the builder counted them, and the side object."""

    blocks: list[bytes]
    crcs: list[int]
    side: SideObject


def stamped(run: Run, low: int, high: int) -> Run:
    """Return a run with these publish times."""
    return build_run(
        run.frames,
        run.offsets,
        ledger_id=7,
        first_entry_id=run.first_entry_id,
        publish_ms_min=low,
        publish_ms_max=high,
    )


def built(
    entries: Sequence[bytes],
    *,
    grain_len: int,
    run_bytes_max: int = 100,
    times: Sequence[tuple[int, int]] = (),
    block_size: int = SIZE,
) -> Built:
    """Fill blocks as the offloader does, counting."""
    runs = runs_of(entries, run_bytes_max=run_bytes_max)
    runs = [stamped(one, *times[n % len(times)]) if times else one for n, one in enumerate(runs)]
    builder = SideBuilder(LedgerId(7), ATTEMPT, grain_len=grain_len)
    left, number, blocks, crcs = list(runs), 0, [], []
    payload = sum(map(len, entries))
    while number < len(entries):
        length = block_len_for_remaining(
            block_size, payload_left=payload, entries_left=len(entries) - number
        )
        block = BlockBuilder(length, number, sums=builder.sums)
        while number < len(entries) and not block.full:
            if block.take_whole(left[0]):
                number = left.pop(0).last_entry_id + 1
                continue
            number = block.take(left[0], number)
            if number > left[0].last_entry_id:
                left.pop(0)
        payload -= block.payload_len
        blocks.append(b"".join(block.finish()))
        crcs.append(block.crc32c)
    return Built(blocks, crcs, builder.finish(len(entries)))


@given(ledgers, grains, st.sampled_from([1, 30, 200, 65536]))
def test_parts_and_grains_have_the_checksums_of_their_bytes(entries, grain_len, run_bytes_max):
    found = built(entries, grain_len=grain_len, run_bytes_max=run_bytes_max)
    assert found.blocks == naive_write(entries, SIZE)
    assert found.crcs == [crc32c(block) for block in found.blocks]
    data = b"".join(found.blocks)
    assert found.side.header.data_len == len(data)
    cut = [data[at : at + grain_len] for at in range(0, len(data), grain_len)]
    assert found.side.columns.crcs.tolist() == [crc32c(grain) for grain in cut]


def places_of(entries: Sequence[bytes], blocks: Sequence[bytes]) -> list[int]:
    """Return where each entry's frame begins in the data object."""
    places = []
    for block in naive_read(b"".join(blocks)):
        at = block.offset + 128
        for _, entry in block.entries:
            places.append(at)
            at += 12 + len(entry)
    assert len(places) == len(entries)
    return places


@given(ledgers, grains, st.sampled_from([1, 30, 200, 65536]))
def test_every_grain_names_the_first_entry_that_begins_in_it_or_behind(
    entries, grain_len, run_bytes_max
):
    found = built(entries, grain_len=grain_len, run_bytes_max=run_bytes_max)
    data_len = found.side.header.data_len
    places = [*places_of(entries, found.blocks), data_len]
    ids, offsets = found.side.columns[:2]
    for number, start in enumerate(range(0, data_len, grain_len)):
        first = next(entry for entry, place in enumerate(places) if place >= start)
        assert int(ids[number]) == first
        assert start + int(offsets[number]) == places[first]


times = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 50)).map(sorted).map(tuple), min_size=1, max_size=9
)


@given(ledgers, grains, times)
@example([b"ten bytes."] * 30, 64, [(9, 9), (1, 1)])
def test_every_grain_has_the_times_of_the_runs_that_begin_in_it(entries, grain_len, spans):
    found = built(entries, grain_len=grain_len, times=spans, run_bytes_max=60)
    places = places_of(entries, found.blocks)
    runs = runs_of(entries, run_bytes_max=60)
    expected: dict[int, list[tuple[int, int]]] = {}
    for number, run in enumerate(runs):
        span = spans[number % len(spans)]
        for entry_id in range(run.first_entry_id, run.last_entry_id + 1):
            expected.setdefault(places[entry_id] // grain_len, []).append(span)
    low, high = found.side.columns[3:]
    for number in range(len(high)):
        here = [span for span in expected.get(number, []) if span[1] > 0]
        between = number not in expected  # inside an entry: what begins around it may count
        if between:
            continue
        assert int(high[number]) == max((span[1] for span in here), default=0)
        assert int(low[number]) == min((span[0] for span in here), default=0)


@given(ledgers, grains, times)
def test_what_was_written_is_read(entries, grain_len, spans):
    side = built(entries, grain_len=grain_len, times=spans).side
    raw = side.encode()
    assert len(raw) == side.header.side_len
    again = SideObject.decode(raw)
    assert again.encode() == raw
    for name in GrainColumns._fields:
        assert np.array_equal(getattr(again.columns, name), getattr(side.columns, name))
    header = again.header
    assert (header.ledger_id, header.uuid, header.entry_count) == (7, ATTEMPT, len(entries))


@given(ledgers, times, st.integers(0, 60))
def test_binary_search_finds_the_grain_of_an_entry_and_of_a_time(entries, spans, wanted_ms):
    grain_len = 64
    found = built(entries * 8, grain_len=grain_len, times=spans)
    header, columns = found.side.header, found.side.columns
    for entry_id, place in enumerate(places_of(entries * 8, found.blocks)):
        page = header.page_of_entry(entry_id)
        assert page == place // grain_len // ROWS_A_PAGE
    late = np.flatnonzero(columns.publish_ms_max >= wanted_ms)
    expected = int(late[0]) // ROWS_A_PAGE if len(late) else None
    assert header.page_of_time(wanted_ms) == expected


hostile_words = st.binary(min_size=8, max_size=8) | st.sampled_from(
    [bytes(8), b"\xff" * 8, b"\x7f" + b"\xff" * 7, b"\x80" + bytes(7), bytes(7) + b"\x01"]
)

GOLD = [bytes([65 + number]) * (number * 5 % 90) for number in range(40)]


def sound() -> bytes:
    return built(GOLD, grain_len=64, times=[(1, 5), (3, 9)]).side.encode()


def test_every_flipped_bit_is_found():
    raw = sound()
    for at in range(len(raw)):
        for bit in (1, 16, 128):
            damaged = raw[:at] + bytes([raw[at] ^ bit]) + raw[at + 1 :]
            with pytest.raises(CorruptError):
                SideObject.decode(damaged)


@given(st.data())
def test_cuts_and_surplus_are_found(data):
    raw = sound()
    at = data.draw(st.integers(0, len(raw) - 1))
    for damaged in (raw[:at], raw[:at] + raw[at + 1 :], raw + b"\0"):
        with pytest.raises(CorruptError):
            SideObject.decode(damaged)


@settings(max_examples=300)
@given(st.binary(max_size=300), st.booleans())
def test_any_bytes_are_refused_or_read_in_bounds(noise, headed):
    raw = sound()
    hostile = raw[:12] + noise if headed else noise
    with pytest.raises(CorruptError):
        SideObject.decode(hostile)


@settings(max_examples=300)
@given(st.data())
def test_pages_made_on_purpose_are_refused_or_mean_what_they_say(data):
    header = SideObject.decode(sound()).header
    start, end = header.page_place(0)
    page = bytearray(sound()[start:end])
    if data.draw(st.booleans()):
        at = data.draw(st.integers(4, len(page) - 8))
        page[at : at + 8] = data.draw(hostile_words)
    else:
        # A little more or less of one entry id or offset.
        count = header.grain_count
        width, start, row = data.draw(st.sampled_from([(8, 32, count), (4, 32 + 8 * count, count)]))
        at = start + width * data.draw(st.integers(0, row - 1))
        moved = int.from_bytes(page[at : at + width], "big") + data.draw(st.integers(-70, 70))
        page[at : at + width] = max(moved, 0).to_bytes(width, "big")
    page[:4] = crc32c(memoryview(page)[4:], header.salt).to_bytes(4, "big")
    try:
        rows = header.decode_page(page, 0)
    except CorruptError:
        return
    assert header.encode_page(0, rows) == page
    ids, size = rows.first_entry_ids.tolist(), header.grain_len
    offsets = rows.entry_offsets.tolist()
    for grain, (entry_id, offset) in enumerate(zip(ids, offsets, strict=True)):
        place = grain * size + offset
        assert (entry_id == header.entry_count) == (place == header.data_len)
        assert entry_id <= header.entry_count
        if grain + 1 < len(ids):
            follower = (grain + 1) * size + offsets[grain + 1]
            if offset >= size:
                assert (ids[grain + 1], follower) == (entry_id, place)
            else:
                assert ids[grain + 1] > entry_id
                assert follower >= place + 12 * (ids[grain + 1] - entry_id)


@pytest.mark.parametrize(("column", "more"), [(0, 1), (0, -1), (1, 1), (1, -1), (1, 64)])
def test_nothing_lies_behind_the_last_entry(column, more):
    side = built([bytes(10)] * 40, grain_len=64).side
    assert side.columns.first_entry_ids[-1] == 40
    damaged = [values.copy() for values in side.columns]
    damaged[column][-1] = int(damaged[column][-1]) + more
    with pytest.raises(CorruptError):
        side.header.encode_page(0, GrainColumns._make(damaged))


@settings(max_examples=300)
@given(st.data())
def test_headers_made_on_purpose_are_refused_or_mean_what_they_say(data):
    raw = bytearray(sound())
    header_len = SideHeader.header_len_at(raw)
    at = data.draw(st.integers(4, header_len - 8))
    raw[at : at + 8] = data.draw(hostile_words)
    crc = crc32c(memoryview(raw)[16:header_len], crc32c(memoryview(raw)[:12]))
    raw[12:16] = crc.to_bytes(4, "big")
    try:
        header = SideHeader.decode(raw)
    except CorruptError:
        return
    assert header.encode() == raw[:header_len]
    assert header.side_len == len(raw)


def test_a_page_of_another_attempt_or_another_place_is_refused():
    entries = [bytes(50)] * 400
    mine = built(entries, grain_len=64).side
    assert mine.header.page_count > 2
    pages = [
        mine.encode()[slice(*mine.header.page_place(number))]
        for number in range(mine.header.page_count)
    ]
    with pytest.raises(CorruptError, match="place of page 1"):
        mine.header.decode_page(pages[0], 1)
    with pytest.raises(CorruptError, match="checksum differs"):
        replace(mine.header, uuid=UUID(int=6)).decode_page(pages[0], 0)


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_joined_checksums_are_those_of_joined_bytes(left, right):
    joined = crc32c_joined(crc32c(left), crc32c(right), len(right))
    assert joined == crc32c(left + right)
    firsts, seconds = (np.array([crc32c(one)] * 3, np.uint32) for one in (left, right))
    assert CrcJoiner(len(right))(firsts, seconds).tolist() == [joined] * 3


def test_grains_grow_with_the_object():
    assert grain_len_for(0) == grain_len_for(2**35) == 64 * 1024
    assert grain_len_for(2**35 + 1) == 128 * 1024
    # The largest object there can be: 10,000 blocks of 2 GiB.
    largest = 10_000 * 2**31
    assert largest / grain_len_for(largest) < 2**20
    assert grain_len_for(largest) <= GRAIN_LEN_MAX
