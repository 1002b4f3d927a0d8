"""Reads a ledger's runs from tier 1, from any node that holds them (seeds/000, "ReadHandle").

Owns the choice of the node and going on with another one. Does not own who decides to read tier 1,
nor caching.

Invariants:
    * Runs come in order and without a gap: each begins where the one before it ended. Only the
      first may begin before the entry that was asked for, since runs are whole.
    * An entry of a closed ledger that no node gives is UNKNOWN, never absent.
    * A damaged run is never yielded: its replica is passed over for another one. Neither is one
      that is not signed with the ledger's key; without that key there is no handle.
    * Runs come in lists, never in an empty one.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Generic, Protocol, TypeVar

import structlog

from tierlog.format.run import Run
from tierlog.ledger.directory import NodeDirectory
from tierlog.ledger.keys import NO_KEYS, LedgerKeys, authentic
from tierlog.model.errors import Reason, RefusedError, RetryableError, TierlogError
from tierlog.model.ids import NO_ENTRY, EntryId, LedgerId, NodeId
from tierlog.model.ledger import LedgerMetadata, LedgerState
from tierlog.ports.storage_node import StorageNodeControl

log = structlog.get_logger()

Node = TypeVar("Node", bound=StorageNodeControl)


class ReadHandle(Protocol):
    """A readable ledger, whichever tier holds it; the caller only chooses which to construct."""

    @property
    def ledger_id(self) -> LedgerId:
        """The ledger's id."""
        ...

    @property
    def ledger_metadata(self) -> LedgerMetadata:
        """The ledger's metadata as of when the handle was made."""
        ...

    async def last_add_confirmed(self) -> EntryId:
        """Return the last entry that may be read; -1: none."""
        ...

    def read_runs(
        self, first: EntryId, last: EntryId, *, bytes_max: int | None = None, wait_s: float = 0.0
    ) -> AsyncIterator[Sequence[Run]]:
        """Iterate over the whole runs that hold these entries, both ends included.

        They come in lists, as large as they were read, and never in an empty one.

        Ends early once ``bytes_max`` is reached, but not before one run. Behind the LAC of an
        open ledger it waits up to ``wait_s``, then raises NOT_YET.
        """
        ...

    async def close(self) -> None:
        """Give back what the handle holds."""
        ...


