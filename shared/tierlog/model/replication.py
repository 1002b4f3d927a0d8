"""Ledgers that lack copies, and storage nodes that are being emptied (ADR-0016).

Owns what is known of a ledger that is to be replicated again, and how two reports of it become
one. Does not own who reports, nor what a worker does about it.

Invariants:
    * Merging loses no complaint: the merged one covers the nodes, reasons and entries of both.
    * Merging is idempotent, so that whoever does not know whether a report arrived repeats it.
    * A report that comes while a worker is at it is told apart from those that it began with.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, Self

from tierlog.model.ids import LedgerId, NodeId
from tierlog.model.spans import Span

ENTRIES_UNKNOWN: Final = None
"""Which entries a copy lacks is to be found out."""

EntryRange = Span
"""First and last entry, both included."""


class CopyTrouble(StrEnum):
    """Why a node's copy of a ledger is complained about. Other texts mean ``MISSING``."""

    LOST = "lost"
    """The node is gone for longer than it may be."""
    DRAINING = "draining"
    """The node is being emptied."""
    MISSING = "missing"
    """The node lacks runs that it should have."""
    DAMAGED = "damaged"
    """The node has runs that can't be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Complaint:
    """What is wrong with one node's copy; ``entries`` None: to be found out by comparing."""

    node_id: NodeId
    reason: str
    entries: EntryRange | None = ENTRIES_UNKNOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class UnderReplicated:
    """A ledger in the queue. ``version`` is its znode's, and no part of the record."""

    ledger_id: LedgerId
    since_ms: int
    complaints: tuple[Complaint, ...] = ()
    tries: int = 0
    under_work: bool = False
    """A worker began with these very complaints; a report since then has cleared it."""
    last_error: str = ""
    last_error_ms: int = 0
    last_worker: str = ""
    version: int = 0

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        """The nodes that are complained about, sorted."""
        return tuple(sorted({one.node_id for one in self.complaints}))

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why, sorted."""
        return tuple(sorted({one.reason for one in self.complaints}))

    def complained(
        self, reason: str, nodes: Collection[NodeId], entries: EntryRange | None
    ) -> Self:
        """Return the ledger with one more report; the same one where it says nothing new."""
        fresh = (Complaint(node_id=node, reason=reason, entries=entries) for node in nodes)
        merged = merge_complaints((*self.complaints, *fresh))
        return replace(self, complaints=merged, under_work=False)

    def begun(self, worker: str) -> Self:
        """Return the ledger as a worker takes it."""
        return replace(self, under_work=True, tries=self.tries + 1, last_worker=worker)

    def failed(self, error: str, now_ms: int) -> Self:
        """Return the ledger as a worker leaves it that could not make it whole."""
        return replace(self, under_work=False, last_error=error, last_error_ms=now_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draining:
    """A storage node that is being emptied, or was: then its id is never used again."""

    node_id: NodeId
    since_ms: int
    retired_ms: int = 0
    """Since when no ledger names it, and none can be made to; 0: not yet. There is no way back."""
    done_ms: int = 0
    """When it held nothing any more and its identity was removed; 0: not yet."""
    said_empty: bool = False
    """The node itself said so; False: it could not be asked, or nobody did yet."""

    @property
    def is_retired(self) -> bool:
        """Whether no ledger may be made to name the node."""
        return bool(self.retired_ms or self.done_ms)


def merge_complaints(complaints: Iterable[Complaint]) -> tuple[Complaint, ...]:
    """Return one complaint a node, reason and whether the entries are known, in their order."""
    merged: dict[tuple[NodeId, str, bool], Complaint] = {}
    for one in complaints:
        key = (one.node_id, one.reason, one.entries is None)
        known = merged.get(key)
        if known is None or known.entries is None or one.entries is None:
            merged[key] = one
        else:
            first = min(known.entries[0], one.entries[0])
            last = max(known.entries[1], one.entries[1])
            merged[key] = replace(one, entries=(first, last))
    return tuple(merged[key] for key in sorted(merged))
