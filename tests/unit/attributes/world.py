"""A metadata store and a bucket in memory, streams with owners, and processes with an index."""

import random

from tierlog.adapters.memory.clock import SimClock
from tierlog.adapters.memory.faults import Faults
from tierlog.adapters.memory.ids import SeededIds
from tierlog.adapters.memory.metadata import MemoryMetadata
from tierlog.adapters.memory.objects import MemoryObjects
from tierlog.attributes.objects import IndexObjects
from tierlog.attributes.page_cache import PageCache
from tierlog.attributes.store import IndexLimits, Tier2AttributeIndex
from tierlog.attributes.update import Shape
from tierlog.catalog import Catalog
from tierlog.model.ids import NodeId, StreamName
from tierlog.model.policy import Policy
from tierlog.model.stream import Stream
from tierlog.offload.attribute_sweep import AttributeSweeper
from tierlog.offload.manifests import ManifestStore
from tierlog.ports.spending import CostMeter

NODE = NodeId("node-1")
SAFETY_MS = 60_000  # tests that run on a real loop may take a second


class Process:
    """One process: clients that suffer its faults, and an index over them."""

    def __init__(self, world: "IndexWorld", faults: Faults, *, cache_bytes: int) -> None:
        rng = random.Random(world.next_seed())
        self.faults = faults
        self.ids = SeededIds(rng)
        self.catalog = Catalog.over(world.metadata.connect(faults), clock=world.clock, ids=self.ids)
        self.meter = CostMeter()
        self.objects = world.bucket.connect(faults, meter=self.meter)
        self.cache = PageCache(limit_bytes=cache_bytes)
        self.index = Tier2AttributeIndex(
            self.catalog.attributes,
            IndexObjects(self.objects, cluster_id=world.cluster_id, ids=self.ids),
            self.cache,
            limits=world.limits,
            shape=world.shape,
        )
        self.manifests = ManifestStore(
            self.objects, cluster_id=world.cluster_id, clock=world.clock, ids=self.ids
        )
        self.sweeper = AttributeSweeper(
            objects=self.objects,
            catalog=self.catalog,
            manifests=self.manifests,
            cluster_id=world.cluster_id,
            key_prefix="",
            clock=world.clock,
            safety_ms=SAFETY_MS,
        )


class IndexWorld:
    """One cluster's metadata and bucket."""

    def __init__(
        self,
        *,
        chunk_bytes: int = 32 * 1024 * 1024,
        chunk_objects_max: int = 512,
        page_bytes: int = 32 * 1024,
        step_bytes: int = 64 * 1024 * 1024,
    ) -> None:
        self.clock = SimClock()
        self.metadata = MemoryMetadata()
        self.bucket = MemoryObjects(self.clock)
        self.limits = IndexLimits(
            chunk_bytes=chunk_bytes, chunk_objects_max=chunk_objects_max, step_bytes=step_bytes
        )
        self.shape = Shape(page_bytes=page_bytes)
        self._seed = 0
        self.cluster_id = SeededIds(random.Random(77)).uuid()

    def next_seed(self) -> int:
        self._seed += 1
        return self._seed

    def process(self, faults: Faults | None = None, *, cache_bytes: int = 1 << 24) -> Process:
        return Process(self, faults or Faults(random.Random(0)), cache_bytes=cache_bytes)

    def index(self) -> Tier2AttributeIndex:
        return self.process().index

    async def stream(self, *, policy: Policy | None = None, raw: bool = False) -> Stream:
        catalog = self.process().catalog
        await catalog.streams.ensure_roots()
        name = StreamName(f"stream-{self.next_seed()}")
        await catalog.streams.create(name, policy=policy, raw=raw)
        return await catalog.streams.claim(name, NODE)

    async def claim(self, stream: Stream) -> Stream:
        return await self.process().catalog.streams.claim(stream.name, NODE)

    def keys_in_bucket(self) -> list[str]:
        return sorted(self.bucket.objects)
