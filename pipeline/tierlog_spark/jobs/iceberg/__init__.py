"""The job ``iceberg``: exported files into an Iceberg table, each once (no Spark; ADR-0034).

from tierlog_spark.jobs.frame import Run
from tierlog_spark.jobs.iceberg import IcebergOptions, fill_table

report = fill_table(Run(), IcebergOptions(stream="orders", source="exports", table="logs.orders",
                                          s3=s3))
"""

from tierlog_spark.jobs.iceberg.job import fill_table
from tierlog_spark.jobs.iceberg.options import IcebergOptions

__all__ = ["IcebergOptions", "fill_table"]
