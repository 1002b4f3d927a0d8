"""What makes no sense is refused before anybody is asked: by its name, with what to do, exit 2."""

import json

import pytest
import typer
from typer.testing import CliRunner

from tierlog.cli import main
from tierlog.cli.scrub import read_report
from tierlog_spark.cli.main import app as spark

PLACE = "is not the place of a dead letter"
REFUSED = [
    (["policy", "show", "--namespace", "a/b"], "namespace 'a/b' is not allowed"),
    (["policy", "set", "--namespace", "", "--offload-size", "1G"], "namespace '' is not allowed"),
    (["dlq", "show", "../../livez"], PLACE),
    (["dlq", "replay", "0/7"], PLACE),
    (["dlq", "dismiss", "?"], PLACE),
    (["scrub", "--from-report", "/no/such/report"], "can't be read"),
    (["scrub", "--from-report", "/"], "is a directory"),
    (["read", "explain", "logs", "--follow"], "explain reads once"),
    (["read", "explain", "logs", "--to", "1:2"], "explain reads once"),
    (["read", "logs", "--from", "banana"], "time:2026-01-31T12:00:00Z"),
    (["perf", "write", "logs", "--batch-events", "9000", "--event-bytes", "1000"], "TOO_LARGE"),
]
WRONG = [
    ["cost", "what-if", "--per-day", "1G", "--reads", "inf"],
    ["cost", "what-if", "--per-day", "1G", "--kept-days", "inf"],
    *(["ledger", verb, "10000000000"] for verb in ("show", "read", "close", "delete")),
]


def run(app: typer.Typer, words: list[str]) -> str:
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2, done.output
    return done.output


@pytest.mark.parametrize(("words", "told"), REFUSED, ids=[" ".join(one[0]) for one in REFUSED])
def test_it_is_told_by_name_and_with_what_to_do(words, told):
    said = run(main.app, words)
    assert told in said
    assert "remedy: " in said


@pytest.mark.parametrize("words", WRONG, ids=" ".join)
def test_numbers_out_of_bounds_are_wrong_usage(words):
    assert "less than or equal to" in run(main.app, words)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["bulk-offload", "--older-than", "never"], "never"),
        (["usage", "--memory", "100M"], "too little for Spark"),
        (["export", "logs", "--to", "s3://"], "is no place for an export"),
    ],
)
def test_a_job_that_makes_no_sense_ends_before_spark_begins(words, told):
    """A back-fill of what is older than never was one of all."""
    said = run(spark, words)
    assert told in said
    assert "remedy: " in said


def test_a_report_that_is_there_is_read(tmp_path):
    report = tmp_path / "report.json"
    rows = [{"ledger_id": 7}, {"ledger_id": None}, {"ledger_id": 3}]
    report.write_text(json.dumps({"findings": rows}), encoding="utf-8")
    assert read_report(report).ledgers == [3, 7]
