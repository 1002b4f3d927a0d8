"""Services with nothing to do do next to nothing, also after a server was away.

Design: reliability.md C1, I10 (no hot loop: less than 5 % of a processor, fewer than ten lines of
log a second).
"""

import asyncio
from pathlib import Path

import psutil
import pytest

from tests.integration.test_offload_queue import until_no_lag
from tierlog.client import open_client

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

STREAM = "at-rest"
REST_S = 10.0
CPU_SHARE_MAX = 0.05
LINES_PER_S_MAX = 10
SETTLED_S = 5.0


def spent_s(cluster) -> dict[str, float]:
    """Return the seconds of a processor that each process took so far."""
    times = {
        name: psutil.Process(child.pid).cpu_times()
        for name, child in cluster.services.children.items()
    }
    return {name: one.user + one.system for name, one in times.items()}


def lines(folder: Path) -> dict[str, int]:
    return {one.stem: one.read_bytes().count(b"\n") for one in folder.glob("*.log")}


async def test_nothing_is_done_in_a_hurry_once_nothing_is_to_be_done(start_nodes, servers):
    cluster = await start_nodes(1, TIERLOG_SCHEDULER__INTERVAL_S="5")
    async with open_client(cluster.settings) as client:
        await client.create_stream(STREAM)
        async with client.writer(STREAM) as writer:
            await writer.send(b"an event")
        await client.seal(STREAM)
        servers.kill("kafka")
        await asyncio.sleep(3)
        await servers.restart("kafka")
        assert await client.offload_prefix(STREAM, timeout_s=90) is not None
    await until_no_lag(cluster.settings, seconds=90)
    await asyncio.sleep(SETTLED_S)
    before, told = spent_s(cluster), lines(cluster.state_dir / "logs")
    await asyncio.sleep(REST_S)
    after, told_since = spent_s(cluster), lines(cluster.state_dir / "logs")
    shares = {name: (after[name] - before[name]) / REST_S for name in after}
    print(f"[rest] {shares}")
    assert all(share < CPU_SHARE_MAX for share in shares.values()), shares
    assert all(
        told_since[name] - told.get(name, 0) < LINES_PER_S_MAX * REST_S for name in told_since
    )
