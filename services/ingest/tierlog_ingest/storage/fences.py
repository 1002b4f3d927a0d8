"""Which ledgers take no ordinary adds any more.

Owns: the set, and fences whose record is not durable yet. Does not own the journal.

Invariant: a fence that was not stored is taken back, and holds nobody up.
"""

from typing import Final

from tierlog.model.ids import LedgerId
from tierlog_ingest.storage.journal.journal import Appended, GroupFuture

_UNDER_WAY_MAX: Final = 64
"""From so many on, those that are durable meanwhile are let go of."""


class Fences:
    """The fences of one node. ``fenced`` may be ahead of the journal."""

    def __init__(self) -> None:
        self.fenced: set[LedgerId] = set()
        self._under_way: dict[LedgerId, Appended] = {}

    def __contains__(self, ledger_id: LedgerId) -> bool:
        return ledger_id in self.fenced

    def __len__(self) -> int:
        return len(self.fenced)

    def __repr__(self) -> str:
        return f"<Fences {len(self.fenced)}, under way={len(self._under_way)}>"

    def begin(self, ledger_id: LedgerId, appended: Appended) -> None:
        """Fence a ledger as far as this process knows."""
        self.fenced.add(ledger_id)
        if len(self._under_way) >= _UNDER_WAY_MAX:
            for one in list(self._under_way):
                self.under_way(one)
        self._under_way[ledger_id] = appended

    def under_way(self, ledger_id: LedgerId) -> GroupFuture | None:
        """Return what to wait for before the fence is answered."""
        appended = self._under_way.get(ledger_id)
        if appended is None:
            return None
        if appended.done.done() and appended.done.exception() is None:
            del self._under_way[ledger_id]
            return None
        return appended.done

    def roll_back(self, seq: int) -> None:
        """Take back the fences whose record has this number, or a higher one."""
        for ledger_id, appended in list(self._under_way.items()):
            if appended.seq >= seq:
                del self._under_way[ledger_id]
                self.fenced.discard(ledger_id)

    def forget(self, ledger_id: LedgerId) -> None:
        """Forget a ledger that was freed: its id is refused for that."""
        self.fenced.discard(ledger_id)
        self._under_way.pop(ledger_id, None)
