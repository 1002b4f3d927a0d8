"""The bytes of an index file: slots, pages, the header and its extents (ADR-0014, point 2)."""

from __future__ import annotations

import random
from itertools import pairwise
from struct import pack

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierlog.model.errors import CorruptError
from tierlog.model.ids import EntryId, LedgerId
from tierlog_ingest.storage.index.index_format import (
    EXTENTS_MAX,
    LOG_ID_MAX,
    LOG_OFFSET_MAX,
    PAGE_LEN,
    PAGE_NO_MAX,
    PAGE_WORDS,
    READ_LENS,
    SLOTS_PER_PAGE,
    WORD,
    HeaderPage,
    State,
    add_page,
    check_page,
    clear_page,
    decode_header,
    has_page,
    pack_slot,
    read_len,
    seal_page,
    smallest_gap,
    unpack_slot,
)

pytestmark = pytest.mark.covers("D27")

LENGTHS = st.integers(1, LOG_OFFSET_MAX) | st.builds(
    lambda power, around: max(1, min(LOG_OFFSET_MAX, 2**power + around)),
    st.integers(0, 32),
    st.integers(-4097, 4097),
)
LOG_IDS = st.integers(1, 3) | st.integers(LOG_ID_MAX - 2, LOG_ID_MAX)
OFFSETS = st.integers(0, LOG_OFFSET_MAX)


