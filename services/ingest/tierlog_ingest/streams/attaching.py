"""Staging ledgers on their way into a stream, at its owner (ADR-0031).

Owns what is looked at before they may be attached, and the attach itself once it is their turn.
Does not own the turn, nor closing the open ledger before it (``owner``), nor the transaction
(``LedgerCatalog.attach``).

Invariants:
    * Nothing is attached that was not read to its end first: every entry can be read, and sets
      the writer's number, and nothing else, where it sets anything. The first entry of each
      ledger does, so that the number is in the stream for as long as any of them is.
    * Whether the writer's number is there already is asked before, and once more in the turn,
      when nothing is under way and nobody else can change it.
    * The owner's attributes count in what was attached before anything else is appended.

Reading takes place beside the appends; in the turn no entry is read, and the attribute index is
waited for no longer than ``IN_TURN_S_MAX``.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from tierlog.catalog import Catalog
from tierlog.catalog.ledgers import LedgersBehindError, checked_staging, context_not_found
from tierlog.format.attribute_changes import attribute_key, change_of
from tierlog.format.entry import Verb
from tierlog.model.errors import (
    IndeterminateError,
    Reason,
    RefusedError,
    RetryableError,
    TierlogError,
)
from tierlog.model.ids import EntryId, LedgerId
from tierlog.model.ledger import DigestType, LedgerMetadata
from tierlog.model.position import Position
from tierlog.model.staging import Staging
from tierlog.model.stream import ListedLedger, Stream
from tierlog.ports.streams import Attachment, AttachOutcome
from tierlog_ingest.streams.attributes.keeper import AttributeKeeper
from tierlog_ingest.streams.attributes.replay import OpenLedger, entries_after
from tierlog_ingest.streams.attributes.state import AttributeState

IN_TURN_S_MAX: Final = 1.0
"""Appends wait meanwhile."""

Put = Callable[[Sequence[LedgerId]], Awaitable[Stream]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Surveyed:
    """A staging ledger that was read: its last entry, its events, its bytes."""

    end: Position
    events: int
    size: int


@dataclass(slots=True, eq=False)
class Attaching:
    """Staging ledgers that wait for the owner's turn, and for whoever asked."""

    wanted: Attachment
    surveyed: tuple[Surveyed, ...]
    answer: asyncio.Future[AttachOutcome]

    def tell(self, outcome: AttachOutcome) -> None:
        """Answer, if somebody still waits."""
        if not self.answer.done():
            self.answer.set_result(outcome)

    def fail(self, error: TierlogError) -> None:
        """Answer with an error."""
        if not self.answer.done():
            self.answer.set_exception(error)


async def is_there(keeper: AttributeKeeper, wanted: Attachment) -> bool:
    """Tell whether the writer's number is that high already."""
    key = attribute_key(wanted.writer_id)
    return (await keeper.get([key])).values.get(key, 0) >= wanted.number


async def survey(
    wanted: Attachment,
    claimed: Stream,
    catalog: Catalog,
    open_ledger: OpenLedger,
    *,
    signed: bool,
) -> tuple[Surveyed, ...]:
    """Read the ledgers to their ends; refuse what would not do in the stream.

    ``signed``: the owner signs its ledgers, so that one without a key is refused.
    """
    found: list[Surveyed] = []
    for ledger_id in wanted.ledger_ids:
        metadata = await catalog.ledgers.get(ledger_id)
        if metadata is None:
            raise context_not_found(ledger_id)
        staging = checked_staging(claimed, ledger_id, metadata)
        if (staging.writer_id, staging.number) != (wanted.writer_id, wanted.number):
            raise _refused(ledger_id, "was staged by another writer, or with another number")
        if signed and metadata.digest_type is not DigestType.HMAC:
            raise _refused(ledger_id, "is not signed, and ledgers of this cluster are")
        found.append(await _survey_one(ledger_id, metadata, staging, open_ledger))
    return tuple(found)


async def _survey_one(
    ledger_id: LedgerId, metadata: LedgerMetadata, staging: Staging, open_ledger: OpenLedger
) -> Surveyed:
    listed = ListedLedger(
        ledger_id=ledger_id,
        opened_ms=0,
        block_size=staging.block_size,
        owner_epoch=0,
        closed=True,
        last_entry_id=metadata.last_entry_id,
        length=metadata.length,
    )
    events = size = 0
    async with aclosing(entries_after([listed], None, open_ledger)) as read:
        async for place, entries in read:
            for offset, entry in enumerate(entries):
                events += _events_of(entry, staging, Position(ledger_id, _at(place, offset)))
                size += len(entry)
    end = Position(ledger_id, metadata.last_entry_id)
    return Surveyed(end=end, events=events, size=size)


def _at(place: Position, offset: int) -> EntryId:
    return EntryId(place.entry_id + offset)


def _events_of(entry: memoryview, staging: Staging, where: Position) -> int:
    """Return how many events an entry has; refuse one that does not belong into the stream."""
    change = change_of(entry)
    if change is None:
        raise _refused(where.ledger_id, f"has an entry that can't be read: {where}")
    sets = [(one.key, one.verb, one.value) for one in change.updates]
    own: tuple[UUID, Verb, int] = (staging.writer_id, Verb.REPLACE, staging.number)
    if change.writer is not None or any(one != own for one in sets):
        raise _refused(where.ledger_id, f"changes other attributes than its writer's: {where}")
    if where.entry_id == 0 and not sets:
        raise _refused(where.ledger_id, "does not set its writer's number in its first entry")
    return change.event_count


async def attach_next(
    one: Attaching, *, keeper: AttributeKeeper, state: AttributeState, put: Put
) -> None:
    """Attach in the owner's turn, no ledger being open, and answer.

    Raises what the owner can't go on after: it is not known whether they were attached, or it is
    the owner no more.
    """
    try:
        async with asyncio.timeout(IN_TURN_S_MAX):
            there = await is_there(keeper, one.wanted)
    except TimeoutError:
        one.fail(_no_number(one.wanted))
        return
    except TierlogError as error:
        one.fail(error)
        return
    if there:
        one.tell(AttachOutcome.THERE)
        return
    try:
        await put(one.wanted.ledger_ids)
    except LedgersBehindError:
        one.tell(AttachOutcome.IDS_TOO_LOW)
        return
    except asyncio.CancelledError:
        one.fail(_in_doubt(one.wanted))
        raise
    except TierlogError as error:
        one.fail(error)
        if isinstance(error, RefusedError) and error.reason is not Reason.FENCED:
            return
        raise
    made = {attribute_key(one.wanted.writer_id): one.wanted.number}
    for ledger in one.surveyed:
        state.replay(made, ledger.events, end=ledger.end, size=ledger.size)
    keeper.confirmed()
    one.tell(AttachOutcome.ATTACHED)


def _in_doubt(wanted: Attachment) -> IndeterminateError:
    return IndeterminateError(
        f"whether number {wanted.number} of writer {wanted.writer_id} was attached is not known: "
        "the owner was cut off",
        remedy="Ask again, by the same number: that settles it",
    )


def _no_number(wanted: Attachment) -> RetryableError:
    return RetryableError(
        f"the number of writer {wanted.writer_id} could not be read in {IN_TURN_S_MAX:.0f} s",
        remedy="Nothing was attached; check that the object store is reachable, and ask again",
    )


def _refused(ledger_id: LedgerId, why: str) -> RefusedError:
    return RefusedError(
        f"ledger {ledger_id} can't be attached: it {why}",
        remedy="Stage ledgers by Tierlog's own client, of this version",
        details={"ledger_id": str(ledger_id)},
    )
