"""What retention takes away from a stream, as a function of what is known (protocols.md 3.10).

Retention by time and by size are two limits, and reaching either is enough, as in Pulsar: a
ledger goes once it was sealed for ``retention_time``, or once the sealed ledgers behind it hold
``retention_size``, so that at least so much always stays.

Invariants:
    * Only a prefix of the list goes, and never an open ledger.
    * A ledger whose copy is wanted, by a threshold or by an admin, does not go before it has one
      (seeds/000: "as otherwise the segment would be deleted before being offloaded").
    * Time is counted for sure (``Now.closed_since``), by no wall clock. A context that was not
      read stops the rest.
    * A ledger whose local copy is being deleted goes after that; one that is being repaired goes
      all the same, and the repair is refused its end.
    * A ledger whose entries are not in the newest checkpoint of the stream's attributes stays, and
      so does one with a copy that is wanted and not in the checkpoint which the manifest names:
      what writers have appended must be known without it.
    * At most ``TRIMMED_MAX`` ledgers of a stream are on their way out at once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from tierlog.model.attribute_record import holds_back
from tierlog.model.ids import EntryId, LedgerId
from tierlog.model.offload import OffloadState
from tierlog.model.policy import threshold
from tierlog.model.position import Position
from tierlog.model.stream import NOT_ATTACHED, ListedLedger
from tierlog.model.trimming import TrimGrounds
from tierlog_scheduler.clocks import Now
from tierlog_scheduler.policy import Delays, LedgerView, StreamView, SweepAbandoned, sweeps

TRIMMED_MAX: Final = 1000
_MAY_GO: Final = frozenset(
    {
        OffloadState.LOCAL,
        OffloadState.OFFLOADING,
        OffloadState.COMPLETE,
        OffloadState.TIER1_DELETED,
        OffloadState.REPAIRING,
        OffloadState.TRIMMING,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginTrim:
    """Take the oldest ledgers off the list, unless the grounds are others by then."""

    ledger_ids: tuple[LedgerId, ...]
    grounds: TrimGrounds


@dataclass(frozen=True, slots=True, kw_only=True)
class DropTrimmed:
    """Delete the copy in tier 1 of a ledger that left the list."""

    ledger_id: LedgerId


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishTrim:
    """Forget a ledger of which nothing is left."""

    ledger_id: LedgerId


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveStream:
    """Remove a stream that is being deleted and has nothing left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepAttributes:
    """Delete the objects of a stream's attribute index that no checkpoint needs."""


Trimming = BeginTrim | DropTrimmed | FinishTrim | SweepAbandoned | RemoveStream | SweepAttributes


