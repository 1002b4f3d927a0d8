"""What a writer knows of each run on its way and of each node that it sends runs to.

Owns the bookkeeping of answers, and the rule by which a node is slow. Does not own what follows
from either: the writer does.

Invariants:
    * A run's bytes are held until it is confirmed, and no longer: only till then are they sent.
    * ``Replica.owed_bytes`` is the sum of the runs that the node has not answered.
    * A node is slow only beside a healthy one that is not: what stalls all of them, as a pause of
      this very process does, makes none of them slow.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tierlog.format.run import Run
from tierlog.model.errors import TierlogError
from tierlog.model.ids import EntryId, NodeId
from tierlog.ports.storage_node import StorageNodeClient


@dataclass(slots=True, eq=False)
class Sent:
    """A run on its way, until it is confirmed."""

    run: Run | None
    """None: confirmed."""
    first_entry_id: EntryId
    last_entry_id: EntryId
    size: int
    deadline_s: float
    acked: set[NodeId] = field(default_factory=set)

    @classmethod
    def of(cls, run: Run, deadline_s: float) -> "Sent":
        """Note a run that is being sent."""
        size = len(run.encoded)
        return cls(run, run.first_entry_id, run.last_entry_id, size, deadline_s)


class Owed(NamedTuple):
    """A run, its answer to come, and when it was sent."""

    sent: Sent
    answer: Awaitable[None]
    sent_s: float


@dataclass(slots=True, eq=False)
class Replica:
    """One node of the ensemble, with the answers that it still owes."""

    node_id: NodeId
    client: StorageNodeClient | None
    """None: a node that could not be reached when the ledger was opened stands here."""
    owed: deque[Owed] = field(default_factory=deque)
    owes: asyncio.Event = field(default_factory=asyncio.Event)
    owed_bytes: int = 0
    failed: bool = False
    """Nothing more is sent to it."""
    cause: TierlogError | None = None
    """What it failed of."""
    slow: bool = False
    late_count: int = 0
    """How many times in a row it was found to be late."""
    task: asyncio.Task[None] | None = None

    def owe(self, sent: Sent, answer: Awaitable[None], now_s: float) -> None:
        """Count a run in."""
        self.owed.append(Owed(sent, answer, now_s))
        self.owed_bytes += sent.size
        self.owes.set()

    def settle(self) -> None:
        """Count the oldest run out: it was answered."""
        self.owed_bytes -= self.owed.popleft().sent.size
        assert self.owed_bytes >= 0

    def give_up(self) -> None:
        """Wait for no answer any more."""
        for owed in self.owed:
            if isinstance(owed.answer, asyncio.Future):
                owed.answer.cancel()
                if owed.answer.done() and not owed.answer.cancelled():
                    owed.answer.exception()  # nobody is left to look at it
        self.owed.clear()
        self.owed_bytes = 0

    def age_s(self, now_s: float) -> float:
        """Return for how long the oldest answer is owed; 0: none is."""
        return now_s - self.owed[0].sent_s if self.owed else 0.0

    @property
    def owes_confirmed(self) -> bool:
        """Whether a run was confirmed without its answer."""
        return bool(self.owed) and self.owed[0].sent.run is None


def late_nodes(
    replicas: Sequence[Replica], now_s: float, *, slow_node_s: float, factor: float
) -> list[Replica]:
    """Return the nodes that are far behind the slowest healthy one beside them.

    Far is more than ``slow_node_s``, and more than ``factor`` times as long as that other node.
    """
    healthy = [one for one in replicas if not one.failed]
    ages = {one.node_id: one.age_s(now_s) for one in healthy}
    late: list[Replica] = []
    for one in healthy:
        beside = [age for node_id, age in ages.items() if node_id != one.node_id]
        if beside and ages[one.node_id] > max(slow_node_s, factor * max(beside)):
            late.append(one)
    return late
