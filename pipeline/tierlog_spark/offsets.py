"""Offsets of a streaming read, and how far one batch goes (pure).

    {"orders": "12:345@0f8fad5b-d9cb-469f-a165-70867728950e"}
                            for each stream the next position to read, and the stream's incarnation

Where no incarnation stands, as in checkpoints of earlier versions, any stream of that name is it.
A position right behind the last entry of a closed ledger is written as the first one of the next
id, ``13:0``, whether or not that ledger is of the stream: so an offset lies in a trimmed ledger
only if entries were trimmed that nobody had read, or if the ledger was open when it was made.
``0:0`` is before everything.

Invariants:
    * Offsets only grow, and never pass what is readable when they are made.
    * A batch takes one entry at least, if there is one, whatever its limits.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from tierlog.model.errors import RefusedError
from tierlog.model.ids import EntryId, LedgerId, StreamName, stream_name
from tierlog.model.position import Position

Offsets = Mapping[StreamName, Position]
BEGINNING: Final = Position(LedgerId(0), EntryId(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadableLedger:
    """A ledger that can be read now, and how much it holds."""

    ledger_id: LedgerId
    entry_count: int
    length: int
    closed: bool = True
    """More comes into one that is not; it is the last."""


@dataclass(slots=True)
class Budget:
    """What one batch may still take; None: no limit. Bytes are those of entries, about."""

    entries: int | None = None
    length: int | None = None
    taken: int = 0

    def take(self, ledger: ReadableLedger, first: int) -> int:
        """Take entries of a ledger from ``first`` on; return how many."""
        count = ledger.entry_count - first
        each = max(1, -(-ledger.length // ledger.entry_count))
        if self.entries is not None:
            count = min(count, self.entries)
        if self.length is not None:
            count = min(count, self.length // each)
        if count <= 0 and self.taken == 0:
            count = 1
        count = max(0, count)
        self.taken += count
        if self.entries is not None:
            self.entries -= count
        if self.length is not None:
            self.length -= count * each
        return count


def normal(ledger: ReadableLedger, entry_id: int) -> Position:
    """Return a position of a ledger; behind the last entry of a closed one the next id's first."""
    if entry_id >= ledger.entry_count and ledger.closed:
        return Position(LedgerId(ledger.ledger_id + 1), EntryId(0))
    return Position(ledger.ledger_id, EntryId(entry_id))


def advanced(start: Position, ledgers: Iterable[ReadableLedger], budget: Budget) -> Position:
    """Return how far a stream is read from ``start`` on."""
    where = start
    for one in ledgers:
        if one.ledger_id < where.ledger_id or one.entry_count == 0:
            continue
        first = where.entry_id if one.ledger_id == where.ledger_id else 0
        if first >= one.entry_count:
            where = normal(one, first)
            continue
        count = budget.take(one, first)
        if count == 0:
            return where
        where = normal(one, first + count)
        if where.ledger_id == one.ledger_id:
            return where
    return where


def advanced_all(
    start: Offsets, readable: Mapping[StreamName, Sequence[ReadableLedger]], budget: Budget
) -> dict[StreamName, Position]:
    """Return how far all streams are read: those that are furthest behind take first."""
    found = dict(start)
    for name in sorted(found, key=lambda name: (found[name], name)):
        found[name] = advanced(found[name], readable.get(name, ()), budget)
    return found


def capped(start: Offsets, offsets: Offsets, target: Offsets) -> dict[StreamName, Position]:
    """Return offsets that don't pass a target; a stream that it doesn't have stays at its start."""
    return {
        name: max(start[name], min(where, target.get(name, start[name])))
        for name, where in offsets.items()
    }


def to_json(
    offsets: Offsets, incarnations: Mapping[StreamName, UUID | None] | None = None
) -> dict[str, str]:
    """Return offsets as a checkpoint has them."""
    known = incarnations or {}
    return {
        name: str(where) if known.get(name) is None else f"{where}@{known[name]}"
        for name, where in sorted(offsets.items())
    }


def from_json(found: Mapping[str, str]) -> dict[StreamName, Position]:
    """Read offsets of a checkpoint, or raise ``RefusedError``."""
    try:
        return {
            stream_name(name): Position.parse(text.partition("@")[0])
            for name, text in found.items()
        }
    except (RefusedError, AttributeError) as error:
        raise _unreadable(found, error) from error


def incarnations_in(found: Mapping[str, str]) -> dict[StreamName, UUID]:
    """Return which streams a checkpoint's offsets are of, or raise ``RefusedError``."""
    try:
        said = {name: text.partition("@")[2] for name, text in found.items()}
        return {stream_name(name): UUID(text) for name, text in said.items() if text}
    except (RefusedError, AttributeError, ValueError) as error:
        raise _unreadable(found, error) from error


def is_another(incarnation: UUID | None, other: UUID | None) -> bool:
    """Tell whether two incarnations are surely not the same; None: it is not known which."""
    return incarnation is not None and other is not None and incarnation != other


def _unreadable(found: Mapping[str, str], error: Exception) -> RefusedError:
    return RefusedError(
        f"the checkpoint's offset {dict(found)!r} can't be read: {error}",
        remedy="Begin a new checkpoint with the option start",
    )
