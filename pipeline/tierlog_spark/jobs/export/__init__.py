"""The job ``export``: streams to Parquet files, each event once (docs/how-to/export-with-spark.md).

from tierlog_spark.jobs.export import ExportOptions, export
from tierlog_spark.jobs.frame import JobRun

report = export(JobRun(spark=spark), ExportOptions(streams=("orders",), to="exports", s3=s3))
"""

from tierlog_spark.jobs.export.committed import Committed, committed_files
from tierlog_spark.jobs.export.job import export
from tierlog_spark.jobs.export.options import ExportOptions

__all__ = ["Committed", "ExportOptions", "committed_files", "export"]
