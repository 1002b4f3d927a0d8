"""PySpark data source and jobs over tier 2.

from tierlog_spark import register

register(spark)
spark.read.format("tierlog").option("bucket", "logs").option("stream", "orders").load()
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tierlog_spark.source import TierlogDataSource, register

__all__ = ["TierlogDataSource", "register"]


def __getattr__(name: str) -> object:
    # The command line looks into this package before it knows whether it needs Spark.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tierlog_spark import source  # noqa: PLC0415

    return getattr(source, name)
