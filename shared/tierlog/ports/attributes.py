"""The attribute index as the owner of a stream sees it: read, and moved on by flushes."""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol

from tierlog.model.attributes import AttributeKey, Checkpoint
from tierlog.model.position import Position
from tierlog.model.stream import Stream


class AttributeIndex(Protocol):
    """Keeps checkpoints of streams. All calls may raise ``RetryableError`` when tier 2 is away."""

    async def load(self, claimed: Stream) -> Checkpoint:
        """Return the newest published checkpoint; one of nothing when there is none.

        From then on retention takes no ledger that no checkpoint covers. FENCED when there is none
        and ``claimed`` is not the owner.
        """
        ...

    async def get(
        self, checkpoint: Checkpoint, keys: Sequence[AttributeKey]
    ) -> dict[AttributeKey, int]:
        """Return the values of those keys that the checkpoint's index has."""
        ...

    def iterate(
        self, checkpoint: Checkpoint, first: AttributeKey, last: AttributeKey
    ) -> AsyncIterator[Sequence[tuple[AttributeKey, int]]]:
        """Give keys and values from ``first`` to ``last``, both included, ascending, in runs."""
        ...

    async def flush(
        self,
        claimed: Stream,
        base: Checkpoint,
        *,
        changes: Mapping[AttributeKey, int],
        core: Mapping[AttributeKey, int],
        through: Position,
    ) -> Checkpoint:
        """Write nodes, then publish the root if ``claimed`` still is the owner; FENCED if not.

        ``changes`` are the extended attributes as they are at ``through``. An ambiguous end is
        settled by reading back.
        """
        ...
