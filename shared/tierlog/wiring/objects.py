"""One bucket to look into, as it is: nothing is made, nothing is changed."""

import contextlib
from collections.abc import AsyncIterator

from tierlog.ports.objects import ObjectStore
from tierlog.ports.spending import CostMeter
from tierlog.runtime.settings import Settings
from tierlog.wiring.build import system_clock, system_ids


@contextlib.asynccontextmanager
async def open_bucket(
    settings: Settings, bucket: str, *, meter: CostMeter | None = None
) -> AsyncIterator[ObjectStore]:
    """Give a bucket of the S3 server that the settings name, whichever bucket they name.

    ``meter`` counts its requests.
    """
    from tierlog.adapters.s3 import open_s3

    s3 = settings.s3.model_copy(update={"bucket": bucket})
    async with open_s3(s3, clock=system_clock(), ids=system_ids(), meter=meter) as store:
        yield store
