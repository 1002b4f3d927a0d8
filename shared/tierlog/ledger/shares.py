"""Whose share an entry is: what each node of a ledger's ensembles should hold. Pure.

Invariant: the shares of an ensemble's nodes hold each entry ``write_quorum`` times; what was lost
with an admin's consent is nobody's.
"""

import numpy as np

from tierlog.model.ids import EntryId, NodeId
from tierlog.model.ledger import LedgerMetadata, LedgerState
from tierlog.model.spans import Spans, union, without


def segment_end(metadata: LedgerMetadata, at: int) -> EntryId:
    """Return the last entry of a segment that is not the last one of an unclosed ledger."""
    is_closed = metadata.state is LedgerState.CLOSED
    if at + 1 < len(metadata.segments):
        end = EntryId(metadata.segments[at + 1].first_entry_id - 1)
        return min(end, metadata.last_entry_id) if is_closed else end
    assert is_closed
    return metadata.last_entry_id


def share_of(metadata: LedgerMetadata, at: int, place: int) -> Spans:
    """Return what the node at ``place`` of segment ``at`` should hold (protocols.md 1, "Add").

    Entries whose loss was accepted are nobody's.
    """
    first, last = metadata.segments[at].first_entry_id, segment_end(metadata, at)
    if first > last:
        return []
    size, quorum, stripe_len = (
        metadata.ensemble_size,
        metadata.write_quorum,
        metadata.stripe_entries,
    )
    if size == quorum:
        return without([(first, last)], metadata.lost)
    stripes = np.arange(first // stripe_len, last // stripe_len + 1)
    mine = union(
        (
            EntryId(max(first, stripe * stripe_len)),
            EntryId(min(last, (stripe + 1) * stripe_len - 1)),
        )
        for stripe in stripes[(place - stripes) % size < quorum].tolist()
    )
    return without(mine, metadata.lost)


def shares_of(metadata: LedgerMetadata) -> dict[NodeId, Spans]:
    """Return what each node of a closed ledger should hold of it, over all segments."""
    shares: dict[NodeId, Spans] = {}
    for at, segment in enumerate(metadata.segments):
        for place, node_id in enumerate(segment.ensemble):
            shares[node_id] = union((*shares.get(node_id, []), *share_of(metadata, at, place)))
    return shares
