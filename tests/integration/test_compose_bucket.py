"""The job of docker-compose.yml that makes the bucket, on a real store: each `up` runs it again."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tierlog.embedded.endpoints import ExternalServers
from tierlog.embedded.supervisor import EmbeddedServers

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.integration

COMPOSE = Path(__file__).resolve().parents[2] / "docker-compose.yml"


@pytest.fixture
def address() -> Iterator[str]:
    """An address that takes connections, for the servers that are not needed."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def job(ports: dict[str, int], bucket: str) -> subprocess.CompletedProcess[str]:
    yaml = pytest.importorskip("yaml", reason="make deploy-tools")
    service = yaml.safe_load(COMPOSE.read_text())["services"]["bucket"]
    (script,) = service["command"]
    for name, port in (("master", 9333), ("filer", 8888)):
        here = f"127.0.0.1:{ports[name]}.{ports[f'{name}.grpc']}"
        script = script.replace(f"s3:{port}", here)
    script = script.replace("$$", "$").replace("name tierlog", f"name {bucket}")
    script = script.replace("-qw tierlog", f"-qw {bucket}")
    path = f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}"
    return subprocess.run(
        [*service["entrypoint"], script], env={**os.environ, "PATH": path},
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


async def test_it_makes_the_bucket_and_is_content_where_there_is_one(
    tmp_path: Path, address: str
) -> None:
    others = ExternalServers(
        zookeeper=f"{address}/chroot", kafka=address, redis=f"redis://{address}/0"
    )
    async with EmbeddedServers(tmp_path, external=others):
        ports = json.loads((tmp_path / "ports.json").read_text())["s3"]
        for told in ("created bucket compose-job", '"fsync":  true'):
            done = job(ports, "compose-job")
            assert (done.returncode, told in done.stdout) == (0, True), done.stdout + done.stderr
