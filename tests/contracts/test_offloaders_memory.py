"""Every driver keeps the contract, over a bucket in memory."""

import pytest

from tests.contracts.offloader_suite import OffloaderContract
from tests.unit.offload.world import CLUSTER, SMALL_RANGES, World
from tierlog.offload import LedgerOffloader
from tierlog.offload.driver import BlockOffloader, Tier2Settings
from tierlog.offload.drivers import DriverParts, Drivers
from tierlog.offload.export import Exporter, ExportingOffloader
from tierlog.offload.single_driver import SINGLE_DRIVER, SingleObjectOffloader
from tierlog.ports.objects import ObjectStore


@pytest.fixture
def block_size() -> int:
    return 512


@pytest.fixture
def objects() -> ObjectStore:
    return World().bucket.connect()


@pytest.fixture(params=["two-objects", "single-object", "by-name", "exporting"])
def driver(request: pytest.FixtureRequest, objects: ObjectStore) -> LedgerOffloader:
    settings = Tier2Settings(bucket="b", cluster_id=CLUSTER, ranges=SMALL_RANGES, grain_len=64)
    two = BlockOffloader(objects, settings)
    made: dict[str, LedgerOffloader] = {
        "two-objects": two,
        "single-object": SingleObjectOffloader(objects, settings, index_len_min=600),
        "by-name": Drivers(DriverParts(objects=objects, settings=settings), writes=SINGLE_DRIVER),
        "exporting": ExportingOffloader(two, Exporter(objects, settings)),
    }
    return made[request.param]


class TestDriversInMemory(OffloaderContract):
    pass
