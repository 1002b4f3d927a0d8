"""A storage node as the ledger's client sees it, local or remote (protocols.md section 2).

Four answers are never confused: NO_SUCH_ENTRY (the node knows that it isn't there), NOT_YET
(behind the LAC), UNKNOWN (could not read) and FENCED.
"""

from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import NamedTuple, Protocol

from tierlog.format.run import Run
from tierlog.model.ids import EntryId, LedgerId
from tierlog.model.spans import Spans


class LacAnswer(NamedTuple):
    """What a node knows of a ledger's end; -1 where it knows none."""

    last_add_confirmed: EntryId
    last_entry_id: EntryId
    doubtful: bool = False
    """It may have lost entries, those behind the last one too; a fence doesn't tell."""


class StorageNodeControl(Protocol):
    """The small calls and the reads of one storage node (gRPC and HTTP between processes)."""

    async def fence(self, ledger_id: LedgerId) -> LacAnswer:
        """Refuse ordinary adds of this ledger for ever; durable before the answer."""
        ...

    async def last_add_confirmed(self, ledger_id: LedgerId) -> LacAnswer:
        """Return what the node knows of the ledger's end."""
        ...

    def read(
        self,
        ledger_id: LedgerId,
        first_entry_id: EntryId,
        *,
        last_entry_id: EntryId | None = None,
        bytes_max: int,
        wait_s: float = 0.0,
        recovery: bool = False,
    ) -> AsyncIterator[Sequence[Run]]:
        """Iterate over whole runs from the one that holds ``first_entry_id``.

        They come in lists, as many at a time as the node or the network has at hand, and
        never in an empty one: what is paid for each step is paid once for many runs.

        Ordinary reads end at the LAC and wait up to ``wait_s`` for it to move (then NOT_YET);
        recovery reads fence first and go to the node's last entry. Raises NO_SUCH_ENTRY,
        NOT_YET, UNKNOWN, UNAVAILABLE. Each run's checksum was verified.
        """
        ...

    async def list_ledgers(self) -> list[LedgerId]:
        """Return the ledgers that the node holds entries of."""
        ...

    async def held_entries(self, ledger_id: LedgerId) -> Spans:
        """Return which entries the node holds, as its index knows: ranges, in order.

        Raises LEDGER_NOT_FOUND once the ledger was freed, UNKNOWN while the node can't tell.
        """
        ...


class StorageNodeClient(StorageNodeControl, Protocol):
    """One storage node, writes included (those travel on the wire)."""

    def add(self, run: Run, *, recovery: bool = False) -> Awaitable[None]:
        """Store a run durably. Runs are taken in the order of the calls; the answer comes later.

        Raises FENCED (RefusedError), READ_ONLY or UNAVAILABLE (RetryableError: nothing was
        stored), or ``IndeterminateError`` when the connection went before the answer.
        """
        ...

    def confirm(self, ledger_id: LedgerId, last_add_confirmed: EntryId) -> None:
        """Tell the node the LAC while no run carries it. Best effort."""
        ...
