"""The ingest service as its callers see it: streams, their owners, and appends to them."""

from dataclasses import dataclass
from typing import Protocol
from uuid import UUID

from tierlog.format.run import Run
from tierlog.model.ids import LedgerId, NodeId, StreamName
from tierlog.model.policy import Policy
from tierlog.model.position import AppendedRange


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerInfo:
    """Who may append to a stream now, and where."""

    node_id: NodeId
    wire_address: str
    grpc_address: str
    http_address: str
    owner_epoch: int
    cluster_id: UUID


class StreamControl(Protocol):
    """Small calls (gRPC). A call that changes something may end as ``IndeterminateError``."""

    async def create_stream(
        self,
        stream: StreamName,
        *,
        raw: bool,
        policy: Policy | None,
        exist_ok: bool,
        partitions: int = 0,
    ) -> bool:
        """Create a stream; False when it was there already.

        PARTITIONED tells of one that is there and has partitions, where none were asked for.
        """
        ...

    async def find_owner(self, stream: StreamName) -> OwnerInfo:
        """Return the stream's owner, or raise STREAM_NOT_FOUND."""
        ...

    async def seal(self, stream: StreamName) -> LedgerId | None:
        """Close the open ledger; None when none was open."""
        ...

    async def close(self) -> None:
        """Give the connection back."""
        ...


class AppendChannel(Protocol):
    """A connection to an owner, for drafts of runs, many in flight."""

    async def append(
        self, stream: StreamName, draft: Run, *, deadline_s: float
    ) -> list[AppendedRange]:
        """Append a draft; return where its entries went."""
        ...

    async def close(self, *, drain_s_max: float = 5.0) -> None:
        """Hang up; what has no answer ends as indeterminate."""
        ...
