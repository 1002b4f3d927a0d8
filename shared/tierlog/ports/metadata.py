"""The metadata store (ZooKeeper): versioned nodes, transactions, sessions.

Errors: ``VersionConflictError``, ``NoNodeError``, ``NodeExistsError`` say for certain that
nothing was changed; ``IndeterminateError`` that a change may or may not have been made (the
connection was lost before the answer); ``RetryableError`` UNAVAILABLE that nothing was sent,
or that a read failed. ``None`` means: the store says that there is no such node.
"""

import asyncio
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

from tierlog.model.errors import RefusedError

REQUEST_BYTES_MAX: Final = 1_000_000
"""Data of one change, or of one transaction. ZooKeeper drops who sends more than 1 MiB."""


class VersionConflictError(RefusedError):
    """The node has another version than the change was made for."""


class NoNodeError(RefusedError):
    """There is no such node."""


class NodeExistsError(RefusedError):
    """There is such a node already."""


class NotEmptyError(RefusedError):
    """The node can't be removed, since there are nodes below it."""


class Versioned(NamedTuple):
    """A node's data and the version that a change of it must name."""

    data: bytes
    version: int


class Check(NamedTuple):
    """In a transaction: the node has this version."""

    path: str
    version: int


class Create(NamedTuple):
    """In a transaction: make a node; its parent must exist."""

    path: str
    data: bytes


class Put(NamedTuple):
    """In a transaction: replace a node's data."""

    path: str
    data: bytes
    version: int


class Delete(NamedTuple):
    """In a transaction: remove a node."""

    path: str
    version: int


Operation = Check | Create | Put | Delete


class MetadataStore(Protocol):
    """One client of the store, with one session at a time."""

    async def sync(self, path: str) -> None:
        """Let reads that follow see all that was written before, by anyone."""
        ...

    async def get(self, path: str) -> Versioned | None:
        """Return a node, or None when there is none."""
        ...

    async def watch(self, path: str) -> tuple[Versioned | None, asyncio.Event]:
        """Return a node and an event that is set once it is made, changed or removed."""
        ...

    async def children(self, path: str) -> list[str] | None:
        """Return the names below a node, sorted, or None when there is no such node."""
        ...

    async def sequence_position(self, path: str) -> int | None:
        """Return the number that the next sequential node below a node gets; make nothing.

        None: there is no such node. It counts all nodes ever made below it, those too that are
        gone or have no number.
        """
        ...

    async def watch_children(self, path: str) -> tuple[list[str] | None, asyncio.Event]:
        """Return the names below a node and an event that is set once they change."""
        ...

    async def create(self, path: str, data: bytes) -> None:
        """Make a node, and its parents (empty) where they are missing."""
        ...

    async def create_ephemeral(self, path: str, data: bytes, *, sequential: bool = False) -> str:
        """Make a node that goes with the session; return its path, with its number if asked."""
        ...

    async def set(self, path: str, data: bytes, *, version: int) -> int:
        """Replace a node's data if it has ``version``; return the new version."""
        ...

    async def delete(self, path: str, *, version: int) -> None:
        """Remove a node if it has ``version`` (-1: any)."""
        ...

    async def transact(self, operations: Sequence[Operation]) -> None:
        """Do all of ``operations`` or none. Errors are those of the first that was refused."""
        ...

    @property
    def session_lost(self) -> asyncio.Event:
        """The present session's end: set once it expired. A new session has a new event."""
        ...

    async def close(self) -> None:
        """End the session; its ephemeral nodes go at once."""
        ...
