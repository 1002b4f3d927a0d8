"""What jobs share: a report and its metrics, and errors of executors as what they are."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tierlog.model.errors import CorruptError, Reason
from tierlog_spark.jobs.frame import JobReport, told_by_executor, write_metrics

TOLD = """[PYTHON_DATA_SOURCE_ERROR] Failed when Python data source instance read data: Traceback
  File "reading.py", line 3, in _naming
tierlog.model.errors.CorruptError: grain 3 has another checksum

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "worker.py", line 9, in main
tierlog.model.errors.CorruptError: object 7-data, entry 7:1: grain 3 has another checksum. Repair it

\tat org.apache.spark.api.python.BasePythonRunner.handlePythonException(PythonRunner.scala:1)
"""


def test_what_an_executor_raised_of_ours_is_told_as_that():
    found = told_by_executor(TOLD)
    assert isinstance(found, CorruptError)
    assert found.reason is Reason.CORRUPT
    assert str(found) == "object 7-data, entry 7:1: grain 3 has another checksum. Repair it"


@pytest.mark.parametrize("text", ["", "ValueError: no", "tierlog.model.errors.NoError: what"])
def test_other_errors_stay_what_they_are(text):
    assert told_by_executor(text) is None


def test_metrics_are_the_counts_of_the_newest_run(tmp_path):
    path = tmp_path / "export.prom"
    report = JobReport(job="export", dry_run=True, counts={"events": 5, "seconds": 1.5})
    write_metrics(report, path, wall_ms=7000)
    assert not path.exists()
    write_metrics(JobReport(job="export", dry_run=False, counts=report.counts), path, wall_ms=7000)
    found = {
        one.name: (one.samples[0].labels, one.samples[0].value)
        for one in text_string_to_metric_families(path.read_text(encoding="utf-8"))
    }
    assert found == {
        "tierlog_spark_job_events": ({"job": "export"}, 5),
        "tierlog_spark_job_seconds": ({"job": "export"}, 1.5),
        "tierlog_spark_job_ended_timestamp_seconds": ({"job": "export"}, 7),
    }
    assert report.document() == {
        "job": "export",
        "dry_run": True,
        "events": 5,
        "seconds": 1.5,
        "rows": [],
    }
