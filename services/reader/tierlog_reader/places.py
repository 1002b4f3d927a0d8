"""Where the entry behind a position is: the decision table of reading (protocols.md section 5).

Owns two decisions, as functions of values: which ledger and entry a position of a stream means
(``locate``), and which tier to ask for it (``choose_tier``), after which ``Failures``. Does not own
the asking.

Invariants:
    * A position at a ledger's end means the next ledger's first entry, once there is one; also
      when the ledger itself was trimmed, if nothing behind that position was.
    * NO_SUCH_ENTRY, NOT_YET, TRIMMED and LEDGER_NOT_FOUND are never confused: what was before
      the oldest ledger is TRIMMED, what lies behind a closed ledger's end is NO_SUCH_ENTRY.
    * ``TIER1_DELETING`` counts as gone from tier 1; an open ledger is only ever in tier 1.
    * What a reader is told to go on with never names a ledger without entries: such a ledger
      leaves the list when it is closed.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter
from typing import Final
from uuid import UUID

from tierlog.model.errors import Reason, RefusedError, RetryableError, TierlogError
from tierlog.model.ids import EntryId, LedgerId, StreamName
from tierlog.model.offload import (
    GONE_FROM_TIER1,
    READABLE_IN_TIER2,
    OffloadContext,
    OffloadState,
)
from tierlog.model.position import Edge, Position
from tierlog.model.stream import ListedLedger

GONE_REASONS: Final = frozenset({Reason.LEDGER_NOT_FOUND, Reason.NO_SUCH_ENTRY})
_FIRST: Final = EntryId(0)
_ledger_id: Final = attrgetter("ledger_id")


class Tier(StrEnum):
    """Who holds the bytes."""

    TIER1 = "tier1"
    TIER2 = "tier2"
    MEMORY = "memory"
    """The reader's own, of what came to tier 1 while somebody waited for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """An entry of a listed ledger. ``resume`` is where to go on while it is not there yet."""

    ledger: ListedLedger
    entry_id: EntryId
    resume: Position | Edge


@dataclass(frozen=True, slots=True, kw_only=True)
class BehindLast:
    """Behind the last confirmed entry of the open ledger, whichever that is.

    ``resume`` is where to go on when it has none.
    """

    ledger: ListedLedger
    resume: Position | Edge


@dataclass(frozen=True, slots=True, kw_only=True)
class AtEnd:
    """Behind everything: no ledger follows, for now."""

    resume: Position | Edge


Place = Spot | BehindLast | AtEnd

Following = Callable[[LedgerId], Awaitable[tuple[ListedLedger, OffloadContext] | None]]
"""Finds the ledger behind one, if it is to be read from tier 2."""


def locate(
    stream: StreamName,
    ledgers: Sequence[ListedLedger],
    where: Position | Edge,
    *,
    trimmed_end: Position | None,
) -> Place:
    """Return what ``where`` means in the list ``ledgers``, or raise why it means nothing.

    ``trimmed_end``: where the newest ledger ended that was before the list; None: not known.
    Ids grow in the list, of which a few are looked at: each read asks, however long it is.
    """
    before = trimmed_end or Edge.EARLIEST
    if where is Edge.EARLIEST:
        return _first_of(ledgers, 0, resume=before)
    if where is Edge.LATEST:
        return _behind_last(ledgers, before)
    assert isinstance(where, Position)
    index = bisect_left(ledgers, where.ledger_id, key=_ledger_id)
    if index == len(ledgers) or ledgers[index].ledger_id != where.ledger_id:
        if where == trimmed_end:
            return _first_of(ledgers, 0, resume=where)
        raise _not_listed(stream, ledgers, where, trimmed_end)
    ledger = ledgers[index]
    if not ledger.closed:
        resume = _resume(ledgers, index, where, before)
        return Spot(ledger=ledger, entry_id=where.entry_id, resume=resume)
    if where.entry_id <= ledger.last_entry_id:
        return Spot(ledger=ledger, entry_id=where.entry_id, resume=where)
    if where.entry_id > ledger.last_entry_id + 1:
        raise no_such_entry(stream, where, last=ledger.last_entry_id)
    return _first_of(ledgers, index + 1, resume=where)


