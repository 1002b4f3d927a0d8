"""The import contracts bite: a copy of the sources with one sin each is refused for each sin."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
ROOMS = ("shared", "services/ingest", "services/scheduler", "services/offloader",
         "services/reader", "pipeline")  # fmt: skip
SINS = {
    "services/ingest/tierlog_ingest/sin.py": "import tierlog_reader",
    "shared/tierlog/cli/sin.py": "import tierlog_scheduler",
    "shared/tierlog/format/sin.py": "import time",
    "shared/tierlog/model/sin.py": "import tierlog.wire",
    "shared/tierlog/offload/sin.py": "import boto3",
    "shared/tierlog/ledger/sin.py": "import kazoo.client",
    "shared/tierlog/client/sin.py": "import confluent_kafka",
    "shared/tierlog/runtime/sin.py": "import redis",
    "services/reader/tierlog_reader/sin.py": "import tierlog.adapters.s3",
    "pipeline/tierlog_spark/sin.py": "import tierlog_offloader",
}
NAMED = (
    "tierlog_ingest.sin -> tierlog_reader",
    "tierlog.cli.sin -> tierlog_scheduler",
    "tierlog.format.sin -> time",
    "tierlog.model.sin -> tierlog.wire",
    "tierlog.offload.sin -> boto3",
    "tierlog.ledger.sin -> kazoo",
    "tierlog.client.sin -> confluent_kafka",
    "tierlog.runtime.sin -> redis",
    "tierlog_reader.sin -> tierlog.adapters.s3",
    "tierlog_spark.sin -> tierlog_offloader",
)


@pytest.fixture(scope="module")
def refusal(tmp_path_factory: pytest.TempPathFactory) -> str:
    copy = tmp_path_factory.mktemp("workspace")
    for room in ROOMS:
        shutil.copytree(ROOT / room, copy / room, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    for path, sin in SINS.items():
        (copy / path).write_text(sin + "\n")
    path = os.pathsep.join(str(copy / room) for room in ROOMS)
    program = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    done = subprocess.run(
        [sys.executable, "-c", program, "--no-cache"],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("named", NAMED)
def test_each_sin_is_named(refusal: str, named: str) -> None:
    assert named in refusal
