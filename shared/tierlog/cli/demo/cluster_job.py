"""The demo's other job: appends go on while nodes die, and in the end nothing lacks a copy.

Owns the order of the steps and every check. Each check that fails ends the demo with exit 6.

What is shown:
    * the stream's owner, its machine and its disk gone for good in the middle of appending,
    * another node killed in the middle, which comes back,
    * nothing that was acknowledged lost or doubled, and the longest time without an answer,
    * every entry of every ledger on as many live nodes as it should be, each copy counted.
"""

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tierlog.cli.demo.records import Source
from tierlog.cli.demo.round_trip import STREAM, RoundTrip, differs, read_back
from tierlog.cli.demo.stage import Stage
from tierlog.model.ids import EntryId, LedgerId, NodeId
from tierlog.model.ledger import LedgerMetadata
from tierlog.model.policy import MIB, Policy
from tierlog.model.quorums import COPIES
from tierlog.model.spans import count, union, without

if TYPE_CHECKING:
    from tierlog.client import PartitionedWriter, StreamWriter

POLICY: Final = Policy(ledger_bytes_max=5 * MIB)
AWAY_S: Final = 3.0
REPLICATED_S_MAX: Final = 180.0


@dataclass(slots=True)
class ClusterOutcome(RoundTrip):
    """What the job found, for the report."""

    lost_node: str = ""
    fresh_node: str = ""
    killed_node: str = ""
    in_flight_at_loss: int = 0
    longest_gap_s: float = 0.0
    queued_max: int = 0
    under_replicated: int = 0
    replicated_s: float = 0.0


