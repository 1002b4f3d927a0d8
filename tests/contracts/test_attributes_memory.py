"""The attribute index in memory, and the one of tier 2 over memory, keep the contract."""

from dataclasses import replace
from uuid import UUID

import pytest

from tests.contracts.attributes_suite import AttributesContract
from tests.unit.attributes.world import IndexWorld
from tierlog.adapters.memory.attributes import MemoryAttributes
from tierlog.model.ids import NodeId, StreamName
from tierlog.model.stream import Owner, Stream
from tierlog.ports.attributes import AttributeIndex


class TwinSite:
    def __init__(self) -> None:
        self.shared = MemoryAttributes()
        self._count = 0

    async def stream(self) -> Stream:
        self._count += 1
        stream = Stream(
            name=StreamName(f"s{self._count}"), incarnation=UUID(int=self._count), created_ms=1
        )
        return await self.claim(stream)

    async def claim(self, stream: Stream) -> Stream:
        self._count += 1
        owner = Owner(node_id=NodeId("n"), claim=UUID(int=self._count))
        return replace(stream, owner=owner, owner_epoch=stream.owner_epoch + 1)

    def index(self) -> AttributeIndex:
        return self.shared.connect()


class TestMemoryAttributeIndex(AttributesContract):
    @pytest.fixture
    def site(self):
        return TwinSite()


class TestTier2AttributeIndex(AttributesContract):
    @pytest.fixture
    def site(self):
        return IndexWorld()


class TestTier2AttributeIndexInSmallSteps(AttributesContract):
    """A flush is many objects."""

    @pytest.fixture
    def site(self):
        return IndexWorld(chunk_objects_max=5, page_bytes=256, step_bytes=600)


class TestTier2AttributeIndexInSmallChunks(AttributesContract):
    """Every few flushes a chunk is closed, and pages split early."""

    @pytest.fixture
    def site(self):
        return IndexWorld(chunk_bytes=600, chunk_objects_max=2, page_bytes=256)