class Tier1ReadHandle(Generic[Node]):
    """A ledger on storage nodes. Making one raises PERMISSION_DENIED without the ledger's key."""

    def __init__(
        self,
        ledger_id: LedgerId,
        metadata: LedgerMetadata,
        nodes: NodeDirectory[Node],
        *,
        keys: LedgerKeys = NO_KEYS,
    ) -> None:
        self._ledger_id = ledger_id
        self._metadata = metadata
        self._nodes = nodes
        self._key = keys.of(ledger_id, metadata)

    def __repr__(self) -> str:
        return f"<Tier1ReadHandle {self._ledger_id} {self._metadata.state.name}>"

    @property
    def ledger_id(self) -> LedgerId:
        return self._ledger_id

    @property
    def ledger_metadata(self) -> LedgerMetadata:
        return self._metadata

    async def last_add_confirmed(self) -> EntryId:
        """Return the last entry of a closed ledger, else the highest LAC that a node knows."""
        if self._metadata.state is LedgerState.CLOSED:
            return self._metadata.last_entry_id
        known: list[EntryId] = []
        trouble: TierlogError | None = None
        for node_id in self._metadata.segments[-1].ensemble:
            try:
                client = await self._nodes.client(node_id)
                answer = await client.last_add_confirmed(self._ledger_id)
            except TierlogError as error:
                trouble = error
            else:
                known.append(answer.last_add_confirmed)
        if not known:
            raise RetryableError(
                f"no storage node of ledger {self._ledger_id} says where it ends",
                reason=Reason.UNKNOWN,
                remedy="Check that the ledger's storage nodes are up",
            ) from trouble
        return max(known)

    async def read_runs(
        self, first: EntryId, last: EntryId, *, bytes_max: int | None = None, wait_s: float = 0.0
    ) -> AsyncIterator[Sequence[Run]]:
        """See ``ReadHandle``."""
        closed = self._metadata.state is LedgerState.CLOSED
        if closed and last > self._metadata.last_entry_id:
            raise _no_such_entry(self._ledger_id, last, self._metadata.last_entry_id)
        position, budget = first, bytes_max
        while position <= last and (budget is None or budget > 0):
            before = position
            trouble: list[TierlogError] = []
            for node_id in self._metadata.write_set(position):
                read = self._read_node(
                    node_id, position, last, bytes_max=budget, wait_s=wait_s, trouble=trouble
                )
                async with closing_runs(read):
                    async for runs in read:
                        position = EntryId(runs[-1].last_entry_id + 1)
                        if budget is None:
                            yield runs
                            continue
                        within, budget = runs_within(runs, budget)
                        yield within
                        if budget <= 0:
                            return
                if position > before:
                    break
            if position == before:
                raise self._unreadable(position, trouble)

    async def _read_node(
        self,
        node_id: NodeId,
        first: EntryId,
        last: EntryId,
        *,
        bytes_max: int | None,
        wait_s: float,
        trouble: list[TierlogError],
    ) -> AsyncIterator[Sequence[Run]]:
        """Yield what one node has from ``first`` on, without a gap; note why it ended."""
        budget = bytes_max if bytes_max is not None else READ_BYTES_MAX
        closed = self._metadata.state is LedgerState.CLOSED
        expected = first
        # A node knows no LAC behind its last run; of a closed ledger the metadata is the end, and
        # the fence that comes with a recovery read changes nothing any more.
        for recovery in (False, True) if closed else (False,):
            client: Node | None = None
            try:
                client = await self._nodes.client(node_id)
                read = client.read(
                    self._ledger_id,
                    first,
                    last_entry_id=last,
                    bytes_max=budget,
                    wait_s=0.0 if closed else wait_s,
                    recovery=recovery,
                )
                async with closing_runs(read):
                    async for runs in read:
                        good = self._following(runs, expected, last, at_start=expected == first)
                        good, damage = authentic(good, self._key)
                        if good:
                            expected = EntryId(good[-1].last_entry_id + 1)
                            yield good
                        if damage is not None:
                            raise damage
                        if expected > last:
                            return
                        if len(good) < len(runs):
                            break
            except TierlogError as error:
                trouble.append(error)
                if error.reason not in _ANSWERS:
                    await self._give_up(node_id, client, expected, error)
                    return
            if expected > first:
                return

    async def _give_up(
        self, node_id: NodeId, client: Node | None, entry_id: EntryId, error: TierlogError
    ) -> None:
        log.warning(
            "replica.unreadable",
            ledger_id=self._ledger_id,
            node_id=node_id,
            entry_id=entry_id,
            cause=str(error),
        )
        if client is not None:
            await self._nodes.report_failed(node_id, client)

    def _following(
        self, runs: Sequence[Run], expected: EntryId, last: EntryId, *, at_start: bool
    ) -> Sequence[Run]:
        """Return the runs up to the first that does not follow, or lies behind ``last``."""
        for count, run in enumerate(runs):
            header = run.header
            first, following = header.first_entry_id, header.first_entry_id + header.count
            follows = first == expected or (at_start and first < expected < following)
            if not follows or expected > last or header.ledger_id != self._ledger_id:
                return runs[:count]
            expected, at_start = EntryId(following), False
        return runs

    def _unreadable(self, position: EntryId, trouble: list[TierlogError]) -> TierlogError:
        """Say what it means that no node of a write set gave the entry."""
        not_yet = next((one for one in trouble if one.reason is Reason.NOT_YET), None)
        cause = "; ".join(str(one) for one in trouble) or "the replicas end before it"
        if self._metadata.state is not LedgerState.CLOSED and not_yet is not None:
            return not_yet
        return RetryableError(
            f"entry {self._ledger_id}:{position} could not be read from tier 1: {cause}",
            reason=Reason.UNKNOWN,
            remedy="Check the ledger's storage nodes; it is not known to be lost",
            details={"ledger_id": str(self._ledger_id), "entry_id": str(position)},
        )

    async def close(self) -> None:
        """Nothing is held: connections belong to the directory."""


def runs_within(runs: Sequence[Run], bytes_max: int) -> tuple[Sequence[Run], int]:
    """Return the runs up to the one that reaches ``bytes_max``, and what is left of that."""
    for count, run in enumerate(runs, 1):
        bytes_max -= len(run.encoded)
        if bytes_max <= 0:
            return runs[:count], bytes_max
    return runs, bytes_max


@asynccontextmanager
async def closing_runs(runs: AsyncIterator[Sequence[Run]]) -> AsyncIterator[None]:
    """End an iteration over runs at once, where it is left early, and not some time later."""
    try:
        yield
    finally:
        if isinstance(runs, AsyncGenerator):
            await runs.aclose()


READ_BYTES_MAX = 64 * 1024 * 1024
"""Bytes asked of a node at once where the caller names no budget."""

_ANSWERS = frozenset({Reason.NO_SUCH_ENTRY, Reason.NOT_YET})


def _no_such_entry(ledger_id: LedgerId, entry_id: EntryId, last: EntryId) -> RefusedError:
    has = f"its last entry is {last}" if last > NO_ENTRY else "it is empty"
    return RefusedError(
        f"ledger {ledger_id} has no entry {entry_id}, {has}",
        reason=Reason.NO_SUCH_ENTRY,
        remedy="Read within the ledger, or go on with the next one",
        details={"ledger_id": str(ledger_id), "entry_id": str(entry_id)},
    )