class AnswerWatch:
    """The longest time between two answers, while there was something to be answered."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._bytes = 0
        self._last_s: float | None = None

    def __call__(self, what: str, done: int, total: int | None) -> None:
        """Take the bytes that are acknowledged so far."""
        del what, total
        if done == self._bytes:
            return
        self._bytes, now_s = done, asyncio.get_running_loop().time()
        if self._last_s is not None:
            self.longest_s = max(self.longest_s, now_s - self._last_s)
        self._last_s = now_s

    def pause(self) -> None:
        """Nothing is sent now: the time until the next answer says nothing."""
        self._last_s = None


class ClusterJob:
    """One run of the job on a stage of three nodes or more."""

    def __init__(self, stage: Stage, source: Source, *, bytes_min: int) -> None:
        self._stage = stage
        self._source = source
        self._bytes_min = bytes_min
        self._answers = AnswerWatch()
        self._replaced = asyncio.Event()
        self.outcome = ClusterOutcome(source=source.name)

    async def run(self) -> ClusterOutcome:
        """Do all of it; raises ``CorruptError`` when anything differs."""
        stage = self._stage
        await stage.client.create_stream(STREAM, policy=POLICY)
        stage.tell(f"{len(self._source.records)} records from {self._source.name}")
        await self._append()
        await stage.client.seal(STREAM)
        await self._until_replicated()
        await read_back(stage, self.outcome)
        await self._survey()
        return self.outcome

    # Appending, while nodes die

    async def _append(self) -> None:
        loop, outcome = asyncio.get_running_loop(), self.outcome
        begun_s = loop.time()
        async with (
            asyncio.TaskGroup() as group,
            self._stage.client.writer(STREAM, progress=self._answers) as writer,
        ):
            breaking = group.create_task(self._break_nodes(writer))
            for event in outcome.events(self._source, self._bytes_min):
                await writer.send(event)
                if not self._replaced.is_set() and writer.acked_bytes > 0.6 * self._bytes_min:
                    # So quick are the appends that the second crash would come too late.
                    await writer.flush()
                    self._answers.pause()
                    await self._replaced.wait()
            await writer.flush()
            self._answers.pause()
            await breaking
        outcome.append_s = loop.time() - begun_s
        outcome.resolved_count = writer.resolved_count
        outcome.acknowledged = writer.acked_events
        outcome.longest_gap_s = self._answers.longest_s
        if outcome.acknowledged != outcome.appended.count:
            raise differs("not every event was acknowledged")
        self._stage.tell(
            f"all {writer.acked_events} events ({writer.acked_bytes / 1e6:.1f} MB) acknowledged; "
            f"the longest time without an answer was {outcome.longest_gap_s:.1f} s"
        )

    async def _break_nodes(self, writer: "StreamWriter | PartitionedWriter") -> None:
        stage, outcome = self._stage, self.outcome
        await self._until_appended(writer, 0.3)
        lost = await self._owner()
        outcome.in_flight_at_loss = writer.in_flight_events
        outcome.lost_node = stage.node_id(lost)
        stage.tell(
            f"kill -9 {lost}, which owns the stream, and its disk is gone for good: "
            f"{writer.acked_events} events acknowledged, {writer.in_flight_events} in flight"
        )
        stage.cluster.lose_node(lost)
        if len(stage.cluster.nodes) < COPIES:
            fresh = await stage.cluster.add_node()
            outcome.fresh_node = stage.node_id(fresh)
            stage.tell(f"{fresh} is started in its place, with an empty disk")
        self._replaced.set()
        await self._until_appended(writer, 0.7)
        owner = await self._owner()
        killed = next(
            name
            for name in stage.cluster.nodes
            if name != owner and stage.node_id(name) != outcome.fresh_node
        )
        outcome.killed_node = stage.node_id(killed)
        stage.tell(f"kill -9 {killed}: {writer.acked_events} events acknowledged")
        stage.cluster.services.kill(killed)
        await asyncio.sleep(AWAY_S)
        await stage.cluster.services.restart(killed)
        stage.tell(f"{killed} is back")

    async def _until_appended(
        self, writer: "StreamWriter | PartitionedWriter", share: float
    ) -> None:
        """Wait until a share of all is acknowledged and more is in flight."""
        while writer.acked_bytes < share * self._bytes_min or not writer.in_flight_events:
            if writer.acked_bytes >= self._bytes_min:
                raise differs("all was appended before a node could be killed in the middle")
            await asyncio.sleep(0.001)

    async def _owner(self) -> str:
        """Return the process that owns the stream."""
        owner = (await self._stage.catalog.streams.snapshot(STREAM)).stream.owner
        for name in self._stage.cluster.nodes:
            if owner is not None and self._stage.node_id(name) == owner.node_id:
                return name
        raise differs(f"the stream's owner is {owner}, which is none of the nodes")

    # What must hold afterwards

    async def _until_replicated(self) -> None:
        """Wait until the queue is empty and every copy of every ledger is where it should be."""
        stage, loop = self._stage, asyncio.get_running_loop()
        begun_s, told = loop.time(), -1
        stage.tell("waiting until every ledger has all its copies again")

        async def whole() -> bool:
            nonlocal told
            queued = len(await stage.catalog.underreplicated.list())
            self.outcome.queued_max = max(self.outcome.queued_max, queued)
            if queued != told:
                told = queued
                stage.tell(f"{queued} ledgers are queued for replication")
            return queued == 0 and await self._lacking() == 0

        await stage.until("every ledger replicated again", whole, timeout_s=REPLICATED_S_MAX)
        self.outcome.replicated_s = loop.time() - begun_s
        stage.tell("every ledger has all its copies, on live nodes")

    async def _lacking(self) -> int:
        """Return how many copies of entries are missing, over all ledgers."""
        lacking = 0
        for listed in await self._stage.ledgers(STREAM):
            metadata = await self._stage.catalog.ledgers.get(listed.ledger_id)
            if metadata is None:
                raise differs(f"ledger {listed.ledger_id} has no metadata")
            lacking += await self._lacking_of(listed.ledger_id, metadata)
        return lacking

    async def _lacking_of(self, ledger_id: LedgerId, metadata: LedgerMetadata) -> int:
        live = await self._stage.catalog.nodes.live()
        lacking = 0
        for node_id, wanted in entries_by_node(metadata).items():
            spans = union((one, one) for one in wanted)
            if node_id in live:
                control = await self._stage.nodes.client(node_id)
                spans = without(spans, await control.held_entries(ledger_id))
            lacking += count(spans)
        return lacking

    async def _survey(self) -> None:
        """Note where each ledger's copies lie, for the report."""
        stage = self._stage
        self.outcome.under_replicated = len(await stage.catalog.underreplicated.list())
        for listed in await stage.ledgers(STREAM):
            metadata = await stage.catalog.ledgers.get(listed.ledger_id)
            assert metadata is not None
            self.outcome.ledgers.append(
                {
                    "ledger_id": int(listed.ledger_id),
                    "state": metadata.state.name.lower(),
                    "entries": int(listed.entry_count),
                    "bytes": listed.length,
                    "epoch": listed.owner_epoch,
                    "copies": metadata.write_quorum,
                    "lacking": await self._lacking_of(listed.ledger_id, metadata),
                    "ensembles": [
                        f"{one.first_entry_id}: {' '.join(one.ensemble)}"
                        for one in metadata.segments
                    ],
                }
            )
        named = {one for line in self.outcome.ledgers for one in line["ensembles"]}
        if any(self.outcome.lost_node in line.split() for line in named):
            raise differs(f"ledgers still name {self.outcome.lost_node}, which is gone")


def entries_by_node(metadata: LedgerMetadata) -> dict[NodeId, list[EntryId]]:
    """Return which entries of a closed ledger each node should hold."""
    found: dict[NodeId, list[EntryId]] = {}
    for number in range(metadata.last_entry_id + 1):
        for node_id in metadata.write_set(EntryId(number)):
            found.setdefault(node_id, []).append(EntryId(number))
    return found
