"""Keys of each kind that the SDK finds are renewed in place."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from aiobotocore.credentials import AioCredentials, AioRefreshableCredentials

from tierlog.adapters.s3.credentials import Credentials, Keys


def refreshable() -> Any:
    """Keys as a role of a machine or a pod has them."""

    async def refresh() -> dict[str, str]:
        raise AssertionError("they are not old")

    later = datetime.now(UTC) + timedelta(hours=6)
    return AioRefreshableCredentials("old", "s", "t", later, refresh, "test")


@pytest.mark.parametrize("make", [refreshable, lambda: AioCredentials("old", "s", "t")])
async def test_they_are_renewed_and_the_same_ones_are_no_new_ones(make):
    found = Keys("old", "s", "t")

    async def load() -> Keys:
        return found

    in_use = make()
    credentials = Credentials(in_use, load)
    assert not await credentials.renew(0)
    found = Keys("new", "other", None)
    assert await credentials.renew(0)
    frozen = await in_use.get_frozen_credentials()
    assert frozen.access_key == "new"
    assert await credentials.renew(0), "whoever failed with the old ones goes on with the new"
    assert credentials.generation == 1
