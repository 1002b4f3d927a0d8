"""The entries of a stream behind a position, for who rebuilds its attributes.

Owns the order of ledgers and entries, going on with a ledger's copy in tier 2 where its nodes
fail, and finding out what no tier gives. Does not own where a ledger's entries are: ``OpenLedger``
opens tier 1, or tier 2 where that has it alone; nor what is given up.

Invariants:
    * Every entry behind the position is given once, in order, or the iteration raises; but for
      those that were given up with an admin's consent, whether they can be read again or not.
    * All ledgers are closed: nothing behind the last of them is in the stream.
    * Tier 2 that is away may have what is asked for.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Final

import structlog

from tierlog.ledger.reader import ReadHandle, closing_runs
from tierlog.model.errors import (
    CorruptError,
    Reason,
    RefusedError,
    RetryableError,
    TierlogError,
)
from tierlog.model.ids import EntryId, LedgerId
from tierlog.model.position import Position
from tierlog.model.replication import EntryRange
from tierlog.model.spans import without
from tierlog.model.stream import ListedLedger

log = structlog.get_logger()

Entries = AsyncGenerator[tuple[Position, Sequence[memoryview]], None]
OpenLedger = Callable[[LedgerId], Awaitable[ReadHandle]]
Lost = Mapping[LedgerId, Sequence[EntryRange]]

_GONE: Final = frozenset({Reason.LEDGER_NOT_FOUND, Reason.NO_SUCH_ENTRY})


class CopyAwayError(RetryableError):
    """A ledger's nodes don't give it, and whether its copy has it is not known."""


async def entries_after(
    ledgers: Sequence[ListedLedger],
    through: Position | None,
    open_ledger: OpenLedger,
    open_copy: OpenLedger | None = None,
    lost: Lost | None = None,
) -> Entries:
    """Give the entries behind ``through``, some at once, each time with the first one's place.

    ``open_copy`` opens what tier 2 has of a ledger, for where its nodes don't give it; ``lost``
    are entries to leave out.
    """
    for ledger, first, last in pieces_after(ledgers, through, lost or {}):
        piece = replace(ledger, last_entry_id=last)
        try:
            async with aclosing(_from_either(piece, first, open_ledger, open_copy)) as found:
                async for place, entries in found:
                    yield place, entries
        except RefusedError as error:
            if error.reason not in _GONE:
                raise
            raise RetryableError(
                f"ledger {ledger.ledger_id} went elsewhere while it was read: {error.message}",
                remedy="It is looked up again",
            ) from error


def pieces_after(
    ledgers: Sequence[ListedLedger], through: Position | None, lost: Lost
) -> list[tuple[ListedLedger, EntryId, EntryId]]:
    """Return the ranges of entries behind a position, ascending, without those that are lost."""
    found = []
    for ledger in ledgers:
        assert ledger.closed
        first = EntryId(0)
        if through is not None:
            if ledger.ledger_id < through.ledger_id:
                continue
            if ledger.ledger_id == through.ledger_id:
                first = EntryId(through.entry_id + 1)
        if first <= ledger.last_entry_id:
            whole = [(first, ledger.last_entry_id)]
            left = without(whole, lost.get(ledger.ledger_id, ()))
            found += [(ledger, one, other) for one, other in left]
    return found


async def next_readable(
    ledger: ListedLedger, first: EntryId, open_ledger: OpenLedger, open_copy: OpenLedger | None
) -> EntryId:
    """Return the next entry from ``first`` on that a tier gives, or the one behind the last.

    Damage is taken to be in one piece: behind more of it, a piece of what is good is not seen.
    Raises ``RetryableError`` when tier 2 is away.
    """

    async def is_given(entry_id: EntryId) -> bool:
        return await _is_given(ledger, entry_id, open_ledger, open_copy)

    if await is_given(first):
        return first
    end, step = EntryId(ledger.last_entry_id + 1), 1
    bad, good = first, EntryId(first + 1)
    while good < end and not await is_given(good):
        bad, step = good, 2 * step
        good = min(EntryId(bad + step), end)
    while good - bad > 1:
        middle = EntryId((bad + good) // 2)
        if await is_given(middle):
            good = middle
        else:
            bad = middle
    return good


async def _is_given(
    ledger: ListedLedger,
    entry_id: EntryId,
    open_ledger: OpenLedger,
    open_copy: OpenLedger | None,
) -> bool:
    only = replace(ledger, last_entry_id=entry_id)
    try:
        async with aclosing(_from_either(only, entry_id, open_ledger, open_copy)) as found:
            async for _ in found:
                return True
    except CopyAwayError:
        raise
    except (RetryableError, CorruptError):
        return False
    except RefusedError as error:
        if error.reason not in _GONE:
            raise
    return False


async def _from_either(
    ledger: ListedLedger, first: EntryId, open_ledger: OpenLedger, open_copy: OpenLedger | None
) -> Entries:
    """Give the entries of a ledger; from tier 2 what its nodes can't give, if a copy is there."""
    position = first
    try:
        async with aclosing(_from_one(ledger, first, open_ledger)) as found:
            async for place, entries in found:
                yield place, entries
                position = EntryId(place.entry_id + len(entries))
    except (RetryableError, CorruptError) as error:
        if open_copy is None:
            raise
        trouble: TierlogError = error
    else:
        return
    log.info("attributes.read_copy", ledger_id=ledger.ledger_id, cause=str(trouble))
    try:
        async with aclosing(_from_one(ledger, position, open_copy)) as found:
            async for place, entries in found:
                yield place, entries
    except RetryableError as error:
        raise CopyAwayError(error.message, reason=error.reason, remedy=error.remedy) from error
    except TierlogError as error:
        # There is none, or it is no better: the nodes may come back.
        raise trouble from error


async def _from_one(ledger: ListedLedger, first: EntryId, open_ledger: OpenLedger) -> Entries:
    handle = await open_ledger(ledger.ledger_id)
    try:
        async with aclosing(_entries(handle, first, ledger.last_entry_id)) as found:
            async for place, entries in found:
                yield place, entries
    finally:
        await handle.close()


async def _entries(handle: ReadHandle, first: EntryId, last: EntryId) -> Entries:
    position = first
    for part_first, part_last in without([(first, last)], handle.ledger_metadata.lost):
        if part_first > position:
            log.warning("attributes.entries_lost", ledger_id=handle.ledger_id, first=position)
        position = part_first
        read = handle.read_runs(part_first, part_last)
        async with closing_runs(read):
            async for runs in read:
                for run in runs:
                    end = min(part_last, run.last_entry_id)
                    skipped = position - run.first_entry_id
                    entries = list(run.entries())[skipped : end - run.first_entry_id + 1]
                    yield Position(handle.ledger_id, position), entries
                    position = EntryId(end + 1)
