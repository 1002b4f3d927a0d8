"""Where in a ledger's file each run lies: sorted columns in memory, 32 bytes a run.

Owns: finding, inserting, and taking back of the newest. Pure; knows no file.

Invariants:
    * Runs don't overlap, and are in the order of their first entry ids.
    * A run that comes again is the same one, or it is refused.
"""

from array import array
from bisect import bisect_right
from typing import NamedTuple

from tierlog.format.run import CRC_LEN, CRC_OFFSET, Run
from tierlog.model.errors import CorruptError
from tierlog.model.ids import NO_ENTRY, EntryId


class Place(NamedTuple):
    """One run in the index."""

    first_entry_id: int
    last_entry_id: int
    offset: int
    length: int
    crc: int


class RunIndex:
    """The runs of one ledger on this node."""

    def __init__(self) -> None:
        self._first = array("q")
        self._last = array("q")
        self._offset = array("q")
        self._length = array("I")
        self._crc = array("I")

    def __len__(self) -> int:
        return len(self._first)

    def __repr__(self) -> str:
        return f"<RunIndex runs={len(self)} last={self.last_entry_id}>"

    def __getitem__(self, at: int) -> Place:
        return Place(
            self._first[at], self._last[at], self._offset[at], self._length[at], self._crc[at]
        )

    @property
    def last_entry_id(self) -> EntryId:
        """The highest entry id; -1 when there is none."""
        return EntryId(self._last[-1]) if self._last else NO_ENTRY

    def find(self, entry_id: int) -> int | None:
        """Return which run holds ``entry_id``."""
        at = bisect_right(self._first, entry_id) - 1
        return at if at >= 0 and entry_id <= self._last[at] else None

    def insert(self, run: Run, offset: int) -> bool:
        """Take note of a run; False when it is there already. ``CorruptError`` on a conflict."""
        first, last, length = run.first_entry_id, run.last_entry_id, len(run.encoded)
        at = bisect_right(self._first, last)
        if at and self._last[at - 1] >= first:
            known = self[at - 1]
            if known == (first, last, known.offset, length, crc_of(run)):
                return False
            raise CorruptError(
                f"entries {first} to {last} of ledger {run.header.ledger_id} differ from those"
                f" that the node has ({known.first_entry_id} to {known.last_entry_id})",
                remedy="Find out who writes this ledger beside its owner; nothing was stored",
                details={"ledger_id": str(run.header.ledger_id), "entry_id": str(first)},
            )
        self._first.insert(at, first)
        self._last.insert(at, last)
        self._offset.insert(at, offset)
        self._length.insert(at, length)
        self._crc.insert(at, crc_of(run))
        return True

    def drop_from(self, offset: int) -> None:
        """Forget the runs that lie at ``offset`` and behind it in the file."""
        kept = [at for at, found in enumerate(self._offset) if found < offset]
        for name in ("_first", "_last", "_offset", "_length", "_crc"):
            column = getattr(self, name)
            setattr(self, name, array(column.typecode, [column[at] for at in kept]))


def crc_of(run: Run) -> int:
    """Return the checksum that a run carries."""
    return int.from_bytes(run.encoded[CRC_OFFSET : CRC_OFFSET + CRC_LEN], "big")
