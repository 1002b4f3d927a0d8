"""Who ends on a full disk is told to have done so, with where the state lies, and no one else."""

import os
import sys
from pathlib import Path

import pytest

from tierlog.embedded.cluster import EmbeddedCluster
from tierlog.embedded.full_disk import LOW_BYTES, full_disk
from tierlog.embedded.process import Child, Launch
from tierlog.model.errors import Reason

FOLDER = Path("state")
FILLS = "import os; os.write(os.open('/dev/full', os.O_WRONLY), b'x')"
ENDS = "raise SystemExit('another trouble')"


def judged(*, free_bytes=LOW_BYTES, exit_code=1, last_words="java.io.IOException: Broken pipe"):
    return full_disk(
        "kafka ended with 1",
        FOLDER,
        free_bytes=free_bytes,
        exit_code=exit_code,
        last_words=last_words,
    )


@pytest.mark.parametrize(
    "case",
    [
        {"free_bytes": LOW_BYTES - 1},
        {"last_words": "java.io.IOException: No space left on device\n\tat sun.nio.ch"},
        {"last_words": "No space left on device", "exit_code": -9, "free_bytes": 10**12},
    ],
)
def test_a_full_disk_is_named_with_what_is_free_and_where(case):
    error = judged(**case)
    assert error is not None
    assert error.reason is Reason.READ_ONLY
    for word in ("kafka ended with 1", "the disk is full", "MiB are free at state"):
        assert word in error.message
    for word in ("--state-dir", "TIERLOG_STATE_DIR"):
        assert word in error.remedy


@pytest.mark.parametrize("case", [{}, {"free_bytes": 0, "exit_code": -9}])
def test_without_a_sign_of_it_the_disk_is_not_to_blame(case):
    assert judged(**case) is None


@pytest.mark.parametrize(("program", "is_full"), [(FILLS, True), (ENDS, False)])
async def test_up_says_that_a_server_met_a_full_disk(tmp_path, program, is_full):
    cluster = EmbeddedCluster(tmp_path, nodes=1, environ={})
    for folder in (cluster.servers.run_dir, cluster.servers.log_dir):
        folder.mkdir(parents=True)
    log = cluster.servers.log_dir / "kafka.log"
    log.write_text("No space left on device, in an earlier run\n")
    launch = Launch(argv=[sys.executable, "-c", program], cwd=tmp_path, log=log, env=os.environ)
    child = Child.spawn("kafka", launch, run_dir=cluster.servers.run_dir)
    cluster.services._children["kafka"] = child
    error = await cluster.wait_failed()
    assert "kafka ended with 1" in error.message
    if is_full:
        assert "the disk is full" in error.message
        assert "--state-dir" in error.remedy
    else:
        assert "full" not in str(error)
        assert f"Look into its log, {log}" in error.remedy
