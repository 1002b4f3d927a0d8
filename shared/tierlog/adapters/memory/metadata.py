"""The metadata port in memory: one server object, any number of clients with sessions.

Owns the tree of nodes with ZooKeeper's rules: versions, ephemeral nodes that go with their
session, sequence numbers that count the nodes ever made below a parent, one-shot watches,
transactions. Does not own faults: each client asks its ``Faults`` around each call.

Invariants:
    * A transaction changes everything it names or nothing.
    * Watches fire after the whole change, never in its middle.
    * A session that ended never comes back; its client goes on with a new one.
"""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from tierlog.adapters.memory.faults import Faults, no_faults
from tierlog.model.errors import Reason, RefusedError, RetryableError
from tierlog.ports.metadata import (
    REQUEST_BYTES_MAX,
    Check,
    Create,
    Delete,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
    Operation,
    Put,
    VersionConflictError,
    Versioned,
)

T = TypeVar("T")

ANY_VERSION = -1


@dataclass(slots=True)
class _Session:
    number: int
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    watching: list[asyncio.Event] = field(default_factory=list)
    forget_at: int = 64
    """So many watches, and those that were set are forgotten."""


@dataclass(slots=True)
class _Node:
    data: bytes
    version: int = 0
    owner: _Session | None = None
    made_below: int = 0
    children: set[str] = field(default_factory=set)


