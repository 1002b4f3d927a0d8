"""What is to be done for a ledger that lacks copies, and which nodes count as lost. Pure.

Owns the judgements: which node is lost, which copy is compared, moved or waited for. Does not own
whose share an entry is (``tierlog.ledger.shares``), nor looking (``auditor``, ``checking``), nor
copying (``worker``).

Invariants:
    * A node that was seen live, or not looked at, within ``delay_s`` is not lost.
    * A copy is moved only off a node that is draining, or lost by an auditor's word; off one that
      is merely away it is not: it may come back with all it has.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from tierlog.ledger.shares import share_of
from tierlog.model.ids import EntryId, LedgerId, NodeId
from tierlog.model.ledger import LedgerMetadata, LedgerState
from tierlog.model.replication import CopyTrouble, UnderReplicated
from tierlog.model.spans import Span, Spans, common, union

BACKOFF_DOUBLINGS_MAX: Final = 16


class Fate(Enum):
    """What becomes of a node's copy."""

    COMPARED = "the node is live: what it lacks is copied to it"
    MOVED = "another node gets all of it and takes the node's place"
    AWAITED = "the node is away, and may come back"


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """One node's copy of one segment."""

    first_entry_id: EntryId
    """Which segment."""
    at: int
    """The node's place in the ensemble."""
    node_id: NodeId
    fate: Fate
    share: tuple[Span, ...]
    """What the node should hold."""
    suspect: tuple[Span, ...] = ()
    """What it holds and can't be trusted."""


def fate_of(
    node_id: NodeId,
    *,
    live: Collection[NodeId],
    draining: Collection[NodeId],
    lost: Collection[NodeId],
) -> Fate:
    """Judge one node's copies."""
    if node_id in draining:
        return Fate.MOVED
    if node_id in live:
        return Fate.COMPARED
    return Fate.MOVED if node_id in lost else Fate.AWAITED


def copies_of(
    metadata: LedgerMetadata,
    queued: UnderReplicated,
    *,
    live: Collection[NodeId],
    draining: Collection[NodeId],
) -> list[Copy]:
    """Return every copy of a ledger, and what becomes of it.

    Of one that is not closed, those before its last segment.
    """
    lost = complained_nodes(queued, CopyTrouble.LOST)
    is_closed = metadata.state is LedgerState.CLOSED
    copies: list[Copy] = []
    for at, segment in enumerate(metadata.segments if is_closed else metadata.segments[:-1]):
        for place, node_id in enumerate(segment.ensemble):
            share = share_of(metadata, at, place)
            copies.append(
                Copy(
                    first_entry_id=segment.first_entry_id,
                    at=place,
                    node_id=node_id,
                    fate=fate_of(node_id, live=live, draining=draining, lost=lost),
                    share=tuple(share),
                    suspect=tuple(common(share, _suspect(queued, node_id))),
                )
            )
    return copies


def _suspect(queued: UnderReplicated, node_id: NodeId) -> Spans:
    return union(
        one.entries
        for one in queued.complaints
        if one.node_id == node_id and one.entries is not None
    )


def is_suspect(queued: UnderReplicated, node_id: NodeId, entry_id: EntryId) -> bool:
    """Tell whether a node's copy of an entry is complained about."""
    return any(first <= entry_id <= last for first, last in _suspect(queued, node_id))


def complained_nodes(queued: UnderReplicated, *reasons: str) -> frozenset[NodeId]:
    """Return the nodes that are complained about for one of ``reasons``."""
    return frozenset(one.node_id for one in queued.complaints if one.reason in reasons)


def named_nodes(metadata: LedgerMetadata) -> frozenset[NodeId]:
    """Return every node that a ledger's ensembles name."""
    return metadata.named_nodes


class Absences:
    """Since when each node is away, on a clock that only moves forward."""

    def __init__(self) -> None:
        self._since_s: dict[NodeId, float] = {}

    def __repr__(self) -> str:
        return f"<Absences of {sorted(self._since_s)}>"

    def note(self, known: Collection[NodeId], live: Collection[NodeId], now_s: float) -> None:
        """Take note of who is live now; ``known`` are those that might be."""
        for node_id in list(self._since_s):
            if node_id in live or node_id not in known:
                del self._since_s[node_id]
        for node_id in known:
            if node_id not in live:
                self._since_s.setdefault(node_id, now_s)

    def longer_than(self, delay_s: float, now_s: float) -> frozenset[NodeId]:
        """Return the nodes that are away for so long."""
        return frozenset(
            node_id for node_id, since_s in self._since_s.items() if now_s - since_s >= delay_s
        )

    def next_s(self, delays_s: Collection[float], now_s: float) -> float | None:
        """Return in how many seconds a node will have been away for one of ``delays_s``."""
        due = (
            since_s + delay_s - now_s for since_s in self._since_s.values() for delay_s in delays_s
        )
        return min((one for one in due if one > 0), default=None)


def complaints_of(
    metadata: LedgerMetadata,
    *,
    lost: Collection[NodeId],
    lost_long: Collection[NodeId],
    draining: Collection[NodeId],
) -> Mapping[CopyTrouble, frozenset[NodeId]]:
    """Return what an auditor reports of a ledger: lost nodes, and those being emptied.

    ``lost_long``: for the grace time too, after which a ledger that stands open is not left to its
    owner any more.
    """
    named = named_nodes(metadata)
    gone = lost if metadata.state is LedgerState.CLOSED else lost_long
    found = {
        CopyTrouble.LOST: named.intersection(gone),
        CopyTrouble.DRAINING: named.intersection(draining),
    }
    return {trouble: nodes for trouble, nodes in found.items() if nodes}


def is_due(
    queued: UnderReplicated, now_ms: int, *, backoff_s_first: float, backoff_s_max: float
) -> bool:
    """Tell whether a ledger may be tried again; a clock that went back holds nothing up."""
    if not queued.last_error_ms or queued.last_error_ms > now_ms:
        return True
    doublings = min(max(queued.tries - 1, 0), BACKOFF_DOUBLINGS_MAX)
    backoff_s = min(backoff_s_max, backoff_s_first * float(2**doublings))
    return now_ms - queued.last_error_ms >= 1000 * backoff_s


def in_order(queue: Collection[UnderReplicated], own_start: LedgerId) -> list[UnderReplicated]:
    """Return the queue, least tried first; workers begin at places of their own."""
    return sorted(queue, key=lambda one: (one.tries, one.ledger_id < own_start, one.ledger_id))
