"""Which bytes of which entry log to read for a range of one ledger's entries. Pure.

Owns: turning slots into one window that a single call of the disk fetches, and the window's bytes
into runs. Does not own reading (``range_reader``).

Invariants:
    * Runs lie in the window in the order of their entries, none far from the one before it.
    * Each run that comes out of a window was verified by its checksum, and holds the entry that
      its slot stands for.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierlog.format.run import Run, take_runs
from tierlog.model.errors import CorruptError
from tierlog.ports.files import Buffer
from tierlog_ingest.storage.index.index_format import unpack_slot

Slots = NDArray[np.uint64]


class Piece(NamedTuple):
    """One run in a window."""

    entry_id: int
    slot: int
    offset: int
    """In the log."""
    read_len: int


class Window:
    """Grows by slots until it is ``full``: by its length, a gap, another log, an absent entry."""

    __slots__ = ("_len_max", "_slot_before", "full", "log_id", "next_entry_id", "pieces")

    def __init__(self, *, len_max: int) -> None:
        self._len_max = len_max
        self._slot_before = -1
        self.log_id = 0
        self.pieces: list[Piece] = []
        self.full = False
        self.next_entry_id = 0
        """The first entry behind the window, as far as slots tell."""

    def __repr__(self) -> str:
        return f"<Window log {self.log_id}, {len(self.pieces)} runs, {self.length} bytes>"

    @property
    def offset(self) -> int:
        """Where the window begins in its log."""
        return self.pieces[0].offset

    @property
    def length(self) -> int:
        """How much to read; the log may end before."""
        if not self.pieces:
            return 0
        return self.pieces[-1].offset + self.pieces[-1].read_len - self.pieces[0].offset

    def extend(self, slots: Slots, first_entry_id: int) -> None:
        """Take in the slots of the entries from ``first_entry_id`` on."""
        if not len(slots):
            return
        # Entries of one run have one slot: a step for each run, not for each entry.
        starts = (np.flatnonzero(slots[1:] != slots[:-1]) + 1).tolist()
        if slots.item(0) != self._slot_before:
            starts.insert(0, 0)
        for start, slot in zip(starts, slots[starts].tolist(), strict=True):
            if not (slot and self._takes(first_entry_id + start, slot)):
                self.full = True
                self.next_entry_id = first_entry_id + start
                return
        self.next_entry_id = first_entry_id + len(slots)
        self._slot_before = slots.item(-1)

    def _takes(self, entry_id: int, slot: int) -> bool:
        """Take a run if it may lie in one window with those before it; say whether."""
        log_id, offset, read_len = unpack_slot(slot)
        pieces = self.pieces
        if not pieces:
            self.log_id = log_id
        else:
            last = pieces[-1]
            if not (
                log_id == self.log_id
                and last.offset < offset <= last.offset + last.read_len
                and offset + read_len - pieces[0].offset <= self._len_max
            ):
                return False
        pieces.append(Piece(entry_id, slot, offset, read_len))
        return True

    def decode(self, data: Buffer, *, ledger_id: int) -> list[Run]:
        """Return the window's runs, up to a gap; ``CorruptError`` when the first one is bad.

        A bad run further on ends the list: who asks for it by itself gets the error.
        """
        view, origin = memoryview(data), self.offset
        together = _together(view) if len(self.pieces) > 1 else {}
        runs: list[Run] = []
        for piece in self.pieces:
            if runs and piece.entry_id != runs[-1].last_entry_id + 1:
                if piece.entry_id <= runs[-1].last_entry_id:
                    continue  # a later run took some of its entries
                break
            start = piece.offset - origin
            try:
                run = together.get(start) or _decode(view[start:])
                runs.append(_checked(run, piece, ledger_id))
            except CorruptError:
                if not runs:
                    raise
                break
        return runs


def _together(view: memoryview) -> dict[int, Run]:
    """Return the good runs that lie back to back, by where they begin: quicker than singly."""
    found, at = dict[int, Run](), 0
    for run in take_runs(view).runs:
        found[at] = run
        at += len(run.encoded)
    return found


def _decode(data: memoryview) -> Run:
    return Run.decode(data[: Run.encoded_len(data, len_max=len(data))])


def _checked(run: Run, piece: Piece, ledger_id: int) -> Run:
    """Return the run if it is the one that the slot stands for."""
    holds = run.first_entry_id <= piece.entry_id <= run.last_entry_id
    if run.header.ledger_id != ledger_id or not holds:
        raise CorruptError(
            f"another run lies at byte {piece.offset} of the entry log, where entry"
            f" {piece.entry_id} of ledger {ledger_id} belongs",
            remedy="Read another copy",
        )
    return run