class MemoryMetadata:
    """The server. ``connect`` gives clients; hooks below let a test play the administrator."""

    def __init__(self, *, session_timeout_s: float = 6.0) -> None:
        self._session_timeout_s = session_timeout_s
        self._nodes: dict[str, _Node] = {"/": _Node(b"")}
        self._sessions = itertools.count(1)
        self._data_watches: dict[str, list[asyncio.Event]] = {}
        self._child_watches: dict[str, list[asyncio.Event]] = {}
        self._undo: list[Callable[[], None]] = []
        self._fired: list[asyncio.Event] = []
        self.changes = 0
        """How many changes (a transaction is one) were made so far."""

    def __repr__(self) -> str:
        return f"MemoryMetadata(nodes={len(self._nodes)}, changes={self.changes})"

    def connect(self, faults: Faults | None = None) -> "MemoryMetadataClient":
        """Return a client with a session of its own."""
        return MemoryMetadataClient(self, faults or no_faults())

    def dump(self) -> dict[str, Versioned]:
        """Return all nodes by path: what an administrator sees."""
        return {
            path: Versioned(node.data, node.version) for path, node in sorted(self._nodes.items())
        }

    # What clients do, each at one instant.

    def new_session(self) -> _Session:
        return _Session(next(self._sessions))

    def end_session(self, session: _Session) -> None:
        """Remove the session's ephemeral nodes and tell its client."""
        if session.lost.is_set():
            return
        session.lost.set()
        owned = [path for path, node in self._nodes.items() if node.owner is session]
        self.change(lambda: self._delete_all(owned))
        for event in session.watching:
            event.set()

    def expire_later(self, session: _Session) -> None:
        """Let the session run out: its client does not answer any more."""
        asyncio.get_running_loop().call_later(
            self._session_timeout_s, lambda: self.end_session(session)
        )

    def get(self, path: str) -> Versioned | None:
        node = self._nodes.get(path)
        return None if node is None else Versioned(node.data, node.version)

    def children(self, path: str) -> list[str] | None:
        node = self._nodes.get(path)
        return None if node is None else sorted(node.children)

    def sequence_position(self, path: str) -> int | None:
        node = self._nodes.get(path)
        return None if node is None else node.made_below

    def watch(self, path: str, session: _Session, *, children: bool) -> asyncio.Event:
        """Return an event for the next change; a missing node is watched for being made."""
        event = asyncio.Event()
        watches = self._child_watches if children and path in self._nodes else self._data_watches
        watches.setdefault(path, []).append(event)
        session.watching.append(event)
        if len(session.watching) >= session.forget_at:
            session.watching = [e for e in session.watching if not e.is_set()]
            session.forget_at = 2 * len(session.watching) + 64
        return event

    def change(self, apply: Callable[[], T]) -> T:
        """Run ``apply``; take all of it back when it is refused; fire watches when it is not."""
        assert not self._undo, "changes don't nest"
        try:
            result = apply()
        except RefusedError:
            for undo in reversed(self._undo):
                undo()
            self._undo.clear()
            self._fired.clear()
            raise
        self._undo.clear()
        fired, self._fired = self._fired, []
        for event in fired:
            event.set()
        self.changes += 1
        return result

    def create(
        self, path: str, data: bytes, *, parents: bool, owner: _Session | None, sequential: bool
    ) -> str:
        _check_path(path)
        _check_size(len(data))
        if parents:
            self._make_parents(path)
        parent = self._nodes.get(_parent_of(path))
        if parent is None:
            raise _no_node(_parent_of(path))
        if sequential:
            path = f"{path}{parent.made_below:010d}"
        if path in self._nodes:
            raise NodeExistsError(f"metadata node {path} exists already")
        if parent.owner is not None:
            raise RefusedError(
                f"metadata node {_parent_of(path)} is ephemeral and can have none below it",
                remedy="Use another path",
            )
        name = path.rpartition("/")[2]
        made_below = parent.made_below
        self._nodes[path] = _Node(data, owner=owner)
        parent.children.add(name)
        parent.made_below += 1

        def undo() -> None:
            del self._nodes[path]
            parent.children.remove(name)
            parent.made_below = made_below

        self._undo.append(undo)
        self._fire(path)
        self._fire_children(_parent_of(path))
        return path

    def put(self, path: str, data: bytes, version: int) -> int:
        _check_size(len(data))
        node = self._checked(path, version)
        before = (node.data, node.version)
        node.data, node.version = data, node.version + 1

        def undo() -> None:
            node.data, node.version = before

        self._undo.append(undo)
        self._fire(path)
        return node.version

    def delete(self, path: str, version: int) -> None:
        self._delete(path, version)

    def transact(self, operations: Sequence[Operation]) -> None:
        _check_size(sum(len(o.data) for o in operations if isinstance(o, Create | Put)))
        for operation in operations:
            match operation:
                case Check(path, version):
                    self._checked(path, version)
                case Create(path, data):
                    self.create(path, data, parents=False, owner=None, sequential=False)
                case Put(path, data, version):
                    self.put(path, data, version)
                case Delete(path, version):
                    self._delete(path, version)

    # Inside one change.

    def _make_parents(self, path: str) -> None:
        parent = _parent_of(path)
        if parent not in self._nodes:
            self._make_parents(parent)
            self.create(parent, b"", parents=False, owner=None, sequential=False)

    def _delete_all(self, paths: Sequence[str]) -> None:
        for path in paths:
            self._delete(path, ANY_VERSION)

    def _delete(self, path: str, version: int) -> None:
        _check_path(path)
        node = self._checked(path, version)
        if node.children:
            raise NotEmptyError(f"metadata node {path} has nodes below it")
        parent = self._nodes[_parent_of(path)]
        name = path.rpartition("/")[2]
        del self._nodes[path]
        parent.children.remove(name)

        def undo() -> None:
            self._nodes[path] = node
            parent.children.add(name)

        self._undo.append(undo)
        self._fire(path)
        self._fire_children(path)
        self._fire_children(_parent_of(path))

    def _checked(self, path: str, version: int) -> _Node:
        node = self._nodes.get(path)
        if node is None:
            raise _no_node(path)
        if version not in {ANY_VERSION, node.version}:
            raise VersionConflictError(
                f"metadata node {path} has another version than {version}",
                remedy="Read it again and decide anew",
            )
        return node

    def _fire(self, path: str) -> None:
        self._take_watches(self._data_watches, path)

    def _fire_children(self, path: str) -> None:
        self._take_watches(self._child_watches, path)

    def _take_watches(self, watches: dict[str, list[asyncio.Event]], path: str) -> None:
        taken = watches.pop(path, [])
        if taken:
            self._fired.extend(taken)
            self._undo.append(lambda: watches.setdefault(path, []).extend(taken))


