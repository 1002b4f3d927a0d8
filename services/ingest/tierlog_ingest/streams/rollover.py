"""When a ledger is full, and how much of an append still fits it. Pure.

Invariants:
    * A ledger gets at least one entry, however large.
    * It never gets more than ``entries_max`` entries, and stays below ``bytes_max`` payload bytes
      until its last entry.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np

from tierlog.format.frame import FRAME_HEADER_LEN, Offsets
from tierlog.model.policy import Policy, ledger_bytes_highest


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerLimits:
    """When a stream's ledgers are rolled."""

    bytes_max: int
    entries_max: int
    age_ms_max: int

    @classmethod
    def of(cls, policy: Policy, block_size: int) -> Self:
        """Read the limits from a policy that has every value set.

        Blocks of an open ledger stay as they are, and an object has so many at most: whatever
        the policy says by now, a ledger is full before it can't be offloaded.
        """
        bytes_max, entries_max = policy.ledger_bytes_max, policy.ledger_entries_max
        age_ms_max = policy.ledger_age_ms_max
        assert bytes_max is not None
        assert entries_max is not None
        assert age_ms_max is not None
        bytes_max = min(bytes_max, ledger_bytes_highest(block_size, entries_max))
        return cls(bytes_max=bytes_max, entries_max=entries_max, age_ms_max=age_ms_max)


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerFill:
    """How far an open ledger is. ``length`` counts payload bytes."""

    entry_count: int
    length: int
    age_s: float


def is_due(fill: LedgerFill, limits: LedgerLimits, *, waits: bool) -> bool:
    """Tell whether the ledger is to be sealed; ``waits``: an append does, which is to come first.

    One without entries is due by age alone: it was opened for what was refused then, or given up,
    and it would stand for ever as something that is to be offloaded.
    """
    if fill.entry_count == 0:
        return not waits and fill.age_s * 1000 >= limits.age_ms_max
    return (
        fill.entry_count >= limits.entries_max
        or fill.length >= limits.bytes_max
        or fill.age_s * 1000 >= limits.age_ms_max
    )


def fitting(fill: LedgerFill, limits: LedgerLimits, offsets: Offsets, frames_len: int) -> int:
    """Return how many of the entries framed at ``offsets`` still go into the ledger."""
    count = len(offsets)
    room = min(count, limits.entries_max - fill.entry_count)
    if fill.length + frames_len - FRAME_HEADER_LEN * count >= limits.bytes_max:
        ends = np.append(offsets[1:], frames_len).astype(np.int64)
        payload = ends - FRAME_HEADER_LEN * np.arange(1, count + 1, dtype=np.int64)
        # The entry that reaches the limit is the last one in.
        reached = int(np.searchsorted(payload, limits.bytes_max - fill.length, "left"))
        room = min(room, reached + 1)
    return max(room, 1 if fill.entry_count == 0 else 0)
