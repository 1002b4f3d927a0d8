"""What an admin asks to be offloaded: everything sealed before a position, of one or more streams.

Owns the wish and the first request. Does not own that it comes true: the wish is kept in the
streams' metadata, and whoever leads asks until it is done.

Invariant: what is asked for here is remembered by a leader alone; of others nobody would ever
forget it.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from tierlog.catalog import Catalog
from tierlog.catalog.streams import StreamSnapshot, check_not_paused
from tierlog.model.errors import IndeterminateError, RetryableError
from tierlog.model.ids import EntryId, LedgerId, StreamName
from tierlog.model.position import Position
from tierlog.model.stream import ListedLedger, Stream, check_in_stream
from tierlog.offload.messages import Trigger
from tierlog_scheduler.actions import Actions, Memory
from tierlog_scheduler.clocks import Now
from tierlog_scheduler.policy import LedgerView, RequestOffload, first_behind, sealed_before

log = structlog.get_logger()

ASK_S_MAX: Final = 5.0
"""So long an admin waits for the queue; a client waits longer for the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixOffload:
    """What an admin's wish came to: ``position`` is where what is not selected begins."""

    position: Position | None
    selected: tuple[LedgerId, ...]
    requested: tuple[LedgerId, ...]


class PrefixOffloads:
    """Takes admins' wishes, of any process."""

    def __init__(
        self, catalog: Catalog, actions: Actions, memory: Memory, *, leading: Callable[[], bool]
    ) -> None:
        self._catalog = catalog
        self._actions = actions
        self._memory = memory
        self._leading = leading

    async def offload(
        self, names: Sequence[StreamName], before: Position | None, now: Now
    ) -> list[PrefixOffload]:
        """Want every sealed ledger of streams before a position offloaded, and ask for them now.

        What the queue does not take within ``ASK_S_MAX`` is not among ``requested``: a pass asks
        for it. Raises NO_SUCH_ENTRY or TRIMMED for a position that a stream does not have.
        """
        wished = [await self._want(name, before) for name in names]
        requested: set[LedgerId] = set()
        try:
            async with asyncio.timeout(ASK_S_MAX):
                for snapshot, selected in wished:
                    for listed in selected:
                        if await self._ask_for(snapshot.stream, listed, now):
                            requested.add(listed.ledger_id)
        except (RetryableError, IndeterminateError, TimeoutError) as error:
            log.warning("offload.asked_later", streams=list(names), cause=str(error) or "timeout")
        return [
            PrefixOffload(
                position=first_behind(snapshot.ledgers, selected),
                selected=tuple(one.ledger_id for one in selected),
                requested=tuple(one.ledger_id for one in selected if one.ledger_id in requested),
            )
            for snapshot, selected in wished
        ]

    async def _want(
        self, name: StreamName, before: Position | None
    ) -> tuple[StreamSnapshot, list[ListedLedger]]:
        snapshot = await self._catalog.streams.snapshot(name)
        check_not_paused(snapshot.stream)
        if before is not None:
            ends = [(one.ledger_id, _end_of(one)) for one in snapshot.ledgers]
            check_in_stream(name, ends, before)
        selected = sealed_before(snapshot.ledgers, before)
        if selected:
            await self._catalog.streams.want_offloaded(name, selected[-1].ledger_id)
        return snapshot, selected

    async def _ask_for(self, stream: Stream, listed: ListedLedger, now: Now) -> bool:
        """Ask workers for a ledger that is not offloaded; True once the queue has the request."""
        context = await self._catalog.contexts.get(listed.ledger_id)
        if not LedgerView(listed=listed, context=context).to_offload:
            return False
        asked = self._memory.asked.get(listed.ledger_id)
        count = 1 if asked is None else asked.count + 1
        action = RequestOffload(ledger_id=listed.ledger_id, trigger=Trigger.ADMIN, count=count)
        await self._actions.request(stream, action, now)
        if not self._leading():
            self._memory.asked.pop(listed.ledger_id, None)
        return True


def _end_of(one: ListedLedger) -> EntryId | None:
    return one.last_entry_id if one.closed else None
