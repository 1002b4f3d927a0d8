"""What the bucket says of its own streams, and which deletions wait for it (protocols.md 3).

Owns the interface between the leader's loop and the manifests. Does not own their bytes
(``tierlog.format.manifest``) nor reading and writing them (``tierlog.offload.manifests``).

A pass over a stream: ``look`` before its metadata is read, ``record`` with what was read, then
the deletions, each after the question that belongs to it. None of it raises what the bucket
does: a manifest that can't be read or written stops deletions, and nothing else.
"""

from collections.abc import Mapping
from typing import Protocol
from uuid import UUID

from tierlog.catalog.streams import StreamSnapshot
from tierlog.model.ids import LedgerId, StreamName
from tierlog.model.offload import OffloadContext


class ManifestGate(Protocol):
    """Writes manifests, and says what may be deleted."""

    def begin_term(self) -> None:
        """Forget what was known: another leader may have written since."""
        ...

    async def look(self, name: StreamName) -> bool:
        """Know the newest manifest of a stream, before its metadata is read.

        True: someone else wrote it, or it is known for the first time; what is kept of the
        stream's metadata from before this call must be read again. Cheap when nothing moved.
        """
        ...

    async def record(
        self, snapshot: StreamSnapshot, contexts: Mapping[LedgerId, OffloadContext]
    ) -> None:
        """Write the next manifest, if what was read since ``look`` calls for one.

        ``contexts``: those read in this pass, or kept and unchanged. One that is not given is as
        it was when it was given last; one never given is read.
        """
        ...

    async def may_delete_local(self, context: OffloadContext) -> bool:
        """Tell whether the newest manifest, asked for now, names the context's copy (step 9)."""
        ...

    async def may_sweep(self, context: OffloadContext, uuid: UUID) -> bool:
        """Tell whether an abandoned attempt is surely not what a manifest names (step 3)."""
        ...

    async def let_go(self, name: StreamName, incarnation: UUID, ledger_id: LedgerId) -> bool:
        """Tell whether the newest manifest says that a ledger was trimmed (step 10).

        Only then may its objects be deleted, and its id be struck off ``deleting``.
        """
        ...

    def stopped(self, name: StreamName) -> str | None:
        """Return why nothing of a stream is deleted now; None: nothing stops it."""
        ...
