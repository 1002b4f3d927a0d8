"""The script that proves a deployment, over local processes.

The same file is the chart's `helm test` and the compose file's `smoke`.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.plugins.fix_cluster import ServiceCluster

pytestmark = [pytest.mark.integration]

SCRIPT = Path(__file__).resolve().parents[2] / "deploy/helm/tierlog/files/smoke.sh"


async def smoke(cluster: ServiceCluster, **env: str) -> tuple[int | None, str]:
    client = cluster.settings.client
    addresses = {
        "TIERLOG_CLIENT__INGEST_ADDRESS": client.ingest_address,
        "TIERLOG_CLIENT__READER_HTTP_ADDRESS": client.reader_http_address,
        "TIERLOG_CLIENT__SCHEDULER_HTTP_ADDRESS": client.scheduler_http_address,
    }
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    process = await asyncio.create_subprocess_exec(
        "/bin/sh", str(SCRIPT), env={**os.environ, **addresses, "PATH": path, **env},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    out, _ = await process.communicate()
    return process.returncode, out.decode()


async def test_the_script_passes_where_all_is_well(cluster: ServiceCluster) -> None:
    code, said = await smoke(cluster)
    assert code == 0, said
    assert "ok: 1000 events came back from tier2" in said


async def test_the_script_fails_where_nobody_offloads(cluster: ServiceCluster) -> None:
    cluster.kill("offloader")
    try:
        code, said = await smoke(cluster, SMOKE_TIMEOUT_S="2", SMOKE_EVENTS="5")
    finally:
        await cluster.restart("offloader")
    assert code == 5, said
    assert "ok:" not in said