class MemoryMetadataClient:
    """One client: the port, and what can happen to a client."""

    def __init__(self, server: MemoryMetadata, faults: Faults) -> None:
        self._server = server
        self.faults = faults
        self._session = server.new_session()
        self._closed = False

    def __repr__(self) -> str:
        return f"MemoryMetadataClient(session={self._session.number}, closed={self._closed})"

    @property
    def session_lost(self) -> asyncio.Event:
        return self._session.lost

    def expire_session(self) -> None:
        """End the session as ZooKeeper does to a silent client; the client gets a new one."""
        lost, self._session = self._session, self._server.new_session()
        self._server.end_session(lost)

    def abandon(self) -> None:
        """Die as a process does: the session runs out by itself, after the session timeout."""
        self._closed = True
        self._server.expire_later(self._session)

    async def sync(self, path: str) -> None:
        await self._read("sync", lambda: self._server.get(path))

    async def get(self, path: str) -> Versioned | None:
        return await self._read("get", lambda: self._server.get(path))

    async def watch(self, path: str) -> tuple[Versioned | None, asyncio.Event]:
        return await self._read(
            "watch",
            lambda: (
                self._server.get(path),
                self._server.watch(path, self._session, children=False),
            ),
        )

    async def children(self, path: str) -> list[str] | None:
        return await self._read("children", lambda: self._server.children(path))

    async def sequence_position(self, path: str) -> int | None:
        return await self._read("position", lambda: self._server.sequence_position(path))

    async def watch_children(self, path: str) -> tuple[list[str] | None, asyncio.Event]:
        return await self._read(
            "watch_children",
            lambda: (
                self._server.children(path),
                self._server.watch(path, self._session, children=True),
            ),
        )

    async def create(self, path: str, data: bytes) -> None:
        await self._change(
            "create",
            lambda: self._server.create(path, data, parents=True, owner=None, sequential=False),
        )

    async def create_ephemeral(self, path: str, data: bytes, *, sequential: bool = False) -> str:
        return await self._change(
            "create_ephemeral",
            lambda: self._server.create(
                path, data, parents=True, owner=self._session, sequential=sequential
            ),
        )

    async def set(self, path: str, data: bytes, *, version: int) -> int:
        return await self._change("set", lambda: self._server.put(path, data, version))

    async def delete(self, path: str, *, version: int) -> None:
        await self._change("delete", lambda: self._server.delete(path, version))

    async def transact(self, operations: Sequence[Operation]) -> None:
        kept = list(operations)
        await self._change("transact", lambda: self._server.transact(kept))

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._server.end_session(self._session)

    async def _read(self, verb: str, effect: Callable[[], T]) -> T:
        self._check_open()
        return await self.faults.call(f"metadata.{verb}", effect, changes=False)

    async def _change(self, verb: str, effect: Callable[[], T]) -> T:
        self._check_open()
        return await self.faults.call(
            f"metadata.{verb}", lambda: self._server.change(effect), changes=True
        )

    def _check_open(self) -> None:
        if self._closed:
            raise RetryableError(
                "the connection to the metadata store is closed", remedy="Connect again"
            )


def _parent_of(path: str) -> str:
    return path.rpartition("/")[0] or "/"


def _check_path(path: str) -> None:
    assert path.startswith("/"), path
    assert not path.endswith("/"), path
    assert "//" not in path, path


def _check_size(size: int) -> None:
    if size > REQUEST_BYTES_MAX:
        raise RefusedError(
            f"a change of {size} bytes is above the metadata store's {REQUEST_BYTES_MAX}",
            reason=Reason.TOO_LARGE,
            remedy="Split it",
        )


def _no_node(path: str) -> NoNodeError:
    return NoNodeError(f"there is no metadata node {path}")