def ledger_behind(ledgers: Sequence[ListedLedger], ledger_id: LedgerId) -> ListedLedger | None:
    """Return the ledger that follows one, which may have left the list."""
    index = bisect_right(ledgers, ledger_id, key=_ledger_id)
    return ledgers[index] if index < len(ledgers) else None


@dataclass(slots=True)
class Failures:
    """The tiers that failed for one ledger; of tier 2 it is one copy that did."""

    errors: dict[Tier, TierlogError] = field(default_factory=dict)
    copy: UUID | None = None

    def note(self, tier: Tier, error: TierlogError, context: OffloadContext | None) -> None:
        self.errors[tier] = error
        if tier is Tier.TIER2 and context is not None:
            self.copy = context.uuid

    def of(self, context: OffloadContext | None) -> Mapping[Tier, TierlogError]:
        """Return what failed of what is there: a repair puts another copy in a damaged one's place.

        What was known of that is no word on the new one.
        """
        if context is not None and context.uuid != self.copy:
            self.errors.pop(Tier.TIER2, None)
        return self.errors


def unrefused(failures: Mapping[Tier, TierlogError]) -> TierlogError | None:
    """Return what failed where a ledger may be: that it is not elsewhere says nothing of it.

    What may pass comes first.
    """
    told = (one for one in failures.values() if one.reason not in GONE_REASONS)
    return min(told, key=lambda one: isinstance(one, RefusedError), default=None)


def choose_tier(
    ledger: ListedLedger,
    context: OffloadContext | None,
    *,
    priority: str,
    gone: frozenset[Tier] = frozenset(),
    entry_id: EntryId = _FIRST,
) -> Tier:
    """Return the tier to read a ledger from; ``gone`` are those just found without it.

    ``entry_id``: from which entry on it is wanted.
    """
    if not ledger.closed or context is None:
        holders = [Tier.TIER1]
    else:
        if context.state is OffloadState.TRIMMING:
            end = Position(ledger.ledger_id, EntryId(ledger.last_entry_id + 1))
            raise _trimmed(context.stream, Position(ledger.ledger_id, entry_id), before=end)
        holders = [Tier.TIER2] if context.state in READABLE_IN_TIER2 else []
        if context.state not in GONE_FROM_TIER1 and not context.bookkeeper_deleted:
            holders.append(Tier.TIER1)
        holders.sort(key=lambda tier: tier.value != priority)
    left = [tier for tier in holders if tier not in gone]
    if not left:
        raise RetryableError(
            f"no tier has ledger {ledger.ledger_id} any more, or it is being moved",
            reason=Reason.UNKNOWN,
            remedy="Try again; if it lasts, look at: tierlog ledger show, and repair a copy that"
            " lacks an object with: tierlog scrub --repair",
            details={"ledger_id": str(ledger.ledger_id)},
        )
    return left[0]


def why_tier(
    ledger: ListedLedger | None, context: OffloadContext | None, tier: Tier, *, priority: str
) -> str:
    """Say why a ledger is read from ``tier``, in words."""
    if tier is Tier.MEMORY:
        return "it came while somebody waited for it, and is still in the reader's memory"
    if ledger is None:
        return "the ledger was trimmed since"
    if not ledger.closed:
        return "the ledger is open"
    state = context.state.name if context is not None else "not offloaded"
    in_tier2 = context is not None and context.state in READABLE_IN_TIER2
    in_tier1 = context is None or (
        context.state not in GONE_FROM_TIER1 and not context.bookkeeper_deleted
    )
    if in_tier1 and in_tier2:
        chosen = tier.value == priority
        cause = "offloaded_read_priority" if chosen else "the other tier did not give it"
        return f"{state}: both tiers have it, and {cause} decides for {tier}"
    return f"{state}: only {tier} has it"


