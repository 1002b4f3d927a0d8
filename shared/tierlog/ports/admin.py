"""The scheduler's administration as its callers see it: JSON, as its REST answers."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tierlog.model.ids import LedgerId, StreamName
from tierlog.model.position import Position

Document = Mapping[str, Any]


class Administration(Protocol):
    """What people look at and ask for. Errors: the reasons of protocols.md section 6."""

    async def streams(self) -> Sequence[Document]:
        """Return all streams."""
        ...

    async def stream(self, name: StreamName) -> Document:
        """Return one stream with its ledgers, or raise STREAM_NOT_FOUND."""
        ...

    async def ledger(self, ledger_id: LedgerId) -> Document:
        """Return one ledger with its context, or raise LEDGER_NOT_FOUND."""
        ...

    async def offload(self, name: StreamName, before: Position | None) -> Document:
        """Ask for everything closed before a position (None: everything closed)."""
        ...

    async def offloads(self) -> Sequence[Document]:
        """Return the offloads that are due, running, failed or done."""
        ...

    async def policy(self, name: StreamName) -> Document:
        """Return a stream's thresholds."""
        ...

    async def set_policy(self, name: StreamName, policy: Document) -> Document:
        """Replace a stream's own thresholds; POLICY_INVALID names the bound."""
        ...

    async def close(self) -> None:
        """Give the connections back."""
        ...
