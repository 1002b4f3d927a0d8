"""How many bytes of each ledger an entry log holds: sorted columns, 12 bytes a ledger.

Owns: counting, forgetting, and the columns that are written. Does not own how they are written:
``entry_log_format`` does.

Invariants:
    * ``total`` is the sum of all sizes; a ledger without bytes is not in the map.
    * Adding is amortised: what was added waits in ``_waiting`` until somebody asks, or until it is
      longer than half of what is there.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Sizes = NDArray[np.int64]

_WAITING_MIN: Final = 1024


class LedgerMap(Mapping[int, int]):
    """Bytes by ledger id. Read as any mapping; written by ``add`` and ``forget``."""

    __slots__ = ("_dead", "_ids", "_sizes", "_waiting", "_waiting_len", "total")

    def __init__(self, sizes: Mapping[int, int] | None = None) -> None:
        self._ids: NDArray[np.int64] = np.empty(0, np.int64)
        # An entry log is shorter than 4 GiB, or holds a single run.
        self._sizes: NDArray[np.uint32] = np.empty(0, np.uint32)
        self._waiting: list[tuple[Ids, Sizes]] = []
        self._waiting_len = 0
        self._dead = 0
        """Rows of size 0: ledgers that were forgotten."""
        self.total = 0
        if isinstance(sizes, LedgerMap):
            self.add(*sizes.columns())
        elif sizes:
            count = len(sizes)
            self.add(
                np.fromiter(sizes, np.int64, count), np.fromiter(sizes.values(), np.int64, count)
            )

    def __getitem__(self, ledger_id: int) -> int:
        at = self._find(ledger_id)
        if at is None or not self._sizes[at]:
            raise KeyError(ledger_id)
        return int(self._sizes[at])

    def __iter__(self) -> Iterator[int]:
        return iter(self.columns()[0].tolist())

    def __len__(self) -> int:
        self._settle()
        return len(self._ids) - self._dead

    def __repr__(self) -> str:
        return f"<LedgerMap ledgers={len(self)} total={self.total}>"

    def columns(self) -> tuple[Ids, Sizes]:
        """Return ids, ascending, and their sizes: copies."""
        self._settle()
        held = self._sizes > 0
        return self._ids[held], self._sizes[held].astype(np.int64)

    def add(self, ids: Ids, sizes: Sizes) -> None:
        """Count ``sizes`` bytes more; ids come in any order, and may repeat."""
        if len(ids) == 0:
            return
        assert int(sizes.min()) > 0
        self._waiting.append((ids, sizes))
        self._waiting_len += len(ids)
        self.total += int(sizes.sum())
        if self._waiting_len > max(_WAITING_MIN, len(self._ids) // 2):
            self._settle()

    def merge(self, other: "LedgerMap") -> None:
        """Add all of ``other``."""
        self.add(*other.columns())

    def forget(self, ids: Ids) -> None:
        """Drop ledgers, some of which may not be here."""
        self._settle()
        if len(self._ids) == 0 or len(ids) == 0:
            return
        at = np.minimum(self._ids.searchsorted(ids), len(self._ids) - 1)
        found = np.unique(at[self._ids[at] == ids])
        sizes = self._sizes[found]
        self._sizes[found] = 0
        self.total -= int(sizes.sum(dtype=np.int64))
        self._dead += int(np.count_nonzero(sizes))
        if self._dead > len(self._ids) // 2:
            # Rarely, since each time costs a copy of the columns.
            self._ids, sizes = self.columns()
            self._sizes = sizes.astype(np.uint32)
            self._dead = 0

    def agrees_with(self, other: "LedgerMap") -> bool:
        """Tell whether every ledger of ``other`` has just as many bytes here."""
        ids, sizes = other.columns()
        own_ids, own_sizes = self.columns()
        if len(ids) == 0:
            return True
        if len(own_ids) < len(ids):
            return False
        at = np.minimum(own_ids.searchsorted(ids), len(own_ids) - 1)
        return bool(((own_ids[at] == ids) & (own_sizes[at] == sizes)).all())

    def _find(self, ledger_id: int) -> int | None:
        self._settle()
        at = int(self._ids.searchsorted(ledger_id))
        return at if at < len(self._ids) and self._ids[at] == ledger_id else None

    def _settle(self) -> None:
        if not self._waiting:
            return
        ids = np.concatenate([self._ids, *(one for one, _ in self._waiting)])
        sizes = np.concatenate([self._sizes, *(one for _, one in self._waiting)])
        self._waiting.clear()
        self._waiting_len = 0
        order = np.argsort(ids, kind="stable")
        ids, sizes = ids[order], sizes[order].astype(np.int64)
        starts = np.flatnonzero(np.append(True, ids[1:] != ids[:-1]))
        self._ids = ids[starts]
        sums = np.add.reduceat(sizes, starts)
        assert int(sums.max()) < 2**32
        self._sizes = sums.astype(np.uint32)
        self._dead = int(np.count_nonzero(sums == 0))


def all_ids(maps: Iterable[LedgerMap]) -> set[int]:
    """Return every ledger that is in any of ``maps``."""
    columns = [one.columns()[0] for one in maps]
    return set(np.unique(np.concatenate(columns)).tolist()) if columns else set()
