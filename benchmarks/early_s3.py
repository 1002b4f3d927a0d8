"""SeaweedFS as it comes: it acknowledges before its disk has the bytes.

``tierlog up`` makes it sync every write, and then its disk sets the rate of whoever uploads. Here
clients are compared, or what shares the machine with them, so it may answer as a store does whose
disks are elsewhere.
"""

import asyncio
import json
import urllib.request

from common import Bench
from tierlog.embedded.seaweedfs import FSYNC_PATH


async def acknowledge_early(bench: Bench) -> None:
    """Take the rule away by which the S3 server of ``bench`` syncs; until it starts anew."""
    await asyncio.to_thread(_drop_rule, bench)


def _drop_rule(bench: Bench) -> None:
    ports = bench.cluster.servers.state_dir / "ports.json"
    port = json.loads(ports.read_text(encoding="utf-8"))["s3"]["filer"]
    url = f"http://127.0.0.1:{port}{FSYNC_PATH}"
    request = urllib.request.Request(url, data=b'{"version": 1}', method="PUT")
    with urllib.request.urlopen(request) as answer:
        assert answer.status in {200, 201}, answer.status
