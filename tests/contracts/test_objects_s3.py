"""S3 keeps the object store's contract."""

import uuid

import pytest
from pydantic import SecretStr

from tests.contracts.objects_suite import ObjectsContract
from tierlog.adapters.s3 import open_s3
from tierlog.adapters.system import SystemClock, SystemIds
from tierlog.runtime.settings import S3Settings

pytestmark = pytest.mark.integration


@pytest.fixture
async def store(servers):
    where = servers.endpoints
    settings = S3Settings(
        endpoint_url=where.s3_endpoint_url,
        access_key=where.s3_access_key,
        secret_key=SecretStr(where.s3_secret_key),
        bucket=where.s3_bucket,
    )
    async with open_s3(settings, clock=SystemClock(), ids=SystemIds()) as store:
        yield store


@pytest.fixture
def prefix():
    return f"contract/{uuid.uuid4()}/"


class TestS3Objects(ObjectsContract):
    pass
