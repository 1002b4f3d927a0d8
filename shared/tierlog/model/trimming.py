"""What a decision to trim a stream, or to delete its local copies, stands on.

It is asked for again when the decision is carried out.

Invariant: what was ordered on equal grounds is still ordered: how long a ledger has been sealed
and how much is behind it only grow, all else that people can change is in here.
"""

from dataclasses import dataclass
from typing import Self

from tierlog.model.ids import LedgerId
from tierlog.model.policy import Policy, PolicyLevels
from tierlog.model.stream import Stream, StreamLifecycle


@dataclass(frozen=True, slots=True, kw_only=True)
class TrimGrounds:
    """What people want of a stream. ``policy`` None: that all of it goes."""

    policy: Policy | None
    offload_through: LedgerId | None = None
    paused: bool = False

    @classmethod
    def of(cls, stream: Stream, levels: PolicyLevels) -> Self:
        """Return the grounds as the metadata say now; POLICY_INVALID: they say nothing."""
        paused = stream.offload_pause is not None
        if stream.lifecycle is StreamLifecycle.DELETING:
            return cls(policy=None, paused=paused)
        return cls(
            policy=levels.effective(stream.name, stream.policy),
            offload_through=stream.offload_through,
            paused=paused,
        )

    def wants_copy(self, ledger_id: LedgerId) -> bool:
        """Tell whether a ledger goes only with a complete copy in tier 2."""
        if self.policy is None:
            return False
        wish = self.offload_through
        return self.policy.offloads or (wish is not None and ledger_id <= wish)