class Behind(NamedTuple):
    """What a stream's list has behind a ledger: sealed bytes, and an id given after its closing."""

    bytes: int
    successor: LedgerId | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a ledger goes; ``in_ms``: when it does by time alone, None: not by time."""

    goes: bool
    in_ms: int | None
    why: str


def decide(view: StreamView, now: Now, delays: Delays) -> list[Trimming]:
    """Return what is to be trimmed now, and what is to be done with what was."""
    if view.paused:
        return []
    actions: list[Trimming] = []
    begin = trimmable(view, now)[: max(0, TRIMMED_MAX - len(view.trimmed))]
    if begin:
        actions.append(BeginTrim(ledger_ids=tuple(begin), grounds=view.grounds))
    for ledger_id, context in view.trimmed.items():
        if context is None or context.is_trimmed:
            actions.append(FinishTrim(ledger_id=ledger_id))
            continue
        if not context.bookkeeper_deleted:
            actions.append(DropTrimmed(ledger_id=ledger_id))
        actions.extend(sweeps(context, view, now, delays))
    if view.deleting and not view.ledgers and not view.trimmed:
        actions.append(RemoveStream())
    if _sweeps_attributes(view, now, delays):
        actions.append(SweepAttributes())
    return actions


def _sweeps_attributes(view: StreamView, now: Now, delays: Delays) -> bool:
    """Tell whether it is time to look for what no checkpoint needs; not while all of it goes."""
    if view.attributes is None or view.deleting:
        return False
    swept_ms = view.attributes_swept_ms
    return swept_ms is None or now.progress_ms - swept_ms >= delays.sweep_attributes_ms


def trimmable(view: StreamView, now: Now) -> list[LedgerId]:
    """Return the ledgers that go now, oldest first: a prefix of the list."""
    if not view.deleting and not view.policy.trims:
        return []
    found: list[LedgerId] = []
    for one, behind in with_what_is_behind(view.ledgers):
        if not judge(view, one, now, behind).goes:
            break
        found.append(one.listed.ledger_id)
    return found


def with_what_is_behind(ledgers: Sequence[LedgerView]) -> Iterator[tuple[LedgerView, Behind]]:
    """Iterate over the ledgers, with what is behind each."""
    left = sum(one.listed.length for one in ledgers)
    for one, successor in zip(ledgers, successors([one.listed for one in ledgers]), strict=True):
        left -= one.listed.length
        yield one, Behind(bytes=left, successor=successor)


def successors(ledgers: Sequence[ListedLedger]) -> list[LedgerId | None]:
    """Return for each ledger the first id that was surely given once it stood closed in the list.

    Of the next ledger, but for attached ones: their own ids are older than the attach, at which
    one was drawn for all of it. It was so before they came into the list, so they go by the next.
    """
    found: list[LedgerId | None] = []
    behind: LedgerId | None = None
    further: LedgerId | None = None
    for number in reversed(range(len(ledgers))):
        own = _given_in_turn(ledgers, number)
        found.append(further if own == behind else behind)
        if own is not None and own != behind:
            behind, further = own, behind
    return found[::-1]


def _given_in_turn(ledgers: Sequence[ListedLedger], number: int) -> LedgerId | None:
    """Return an id that was given after the ledger before was closed; None: not known.

    What releases attached that drew no id is known by stamps: it was there before that closing.
    Where a clock is wrong, a ledger that was opened is taken for one: then the next one counts.
    """
    one = ledgers[number]
    if one.attached_id != NOT_ATTACHED:
        return one.attached_id
    if number and one.opened_ms < ledgers[number - 1].closed_ms:
        return None
    return one.ledger_id


def judge(view: StreamView, one: LedgerView, now: Now, behind: Behind) -> Verdict:
    """Tell whether a ledger goes, were it the oldest."""
    if not one.listed.closed:
        return Verdict(goes=False, in_ms=None, why="it is open")
    verdict = _by_limits(view, one, now, behind)
    if not verdict.goes:
        return verdict
    held = _held_by(view, one)
    return verdict if held is None else Verdict(goes=False, in_ms=None, why=held)


def _by_limits(view: StreamView, one: LedgerView, now: Now, behind: Behind) -> Verdict:
    if view.deleting:
        return Verdict(goes=True, in_ms=0, why="its stream is being deleted")
    time_ms = threshold(view.policy.retention_time_ms)
    size_bytes = threshold(view.policy.retention_size_bytes)
    if size_bytes is not None and behind.bytes >= size_bytes:
        why = f"{behind.bytes} bytes are sealed behind it, retention_size is {size_bytes}"
        return Verdict(goes=True, in_ms=0, why=why)
    if time_ms is None:
        if size_bytes is None:
            return Verdict(goes=False, in_ms=None, why="retention has no limit")
        why = f"once {size_bytes - behind.bytes} more bytes are sealed behind it"
        return Verdict(goes=False, in_ms=None, why=why)
    seen_ms = view.closed_seen_ms.get(one.listed.ledger_id)
    left_ms = time_ms - now.closed_since(seen_ms, behind.successor)
    why = f"retention_time is {time_ms} ms since it was sealed"
    return Verdict(goes=left_ms <= 0, in_ms=max(0, left_ms), why=why)


def _held_by(view: StreamView, one: LedgerView) -> str | None:
    """Return what keeps a ledger from going whose time has come."""
    context = one.context
    if context is None:
        return "its context could not be read"
    if context.state not in _MAY_GO:
        return f"it is {context.state.name}: that is ended first"
    if view.grounds.wants_copy(one.listed.ledger_id) and not context.complete:
        return "it is to be offloaded first"
    if view.deleting:
        return None
    end = Position(one.listed.ledger_id, EntryId(max(0, one.listed.last_entry_id)))
    # Where copies are not wanted any more, no manifest will come to name a later checkpoint.
    is_copied = context.complete and view.grounds.wants_copy(one.listed.ledger_id)
    return holds_back(view.attributes, view.attributes_named, end, is_copied=is_copied)
