"""What jobs share: a report and its metrics, and errors of executors as what they are."""

import traceback

import pytest
import typer
from prometheus_client.parser import text_string_to_metric_families

from tierlog.cli.output import Output
from tierlog.model.errors import (
    KINDS,
    CorruptError,
    IndeterminateError,
    Reason,
    RefusedError,
    RetryableError,
    TierlogError,
)
from tierlog.ports.objects import ObjectExistsError
from tierlog_spark.cli.running import EXIT_FINDINGS, EXIT_INCOMPLETE, tell
from tierlog_spark.jobs.frame import JobReport, Run, told_by_executor, write_metrics

SPARK = "[PYTHON_DATA_SOURCE_ERROR] Failed when an instance read data:\n{}\n\tat org.x(Y)"


def told_of(error: BaseException) -> TierlogError:
    """Return what comes of an error when its traceback is all that travels."""
    found = told_by_executor(SPARK.format("".join(traceback.format_exception(error))))
    assert found is not None
    return found


def raised_from(error: TierlogError, cause: TierlogError) -> BaseException:
    try:
        raise error from cause
    except TierlogError as caught:
        return caught


@pytest.mark.parametrize(
    "error",
    [
        CorruptError("grain 3 has another checksum", remedy="Repair it", details={"object": "7"}),
        RefusedError(
            "entry 7:1 is gone", reason=Reason.TRIMMED, remedy="Begin at EARLIEST. Or not"
        ),
        RetryableError("no room.\nSecond line", reason=Reason.RESOURCE_EXHAUSTED),
        ObjectExistsError("b/o is there", remedy="Read the object that is there"),
    ],
)
def test_what_an_executor_raised_of_ours_is_told_as_that(error):
    cause = IndeterminateError("what came before", remedy="Read back")
    for raised in (error, raised_from(error, cause), ExceptionGroup("tasks", [error])):
        found = told_of(raised)
        assert isinstance(error, type(found))
        assert type(found) in KINDS
        assert (found.reason, found.remedy) == (error.reason, error.remedy)
        if raised is not error and isinstance(raised, ExceptionGroup):
            continue  # its lines are indented
        assert str(found) == str(error)


def test_a_remedy_that_was_made_longer_since_is_told_once():
    error = RefusedError("no", remedy="Correct it")
    error.remedy += ". The 3 events before it are appended"
    assert str(told_of(error)) == str(error)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ValueError: no",
        "tierlog.model.errors.RefusedError: of an older one",
        "tierlog.model.errors.NoError: what\ntierlog reason: NO_REASON",
    ],
)
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
        "tierlog_spark_job_exit_code": ({"job": "export"}, 0),
        "tierlog_spark_job_ended_timestamp_seconds": ({"job": "export"}, 7),
    }
    assert report.document() == {
        "job": "export",
        "dry_run": True,
        "events": 5,
        "seconds": 1.5,
        "rows": [],
    }


@pytest.mark.parametrize(
    ("counts", "code"),
    [
        ({"remaining": 0, "unread": 0}, 0),
        ({"remaining": 2, "unread": 1}, EXIT_FINDINGS),
        ({"remaining": 0, "unread": 1}, EXIT_INCOMPLETE),
        ({"other": 9}, 0),
    ],
)
def test_metrics_of_a_run_that_left_something_undone_say_so(tmp_path, counts, code):
    path, codes = tmp_path / "scrub.prom", [0]
    try:
        tell(
            Run(),
            JobReport(job="scrub", dry_run=False, counts=counts),
            columns={},
            metrics=path,
            output=Output.TABLE,
            quiet=True,
            ends={"remaining": EXIT_FINDINGS, "unread": EXIT_INCOMPLETE},
        )
    except typer.Exit as ended:
        codes.append(ended.exit_code)
    assert codes[-1] == code
    assert f'tierlog_spark_job_exit_code{{job="scrub"}} {code:.1f}\n' in path.read_text(
        encoding="utf-8"
    )
