"""What will happen to each ledger of a stream, and when, for people: a function of what is known.

Owns the words. Does not own decisions: times come from the functions that decisions are made by,
so that what is said to be due now is what the next pass does.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from tierlog.model.ids import LedgerId
from tierlog.model.offload import DOUBT_REMEDY, Doubt, OffloadContext, OffloadState
from tierlog.model.policy import threshold
from tierlog_scheduler.clocks import Now
from tierlog_scheduler.policy import (
    Delays,
    LedgerView,
    StreamView,
    deletion_due_in_ms,
    offload_due_in_ms,
    sweep_due_in_ms,
    wanted_ledgers,
)
from tierlog_scheduler.retention import Behind, judge, trimmable, with_what_is_behind


class What(StrEnum):
    """What can happen to a ledger."""

    SEAL = "seal"
    OFFLOAD = "offload"
    DELETE_LOCAL = "delete local copy"
    TRIM = "trim"
    CLEAN = "clean up"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One thing that will happen. ``in_ms`` 0: it is due; None: not by time alone, or never."""

    ledger_id: LedgerId
    what: What
    in_ms: int | None
    why: str


def explain(view: StreamView, now: Now, delays: Delays) -> list[Step]:
    """Return what comes next for each ledger, in the order of the list, what left it last."""
    wanted = wanted_ledgers(view, now)
    trimmed = frozenset(trimmable(view, now))
    waiting_bytes = sum(one.listed.length for one in view.ledgers if one.to_offload)
    steps: list[Step] = []
    for one, behind in with_what_is_behind(view.ledgers):
        ledger_id = one.listed.ledger_id
        if not one.listed.closed:
            steps.append(_seal(view, one, now))
        elif one.to_offload:
            trigger = wanted.get(ledger_id)
            steps.append(
                _offload(view, one, now, trigger.value if trigger else None, waiting_bytes)
            )
        if one.context is not None:
            steps.extend(_delete_local(view, one.context, now))
            steps.extend(_clean(view, one.context, now, delays))
        if one.listed.closed:
            steps.append(_trim(view, one, now, behind, goes=ledger_id in trimmed))
    for ledger_id, context in view.trimmed.items():
        steps.append(_finish_trim(view, ledger_id, context, now, delays))
    return steps


def _seal(view: StreamView, one: LedgerView, now: Now) -> Step:
    age_ms_max = view.policy.ledger_age_ms_max
    assert age_ms_max is not None, "the defaults have one"
    left_ms = max(0, age_ms_max - now.at_most_since(one.listed.opened_ms))
    return Step(
        ledger_id=one.listed.ledger_id,
        what=What.SEAL,
        in_ms=left_ms,
        why=f"by its owner, {age_ms_max} ms after it was opened; earlier when it is full",
    )


def _offload(
    view: StreamView, one: LedgerView, now: Now, trigger: str | None, waiting_bytes: int
) -> Step:
    ledger_id = one.listed.ledger_id
    if view.paused or view.deleting:
        why = "offloading of the stream is paused" if view.paused else "its stream is being deleted"
        return Step(ledger_id=ledger_id, what=What.OFFLOAD, in_ms=None, why=why)
    if trigger is not None:
        asked = view.asked.get(ledger_id)
        count = "not asked for yet" if asked is None else f"asked for {asked.count} times"
        return Step(
            ledger_id=ledger_id, what=What.OFFLOAD, in_ms=0, why=f"due by {trigger}; {count}"
        )
    left_ms = offload_due_in_ms(view, one, now)
    size_bytes = threshold(view.policy.offload_size_bytes)
    if left_ms is not None:
        why = f"offload_time is {view.policy.offload_time_ms} ms since it was sealed"
    elif size_bytes is not None:
        why = f"once {max(0, size_bytes - waiting_bytes)} more bytes wait to be offloaded"
    else:
        why = "no level sets offload_time or offload_size"
    return Step(ledger_id=ledger_id, what=What.OFFLOAD, in_ms=left_ms, why=why)


def _delete_local(view: StreamView, context: OffloadContext, now: Now) -> Iterator[Step]:
    if not context.complete or context.bookkeeper_deleted:
        return
    if context.state is OffloadState.TIER1_DELETED:
        return
    lag_ms = threshold(view.policy.deletion_lag_ms)
    left_ms: int | None = None
    if view.paused:
        why = "deletions of the stream are paused"
    elif view.deleting:
        why = "it goes with its stream"
    elif context.state is OffloadState.TIER1_DELETING:
        left_ms, why = 0, "begun, and to be ended"
    elif context.state is not OffloadState.COMPLETE:
        why = f"after it is {context.state.name} no more"
    elif context.doubt is not None:
        why = doubt_text(context.doubt)
    elif lag_ms is None:
        why = "deletion_lag is never"
    else:
        left_ms = deletion_due_in_ms(view, context, now)
        why = f"deletion_lag is {lag_ms} ms since its copy was seen complete"
    in_ms = None if left_ms is None else max(0, left_ms)
    yield Step(ledger_id=context.ledger_id, what=What.DELETE_LOCAL, in_ms=in_ms, why=why)


def doubt_text(doubt: Doubt) -> str:
    """Say of a copy what was found wrong with it, and what helps."""
    return (
        f"its copy in tier 2 was found damaged: {doubt.cause}; until that is mended, a local copy "
        f"stays. {DOUBT_REMEDY}"
    )


def _clean(view: StreamView, context: OffloadContext, now: Now, delays: Delays) -> Iterator[Step]:
    in_ms = sweep_due_in_ms(context, view, now, delays)
    if in_ms is not None:
        why = f"{len(context.abandoned)} abandoned attempts are swept, twice"
        yield Step(ledger_id=context.ledger_id, what=What.CLEAN, in_ms=in_ms, why=why)


def _finish_trim(
    view: StreamView, ledger_id: LedgerId, context: OffloadContext | None, now: Now, delays: Delays
) -> Step:
    in_ms: int | None = 0
    if context is None:
        left = "its context"
    else:
        left = f"{len(context.abandoned)} attempts"
        if context.bookkeeper_deleted and not context.is_trimmed:
            in_ms = sweep_due_in_ms(context, view, now, delays)
    why = f"trimmed; left: {left}"
    if view.paused:
        in_ms, why = None, f"{why}; deletions of the stream are paused"
    return Step(ledger_id=ledger_id, what=What.CLEAN, in_ms=in_ms, why=why)


def _trim(view: StreamView, one: LedgerView, now: Now, behind: Behind, *, goes: bool) -> Step:
    verdict = judge(view, one, now, behind)
    in_ms, why = verdict.in_ms, verdict.why
    if view.paused:
        in_ms, why = None, "deletions of the stream are paused"
    elif verdict.goes and not goes:
        in_ms, why = None, f"{why}; but an older ledger stays, and only a prefix goes"
    return Step(ledger_id=one.listed.ledger_id, what=What.TRIM, in_ms=in_ms, why=why)
