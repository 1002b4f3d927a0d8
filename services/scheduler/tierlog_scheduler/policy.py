"""What is to be done for a stream now: a function of what is known, and of nothing else.

Level-triggered: decisions come from the metadata, each time anew, so that what the queue or a
former leader lost is decided again (protocols.md section 3).

Owns the thresholds' meaning. Does not own doing it: ``tierlog_scheduler.scheduler`` does.

Invariants:
    * Only closed ledgers whose copy is not complete are asked for; by size, the oldest first and
      no more than brings what is not offloaded below the threshold. An open ledger counts once
      it is closed: its size is known to its owner alone, and only closed ones can be offloaded.
    * A local copy is deleted only when the smaller of wall-clock and monotonic time since its
      copy was complete reaches the lag; a lag of -1 never ends.
    * An abandoned attempt is swept at once, and again, for the last time, after the longest
      request's deadline.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final
from uuid import UUID

from tierlog.model.ids import LedgerId
from tierlog.model.offload import AbandonedAttempt, OffloadContext, OffloadState
from tierlog.model.policy import NEVER, Policy
from tierlog.model.position import Position
from tierlog.model.stream import ListedLedger
from tierlog.offload.messages import Trigger

BACKOFF_DOUBLINGS_MAX: Final = 6
_TO_OFFLOAD: Final = frozenset({OffloadState.LOCAL, OffloadState.OFFLOADING})


@dataclass(frozen=True, slots=True, kw_only=True)
class Now:
    """Two clocks: the wall's, and how long leaders have been at work in all."""

    wall_ms: int
    progress_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """When, on the monotonic clock, a ledger was last asked for, and how often so far."""

    progress_ms: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Delays:
    """How long to wait before the same thing is done again."""

    request_again_ms: int
    sweep_again_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerView:
    """A ledger as its stream lists it, with its context (None: not read, or gone)."""

    listed: ListedLedger
    context: OffloadContext | None

    @property
    def to_offload(self) -> bool:
        """Whether its copy is still to be made."""
        return (
            self.listed.closed
            and self.listed.entry_count > 0
            and self.context is not None
            and self.context.state in _TO_OFFLOAD
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamView:
    """Everything that a decision about a stream may look at."""

    ledgers: Sequence[LedgerView]
    policy: Policy
    offload_through: LedgerId | None = None
    asked: Mapping[LedgerId, Asked] = field(default_factory=dict)
    complete_seen_ms: Mapping[LedgerId, int] = field(default_factory=dict)
    swept_seen_ms: Mapping[UUID, int] = field(default_factory=dict)
    paused: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOffload:
    """Ask for a ledger, for the ``count``-th time."""

    ledger_id: LedgerId
    trigger: Trigger
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteTier1:
    """Verify the copy once more, and delete the local one."""

    context: OffloadContext


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepAbandoned:
    """Delete what an attempt left; ``strike_off``: it is the last time."""

    ledger_id: LedgerId
    attempt: AbandonedAttempt
    strike_off: bool


Action = RequestOffload | DeleteTier1 | SweepAbandoned


def decide(view: StreamView, now: Now, delays: Delays) -> list[Action]:
    """Return what is to be done for a stream now, oldest ledger first within each kind."""
    if view.paused:
        # What an attempt left is never read: sweeping it is all that an admin does not stop.
        return list(_sweeps(view, now, delays))
    wanted = wanted_ledgers(view, now)
    actions: list[Action] = [
        RequestOffload(ledger_id=ledger_id, trigger=trigger, count=_count(view, ledger_id) + 1)
        for ledger_id, trigger in wanted.items()
        if _may_ask(view.asked.get(ledger_id), now, delays)
    ]
    actions.extend(_deletions(view, now))
    actions.extend(_sweeps(view, now, delays))
    return actions


def wanted_ledgers(view: StreamView, now: Now) -> dict[LedgerId, Trigger]:
    """Return the ledgers whose copy should be made now, and why; whether asked for or not."""
    wanted: dict[LedgerId, Trigger] = {}
    for one in _by_size(view):
        wanted[one.listed.ledger_id] = Trigger.SIZE
    for one in view.ledgers:
        if not one.to_offload:
            continue
        sealed_ms = now.wall_ms - one.listed.closed_ms
        if view.policy.offload_time_ms is not None and sealed_ms >= view.policy.offload_time_ms:
            wanted[one.listed.ledger_id] = Trigger.TIME
        if view.offload_through is not None and one.listed.ledger_id <= view.offload_through:
            wanted[one.listed.ledger_id] = Trigger.ADMIN
    return dict(sorted(wanted.items()))


def _by_size(view: StreamView) -> Iterator[LedgerView]:
    """Iterate over the oldest ledgers, until less than the threshold is not offloaded."""
    threshold = view.policy.offload_size_bytes
    if threshold is None:
        return
    waiting = [one for one in view.ledgers if one.to_offload]
    left = sum(one.listed.length for one in waiting)
    for one in waiting:
        if left < threshold:
            return
        yield one
        left -= one.listed.length


def _count(view: StreamView, ledger_id: LedgerId) -> int:
    asked = view.asked.get(ledger_id)
    return 0 if asked is None else asked.count


def _may_ask(asked: Asked | None, now: Now, delays: Delays) -> bool:
    if asked is None:
        return True
    wait_ms: int = delays.request_again_ms * 2 ** min(asked.count - 1, BACKOFF_DOUBLINGS_MAX)
    return now.progress_ms - asked.progress_ms >= wait_ms


def _deletions(view: StreamView, now: Now) -> Iterator[DeleteTier1]:
    lag_ms = view.policy.deletion_lag_ms
    for one in view.ledgers:
        context = one.context
        if context is None or not context.complete:
            continue
        if context.state is OffloadState.TIER1_DELETING:
            # Begun by a leader that did not end it: readers take it for gone already.
            yield DeleteTier1(context=context)
        elif context.state is OffloadState.COMPLETE and lag_ms is not None and lag_ms != NEVER:
            seen_ms = view.complete_seen_ms.get(context.ledger_id)
            if seen_ms is None:
                continue
            elapsed_ms = min(now.wall_ms - context.timestamp_ms, now.progress_ms - seen_ms)
            if elapsed_ms >= lag_ms:
                yield DeleteTier1(context=context)


def _sweeps(view: StreamView, now: Now, delays: Delays) -> Iterator[SweepAbandoned]:
    for one in view.ledgers:
        for attempt in one.context.abandoned if one.context is not None else ():
            if attempt.swept_ms == 0:
                strike_off = False
            else:
                seen_ms = view.swept_seen_ms.get(attempt.uuid)
                if seen_ms is None:
                    continue
                since_ms = min(now.wall_ms - attempt.swept_ms, now.progress_ms - seen_ms)
                if since_ms < delays.sweep_again_ms:
                    continue
                strike_off = True
            yield SweepAbandoned(
                ledger_id=one.listed.ledger_id, attempt=attempt, strike_off=strike_off
            )


def sealed_before(ledgers: Sequence[ListedLedger], before: Position | None) -> list[ListedLedger]:
    """Return the sealed ledgers that lie wholly before a position; all of them for None."""
    return [
        one
        for one in ledgers
        if one.closed and (before is None or Position(one.ledger_id, one.last_entry_id) < before)
    ]
