"""What a node saw of the ledger ids that the metadata store gave, and whether it still knows them.

Ids only go up. A store that came back from an old backup has forgotten some, and the ledgers that
were made under them; and it gives those ids again, so that after a while its counter alone looks
as if nothing had happened. So a node keeps what it saw, and leaves a mark in the store with it:
its *tally*, a node of the store whose version goes up each time. A backup has an older one, and
nobody else makes it newer.

Owns: the judgement (pure). Does not own asking (``gc``) nor keeping (``marking``, ``state_file``).

Invariants:
    * Once the store was found behind, that stands until an operator takes its content for right.
    * The tally in the store is written before what is kept here: it is never behind by itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

NEVER: Final = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenIds:
    """What a node keeps."""

    next_id: int = 0
    """Every id below it was given: the highest that the store named as its next one."""
    tally: int = NEVER
    """The version that this node's tally in the store had at least."""
    trusted_to: int = NEVER
    """Ledgers held up to this id prove nothing: an operator took a store for right after them."""
    behind_at: int = NEVER
    """Which id the store would have given next when it was found behind; -1: it never was."""

    @property
    def behind(self) -> bool:
        """Whether the store was found behind, and nobody took it for right since."""
        return self.behind_at != NEVER


NOTHING_SEEN: Final = SeenIds()


def judged(seen: SeenIds, held: Sequence[int], *, next_id: int, tally: int) -> SeenIds:
    """Return what to keep once the store named its next id and the node's tally (-1: none).

    ``held``: ids of ledgers that the node had entries of before the store was asked.
    """
    if seen.behind:
        return seen
    proving = max((one for one in held if one > seen.trusted_to), default=NEVER)
    given = max(seen.next_id, proving + 1)
    if next_id < given or tally < seen.tally:
        return replace(seen, next_id=max(given, next_id), behind_at=next_id)
    return seen


def trusting(seen: SeenIds, held: Sequence[int]) -> SeenIds:
    """Return what to keep once an operator takes the store as it is for right."""
    return SeenIds(trusted_to=max(seen.next_id - 1, seen.trusted_to, *held))
