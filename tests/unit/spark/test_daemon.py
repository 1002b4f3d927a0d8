"""A worker of Spark whose Java has gone ends without a stack trace."""

import os
import select
import socket
import struct
import subprocess
import sys
import tempfile

import pytest

from tierlog_spark.local import spark_environment

pytestmark = pytest.mark.timeout(60)


def read_int(stream):
    return struct.unpack("!i", stream.read(4))[0]


@pytest.mark.parametrize(
    ("ours", "says"),
    # As long as PySpark's own says more, the other one is needed.
    [(True, False), (False, True)],
)
def test_a_worker_whose_java_has_gone(ours, says, tmp_path, monkeypatch):
    python = tmp_path / "my $project's" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(python))
    if ours:
        python = spark_environment(tmp_path, os.environ)["PYSPARK_PYTHON"]
    command = [python, "-m", "pyspark.daemon", "pyspark.sql.worker.lookup_data_sources"]
    # The name of a socket has little room, so that it is not below pytest's folders.
    with (
        tempfile.TemporaryDirectory() as sockets,
        subprocess.Popen(
            command,
            env=os.environ | as_spark_says(sockets),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as daemon,
    ):
        assert daemon.stdout is not None
        path = daemon.stdout.read(read_int(daemon.stdout))
        with socket.socket(socket.AF_UNIX) as java, java.makefile("rb") as answer:
            java.connect(path)
            worker = os.pidfd_open(read_int(answer))
        with os.fdopen(worker, "rb") as handle:
            select.select([handle], [], [])  # until it has ended
        _, said = daemon.communicate()
    assert (b"Traceback" in said) is says, said


def as_spark_says(sockets: str) -> dict[str, str]:
    return {
        "PYTHON_UNIX_DOMAIN_ENABLED": "true",
        "PYTHON_WORKER_FACTORY_SOCK_DIR": sockets,
        "PYTHON_DAEMON_KILL_WORKER_ON_FLUSH_FAILURE": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
