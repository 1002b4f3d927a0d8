"""``tierlog doctor`` and ``tierlog debug bundle`` over real servers and services."""

import asyncio
import io
import json
import os
import sys
import tarfile

import pytest

from tests.plugins.fix_cli import Done

pytestmark = [pytest.mark.integration]


async def doctor(*arguments, state_dir, **environment):
    """Run the command of another room, in a process of its own."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tierlog.cli.main", "doctor", *arguments, "-o", "json",
        env={**os.environ, "TIERLOG_STATE_DIR": str(state_dir), **environment},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    stdout, stderr = await process.communicate()
    assert process.returncode is not None
    return Done(process.returncode, stdout, stderr.decode())


async def test_doctor_finds_nothing_wrong_with_a_cluster_that_runs(cluster):
    environment = {name: value for name, value in cluster.env.items() if "__" in name}
    done = await doctor(
        "--only", "versions", "--only", "servers", "--only", "services",
        state_dir=cluster.state_dir, **environment,
    )  # fmt: skip
    done.check(0)
    found = {row["check"]: row for row in json.loads(done.stdout)}
    assert [name for name, row in found.items() if row["result"] == "failed"] == []
    wanted = {
        "python", "packages", "metadata", "nodes", "bucket cluster: write", "clock of the store",
        "bucket cluster: upload", "cache", "ingest", "ingest gRPC", "reader", "reader gRPC",
        "scheduler", "offloader", "clock of reader",
    }  # fmt: skip
    assert wanted <= set(found)
    assert [name for name in found if name.startswith("topic ")]
    assert found["bucket cluster: delete"]["result"] == "ok"


async def test_doctor_names_the_server_that_is_away(cluster, tmp_path):
    environment = {name: value for name, value in cluster.env.items() if "__" in name}
    environment |= {
        "TIERLOG_ZOOKEEPER__HOSTS": "127.0.0.1:1",
        "TIERLOG_ZOOKEEPER__CONNECT_TIMEOUT_S": "0.5",
        "TIERLOG_S3__BUCKET": "no-such-bucket",
    }
    done = await doctor("--only", "servers", state_dir=tmp_path, **environment)
    done.check(5, "checks failed", "metadata", "remedy:")
    found = {row["check"]: row for row in json.loads(done.stdout)}
    assert found["metadata"]["result"] == "failed"
    assert found["bucket no-such-bucket: look"]["result"] == "failed"
    assert "zookeeper" in found["metadata"]["remedy"].lower()


async def test_a_bundle_of_a_cluster_that_runs(cli, cluster, tmp_path):
    environment = {name: value for name, value in cluster.env.items() if "__" in name}
    environment["TIERLOG_WIRE__TOKEN"] = "pl4nted-wire-token"
    path = tmp_path / "bundle.tar.gz"
    done = await cli(
        "debug", "bundle", "--out", str(path), "-o", "json",
        state_dir=cluster.state_dir, **environment,
    )  # fmt: skip
    done.check(0)
    assert json.loads(done.stdout)["troubles"] == []
    with tarfile.open(fileobj=io.BytesIO(path.read_bytes())) as archive:
        files = {
            one.name.partition("/")[2]: read.read()
            for one in archive.getmembers()
            if (read := archive.extractfile(one))
        }
    assert {"settings.json", "doctor.json", "metadata.json", "versions.json"} <= set(files)
    assert json.loads(files["metadata.json"])["nodes"][0]["state"] == "live"
    assert b"tierlog_build_info" in files["services/ingest-metrics.txt"]
    assert any(name.startswith("logs/") for name in files)
    secret = cluster.env["TIERLOG_S3__SECRET_KEY"].encode()
    for name, raw in files.items():
        assert secret not in raw, name
        assert b"pl4nted" not in raw, name
    again = await cli(
        "debug", "bundle", "--out", str(path), state_dir=cluster.state_dir, **environment
    )
    again.check(2, "is there already", "--out")
