"""``tierlog demo``: the main job with both crashes, as a user runs it; and it ends when told to."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import orjson
import psutil
import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

DEMO = [sys.executable, "-m", "tierlog.cli.main", "demo", "-o", "json"]


def processes_in(folder):
    """Return the processes that were started for a demo's folder."""
    found = []
    for process in psutil.process_iter(["cmdline", "environ"]):
        said = [*(process.info["cmdline"] or ()), *(process.info["environ"] or {}).values()]
        if any(str(folder) in one for one in said) and process.pid != os.getpid():
            found.append(process)
    return found


@pytest.mark.covers("A04", "A14", "A15")
def test_the_demo_shows_that_nothing_is_lost_doubled_or_left_behind(tmp_path):
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(DEMO, capture_output=True, env=environ, timeout=380, check=False)
    assert done.returncode == 0, done.stderr.decode()
    shown = orjson.loads(done.stdout)
    assert shown["same"] is True
    assert shown["appended"]["bytes"] >= 50_000_000
    for name in ("events", "bytes", "sha256"):
        assert shown["read"][name] == shown["appended"][name]
    assert set(shown["read"]["events_by_tier"]) == {"tier1", "tier2"}
    assert sum(one["where"] == "S3" for one in shown["ledgers"]) >= 5
    assert shown["killed_offloader"]["left_behind"] == []
    assert max(one["attempts"] for one in shown["ledgers"]) >= 2
    killed = shown["killed_ingest"]
    assert killed["events_in_flight"] > 0
    assert (killed["events_lost"], killed["events_doubled"]) == (0, 0)
    assert killed["acknowledged_events"] == shown["appended"]["events"]
    assert list(tmp_path.glob("tierlog-demo-*")) == []
    assert processes_in(tmp_path) == []


@pytest.mark.covers("D17")
def test_the_demo_of_a_cluster_loses_a_node_for_good_and_no_copy_in_the_end(tmp_path):
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [*DEMO, "--nodes", "3", "--kill-node", "--megabytes", "50"]
    done = subprocess.run(command, capture_output=True, env=environ, timeout=380, check=False)
    assert done.returncode == 0, done.stderr.decode()
    shown = orjson.loads(done.stdout)
    assert shown["same"] is True
    assert (shown["events_lost"], shown["events_doubled"]) == (0, 0)
    assert shown["acknowledged_events"] == shown["appended"]["events"] == shown["read"]["events"]
    lost = shown["lost_node"]
    assert lost["events_in_flight"] > 0
    assert lost["replaced_by"] == "node-4"
    assert shown["killed_node"]["node_id"] not in (lost["node_id"], lost["replaced_by"])
    replication = shown["replication"]
    assert (replication["under_replicated"], replication["copies_lacking"]) == (0, 0)
    assert len(shown["ledgers"]) >= 8
    for one in shown["ledgers"]:
        assert (one["state"], one["copies"]) == ("closed", 3)
        assert all(lost["node_id"] not in ensemble.split() for ensemble in one["ensembles"])
    assert any("node-4" in ensemble for one in shown["ledgers"] for ensemble in one["ensembles"])
    assert processes_in(tmp_path) == []


def test_a_demo_without_a_node_to_spare_is_refused():
    command = [*DEMO, "--nodes", "2", "--kill-node"]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert done.returncode == 2
    assert b"--nodes 3" in done.stderr


def test_a_demo_that_is_told_to_end_leaves_nothing_running(tmp_path):
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(DEMO, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environ)
    assert process.stderr is not None
    for line in process.stderr:
        if b"s3 is ready" in line:
            break
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=120)[1].decode()
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert list(Path(tmp_path).glob("tierlog-demo-*")) == []
    assert processes_in(tmp_path) == []
