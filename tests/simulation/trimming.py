"""Rule j of the checker: retention takes ledgers away, and nothing else does.

    j  a ledger leaves the list only from its front, closed, complete in tier 2, and, by true time,
       no earlier than the retention after it was closed; nothing of it is deleted before a
       manifest is there without it; at rest nothing of it is left

``trim_many`` in ``scenarios``: as ``offload_many``, with a retention that ends while processes
crash, clocks jump on all hosts, and workers are at work on what goes.
"""

from collections.abc import Callable, Sequence

from tierlog.model.ids import LedgerId
from tierlog.model.manifest import ManifestHead
from tierlog.model.offload import OffloadContext
from tierlog.model.stream import ListedLedger, Stream

RETENTION_S = 1800.0


class TrimRules:
    """What retention may do to the stream that is looked at."""

    def __init__(self, complain: Callable[[str, str], None], now_s: Callable[[], float]) -> None:
        self._complain = complain
        self._now_s = now_s
        self._closed_s: dict[LedgerId, float] = {}
        self._copies: dict[str, LedgerId] = {}
        self.trimmed: set[LedgerId] = set()
        """Ledgers that left the list by retention."""

    def __repr__(self) -> str:
        return f"<TrimRules trimmed={len(self.trimmed)}>"

    def list_changed(
        self, was: Stream, now: Stream, context_of: Callable[[int], OffloadContext | None]
    ) -> None:
        """The stream's own znode changed; contexts are as of the same change."""
        for one in now.ledgers:
            if one.closed:
                self._closed_s.setdefault(one.ledger_id, self._now_s())
        gone = [
            one for one in was.ledgers if one.ledger_id in set(now.deleting) - set(was.deleting)
        ]
        if not gone:
            return
        self._expect(
            f"{gone} is no prefix of the list", holds=gone == list(was.ledgers[: len(gone)])
        )
        for one in gone:
            self._left(one, context_of(one.ledger_id))
        self.trimmed.update(one.ledger_id for one in gone)

    def _left(self, one: ListedLedger, context: OffloadContext | None) -> None:
        self._expect(f"open ledger {one.ledger_id} was trimmed", holds=one.closed)
        since_s = self._now_s() - self._closed_s.get(one.ledger_id, float("inf"))
        text = f"ledger {one.ledger_id} was trimmed {since_s:.1f} s after it was closed"
        self._expect(text, holds=since_s >= RETENTION_S - 0.001)
        state = context.state.name if context is not None else "gone"
        self._expect(f"trimmed ledger {one.ledger_id} is {state}", holds=state == "TRIMMING")

    def began(self, was: OffloadContext) -> None:
        """A context became TRIMMING."""
        text = f"ledger {was.ledger_id} was trimmed before it was offloaded"
        self._expect(text, holds=was.complete)
        if was.location is not None:
            self._copies.update(dict.fromkeys(was.location.keys, was.ledger_id))

    def object_deleted(self, key: str, newest: ManifestHead | None) -> None:
        """An object was deleted."""
        ledger_id = self._copies.get(key)
        if ledger_id is not None:
            self.deleted(f"object {key}", ledger_id, newest)

    def deleted(self, what: str, ledger_id: int, newest: ManifestHead | None) -> None:
        """Something of a trimmed ledger was deleted."""
        through = newest.trimmed_through if newest is not None else -1
        text = f"{what} of trimmed ledger {ledger_id} was deleted, a manifest still has it"
        self._expect(text, holds=ledger_id <= through)

    def at_rest(self, contexts: Sequence[OffloadContext], keys: Sequence[str]) -> None:
        """Nothing is left of what was trimmed."""
        left = sorted(one.ledger_id for one in contexts if one.ledger_id in self.trimmed)
        self._expect(f"contexts of trimmed ledgers are left: {left}", holds=not left)
        ends = tuple(f"-ledger-{one}" for one in self.trimmed)
        names = {key: key.removesuffix("-index").removesuffix("-side") for key in keys}
        objects = [key for key, name in names.items() if ends and name.endswith(ends)]
        self._expect(f"objects of trimmed ledgers are left: {objects}", holds=not objects)

    def _expect(self, text: str, *, holds: bool) -> None:
        if not holds:
            self._complain("j", text)
