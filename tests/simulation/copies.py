"""Which node made which entry durable, as the nodes themselves told; and whether all is there.

Notes every answer of every ``StorageNode.add``, at the instant at which it is given: the truth that
acknowledgements, and changes of ensembles, are held against.

Invariant: whatever bytes an entry had on one node, it has on every other.
"""

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any
from unittest.mock import patch

from tests.simulation.trace import CURRENT
from tierlog.format.run import Run
from tierlog.model.errors import RefusedError, TierlogError
from tierlog.model.ids import EntryId, LedgerId, NodeId
from tierlog.model.ledger import LedgerMetadata
from tierlog.ports.storage_node import StorageNodeControl
from tierlog_ingest.storage.node import StorageNode

Position = tuple[int, int]
READ_BYTES_MAX = 1024 * 1024


class Copies:
    """What became durable where, since the run began."""

    def __init__(self, complain: Callable[[str, str], None]) -> None:
        self._complain = complain
        self._holders: dict[Position, set[str]] = {}
        self._unanswered: dict[Position, set[str]] = {}
        self._data: dict[Position, bytes] = {}
        self.repeated = 0
        """How many adds a node answered of what it had answered for before."""
        self._awaited: tuple[frozenset[str], asyncio.Future[str]] | None = None

    def __repr__(self) -> str:
        return f"<Copies of {len(self._holders)} entries>"

    def holders(self, position: Position) -> set[str]:
        """Return the nodes that ever had an entry, those that lost their disks too."""
        return self._holders.get(position, set())

    def may_hold(self, position: Position) -> set[str]:
        """Return ``holders``, and the nodes that crashed, or are, before they answered for it."""
        return self.holders(position) | self._unanswered.get(position, set())

    def note(self, node: str, run: Run) -> None:
        """Take note that a node has made a run durable."""
        for step, entry in enumerate(run.entries()):
            position = (run.header.ledger_id, run.first_entry_id + step)
            holders = self._holders.setdefault(position, set())
            if not holders:
                self._tell_first(node)
            self.repeated += node in holders and not step
            holders.add(node)
            if self._data.setdefault(position, bytes(entry)) != entry:
                self._complain("d", f"{node} has other bytes at {position} than another node")

    def data(self, position: Position) -> bytes | None:
        """Return an entry's bytes."""
        return self._data.get(position)

    def first_of(self, nodes: Collection[str]) -> "asyncio.Future[str]":
        """Return who of ``nodes`` next has an entry that nobody else has; one asks at a time."""
        told: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._awaited = frozenset(nodes), told
        return told

    def _tell_first(self, node: str) -> None:
        if self._awaited is not None and node in self._awaited[0]:
            _, told = self._awaited
            self._awaited = None
            if not told.done():
                told.set_result(node)

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Learn of every add that is answered, in all processes."""
        add = StorageNode.add

        def noted(node: StorageNode, run: Run, *, recovery: bool = False) -> Any:
            name = CURRENT.get()
            copied = Run.decode(bytes(run.encoded))
            ledger_id = run.header.ledger_id
            entry_ids = range(run.first_entry_id, run.last_entry_id + 1)
            for entry_id in entry_ids:
                self._unanswered.setdefault((ledger_id, entry_id), set()).add(name)

            def done(answer: "asyncio.Future[None]") -> None:
                error = None if answer.cancelled() else answer.exception()
                if answer.cancelled() or not isinstance(error, RefusedError | None):
                    return
                if error is None:
                    self.note(name, copied)
                for entry_id in entry_ids:
                    self._unanswered[ledger_id, entry_id].discard(name)

            answer = add(node, run, recovery=recovery)
            answer.add_done_callback(done)
            return answer

        with patch.object(StorageNode, "add", noted):
            yield


async def lacking(
    ledger_id: LedgerId,
    metadata: LedgerMetadata,
    nodes: Mapping[NodeId, StorageNodeControl],
    copies: Copies,
) -> list[str]:
    """Read every copy of every entry of a closed ledger off its own node; return what is wrong."""
    wrong: list[str] = []
    found: dict[NodeId, dict[int, bytes]] = {}
    named = sorted({node_id for one in metadata.segments for node_id in one.ensemble})
    for node_id in named:
        if node_id in nodes:
            found[node_id] = await _entries(nodes[node_id], ledger_id, metadata.last_entry_id)
        else:
            wrong.append(f"{ledger_id} names {node_id}, which is not there")
    for entry_id in range(metadata.last_entry_id + 1):
        for node_id in metadata.write_set(EntryId(entry_id)):
            position = (int(ledger_id), entry_id)
            data = found.get(node_id, {}).get(entry_id)
            if data is None:
                wrong.append(f"{node_id} lacks {position}")
            elif data != copies.data(position):
                wrong.append(f"{node_id} has other bytes at {position}")
    return wrong


async def _entries(
    node: StorageNodeControl, ledger_id: LedgerId, last: EntryId
) -> dict[int, bytes]:
    """Return what one node has of a ledger."""
    entries: dict[int, bytes] = {}
    with contextlib.suppress(TierlogError):
        for first, end in await node.held_entries(ledger_id):
            if first > last:
                break
            with contextlib.suppress(TierlogError):
                async for runs in node.read(
                    ledger_id,
                    first,
                    last_entry_id=min(end, last),
                    bytes_max=READ_BYTES_MAX,
                    recovery=True,
                ):
                    for run in runs:
                        for step, entry in enumerate(run.entries()):
                            entries[run.first_entry_id + step] = bytes(entry)
    return entries
