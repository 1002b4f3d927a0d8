"""Every driver keeps the contract, over the S3 server, with the smallest parts that it takes."""

from collections.abc import AsyncIterator

import pytest

from tests.contracts.offloader_suite import OffloaderContract
from tests.unit.offload.world import CLUSTER
from tierlog.model.policy import BLOCK_SIZE_MIN
from tierlog.offload import LedgerOffloader
from tierlog.offload.driver import DRIVER, Tier2Settings
from tierlog.offload.drivers import DriverParts, Drivers
from tierlog.offload.single_driver import SINGLE_DRIVER
from tierlog.ports.objects import ObjectStore
from tierlog.runtime.settings import Settings
from tierlog.wiring.build import open_objects

pytestmark = pytest.mark.integration


@pytest.fixture
def block_size() -> int:
    return BLOCK_SIZE_MIN


@pytest.fixture
async def objects(corner: Settings) -> AsyncIterator[ObjectStore]:
    async with open_objects(corner) as opened:
        yield opened


@pytest.fixture(params=[DRIVER, SINGLE_DRIVER])
def driver(
    request: pytest.FixtureRequest, corner: Settings, objects: ObjectStore
) -> LedgerOffloader:
    settings = Tier2Settings(
        bucket=corner.s3.bucket, cluster_id=CLUSTER, key_prefix=corner.s3.key_prefix
    )
    return Drivers(DriverParts(objects=objects, settings=settings), writes=request.param)


class TestDriversOverS3(OffloaderContract):
    pass
