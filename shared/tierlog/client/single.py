"""One append at a time, under a condition: all of its events, or none of them.

Owns the entry, and what an answer means where there is no writer behind it. A condition on the
writer's number makes an append harmless to send again; one on the position alone does not: the
entry that is in the way may be its own.

A number says what is there, not who sent it. So only behind a lost answer of this very call does
the expected one acknowledge its events; else it is another's, or an earlier call's: refused. What
ends the tries behind a lost answer, and does not tell what became of that, leaves the doubt.
"""

from collections.abc import Sequence
from uuid import UUID

from tierlog.client.batches import Event, draft_of
from tierlog.client.idempotent import is_failed_condition, number_told
from tierlog.client.owners import OwnerConnections, append_alone
from tierlog.format.entry import AttributeUpdate, StructuredEvent, encode_entry
from tierlog.model.attributes import AppendCondition
from tierlog.model.errors import IndeterminateError, RefusedError, TierlogError
from tierlog.model.ids import StreamName
from tierlog.model.position import Position
from tierlog.ports.clock import Clock


async def append_events(
    stream: StreamName,
    events: Sequence[Event],
    *,
    owners: OwnerConnections,
    clock: Clock,
    writer_id: UUID | None,
    condition: AppendCondition,
    updates: Sequence[AttributeUpdate],
    append_s_max: float,
    retry_s_max: float,
) -> Position | None:
    """Append events as one entry; return where it is, None where only its number was told."""
    before = condition.last_event_number
    if (writer_id is None) != (before is None):
        raise RefusedError(
            "a writer's id and its last event number belong together",
            remedy="Give both, or a position alone",
        )
    if len({isinstance(one, StructuredEvent) for one in events}) > 1:
        raise RefusedError(
            "plain and structured events do not share an entry", remedy="Append one kind"
        )
    number = before + len(events) if before is not None else 0
    now_ms = clock.wall_ms()
    data = encode_entry(
        events,
        publish_time_ms=now_ms,
        writer_id=writer_id,
        event_number=number,
        attribute_updates=updates,
    )
    conditional = before is not None or condition.after is not None
    lost: list[bool] = []
    numbered = before is not None and number > before
    try:
        places = await append_alone(
            owners,
            stream,
            draft_of([data], now_ms=now_ms),
            condition=condition if conditional else None,
            append_s_max=append_s_max,
            retry_s_max=retry_s_max,
            on_doubt=(lambda: lost.append(True)) if numbered else None,
        )
    except TierlogError as error:
        told = number_told(error)
        if lost and told == number:
            return None
        if lost and (told > number if told is not None else not is_failed_condition(error)):
            raise _in_doubt(number, error) from error
        if numbered and told == number:
            error.remedy = (
                f"It was another, or an earlier call, that got to number {number}: if nobody else "
                "uses the writer's id and these events were sent before, they are there"
            )
        raise
    return Position(places[-1].ledger_id, places[-1].last_entry_id)


def _in_doubt(number: int, error: TierlogError) -> IndeterminateError:
    if isinstance(error, IndeterminateError):
        return error
    return IndeterminateError(
        f"an answer was lost, and the tries behind it do not tell what became of it: {error}",
        remedy="Append the same events again behind the same number, or look where the stream is: "
        f"they may be there up to number {number}",
    )
