"""How long the reader's parts take, for /metrics; what it counts is in ``metrics``."""

from typing import Final

from prometheus_client import Histogram

from tierlog_reader.places import Tier

_BUCKETS: Final = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10)

READ: Final = Histogram(
    "tierlog_read_duration_seconds",
    "How long a tier took to give what it was asked for, or to fail",
    ["tier"],
    buckets=_BUCKETS,
)
OF_TIER: Final = {tier: READ.labels(tier.value) for tier in Tier}
INDEX_READ: Final = Histogram(
    "tierlog_index_read_duration_seconds",
    "How long it took to get a copy's index, from the shared cache or the object store",
    buckets=_BUCKETS,
)
