"""A cluster in memory for tests of ledgers and streams: nodes, metadata, seeded chance."""

import asyncio
import random
from collections.abc import Mapping, Sequence

from tierlog.adapters.memory.clock import SimClock
from tierlog.adapters.memory.faults import Faults, no_faults
from tierlog.adapters.memory.ids import SeededIds
from tierlog.adapters.memory.metadata import MemoryMetadata
from tierlog.adapters.memory.storage_node import MemoryStorageNode
from tierlog.catalog import Catalog
from tierlog.format.frame import pack_entries
from tierlog.format.run import Run, build_run
from tierlog.ledger.directory import NodeDirectory
from tierlog.ledger.keys import NO_KEYS, LedgerKeys
from tierlog.ledger.recovery import Recovery, RecoveryLimits
from tierlog.model.ids import EntryId, LedgerId, NodeId, StreamName
from tierlog.model.ledger import (
    COMPONENT_BARE,
    KEY_COMPONENT,
    KEY_KEY_ID,
    KEY_STRIPE_ENTRIES,
    DigestType,
    LedgerMetadata,
    Segment,
)
from tierlog.model.node import NodeInfo
from tierlog.model.policy import Policy
from tierlog.model.stream import Stream
from tierlog.ports.storage_node import StorageNodeClient
from tierlog.runtime.settings import OwnerSettings

STREAM = StreamName("logs")
THREE = ["n1", "n2", "n3"]

ALONE = OwnerSettings(ensemble_size=1, write_quorum=1, ack_quorum=1, append_timeout_s=5.0)
"""An owner that needs no other node."""


def quorums(ensemble_size: int, write_quorum: int, ack_quorum: int) -> OwnerSettings:
    """Return an owner's settings with these."""
    return ALONE.model_copy(
        update={
            "ensemble_size": ensemble_size,
            "write_quorum": write_quorum,
            "ack_quorum": ack_quorum,
        }
    )


def draft(*entries: bytes, publish_ms: tuple[int, int] = (0, 0)) -> Run:
    """Return what a producer sends: a run without ids."""
    frames, offsets = pack_entries(entries)
    return build_run(frames, offsets, publish_ms_min=publish_ms[0], publish_ms_max=publish_ms[1])


class NoConnector:
    """Remote nodes that nobody can reach."""

    async def connect(self, info: NodeInfo) -> StorageNodeClient:
        raise AssertionError(f"{info.node_id} is local in these tests")

    async def close(self, node: StorageNodeClient) -> None:
        raise AssertionError(f"{node} was never connected")


class SmallCluster:
    """Storage nodes ``n1`` to ``nN`` and one metadata server."""

    def __init__(self, count: int = 1, *, seed: int = 1) -> None:
        self.rng = random.Random(seed)
        self.clock = SimClock()
        self.ids = SeededIds(self.rng)
        self.metadata = MemoryMetadata()
        self.names = [NodeId(f"n{number}") for number in range(1, count + 1)]
        self.nodes = {name: MemoryStorageNode(name) for name in self.names}

    def catalog(self, faults: Faults | None = None) -> Catalog:
        """Return a catalog with a session of its own."""
        store = self.metadata.connect(faults or no_faults())
        return Catalog.over(store, clock=self.clock, ids=self.ids)

    def info(self, name: NodeId) -> NodeInfo:
        """Return what a node announces of itself."""
        return NodeInfo(
            node_id=name,
            wire_address=f"{name}:1",
            grpc_address=f"{name}:2",
            http_address=f"{name}:3",
        )

    async def start(self, *, policy: Policy | None = None) -> Catalog:
        """Announce all nodes and create the stream."""
        catalog = self.catalog()
        await catalog.nodes.ensure_cluster()
        await catalog.streams.ensure_roots()
        for name in self.names:
            await catalog.nodes.announce(self.info(name))
        await catalog.streams.create(STREAM, policy=policy)
        return catalog

    def directory(self, catalog: Catalog) -> NodeDirectory[StorageNodeClient]:
        """Return clients of all nodes."""
        return NodeDirectory(catalog.nodes.live, NoConnector(), local=self.nodes)

    def recovery(self, catalog: Catalog, *, keys: LedgerKeys = NO_KEYS) -> Recovery:
        """Return a recovery that gives nodes one second to answer."""
        return Recovery(
            catalog,
            self.directory(catalog),
            ids=self.ids,
            limits=RecoveryLimits(answer_timeout_s=1.0),
            keys=keys,
        )

    async def open_ledger(
        self,
        catalog: Catalog,
        claimed: Stream,
        *,
        quorums: tuple[int, int, int] = (1, 1, 1),
        stripe_entries: int = 2**40,
        key_id: str | None = None,
    ) -> tuple[LedgerId, LedgerMetadata]:
        """Make a ledger on the first nodes."""
        size, write, ack = quorums
        metadata = LedgerMetadata(
            ensemble_size=size,
            write_quorum=write,
            ack_quorum=ack,
            segments=(Segment(first_entry_id=EntryId(0), ensemble=tuple(self.names[:size])),),
            digest_type=DigestType.CRC32C if key_id is None else DigestType.HMAC,
            custom={
                KEY_STRIPE_ENTRIES: str(stripe_entries).encode(),
                **({} if key_id is None else {KEY_KEY_ID: key_id.encode()}),
            },
        )
        ledger_id = await catalog.ledgers.new_id()
        await catalog.ledgers.open(claimed, ledger_id, metadata, block_size=5 * 1024 * 1024)
        return ledger_id, metadata


def bare_metadata(
    segments: Mapping[int, Sequence[str]], quorums: tuple[int, int, int] = (1, 1, 1)
) -> LedgerMetadata:
    """Return the metadata of a bare ledger: first entries and ensembles of its segments."""
    return LedgerMetadata(
        ensemble_size=quorums[0],
        write_quorum=quorums[1],
        ack_quorum=quorums[2],
        segments=tuple(
            Segment(first_entry_id=EntryId(first), ensemble=tuple(map(NodeId, ensemble)))
            for first, ensemble in segments.items()
        ),
        custom={KEY_COMPONENT: COMPONENT_BARE},
    )


def now_s() -> float:
    """Return the loop's time."""
    return asyncio.get_running_loop().time()


def payloads(runs: Sequence[Run]) -> list[bytes]:
    """Return the data of all entries."""
    return [bytes(entry) for run in runs for entry in run.entries()]
