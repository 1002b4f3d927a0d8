"""What the answers to one writer's conditional appends mean (pure).

Each append is conditional on the writer's number before it, so the owner's number tells of all of
them at once. With ``n`` the highest number that is known to be there:

    answer of a batch            meaning
    its places                   it is there, and so is every batch before it
    n >= its last number         it is there; nobody says where
    n inside it                  its first events are there; the rest goes as a batch of its own
    n = the number before it     it is not there, and goes again
    n < the number before it     one before it failed: all go again from there, in order
    n > whatever was sent        somebody else uses the writer's id: refused
    n < what was acknowledged    the stream lost events, as a restore from the bucket may: refused
    no answer, or indeterminate  nothing is known: it goes again, under the same condition

A writer that can be resumed has a *session* besides, an attribute of its own that every append
expects. Whoever resumes the writer changes it, and what its predecessor sent, or left in some
queue, fails from then on. A number says what is there, not who sent it: so after a failed condition
session and number are asked for in one, and only a number of the writer's own session settles.

Owns these meanings. Does not own sending (``writer``), nor taking a writer over (``resuming``).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from uuid import UUID, uuid5

from tierlog.client.batches import PLACE_UNKNOWN, Batch, BatchBuilder
from tierlog.format.entry import AttributeUpdate, Verb
from tierlog.model.errors import Reason, RefusedError, TierlogError
from tierlog.model.ids import StreamName

NUMBER_DETAIL: Final = "event_number"
SESSION_NAME: Final = "session"


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """What a writer knows of its numbers in one stream."""

    acked: int
    """Of the last event that is known to be there."""
    sent: int
    """Of the last event that may be there."""


def session_key(writer_id: UUID) -> UUID:
    """Return the attribute that holds the session of a writer that can be resumed."""
    return uuid5(writer_id, SESSION_NAME)


def session_update(writer_id: UUID, session: int) -> AttributeUpdate:
    """Return what each append of that session carries: nothing changes, but it must hold."""
    return AttributeUpdate(
        key=session_key(writer_id),
        verb=Verb.REPLACE_IF_EQUALS,
        value=session,
        expected=session,
    )


def is_failed_condition(error: TierlogError | None) -> bool:
    """Tell whether an owner answered that a condition does not hold."""
    return error is not None and error.reason is Reason.CONDITIONAL_APPEND_FAILED


def number_told(error: TierlogError | None) -> int | None:
    """Return the writer's number that a failed condition tells of."""
    if error is None or not is_failed_condition(error):
        return None
    text = error.details.get(NUMBER_DETAIL, "")
    return int(text) if text.isascii() and text.isdigit() else None


def settle(
    batches: Sequence[Batch],
    builder: BatchBuilder,
    numbers: Numbers,
    *,
    stream: StreamName,
    own: int | None = None,
) -> list[Batch]:
    """Settle what the answers tell; return the batches, in order, or raise ``RefusedError``.

    Where one is there in part, two stand in its place: what is there, and the rest. ``own``: the
    number of this session, where there is one: those that the answers told may be another's.
    """
    if not batches:
        return []
    placed = [one.last_number for one in batches if one.ranges is not None]
    told = [one for one in map(_told, batches) if one is not None]
    number = max(placed + told, default=numbers.acked)
    if number > numbers.sent:
        raise _somebody_else(stream, number, numbers)
    if told and number < numbers.acked:
        raise _lost(stream, number, numbers)
    if own is not None:
        number = max([own, *placed])
    settled: list[Batch] = []
    for batch in batches:
        if batch.ranges is not None or number <= batch.after:
            settled.append(batch)
        elif number >= batch.last_number:
            batch.ranges, batch.error = PLACE_UNKNOWN, None
            settled.append(batch)
        else:
            rest = builder.rest(batch, number)
            rest.error = batch.error
            batch.payload_len -= rest.payload_len
            batch.last_number = number
            batch.ranges, batch.error = PLACE_UNKNOWN, None
            settled += (batch, rest)
    return settled


def _told(batch: Batch) -> int | None:
    return number_told(batch.error) if batch.ranges is None else None


def _somebody_else(stream: StreamName, number: int, numbers: Numbers) -> RefusedError:
    return RefusedError(
        f"{stream} has number {number} of this writer, which sent none above {numbers.sent}",
        reason=Reason.CONDITIONAL_APPEND_FAILED,
        remedy="Somebody else uses the writer's id: let one of them go on, from its stored state",
        details={NUMBER_DETAIL: str(number)},
    )


def _lost(stream: StreamName, number: int, numbers: Numbers) -> RefusedError:
    return RefusedError(
        f"{stream} has number {number} of this writer, and had acknowledged {numbers.acked}",
        reason=Reason.CONDITIONAL_APPEND_FAILED,
        remedy="The stream lost events, as after a restore: resume the writer, and send again what "
        f"came after event {number}",
        details={NUMBER_DETAIL: str(number)},
    )


def session_over(stream: StreamName, numbers: Numbers) -> RefusedError:
    """Say that another process goes on with this writer."""
    return RefusedError(
        f"another process resumed this writer of {stream}",
        reason=Reason.FENCED,
        remedy="Let that one go on: what was sent here and not acknowledged is its to send again",
        details={NUMBER_DETAIL: str(numbers.acked)},
    )
