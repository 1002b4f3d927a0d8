"""The command line's main job: append, read, seal, offload, look; and ``tierlog up`` itself."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import orjson
import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.integration]


async def test_append_and_read_in_every_format(cli, cluster):
    state = cluster.state_dir
    lines = b"".join(b"line %d\n" % number for number in range(1000))
    done = (await cli("append", "cli-a", "-o", "json", stdin=lines, state_dir=state)).check(0)
    assert orjson.loads(done.stdout)["events"] == 1000
    assert (await cli("read", "cli-a", state_dir=state)).check(0).stdout == lines
    records = b"".join(len(one).to_bytes(4, "big") + one for one in (b"\x00\n\xff", b"", b"x"))
    (await cli("append", "cli-b", "-f", "binary", stdin=records, state_dir=state)).check(0)
    assert (await cli("read", "cli-b", "-o", "binary", state_dir=state)).check(0).stdout == records
    shown = (await cli("read", "cli-b", "-o", "jsonl", state_dir=state)).check(0).stdout
    documents = [orjson.loads(line) for line in shown.splitlines()]
    assert [one.get("payload_base64", one.get("payload")) for one in documents] == ["AAr/", "", "x"]
    limited = (await cli("read", "cli-a", "-n", "2", "-o", "json", state_dir=state)).check(0)
    assert [one["payload"] for one in orjson.loads(limited.stdout)] == ["line 0", "line 1"]
    assert (await cli("read", "cli-a", "--from", "latest", state_dir=state)).check(0).stdout == b""


def test_the_probe_of_the_service_levels_reads_what_it_appended(cluster, tmp_path):
    if shutil.which("jq") is None:
        pytest.skip("needs jq")
    page = (ROOT / "docs" / "reference" / "service-levels.md").read_text("utf-8")
    steps = page.partition("## The probe")[2].partition("\n    ")[2].partition("\n\n")[0]
    script = textwrap.dedent(f"    {steps}")
    environ = {k: v for k, v in os.environ.items() if not k.startswith("TIERLOG_")} | {
        "TIERLOG_STATE_DIR": str(cluster.state_dir),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }

    def probe(sent):
        # The first event of the stream is none that a later run may take for its own.
        (tmp_path / "date").write_text(f"#!/bin/sh\necho {sent}\n")
        (tmp_path / "date").chmod(0o755)
        path = f"{tmp_path}{os.pathsep}{environ['PATH']}"
        shown = f'{script}\necho "read $got"'
        done = subprocess.run(
            ["bash", "-c", shown], env=environ | {"PATH": path}, capture_output=True, check=False
        )
        return done.returncode, done.stdout.decode()

    assert probe("first") == (0, "read first\n")
    assert probe("second") == (0, "read second\n")
    environ["TIERLOG_CLIENT__READER_HTTP_ADDRESS"] = "127.0.0.1:9"
    environ["TIERLOG_CLIENT__INGEST_ADDRESS"] = "127.0.0.1:9"
    assert probe("third") == (5, "")


async def test_raw_streams_hold_the_bytes_and_nothing_more(cli, cluster):
    state = cluster.state_dir
    (await cli("append", "cli-raw", "--raw", stdin=b"a\nb\n", state_dir=state)).check(0)
    shown = (await cli("read", "cli-raw", "-o", "jsonl", state_dir=state)).check(0).stdout
    documents = [orjson.loads(line) for line in shown.splitlines()]
    assert [(one["payload"], one["position"].split(":")[1]) for one in documents] == [
        ("a", "0"),
        ("b", "1"),
    ]
    done = await cli("append", "cli-raw", stdin=b"c\n", state_dir=state)
    done.check(2, "another shape")


@pytest.mark.covers("A10", "A33")
async def test_offload_run_waits_and_shows(cli, cluster):
    state = cluster.state_dir
    (await cli("append", "cli-off", stdin=b"x\n" * 1000, state_dir=state)).check(0)
    (await cli("stream", "seal", "cli-off", state_dir=state)).check(0)
    (await cli("append", "cli-off", stdin=b"y\n", state_dir=state)).check(0)
    done = (await cli("offload", "run", "cli-off", "--wait", "-o", "json", state_dir=state)).check(
        0
    )
    assert orjson.loads(done.stdout)["state"] == "complete"
    shown = (await cli("stream", "show", "cli-off", "-o", "json", state_dir=state)).check(0)
    tiers = [one["tier2"] for one in orjson.loads(shown.stdout)["ledgers"]]
    assert tiers == [True, False]
    status = (await cli("offload", "status", "cli-off", "-o", "jsonl", state_dir=state)).check(0)
    assert b'"complete":true' in status.stdout
    for arguments in (("stream", "ls"), ("ledger", "ls", "cli-off"), ("offload", "status")):
        assert b"cli-off" in (await cli(*arguments, state_dir=state)).check(0).stdout or (
            arguments[0] == "ledger"
        )


def spawn_up(state_dir, *more):
    environ = {k: v for k, v in os.environ.items() if not k.startswith("TIERLOG_")}
    environ["TIERLOG_UP__BACKGROUND_NICENESS"] = "1"
    return subprocess.Popen(
        [sys.executable, "-m", "tierlog.cli.main", "up", "--state-dir", str(state_dir), *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environ,
    )


def first_document(process):
    """Read standard output up to the end of the first JSON document."""
    line = process.stdout.readline()
    assert line, process.stderr.read().decode()
    return orjson.loads(line)


def gone(pids):
    deadline = time.monotonic() + 10
    while any(psutil.pid_exists(pid) for pid in pids):
        if time.monotonic() > deadline:
            return [pid for pid in pids if psutil.pid_exists(pid)]
        time.sleep(0.1)
    return []


def giving_way(state):
    """Return the names of the processes that let others have the CPU first."""
    noted = [orjson.loads(file.read_bytes()) for file in (state / "run").glob("*.pid")]
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    return {one["name"] for one in noted if os.getpriority(os.PRIO_PROCESS, one["pid"]) > ours}


async def test_up_starts_everything_keeps_its_data_and_leaves_no_process(cli, tmp_path):
    state = tmp_path / "state"
    kept = b""
    for end in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT):
        process = spawn_up(state, "-o", "jsonl")
        try:
            written = first_document(process)
            assert set(written["services"]) == {"ingest", "reader", "offloader", "scheduler"}
            line = f"until {end.name}\n".encode()
            (await cli("append", "kept", stdin=line, state_dir=state)).check(0)
            kept += line
            assert (await cli("read", "kept", state_dir=state)).check(0).stdout == kept
            other = spawn_up(state)
            refused = other.communicate(timeout=30)[1].decode()
            assert other.returncode == 5
            assert "is in use by process" in refused
            assert "Traceback" not in refused
            children = [one.pid for one in psutil.Process(process.pid).children(recursive=True)]
            assert len(children) >= 8
            assert {"s3", "reader", "offloader", "scheduler"} == giving_way(state)
        finally:
            process.send_signal(end)
            process.communicate(timeout=60)
        assert gone(children) == []
        assert process.returncode == (-signal.SIGKILL if end == signal.SIGKILL else 0)
    assert not (state / "endpoints.json").exists()


async def test_up_refuses_external_servers_that_are_not_there(cli, tmp_path):
    done = await cli("up", "--external-kafka", "127.0.0.1:1", state_dir=tmp_path)
    done.check(5, "external kafka", "remedy:")
    done = await cli("up", "--external-kafka", "nonsense", state_dir=tmp_path)
    done.check(2, "host:port")
    done = await cli("up", "--external-s3", "http://127.0.0.1:1", state_dir=tmp_path)
    done.check(2, "TIERLOG_S3__ACCESS_KEY")
    settings = {"TIERLOG_UP__EXTERNAL_REDIS": "redis://127.0.0.1:1/0"}
    done = await cli("up", state_dir=tmp_path, **settings)
    done.check(5, "external redis", "remedy:")
    done = await cli("up", state_dir="/proc/no/such")
    done.check(2, "cannot be written")
