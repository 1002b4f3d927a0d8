"""Re-writing what recovery found, and putting other nodes in the place of those that fail at it.

Owns the ensemble as this recovery changes it. It is told to nobody before the closing change
publishes it; reading goes by the published metadata alone.

Invariants:
    * A batch is done only when each of its runs has its ack quorum of acknowledgements, from
      nodes that are in its write set now: those of a replaced node don't count. Less will do
      only where a loss was accepted.
    * A new segment begins with the first run of the batch that made it necessary, and all of
      that batch is sent by it. Runs before it stay where they were re-written.
    * No node comes back into an ensemble that it failed in during this recovery.
    * Which nodes may lack entries in the end is known: ``lacking``.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import structlog

from tierlog.format.run import Run
from tierlog.ledger.asking import Asking
from tierlog.ledger.placement import choose_replacement
from tierlog.model.errors import TierlogError
from tierlog.model.ids import EntryId, LedgerId, NodeId
from tierlog.model.ledger import LedgerMetadata, Segment
from tierlog.model.node import NodeInfo
from tierlog.ports.storage_node import StorageNodeClient
from tierlog.ports.waiting import Helpers

log = structlog.get_logger()

LiveNodes = Callable[[], Awaitable[Mapping[NodeId, NodeInfo]]]


@dataclass(slots=True)
class _Batch:
    """Runs on their way to their write sets."""

    runs: Sequence[Run]
    acks: list[set[NodeId]] = field(init=False)
    under_way: dict[NodeId, "asyncio.Task[None]"] = field(default_factory=dict)
    quorum_s: float | None = None
    """When all runs had their ack quorum."""

    def __post_init__(self) -> None:
        self.acks = [set() for _ in self.runs]

    def owed(self, node_id: NodeId, metadata: LedgerMetadata) -> list[tuple[int, Run]]:
        """Return the runs that a node should have and did not acknowledge."""
        return [
            (at, run)
            for at, run in enumerate(self.runs)
            if node_id not in self.acks[at] and node_id in metadata.write_set(run.first_entry_id)
        ]

    def count_min(self, metadata: LedgerMetadata) -> int:
        """Return how many copies the run has that has the fewest."""
        return min(
            len(acks.intersection(metadata.write_set(run.first_entry_id)))
            for run, acks in zip(self.runs, self.acks, strict=True)
        )


class Rewriting:
    """The writing side of one recovery."""

    def __init__(
        self, ledger_id: LedgerId, metadata: LedgerMetadata, asking: Asking, live: LiveNodes
    ) -> None:
        self.lacking: set[NodeId] = set()
        """Nodes that did not acknowledge an entry of their own."""
        self._ledger_id = ledger_id
        self._published = metadata
        self._metadata = metadata
        self._asking = asking
        self._live = live
        self._failed: set[NodeId] = set()
        self._sought: set[NodeId] = set()
        """Failed nodes for which another was sought just now, found or not."""
        self._out: list[NodeId] = []
        """Failed nodes in whose place another came."""

    @property
    def segments(self) -> tuple[Segment, ...] | None:
        """The segments that the close must publish; None: they are as they were."""
        changed = self._metadata.segments != self._published.segments
        return self._metadata.segments if changed else None

    async def rewrite(self, runs: Sequence[Run]) -> None:
        """Send runs to their write sets until each has its ack quorum, and more if it is quick."""
        batch = _Batch(runs)
        self._sought.clear()
        backoff_s = self._asking.limits.backoff_s_first
        async with Helpers() as tasks:
            while True:
                await self._replace_failed(batch)
                self._send(batch, tasks)
                copies = batch.count_min(self._metadata)
                if copies >= self._metadata.write_quorum:
                    return
                if copies >= self._metadata.ack_quorum:
                    if not batch.under_way:
                        self._note_lacking(batch)
                        return
                    await self._wait_for_rest(batch)
                elif batch.under_way:
                    await self._asking.until("re-write", lambda: self._moved(batch))
                elif copies and self._asking.loss_accepted:
                    self._note_lacking(batch)
                    return
                else:
                    self._asking.tell("re-write")
                    await self._asking.back_off(backoff_s)
                    backoff_s = min(self._asking.limits.backoff_s_max, 2 * backoff_s)
                    self._failed.clear()
                    self._sought.clear()

    def _send(self, batch: _Batch, tasks: Helpers) -> None:
        for node_id in self._metadata.segments[-1].ensemble:
            if node_id in batch.under_way or node_id in self._failed:
                continue
            owed = batch.owed(node_id, self._metadata)
            if owed:
                batch.under_way[node_id] = tasks.spawn(self._send_to(node_id, owed, batch))

    async def _send_to(
        self, node_id: NodeId, owed: Sequence[tuple[int, Run]], batch: _Batch
    ) -> None:
        async def add(client: StorageNodeClient) -> None:
            answers = [(at, client.add(run, recovery=True)) for at, run in owed]
            for at, answer in answers:
                await answer
                batch.acks[at].add(node_id)
                self._asking.news.set()

        failure = await self._asking.once(node_id, "re-write", add)
        del batch.under_way[node_id]
        if failure is not None:
            self._fail(node_id, failure.error)
            await self._asking.drop(node_id, failure)

    def _fail(self, node_id: NodeId, error: TierlogError | None) -> None:
        self._failed.add(node_id)
        log.warning(
            "recovery.replica_failed",
            ledger_id=self._ledger_id,
            node_id=node_id,
            cause="slower than the others" if error is None else str(error),
        )

    def _moved(self, batch: _Batch) -> bool | None:
        """Tell whether there is something to do: a quorum, a failure to make up for."""
        enough = batch.count_min(self._metadata) >= self._metadata.ack_quorum
        return True if enough or not batch.under_way or self._newly_failed() else None

    async def _wait_for_rest(self, batch: _Batch) -> None:
        """Give the slower nodes some time; who has not answered then has failed."""
        loop = asyncio.get_running_loop()
        if batch.quorum_s is None:
            batch.quorum_s = loop.time()
        try:
            async with asyncio.timeout_at(batch.quorum_s + self._asking.limits.patience_s):
                self._asking.news.clear()
                await self._asking.news.wait()
        except TimeoutError:
            batch.quorum_s = None  # those that take over get their time, too
            for node_id, task in list(batch.under_way.items()):
                task.cancel()
                del batch.under_way[node_id]
                self._fail(node_id, None)

    def _newly_failed(self) -> list[NodeId]:
        """Return the failed nodes of the ensemble for which no other was sought yet."""
        ensemble = self._metadata.segments[-1].ensemble
        return [one for one in ensemble if one in self._failed and one not in self._sought]

    async def _replace_failed(self, batch: _Batch) -> None:
        """Put other nodes in the place of failed ones from this batch on, as far as there are."""
        failed = self._newly_failed()
        if not failed:
            return
        try:
            live = await self._live()
        except TierlogError as error:
            log.info("recovery.nodes_unknown", ledger_id=self._ledger_id, cause=str(error))
            live = {}
        self._sought.update(failed)
        ensemble = list(self._metadata.segments[-1].ensemble)
        for node_id in failed:
            at = ensemble.index(node_id)
            found = choose_replacement(
                live.values(),
                ensemble,
                at,
                write_quorum=self._metadata.write_quorum,
                seed=str(self._ledger_id).encode(),
                excluded=self._failed.union(self._out),
            )
            if found is not None:
                ensemble[at] = found
                self._out.append(node_id)
                log.info(
                    "recovery.replica_replaced",
                    ledger_id=self._ledger_id,
                    node_id=node_id,
                    replacement=found,
                    first_entry_id=batch.runs[0].first_entry_id,
                )
        self._change_ensemble(batch.runs[0].first_entry_id, tuple(ensemble))

    def _change_ensemble(self, first_entry_id: EntryId, ensemble: tuple[NodeId, ...]) -> None:
        *before, last = self._metadata.segments
        if ensemble == last.ensemble:
            return
        assert first_entry_id >= last.first_entry_id, "a batch lies in the last segment"
        if first_entry_id > last.first_entry_id:
            before.append(last)
        changed = Segment(first_entry_id=first_entry_id, ensemble=ensemble)
        self._metadata = replace(self._metadata, segments=(*before, changed))

    def _note_lacking(self, batch: _Batch) -> None:
        for node_id in self._metadata.segments[-1].ensemble:
            if batch.owed(node_id, self._metadata):
                self.lacking.add(node_id)