def no_such_entry(stream: StreamName, where: Position, *, last: EntryId) -> RefusedError:
    """Say that a closed ledger ends before ``where``."""
    return RefusedError(
        f"stream {stream} has no entry {where}: its ledger ends with entry {last}",
        reason=Reason.NO_SUCH_ENTRY,
        remedy=f"Go on from {where.ledger_id}:{last + 1}, or list: tierlog ledger ls {stream}",
        details={"stream": stream, "position": str(where), "last_entry_id": str(last)},
    )


def not_yet(stream: StreamName, where: Position, *, last: EntryId) -> RetryableError:
    """Say that the open ledger has not come as far as ``where``."""
    return RetryableError(
        f"stream {stream} has no entry {where} yet: its last confirmed one is {last}",
        reason=Reason.NOT_YET,
        remedy=f"Go on from {where.ledger_id}:{last + 1}, or wait for producers",
        details={"stream": stream, "position": str(where), "last_entry_id": str(last)},
    )


def not_whole(stream: StreamName, where: Position | Edge, end: Position) -> RetryableError:
    """Say that nothing is given from ``where`` on, though there is more before ``end``."""
    return RetryableError(
        f"stream {stream} has entries from {where} to {end}, and nobody confirms them now",
        reason=Reason.UNKNOWN,
        remedy="Check that the storage nodes of the ledger are up",
        details={"stream": stream, "position": str(where)},
    )


def _first_of(ledgers: Sequence[ListedLedger], index: int, *, resume: Position | Edge) -> Place:
    if index >= len(ledgers):
        return AtEnd(resume=resume)
    return Spot(ledger=ledgers[index], entry_id=_FIRST, resume=resume)


def _behind_last(ledgers: Sequence[ListedLedger], before: Position | Edge) -> Place:
    if not ledgers:
        return AtEnd(resume=before)
    if not ledgers[-1].closed:
        resume = _end_before(ledgers, len(ledgers) - 1, before)
        return BehindLast(ledger=ledgers[-1], resume=resume)
    return AtEnd(resume=_end_before(ledgers, len(ledgers), before))


def _end_before(
    ledgers: Sequence[ListedLedger], index: int, before: Position | Edge
) -> Position | Edge:
    """Return the end of the ledger before ``index``: a name for "the start of that one".

    ``before``: the same for the whole list.
    """
    if index == 0:
        return before
    last = ledgers[index - 1]
    return Position(last.ledger_id, EntryId(last.last_entry_id + 1))


def _resume(
    ledgers: Sequence[ListedLedger], index: int, where: Position, before: Position | Edge
) -> Position | Edge:
    # The open ledger may be closed without an entry, and then its id means nothing.
    return where if where.entry_id else _end_before(ledgers, index, before)


def _not_listed(
    stream: StreamName,
    ledgers: Sequence[ListedLedger],
    where: Position,
    trimmed_end: Position | None,
) -> RefusedError:
    if trimmed_end is not None and where.ledger_id == trimmed_end.ledger_id and where > trimmed_end:
        return no_such_entry(stream, where, last=EntryId(trimmed_end.entry_id - 1))
    before = Position(ledgers[0].ledger_id, _FIRST) if ledgers else trimmed_end
    if before is not None and where < before:
        error = _trimmed(stream, where, before=before)
        if trimmed_end is None:
            error.message = (
                f"stream {stream} begins at {before}, and {where} is before that; as far as is"
                " known, nothing of it was trimmed"
            )
            error.remedy = "Go on from earliest; or read the stream whose position it is"
        return error
    return RefusedError(
        f"stream {stream} has no ledger {where.ledger_id}",
        reason=Reason.LEDGER_NOT_FOUND,
        remedy=f"Give earliest, latest, or a ledger of: tierlog ledger ls {stream}",
        details={"stream": stream, "position": str(where)},
    )


def _trimmed(stream: StreamName, where: Position, *, before: Position) -> RefusedError:
    return RefusedError(
        f"what stream {stream} had from {where} on and before {before} was trimmed by its"
        " retention",
        reason=Reason.TRIMMED,
        remedy="Go on from earliest; lengthen the retention if readers can't keep up",
        details={"stream": stream, "lost_from": str(where), "lost_before": str(before)},
    )
