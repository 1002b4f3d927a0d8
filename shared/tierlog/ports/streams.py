"""The ingest service as its callers see it: streams, their owners, and appends to them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol
from uuid import UUID

from tierlog.format.run import Run
from tierlog.model.attributes import KEY_LEN, AppendCondition, AttributeKey
from tierlog.model.ids import LedgerId, NodeId, StreamName
from tierlog.model.policy import Policy
from tierlog.model.position import AppendedRange, Position

FIRST_KEY: Final = AttributeKey(bytes(KEY_LEN))
LAST_KEY: Final = AttributeKey(b"\xff" * KEY_LEN)
ATTRIBUTES_MAX: Final = 1000
"""So many attributes an answer holds at most, and so many keys may be asked for at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerInfo:
    """Who may append to a stream now, and where."""

    node_id: NodeId
    wire_address: str
    grpc_address: str
    http_address: str
    owner_epoch: int
    cluster_id: UUID


@dataclass(frozen=True, slots=True, kw_only=True)
class AttributeValues:
    """Attributes of a stream, all as of one confirmed position."""

    values: Mapping[AttributeKey, int]
    """Those that are there, ascending by key."""
    as_of: Position | None
    """The last entry that they count in; None: the stream has no entries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """Closed staging ledgers, ids ascending, and the number that their writer has with them."""

    ledger_ids: tuple[LedgerId, ...]
    writer_id: UUID
    number: int


class AttachOutcome(Enum):
    """What became of an attachment."""

    ATTACHED = "attached"
    THERE = "there"
    """The writer's number was that high already, so nothing was changed."""
    IDS_TOO_LOW = "ids too low"
    """The stream had a ledger of a higher id, so nothing was changed."""


class AttachDesk(Protocol):
    """Makes staging ledgers part of a stream (ADR-0031)."""

    async def attach(
        self, stream: StreamName, wanted: Attachment, *, deadline_s: float
    ) -> AttachOutcome:
        """Attach all of the ledgers, or none; asking again does no harm.

        ``IndeterminateError``: it may have been done, or be done yet.
        """
        ...

    async def number(self, stream: StreamName, writer_id: UUID) -> int:
        """Return the number that the stream has of a writer; 0: none."""
        ...


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

    async def get_attributes(
        self, stream: StreamName, keys: Sequence[AttributeKey]
    ) -> AttributeValues:
        """Return those of the attributes that are there. NOT_OWNER names whom to ask."""
        ...

    async def list_attributes(
        self,
        stream: StreamName,
        *,
        first: AttributeKey = FIRST_KEY,
        last: AttributeKey = LAST_KEY,
        limit: int = ATTRIBUTES_MAX,
    ) -> AttributeValues:
        """Return the attributes between two keys, both included, the first ``limit`` of them.

        As many as ``limit``: there may be more, behind the last of them.
        """
        ...

    async def close(self) -> None:
        """Give the connection back."""
        ...


class AppendChannel(Protocol):
    """A connection to an owner, for drafts of runs, many in flight."""

    async def append(
        self,
        stream: StreamName,
        draft: Run,
        *,
        deadline_s: float,
        condition: AppendCondition | None = None,
    ) -> list[AppendedRange]:
        """Append a draft; return where its entries went.

        Where the condition does not hold, or an update that its header lists: nothing is appended,
        and CONDITIONAL_APPEND_FAILED tells by ``event_number`` the writer's number that is there
        (0: none), by ``last_position`` the stream's last entry (``earliest``: none), by ``key`` and
        ``value`` the attribute that is otherwise (no ``value``: it is not there).
        """
        ...

    async def close(self, *, drain_s_max: float = 5.0) -> None:
        """Hang up; what has no answer ends as indeterminate."""
        ...
