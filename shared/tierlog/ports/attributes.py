"""The attribute index as the owner of a stream sees it: read, and moved on by flushes."""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from tierlog.model.attribute_record import KeyRange
from tierlog.model.attributes import AttributeKey, Checkpoint
from tierlog.model.position import Position
from tierlog.model.stream import Stream


class Salvage(NamedTuple):
    """What of an index can be read, and between which keys it can't, ascending."""

    values: Mapping[AttributeKey, int]
    lost: Sequence[KeyRange]


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

    async def former(self, claimed: Stream) -> Sequence[Checkpoint]:
        """Return the checkpoints before the newest that are kept still, the newest first."""
        ...

    async def salvage(self, checkpoint: Checkpoint) -> Salvage:
        """Return all of an index that can be read."""
        ...

    async def make_anew(
        self,
        claimed: Stream,
        base: Checkpoint,
        *,
        values: Mapping[AttributeKey, int],
        good: Position | None,
        lost: Sequence[KeyRange] = (),
    ) -> Checkpoint:
        """Publish an index of all these attributes in the place of that of ``base``, as of its end.

        Nothing of the index before is read. Former checkpoints behind ``good`` are kept no more;
        what is ``lost`` is put on record. Errors as those of ``flush``.
        """
        ...
