"""One pass over one ledger: fence it, find its end, re-write what lies behind the LAC.

Owns the reading side of a recovery, and what makes an entry absent. Does not own the ledger's
metadata, which ``recovery`` changes, nor re-writing (``rewriting``).

Invariants:
    * Reading goes by the published ensembles alone.
    * ``write_quorum - ack_quorum + 1`` nodes of a write set decide, each of them fenced: as many
      for the fence of each possible write set, as many for an entry's absence.
    * What lies up to the LAC was acknowledged: absent there means not readable now.
    * Once a loss was accepted, an entry is lost that no node of its write set can give or deny.
      What lies behind it is looked for on all nodes. Where the end can't be known any more, the
      first entry that may have been there is recorded as lost, so that readers meet the loss.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import partial

from tierlog.format.authentication import LedgerKey
from tierlog.format.run import Run
from tierlog.ledger.asking import Asking
from tierlog.ledger.keys import authentic
from tierlog.ledger.reader import closing_runs
from tierlog.ledger.rewriting import Rewriting
from tierlog.model.errors import Reason, RetryableError, TierlogError
from tierlog.model.ids import INT64_MAX, NO_ENTRY, EntryId, LedgerId, NodeId
from tierlog.model.ledger import LedgerMetadata, LedgerState, Segment
from tierlog.model.replication import EntryRange
from tierlog.ports.storage_node import StorageNodeClient
from tierlog.ports.waiting import Helpers


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How a ledger is to be closed."""

    lac: EntryId
    last_entry_id: EntryId
    length: int
    segments: tuple[Segment, ...] | None = None
    lost: tuple[EntryRange, ...] = ()


class _Verdict(Enum):
    """Why there are no runs."""

    ABSENT = auto()
    """Nobody can have needed the entry's nodes to acknowledge it."""
    LOST = auto()
    """Nobody can tell, and an admin wants it given up."""
    MOVED = auto()
    """It lies on other nodes by now."""


@dataclass(slots=True)
class _Found:
    """What a write set says of an entry."""

    batches: list[list[Run]] = field(default_factory=list)
    absent: set[NodeId] = field(default_factory=set)
    failed: set[NodeId] = field(default_factory=set)


