"""On how many nodes ledgers lie when nobody says otherwise (ADR-0016, "Numbers"). Pure.

Invariant: ``ack quorum <= write quorum <= ensemble size``, and no more than there are nodes.
"""

from typing import Final

COPIES: Final = 3
"""An ensemble of this many nodes, each keeping every entry, where there are as many."""
ACKNOWLEDGING: Final = 2
STRIPE_ENTRIES: Final = 256
"""A run never crosses a stripe: with one entry each they would be as short."""
STRIPE_WHOLE: Final = 2**40
STRIPE_BYTES: Final = 4 * 1024 * 1024
"""What a node is asked for at once ends with its stripes: each costs a request."""
STRIPE_ENTRIES_MIN: Final = 16
STRIPE_ENTRIES_MAX: Final = 2**16


def quorums_of(node_count: int) -> tuple[int, int, int]:
    """Return ensemble size, write and ack quorum: 3/3/2; 2/2/2 of two nodes, 1/1/1 of one."""
    copies = max(1, min(node_count, COPIES))
    return copies, copies, min(copies, ACKNOWLEDGING)


def stripe_entries_of(length: int, entry_count: int, stripe_bytes: int) -> int:
    """Return how many entries make about so many bytes, if they are like these."""
    if entry_count <= 0:
        return STRIPE_ENTRIES
    wanted = stripe_bytes * entry_count // max(1, length)
    return min(max(wanted, STRIPE_ENTRIES_MIN), STRIPE_ENTRIES_MAX)


def stripe_of(ensemble_size: int, write_quorum: int, stripe_entries: int) -> int:
    """Return the stripe of a ledger: where every node gets every entry, runs are never cut."""
    return STRIPE_WHOLE if write_quorum == ensemble_size else stripe_entries
