"""A metadata store in memory, processes with catalogs over it, and tests on virtual time."""

import functools
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from uuid import UUID

from tests.simulation.virtual_loop import run_virtual
from tierlog.adapters.memory.clock import SimClock
from tierlog.adapters.memory.faults import Faults
from tierlog.adapters.memory.ids import SeededIds
from tierlog.adapters.memory.metadata import MemoryMetadata, _Node
from tierlog.catalog import Catalog
from tierlog.model.ids import EntryId, LedgerId, NodeId, StreamName
from tierlog.model.ledger import LedgerMetadata, Segment
from tierlog.model.offload import Tier2Copy, Tier2Location
from tierlog.model.stream import Stream

NODE = NodeId("node-1")
ORDERS = StreamName("orders")
COPY = Tier2Copy(
    format_version=1,
    data_len=194,
    index_len=235,
    index_sha256=b"\x01" * 32,
    entry_count=3,
    block_count=1,
)
MIB = 1024 * 1024


def on_virtual_time(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a test where waiting costs nothing and every run is the same."""

    @functools.wraps(test)
    def run(*args, **named):
        async def main() -> None:
            await test(*args, **named)

        run_virtual(main(), until_s=10_000)

    return run


class Process:
    """One process: its own client, faults, clock and ids."""

    def __init__(self, server: MemoryMetadata, seed: int) -> None:
        rng = random.Random(seed)
        self.faults = Faults(rng)
        self.client = server.connect(self.faults)
        self.clock = SimClock()
        self.ids = SeededIds(rng)
        self.catalog = Catalog.over(self.client, clock=self.clock, ids=self.ids)


class World:
    """One cluster's metadata and its processes."""

    def __init__(self) -> None:
        self.server = MemoryMetadata(session_timeout_s=6)
        self._seed = 0

    def process(self) -> Process:
        self._seed += 1
        return Process(self.server, self._seed)

    async def owner(self, name: StreamName = ORDERS) -> tuple[Process, Stream]:
        """Return a process that has just become the stream's owner."""
        process = self.process()
        await process.catalog.nodes.ensure_cluster()
        await process.catalog.streams.create(name)
        return process, await process.catalog.streams.claim(name, NODE)

    async def closed_ledger(self, owner: Process, claimed: Stream) -> LedgerId:
        """Open a ledger and close it with three entries."""
        ledgers = owner.catalog.ledgers
        ledger_id = await ledgers.new_id()
        await ledgers.open(claimed, ledger_id, one_node(), block_size=5 * MIB)
        await ledgers.close(claimed, ledger_id, last_entry_id=EntryId(2), length=30)
        return ledger_id


Backup = dict[str, _Node]


def backup_of(server: MemoryMetadata) -> Backup:
    """Return what a copy of the server's disk has."""
    kept = {path: node for path, node in server._nodes.items() if node.owner is None}
    return {
        path: replace(node, children={one for one in node.children if _below(path, one) in kept})
        for path, node in kept.items()
    }


def put_back(server: MemoryMetadata, backup: Backup) -> None:
    """Put the server back to what it was; who has a session goes on without its nodes."""
    server._nodes = {path: replace(one, children=set(one.children)) for path, one in backup.items()}


def _below(path: str, name: str) -> str:
    return f"{path.rstrip('/')}/{name}"


def one_node() -> LedgerMetadata:
    return LedgerMetadata(
        ensemble_size=1,
        write_quorum=1,
        ack_quorum=1,
        segments=(Segment(first_entry_id=EntryId(0), ensemble=(NODE,)),),
    )


def location(uuid: UUID, ledger_id: LedgerId) -> Tier2Location:
    key = f"{uuid}-ledger-{ledger_id}"
    return Tier2Location(
        driver="s3",
        endpoint_name="default",
        bucket="tierlog",
        data_key=key,
        index_key=f"{key}-index",
        side_key=f"{key}-side",
    )
