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

    async def offloads(self, stream: StreamName | None = None) -> Sequence[Document]:
        """Return the offloads that are due, running, failed or done; of ``stream`` alone if given.

        Of one with partitions: of them.
        """
        ...

    async def offload_status(self, name: StreamName) -> Sequence[Document]:
        """Return how far a stream's offload has come; of one with partitions, for each."""
        ...

    async def pause_offload(self, name: StreamName, cause: str) -> Sequence[Document]:
        """Let no offload begin and nothing be deleted; return the status."""
        ...

    async def resume_offload(self, name: StreamName) -> Sequence[Document]:
        """Let it go on; return the status."""
        ...

    async def attempts(self, name: StreamName) -> Sequence[Document]:
        """Return the ledgers of a stream that were attempted, each with its attempts."""
        ...

    async def leftovers(self, name: StreamName) -> Sequence[Document]:
        """Return what attempts left that is still to be deleted."""
        ...

    async def policy(self, name: StreamName) -> Document:
        """Return a stream's thresholds."""
        ...

    async def set_policy(self, name: StreamName, policy: Document) -> Document:
        """Replace a stream's own thresholds; POLICY_INVALID names the bound."""
        ...

    async def change_policy(self, name: StreamName, changes: Document) -> Document:
        """Change those that are given, None unsets one; POLICY_INVALID names the bound."""
        ...

    async def level(self, namespace: str | None) -> Document:
        """Return the thresholds of a namespace, or, for None, of the cluster."""
        ...

    async def set_level(self, namespace: str | None, policy: Document) -> Document:
        """Replace them; POLICY_INVALID names the stream below that would break."""
        ...

    async def change_level(self, namespace: str | None, changes: Document) -> Document:
        """Change those that are given, None unsets one."""
        ...

    async def explain(self, name: StreamName) -> Document:
        """Return which level gives each threshold, and what happens next to each ledger."""
        ...

    async def delete_stream(self, name: StreamName) -> Document:
        """Begin to delete a stream, or tell how much of one is left that is being deleted."""
        ...

    async def close(self) -> None:
        """Give the connections back."""
        ...


class ScrubDesk(Protocol):
    """Scrubs of the bucket, as the scheduler's REST shows them."""

    async def begin(
        self, *, repair: bool, deep: bool, ledgers: Sequence[LedgerId] | None = None
    ) -> Document:
        """Begin a scrub; UNAVAILABLE while another one is at work.

        ``ledgers``: data of those alone are read, and nothing else is repaired.
        """
        ...

    async def find(self) -> Sequence[Document]:
        """Return the newest scrubs, newest first, without their findings."""
        ...

    async def get(self, scrub_id: str) -> Document:
        """Return a scrub with its findings, or raise NO_SUCH_ENTRY."""
        ...


class DeadLetterDesk(Protocol):
    """Requests that were put aside, as the scheduler's REST shows them."""

    async def find(
        self, *, state: str | None = None, stream: StreamName | None = None
    ) -> Sequence[Document]:
        """Return the requests that were put aside, newest first; None does not restrict."""
        ...

    async def listing(
        self, *, state: str | None = None, stream: StreamName | None = None
    ) -> Document:
        """Return them as ``dead_letters``; ``left_off``: how many older ones are not shown."""
        ...

    async def get(self, place: str) -> Document:
        """Return one of them, with what is in it, or raise NO_SUCH_ENTRY."""
        ...

    async def replay(self, place: str) -> Document:
        """Ask again for what it asked for; refused for what is no request."""
        ...

    async def replay_waiting(
        self, *, stream: StreamName | None = None, reason: str | None = None
    ) -> Document:
        """Ask again for what waits; return ``replayed`` and ``refused``."""
        ...

    async def dismiss(self, place: str) -> Document:
        """Note that it needs nothing any more."""
        ...

    async def close(self) -> None:
        """Give the connections back."""
        ...
