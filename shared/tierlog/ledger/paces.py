"""How fast storage nodes answer, as one process sees it. Pure: the time is an argument.

Invariants:
    * Nodes that are about as fast as the fastest keep their order, so that what a write set's
      order spreads over nodes stays spread.
    * A node that failed lately comes last.
    * What was measured long ago counts for nothing: the node is tried again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tierlog.model.ids import NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceLimits:
    """Every bound of it."""

    weight: float = 0.2
    """How much a new answer counts beside all those before it."""
    remembered_s: float = 30.0
    failed_s: float = 10.0
    equal_factor: float = 2.0
    equal_s: float = 0.005
    unknown_s: float = 0.05
    """What a node is taken for whose pace isn't known."""


@dataclass(slots=True)
class _Pace:
    smoothed_s: float
    measured_s: float


class Paces:
    """Smoothed times to the first bytes of a read, by node."""

    def __init__(self, limits: PaceLimits | None = None) -> None:
        self._limits = limits or PaceLimits()
        self._paces: dict[NodeId, _Pace] = {}
        self._failed_s: dict[NodeId, float] = {}

    def __repr__(self) -> str:
        paces = {one: round(pace.smoothed_s, 4) for one, pace in sorted(self._paces.items())}
        return f"<Paces {paces} failed={sorted(self._failed_s)}>"

    def answered(self, node_id: NodeId, took_s: float, *, now_s: float) -> None:
        """Take notice of an answer."""
        self._failed_s.pop(node_id, None)
        known = self._known(node_id, now_s)
        if known is None:
            self._paces[node_id] = _Pace(took_s, now_s)
        else:
            known.smoothed_s += self._limits.weight * (took_s - known.smoothed_s)
            known.measured_s = now_s

    def silent(self, node_id: NodeId, waited_s: float, *, now_s: float) -> None:
        """Take notice that a node took longer than that; nobody waited for its answer."""
        known = self._known(node_id, now_s)
        if known is None or known.smoothed_s < waited_s:
            self._paces[node_id] = _Pace(waited_s, now_s)

    def failed(self, node_id: NodeId, *, now_s: float) -> None:
        """Take notice of a failure."""
        self._failed_s[node_id] = now_s

    def failed_lately(self, node_id: NodeId, *, now_s: float) -> bool:
        """Tell whether the last that came of a node was a failure, and not long ago."""
        failed_s = self._failed_s.get(node_id)
        return failed_s is not None and now_s - failed_s < self._limits.failed_s

    def expected_s(self, node_id: NodeId, *, now_s: float) -> float | None:
        """Return how long an answer takes; None: that isn't known."""
        known = self._known(node_id, now_s)
        return None if known is None else known.smoothed_s

    def order(self, node_ids: Sequence[NodeId], *, now_s: float) -> list[NodeId]:
        """Return the nodes, the fastest first."""
        limits = self._limits
        known = {one: self.expected_s(one, now_s=now_s) for one in node_ids}
        paces = {one: limits.unknown_s if pace is None else pace for one, pace in known.items()}
        fastest = min(paces.values(), default=0.0)
        equal_s = max(limits.equal_factor * fastest, fastest + limits.equal_s)

        def badness(node_id: NodeId) -> tuple[bool, float]:
            slowness = 0.0 if paces[node_id] <= equal_s else paces[node_id]
            return self.failed_lately(node_id, now_s=now_s), slowness

        return sorted(node_ids, key=badness)

    def _known(self, node_id: NodeId, now_s: float) -> _Pace | None:
        pace = self._paces.get(node_id)
        if pace is None or now_s - pace.measured_s >= self._limits.remembered_s:
            return None
        return pace
