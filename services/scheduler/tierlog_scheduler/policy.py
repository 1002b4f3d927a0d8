"""What is to be done for a stream now: a function of what is known, and of nothing else.

Level-triggered: decisions come from the metadata, each time anew, so that what the queue or a
former leader lost is decided again (protocols.md section 3).

Owns the thresholds' meaning (retention's: ``retention``). Does not own doing it:
``tierlog_scheduler.actions`` does, and reads again whatever it is about to delete.

Invariants:
    * Only closed ledgers whose copy is not complete are asked for; by size, the oldest first and
      no more than brings what is not offloaded below the threshold. An open ledger counts once
      it is closed: its size is known to its owner alone, and only closed ones can be offloaded.
    * A local copy is deleted only when leaders have been at work for the lag since they saw that
      very copy complete in tier 2; a lag of -1 never ends. Never while that copy is in doubt.
    * An abandoned attempt is swept at once, and again, for the last time, after the longest
      request's deadline.
    * An attempt that did not end in ``stalled_ms`` is abandoned where nothing asks for its ledger
      any more. Where something does, the next attempt abandons it.
    * Nothing is offloaded nor deleted while an admin has paused the stream.
"""

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final
from uuid import UUID

from tierlog.model.attribute_record import AttributesRecord
from tierlog.model.ids import EntryId, LedgerId
from tierlog.model.offload import AbandonedAttempt, CopySeen, OffloadContext, OffloadState
from tierlog.model.policy import BLOCK_SIZE_DEFAULT, Policy, threshold
from tierlog.model.position import Position
from tierlog.model.stream import ListedLedger
from tierlog.model.trimming import TrimGrounds
from tierlog.offload.messages import Trigger
from tierlog.offload.scrub_rules import is_stalled
from tierlog_scheduler.clocks import Now

