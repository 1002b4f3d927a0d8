"""What the node keeps in memory of each ledger that was used since the start, and who waits.

Owns: the ends of ledgers (last entry, LAC), and waiting for the LAC. Does not own runs (``store``).

    indexed_to <= last_entry_id
         indexed_to      the last entry that has a slot in the index
         last_entry_id   that, or the last one in the write buffer

Invariants:
    * A ledger that is in here was looked up: what it says of the ledger's end is known.
    * The LAC never goes back.
    * An idle ledger costs one small object: no event, no future, no lock.
"""

import asyncio
import contextlib
from collections.abc import Iterator

from tierlog.model.ids import NO_ENTRY, EntryId, LedgerId


class Held:
    """One ledger's end."""

    __slots__ = ("indexed_to", "last_add_confirmed", "last_entry_id")

    def __init__(self, indexed_to: EntryId, last_add_confirmed: EntryId) -> None:
        self.indexed_to = indexed_to
        self.last_entry_id = indexed_to
        self.last_add_confirmed = last_add_confirmed

    def __repr__(self) -> str:
        return f"<Held to {self.indexed_to}/{self.last_entry_id}, LAC {self.last_add_confirmed}>"

    def extend(self, last_entry_id: EntryId) -> None:
        """Take note of a run that the write buffer has."""
        self.last_entry_id = max(self.last_entry_id, last_entry_id)

    def indexed(self, last_entry_id: EntryId) -> None:
        """Take note of a run that the index has."""
        self.indexed_to = max(self.indexed_to, last_entry_id)
        self.last_entry_id = max(self.last_entry_id, last_entry_id)


class Ledgers:
    """All of them."""

    def __init__(self) -> None:
        self._held: dict[LedgerId, Held] = {}
        self._moves: dict[LedgerId, tuple[asyncio.Event, list[None]]] = {}

    def __repr__(self) -> str:
        return f"<Ledgers {len(self._held)}, awaited={len(self._moves)}>"

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[LedgerId]:
        return iter(self._held)

    def get(self, ledger_id: LedgerId) -> Held | None:
        """Return the ledger; None: it was not looked up yet, or there is none."""
        return self._held.get(ledger_id)

    def hold(
        self, ledger_id: LedgerId, *, indexed_to: EntryId, last_add_confirmed: EntryId
    ) -> Held:
        """Return the ledger, which is as said if it is new."""
        held = self._held.get(ledger_id)
        if held is None:
            held = self._held[ledger_id] = Held(indexed_to, NO_ENTRY)
            self.confirm(ledger_id, last_add_confirmed)
        return held

    def forget(self, ledger_id: LedgerId) -> None:
        """Drop a ledger; whoever waits for it looks again."""
        self._held.pop(ledger_id, None)
        self._wake(ledger_id)

    def last_add_confirmed(self, ledger_id: LedgerId) -> EntryId:
        """Return the LAC; -1 where none is known."""
        held = self._held.get(ledger_id)
        return NO_ENTRY if held is None else held.last_add_confirmed

    def confirm(self, ledger_id: LedgerId, last_add_confirmed: EntryId) -> None:
        """Move the LAC of a ledger that is in here."""
        held = self._held[ledger_id]
        if last_add_confirmed > held.last_add_confirmed:
            held.last_add_confirmed = last_add_confirmed
            if self._moves:
                self._wake(ledger_id)

    async def wait_for(self, ledger_id: LedgerId, entry_id: EntryId, *, wait_s: float) -> EntryId:
        """Wait until the LAC is at ``entry_id``, or until the time is over; return the LAC."""
        if wait_s > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    while self.last_add_confirmed(ledger_id) < entry_id:
                        await self._moved(ledger_id)
        return self.last_add_confirmed(ledger_id)

    async def _moved(self, ledger_id: LedgerId) -> None:
        event, waiting = self._moves.setdefault(ledger_id, (asyncio.Event(), []))
        waiting.append(None)
        try:
            await event.wait()
        finally:
            waiting.pop()
            if not waiting and self._moves.get(ledger_id) == (event, waiting):
                del self._moves[ledger_id]

    def _wake(self, ledger_id: LedgerId) -> None:
        moved = self._moves.pop(ledger_id, None)
        if moved is not None:
            moved[0].set()
