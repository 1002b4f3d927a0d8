"""Leaders that write manifests into a bucket in memory; backups of metadata."""

from dataclasses import replace
from typing import Any

from tests.unit.offload.world import CLUSTER, STREAM, World
from tierlog.adapters.memory.faults import Faults, no_faults
from tierlog.adapters.memory.metadata import MemoryMetadata
from tierlog.catalog import Catalog
from tierlog.catalog.streams import StreamSnapshot
from tierlog.format.manifest import parse_manifest_key
from tierlog.model.ids import LedgerId, StreamName
from tierlog.model.offload import OffloadContext, OffloadState
from tierlog.model.stream import Stream
from tierlog.offload.manifests import KnownManifest, ManifestStore
from tierlog_scheduler.manifests import BucketManifests

ENTRIES = [bytes([number]) * (number * 37 % 200) for number in range(10)]


def store_of(world: World, faults: Faults | None = None) -> ManifestStore:
    return ManifestStore(
        world.bucket.connect(faults or no_faults()),
        cluster_id=CLUSTER,
        clock=world.clock,
        ids=world.ids,
    )


class Leader:
    """What a pass of the scheduler does about manifests."""

    def __init__(self, world: World, faults: Faults | None = None) -> None:
        self.world = world
        self.catalog: Catalog = world.catalog(faults)
        self.gate = BucketManifests(store_of(world, faults), self.catalog)

    async def read(
        self, name: StreamName = STREAM
    ) -> tuple[StreamSnapshot, dict[LedgerId, OffloadContext]]:
        snapshot = await self.catalog.streams.snapshot(name)
        contexts = {}
        for listed in snapshot.ledgers:
            context = await self.catalog.contexts.peek(listed.ledger_id)
            if context is not None:
                contexts[listed.ledger_id] = context
        return snapshot, contexts

    async def visit(self, name: StreamName = STREAM) -> None:
        await self.gate.look(name)
        await self.gate.record(*await self.read(name))


async def offloaded(world: World, claimed: Stream) -> LedgerId:
    """Seal a ledger and copy it."""
    ledger_id = await world.seal(claimed, ENTRIES)
    await world.worker().handle(world.request(claimed, ledger_id))
    assert (await world.context(ledger_id)).complete
    return ledger_id


async def named() -> tuple[World, Stream, LedgerId, Leader]:
    """A ledger in the bucket, and the leader whose manifest names its copy."""
    world = World()
    claimed = await world.stream()
    ledger_id = await offloaded(world, claimed)
    leader = Leader(world)
    await leader.visit()
    return world, claimed, ledger_id, leader


async def newest(world: World, name: StreamName = STREAM) -> KnownManifest:
    stream = await world.catalog().streams.get(name)
    return await store_of(world).newest(name, stream.incarnation)


def manifests_of(world: World) -> list[str]:
    return [key for key in sorted(world.bucket.objects) if parse_manifest_key("", key)]


def backup(metadata: MemoryMetadata) -> dict[str, Any]:
    nodes = metadata._nodes
    return {path: replace(node, children=set(node.children)) for path, node in nodes.items()}


def restore(metadata: MemoryMetadata, nodes: dict[str, Any]) -> None:
    metadata._nodes.clear()
    metadata._nodes.update(nodes)


async def trim(world: World, ledger_id: LedgerId) -> None:
    """What retention's transaction does to the list."""
    catalog = world.catalog()
    await catalog.contexts.change(
        ledger_id,
        lambda one: one.moved_to(OffloadState.TRIMMING),
        applied=lambda one: one.state is OffloadState.TRIMMING,
    )

    def plan(stream: Stream) -> Stream:
        left = tuple(one for one in stream.ledgers if one.ledger_id != ledger_id)
        return replace(stream, ledgers=left, deleting=(*stream.deleting, ledger_id))

    await catalog.streams.change(STREAM, plan, applied=lambda one: one.listed(ledger_id) is None)
