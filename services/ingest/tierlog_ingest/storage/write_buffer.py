"""Runs that no entry log has yet: found by readers, taken by the flush. Pure.

Owns: finding, taking back, and what a flush takes. Does not own when: the node decides.

Invariants:
    * Runs of a ledger don't overlap; a run that comes again is the same one, or it is refused.
    * ``bytes`` counts every run held with what it costs beside its encoding.
    * ``roll_back`` and ``snapshot`` never meet: the one takes what was not stored, the other what
      is durable.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from operator import attrgetter
from typing import Final, NamedTuple

from tierlog.format.run import Run
from tierlog.model.errors import CorruptError
from tierlog.model.ids import NO_ENTRY, EntryId, LedgerId
from tierlog.model.spans import Spans

# Objects of a run beside its bytes: the run, its header, three views, its offsets, its place here.
RUN_OVERHEAD: Final = 1024


class _Held(NamedTuple):
    first_entry_id: int
    seq: int
    run: Run


_FIRST: Final = attrgetter("first_entry_id")


class WriteBuffer:
    """Runs by ledger and entry."""

    def __init__(self) -> None:
        self._ledgers: dict[int, list[_Held]] = {}
        self.bytes = 0
        """What the runs cost in memory."""

    def __len__(self) -> int:
        return sum(map(len, self._ledgers.values()))

    def __repr__(self) -> str:
        return f"<WriteBuffer ledgers={len(self._ledgers)} runs={len(self)} bytes={self.bytes}>"

    def add(self, run: Run, seq: int) -> bool:
        """Take a run in; False when it is there already. ``CorruptError`` on a conflict."""
        ledger_id, first = run.header.ledger_id, run.first_entry_id
        held = self._ledgers.get(ledger_id)
        if held is None:
            self._ledgers[ledger_id] = [_Held(first, seq, run)]
        else:
            before = held[-1]
            if first > before.run.last_entry_id:
                held.append(_Held(first, seq, run))
            elif self._is_there(held, run):
                return False
            else:
                insort(held, _Held(first, seq, run), key=_FIRST)
        self.bytes += len(run.encoded) + RUN_OVERHEAD
        return True

    def find(self, ledger_id: int, entry_id: int) -> Run | None:
        """Return the run that holds an entry."""
        held = self._ledgers.get(ledger_id, ())
        at = bisect_right(held, entry_id, key=_FIRST) - 1
        return held[at].run if at >= 0 and entry_id <= held[at].run.last_entry_id else None

    def first_after(self, ledger_id: int, entry_id: int) -> EntryId | None:
        """Return the lowest entry held above ``entry_id``."""
        held = self._ledgers.get(ledger_id, ())
        at = bisect_right(held, entry_id, key=_FIRST)
        if at and entry_id < held[at - 1].run.last_entry_id:
            return EntryId(entry_id + 1)
        return EntryId(held[at].first_entry_id) if at < len(held) else None

    def last_entry_id(self, ledger_id: int) -> EntryId:
        """Return the highest entry held; -1 when there is none."""
        held = self._ledgers.get(ledger_id)
        return held[-1].run.last_entry_id if held else NO_ENTRY

    def spans(self, ledger_id: int) -> Spans:
        """Return the entries held of a ledger, run by run."""
        held = self._ledgers.get(ledger_id, ())
        return [(one.run.first_entry_id, one.run.last_entry_id) for one in held]

    def ledger_ids(self) -> set[LedgerId]:
        """Return the ledgers that have runs here."""
        return {LedgerId(one) for one in self._ledgers}

    def roll_back(self, seq: int) -> None:
        """Forget runs that were not stored: those with this number, and above."""
        for ledger_id, held in list(self._ledgers.items()):
            if any(one.seq >= seq for one in held):
                self._keep(ledger_id, [one for one in held if one.seq < seq])

    def snapshot(self, durable_seq: int) -> list[Run]:
        """Return what is durable in the journal, by ledger and entry; it stays here."""
        ledgers = self._ledgers
        return [
            one.run
            for ledger_id in sorted(ledgers)
            for one in ledgers[ledger_id]
            if one.seq <= durable_seq
        ]

    def drop(self, runs: Sequence[Run]) -> None:
        """Forget runs that the index knows now; those that are gone already don't matter."""
        at = 0
        while at < len(runs):
            at += max(1, self._drop_together(runs, at))

    def _drop_together(self, runs: Sequence[Run], at: int) -> int:
        """Drop the runs from ``at`` on that lie together here; return how many."""
        ledger_id = runs[at].header.ledger_id
        held = self._ledgers.get(ledger_id)
        if held is None:
            return 0
        start = end = (
            0 if held[0].run is runs[at] else bisect_left(held, runs[at].first_entry_id, key=_FIRST)
        )
        while (
            end < len(held)
            and at + end - start < len(runs)
            and held[end].run is runs[at + end - start]
        ):
            self.bytes -= len(held[end].run.encoded) + RUN_OVERHEAD
            end += 1
        if end - start == len(held):
            del self._ledgers[ledger_id]
        else:
            del held[start:end]
        return end - start

    def forget_ledger(self, ledger_id: int) -> None:
        """Forget all of a ledger."""
        self._keep(ledger_id, [])

    def _keep(self, ledger_id: int, kept: list[_Held]) -> None:
        gone = _cost(self._ledgers.pop(ledger_id, [])) - _cost(kept)
        assert gone >= 0
        self.bytes -= gone
        if kept:
            self._ledgers[ledger_id] = kept

    def _is_there(self, held: Sequence[_Held], run: Run) -> bool:
        at = bisect_right(held, run.last_entry_id, key=_FIRST) - 1
        if at < 0 or held[at].run.last_entry_id < run.first_entry_id:
            return False
        known = held[at].run
        if known == run:
            return True
        raise CorruptError(
            f"entries {run.first_entry_id} to {run.last_entry_id} of ledger"
            f" {run.header.ledger_id} differ from those that the node has"
            f" ({known.first_entry_id} to {known.last_entry_id})",
            remedy="Find out who writes this ledger beside its owner; nothing was stored",
            details={
                "ledger_id": str(run.header.ledger_id),
                "entry_id": str(run.first_entry_id),
            },
        )


def _cost(held: Sequence[_Held]) -> int:
    return sum(len(one.run.encoded) + RUN_OVERHEAD for one in held)