class OneRecovery:
    """One pass. ``find_end`` is all of it."""

    def __init__(
        self,
        ledger_id: LedgerId,
        metadata: LedgerMetadata,
        key: LedgerKey | None,
        asking: Asking,
        rewriting: Rewriting,
    ) -> None:
        self.rewriting = rewriting
        self._ledger_id = ledger_id
        self._metadata = metadata
        self._key = key
        self._asking = asking
        self._lacs: dict[NodeId, EntryId] = {}
        self._unfenced: set[NodeId] = set()
        """Nodes that failed at the fence so far."""
        self._lost: list[EntryRange] = []

    @property
    def unfenced(self) -> list[NodeId]:
        """The nodes of the last ensemble that have not answered the fence (yet)."""
        return [one for one in self._metadata.segments[-1].ensemble if one not in self._lacs]

    def learn(self, metadata: LedgerMetadata) -> None:
        """Take notice of the metadata as it is now: copies in settled segments may have moved."""
        if metadata.segments[-1] != self._metadata.segments[-1]:
            return  # of before the recovery began, from a server that is behind
        self._metadata = replace(self._metadata, segments=metadata.segments)
        self._asking.news.set()

    def closed(self, end: End) -> LedgerMetadata:
        """Return the ledger as a close with this end leaves it."""
        metadata = self._metadata.with_loss(end.lost) if end.lost else self._metadata
        if end.segments is not None:
            metadata = metadata.with_tail(end.segments)
        return metadata.moved_to(
            LedgerState.CLOSED, last_entry_id=end.last_entry_id, length=end.length
        )

    async def find_end(self, tasks: Helpers) -> End:
        """Do all of it. The fence goes on in ``tasks`` at those nodes that it didn't need."""
        for node_id in self._metadata.segments[-1].ensemble:
            tasks.spawn(self._fence_node(node_id))
        lac = await self.fence()
        last_entry_id, length = await self.rewrite(lac)
        return End(
            lac=lac,
            last_entry_id=last_entry_id,
            length=length,
            segments=self.rewriting.segments,
            lost=tuple(self._lost),
        )

    async def fence(self) -> EntryId:
        """Wait until nothing can be acknowledged any more; return the highest LAC known."""

        def decide() -> EntryId | None:
            covered = self._metadata.is_covered(self._lacs)
            if covered or self._asking.is_vain(self.unfenced, self._unfenced):
                return max(self._lacs.values(), default=NO_ENTRY)
            return None

        return await self._asking.until("fence", decide)

    async def _fence_node(self, node_id: NodeId) -> None:
        async def fence(client: StorageNodeClient) -> None:
            self._lacs[node_id] = (await client.fence(self._ledger_id)).last_add_confirmed

        await self._asking.ask(node_id, "fence", fence, self._unfenced)

    async def rewrite(self, lac: EntryId) -> tuple[EntryId, int]:
        """Read to the end, re-write what may not have its quorum; return last id and length."""
        start = EntryId(max(lac + 1, self._metadata.segments[-1].first_entry_id))
        position, length = start, 0
        while True:
            batch = await self._read(position, acknowledged=False)
            if batch is _Verdict.ABSENT:
                break
            if isinstance(batch, list):
                await self.rewriting.rewrite(batch)
                position, length = _behind(batch)
                continue
            held = await self._held(self._metadata.segments[-1].ensemble)
            behind = [max(first, position + 1) for first, last in held if last > position]
            following = min(behind, default=None)
            if following is None:
                position = self._give_up(position, EntryId(max(position, lac)))
                break
            position = self._give_up(position, EntryId(following - 1))
        if position == start > 0:
            # Nothing lies behind the LAC, so the run before it tells the length.
            length = await self._length_up_to(EntryId(start - 1))
        assert position > lac, "an entry that was confirmed is there"
        return EntryId(position - 1), length

    def _give_up(self, first: EntryId, last: EntryId) -> EntryId:
        """Record a loss; return the entry behind it."""
        if self._lost and self._lost[-1][1] == first - 1:
            first, _ = self._lost.pop()
        self._lost.append((first, last))
        return EntryId(last + 1)

    async def _length_up_to(self, last: EntryId) -> int:
        """Return the ledger's length up to an entry that was acknowledged."""
        position, length = last, 0
        segment = self._metadata.segment_of(last)
        # What lies before this segment is another one's, and is not looked at.
        while position >= segment.first_entry_id:
            batch = await self._read(position, acknowledged=True)
            if batch is _Verdict.MOVED:
                segment = self._metadata.segment_of(last)
                continue
            if isinstance(batch, list):
                length = _behind(batch[:1])[1]
                break
            held = await self._held(segment.ensemble)
            before = [min(one[1], position - 1) for one in held if one[0] < position]
            position = EntryId(max(before, default=segment.first_entry_id - 1))
        if position < last:
            self._give_up(EntryId(position + 1), last)
        return length

    async def _held(self, ensemble: Sequence[NodeId]) -> list[EntryRange]:
        """Return what the nodes hold that answer, once a loss was accepted."""
        held: dict[NodeId, list[EntryRange]] = {}
        failed: set[NodeId] = set()

        async def look(node_id: NodeId, client: StorageNodeClient) -> None:
            held[node_id] = list(await client.held_entries(self._ledger_id))

        def decide() -> bool | None:
            silent = [one for one in ensemble if one not in held]
            return self._asking.is_vain(silent, failed) or None

        async with Helpers() as tasks:
            for one in ensemble:
                call = partial(look, one)
                tasks.spawn(self._asking.ask(one, "entries that it holds", call, failed))
            await self._asking.until("what lies behind a loss", decide)
        return [span for node_id in ensemble for span in held.get(node_id, [])]

    async def _read(self, position: EntryId, *, acknowledged: bool) -> list[Run] | _Verdict:
        """Return runs from ``position`` on, or why there are none.

        What was ``acknowledged`` is waited for, whoever denies it.
        """
        found = _Found()
        write_set = self._metadata.write_set(position)

        def decide() -> list[Run] | _Verdict | None:
            if found.batches:
                return found.batches[0]
            if self._metadata.write_set(position) != write_set:
                return _Verdict.MOVED
            if len(found.absent) >= self._metadata.covering:
                return _Verdict.ABSENT
            silent = [one for one in write_set if one not in found.absent]
            return _Verdict.LOST if self._asking.is_vain(silent, found.failed) else None

        async with Helpers() as tasks:
            for node_id in write_set:
                tasks.spawn(self._read_node(node_id, position, found, acknowledged=acknowledged))
            return await self._asking.until(f"entry {position}", decide)

    async def _read_node(
        self, node_id: NodeId, position: EntryId, found: _Found, *, acknowledged: bool
    ) -> None:
        async def read(client: StorageNodeClient) -> None:
            batch: list[Run] = []
            try:
                await self._read_following(client, position, batch)
            except TierlogError as error:
                if not batch:
                    if error.reason is not Reason.NO_SUCH_ENTRY or acknowledged:
                        raise
                    found.absent.add(node_id)
                    return
            if not batch:
                raise RetryableError(
                    f"node {node_id} answers with other runs than those asked for",
                    reason=Reason.UNKNOWN,
                    remedy="Look into the node's log",
                )
            found.batches.append(batch)

        await self._asking.ask(node_id, f"entry {position}", read, found.failed)

    async def _read_following(
        self, client: StorageNodeClient, position: EntryId, batch: list[Run]
    ) -> None:
        """Add one node's runs from ``position`` on, as far as they go without a gap."""
        expected, end = position, self._metadata.segment_end(position)
        read: AsyncIterator[Sequence[Run]] = client.read(
            self._ledger_id,
            position,
            last_entry_id=None if end == INT64_MAX - 1 else end,
            bytes_max=self._asking.limits.batch_bytes_max,
            recovery=True,
        )
        async with closing_runs(read):
            async for runs in read:
                good, damage = authentic(runs, self._key)
                for run in good:
                    begins = run.first_entry_id == expected
                    holds = not batch and run.first_entry_id <= expected <= run.last_entry_id
                    if run.header.ledger_id != self._ledger_id or not (begins or holds):
                        return
                    batch.append(run)
                    expected = EntryId(run.last_entry_id + 1)
                if damage is not None:
                    raise damage


def _behind(runs: Sequence[Run]) -> tuple[EntryId, int]:
    """Return the entry that follows runs, and the ledger's length up to it."""
    header = runs[-1].header
    assert header.ledger_len >= 0, "an owner's run tells the length"
    return EntryId(runs[-1].last_entry_id + 1), header.ledger_len