BACKOFF_DOUBLINGS_MAX: Final = 7
"""The metadata don't tell a request that was lost from one that waits, or is put aside each time:
each wait is as long as all before it, so that a backlog fills no queue with repeats."""
_STATES: Final = {
    state: {"LOCAL": "sealed", "COMPLETE": "offloaded"}.get(state.name, state.name.lower())
    for state in OffloadState
}
STATES: Final = ("open", *_STATES.values(), "unknown")
TRIMMING: Final = _STATES[OffloadState.TRIMMING]
_TO_OFFLOAD: Final = frozenset({OffloadState.LOCAL, OffloadState.OFFLOADING})


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """When, on the monotonic clock, a ledger was last asked for, and how often so far."""

    progress_ms: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Delays:
    """How long to wait before the same thing is done again.

    ``longest_request_s``: how long a request of so many bytes may be on its way to the store; no
    sweep is the last one before that.
    """

    request_again_ms: int
    sweep_again_ms: int
    sweep_attributes_ms: int = 900_000
    stalled_ms: int = 86_400_000
    longest_request_s: Callable[[int], float] = lambda _: 0.0

    def sweep_ms(self, block_size: int) -> int:
        """Return how long after a sweep an attempt with such blocks is swept again."""
        return max(self.sweep_again_ms, math.ceil(1000 * self.longest_request_s(block_size)))


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadLag:
    """What is not in tier 2 yet: how old its oldest byte may be, its bytes, how many ledgers.

    A byte is at most as old as its ledger; an open one's length is known to its owner alone.
    ``due_in_ms``: when the first of it is due by the policy, below 0 once it was; None: time
    alone makes nothing of it due, by size or because the stream is paused.
    """

    age_ms: int
    length: int
    ledgers: int
    due_in_ms: int | None

    @property
    def overdue_ms(self) -> int:
        """For how long something of it has been due."""
        return max(0, -self.due_in_ms) if self.due_in_ms is not None else 0

    @property
    def unbounded_age_ms(self) -> int:
        """How old it may be where time alone makes nothing of it due."""
        return self.age_ms if self.due_in_ms is None else 0

    def aged(self, passed_ms: int) -> "OffloadLag":
        """Return the same as it is some time later, if nothing of it was offloaded."""
        if not self.ledgers:
            return self
        due_in_ms = None if self.due_in_ms is None else self.due_in_ms - passed_ms
        return replace(self, age_ms=self.age_ms + passed_ms, due_in_ms=due_in_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerView:
    """A ledger as its stream lists it, with its context (None: not read, or gone)."""

    listed: ListedLedger
    context: OffloadContext | None

    @property
    def state(self) -> str:
        """Where it is, as metrics say it: a state of its context, or open."""
        if not self.listed.closed:
            return "open"
        return _STATES[self.context.state] if self.context is not None else "unknown"

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
    """Everything that a decision about a stream may look at.

    ``trimmed``: ledgers that left the list, and of which something is left (None: no context).
    ``…_seen…``: the progress at which leaders first saw that it was so; ``closed_seen_ms``
    only of ledgers that are not offloaded, or whose successor came late or has not come yet.
    ``unseen_ms``: when an attempt was swept without seeing whether an upload of it is open, or was
    kept, as its ledger has no sound copy.
    """

    ledgers: Sequence[LedgerView]
    policy: Policy
    offload_through: LedgerId | None = None
    asked: Mapping[LedgerId, Asked] = field(default_factory=dict)
    complete_seen: Mapping[LedgerId, CopySeen] = field(default_factory=dict)
    swept_seen_ms: Mapping[UUID, int] = field(default_factory=dict)
    closed_seen_ms: Mapping[LedgerId, int] = field(default_factory=dict)
    unseen_ms: Mapping[UUID, int] = field(default_factory=dict)
    trimmed: Mapping[LedgerId, OffloadContext | None] = field(default_factory=dict)
    paused: bool = False
    deleting: bool = False
    """The whole stream is."""
    attributes: AttributesRecord | None = None
    """Checkpoints of what writers and applications keep beside it; None: there never was any."""
    attributes_named: Position | None = None
    """As of which entry the manifest names them."""
    attributes_swept_ms: int | None = None
    """The progress at which this leader last looked for what no checkpoint needs."""
    _block_sizes: dict[LedgerId | None, int] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Of the list, once it was asked for: it may be long, and be asked for very often."""

    def block_size(self, ledger_id: LedgerId) -> int:
        """Return a ledger's block size; of one that left the list, the largest that is known."""
        sizes = self._block_sizes
        if not sizes:
            sizes.update((one.listed.ledger_id, one.listed.block_size) for one in self.ledgers)
            own = self.policy.block_size or BLOCK_SIZE_DEFAULT
            sizes[None] = max(own, BLOCK_SIZE_DEFAULT, *sizes.values())
        return sizes.get(ledger_id) or sizes[None]

    @property
    def grounds(self) -> TrimGrounds:
        """What deletions stand on; as ``TrimGrounds.of`` says when they are carried out."""
        if self.deleting:
            return TrimGrounds(policy=None, paused=self.paused)
        return TrimGrounds(
            policy=self.policy, offload_through=self.offload_through, paused=self.paused
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOffload:
    """Ask for a ledger, for the ``count``-th time."""

    ledger_id: LedgerId
    trigger: Trigger
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteTier1:
    """Verify the copy once more, and delete the local one, if the grounds are the same then."""

    context: OffloadContext
    grounds: TrimGrounds


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepAbandoned:
    """Delete what an attempt left; ``strike_off``: it is the last time."""

    ledger_id: LedgerId
    attempt: AbandonedAttempt
    strike_off: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AbandonStalled:
    """Abandon an attempt that did not end, unless somebody is at it."""

    ledger_id: LedgerId
    uuid: UUID


Action = RequestOffload | DeleteTier1 | SweepAbandoned | AbandonStalled


def decide(view: StreamView, now: Now, delays: Delays) -> list[Action]:
    """Return what is to be done for a stream now, oldest ledger first within each kind.

    What retention does comes on top of it, see ``retention.decide``.
    """
    actions: list[Action] = []
    if not view.paused and not view.deleting:
        wanted = wanted_ledgers(view, now)
        actions += [
            RequestOffload(ledger_id=ledger_id, trigger=trigger, count=_count(view, ledger_id) + 1)
            for ledger_id, trigger in wanted.items()
            if _may_ask(view.asked.get(ledger_id), now, delays)
        ]
        actions.extend(_deletions(view, now))
        actions.extend(_stalled(view, wanted, now, delays))
    elif not view.paused:
        # A local deletion that was begun is ended first: nothing else leads out of it.
        actions.extend(_begun_deletions(view))
    # What an attempt left is never read: sweeping it is all that an admin does not stop.
    for one in view.ledgers:
        if one.context is not None and one.context.abandoned:
            actions.extend(sweeps(one.context, view, now, delays))
    return actions


def wanted_ledgers(view: StreamView, now: Now) -> dict[LedgerId, Trigger]:
    """Return the ledgers whose copy should be made now, and why; whether asked for or not."""
    waiting = [one for one in view.ledgers if one.to_offload]
    if not waiting:
        return {}
    wanted: dict[LedgerId, Trigger] = {}
    for one in _by_size(waiting, threshold(view.policy.offload_size_bytes)):
        wanted[one.listed.ledger_id] = Trigger.SIZE
    for one in waiting:
        left_ms = offload_due_in_ms(view, one, now)
        if left_ms is not None and left_ms <= 0:
            wanted[one.listed.ledger_id] = Trigger.TIME
        if view.offload_through is not None and one.listed.ledger_id <= view.offload_through:
            wanted[one.listed.ledger_id] = Trigger.ADMIN
    return dict(sorted(wanted.items()))


def offload_due_in_ms(view: StreamView, one: LedgerView, now: Now) -> int | None:
    """Return when a closed ledger is due by time; None: it never is.

    Early does no harm here, and late keeps data off tier 2: the larger of two clocks counts.
    """
    offload_time_ms = threshold(view.policy.offload_time_ms)
    if offload_time_ms is None:
        return None
    return offload_time_ms - _closed_for_ms(view, one.listed, now)


def _closed_for_ms(view: StreamView, one: ListedLedger, now: Now) -> int:
    return now.at_most_since(one.closed_ms, seen_ms=view.closed_seen_ms.get(one.ledger_id))


def _by_size(waiting: Sequence[LedgerView], size_bytes: int | None) -> Iterator[LedgerView]:
    """Iterate over the oldest ledgers, until less than the threshold is not offloaded."""
    if size_bytes is None:
        return
    left = sum(one.listed.length for one in waiting)
    for one in waiting:
        if left < size_bytes:
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


def _begun_deletions(view: StreamView) -> Iterator[DeleteTier1]:
    """Iterate over what a leader began and did not end: readers take it for gone already."""
    for one in view.ledgers:
        context = one.context
        if context is None or context.doubt is not None:
            continue
        if context.state is OffloadState.TIER1_DELETING:
            yield DeleteTier1(context=context, grounds=view.grounds)


def _deletions(view: StreamView, now: Now) -> Iterator[DeleteTier1]:
    yield from _begun_deletions(view)
    for one in view.ledgers:
        context = one.context
        if context is not None and context.state is OffloadState.COMPLETE:
            left_ms = deletion_due_in_ms(view, context, now)
            if left_ms is not None and left_ms <= 0:
                yield DeleteTier1(context=context, grounds=view.grounds)


def _stalled(
    view: StreamView, wanted: Container[LedgerId], now: Now, delays: Delays
) -> Iterator[AbandonStalled]:
    """Iterate over the attempts that nobody will ask to be made again."""
    for one in view.ledgers:
        context = one.context
        if context is None or context.uuid is None or context.ledger_id in wanted:
            continue
        if is_stalled(context, now_ms=now.wall_ms, safety_ms=delays.stalled_ms):
            yield AbandonStalled(ledger_id=context.ledger_id, uuid=context.uuid)


def deletion_due_in_ms(view: StreamView, context: OffloadContext, now: Now) -> int | None:
    """Return when the local copy of a complete ledger is to go; None: never, or not known yet."""
    lag_ms = threshold(view.policy.deletion_lag_ms)
    seen = view.complete_seen.get(context.ledger_id)
    if context.doubt is not None or lag_ms is None or seen is None or seen.uuid != context.uuid:
        return None
    return lag_ms - (now.progress_ms - seen.progress_ms)


def sweeps(
    context: OffloadContext, view: StreamView, now: Now, delays: Delays
) -> Iterator[SweepAbandoned]:
    """Iterate over the attempts of a ledger that are to be swept now."""
    wait_ms = delays.sweep_ms(view.block_size(context.ledger_id)) if context.abandoned else 0
    for attempt in context.abandoned:
        if _sweep_due_in_ms(attempt, view, now, wait_ms) == 0:
            again = attempt.swept_ms != 0
            yield SweepAbandoned(ledger_id=context.ledger_id, attempt=attempt, strike_off=again)


def sweep_due_in_ms(
    context: OffloadContext, view: StreamView, now: Now, delays: Delays
) -> int | None:
    """Return how long until the next sweep of a ledger's attempts; None: there are none."""
    if not context.abandoned:
        return None
    wait_ms = delays.sweep_ms(view.block_size(context.ledger_id))
    return min(_sweep_due_in_ms(one, view, now, wait_ms) for one in context.abandoned)


def _sweep_due_in_ms(attempt: AbandonedAttempt, view: StreamView, now: Now, wait_ms: int) -> int:
    since_ms = [view.unseen_ms[attempt.uuid]] if attempt.uuid in view.unseen_ms else []
    if attempt.swept_ms != 0:
        since_ms.append(view.swept_seen_ms.get(attempt.uuid, now.progress_ms))
    return max(0, wait_ms - (now.progress_ms - max(since_ms))) if since_ms else 0


def offload_lag(view: StreamView, now: Now) -> OffloadLag:
    """Return what of a stream is not in tier 2 yet."""
    waiting = [
        one
        for one in view.ledgers
        if not (one.listed.closed and one.listed.entry_count == 0)
        and (one.context is None or not one.context.complete)
    ]
    due_in_ms = [_due_in_ms(view, one, now) for one in waiting]
    due_in_ms.append(_due_by_size_in_ms(view, now))
    if view.paused:
        due_in_ms = []
    return OffloadLag(
        age_ms=max((_age_ms(view, one.listed, now) for one in waiting), default=0),
        length=sum(one.listed.length for one in waiting),
        ledgers=len(waiting),
        due_in_ms=min((one for one in due_in_ms if one is not None), default=None),
    )


def _due_in_ms(view: StreamView, one: LedgerView, now: Now) -> int | None:
    """Return when a ledger is due by time: of an open one, if it is sealed when it should be."""
    if one.listed.closed:
        return offload_due_in_ms(view, one, now)
    offload_time_ms = threshold(view.policy.offload_time_ms)
    if offload_time_ms is None:
        return None
    assert view.policy.ledger_age_ms_max is not None, "the defaults have one"
    return offload_time_ms + view.policy.ledger_age_ms_max - _age_ms(view, one.listed, now)


def _due_by_size_in_ms(view: StreamView, now: Now) -> int | None:
    """Return since when, below 0, the oldest ledger is due by size; None: it is not.

    It became due when the ledger was closed with which so much waited.
    """
    missing = threshold(view.policy.offload_size_bytes)
    if missing is None:
        return None
    for one in view.ledgers:
        if one.to_offload:
            missing -= one.listed.length
            if missing <= 0:
                return -_closed_for_ms(view, one.listed, now)
    return None


def _age_ms(view: StreamView, one: ListedLedger, now: Now) -> int:
    """Return how old a ledger may be: what a clock hides that is off, leaders may have seen."""
    seen = now.history.given_by(one.ledger_id), view.closed_seen_ms.get(one.ledger_id)
    seen_ms = min((each for each in seen if each is not None), default=None)
    return now.at_most_since(one.opened_ms, seen_ms=seen_ms)


def sealed_before(ledgers: Sequence[ListedLedger], before: Position | None) -> list[ListedLedger]:
    """Return the sealed ledgers that lie wholly before a position; all of them for None."""
    return [
        one
        for one in ledgers
        if one.closed and (before is None or Position(one.ledger_id, one.last_entry_id) < before)
    ]


def first_behind(
    ledgers: tuple[ListedLedger, ...], selected: list[ListedLedger]
) -> Position | None:
    """Return the first position behind what was selected; None in a stream without ledgers."""
    rest = ledgers[len(selected) :]
    if rest:
        return Position(rest[0].ledger_id, EntryId(0))
    if selected:
        return Position(selected[-1].ledger_id, EntryId(selected[-1].last_entry_id + 1))
    return None
