"""The attribute index on a real S3 and a real ZooKeeper keeps the contract, and is swept there."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from uuid import UUID, uuid4

import pytest
from pydantic import SecretStr

from tests.contracts.attributes_suite import AttributesContract, all_of, at, key_of
from tests.unit.catalog.world import NODE
from tierlog.adapters.s3 import open_s3
from tierlog.adapters.system import SystemClock, SystemIds
from tierlog.adapters.zookeeper.metadata import ZooKeeperMetadata
from tierlog.attributes.objects import IndexObjects
from tierlog.attributes.page_cache import PageCache
from tierlog.attributes.store import IndexLimits, Tier2AttributeIndex
from tierlog.attributes.update import Shape
from tierlog.catalog import Catalog
from tierlog.model.attributes import AttributeKey
from tierlog.model.errors import CorruptError
from tierlog.model.ids import StreamName
from tierlog.model.stream import Stream
from tierlog.offload.attribute_sweep import AttributeSweeper
from tierlog.offload.manifests import ManifestStore
from tierlog.ports.objects import ObjectStore
from tierlog.runtime.settings import S3Settings

pytestmark = pytest.mark.integration


class ServerSite:
    """Streams in a corner of ZooKeeper, objects below a prefix of the bucket."""

    def __init__(self, catalog: Catalog, objects: ObjectStore, prefix: str) -> None:
        self.catalog = catalog
        self.objects = objects
        self.prefix = prefix
        self.cluster_id = UUID(int=7)

    async def stream(self) -> Stream:
        await self.catalog.streams.ensure_roots()
        name = StreamName(f"s-{uuid4().hex[:12]}")
        await self.catalog.streams.create(name)
        return await self.catalog.streams.claim(name, NODE)

    async def claim(self, stream: Stream) -> Stream:
        return await self.catalog.streams.claim(stream.name, NODE)

    def index(self) -> Tier2AttributeIndex:
        objects = IndexObjects(
            self.objects, cluster_id=self.cluster_id, ids=SystemIds(), key_prefix=self.prefix
        )
        return Tier2AttributeIndex(
            self.catalog.attributes,
            objects,
            PageCache(limit_bytes=1 << 20),
            limits=IndexLimits(chunk_objects_max=2),
            shape=Shape(page_bytes=1024),
        )

    def sweeper(self) -> AttributeSweeper:
        manifests = ManifestStore(
            self.objects,
            cluster_id=self.cluster_id,
            clock=SystemClock(),
            ids=SystemIds(),
            key_prefix=self.prefix,
        )
        return AttributeSweeper(
            objects=self.objects,
            catalog=self.catalog,
            manifests=manifests,
            cluster_id=self.cluster_id,
            key_prefix=self.prefix,
            clock=SystemClock(),
            safety_ms=-60_000,
        )


@pytest.fixture
async def site(servers, zookeeper_corner) -> AsyncIterator[ServerSite]:
    where = servers.endpoints
    settings = S3Settings(
        endpoint_url=where.s3_endpoint_url,
        access_key=where.s3_access_key,
        secret_key=SecretStr(where.s3_secret_key),
        bucket=where.s3_bucket,
    )
    async with AsyncExitStack() as stack:
        opened = open_s3(settings, clock=SystemClock(), ids=SystemIds())
        objects = await stack.enter_async_context(opened)
        store = await ZooKeeperMetadata.connect(zookeeper_corner)
        stack.push_async_callback(store.close)
        catalog = Catalog.over(store, clock=SystemClock(), ids=SystemIds())
        yield ServerSite(catalog, objects, f"attributes/{uuid4()}")


class TestAttributesOnServers(AttributesContract):
    pass


@pytest.mark.covers("E37", "E39")
async def test_old_objects_go_from_the_bucket_and_the_newest_checkpoint_stays(site):
    stream, index = await site.stream(), site.index()
    base, values = await index.load(stream), dict[AttributeKey, int]()
    made = []
    for number in range(12):
        changes = {key_of(one): number for one in range(0, 300, 1 + number % 3)}
        values |= changes
        base = await index.flush(stream, base, changes=changes, core={}, through=at(0, number))
        made.append(base)

    async def free(length: int) -> None:
        del length

    swept = await site.sweeper().run(stream.name, stream.incarnation, delete=True, pay=free)
    assert swept.deleted > 3
    assert swept.findings == []
    assert await all_of(site.index(), base) == values
    with pytest.raises(CorruptError):
        await site.index().get(made[0], list(values))
    base = await index.flush(stream, base, changes={key_of(0): -1}, core={}, through=at(1, 0))
    assert (await all_of(site.index(), base))[key_of(0)] == -1
    assert await site.sweeper().remove(stream.name, stream.incarnation, at_most=1000) > 0
