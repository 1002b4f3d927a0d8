"""A service process: ready in one line, ends on signals, and an exit code for each way to fail."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tierlog.model.errors import SURFACES, Reason

ROOT = Path(__file__).resolve().parents[3]


def _service(body: str) -> list[str]:
    program = "import asyncio, os, sys\nfrom tierlog.runtime.service import *\n"
    program += "os.environ['TIERLOG_SECURITY__MODE'] = 'open'\n"
    program += "from tierlog.model.errors import *\n"
    program += (
        f"async def main(settings, stop):\n{textwrap.indent(textwrap.dedent(body), '    ')}\n"
    )
    return [sys.executable, "-c", program + "sys.exit(run_service('test', main))\n"]


def _fails(body: str, **environment: str) -> tuple[int, str]:
    done = subprocess.run(
        _service(body), env={**os.environ, **environment}, capture_output=True, text=True,
        check=False, cwd=ROOT, timeout=30,
    )  # fmt: skip
    return done.returncode, done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_says_where_it_listens_and_ends_well_on_a_signal(number):
    with subprocess.Popen(
        _service("announce_ready(http='127.0.0.1:1', pid=7)\nawait stop.wait()"),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        line = json.loads(process.stdout.readline())
        assert line == {"ready": True, "http": "127.0.0.1:1", "pid": 7}
        process.send_signal(number)
        _, logged = process.communicate(timeout=10)
    assert process.returncode == 0
    events = [json.loads(line)["event"] for line in logged.splitlines()]
    assert events == ["service.started", "service.stopped"]


def test_an_error_of_ours_gives_its_exit_code_and_no_trace():
    plain = "raise CorruptError('broken', remedy='mend it')"
    in_a_task = f"""
        async def fail(): {plain}
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fail())
        """
    for body in (plain, in_a_task):
        status, output = _fails(body)
        assert status == SURFACES[Reason.CORRUPT].exit_code
        assert "mend it" in output
        assert "Traceback" not in output


def test_a_bug_gives_one_and_a_trace_in_the_log():
    status, output = _fails("1 / 0")
    assert status == 1
    assert "ZeroDivisionError" in json.loads(output.splitlines()[-1])["exception"]


def test_a_bad_setting_gives_two_and_two_lines():
    status, output = _fails("pass", TIERLOG_S3__CONNECTIONS_MAX="0")
    assert status == 2
    assert output.splitlines()[0].startswith("error: setting s3.connections_max")
    assert "remedy: Correct TIERLOG_S3__CONNECTIONS_MAX" in output
    status, output = _fails("pass", TIERLOG_CONFIG="/nowhere/tierlog.toml")
    assert status == 2
    assert "does not exist" in output


def test_arguments_come_before_the_environment_and_are_checked():
    body = "announce_ready(bucket=settings.s3.bucket, level=settings.log.level)"
    program = _service(body)
    program[2] = program[2].replace("'test', main", "'test', main, sys.argv[1:]")
    environment = {**os.environ, "TIERLOG_S3__BUCKET": "from-environment"}

    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [*program, *arguments], env=environment, capture_output=True, text=True,
            check=False, cwd=ROOT, timeout=30,
        )  # fmt: skip

    done = run("--profile", "development", "--set", "s3.bucket=argument")
    assert json.loads(done.stdout) == {"ready": True, "bucket": "argument", "level": "debug"}
    done = run("--set", "s3.bukcet=x")
    assert done.returncode == 2
    assert "TIERLOG_S3__BUCKET" in done.stderr.splitlines()[1]


def test_one_that_is_stopped_before_it_began_ends_well_also_in_a_task():
    plain = "raise StoppedError('metadata')"
    in_a_task = f"""
        async with asyncio.TaskGroup():
            {plain}
        """
    for body in (plain, in_a_task):
        status, output = _fails(body)
        assert status == 0, output
        assert "service.stopped" in output