@given(LOG_IDS, OFFSETS, LENGTHS)
def test_a_slot_says_where_to_read_and_enough(log_id, offset, length):
    slot = pack_slot(log_id, offset, length)
    assert 0 < slot < 2**64
    found = unpack_slot(slot)
    assert (found.log_id, found.offset) == (log_id, offset)
    assert found.read_len == read_len(slot)
    assert length <= found.read_len <= max(length + 4095, length * 9 // 8 + 1)


def test_what_a_hint_means_grows_with_it():
    assert READ_LENS[0] == 0
    assert READ_LENS[1] == 4096
    assert READ_LENS[128] == 512 * 1024
    assert READ_LENS[129] == 9 * 64 * 1024
    assert READ_LENS[136] == 1024 * 1024
    assert READ_LENS[137] == 9 * 128 * 1024
    assert (np.diff(np.array(READ_LENS)) > 0).all()


@pytest.mark.parametrize("place", [(0, 0, 1), (LOG_ID_MAX + 1, 0, 1), (1, 2**32, 1), (1, 0, 0)])
def test_a_place_that_no_log_has_is_a_mistake(place):
    with pytest.raises(AssertionError):
        pack_slot(*place)
    with pytest.raises(AssertionError):
        unpack_slot(0)


# The extents


@given(st.lists(st.integers(0, 40), max_size=40, unique=True))
def test_extents_hold_what_was_added_and_are_apart(page_nos):
    bounds: list[int] = []
    for count, page_no in enumerate(page_nos, 1):
        assert not has_page(bounds, page_no)
        add_page(bounds, page_no)
        assert [one for one in range(-1, 45) if has_page(bounds, one)] == sorted(page_nos[:count])
        assert all(a < b for a, b in pairwise(bounds))
        assert len(bounds) % 2 == 0
        if len(bounds) > 2:
            gap = smallest_gap(bounds)
            assert not has_page(bounds, gap[0])
            assert has_page(bounds, gap[0] - 1)
            assert has_page(bounds, gap[-1] + 1)
            gaps = np.array(bounds[2::2]) - np.array(bounds[1:-1:2])
            assert len(gap) == gaps.min()


# The header

HEADER = HeaderPage(
    ledger_id=LedgerId(7),
    last_add_confirmed=EntryId(5000),
    last_entry_id=EntryId(9 * SLOTS_PER_PAGE + 3),
    bounds=(0, 2, 5, 10),
)


def headers(ledger_id: int = 7):
    pages = st.lists(st.integers(0, PAGE_NO_MAX + 1), max_size=40, unique=True).map(sorted)
    bounds = pages.map(lambda found: tuple(found[: len(found) // 2 * 2]))
    return st.builds(
        lambda bounds, at, confirmed, state: HeaderPage(
            ledger_id=LedgerId(ledger_id),
            last_add_confirmed=EntryId(confirmed),
            last_entry_id=EntryId((bounds[-1] - 1) * SLOTS_PER_PAGE + at if bounds else -1),
            bounds=bounds,
            state=state,
        ),
        bounds,
        st.integers(0, SLOTS_PER_PAGE - 1),
        st.integers(-1, 2**63 - 1),
        st.sampled_from(State),
    )


@given(headers())
def test_a_header_comes_back(header):
    page = header.pack()
    assert len(page) == PAGE_LEN
    assert decode_header(page, LedgerId(7)) == header


def test_a_header_holds_as_many_extents_as_it_says():
    bounds = tuple(range(2 * EXTENTS_MAX))
    last = EntryId((bounds[-1] - 1) * SLOTS_PER_PAGE)
    full = HeaderPage(
        ledger_id=LedgerId(7), last_add_confirmed=last, last_entry_id=last, bounds=bounds
    )
    assert decode_header(full.pack(), LedgerId(7)) == full


def test_every_flipped_byte_and_every_cut_of_a_header_is_found():
    page = HEADER.pack()
    for at in range(PAGE_LEN):
        with pytest.raises(CorruptError):
            decode_header(page[:at], LedgerId(7))
        flipped = bytearray(page)
        flipped[at] ^= 0x40
        with pytest.raises(CorruptError):
            decode_header(flipped, LedgerId(7))
    with pytest.raises(CorruptError, match="another's"):
        decode_header(page, LedgerId(8))


@pytest.mark.parametrize(
    ("offset", "value"),
    [
        (0, b"TLIP"),
        (8, pack(">q", 8)),
        (16, pack(">q", 11)),
        (16, pack(">q", 9)),
        (24, pack(">q", -2)),
        (32, pack(">q", 9 * SLOTS_PER_PAGE - 1)),
        (32, pack(">q", 10 * SLOTS_PER_PAGE)),
        (32, pack(">q", -2)),
        (40, pack(">I", 2)),
        (44, pack(">I", 1)),
        (44, pack(">I", 3)),
        (44, pack(">I", EXTENTS_MAX + 1)),
        (52, pack(">I", 0)),
        (52, pack(">I", 5)),
        (56, pack(">I", 1)),
        (64, b"\1"),
        (4091, b"\1"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused_whatever_its_checksum(offset, value):
    page = bytearray(HEADER.pack())
    page[offset : offset + len(value)] = value
    seal_page(memoryview(page))
    with pytest.raises(CorruptError):
        decode_header(page, LedgerId(7))


# Pages


def sealed_page(ledger_id: int = 7, page_no: int = 3) -> bytearray:
    words = np.empty(PAGE_WORDS, WORD)
    clear_page(words, ledger_id, page_no)
    words[2:510] = np.frombuffer(random.Random(1).randbytes(508 * 8), WORD)
    page = bytearray(words.tobytes())
    seal_page(memoryview(page))
    return page


def test_every_flipped_byte_and_every_cut_of_a_page_is_found():
    page = sealed_page()
    check_page(page, LedgerId(7), 3)
    for at in range(PAGE_LEN):
        with pytest.raises(CorruptError):
            check_page(page[:at], LedgerId(7), 3)
        page[at] ^= 1
        with pytest.raises(CorruptError):
            check_page(page, LedgerId(7), 3)
        page[at] ^= 1


def test_a_page_of_another_place_is_refused():
    with pytest.raises(CorruptError, match="another's"):
        check_page(sealed_page(), LedgerId(7), 4)
    with pytest.raises(CorruptError, match="another's"):
        check_page(sealed_page(), LedgerId(8), 3)
    with pytest.raises(CorruptError):
        check_page(HEADER.pack(), LedgerId(7), 3)
    with pytest.raises(CorruptError):
        check_page(bytes(PAGE_LEN), LedgerId(0), 0)
    page = sealed_page()
    page[4085] = 1
    seal_page(memoryview(page))
    with pytest.raises(CorruptError, match="zeros"):
        check_page(page, LedgerId(7), 3)
