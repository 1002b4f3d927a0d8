"""What one call of the disk fetches, against a model that looks at each entry by itself."""

from typing import NamedTuple

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from tierlog_ingest.storage.index.index_format import pack_slot, unpack_slot
from tierlog_ingest.storage.windows import Piece, Window

FIRST = 1000
LEN_MAX = 16 * 1024


class Placed(NamedTuple):
    """So many entries of one run, or none at all; where it lies behind the run before it."""

    entries: int
    length: int
    skipped: int
    log_id: int
    absent: bool


PLACED = st.builds(
    Placed,
    entries=st.integers(1, 6),
    length=st.sampled_from([1, 100, 4096, 4096, 8192, 5000]),
    skipped=st.sampled_from([0, 0, 0, 1, 100_000, -4096, -30_000]),
    log_id=st.sampled_from([1, 1, 1, 1, 2]),
    absent=st.sampled_from([False] * 7 + [True]),
)


def slots_of(placed: list[Placed]) -> list[int]:
    slots, at = list[int](), 200_000
    for one in placed:
        at = max(at + one.skipped, 0)
        slot = 0 if one.absent else pack_slot(one.log_id, at, one.length)
        slots += [slot] * one.entries
        at += 0 if one.absent else one.length
    return slots


def modelled(slots: list[int]) -> tuple[list[Piece], int, bool]:
    """Return the pieces, the entry behind them, and whether something ended the window."""
    pieces: list[Piece] = []
    for entry_id, slot in enumerate(slots, FIRST):
        if pieces and pieces[-1].slot == slot:
            continue
        if not slot:
            return pieces, entry_id, True
        place = unpack_slot(slot)
        if pieces:
            first, last = pieces[0], pieces[-1]
            if (
                place.log_id != unpack_slot(first.slot).log_id
                or place.offset <= last.offset
                or place.offset > last.offset + last.read_len
                or place.offset + place.read_len > first.offset + LEN_MAX
            ):
                return pieces, entry_id, True
        pieces.append(Piece(entry_id, slot, place.offset, place.read_len))
    return pieces, FIRST + len(slots), False


@example([Placed(1, 4096, 0, 1, absent=False)] * 5, [])  # the fourth ends where a window may
@example([Placed(1, 4096, 0, 1, absent=False), Placed(1, 8192, -4096, 1, absent=False)], [])
@given(st.lists(PLACED, max_size=12), st.lists(st.integers(0, 9), max_size=20))
def test_a_window_is_the_same_however_its_slots_come(placed, cuts):
    slots = slots_of(placed)
    window, at = Window(len_max=LEN_MAX), 0
    for count in [*cuts, len(slots)]:
        if not window.full:
            window.extend(np.array(slots[at : at + count], np.uint64), FIRST + at)
            at += count
    pieces, behind, full = modelled(slots)
    assert window.pieces == pieces
    assert window.full == full
    if slots:
        assert window.next_entry_id == behind
    if pieces:
        assert window.log_id == unpack_slot(pieces[0].slot).log_id
        assert window.length == pieces[-1].offset + pieces[-1].read_len - pieces[0].offset
