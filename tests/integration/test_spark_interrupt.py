"""A job that is interrupted says so, and ends with 130: no stack trace of Spark's."""

import os
import signal
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

PROGRAM = """
import typer
from tierlog.cli.session import command, load
from tierlog_spark.jobs.session import job_session

app = typer.Typer()

@app.command()
@command
def job():
    load()
    with job_session(cores=1, memory_mb=512) as spark:
        print("works", flush=True)
        spark._jvm.java.lang.Thread.sleep(200_000)

app()
"""


def test_an_interrupted_job_says_no_more_than_that():
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # As Ctrl-C does, the signal goes to all of a group.
        start_new_session=True,
    ) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "works\n"
        os.killpg(job.pid, signal.SIGINT)
        _, said = job.communicate(timeout=100)
    assert job.returncode == 130, said
    assert said.rstrip().endswith("interrupted")
    assert "Traceback" not in said
