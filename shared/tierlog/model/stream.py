"""A stream as its metadata describes it: who owns it, and the list of its ledgers.

Invariants:
    * Ledgers are listed oldest first with growing ids; at most the last one is not closed.
    * The owner epoch only grows.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final
from uuid import UUID

from tierlog.model.errors import Reason, RefusedError
from tierlog.model.ids import NO_ENTRY, EntryId, LedgerId, NodeId, StreamName
from tierlog.model.policy import Policy
from tierlog.model.position import Position

NOT_ATTACHED: Final = LedgerId(0)
"""No attached ledger has it: the id drawn at an attach is above those that are attached."""


class StreamLifecycle(Enum):
    """Whether a stream lives."""

    ACTIVE = 1
    DELETING = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedLedger:
    """A ledger as its stream's list knows it; the ledger's own znode is the truth.

    ``attached_id``: of an attached one, an id that was given when the ledger before it was closed;
    its own was given long before. 0: it was opened in the stream, after that.
    """

    ledger_id: LedgerId
    opened_ms: int
    block_size: int
    owner_epoch: int
    closed: bool = False
    last_entry_id: EntryId = NO_ENTRY
    length: int = 0
    closed_ms: int = 0
    attached_id: LedgerId = NOT_ATTACHED

    @property
    def entry_count(self) -> int:
        """How many entries a closed ledger has."""
        return self.last_entry_id + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerPageRef:
    """A page of closed ledgers that no longer stand in the stream's own znode."""

    page_number: int
    first_ledger_id: LedgerId
    last_ledger_id: LedgerId
    ledger_count: int

    def is_of(self, ledgers: Sequence[ListedLedger]) -> bool:
        """Tell whether this refers to a page that holds these."""
        return len(ledgers) == self.ledger_count and (
            (ledgers[0].ledger_id, ledgers[-1].ledger_id)
            == (self.first_ledger_id, self.last_ledger_id)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Who may append: the claim's UUID tells two claimants of the same epoch apart."""

    node_id: NodeId
    claim: UUID


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadPause:
    """An admin wants a stream left as it is: no offload begins, nothing of it is deleted."""

    since_ms: int
    cause: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """A stream's znode as a value. ``ledgers`` is the tail of the list, behind ``pages``.

    ``offload_through``: an admin wants every sealed ledger up to that one offloaded.
    ``trimmed_end``: where the newest trimmed ledger ended; whoever has read up to there goes on.
    ``partitions``: how many it has; 0: it has entries itself, as each partition does.
    ``empty_ledger_id``: the newest ledger that left the list without an entry.
    ``offload_pauses``: the number of its newest pause, which may end before anybody else has seen
    it. By the clock it is higher than those, too, that metadata from a backup have forgotten.
    ``policy_changed_ms``: of two policies the newer one's is higher.
    """

    name: StreamName
    incarnation: UUID
    created_ms: int
    raw: bool = False
    lifecycle: StreamLifecycle = StreamLifecycle.ACTIVE
    owner_epoch: int = 0
    owner: Owner | None = None
    policy: Policy = Policy()
    ledgers: tuple[ListedLedger, ...] = ()
    pages: tuple[LedgerPageRef, ...] = ()
    deleting: tuple[LedgerId, ...] = ()
    offload_through: LedgerId | None = None
    partitions: int = 0
    offload_pause: OffloadPause | None = None
    trimmed_end: Position | None = None
    empty_ledger_id: LedgerId | None = None
    offload_pauses: int = 0
    policy_changed_ms: int = 0

    def __post_init__(self) -> None:
        ids = [ledger.ledger_id for ledger in self.ledgers]
        assert ids == sorted(set(ids)), "ledger ids of a stream grow"
        assert all(ledger.closed for ledger in self.ledgers[:-1]), "only the last may be open"
        assert self.partitions >= 0
        assert not (self.partitions and self.ledgers), "entries are in the partitions"

    def listed(self, ledger_id: LedgerId) -> ListedLedger | None:
        """Return the ledger of the tail with that id, or None."""
        return next((one for one in self.ledgers if one.ledger_id == ledger_id), None)

    @property
    def newest_ledger_id(self) -> LedgerId | None:
        """The highest id that a ledger of the stream has, or had, as far as is remembered.

        Somebody may have read up to there: whatever comes behind must have a higher one.
        """
        known = [
            *(one.ledger_id for one in self.ledgers[-1:]),
            *(one.last_ledger_id for one in self.pages[-1:]),
            *self.deleting,
            *((self.trimmed_end.ledger_id,) if self.trimmed_end is not None else ()),
            *((self.empty_ledger_id,) if self.empty_ledger_id is not None else ()),
        ]
        return max(known, default=None)


def check_in_stream(
    stream: StreamName, ledgers: Iterable[tuple[LedgerId, EntryId | None]], where: Position
) -> None:
    """Refuse a position that a stream does not have, or has no more.

    ``ledgers``: the ids in the order of the list, each with the last entry, None while it is open.
    Right behind a ledger's end is a position, too.
    """
    last_entry_ids = dict(ledgers)
    what = f"stream {stream} has no position {where}"
    details = {"stream": stream, "position": str(where)}
    remedy = f"List what it has: tierlog ledger ls {stream}"
    if where.ledger_id not in last_entry_ids:
        first = min(last_entry_ids, default=None)
        if first is not None and where.ledger_id < first:
            raise RefusedError(
                f"{what}: it begins at {first}:0",
                reason=Reason.TRIMMED,
                remedy=remedy,
                details=details,
            )
        raise RefusedError(
            f"{what}: ledger {where.ledger_id} is not in its list",
            reason=Reason.NO_SUCH_ENTRY,
            remedy=remedy,
            details=details,
        )
    last = last_entry_ids[where.ledger_id]
    if last is not None and where.entry_id > last + 1:
        raise RefusedError(
            f"{what}: that ledger ends with entry {last}",
            reason=Reason.NO_SUCH_ENTRY,
            remedy=remedy,
            details=details,
        )
